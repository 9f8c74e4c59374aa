"""The two passes of `recurrence` on TPUs as Pallas kernels, over operands that lie by chunk and head (tpu.py).

Legend: B rows, N chunks of a row, C tokens per chunk, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention.tpu_parts import VMEM
from jaxrl.kernels.recurrence.chunks import GIVEN, PROMPT, SAVES, STRETCH, ZERO, flops
from jaxrl.kernels.recurrence.tpu_chunk import (
    asked_for,
    dot,
    gates_of,
    gradients_of,
    halves,
    marks_of,
    solved_of,
    spread_of,
    update_of,
)

USED = 8  # in a chunk's word, beside its start and SAVES


class Call(NamedTuple):
    """The static part of a call.

    keys, values: key and value heads of a step; keys is 1 where a key head has several steps. interpret: of
    pallas_call."""

    keys: int
    values: int
    delta: bool
    interpret: Any

    def heads(self):
        """Returns an iterator of pairs (key head, range of its value heads) of a step."""
        each = self.values // self.keys
        return ((i, range(each * i, each * (i + 1))) for i in range(self.keys))


class Laid(NamedTuple):
    """Operands by chunk and head: q, k [B, H, N, C, K], v [B, G, N, C, V], gates [B, G, N, GATES, C]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: jax.Array


class _Grid:
    """Blocks of operands by row, step's heads and chunk; chunk(t, stretches) is that of step t."""

    def __init__(self, call: Call, laid: Laid, steps_of_row):
        self.call, (self.groups, key, value) = call, (laid.v.shape[1], laid.q.shape[4], laid.v.shape[4])
        self.steps = self.groups // call.values
        self.shared = self.steps * call.keys // laid.q.shape[1]             # steps of a key head
        self.size, self.acc = (key, value), laid.gates.dtype
        self.shape = laid.v.shape[0], self.steps, steps_of_row
        self.state = pl.BlockSpec((1, call.values, key, value), lambda b, i, t, words, n: (b, i, 0, 0))

    def by_key(self, x, chunk=lambda t, n: t):
        return pl.BlockSpec((1, self.call.keys, 1, *x.shape[3:]),
                            lambda b, i, t, words, n: (b, i // self.shared, chunk(t, n[0]), 0, 0))

    def by_value(self, x, chunk=lambda t, n: t):
        return pl.BlockSpec((1, self.call.values, 1, *x.shape[3:]),
                            lambda b, i, t, words, n: (b, i, chunk(t, n[0]), 0, 0))

    def pairs(self, stretch):
        return pl.BlockSpec((1, 1, 2, self.call.values, *self.size),
                            lambda b, i, t, words, n: (b, stretch(t, n[0]), 0, i, 0, 0))

    def whole(self, x):
        return pl.BlockSpec(x.shape, lambda b, i, t, words, n: (0,) * x.ndim)


def _cost(call: Call, laid: Laid, passes: int):
    _, groups, _, size, value = laid.v.shape
    tokens = math.prod(laid.v.shape) // (groups * value)
    return pl.CostEstimate(flops=passes * tokens * flops(groups, laid.q.shape[4], value, size, call.delta),
                           transcendentals=passes * tokens * groups * size,
                           bytes_accessed=passes * sum(x.size * x.dtype.itemsize for x in laid))


def _launch(call: Call, laid: Laid, body, grid, in_specs, outs, scratch, passes: int, name: str):
    """Returns pallas_call of a pass; outs: (spec, shape) of results in `grid.acc`, or (spec, shape, dtype)."""
    shapes = [jax.ShapeDtypeStruct(shape, *(dtype or (grid.acc,))) for _, shape, *dtype in outs]
    return pl.pallas_call(
        body, out_shape=shapes, interpret=call.interpret, cost_estimate=_cost(call, laid, passes), name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid.shape, in_specs=in_specs, out_specs=[spec for spec, *_ in outs],
            scratch_shapes=[pltpu.VMEM(shape, grid.acc) for shape in scratch]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"),
                                             vmem_limit_bytes=VMEM))


# ---- forward


def forward(call: Call, laid: Laid, given, words, stretches, keep: bool):
    """Returns (out [B, G, N, C, V], states after the rows [B, G, K, V], pairs of states before each stretch or None).

    out is in v's dtype, the rest fp32 or better. Pairs are [B, N / STRETCH, 2, G, K, V]: the running state and the
    prompt's. Chunks that are not used have no output.

    Args:
      laid: operands by chunk and head; N is a multiple of STRETCH.
      given: states [B, G, K, V] of rows that continue.
      words: [B * N] int32 flags of the chunks: start, SAVES and USED. stretches: [1] int32, how many are computed.
      keep: whether to return the pairs."""
    grid = _Grid(call, laid, stretches[0] * STRETCH)
    (batch, groups, count, size, _), (key, value) = laid.v.shape, grid.size
    spread = spread_of(size, grid.acc)
    outs = [(grid.by_value(laid.v), laid.v.shape, laid.v.dtype), (grid.state, given.shape)]
    if keep:
        outs.append((grid.pairs(lambda t, n: t // STRETCH), (batch, count // STRETCH, 2, groups, key, value)))
    in_specs = [grid.by_key(laid.q), grid.by_key(laid.k), grid.by_value(laid.v), grid.by_value(laid.gates),
                grid.whole(spread), grid.state]
    run = _launch(call, laid, functools.partial(_forward_body, call, count, keep), grid, in_specs, outs,
                  [(call.values, key, value)] * 2, 1, "recurrence_forward")
    out, state, *pairs = run(words, stretches, *laid, spread, given)
    return out, state, pairs[0] if keep else None


def _forward_body(call: Call, count, keep, words, _, q, k, v, gates, spread, given, out, state, *rest):
    """Runs one chunk of the forward pass: writes out [C, V] per value head and carries the states [values, K, V] in
    scratch.

    words: flags by chunk. q, k [1, keys, 1, C, K], v [1, values, 1, C, V], gates [1, values, 1, GATES, C], given and
    state [1, values, K, V]. rest: the pairs, if they are kept, then scratch: running and prompt's state."""
    pairs, (now, prompt) = rest[:keep], rest[keep:]
    n = pl.program_id(2)
    word = words[pl.program_id(0) * count + n]

    @pl.when(n == 0)
    def _():
        now[...], prompt[...] = given[0], jnp.zeros_like(prompt)

    if keep:
        @pl.when(n % STRETCH == 0)
        def _():
            pairs[0][0, 0, 0], pairs[0][0, 0, 1] = now[...], prompt[...]

    _begin(word, now, prompt, given[0])

    @pl.when(word >= USED)
    def _():
        acc, marks = now.dtype, marks_of(gates.shape[-1])
        for i, values in call.heads():
            keys = k[0, i, 0].astype(acc)
            asked = asked_for(call.delta, q[0, i, 0].astype(acc), keys)
            attended, similar = halves(call.delta, dot(asked, keys, 1, 1))
            for j in values:
                one = gates_of(gates[0, j, 0], marks)
                read, recalled = halves(call.delta, dot(asked, now[j], 1, 0))
                solved = solved_of(call.delta, one, similar, marks, spread)
                update = update_of(call.delta, one, v[0, j, 0].astype(acc), recalled, solved)
                out[0, j, 0] = (one.faded * read + dot(attended * one.decay, update, 1, 0)).astype(out.dtype)
                now[j] = one.end * now[j] + dot(one.left * keys, update, 0, 0)

    _save(word, now, prompt)

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        state[0] = now[...]


def _begin(word, now, prompt, given) -> None:
    start = word & (SAVES - 1)
    for at, value in ((ZERO, lambda: jnp.zeros_like(now)), (PROMPT, lambda: prompt[...]), (GIVEN, lambda: given)):
        @pl.when(start == at)
        def _(value=value):
            now[...] = value()


def _save(word, now, prompt) -> None:
    @pl.when((word & SAVES) > 0)
    def _():
        prompt[...] = now[...]


# ---- backward


class _Own(NamedTuple):
    """What a step of the backward pass reads, writes and keeps."""

    q: Any
    k: Any
    v: Any
    gates: Any
    spread: Any
    given: Any
    pairs: Any
    d_out: Any
    d_state: Any
    d_q: Any
    d_k: Any
    d_v: Any
    d_gates: Any
    d_given: Any
    now: Any
    prompt: Any
    d_now: Any
    d_prompt: Any
    states: Any    # of the stretch, before each chunk; and its inverses and updates
    inverses: Any
    updates: Any


def _chunk_of(t, stretches):
    """Returns (stretch, chunk) of a step, and the chunk whose gradients it computes or will compute first."""
    stretch, phase = stretches - 1 - t // (2 * STRETCH), t % (2 * STRETCH)
    after = stretch * STRETCH + jnp.minimum(2 * STRETCH - 1 - phase, STRETCH - 1)
    return stretch, jnp.where(phase < STRETCH, stretch * STRETCH + phase, after), after


def backward(call: Call, laid: Laid, given, pairs, d_out, d_state, words, stretches):
    """Returns (gradients of `laid` in its dtypes, of `given`), from d_out [B, G, N, C, V] and d_state [B, G, K, V].

    given: states [B, G, K, V] of rows that continue. pairs: what `forward` kept. words: [B * N] int32 flags of the
    chunks. stretches: [1] int32, how many are computed."""
    grid = _Grid(call, laid, stretches[0] * 2 * STRETCH)
    stretch_at, now_at, after_at = (lambda t, n, i=i: _chunk_of(t, n)[i] for i in range(3))
    (batch, _, count, size, _), (key, value) = laid.v.shape, grid.size
    spread, state = spread_of(size, grid.acc), (call.values, key, value)
    parts = (batch, grid.steps * call.keys, count, size, key)
    by_part = pl.BlockSpec((1, call.keys, 1, size, key), lambda b, i, t, words, n: (b, i, after_at(t, n[0]), 0, 0))
    in_specs = [grid.by_key(laid.q, after_at), grid.by_key(laid.k, now_at), grid.by_value(laid.v, now_at),
                grid.by_value(laid.gates, now_at), grid.whole(spread), grid.state, grid.pairs(stretch_at),
                grid.by_value(d_out, after_at), grid.state]
    outs = [(by_part, parts), (by_part, parts), (grid.by_value(laid.v, after_at), laid.v.shape, laid.v.dtype),
            (grid.by_value(laid.gates, after_at), laid.gates.shape), (grid.state, given.shape)]
    of_pairs = (STRETCH, call.values, *((size, size) if call.delta else (1, 1)))
    scratch = [state] * 4 + [(STRETCH, *state), of_pairs, (STRETCH, call.values, size, value)]
    run = _launch(call, laid, functools.partial(_backward_body, call, count), grid, in_specs, outs, scratch, 3,
                  "recurrence_backward")
    d_q, d_k, d_v, d_gates, d_given = run(words, stretches, *laid, spread, given, pairs, d_out, d_state)
    summed = lambda x, like: x.reshape(  # noqa: E731
        batch, like.shape[1], -1, *like.shape[2:]).sum(axis=2).astype(like.dtype)
    return Laid(summed(d_q, laid.q), summed(d_k, laid.k), d_v, d_gates), d_given


def _backward_body(call: Call, count, words, stretches, *refs):
    """Runs one of the 2 STRETCH phases of a stretch: first its chunks forward again, then their gradients, last chunk
    first.

    refs: the fields of _Own. The gradients of the running and of the prompt's state, [values, K, V], are carried in
    scratch."""
    own, t = _Own(*refs), pl.program_id(2)
    _, n, _ = _chunk_of(t, stretches[0])
    phase = t % (2 * STRETCH)
    place = jnp.minimum(phase, 2 * STRETCH - 1 - phase)
    word = words[pl.program_id(0) * count + n]
    used, start = word >= USED, word & (SAVES - 1)

    @pl.when(t == 0)
    def _():
        own.d_now[...], own.d_prompt[...] = own.d_state[0], jnp.zeros_like(own.d_prompt)
        own.d_given[...] = jnp.zeros_like(own.d_given)

    @pl.when(phase == 0)
    def _():
        own.now[...], own.prompt[...] = own.pairs[0, 0, 0], own.pairs[0, 0, 1]

    @pl.when(phase < STRETCH)
    def _():
        _begin(word, own.now, own.prompt, own.given[0])
        own.states[place] = own.now[...]
        pl.when(used)(lambda: _again(call, own, place))
        _save(word, own.now, own.prompt)

    @pl.when(phase >= STRETCH)
    def _():
        @pl.when((word & SAVES) > 0)
        def _():
            own.d_now[...] += own.d_prompt[...]
            own.d_prompt[...] = jnp.zeros_like(own.d_prompt)

        pl.when(used)(lambda: _turned(call, own, place))

        @pl.when(start == PROMPT)
        def _():
            own.d_prompt[...] += own.d_now[...]

        @pl.when(start == GIVEN)
        def _():
            own.d_given[0] += own.d_now[...]

        @pl.when(start > 0)
        def _():
            own.d_now[...] = jnp.zeros_like(own.d_now)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        own.d_given[0] += own.d_now[...]


def _again(call: Call, own: _Own, place) -> None:
    """Runs a chunk forward without its output; keeps what its gradients need."""
    acc, marks = own.now.dtype, marks_of(own.gates.shape[-1])
    for i, values in call.heads():
        keys = own.k[0, i, 0].astype(acc)
        similar = dot(keys, keys, 1, 1) if call.delta else None
        for j in values:
            one = gates_of(own.gates[0, j, 0], marks)
            solved = solved_of(call.delta, one, similar, marks, own.spread)
            recalled = dot(keys, own.now[j], 1, 0) if call.delta else None
            update = update_of(call.delta, one, own.v[0, j, 0].astype(acc), recalled, solved)
            own.updates[place, j] = update
            if call.delta:
                own.inverses[place, j] = solved
            own.now[j] = one.end * own.now[j] + dot(one.left * keys, update, 0, 0)


def _turned(call: Call, own: _Own, place) -> None:
    """Runs a chunk backward."""
    acc, marks = own.now.dtype, marks_of(own.gates.shape[-1])
    for i, values in call.heads():
        keys = own.k[0, i, 0].astype(acc)
        asked = asked_for(call.delta, own.q[0, i, 0].astype(acc), keys)
        products = dot(asked, keys, 1, 1)
        d_asked, d_products, d_keys = jnp.zeros_like(asked), jnp.zeros_like(products), jnp.zeros_like(keys)
        for j in values:
            found = gradients_of(
                call.delta, gates_of(own.gates[0, j, 0], marks), marks, asked, keys, own.v[0, j, 0].astype(acc),
                products, own.states[place, j], own.inverses[place, j], own.updates[place, j],
                own.d_out[0, j, 0].astype(acc), own.d_now[j])
            d_asked += found.asked
            d_keys += found.keys
            d_products += found.products
            own.d_v[0, j, 0] = found.v.astype(own.d_v.dtype)
            own.d_gates[0, j, 0] = found.gates
            own.d_now[j] = found.state
        d_queries, d_recalled = halves(call.delta, d_asked + dot(d_products, keys, 1, 0))
        d_keys += dot(d_products, asked, 0, 0)
        own.d_q[0, i, 0] = d_queries
        own.d_k[0, i, 0] = d_keys + d_recalled if call.delta else d_keys
