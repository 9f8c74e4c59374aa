"""The two kernels of `experts` on Hopper: a block of threads per multiprocessor, in it two warpgroups that multiply, 64
rows each, and one that lets the copy engine fill a ring of tiles of the operands.

A block of threads computes one tile of a result after another, those of one expert together, so that its weights stay
in the L2 cache; the ring goes on from tile to tile, and is filled while the one before is written. Sums stay in
registers over the whole contraction, and what follows them happens there. A tile is one block of rows and `parts`
times `columns` columns, each part with sums of its own: of a narrow tile the operands need more of the L2 cache's
bandwidth than there is (128 x 128: 10.8 TB/s at 700 TFLOP/s; 128 x 256: 8.1). No sum crosses blocks of threads:
nothing is atomic, every run gives the same bits.

Legend: E experts, R rows of a chunk's blocks, I and O columns in and out, N blocks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_chip
from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.gpu_chip import ROWS
from jaxrl.kernels.experts import tuned
from jaxrl.kernels.experts.grouped import ROW_SUM, Product, Task
from jaxrl.kernels.experts.opened import laid_open

CONSUMERS = 2
DEEP = 64  # of the contraction, per tile of the ring: 128 bytes, the widest swizzle


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call of `rows`.

    phases: products that are made side by side from one step's tiles. Products that only add to one sum are phases one
    after the other, so that a step holds the tiles of one of them.

    biases: number of them. gates: whether there are gates. dtype: of the inputs."""

    task: Task
    phases: tuple[tuple[Product, ...], ...]
    biases: int
    gates: bool
    steps: int                # tiles of a phase's contraction
    sizes: tuned.GpuSizes
    dtype: jnp.dtype

    @property
    def kinds(self):
        """Dtypes of the outputs [R, O], without a row sum."""
        return [t for t in self.task.outputs if t != ROW_SUM]

    @property
    def summed(self) -> bool:
        """Whether the last output is a sum over columns."""
        return ROW_SUM in self.task.outputs

    @property
    def sums(self) -> int:
        """Number of sums that the products add to."""
        return 1 + max(p.into for p in self.task.products)

    def lefts(self, phase: int) -> list[int]:
        """Returns the numbers of the left operands that a phase's products read, ascending."""
        return sorted({p.left for p in self.phases[phase]})

    def rights(self, phase: int) -> dict[int, bool]:
        """Returns {number of a weight: whether it is multiplied transposed} of a phase's products."""
        return {p.right: p.across for p in sorted(self.phases[phase], key=lambda p: p.right)}

    def scratch(self):
        """Returns the kernel's shared memory and barriers, by name."""
        _, stages, columns, parts = self.sizes
        beside, row = self.biases * parts + CONSUMERS * self.gates, plgpu.SMEM((CONSUMERS, ROWS), jnp.float32)
        lefts, rights = self.lefts(0), self.rights(0)
        return dict(
            left=[gp.swizzled((stages, CONSUMERS, ROWS, DEEP), self.dtype) for _ in lefts],
            right=[gp.swizzled((stages, parts, *((columns, DEEP) if across else (DEEP, columns))), self.dtype)
                   for across in rights.values()],
            bias=[plgpu.SMEM((parts, columns), self.dtype)] * self.biases, gates=row if self.gates else None,
            out=gp.swizzled((CONSUMERS, ROWS, columns), self.kinds[0]), row_sum=row if self.summed else None,
            ready=plgpu.Barrier(num_arrivals=len(lefts) * CONSUMERS + len(rights) * parts, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            beside=plgpu.Barrier(num_arrivals=beside) if beside else None,
            beside_free=plgpu.Barrier(num_arrivals=CONSUMERS) if beside else None)


def rows(interpret, call, lay, task, lefts, weights, biases=(), gates_R=None):
    """Runs a Task on rows sorted by expert and returns its outputs [R, O] (dtypes of the task); a row sum is [R] in
    fp32.

    interpret: as gpu_chip.interpreted returns it. call: walk.Call; not read. lay: Layout. lefts [R, I], weights [E, I,
    O] or transposed, biases [E, O], gates_R: see grouped.Kernels. Rows after the used blocks mean nothing."""
    first, blocks = task.products[0], lay.experts.size
    out = weights[first.right].shape[1 if first.across else 2]
    apart = len(task.products) > 1 and all(p.into == first.into for p in task.products)
    sizes = tuned.gpu_sizes(task.name, out)
    own_call = Call(task, tuple((p,) for p in task.products) if apart else (task.products,), len(biases),
                    gates_R is not None, lefts[0].shape[1] // DEEP, sizes, lefts[0].dtype)
    operands = [*lefts, *weights, *biases, *(() if gates_R is None else (gates_R.astype(jnp.float32),))]
    results, tiles = [jax.ShapeDtypeStruct((lay.slots.size, out), t) for t in own_call.kinds], out // sizes.width
    if own_call.summed:
        results.append(jax.ShapeDtypeStruct((tiles, lay.slots.size), jnp.float32))

    def kernel(*refs):
        inside, (experts, used, *outs, own) = refs[:len(operands)], refs[len(operands):]
        split = lambda flat: (lax.div(flat, jnp.int32(tiles)), lax.rem(flat, jnp.int32(tiles)))  # noqa: E731

        def consume(warpgroup, number, flat, before):
            block, tile = split(flat)
            return _consume(own_call, outs, own, warpgroup, number, block, tile)

        def produce(number, flat, before):
            block, tile = split(flat)
            return _produce(own_call, inside, own, number, block, experts[block], tile)

        _each(jnp.minimum(used[0], blocks) * tiles, consume, produce)

    kernel.__name__ = f"experts_{task.name}"
    made = _apart(_launch(kernel, results, own_call.scratch(), blocks * tiles, interpret)(
        *operands, lay.experts, lay.used[None]), interpret)
    return (*made[:-1], jnp.sum(made[-1], axis=0)) if own_call.summed else made


def _launch(kernel, results, scratch, most, interpret):
    """Runs the kernel on as many blocks of threads as there are multiprocessors, or as there are tiles at most."""
    return plgpu.kernel(kernel, out_type=results, scratch_types=[scratch], grid=(min(gpu_chip.MULTIPROCESSORS, most),),
                        grid_names=("chip",), num_threads=CONSUMERS + 1, thread_name="warpgroup", interpret=interpret,
                        compiler_params=gp.PARAMS)


def _each(count, consume, produce):
    """Runs this block of threads' share of `count` tiles: consume(warpgroup, number, tile, before) and produce(number,
    tile, before), by role, which return `before` of the next tile: the steps that the ring has made."""
    chip, chips, warpgroup = lax.axis_index("chip"), lax.axis_size("chip"), lax.axis_index("warpgroup")
    mine = lax.div(count - chip + jnp.int32(chips - 1), jnp.int32(chips))

    def share(one):
        lax.fori_loop(jnp.int32(0), mine, lambda i, before: one(i, chip + i * chips, before), jnp.int32(0))

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(tuned.GPU_REGISTERS, action="increase")
        share(lambda *at: consume(warpgroup, *at))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(tuned.GPU_PRODUCER_REGISTERS, action="decrease")
        share(produce)


def _produce(call, refs, own, number, block, expert, tile):
    """Copies the tiles that a block's products read into the ring, then its biases and gates; returns the steps done so
    far.

    refs: lefts [R, I], weights [E, I, O], biases [E, O], gates [R] in global memory. own: shared memory and barriers
    by name. number: how many blocks of work came before. block, expert, tile: where the work lies."""
    lefts, weights = (1 + max(getattr(p, side) for p in call.task.products) for side in ("left", "right"))
    x, w, rest = refs[:lefts], refs[lefts:][:weights], refs[lefts + weights:]
    _, stages, columns, parts = call.sizes
    steps = call.steps * len(call.phases)

    def at(part):
        return pl.ds((tile * parts + part) * columns, columns)

    def copy(phase, step, slot):
        deep, ready = pl.ds(step * DEEP, DEEP), own["ready"].at[slot]
        for i, to in zip(call.lefts(phase), own["left"], strict=True):
            for c in range(CONSUMERS):
                plgpu.copy_gmem_to_smem(x[i].at[_rows(block, c), deep], to.at[slot, c], ready)
        for (i, across), to in zip(call.rights(phase).items(), own["right"], strict=True):
            for p in range(parts):
                source = w[i].at[(expert, at(p), deep) if across else (expert, deep, at(p))]
                plgpu.copy_gmem_to_smem(source, to.at[slot, p], ready)

    def fill(step, slot, reused):
        pl.when(reused)(lambda: plgpu.barrier_wait(own["free"].at[slot]))
        for phase in range(len(call.phases)):
            here = lax.div(step, jnp.int32(call.steps)) == phase
            pl.when(here)(lambda phase=phase: copy(phase, step - phase * call.steps, slot))

    gp.ring(jnp.int32(steps), stages, fill, number * steps)
    if own["beside"] is not None:  # behind the tiles: the consumers still read those of the tile before
        pl.when(number > 0)(lambda: plgpu.barrier_wait(own["beside_free"]))
    for ref, to in zip(rest, own["bias"], strict=False):
        for p in range(parts):
            plgpu.copy_gmem_to_smem(ref.at[expert, at(p)], to.at[p], own["beside"])
    for c in range(CONSUMERS if call.gates else 0):
        plgpu.copy_gmem_to_smem(rest[-1].at[_rows(block, c)], own["gates"].at[c], own["beside"])
    return (number + 1) * steps


def _consume(call, outs, own, warpgroup, number, block, tile):
    """Multiplies one consumer's 64 rows of a tile and writes its outputs [64, columns] and row sums [64]; returns the
    steps done so far.

    outs: outputs in global memory. The other arguments: as of `_produce`."""
    _, stages, columns, parts = call.sizes
    steps, products = call.steps * len(call.phases), call.phases[0]
    lefts, rights = call.lefts(0), list(call.rights(0))

    def multiply(*accs):
        def step(i, _):
            slot = gp.slot_of(number * steps + i, stages)
            plgpu.barrier_wait(own["ready"].at[slot])
            for p in products:
                left = own["left"][lefts.index(p.left)].at[slot, warpgroup]
                for part in range(parts):
                    right = own["right"][rights.index(p.right)].at[slot, part]
                    plgpu.wgmma(accs[part * call.sums + p.into], left, right.transpose((1, 0)) if p.across else right)
            _let_go(i, number * steps + i, own["free"], stages, len(products) * parts)

        lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, None)
        return tuple(acc[...] for acc in accs)

    shape, gates, at = (ROWS, columns), None, _rows(block, warpgroup)
    sums = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * (call.sums * parts))
    plgpu.barrier_arrive(own["free"].at[gp.slot_of((number + 1) * steps - 1, stages)])
    if own["beside"] is not None:
        plgpu.barrier_wait(own["beside"])
    if call.gates:
        gates = gp.rows(gp.loaded(own["gates"].at[warpgroup], gp.BY_ROW), shape)
    row_sum = None
    for part in range(parts):
        biases = [gp.columns(gp.loaded(ref.at[part], gp.BY_COLUMN).astype(jnp.float32), shape)
                  for ref in own["bias"]]
        made = list(laid_open(call.task.after, list(sums[part * call.sums:][:call.sums]), biases, gates))
        if call.summed:
            more = made.pop().sum(axis=1)
            row_sum = more if row_sum is None else row_sum + more
        to = pl.ds((tile * parts + part) * columns, columns)
        for value, target in zip(made, outs, strict=False):  # one after the other through the same tile
            _write(value, own["out"].at[warpgroup], target.at[at, to])
    if own["beside"] is not None:
        plgpu.commit_smem()  # the copy engine may overwrite what was read of biases and gates
        plgpu.barrier_arrive(own["beside_free"])
    if call.summed:
        _write(row_sum, own["row_sum"].at[warpgroup], outs[-1].at[tile, at])
    return (number + 1) * steps


def _write(value, tile, target):
    """Writes through a tile in shared memory, once what was written through it before has left it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = value.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def sums(interpret, call, lay, left_RxI, right_RxO, sum_ExIxO):
    """Returns sum_ExIxO (0 for a ShapeDtypeStruct) + left^T right of each expert's rows, new; see grouped.Kernels."""
    (count, into, out), fresh = sum_ExIxO.shape, isinstance(sum_ExIxO, jax.ShapeDtypeStruct)
    sizes = tuned.gpu_sizes("sums", out)
    pairs, tiles = -(-into // (ROWS * CONSUMERS)), out // sizes.width
    scratch = _scratch_of_sums(sizes, left_RxI.dtype, sum_ExIxO.dtype, fresh)

    def kernel(left, right, *refs):
        total, (ends, result, own) = None if fresh else refs[0], refs[not fresh:]

        def place(flat):
            """Returns (expert, pair of 64 columns of the left side, tile of the right one, first row, steps)"""
            expert, rest = lax.div(flat, jnp.int32(pairs * tiles)), lax.rem(flat, jnp.int32(pairs * tiles))
            start = jnp.where(expert == 0, 0, ends[jnp.maximum(expert, 1) - 1])
            stop = jnp.minimum(ends[expert], lay.experts.size)
            steps = jnp.maximum(stop - start, 0) * (call.block // DEEP)
            return expert, lax.div(rest, jnp.int32(tiles)), lax.rem(rest, jnp.int32(tiles)), start * call.block, steps

        def columns_of(pair, c):
            """Returns a warpgroup's columns of the left side; where one is left over, both warpgroups' are the same."""
            return pl.ds(jnp.minimum(pair * CONSUMERS + c, into // ROWS - 1) * ROWS, ROWS)

        part_of = lambda tile, part: pl.ds((tile * sizes.parts + part) * sizes.columns, sizes.columns)  # noqa: E731

        def produce(number, flat, before):
            expert, pair, tile, start, steps = place(flat)

            def fill(step, slot, reused):
                pl.when(reused)(lambda: plgpu.barrier_wait(own["free"].at[slot]))
                deep, ready = pl.ds(start + step * DEEP, DEEP), own["ready"].at[slot]
                for c in range(CONSUMERS):
                    plgpu.copy_gmem_to_smem(left.at[deep, columns_of(pair, c)], own["left"].at[slot, c], ready)
                for p in range(sizes.parts):
                    plgpu.copy_gmem_to_smem(right.at[deep, part_of(tile, p)], own["right"].at[slot, p], ready)

            gp.ring(steps, sizes.stages, fill, before)
            return before + steps

        def consume(warpgroup, number, flat, before):
            expert, pair, tile, _, steps = place(flat)
            found = _summed(own, warpgroup, before, steps, sizes)

            @pl.when(pair * CONSUMERS + warpgroup < into // ROWS)
            def _():
                for p, value in enumerate(found):
                    at, mine = (expert, columns_of(pair, warpgroup), part_of(tile, p)), own["total"].at[warpgroup]
                    if not fresh:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.copy_gmem_to_smem(total.at[at], mine, own["before"].at[warpgroup])
                        plgpu.barrier_wait(own["before"].at[warpgroup])
                        value = value + gp.loaded(mine, gp.WGMMA)
                    _write(value, mine, result.at[at])
            return before + steps

        _each(jnp.int32(count * pairs * tiles), consume, produce)

    kernel.__name__ = "experts_sums"
    made = jax.ShapeDtypeStruct(sum_ExIxO.shape, sum_ExIxO.dtype)
    launch = _launch(kernel, made, scratch, count * pairs * tiles, interpret)
    return _apart(launch(left_RxI, right_RxO, *(() if fresh else (sum_ExIxO,)), lay.ends), interpret)


def _scratch_of_sums(sizes, dtype, of_sum, fresh: bool) -> dict:
    """Returns the shared memory and barriers of `sums`, by name.

    of_sum: dtype of its result. fresh: it adds to none."""
    return dict(
        left=gp.swizzled((sizes.stages, CONSUMERS, DEEP, ROWS), dtype),
        right=gp.swizzled((sizes.stages, sizes.parts, DEEP, sizes.columns), dtype),
        total=gp.swizzled((CONSUMERS, ROWS, sizes.columns), of_sum),
        ready=plgpu.Barrier(num_arrivals=CONSUMERS + sizes.parts, num_barriers=sizes.stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=sizes.stages),
        before=None if fresh else plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS))


def _summed(own, warpgroup, before, steps, sizes):
    """Returns a consumer's part of left^T right, by parts of the tile's columns."""
    def multiply(*accs):
        def step(i, _):
            slot = gp.slot_of(before + i, sizes.stages)
            plgpu.barrier_wait(own["ready"].at[slot])
            left = own["left"].at[slot, warpgroup].transpose((1, 0))
            for part, acc in enumerate(accs):
                plgpu.wgmma(acc, left, own["right"].at[slot, part])
            _let_go(i, before + i, own["free"], sizes.stages, sizes.parts)

        lax.fori_loop(jnp.int32(0), steps, step, None)
        return tuple(acc[...] for acc in accs)

    found = pl.run_scoped(multiply, *[plgpu.ACC((ROWS, sizes.columns), jnp.float32)] * sizes.parts)
    last = gp.slot_of(jnp.maximum(before + steps, 1) - 1, sizes.stages)
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(own["free"].at[last]))
    return found


def _rows(block, consumer):
    return pl.ds((block * CONSUMERS + consumer) * ROWS, ROWS)


def _let_go(i, step, free, stages, products):
    """Frees a tile once the products that read it are done: those of the step before this one are, when no more than
    this one's are under way. i: of a result's tile; step: of the ring."""
    plgpu.wgmma_wait(products)
    pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[gp.slot_of(jnp.maximum(step, 1) - 1, stages)]))


def _apart(made, interpret):
    """Keeps two kernels apart in the interpreter, which cannot run both at once."""
    return jax.lax.optimization_barrier(made) if interpret else made
