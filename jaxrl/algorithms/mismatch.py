"""Weights for completions that another policy drew (the sampler's arithmetic, older weights) than the proximal one.

rho = exp(old - behaviour). A weight multiplies the policy loss only, never KL or entropy; denominators stay. No
gradient flows through any of them.

Legend: R rows, S loss slots per row; see numerics.py for `sequences`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.algorithms.numerics import masked_exp, sequence_mean, sequence_sum


def mismatch_ratio(old, behaviour, mask, *, sequences=None, level="token"):
    """Returns the importance ratio of the proximal to the behaviour policy before truncation, [R, S], 0 where masked.

        token      rho_t = exp(old - behaviour)
        sequence   product of rho over the sequence's loss tokens, at each of them
        geometric  its |y|-th root

    No gradient flows. Products are sums of logs; above 20 the exponential continues linearly (masked_exp). Shapes other
    than [R, S] are fine for level token.

    Args:
      old, behaviour: [R, S] log-probs in nats under the proximal and the behaviour policy. mask: bool, loss tokens.
      sequences: int, id of the slot's sequence within its row, 0 = unused; for levels other than token.
      level: a row of the table.

    Raises ValueError for other levels, and where sequences is missing.
    """
    x = jnp.where(mask, jax.lax.stop_gradient(old) - jax.lax.stop_gradient(behaviour), 0)
    if level == "token":
        return masked_exp(x, mask)
    if level not in ("sequence", "geometric"):
        raise ValueError(f"mismatch level {level!r}: expected token, sequence or geometric")
    if sequences is None:
        raise ValueError(f"mismatch level {level!r} needs the ids of sequences")
    return masked_exp(sequence_sum(x, sequences) if level == "sequence" else sequence_mean(x, mask, sequences), mask)


def mismatch_weight(old, behaviour, mask, cap, *, sequences=None, level="token", action="truncate", low=0.0):
    """Returns the importance weight on the policy loss, [R, S], without gradient, 0 where masked. With rho of
    `mismatch_ratio`:

        truncate  min(rho, cap)               TIS, https://fengyao.notion.site/off-policy-rl; by token: decoupled PPO's
                                              capped behaviour weight (arXiv 2110.00641, 2505.24298)
        mask      rho * 1[low <= rho <= cap]  MIS; IcePop (arXiv 2510.18855) with low 0.5, cap 5

    With level sequence or geometric, mask drops whole sequences.

    Args:
      old, behaviour: [R, S] log-probs in nats under the proximal and the behaviour policy. mask: bool, loss tokens.
      cap: largest ratio; may be inf. low: smallest ratio, read by mask only.
      sequences: int, id of the slot's sequence within its row, 0 = unused; for levels other than token.
      level: token, sequence (product of its tokens' ratios) or geometric (their geometric mean).
      action: a row of the table.

    Raises ValueError for other actions and levels, and where a level needs sequences that are missing.
    """
    ratio = mismatch_ratio(old, behaviour, mask, sequences=sequences, level=level)
    if action == "truncate":
        return jnp.minimum(ratio, cap)
    if action == "mask":
        return jnp.where((ratio >= low) & (ratio <= cap), ratio, 0)
    raise ValueError(f"mismatch action {action!r}: expected truncate or mask")


def off_policy_sequence_mask(logp, behaviour, advantage, mask, sequences, delta):
    """Returns the factor 1 on kept tokens, 0 on those of dropped sequences and where masked; [R, S], no gradient, dtype
    of logp.

    DeepSeek-V3.2 (arXiv 2512.02556): a sequence is dropped where its advantage is negative and the mean of behaviour
    - logp over its loss tokens is above delta (nats). With advantages per token, their mean over the sequence
    decides (TRL decides per token). behaviour is the sampler's log-prob (slime takes the proximal policy's).

    Args:
      logp, behaviour: [R, S] log-probs in nats under the current policy and as sampled. advantage: [R, S].
      mask: [R, S] bool, loss tokens.
      sequences: [R, S] int, id of the slot's sequence within its row, 0 = unused.
      delta: bound on the mean gap, in nats.
    """
    gap = sequence_mean(jax.lax.stop_gradient(behaviour) - jax.lax.stop_gradient(logp), mask, sequences)
    dropped = (sequence_mean(jax.lax.stop_gradient(advantage), mask, sequences) < 0) & (gap > delta)
    return (mask & ~dropped).astype(logp.dtype)
