"""Which blocks the Mosaic GPU kernels visit, in which order, and what they read about tokens to mask the rest.

Legend: B rows, L queries and S keys per row (both filled up to UNIT), N tiles, M blocks, I kinds of information.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxrl.kernels.attention.gpu_chip import ROWS
from jaxrl.kernels.attention.packed.blocks import NO_KEY, NO_QUERY, active_blocks, filled_ids
from jaxrl.kernels.attention.packed.reference import Ids

UNIT = 128  # rows are filled up to whole numbers of this; every tile and block divides it


class Plan(NamedTuple):
    """For tiles of queries and the key blocks each visits (or, transposed, key tiles and the query blocks)."""

    q_info: object  # [B, I, L] int32: positions, and where there are segments also segments and prefixes; where queries
    # have a reach, that in the place of positions, and these last
    k_info: object  # [B, I, S] int32: positions, and segments
    order: object   # [B * N] int32: tiles row * N + tile, the most expensive ones first
    counts: object  # [B, N, 2] int32: blocks that all of the tile sees all of, all blocks with work
    lists: object   # [B, N, M] int32: entries (see entry) in the order of visit, first those counted first


def plan(batch, ids: Ids, *, window, parts, block, transposed=False) -> Plan:
    """Returns the Plan of tiles of `parts` x ROWS queries over blocks of `block` keys; transposed: keys over queries.

    Padding (segment 0, and what fills up the rows) sees nothing and is not seen.

    Args:
      batch: B. ids: Ids, int positions and segments [B, L] and [B, S], with `batch` rows, or one for all.
      window: positions that a query sees, itself included; 0 = all.
      parts: warpgroups' parts of a tile. block: tokens of a block of the side that passes by."""
    ids = filled_ids(ids, UNIT, UNIT)
    block_q, block_k = (block, ROWS) if transposed else (ROWS, block)
    active = active_blocks(ids, window=window, block_q=block_q, block_k=block_k)
    q_info, k_info = _info(*ids)
    full = active & _all_visible(q_info, k_info, window, block_q, block_k, ids.q_reach is not None)
    if transposed:
        active, full = active.swapaxes(1, 2), full.swapaxes(1, 2)
    active, full = (x.reshape(x.shape[0], -1, parts, x.shape[2]) for x in (active, full))
    wants = (active * 2 ** jnp.arange(parts)[None, None, :, None]).sum(axis=2)  # a bit per part
    active, full = active.any(axis=2), full.all(axis=2)
    counts = jnp.stack([full.sum(axis=2), active.sum(axis=2)], axis=2).astype(jnp.int32)
    visit = jnp.argsort(2 - active.astype(jnp.int8) - full.astype(jnp.int8), axis=2, stable=True)
    lists = (visit * 2 ** parts + jnp.take_along_axis(wants, visit, axis=2)).astype(jnp.int32)
    q_info, k_info, counts, lists = (
        jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (q_info, k_info, counts, lists))
    order = jnp.argsort(-counts[..., 1].reshape(-1), stable=True).astype(jnp.int32)
    return Plan(q_info, k_info, order, counts, lists)


def entry(value, parts, part=None):
    """Returns (block, None) of an entry of Plan.lists; with a part (0 or 1) of the tile, (block, whether that part sees
    it).

    value: an entry, int32 scalar. parts: parts of the tile, each of which has a bit in the entry."""
    block = lax.div(value, jnp.int32(2 ** parts))
    return block, None if part is None else lax.rem(lax.div(value, jnp.int32(1) + part), jnp.int32(2)) == 1


def _info(q_pos, k_pos, q_seg, k_seg, q_pre, reach):
    q, k, behind = [q_pos if reach is None else reach], [k_pos], [] if reach is None else [q_pos]
    if q_seg is not None:
        prefix = q_seg if q_pre is None else jnp.where(q_pre == 0, q_seg, q_pre)
        q = [jnp.where(q_seg == 0, NO_QUERY, q[0]), q_seg, prefix]
        k = [jnp.where(k_seg == 0, NO_KEY, k_pos), k_seg]
    return (jnp.stack(jnp.broadcast_arrays(*part), axis=1).astype(jnp.int32) for part in ([*q, *behind], k))


def _all_visible(q_info, k_info, window, block_q, block_k, reaches):
    """Returns bool [B, N, M]: blocks where every query sees every key, as far as extremes tell (masking is never
    wrong)."""
    q, k = (x.reshape(*x.shape[:2], -1, block) for x, block in ((q_info, block_q), (k_info, block_k)))
    (q_low, q_high), (k_low, k_high) = ((x.min(axis=3), x.max(axis=3)) for x in (q, k))
    sees = k_high[:, 0, None, :] <= q_low[:, 0, :, None]
    if window:
        sees &= q_high[:, -1 if reaches else 0, :, None] - k_low[:, 0, None, :] < window
    if k.shape[1] > 1:
        k_one = (k_low[:, 1] == k_high[:, 1])[:, None, :]
        mine = [(q_low[:, i] == q_high[:, i])[:, :, None] & (q_low[:, i, :, None] == k_low[:, 1, None, :])
                for i in (1, 2)]
        sees &= k_one & (mine[0] | mine[1])
    return sees
