"""Losses of the training service, as the protocol documents them: sums over tokens, without any denominator.

With logp the log-prob of a target under the current policy, q under the policy that sampled it, r = exp(logp - q), A
the advantage and w the weight (1 where none is given), a token's loss is

    cross_entropy         -w logp
    importance_sampling   -w r A
    ppo                   -w min(r A, clip(r, low, high) A)
    cispo                 -w stop_gradient(clip(r, low, high)) A logp
    dro                   -w (A logp - beta / 2 (logp - q)^2)

cispo: MiniMax-M1, arXiv 2506.13585. dro: Richemond et al., arXiv 2405.19107, without its value term.

Which loss a token has, and its thresholds, are data: one program serves them all. Called by service.trainer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ApiLoss(NamedTuple):
    """A loss of the protocol.

    Attributes:
      number: how a token names it in the column "loss".
      tensors: names of the inputs that it needs besides the target tokens.
      thresholds: names of its one or two options, "low" and "high" of token_losses, with their defaults; None = has to
        be given.
    """

    number: int
    tensors: tuple[str, ...] = ()
    thresholds: dict[str, float | None] = {}


API_LOSSES = {
    "cross_entropy": ApiLoss(0),
    "importance_sampling": ApiLoss(1, ("logprobs", "advantages")),
    "ppo": ApiLoss(2, ("logprobs", "advantages"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": ApiLoss(3, ("logprobs", "advantages"), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": ApiLoss(4, ("logprobs", "advantages"), {"beta": None}),
}


def token_losses(logp, sampled_logp, advantage, weight, number, low, high):
    """Computes the loss of each token in nats; arrays of one shape.

    Args:
      logp: current log-probs; gradients flow through them alone.
      sampled_logp, advantage: not read where the loss is cross_entropy; 0 there.
      weight: factor of every loss.
      number: ApiLoss.number of each token's loss.
      low, high: bounds of the ratio, of ppo and cispo; low is beta of dro.
    """
    is_loss = {name: number == loss.number for name, loss in API_LOSSES.items()}
    gap = jnp.where(is_loss["cross_entropy"], 0, logp - sampled_logp)
    value = jax.lax.stop_gradient(jnp.exp(gap))
    clipped = jnp.clip(value, low, high)
    moves = is_loss["importance_sampling"] | is_loss["ppo"] & (value * advantage <= clipped * advantage)
    ratio = jnp.exp(jnp.where(moves, gap, 0))  # elsewhere it has no gradient, also where it overflows
    gains = {"cross_entropy": logp, "importance_sampling": ratio * advantage,
             "ppo": jnp.where(moves, ratio, clipped) * advantage, "cispo": clipped * advantage * logp,
             "dro": advantage * logp - low / 2 * jnp.square(gap)}
    return -weight * jnp.select([is_loss[name] for name in gains], list(gains.values()))
