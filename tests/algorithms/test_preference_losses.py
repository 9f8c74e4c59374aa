"""Losses of preferences: their derivatives are their difference quotients, and what the papers say of them holds."""


import numpy as np
import pytest
from helpers.preference_options import options

from jaxrl.algorithms import preferred_advantages
from jaxrl.algorithms.preference import LOSSES, Table, needs_reference, preference_loss, weighted


def batch(pairs=5, seed=0, spread=4.0):
    """(s, r, lengths, table): answers of pairs, in mixed order, with sums of log-probs as answers of 3 to 30 tokens have them."""
    rng = np.random.default_rng(seed)
    n = 2 * pairs
    lengths = rng.integers(3, 30, n)
    s = -rng.uniform(0.2, 2.0, n) * lengths
    order = rng.permutation(n)
    good = np.zeros(n, bool)
    good[order[:pairs]] = True
    return s, s + rng.normal(size=n) * spread, lengths, Table(order[:pairs], order[pairs:], good)


CASES = {**{name: {} for name in LOSSES}, "dpo smoothed": {"label_smoothing": 0.2}, "robust smoothed": {"label_smoothing": 0.2},
         "aot smoothed": {"label_smoothing": 0.2}, "simpo smoothed": {"label_smoothing": 0.2, "simpo_gamma": 1.5},
         "cpo smoothed": {"label_smoothing": 0.2}, "ipo sums": {"ipo_mean": False},
         "kto weighted": {"desirable_weight": 2.0, "undesirable_weight": 0.5},
         "dpo rpo": {"rpo_alpha": 0.7}, "discopop warm": {"discopop_tau": 0.8}}


@pytest.mark.parametrize("case", CASES)
def test_the_derivative_is_the_difference_quotient(case):
    s, r, lengths, table = batch()
    o = options(case.split(" ")[0], **CASES[case])
    for beta in (0.1, 0.9):
        o.beta = beta
        at = lambda x: preference_loss(x, r, lengths, table, o, z0=0.4)[0]  # noqa: E731, B023
        _, derivative, _ = preference_loss(s, r, lengths, table, o, z0=0.4)
        assert derivative.dtype == np.float64 and np.abs(derivative).max() > 0
        for i, step in enumerate(np.eye(len(s)) * 1e-5):
            assert derivative[i] == pytest.approx((at(s + step) - at(s - step)) / 2e-5, rel=2e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_far_sums_give_finite_numbers(name):
    """Log-ratios of thousands of nats, a sum of exactly 0, and a step without pairs or without good answers."""
    s, r, lengths, table = batch()
    for x in (s * 1e3, s * 0, np.where(table.good, s * 1e3, 0.0)):
        if name == "discopop" and x is not s:
            continue  # its exponential is meant
        loss, derivative, metrics = preference_loss(x, r, lengths, table, options(name))
        assert np.isfinite(loss) and np.isfinite(derivative).all() and all(map(np.isfinite, metrics.values()))
    if LOSSES[name].unpaired:
        none = np.zeros(0, int)
        for good in (np.zeros(10, bool), np.ones(10, bool)):
            loss, derivative, metrics = preference_loss(s, r, lengths, Table(none, none, good), options(name))
            assert np.isfinite(loss) and ("reward/chosen" in metrics) == good[0] and "reward/accuracy" not in metrics


def test_a_policy_that_is_the_reference():
    """log 2 and no preference, whatever the lengths; the descent raises what is chosen and lowers what is rejected."""
    s, _, lengths, table = batch()
    for name, row in LOSSES.items():
        loss, derivative, metrics = preference_loss(s, s, lengths, table, options(name))
        if row.reference:
            assert metrics["reward/accuracy"] == 0.5 and metrics["reward/margin"] == metrics["reward/chosen"] == 0
        if name in ("dpo", "dpo_norm", "robust"):
            assert loss == pytest.approx(np.log(2))
        if name not in ("nll", "apo_down", "discopop"):  # the gate of discopop shuts as fast as its exponential falls
            assert (derivative[table.chosen] < 0).all() and (derivative[table.rejected] > 0).all(), name


def test_labels_that_are_flipped():
    """Robust DPO of labels flipped with probability eps is DPO of the true ones, on average; conservative DPO is least where the model's own
    probability of the order is 1 - eps."""
    s, r, lengths, table = batch(seed=3)
    flipped = Table(table.rejected, table.chosen, ~table.good)
    eps, o = 0.3, options("robust", label_smoothing=0.3)
    right, wrong = (preference_loss(s, r, lengths, t, o)[0] for t in (table, flipped))
    assert (1 - eps) * right + eps * wrong == pytest.approx(preference_loss(s, r, lengths, table, options("dpo"))[0])
    pair, o = Table(np.array([0]), np.array([1]), np.array([True, False])), options("dpo", label_smoothing=0.3)
    at = np.log(0.7 / 0.3) / o.beta
    assert preference_loss([at, 0], [0, 0], [1, 1], pair, o)[1] == pytest.approx([0, 0])


def test_exo_is_a_divergence_and_ipo_has_its_target():
    pair = Table(np.array([0]), np.array([1]), np.array([True, False]))
    o = options("exo", label_smoothing=0.2)
    loss, derivative, _ = preference_loss([np.log(4) / o.beta, 0], [0, 0], [1, 1], pair, o)
    assert loss == pytest.approx(0, abs=1e-12) and derivative == pytest.approx([0, 0])
    loss, derivative, _ = preference_loss([30.0, 0], [0, 0], [6, 1], pair, options("ipo"))  # 30 / 6 nats a token = 1 / (2 beta)
    assert loss == 0 and derivative == pytest.approx([0, 0])
    assert preference_loss([30.0, 0], [0, 0], [6, 1], pair, options("ipo", ipo_mean=False))[0] == pytest.approx(25**2)


def test_aot_of_one_pair_is_dpo_and_of_many_does_not_ask_who_belongs_to_whom():
    one = batch(pairs=1)
    for name in ("aot", "aot_unpaired"):
        a, b = preference_loss(*one, options(name)), preference_loss(*one, options("dpo"))
        assert a[0] == pytest.approx(b[0]) and a[1] == pytest.approx(b[1])
    s, r, lengths, table = batch()
    other = table._replace(rejected=table.rejected[::-1])
    assert preference_loss(s, r, lengths, other, options("aot_unpaired"))[0] == preference_loss(s, r, lengths, table, options("aot_unpaired"))[0]


def test_losses_add_up_and_say_what_each_came_to():
    args, o = batch(), options("dpo", "ipo", loss_weights=(2.0, 0.5), rpo_alpha=0.3)
    loss, derivative, metrics = preference_loss(*args, o)
    parts = {name: preference_loss(*args, options(name)) for name in ("dpo", "ipo", "nll")}
    assert weighted(o) == {"dpo": 2.0, "ipo": 0.5, "nll": 0.3}
    assert loss == pytest.approx(2 * parts["dpo"][0] + 0.5 * parts["ipo"][0] + 0.3 * parts["nll"][0])
    assert derivative == pytest.approx(2 * parts["dpo"][1] + 0.5 * parts["ipo"][1] + 0.3 * parts["nll"][1])
    assert {metrics[f"loss/{name}"] for name in parts} == {found[0] for found in parts.values()}
    assert needs_reference(o) and not needs_reference(options("simpo", "nll"))


def test_margins_gates_and_weights():
    """SimPO asks for gamma; DiscoPOP's gate is open or shut by tau; KTO weighs good and other answers; a larger beta is a steeper loss."""
    table = Table(np.array([0]), np.array([1]), np.array([True, False]))
    s, lengths = [-1.0, -2.0], [1, 2]  # one nat per token each
    assert preference_loss(s, None, lengths, table, options("simpo", simpo_gamma=0.0))[0] == pytest.approx(np.log(2))
    assert preference_loss([1.0, -2.0], None, lengths, table, options("simpo", beta=1.0, simpo_gamma=2.0))[0] == pytest.approx(np.log(2))
    cold, warm = (preference_loss([3.0, 0.0], [0, 0], lengths, table, options("discopop", discopop_tau=tau))[0] for tau in (1e-3, 1e6))
    assert cold == pytest.approx(np.exp(-0.3)) and warm == pytest.approx((np.exp(-0.3) + np.log1p(np.exp(-0.3))) / 2)
    plain = preference_loss(s, s, lengths, table, options("kto"))[1]
    weighed = preference_loss(s, s, lengths, table, options("kto", desirable_weight=3.0, undesirable_weight=0.5))[1]
    assert weighed == pytest.approx(plain * [3.0, 0.5]) and plain[0] == -plain[1] < 0
    steep = preference_loss(s, s, lengths, table, options("dpo", beta=0.4))[1]
    assert steep == pytest.approx(4 * preference_loss(s, s, lengths, table, options("dpo"))[1])


def test_rewards():
    """beta (s - r), of simpo and orpo beta s per token; ties count half."""
    table = Table(np.array([0, 2]), np.array([1, 3]), np.array([True, False, True, False]))
    s, r, lengths = np.array([-1.0, -3, -4, -4]), np.array([-2.0, -2, -4, -4]), np.array([1, 3, 4, 2])
    metrics = preference_loss(s, r, lengths, table, options("dpo", beta=0.5))[2]
    assert metrics == {"reward/chosen": 0.25, "reward/rejected": -0.25, "reward/margin": 0.5, "reward/accuracy": 0.75}
    metrics = preference_loss(s, None, lengths, table, options("simpo", beta=2.0))[2]
    assert metrics == {"reward/chosen": -2.0, "reward/rejected": -3.0, "reward/margin": 1.0, "reward/accuracy": 0.75}


@pytest.mark.compat  # trl is in no extra
@pytest.mark.torch
def test_the_losses_are_trls():
    pytest.importorskip("trl", reason="pip install trl==1.16.0; evidence/trl_parity.py")
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
    import trl_parity

    rows = trl_parity.compared()
    assert {row["loss"].split(" ")[0] for row in rows} == set(LOSSES)
    for row in rows:
        bound = 1e-7 if row["loss"] == "exo" else 1e-10  # TRL takes the logarithm of label_smoothing in fp32
        assert row["loss_difference"] < bound and row["gradient_difference"] < bound, row


def test_online_dpo_is_reinforce_with_dpos_derivative():
    """sum_i A_i / N * grad s_i is minus DPO's gradient on (best, worst) of every group, as written out by `dpo`. Of equals the first
    counts; absent scores, groups of equals and answers without tokens are in no pair."""
    rng = np.random.default_rng(2)
    groups = np.repeat([4, 9, 1, 7], 4)
    scores = np.array([0.0, 1.0, 1.0, 0.5, 1.0, np.nan, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 2.0, np.nan])
    ratios = rng.normal(size=16) * 5
    ratios[12] = np.nan  # the best answer of group 7 has no tokens
    found, pairs = preferred_advantages(scores, groups, ratios, 0.3)
    assert sorted(map(tuple, pairs)) == [(1, 0), (4, 6), (14, 13)]
    known = np.nan_to_num(ratios)
    table = Table(pairs[:, 0], pairs[:, 1], np.isin(np.arange(16), pairs[:, 0]))
    _, derivative, _ = preference_loss(known, np.zeros(16), np.ones(16), table, options("dpo", beta=0.3))
    np.testing.assert_allclose(-found / 15, derivative, rtol=0, atol=1e-15)
    assert np.count_nonzero(found) == 6
    nothing, none = preferred_advantages(np.ones(16), groups, ratios, 0.3)
    assert not nothing.any() and none.shape == (0, 2)
