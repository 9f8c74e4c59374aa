"""The kernel of decode_gpu. A piece of work is a slot, a group of query heads and a split of the slot's blocks; a block
of threads per multiprocessor takes one piece after the other, and its producer reads ahead into the next one.

Legend: B slots, C cache length, N layers, G key-value heads, R query heads per group (a multiple of 8), K head size, P splits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention.gpu_parts import (
    BY_ROW,
    HIDDEN,
    LOG2E,
    ROWS,
    SEEN,
    WGMMA,
    accumulate,
    in_base_2,
    ring,
    rows,
    slot_of,
    staged,
    swizzled,
    zeros,
)
from jaxrl.kernels.attention.tuned_gpu import MULTIPROCESSORS


def decode(q_BxGxRxK, k_NxBxCxGK, v_NxBxCxGK, positions_B, layer_1, op, sizes, splits, interpret=None):
    """Returns (out [P, B, G, R, K], fp32 or, of one split, in q's dtype; lse [P, B, G, R] in base 2 and fp32).

    positions at or beyond C: the slot is idle, its output 0. sizes: tuned_gpu.Decode.
    """
    batch, groups, heads, size = q_BxGxRxK.shape
    length, keys, dtype = k_NxBxCxGK.shape[2], sizes.keys, q_BxGxRxK.dtype
    out_dtype = dtype if splits == 1 else jnp.float32
    out = [jax.ShapeDtypeStruct((splits, *q_BxGxRxK.shape), out_dtype),
           jax.ShapeDtypeStruct((splits, batch, groups, ROWS), jnp.float32)]
    takers = min(splits * groups * batch, MULTIPROCESSORS)
    one = plgpu.Barrier(num_arrivals=1, num_barriers=sizes.stages)
    tiles = dict(q=swizzled((ROWS, size), dtype), out=None if splits == 1 else swizzled((ROWS, size), jnp.float32),
                 k=swizzled((sizes.stages, keys, size), dtype), v=swizzled((sizes.stages, keys, size), dtype),
                 stage=staged(1, ROWS, keys, dtype, op))
    small = dict(  # behind the tiles, whose alignment would waste the space between
        lse=plgpu.SMEM((ROWS,), jnp.float32), q_ready=plgpu.Barrier(), q_free=plgpu.Barrier(),
        k_ready=one, v_ready=one, k_free=one, v_free=one)

    def kernel(q, k, v, positions, layer, out, lse, tiles, small):
        own = {**tiles, **small}

        def each(body):
            _pieces((batch, groups, splits), takers, lambda row: _blocks(positions[row], length, keys, op.window), body)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            plgpu.set_max_registers(sizes.registers, action="increase")

            @each
            def _(i, where, first, n, position, before):
                sums = _consume(first, n, position, before, length, own, op, sizes)
                _write(sums, out.at[where], lse.at[where], own)
                plgpu.barrier_arrive(own["q_free"])

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            plgpu.set_max_registers(sizes.producer_registers, action="decrease")
            each(lambda i, where, first, n, position, before: _produce(
                (q, k.at[layer[0]], v.at[layer[0]]), i, where[1:], first, n, before, length, own, sizes))

    out, lse = plgpu.kernel(
        kernel, out_type=out, scratch_types=[tiles, small], grid=(takers,), grid_names=("taker",),
        num_threads=2, thread_name="warpgroup", interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q_BxGxRxK, k_NxBxCxGK, v_NxBxCxGK, positions_B, layer_1)
    return out, lse[..., :heads]


def _pieces(shape, takers, blocks_of, body):
    """body(number, (split, row, group), first block, blocks, position, steps done before) for each of this block's pieces.

    shape: slots, groups, splits. blocks_of: slot -> (the query's position, its first block, the one behind its last).
    """
    slots, groups, splits = shape
    taker = lax.axis_index("taker")

    def one(i, before):
        piece = taker + i * takers
        row, rest = lax.div(piece, jnp.int32(groups * splits)), lax.rem(piece, jnp.int32(groups * splits))
        group, split = lax.div(rest, jnp.int32(splits)), lax.rem(rest, jnp.int32(splits))
        position, first, end = blocks_of(row)
        share = lax.div(end - first + jnp.int32(splits - 1), jnp.int32(splits))
        first = first + split * share
        n = jnp.maximum(jnp.minimum(end - first, share), 0)
        body(i, (split, row, group), first, n, position, before)
        return before + n

    mine = lax.div(slots * groups * splits - taker + jnp.int32(takers - 1), jnp.int32(takers))
    lax.fori_loop(jnp.int32(0), mine, one, jnp.int32(0))


def _produce(refs, i, where, first, n, before, length, own, sizes):
    """The queries of one piece, once the result of the piece before has left their tile, then its keys and values."""
    (q, k, v), (row, group) = refs, where
    (heads, size), keys = q.shape[2:], sizes.keys
    pl.when(i > 0)(lambda: plgpu.barrier_wait(own["q_free"]))
    # Rows from R on hold whatever shared memory held; no row of a product depends on another.
    plgpu.copy_gmem_to_smem(q.at[row, group], own["q"].at[pl.ds(0, heads)], own["q_ready"])

    def fill(step, slot, reused):
        at = row, pl.ds(_start(first + step, length, keys), keys), pl.ds(group * size, size)
        for name, source in (("k", k), ("v", v)):
            pl.when(reused)(lambda name=name: plgpu.barrier_wait(own[f"{name}_free"].at[slot]))
            plgpu.copy_gmem_to_smem(source.at[at], own[name].at[slot], own[f"{name}_ready"].at[slot])

    ring(n, sizes.stages, fill, before)


def _blocks(position, length, keys, window):
    """(position, the first block of `keys` positions that a query there sees, the one behind its last); none for an idle slot."""
    end = jnp.where(position < length, lax.div(position, jnp.int32(keys)) + 1, 0)
    if not window:
        return position, jnp.int32(0), end
    return position, jnp.minimum(lax.div(jnp.maximum(position - (window - 1), 0), jnp.int32(keys)), end), end


def _start(block, length, keys):
    """Where a block is read: the last one ends with the row, and so may begin inside the one before it."""
    return jnp.minimum(block * keys, length - keys)


def _consume(first, n, position, before, length, own, op, sizes):
    """(weighted sum of values, maximum and total of the weights) of the heads of a group."""
    q, shape = own["q"], (ROWS, sizes.keys)
    stage = None if own["stage"] is None else own["stage"].at[0]
    plgpu.barrier_wait(own["q_ready"])

    def step(i, carry):
        acc, top, total = carry
        slot, block = slot_of(before + i, sizes.stages), first + i
        plgpu.barrier_wait(own["k_ready"].at[slot])

        def multiply(ref):
            plgpu.wgmma(ref, q, own["k"].at[slot].transpose((1, 0)))
            return ref[...]

        scores, _ = in_base_2(pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32)), op)
        at = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + _start(block, length, sizes.keys)
        mask = (at <= position) & (at >= block * sizes.keys)
        if op.window:
            mask &= position - at < op.window
        scores = jnp.where(mask, scores, HIDDEN)
        plgpu.barrier_arrive(own["k_free"].at[slot])

        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - rows(jnp.where(new_top > SEEN, new_top, 0.0), shape))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        low = weights.astype(q.dtype)
        plgpu.barrier_wait(own["v_ready"].at[slot])
        acc, = accumulate((acc * rows(shrink, acc.shape),), ((lambda: low, own["v"].at[slot]),), stage)
        plgpu.barrier_arrive(own["v_free"].at[slot])
        return acc, new_top, total

    start = (zeros((ROWS, q.shape[-1])), zeros((ROWS,), BY_ROW, HIDDEN), zeros((ROWS,), BY_ROW))
    return lax.fori_loop(jnp.int32(0), n, step, start)


def _write(sums, out, lse, own):
    """The weighted mean, 0 where nothing was seen, and its lse, then so low that it counts for nothing."""
    acc, top, total = sums
    tile, heads = own["q"] if own["out"] is None else own["out"], out.shape[0]
    seen = top > SEEN
    tile[...] = (acc * rows(jnp.where(seen, 1.0 / total, 0.0), acc.shape)).astype(tile.dtype)
    own["lse"][...] = jnp.where(seen, top + jnp.log(total) * LOG2E, HIDDEN)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, heads)], out)
    plgpu.copy_smem_to_gmem(own["lse"], lse)
    plgpu.wait_smem_to_gmem(0)
