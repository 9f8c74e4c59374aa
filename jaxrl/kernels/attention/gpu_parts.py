"""What the Mosaic GPU kernels of both ops share: tiles in shared memory, a ring of them, matrix products, scores.

A kernel runs in warpgroups of 128 threads: one producer, which lets the copy engine fill a ring of tiles, and
consumers, which multiply. Scores are kept in base 2 (times log2 e), so that softmax is one fused multiply-add and one
`exp2` per score.

Two idioms of fast Hopper kernels do not run interpreted (jax 0.12.0.1): accumulating onto registers
(`run_state` over `ACC.init`) and a left operand in registers. Both live in `accumulate`, which has a second body that
runs anywhere: it stages the left operand in shared memory. Everything else is one code for both.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxrl.kernels.mosaic_names  # noqa: F401

LOG2E = math.log2(math.e)
SEEN = -1e20  # a row's maximum is above this where it saw a key
PARAMS = plgpu.CompilerParams(approx_math=True)
WGMMA, BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def swizzled(shape, dtype, parts=1):
    """Returns shared memory of this shape that copy engine and matrix unit read without bank conflicts.

    parts: number of parts that the last axis is cut into, each with a swizzle of its own width."""
    swizzle = plgpu.find_swizzle(shape[-1] // parts * jnp.finfo(dtype).bits)
    columns = 8 * swizzle // jnp.finfo(dtype).bits
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


def staged(warpgroups, rows, columns, dtype, op):
    """Returns shared memory [warpgroups, rows, columns] where `accumulate` stages its left operand; None if it keeps
    to registers."""
    return None if op.in_registers else swizzled((warpgroups, rows, columns), dtype)


def zeros(shape, layout=WGMMA, value=0.0):
    """Returns an fp32 array of `shape` filled with `value`, in the layout of the matrix unit's results."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def loaded(ref, layout) -> Any:
    """Returns a tile of shared memory in registers, in this layout."""
    return plgpu.load(ref, layout=layout)  # pyright: ignore[reportCallIssue] (jax below 0.11 wants an index)


def accumulate(sums, products, stage) -> Any:
    """Returns [sum + left() @ right, ...] in fp32; a left operand is computed while the product before it runs.

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
    """Returns (scores in base 2, tanh of the soft-cap or None) of raw products q.k, both in fp32 and of their shape.

    The scores are softcap(scale * raw) * log2(e); the tanh is for the soft-cap's derivative."""
    if not op.softcap:
        return raw * (op.scale * LOG2E), None
    tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(raw * (2.0 * LOG2E * op.scale / op.softcap)))
    return tanh * (op.softcap * LOG2E), tanh


def rows(vector, shape):
    """Broadcasts a vector with one value per row [R] to `shape` [R, C]."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns(vector, shape):
    """Broadcasts a vector with one value per column [C] to `shape` [R, C]."""
    return lax.broadcast_in_dim(vector, shape, [1])


def slot_of(step, stages):
    """Returns the slot of a ring of `stages` slots that a step uses: step modulo stages, int32."""
    return lax.rem(step, jnp.int32(stages))


def ring(n, stages, fill, before=0):
    """Runs the producer's loop over n steps: fill(step, slot, reused).

    reused: whether consumers must free the slot first. stages: slots of the ring. before: steps done for earlier
    work."""
    def one(step, _):
        fill(step, slot_of(before + step, stages), before + step >= stages)

    lax.fori_loop(jnp.int32(0), n, one, None)


def ring_barriers(consumers, stages, first, second):
    """Returns the barriers of a ring whose slots' two halves are filled and freed apart, by so many copies each.

    consumers: warpgroups that free a slot. stages: slots. first, second: copies into each half."""
    free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    return dict(first_ready=plgpu.Barrier(num_arrivals=first, num_barriers=stages), first_free=free,
                second_ready=plgpu.Barrier(num_arrivals=second, num_barriers=stages), second_free=free)


def load(own, slot, ready, **sources):
    """Starts copies of each source to shared memory, own[name].at[slot]; each arrives at the barrier `ready`."""
    for name, source in sources.items():
        plgpu.copy_gmem_to_smem(source, own[name].at[slot], ready)


def refill(own, slot, reused, first, second):
    """Runs the producer's step: copies {name: source} of each half, once consumers have freed it.

    own: shared memory and barriers by name. reused: whether the slot must be freed first. first, second: {name:
    source} of the two halves."""
    for half, sources in (("first", first), ("second", second)):
        pl.when(reused)(lambda half=half: plgpu.barrier_wait(own[f"{half}_free"].at[slot]))
        load(own, slot, own[f"{half}_ready"].at[slot], **sources)
