"""jaxrl.algorithms against the float64 oracle, value and gradient, on random batches full of corner cases."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import algorithm_cases, oracle
from helpers.tiers import first_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl import algorithms as alg

SEEDS = range(48)  # even ones with extreme log-probs
CFG = {
    "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0, "delta": 0.0, "ratio": "token", "cispo_max_ratio": 1.4,
    "cispo_min_ratio": 0.0, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, "dppo_low": 0.05, "dppo_high": 0.04,
}  # fmt: skip


def registered(name, **changes):
    cfg = SimpleNamespace(**{**CFG, **changes})
    return lambda t: alg.policy_loss(name)(t, cfg)[0]


def kl(estimator):
    return lambda t: alg.kl_penalty(t.logp, t.ref, t.old, t.mask, estimator), lambda b, x: oracle.kl(b, x, estimator)


# name -> (ours: Tokens -> per-token loss, the oracle's: (batch, log-probs) -> {slot: loss})
LOSSES = {
    "clip": (registered("clip"), lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28)),
    "dual clip": (registered("clip", dual_clip=1.5), lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28, dual=1.5)),
    "delta": (registered("clip", delta=1.6), lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28, delta=1.6)),
    "dual and delta": (
        registered("clip", dual_clip=3.0, delta=2.0),
        lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28, dual=3.0, delta=2.0),
    ),
    "gspo": (registered("clip", ratio="sequence"), lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28, "sequence")),
    "gspo token": (
        registered("clip", ratio="sequence_token", dual_clip=1.5),
        lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28, "sequence_token", dual=1.5),
    ),
    "gmpo": (registered("clip", ratio="geometric"), lambda b, x: oracle.gmpo(b, x, 0.2, 0.28)),
    "cispo": (registered("cispo"), lambda b, x: oracle.cispo(b, x, 1.4, 0.0)),
    "cispo, two bounds, by sequence": (
        registered("cispo", cispo_min_ratio=0.8, ratio="sequence"),
        lambda b, x: oracle.cispo(b, x, 1.4, 0.8, "sequence"),
    ),
    "sapo": (registered("sapo"), lambda b, x: oracle.sapo(b, x, 1.0, 1.05)),
    "sapo by sequence": (
        registered("sapo", ratio="sequence", sapo_tau_pos=2.0),
        lambda b, x: oracle.sapo(b, x, 2.0, 1.05, "sequence"),
    ),
    "dppo": (registered("dppo"), lambda b, x: oracle.dppo(b, x, 0.05, 0.04)),
    "topr": (registered("topr", ratio="sequence"), lambda b, x: oracle.topr(b, x, False)),
    "topr by token": (registered("topr"), lambda b, x: oracle.topr(b, x, True)),
    "pg": (registered("pg"), oracle.pg),
    "nll": (lambda t: alg.nll_loss(t.logp, t.mask), oracle.nll),
    "value": (lambda t: alg.value_loss(t.logp, t.old, t.ref, t.mask, None)[0], lambda b, x: oracle.value(b, x, None)),
    "value, clipped": (
        lambda t: alg.value_loss(t.logp, t.old, t.ref, t.mask, 0.2)[0],
        lambda b, x: oracle.value(b, x, 0.2),
    ),
    **{f"kl {e}": kl(e) for e in ("k2", "k3", "k3_unbiased", "abs", "low_var")},
}
WEIGHTS = [
    (level, action, cap, low)
    for level in ("token", "sequence", "geometric")
    for action, cap, low in (("truncate", 1.1, 0.0), ("truncate", np.inf, 0.0), ("mask", 1.1, 0.0), ("mask", 1.2, 0.9))
]
FIELDS = ("logp", "old", "behaviour", "ref", "advantage", "mask", "sequences", "weights")


@jax.jit
def everything(fields):
    """name -> (per-token loss, gradient of the weighted sum), and every mismatch weight."""
    tokens = alg.Tokens(
        **{k: fields[k] for k in FIELDS if k != "weights"}, entropy=jnp.zeros_like(fields["logp"]), columns={}
    )

    def total(logp, ours):
        loss = ours(tokens._replace(logp=logp))
        return jnp.sum(fields["weights"] * loss), loss

    out = {}
    for name, (ours, _) in LOSSES.items():
        grad, loss = jax.grad(total, has_aux=True)(tokens.logp, ours)
        out[name] = loss, grad
    for level, action, cap, low in WEIGHTS:
        out[level, action, cap, low] = alg.mismatch_weight(
            tokens.old, tokens.behaviour, tokens.mask, cap, sequences=tokens.sequences, level=level, action=action, low=low
        )
    out["keep"] = alg.off_policy_sequence_mask(
        tokens.logp, tokens.behaviour, tokens.advantage, tokens.mask, tokens.sequences, 0.05
    )
    return {str(k): v for k, v in out.items()}


def evaluate(batch, dtype):
    with jax.enable_x64(dtype == np.float64):
        fields = {k: getattr(batch, k) for k in FIELDS}
        fields = {k: v.astype(dtype) if v.dtype == np.float64 else v for k, v in fields.items()}
        return jax.tree.map(np.asarray, everything(fields))


@functools.cache
def case(seed):
    return algorithm_cases.batch(seed, extremes=seed % 2 == 0)


@functools.cache
def ours(seed, dtype):
    return evaluate(case(seed), dtype)


@functools.cache
def wanted(name, seed):
    """(loss, gradient) of the oracle, both dense; the gradient by complex steps, exact to rounding."""
    b, formula = case(seed), LOSSES[name][1]
    loss, grad = np.zeros(b.mask.shape), np.zeros(b.mask.shape)
    for at, v in formula(b, b.logp.tolist()).items():
        loss[at] = v
    for r, j in oracle.scored(b):
        x = b.logp.tolist()
        x[r][j] = complex(x[r][j], 1e-30)
        grad[r, j] = sum(b.weights[at] * (v.imag if isinstance(v, complex) else 0) for at, v in formula(b, x).items()) / 1e-30
    return loss, grad


def float64_agrees(name, seed):
    (loss, grad), (want, want_grad) = ours(seed, np.float64)[name], wanted(name, seed)
    assert loss.dtype == grad.dtype == np.float64
    np.testing.assert_allclose(loss, want, rtol=1e-12, atol=1e-12, err_msg=f"{name}, seed {seed}")
    scale = np.maximum(1, np.abs(want_grad).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(grad / scale, want_grad / scale, rtol=0, atol=1e-12, err_msg=f"{name}, seed {seed}")


@first_cases(6, "name", LOSSES)
def test_float64_agrees_to_1e12(name):
    for seed in SEEDS:
        float64_agrees(name, seed)


def absolute_terms(name, seed):
    """Sums of the absolute values of what the weighted loss, and one token's gradient, is a sum of."""
    b, (want, grad) = case(seed), wanted(name, seed)
    if name.removeprefix("kl ") in ("k3", "k3_unbiased", "low_var"):
        terms = oracle.kl_terms(b, name.removeprefix("kl "))
        return [sum(b.weights[at] * t[i] for at, t in terms.items()) for i in (0, 1)]
    return np.abs(b.weights * want).sum(), np.abs(grad).sum()


def fp32_agrees(name, seed):
    b, (terms, grad_terms) = case(seed), absolute_terms(name, seed)
    (loss, grad), (want, want_grad) = ours(seed, np.float32)[name], wanted(name, seed)
    assert loss.dtype == grad.dtype == np.float32
    assert abs((b.weights * loss).sum() - (b.weights * want).sum()) <= 1e-6 * terms, f"{name}, seed {seed}"
    np.testing.assert_allclose(grad, want_grad, rtol=0, atol=1e-6 * grad_terms, err_msg=f"{name}, seed {seed}")


@pytest.mark.full
@first_cases(6, "name", LOSSES)
def test_fp32_agrees_to_1e6_of_the_sum_of_absolute_terms(name):
    for seed in SEEDS:
        fp32_agrees(name, seed)


@pytest.mark.full
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(st.integers(1000, 2**31))
def test_both_on_batches_that_hypothesis_draws(seed):
    for name in LOSSES:
        float64_agrees(name, seed)
        fp32_agrees(name, seed)


@pytest.mark.parametrize("name", map(str, [*WEIGHTS, "keep"]))
def test_weights_agree(name):
    for seed in SEEDS:
        b, want = case(seed), np.zeros((algorithm_cases.ROWS, algorithm_cases.SLOTS))
        row = next((w for w in WEIGHTS if str(w) == name), None)
        rows = oracle.mismatch(b, row[2], row[0], row[1], row[3]) if row else oracle.keep_sequence(b, 0.05)
        for at, v in rows.items():
            want[at] = v
        np.testing.assert_allclose(ours(seed, np.float64)[name], want, rtol=1e-12, atol=1e-12, err_msg=f"seed {seed}")
        np.testing.assert_allclose(ours(seed, np.float32)[name], want, rtol=1e-5, atol=1e-7, err_msg=f"seed {seed}")


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_what_does_not_count_changes_no_bit(junk):
    for seed in range(4):
        for dtype in (np.float32, np.float64):
            clean, dirty = ours(seed, dtype), evaluate(case(seed).junk(junk), dtype)
            for name, want in clean.items():
                jax.tree.map(lambda g, w, n=name: np.testing.assert_array_equal(g, w, err_msg=n), dirty[name], want)
                assert all(np.isfinite(x).all() for x in jax.tree.leaves(dirty[name])), name


def test_splitting_rows_into_microbatches_leaves_sums_equal():
    b = case(1)
    parts = []
    for r in range(algorithm_cases.ROWS):  # one row each, the others empty
        alone = np.arange(algorithm_cases.ROWS)[:, None] == r
        blank = {"mask": b.mask & alone, "sequences": b.sequences * alone, "weights": b.weights * alone}
        parts.append(evaluate(SimpleNamespace(**{**vars(b), **blank}), np.float64))
    for name in LOSSES:
        whole_loss, whole_grad = ours(1, np.float64)[name]
        np.testing.assert_array_equal(sum(p[name][0] for p in parts), whole_loss)
        np.testing.assert_array_equal(sum(p[name][1] for p in parts), whole_grad)


def test_stats_say_which_tokens_were_clipped():
    for seed in range(12):
        b = case(seed)
        args = [jnp.asarray(x) for x in (b.logp, b.old, b.advantage, b.mask)]
        _, stats = alg.clipped_policy_loss(*args, 0.2, 0.28, dual_clip=1.5)
        for at in oracle.scored(b):
            r, a = oracle.exp(b.logp[at] - b.old[at]), b.advantage[at]
            flags = {"clipped_low": a < 0 and r < 0.8, "clipped_high": a > 0 and r > 1.28, "dual_clipped": a < 0 and r > 1.5}
            flags["clipped"] = flags["clipped_low"] or flags["clipped_high"]
            assert {k: bool(stats[k][at]) for k in flags} == flags
        assert all((np.asarray(v)[~b.mask] == 0).all() for v in stats.values())


# -- host functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", ["none", "group", "batch", "leave_one_out", "greedy"])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
def test_advantages(mean, std):
    for seed in range(60):
        t = algorithm_cases.ragged(seed)
        got, zero = alg.group_advantages(t.scores, t.groups, mean=mean, std=std, baseline_N=t.baseline)
        want = np.array(oracle.advantages(t.scores, t.groups, mean, std, t.baseline))
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=f"seed {seed}")
        assert zero.tolist() == [bool((want[t.groups == g] == 0).all()) for g in t.groups]


def test_token_functions():
    for seed in range(60):
        t = algorithm_cases.ragged(seed)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12, err_msg=f"seed {seed}")
        close(
            alg.token_rewards(t.scores, t.mask, t.offsets, t.kl, 0.1),
            oracle.token_rewards(t.scores, t.mask, t.offsets, t.kl, 0.1),
        )
        junk = np.where(t.mask, t.rewards, np.nan), np.where(t.mask, t.values, np.nan)
        close(
            alg.token_returns(junk[0], t.mask, t.offsets, 0.9),
            oracle.reward_to_go(t.rewards, t.mask, t.offsets, 0.9),
        )
        lam = np.linspace(0, 1, len(t.scores))
        got = alg.gae(*junk, t.mask, t.offsets, 0.9, lam)
        close(got, oracle.gae(t.rewards, t.values, t.mask, t.offsets, 0.9, lam))
        every = alg.gae(*junk, t.mask, t.offsets, 1.0, 0 * lam + 0.5)
        close(alg.gae(*junk, t.mask, t.offsets, 1.0, 0.5), every)
        close(alg.whiten(junk[0], t.mask), oracle.whiten(t.rewards, t.mask))
        for minimum in (1, 2, 4):
            args = t.tokens, t.offsets, t.prompts, t.groups, t.scores, minimum
            assert alg.shared_prefix_mask(*args).tolist() == oracle.allowed(*args)


def test_kl_value_is_the_estimator():
    for seed in SEEDS:
        b = case(seed)
        for estimator in ("k1", "abs", "k2", "k3", "low_var"):
            with np.errstate(over="ignore"):
                got = alg.kl_value(b.logp, b.ref, estimator)
            for at in oracle.scored(b):
                d = b.logp[at] - b.ref[at]
                if d < -20 and estimator == "k3":  # the oracle bounds the exponent
                    continue
                want = d if estimator == "k1" else oracle.kl(b, b.logp.tolist(), estimator)[at]
                assert got[at] == pytest.approx(want, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"])
def test_aggregation_weights(aggregation):
    rng = np.random.default_rng(0)
    for _ in range(40):
        n = int(rng.integers(0, 7))
        counts, groups = rng.integers(0, 4, n), rng.integers(0, 3, n) * 5
        got = alg.aggregation_weights(counts, aggregation, groups_N=groups, max_tokens=9)
        np.testing.assert_allclose(got, oracle.weights(counts, aggregation, groups, 9), rtol=1e-15)


def test_token_means_of_some_trajectories_each():
    rng = np.random.default_rng(0)
    for _ in range(40):
        n = int(rng.integers(0, 9))
        counts = rng.integers(0, 4, n)
        weights = lambda kind, k=0: alg.aggregation_weights(counts, kind, chunk=k)  # noqa: B023, E731
        for k in (2, 3):
            np.testing.assert_allclose(weights("token_mean", k), oracle.weights(counts, "token_mean", None, 0, k), rtol=1e-15)
        np.testing.assert_allclose(weights("token_mean", 1), weights("sequence_mean"), rtol=1e-15)
        np.testing.assert_allclose(weights("token_mean", n + 1), weights("token_mean"), rtol=1e-15)


def test_explained_variance():
    returns, mask = np.array([1.0, 2.0, 4.0, np.nan]), np.array([True, True, True, False])
    assert alg.explained_variance(returns, returns, mask) == 1.0
    assert alg.explained_variance(np.full(4, 7.0), returns, mask) == pytest.approx(0.0, abs=1e-15)
    values = np.array([0.0, 2.0, 1.0, np.nan])
    want = 1 - np.var([1.0, 0.0, 3.0]) / np.var([1.0, 2.0, 4.0])
    assert alg.explained_variance(values, returns, mask) == pytest.approx(want, rel=1e-14)
    assert alg.explained_variance(values, np.ones(4), mask) == 0.0
    assert alg.explained_variance(values, returns, np.zeros(4, bool)) == 0.0


# -- whole rows ----------------------------------------------------------------------------------------------------


def token_mean(sequences):
    return sum(sum(s) for s in sequences) / sum(len(s) for s in sequences)


def sequence_mean(sequences):
    return oracle.mean(oracle.mean(s) for s in sequences)


PAPERS = {  # row -> (advantage's mean and std, per-token loss, how its tokens become one number), as the papers have it
    "grpo": ("group", "group", lambda b, x: oracle.clip_loss(b, x, 0.2, 0.2), token_mean),
    "grpo_paper": (
        "group",
        "group",
        lambda b, x: plus(oracle.clip_loss(b, x, 0.2, 0.2), oracle.kl(b, x, "k3"), 0.04),
        sequence_mean,
    ),
    "dr_grpo": ("group", "none", lambda b, x: oracle.clip_loss(b, x, 0.2, 0.2), lambda s: oracle.mean(sum(y) / 64 for y in s)),
    "dapo": ("group", "group", lambda b, x: oracle.clip_loss(b, x, 0.2, 0.28), token_mean),
    "gspo": (
        "group",
        "group",
        lambda b, x: oracle.clip_loss(b, x, 3e-4, 4e-4, "sequence"),
        lambda s: oracle.mean(y[0] for y in s),
    ),
    "gmpo": ("group", "group", lambda b, x: oracle.gmpo(b, x, 0.4, 0.4), lambda s: oracle.mean(y[0] for y in s)),
    "cispo": ("group", "group", lambda b, x: oracle.cispo(b, x, 5.0, 0.0), token_mean),
    "rloo": ("leave_one_out", "none", oracle.pg, lambda s: oracle.mean(sum(y) for y in s)),
    "sapo": ("group", "group", lambda b, x: oracle.sapo(b, x, 1.0, 1.05), sequence_mean),
    "dppo": ("group", "group", lambda b, x: oracle.dppo(b, x, 0.2, 0.2), token_mean),
    "lite_ppo": ("group", "batch", lambda b, x: oracle.clip_loss(b, x, 0.2, 0.2), token_mean),
}


def plus(a, b, coef):
    return {at: a[at] + coef * b[at] for at in a}


@pytest.mark.parametrize("name", PAPERS)
def test_a_row_is_its_papers_objective(name):
    b, row, (mean, std, per_token, aggregate) = case(1), alg.PRESETS[name], PAPERS[name]
    owners = sorted({(r, int(b.sequences[r, j])) for r, j in oracle.scored(b)})
    rng = np.random.default_rng(3)
    scores, groups = rng.choice([0.0, 1.0, 0.5], len(owners)), np.arange(len(owners)) % 3

    def spread(per_sequence):
        out = np.zeros(b.mask.shape)
        for r, j in oracle.scored(b):
            out[r, j] = per_sequence[owners.index((r, int(b.sequences[r, j])))]
        return out

    counts = [sum(b.sequences[r, j] == i for q, j in oracle.scored(b) if q == r) for r, i in owners]
    a, _ = alg.group_advantages(scores, groups, mean=row["advantage_mean"], std=row["advantage_std"])
    weights = spread(alg.aggregation_weights(counts, row["aggregation"], groups_N=groups, max_tokens=64))
    with jax.enable_x64(True):
        fields = {k: jnp.asarray(getattr(b, k)) for k in FIELDS[:-1]} | {"advantage": jnp.asarray(spread(a))}
        tokens = alg.Tokens(**fields, entropy=None, columns={})
        got = jnp.sum(weights * alg.policy_loss(row["policy_loss"])(tokens, SimpleNamespace(**row))[0])
        if row["kl.coef"]:
            penalty = alg.kl_penalty(tokens.logp, tokens.ref, tokens.old, tokens.mask, row["kl.estimator"])
            got += row["kl.coef"] * jnp.sum(weights * penalty)
    b = SimpleNamespace(**{**vars(b), "advantage": spread(oracle.advantages(scores, groups, mean, std))})
    losses = per_token(b, b.logp.tolist())
    sequences = [[losses[r, j] for q, j in oracle.scored(b) if q == r and b.sequences[r, j] == i] for r, i in owners]
    assert len(sequences) > 4 and np.abs(a).max() > 0
    assert float(got) == pytest.approx(aggregate(sequences), rel=1e-12)
