"""Log-ratios of the current to the proximal policy, by token, by sequence, and as a clipped geometric mean.

Legend: R rows, S loss slots per row; see numerics.py for `sequences`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.algorithms.numerics import sequence_mean


def log_ratio(logp, old, mask, sequences, level):
    """Returns the log of the importance ratio of each token, [R, S], in nats, 0 where masked. With x = logp - old:

        token           x                                              PPO, arXiv 1707.06347
        sequence        mean of x over the sequence's loss tokens      GSPO, arXiv 2507.18071
        sequence_token  sg(that mean) + logp - sg(logp)                GSPO-token, the same paper

    `sequence` and `sequence_token` have the same value. The gradient of `sequence` at any slot is 1/|y| with respect to
    every token of its sequence; that of `sequence_token` is 1 with respect to its own token alone. Summed over a
    sequence with one advantage, both give the same.

    Args:
      logp, old: [R, S] current and proximal log-probs in nats. mask: [R, S] bool, loss tokens.
      sequences: [R, S] int, id of the slot's sequence within its row, 0 = unused; not read for level token.
      level: a row of the table.

    Raises ValueError for other levels; the geometric one needs advantages, see `geometric_log_ratio`.
    """
    x = jnp.where(mask, logp - old, 0)
    if level == "token":
        return x
    if level not in ("sequence", "sequence_token"):
        raise ValueError(f"ratio={level!r}: expected token, sequence or sequence_token here (geometric: policy loss "
                         "clip only)")
    mean = jnp.where(mask, sequence_mean(x, mask, sequences), 0)
    if level == "sequence":
        return mean
    return jax.lax.stop_gradient(mean) + jnp.where(mask, logp - jax.lax.stop_gradient(logp), 0)


def geometric_log_ratio(logp, old, advantage, mask, sequences, clip_low, clip_high):
    """Returns the log of the geometric mean of each sequence's clipped token ratios: GMPO (arXiv 2507.20673).

    With x = logp - old, the log-ratio of a token is min(x, clip_high) where its advantage is positive, max(x,
    -clip_low) where it is negative, x where it is 0: the min of the paper's surrogate, token by token, before the mean.
    The bounds are in nats, so that ratios lie in [exp(-clip_low), exp(clip_high)].

    Args:
      logp, old: [R, S] current and proximal log-probs in nats. advantage: [R, S]. mask: [R, S] bool, loss tokens.
      sequences: [R, S] int, id of the slot's sequence within its row, 0 = unused.
      clip_low, clip_high: bounds on the log-ratio in nats, >= 0.

    Returns:
      (mean, low, high): `mean` [R, S] is the mean over the sequence's loss tokens at each of them, 0 where masked;
        its gradient with respect to a token is 1/|y|, 0 where it was clipped. `low`, `high` bool: which bound acted.
    """
    x = jnp.where(mask, logp - old, 0)
    advantage = jnp.where(mask, advantage, 0)
    low, high = (advantage < 0) & (x < -clip_low), (advantage > 0) & (x > clip_high)
    clipped = jnp.where(low, -clip_low, jnp.where(high, clip_high, x))
    return jnp.where(mask, sequence_mean(clipped, mask, sequences), 0), low, high
