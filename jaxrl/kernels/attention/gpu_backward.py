"""Backward kernels of `attention` on Hopper: one for dq, one for dk and dv. Both compute the weights again.

`dq` is laid out like the forward kernel: a tile of queries, a ring of keys and values. `dk` and `dv` turn it round: a
tile of keys, a ring of queries and output gradients, which runs over the tile's query blocks and over the query heads
that share the key head. No sum crosses blocks of threads, so nothing is atomic and every run gives the same bits.

With P the weights, S the scores, delta = sum(dout * out): dV = P^T dout, dP = dout V^T, dS = P (dP - delta),
dQ = scale * dS K, dK = scale * dS^T Q; a soft-cap multiplies dS by 1 - tanh^2.

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
    BY_COLUMN,
    BY_ROW,
    ROWS,
    accumulate,
    columns,
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

PARAMS = plgpu.CompilerParams(approx_math=True)


def stats(out_BxLxHxK, d_out_BxLxHxK, lse_BxHxL):
    """[B, H, 2, L] fp32: lse and delta, what the backward kernels read per query."""
    delta = jnp.einsum("blhk,blhk->bhl", out_BxLxHxK.astype(jnp.float32), d_out_BxLxHxK.astype(jnp.float32))
    return jnp.stack([lse_BxHxL, delta], axis=2)


def dq(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL, plan, op, sizes, interpret=None):
    """Returns (dq_BxLxHxK, blocks_BxHxN executed or None).

    plan: sizes.consumers parts, blocks of sizes.keys keys; sizes: tuned_gpu.Queries.
    """
    batch, length, heads, size = q_BxLxHxK.shape
    consumers, keys, dtype = sizes.consumers, sizes.keys, q_BxLxHxK.dtype
    tiles = length // (consumers * ROWS)
    out = [jax.ShapeDtypeStruct(q_BxLxHxK.shape, dtype)]
    if op.count:
        out.append(jax.ShapeDtypeStruct((batch, heads, tiles * consumers), jnp.int32))
    scratch = dict(
        q=swizzled((consumers, ROWS, size), dtype), d_out=swizzled((consumers, ROWS, size), dtype),
        k=swizzled((sizes.stages, keys, size), dtype), v=swizzled((sizes.stages, keys, size), dtype),
        stats=plgpu.SMEM((consumers, 2, ROWS), jnp.float32),
        q_info=plgpu.SMEM((consumers, plan.q_info.shape[1], ROWS), jnp.int32),
        k_info=plgpu.SMEM((sizes.stages, plan.k_info.shape[1], keys), jnp.int32),
        stage=staged(consumers, ROWS, keys, dtype, op), q_ready=plgpu.Barrier(num_arrivals=4 * consumers),
        **_ring_barriers(consumers, sizes.stages))

    def kernel(q, k, v, d_out, stats, q_info, k_info, order, counts, lists, out, *rest):
        *blocks, own = rest
        flat = order[lax.axis_index("work")]
        row, tile, head = lax.div(flat, jnp.int32(tiles)), lax.rem(flat, jnp.int32(tiles)), lax.axis_index("head")
        n_full, n = counts[row, tile, 0], counts[row, tile, 1]
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < consumers)
        def _():
            plgpu.set_max_registers(sizes.registers, action="increase")
            wanted = lambda step: entry(lists[row, tile, step], consumers, warpgroup)[1]  # noqa: E731
            acc, done = _sum_dq(warpgroup, n_full, n, wanted, own, op, sizes)
            tile_dq = own["q"].at[warpgroup]
            tile_dq[...] = (acc * op.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile_dq, out.at[row, pl.ds((tile * consumers + warpgroup) * ROWS, ROWS), head])
            plgpu.wait_smem_to_gmem(0)
            if blocks:
                blocks[0][row, head, tile * consumers + warpgroup] = done

        @pl.when(warpgroup == consumers)
        def _():
            plgpu.set_max_registers(sizes.producer_registers, action="decrease")
            group = lax.div(head, jnp.int32(heads // k_BxSxGxK.shape[2]))
            for w in range(consumers):
                queries = pl.ds((tile * consumers + w) * ROWS, ROWS)
                for source, name in ((q.at[row, queries, head], "q"), (d_out.at[row, queries, head], "d_out"),
                                     (stats.at[row, head, :, queries], "stats"), (q_info.at[row, :, queries], "q_info")):
                    plgpu.copy_gmem_to_smem(source, own[name].at[w], own["q_ready"])

            def fill(step, slot, reused):
                at = pl.ds(entry(lists[row, tile, step], consumers)[0] * keys, keys)
                first = (k.at[row, at, group], own["k"].at[slot]), (k_info.at[row, :, at], own["k_info"].at[slot])
                _refill(own, slot, reused, first, ((v.at[row, at, group], own["v"].at[slot]),))

            ring(n, sizes.stages, fill)

    results = plgpu.kernel(
        kernel, out_type=out, scratch_types=[scratch], grid=(heads, batch * tiles), grid_names=("head", "work"),
        num_threads=consumers + 1, thread_name="warpgroup", interpret=interpret, compiler_params=PARAMS,
    )(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL, *plan)
    return results[0], (results[1] if op.count else None)


def _ring_barriers(consumers, stages, first=2, second=1):
    """A slot's two halves are filled and freed apart: `first` and `second` copies each."""
    free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    return dict(first_ready=plgpu.Barrier(num_arrivals=first, num_barriers=stages), first_free=free,
                second_ready=plgpu.Barrier(num_arrivals=second, num_barriers=stages), second_free=free)


def _refill(own, slot, reused, first, second):
    """The producer's step: copies (source, target) of each half, once consumers have freed it."""
    for name, copies in (("first", first), ("second", second)):
        pl.when(reused)(lambda name=name: plgpu.barrier_wait(own[f"{name}_free"].at[slot]))
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, own[f"{name}_ready"].at[slot])


def _pass(own, slot):
    """A consumer's step without work."""
    for name in ("first", "second"):
        plgpu.barrier_wait(own[f"{name}_ready"].at[slot])
        plgpu.barrier_arrive(own[f"{name}_free"].at[slot])


def _two_products(shape, first, second, between, ready):
    """(between(first product), second product), both started at once; `ready` waits for the second one's operands."""
    def issue(one, two):
        plgpu.wgmma(one, *first)
        ready()
        plgpu.wgmma(two, *second)
        return between(plgpu.wgmma_accumulator_load(one, wait_n=1)), plgpu.wgmma_accumulator_load(two)

    return pl.run_scoped(issue, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def _sum_dq(warpgroup, n_full, n, wanted, own, op, sizes):
    """(sum of dS K of one consumer's queries in fp32, number of key blocks)."""
    q, d_out, q_info = (own[name].at[warpgroup] for name in ("q", "d_out", "q_info"))
    shape = (ROWS, sizes.keys)
    stage = None if own["stage"] is None else own["stage"].at[warpgroup]
    plgpu.barrier_wait(own["q_ready"])
    lse, delta = (plgpu.load(own["stats"].at[warpgroup, i], layout=BY_ROW) for i in range(2))

    def step(i, carry, masked):
        acc, done = carry
        slot = slot_of(i, sizes.stages)
        k, v = own["k"].at[slot], own["v"].at[slot]
        plgpu.barrier_wait(own["first_ready"].at[slot])

        def weigh(raw):
            scores, tanh = in_base_2(raw, op)
            weights = jnp.exp2(scores - rows(lse, shape))
            if masked:
                weights = jnp.where(visible(q_info, own["k_info"].at[slot], shape, op), weights, 0.0)
                plgpu.commit_smem()  # the copy engine may overwrite what was read of k_info
            return weights, tanh

        (weights, tanh), d_weights = _two_products(
            shape, (q, k.transpose((1, 0))), (d_out, v.transpose((1, 0))), weigh,
            lambda: plgpu.barrier_wait(own["second_ready"].at[slot]))
        plgpu.barrier_arrive(own["second_free"].at[slot])
        d_scores = _d_scores(weights, d_weights, rows(delta, shape), tanh).astype(q.dtype)
        acc, = accumulate((acc,), ((lambda: d_scores, k),), stage)
        plgpu.barrier_arrive(own["first_free"].at[slot])
        return acc, done + 1

    start = zeros((ROWS, q.shape[-1])), jnp.int32(0)
    return steps(n_full, n, step, lambda i: _pass(own, slot_of(i, sizes.stages)), wanted, start)


def _d_scores(weights, d_weights, delta, tanh):
    d_scores = weights * (d_weights - delta)
    return d_scores if tanh is None else d_scores * (1.0 - tanh * tanh)


def dkv(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL, plan, op, sizes, interpret=None):
    """Returns (dk_BxSxGxK, dv_BxSxGxK, blocks_BxGxN executed or None). plan: transposed, sizes.consumers parts
    and blocks of sizes.queries queries; sizes: tuned_gpu.Keys."""
    batch, length, groups, size = k_BxSxGxK.shape
    shared, dtype = q_BxLxHxK.shape[2] // groups, q_BxLxHxK.dtype
    consumers, queries = sizes.consumers, sizes.queries
    warpgroups, tiles = consumers * sizes.parts, length // (consumers * ROWS)
    out = [jax.ShapeDtypeStruct(k_BxSxGxK.shape, dtype)] * 2
    if op.count:
        out.append(jax.ShapeDtypeStruct((batch, groups, tiles * consumers), jnp.int32))
    scratch = dict(
        **{name: swizzled((consumers, ROWS, size), dtype, sizes.parts) for name in ("k", "v")},
        **{name: swizzled((sizes.stages, queries, size), dtype, sizes.parts) for name in ("q", "d_out")},
        stats=plgpu.SMEM((sizes.stages, 2, queries), jnp.float32),
        k_info=plgpu.SMEM((consumers, plan.k_info.shape[1], ROWS), jnp.int32),
        q_info=plgpu.SMEM((sizes.stages, plan.q_info.shape[1], queries), jnp.int32),
        stage=staged(warpgroups, ROWS, queries, dtype, op), k_ready=plgpu.Barrier(num_arrivals=3 * consumers),
        done=plgpu.Barrier(num_arrivals=warpgroups), **_ring_barriers(warpgroups, sizes.stages, 3, 1))

    def kernel(q, k, v, d_out, stats, q_info, k_info, order, counts, lists, dk, dv, *rest):
        *blocks, own = rest
        flat = order[lax.axis_index("work")]
        row, tile, group = lax.div(flat, jnp.int32(tiles)), lax.rem(flat, jnp.int32(tiles)), lax.axis_index("group")
        n_full, n = counts[row, tile, 0] * shared, counts[row, tile, 1] * shared
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(sizes.registers, action="increase")
            mine = lax.div(warpgroup, jnp.int32(sizes.parts))
            wanted = lambda step: entry(lists[row, tile, lax.div(step, jnp.int32(shared))], consumers, mine)[1]  # noqa: E731
            sums, done = _sum_dkv(warpgroup, n_full, n, wanted, own, op, sizes)
            _write_dkv(warpgroup, (row, tile, group), sums, (dk, dv), own, op, sizes)
            if blocks:
                blocks[0][row, group, tile * consumers + mine] = done

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(sizes.producer_registers, action="decrease")
            for w in range(consumers):
                keys = pl.ds((tile * consumers + w) * ROWS, ROWS)
                for source, name in ((k.at[row, keys, group], "k"), (v.at[row, keys, group], "v"),
                                     (k_info.at[row, :, keys], "k_info")):
                    plgpu.copy_gmem_to_smem(source, own[name].at[w], own["k_ready"])

            def fill(step, slot, reused):
                block, head = lax.div(step, jnp.int32(shared)), group * shared + lax.rem(step, jnp.int32(shared))
                at = pl.ds(entry(lists[row, tile, block], consumers)[0] * queries, queries)
                first = ((q.at[row, at, head], own["q"].at[slot]), (stats.at[row, head, :, at], own["stats"].at[slot]),
                         (q_info.at[row, :, at], own["q_info"].at[slot]))
                _refill(own, slot, reused, first, ((d_out.at[row, at, head], own["d_out"].at[slot]),))

            ring(n, sizes.stages, fill)

    results = plgpu.kernel(
        kernel, out_type=out, scratch_types=[scratch], grid=(groups, batch * tiles), grid_names=("group", "work"),
        num_threads=warpgroups + 1, thread_name="warpgroup", interpret=interpret, compiler_params=PARAMS,
    )(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, d_out_BxLxHxK, stats_BxHx2xL, *plan)
    return results[0], results[1], (results[2] if op.count else None)


def _sum_dkv(warpgroup, n_full, n, wanted, own, op, sizes):
    """((sum of dS^T Q, sum of P^T dout) of one consumer's keys and part of the head in fp32, number of query blocks)."""
    keys, part = _place(warpgroup, own["k"].shape[-1], sizes)
    k, v, k_info = (own[name].at[keys] for name in ("k", "v", "k_info"))
    shape, dtype = (ROWS, sizes.queries), k.dtype
    stage = None if own["stage"] is None else own["stage"].at[warpgroup]
    plgpu.barrier_wait(own["k_ready"])

    def step(i, carry, masked):
        d_k, d_v, done = carry
        slot = slot_of(i, sizes.stages)
        q, d_out, stats = (own[name].at[slot] for name in ("q", "d_out", "stats"))
        plgpu.barrier_wait(own["first_ready"].at[slot])

        def weigh(raw):
            scores, tanh = in_base_2(raw, op)
            weights = jnp.exp2(scores - columns(plgpu.load(stats.at[0], layout=BY_COLUMN), shape))
            if masked:
                weights = jnp.where(visible(own["q_info"].at[slot], k_info, shape, op, transposed=True), weights, 0.0)
            return weights, tanh

        (weights, tanh), d_weights = _two_products(
            shape, (k, q.transpose((1, 0))), (v, d_out.transpose((1, 0))), weigh,
            lambda: plgpu.barrier_wait(own["second_ready"].at[slot]))

        def d_scores():
            delta = columns(plgpu.load(stats.at[1], layout=BY_COLUMN), shape)
            return _d_scores(weights, d_weights, delta, tanh).astype(dtype)

        d_v, d_k = accumulate((d_v, d_k), (
            (lambda: weights.astype(dtype), d_out.at[:, part]), (d_scores, q.at[:, part])), stage)
        plgpu.commit_smem()  # the copy engine may overwrite what was read of stats and q_info
        plgpu.barrier_arrive(own["second_free"].at[slot])
        plgpu.barrier_arrive(own["first_free"].at[slot])
        return d_k, d_v, done + 1

    width = k.shape[-1] // sizes.parts
    start = zeros((ROWS, width)), zeros((ROWS, width)), jnp.int32(0)
    d_k, d_v, done = steps(n_full, n, step, lambda i: _pass(own, slot_of(i, sizes.stages)), wanted, start)
    return (d_k, d_v), done


def _place(warpgroup, size, sizes):
    """(index of the warpgroup's 64 keys in the tile, its columns of the head)."""
    width = size // sizes.parts
    if sizes.parts == 1:
        return warpgroup, slice(None)
    return lax.div(warpgroup, jnp.int32(sizes.parts)), pl.ds(lax.rem(warpgroup, jnp.int32(sizes.parts)) * width, width)


def _write_dkv(warpgroup, where, sums, outs, own, op, sizes):
    """The sums through the tiles of k and v; with parts, all read those to the end before, and are read out together."""
    row, tile, group = where
    keys, part = _place(warpgroup, own["k"].shape[-1], sizes)
    at = pl.ds((tile * sizes.consumers + keys) * ROWS, ROWS)

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
