"""What of `recurrence` goes from chunk to chunk, on Hopper: two kernels on Mosaic GPU, forward and backward.

A block of threads has 64 columns of the values of one head of one row and goes through the row's chunks; one
warpgroup lets the copy engine fill a ring of the chunks' operands, the other multiplies. The state stays in registers,
transposed, so that it and what is made of it are left operands of the matrix unit without a way through shared memory;
that behind the prompt stays in shared memory. With S^T the state before a chunk [V, K] (gpu.py has the rest):

    U^T = U0^T - S^T W^T,   out^T = faded (S^T q^T) + U^T P^T,   S^T <- end S^T + (left U^T) k

and backward, from dS^T, the gradient of the state behind the chunk:

    dU^T = left (dS^T k^T) + dout^T P,   dS^T <- end dS^T + (faded dout^T) q - dU^T W

No sum crosses blocks of threads: nothing is atomic, and every run gives the same bits.

Legend: N chunks, B rows, C tokens per chunk, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.attention import gpu_parts as gp
from jaxrl.kernels.attention.gpu_chip import ROWS
from jaxrl.kernels.recurrence.chunks import PROMPT, SAVES, ZERO
from jaxrl.kernels.recurrence.gpu_call import PRODUCER_REGISTERS, REGISTERS, Call

DEEP = 64  # numbers of the widest swizzle, 128 bytes


class Laid(NamedTuple):
    """What both passes read of chunks. q, k [N, B, C, H, K]; reads, W [N, B, G, C, K], None without the delta;
    attended, P [N, B, G, C, C]: all of the inputs' type; gates [N, B, G, 2, C] fp32: faded, left."""

    q: jax.Array
    k: jax.Array
    reads: Any
    attended: jax.Array
    gates: jax.Array


class Scalars(NamedTuple):
    """The decays and flags that both passes read chunk by chunk.

    ends [N, B, G] fp32: decay of the state over the chunk. words [N, B] int32: start, and SAVES. used [B] int32: chunks
    of a row."""

    ends: jax.Array
    words: jax.Array
    used: jax.Array


class _Place(NamedTuple):
    """Of a block of threads: row, value head, its part of the values, chunks, and the references of Scalars."""

    row: Any
    head: Any
    values: Any
    count: Any
    scalars: Scalars


def forward(call: Call, laid: Laid, scalars: Scalars, writes, pair, keep: bool):
    """Returns (out [N, B, G, V, C], pair behind the chunks) and, with `keep`, (states before chunks [N, B, G, V, K],
    updates U [N, B, G, V, C]); chunks that are not used have none of them. out, states, updates: the inputs' type.

    writes: U0 [N, B, G, V, C] fp32. pair: the state before the chunks and that behind the prompt, [2, B, G, V, K]
    fp32.
    """
    dtype, by_token = laid.q.dtype, writes.shape
    of_states = (*by_token[:4], laid.q.shape[4])
    results = [jax.ShapeDtypeStruct(by_token, dtype), jax.ShapeDtypeStruct(pair.shape, jnp.float32)]
    results += [jax.ShapeDtypeStruct(shape, dtype) for shape in (of_states, by_token) if keep]

    def consume(at: _Place, outs, own):
        out, after, *kept = outs
        low = (ROWS, own["prompt"].shape[1]), (ROWS, own["out"].shape[1])

        def step(i, state):
            slot, word = gp.slot_of(i, call.stages), at.scalars.words[i, at.row]
            end, here = at.scalars.ends[i, at.row, at.head], (i, at.row, at.head, at.values)
            state = _begun(word, state, own)
            if keep:
                _write(state, own["state"], kept[0].at[here])
            tile = {name: own[name].at[slot] for name in (*laid._fields, "beside") if own.get(name) is not None}
            plgpu.barrier_wait(own["ready"].at[slot])
            asks = [tile["q"], *([tile["reads"]] if call.delta else ())]
            rounded = state.astype(dtype)
            read, *recalled = gp.accumulate(
                tuple(gp.zeros(low[1]) for _ in asks),
                tuple((lambda: rounded, ask.transpose((1, 0))) for ask in asks), own["stage_of_state"])
            faded, left = _gates(tile, low[1])
            update = gp.loaded(tile["beside"], gp.WGMMA)
            update = update - recalled[0] if call.delta else update
            if keep:
                _write(update, own["update"], kept[1].at[here])
            made, state = gp.accumulate(
                (read * faded, state * end),
                ((lambda: update.astype(dtype), tile["attended"].transpose((1, 0))),
                 (lambda: (update * left).astype(dtype), tile["k"])), own["stage_of_tokens"])
            plgpu.commit_smem()  # the copy engine may overwrite what was read of the gates and the writes
            plgpu.barrier_arrive(own["free"].at[slot])
            _write(made, own["out"], out.at[here])
            pl.when((word & SAVES) > 0)(lambda: _keep(own["prompt"], state))
            return state

        state = lax.fori_loop(jnp.int32(0), at.count, step, _first(own, at, own["pair"]))
        _last(own, at, state, after)

    extra = dict(state=gp.swizzled((ROWS, of_states[-1]), dtype), update=gp.swizzled((ROWS, by_token[-1]), dtype))
    return _launch(call, laid, scalars, writes, pair, results, consume, extra if keep else {}, lambda i, n: i)


def backward(call: Call, laid: Laid, scalars: Scalars, d_out, d_pair):
    """Returns (gradients of U [N, B, G, V, C] fp32, of pair [2, B, G, V, K] fp32, and of the states behind chunks [N,
    B, G, V, K] in the inputs' type), from those of out, d_out [N, B, G, V, C] in the inputs' type, and of the pair
    behind the chunks, d_pair; chunks that are not used have none."""
    dtype, by_token = laid.q.dtype, d_out.shape
    of_states = (*by_token[:4], laid.q.shape[4])
    results = [jax.ShapeDtypeStruct(by_token, jnp.float32), jax.ShapeDtypeStruct(d_pair.shape, jnp.float32),
               jax.ShapeDtypeStruct(of_states, dtype)]

    def consume(at: _Place, outs, own):
        d_updates, before, d_states = outs

        def step(i, d_state):
            slot, n = gp.slot_of(i, call.stages), at.count - 1 - i
            word, end = at.scalars.words[n, at.row], at.scalars.ends[n, at.row, at.head]
            here = n, at.row, at.head, at.values
            d_state = lax.cond((word & SAVES) > 0, lambda s: _and_prompt(own, s), lambda s: s, d_state)
            _write(d_state, own["state"], d_states.at[here])
            tile = {name: own[name].at[slot] for name in (*laid._fields, "beside") if own.get(name) is not None}
            plgpu.barrier_wait(own["ready"].at[slot])
            shape = tile["beside"].shape
            rounded, asked = d_state.astype(dtype), gp.loaded(tile["beside"], gp.WGMMA)
            faded, left = _gates(tile, shape)
            written, = gp.accumulate((gp.zeros(shape),), ((lambda: rounded, tile["k"].transpose((1, 0))),),
                                     own["stage_of_state"])
            d_update, d_state = gp.accumulate(
                (written * left, d_state * end),
                ((lambda: asked, tile["attended"]),
                 (lambda: (asked.astype(jnp.float32) * faded).astype(dtype), tile["q"])), own["stage_of_tokens"])
            if call.delta:
                d_state, = gp.accumulate((d_state,), ((lambda: (-d_update).astype(dtype), tile["reads"]),),
                                         own["stage_of_tokens"])
            plgpu.commit_smem()  # the copy engine may overwrite what was read of the gates and of d_out
            plgpu.barrier_arrive(own["free"].at[slot])
            _write(d_update, own["out"], d_updates.at[here])
            return _handed_on(word, d_state, own)

        d_state = lax.fori_loop(jnp.int32(0), at.count, step, _first(own, at, own["pair"]))
        _last(own, at, d_state, before)

    extra = dict(state=gp.swizzled((ROWS, of_states[-1]), dtype))
    return _launch(call, laid, scalars, d_out, d_pair, results, consume, extra, lambda i, n: n - 1 - i)


def _launch(call: Call, laid: Laid, scalars: Scalars, beside, pair, results, consume, extra, chunk):
    """Runs a pass. beside: the operand by value head that it alone has; chunk(step, count): that of a step."""
    (_, batch, groups, values, size), key, dtype = beside.shape, laid.q.shape[4], laid.q.dtype
    repeats, stages = groups // laid.q.shape[3], call.stages
    given = {name: x for name, x in laid._asdict().items() if x is not None} | {"beside": beside}
    tiles = dict(q=(size, key), k=(size, key), reads=(size, key), attended=(size, size), beside=(ROWS, size))
    by_key = key // size if size < DEEP else 1  # tokens, over which products run, are of whole swizzles
    scratch = {name: plgpu.SMEM((stages, 2, size), jnp.float32) if name == "gates" else
               gp.swizzled((stages, *tiles[name]), x.dtype, by_key if tiles[name][1] == key else 1)
               for name, x in given.items()}
    staged = lambda width: None if call.interpret is None else gp.swizzled((ROWS, width), dtype)  # noqa: E731
    scratch |= extra | dict(
        out=gp.swizzled((ROWS, size), results[0].dtype), prompt=gp.swizzled((ROWS, key), jnp.float32),
        stage_of_state=staged(key), stage_of_tokens=staged(size), loaded=plgpu.Barrier(num_arrivals=1),
        ready=plgpu.Barrier(num_arrivals=len(given), num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=stages))

    def kernel(*refs):
        inside, rest = refs[:len(given)], refs[len(given):]
        (*of_scalars, before), (*outs, own) = rest[:len(scalars) + 1], rest[len(scalars) + 1:]
        row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        at = _Place(row, head, pl.ds(part * ROWS, ROWS), of_scalars[-1][row], Scalars(*of_scalars))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(REGISTERS, action="increase")
            consume(at, outs, own | {"pair": before})

        @pl.when(warpgroup == 1)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            key_head = lax.div(head, jnp.int32(repeats))

            def fill(i, slot, reused):
                pl.when(reused)(lambda: plgpu.barrier_wait(own["free"].at[slot]))
                n = chunk(i, at.count)
                for name, ref in zip(given, inside, strict=True):
                    where = (n, row, slice(None), key_head) if name in ("q", "k") else (n, row, head)
                    source = ref.at[(*where, at.values) if name == "beside" else where]
                    plgpu.copy_gmem_to_smem(source, own[name].at[slot], own["ready"].at[slot])

            gp.ring(at.count, stages, fill)

    return plgpu.kernel(
        kernel, out_type=results, scratch_types=[scratch], grid=(batch, groups, values // ROWS),
        grid_names=("row", "head", "part"), num_threads=2, thread_name="warpgroup", interpret=call.interpret,
        compiler_params=gp.PARAMS)(*given.values(), *scalars, pair)


def _gates(tile, shape):
    """Returns (faded, left) of each token, for every value."""
    return tuple(gp.columns(gp.loaded(tile["gates"].at[i], gp.BY_COLUMN), shape) for i in range(2))


def _write(value, tile, target):
    """Writes through a tile in shared memory, once what was written before has left it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = value.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def _keep(ref, value):
    ref[...] = value
    plgpu.commit_smem()


def _first(own, at: _Place, pair):
    """Returns the state of a pair; leaves the prompt's in its place."""
    def loaded(i):
        plgpu.copy_gmem_to_smem(pair.at[i, at.row, at.head, at.values], own["prompt"], own["loaded"])
        plgpu.barrier_wait(own["loaded"])

    loaded(0)
    state = gp.loaded(own["prompt"], gp.WGMMA)
    plgpu.commit_smem()
    loaded(1)
    return state


def _last(own, at: _Place, state, pair):
    """Writes a pair."""
    to = lambda i: pair.at[i, at.row, at.head, at.values]  # noqa: E731
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own["prompt"], to(1))
    _write(state, own["prompt"], to(0))
    plgpu.wait_smem_to_gmem(0)


def _begun(word, state, own):
    """Returns what a chunk begins with."""
    start = word & (SAVES - 1)
    state = lax.cond(start == ZERO, lambda s: gp.zeros(s.shape), lambda s: s, state)
    return lax.cond(start == PROMPT, lambda s: gp.loaded(own["prompt"], gp.WGMMA), lambda s: s, state)


def _and_prompt(own, d_state):
    """Returns d_state with that of the completions, which leaves its place."""
    d_state = d_state + gp.loaded(own["prompt"], gp.WGMMA)
    _keep(own["prompt"], gp.zeros(d_state.shape))
    return d_state


def _handed_on(word, d_state, own):
    """Returns the gradient of the state behind the chunk before; that of a completion's begin goes to its prompt."""
    start = word & (SAVES - 1)

    @pl.when(start == PROMPT)
    def _():
        _keep(own["prompt"], d_state + gp.loaded(own["prompt"], gp.WGMMA))

    is_new = (start == PROMPT) | (start == ZERO)
    return lax.cond(is_new, lambda s: gp.zeros(s.shape), lambda s: s, d_state)
