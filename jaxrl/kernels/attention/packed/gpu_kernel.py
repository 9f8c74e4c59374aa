"""The frame of the three kernels on Hopper: a block of threads per tile and head, in it warpgroups that multiply and
one that lets the copy engine fill a ring of tiles of the other side, only those in the tile's list.

Blocks of threads start in the order of the grid, whose last axis runs fastest: the dearest tile of every head first.
With heads outside, the last head's dearest tile would begin when hardly any other work is left (8k tokens, 12 heads:
1.15 times the time of work spread evenly, in place of 1.00).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.gpu_chip import ROWS
from jaxrl.kernels.attention.packed.gpu_plan import entry


def launch(consume, produce, operands, results, scratch, plan, op, sizes, interpret):
    """Returns the kernel's results and, last, the blocks that each part of a tile computed, int32 [B, heads, parts of
    the row], or None where op.count is off.

    Args:
      consume: (warpgroup, where, (n_full, n, wanted), results, own) -> blocks computed, of one consumer. `where` is
        (row, tile, head); wanted(step) says whether the consumer's part of the tile has work in that step's block.
      produce: (where, n, block_of, operands and the plan's q_info and k_info, own), of the warpgroup that copies.
      operands: arrays. results: shapes, of which the first one is [B, rows of the side that stays, heads, K].
      scratch: {name: memory or barriers}, which is `own`.
      plan: gpu_plan.Plan. op: gpu_chip.Op. sizes: gpu_chip.Sizes. interpret: of plgpu.kernel; None = compiled."""
    (batch, length, heads, _), consumers = results[0].shape, sizes.consumers
    tiles, warpgroups, inputs = length // (consumers * ROWS), consumers * sizes.parts, len(operands) + 2
    if op.count:
        results = [*results, jax.ShapeDtypeStruct((batch, heads, tiles * consumers), jnp.int32)]

    def kernel(*refs):
        order, counts, lists, *outs, own = refs[inputs:]
        flat, head, warpgroup = order[lax.axis_index("work")], lax.axis_index("head"), lax.axis_index("warpgroup")
        row, tile = lax.div(flat, jnp.int32(tiles)), lax.rem(flat, jnp.int32(tiles))
        n_full, n = counts[row, tile, 0], counts[row, tile, 1]

        def look(step, part=None):
            return entry(lists[row, tile, step], consumers, part)

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(sizes.registers, action="increase")
            part = warpgroup if sizes.parts == 1 else lax.div(warpgroup, jnp.int32(sizes.parts))
            done = consume(warpgroup, (row, tile, head), (n_full, n, lambda step: look(step, part)[1]), outs, own)
            if op.count:
                outs[-1][row, head, tile * consumers + part] = done

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(sizes.producer_registers, action="decrease")
            produce((row, tile, head), n, lambda step: look(step)[0], refs[:inputs], own)

    out = plgpu.kernel(
        kernel, out_type=results, scratch_types=[scratch], grid=(batch * tiles, heads), grid_names=("work", "head"),
        num_threads=warpgroups + 1, thread_name="warpgroup", interpret=interpret, compiler_params=gp.PARAMS,
    )(*operands, *plan)
    return *out, *(() if op.count else (None,))


def part_of(tile, w, sizes):
    """Returns the slice of rows (ROWS of them) of a tile's w-th part."""
    return pl.ds((tile * sizes.consumers + w) * ROWS, ROWS)


def stage_of(own, warpgroup):
    """Returns this warpgroup's tile of gpu_parts.staged, or None."""
    return None if own["stage"] is None else own["stage"].at[warpgroup]


def steps(blocks, body, skip, carry):
    """Runs body(step, carry, masked=...) over the blocks of a tile; returns the last carry.

    The blocks that every query sees whole come first, without a mask. Of those with a mask, blocks that are not
    wanted(step) are another warpgroup's work: skip(step) passes them, so that both keep pace.

    blocks: (number of the former, of all, wanted)."""
    n_full, n, wanted = blocks

    def some(i, carry):
        def passed(carry):
            skip(i)
            return carry

        return lax.cond(wanted(i), lambda c: body(i, c, masked=True), passed, carry)

    carry = lax.fori_loop(jnp.int32(0), n_full, lambda i, c: body(i, c, masked=False), carry)
    return lax.fori_loop(n_full, n, some, carry)


def visible(q_info, k_info, shape, op, transposed=False):
    """Returns bool `shape`: which key each query sees. Rows are queries, or keys where `transposed`.

    q_info [reach, segments, prefixes, positions] and k_info [positions, segments]: int32 in shared memory, as
    `gpu_plan` makes them; without segments neither these nor prefixes, and where queries reach no further than
    themselves, their reach is their position. Before the copy engine overwrites them, commit_smem.
    """
    def spread(ref, by_column):
        vector = gp.loaded(ref, gp.BY_COLUMN if by_column else gp.BY_ROW)
        return gp.columns(vector, shape) if by_column else gp.rows(vector, shape)

    reach, *q_rest = (spread(q_info.at[i], transposed) for i in range((3 if op.segments else 1) + op.reach))
    q_pos = q_rest.pop() if op.reach else reach
    k_pos, *k_rest = (spread(k_info.at[i], not transposed) for i in range(2 if op.segments else 1))
    mask = k_pos <= reach
    if op.window:
        mask &= q_pos - k_pos < op.window
    if op.segments:
        (own, prefix), (segment,) = q_rest, k_rest
        mask &= (segment == own) | (segment == prefix)
    return mask
