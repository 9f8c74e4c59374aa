"""Forward kernel of `attention` on Hopper: a tile of 128 queries of one head per block of threads.

Two consumer warpgroups hold 64 queries each and take turns: while one multiplies, the other computes its softmax. The
ring holds tiles of keys and values, first those without a mask.

Legend: B rows, L queries and S keys per row (padded to blocks), H query heads, G key-value heads, K head size,
N warpgroups' parts of a row, I kinds of information per token (see gpu_plan).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.gpu_chip import HIDDEN, ROWS
from jaxrl.kernels.attention.packed.gpu_kernel import launch, part_of, stage_of, steps, visible


def forward(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, plan, op, sizes, interpret=None):
    """Returns (out [B, L, H, K] in q's dtype, lse [B, H, L] fp32 in base 2, blocks executed [B, H, N] int32 or None).

    A query that sees no key has out 0 and the lse -HIDDEN, a huge number.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK: of one dtype, L and S multiples of gpu_plan.UNIT.
      plan: gpu_plan.Plan of sizes.consumers parts and blocks of sizes.block keys.
      op: gpu_chip.Op; blocks are counted where it says so. sizes: gpu_chip.Sizes of the forward kernel.
      interpret: of plgpu.kernel; None = compiled."""
    batch, length, heads, size = q_BxLxHxK.shape
    consumers, keys, dtype = sizes.consumers, sizes.block, q_BxLxHxK.dtype
    results = [jax.ShapeDtypeStruct(q_BxLxHxK.shape, dtype), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
    scratch = dict(
        q=gp.swizzled((consumers, ROWS, size), dtype), k=gp.swizzled((sizes.stages, keys, size), dtype),
        v=gp.swizzled((sizes.stages, keys, size), dtype), lse=plgpu.SMEM((consumers, ROWS), jnp.float32),
        q_info=plgpu.SMEM((consumers, plan.q_info.shape[1], ROWS), jnp.int32),
        k_info=plgpu.SMEM((sizes.stages, plan.k_info.shape[1], keys), jnp.int32),
        stage=gp.staged(consumers, ROWS, keys, dtype, op), q_ready=plgpu.Barrier(num_arrivals=2 * consumers),
        **gp.ring_barriers(consumers, sizes.stages, 2, 1), turn=plgpu.Barrier(num_arrivals=consumers))

    def produce(where, n, block_of, refs, own):
        q, k, v, q_info, k_info = refs
        row, tile, head = where
        group = lax.div(head, jnp.int32(heads // k_BxSxGxK.shape[2]))
        for w in range(consumers):
            at = part_of(tile, w, sizes)
            gp.load(own, w, own["q_ready"], q=q.at[row, at, head], q_info=q_info.at[row, :, at])

        def fill(step, slot, reused):
            at = pl.ds(block_of(step) * keys, keys)
            gp.refill(own, slot, reused, dict(k=k.at[row, at, group], k_info=k_info.at[row, :, at]),
                      dict(v=v.at[row, at, group]))

        gp.ring(n, sizes.stages, fill)

    def consume(warpgroup, where, blocks, outs, own):
        return _consume(warpgroup, where, blocks, outs, own, op, sizes)

    return launch(consume, produce, (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK), results, scratch, plan, op, sizes, interpret)


def _consume(warpgroup, where, blocks, outs, own, op, sizes):
    """Computes one consumer's 64 queries, out [64, K] and lse [64]; returns the number of key blocks that it
    multiplied."""
    q, q_info, turn = own["q"].at[warpgroup], own["q_info"].at[warpgroup], own["turn"]
    size, shape, stage = q.shape[-1], (ROWS, sizes.block), stage_of(own, warpgroup)
    k_ready, k_free, v_ready, v_free = (
        own[f"{half}_{what}"] for half in ("first", "second") for what in ("ready", "free"))

    def take_turns():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    plgpu.barrier_wait(own["q_ready"])
    pl.when(warpgroup == 1)(take_turns)  # the second one is half a step behind

    def step(i, carry, masked):
        acc, top, total, done = carry
        slot = gp.slot_of(i, sizes.stages)
        plgpu.barrier_wait(k_ready.at[slot])

        def multiply(ref):
            plgpu.wgmma(ref, q, own["k"].at[slot].transpose((1, 0)))
            take_turns()
            return ref[...]

        raw = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        scores = gp.in_base_2(raw, op)[0] if op.softcap else raw
        factor = 1.0 if op.softcap else op.scale * gp.LOG2E
        if masked:
            scores = jnp.where(visible(q_info, own["k_info"].at[slot], shape, op), scores, HIDDEN)
            plgpu.commit_smem()  # the copy engine may overwrite what was read of k_info
        plgpu.barrier_arrive(k_free.at[slot])

        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        base = jnp.where(new_top > gp.SEEN, new_top, 0.0) if masked else new_top  # so that hidden keys weigh 0, not 1
        weights = jnp.exp2(scores * factor - gp.rows(base, shape))
        shrink = jnp.exp2(top - new_top)
        acc *= gp.rows(shrink, acc.shape)
        total = total * shrink + weights.sum(axis=1)
        low = weights.astype(q.dtype)
        acc, total, new_top, low = lax.optimization_barrier((acc, total, new_top, low))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_ready.at[slot])
        plgpu.barrier_wait(turn)
        acc, = gp.accumulate((acc,), ((lambda: low, own["v"].at[slot]),), stage)
        plgpu.barrier_arrive(v_free.at[slot])
        return acc, new_top, total, done + 1

    def skip(i):
        for ready, free in ((k_ready, k_free), (v_ready, v_free)):
            plgpu.barrier_wait(ready.at[gp.slot_of(i, sizes.stages)])
            take_turns()
            plgpu.barrier_arrive(free.at[gp.slot_of(i, sizes.stages)])

    start = (gp.zeros((ROWS, size)), gp.zeros((ROWS,), gp.BY_ROW, HIDDEN), gp.zeros((ROWS,), gp.BY_ROW), jnp.int32(0))
    acc, top, total, done = steps(blocks, step, skip, start)
    pl.when(warpgroup == 0)(take_turns)
    _write(warpgroup, where, outs, own, (acc, top, total), sizes)
    return done


def _write(warpgroup, where, outs, own, sums, sizes):
    """Writes out = sum / total and lse = top + log2(total); 0 and a huge lse where a query saw no key."""
    (acc, top, total), (out, lse, *_), (row, tile, head) = sums, outs, where
    seen = top > gp.SEEN
    q, lse_tile = own["q"].at[warpgroup], own["lse"].at[warpgroup]
    q[...] = (acc * gp.rows(jnp.where(seen, 1.0 / total, 0.0), acc.shape)).astype(q.dtype)
    lse_tile[...] = jnp.where(seen, top + jnp.log(total) * gp.LOG2E, -HIDDEN)
    plgpu.commit_smem()
    queries = part_of(tile, warpgroup, sizes)
    plgpu.copy_smem_to_gmem(q, out.at[row, queries, head])
    plgpu.copy_smem_to_gmem(lse_tile, lse.at[row, head, queries])
    plgpu.wait_smem_to_gmem(0)
