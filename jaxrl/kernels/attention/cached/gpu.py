"""`cached_attention` on Hopper GPUs: reads the cache blocks that a slot's query sees, once for a group's heads.

The query heads of a group are the rows of one matrix product (64, of which R are used: decoding is bound by reading the
cache, not by multiplying). The whole stacked cache is the kernel's operand, in place. Where slots and groups are too
few for the chip, a slot's positions are split, and the parts' results are joined by their logsumexp.

Of a prompt that slots share (shared.py) the whole blocks are pieces of work of their own, whose 64 rows hold the query
heads of several slots. The slots' other pieces begin behind them, in the same launch, and the results are joined as
those of splits.

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, R = H / G, K head size, P parts of a tile's
positions and splits of a slot's, T tiles, W slots of a tile that a product has room for.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import gpu_chip
from jaxrl.kernels.attention import sinks as at_sinks
from jaxrl.kernels.attention.cached import tuned
from jaxrl.kernels.attention.cached.shared import WIDTH
from jaxrl.kernels.attention.gpu_chip import HIDDEN, ROWS, Op, check_chip, interpreted, sizes_of

ALIGNED = 8   # cache lengths are whole numbers of this
WIDEST = 192  # head size whose parts' fp32 results fit into shared memory beside the ring


class Work(NamedTuple):
    """The tiles of slots with a shared prompt, whose keys are read once per tile: T tiles of W slots, B slots in
    all."""

    slots: jax.Array    # [T, W] int32, -1 = none
    sources: jax.Array  # [T] int32, the slot that is read
    blocks: jax.Array   # [T] int32, whole blocks that are read, 0 = no work
    count: jax.Array    # [1] int32, tiles with work are among the first so many
    before: jax.Array   # [B] int32, blocks of a slot that its tile reads
    place: jax.Array    # [B] int32, of a slot in its tile


def work_of(positions_Bx1, shape_NxBxCxGK, dtype, *, window, shared, heads, size) -> Work | None:
    """Returns the Work of a decoding step: which tiles of slots read a shared prompt once. None where no tiles are
    read.

    That is without `shared`, with a window, for heads above WIDEST, or more than ROWS query heads per group.

    Args:
      positions_Bx1: int32 positions of the queries; a slot at or beyond C is idle.
      shape_NxBxCxGK: of the cache's keys. dtype: not read.
      window: positions that a query sees, 0 = all. shared: shared.Shared or None.
      heads, size: query heads H and head size K."""
    del dtype
    _, slots, length, width = shape_NxBxCxGK
    rows = padded(heads * size // width)
    if shared is None or window or size > WIDEST or rows > ROWS:
        return None
    keys = sizes_of(tuned.GPU, size).block
    row, place = shared.row, shared.place
    busy = (positions_Bx1[:, 0] < length) & (row >= 0)
    before = jnp.where(busy, shared.length[row] // keys, 0)
    fit = min(WIDTH, ROWS // rows)
    tiles = shared.tiles.reshape(-1, fit)
    blocks = jnp.max(jnp.where(tiles >= 0, before[tiles], 0), axis=1)
    count = jnp.max(jnp.where(blocks > 0, jnp.arange(1, len(blocks) + 1), 0), keepdims=True)
    return Work(tiles, jnp.repeat(jnp.maximum(shared.tiles[:, 0], 0), WIDTH // fit), *(
        x.astype(jnp.int32) for x in (blocks, count, before, place % fit)))


def least_shared(shape_BxCxGK, dtype, groups: int) -> int:
    """Returns the fewest positions of a prompt that a tile reads: a block; more than there are for heads above WIDEST.

    shape_BxCxGK: of a layer's keys. dtype: not read. groups: key-value heads G."""
    del dtype
    size = shape_BxCxGK[2] // groups
    return sizes_of(tuned.GPU, size).block if size <= WIDEST else shape_BxCxGK[1] + 1


def padded(rows: int) -> int:
    """Returns `rows`, the query heads of a group, rounded up to the 8 of a tile of memory."""
    return -(-rows // 8) * 8


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale, shared=None,
              work=None, sinks=None, interpret=None):
    """Computes api.cached_attention with the Mosaic GPU kernel; returns out [B, 1, H, K] in q's dtype. Has no gradient.

    Args:
      q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK: queries and the cache of N layers, all of one dtype: bfloat16 or float16.
      positions_Bx1: int; at or beyond C = an idle slot, whose output means nothing. layer: int scalar, which is read.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: positive factor on the scores. sinks: [H] fp32 scores of keys without a value, or None.
      shared: shared.Shared or None; not read if there is `work`, of `work_of` (None = made here).
      interpret: False, True, or what the interpreter is told; None = interpret where this is no GPU.

    Raises NotImplementedError for what `check` names."""
    splits = check(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, scale, interpret)
    from jaxrl.kernels.attention.cached.gpu_kernel import decode

    batch, _, heads, size = q_Bx1xHxK.shape
    groups, interpret = k_NxBxCxGK.shape[3] // size, interpreted(interpret)
    rows, length, sizes = heads // groups, k_NxBxCxGK.shape[2], sizes_of(tuned.GPU, size)
    if work is None:
        work = work_of(positions_Bx1, k_NxBxCxGK.shape, q_Bx1xHxK.dtype, window=window, shared=shared, heads=heads,
                       size=size)
    q = q_Bx1xHxK.reshape(batch, groups, rows, size)
    q = jnp.pad(q, [(0, 0), (0, 0), (0, padded(rows) - rows), (0, 0)])
    op = Op(float(scale), float(softcap), window, segments=False, in_registers=not interpret)
    positions, layer = positions_Bx1.reshape(-1).astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1)
    parts = 0 if work is None else parts_of(-(-batch // work.slots.shape[1]) * groups, length, sizes.block)
    out, lse = decode(q, k_NxBxCxGK, v_NxBxCxGK, positions, layer, op, sizes, splits, interpret, work, parts)
    if parts:
        out, lse = _as_slots(out, lse, work, parts)
    lse = lse[..., :q.shape[2]]
    if sinks is not None:
        of_rows = jnp.pad(sinks.reshape(groups, rows) * at_sinks.BASE_2[2], [(0, 0), (0, q.shape[2] - rows)])
        lse = jnp.concatenate([lse, jnp.broadcast_to(of_rows[None, None], (1, *lse.shape[1:]))])
    if splits + parts > 1 or sinks is not None:
        weights = jnp.exp2(lse - lse.max(axis=0, keepdims=True))
        share = weights / weights.sum(axis=0, keepdims=True)
        out = (out * share[:len(out), ..., None]).sum(axis=0)
    else:
        out = out[0]
    return out[:, :, :rows].reshape(q_Bx1xHxK.shape).astype(q_Bx1xHxK.dtype)


def check(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, scale, interpret=None) -> int:
    """Returns the number of parts that each slot's positions are split into, for the arrays of a call (see
    `attention`).

    Raises NotImplementedError for GPUs but Hopper, jax below 0.11 (interpreted: 0.12), dtypes but bfloat16 and float16,
    and mixed ones; for head sizes that are no multiple of 16 from 64 to 256; more than 64 query heads per group; a
    scale that is not positive; a cache shorter than a block, or no multiple of ALIGNED; and heads above WIDEST where
    positions would be split."""
    batch, _, heads, size = q_Bx1xHxK.shape
    length, width = k_NxBxCxGK.shape[2:]
    check_chip(q_Bx1xHxK.dtype, interpret)
    if not q_Bx1xHxK.dtype == k_NxBxCxGK.dtype == v_NxBxCxGK.dtype:
        raise NotImplementedError(
            f"queries of {q_Bx1xHxK.dtype}, a cache of {k_NxBxCxGK.dtype}; the decoding kernel takes one")
    if size % 16 or not 64 <= size <= 256 or heads * size > 64 * width or scale <= 0:
        raise NotImplementedError(
            f"head size {size}, {heads * size // width} query heads per key-value head, scale {scale}; the decoding "
            "kernel takes multiples of 16 from 64 to 256, up to 64, and positive ones")
    block = sizes_of(tuned.GPU, size).block
    if length % ALIGNED or length < block:
        raise NotImplementedError(
            f"cache length {length}; the decoding kernel takes multiples of {ALIGNED} from {block}")
    splits = splits_of(batch * width // size, length, block)
    if splits > 1 and size > WIDEST:
        raise NotImplementedError(f"{batch} slots of {width // size} key-value heads of size {size}; too few for the "
                                  "chip, and too wide to be split")
    return splits


def splits_of(pieces: int, length: int, block: int) -> int:
    """Returns the parts into which a slot's positions are split: two pieces of work per multiprocessor, 4 blocks at
    least each.

    Args:
      pieces: slots times groups of heads. length: positions of the cache. block: positions of a block."""
    return max(1, min(-(-2 * gpu_chip.MULTIPROCESSORS // pieces), length // (4 * block)))


def parts_of(pieces: int, length: int, block: int) -> int:
    """Returns the parts into which a tile's positions are split: two pieces of work per multiprocessor, tuned.PART
    blocks at least each, since a part leaves results of several slots.

    Args:
      pieces: tiles times groups of heads. length: positions of the cache. block: positions of a block."""
    return max(1, min(-(-2 * gpu_chip.MULTIPROCESSORS // pieces), length // (tuned.PART * block)))


def _as_slots(out_PxBxGxRxK, lse_PxBxGx64, work, parts):
    """Returns the same with the rows of each slot first, and nothing where a part of a tile was empty and wrote
    nothing."""
    heads = out_PxBxGxRxK.shape[3]
    share = jnp.maximum(-(-work.before // parts), tuned.PART)
    written = (jnp.arange(parts)[:, None] * share[None] < work.before[None])[..., None, None]
    at = work.place[:, None, None] * heads + jnp.arange(heads)[None, None]
    of_tiles = jnp.take_along_axis(lse_PxBxGx64[:parts], at[None], axis=3)
    lse = jnp.concatenate([jnp.where(written, of_tiles, HIDDEN), lse_PxBxGx64[parts:, ..., :heads]])
    return jnp.concatenate([jnp.where(written[..., None], out_PxBxGxRxK[:parts], 0), out_PxBxGxRxK[parts:]]), lse
