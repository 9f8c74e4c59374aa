"""Masks of tokens that get no policy loss because of their rank among all tokens of a step, or of their completion's
ratio; host numpy, float64.

The masks are of the whole step's batch and of log-probs known before its first update, so that micro-batches, packing
and the order of mini-batches change nothing. Masked tokens stay in the denominators.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.algorithms.advantages import shared_prefix_mask


def second_moment_mask(behaviour_T, old_T, mask_T, threshold: float):
    """Returns M2PO's mask (arXiv 2510.01161), bool [T]: False at the tokens with the largest squared log-ratio, as few
    as bring the mean of (old - behaviour)^2 over the others below `threshold`.

    At least one token remains. True outside mask_T. The authors' code and AReaL take the tokens of one micro-batch.

    Args:
      behaviour_T, old_T: [T] log-probs in nats of the behaviour and the proximal policy, not read outside mask_T.
      mask_T: [T] bool, the loss tokens of the step.
      threshold: bound on the second moment, in nats squared.
    """
    mask = np.asarray(mask_T, bool)
    keep, at = np.ones(len(mask), bool), np.flatnonzero(mask)
    if not len(at):
        return keep
    moment = np.square(np.asarray(old_T, np.float64)[at] - np.asarray(behaviour_T, np.float64)[at])
    order = np.argsort(moment, kind="stable")  # rising: the first k have the smallest mean of k tokens
    means = np.cumsum(moment[order]) / np.arange(1, len(at) + 1)
    keep[at[order[max(np.count_nonzero(means < threshold), 1) :]]] = False
    return keep


def covariance_mask(old_T, advantage_T, mask_T, share: float, low: float, high: float, seed: int):
    """Returns Clip-Cov's mask (arXiv 2505.22617), bool [T]: False on a random `share` of the step's loss tokens
    (rounded down, at least one) among those whose covariance term (A - mean A) * (logp - mean logp) lies
    between `low` and `high`; on all of those if they are fewer.

    Means are over mask_T. logp is the proximal policy's, which is the paper's at the first update of a batch; its
    authors take the current one's at each, and leave out tokens that the clip stops. True outside mask_T.

    Args:
      old_T, advantage_T: [T] the proximal policy's log-probs in nats and advantages A, not read outside mask_T.
      mask_T: [T] bool, the loss tokens of the step.
      share: of all loss tokens. low, high: bounds of the term, exclusive.
      seed: of the random choice.
    """
    mask = np.asarray(mask_T, bool)
    keep, at = np.ones(len(mask), bool), np.flatnonzero(mask)
    if not len(at):
        return keep
    logp, advantage = np.asarray(old_T, np.float64)[at], np.asarray(advantage_T, np.float64)[at]
    covariance = (advantage - advantage.mean()) * (logp - logp.mean())
    inside = at[(covariance > low) & (covariance < high)]
    count = min(max(int(share * len(at)), 1), len(inside))
    keep[np.random.default_rng(seed).choice(inside, count, replace=False)] = False
    return keep


def sequence_ratio_mask(behaviour_T, old_T, mask_T, offsets, low: float, high: float, mean: bool):
    """Returns a mask of whole completions, bool [T]: False on the tokens of those whose ratio of the proximal to the
    behaviour policy is below `low` or above `high`.

    The log of the ratio is bounded to +-20. True outside mask_T, so on all of a completion without such tokens. SkyRL's
    sequence_mask_metric, whose masked completions stay in the denominators, too.

    Args:
      behaviour_T, old_T: [T] log-probs in nats of the behaviour and the proximal policy, not read outside mask_T.
      mask_T: [T] bool, the loss tokens.
      offsets: [N+1]; completion i owns tokens offsets[i]:offsets[i+1].
      mean: the ratio is exp of the mean of (old - behaviour) over a completion's tokens in mask_T (the geometric mean
        of its tokens' ratios); False = of their sum (their product).
    """
    mask, offsets = np.asarray(mask_T, bool), np.asarray(offsets, np.int64)
    gap = np.where(mask, np.asarray(old_T, np.float64) - np.asarray(behaviour_T, np.float64), 0.0)
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    log_ratio = np.bincount(owner, gap, len(offsets) - 1)
    if mean:
        log_ratio = log_ratio / np.maximum(np.bincount(owner, mask, len(offsets) - 1), 1)
    ratio = np.exp(np.clip(log_ratio, -20.0, 20.0))
    return ((ratio >= low) & (ratio <= high))[owner] | ~mask


class StepTokens(NamedTuple):
    """The inputs of a token mask: the T tokens of a step's N trajectories, host numpy. Trajectory i, prompt and
    completion, owns tokens [offsets[i], offsets[i+1])."""

    tokens: Any  # [T] ids
    mask: Any  # [T] bool: the policy sampled the token
    offsets: Any  # [N+1]
    prompt_lengths: Any  # [N]
    groups: Any  # [N] prompt of the completion
    scores: Any  # [N] float64, NaN = absent
    columns: dict[str, Any]  # name -> [T]: advantage, behaviour, and old where it is scored
    options: Any  # those below `algorithm`


class TokenMask(NamedTuple):
    """A mask of tokens that get no policy loss, and what it reads: an entry of TOKEN_MASKS.

    Attributes:
      function: StepTokens -> bool [T], False on the tokens that add no policy loss.
      metric: name of the logged share of loss tokens that are left out.
      columns: token columns that it needs; `old` is there where algorithm.old_logprobs=recompute.
    """

    function: Callable[[StepTokens], Any]
    metric: str
    columns: tuple[str, ...] = ()


def _shared_prefix(t: StepTokens):
    return shared_prefix_mask(t.tokens, t.offsets, t.prompt_lengths, t.groups, t.scores, t.options.shared_prefix_tokens)


def _second_moment(t: StepTokens):
    return second_moment_mask(t.columns["behaviour"], t.columns["old"], t.mask, t.options.m2_threshold)


def _covariance(t: StepTokens):
    seed = zlib.crc32(np.ascontiguousarray(t.tokens).data)  # the same wherever the step is computed again
    bounds = t.options.cov_share, t.options.cov_low, t.options.cov_high
    return covariance_mask(t.columns["old"], t.columns["advantage"], t.mask, *bounds, seed)


def _sequence_ratio(t: StepTokens):
    o = t.options
    bounds = o.sequence_low, o.sequence_high, o.sequence_ratio == "geometric"
    return sequence_ratio_mask(t.columns["behaviour"], t.columns["old"], t.mask, t.offsets, *bounds)


TOKEN_MASKS: dict[str, TokenMask] = {  # option below `algorithm` that turns it on -> the mask
    "shared_prefix_tokens": TokenMask(_shared_prefix, "policy/prefix_masked_fraction"),
    "m2_threshold": TokenMask(_second_moment, "policy/m2_masked_fraction", ("behaviour", "old")),
    "sequence_high": TokenMask(_sequence_ratio, "policy/ratio_masked_fraction", ("behaviour", "old")),
    "cov_share": TokenMask(_covariance, "policy/cov_masked_fraction", ("old", "advantage")),
}
