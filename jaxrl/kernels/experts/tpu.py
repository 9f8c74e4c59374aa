"""`experts` on TPUs: Pallas kernels over the blocks that hold rows. Off a TPU they run interpreted.

The grid's last axis is those blocks, as many as there are at run time; which expert a block has is known before its
step (scalar prefetch), so that an expert's weights are fetched once for all of its blocks in a row. A step multiplies
whole rows: nothing is summed over steps but the gradients of weights, in the block of the result that stays on the
chip as long as the expert does. Experts without rows are not visited.

Legend: E experts, R rows of a chunk's blocks, I and O columns in and out.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention.tpu_parts import VMEM
from jaxrl.kernels.experts import grouped, tuned
from jaxrl.kernels.experts.walk import Implementation, accumulator
from jaxrl.kernels.low_precision import DEFAULT
from jaxrl.kernels.platform import cores, platform

UNIT = 64


def serving(x_TxD, weights, *, matmul=DEFAULT, activation=None, interpret=None) -> tuple[Implementation, int]:
    """Returns (the implementation for such tokens and weights, rows of its blocks).

    Args:
      x_TxD: tokens. weights: gate (if there is one), up and down [E, I, O], then biases if any. Shapes and x's dtype
        are read.
      matmul: scheme of kernels.low_precision. activation: not read. interpret: for pallas_call; None = off a TPU.

    Raises NotImplementedError for dtypes but float32 and bfloat16 (interpreted, float64 too), a matmul but the default,
    sizes that are no multiple of UNIT, and experts of which a step does not fit into on-chip memory."""
    del activation
    interpret = platform() != "tpu" if interpret is None else bool(interpret)
    (size, width), dtype = weights[0].shape[1:], x_TxD.dtype
    if dtype not in (jnp.float32, jnp.bfloat16) and not (interpret and dtype == jnp.float64):
        raise NotImplementedError(f"{dtype} inputs; the TPU kernel takes float32 and bfloat16")
    if matmul != DEFAULT:
        raise NotImplementedError(f"train.matmul={matmul}; the TPU kernel multiplies numbers as they are")
    if size % UNIT or width % UNIT:
        raise NotImplementedError(f"experts of {size} x {width}; the TPU kernel takes multiples of {UNIT}")
    for task in tuned.tpu_tasks(size, width):
        if not tuned.tpu_columns(*task, itemsize=dtype.itemsize, cores=cores()):
            raise NotImplementedError(f"experts of {size} x {width} in {dtype}; a step of the TPU kernel would take "
                                      f"more than {VMEM >> 20} MiB of on-chip memory")
    return _made(interpret), tuned.KERNEL_BLOCK


@functools.cache
def _made(interpret: bool) -> Implementation:
    return grouped.implementation(grouped.Kernels(functools.partial(rows, interpret),
                                                  functools.partial(sums, interpret)))


def dot(a, b, over_a, over_b):
    """Returns the product of two matrices in fp32 or better, summed over axis over_a of a and over_b of b; fp32
    inputs are not rounded to bf16."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, (((over_a,), (over_b,)), ((), ())), precision=exact,
                               preferred_element_type=accumulator(a.dtype))


def used(lay):
    """Returns the number of blocks to compute, int32 []: those that hold rows, at most all of lay.experts.

    More are wanted only where a token's ids repeat; then walk.experts returns NaN."""
    return jnp.minimum(lay.used, lay.experts.size)


def rows(interpret, call, lay, task, lefts, weights, biases=(), gates_R=None):
    """Runs a Task on rows sorted by expert and returns its outputs [R, O] in the task's dtypes; a row sum is [R].

    interpret: of pallas_call. call: walk.Call. lay: Layout. lefts [R, I], weights [E, I, O] or transposed, biases [E,
    O], gates_R: see grouped.Kernels. Rows after the used blocks mean nothing."""
    acc, block = accumulator(lefts[0].dtype), call.block
    first = task.products[0]
    into = lefts[0].shape[1]
    out = weights[first.right].shape[1 if first.across else 2]
    counts = len(lefts), len(weights), 1 + max(p.into for p in task.products), len(task.outputs)
    tile = tuned.tpu_columns(into, out, *counts, lefts[0].dtype.itemsize, cores())
    across = {p.right: p.across for p in task.products}
    tiles = pl.cdiv(out, tile)

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda o, n, experts: index(o, n, experts[n]))

    in_specs = [spec((block, into), lambda o, n, e: (n, 0)) for _ in lefts]
    in_specs += [spec((1, tile, into), lambda o, n, e: (e, o, 0)) if across[i] else
                 spec((1, into, tile), lambda o, n, e: (e, 0, o)) for i in range(len(weights))]
    in_specs += [spec((1, 1, tile), lambda o, n, e: (e, 0, o)) for _ in biases]
    operands = [*lefts, *weights, *(b[:, None] for b in biases)]
    if gates_R is not None:
        in_specs.append(spec((block, 1), lambda o, n, e: (n, 0)))
        operands.append(gates_R[:, None].astype(acc))
    summed = task.outputs[-1] == grouped.ROW_SUM
    shapes: list[tuple[tuple, Any]] = [((lay.slots.size, out), t) for t in task.outputs if t != grouped.ROW_SUM]
    out_specs = [spec((block, tile), lambda o, n, e: (n, o)) for _ in shapes]
    if summed:
        shapes.append(((tiles, lay.slots.size, 1), acc))
        out_specs.append(spec((1, block, 1), lambda o, n, e: (o, n, 0)))

    def body(_, *refs):
        x, w = refs[:len(lefts)], refs[len(lefts):len(lefts) + len(weights)]
        b = refs[len(lefts) + len(weights):len(operands) - (gates_R is not None)]
        found = {}
        for p in task.products:
            more = dot(x[p.left][...], w[p.right][0], 1, 1 if p.across else 0)
            found[p.into] = found[p.into] + more if p.into in found else more
        shape = found[0].shape
        spread = [jnp.broadcast_to(ref[0].astype(acc), shape) for ref in b]
        gates = None if gates_R is None else jnp.broadcast_to(refs[len(operands) - 1][...], shape)
        made = task.after([found[i] for i in range(len(found))], spread, gates)
        for ref, value, t in zip(refs[len(operands):], made, task.outputs, strict=True):
            if t == grouped.ROW_SUM:
                column = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + pl.program_id(0) * tile
                ref[0] = jnp.sum(jnp.where(column < out, value, 0), axis=1, keepdims=True)
            else:
                ref[...] = value

    size, products = lefts[0].dtype.itemsize, len(task.products)
    cost = pl.CostEstimate(flops=2 * products * lay.slots.size * into * out, transcendentals=0, bytes_accessed=size * (
        lay.slots.size * (into * len(lefts) * tiles + out * len(shapes)) + sum(w.size for w in weights)))
    made = pl.pallas_call(
        body, out_shape=[jax.ShapeDtypeStruct(*s) for s in shapes], interpret=interpret, cost_estimate=cost,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(tiles, used(lay)), in_specs=in_specs,
                                               out_specs=out_specs),
        name=f"experts_{task.name}", compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM))(lay.experts, *operands)
    return (*made[:-1], jnp.sum(made[-1][..., 0], axis=0)) if summed else made


def sums(interpret, call, lay, left_RxI, right_RxO, sum_ExIxO):
    """Returns sum_ExIxO plus the products left^T right of each expert's rows, added in place; see grouped.Kernels.

    interpret: of pallas_call. call: walk.Call. lay: Layout. Rows of left_RxI and right_RxO without a slot are 0."""
    (into, out), block = sum_ExIxO.shape[1:], call.block
    tile_in, tile_out = (min(size, most) for size, most in zip((into, out), tuned.TPU_SUMS, strict=True))

    def body(experts, left, right, before, total):
        n = pl.program_id(2)
        more = dot(left[...], right[...], 0, 0)
        new = (n == 0) | (experts[jnp.maximum(n, 1) - 1] != experts[n])

        @pl.when(new)
        def _():
            total[0] = before[0] + more

        @pl.when(jnp.logical_not(new))
        def _():
            total[0] += more

    whole = pl.BlockSpec((1, tile_in, tile_out), lambda i, o, n, experts: (experts[n], i, o))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(pl.cdiv(into, tile_in), pl.cdiv(out, tile_out), used(lay)),
        in_specs=[pl.BlockSpec((block, tile_in), lambda i, o, n, experts: (n, i)),
                  pl.BlockSpec((block, tile_out), lambda i, o, n, experts: (n, o)), whole], out_specs=whole)
    cost = pl.CostEstimate(flops=2 * lay.slots.size * into * out, transcendentals=0,
                           bytes_accessed=2 * sum_ExIxO.size * sum_ExIxO.dtype.itemsize)
    return pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(sum_ExIxO.shape, sum_ExIxO.dtype), grid_spec=grid, interpret=interpret,
        cost_estimate=cost, input_output_aliases={3: 0}, name="experts_sums", compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM))(lay.experts, left_RxI, right_RxO, sum_ExIxO)
