"""jaxrl.migrate: Cosmos-RL. What counts as a batch, what is on unless it is set, and that its table and the ledger agree."""

import math
import random

import pytest
from test_migrate import migrated, run, values

from jaxrl.config.load import load_config
from jaxrl.migrate.source import Unreadable
from jaxrl.resolve.checks.common import check

T, P, R, PAR, D = "train.", "train.train_policy.", "rollout.", "policy.parallelism.", "distillation."
GRPO, SFT = {P + "type": "grpo"}, {P + "type": "sft"}


def of(settings=None, version=None, gpus=0):
    return migrated("cosmos_rl", {**GRPO, **(settings or {})}, version, gpus=gpus)


def test_a_batch_is_samples_of_a_replica_and_rows_of_a_worker_in_sft():
    m = of({T + "train_batch_per_replica": 128})
    assert values(m)["data.prompts_per_step"] == 8 and m.facts["sequences per step"] == 128  # / 16, n_generation's default
    two = of({T + "train_batch_per_replica": 128, PAR + "n_init_replicas": 2, PAR + "dp_shard_size": 4, R + "n_generation": 8})
    assert values(two)["data.prompts_per_step"] == 32 and two.facts["sequences per step"] == 256
    parts = of({T + "train_batch_per_replica": 128, PAR + "dp_shard_size": 2, P + "batch_size_per_optimize": 16, P + "mu_iterations": 2})
    assert values(parts)["algorithm.num_minibatches"] == 4 and parts.facts["optimizer steps per step"] == 8  # 64 of a GPU / 16
    rows = migrated("cosmos_rl", {**SFT, T + "train_batch_per_replica": 32, PAR + "dp_shard_size": 4, PAR + "dp_replicate_size": 2})
    assert values(rows)["data.prompts_per_step"] == 256 and rows.facts["rows per update"] == 256
    left = migrated("cosmos_rl", {**SFT, T + "train_batch_per_replica": 32, PAR + "dp_shard_size": -1, PAR + "tp_size": 2}, gpus=8)
    assert values(left)["data.prompts_per_step"] == 128
    assert of({T + "train_batch_per_replica": 24}).outcome(False) == "refused"  # a group and a half
    small = of()  # its defaults: 8 samples of groups of 16
    assert values(small)["data.prompts_per_step"] == 1 and any("part of a group" in why for _, why, _ in small.lacking)
    assert values(of({P + "mini_batch": 4}))["train.tokens_per_microbatch"] == 4 * 4096


def test_what_is_on_unless_it_is_set():
    v = values(of())
    assert (v["algorithm.clip_low"], v["algorithm.clip_high"], v["algorithm.dual_clip"]) == (0.2, 0.2, 3.0)
    assert (v["rollout.max_staleness"], v["rollout.sync_every"]) == (4, 1)
    assert (v["optimizer.warmup_steps"], v["optimizer.schedule"], v["optimizer.eps"], v["optimizer.b2"]) == (20, "constant", 1e-6, 0.999)
    assert (v["algorithm.advantage_std"], v["algorithm.mismatch.correction"], v["algorithm.kl.coef"]) == ("group_population", "none", 0)
    assert (v["rollout.group_size"], v["rollout.max_new_tokens"], v["train.max_sequence_tokens"]) == (16, 2048, 4096)
    assert v["mesh.tp"] == v["rollout.vllm.tensor_parallel"] == 2 and v["rollout.vllm.devices"] == ("2,3",)
    assert (v["checkpoint.every_steps"], v["checkpoint.at_end"], v["eval.every_steps"], v["data.epochs"]) == (0, False, 0, 1)
    alone = of({PAR + "tp_size": 1, R + "parallelism.tp_size": 1})  # a GPU to each
    assert alone.facts["GPUs of a host"] == "2: training has GPU 0 of every host and vLLM the next one"
    assert not any("every host" in text for text in alone.needs_you)
    many = of({PAR + "dp_shard_size": 8, PAR + "tp_size": 1, R + "parallelism.tp_size": 1})
    assert any(text.startswith("training has GPUs 0 to 7 of every host and vLLM the next one;") for text in many.needs_you)
    gspo = values(of({P + "variant": "gspo"}))
    assert (gspo["algorithm.ratio"], gspo["algorithm.dual_clip"]) == ("sequence", 0)  # where the dual clip is off
    assert values(of({P + "unbiased_advantage": True}))["algorithm.advantage_std"] == "none"
    assert values(of({P + "kl_beta": 0.1}))["algorithm.kl.estimator"] == "low_var"
    assert "algorithm.advantage_low" not in values(of({P + "advantage_low": -1.0}))  # its text trainers do not read it
    share = values(of({T + "optm_warmup_steps": 0.1}))
    assert (share["optimizer.warmup_steps"], share["optimizer.warmup_fraction"]) == (0, 0.1)


@pytest.mark.parametrize("settings, staleness, every", [
    ({P + "on_policy": True}, 0, 1), ({"mode": "colocated"}, 0, 1), ({P + "allowed_outdated_steps": 1}, 1, 1),
    ({T + "sync_weight_interval": 2}, 2, 2),  # 4 steps are 2 publications
    ({T + "sync_weight_interval": 8}, 0, 8),  # raised to 7 steps
])
def test_staleness_is_counted_in_publications(settings, staleness, every):
    v = values(of(settings))
    assert (v["rollout.max_staleness"], v["rollout.sync_every"]) == (staleness, every)


def test_two_temperatures_are_said():
    assert of({P + "temperature": 0.7, R + "sampling_config.temperature": 0.7}).lacking == of().lacking
    apart = of({P + "temperature": 0.9})  # as in most of its examples: drawn at 1
    assert values(apart)["rollout.temperature"] == 1.0 and values(apart)["algorithm.temperature"] == 0.9
    assert any("not the one that is sampled" in text for text in apart.different)
    for beside in ({P + "use_decoupled_loss": True}, {"distillation.enable": True}):  # log-probs are compared
        both = of({P + "temperature": 0.9, **beside})
        assert "algorithm.temperature" not in values(both) and P + "temperature" in [k for k, _, _ in both.lacking]


def test_bounds_that_are_negative_are_none_and_aipo_is_a_clip_on_one_side():
    v = values(of({P + "epsilon_low": -1.0, P + "epsilon_high": -1.0}))
    assert v["algorithm.clip_low"] == 1.0 and v["algorithm.clip_high"] > math.exp(20)  # the largest ratio there
    v = values(of({P + "aipo_rho": 4.0}))
    low, high, dual = (v[f"algorithm.{n}"] for n in ("clip_low", "clip_high", "dual_clip"))
    draw = random.Random(0)
    for _ in range(200):
        ratio, advantage = math.exp(draw.uniform(-4, 4)), draw.gauss(0, 1)
        loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        loss = min(loss, -dual * advantage) if advantage < 0 else loss
        assert loss == pytest.approx(-min(ratio, 4.0) * advantage, rel=1e-12)


def test_sums_and_means():
    agg = lambda **k: tuple(values(of({P + n: x for n, x in k.items()})).get(f"algorithm.aggregation{s}") for s in ("", "_constant", "_sequences"))  # noqa: E731
    assert agg() == ("token_mean", None, 2) and agg(loss_type="seq-mean-token-sum") == ("sequence_sum", None, None)
    assert agg(mini_batch=1) == ("sequence_mean", None, None) and agg(max_token_len_per_mini_batch=9000) == ("token_mean", None, None)
    balanced = {P + "balance_dp_token": True, PAR + "dp_shard_size": 4}
    assert values(of(balanced))["algorithm.aggregation_sequences"] == 8  # of all workers
    assert agg(loss_type="seq-mean-token-mean") == ("sequence_mean", None, None)
    assert agg(loss_type="seq-mean-token-mean", unbiased_loss_max_tokens=3000) == ("constant", 3000.0, None)
    assert agg(loss_type="token-sum", mini_batch=4) == ("constant", 0.25, None)  # sums of mini-batches, averaged


def test_evaluation_is_greedy_by_its_top_k_and_older_versions_sample():
    on = {"validation.enable": True}
    v = values(of(on))
    assert (v["eval.temperature"], v["eval.top_k"], v["eval.every_steps"], v["eval.before"], v["eval.after"]) == (0, 1, 20, False, True)
    four = of({**on, "validation.temperature": 0.6, "validation.n_generation": 4})
    assert values(four)["eval.samples"] == 1 and any(k == "validation.n_generation" for k, _, _ in four.lacking)
    assert values(of({**on, "validation.temperature": 0.6, "validation.n_generation": 4, "validation.top_k": -1}))["eval.samples"] == 4
    old = values(of(on, "0.1"))
    assert (old["eval.temperature"], old["eval.top_k"], old["eval.max_new_tokens"]) == (0.9, 10, 2048)


def test_a_ratio_of_decay_is_steps_where_they_are_known():
    v = values(of({T + "optm_decay_type": "sqrt", T + "optm_decay_ratio": 0.25, T + "max_num_steps": 80, T + "optm_min_lr_factor": 0.1}))
    assert [v[f"optimizer.{n}"] for n in ("schedule", "decay_shape", "decay_steps", "floor")] == ["wsd", "sqrt", 20, 0.1]
    assert values(of({T + "optm_decay_type": "cosine"}))["optimizer.schedule"] == "cosine"
    twice = values(of({P + "mu_iterations": 2, T + "optm_decay_type": "sqrt", T + "optm_decay_ratio": 0.25, T + "max_num_steps": 80}))
    assert (twice["optimizer.warmup_steps"], twice["optimizer.decay_steps"]) == (40, 40)  # its schedules move once per step
    assert any("decay_steps" in text for text in of({T + "optm_decay_type": "linear", T + "optm_decay_ratio": 0.25}).needs_you)
    assert values(of({T + "optm_decay_ratio": 0.25}))["optimizer.schedule"] == "constant"  # a ratio without a type


def test_a_table_without_a_type_is_what_its_keys_say():
    assert values(migrated("cosmos_rl", {P + "mini_batch": 2}))["run.recipe"] == "sft"
    assert values(migrated("cosmos_rl", {P + "mini_batch": 2, P + "kl_beta": 0.0}))["run.recipe"] == "rl"
    assert values(migrated("cosmos_rl", {T + "epoch": 2}))["run.recipe"] == "rl"
    assert migrated("cosmos_rl", {**SFT, P + "trainer_type": "pi_sft"}).outcome(False) == "refused"


def test_a_teacher():
    on = {D + "enable": True, D + "model_name_or_path": "a/teacher", T + "train_batch_per_replica": 128}
    v = values(of({**on, D + "kl_penalty_coef": 0.5, D + "kl_discount_factor": 0.9}))
    assert (v["run.recipe"], v["distill.loss"], v["distill.coef"], v["distill.gamma"]) == ("distill", "sampled", 0.5, 0.9)
    assert v["reward.functions"] == () and v["algorithm.dual_clip"] == 3.0 and "algorithm.advantage_std" not in v
    kinds = {beta: values(of({**on, D + "top_k": 8, D + "jsd_beta": beta})) for beta in (0.0, 0.3, 1)}
    assert [k["distill.loss"] for k in kinds.values()] == ["forward", "jsd", "reverse"]
    assert kinds[0.3]["distill.beta"] == 0.3 and not kinds[0.3]["distill.tail"] and "algorithm.dual_clip" not in kinds[0.3]


@pytest.mark.parametrize("settings", [{"policy.is_diffusers": True}, {"vla.num_envs": 8}, {"policy.diffusers.is_video": True},
                                      {T + "non_text": True}, {"trainer.max_iter": 5}, {R + "backend": "vla"}, {R + "n_generation": 1},
                                      {P + "bypass_reward": True}])
def test_what_would_be_another_job_is_refused_by_name(settings):
    m = of(settings)
    assert m.outcome(False) == "refused" and any(key == name and refuse for key, _, refuse in m.lacking for name in settings)


# -- files -------------------------------------------------------------------------------------------------------------

RL = """redis = "12800"

[train]
optm_lr = 2e-6
optm_warmup_steps = 20
train_batch_per_replica = 64
output_dir = "./outputs/small"

[rollout]
n_generation = 8
max_response_length = 512
parallelism.tp_size = 1

[policy]
model_name_or_path = "someone/small-1b"
model_max_length = 1024

[policy.parallelism]
tp_size = 1
dp_shard_size = 2

[train.train_policy]
type = "grpo"
dataset.name = "someone/sums"
dataset.split = ["train"]
prompt_column_name = "question"
response_column_name = "result"
reward_function = {gsm8k = 1.0, format = 0.5, single_choice = 0.1, direct_math = 0.1}
kl_beta = 0.01

[custom]
level = 3

[validation]
enable = true
dataset.name = "someone/sums"
dataset.split = "test"

[train.ckpt]
enable_checkpoint = true
"""
SUPERVISED = """[train]
train_batch_per_replica = 4
[policy]
model_name_or_path = "someone/small-1b"
[policy.lora]
target_modules = ["q_proj"]
r_pattern = {"layers.1.q_proj" = 4}
[train.train_policy]
type = "sft"
dataset.name = "someone/talks"
conversation_column_name = "talk"
"""
TEACHER = """[train]
train_batch_per_replica = 32
[policy]
model_name_or_path = "someone/small-1b"
[train.train_policy]
type = "grpo"
loss_type = "token-sum"
epsilon_low = -1.0
dataset.name = "someone/sums"
[distillation]
enable = true
model_name_or_path = "someone/large-7b"
TOP
"""


def test_files_become_configs_that_pass_the_checks(tmp_path, monkeypatch):
    texts = {"rl": RL, "sft": SUPERVISED, "sampled": TEACHER.replace("TOP", "kl_discount_factor = 0.5"),
             "dense": TEACHER.replace("TOP", "top_k = 4\njsd_beta = 0.3"), "colocated": 'mode = "colocated"\n' + RL}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        status, report, out = run(tmp_path / name, text, name="job.toml", system="cosmos_rl")
        assert status == 0 and len({k["key"] for k in report["keys"]}) == len(report["keys"])
        assert not [k["key"] for k in report["keys"] if k["kind"] == "unknown"], name
        monkeypatch.chdir(out)  # the rewards lie beside it
        check(load_config("job.py"))
        if name == "rl":
            assert report["commands"]["plan"].endswith("plan.target=h100:2")  # the policy's, vLLM has one more
            config, where = load_config("job.py"), {k["key"]: k["where"] for k in report["keys"]}
            assert config.data.prompts_per_step == 8 and config.user.level == 3 and config.reward.weights == (1.0, 0.5, 0.1, 0.1)
            assert where[P + "dataset.name"] == "job.toml:24" and where[R + "parallelism.tp_size"] == "job.toml:12"


def test_the_rewards_of_the_file():
    m = of({P + "reward_function": ["gsm8k", "single_choice", "direct_math", "overlong", "mine"], R + "max_response_length": 6000})
    v, rules = values(m), {}
    exec(m.files["job_reward.py"], rules)
    assert v["reward.functions"] == tuple(f"./job_reward.py:{n}" for n in ("gsm8k", "single_choice", "direct_math", "mine"))
    assert rules["gsm8k"]("", "so #### 1,234 and #### 5", "... #### 1234") == 1 and rules["gsm8k"]("", "1234", "#### 1234") == 0
    assert rules["single_choice"]("", "well <answer> B </answer>", "<answer>b</answer>") == 1
    assert rules["direct_math"]("", "Answer: $1,000$", "1000") == 1 and rules["direct_math"]("", "1000", "1000") == -1
    assert any("'mine'" in text for text in m.needs_you)
    # its buffer of 4096 ends at 6000, of which answers of 4095 reach the 2191st token
    assert (v["reward.overlong_buffer"], v["reward.overlong_penalty"], v["train.max_sequence_tokens"]) == (2191, 2191 / 4096, 4096)
    far = values(of({P + "reward_function": ["gsm8k", "overlong"], R + "max_response_length": 20480}))
    assert far["reward.overlong_buffer"] == 0  # it would begin at 16384


def test_its_first_version_has_another_mean_warm_up_and_dtype_of_weights():
    """v0.1.x: a token mean of each answer; (n + 1) / (warm-up + 1) of the rate in update n, however many a step has; no fp32 weights."""
    two = {T + "train_batch_per_replica": 128, P + "mu_iterations": 2, P + "mini_batch": 8, T + "optm_warmup_steps": 10}
    old, new = values(of(two, "0.1")), values(of(two))
    assert (old["optimizer.warmup_steps"], old["algorithm.aggregation"], old["train.param_dtype"]) == (11, "sequence_mean", "bf16")
    assert (new["optimizer.warmup_steps"], new["algorithm.aggregation"], new["train.param_dtype"]) == (20, "token_mean", "fp32")
    assert new["algorithm.aggregation_sequences"] == 8 and "algorithm.aggregation_sequences" not in old
    assert values(of({**two, T + "optm_warmup_steps": 0}, "0.1"))["optimizer.warmup_steps"] == 0
    assert values(of({T + "param_dtype": "float32"}, "0.1"))["train.param_dtype"] == "fp32"


@pytest.mark.full
def test_what_cannot_be_is_said_with_its_place(tmp_path, capsys):
    for text, said in (("[train]\noptm_lr = \"fast\"\n", "job.toml:2: train.optm_lr"), ("[train\n", "job.toml:1"),
                       ("[train.train_policy]\ntype = \"ppo\"\n", "job.toml:2: train.train_policy.type: 'ppo': expected grpo or sft")):
        assert run(tmp_path, text, name="job.toml", system="cosmos_rl")[0] == 2
        assert said in capsys.readouterr().err
    with pytest.raises(Unreadable, match="epsilon_low"):
        of({P + "epsilon_low": 0.0})
    assert run(tmp_path, "[train]\ntrian_batch_per_replica = 8\n", name="job.toml", system="cosmos_rl")[0] == 0
    assert "train.train_batch_per_replica" in (tmp_path / "out" / "report.md").read_text()


def test_towers_by_cosmos_names():
    """Of SFT, which samples nothing: the model of the documented example is taken, and its tower has our name."""
    from jaxrl.migrate.models import trained
    model = {"policy.model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}
    for given, option, want in (({"freeze_pattern": ["^visual", "embed"]}, "model.frozen", ("vision/.*", "embed")),
                                ({"freeze_pattern": [r"^visual\..*"]}, "model.frozen", ("vision/.*",)),
                                ({"trainable_map.visual.merger": True}, "model.trainable", ("vision/merger/.*",)),
                                ({"trainable_map.visual": False}, "model.frozen", ("vision/.*",))):
        m = trained(migrated("cosmos_rl", {**SFT, **model, **{f"policy.{k}": v for k, v in given.items()}}))
        assert values(m)[option] == want and not any("Qwen2.5-VL" in text for text in map(str, m.lacking))
    assert values(trained(of(model)))["rollout.engine"] == "vllm"
