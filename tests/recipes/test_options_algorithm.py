"""The options algorithm.*, critic.*, reference.reset_* and reward.norm_* act: numbers that follow from each.

Most is shown on the parts of a step (advantages, gather, one update). Four short runs show what only a run can:
`ppo` (a critic of its own, a reference that is reset), `resumed` (its last step again, from a checkpoint), `shared` (one
trunk, early stop, adaptive entropy) and `own` (a user's loss, advantage and filter).
"""

import dataclasses
import itertools
import json
import logging
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import tiny_job
from helpers.algorithm_runs import decided, job, same, watched, with_options
from helpers.algorithm_steps import batch_of, config, jax_as_it_was, of_tokens, row, thirds, trajectories  # noqa: F401
from helpers.tiers import first_cases
from helpers.training_helpers import batch_of_groups

from jaxrl import training
from jaxrl.algorithms import PRESETS, Tokens
from jaxrl.config.schema import options
from jaxrl.errors import ConfigError
from jaxrl.models.io import hf
from jaxrl.models.io.tensorfile import list_folder
from jaxrl.models.value import ValueModel
from jaxrl.resolve.spec import resolve
from jaxrl.rl import step as rl_step
from jaxrl.rl.advantages import advantages, spread_over_tokens
from jaxrl.rl.roles import Roles, clear_early_stop
from jaxrl.roles import parameters
from jaxrl.roles.critic import Critic
from jaxrl.roles.reference import Reference
from jaxrl.roles.role import Policy
from jaxrl.run import setup
from jaxrl.training.objective import find_policy_loss
from jaxrl.training.optimizer import critics_optimizer
from jaxrl.training.update import loss_and_metrics, make_apply
from jaxrl.types import Trajectories


@pytest.fixture(scope="module")
def open_job():
    return setup.open_job(config())


@pytest.fixture(scope="module")
def algorithm(open_job):
    """algorithm({option: value}) -> Roles of a checked config, around one tiny model."""
    return lambda changes=None: Roles(with_options(open_job, config(changes)), 5)


# -- presets -----------------------------------------------------------------------------------------------------------


def test_every_preset_has_a_name_and_passes_the_checks():
    for name in PRESETS:
        states = {"env.function": "guess", "rollout.prompt_lengths": ()} if name == "gigpo" else {}
        assert row({"algorithm.preset": name} | states) == dict(PRESETS[name])


def test_pairs_of_online_dpo_are_the_reference_s_log_ratios():
    """beta is kl.coef, the log-ratios are the KL's sums over the sampled tokens, of all turns."""
    c = resolve(config({"algorithm.preset": "online_dpo", "algorithm.kl.coef": 0.5}), engine="jax").algorithm
    traj = Trajectories(
        tokens=np.arange(8, dtype=np.int32), offsets=np.array([0, 4, 8]), loss_mask=np.array([0, 1, 0, 1, 0, 1, 1, 1], bool),
        logprobs=np.zeros(8, np.float32), versions=np.zeros(8, np.int32), prompt_lengths=np.ones(2, np.int32), group=np.zeros(2, int),
        sample=np.arange(2, dtype=np.int32), seed=np.zeros(2, np.uint32), finish=np.zeros(2, np.int8))
    kl = np.array([9.0, 0.2, 9.0, 0.3, 9.0, -0.1, -0.4, 0.3])
    found = advantages(c, traj, np.array([0.0, 1.0]), kl=kl)
    size = 0.5 * 2 / (1 + np.exp(0.5 * (-0.2 - 0.5)))
    np.testing.assert_allclose(found.tokens, [0, -size, 0, -size, 0, size, size, size], rtol=1e-14)
    assert found.metrics["advantage/pairs_fraction"] == 1 and found.metrics["advantage/pairs_margin"] == pytest.approx(-0.35)
    assert not found.zero_signal.any() and advantages(c, traj, np.ones(2), kl=kl).zero_signal.all()


@pytest.mark.parametrize("changes,message", [
    ({"algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k2"}, "algorithm.kl.placement=loss with algorithm.advantage=dpo"),
    ({"algorithm.advantage_std": "group"}, "algorithm.advantage_std=group with algorithm.advantage=dpo: it would be another loss than DPO's"),
    ({"algorithm.advantage_high": 1.0}, "algorithm.advantage_high=1.0 with algorithm.advantage=dpo: it would be another loss than DPO's"),
    ({"algorithm.kl.coef": 0.0}, "algorithm.kl.coef=0.0 with algorithm.advantage=dpo: it is DPO's beta; set 0.1"),
    ({"rollout.group_size": 1}, "rollout.group_size=1 with algorithm.advantage=dpo: a pair needs two answers"),
])
def test_online_dpo_refuses_what_would_be_another_loss(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config({"algorithm.preset": "online_dpo"} | changes)


# -- policy losses -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_losses(algorithm):
    """token_losses({option: value}, ratios, advantages) -> (losses, d loss / d logp) of one sequence, old log-prob -1."""

    def compute(changes, ratios, found):
        cfg = algorithm(changes).loss
        old = jnp.full((1, len(ratios)), -1.0)
        logp = old + jnp.log(jnp.asarray([ratios]))
        mask, ids = jnp.ones_like(logp, bool), jnp.ones(logp.shape, jnp.int32)

        def loss(x):
            t = Tokens(x, old, old, None, jnp.asarray([found], jnp.float32), mask, ids, None, {})
            return find_policy_loss(cfg.options.policy_loss)(t, cfg.options)[0]

        return np.asarray(loss(logp))[0], np.asarray(jax.grad(lambda x: loss(x).sum())(logp))[0]

    return compute


@pytest.mark.full
def test_policy_loss_chooses_the_formula(token_losses):
    logp = -1 + np.log(1.5)
    names = ("clip", "cispo", "sapo", "dppo", "pg")
    one = {name: token_losses({"algorithm.policy_loss": name}, [1.5], [1.0]) for name in names}
    assert one["clip"][0] == pytest.approx(-1.2) and one["clip"][1] == 0
    assert one["cispo"][0] == pytest.approx(-1.5 * logp) and one["cispo"][1] == pytest.approx(-1.5)
    assert one["sapo"][0] == pytest.approx(-4 / (1 + np.exp(-0.5)))
    assert one["dppo"][0] == pytest.approx(-1.5 * logp)  # the probability rose by 0.18 < dppo_high
    assert one["pg"][0] == pytest.approx(-logp) and one["pg"][1] == pytest.approx(-1)


@pytest.mark.full
def test_ratio_is_of_tokens_sequences_or_their_clipped_mean(token_losses):
    """Ratios 1.5 and 0.6: their geometric mean is 0.9487."""
    wide, ratios, plus = {"algorithm.clip_low": 0.9, "algorithm.clip_high": 9.0}, [1.5, 0.6], [1.0, 1.0]
    value = lambda ratio: token_losses({**wide, "algorithm.ratio": ratio}, ratios, plus)  # noqa: E731
    mean = np.sqrt(0.9)
    np.testing.assert_allclose(value("token")[0], [-1.5, -0.6], rtol=1e-6)
    for level in ("sequence", "sequence_token"):
        np.testing.assert_allclose(value(level)[0], -mean, rtol=1e-6)
        np.testing.assert_allclose(value(level)[1], -mean, rtol=1e-6)  # a constant advantage: the same gradient
    geometric = {"algorithm.ratio": "geometric", "algorithm.clip_low": 0.4, "algorithm.clip_high": 0.1}
    np.testing.assert_allclose(token_losses(geometric, ratios, plus)[0], -np.exp((0.1 + np.log(0.6)) / 2), rtol=1e-6)


@pytest.mark.full
def test_dual_clip_and_delta_bound_the_loss_of_a_negative_advantage(token_losses):
    def at_ratio_five(changes):
        loss, gradient = token_losses(changes, [5.0], [-1.0])
        return pytest.approx(loss[0]), gradient[0] == 0

    assert at_ratio_five({}) == (5.0, False)
    assert at_ratio_five({"algorithm.dual_clip": 3.0}) == (3.0, True)
    assert at_ratio_five({"algorithm.delta": 1.5}) == (1.5, True)


@pytest.mark.full
def test_cispo_bounds_the_weight_on_both_sides(token_losses):
    ratios, ones = [4.0, 1.0, 0.25], [1.0] * 3
    plain = token_losses({"algorithm.preset": "cispo"}, ratios, ones)[1]
    np.testing.assert_allclose(plain, [-4, -1, -0.25], rtol=1e-6)
    bounds = {"algorithm.preset": "cispo", "algorithm.cispo_max_ratio": 2.0, "algorithm.cispo_min_ratio": 0.5}
    np.testing.assert_allclose(token_losses(bounds, ratios, ones)[1], [-2, -1, -0.5], rtol=1e-6)


@pytest.mark.full
def test_sapo_has_a_temperature_for_each_sign(token_losses):
    changes = {"algorithm.preset": "sapo", "algorithm.sapo_tau_pos": 2.0, "algorithm.sapo_tau_neg": 3.0}
    loss, _ = token_losses(changes, [1.5, 1.5], [1.0, -1.0])
    np.testing.assert_allclose(loss, [-(4 / 2) / (1 + np.exp(-1.0)), (4 / 3) / (1 + np.exp(-1.5))], rtol=1e-6)


@pytest.mark.full
def test_dppo_leaves_out_tokens_whose_probability_moved_too_far(token_losses):
    """Probabilities go from 0.368 to 0.331, or to 0.404."""
    def gradient(changes):
        return (token_losses({"algorithm.preset": "dppo", **changes}, [0.9, 1.1], [-1.0, 1.0])[1] != 0).tolist()

    assert gradient({}) == [True, True]
    assert gradient({"algorithm.dppo_low": 0.03}) == [False, True]
    assert gradient({"algorithm.dppo_high": 0.03}) == [True, False]


# -- advantages --------------------------------------------------------------------------------------------------------








def test_advantage_chooses_the_estimator_and_gamma_discounts():
    outcome, _ = of_tokens({"algorithm.advantage": "outcome"}, [2.0, 3.0], [3, 1])
    np.testing.assert_allclose(outcome, [2, 2, 2, 3])
    returns, _ = of_tokens({"algorithm.advantage": "returns", "algorithm.gamma": 0.5}, [2.0, 3.0], [3, 1])
    np.testing.assert_allclose(returns, [0.5, 1, 2, 3])


def test_lam_and_the_critics_own_lam():
    """Deltas are 0.08, 0.07, 0.7. With critic_lam 1 the critic learns discounted returns, whatever lam is."""
    values = [0.1, 0.2, 0.3]
    gae = {"algorithm.advantage": "gae", "algorithm.gamma": 0.9, "algorithm.lam": 0.5}
    found, targets = of_tokens(gae, [1.0], [3], values=values)
    np.testing.assert_allclose(found, [0.08 + 0.45 * 0.385, 0.07 + 0.45 * 0.7, 0.7])
    np.testing.assert_allclose(targets, found + values)
    same_, targets = of_tokens({**gae, "algorithm.critic_lam": 1.0}, [1.0], [3], values=values)
    np.testing.assert_allclose(same_, found)
    np.testing.assert_allclose(targets, [0.81, 0.9, 1.0])


def test_lam_alpha_makes_lambda_grow_with_the_answer():
    """lambda = 1 - 1 / (1 * 4) = 0.75; the critic's stays lam."""
    changes = {"algorithm.advantage": "gae", "algorithm.lam_alpha": 1.0, "algorithm.lam": 0.0}
    found, targets = of_tokens(changes, [1.0], [4], values=[0.0] * 4)
    np.testing.assert_allclose(found, 0.75 ** np.arange(3, -1, -1))
    np.testing.assert_allclose(targets, [0, 0, 0, 1])


def test_whiten_and_the_bounds_of_advantages():
    whitened, _ = of_tokens({"algorithm.whiten": True}, [4.0, 1.0, np.nan], [1, 3, 5])
    assert whitened[:4].mean() == pytest.approx(0) and whitened[:4].std(ddof=1) == pytest.approx(1) and not whitened[4:].any()
    centred, _ = of_tokens({"algorithm.whiten": True, "algorithm.whiten_std": "none"}, [4.0, 1.0], [1, 3])
    np.testing.assert_allclose(centred, np.array([4.0, 1.0, 1.0, 1.0]) - 1.75)
    scaled, _ = of_tokens({"algorithm.whiten": True, "algorithm.whiten_mean": "none"}, [4.0, 1.0], [1, 3])
    np.testing.assert_allclose(scaled, np.array([4.0, 1.0, 1.0, 1.0]) / np.sqrt(19 / 3), rtol=1e-6)
    bounds = {"algorithm.advantage_low": -1.0, "algorithm.advantage_high": 2.5}
    np.testing.assert_allclose(of_tokens(bounds, [-3.0, 0.5, 7.0], [1, 1, 1])[0], [-1, 0.5, 2.5])


def test_kl_placement_in_the_reward_costs_coef_times_kl(algorithm):
    """By token where there are returns, by sequence where there is one number per answer; then the loss has no KL term."""
    old, ref = np.array([-1.0, -2.0, -0.5, -3.0]), np.array([-1.5, -1.0, -0.75, -4.0])
    kl = {"algorithm.kl.coef": 0.1, "algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1"}
    a = algorithm(kl)
    np.testing.assert_allclose(a.kl({"old": old, "ref": ref}), old - ref)
    assert (a.loss.kl_coef, a.old_source) == (0.0, "recompute")
    in_loss = algorithm({"algorithm.kl.coef": 0.1})
    assert in_loss.kl({}) is None and in_loss.loss.kl_coef == 0.1

    def change(changes):
        given = {"kl": np.insert(old - ref, 3, 9.0)}  # the second prompt's token lies between
        return of_tokens({**kl, **changes}, [1.0, 2.0], [3, 1], **given)[0] - of_tokens(changes, [1.0, 2.0], [3, 1])[0]

    np.testing.assert_allclose(change({"algorithm.advantage": "returns", "algorithm.gamma": 0.0}), -0.1 * (old - ref))
    to_go = np.append(np.cumsum((old - ref)[2::-1])[::-1], 1.0)
    np.testing.assert_allclose(change({"algorithm.advantage": "returns"}), -0.1 * to_go)
    np.testing.assert_allclose(change({"algorithm.advantage": "outcome"}), -0.1 * np.array([-0.25, -0.25, -0.25, 1.0]))


def test_what_an_advantage_function_may_return():
    traj = trajectories([2, 1], [0, 0])
    np.testing.assert_array_equal(spread_over_tokens("mine:f", [3.0, 4.0], traj), [3, 3, 3, 4, 4])
    np.testing.assert_array_equal(spread_over_tokens("mine:f", range(5), traj), range(5))
    with pytest.raises(ConfigError, match=r"algorithm.advantage='mine:f' returned shape \(3,\): expected one number per"):
        spread_over_tokens("mine:f", [1.0, 2.0, 3.0], traj)
    with pytest.raises(ConfigError, match="not finite"):
        spread_over_tokens("mine:f", [1.0, np.inf], traj)
    for wrong, kind in (({"advantage": [1.0, 2.0]}, "a dict"), ([[1.0], [1.0, 2.0]], "a list"), ("high", "a str")):
        with pytest.raises(ConfigError, match=f"algorithm.advantage='mine:f' returned {kind} that is no array of numbers: "):
            spread_over_tokens("mine:f", wrong, traj)


# -- a step's batch ----------------------------------------------------------------------------------------------------












def test_refill_replaces_groups_without_signal():
    """0 and 3 of the first four carry none: two more prompts are asked, and the first answers are not scored again."""
    off, *_ = batch_of({}, thirds)
    assert (off.traj.group.tolist(), off.cursor, off.metrics) == ([0, 0, 1, 1, 2, 2, 3, 3], 4, {})
    batch, engine, rewards = batch_of({"algorithm.dynamic_sampling": "refill"}, thirds)
    assert batch.traj.group.tolist() == [1, 1, 2, 2, 4, 4, 5, 5] and batch.cursor == 6 and not batch.dropped.any()
    assert batch.metrics["rollout/rounds"] == 2 and batch.metrics["rollout/discarded_fraction"] == pytest.approx(2 / 6)
    assert batch.metrics["rollout/masked_fraction"] == 0 and batch.asked == 8
    assert len(engine.asked) == rewards.called == 12 and len({r.seed for r in engine.asked}) == 12
    np.testing.assert_array_equal(batch.scores, [5, 6] * 4)


def test_refill_goes_on_until_the_cap(caplog):
    """No prompt carries signal: after so many rounds the step is filled with groups that teach nothing."""
    changes = {"algorithm.dynamic_sampling": "refill", "algorithm.dynamic_sampling_rounds": 3}
    with caplog.at_level(logging.WARNING, "jaxrl"):
        batch, engine, _ = batch_of(changes, lambda g, k: [5, 1])
    assert (batch.cursor, len(engine.asked)) == (12, 24)
    assert batch.traj.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and batch.dropped.all()
    assert batch.metrics == {
        "rollout/rounds": 3, "rollout/discarded_fraction": pytest.approx(2 / 3), "rollout/masked_fraction": 1}
    assert "0 of 4 groups have signal after 3 rounds (algorithm.dynamic_sampling_rounds=3)" in caplog.text


def test_refill_where_the_data_end():
    """Six rows, three with signal: 4 and 5 are asked, then no more; a group without signal completes the step."""
    batch, *_ = batch_of({"algorithm.dynamic_sampling": "refill"}, lambda g, k: [5 + k * (g in (1, 2, 4)), 1], rows=6)
    assert batch.traj.group.tolist() == [0, 0, 1, 1, 2, 2, 4, 4] and batch.cursor == 6
    assert batch.dropped.tolist() == [True, True] + [False] * 6
    assert batch.metrics["rollout/rounds"] == 2 and batch.metrics["rollout/discarded_fraction"] == pytest.approx(2 / 6)


def test_masked_groups_have_no_weight_and_keep_the_denominators():
    batch, *_ = batch_of({"algorithm.dynamic_sampling": "mask"}, thirds)
    assert batch.traj.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and batch.cursor == 4
    assert batch.dropped.tolist() == [True, True, False, False, False, False, True, True]
    assert batch.metrics == {"rollout/masked_fraction": 0.5}
    weights = packed_weights({}, batch)
    np.testing.assert_allclose(weights["policy"], [0] * 4 + [1 / 16] * 8 + [0] * 4)


def test_keep_group_asks_one_reward():
    """The sum differs within every group, the reward `b` in group 2 only."""
    both = {"a": lambda tokens: tokens[0], "b": lambda tokens: tokens[1]}
    changes = {"algorithm.dynamic_sampling": "mask", "reward.functions": ("./mine.py:a", "./mine.py:b")}
    answer = lambda g, k: [k, k * (g == 2)]  # noqa: E731
    assert not batch_of(changes, answer, **both)[0].dropped.any()
    batch, *_ = batch_of({**changes, "algorithm.keep_group": "b"}, answer, **both)
    assert sorted(set(batch.traj.group[~batch.dropped])) == [2]


def test_keep_group_is_a_function_of_the_users(tmp_path):
    """It sees a group's scores, rewards, answers, lengths and truncation."""
    (tmp_path / "mine.py").write_text(
        "def long(group):\n"
        "    alike = list(group['scores']) == list(group['rewards']['digits']) and len(group['completions']) == 2\n"
        "    assert alike and list(group['truncated']) == [n == 10 for n in group['lengths']]\n"
        "    return group['truncated'].any()\n")
    changes = {"algorithm.dynamic_sampling": "mask", "algorithm.keep_group": f"{tmp_path}/mine.py:long"}
    batch, *_ = batch_of(changes, lambda g, k: [5] * (10 if (g, k) == (3, 1) else 2))
    assert sorted(set(batch.traj.group[~batch.dropped])) == [3]


def test_the_greedy_baseline_is_the_score_of_the_greedy_answer():
    """ReMax: one more answer per prompt, at temperature 0; it is no part of the batch."""
    batch, engine, _ = batch_of({"algorithm.preset": "remax"}, lambda g, k: [3 * g if k == "greedy" else 10 * g + k])
    greedy = [r for r in engine.asked if r.sampling.temperature == 0]
    assert [r.group for r in greedy] == [0, 1, 2, 3] and batch.traj.num_sequences == 8
    np.testing.assert_array_equal(batch.baseline, np.repeat([0, 3, 6, 9], 2))
    options = decided(config({"algorithm.preset": "remax", "algorithm.advantage_mean": "greedy"})).algorithm
    found = advantages(options, batch.traj, batch.scores, baseline=batch.baseline).tokens[batch.traj.loss_mask]
    np.testing.assert_array_equal(found, [0, 1, 7, 8, 14, 15, 21, 22])
    assert batch_of({}, lambda g, k: [g])[0].baseline is None


def test_rewards_are_normalised_last():
    """After scale and the overlong penalty, by group or over the batch."""
    answer = lambda g, k: [g + 2 * k] * (10 if k else 1)  # noqa: E731
    base = {"reward.scale": 2.0, "reward.overlong_buffer": 1, "reward.overlong_penalty": 1.0}
    raw = np.array([2 * (g + 2 * k) - k for g in range(4) for k in range(2)], float)
    np.testing.assert_array_equal(batch_of(base, answer)[0].scores, raw)
    mean = batch_of({**base, "reward.norm_mean": "batch"}, answer)[0].scores
    np.testing.assert_allclose(mean, raw - raw.mean())
    group = batch_of({**base, "reward.norm_mean": "group", "reward.norm_std": "group"}, answer)[0].scores
    np.testing.assert_allclose(group, np.tile([-(0.5**0.5), 0.5**0.5], 4), rtol=1e-5)
    std = batch_of({**base, "reward.norm_std": "batch"}, answer)[0].scores
    np.testing.assert_allclose(std, raw / raw.std(ddof=1), rtol=1e-5)


def test_the_overlong_buffer_as_a_fraction_of_the_longest_answer():
    """Half of 10 tokens: an answer of 8 is 3 into the buffer of 5. reward.overlong_buffer wins."""
    fraction, answer = {"algorithm.overlong_buffer_fraction": 0.5}, lambda g, k: [1] * 8  # noqa: E731
    np.testing.assert_allclose(batch_of(fraction, answer)[0].scores, 1 - 3 / 5)
    np.testing.assert_allclose(batch_of({**fraction, "reward.overlong_buffer": 4}, answer)[0].scores, 1 - 2 / 4)


# -- which tokens the policy learns from -------------------------------------------------------------------------------


def steps_of(c, update, batch, layout, columns):
    """The policy's optimizer steps on a batch, where only the update matters: update(batches) -> metrics."""
    policy = SimpleNamespace(put=lambda packed: packed, update=update, shown=lambda traj: traj)
    prepared = rl_step.Prepared(rl_step.StepLayout(layout, layout, 0), columns, None, None, None)
    return rl_step.update_policy(decided(c), policy, batch, prepared)


def packed_weights(changes, batch, columns=None):
    """Term -> weights of the loss tokens that the first optimizer step is given, in the batch's order."""
    traj, given = batch.traj, []
    shapes = training.row_shapes((), int(traj.lengths.max()), 4096, 1, 1)
    layout = training.make_layout(traj.sizes, shapes)
    steps_of(config(changes), lambda batches: given.append(list(batches)) or {}, batch, layout, columns or {})
    out, micro = {}, layout.minibatches[0].microbatches[0]
    for term, weights in given[0][0].weights.items():
        flat = np.zeros(len(traj.tokens))
        training.unpack(traj, micro, weights, flat)
        out[term] = flat[traj.loss_mask]
    return out


def test_truncated_answers_add_no_loss():
    """Their tokens stay in the denominator of 24."""
    batch, *_ = batch_of({}, lambda g, k: [k] * (10 if (g, k) == (1, 1) else 2))
    cut = (np.arange(24) >= 6) & (np.arange(24) < 16)
    np.testing.assert_allclose(packed_weights({}, batch)["policy"], 1 / 24)
    np.testing.assert_allclose(packed_weights({"algorithm.mask_truncated": True}, batch)["policy"], np.where(cut, 0, 1 / 24))


def test_positive_nll_weighs_the_answers_that_reach_the_pass_mark():
    """Their tokens alone, 1 over their number."""
    batch, *_ = batch_of({}, lambda g, k: [k if g == 2 else 0, 9, 9])
    assert "positive" not in packed_weights({}, batch)
    weights = packed_weights({"algorithm.positive_nll_coef": 0.1, "reward.pass_mark": 1.0}, batch)
    np.testing.assert_allclose(weights["positive"], np.where(np.arange(24) // 3 == 5, 1 / 3, 0))
    np.testing.assert_allclose(weights["policy"], 1 / 24)


def test_shared_prefixes_of_answers_with_different_scores_are_left_out():
    """Answers of group 1 share two tokens and differ in score; those of the others are alike."""
    batch, *_ = batch_of({}, lambda g, k: [4, 4, k, k] if g == 1 else [4, 4, 4, 4], digits=lambda tokens: tokens[3])
    shared = np.isin(np.arange(32), [8, 9, 12, 13])
    for changes, expected in (({}, 0 * shared), ({"algorithm.shared_prefix_tokens": 2}, shared),
                              ({"algorithm.shared_prefix_tokens": 3}, 0 * shared)):
        np.testing.assert_allclose(packed_weights(changes, batch)["policy"], (1 - expected) / 32)


def test_tokens_far_from_the_sampler_or_of_high_covariance_are_left_out():
    """They keep their place in the denominators; old log-probs are the trainer's before the update."""
    batch, *_ = batch_of({}, lambda g, k: [k] * 4)
    traj = batch.traj
    count, scored = len(traj.tokens), np.flatnonzero(traj.loss_mask)
    far = np.zeros(count)
    far[scored[:3]] = 3.0
    columns = {"behaviour": far, "old": np.zeros(count), "advantage": np.zeros(count)}
    own = {"algorithm.old_logprobs": "recompute"}
    weights = packed_weights({**own, "algorithm.m2_threshold": 0.1}, batch, columns)["policy"]
    np.testing.assert_allclose(weights, np.where(np.arange(len(scored)) < 3, 0, 1 / len(scored)))
    columns = {"behaviour": far, "old": -far, "advantage": -far}
    for bounds, expected in (({"cov_low": 1.0}, 3), ({"cov_low": 8.0}, 0), ({"cov_high": 1.5}, 0)):
        options = {f"algorithm.{n}": x for n, x in ({"cov_share": 0.9, "cov_low": 1.0, "cov_high": 50.0} | bounds).items()}
        assert (packed_weights({**own, **options}, batch, columns)["policy"] == 0).sum() == expected
    assert (packed_weights({**own, **options, "algorithm.cov_high": 50.0, "algorithm.cov_share": 0.05}, batch, columns)["policy"] == 0).sum() == 1


def test_completions_far_from_the_sampler_are_left_out_whole():
    """By the geometric mean or the product of their tokens' ratios; they keep their place in the denominators."""
    batch, *_ = batch_of({}, lambda g, k: [k] * 4)
    traj = batch.traj
    scored = np.flatnonzero(traj.loss_mask)
    owner = np.repeat(np.arange(len(traj.spans) - 1), np.diff(traj.spans))[scored]
    gap = np.zeros(len(traj.tokens))
    gap[scored[owner == 1]] = [0.4, 0.0, 0.0, 0.0]  # mean ratio exp(0.1), product exp(0.4)
    gap[scored[owner == 2]] = -0.2
    columns = {"behaviour": -gap, "old": np.zeros(len(gap)), "advantage": np.zeros(len(gap))}
    own = {"algorithm.old_logprobs": "recompute", "algorithm.sequence_high": 1.2}
    for more, out in (({}, ()), ({"algorithm.sequence_low": 0.9}, (2,)), ({"algorithm.sequence_ratio": "product"}, (1,)),
                      ({"algorithm.sequence_ratio": "product", "algorithm.sequence_low": 0.5}, (1, 2)), ({"algorithm.sequence_high": 1.05}, (1,))):
        weights = packed_weights({**own, **more}, batch, columns)["policy"]
        np.testing.assert_allclose(weights, np.where(np.isin(owner, out), 0, 1 / len(scored)))


# -- one update --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table():
    """A model that is a table of hidden states by token, three groups of three answers, and their log-probs under it."""
    traj, columns = batch_of_groups(groups=3, size=3)
    model = SimpleNamespace(
        forward=lambda params, tokens, *where: (params["table"][tokens], {}), head=lambda params: params["table"].T,
        compute_dtype=jnp.float32, config=SimpleNamespace(final_softcap=0.0, tied=False))
    params = {"table": jnp.asarray(0.5 * np.random.default_rng(0).normal(size=(61, 8)), jnp.float32)}
    shapes = training.row_shapes((), 24, 24 * 9, 1)
    layout = training.make_layout(traj.sizes, shapes, share_prompts=False)
    logits = np.asarray(params["table"] @ params["table"].T, np.float64)
    logps = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    logp = np.append(0, logps[traj.tokens[:-1], traj.tokens[1:]])

    def compute(cfg, positive=None, **changed):
        weights = training.loss_weights(traj, np.arange(9), "token_mean", positive=positive)
        batch = training.pack(traj, layout.minibatches[0].microbatches[0], columns | changed, weights)
        loss, metrics = loss_and_metrics(params, {}, jax.tree.map(jnp.asarray, batch), model, cfg)
        return float(loss), {k: float(v) for k, v in metrics.items()}

    return SimpleNamespace(traj=traj, logp=logp, entropy=-(np.exp(logps) * logps).sum(1), compute=compute,
                           advantage=columns["advantage"])


def by_sequence(table, values, reduce):
    """[T] of each sequence's reduced values over its answer."""
    t = table.traj
    found = [reduce(values[a:b][t.loss_mask[a:b]]) for a, b in zip(t.offsets[:-1], t.offsets[1:], strict=True)]
    return np.repeat(found, t.lengths)


@pytest.mark.full
@first_cases(1, "level", ["token", "sequence", "geometric"])
def test_mismatch_correction_by_level_and_action_with_its_bounds(algorithm, table, level):
    mask = table.traj.loss_mask
    gap = np.where(mask, np.random.default_rng(1).normal(0, 0.3, len(mask)), 0)
    whole = {"token": gap, "sequence": by_sequence(table, gap, np.sum), "geometric": by_sequence(table, gap, np.mean)}[level]
    ratio = np.exp(whole)[mask]
    distinct = np.unique(ratio)
    low, cap = ((distinct[i] + distinct[i + 1]) / 2 for i in (len(distinct) // 3, 2 * len(distinct) // 3))
    changes = {"algorithm.mismatch.cap": float(cap), "algorithm.old_logprobs": "recompute"}

    def weight(action, **more):
        cfg = algorithm({**changes, "algorithm.mismatch.correction": f"{level}_{action}", **more}).loss
        return table.compute(cfg, old=table.logp, behaviour=table.logp - gap)[1]

    cut = weight("tis")
    assert cut["gap/weight_mean"] == pytest.approx(np.minimum(ratio, cap).mean(), rel=1e-5)
    assert cut["gap/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    dropped = weight("mis")
    assert dropped["gap/weight_mean"] == pytest.approx(np.where(ratio <= cap, ratio, 0).mean(), rel=1e-5)
    both = weight("mis", **{"algorithm.mismatch.low": float(low)})
    inside = (ratio <= cap) & (ratio >= low)
    assert both["gap/weight_mean"] == pytest.approx(np.where(inside, ratio, 0).mean(), rel=1e-5)
    assert both["gap/corrected_fraction"] == pytest.approx(1 - inside.mean(), abs=1e-6)


@pytest.mark.full
def test_sequence_delta_leaves_out_bad_answers_the_policy_has_left(algorithm, table):
    """The sampler's log-probs lie 0.3 above the trainer's in all answers: those of negative advantage are dropped at 0.2."""
    def masked(delta):
        cfg = algorithm({"algorithm.mismatch.sequence_delta": delta, "algorithm.policy_loss": "pg"}).loss
        return table.compute(cfg, behaviour=table.logp + 0.3)

    mask = table.traj.loss_mask
    good = (table.advantage > 0)[mask]
    loss, metrics = masked(0.2)
    assert 0 < metrics["policy/sequence_masked_fraction"] == pytest.approx((~good).mean(), rel=1e-5)
    assert loss == pytest.approx(np.where(good, -table.advantage[mask] * table.logp[mask], 0).mean(), rel=1e-4)
    loss, metrics = masked(0.4)
    assert metrics["policy/sequence_masked_fraction"] == 0
    assert loss == pytest.approx((-table.advantage * table.logp)[mask].mean(), rel=1e-4)


@pytest.mark.full
def test_positive_nll_coef_adds_the_mean_nll_of_positive_answers(algorithm, table):
    positive = np.arange(9) % 2 == 0
    tokens = np.repeat(positive, table.traj.lengths) & table.traj.loss_mask
    plain, _ = table.compute(algorithm({}).loss, positive)
    loss, metrics = table.compute(algorithm({"algorithm.positive_nll_coef": 0.5}).loss, positive)
    assert metrics["policy/positive_nll"] == pytest.approx(-table.logp[tokens].mean(), rel=1e-5)
    assert loss - plain == pytest.approx(0.5 * metrics["policy/positive_nll"], rel=1e-4)


@pytest.mark.full
@first_cases(1, "option, metric, fine, above", [("early_stop_ratio", "policy/ratio_mean", 1.4, 1.6),
                                                         ("early_stop_kl", "policy/approx_kl", 0.1, 2.0)])
def test_early_stop_leaves_out_the_rest_of_a_step(algorithm, option, metric, fine, above):
    """The update above the limit and all after it change nothing, until the next step begins."""
    cfg = algorithm({f"algorithm.{option}": 1.5, "algorithm.ppo_epochs": 3}).loss
    apply = make_apply(optax.sgd(1.0, momentum=0.9), lambda i: 1.0, cfg)
    state = training.init_state({"w": jnp.ones(3)}, {}, optax.sgd(1.0, momentum=0.9))
    values = {"loss": 0.0, "policy/ratio_mean": 1.0, "policy/approx_kl": 0.0}
    moved = []
    for value in (fine, above, fine, None, fine):
        if value is None:
            state = clear_early_stop(state)
            continue
        metrics = {name: jnp.float32(value if name == metric else other) for name, other in values.items()}
        new, metrics = apply(state, {"w": jnp.full(3, 0.1)}, metrics)
        moved.append(not same((new.trainable, new.opt_state), (state.trainable, state.opt_state)))
        assert metrics["policy/early_stopped"] == 1 - moved[-1]
        state = new
    assert moved == [True, False, False, True] and int(state.step) == 2


# -- the reference -----------------------------------------------------------------------------------------------------


def test_reset_epochs_counts_passes_over_the_data(open_job):
    """Every half pass: at 0.6 and 1.2, and after a resumption at 0.9 where it would have been without."""
    changes = {"algorithm.kl.coef": 0.1, "reference.reset_epochs": 0.5}
    state = training.init_state({"w/kernel": jnp.ones(3)}, {}, optax.sgd(1.0))
    opened, policy = with_options(open_job, config(changes)), object.__new__(Policy)
    policy.job = opened
    reference, steps = Reference(opened), itertools.count(1)

    def after(cursor, value):
        policy.state = state.replace(trainable={"w/kernel": jnp.full(3, value)})
        return reference.after_step(policy, next(steps), cursor / 10)["policy/reference_reset"], float(reference.state["w"]["kernel"][0])

    reference.state = {"w": {"kernel": jnp.zeros(3)}}
    assert [after(3, 1.0), after(6, 2.0), after(9, 3.0)] == [(0, 0), (1, 2), (0, 2)]
    held, said = reference.arrays(), json.loads(json.dumps(reference.host()))
    reference = Reference(opened)
    reference.start(held, said)
    assert [after(10, 4.0), after(12, 5.0), after(33, 6.0)] == [(1, 4), (0, 4), (1, 6)]
    still = Reference(with_options(open_job, config({"algorithm.kl.coef": 0.1})))
    assert still.after_step(policy, 1, 0.0) == {} and still.arrays() == {} and still.abstract() == {}


def test_aggregations_divide_by_what_is_asked():
    """algorithm.aggregation_constant, else rollout.max_new_tokens=12, and the four answers; algorithm.aggregation_sequences."""
    traj, columns = batch_of_groups(groups=2, size=2)
    shapes = training.row_shapes((), int(traj.lengths.max()), 4096, 1, 1)
    layout = training.make_layout(traj.sizes, shapes)
    batch = SimpleNamespace(traj=traj, dropped=np.zeros(4, bool), scores=None, result=None)

    def weights(kind, **options):
        c, seen = config({"algorithm.aggregation": kind, **{f"algorithm.aggregation_{k}": v for k, v in options.items()}}), []

        def update(batches):
            seen.extend(np.unique(np.asarray(b.weights["policy"])).tolist() for b in batches)
            return {}

        steps_of(c, update, batch, layout, columns)
        return seen

    assert weights("constant") == [pytest.approx([0, 1 / (4 * 12)])]
    assert weights("constant", constant=500.0) == [pytest.approx([0, 1 / (4 * 500)])]
    counts = traj.total()
    pairs = 2 / (4 * np.array([counts[:2].sum(), counts[2:].sum()]))
    assert weights("token_mean", sequences=2) == [pytest.approx(sorted([0, *pairs]))] != weights("token_mean")


# -- runs --------------------------------------------------------------------------------------------------------------


PPO = {
    "algorithm.preset": "ppo", "algorithm.kl.coef": 0.1, "algorithm.num_minibatches": 2, "train.steps": 4,
    "critic.lr": 1e-2, "critic.value_clip": 0.1, "critic.num_minibatches": 4, "critic.warmup_steps": 1,
    "critic.normalize": True, "reference.reset_steps": 2, "reference.reset_optimizer": True, "reference.dtype": "fp32",
}


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    """Four steps, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    summary, steps, published = watched(job(folder, PPO))
    return SimpleNamespace(folder=folder, summary=summary, steps=steps, published=published)


@pytest.fixture(scope="module")
def resumed(ppo):
    """The last of the four steps again, from the third's checkpoint."""
    folder = ppo.folder.parent / "again"
    shutil.copytree(ppo.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "00000004")
    _, steps, _ = watched(job(folder, PPO))
    return steps


def raw_returns(step):
    """Returns [number of loss tokens] in units of the score: what the critic was given, as its statistics then were."""
    running = step.after.running
    std = np.sqrt(running["squares"] / running["count"])
    return step.columns["return"][step.batch.traj.loss_mask].astype(float) * std + running["mean"]


@pytest.mark.slow
def test_the_critic_has_its_own_number_of_updates(ppo):
    """critic.num_minibatches=4 per step, the policy's is 2."""
    for i, step in enumerate(ppo.steps):
        assert len(step.critic_updates) == 4 and int(step.after.critic["step"]) == 4 * (i + 1)
    assert [step.after.updates for step in ppo.steps] == [0, 2, 4, 6]


@pytest.mark.slow
def test_in_the_warm_up_only_the_critic_learns(ppo):
    first, second = ppo.steps[:2]
    assert same(first.after.policy, first.before.policy) and same(first.after.optimizer, first.before.optimizer)
    assert not same(first.after.critic["trainable"], first.before.critic["trainable"])
    assert not same(second.after.policy, second.before.policy) and len(second.updates) == 2 and not first.updates


def test_the_critic_has_its_own_learning_rate(ppo):
    """Adam's first updates are at most the rate by element: 4 x 0.01, where the policy's rate is 0.03."""
    first = ppo.steps[0]
    assert [m["optim/lr"] for m in first.critic_updates] == pytest.approx([1e-2] * 4)
    assert [m["optim/lr"] for m in ppo.steps[1].updates] == pytest.approx([3e-2] * 2)
    before, after = first.before.critic["trainable"], first.after.critic["trainable"]
    assert 0.01 < max(np.abs(after[n] - before[n]).max() for n in after) < 0.0401


def test_targets_are_normalised_by_running_statistics(ppo):
    first, second = ppo.steps[:2]
    targets = first.columns["return"][first.batch.traj.loss_mask]
    assert targets.mean() == pytest.approx(0, abs=1e-5) and targets.std() == pytest.approx(1, rel=1e-5)
    both = np.concatenate([raw_returns(first), raw_returns(second)])
    running = second.after.running
    assert running["count"] == len(both) and running["mean"] == pytest.approx(both.mean(), abs=1e-5)
    assert np.sqrt(running["squares"] / running["count"]) == pytest.approx(both.std(), rel=1e-4)


@pytest.mark.slow
def test_values_are_clipped_around_those_of_the_steps_start(ppo, shared):
    """At the first of a step's updates nothing has moved; afterwards values moved by more than 0.1. value_clip=0 clips none."""
    fractions = [[m["value/clip_fraction"] for m in step.critic_updates] for step in ppo.steps]
    assert all(f[0] == 0 for f in fractions) and max(max(f) for f in fractions) > 0.05
    assert all(m["value/clip_fraction"] == 0 for step in shared.steps for m in step.updates)
    assert max(m["value/mean"] for m in shared.steps[1].updates) > 0


def test_the_reference_becomes_the_policy_every_reset_steps(ppo):
    """After steps 2 and 4. It was the first policy until then; so the KL of step 3 is 0, that of step 4 is not."""
    steps = ppo.steps
    assert [s.metrics["policy/reference_reset"] for s in steps] == [0, 1, 0, 1]
    assert same(steps[0].after.reference, steps[0].before.policy_tree)
    for i in (1, 3):
        assert same(steps[i].after.reference, steps[i].after.policy_tree)
        assert not same(steps[i].after.reference, steps[i].before.reference)
    assert same(steps[2].after.reference, steps[1].after.policy_tree)
    mask = steps[2].batch.traj.loss_mask
    np.testing.assert_array_equal(steps[2].columns["ref"][mask], steps[2].columns["old"][mask])
    assert steps[2].metrics["policy/kl_in_reward"] == 0 != steps[3].metrics["policy/kl_in_reward"]


def test_a_reset_starts_the_optimizers_state_anew(ppo):
    """With reset_optimizer: zero moments after steps 2 and 4; the schedule of the learning rate goes on."""
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
    nodes = [jax.tree.leaves(step.after.optimizer, is_leaf=is_schedule) for step in ppo.steps]
    zeros = [all(not np.any(x) for x in n if not is_schedule(x)) for n in nodes]
    assert zeros == [True, True, False, True]
    assert [[int(x.count) for x in n if is_schedule(x)] for n in nodes] == [[0], [2], [4], [6]]


@pytest.mark.slow
def test_critic_reference_and_statistics_are_resumed_bitwise(ppo, resumed):
    third, fourth = ppo.steps[2:]
    (again,) = resumed
    for name in ("policy", "optimizer", "critic", "reference"):
        assert same(getattr(again.before, name), getattr(third.after, name)), name
        assert same(getattr(again.after, name), getattr(fourth.after, name)), name
    assert (again.before.running, again.after.running) == (third.after.running, fourth.after.running)
    assert again.metrics == fourth.metrics


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Two steps of three passes with one trunk, early stop and adaptive entropy."""
    folder = tmp_path_factory.mktemp("shared") / "run"
    summary, steps, published = watched(job(folder, {
        "algorithm.preset": "ppo", "algorithm.ppo_epochs": 3,
        "critic.shared": True, "critic.coef": 0.7, "critic.value_clip": 0.0,
        "algorithm.early_stop_kl": 1e-6, "algorithm.entropy_target": 9.0, "algorithm.entropy_rate": 0.01,
        "algorithm.entropy_max": 0.015, "train.score_tokens_per_microbatch": 144}))
    return SimpleNamespace(folder=folder, summary=summary, steps=steps, published=published)


@pytest.mark.slow
def test_a_shared_value_head_stays_in_the_training_state(shared):
    """It learns there; what is published and exported is the language model."""
    before, after = shared.steps[0].before.policy, shared.steps[0].after.policy
    assert not np.any(before["value/kernel"]) and np.any(after["value/kernel"]) and shared.steps[0].after.critic is None
    assert set(shared.published) == {0, 1, 2} and not any("value" in names for names in shared.published.values())
    assert not any("value" in name or "score" in name for name in list_folder(shared.folder / "export"))
    assert "value" not in shared.steps[0].after.policy_tree


@pytest.mark.full
def test_scoring_has_rows_of_its_own_where_asked(own, shared):
    """One row at a time where the update has three: more microbatches, the same log-probs but for rounding. Else the update's own."""
    assert own and all(step.scored is step.layout for step in own)
    for step in shared.steps:
        (scored,), (updated,) = step.scored.minibatches, step.layout.minibatches
        assert len(scored.microbatches) > len(updated.microbatches)
        assert 0 < step.updates[0]["old_gap/max"] < 1e-4


@pytest.mark.full
def test_coef_weighs_the_shared_value_loss(shared):
    """loss = policy's + 0.7 x value's - adaptive coefficient x entropy."""
    for step in shared.steps:
        for m in step.updates:
            value, entropy = 0.7 * m["value/loss"], m["policy/entropy_coef"] * m["policy/entropy"]
            assert m["loss"] == pytest.approx(m["policy/loss"] + value - entropy, abs=1e-5) and value > 1e-4


@pytest.mark.full
def test_the_entropy_coefficient_grows_below_its_target_up_to_its_maximum(shared):
    """By entropy_rate per update taken, and one of each step's three is (early stop); after the second it is entropy_max."""
    coefs = [m["policy/entropy_coef"] for step in shared.steps for m in step.updates]
    assert coefs == pytest.approx([0, 0.01, 0.01, 0.01, 0.015, 0.015])
    assert max(m["policy/entropy"] for m in shared.steps[1].updates) < 9


@pytest.mark.full
def test_early_stop_begins_anew_at_every_step(shared):
    """early_stop_kl is passed at each step's second update: one of three is taken."""
    for i, step in enumerate(shared.steps):
        assert [m["policy/early_stopped"] for m in step.updates] == [0, 1, 1]
        assert step.updates[0]["policy/approx_kl"] <= 1e-6 < step.updates[1]["policy/approx_kl"]
        assert step.updates[1]["policy/approx_kl"] == step.updates[2]["policy/approx_kl"]  # nothing moved in between
        assert step.after.updates == i + 1


OWN = """
import jax.numpy as jnp

def loss(tokens, cfg):
    weight = jnp.where(tokens.mask, cfg.clip_high * tokens.advantage, 0)
    return -weight * jnp.where(tokens.mask, tokens.logp, 0), {"own": 2 * weight}

def advantage(inputs):
    assert list(inputs.rewards) == ["digits"] and len(inputs.columns["behaviour"]) == len(inputs.mask)
    return inputs.scores - 0.25

def even(group):
    return len(group["completions"][0]) % 2 == 0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Two steps with everything of the user's own, named relative to the working directory."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _, steps, _ = watched(job(folder / "run", {
            "algorithm.policy_loss": "./own.py:loss", "algorithm.advantage": "./own.py:advantage", "algorithm.clip_high": 0.5,
            "algorithm.dynamic_sampling": "refill", "algorithm.keep_group": "./own.py:even",
            "algorithm.dynamic_sampling_rounds": 4, "checkpoint.every_steps": 0, "checkpoint.at_end": False,
            "checkpoint.every_minutes": 0.0}))
    return steps


@pytest.mark.slow
def test_an_own_advantage_and_an_own_policy_loss_in_a_run(own):
    for step in own:
        traj, columns = step.batch.traj, step.columns
        mask, found = traj.loss_mask, columns["advantage"]
        np.testing.assert_allclose(found[mask], np.repeat(step.batch.scores - 0.25, traj.lengths)[mask], atol=1e-6)
        (m,), kept = step.updates, ~np.repeat(step.batch.dropped, traj.lengths)[mask]
        assert m["policy/own"] == pytest.approx(found[mask].mean(), rel=1e-3)  # 2 x clip_high = 1
        loss = np.where(kept, -0.5 * found[mask] * traj.logprobs[mask], 0).mean()
        assert m["policy/loss"] == pytest.approx(loss, rel=1e-3)


@pytest.mark.full
def test_refill_in_a_run(own):
    """Four groups in every step; the next begins where the last one's rounds ended."""
    for step in own:
        asked = step.after.cursor - step.before.cursor
        assert len(np.unique(step.batch.traj.group)) == 4 and asked > 4 and step.batch.traj.num_sequences == 16
        assert step.metrics["rollout/discarded_fraction"] == pytest.approx(1 - 4 / asked)
        assert step.before.cursor <= step.batch.traj.group.min() and step.batch.traj.group.max() < step.after.cursor
    assert own[1].before.cursor == own[0].after.cursor


# -- the critic's model ------------------------------------------------------------------------------------------------


def critic_of(changes, open_job):
    """A critic as a run starts it."""
    c = config({"algorithm.preset": "ppo", **changes})
    opened = with_options(open_job, c)
    critic = Critic(opened, 5)
    critic.start(None, None)
    return critic


@pytest.mark.slow
def test_but_for_its_rate_the_critics_optimizer_is_the_policys(open_job):
    """optimizer.b1, b2 and weight_decay: two updates are those of the policy's optimizer at critic.lr."""
    mine = {"critic.lr": 0.1, "optimizer.b1": 0.5, "optimizer.b2": 0.6, "optimizer.weight_decay": 0.3}
    params = {"value/kernel": jnp.array([1.0, -2.0]), "embed/embedding": jnp.array([[1.0, 3.0]])}

    def updates(optimizer):
        state, found = optimizer.init(params), []
        for scale in (1.0, -0.2):
            out, state = optimizer.update({n: scale * jnp.sin(x) for n, x in params.items()}, state, params)
            found.append(out)
        return found

    c = config({"optimizer.lr": 0.1, **{k: v for k, v in mine.items() if k.startswith("optimizer.")}}).optimizer
    axes = {"value/kernel": ("norm",), "embed/embedding": ("vocab", "embed")}
    assert same(updates(critic_of(mine, open_job).optimizer), updates(training.make_optimizer(c, 5, axes)[0]))
    assert not same(updates(critic_of({"critic.lr": 0.1}, open_job).optimizer), updates(training.make_optimizer(c, 5, axes)[0]))


def test_the_critic_has_entries_of_the_optimizer_of_its_own(open_job):
    """critic.optimizer wins over optimizer.*, for the critic only; what cannot work is named as it was written."""
    own = {"b1": 0.5, "b2": 0.6, "eps": 0.1, "weight_decay": 0.3, "schedule": "wsd", "decay_shape": "cosine", "decay_steps": 3,
           "warmup_steps": 0, "floor": 0.1}
    changes = {"algorithm.preset": "ppo", "critic.lr": 0.1, "optimizer.groups": {"embed": {"lr": 0.0}}}
    theirs = critics_optimizer(config({**changes, "critic.optimizer": own}))
    assert {name: theirs[name] for name in own} == own and theirs.lr == 0.1 and not theirs.groups
    assert config({**changes, "critic.optimizer": own}).optimizer.b1 == 0.9
    for entry, message in (({"lr": 1.0}, "critic.optimizer.lr: the critic has of its own name, b1"),
                           ({"b1": 1.5}, r"critic.optimizer.b1=1.5: must lie in \[0, 1\)"),
                           ({"b1": "x"}, "critic.optimizer.b1='x': expected float, got str"),
                           ({"eps": -1}, "critic.optimizer.eps=-1.0: must not be negative"),
                           ({"schedule": "sine"}, "critic.optimizer.schedule='sine': choose one of"),
                           ({"decay_shape": "sqrt"}, "critic.optimizer.decay_shape='sqrt' has no effect with")):
        with pytest.raises(ConfigError, match=message):
            config({**changes, "critic.optimizer": entry})


def test_the_values_bound_is_the_configs(open_job, monkeypatch):
    """critic.value_clip; what it does: test_values_are_clipped_around_those_of_the_steps_start."""
    losses, make = [], training.make_update
    monkeypatch.setattr(training, "make_update", lambda model, optimizer, schedule, loss, *more: (losses.append(loss), make(
        model, optimizer, schedule, loss, *more))[1])
    critic_of({"critic.value_clip": 0.03}, open_job)
    shared = config({"algorithm.preset": "ppo", "critic.shared": True, "critic.value_clip": 0.04})
    assert losses[0] == training.Value(clip=0.03, chunk=losses[0].chunk, max_grad_norm=1.0)
    assert Roles(with_options(open_job, shared), 5).loss.value_clip == 0.04


@pytest.mark.parametrize("whose", ["optimizer.max_grad_norm", "critic.optimizer.max_grad_norm"])
@pytest.mark.slow
def test_the_critics_gradient_is_clipped_too(open_job, whose):
    """By optimizer.max_grad_norm, or its own: plain SGD at rate 1 moves exactly that far."""
    critic = critic_of({"optimizer.name": "optax:sgd", "critic.lr": 1.0, whose: 0.01}, open_job)
    traj, _ = batch_of_groups(groups=2, size=2)
    before = {name: np.array(x) for name, x in critic.state.trainable.items()}
    target = traj.loss_mask.astype(np.float32)
    (metrics,) = critic.learn(traj, {"return": target, "old_value": 0 * target}, 0)
    moved = np.sqrt(sum(np.square(np.array(x) - before[name]).sum() for name, x in critic.state.trainable.items()))
    assert metrics["optim/grad_norm"] > 0.1 and moved == pytest.approx(0.01, rel=1e-4)


def test_the_critic_is_sharded_like_the_policy(open_job):
    """mesh.fsdp=4: the same quarter of every parameter, a whole value head."""
    mesh = jax.sharding.AbstractMesh((1, 4, 1, 1, 1), ("dp", "fsdp", "cp", "ep", "tp"))
    job, model = dataclasses.replace(open_job, mesh=mesh), open_job.model

    def shards(tree):
        shapes, where = jax.eval_shape(tree.init, jax.random.key(0)), parameters.param_shardings(job, tree=tree)
        return flatten_dict(jax.tree.map(lambda x, place: place.shard_shape(x.shape), shapes, where), sep="/")

    critic, policy = shards(ValueModel(model)), shards(model)
    assert {name: shape for name, shape in critic.items() if not name.startswith("value/")} == policy
    assert critic["value/kernel"] == (32,) and policy["layer_0/mlp/up/kernel"] == (8, 64)


@pytest.mark.torch
@pytest.mark.slow
def test_a_reward_model_of_transformers_as_the_critic(open_job, tmp_path):
    """critic.path: a sequence classifier with one label; its score at each token is the critic's value there. critic.head: under
    another name of its head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(Qwen2Config(**tiny_job.MODEL, num_labels=1, pad_token_id=0, initializer_range=0.2))
    model.eval().save_pretrained(tmp_path / "rm")
    traj, _ = batch_of_groups(groups=2, size=2)
    layout = training.make_layout(traj.sizes, open_job.row_shapes)

    def values(path, **more):
        return critic_of({"critic.path": path} | more, open_job).values(None, traj, layout)[0]

    found = values(str(tmp_path / "rm"))
    for a, b, prompt in zip(traj.offsets[:-1], traj.offsets[1:], traj.prompt_lengths, strict=True):
        with torch.no_grad():
            hidden = model.model(torch.tensor(traj.tokens[None, a:b].astype(np.int64))).last_hidden_state
            expected = model.score(hidden)[0, :, 0].numpy()
        np.testing.assert_allclose(found[a + prompt : b], expected[prompt - 1 : -1], atol=2e-4)
    assert np.abs(found).max() > 0.1 and not values("").any()  # without: the policy's trunk, a head at zero
    tree = ValueModel(open_job.model, name="value_head", bias=False)
    params = hf.load_critic(ValueModel(open_job.model, bias=False), tmp_path / "rm")
    hf.export(tree, params, tmp_path / "named", {**tiny_job.MODEL, hf.SOURCE: {}})
    np.testing.assert_array_equal(values(str(tmp_path / "named"), **{"critic.head": "value_head"}), found)


# -- what is refused ---------------------------------------------------------------------------------------------------


GAE, KL, TWO = {"algorithm.preset": "ppo"}, {"algorithm.kl.coef": 0.1}, {"algorithm.ppo_epochs": 2}
REFUSED = [
    ({"algorithm.m2_threshold": 0.04}, "algorithm.m2_threshold=0.04 with algorithm.old_logprobs=auto: it reads the trainer's log-probs"),
    ({"algorithm.cov_share": 0.1, "algorithm.old_logprobs": "rollout"}, "algorithm.cov_share=0.1 with algorithm.old_logprobs=rollout"),
    ({"algorithm.cov_low": 6.0}, "algorithm.cov_low=6.0: must be below algorithm.cov_high=5.0"),
    ({"algorithm.policy_loss": "topr", "algorithm.ratio": "geometric"}, "set algorithm.ratio=token or sequence, or"),
    ({"algorithm.temperature": 0.5}, "algorithm.mismatch.correction=auto: it would compare log-probs of two temperatures; set it to none"),
    ({"algorithm.temperature": 0.5, "algorithm.mismatch.correction": "none", "algorithm.old_logprobs": "rollout"},
     "algorithm.old_logprobs=rollout: it would compare log-probs of two temperatures; set it to auto or recompute"),
    *(({f"algorithm.{n}": 0.0}, f"algorithm.{n}=0.0: must be above 0")
      for n in ("clip_high", "cispo_max_ratio", "sapo_tau_pos", "sapo_tau_neg", "dppo_low", "dppo_high", "mismatch.cap")),
    *(({f"algorithm.{n}": -0.5}, f"algorithm.{n}=-0.5: must not be negative")
      for n in ("cispo_min_ratio", "entropy_coef", "entropy_target", "entropy_rate", "entropy_max", "positive_nll_coef",
                "lam_alpha", "mismatch.low", "mismatch.sequence_delta", "early_stop_ratio", "early_stop_kl", "kl.coef")),
    *(({"algorithm.preset": "ppo", f"algorithm.{n}": 1.5}, f"algorithm.{n}=1.5: must lie in 0..1")
      for n in ("gamma", "lam", "critic_lam", "overlong_buffer_fraction")),
    *(({n: -1}, f"{n}=-1: must not be negative")
      for n in ("algorithm.shared_prefix_tokens", "critic.num_minibatches", "critic.warmup_steps", "reference.reset_steps")),
    *(({n: -1.0}, f"{n}=-1.0: must not be negative") for n in ("critic.coef", "critic.value_clip", "reference.reset_epochs")),
    *(({f"algorithm.{n}": 0}, f"algorithm.{n}=0: must be at least 1") for n in ("ppo_epochs", "num_minibatches")),
    ({"algorithm.dynamic_sampling_rounds": 0}, "algorithm.dynamic_sampling_rounds=0: must be above 0"),
    ({"critic.lr": 0.0}, "critic.lr=0.0: must be above 0"),
    ({"algorithm.aggregation_constant": 9.0}, "algorithm.aggregation_constant=9.0 has no effect with algorithm.aggregation=token_mean; "
     "set algorithm.aggregation=constant"),
    ({"algorithm.aggregation": "constant", "algorithm.aggregation_sequences": 2}, "algorithm.aggregation_sequences=2 has no effect with "
     "algorithm.aggregation=constant; set algorithm.aggregation=token_mean"),
    ({"algorithm.aggregation_sequences": -1}, "algorithm.aggregation_sequences=-1: must not be negative"),
    ({"algorithm.aggregation": "constant", "algorithm.aggregation_constant": -1.0}, "aggregation_constant=-1.0: must not be negative"),
    ({"optimizer.decay_shape": "sqrt"}, "optimizer.decay_shape='sqrt' has no effect with optimizer.schedule=constant; set optimizer.schedule=wsd"),
    ({"train.score_tokens_per_microbatch": -1}, "train.score_tokens_per_microbatch=-1: must not be negative"),
    ({**GAE, "critic.shared": True, "critic.optimizer": {"b1": 0.5}}, "critic.optimizer=['b1'] has no effect with critic.shared=True; leave"),
    ({"algorithm.dual_clip": 0.9}, "algorithm.dual_clip=0.9: must be above 1, or 0 for off"),
    ({"algorithm.delta": 1.1}, "algorithm.delta=1.1: must be at least 1 + clip_high = 1.2, or 0 for off"),
    ({"algorithm.advantage": "gea"}, "algorithm.advantage='gea': choose one of outcome, returns, gae, "),
    ({"algorithm.policy_loss": "ppo"}, "algorithm.policy_loss='ppo': choose one of clip, cispo, sapo, dppo, topr, pg, "),
    ({"algorithm.advantage": "nowhere:f"}, "algorithm.advantage='nowhere:f' cannot be imported: ModuleNotFoundError"),
    ({"algorithm.policy_loss": "./no.py:f"}, "algorithm.policy_loss='./no.py:f' cannot be imported: FileNotFoundError"),
    ({"algorithm.policy_loss": "math:pi"}, "algorithm.policy_loss='math:pi' is a float, not a function"),
    ({"algorithm.advantage": "returns", "algorithm.lam": 0.9}, "algorithm.lam=0.9 has no effect with "
     "algorithm.advantage=returns; set algorithm.advantage=gae"),
    ({"algorithm.lam_alpha": 0.1}, "algorithm.lam_alpha=0.1 has no effect with algorithm.advantage=outcome; set algorithm.advantage=gae"),
    ({"algorithm.critic_lam": 0.1}, "algorithm.critic_lam=0.1 has no effect with algorithm.advantage=outcome; set algorithm.advantage=gae"),
    ({"algorithm.gamma": 0.9}, "algorithm.gamma=0.9 has no effect with algorithm.advantage=outcome; set algorithm.advantage=returns or "
     "gae"),
    *(({f"critic.{n}": v}, f"critic.{n}={v!r} has no effect with algorithm.advantage=outcome; set algorithm.advantage=gae, or leave")
      for n, v in (("path", "x"), ("shared", True), ("coef", 1.0), ("lr", 1.0), ("value_clip", 0.0), ("num_minibatches", 2),
                   ("warmup_steps", 1), ("normalize", True))),
    *(({**GAE, "critic.shared": True, f"critic.{n}": v}, f"critic.{n}={v!r} has no effect with critic.shared=True; leave out "
       "critic.shared") for n, v in (("path", "x"), ("num_minibatches", 2), ("warmup_steps", 1))),
    ({**GAE, "critic.num_minibatches": 3}, "critic.num_minibatches=3: data.prompts_per_step=4 would give 1.33 prompts per "
     "optimizer step; choose a divisor of 4"),
    ({"algorithm.advantage_low": 1.0, "algorithm.advantage_high": 1.0}, "algorithm.advantage_low=1.0: must be below "
     "algorithm.advantage_high=1.0"),
    ({"algorithm.ratio": "sequence", "algorithm.policy_loss": "dppo"}, "algorithm.ratio=sequence with "
     "algorithm.policy_loss=dppo: set algorithm.ratio=token, or another loss"),
    ({"algorithm.ratio": "geometric", "algorithm.policy_loss": "cispo"}, "algorithm.ratio=geometric with "
     "algorithm.policy_loss=cispo: set algorithm.ratio=token or sequence or sequence_token, or another loss"),
    ({"algorithm.ratio": "geometric", "algorithm.dual_clip": 3.0}, "algorithm.dual_clip and delta must be 0"),
    ({"algorithm.policy_loss": "sapo", "algorithm.delta": 2.0}, "algorithm.delta=2.0 has no effect with algorithm.policy_loss=sapo; it "
     "belongs to clip"),
    ({"algorithm.policy_loss": "pg", "algorithm.cispo_max_ratio": 3.0}, "algorithm.cispo_max_ratio=3.0 has no effect with "
     "algorithm.policy_loss=pg; it belongs to cispo"),
    ({"algorithm.cispo_min_ratio": 5.0}, "algorithm.cispo_min_ratio=5.0: must be below cispo_max_ratio=5.0"),
    ({**KL, "algorithm.kl.estimator": "k1"}, "algorithm.kl.estimator=k1 in the loss: its expected gradient is zero, it would "
     "do nothing; take k3_unbiased or k2, or algorithm.kl.placement=reward"),
    ({**KL, "algorithm.kl.placement": "reward"}, "algorithm.kl.estimator=k3_unbiased in the reward: no gradient flows through "
     "its ratio there; take k1"),
    ({**KL, "algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1", "algorithm.old_logprobs": "rollout"},
     "algorithm.old_logprobs=rollout with a KL in the reward"),
    ({"algorithm.kl.placement": "reward"}, "algorithm.kl.placement='reward' has no effect with algorithm.kl.coef=0; set "
     "algorithm.kl.coef"),
    *(({f"reference.{n}": v}, f"reference.{n}={v!r} has no effect with algorithm.kl.coef=0; set algorithm.kl.coef, or leave it out")
      for n, v in (("path", "x"), ("reset_steps", 2), ("reset_epochs", 0.5))),
    ({**KL, "reference.reset_optimizer": True}, "reference.reset_optimizer=True has no effect with reference.reset_steps=0 and "
     "reference.reset_epochs=0; set reference.reset_steps or reference.reset_epochs"),
    ({"algorithm.mismatch.correction": "none", "algorithm.mismatch.cap": 3.0}, "algorithm.mismatch.cap=3.0 has no effect with "
     "algorithm.mismatch.correction=none; set algorithm.mismatch.correction=token_tis, sequence_tis"),
    ({"algorithm.mismatch.correction": "token_tis", "algorithm.mismatch.low": 0.5}, "algorithm.mismatch.low=0.5 has no effect "
     "with algorithm.mismatch.correction=token_tis; set algorithm.mismatch.correction=token_mis, sequence_mis or geometric_mis"),
    ({"algorithm.mismatch.correction": "token_mis", "algorithm.mismatch.low": 2.0}, "algorithm.mismatch.low=2.0: must be below "
     "algorithm.mismatch.cap=2.0"),
    ({"algorithm.mismatch.correction": "sequence_tis", "algorithm.old_logprobs": "rollout"}, "algorithm.mismatch.correction="
     "sequence_tis with algorithm.old_logprobs=rollout: the ratio is already taken to the sampler's log-probs; use one of "
     "them"),
    ({"algorithm.dynamic_sampling": "mask", "algorithm.keep_group": "speed"}, "algorithm.keep_group='speed': neither a reward "
     "of this run nor an import path"),
    ({"algorithm.dynamic_sampling": "mask", "algorithm.keep_group": "nowhere:f"}, "algorithm.keep_group='nowhere:f' cannot be "
     "imported"),
    ({"algorithm.keep_group": "digits"}, "algorithm.keep_group='digits' has no effect with algorithm.dynamic_sampling=off; "
     "set algorithm.dynamic_sampling=mask or refill"),
    ({"algorithm.entropy_target": 1.0, "algorithm.entropy_coef": 0.1}, "algorithm.entropy_coef=0.1 with entropy_target=1.0: "
     "the coefficient adapts by itself, up to entropy_max; set entropy_coef=0"),
    ({"algorithm.early_stop_kl": 0.1}, "algorithm.early_stop_kl=0.1 has no effect with algorithm.num_minibatches=1 and "
     "algorithm.ppo_epochs=1; raise algorithm.num_minibatches or algorithm.ppo_epochs"),
    ({**TWO, "algorithm.early_stop_ratio": 1.0}, "algorithm.early_stop_ratio=1.0: must be above 1, the ratio of an unchanged "
     "policy; 0 = off"),
    *(({f"algorithm.{n}": "x"}, f"algorithm.{n}='x': choose one of ") for n in ("ratio", "dynamic_sampling", "kl.placement",
                                                                                "mismatch.correction", "advantage_mean")),
    *(({f"reward.{n}": "x"}, f"reward.{n}='x': choose one of none, group, batch") for n in ("norm_mean", "norm_std")),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[", ".join(f"{k}={v}" for k, v in c.items()) for c, _ in REFUSED])
def test_what_cannot_work_is_refused_with_its_remedy(changes, message):
    assert set(changes) <= set(options())
    with pytest.raises(ConfigError) as error:
        config(changes)
    assert message in str(error.value)
