"""What the algorithms are for, proven: expected gradients by exact enumeration, laws, limits, stop-gradients.

The policy is a table: 5 actions, 2 steps, the second depends on the first action, so 25 sequences, one per row of a batch.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl import algorithms as alg

V, Y = 5, 25
FIRST, SECOND = np.divmod(np.arange(Y), V)
STATES = np.stack([np.zeros(Y, int), 1 + FIRST], axis=1)  # row of the table at each step
ACTIONS = np.stack([FIRST, SECOND], axis=1)
RNG = np.random.default_rng(7)
THETA, OLD, BEHAVIOUR, REF = RNG.normal(size=(4, 1 + V, V)) * 0.7
REWARD = RNG.normal(size=Y) + FIRST - 0.3 * SECOND
ONES = np.ones((Y, 2), bool)
SEQUENCES = np.ones((Y, 2), np.int32)
OFFSETS = np.arange(Y + 1) * 2


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def tokens_logp(theta):
    """[Y, 2] log-probs of all sequences."""
    return jax.nn.log_softmax(jnp.asarray(theta))[STATES, ACTIONS]


def probability(theta):
    return jnp.exp(tokens_logp(theta).sum(axis=1))


def cfg_of(row, **changes):
    return SimpleNamespace(**{**alg.PRESETS[row], **changes})


def expected_gradient(loss, theta=THETA, sampler=THETA, old=None, advantage=REWARD, weight=1.0, ref=REF):
    """Gradient at theta of the expectation, over sequences of the sampler, of the sum of token losses * weight.

    loss: Tokens -> [Y, 2]. old: table of the proximal policy (theta if None). advantage: [Y] or [Y, 2].
    """
    fixed = tokens_logp(theta if old is None else old)
    advantage = jnp.broadcast_to(jnp.asarray(advantage).reshape(Y, -1), (Y, 2))

    def total(th):
        tokens = alg.Tokens(
            logp=tokens_logp(th), old=fixed, behaviour=tokens_logp(sampler), ref=tokens_logp(ref), advantage=advantage,
            mask=jnp.asarray(ONES), sequences=jnp.asarray(SEQUENCES), entropy=None, columns={},
        )  # fmt: skip
        return jnp.sum(probability(sampler)[:, None] * weight * loss(tokens))

    return np.asarray(jax.grad(total)(jnp.asarray(theta)))


def named(name, row="grpo", **changes):
    return lambda t: alg.policy_loss(name)(t, cfg_of(row, **changes))[0]


def grad_of(f, theta=THETA):
    return np.asarray(jax.grad(f)(jnp.asarray(theta)))


def grad_return(reward=REWARD):
    """Gradient of the expected reward."""
    return grad_of(lambda th: jnp.sum(probability(th) * reward))


close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-13)


def apart(a, b):
    assert np.abs(a - b).max() > 1e-3


# -- unbiased rows -------------------------------------------------------------------------------------------------


@pytest.mark.full
@first_cases(8, "row", alg.PRESETS)
def test_on_policy_every_row_has_the_reinforce_gradient(row):
    """Sequence by sequence, not only on average: all ratios are 1."""
    cfg, weight = cfg_of(row), RNG.normal(size=(Y, 1))
    got = expected_gradient(lambda t: alg.policy_loss(cfg.policy_loss)(t, cfg)[0], weight=weight)
    close(got, expected_gradient(lambda t: -t.advantage * t.logp, weight=weight))
    args = [tokens_logp(THETA)] * 4
    t = alg.Tokens(*args, jnp.zeros((Y, 2)), jnp.asarray(ONES), jnp.asarray(SEQUENCES), None, {})
    stats = alg.policy_loss(cfg.policy_loss)(t, cfg)[1]
    assert (np.asarray(stats["ratio"]) == 1).all() and not np.asarray(stats["clipped"]).any()


@pytest.mark.full
def test_no_baseline_and_the_greedy_baseline_are_unbiased():
    groups = np.zeros(Y, int)
    greedy = int(np.argmax(probability(THETA)))
    for mean, factor in (("none", 1.0), ("greedy", 1.0)):
        a, _ = alg.group_advantages(REWARD, groups, mean=mean, std="none", baseline_N=np.full(Y, REWARD[greedy]))
        close(expected_gradient(named("pg"), advantage=a), -factor * grad_return())


@pytest.mark.parametrize("mean, factor", [("leave_one_out", 1.0), ("group", 0.5)])
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_by_one_minus_one_over_g(mean, factor):
    """All 625 pairs of samples are a group each: A of the first, averaged over the second."""
    first, second = np.divmod(np.arange(Y * Y), Y)
    scores = np.stack([REWARD[first], REWARD[second]], axis=1).ravel()
    a, _ = alg.group_advantages(scores, np.repeat(np.arange(Y * Y), 2), mean=mean, std="none")
    p = np.asarray(probability(THETA))
    a = (a[::2].reshape(Y, Y) * p[None]).sum(axis=1)
    close(expected_gradient(named("pg"), advantage=a), -factor * grad_return())


def test_a_group_std_is_biased():
    first, second, third = np.unravel_index(np.arange(Y**3), (Y, Y, Y))
    scores = np.stack([REWARD[first], REWARD[second], REWARD[third]], axis=1).ravel()
    a, _ = alg.group_advantages(scores, np.repeat(np.arange(Y**3), 3))
    p = np.asarray(probability(THETA))
    a = np.einsum("ijk,j,k->i", a[::3].reshape(Y, Y, Y), p, p)
    got, want = expected_gradient(named("pg"), advantage=a), -grad_return()
    slope = (got * want).sum() / (want * want).sum()
    assert slope > 0
    apart(got, slope * want)


def test_returns_and_gae_are_unbiased():
    rewards = RNG.normal(size=(Y, 2))
    rewards[:, 0] = RNG.normal(size=V)[FIRST]  # the first step's reward cannot depend on the second action
    want = -grad_return(jnp.asarray(rewards.sum(axis=1)))
    go = alg.token_returns(rewards.ravel(), ONES.ravel(), OFFSETS, 1.0).reshape(Y, 2)
    close(expected_gradient(named("pg"), advantage=go), want)
    any_value = RNG.normal(size=1 + V)[STATES].ravel()
    a, returns = alg.gae(rewards.ravel(), any_value, ONES.ravel(), OFFSETS, 1.0, 1.0)
    close(expected_gradient(named("clip"), advantage=a.reshape(Y, 2)), want)
    close(returns, go.ravel())
    p = np.asarray(jax.nn.softmax(jnp.asarray(THETA)))
    after = (p[1 + FIRST, SECOND] * rewards[:, 1]).reshape(V, V).sum(axis=1)
    exact = np.concatenate([[(p[0] * (rewards[::V, 0] + after)).sum()], after])[STATES].ravel()
    a, _ = alg.gae(rewards.ravel(), exact, ONES.ravel(), OFFSETS, 1.0, 0.0)
    close(expected_gradient(named("pg"), advantage=a.reshape(Y, 2)), want)
    a, _ = alg.gae(rewards.ravel(), any_value, ONES.ravel(), OFFSETS, 1.0, 0.0)
    apart(expected_gradient(named("pg"), advantage=a.reshape(Y, 2)), want)


# -- off-policy ----------------------------------------------------------------------------------------------------


def weighted(loss, cap, level, **more):
    def f(t):
        return loss(t) * alg.mismatch_weight(t.old, t.behaviour, t.mask, cap, sequences=t.sequences, level=level, **more)

    return f


@pytest.mark.full
def test_sequence_importance_weights_without_a_cap_give_the_true_gradient():
    for action in ("truncate", "mask"):
        for name in ("pg", "clip", "cispo"):
            loss = weighted(named(name), np.inf, "sequence", action=action)
            close(expected_gradient(loss, sampler=BEHAVIOUR), -grad_return())
            apart(expected_gradient(weighted(named(name), 1.1, "sequence", action=action), sampler=BEHAVIOUR), -grad_return())
    apart(expected_gradient(named("pg"), sampler=BEHAVIOUR), -grad_return())


def test_token_importance_weights_without_a_cap_give_the_gradient_of_the_surrogate():
    """Decoupled PPO, token TIS, AIPO: E over the sampler's states of sum_a p(a|s) A(s, a), at any p, prox and sampler."""
    a = RNG.normal(size=(1 + V, V))  # any function of state and action
    visits = np.zeros(1 + V)
    np.add.at(visits, STATES.ravel(), np.repeat(np.asarray(probability(BEHAVIOUR)), 2))
    want = -grad_of(lambda th: jnp.sum(visits[:, None] * jax.nn.softmax(th) * a))
    free = {"clip_low": 1.0, "clip_high": 1e9}
    decoupled = weighted(named("clip", **free), np.inf, "token")
    aipo = named("cispo", cispo_max_ratio=np.inf)
    kept = {"sampler": BEHAVIOUR, "advantage": a[STATES, ACTIONS]}
    close(expected_gradient(decoupled, old=OLD, **kept), want)
    close(expected_gradient(aipo, old=BEHAVIOUR, **kept), want)
    close(expected_gradient(named("clip", **free), old=BEHAVIOUR, **kept), want)
    apart(expected_gradient(named("clip", **free), old=OLD, **kept), want)
    apart(expected_gradient(weighted(named("clip", **free), 1.1, "token"), old=OLD, **kept), want)


def test_off_policy_sequence_mask_drops_bad_sequences_the_policy_has_left():
    logp, behaviour = tokens_logp(THETA), tokens_logp(BEHAVIOUR)
    a = jnp.asarray(np.repeat(REWARD[:, None], 2, axis=1))
    keep = alg.off_policy_sequence_mask(logp, behaviour, a, jnp.asarray(ONES), jnp.asarray(SEQUENCES), 0.1)
    gone = (REWARD < 0) & (np.asarray(behaviour - logp).mean(axis=1) > 0.1)
    assert 0 < gone.sum() < Y
    np.testing.assert_array_equal(np.asarray(keep) == 0, np.repeat(gone[:, None], 2, axis=1))


# -- KL ------------------------------------------------------------------------------------------------------------


def by_state(f, visits_of):
    """Gradient of sum_s d(s) f(p(.|s), q(.|s)), d(s) fixed at the visits of a sampler."""
    visits = np.zeros(1 + V)
    np.add.at(visits, STATES.ravel(), np.repeat(np.asarray(probability(visits_of)), 2))
    q = jax.nn.log_softmax(jnp.asarray(REF))
    return grad_of(lambda th: jnp.sum(visits * f(jax.nn.log_softmax(th), q)))


def forward(p, q):
    return jnp.sum(jnp.exp(p) * (p - q), axis=1)


def backward(p, q):
    return jnp.sum(jnp.exp(q) * (q - p), axis=1)


def variation(p, q):
    return jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=1)


def kl_loss(estimator):
    return lambda t: alg.kl_penalty(t.logp, t.ref, t.old, t.mask, estimator)


@pytest.mark.parametrize(
    "estimator, kind",
    [("k2", forward), ("k3_unbiased", forward), ("k3", backward), ("low_var", backward), ("abs", variation)],
)
def test_kl_in_the_loss_on_policy(estimator, kind):
    close(expected_gradient(kl_loss(estimator)), by_state(kind, THETA))
    apart(by_state(forward, THETA), by_state(backward, THETA))


def test_kl_in_the_loss_off_policy_is_right_with_the_ratio_only():
    off = {"sampler": OLD, "old": OLD}
    close(expected_gradient(kl_loss("k3_unbiased"), **off), by_state(forward, OLD))
    for estimator in ("k2", "k3", "abs", "low_var"):
        for kind in (forward, backward, variation):
            apart(expected_gradient(kl_loss(estimator), **off), by_state(kind, OLD))


def test_k1_in_the_loss_would_do_nothing_and_is_refused():
    close(expected_gradient(lambda t: t.logp - t.ref), 0)
    with pytest.raises(ValueError, match="expected gradient is 0"):
        expected_gradient(kl_loss("k1"))
    with pytest.raises(ValueError, match="expected k2, k3"):
        expected_gradient(kl_loss("k4"))
    with pytest.raises(ValueError, match="expected k1, abs"):
        alg.kl_value(0.0, 0.0, "k3_unbiased")


def test_kl_in_the_reward():
    def gradient(estimator):
        cost = alg.kl_value(tokens_logp(THETA), tokens_logp(REF), estimator)
        rewards = alg.token_rewards(np.zeros(Y), ONES.ravel(), OFFSETS, cost.ravel(), 1.0)
        go = alg.token_returns(rewards, ONES.ravel(), OFFSETS, 1.0).reshape(Y, 2)
        return expected_gradient(named("pg"), advantage=go)

    whole = grad_of(lambda th: jnp.sum(probability(th) * (tokens_logp(th) - tokens_logp(REF)).sum(axis=1)))
    close(gradient("k1"), whole)
    close(gradient("k3"), whole - by_state(backward, THETA))
    close(gradient("low_var"), gradient("k3"))
    apart(whole, by_state(forward, THETA))  # the loss does not see that actions change later states
    for estimator in ("abs", "k2"):
        for other in (whole, by_state(forward, THETA), by_state(backward, THETA), 0 * whole):
            apart(gradient(estimator), other)


def test_low_var_loses_its_gradient_where_it_is_needed_most():
    d, one = jnp.array([-25.0, -5.0, 0.5, 15.0, 25.0]), jnp.ones(5, bool)
    grad = jax.grad(lambda x: alg.kl_penalty(x, 0 * d, x, one, "low_var").sum())(d)
    np.testing.assert_allclose(grad, [0, 0, 1 - np.exp(-0.5), 0, 0], atol=1e-12)
    assert np.abs(jax.grad(lambda x: alg.kl_penalty(x, 0 * d, x, one, "k3").sum())(d)).min() > 0.3


def test_small_kl_keeps_its_digits_in_fp32():
    with jax.enable_x64(False):
        d, one = jnp.float32([1e-4, -1e-5]), jnp.ones(2, bool)
        for estimator in ("k3", "low_var", "k3_unbiased"):
            np.testing.assert_allclose(alg.kl_penalty(d, 0 * d, d, one, estimator), d * d / 2, rtol=5e-3)


# -- stop-gradients and limits -------------------------------------------------------------------------------------


def test_weights_have_no_gradient():
    a, b = tokens_logp(OLD), tokens_logp(BEHAVIOUR)
    mask, ids = jnp.asarray(ONES), jnp.asarray(SEQUENCES)
    for level in ("token", "sequence", "geometric"):
        for action in ("truncate", "mask"):
            weight = functools.partial(alg.mismatch_weight, sequences=ids, level=level, action=action)
            f = lambda o, m: weight(o, m, mask, 9.0).sum()  # noqa: B023, E731
            assert all((np.asarray(g) == 0).all() for g in jax.grad(f, argnums=(0, 1))(a, b))
            assert f(a, b) != f(b, a)
    f = lambda o, m: (alg.off_policy_sequence_mask(o, m, o, mask, ids, 0.0) * 3).sum()  # noqa: E731
    assert all((np.asarray(g) == 0).all() for g in jax.grad(f, argnums=(0, 1))(a, b))


@pytest.mark.full
def test_ratios_have_the_gradient_of_their_paper():
    mask = jnp.asarray([[True, False, True, True, True, False]])
    ids = jnp.asarray([[1, 1, 1, 2, 2, 0]], jnp.int32)
    x = jnp.linspace(-1, 0, 6)[None]
    jacobian = {
        level: np.asarray(jax.jacobian(lambda z, k=level: alg.log_ratio(z, x * 0.5, mask, ids, k)[0])(x))[:, 0]
        for level in ("token", "sequence", "sequence_token")
    }
    own = np.diag(np.asarray(mask[0], float))
    np.testing.assert_allclose(jacobian["token"], own)
    np.testing.assert_allclose(jacobian["sequence_token"], own)
    half = np.zeros((6, 6))
    half[np.ix_([0, 2], [0, 2])] = half[np.ix_([3, 4], [3, 4])] = 0.5
    np.testing.assert_allclose(jacobian["sequence"], half)
    values = [alg.log_ratio(x, x * 0.5, mask, ids, k) for k in ("sequence", "sequence_token")]
    np.testing.assert_array_equal(*values)
    with pytest.raises(ValueError, match="geometric"):
        alg.log_ratio(x, x, mask, ids, "geometric")


@pytest.mark.full
def test_sums_over_sequences():
    ids = jnp.asarray([[1, 1, 2, 3, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]], jnp.int32)
    mask = (ids > 0) & (ids != 3)
    x = jnp.where(ids > 0, jnp.arange(15.0).reshape(3, 5), jnp.nan)
    total = alg.sequence_sum(x, ids)
    np.testing.assert_array_equal(total, [[1, 1, 2, 3, 0], [0] * 5, [10, 11, 12, 13, 14]])
    assert (jax.grad(lambda v: alg.sequence_sum(v, ids).sum())(x) == jnp.asarray([[2, 2, 1, 1, 0], [0] * 5, [1] * 5])).all()
    np.testing.assert_array_equal(alg.sequence_mean(x, mask, ids), [[0.5, 0.5, 2, 0, 0], [0] * 5, [10, 11, 0, 13, 14]])
    np.testing.assert_array_equal(alg.sequence_mean(jnp.where(mask, x, jnp.inf), mask, ids), alg.sequence_mean(x, mask, ids))


@pytest.mark.full
def test_a_value_counts_as_clipped_only_beyond_its_range():
    v, old, ret = RNG.normal(size=(3, 400))
    mask = RNG.random(400) < 0.9
    clipped = np.asarray(alg.value_loss(v, old, ret, mask, 0.5)[1]["clipped"], bool)
    grad = jax.grad(lambda x: alg.value_loss(x, old, ret, mask, 0.5)[0].sum())(jnp.asarray(v))
    np.testing.assert_allclose(grad, np.where(mask & ~clipped, v - ret, 0), atol=1e-15)
    bounded = np.clip(v, old - 0.5, old + 0.5)
    np.testing.assert_array_equal(clipped, mask & (bounded != v) & (abs(bounded - ret) > abs(v - ret)))
    assert 20 < clipped.sum() < 200
    small = alg.value_loss(old + 0.4 * v / abs(v).max(), old, ret, mask, 0.5)
    assert not np.asarray(small[1]["clipped"]).any()


def test_gspo_and_gspo_token_have_one_gradient_while_advantages_are_per_sequence():
    off, per_token = {"sampler": OLD, "old": OLD}, RNG.normal(size=(Y, 2))
    pair = [named("clip", ratio=level, clip_low=0.3, clip_high=0.2) for level in ("sequence", "sequence_token")]
    close(*[expected_gradient(f, **off) for f in pair])
    apart(*[expected_gradient(f, **off, advantage=per_token) for f in pair])


def test_limits():
    """Bounds at infinity leave the policy gradient times the ratio."""
    off = {"sampler": OLD, "old": OLD}
    free = {"clip_low": 1.0, "clip_high": 1e9}
    want = expected_gradient(lambda t: -jnp.exp(t.logp - t.old) * t.advantage, **off)
    for loss in (
        named("clip", **free),
        named("clip", **free, dual_clip=1e9),
        named("clip", **free, delta=1e10),
        named("cispo", cispo_max_ratio=np.inf),
        named("dppo", dppo_low=1.0, dppo_high=1.0),
    ):
        close(expected_gradient(loss, **off), want)
    soft = expected_gradient(named("sapo", sapo_tau_pos=1e-5, sapo_tau_neg=1e-5), **off)
    np.testing.assert_allclose(soft, want, atol=1e-8)
    geometric = expected_gradient(named("clip", ratio="geometric", clip_low=1e9, clip_high=1e9), **off)
    close(geometric, expected_gradient(named("clip", ratio="sequence", **free), **off))
    apart(expected_gradient(named("clip"), **off), want)


@pytest.mark.full
def test_gmpo_clips_tokens_before_their_mean():
    x = jnp.log(jnp.array([[3.0, 1.1, 0.2]]))
    ids, mask = jnp.ones((1, 3), jnp.int32), jnp.ones((1, 3), bool)
    for a, kept in ((1.0, [0.4, np.log(1.1), np.log(0.2)]), (-1.0, [np.log(3.0), np.log(1.1), -0.4])):
        f = lambda z: alg.gmpo_loss(z, 0 * x, jnp.full((1, 3), a), mask, ids, 0.4, 0.4)[0].mean()  # noqa: B023, E731
        value, grad = jax.value_and_grad(f)(x)
        geometric = np.exp(np.mean(kept))
        assert value == pytest.approx(-a * geometric, rel=1e-14)
        inside = np.array([a < 0, True, a > 0])
        np.testing.assert_allclose(grad[0], -a * geometric / 3 * inside, rtol=1e-13)


def test_zero_variance_groups_give_zero_gradient():
    for row in ("grpo", "dr_grpo", "gspo", "gmpo", "cispo", "rloo", "sapo", "dppo", "lite_ppo"):
        v = alg.PRESETS[row]
        a, zero = alg.group_advantages(np.full(Y, 0.3), np.zeros(Y), mean=v["advantage_mean"], std=v["advantage_std"])
        assert zero.all()
        assert (expected_gradient(named(v["policy_loss"], row), sampler=OLD, old=OLD, advantage=a) == 0).all()


# -- laws of the advantages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
def test_shift_scale_and_permutation(mean, std):
    scores, groups = RNG.normal(size=24), RNG.permutation(np.repeat(np.arange(6), 4))
    scores[3] = np.nan
    f = functools.partial(alg.group_advantages, mean=mean, std=std)
    base, _ = f(scores, groups)
    np.testing.assert_allclose(f(scores + 3, groups)[0], base, atol=1e-11)
    np.testing.assert_allclose(f(7 * scores, groups)[0], base * (7 if std == "none" else 1), rtol=1e-3, atol=1e-12)
    order = RNG.permutation(24)
    np.testing.assert_allclose(f(scores[order], groups[order])[0], base[order], atol=1e-12)
    np.testing.assert_allclose(f(scores, 10 - groups)[0], base, atol=1e-12)
    present = np.isfinite(scores)
    np.testing.assert_allclose(f(scores[present], groups[present])[0], base[present], atol=1e-12)


def test_equal_scores_never_divide_by_almost_nothing():
    for mean in ("none", "batch"):
        a, _ = alg.group_advantages([1.0, 1.0, 0.0, 4.0], [0, 0, 1, 2], mean=mean, std="group")
        assert np.abs(a).max() < 5


def test_advantages_refuse_what_they_do_not_know():
    for kwargs, message in (
        ({"mean": "median"}, "advantage_mean='median'"),
        ({"std": "mad"}, "advantage_std='mad'"),
        ({"mean": "greedy"}, "baseline_N"),
    ):
        with pytest.raises(ValueError, match=message):
            alg.group_advantages([1.0], [0], **kwargs)


def test_clip_and_whiten():
    np.testing.assert_array_equal(alg.clip_advantages([-3.0, 0.5, 9.0], None, 2.0), [-3.0, 0.5, 2.0])
    np.testing.assert_array_equal(alg.clip_advantages([-3.0, 0.5], -1.0, None), [-1.0, 0.5])
    a, mask = RNG.normal(size=50), RNG.random(50) < 0.6
    white = alg.whiten(a, mask)
    assert abs(white[mask].mean()) < 1e-14 and white[mask].std(ddof=1) == pytest.approx(1, abs=1e-7)
    np.testing.assert_allclose(alg.whiten(5 * a - 2, mask), white, atol=1e-6)
    assert (alg.whiten([3.0, 4.0], [False, True]) == 0).all() and (alg.whiten([3.0], [False]) == 0).all()


@pytest.mark.parametrize("mean", ["step", "group", "none"])
@pytest.mark.parametrize("std", ["step", "group", "none"])
def test_whitening_by_group_and_by_step(mean, std):
    """Written out token by token: the mean of the level, then the root of the sum of squares about it over n - 1 of the level."""
    a, mask, groups = RNG.normal(size=60) + 2, RNG.random(60) < 0.7, RNG.integers(5, 9, size=60)
    mask[groups == 5], groups[0], mask[0] = False, 5, True  # a group of one token: no deviation of its own
    tokens = {"step": lambda t: np.flatnonzero(mask), "group": lambda t: np.flatnonzero(mask & (groups == groups[t]))}
    centre = {t: a[t] - (a[tokens[mean](t)].mean() if mean != "none" else 0.0) for t in np.flatnonzero(mask)}
    want = np.zeros(60)
    for t, x in centre.items():
        of = tokens[std](t) if std != "none" else ()
        rms = np.sqrt(sum(centre[u] ** 2 for u in of) / max(len(of) - 1, 1) + 1e-8) if std != "none" else 1.0
        want[t] = 0.0 if len(of) == 1 else x / rms
    found = alg.whiten(a, mask, groups, mean, std)
    np.testing.assert_allclose(found, want, atol=1e-12)
    if mean == "group":  # what is added to a whole group goes
        np.testing.assert_allclose(alg.whiten(a + groups, mask, groups, mean, std), found, atol=1e-9)
    if mean == std == "group":  # and what a group is multiplied with
        np.testing.assert_allclose(alg.whiten(a * groups, mask, groups, mean, std), found, atol=1e-6)
    if mean == std == "step":
        np.testing.assert_array_equal(found, alg.whiten(a, mask))


# -- laws of token returns -----------------------------------------------------------------------------------------


def multi_turn(seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, 5, 0, 9, 1, 12])
    mask = rng.random(27) < 0.6
    return offsets, mask, rng.normal(size=27), rng.normal(size=27)


def test_gae_at_lambda_one_and_zero():
    offsets, mask, rewards, values = multi_turn()
    a, returns = alg.gae(rewards, values, mask, offsets, 0.9, 1.0)
    go = alg.token_returns(rewards, mask, offsets, 0.9)
    np.testing.assert_allclose(a, np.where(mask, go - values, 0), atol=1e-13)
    np.testing.assert_allclose(returns, go, atol=1e-13)
    a, _ = alg.gae(rewards, values, mask, offsets, 0.9, 0.0)
    for i in range(5):
        steps = [t for t in range(offsets[i], offsets[i + 1]) if mask[t]]
        for t, after in zip(steps, [*values[steps[1:]], 0.0], strict=True) if steps else ():
            assert a[t] == pytest.approx(rewards[t] + 0.9 * after - values[t], abs=1e-13)


def test_skipped_observations_are_as_if_removed():
    offsets, mask, rewards, values = multi_turn()
    inside = np.concatenate([[0], np.cumsum(mask)])[offsets]
    junk = [np.where(mask, x, np.nan) for x in (rewards, values)]
    lam = np.array([0.1, 0.5, 0.9, 1.0, 0.0])
    for got, want in zip(
        alg.gae(*junk, mask, offsets, 0.9, lam),
        alg.gae(rewards[mask], values[mask], np.ones(mask.sum(), bool), inside, 0.9, lam),
        strict=True,
    ):
        np.testing.assert_array_equal(got[mask], want)
        assert (got[~mask] == 0).all()


def test_adaptive_lambda():
    np.testing.assert_allclose(alg.adaptive_lambda([0, 1, 20, 100, 1000], 0.05), [0, 0, 0, 0.8, 0.98], atol=1e-15)
    for length in (100, 5000):  # the weights of all TD errors sum to alpha * |y|
        assert 1 / (1 - alg.adaptive_lambda([length], 0.05)[0]) == pytest.approx(0.05 * length, rel=1e-10)
    with pytest.raises(ValueError, match="lam_alpha"):
        alg.adaptive_lambda([3], 0.0)


def test_token_rewards_end_at_the_last_scored_token():
    offsets, mask = [0, 4, 7, 9], [False, True, True, False, True, False, True, False, False]
    got = alg.token_rewards([2.0, np.nan, 5.0], mask, offsets, np.full(9, 3.0), 0.1)
    np.testing.assert_allclose(got, [0, -0.3, 1.7, 0, 0, 0, 0, 0, 0], atol=1e-15)
    np.testing.assert_array_equal(alg.token_rewards([2.0, 1.0, 5.0], mask, offsets), [0, 0, 2, 0, 0, 0, 1, 0, 0])


def test_shared_prefix_mask():
    answers = [[1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [9], [1, 2, 3]]  # the last is of another group
    tokens, offsets = sum(([7, 7, *a] for a in answers), []), np.cumsum([0] + [2 + len(a) for a in answers])
    scores, groups = [1.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 0, 0, 1]

    def lost(minimum, scores=scores):
        allowed = alg.shared_prefix_mask(tokens, offsets, np.full(5, 2), groups, scores, minimum)
        return [int((~allowed[s:e]).sum()) for s, e in zip(offsets[:-1], offsets[1:], strict=True)]

    assert lost(1) == [2, 2, 2, 0, 0] and lost(3) == [0] * 5
    assert lost(1, [np.nan, 0.0, 1.0, 1.0, 0.0]) == [0, 3, 3, 0, 0]  # answer 1 lies whole in answer 2
    assert lost(1, [0.1 + 0.2, 0.3, 0.3, 1.0, 0.0]) == [0] * 5


# -- entropy, registry, presets ------------------------------------------------------------------------------------


def test_adaptive_entropy_coefficient():
    step = lambda c, e: [float(x) for x in alg.adaptive_entropy_coef(c, e, 0.2, 0.005, 0.01)]  # noqa: E731
    assert step(0.0, 0.1) == [0.005, 0.0]
    assert step(0.005, 0.1) == [0.01, 0.005]
    assert step(0.01, 0.1) == [0.01, 0.01]  # the highest
    assert step(0.01, 0.3) == [0.005, 0.0]  # above the target: falls, not applied
    assert step(0.002, 0.3) == [0.0, 0.0]
    assert step(0.004, 0.2) == [0.004, 0.004]


def test_a_user_registers_a_policy_loss():
    @alg.register_policy_loss("mine")
    def mine(tokens, cfg):
        return -jnp.where(tokens.mask, tokens.logp * cfg.clip_low, 0), {}

    try:
        assert alg.policy_loss("mine").function is mine
        assert alg.register_policy_loss("mine")(mine) is mine  # a module that is imported twice
        with pytest.raises(ValueError, match="'mine' exists"):
            alg.register_policy_loss("mine")(lambda tokens, cfg: None)
    finally:
        del alg.POLICY_LOSSES["mine"]
    with pytest.raises(ValueError, match="expected cispo, clip, dppo, pg, sapo"):
        alg.policy_loss("mine")


def test_built_in_names_are_refused_where_users_register():
    """`advantages` would run the built-in estimator, and never the function."""
    from jaxrl.rl.advantages import ESTIMATORS

    for name in ESTIMATORS:
        with pytest.raises(ValueError, match=f"advantage '{name}' exists"):
            alg.register_advantage(name)(lambda inputs: inputs.scores)
    assert not alg.ADVANTAGES
    with pytest.raises(ValueError, match="'clip' exists"):
        alg.register_policy_loss("clip")(lambda tokens, cfg: None)


def test_choices_without_meaning_are_refused():
    for name, changes in (
        ("pg", {"ratio": "sequence"}),
        ("dppo", {"ratio": "sequence"}),
        ("sapo", {"ratio": "geometric"}),
        ("clip", {"ratio": "geometric", "dual_clip": 3.0}),
        ("clip", {"ratio": "word"}),
    ):
        with pytest.raises(ValueError, match="ratio="):
            expected_gradient(named(name, **changes))
    for kwargs in ({"level": "word"}, {"level": "sequence"}, {"action": "drop"}):
        with pytest.raises(ValueError, match="mismatch"):
            alg.mismatch_weight(jnp.zeros(2), jnp.zeros(2), jnp.ones(2, bool), 2.0, **kwargs)
    for aggregation in ("constant", "prompt_mean", "mean"):
        with pytest.raises(ValueError, match="aggregation="):
            alg.aggregation_weights([1, 2], aggregation)


@pytest.mark.full
def test_every_preset_has_every_option_and_known_choices():
    keys = list(alg.PRESETS["grpo"])
    for name, row in alg.PRESETS.items():
        assert sorted(row) == sorted(keys), name
        alg.policy_loss(row["policy_loss"])
        alg.group_advantages([1.0], [0], mean=row["advantage_mean"], std=row["advantage_std"], baseline_N=[0.0])
        alg.aggregation_weights([1], row["aggregation"], groups_N=[0], max_tokens=4)
        if row["kl.placement"] == "reward":
            alg.kl_value(0.0, 0.0, row["kl.estimator"])
        else:
            alg.kl_penalty(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool), row["kl.estimator"])
        assert row["advantage"] in ("outcome", "returns", "gae", "turn", "gigpo", "dpo") and row["dynamic_sampling"] in ("off", "mask", "refill")
