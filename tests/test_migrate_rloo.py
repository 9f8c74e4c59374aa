"""jaxrl.migrate: TRL's RLOO. Its objective is the one that RLOOTrainer computes, by a formula of this file."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.algorithm_runs import decided
from helpers.algorithm_steps import config as tiny_config
from helpers.algorithm_steps import trajectories
from test_migrate import migrated, run, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.migrate.source import Unreadable
from jaxrl.resolve.checks.common import check
from jaxrl.rewards.items import shape
from jaxrl.rl.advantages import advantages
from jaxrl.training.pack import loss_weights

JOB = {"num_processes": 4, "num_generations": 4, "model_name_or_path": "a/b", "dataset_name": "a/rows", "reward_funcs": ["accuracy_reward"]}
SCRIPT = "accelerate launch --num_processes 4 rloo.py --model_name_or_path a/b --dataset_name a/rows --reward_funcs accuracy_reward"
YAML = """
model_name_or_path: a/b
dataset_name: a/rows
reward_funcs: [accuracy_reward]
num_processes: 4
normalize_advantages: false
"""
PROGRAM = """
from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward

args = RLOOConfig(output_dir="out", model_init_kwargs={"dtype": "bfloat16"}, num_generations=8, epsilon_high=0.3, steps_per_generation=2)
trainer = RLOOTrainer(model="a/b", args=args, reward_funcs=[accuracy_reward], train_dataset=load_dataset("a/rows", split="train"))
"""
PLAIN = {"algorithm.policy_loss": "pg", "algorithm.aggregation": "sequence_sum", "algorithm.advantage": "outcome",
         "algorithm.advantage_mean": "leave_one_out", "algorithm.advantage_std": "none", "algorithm.kl.coef": 0.05,
         "algorithm.kl.estimator": "k1", "algorithm.kl.placement": "reward", "algorithm.mismatch.correction": "none",
         "rollout.group_size": 2, "data.prompts_per_step": 16, "optimizer.lr": 1e-6}


@pytest.mark.parametrize(("name", "text", "want"), [
    ("job.sh", SCRIPT, PLAIN), ("job.yaml", YAML, PLAIN), ("job.sh", SCRIPT.replace("rloo.py", "-m trl.scripts.rloo"), PLAIN),
    ("job.py", PROGRAM, {"algorithm.aggregation": "sequence_mean", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.3,
                         "algorithm.num_minibatches": 2, "rollout.group_size": 8, "data.prompts_per_step": 8, "train.param_dtype": "bf16"}),
])
def test_a_file_of_rloo_becomes_a_config_that_passes_the_checks(name, text, want, tmp_path, monkeypatch):
    status, report, out = run(tmp_path, text, *(["--gpus=4"] if name == "job.py" else []), name=name, system="trl")
    assert (status, report["outcome"], report["job"]) == (0, "full", "rloo"), (report["lacks"], report["needs_you"])
    monkeypatch.chdir(out)
    config = load_config(report["config"])
    check(config)
    assert {option: _at(config, option) for option in want} == want


def _at(config, option):
    for part in option.split("."):
        config = config[part]
    return config


def written(tmp_path, settings):
    """The tiny job with what is migrated below `algorithm` and `reward`, its files beside it; and the prefix of its reward."""
    m = migrated("trl/rloo", {**JOB, **settings})
    assert m.outcome(False) != "refused", m.lacking
    for name, text in m.files.items():
        (tmp_path / name).write_text(text)
    ours = {o: v for o, v in values(m).items() if o.startswith("algorithm.") or o in ("reward.clip", "reward.bias")}
    ours = {o: str(tmp_path / v[2:]) if isinstance(v, str) and v.startswith("./") else v for o, v in ours.items()}
    return decided(tiny_config({**ours, "rollout.group_size": 4, "data.prompts_per_step": 4})), m


GROUPS, SAMPLES = 4, 4
CASES = [
    {}, {"beta": 0.0}, {"reward_clip_range": [-1, 1]}, {"reward_clip_range": [0.1, 0.9]}, {"normalize_advantages": True},
    {"num_iterations": 2}, {"num_iterations": 2, "epsilon_high": 0.5, "normalize_advantages": True, "reward_clip_range": [-2, 0.5]},
    {"steps_per_generation": 4, "mask_truncated_completions": True, "beta": 0.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient_are_those_of_rloo_trainers_formula(case, tmp_path):
    """With s = clip(reward) - beta sum_t (log pi_old - log pi_ref): A_i = s_i less the mean of its group's others, perhaps whitened over
    completions; loss = -mean_i min(r_i A_i, clip(r_i) A_i), r_i the product of its tokens' ratios. A completion without a score has A 0."""
    spec, m = written(tmp_path, case)
    several = "num_iterations" in case or "steps_per_generation" in case
    rng = np.random.default_rng(3)
    n, most = GROUPS * SAMPLES, 6
    lengths = rng.integers(1, most + 1, n)
    mask = np.arange(most) < lengths[:, None]
    old = np.where(mask, rng.normal(-1, 0.5, (n, most)), 0)
    ref, logp = (np.where(mask, old + rng.normal(0, scale, (n, most)), 0) for scale in (0.5, 0.2))
    logp = logp if several else old  # the first update of a batch
    rewards = rng.normal(0, 1, n)
    rewards[5] = np.nan
    cut = np.arange(n) % 3 == 0
    out = cut & case.get("mask_truncated_completions", False)

    # TRL's
    low, high = case.get("reward_clip_range", (-np.inf, np.inf))
    s = np.clip(rewards, low, high) - case.get("beta", 0.05) * (old - ref).sum(1)
    want_a = np.array([s[i] - np.nanmean([s[j] for j in range(n) if j // SAMPLES == i // SAMPLES and j != i]) for i in range(n)])
    if case.get("normalize_advantages"):
        want_a = (want_a - np.nanmean(want_a)) / (np.nanstd(want_a, ddof=1) + 1e-4)
    want_a = np.nan_to_num(want_a)
    ratio = np.exp((logp - old).sum(1))
    ends = 1 - 0.2, 1 + case.get("epsilon_high", 0.2)
    unclipped = ratio * want_a <= np.clip(ratio, *ends) * want_a
    assert not several or 0 < unclipped.sum() < n
    want = -np.where(unclipped & ~out, ratio * want_a, 0)[:, None] / n * mask  # d loss / d log pi, by token

    # ours
    score = shape(SimpleNamespace(total=rewards, parts={}), lengths, cut, spec.reward, 64)
    traj = trajectories(lengths, np.arange(n) // SAMPLES)
    kl = _flat(old - ref, mask, traj) if spec.algorithm.kl.coef else None
    tokens = advantages(spec.algorithm, traj, score, kl=kl).tokens
    weights = loss_weights(traj, np.arange(n), spec.algorithm.aggregation, dropped=out)["policy"]
    rows = lambda x: _rows(x, mask, traj)  # noqa: E731
    np.testing.assert_allclose(rows(tokens), np.where(mask, want_a[:, None], 0), atol=1e-9)
    loss = _loss(spec, mask)
    with jax.enable_x64(True):
        got = jax.grad(lambda x: jnp.sum(rows(weights) * loss(x, old, rows(tokens))))(jnp.asarray(logp))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert bool(m.different) and (several == ("job_loss.py" in m.files))


def _flat(x, mask, traj):
    out = np.zeros(len(traj.tokens))
    out[traj.loss_mask] = x[mask]
    return out


def _rows(x, mask, traj):
    out = np.zeros(mask.shape)
    out[mask] = x[traj.loss_mask]
    return out


def _loss(spec, mask):
    """The policy loss of a spec, of log-probs, old ones and advantages of completions, two of which share a row."""
    from jaxrl.algorithms import Tokens, policy_loss
    from jaxrl.config.user_code import imported
    name = spec.algorithm.policy_loss
    function = policy_loss(name) if name == "pg" else imported(name)
    two = lambda x: jnp.asarray(x).reshape(len(mask) // 2, -1)  # noqa: E731
    ids = two(np.where(mask, 1 + np.arange(len(mask))[:, None] % 2, 0))
    return lambda logp, old, advantage: function(Tokens(two(logp), two(old), None, None, two(advantage), two(mask), ids, None, {}),
                                                 spec.algorithm)[0].reshape(mask.shape)


def test_rewards_that_are_clipped_around_another_middle_are_moved_and_said_so():
    m = migrated("trl/rloo", {**JOB, "reward_clip_range": [0, 4]})
    assert (values(m)["reward.clip"], values(m)["reward.bias"]) == (2, -2)
    assert any("moved by -2" in text and "lower by 2" in text for text in m.different)
    even = migrated("trl/rloo", {**JOB, "reward_clip_range": [-3, 3]})
    assert values(even)["reward.clip"] == 3 and "reward.bias" not in values(even)
    for wrong in ([1], [2, 1], "much", [0, float("inf")]):
        with pytest.raises(Unreadable, match="reward_clip_range"):
            migrated("trl/rloo", {**JOB, "reward_clip_range": wrong})


@pytest.mark.parametrize(("settings", "said"), [
    ({"rloo_k": 4}, "rloo_k"), ({"kl_coef": 0.1}, "kl_coef"), ({"token_level_kl": True}, "token_level_kl"),
    ({"steps_per_generation": 2, "generation_batch_size": 64}, "steps_per_generation"),
])
def test_the_trainer_before_0_22_and_what_trl_refuses_are_refused(settings, said):
    m = migrated("trl/rloo", {**JOB, **settings})
    assert m.outcome(False) == "refused" and said in [key for key, *_ in m.lacking]


def test_versions_of_another_trainer_are_not_read(tmp_path, capsys):
    (tmp_path / "job.sh").write_text(SCRIPT)
    assert command.main(["trl", str(tmp_path / "job.sh"), "--from-version=0.19", f"--out={tmp_path / 'out'}"]) == 2
    assert "rloo is read from 0.22 on" in capsys.readouterr().err
    bounds = {v: values(migrated("trl/rloo", JOB, v))["data.max_prompt_tokens"] for v in ("0.22", "0.26", "0.27")}
    assert bounds == {"0.22": 512, "0.26": 512, "0.27": 2048}
    assert [values(migrated("trl/rloo", JOB, v))["rollout.max_new_tokens"] for v in ("1.9", "1.10")] == [256, 512]
    assert any("counts 0" in text for text in migrated("trl/rloo", JOB, "1.0").different)


def test_a_reward_model_among_the_functions_has_its_weight():
    model = {"reward_funcs": ["trl-lib/Qwen2.5-RM", "accuracy_reward"], "reward_weights": [0.5, 2.0]}
    v = values(migrated("trl/rloo", {**JOB, **model}))
    assert (v["reward.model.path"], v["reward.model.weight"]) == ("trl-lib/Qwen2.5-RM", 0.5)
    assert (v["reward.functions"], v["reward.weights"]) == (("math",), (2.0,))
    first = {"reward_model_name_or_path": "a/rm", "reward_weights": [3.0, 1.0]}  # the script puts it before the functions
    v = values(migrated("trl/rloo", {**JOB, **first}))
    assert (v["reward.model.weight"], v["reward.functions"], v["reward.weights"]) == (3.0, ("math",), (1.0,))
    assert migrated("trl/rloo", {**JOB, "reward_funcs": ["a/rm", "b/rm"]}).outcome(False) == "refused"


def test_a_file_that_may_be_of_either_trainer_is_read_as_grpos_and_says_so(tmp_path):
    plain = YAML.replace("normalize_advantages: false\n", "num_generations: 4\n")
    _, report, _ = run(tmp_path, plain, name="job.yaml", system="trl")
    assert report["job"] == "" and any("trl/rloo" in text for text in report["differs"])
    _, report, _ = run(tmp_path, plain + "loss_type: grpo\n", name="job.yaml", system="trl")
    assert not any("trl/rloo" in text for text in report["differs"])
