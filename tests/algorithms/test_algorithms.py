"""Formulas against closed forms, exact enumeration and published algebra."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import (
    PRESETS,
    aggregation_weights,
    clipped_policy_loss,
    group_advantages,
    kl_penalty,
    masked_exp,
    mismatch_weight,
    resolve,
)


def test_group_advantages_closed_form():
    a, zero = group_advantages([1, 0, 0, 1, 5, 5], [7, 7, 7, 7, 2, 2])
    std = np.std([1, 0, 0, 1], ddof=1)
    np.testing.assert_allclose(a[:4], np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6), rtol=1e-12)
    assert (a[4:] == 0).all() and zero.tolist() == [False] * 4 + [True] * 2


def test_equal_rewards_give_exactly_zero_even_with_rounding_noise():
    a, zero = group_advantages([0.1 + 0.2, 0.3, 0.3], [0, 0, 0])
    assert (a == 0).all() and zero.all()


def test_absent_scores_are_absent_not_zero():
    a, _ = group_advantages([1.0, 0.0, np.nan], [0, 0, 0])
    b, _ = group_advantages([1.0, 0.0], [0, 0])
    np.testing.assert_array_equal(a[:2], b)
    assert a[2] == 0


@pytest.mark.parametrize("std", ["group", "none"])
def test_advantages_shift_scale_and_permutation(std):
    rng = np.random.default_rng(0)
    scores, groups = rng.normal(size=24), np.repeat(np.arange(6), 4)
    base, _ = group_advantages(scores, groups, std=std)
    shifted, _ = group_advantages(scores + 3.0, groups, std=std)
    np.testing.assert_allclose(base, shifted, atol=1e-12)
    scaled, _ = group_advantages(7 * scores, groups, std=std)
    np.testing.assert_allclose(scaled, base if std == "group" else 7 * base, rtol=1e-4)
    order = rng.permutation(24)
    permuted, _ = group_advantages(scores[order], groups[order], std=std)
    np.testing.assert_allclose(permuted, base[order], atol=1e-12)


def test_aggregation_weights_are_means():
    counts = np.array([3, 5, 0, 2])
    token = aggregation_weights(counts, "token_mean")
    sequence = aggregation_weights(counts, "sequence_mean")
    assert np.sum(token * counts) == pytest.approx(1) and np.sum(sequence * counts) == pytest.approx(1)
    np.testing.assert_allclose(sequence * counts, [1 / 3, 1 / 3, 0, 1 / 3])
    assert (aggregation_weights(np.zeros(3), "token_mean") == 0).all()


def test_clip_stops_the_gradient_exactly_where_it_should():
    old = jnp.zeros(4)
    logp = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5]))
    advantage = jnp.array([1.0, -1.0, 1.0, -1.0])
    mask = jnp.ones(4, bool)
    grad = jax.grad(lambda x: clipped_policy_loss(x, old, advantage, mask, 0.2, 0.28)[0].sum())(logp)
    np.testing.assert_allclose(grad, [0, 1.5, -0.5, 0], rtol=1e-6)
    loss, stats = clipped_policy_loss(logp, old, advantage, mask, 0.2, 0.28)
    np.testing.assert_allclose(loss, [-1.28, 1.5, -0.5, 0.8], rtol=1e-6)
    assert stats["clipped"].tolist() == [1, 0, 0, 1]


def test_at_ratio_one_the_gradient_is_reinforce():
    logp = jnp.array([-0.3, -2.0])
    advantage = jnp.array([0.7, -1.1])
    old = jax.lax.stop_gradient(logp)
    grad = jax.grad(lambda x: clipped_policy_loss(x, old, advantage, jnp.ones(2, bool), 0.2, 0.2)[0].sum())(logp)
    np.testing.assert_allclose(grad, -advantage, rtol=1e-6)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_junk_changes_nothing(junk):
    mask = jnp.array([True, False, True])
    clean = jnp.array([-1.0, -1.0, -2.0])
    dirty = jnp.where(mask, clean, junk)

    def total(x, other):
        loss, _ = clipped_policy_loss(x, other, other, mask, 0.2, 0.2)
        loss = loss * mismatch_weight(x, other, mask, 2.0)
        return sum(jnp.sum(kl_penalty(x, other, other, mask, e)) for e in ("k2", "k3", "k3_unbiased")) + jnp.sum(loss)

    want = jax.value_and_grad(total)(clean, clean * 0.5)
    got = jax.value_and_grad(total)(dirty, jnp.where(mask, clean * 0.5, junk))
    np.testing.assert_array_equal(want[0], got[0])
    np.testing.assert_array_equal(want[1], got[1])
    assert np.isfinite(got[0])


def test_masked_exp_continues_linearly():
    value, grad = jax.value_and_grad(lambda x: masked_exp(x, True))(30.0)
    assert value == pytest.approx(np.exp(20.0) * 11, rel=1e-6) and grad == pytest.approx(np.exp(20.0), rel=1e-6)


def _enumerate(estimator):
    """Exact expected gradient of a KL term over all 25 sequences of a categorical policy, V=5, T=2, in float64."""
    with jax.enable_x64(True):
        theta, ref_theta = jax.random.normal(jax.random.key(1), (2, 2, 5), jnp.float64)
        ref = jax.nn.log_softmax(ref_theta)
        old = jax.nn.log_softmax(theta)

        def expected(th):
            lp = jax.nn.log_softmax(th)
            total = 0.0
            for a, b in itertools.product(range(5), repeat=2):
                prob = jnp.exp(old[0, a] + old[1, b])
                args = (
                    jnp.array([lp[0, a], lp[1, b]]),
                    jnp.array([ref[0, a], ref[1, b]]),
                    jnp.array([old[0, a], old[1, b]]),
                )
                total += prob * jnp.sum(kl_penalty(*args, jnp.ones(2, bool), estimator))
            return total

        def kl(th, reverse):
            p, q = jax.nn.log_softmax(th), ref
            return jnp.sum(jnp.exp(q) * (q - p)) if reverse else jnp.sum(jnp.exp(p) * (p - q))

        return jax.grad(expected)(theta), jax.grad(kl)(theta, False), jax.grad(kl)(theta, True)


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["k2", "k3_unbiased", "k3"])
def test_kl_gradient_by_enumeration(estimator):
    got, forward, reverse = _enumerate(estimator)
    np.testing.assert_allclose(got, reverse if estimator == "k3" else forward, atol=1e-12)
    assert np.abs(np.asarray(forward - reverse)).max() > 1e-2


def test_mismatch_weight_truncates_and_has_no_gradient():
    old, behaviour = jnp.log(jnp.array([0.5, 0.2, 0.1])), jnp.log(jnp.array([0.1, 0.4, 0.1]))
    mask = jnp.ones(3, bool)
    np.testing.assert_allclose(mismatch_weight(old, behaviour, mask, 2.0), [2.0, 0.5, 1.0], rtol=1e-6)
    assert (jax.grad(lambda o: mismatch_weight(o, behaviour, mask, 2.0).sum())(old) == 0).all()


@pytest.mark.full
def test_policy_gradient_is_unbiased_on_a_bandit():
    """sum over actions of p * grad(loss) equals -grad of the expected reward, when advantages are the rewards."""
    with jax.enable_x64(True):
        theta = jnp.array([0.3, -0.2, 0.9], jnp.float64)
        reward = jnp.array([1.0, 0.0, 0.4], jnp.float64)
        p = jax.nn.softmax(theta)

        def surrogate(th, a):
            lp = jax.nn.log_softmax(th)[a]
            return clipped_policy_loss(lp, jnp.log(p[a]), reward[a], jnp.array(True), 0.2, 0.2)[0]

        got = sum(p[a] * jax.grad(surrogate)(theta, a) for a in range(3))
        want = -jax.grad(lambda th: jnp.sum(jax.nn.softmax(th) * reward))(theta)
        np.testing.assert_allclose(got, want, atol=1e-15)


def test_presets_fill_only_what_is_not_set():
    rows = resolve("grpo_paper", {"clip_low": 0.1, "kl.coef": None})
    assert rows["clip_low"] == (0.1, "config")
    assert rows["kl.coef"] == (PRESETS["grpo_paper"]["kl.coef"], "preset grpo_paper")
    assert set(PRESETS["grpo"]) == set(PRESETS["grpo_paper"])
