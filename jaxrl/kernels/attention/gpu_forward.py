"""Forward kernel of `attention` on Hopper: a tile of 128 queries of one head per block of threads.

Two consumer warpgroups hold 64 queries each and take turns: while one multiplies, the other computes its softmax. The
producer fills a ring of key and value tiles, only those in the tile's list, first those without a mask.

Legend: B rows, L queries and S keys per row (padded to blocks), H query heads, G key-value heads, K head size,
N warpgroups' parts of a row, I kinds of information per token (see gpu_plan).
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
    accumulate,
    in_base_2,
    ring,
    rows,
    slot_of,
    staged,
    steps,
    swizzled,
    visible,
    zeros,
)
from jaxrl.kernels.attention.gpu_plan import entry

CONSUMERS = 2


def forward(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, plan, op, sizes, interpret=None):
    """Returns (out_BxLxHxK, lse_BxHxL in base 2 and fp32, blocks_BxHxN executed or None).

    plan: gpu_plan.Plan of two parts and blocks of sizes.keys keys; sizes: tuned_gpu.Forward.
    """
    batch, length, heads, size = q_BxLxHxK.shape
    tiles, keys, dtype = length // (CONSUMERS * ROWS), sizes.keys, q_BxLxHxK.dtype
    n_info_q, n_info_k = plan.q_info.shape[1], plan.k_info.shape[1]
    out = [jax.ShapeDtypeStruct(q_BxLxHxK.shape, dtype), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
    if op.count:
        out.append(jax.ShapeDtypeStruct((batch, heads, tiles * CONSUMERS), jnp.int32))
    ready, free = (plgpu.Barrier(num_arrivals=n, num_barriers=sizes.stages) for n in (1, CONSUMERS))
    scratch = dict(
        q=swizzled((CONSUMERS, ROWS, size), dtype), k=swizzled((sizes.stages, keys, size), dtype),
        v=swizzled((sizes.stages, keys, size), dtype), lse=plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        q_info=plgpu.SMEM((CONSUMERS, n_info_q, ROWS), jnp.int32),
        k_info=plgpu.SMEM((sizes.stages, n_info_k, keys), jnp.int32),
        stage=staged(CONSUMERS, ROWS, keys, dtype, op),
        q_ready=plgpu.Barrier(num_arrivals=2 * CONSUMERS), k_ready=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
        v_ready=ready, k_free=free, v_free=free, turn=plgpu.Barrier(num_arrivals=CONSUMERS))

    def kernel(q, k, v, q_info, k_info, order, counts, lists, out, lse, *rest):
        *blocks, own = rest
        flat = order[lax.axis_index("work")]
        row, tile, head = lax.div(flat, jnp.int32(tiles)), lax.rem(flat, jnp.int32(tiles)), lax.axis_index("head")
        n_full, n = counts[row, tile, 0], counts[row, tile, 1]
        warpgroup = lax.axis_index("warpgroup")
        where = (row, tile, head)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(sizes.registers, action="increase")
            wanted = lambda step: entry(lists[row, tile, step], CONSUMERS, warpgroup)[1]  # noqa: E731
            done = _consume(warpgroup, where, n_full, n, wanted, (out, lse), own, op, sizes)
            if blocks:
                blocks[0][row, head, tile * CONSUMERS + warpgroup] = done

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(sizes.producer_registers, action="decrease")
            group = lax.div(head, jnp.int32(heads // k_BxSxGxK.shape[2]))
            _produce(where, group, n, (q, k, v, q_info, k_info, lists), own, sizes)

    results = plgpu.kernel(
        kernel, out_type=out, scratch_types=[scratch], grid=(heads, batch * tiles), grid_names=("head", "work"),
        num_threads=CONSUMERS + 1, thread_name="warpgroup", interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, plan.q_info, plan.k_info, plan.order, plan.counts, plan.lists)
    return results[0], results[1], (results[2] if op.count else None)


def _produce(where, group, n, refs, own, sizes):
    q, k, v, q_info, k_info, lists = refs
    row, tile, head = where
    for w in range(CONSUMERS):
        queries = pl.ds((tile * CONSUMERS + w) * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q.at[row, queries, head], own["q"].at[w], own["q_ready"])
        plgpu.copy_gmem_to_smem(q_info.at[row, :, queries], own["q_info"].at[w], own["q_ready"])

    def fill(step, slot, reused):
        keys = pl.ds(entry(lists[row, tile, step], CONSUMERS)[0] * sizes.keys, sizes.keys)

        @pl.when(reused)
        def _():
            plgpu.barrier_wait(own["k_free"].at[slot])

        plgpu.copy_gmem_to_smem(k.at[row, keys, group], own["k"].at[slot], own["k_ready"].at[slot])
        plgpu.copy_gmem_to_smem(k_info.at[row, :, keys], own["k_info"].at[slot], own["k_ready"].at[slot])

        @pl.when(reused)
        def _():
            plgpu.barrier_wait(own["v_free"].at[slot])

        plgpu.copy_gmem_to_smem(v.at[row, keys, group], own["v"].at[slot], own["v_ready"].at[slot])

    ring(n, sizes.stages, fill)


def _consume(warpgroup, where, n_full, n, wanted, outs, own, op, sizes):
    """One consumer's 64 queries; returns the number of key blocks that it multiplied."""
    q, q_info, turn = own["q"].at[warpgroup], own["q_info"].at[warpgroup], own["turn"]
    size, shape = q.shape[-1], (ROWS, sizes.keys)
    stage = None if own["stage"] is None else own["stage"].at[warpgroup]

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    plgpu.barrier_wait(own["q_ready"])
    pl.when(warpgroup == 1)(take_turns)  # the second one is half a step behind

    def step(i, carry, masked):
        acc, top, total, done = carry
        slot = slot_of(i, sizes.stages)
        plgpu.barrier_wait(own["k_ready"].at[slot])

        def multiply(ref):
            plgpu.wgmma(ref, q, own["k"].at[slot].transpose((1, 0)))
            take_turns()
            return ref[...]

        raw = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        scores = in_base_2(raw, op)[0] if op.softcap else raw
        factor = 1.0 if op.softcap else op.scale * LOG2E
        if masked:
            scores = jnp.where(visible(q_info, own["k_info"].at[slot], shape, op), scores, HIDDEN)
            plgpu.commit_smem()  # the copy engine may overwrite what was read of k_info
        plgpu.barrier_arrive(own["k_free"].at[slot])

        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        base = jnp.where(new_top > SEEN, new_top, 0.0) if masked else new_top  # so that hidden keys weigh 0, not 1
        weights = jnp.exp2(scores * factor - rows(base, shape))
        shrink = jnp.exp2(top - new_top)
        acc *= rows(shrink, acc.shape)
        total = total * shrink + weights.sum(axis=1)
        low = weights.astype(q.dtype)
        acc, total, new_top, low = lax.optimization_barrier((acc, total, new_top, low))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(own["v_ready"].at[slot])
        plgpu.barrier_wait(turn)
        acc, = accumulate((acc,), ((lambda: low, own["v"].at[slot]),), stage)
        plgpu.barrier_arrive(own["v_free"].at[slot])
        return acc, new_top, total, done + 1

    def skip(i):
        slot = slot_of(i, sizes.stages)
        plgpu.barrier_wait(own["k_ready"].at[slot])
        take_turns()
        plgpu.barrier_arrive(own["k_free"].at[slot])
        plgpu.barrier_wait(own["v_ready"].at[slot])
        take_turns()
        plgpu.barrier_arrive(own["v_free"].at[slot])

    start = (zeros((ROWS, size)), zeros((ROWS,), BY_ROW, HIDDEN), zeros((ROWS,), BY_ROW), jnp.int32(0))
    acc, top, total, done = steps(n_full, n, step, skip, wanted, start)
    pl.when(warpgroup == 0)(take_turns)
    _write(warpgroup, where, outs, own, acc, top, total)
    return done


def _write(warpgroup, where, outs, own, acc, top, total):
    """out = sum / total and lse = top + log2(total); 0 and a huge lse where a query saw no key."""
    (out, lse), (row, tile, head) = outs, where
    seen = top > SEEN
    q, lse_tile = own["q"].at[warpgroup], own["lse"].at[warpgroup]
    q[...] = (acc * rows(jnp.where(seen, 1.0 / total, 0.0), acc.shape)).astype(q.dtype)
    lse_tile[...] = jnp.where(seen, top + jnp.log(total) * LOG2E, -HIDDEN)
    plgpu.commit_smem()
    queries = pl.ds((tile * CONSUMERS + warpgroup) * ROWS, ROWS)
    plgpu.copy_smem_to_gmem(q, out.at[row, queries, head])
    plgpu.copy_smem_to_gmem(lse_tile, lse.at[row, head, queries])
    plgpu.wait_smem_to_gmem(0)
