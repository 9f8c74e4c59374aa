"""Losses of the training service, as the protocol documents them: sums over tokens, without any denominator.

With logp the log-prob of a target under the current policy, q under the policy that sampled it, r = exp(logp - q), A
the advantage and w the weight (1 where none is given), a token's loss is

    cross_entropy         -w logp
    importance_sampling   -w r A
    ppo                   -w min(r A, clip(r, low, high) A)

Which loss a token has, and its thresholds, are data: one program serves them all. Called by service.trainer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class ApiLoss(NamedTuple):
    """A loss of the protocol.

    Attributes:
      number: how a token names it in the column "loss".
      tensors: names of the inputs that it needs beside the target tokens.
      thresholds: names of its options with their defaults.
    """

    number: int
    tensors: tuple[str, ...] = ()
    thresholds: dict[str, float] = {}


API_LOSSES = {
    "cross_entropy": ApiLoss(0),
    "importance_sampling": ApiLoss(1, ("logprobs", "advantages")),
    "ppo": ApiLoss(2, ("logprobs", "advantages"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}


def token_losses(logp, sampled_logp, advantage, weight, number, low, high):
    """Computes the loss of each token in nats; arrays of one shape.

    Args:
      logp: current log-probs; gradients flow through them alone.
      sampled_logp, advantage: not read where the loss is cross_entropy; 0 there.
      weight: factor of every loss.
      number: ApiLoss.number of each token's loss.
      low, high: bounds of the ratio, of ppo.
    """
    policy = number > 0
    ratio = jnp.exp(jnp.where(policy, logp - sampled_logp, 0))
    gain = ratio * advantage
    clipped = jnp.minimum(gain, jnp.clip(ratio, low, high) * advantage)
    return -weight * jnp.where(policy, jnp.where(number == API_LOSSES["ppo"].number, clipped, gain), logp)
