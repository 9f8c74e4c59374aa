"""Which blocks of an attention matrix hold work: computed from positions and segments, once per step, for every kernel.

Legend: B rows, L queries per row, S keys per row, N query blocks, M key blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl.kernels.attention.packed.reference import Ids, visible

NO_KEY, NO_QUERY = jnp.iinfo(jnp.int32).max, jnp.iinfo(jnp.int32).min  # positions of what fills up the last blocks


class BlockLists(NamedTuple):
    """The blocks of the other side (keys for queries, or the reverse) that each block of one side visits: N blocks,
    M at most."""

    blocks: jnp.ndarray  # [B, N, M] int32, ascending; past the count the last one is repeated (0 where there is none)
    counts: jnp.ndarray  # [B, N] int32


def active_blocks(ids: Ids, *, window, block_q, block_k):
    """Returns bool [B, N, M]: whether any query of the block sees any key of the block, by the rules of api.attention.

    Padding queries (segment 0) want nothing. Rows of 1 broadcast over B. The last blocks may be partly empty. XLA for
    TPUs and GPUs reduces the comparisons as it makes them: no [L, S] array exists; for CPUs it does, of bools.

    ids: Ids, int positions and segments [B, L] and [B, S]. window: positions that a query sees, itself included; 0 =
    all. block_q, block_k: queries and keys of a block."""
    q_pos, k_pos, q_seg, k_seg, prefixes, reach = filled_ids(ids, block_q, block_k)
    if q_seg is not None and reach is not None:
        reach = jnp.where(q_seg == 0, NO_QUERY, reach)
    elif q_seg is not None:
        q_pos = jnp.where(q_seg == 0, NO_QUERY, q_pos)
    q_pos, q_seg, prefixes, reach = (x if x is None else x.reshape(len(x), -1, 1, block_q)
                                     for x in (q_pos, q_seg, prefixes, reach))
    k_pos, k_seg = (x if x is None else x.reshape(len(x), 1, -1, block_k) for x in (k_pos, k_seg))
    return visible(Ids(q_pos, k_pos, q_seg, k_seg, prefixes, reach), window).any(axis=(3, 4))


def block_lists(active_BxNxM) -> BlockLists:
    """Returns the BlockLists of active pairs [B, N, M] bool: the key blocks of every query block.

    Of `active.swapaxes(1, 2)`, the query blocks of every key block."""
    counts = active_BxNxM.sum(axis=2, dtype=jnp.int32)
    order = jnp.argsort(~active_BxNxM, axis=2, stable=True).astype(jnp.int32)
    last = jnp.maximum(counts - 1, 0)[..., None]
    at = jnp.minimum(jnp.arange(active_BxNxM.shape[2])[None, None], last)
    blocks = jnp.where(counts[..., None] > 0, jnp.take_along_axis(order, at, axis=2), 0)
    return BlockLists(blocks, counts)


def filled(x_BxL, block, value):
    """Returns x [B, L] with `value` appended to its last axis, up to a multiple of `block`."""
    return jnp.pad(x_BxL, [(0, 0), (0, -x_BxL.shape[1] % block)], constant_values=value)


def filled_ids(ids: Ids, block_q, block_k) -> Ids:
    """Returns the Ids with queries up to a multiple of block_q and keys of block_k; what fills them up sees nothing and
    is not seen."""
    sides = (block_q, NO_QUERY), (block_k, NO_KEY), (block_q, 0), (block_k, 0), (block_q, 0), (block_q, NO_QUERY)
    return Ids(*(x if x is None else filled(x, *side) for x, side in zip(ids, sides, strict=True)))
