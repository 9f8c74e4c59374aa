"""What the Mosaic GPU kernels of this folder share: tiles in shared memory, matrix products, scores and masks.

A kernel runs in warpgroups of 128 threads: one producer, which lets the copy engine fill a ring of tiles, and
consumers, which multiply. Scores are kept in base 2 (times log2 e), so that softmax is one fused multiply-add and one
`exp2` per score.

Two idioms of fast Hopper kernels do not run interpreted (jax 0.12.0.1): accumulating onto registers
(`run_state` over `ACC.init`) and a left operand in registers. Both live in `accumulate`, which has a second body that
runs anywhere: it stages the left operand in shared memory. Everything else is one code for both.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
HIDDEN = -1e30  # the score of a hidden key: finite, so that a row of hidden keys stays finite
SEEN = -1e20    # a row's maximum is above this where it saw a key
ROWS = 64       # rows of a matrix product of one warpgroup

WGMMA, BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Op:
    """The static part of a call: factor on the scores, soft-cap and window (0 = none), whether there are segments,
    whether `accumulate` keeps to registers, and whether blocks are counted."""

    scale: float
    softcap: float
    window: int
    segments: bool
    in_registers: bool
    count: bool = False


def swizzled(shape, dtype, parts=1):
    """Shared memory that the copy engine and the matrix unit read without bank conflicts; the last axis may be cut in parts."""
    swizzle = plgpu.find_swizzle(shape[-1] // parts * jnp.finfo(dtype).bits)
    columns = 8 * swizzle // jnp.finfo(dtype).bits
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


def staged(warpgroups, rows, columns, dtype, op):
    """Where `accumulate` stages left operands: one tile per warpgroup, None where it keeps to registers."""
    return None if op.in_registers else swizzled((warpgroups, rows, columns), dtype)


def zeros(shape, layout=WGMMA, value=0.0):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def accumulate(sums, products, stage):
    """[sum + left() @ right, ...] in fp32; a left operand is computed while the product before it runs.

    Args:
      sums: fp32 arrays in registers.
      products: pairs of a function that returns the left operand in registers, and the right operand in shared memory.
      stage: this warpgroup's tile of `staged`, or None: operands and sums stay in registers.
    """
    if stage is None:
        def issue(refs):
            for ref, (left, right) in zip(refs, products, strict=True):
                plgpu.wgmma(ref, left(), right)

        return pl.run_state(issue)(tuple(plgpu.ACC.init(s) for s in sums))
    out = []
    for s, (left, right) in zip(sums, products, strict=True):
        stage[...] = left()
        plgpu.commit_smem()

        def multiply(ref, right=right):
            plgpu.wgmma(ref, stage, right)
            return ref[...]

        out.append(s + pl.run_scoped(multiply, plgpu.ACC(s.shape, jnp.float32)))
    return tuple(out)


def in_base_2(raw, op):
    """(scores in base 2 of the products q.k, what the derivative of the soft-cap needs)."""
    if not op.softcap:
        return raw * (op.scale * LOG2E), None
    tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(raw * (2.0 * LOG2E * op.scale / op.softcap)))
    return tanh * (op.softcap * LOG2E), tanh


def visible(q_info, k_info, shape, op, transposed=False):
    """bool `shape`: which key each query sees. Rows are queries, or keys where `transposed`.

    q_info [positions, segments, prefixes] and k_info [positions, segments]: int32 in shared memory, as `gpu_plan`
    makes them; without segments only positions. Before the copy engine overwrites them, commit_smem.
    """
    q_layout, q_axis, k_layout, k_axis = (BY_COLUMN, 1, BY_ROW, 0) if transposed else (BY_ROW, 0, BY_COLUMN, 1)
    q_pos, *q_rest = (_spread(q_info.at[i], q_layout, q_axis, shape) for i in range(3 if op.segments else 1))
    k_pos, *k_rest = (_spread(k_info.at[i], k_layout, k_axis, shape) for i in range(2 if op.segments else 1))
    mask = k_pos <= q_pos
    if op.window:
        mask &= q_pos - k_pos < op.window
    if op.segments:
        (own, prefix), (segment,) = q_rest, k_rest
        mask &= (segment == own) | (segment == prefix)
    return mask


def _spread(ref, layout, axis, shape):
    return lax.broadcast_in_dim(plgpu.load(ref, layout=layout), shape, [axis])


def rows(vector, shape):
    """A value per row, for every column."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns(vector, shape):
    """A value per column, for every row."""
    return lax.broadcast_in_dim(vector, shape, [1])


def slot_of(step, stages):
    return lax.rem(step, jnp.int32(stages))


def steps(n_full, n, body, skip, wanted, carry):
    """body(step, carry, masked=...) over the blocks that every query sees all of, then over those with a mask, of which
    skip(step) passes those that are not wanted(step): another warpgroup's work, with which this one keeps pace."""
    def some(i, carry):
        def passed(carry):
            skip(i)
            return carry

        return lax.cond(wanted(i), lambda c: body(i, c, masked=True), passed, carry)

    carry = lax.fori_loop(jnp.int32(0), n_full, lambda i, c: body(i, c, masked=False), carry)
    return lax.fori_loop(n_full, n, some, carry)


def ring(n, stages, fill, before=0):
    """The producer's loop: fill(step, slot, reused); `reused`: consumers must have freed the slot. before: steps done so far."""
    def one(step, _):
        fill(step, slot_of(before + step, stages), before + step >= stages)

    lax.fori_loop(jnp.int32(0), n, one, None)
