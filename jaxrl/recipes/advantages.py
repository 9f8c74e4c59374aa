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


def advantages(options, traj, scores, *, baseline=None, kl=None, values=None, rewards=None, columns=None,
               user=None) -> Advantages:
    """Advantages as the group `algorithm` of a Spec says.

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
    kind, returns = options.advantage, None
    if kl is not None and kind not in ("returns", "gae"):
        scores = scores - options.kl.coef * traj.total(kl)
    numbers, zero = group_advantages(
        scores, traj.group, mean=options.advantage_mean, std=options.advantage_std, baseline_N=baseline)
    if kind == "outcome":
        tokens = traj.spread(numbers)
    elif kind in ("returns", "gae"):
        numbers = np.where(np.isfinite(scores), numbers, np.nan)
        per_token = token_rewards(numbers, mask, spans, kl, options.kl.coef)
        if kind == "returns":
            tokens = token_returns(per_token, mask, spans, options.gamma)
        else:
            lam = adaptive_lambda(traj.total(), options.lam_alpha) if options.lam_alpha else options.lam
            tokens, _ = gae(per_token, values, mask, spans, options.gamma, lam)
            own = options.lam if options.critic_lam is None else options.critic_lam
            returns = np.where(present, gae(per_token, values, mask, spans, options.gamma, own)[1], values)
    else:
        own = ADVANTAGES[kind] if kind in ADVANTAGES else imported(kind)
        tokens = spread(kind, own(AdvantageInputs(scores, traj.group, mask, spans, rewards, columns, user)), traj)
    tokens = np.where(present, tokens, 0.0)
    if options.whiten:
        tokens = whiten(tokens, present)
    tokens = clip_advantages(tokens, options.advantage_low, options.advantage_high)
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
