"""The kernel of `gpu`. A piece of work is a slot (or a tile of slots, with the blocks that they share), a group of
query heads and a split of the blocks; a block of threads per multiprocessor takes one piece after the other, and its
producer reads ahead into the next one.

Legend: B slots, C cache length, N layers, G key-value heads, R query heads per group (a multiple of 8), K head size, P
parts of tiles, then splits of slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_chip
from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.cached import tuned
from jaxrl.kernels.attention.gpu_chip import HIDDEN, ROWS


class Piece(NamedTuple):
    """One piece of work of a block of threads, as its producer and its consumer see it; scalars of the kernel."""

    shared: Any    # whether it is a tile's
    row: Any       # the tile, or the slot
    group: Any
    part: Any      # where its results go
    first: Any     # block
    n: Any         # blocks
    position: Any  # the last that is seen
    done: Any      # pieces before, of this taker
    before: Any    # blocks of those pieces


def decode(q_BxGxRxK, k_NxBxCxGK, v_NxBxCxGK, positions_B, layer_1, op, sizes, splits, interpret=None, work=None,
           parts=0):
    """Computes attention of one query per slot over its cache, in splits of the cache and tiles of slots.

    Args:
      q_BxGxRxK, k_NxBxCxGK, v_NxBxCxGK: of one dtype, bfloat16 or float16.
      layer_1: [1] int32, the layer of k and v that is read.
      positions_B: last position that is seen; at or beyond C the slot is idle, its output 0.
      op, sizes: the operation (window, soft-cap, scale); keys of a block, stages, registers.
      splits: parts that a slot's blocks are divided into.
      work: gpu.Work, the blocks that tiles of slots share, or None.
      parts: parts that a tile's blocks are divided into; 0 = no tiles.

    Returns:
      (out [P, B, G, R, K] fp32, or with one split and no tiles in q's dtype; lse [P, B, G, 64] fp32, base 2). A tile
      writes into each of its slots the lse of all its rows, R for each of its slots. Parts of a tile without blocks are
      not written."""
    batch, groups, heads, size = q_BxGxRxK.shape
    length, keys, dtype = k_NxBxCxGK.shape[2], sizes.block, q_BxGxRxK.dtype
    together = 1 if work is None else work.slots.shape[1]
    out_dtype = dtype if splits + parts == 1 else jnp.float32
    out = [jax.ShapeDtypeStruct((parts + splits, *q_BxGxRxK.shape), out_dtype),
           jax.ShapeDtypeStruct((parts + splits, batch, groups, ROWS), jnp.float32)]
    takers = min(splits * groups * batch, gpu_chip.MULTIPROCESSORS)
    tiles = dict(q=gp.swizzled((ROWS, size), dtype),
                 out=None if splits + parts == 1 else gp.swizzled((ROWS, size), jnp.float32),
                 k=gp.swizzled((sizes.stages, keys, size), dtype), v=gp.swizzled((sizes.stages, keys, size), dtype),
                 stage=gp.staged(1, ROWS, keys, dtype, op))
    small = dict(  # behind the tiles, whose alignment would waste the space between
        lse=plgpu.SMEM((ROWS,), jnp.float32), q_ready=plgpu.Barrier(), q_free=plgpu.Barrier(),
        others_ready=plgpu.Barrier(num_arrivals=together - 1) if together > 1 else None,
        **gp.ring_barriers(1, sizes.stages, 1, 1))

    def kernel(q, k, v, positions, layer, *rest):
        *work, out, lse, tiles, small = rest
        own = {**tiles, **small}
        slots, sources = work[:2] if work else (None, None)

        def each(body):
            _pieces((batch, groups, splits, parts), takers, _blocks(positions, length, keys, op.window, work), body)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            plgpu.set_max_registers(sizes.registers, action="increase")

            @each
            def _(piece):
                sums = _consume(piece, length, own, op, sizes)
                _write(sums, piece, slots, out, lse, own)
                plgpu.barrier_arrive(own["q_free"])

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            plgpu.set_max_registers(sizes.producer_registers, action="decrease")
            each(lambda piece: _produce(piece, (q, k.at[layer[0]], v.at[layer[0]]), slots, sources, length, own, sizes))

    return plgpu.kernel(
        kernel, out_type=out, scratch_types=[tiles, small], grid=(takers,), grid_names=("taker",),
        num_threads=2, thread_name="warpgroup", interpret=interpret, compiler_params=gp.PARAMS,
    )(q_BxGxRxK, k_NxBxCxGK, v_NxBxCxGK, positions_B, layer_1, *(() if work is None else work[:5]))


def _pieces(shape, takers, blocks, body):
    """Runs body(Piece) for each of this block's pieces: first those of tiles, as far as there is work, then those of
    slots.

    shape: slots, groups, splits, parts of tiles. blocks: of `_blocks`.
    """
    slots, groups, splits, parts = shape
    tiles, of_tile, of_slot = blocks
    taker, of_tiles = lax.axis_index("taker"), tiles * (groups * parts)

    def one(i, carry):
        done, before = carry
        number = taker + i * takers
        if parts:
            shared = number < of_tiles
            number = number - jnp.where(shared, 0, of_tiles)
            into = jnp.where(shared, jnp.int32(parts), jnp.int32(splits))
        else:
            shared, into = False, jnp.int32(splits)
        row, rest = lax.div(number, groups * into), lax.rem(number, groups * into)
        group, part = lax.div(rest, into), lax.rem(rest, into)
        position, first, end = of_slot(jnp.where(shared, 0, row) if parts else row)
        share, wanted = lax.div(end - first + into - 1, into), True
        if parts:
            tile = of_tile(jnp.where(shared, row, 0))
            position, first, end = (jnp.where(shared, a, b) for a, b in zip(tile, (position, first, end), strict=True))
            share = lax.div(end - first + into - 1, into)
            share = jnp.where(shared, jnp.maximum(share, tuned.PART), share)
        first = first + part * share
        n = jnp.maximum(jnp.minimum(end - first, share), 0)
        place = part + (jnp.where(shared, 0, parts) if parts else 0)
        piece = Piece(shared, row, group, place, first, n, position, done, before)
        if parts:
            wanted = (n > 0) | ~shared
            pl.when(wanted)(lambda: body(piece))
        else:
            body(piece)
        return done + wanted, before + n

    mine = lax.div(of_tiles + slots * groups * splits - taker + jnp.int32(takers - 1), jnp.int32(takers))
    lax.fori_loop(jnp.int32(0), mine, one, (jnp.int32(0), jnp.int32(0)))


def _produce(piece, refs, slots, sources, length, own, sizes):
    """Copies the queries of one piece, once the result of the piece before has left their tile, then its keys and
    values."""
    q, k, v = refs
    shared, row, group = piece.shared, piece.row, piece.group
    (heads, size), keys = q.shape[2:], sizes.block
    pl.when(piece.done > 0)(lambda: plgpu.barrier_wait(own["q_free"]))
    lead = row if slots is None else jnp.where(shared, slots[jnp.where(shared, row, 0), 0], row)
    # Rows from R on hold whatever shared memory held; no row of a product depends on another.
    plgpu.copy_gmem_to_smem(q.at[lead, group], own["q"].at[pl.ds(0, heads)], own["q_ready"])
    if slots is not None:
        @pl.when(shared)
        def _():
            for w in range(1, slots.shape[1]):  # where there is no slot, the first one's again: its results go nowhere
                slot = slots[row, w]
                plgpu.copy_gmem_to_smem(q.at[jnp.where(slot < 0, lead, slot), group],
                                        own["q"].at[pl.ds(w * heads, heads)], own["others_ready"])

    source_slot = row if slots is None else jnp.where(shared, sources[jnp.where(shared, row, 0)], row)

    def fill(step, slot, reused):
        at = source_slot, pl.ds(_start(piece.first + step, length, keys), keys), pl.ds(group * size, size)
        gp.refill(own, slot, reused, dict(k=k.at[at]), dict(v=v.at[at]))

    gp.ring(piece.n, sizes.stages, fill, piece.before)


def _blocks(positions, length, keys, window, work):
    """Returns (tiles with work; then of a tile and of a slot: (the last position seen, the first block of `keys`
    positions that is read, the one behind the last); none for an idle slot)."""
    *_, blocks, count, before = work or (None,) * 5

    def of_slot(slot):
        position = positions[slot]
        end = jnp.where(position < length, lax.div(position, jnp.int32(keys)) + 1, 0)
        if window:
            return position, jnp.minimum(lax.div(jnp.maximum(position - (window - 1), 0), jnp.int32(keys)), end), end
        return position, jnp.int32(0) if before is None else before[slot], end

    def of_tile(tile):
        return blocks[tile] * keys - 1, jnp.int32(0), blocks[tile]

    return count[0] if work else jnp.int32(0), of_tile, of_slot


def _start(block, length, keys):
    """Returns where a block is read: the last one ends with the row, and so may begin inside the one before it."""
    return jnp.minimum(block * keys, length - keys)


def _consume(piece, length, own, op, sizes):
    """Returns (sum of weights times values [R, K], maximum [R] and total [R] of the weights) of a piece's R heads, in
    fp32.

    length: positions of the cache. own: shared memory and barriers by name."""
    q, shape = own["q"], (ROWS, sizes.block)
    stage = None if own["stage"] is None else own["stage"].at[0]
    plgpu.barrier_wait(own["q_ready"])
    if own["others_ready"] is not None:
        pl.when(piece.shared)(lambda: plgpu.barrier_wait(own["others_ready"]))

    def step(i, carry):
        acc, top, total = carry
        slot, block = gp.slot_of(piece.before + i, sizes.stages), piece.first + i
        plgpu.barrier_wait(own["first_ready"].at[slot])

        def multiply(ref):
            plgpu.wgmma(ref, q, own["k"].at[slot].transpose((1, 0)))
            return ref[...]

        scores, _ = gp.in_base_2(pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32)), op)
        at = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=gp.WGMMA) + _start(block, length, sizes.block)
        mask = (at <= piece.position) & (at >= block * sizes.block)
        if op.window:
            mask &= piece.position - at < op.window
        scores = jnp.where(mask, scores, HIDDEN)
        plgpu.barrier_arrive(own["first_free"].at[slot])

        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - gp.rows(jnp.where(new_top > gp.SEEN, new_top, 0.0), shape))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        low = weights.astype(q.dtype)
        plgpu.barrier_wait(own["second_ready"].at[slot])
        acc, = gp.accumulate((acc * gp.rows(shrink, acc.shape),), ((lambda: low, own["v"].at[slot]),), stage)
        plgpu.barrier_arrive(own["second_free"].at[slot])
        return acc, new_top, total

    start = (gp.zeros((ROWS, q.shape[-1])), gp.zeros((ROWS,), gp.BY_ROW, HIDDEN), gp.zeros((ROWS,), gp.BY_ROW))
    return lax.fori_loop(jnp.int32(0), piece.n, step, start)


def _write(sums, piece, slots, out, lse, own):
    """Writes the weighted mean, 0 where nothing was seen, and its lse, then so low that it counts for nothing."""
    acc, top, total = sums
    tile, heads = own["q"] if own["out"] is None else own["out"], out.shape[3]
    seen = top > gp.SEEN
    tile[...] = (acc * gp.rows(jnp.where(seen, 1.0 / total, 0.0), acc.shape)).astype(tile.dtype)
    own["lse"][...] = jnp.where(seen, top + jnp.log(total) * gp.LOG2E, HIDDEN)
    plgpu.commit_smem()

    def leave(slot, w=0):
        where = piece.part, slot, piece.group
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(w * heads, heads)], out.at[where])
        plgpu.copy_smem_to_gmem(own["lse"], lse.at[where])

    if slots is None:
        leave(piece.row)
    else:
        pl.when(~piece.shared)(lambda: leave(piece.row))

        @pl.when(piece.shared)
        def _():
            for w in range(slots.shape[1]):
                slot = slots[piece.row, w]
                pl.when(slot >= 0)(lambda slot=slot, w=w: leave(slot, w))

    plgpu.wait_smem_to_gmem(0)
