"""jaxrl.migrate: Tunix's command line, its layers of files, and arithmetic that scripts leave to awk."""

import json

import pytest
from test_migrate import migrated, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.awk import computed

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
    assert (c.data.prompts_per_step, c.rollout.group_size, c.algorithm.num_minibatches, c.train.steps) == (8, 4, 2, 40)
    assert (c.optimizer.lr, c.optimizer.warmup_steps, c.optimizer.decay_steps, c.optimizer.max_grad_norm) == (3e-6, 4, 36, 0.0)
    assert (c.optimizer.weight_decay, c.optimizer.b2) == (1e-4, 0.999)  # the table replaces base_config.yaml's
    assert (c.mesh.tp, c.lora.rank, c.lora.targets) == (4, 8, ("q_proj", "k_proj", "v_proj"))
    assert (c.model.path, c.data.path, c.data.subset, c.rollout.engine) == ("Qwen/Qwen3-0.6B", ("openai/gsm8k",), "main", "jax")
    assert (c.algorithm.kl.coef, c.algorithm.kl.estimator, c.algorithm.temperature) == (0.04, "k3", 0.0)
    assert "unknown" not in {k["kind"] for k in report["keys"]}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "reward.py").write_text(REWARD)
    monkeypatch.setenv("TUNIX", str(tmp_path))
    space: dict = {}
    exec((out / "run_reward.py").read_text(), space)
    space["score"].prepare()
    assert (space["score"]("q", "7", "7"), space["score"]("q", "7777", "7")) == (2.0, -0.5)


def test_a_role_takes_from_the_model_what_it_does_not_change():
    base = {"actor_model_config.model_id": "meta-llama/Llama-3.1-8B", "model_config.model_id": "a/b"}
    assert values(migrated("tunix", base))["model.path"] == "a/b"
    assert values(migrated("tunix", {**base, "actor_model_config.model_id": "c/d"}))["model.path"] == "c/d"


def test_a_kl_without_gradient_is_named_and_ppo_has_its_own():
    m = migrated("tunix", {"model_config.model_id": "a/b"})
    assert values(m)["algorithm.kl.coef"] == 0.0 and [key for key, *_ in m.lacking] == ["grpo_config.beta"] and m.outcome(False) == "partial"
    assert values(migrated("tunix", {"model_config.model_id": "a/b"}, "0.1.6"))["algorithm.kl.coef"] == 0.08
    v = values(migrated("tunix", {"model_config.model_id": "a/b", "ppo_config.beta": 0.02}))
    assert (v["algorithm.advantage"], v["algorithm.kl.coef"], v["algorithm.kl.placement"], v["rollout.group_size"]) == ("gae", 0.02, "reward", 1)
    assert migrated("tunix", {"training_config.max_steps": 3, "optimizer_config.opt_type": "adamw"}).outcome(False) == "refused"  # SFT


def test_agents_are_episodes_and_a_mesh_of_the_rollouts_own_a_role():
    m = migrated("tunix", {
        "model_config.model_id": "a/b", "training_mode": "agentic_grpo", "env_class_path": "game.env.Lake", "env_kwargs.max_steps": 8,
        "actor_model_config.mesh.shape": "(2,2)", "rollout_model_config.mesh.shape": "(2,1)", "rollout_config.return_logprobs": True})
    v = values(m)
    assert v["env.max_turns"] == 8 and "WRITE HERE" in m.files["job_env.py"] and v["algorithm.old_logprobs"] == "rollout"
    assert (v["mesh.roles.policy"], v["mesh.roles.sampler"]) == ({"devices": "0-3"}, {"devices": "4-5"})


@pytest.mark.parametrize("text, want", [
    ('awk "BEGIN {print 3738 * 1 * 1.0}"', "3738"), ('awk "BEGIN {printf \\"%.0f\\", 0.1 * 3738}"', "374"), ('printf "%.0f" "2.6"', "3"),
    ('awk "BEGIN {\n value = 2 * 0.1;\n if (value < 1) value = 1;\n printf \\"%.0f\\", value;\n}"', "1"), ('awk "{print $1}" rows.txt', None),
    ('awk "BEGIN {system(\\"rm -rf x\\")}"', None), ('awk "BEGIN {print 1 / 0}"', None)])
def test_arithmetic_of_awk_and_printf(text, want):
    assert computed(text) == want
