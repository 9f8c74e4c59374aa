"""Guarded arithmetic of packed slots: bounded exponentials and sums over a sequence's slots.

Legend: R rows, S loss slots per row. `sequences_RxS` int32 is the id of a slot's sequence within its row: 1..K with
K <= S, not falling along the row, 0 = unused slots, wherever they are. A sequence never crosses a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_LOG = 20.0  # exponents are bounded here; beyond, ratios have lost all meaning


def masked_exp(x, mask):
    """Returns exp(x) where mask is true, else 0, with finite value and gradient for any x where masked.

    x and mask have one shape. The mask is applied before exp (0 * inf in a gradient is NaN). Above MAX_LOG the
    function continues linearly, so that its gradient does not vanish where it is needed most."""
    x = jnp.where(mask, x, 0)
    bounded = jnp.minimum(x, MAX_LOG)
    return jnp.where(mask, jnp.exp(bounded) * (1 + x - bounded), 0)


def masked_expm1(x, mask):
    """Returns exp(x) - 1 where mask is true, else 0, without cancellation at small x; linear above MAX_LOG as
    `masked_exp`. x and mask have one shape."""
    x = jnp.where(mask, x, 0)
    bounded = jnp.minimum(x, MAX_LOG)
    return jnp.where(mask, jnp.expm1(bounded) + jnp.exp(bounded) * (x - bounded), 0)


def sequence_sum(x_RxS, sequences_RxS):
    """Returns the sum of x over each sequence's slots, broadcast back to them, [R, S] in x's dtype; 0 at unused slots.

    Args:
      x_RxS: [R, S]; anything at unused slots.
      sequences_RxS: [R, S] int, id of the slot's sequence within its row: at most S and not falling along the row, 0 =
        unused, wherever they are."""
    used = sequences_RxS > 0
    slots = x_RxS.shape[1]

    def one_row(x, ids):
        return jax.ops.segment_sum(x, ids, num_segments=slots + 1, indices_are_sorted=True)[ids]

    # unused slots, which may stand between others (mesh.cp), add nothing to the sequence before them: ids stay sorted
    ids = jax.lax.cummax(jnp.where(used, sequences_RxS, 0), axis=1)
    return jnp.where(used, jax.vmap(one_row)(jnp.where(used, x_RxS, 0), ids), 0)


def sequence_mean(x_RxS, mask_RxS, sequences_RxS):
    """Returns the mean of x over each sequence's slots where mask is true, broadcast to all its slots (masked ones
    too).

    The denominator is max(count, 1): 0 for a sequence that is masked throughout, and at unused slots.

    Args:
      x_RxS: [R, S] float over packed slots, whose dtype the result has; anything where masked.
      mask_RxS: [R, S] bool.
      sequences_RxS: [R, S] int, id of the slot's sequence within its row: at most S and not falling along the row, 0 =
        unused, wherever they are."""
    total = sequence_sum(jnp.where(mask_RxS, x_RxS, 0), sequences_RxS)
    return total / jnp.maximum(sequence_sum(mask_RxS.astype(total.dtype), sequences_RxS), 1)
