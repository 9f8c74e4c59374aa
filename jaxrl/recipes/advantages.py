"""Scores -> one advantage per scored token, on the host in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl.algorithms import (
    ADVANTAGES,
    AdvantageInputs,
    adaptive_lambda,
    clip_advantages,
    gae,
    group_advantages,
    token_returns,
    token_rewards,
    whiten,
)
from jaxrl.errors import ConfigError
from jaxrl.imports import imported


class Advantages(NamedTuple):
    tokens: np.ndarray  # [T] float64, 0 where not scored and where the score is absent
    returns: np.ndarray | None  # [T] float64: what the critic learns; its own value where the score is absent
    zero_signal: np.ndarray  # [N] bool: sequences of groups whose scores carry no signal


def advantages(v: dict, traj, scores, *, baseline=None, kl=None, values=None, rewards=None, columns=None,
               user=None) -> Advantages:
    """Advantages as the row `v` of algorithm options says.

    Score, less kl.coef * KL where it is placed in the reward; less its baseline, over its scale; then the estimator:

        outcome  the sequence's number at each scored token (the KL of a sequence is the sum over its tokens; so it is
                 for a function of the user's own, which sees scores less that KL)
        returns  reward to go, the number at the last scored token and the KL at each
        gae      the same rewards with a critic

    then whitened over all tokens of sequences with a score, then clipped.

    Args:
      scores: [N], NaN = absent. baseline: [N] greedy scores. kl: [T] or None. values: [T] for gae.
      rewards, columns, user: for a function of the user's own.
    """
    mask, spans = traj.loss_mask, traj.spans
    present = traj.spread(np.isfinite(scores)) & mask
    kind, returns = v["advantage"], None
    if kl is not None and kind not in ("returns", "gae"):
        scores = scores - v["kl.coef"] * traj.total(kl)
    numbers, zero = group_advantages(
        scores, traj.group, mean=v["advantage_mean"], std=v["advantage_std"], baseline_N=baseline)
    if kind == "outcome":
        tokens = traj.spread(numbers)
    elif kind in ("returns", "gae"):
        numbers = np.where(np.isfinite(scores), numbers, np.nan)
        per_token = token_rewards(numbers, mask, spans, kl, v["kl.coef"])
        if kind == "returns":
            tokens = token_returns(per_token, mask, spans, v["gamma"])
        else:
            lam = adaptive_lambda(traj.total(), v["lam_alpha"]) if v["lam_alpha"] else v["lam"]
            tokens, _ = gae(per_token, values, mask, spans, v["gamma"], lam)
            own = v["lam"] if v["critic_lam"] is None else v["critic_lam"]
            returns = np.where(present, gae(per_token, values, mask, spans, v["gamma"], own)[1], values)
    else:
        own = ADVANTAGES[kind] if kind in ADVANTAGES else imported(kind)
        tokens = spread(kind, own(AdvantageInputs(scores, traj.group, mask, spans, rewards, columns, user)), traj)
    tokens = np.where(present, tokens, 0.0)
    if v["whiten"]:
        tokens = whiten(tokens, present)
    tokens = clip_advantages(tokens, v["advantage_low"], v["advantage_high"])
    return Advantages(np.where(present, tokens, 0.0), returns, zero)


def spread(name: str, found, traj) -> np.ndarray:
    """[N] or [T] numbers of a user's function -> [T]. Raises ConfigError for other shapes, and where not finite."""
    found = np.asarray(found, np.float64)
    if found.shape == (traj.num_trajectories,):
        found = traj.spread(found)
    if found.shape != (len(traj.tokens),):
        raise ConfigError(f"algorithm.advantage={name!r} returned shape {found.shape}: expected one number per "
                          f"sequence ({traj.num_trajectories}) or per token ({len(traj.tokens)})")
    if not np.isfinite(found[traj.loss_mask]).all():
        raise ConfigError(f"algorithm.advantage={name!r} returned numbers that are not finite")
    return found
