"""Corners where options of the algorithms meet each other, resumption and the end of the data."""


import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.algorithm_runs import job, watched, with_options
from helpers.algorithm_steps import batch_of, config, jax_as_it_was, of_tokens, row, thirds  # noqa: F401
from helpers.training_helpers import policy_objective

from jaxrl import training
from jaxrl.checkpoint.resume import refusal_reason
from jaxrl.errors import ConfigError
from jaxrl.rl.roles import Roles
from jaxrl.roles.reference import Reference
from jaxrl.roles.role import Policy
from jaxrl.run import setup
from jaxrl.training.update import make_apply


@pytest.fixture(scope="module")
def open_job():
    return setup.open_job(config())


@pytest.fixture(scope="module")
def algorithm(open_job):
    """algorithm({option: value}) -> Roles of a checked config, around one tiny model."""
    return lambda changes=None: Roles(with_options(open_job, config(changes)), 5)

OWN = """
import jax.numpy as jnp
import zlib

def loss(tokens, cfg):
    kept = tokens.mask.astype(tokens.logp.dtype)
    return -jnp.where(tokens.mask, tokens.advantage * tokens.logp, 0), {"kept": kept}

def length(prompt, completion, **columns):
    return float(len(completion))

def half(prompt, completion, **columns):
    return float(len(completion) % 2) if zlib.crc32(str(prompt).encode()) % 2 else 0.0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_the_cursor_of_a_refill_is_an_int_that_a_checkpoint_takes():
    batch, *_ = batch_of({"algorithm.dynamic_sampling": "refill"}, thirds)
    assert type(batch.cursor) is int


@pytest.mark.slow
def test_a_refilled_step_can_be_saved(own, tmp_path):
    watched(job(tmp_path / "run", {"algorithm.dynamic_sampling": "refill", "reward.functions": (f"{own}:half",)}))


@pytest.mark.slow
def test_a_run_ends_when_refill_has_used_the_data_up(own, tmp_path):
    """data.epochs=1: steps take more rows than prompts_per_step, so that the rows end before total_steps."""
    summary, steps, _ = watched(job(tmp_path / "run", {
        "algorithm.dynamic_sampling": "refill", "reward.functions": (f"{own}:half",), "data.epochs": 1, "data.max_rows": 16,
        "train.steps": 10, "checkpoint.every_steps": 0, "checkpoint.at_end": False}))
    assert summary["finished"] and steps[-1].after.cursor > 12


@pytest.mark.slow
def test_a_positive_example_is_known_where_accuracy_is_another_rewards(own, tmp_path):
    watched(job(tmp_path / "run", {
        "algorithm.positive_nll_coef": 0.1, "eval.rewards": (f"{own}:length",), "eval.accuracy_from": "length", "train.steps": 1}))


@pytest.mark.slow
def test_a_kl_can_be_switched_on_when_a_run_goes_on(tmp_path):
    """algorithm.* is FUTURE in resume.py; the checkpoint has no part `reference`."""
    watched(job(tmp_path / "run", {"train.steps": 1}))
    watched(job(tmp_path / "run", {"algorithm.kl.coef": 0.1}))


@pytest.mark.slow
def test_an_own_loss_without_a_ratio_and_early_stop(own, tmp_path):
    """Refused at the start, or stopped by what there is; not a KeyError in the first update."""
    changes = {"algorithm.policy_loss": f"{own}:loss", "algorithm.ppo_epochs": 2, "algorithm.early_stop_ratio": 2.0}
    try:
        watched(job(tmp_path / "run", changes))
    except ConfigError:
        pass


@pytest.mark.full
def test_a_critic_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="critic.path='/tmp/nowhere'"):
        watched(job(tmp_path / "run", {"algorithm.preset": "ppo", "critic.path": "/tmp/nowhere"}))


@pytest.mark.parametrize("name", ["critic.path", "critic.shared", "critic.lr", "reference.reset_steps"])
def test_every_option_is_classified_for_resumption(name):
    refusal_reason(name)  # KeyError: taken as "not an option of this jaxrl; ignored"


def test_a_non_finite_update_leaves_the_entropy_coefficient_alone(algorithm):
    """One NaN entropy makes the adaptive coefficient NaN, and with it every later loss."""
    cfg = algorithm({"algorithm.entropy_target": 3.0}).loss
    state = training.init_state({"w": jnp.ones(3)}, {}, optax.sgd(1.0))
    nan = jnp.float32(np.nan)
    metrics = {"loss": nan, "policy/entropy": nan, "policy/ratio_mean": nan, "policy/approx_kl": nan}
    state, _ = make_apply(optax.sgd(1.0), lambda i: 1.0, cfg)(state, {"w": jnp.full(3, nan)}, metrics)
    assert np.isfinite(float(state.stats["entropy_coef"]))


def test_a_kl_in_the_reward_is_not_dropped_where_the_advantage_is_the_users(own, monkeypatch):
    """advantages() subtracts it for outcome, returns and gae only: an own function's scores are without it, unsaid."""
    own.write_text("def plain(inputs):\n    return inputs.scores\n")
    kl = {"algorithm.kl.coef": 0.1, "algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1"}
    try:
        found, _ = of_tokens({**kl, "algorithm.advantage": f"{own}:plain"}, [1.0], [2], kl=[2.0, 3.0])
    except ConfigError:  # refused: fine as well
        return
    np.testing.assert_allclose(found, 1 - 0.1 * 5)


def test_normalised_rewards_and_a_greedy_baseline_are_in_one_unit():
    """Scores are normalised, the greedy answers' are not: their difference means nothing. Refuse it, or normalise both."""
    with pytest.raises(ConfigError):
        config({"algorithm.preset": "remax", "reward.norm_std": "batch"})


@pytest.mark.slow
def test_reward_mean_is_of_the_shaped_rewards_not_of_the_normalised(tmp_path):
    """telemetry/names.py: reward/mean is the mean shaped reward; with norm_mean=batch it is always 0."""
    _, steps, _ = watched(job(tmp_path / "run", {"reward.norm_mean": "batch", "train.steps": 1}))
    metrics = steps[0].metrics
    assert metrics["reward/mean"] == pytest.approx(metrics["reward/digits"])


def test_the_learning_rate_told_after_a_reset_is_the_one_that_acts(open_job):
    """reset_optimizer starts optax's own count anew (warm-up again), but optim/lr is schedule(state.step)."""
    c = config({"algorithm.kl.coef": 0.1, "reference.reset_steps": 1, "reference.reset_optimizer": True, "optimizer.name": "sgd",
                "optimizer.lr": 1.0, "optimizer.warmup_steps": 4, "optimizer.weight_decay": 0.0, "optimizer.max_grad_norm": 0.0})
    optimizer, schedule = training.make_optimizer(c.optimizer, 100, {"w/kernel": ("embed", "mlp")})
    loss = policy_objective(max_grad_norm=0.0)
    apply = make_apply(optimizer, schedule, loss)
    state = training.init_state({"w/kernel": jnp.zeros((1, 1))}, {}, optimizer)
    state = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), state)
    metrics = {"loss": jnp.float32(0)}
    for _ in range(4):
        state, _ = apply(state, {"w/kernel": jnp.ones((1, 1))}, metrics)
    policy = object.__new__(Policy)
    opened = with_options(open_job, c)
    policy.state, policy.optimizer, policy.job = state, optimizer, opened
    Reference(opened).after_step(policy, 1, 0.0)
    before = float(policy.state.trainable["w/kernel"][0, 0])
    state, told = apply(policy.state, {"w/kernel": jnp.ones((1, 1))}, metrics)
    assert before - float(state.trainable["w/kernel"][0, 0]) == pytest.approx(float(told["optim/lr"]))


@pytest.mark.slow
def test_resets_of_the_reference_can_be_switched_on_when_a_run_goes_on(tmp_path):
    """reference.* is FUTURE, too."""
    watched(job(tmp_path / "run", {"train.steps": 1, "algorithm.kl.coef": 0.1}))
    watched(job(tmp_path / "run", {"algorithm.kl.coef": 0.1, "reference.reset_steps": 1}))
