"""jaxrl.migrate: what is easy to get wrong in configs of ROLL. Every key of its table is tested in test_migrate.py."""

import json

import pytest

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.source import Setting, Source, Unreadable
from jaxrl.migrate.systems import table_of
from jaxrl.migrate.systems.roll_layout import numbers
from jaxrl.migrate.table import Migration
from jaxrl.resolve.checks.common import check

CONFIG = """
defaults:
  - ../shared/deepspeed_zero3_cpuoffload@_here_
  - _self_
exp_name: small
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 100
response_length: 200
adv_estimator: reinforce
norm_mean_type: ~
whiten_advantages: true
advantage_clip: 2.0
reward_clip: 10
dual_clip_loss: true
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.95
pretrain: some/model
helper: ${now:%Y}
actor_train:
  training_args: {learning_rate: "1.0e-6", per_device_train_batch_size: 1, gradient_accumulation_steps: 32, warmup_steps: 20}
  data_args: {file_name: [a.jsonl], messages: messages, domain_interleave_probs: {math_rule: 1.0}}
  strategy_args: {strategy_name: deepspeed_train, strategy_config: "${deepspeed_zero3_cpuoffload}"}
  device_mapping: list(range(0,16))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.99, top_p: 0.99}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.6, block_size: 16, max_model_len: 8000}}
  device_mapping: "list(range(0,8)) + list(range(8,16))"
rewards:
  math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [aime]}
"""


def migrated(settings=None, version=None, gpus=0):
    table = table_of("roll")
    rows = {k: Setting(k, v, "test:1") for k, v in (settings or {}).items()}
    return Migration(table, Source(rows, [], ""), version or table.versions[-1], gpus).run()


def values(m):
    return {option: value for option, (value, _) in m.options.items()}


BATCH = {"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "response_length": 4096,
         "actor_train.training_args.per_device_train_batch_size": 1}


def steps(accumulation, devices, **config):
    more = {f"actor_train.strategy_args.strategy_config.{k}": v for k, v in config.items()}
    m = migrated({**BATCH, "actor_train.training_args.gradient_accumulation_steps": accumulation,
                  "actor_train.device_mapping": devices, "actor_train.strategy_args.strategy_name": "megatron_train", **more})
    return m, values(m).get("algorithm.num_minibatches")


def test_a_batch_is_of_prompts_and_a_minibatch_of_devices_times_accumulation():
    m, count = steps(32, "list(range(0,16))")
    assert (count, m.facts["sequences per step"], m.facts["sequences per optimizer step"]) == (1, 512, 512)
    assert steps(32, "list(range(0,8))")[1] == 2
    both = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    assert steps(32, "list(range(0,16))", **both)[1] == 8 and steps(32, "list(range(0,16))", expert_model_parallel_size=4)[1] == 1
    for strategy in ("deepspeed_train", "fsdp2_train"):  # ranks that share a sequence are one
        m = migrated({**BATCH, "actor_train.training_args.gradient_accumulation_steps": 16, "actor_train.device_mapping": "list(range(0,16))",
                      "actor_train.strategy_args.strategy_name": strategy, "actor_train.model_args.ulysses_size": 2}, "0.2.0")
        assert (values(m)["algorithm.num_minibatches"], values(m)["mesh.cp"]) == (4, 2)
        m = migrated({**BATCH, "critic.training_args.per_device_train_batch_size": 1, "critic.training_args.gradient_accumulation_steps": 16,
                      "critic.device_mapping": "list(range(0,16))", "critic.strategy_args.strategy_name": strategy,
                      "critic.model_args.ulysses_size": 2}, "0.2.0", gpus=16)
        assert values(m)["critic.num_minibatches"] == 4
    assert steps(33, "list(range(0,16))")[0].outcome(False) == "refused"  # 528 of 512
    assert steps(1, "list(range(0,2))")[0].outcome(False) == "refused"  # two of a group of eight


def test_dual_clip_is_of_pg_clip_and_sampling_is_not_of_the_whole_distribution():
    v = values(migrated({**BATCH, "dual_clip_loss": True, "use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.28}, gpus=8))
    assert (v["algorithm.clip_low"], v["algorithm.clip_high"], v["algorithm.dual_clip"]) == (0.1, 0.28, 1.4)
    assert (v["rollout.temperature"], v["rollout.top_p"], v["rollout.top_k"]) == (0.95, 0.7, 50)
    assert values(migrated(BATCH, gpus=8))["algorithm.dual_clip"] == 0
    assert (v["optimizer.lr"], v["optimizer.schedule"], v["optimizer.weight_decay"], v["optimizer.warmup_steps"]) == (5e-5, "linear", 0, 0)
    assert v["algorithm.aggregation"] == "sequence_mean"
    assert values(migrated(BATCH, "0.1.0", gpus=8))["algorithm.aggregation"] == "sequence_sum"
    assert values(migrated(BATCH, "0.1.0", gpus=8))["optimizer.warmup_fraction"] == 0.03


def test_the_update_has_no_temperature_and_the_weights_are_those_of_the_strategy():
    """Only vLLM is told the temperature; FSDP2 learns parameters in its param_dtype, Megatron keeps fp32."""
    drawn, held = "actor_infer.generating_args.temperature", "actor_train.strategy_args.strategy_config.param_dtype"
    v = values(migrated({**BATCH, drawn: 0.99, held: "bf16"}, gpus=8))
    assert (v["rollout.temperature"], v["algorithm.temperature"], v["train.param_dtype"]) == (0.99, 1.0, "bf16")
    v = values(migrated({**BATCH, drawn: 1.0, held: "bf16", "actor_train.strategy_args.strategy_name": "megatron_train"}, gpus=8))
    assert "algorithm.temperature" not in v and v["train.param_dtype"] == "fp32"
    compared = migrated({**BATCH, drawn: 0.99, "train_infer_correction.is_weight.enabled": True}, gpus=8)
    assert "algorithm.temperature" not in values(compared) and [key for key, *_ in compared.lacking] == [drawn]


@pytest.mark.parametrize("version, settings, found", [
    ("0.1.0", {"reward_norm": "batch"}, ("batch", "batch")), ("0.1.0", {"reward_norm": "batch", "reward_shift": True}, ("batch", "none")),
    ("0.1.0", {"reward_norm": "group", "reward_scale": True}, ("group", "group")), ("0.1.0", {"norm_mean_type": "batch"}, ("none", "none")),
    ("0.1.0", {"adv_estimator": "grpo", "reward_shift": True}, ("group", "none")), ("0.1.1", {"reward_norm": "batch"}, ("none", "none")),
    ("0.3.0", {"norm_mean_type": "batch"}, ("batch", "none")), ("0.3.0", {"adv_estimator": "grpo", "reward_shift": True}, ("group", "group"))])
def test_what_normalises_rewards_is_said_by_the_keys_of_its_version(version, settings, found):
    v = values(migrated({**BATCH, "adv_estimator": "reinforce", **settings}, version, gpus=8))
    assert (v["algorithm.advantage_mean"], v["algorithm.advantage_std"]) == found


def test_kl_has_no_weight_until_it_is_given_one():
    assert values(migrated({**BATCH, "use_kl_loss": True}, gpus=8))["algorithm.kl.coef"] == 0
    v = values(migrated({**BATCH, "use_kl_loss": True, "kl_loss_coef": 0.001}, gpus=8))
    assert (v["algorithm.kl.coef"], v["algorithm.kl.estimator"], v["algorithm.kl.placement"]) == (0.001, "low_var", "loss")
    v = values(migrated({**BATCH, "add_token_level_kl": True, "adv_estimator": "grpo"}, gpus=8))
    assert (v["algorithm.kl.coef"], v["algorithm.kl.estimator"], v["algorithm.kl.placement"]) == (0.2, "k1", "reward")
    assert v["algorithm.advantage"] == "returns" and values(migrated(BATCH))["algorithm.advantage"] == "gae"


@pytest.mark.parametrize("text, found", [
    ("list(range(0,4))", [0, 1, 2, 3]), ("[0, 1] + list(range(8,10))", [0, 1, 8, 9]), ("list(range(0, 8, 2))", [0, 2, 4, 6]),
    ([4, 5], [4, 5]), ("__import__('os').system('true')", None), ("list(range(10**9))", None), ("list(range(0,999999999))", None)])
def test_lists_of_devices_are_read_and_never_executed(text, found):
    if found is not None:
        assert numbers(text) == found
    else:
        with pytest.raises(ValueError):
            numbers(text)
        with pytest.raises(Unreadable, match="device_mapping"):
            migrated({**BATCH, "actor_train.device_mapping": text})


def test_engines_of_their_own_devices_sample_ahead():
    own = {**BATCH, "actor_train.device_mapping": "list(range(0,4))", "actor_infer.device_mapping": "list(range(4,8))",
           "actor_train.training_args.gradient_accumulation_steps": 32, "async_generation_ratio": 1.5,
           "actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2}
    v = values(migrated(own))
    assert (v["rollout.placement"], v["rollout.vllm.devices"], v["rollout.max_staleness"]) == ("disaggregated", ("4,5", "6,7"), 2)
    assert v["mesh.roles.policy"] == {"devices": "0-3"} and v["algorithm.num_minibatches"] == 4
    shared = values(migrated({**own, "actor_infer.device_mapping": "list(range(0,8))"}))
    assert shared["rollout.placement"] == "colocated" and shared["rollout.max_staleness"] == 0


def test_the_report_says_which_gpus_servers_have_where_they_have_fewer():
    both = {**BATCH, "actor_train.device_mapping": "list(range(0,16))", "actor_infer.device_mapping": "list(range(0,12))",
            "num_gpus_per_node": 8}
    m = migrated(both)
    assert values(m)["rollout.vllm.devices"] == ("0", "1", "2", "3", "4", "5")
    assert any("servers have 6 of the 8 of each host" in text for text in m.different)
    assert not any("share only some" in text for text in migrated({**both, "actor_infer.device_mapping": "list(range(0,16))"}).different)


@pytest.mark.full
def test_a_config_with_relative_includes_passes_the_checks(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "shared" / "deepspeed_zero3_cpuoffload.yaml").write_text(
        "deepspeed_zero3_cpuoffload:\n  zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}\n")
    (tmp_path / "job" / "small.yaml").write_text(CONFIG)
    (tmp_path / "job" / "run.sh").write_text("python examples/start_rlvr_pipeline.py --config_path $(basename x) --config_name small\n")
    out = tmp_path / "out"
    assert command.main(["roll", str(tmp_path / "job" / "run.sh"), f"--out={out}"]) == 0
    report = json.loads((out / "report.json").read_text())
    kinds = {k["key"]: k["kind"] for k in report["keys"]}
    assert kinds["actor_train.strategy_args.strategy_config.zero_optimization.offload_optimizer.device"] == "equivalent"
    assert kinds["helper"] == "unknown" and kinds["actor_infer.generating_args.max_new_tokens"] == "inert"
    c = load_config(str(out / "run.py"))
    assert (c.optimizer.lr, c.algorithm.dual_clip, c.algorithm.advantage_high, c.reward.clip) == (1e-6, 1.4, 2.0, 10.0)
    assert c.mesh.roles.policy.rest == "streamed" and c.rollout.vllm.engine_kwargs.block_size == 16 and c.eval.every_steps == 0
    assert c.algorithm.keep_group == f"{out}/run_keep.py:keep" and c.data.answer_column == "ground_truth"
    text = (out / "run_keep.py").read_text()
    assert "0.1 < scores.mean() < 0.95" in text
    c.run.mode, c.plan.target = "plan", "h100:16"
    check(c)


def test_options_of_vllm_are_those_of_the_role_that_samples():
    of = {"is_pure_opd": True, "teacher.model_args.model_name_or_path": "a/t", "student_train.model_args.model_name_or_path": "a/s"}
    for role, more in (("actor_infer.", {}), ("student_infer.", of)):
        m = migrated({**more, role + "strategy_args.strategy_config.block_size": 16})
        assert values(m)["rollout.vllm.engine_kwargs.block_size"] == 16 and not [k for k, _, _ in m.lacking if "block_size" in k]


def test_domains_are_sources_with_rewards_of_their_own_and_a_judge(tmp_path):
    """Shares are weights, tags choose the rows, and the file that is written scores by published rules."""
    rows = {f"rewards.{d}.worker_cls": f"roll.rewards.{c}" for d, c in (
        ("math_rule", "MathRuleRewardWorker"), ("ifeval", "GeneralRuleRewardWorker"), ("cross", "CrossThinkQARuleRewardWorker"),
        ("judged", "LLMJudgeRewardWorker"))}
    rows |= {f"rewards.{d}.tag_included": [f"tag_{d}"] for d in ("math_rule", "ifeval", "cross", "judged")}
    shares = {f"actor_train.data_args.domain_interleave_probs.{d}": s for d, s in (
        ("math_rule", 0.4), ("ifeval", 0.3), ("cross", 0.2), ("judged", 0.1))}
    judge = {"rewards.judged.judge_model_type": "inference", "rewards.judged.model_args.model_name_or_path": "a/judge",
             "rewards.judged.generating_args.max_new_tokens": 100, "rewards.cross.reward_type": "loose"}
    m = migrated(rows | shares | judge | {"actor_train.data_args.file_name": ["a.jsonl", "b.jsonl"]})
    v = values(m)
    assert [v[f"data.sources.{d}"]["weight"] * 128 for d in ("math_rule", "ifeval", "cross", "judged")] == [51, 38, 25, 14]  # as it rounds
    assert v["data.sources.ifeval"] == {"path": ("a.jsonl", "b.jsonl"), "weight": 38 / 128, "where": {"tag": ["tag_ifeval"]}, "rewards": ["score"]}
    assert v["data.sources.judged"]["rewards"] == ["judge"] and "data.path" not in v
    assert v["reward.judge.model"] == "a/judge" and v["reward.judge.words"] == {"yes": 1, "no": 0} and v["reward.judge.max_new_tokens"] == 100
    space: dict = {}
    exec(m.files["job_reward.py"], space)
    score = space["score"]
    text = "no comma here no comma here no comma here"
    repeated = -0.5 * (1 - 3 / 7)  # 7 3-grams, 3 of them different
    assert score("q", text, '{"func_name": "validate_no_commas"}', tag="tag_ifeval") == pytest.approx(1 + repeated)
    assert score("q", "the answer is B", "B", tag="tag_cross") == pytest.approx(1.0) and score("q", r"\boxed{2}", "2", tag="other") == 1.0
    assert score("q", "x", "2", tag="tag_judged") is None


JUDGE = {"worker_cls": "roll.rewards.LLMJudgeRewardWorker", "tag_included": ["a"], "judge_model_type": "inference",
         "model_args.model_name_or_path": "a/judge", "model_args.dtype": "bf16", "strategy_args.strategy_name": "vllm",
         "strategy_args.strategy_config.max_model_len": 8192, "strategy_args.strategy_config.load_format": "auto",
         "generating_args.max_new_tokens": 100, "generating_args.temperature": 0.3, "infer_batch_size": 4, "device_mapping": "[6, 7]"}


def judged(**changes):
    places = {"actor_train.device_mapping": "[0, 1, 2, 3]", "actor_infer.device_mapping": "[4, 5]", "rewards.m.worker_cls": "MathRuleRewardWorker"}
    rows = {f"rewards.j.{k.replace('__', '.')}": v for k, v in {**JUDGE, **changes}.items()}
    return migrated({**BATCH, "actor_train.training_args.gradient_accumulation_steps": 16, **places, **rows})


def test_the_judges_server_and_sampling_come_along():
    """Its vLLM's options, what it samples with (ROLL's defaults where a key is not set), its devices where they are its own."""
    m = judged()
    v, kinds = values(m), {r.key.removeprefix("rewards.j."): (r.kind, list(r.targets)) for r in m.records()}
    assert v["reward.judge.server_args"] == {"max_model_len": 8192, "dtype": "bfloat16", "data_parallel_size": 2}
    assert v["reward.judge.extra"] == {"temperature": 0.3, "top_p": 0.7, "top_k": 50} and v["reward.judge.devices"] == "6,7"
    assert kinds["generating_args.temperature"] == ("equivalent", ["reward.judge.extra"])
    assert kinds["model_args.model_name_or_path"] == ("equivalent", ["reward.judge.model"]) and kinds["infer_batch_size"][0] == "automatic"
    assert kinds["device_mapping"] == ("equivalent", ["reward.judge.server_args", "reward.judge.devices"])
    m = judged(device_mapping="[3, 6]", generating_args__do_sample=False, strategy_args__strategy_name="hf_infer")
    assert values(m)["reward.judge.extra"]["temperature"] == 0.0 and "reward.judge.devices" not in values(m)
    assert any("reward.judge.devices" in text and "3, 6" in text for text in m.needs_you)
    assert any("by hf_infer there" in text for text in m.different) and "max_model_len" not in values(m)["reward.judge.server_args"]
    m = judged(judge_model_type="api", judge_api_url="http://a/v1", judge_model_name="b")
    assert values(m)["reward.judge.model"] == "b" and "reward.judge.extra" not in values(m)
    assert {r.kind for r in m.records() if r.key.startswith("rewards.j.generating_args")} == {"inert"}


def several(first: dict, second: dict, **more):
    """A job whose domains a and b are judged, each by settings of its own."""
    rows = {f"rewards.{d}.{k}": v for d, own in (("a", first), ("b", second)) for k, v in {**JUDGE, "tag_included": [f"t_{d}"], **own}.items()
            if v is not None}
    shares = {f"actor_train.data_args.domain_interleave_probs.{d}": s for d, s in (("a", 0.5), ("b", 0.3), ("m", 0.2))}
    places = {"actor_train.device_mapping": "[0, 1, 2, 3]", "actor_infer.device_mapping": "[4]", "rewards.m.worker_cls": "MathRuleRewardWorker",
              "rewards.m.tag_included": ["t_m"], "actor_train.training_args.gradient_accumulation_steps": 16}
    return migrated({**BATCH, **places, **shares, **rows, "actor_train.data_args.file_name": ["r.jsonl"], **more})


def test_judges_of_different_settings_are_rewards_of_their_own(tmp_path):
    """None is taken for all: model, sampling, engine, devices and prompt are each judge's own."""
    other = {"model_args.model_name_or_path": "b/judge", "generating_args.temperature": 0.9, "generating_args.max_new_tokens": None,
             "device_mapping": "[5]", "judge_prompt": "B", "strategy_args.strategy_config.max_model_len": 4096}
    m = several({"device_mapping": "[6, 7]"}, other)
    v = values(m)
    assert v["reward.functions"] == ("./job_reward.py:score", "judge_a", "judge_b") and not any(o.startswith("reward.judge.") for o in v)
    a, b = v["reward.judges.judge_a"], v["reward.judges.judge_b"]
    assert (a["model"], a["extra"]["temperature"], a["max_new_tokens"], a["devices"]) == ("a/judge", 0.3, 100, "6,7")
    assert (b["model"], b["extra"]["temperature"], b["devices"]) == ("b/judge", 0.9, "5") and "max_new_tokens" not in b
    assert (a["server_args"]["max_model_len"], b["server_args"]["max_model_len"]) == (8192, 4096)
    assert [v[f"data.sources.{d}"]["rewards"] for d in "abm"] == [["judge_a"], ["judge_b"], ["score"]]
    assert {"job_judge_a.txt", "job_judge_b.txt"} < set(m.files)
    assert [text.partition(":")[0] for text in m.needs_you if "prompt_maps['B']" in text] == ["job_judge_b.txt"]
    kinds = {r.key: (r.kind, list(r.targets)) for r in m.records()}
    assert kinds["rewards.b.device_mapping"] == kinds["rewards.b.judge_prompt"] == ("equivalent", ["reward.judges.judge_b"])
    assert any("judge_a, judge_b (reward.judges)" in text for text in m.different)
    m = several({"device_mapping": "[6, 7]"}, {**other, "device_mapping": "[7]"})  # one GPU for two servers
    assert any(text.startswith("reward.judges.judge_b.devices") for text in m.needs_you) and "devices" not in values(m)["reward.judges.judge_b"]
    m = several({}, {"judge_model_type": "api", "judge_api_url": "http://b/v1", "judge_model_name": "b"})
    assert values(m)["reward.judges.judge_b"]["servers"] == ("http://b/v1",) and "servers" not in values(m)["reward.judges.judge_a"]
    m = several({}, {})
    assert values(m)["reward.functions"] == ("./job_reward.py:score", "judge") and values(m)["data.sources.b"]["rewards"] == ["judge"]


def test_a_config_with_two_judges_passes_the_checks(tmp_path):
    judge = "worker_cls: a.LLMJudgeRewardWorker, judge_model_type: inference"
    (tmp_path / "job.yaml").write_text(CONFIG.replace("domain_interleave_probs: {math_rule: 1.0}", "domain_interleave_probs: {a: 1.0, b: 2.0}") + f"""
  a: {{{judge}, tag_included: [x], model_args: {{model_name_or_path: a/judge}}, generating_args: {{temperature: 0.1}}}}
  b: {{{judge}, tag_included: [y], model_args: {{model_name_or_path: b/judge}}}}
""".replace("{{", "{"))
    assert command.main(["roll", str(tmp_path / "job.yaml"), f"--out={tmp_path}"]) == 0
    c = load_config(str(tmp_path / "job.py"))
    assert c.reward.judges.judge_a.extra.temperature == 0.1 and c.reward.judges.judge_b.prompt_file.startswith(str(tmp_path))
    check(c)


def test_rows_of_domains_without_a_share_are_left_out_and_a_filter_of_one_domain_is_named():
    rows = {"rewards.m.worker_cls": "MathRuleRewardWorker", "rewards.m.tag_included": ["t_m"], "rewards.i.worker_cls": "GeneralRuleRewardWorker",
            "rewards.i.tag_included": ["t_i"], "actor_train.data_args.domain_interleave_probs.m": 1.0,
            "actor_train.data_args.file_name": ["r.jsonl"]}
    m = migrated({**BATCH, **rows}, gpus=8)
    assert values(m)["data.sources.m"]["where"] == {"tag": ["t_m"]} and "data.sources.i" not in values(m)
    assert "data.sources.m" not in values(migrated({k: v for k, v in {**BATCH, **rows}.items() if ".i." not in k}, gpus=8))
    kept = {"rewards.m.query_filter_config.type": "std_filter", "rewards.m.query_filter_config.filter_args.std_threshold": 0}
    assert [(k, "i" in why) for k, why, _ in migrated({**BATCH, **rows, **kept}, gpus=8).lacking] == [("rewards.m.query_filter_config.type", True)]
    both = {key.replace(".m.", ".i."): value for key, value in kept.items()}
    assert not migrated({**BATCH, **rows, **kept, **both}, gpus=8).lacking


def test_a_critic_that_learns_in_another_dtype_is_named():
    fsdp = {"strategy_args.strategy_name": "fsdp2_train", "strategy_args.strategy_config.param_dtype": "bf16"}
    critic, policy = ({f"{role}.{k}": v for k, v in fsdp.items()} for role in ("critic", "actor_train"))
    megatron = {"actor_train.strategy_args.strategy_name": "megatron_train"}
    named = lambda *more: [k for k, _, _ in migrated({**BATCH, **{k: v for d in more for k, v in d.items()}}, gpus=8).lacking]  # noqa: E731
    assert named(critic, megatron) == ["critic.strategy_args.strategy_config.param_dtype"] and not named(critic, policy)
    assert named(policy, {"critic.strategy_args.strategy_name": "megatron_train"}) == ["critic.strategy_args.strategy_name"]
    assert not named(critic, megatron, {"adv_estimator": "reinforce"})


def test_packing_by_load_sets_the_tokens_of_a_microbatch():
    pack = {"use_sequence_packing": True, "sequence_packing_args.algorithm": "load_balance", "strategy_args.strategy_name": "megatron_train",
            "sequence_packing_args.max_packed_sequence_length_train": 9000, "sequence_packing_args.max_packed_sequence_length_forward": 12000}
    tokens = lambda **more: [values(migrated({**BATCH, **{f"actor_train.{k.replace('__', '.')}": v for k, v in {**pack, **more}.items()}},  # noqa: E731
                                             gpus=8)).get(f"train.{n}tokens_per_microbatch") for n in ("", "score_")]
    assert tokens() == [9000, 12000] and tokens(use_dynamic_batching_in_train=True, max_tokens_per_microbatch_in_train=20000) == [20000, 12000]
    plain = [5120, 16 * 5120]  # of a row and 16 rows of prompt and completion
    assert tokens(sequence_packing_args__algorithm="none") == tokens(strategy_args__strategy_name="fsdp2_train") == plain
    with pytest.raises(Unreadable, match="max_packed_sequence_length_train"):
        tokens(sequence_packing_args__max_packed_sequence_length_train=None)


def test_on_policy_distillation_has_one_temperature_and_the_trainers_log_probs():
    """ROLL divides no logits in training; init_kl_coef, 0.2 unset, has it score the student's tokens with the trainer."""
    of = {"is_pure_opd": True, "teacher.model_args.model_name_or_path": "a/t", "student_train.model_args.model_name_or_path": "a/s"}
    m = migrated({**of, "student_infer.generating_args.temperature": 0.99})
    assert [k for k, _, _ in m.lacking] == ["student_infer.generating_args.temperature"] and "algorithm.temperature" not in values(m)
    assert not any("algorithm.temperature" in text for text in m.different) and values(m)["algorithm.old_logprobs"] == "recompute"
    m = migrated({**of, "student_infer.generating_args.temperature": 1.0, "init_kl_coef": 0})
    assert not m.lacking and values(m)["algorithm.old_logprobs"] == "auto"
    m = migrated({**BATCH, "force_disable_old_logprobs_recompute": True, "actor_train.training_args.gradient_accumulation_steps": 8}, gpus=8)
    assert [k for k, _, _ in m.lacking] == ["force_disable_old_logprobs_recompute"]


def test_a_prompt_of_several_columns_is_a_column_that_rows_do_not_have_yet():
    """ROLL joins prompt_key, query_key and system_key; a run without the joined column stops, instead of learning without inputs."""
    job = {"sequence_length": 512, "sft_train.device_mapping": "[0]", "sft_train.training_args.max_steps": 100}
    m = migrated({**job, "query_key": "input", "system_key": "system"}, gpus=1)
    assert values(m)["data.prompt_column"] == "instruction+input+system"
    assert any(text.startswith("data.prompt_column=instruction+input+system: ROLL makes a prompt") for text in m.needs_you)
    assert next(r.kind for r in m.records() if r.key.endswith("max_steps")) == "inert"  # an epoch ends it
    assert values(migrated(job, gpus=1))["data.prompt_column"] == "instruction"


def test_several_teachers_are_one_reason_and_words_are_about_what_the_job_has():
    of = {"is_pure_opd": True, "student_train.model_args.model_name_or_path": "a/s", "teacher.a.model_args.model_name_or_path": "b",
          "teacher.a.sequence_packing_args.algorithm": "load_balance", "teacher.a.opd_kl_coef": 1.0}
    m = migrated(of)
    assert not m.unknown and {r.kind for r in m.records() if r.key.startswith("teacher.a.")} == {"unsupported"}
    judge = {"rewards.j.worker_cls": "a.LLMJudgeRewardWorker", "rewards.j.judge_api_url": "http://a/v1"}
    assert not any("math-verify" in text for text in migrated({**BATCH, **judge}, gpus=8).different)
    assert not any("up to 5 tokens" in text for text in table_of("roll").jobs[2].reader().differs)
    words = migrated({**BATCH, "pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}, gpus=8)
    assert any("<think>" in text for text in words.needs_you) and not any("<think>" in text for text in words.different)
