"""The two kernels of `experts` on Hopper: a block of threads per tile of a result, in it two warpgroups that multiply,
64 rows each, and one that lets the copy engine fill a ring of tiles of the operands.

Sums stay in registers over the whole contraction, and what follows them happens there. Blocks of threads whose block of
rows holds none end at once. No sum crosses blocks of threads: nothing is atomic, every run gives the same bits.

Legend: E experts, R rows of a chunk's blocks, I and O columns in and out, N blocks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.gpu_chip import ROWS
from jaxrl.kernels.experts import tuned
from jaxrl.kernels.experts.grouped import ROW_SUM, Task
from jaxrl.kernels.experts.opened import laid_open

CONSUMERS = 2
DEEP = 64  # of the contraction, per tile of the ring: 128 bytes, the widest swizzle


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call of `rows`."""

    task: Task
    lefts: int
    across: tuple[bool, ...]  # of each weight
    biases: int
    gates: bool
    steps: int                # tiles of the contraction
    columns: int              # of a tile of the result
    stages: int               # tiles in the ring
    dtype: jnp.dtype

    @property
    def kinds(self):
        return [t for t in self.task.outputs if t != ROW_SUM]

    @property
    def summed(self) -> bool:
        return ROW_SUM in self.task.outputs

    @property
    def sums(self) -> int:
        return 1 + max(p.into for p in self.task.products)

    def scratch(self):
        stages, columns = self.stages, self.columns
        beside, row = self.biases + CONSUMERS * self.gates, plgpu.SMEM((CONSUMERS, ROWS), jnp.float32)
        return dict(
            left=[gp.swizzled((stages, CONSUMERS, ROWS, DEEP), self.dtype) for _ in range(self.lefts)],
            right=[gp.swizzled((stages, *((columns, DEEP) if across else (DEEP, columns))), self.dtype)
                   for across in self.across],
            bias=[plgpu.SMEM((columns,), self.dtype)] * self.biases, gates=row if self.gates else None,
            out=gp.swizzled((CONSUMERS, ROWS, columns), self.kinds[0]), row_sum=row if self.summed else None,
            ready=plgpu.Barrier(num_arrivals=self.lefts * CONSUMERS + len(self.across), num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            beside=plgpu.Barrier(num_arrivals=beside) if beside else None)


def rows(interpret, call, lay, task, lefts, weights, biases=(), gates_R=None):
    """See grouped.Kernels."""
    first, across = task.products[0], {p.right: p.across for p in task.products}
    out, blocks = weights[first.right].shape[1 if first.across else 2], lay.experts.size
    columns, stages = tuned.gpu_sizes(task.name, out)
    own_call = Call(task, len(lefts), tuple(across[i] for i in range(len(weights))), len(biases), gates_R is not None,
                    lefts[0].shape[1] // DEEP, columns, stages, lefts[0].dtype)
    operands = [*lefts, *weights, *biases, *(() if gates_R is None else (gates_R.astype(jnp.float32),))]
    results = [jax.ShapeDtypeStruct((lay.slots.size, out), t) for t in own_call.kinds]
    if own_call.summed:
        results.append(jax.ShapeDtypeStruct((out // columns, lay.slots.size), jnp.float32))

    def kernel(*refs):
        inside, (experts, used, *outs, own) = refs[:len(operands)], refs[len(operands):]
        block, tile, warpgroup = (lax.axis_index(n) for n in ("block", "tile", "warpgroup"))
        held, expert = block < used[0], experts[block]

        @pl.when(held & (warpgroup < CONSUMERS))
        def _():
            plgpu.set_max_registers(tuned.GPU_REGISTERS, action="increase")
            _consume(own_call, outs, own, warpgroup, block, tile)

        @pl.when(held & (warpgroup == CONSUMERS))
        def _():
            plgpu.set_max_registers(tuned.GPU_PRODUCER_REGISTERS, action="decrease")
            _produce(own_call, inside, own, block, expert, tile)

    kernel.__name__ = f"experts_{task.name}"
    made = _apart(plgpu.kernel(
        kernel, out_type=results, scratch_types=[own_call.scratch()], grid=(blocks, out // columns),
        grid_names=("block", "tile"), num_threads=CONSUMERS + 1, thread_name="warpgroup", interpret=interpret,
        compiler_params=gp.PARAMS)(*operands, lay.experts, lay.used[None]), interpret)
    return (*made[:-1], jnp.sum(made[-1], axis=0)) if own_call.summed else made


def _produce(call, refs, own, block, expert, tile):
    x, w, rest = refs[:call.lefts], refs[call.lefts:][:len(call.across)], refs[call.lefts + len(call.across):]
    at = pl.ds(tile * call.columns, call.columns)
    for ref, to in zip(rest, own["bias"], strict=False):
        plgpu.copy_gmem_to_smem(ref.at[expert, at], to, own["beside"])
    for c in range(CONSUMERS if call.gates else 0):
        plgpu.copy_gmem_to_smem(rest[-1].at[_rows(block, c)], own["gates"].at[c], own["beside"])

    def fill(step, slot, reused):
        pl.when(reused)(lambda: plgpu.barrier_wait(own["free"].at[slot]))
        deep, ready = pl.ds(step * DEEP, DEEP), own["ready"].at[slot]
        for ref, to in zip(x, own["left"], strict=True):
            for c in range(CONSUMERS):
                plgpu.copy_gmem_to_smem(ref.at[_rows(block, c), deep], to.at[slot, c], ready)
        for ref, to, across in zip(w, own["right"], call.across, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[(expert, at, deep) if across else (expert, deep, at)], to.at[slot], ready)

    gp.ring(jnp.int32(call.steps), call.stages, fill)


def _consume(call, outs, own, warpgroup, block, tile):
    """One consumer's 64 rows of a tile."""
    def multiply(*accs):
        def step(i, _):
            slot = gp.slot_of(i, call.stages)
            plgpu.barrier_wait(own["ready"].at[slot])
            for p in call.task.products:
                right = own["right"][p.right].at[slot]
                plgpu.wgmma(accs[p.into], own["left"][p.left].at[slot, warpgroup],
                            right.transpose((1, 0)) if p.across else right)
            _let_go(i, own["free"], call.stages, len(call.task.products))

        lax.fori_loop(jnp.int32(0), jnp.int32(call.steps), step, None)
        return tuple(acc[...] for acc in accs)

    shape, gates = (ROWS, call.columns), None
    sums = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * call.sums)
    if own["beside"] is not None:
        plgpu.barrier_wait(own["beside"])
    biases = [gp.columns(plgpu.load(ref, layout=gp.BY_COLUMN).astype(jnp.float32), shape) for ref in own["bias"]]
    if call.gates:
        gates = gp.rows(plgpu.load(own["gates"].at[warpgroup], layout=gp.BY_ROW), shape)
    made = list(laid_open(call.task.after, list(sums), biases, gates))
    at, to = _rows(block, warpgroup), pl.ds(tile * call.columns, call.columns)
    if call.summed:
        own["row_sum"][warpgroup] = made.pop().sum(axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["row_sum"].at[warpgroup], outs[-1].at[tile, at])
    for value, target in zip(made, outs, strict=False):  # one after the other through the same tile
        own["out"][warpgroup] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["out"].at[warpgroup], target.at[at, to])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.wait_smem_to_gmem(0)


def sums(interpret, call, lay, left_RxI, right_RxO, sum_ExIxO):
    """See grouped.Kernels. Into an array of its own: every expert's tiles are written, those without rows too."""
    (count, into, out), dtype = sum_ExIxO.shape, left_RxI.dtype
    columns, stages = tuned.gpu_sizes("sums", out)
    parts = into // ROWS  # of the left side's columns, a warpgroup each
    scratch = dict(
        left=gp.swizzled((stages, CONSUMERS, DEEP, ROWS), dtype), right=gp.swizzled((stages, DEEP, columns), dtype),
        total=gp.swizzled((CONSUMERS, ROWS, columns), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=CONSUMERS + 1, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages), before=plgpu.Barrier(num_arrivals=CONSUMERS))

    def kernel(left, right, total, ends, result, own):
        expert, pair, tile, warpgroup = (lax.axis_index(n) for n in ("expert", "pair", "tile", "warpgroup"))
        start = jnp.where(expert == 0, 0, ends[jnp.maximum(expert, 1) - 1])
        stop, at = jnp.minimum(ends[expert], lay.experts.size), pl.ds(tile * columns, columns)
        steps = jnp.maximum(stop - start, 0) * (call.block // DEEP)

        def part(c):
            """A warpgroup's columns of the left side; where one is left over, both warpgroups' are the same."""
            return pl.ds(jnp.minimum(pair * CONSUMERS + c, parts - 1) * ROWS, ROWS)

        def fill(step, slot, reused):
            pl.when(reused)(lambda: plgpu.barrier_wait(own["free"].at[slot]))
            deep, ready = pl.ds(start * call.block + step * DEEP, DEEP), own["ready"].at[slot]
            for c in range(CONSUMERS):
                plgpu.copy_gmem_to_smem(left.at[deep, part(c)], own["left"].at[slot, c], ready)
            plgpu.copy_gmem_to_smem(right.at[deep, at], own["right"].at[slot], ready)

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(tuned.GPU_PRODUCER_REGISTERS, action="decrease")
            for c in range(CONSUMERS):
                plgpu.copy_gmem_to_smem(total.at[expert, part(c), at], own["total"].at[c], own["before"])
            gp.ring(steps, stages, fill)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(tuned.GPU_REGISTERS, action="increase")
            _add(own, warpgroup, steps, stages)

            @pl.when(pair * CONSUMERS + warpgroup < parts)
            def _():
                plgpu.copy_smem_to_gmem(own["total"].at[warpgroup], result.at[expert, part(warpgroup), at])
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = "experts_sums"
    return _apart(plgpu.kernel(
        kernel, out_type=jax.ShapeDtypeStruct(sum_ExIxO.shape, jnp.float32), scratch_types=[scratch],
        grid=(count, pl.cdiv(parts, CONSUMERS), out // columns), grid_names=("expert", "pair", "tile"),
        num_threads=CONSUMERS + 1, thread_name="warpgroup", interpret=interpret, compiler_params=gp.PARAMS,
    )(left_RxI, right_RxO, sum_ExIxO, lay.ends), interpret)


def _add(own, warpgroup, steps, stages):
    """A consumer's part of left^T right, added to its tile in shared memory."""
    mine = own["total"].at[warpgroup]

    def multiply(acc):
        def step(i, _):
            slot = gp.slot_of(i, stages)
            plgpu.barrier_wait(own["ready"].at[slot])
            plgpu.wgmma(acc, own["left"].at[slot, warpgroup].transpose((1, 0)), own["right"].at[slot])
            _let_go(i, own["free"], stages, 1)

        lax.fori_loop(jnp.int32(0), steps, step, None)
        return acc[...]

    more = pl.run_scoped(multiply, plgpu.ACC(mine.shape, jnp.float32))
    plgpu.barrier_wait(own["before"])
    mine[...] = plgpu.load(mine, layout=gp.WGMMA) + more
    plgpu.commit_smem()


def _rows(block, consumer):
    return pl.ds((block * CONSUMERS + consumer) * ROWS, ROWS)


def _let_go(i, free, stages, products):
    """A tile may be filled anew once the products that read it are done: those of the step before this one are, when
    no more than this one's are under way."""
    plgpu.wgmma_wait(products)
    pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[gp.slot_of(i - 1, stages)]))


def _apart(made, interpret):
    """The interpreter cannot run two kernels at once."""
    return jax.lax.optimization_barrier(made) if interpret else made
