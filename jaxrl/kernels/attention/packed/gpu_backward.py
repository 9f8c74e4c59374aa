"""Backward kernels of `attention` on Hopper: one for dq, one for dk and dv. Both compute the weights again.

`dq` is laid out like the forward kernel: a tile of queries, a ring of keys and values. `dk` and `dv` turn it round: a
tile of keys, a ring of queries and output gradients, which runs over the tile's query blocks and over the query heads
that share the key head, or over equal shares of these, where tiles and key heads alone are too few for the
multiprocessors (`tuned.key_shares`); then XLA adds the shares' sums. No sum crosses blocks of threads otherwise, so
nothing is atomic and every run gives the same bits.

With P the weights, S the scores, delta = sum(dout * out): dV = P^T dout, dP = dout V^T, dS = P (dP - delta),
dQ = scale * dS K, dK = scale * dS^T Q; a soft-cap multiplies dS by 1 - tanh^2.

Legend: B rows, L queries and S keys per row (padded to blocks), H query heads, G key-value heads, K head size,
N warpgroups' parts of a row, I kinds of information per token (see gpu_plan).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.gpu_chip import ROWS
from jaxrl.kernels.attention.packed import tuned
from jaxrl.kernels.attention.packed.gpu_kernel import launch, part_of, stage_of, steps, visible


def stats(out_BxLxHxK, d_out_BxLxHxK, lse_BxHxL):
    """Returns [B, H, 2, L] fp32, which the backward kernels read per query: lse, and delta = sum over K of d_out * out.

    lse_BxHxL: in base 2, with the sinks if there are any."""
    delta = jnp.einsum("blhk,blhk->blh", out_BxLxHxK.astype(jnp.float32), d_out_BxLxHxK.astype(jnp.float32))
    delta = lax.optimization_barrier(delta)  # or XLA adds up within the stack: a thread a row, 3 KB apart, not a warp
    return jnp.stack([lse_BxHxL, delta.swapaxes(1, 2)], axis=2)


def dq(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL, plan, op, sizes, interpret=None):
    """Returns (dq [B, L, H, K] in q's dtype, blocks executed [B, H, N] int32, or None where they are not counted).

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK: of one dtype, L and S multiples of gpu_plan.UNIT.
      stats_BxHx2xL: of `stats`.
      plan: gpu_plan.Plan of sizes.consumers parts and blocks of sizes.block keys.
      op: gpu_chip.Op. sizes: gpu_chip.Sizes of this kernel. interpret: of plgpu.kernel; None = compiled."""
    *_, heads, size = q_BxLxHxK.shape
    consumers, keys, dtype = sizes.consumers, sizes.block, q_BxLxHxK.dtype
    scratch = dict(
        q=gp.swizzled((consumers, ROWS, size), dtype), d_out=gp.swizzled((consumers, ROWS, size), dtype),
        k=gp.swizzled((sizes.stages, keys, size), dtype), v=gp.swizzled((sizes.stages, keys, size), dtype),
        stats=plgpu.SMEM((consumers, 2, ROWS), jnp.float32),
        q_info=plgpu.SMEM((consumers, plan.q_info.shape[1], ROWS), jnp.int32),
        k_info=plgpu.SMEM((sizes.stages, plan.k_info.shape[1], keys), jnp.int32),
        stage=gp.staged(consumers, ROWS, keys, dtype, op), q_ready=plgpu.Barrier(num_arrivals=4 * consumers),
        **gp.ring_barriers(consumers, sizes.stages, 2, 1))

    def consume(warpgroup, where, blocks, outs, own):
        row, tile, head = where
        acc, done = _sum_dq(warpgroup, blocks, own, op, sizes)
        tile_dq = own["q"].at[warpgroup]
        tile_dq[...] = (acc * op.scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_dq, outs[0].at[row, part_of(tile, warpgroup, sizes), head])
        plgpu.wait_smem_to_gmem(0)
        return done

    def produce(where, n, block_of, refs, own):
        q, k, v, d_out, stats, q_info, k_info = refs
        row, tile, head = where
        group = lax.div(head, jnp.int32(heads // k_BxSxGxK.shape[2]))
        for w in range(consumers):
            at = part_of(tile, w, sizes)
            gp.load(own, w, own["q_ready"], q=q.at[row, at, head], d_out=d_out.at[row, at, head],
                    stats=stats.at[row, head, :, at], q_info=q_info.at[row, :, at])

        def fill(step, slot, reused):
            at = pl.ds(block_of(step) * keys, keys)
            gp.refill(own, slot, reused, dict(k=k.at[row, at, group], k_info=k_info.at[row, :, at]),
                      dict(v=v.at[row, at, group]))

        gp.ring(n, sizes.stages, fill)

    return launch(consume, produce, (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL),
                  [jax.ShapeDtypeStruct(q_BxLxHxK.shape, dtype)], scratch, plan, op, sizes, interpret)


def _pass(own, slot):
    """Takes a consumer's step without work."""
    for name in ("first", "second"):
        plgpu.barrier_wait(own[f"{name}_ready"].at[slot])
        plgpu.barrier_arrive(own[f"{name}_free"].at[slot])


def _two_products(shape, first, second, between, ready):
    """Returns (between(first product), second product), both started at once; `ready` waits for the second one's
    operands."""
    def issue(one, two):
        plgpu.wgmma(one, *first)
        ready()
        plgpu.wgmma(two, *second)
        return between(plgpu.wgmma_accumulator_load(one, wait_n=1)), plgpu.wgmma_accumulator_load(two)

    return pl.run_scoped(issue, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def _sum_dq(warpgroup, blocks, own, op, sizes):
    """Returns (sum of dS K [64, K] of one consumer's queries in fp32, number of key blocks that it multiplied).

    blocks: as of gpu_kernel.steps. own: shared memory and barriers by name."""
    q, d_out, q_info = (own[name].at[warpgroup] for name in ("q", "d_out", "q_info"))
    shape, stage = (ROWS, sizes.block), stage_of(own, warpgroup)
    plgpu.barrier_wait(own["q_ready"])
    lse, delta = (gp.loaded(own["stats"].at[warpgroup, i], gp.BY_ROW) for i in range(2))

    def step(i, carry, masked):
        acc, done = carry
        slot = gp.slot_of(i, sizes.stages)
        k, v = own["k"].at[slot], own["v"].at[slot]
        plgpu.barrier_wait(own["first_ready"].at[slot])

        def weigh(raw):
            scores, tanh = gp.in_base_2(raw, op)
            weights = jnp.exp2(scores - gp.rows(lse, shape))
            if masked:
                weights = jnp.where(visible(q_info, own["k_info"].at[slot], shape, op), weights, 0.0)
                plgpu.commit_smem()  # the copy engine may overwrite what was read of k_info
            return weights, tanh

        (weights, tanh), d_weights = _two_products(
            shape, (q, k.transpose((1, 0))), (d_out, v.transpose((1, 0))), weigh,
            lambda: plgpu.barrier_wait(own["second_ready"].at[slot]))
        plgpu.barrier_arrive(own["second_free"].at[slot])
        d_scores = _d_scores(weights, d_weights, gp.rows(delta, shape), tanh).astype(q.dtype)
        acc, = gp.accumulate((acc,), ((lambda: d_scores, k),), stage)
        plgpu.barrier_arrive(own["first_free"].at[slot])
        return acc, done + 1

    start = gp.zeros((ROWS, q.shape[-1])), jnp.int32(0)
    return steps(blocks, step, lambda i: _pass(own, gp.slot_of(i, sizes.stages)), start)


def _d_scores(weights, d_weights, delta, tanh):
    d_scores = weights * (d_weights - delta)
    return d_scores if tanh is None else d_scores * (1.0 - tanh * tanh)


def dkv(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL, plan, op, sizes, interpret=None):
    """Returns (dk, dv [B, S, G, K] in q's dtype, blocks executed [B, G * P, N] int32 or None), P shares of a key head's
    query heads. dk and dv are summed over those heads.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK: of one dtype, L and S multiples of gpu_plan.UNIT.
      stats_BxHx2xL: of `stats`.
      plan: gpu_plan.Plan, transposed, of sizes.consumers parts and blocks of sizes.block queries.
      op: gpu_chip.Op. sizes: gpu_chip.Sizes of this kernel. interpret: of plgpu.kernel; None = compiled."""
    (batch, length, groups, size), dtype = k_BxSxGxK.shape, q_BxLxHxK.dtype
    consumers, queries, warpgroups = sizes.consumers, sizes.block, sizes.consumers * sizes.parts
    per_group = q_BxLxHxK.shape[2] // groups
    shares = tuned.key_shares(batch * (length // (consumers * ROWS)) * groups, per_group, sizes)
    heads = np.int32(per_group // shares)  # of a block of threads
    scratch = dict(
        **{name: gp.swizzled((consumers, ROWS, size), dtype, sizes.parts) for name in ("k", "v")},
        **{name: gp.swizzled((sizes.stages, queries, size), dtype, sizes.parts) for name in ("q", "d_out")},
        stats=plgpu.SMEM((sizes.stages, 2, queries), jnp.float32),
        k_info=plgpu.SMEM((consumers, plan.k_info.shape[1], ROWS), jnp.int32),
        q_info=plgpu.SMEM((sizes.stages, plan.q_info.shape[1], queries), jnp.int32),
        total=gp.swizzled((consumers, ROWS, size), jnp.float32) if shares > 1 else None,
        stage=gp.staged(warpgroups, ROWS, queries, dtype, op), k_ready=plgpu.Barrier(num_arrivals=3 * consumers),
        done=plgpu.Barrier(num_arrivals=warpgroups), **gp.ring_barriers(warpgroups, sizes.stages, 3, 1))

    def consume(warpgroup, where, blocks, outs, own):
        n_full, n, wanted = blocks
        steps_of = n_full * heads, n * heads, lambda step: wanted(lax.div(step, heads))
        sums, done = _sum_dkv(warpgroup, steps_of, own, op, sizes)
        (_write_dkv if shares == 1 else _write_share)(warpgroup, where, sums, outs, own, op, sizes)
        return done

    def produce(where, n, block_of, refs, own):
        q, k, v, d_out, stats, q_info, k_info = refs
        row, tile, share = where
        group = lax.div(share, jnp.int32(shares))
        for w in range(consumers):
            at = part_of(tile, w, sizes)
            gp.load(own, w, own["k_ready"], k=k.at[row, at, group], v=v.at[row, at, group],
                    k_info=k_info.at[row, :, at])

        def fill(step, slot, reused):
            head, at = share * heads + lax.rem(step, heads), pl.ds(block_of(lax.div(step, heads)) * queries, queries)
            gp.refill(own, slot, reused,
                      dict(q=q.at[row, at, head], stats=stats.at[row, head, :, at], q_info=q_info.at[row, :, at]),
                      dict(d_out=d_out.at[row, at, head]))

        gp.ring(n * heads, sizes.stages, fill)

    made = jax.ShapeDtypeStruct((batch, length, groups * shares, size), dtype if shares == 1 else jnp.float32)
    *both, done = launch(consume, produce, (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL),
                         [made] * 2, scratch, plan, op, sizes, interpret)
    if shares > 1:
        both = (x.reshape(batch, length, groups, shares, size).sum(axis=3).astype(dtype) for x in both)
    return *both, done


def _sum_dkv(warpgroup, blocks, own, op, sizes):
    """Returns ((sum of dS^T Q, sum of P^T dout), both fp32 [64, K / parts], of one consumer's keys; number of query
    blocks).

    blocks: as of gpu_kernel.steps. own: shared memory and barriers by name."""
    keys, part = _place(warpgroup, own["k"].shape[-1], sizes)
    k, v, k_info = (own[name].at[keys] for name in ("k", "v", "k_info"))
    shape, dtype, stage = (ROWS, sizes.block), k.dtype, stage_of(own, warpgroup)
    plgpu.barrier_wait(own["k_ready"])

    def step(i, carry, masked):
        d_k, d_v, done = carry
        slot = gp.slot_of(i, sizes.stages)
        q, d_out, stats = (own[name].at[slot] for name in ("q", "d_out", "stats"))
        plgpu.barrier_wait(own["first_ready"].at[slot])

        def weigh(raw):
            scores, tanh = gp.in_base_2(raw, op)
            weights = jnp.exp2(scores - gp.columns(gp.loaded(stats.at[0], gp.BY_COLUMN), shape))
            if masked:
                weights = jnp.where(visible(own["q_info"].at[slot], k_info, shape, op, transposed=True), weights, 0.0)
            return weights, tanh

        (weights, tanh), d_weights = _two_products(
            shape, (k, q.transpose((1, 0))), (v, d_out.transpose((1, 0))), weigh,
            lambda: plgpu.barrier_wait(own["second_ready"].at[slot]))

        def d_scores():
            delta = gp.columns(gp.loaded(stats.at[1], gp.BY_COLUMN), shape)
            return _d_scores(weights, d_weights, delta, tanh).astype(dtype)

        d_v, d_k = gp.accumulate((d_v, d_k), (
            (lambda: weights.astype(dtype), d_out.at[:, part]), (d_scores, q.at[:, part])), stage)
        plgpu.commit_smem()  # the copy engine may overwrite what was read of stats and q_info
        plgpu.barrier_arrive(own["second_free"].at[slot])
        plgpu.barrier_arrive(own["first_free"].at[slot])
        return d_k, d_v, done + 1

    width = k.shape[-1] // sizes.parts
    start = gp.zeros((ROWS, width)), gp.zeros((ROWS, width)), jnp.int32(0)
    d_k, d_v, done = steps(blocks, step, lambda i: _pass(own, gp.slot_of(i, sizes.stages)), start)
    return (d_k, d_v), done


def _place(warpgroup, size, sizes):
    """Returns (index of the warpgroup's 64 keys in the tile, its columns of the head)."""
    width = size // sizes.parts
    if sizes.parts == 1:
        return warpgroup, slice(None)
    return lax.div(warpgroup, jnp.int32(sizes.parts)), pl.ds(lax.rem(warpgroup, jnp.int32(sizes.parts)) * width, width)


def _write_dkv(warpgroup, where, sums, outs, own, op, sizes):
    """Writes the sums through the tiles of k and v; with parts, all are read to the end before, and written
    together."""
    row, tile, group = where
    keys, part = _place(warpgroup, own["k"].shape[-1], sizes)
    at = part_of(tile, keys, sizes)

    def together():
        if sizes.parts > 1:
            plgpu.barrier_arrive(own["done"])
            plgpu.barrier_wait(own["done"])

    together()
    for total, name in ((sums[0] * op.scale, "k"), (sums[1], "v")):
        target = own[name].at[keys, :, part]
        target[...] = total.astype(target.dtype)
    plgpu.commit_smem()
    together()

    @pl.when(lax.rem(warpgroup, jnp.int32(sizes.parts)) == 0)
    def _():
        plgpu.copy_smem_to_gmem(own["k"].at[keys], outs[0].at[row, at, group])
        plgpu.copy_smem_to_gmem(own["v"].at[keys], outs[1].at[row, at, group])
        plgpu.wait_smem_to_gmem(0)


def _write_share(warpgroup, where, sums, outs, own, op, sizes):
    """Writes a share's sums in fp32, one after the other through the same tile."""
    row, tile, share = where
    mine, at = own["total"].at[warpgroup], part_of(tile, warpgroup, sizes)
    for total, out in ((sums[0] * op.scale, outs[0]), (sums[1], outs[1])):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mine[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out.at[row, at, share])
    plgpu.wait_smem_to_gmem(0)
