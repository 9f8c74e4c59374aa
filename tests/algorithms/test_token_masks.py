"""Tokens that a step leaves out, and MaxRL's scale, against plain loops."""

import numpy as np
import pytest

from jaxrl import algorithms as alg


@pytest.mark.parametrize("seed", range(8))
def test_m2po_takes_the_largest_out_until_the_mean_is_below(seed):
    rng = np.random.default_rng(seed)
    old, behaviour = rng.normal(size=(2, 60)) * (0.1 + 0.4 * (seed % 2))
    mask = rng.random(60) < 0.7
    moment, left = (old - behaviour) ** 2, set(np.flatnonzero(mask))
    while len(left) > 1 and np.mean([moment[i] for i in left]) >= 0.04:
        left.remove(max(left, key=lambda i: moment[i]))
    keep = alg.second_moment_mask(np.where(mask, behaviour, np.nan), old, mask, 0.04)
    assert set(np.flatnonzero(keep & mask)) == left and keep[~mask].all()
    assert seed % 2 == 0 or len(left) < mask.sum()
    assert alg.second_moment_mask(behaviour, old, mask, 1e9).all() and alg.second_moment_mask(old, old, 0 * mask, 0.1).all()
    assert alg.second_moment_mask(behaviour, old, mask, 0.0)[mask].sum() == 1


@pytest.mark.parametrize("share", [0.05, 1e-6, 1.0])
def test_clip_cov_draws_a_share_of_all_tokens_among_those_between_the_bounds(share):
    rng = np.random.default_rng(3)
    logp, advantage, mask = -rng.random(400), rng.normal(size=400), rng.random(400) < 0.9
    mean = lambda x: sum(x[mask]) / mask.sum()  # noqa: E731
    within = {i for i in range(400) if mask[i] and 0.1 < (advantage[i] - mean(advantage)) * (logp[i] - mean(logp)) < 0.3}
    masks = [alg.covariance_mask(np.where(mask, logp, np.nan), advantage, mask, share, 0.1, 0.3, seed) for seed in (0, 0, 1)]
    out = [set(np.flatnonzero(~m)) for m in masks]
    assert out[0] <= within and len(out[0]) == min(max(int(share * mask.sum()), 1), len(within)) and out[0] == out[1]
    assert share == 1.0 or out[0] != out[2]
    assert alg.covariance_mask(logp, advantage, mask, share, 50.0, 90.0, 0).all()


def test_maxrl_divides_by_the_groups_mean():
    scores, groups = np.array([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0]), np.repeat([0, 1, 2], [4, 4, 2])
    found, zero = alg.group_advantages(scores, groups, std="group_mean")
    np.testing.assert_allclose(found, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0], rtol=1e-5)
    assert zero.tolist() == [False] * 8 + [True] * 2
