"""Losses of the training service, as the protocol documents them: sums over tokens, without any denominator.

The formulas are those of `token_losses`. Which loss a token has, and its thresholds, are data: one program serves them
all. Called by service.trainer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ApiLoss(NamedTuple):
    """A loss of the protocol.

    Attributes:
      number: how a token names it in the column "loss".
      tensors: names of the inputs that it needs besides the target tokens; () = none.
      thresholds: its options (none, one or two), in the order of token_losses' `low` and `high`, with their defaults;
        None = has to be given.
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
    "gspo": ApiLoss(5, ("logprobs", "advantages", "sequence_ratio_mask"),
                    {"clip_low_threshold": None, "clip_high_threshold": None}),
}


def mean_by_sequence(values_RxS, marked_RxS, sequences_RxS):
    """Returns [R, S]: the mean of the values over the marked slots of each slot's sequence, at all slots of the
    sequence; 0 where none is marked.

    Args:
      values_RxS: [R, S] float; not read where not marked. The result has their dtype.
      marked_RxS: [R, S] bool.
      sequences_RxS: [R, S] int, the sequence of each slot: numbers within a row, from 0 to S. Nothing of a row reaches
        another one.
    """
    def of_row(values, marked, sequences):
        sums = lambda x: jax.ops.segment_sum(x, sequences, len(sequences) + 1)[sequences]  # noqa: E731
        return sums(jnp.where(marked, values, 0)) / jnp.maximum(sums(marked.astype(values.dtype)), 1)

    return jax.vmap(of_row)(values_RxS, marked_RxS, sequences_RxS)


def token_losses(logp, sampled_logp, advantage, weight, number, low, high, sequence_gap):
    """Computes the loss of each token; nothing is summed or averaged.

    With q = sampled_logp, r = exp(logp - q), A the advantage and w the weight it is

        cross_entropy         -w logp
        importance_sampling   -w r A
        ppo                   -w min(r A, clip(r, low, high) A)
        cispo                 -w stop_gradient(clip(r, low, high)) A logp
        dro                   -w (A logp - beta / 2 (logp - q)^2)
        gspo                  -w min(s A, clip(s, low, high) A), s = exp(mean of logp - q over the marked tokens of the
                              sequence); its gradient at a token is s * that of the token's own logp

    cispo: MiniMax-M1, arXiv 2506.13585. dro: Richemond et al., arXiv 2405.19107, without its value term. gspo:
    GSPO-token, Zheng et al., arXiv 2507.18071, equations 13 and 14.

    Arrays, the result too, have one shape.

    Args:
      logp: current log-probs in nats; take gradients by them alone.
      sampled_logp, advantage: log-probs (nats) under the policy that sampled, and advantages; finite also where the
        loss is cross_entropy, which does not use them (0).
      weight: w, the factor of every loss; 1 where the user gives none.
      number: int, ApiLoss.number of each token's loss; the loss is 0 at any other number.
      low, high: bounds of the ratio, of ppo, cispo and gspo; low is beta of dro.
      sequence_gap: mean of logp - sampled_logp over the marked tokens of each token's sequence (`mean_by_sequence`),
        read by gspo; no gradient flows through it.
    """
    is_loss = {name: number == loss.number for name, loss in API_LOSSES.items()}
    gap = jnp.where(is_loss["cross_entropy"], 0, logp - sampled_logp)
    of_sequence = jnp.where(is_loss["gspo"], sequence_gap, gap)
    value = jax.lax.stop_gradient(jnp.exp(of_sequence))
    clipped = jnp.clip(value, low, high)
    clips = is_loss["ppo"] | is_loss["gspo"]
    moves = is_loss["importance_sampling"] | clips & (value * advantage <= clipped * advantage)
    ratio = jnp.exp(jnp.where(moves & ~is_loss["gspo"], gap, 0))  # elsewhere without gradient, also where it overflows
    same = jnp.exp(logp - jax.lax.stop_gradient(logp))  # 1, with a gradient
    gains = {"cross_entropy": logp, "importance_sampling": ratio * advantage,
             "ppo": jnp.where(moves, ratio, clipped) * advantage, "cispo": clipped * advantage * logp,
             "dro": advantage * logp - low / 2 * jnp.square(gap),
             "gspo": jnp.where(moves, jnp.where(moves, value, 0) * same, clipped) * advantage}
    return -weight * jnp.select([is_loss[name] for name in gains], list(gains.values()))
