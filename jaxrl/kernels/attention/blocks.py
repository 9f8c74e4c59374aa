"""Which blocks of an attention matrix hold work: computed from positions and segments, once per step, for every kernel.

Legend: B rows, L queries per row, S keys per row, N query blocks, M key blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl.kernels.attention.reference import visible

NO_KEY, NO_QUERY = jnp.iinfo(jnp.int32).max, jnp.iinfo(jnp.int32).min  # positions of what fills up the last blocks


class BlockLists(NamedTuple):
    """The work of every block of one side, as blocks of the other side."""

    blocks: jnp.ndarray  # [B, N, M] int32, ascending; past the count the last one is repeated (0 where there is none)
    counts: jnp.ndarray  # [B, N] int32


def active_blocks(q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, *, window, block_q,
                  block_k):
    """bool [B, N, M]: whether any query of the block sees any key of the block, by the rules of api.attention.

    Padding queries (segment 0) want nothing. Rows of 1 broadcast over B. The last blocks may be partly empty. XLA for TPUs
    and GPUs reduces the comparisons as it makes them, so that no [L, S] array exists; for CPUs it holds them (as bools).
    """
    q_pos = filled(q_positions_BxL, block_q, NO_QUERY)
    k_pos = filled(k_positions_BxS, block_k, NO_KEY)
    segments = None, None, None
    if q_segments_BxL is not None:
        q_seg = filled(q_segments_BxL, block_q, 0)
        q_pos = jnp.where(q_seg == 0, NO_QUERY, q_pos)
        segments = (q_seg, filled(k_segments_BxS, block_k, 0),
                    None if q_prefixes_BxL is None else filled(q_prefixes_BxL, block_q, 0))
    q_parts = [None if x is None else x.reshape(x.shape[0], -1, 1, block_q) for x in (q_pos, segments[0], segments[2])]
    k_parts = [None if x is None else x.reshape(x.shape[0], 1, -1, block_k) for x in (k_pos, segments[1])]
    mask = visible(q_parts[0], k_parts[0], q_parts[1], k_parts[1], q_parts[2], window)
    return mask.any(axis=(3, 4))


def block_lists(active_BxNxM) -> BlockLists:
    """The key blocks of every query block; of `active.swapaxes(1, 2)`, the query blocks of every key block."""
    counts = active_BxNxM.sum(axis=2, dtype=jnp.int32)
    order = jnp.argsort(~active_BxNxM, axis=2, stable=True).astype(jnp.int32)
    last = jnp.maximum(counts - 1, 0)[..., None]
    at = jnp.minimum(jnp.arange(active_BxNxM.shape[2]), last)
    blocks = jnp.where(counts[..., None] > 0, jnp.take_along_axis(order, at, axis=2), 0)
    return BlockLists(blocks, counts)


def filled(x_BxL, block, value):
    """x with `value` at the end of its last axis, up to a multiple of `block`."""
    return jnp.pad(x_BxL, [(0, 0), (0, -x_BxL.shape[1] % block)], constant_values=value)
