"""jaxrl.migrate: Tunix's command line, its layers of files, and arithmetic that scripts leave to awk."""

import ast
import json
import shlex
import sys

import pytest
from test_migrate import migrated, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate import each_start
from jaxrl.migrate.awk import computed
from jaxrl.migrate.report import because, config_text, left_out
from jaxrl.planning.case import case_of
from jaxrl.rewards.calling import Call
from jaxrl.workers.loading import LoadError

SCRIPT = """batches=${batches:-40}
share=${share:-0.1}
steps_float=$(awk "BEGIN {print $batches * 2 * 0.5}")
steps=$(printf "%.0f" "$steps_float")
warm=$(awk "BEGIN {printf \\"%.0f\\", $share * $steps}")
python3 -m tunix.cli.grpo_main \\
  tunix/cli/base_config.yaml \\
  override_config_file=configs/own.yaml \\
  batch_size=8 \\
  dataset_name=gsm8k \\
  rl_training_config.mini_batch_size=4 \\
  rl_training_config.max_steps=$steps \\
  rl_training_config.actor_optimizer_config.warmup_steps=$warm \\
  rl_training_config.actor_optimizer_config.decay_steps=$steps \\
  "$@"
"""
OWN = """
model_config: {model_id: Qwen/Qwen3-0.6B, mesh: {shape: "(2,4)", axis_names: "('fsdp','tp')"}}
actor_model_config: {lora_config: {rank: 8, alpha: 16.0, module_path: ".*q_einsum|.*kv_einsum"}}
reference_model_config: {mesh: null, same_mesh_as: actor}
batch_size: 1
rl_training_config:
  actor_optimizer_config: {opt_type: adamw, schedule_type: warmup_cosine_decay_schedule, peak_value: 3.0e-6, init_value: 0.0, max_grad_norm: 0.1}
grpo_config: {num_generations: 4, beta: 0.04, kl_loss_mode: low_var_kl}
reward_functions: [mine/reward.py]
"""
REWARD = """
def exact(prompts, completions, answer, **kwargs):
    return [2.0 * (c == a) for c, a in zip(completions, answer)]

def short(prompts, completions, **kwargs):
    return [-0.5 if len(c) > 3 else 0.0 for c in completions]
"""


def test_a_script_its_file_and_base_config_are_layers(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "configs" / "own.yaml").write_text(OWN)
    (tmp_path / "examples" / "run.sh").write_text(SCRIPT)
    out = tmp_path / "out"
    assert command.main(["tunix", str(tmp_path / "examples" / "run.sh"), f"--out={out}"]) == 0
    report, c = json.loads((out / "report.json").read_text()), load_config(str(out / "run.py"))
    assert (c.data.prompts_per_step, c.rollout.group_size, c.algorithm.num_minibatches, c.train.steps) == (8, 4, 2, 20)  # 40 updates
    assert (c.optimizer.lr, c.optimizer.warmup_steps, c.optimizer.decay_steps, c.optimizer.max_grad_norm) == (3e-6, 4, 36, 0.0)
    assert (c.optimizer.weight_decay, c.optimizer.b2) == (1e-4, 0.999)  # the table replaces base_config.yaml's
    assert (c.mesh.tp, c.lora.rank, c.lora.targets) == (4, 8, ("q_proj", "k_proj", "v_proj"))
    assert (c.model.path, c.data.path, c.data.subset, c.rollout.engine) == ("Qwen/Qwen3-0.6B", ("openai/gsm8k",), "main", "jax")
    assert (c.algorithm.kl.coef, c.algorithm.kl.estimator, c.algorithm.temperature) == (0.04, "k3", 0.0)
    assert "unknown" not in {k["kind"] for k in report["keys"]}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "reward.py").write_text(REWARD)
    monkeypatch.setenv("TUNIX", str(tmp_path))
    assert c.reward.env == ("TUNIX",)  # else its workers do not see it
    space: dict = {}
    exec((out / "run_reward.py").read_text(), space)
    space["score"].prepare()
    assert (space["score"]("q", "7", "7"), space["score"]("q", "7777", "7")) == (2.0, -0.5)


def test_a_role_takes_from_the_model_what_it_does_not_change():
    base = {"actor_model_config.model_id": "meta-llama/Llama-3.1-8B", "model_config.model_id": "a/b"}
    assert values(migrated("tunix", base))["model.path"] == "a/b"
    assert values(migrated("tunix", {**base, "actor_model_config.model_id": "c/d"}))["model.path"] == "c/d"


def test_rows_that_no_template_renders_are_taken_as_they_are():
    rendered = "apply_chat_template_to_dataset"
    assert "data.chat" not in values(migrated("tunix", {"batch_size": 8})) and "data.chat" not in values(
        migrated("tunix", {"training_mode": "agentic_grpo", rendered: False}))
    assert values(migrated("tunix", {rendered: False}))["data.chat"] == "false"


def test_a_kl_without_gradient_is_named_and_ppo_has_its_own():
    m = migrated("tunix", {"model_config.model_id": "a/b"})
    assert values(m)["algorithm.kl.coef"] == 0.0 and [key for key, *_ in m.lacking] == ["grpo_config.beta"] and m.outcome(False) == "partial"
    assert values(migrated("tunix", {"model_config.model_id": "a/b"}, "0.1.6"))["algorithm.kl.coef"] == 0.08
    v = values(migrated("tunix", {"model_config.model_id": "a/b", "ppo_config.beta": 0.02}))
    assert (v["algorithm.advantage"], v["algorithm.kl.coef"], v["algorithm.kl.placement"], v["rollout.group_size"]) == ("gae", 0.02, "reward", 1)
    assert migrated("tunix", {"training_config.max_steps": 3, "optimizer_config.opt_type": "adamw"}).outcome(False) == "refused"  # SFT


def test_agents_are_episodes_and_a_mesh_of_the_rollouts_own_a_role():
    m = migrated("tunix", {
        "model_config.model_id": "a/b", "training_mode": "agentic_grpo", "env_class_path": "game.env.Lake", "env_kwargs.max_steps": "8",
        "actor_model_config.mesh.shape": "(2,2)", "rollout_model_config.mesh.shape": "(2,1)", "rollout_config.return_logprobs": True})
    v = values(m)
    assert v["env.max_turns"] == 8 and "WRITE HERE" in m.files["job_env.py"] and v["algorithm.old_logprobs"] == "rollout"
    assert (v["mesh.roles.policy"], v["mesh.roles.sampler"]) == ({"devices": "0-3"}, {"devices": "4-5"})
    assert (v["env.episode_seconds"], v["env.step_seconds"]) == (1800.0, 1800.0) and "env.in_flight" not in v
    more = {"training_mode": "agentic_grpo", "env_class_path": "game.env.Lake", "agentic_grpo_config.max_turns": 6,
            "agentic_grpo_config.per_turn_timeout_secs": 200, "agentic_grpo_config.max_concurrency": 64}
    v = values(migrated("tunix", {"model_config.model_id": "a/b", **more}))
    assert (v["env.episode_seconds"], v["env.in_flight"]) == (1200.0, 64)
    v = values(migrated("tunix", {"model_config.model_id": "a/b", **more, "agentic_grpo_config.episode_timeout": 5400}))
    assert v["env.episode_seconds"] == 5400.0


OPT = "rl_training_config.actor_optimizer_config."
NAMES = ("lr", "schedule", "warmup_steps", "warmup_fraction", "warmup_start", "decay_steps", "floor")


@pytest.mark.parametrize("keys, want", [
    ({"schedule_type": "cosine_decay_schedule", "init_value": 1e-6, "decay_steps": 90, "alpha": 0.1}, (1e-6, "cosine", 0, 0, 0, 90, 0.1)),
    ({"schedule_type": "linear_schedule", "init_value": 2e-6, "end_value": 1e-6, "transition_steps": 30}, (2e-6, "linear", 0, 0, 0, 30, 0.5)),
    ({"schedule_type": "warmup_constant_schedule", "init_value": 1e-6, "peak_value": 4e-6, "warmup_steps": 7}, (4e-6, "constant", 7, 0, 0.25, 0, 0)),
    ({"schedule_type": "constant_schedule", "value": 3e-6, "peak_value": 9e-6}, (3e-6, "constant", 0, 0, 0, 0, 0)),
    ({"learning_rate": 5e-6}, (5e-6, "constant", 0, 0, 0, 0, 0)),
    ({"schedule_type": "warmup_cosine_decay_schedule", "peak_value": 3e-6}, (3e-6, "cosine", 0, 0.1, 0, 0, 0))])
def test_schedules_of_optax(keys, want):
    """Each function of optax takes its own keys; without max_steps the rows decide how long a run is."""
    m = migrated("tunix", {"model_config.model_id": "a/b", "num_train_epochs": 2, **{OPT + k: v for k, v in keys.items()}})
    v = values(m)
    defaults = {"warmup_fraction": 0.0, "warmup_start": 0.0, "decay_steps": 0, "floor": 0.0}
    assert tuple(v.get(f"optimizer.{n}", defaults.get(n)) for n in NAMES) == want
    assert v["data.epochs"] == 2 and "train.steps" not in v and m.outcome(False) != "refused"


def test_a_schedule_or_a_rate_that_tunix_would_not_start_with_is_refused():
    for keys in ({"schedule_type": "exponential_decay", "init_value": 1e-6}, {"schedule_type": "constant_schedule", "peak_value": 1e-6},
                 {"schedule_type": "warmup_cosine_decay_schedule", "peak_value": 1e-6, "warmup_steps": 9, "decay_steps": 8}):
        assert migrated("tunix", {"model_config.model_id": "a/b", **{OPT + k: v for k, v in keys.items()}}).outcome(False) == "refused"


def test_max_steps_counts_updates_and_mini_batches_are_sampled_in_turn():
    base = {"model_config.model_id": "a/b", "batch_size": 16, "rl_training_config.max_steps": 60, "grpo_config.num_generations": 4,
            "rl_training_config.checkpointing_options.save_interval_steps": 12}
    v = values(migrated("tunix", {**base, "grpo_config.num_iterations": 3}))
    assert (v["train.steps"], v["algorithm.ppo_epochs"], v["checkpoint.every_steps"]) == (20, 3, 4)
    split = {**base, "rl_training_config.mini_batch_size": 4}
    names = ("data.prompts_per_step", "algorithm.num_minibatches", "train.steps")
    apart = values(migrated("tunix", {**split, "rollout_model_config.mesh.shape": "(4,1)"}))
    assert tuple(apart[n] for n in names) == (16, 4, 15)
    together = migrated("tunix", {**split, "rollout_model_config.mesh": None, "rollout_model_config.same_mesh_as": "actor"})
    assert tuple(values(together)[n] for n in names) == (4, 1, 60) and together.facts["sequences per step"] == 16
    agents = values(migrated("tunix", {**split, "training_mode": "agentic_grpo", "rollout_config.return_logprobs": True}))
    assert tuple(agents[n] for n in names) == (16, 4, 60)  # whose steps are counted
    rows = {k: v for k, v in base.items() if "max_steps" not in k}
    assert values(migrated("tunix", {**rows, "num_batches": 50, "num_train_epochs": 2, "train_fraction": 0.5}))["train.steps"] == 50


@pytest.mark.parametrize("model, version, dtype", [
    ("Qwen/Qwen3-1.7B", "0.1.7", "fp32"), ("Qwen/Qwen3-1.7B", "0.1.6", "bf16"), ("google/gemma-4-e2b", "0.1.7", "fp32"),
    ("google/gemma-3-1b-it", "0.1.7", "bf16"), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "0.1.7", "fp32"),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "0.1.7", "bf16"),
    ("meta-llama/Meta-Llama-3.1-8B", "0.1.7", "bf16"), ("qwen2p5_0p5b", "0.1.7", "fp32"), ("meta-llama/Llama-3.1-8B", "0.1.7", "bf16")])
def test_a_models_config_has_a_dtype_of_its_own(model, version, dtype):
    m = migrated("tunix", {"model_config.model_id": model}, version)
    v = values(m)
    assert v["train.compute_dtype"] == dtype and (v.get("run.matmul_precision") == "default") == (dtype == "fp32")
    assert values(migrated("tunix", {"model_config.model_id": model, "model_config.dtype": "bfloat16"}, version))["train.compute_dtype"] == "bf16"


def test_the_loss_of_0_1_6_does_not_divide_logits():
    assert values(migrated("tunix", {"model_config.model_id": "a/b"}, "0.1.6"))["algorithm.temperature"] == 1.0
    assert "algorithm.temperature" not in values(migrated("tunix", {"model_config.model_id": "a/b"}))


@pytest.mark.parametrize("text, want", [
    ('awk "BEGIN {print 3738 * 1 * 1.0}"', "3738"), ('awk "BEGIN {printf \\"%.0f\\", 0.1 * 3738}"', "374"), ('printf "%.0f" "2.6"', "3"),
    ('awk "BEGIN {\n value = 2 * 0.1;\n if (value < 1) value = 1;\n printf \\"%.0f\\", value;\n}"', "1"), ('awk "{print $1}" rows.txt', None),
    ('printf "%.2f" "-"', None), ('printf "%.1f" 1.2.3', None), ('awk "BEGIN {system(\\"rm -rf x\\")}"', None), ('awk "BEGIN {print 1 / 0}"', None)])
def test_arithmetic_of_awk_and_printf(text, want):
    assert computed(text) == want


def test_micro_batches_are_of_the_whole_mesh():
    """There a micro-batch has so many prompts on all chips; here its tokens are counted per data shard, one row at least."""
    base = {"model_config.model_id": "a/b", "grpo_config.num_generations": 8, "actor_model_config.mesh.shape": "(4,2)"}
    longest, micro = 256 + 768, "rl_training_config.train_micro_batch_size"
    m = migrated("tunix", {**base, micro: 2})
    assert values(m)["train.tokens_per_microbatch"] == 4 * longest and "train.score_tokens_per_microbatch" not in values(m)
    assert any("4 data shards there: here 4 on each" in text for text in m.different)
    assert values(migrated("tunix", {**base, micro: 1, "grpo_config.num_generations": 2}))["train.tokens_per_microbatch"] == longest
    scored = "rl_training_config.compute_logps_micro_batch_size"
    assert values(migrated("tunix", {**base, micro: 2, scored: 4}))["train.score_tokens_per_microbatch"] == 8 * longest
    assert "train.score_tokens_per_microbatch" not in values(migrated("tunix", {**base, micro: 2, scored: 2}))


def test_a_table_that_is_replaced_whole_has_no_defaults():
    """The comment beside an option names no default that Tunix does not use."""
    m = migrated("tunix", {"model_config.model_id": "a/b", OPT + "schedule_type": "warmup_cosine_decay_schedule", OPT + "peak_value": 3e-6})
    for option in ("warmup_fraction", "b2", "weight_decay"):
        text = because(m, m.options["optimizer." + option][1])
        assert "is not set, and its table is replaced whole" in text and "Tunix's default" not in text
    assert "is Tunix's default" in because(m, m.options["rollout.temperature"][1])


def test_tokens_that_end_a_completion_are_set_or_answered():
    base = {"model_config.model_id": "a/b"}
    assert values(migrated("tunix", {**base, "rollout_config.eos_tokens": ["<end_of_turn>"]}))["model.eos_tokens"] == ("<end_of_turn>",)
    m = migrated("tunix", {**base, "rollout_config.eos_tokens": [1, 106]})
    assert not any("eos_tokens" in text for text in m.needs_you) and any("eos_tokens=[1, 106]" in text for text in m.different)


def test_a_script_without_its_file_says_so_first(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT)
    command.main(["tunix", str(tmp_path / "run.sh"), f"--out={tmp_path / 'out'}"])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["needs_you"][0].startswith("configs/own.yaml: run.sh names this config, and it was not found")
    row = next(k for k in report["keys"] if k["key"] == "override_config_file")
    assert (row["kind"], row["note"]) == ("ask", "not found: its keys are not read")
    assert "needs you: configs/own.yaml" in capsys.readouterr().out


FOLDER = """dir="${dir:-runs/one}"
suffix=$(printf '%04d' "$((RANDOM % 10000))")
if [[ -n "$dir" && "$dir" != "null" ]]; then
  dir="${dir}_${suffix}"
fi
python3 -m tunix.cli.grpo_main model_config.model_id=a/b `# -- Model ---` \
  `# -- Data ---` rl_training_config.checkpoint_root_directory=$dir rl_training_config.actor_optimizer_config.learning_rate=1e-6
"""


def test_a_folder_that_is_new_at_each_start(tmp_path):
    """Its random part is left out, and the report says what a second start does; comments within a command are nothing."""
    (tmp_path / "run.sh").write_text(FOLDER)
    command.main(["tunix", str(tmp_path / "run.sh"), f"--out={tmp_path / 'out'}"])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert load_config(str(tmp_path / "out" / "run.py")).run.dir == "runs/one"
    assert any(text.startswith("run.dir: there each start has a folder of its own, by $(printf") for text in report["differs"])
    assert [text for text in report["notes"] if "Model" in text or "Data" in text or "does not decide" in text] == []
    assert next(k for k in report["keys"] if k["key"] == "model_config.model_id")["value"] == "a/b"


@pytest.mark.parametrize("text, want, parts", [
    ("/tmp/ckpts/qwen_$RANDOM", "/tmp/ckpts/qwen", ["$RANDOM"]), ("a/${RANDOM}/b", "a//b", ["${RANDOM}"]), ("$HOME/runs/x", "$HOME/runs/x", []),
    ("x-$(date +%m%d)-y", "x-y", ["$(date +%m%d)"]), ("run_`date`", "run", ["`date`"]), ("$(dirname $0)/runs", "$(dirname $0)/runs", []),
    ("out/${now:%Y-%m-%d}", "out/", ["${now:%Y-%m-%d}"]), ("$(date +%s)", "", ["$(date +%s)"]), ("runs/$$", "runs/", ["$$"])])
def test_parts_of_a_name_that_are_new_at_each_start(text, want, parts):
    assert each_start.without(text) == (want, parts)


def test_the_plan_of_a_job_with_chips_apart_runs_as_printed(tmp_path):
    """For every system whose roles may have devices of their own: what left_out prints leaves a case that can be planned."""
    hf = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096}
    m = migrated("tunix", {"model_config.model_id": "a/b", "actor_model_config.mesh.shape": "(4,1)", "offload_to_cpu": True,
                           "rollout_model_config.mesh.shape": "(4,1)"})
    flags = left_out(m)
    assert "--config.plan.part=training" in flags and "sampler" not in flags and "'rest': 'host'" in flags
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "job.py").write_text(config_text(m, "x"))
    given = dict(flag.removeprefix("--config.").split("=", 1) for flag in shlex.split(flags))
    given["mesh.roles"] = ast.literal_eval(given["mesh.roles"])
    more = {"run.mode": "plan", "plan.target": "h100:4", "model.path": str(tmp_path)}
    config = load_config(str(tmp_path / "job.py"), {**given, **more})
    assert case_of(config, hf).mesh["fsdp"] == 4


def test_a_reward_file_that_imports_what_is_not_here_is_one_line(tmp_path, monkeypatch):
    """The checkout's own modules are found; what else is missing is said before a step, with its name."""
    m = migrated("tunix", {"model_config.model_id": "a/b", "reward_functions": ["mine/reward.py"]})
    (tmp_path / "mine").mkdir()
    (tmp_path / "of_the_checkout.py").write_text("BONUS = 2.0\n")
    (tmp_path / "mine" / "reward.py").write_text("import of_the_checkout\ndef f(prompts, completions, **rows):\n    return [of_the_checkout.BONUS]\n")
    (tmp_path / "job_reward.py").write_text(m.files["job_reward.py"])
    monkeypatch.setenv("TUNIX", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    call = Call(f"{tmp_path / 'job_reward.py'}:score", "job", {})
    assert call.fn("q", "a") == 2.0
    (tmp_path / "mine" / "reward.py").write_text("import missing_metrics\n")
    with pytest.raises(LoadError, match="mine/reward.py: No module named 'missing_metrics': install what it imports"):
        Call(f"{tmp_path / 'job_reward.py'}:score", "job", {})
