"""jaxrl.migrate: keys that say where something lies or what a server does, and change no number; whose experts are replayed."""

import pytest
from test_migrate import migrated, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.systems import table_of
from jaxrl.resolve.checks.common import check

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
GRPO = {"algorithm.adv_estimator": "grpo", R + "n": 8}
MEGA = {**GRPO, "model_engine": "megatron"}
OVERRIDE = A + "optim.override_optimizer_config."


def of(system, settings, version=None):
    return migrated(system, {**table_of(system).required, **settings}, version)


def test_megatrons_optimizer_on_the_host_is_ours():
    m = of("verl", {**MEGA, OVERRIDE + "optimizer_cpu_offload": True, OVERRIDE + "optimizer_offload_fraction": 1,
                    OVERRIDE + "overlap_cpu_optimizer_d2h_h2d": True, OVERRIDE + "use_precision_aware_optimizer": True})
    assert values(m)["optimizer.offload"] is True and m.outcome(False) == "full", (m.lacking, m.needs_you)
    for other in ({OVERRIDE + "optimizer_cpu_offload": True}, {OVERRIDE + "optimizer_offload_fraction": 1}):  # nothing is on the host there
        assert "optimizer.offload" not in values(of("verl", {**MEGA, **other}))
    assert of("verl", {**MEGA, OVERRIDE + "fp8_recipe": "x"}).outcome(False) == "partial"


def test_a_server_of_several_kinds_of_parts_is_split_by_tensors():
    m = of("verl", {**GRPO, R + "tensor_model_parallel_size": 2, R + "data_parallel_size": 2, R + "expert_parallel_size": 4})
    v = values(m)
    assert v["rollout.vllm.tensor_parallel"] == 4 and v["rollout.vllm.replicas"] == 2 and m.outcome(False) == "full"
    assert v["rollout.vllm.engine_kwargs.enable_expert_parallel"] is True and any("2 x 2 (data) x 1" in t for t in m.different)
    m = of("verl", {**GRPO, R + "tensor_model_parallel_size": 1, R + "data_parallel_size": 16, "trainer.nnodes": 2})
    assert [key for key, _, _ in m.lacking] == [R + "data_parallel_size"] and values(m)["rollout.vllm.tensor_parallel"] == 1
    assert values(of("skyrl", {"generator.inference_engine.expert_parallel_size": 4}))["rollout.vllm.engine_kwargs.enable_expert_parallel"] is True


def test_tables_within_vllms_options_are_written_as_tables():
    k = R + "engine_kwargs.vllm."
    m = of("verl", {**GRPO, k + "compilation_config.cudagraph_mode": "FULL", k + "compilation_config.pass_config.fuse_norm_quant": True,
                    k + "seed": 3})
    v = values(m)
    assert v["rollout.vllm.engine_kwargs.compilation_config"] == {"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": True}}
    assert v["rollout.vllm.engine_kwargs.seed"] == 3 and m.outcome(False) == "full"
    m = of("verl", {**GRPO, k + "speculative_config.method": "mtp"})
    assert [why for _, why, _ in m.lacking] == ["speculative decoding"]


@pytest.mark.parametrize(("system", "key"), [
    ("verl", "data.apply_chat_template_kwargs."), ("skyrl", "generator.chat_template_kwargs."), ("trl", "chat_template_kwargs."),
    ("trl/sft", "chat_template_kwargs.")])
def test_variables_of_the_chat_template(system, key):
    m = of(system, {key + "enable_thinking": False, key + "reasoning_effort": "low", key + "empty": None})
    v = values(m)
    assert v["data.chat_template_kwargs.enable_thinking"] is False and v["data.chat_template_kwargs.reasoning_effort"] == "low"
    assert "data.chat_template_kwargs.empty" not in v and not any("chat_template_kwargs" in t for t in m.needs_you)


@pytest.mark.parametrize(("system", "key", "without"), [
    ("verl", "actor_rollout_ref.model.enable_activation_offload", "full"), ("verl/sft", "model.enable_activation_offload", "full"),
    ("trl/sft", "activation_offloading", None)])
def test_activations_on_the_host(system, key, without):
    assert values(of(system, {key: True}))["model.remat"] == "offload"
    assert without is None or values(of(system, {key: False}))["model.remat"] == without


@pytest.mark.parametrize(("system", "settings", "want"), [
    ("verl", {**MEGA, A + "router_replay.mode": "R3"}, "sampled"),
    ("verl", {**GRPO, A + "veomni.router_replay.mode": "R2"}, "scored"),
    ("verl", {**GRPO, A + "router_replay.mode": "disabled"}, None),
    ("roll", {"actor_train.router_replay.mode": "R3", "actor_train.strategy_args.strategy_name": "megatron_train"}, "sampled"),
    ("roll", {"actor_train.router_replay.mode": "R3", "actor_train.strategy_args.strategy_name": "fsdp2_train"}, None),
    ("skyrl", {"trainer.strategy": "megatron", "trainer.policy.megatron_config.moe_enable_routing_replay": True,
               "generator.inference_engine.enable_return_routed_experts": True}, "sampled"),
    ("skyrl", {"trainer.strategy": "megatron", "trainer.policy.megatron_config.moe_enable_routing_replay": True}, None),
    ("skyrl", {"trainer.strategy": "fsdp2", "trainer.policy.megatron_config.moe_enable_routing_replay": True,
               "generator.inference_engine.enable_return_routed_experts": True}, None),
])
def test_experts_that_are_replayed(system, settings, want):
    """R2 scores old log-probs, whose experts it replays; SkyRL's needs both of its keys, as ROLL's and SkyRL's need Megatron."""
    m = of(system, settings)
    v = values(m)
    assert v.get("algorithm.routes", None) == want and not m.lacking
    assert v.get("algorithm.old_logprobs") == ("recompute" if want == "scored" else None) or system == "roll"


def test_replay_of_experts_that_are_not_scored_is_named():
    m = of("verl", {**MEGA, A + "router_replay.mode": "R2", "algorithm.rollout_correction.bypass_mode": True})
    assert any("no pass scores" in why for _, why, _ in m.lacking) and "algorithm.routes" not in values(m)


def test_a_config_of_these_passes_the_checks(tmp_path, monkeypatch):
    (tmp_path / "job.sh").write_text(f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {R}n=8 {R}expert_parallel_size=4 \
 {R}tensor_model_parallel_size=4 {A}optim.lr=1e-6 model_engine=megatron {OVERRIDE}optimizer_cpu_offload=True {A}megatron.param_offload=True \
 +{OVERRIDE}optimizer_offload_fraction=1 {A}router_replay.mode=R3 +{R}engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL \
 +data.apply_chat_template_kwargs.enable_thinking=False actor_rollout_ref.model.path=a/b trainer.logger='["console","file"]'
""")
    monkeypatch.chdir(tmp_path)
    assert command.main(["verl", "job.sh", "--out=out"]) == 0
    config = load_config("out/job.py")
    check(config)
    assert config.rollout.vllm.engine_kwargs.compilation_config.cudagraph_mode == "FULL" and config.optimizer.offload
    assert config.data.chat_template_kwargs.enable_thinking is False


@pytest.mark.parametrize(("system", "table"), [("verl", "actor_rollout_ref.model."), ("verl/sft", "model.")])
def test_positions_of_the_models_config_are_replaced(system, table):
    config = table + "override_config."
    m = of(system, {config + "max_position_embeddings": 32768, config + "attn_implementation": "eager"})
    assert values(m)["model.config.max_position_embeddings"] == 32768 and not any("model.config" in t for t in m.needs_you)
    assert any("vocab_size" in t for t in of(system, {config + "vocab_size": 9}).needs_you)


TRANSFORMER = A + "megatron.override_transformer_config."


@pytest.mark.parametrize(("system", "settings"), [
    ("verl", {TRANSFORMER + "moe_aux_loss_coeff": 0.01}), ("verl", {TRANSFORMER + "moe_z_loss_coeff": 0.001}),
    ("verl", {TRANSFORMER + "fp8": "e4m3"}), ("verl", {A + "loss_mode": "clip_cov"}), ("verl", {R + "use_fire_sampling": True}),
    ("verl", {A + "mindspeed.override_transformer_config.rope_scaling_type": "yarn"}),
    ("verl/sft", {"engine.override_transformer_config.moe_aux_loss_coeff": 0.01}),
    ("skyrl", {"trainer.policy.megatron_config.transformer_config_kwargs.moe_z_loss_coeff": 0.001}),
    ("roll", {"actor_train.strategy_args.strategy_config.fp8": "hybrid"}), ("roll", {"actor_train.strategy_args.strategy_config.yarn_mscale": 1.0}),
    ("cosmos_rl", {"train.train_policy.enable_dp_load_balancing": True}),
    ("tunix", {"training_mode": "agentic_grpo", "agentic_grpo_config.overlong_filter": True}),
])
def test_what_changes_training_below_a_table_that_needs_nothing_is_named(system, settings):
    """Keys of tables whose other keys are automatic."""
    [key] = [key for key in settings if key != "training_mode"]
    m = of(system, settings)
    assert key in [k for k, _, _ in m.lacking] or any(key in text for text in m.needs_you)
    if "." in key and not isinstance(settings[key], str):  # as it is when it is off
        assert key not in [k for k, _, _ in of(system, {**settings, key: 0}).lacking]


@pytest.mark.parametrize(("system", "settings", "on", "rate"), [
    ("verl", MEGA, TRANSFORMER + "moe_router_enable_expert_bias", TRANSFORMER + "moe_router_bias_update_rate"),
    ("skyrl", {"trainer.strategy": "megatron"}, "trainer.policy.megatron_config.moe_router_enable_expert_bias",
     "trainer.policy.megatron_config.transformer_config_kwargs.moe_router_bias_update_rate")])
def test_the_bias_of_routers_moves_at_megatrons_rate(system, settings, on, rate):
    assert values(of(system, {**settings, on: True}))["train.router_bias_rate"] == 1e-3
    assert values(of(system, {**settings, on: True, rate: 1e-2}))["train.router_bias_rate"] == 1e-2
    for other in ({on: False}, {on: True, rate: 0}, {rate: 1e-2}):
        assert "train.router_bias_rate" not in values(of(system, {**settings, **other}))


def test_servers_whose_host_a_script_leaves_open_are_asked_for():
    urls = "generator.inference_engine.external_server_urls"
    m = of("skyrl", {urls: ["http://", "$HOST:8000", "://", "10.0.0.1:8000"], "generator.inference_engine.run_engines_locally": False})
    assert values(m)["rollout.servers"] == ("http://10.0.0.1:8000",) and any("rollout.servers" in t for t in m.needs_you)
