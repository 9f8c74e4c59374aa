"""`experts` over the blocks of layout.py, chunk after chunk of tokens: what implementations share, and the gradient.

A chunk's buffers hold every routing of its tokens, so memory is static and nothing is dropped; only blocks that hold
rows are computed. The backward pass is a second walk that computes gate and up again and sums the weights' gradients
in fp32 (float64 where inputs are) in the order of chunks. What experts return is gathered and added slot by slot: no
floating-point number is added to memory in an order that devices choose. Where experts lie on several devices, a chunk
is some tokens of each, and goes around once per walk (exchange.py): no device is asked for more because of a routing.

With r a row, t its token, g its gate: h = act(x_t G, x_t U), y_t = sum g (h D). Hence dh = dy_t D^T, dg = sum dh h (the
product h D is not needed), (da, db) = act'(g dh), dx_t = sum da G^T + db U^T, dG += x_t^T da, dU += x_t^T db,
dD += (g h)^T dy_t. Biases of the three products, where there are some, get da, db and g dy_t, and dg that of the third
times dy_t more.

Legend: T tokens, K slots per token, E experts, D hidden size, F an expert's width, n chunks, t tokens of a chunk,
R rows of a chunk's blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.experts.exchange import Exchange
from jaxrl.kernels.experts.layout import Layout, layout
from jaxrl.kernels.low_precision import DEFAULT
from jaxrl.types import custom_vjp


class Implementation(NamedTuple):
    """The functions of an implementation of `experts` that compute the rows of a chunk of tokens.

    forward(call, layout, x_RxD, *weights) -> out_RxD.
    backward(call, layout, x_RxD, dy_RxD, gates_R, weights, sums) -> (dx_RxD, dgates_R, sums).

    weights: gate, up and down, and perhaps a bias of each, or up and down. x and dy are Rows; results are fp32 or
    better, and rows without a slot mean nothing in them. sums: the weights' gradients so far, fp32 or better, to which
    the chunk's are added, or () where nobody asks for them. Where tokens are a single chunk, an implementation with
    `fresh` is given ShapeDtypeStructs of the weights instead, and returns the chunk's own sums, rounded to the weights'
    dtype: nothing is read, and half as much is written. room: bytes that a chunk's rows may take in the backward pass,
    up to which chunks grow; 0: they do not (tuned.chunk).
    """

    forward: Callable
    backward: Callable
    fresh: bool = False
    room: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call: implementation, activation, and how tokens are cut into chunks and rows into
    blocks.

    run: the implementation. activation: (gate, up) -> hidden, or up -> hidden. exchange: moves tokens between devices.
    """

    run: Implementation
    activation: Callable
    block: int              # rows of a block
    chunk: int              # tokens of a chunk, at most; of all devices of the exchange
    exchange: Exchange = Exchange()
    matmul: str = DEFAULT   # scheme of kernels.low_precision


class Rows(NamedTuple):
    """The numbers of tokens, one row per slot: row i is tokens[slots[i] // K], and 0 where it has no slot."""

    tokens: jax.Array  # [t, D]
    slots: jax.Array   # [R], see Layout
    each: int          # K

    def at(self, start, count: int):
        """Returns `count` rows from `start` on, [count, D]."""
        return self._taken(jax.lax.dynamic_slice(self.slots, (start,), (count,)))

    def all(self):
        """Returns [R, D], the row of every slot; 0 where there is none."""
        return self._taken(self.slots)

    def _taken(self, slots):
        token = slots // self.each  # past the last one where there is no slot
        return self.tokens.at[token].get(mode="fill", fill_value=0)


def sorted_out(weights):
    """Splits weights, in the order (gate,) up, down and the biases of the three, if any, into (those of the products
    with x, that of the last product, biases). Without a gate there are no biases."""
    count = min(len(weights), 3) - 1
    return weights[:count], weights[count], weights[count + 1:]


def accumulator(dtype):
    """Returns the dtype of sums of products: fp32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


@custom_vjp(0)
def experts(call: Call, x_TxD, ids_TxK, gates_TxK, *weights):
    """Computes api.experts chunk by chunk of tokens; returns y [T, D] in x's dtype: the sum over a token's slots of
    gate times what the slot's expert returns.

    Where K > E, the outputs of a whole chunk are NaN if its ids repeat within tokens so that they need more rows than
    distinct ids could.

    call: Call. ids_TxK: int32, outside 0 <= id < E = an empty slot, which adds 0. gates_TxK: fp32 or float64. weights:
    (gate [E, D, F],) up [E, D, F], down [E, F, D], then their biases, if any."""
    def one(_, xs):
        x, ids, gates = call.exchange.gathered(*xs)
        lay = layout(call.exchange.own(ids, count), count, call.block)
        out = call.run.forward(call, lay, Rows(x, lay.slots, ids.shape[1]), *weights)
        y = added(lay, gates.astype(out.dtype), out)
        if ids.shape[1] > count:  # ids that repeat within a token may need more rows than there are
            y = jnp.where(lay.used <= lay.experts.size, y, jnp.nan)
        return None, call.exchange.returned(y.astype(x.dtype))

    cut, count = _cut(call, x_TxD), len(weights[0])
    return cut.joined(cut.walk(one, None, (x_TxD, ids_TxK, gates_TxK))[1])


def _forward(call, *arguments):
    """Runs `experts` with symbolic zeros: `perturbed` tells which arguments are differentiated."""
    values = tuple(x.value for x in arguments)
    wanted = any(x.perturbed for x in arguments[3:])  # a pytree without leaves, since it is static
    return experts(call, *values), (values, () if wanted else None)


def _backward(call, saved, dy_TxD):
    (x_TxD, ids_TxK, gates_TxK, *weights), wanted = saved
    acc = accumulator(x_TxD.dtype)

    def one(sums, xs):
        x, ids, gates, dy = call.exchange.gathered(*xs)
        lay, slots = layout(call.exchange.own(ids, len(weights[0])), len(weights[0]), call.block), ids.shape[1]
        own = gates.astype(acc).reshape(-1).at[lay.slots].get(mode="fill", fill_value=0)
        dx, dgates, sums = call.run.backward(call, lay, Rows(x, lay.slots, slots), Rows(dy, lay.slots, slots), own,
                                             weights, sums)
        held = lay.rows < lay.slots.size
        dgates = jnp.where(held, dgates.at[lay.rows].get(mode="clip"), 0).astype(gates.dtype)
        return sums, tuple(map(call.exchange.returned, (added(lay, None, dx).astype(x.dtype), dgates)))

    cut = _cut(call, x_TxD)
    arrays = x_TxD, ids_TxK, gates_TxK, dy_TxD.astype(x_TxD.dtype)
    if wanted is not None and call.run.fresh and cut.count == 1:
        sums, (dx, dgates) = one(tuple(jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights), arrays)
        return dx, None, dgates, *sums
    sums = () if wanted is None else tuple(jnp.zeros(w.shape, acc) for w in weights)
    sums, (dx, dgates) = cut.walk(one, sums, arrays)
    dweights = [s.astype(w.dtype) for s, w in zip(sums, weights, strict=True)] if sums else [None] * len(weights)
    return cut.joined(dx), None, cut.joined(dgates), *dweights


experts.defvjp(_forward, _backward, symbolic_zeros=True)


def added(lay: Layout, gates_txK, out_RxD):
    """Returns [t, D], in out's dtype: for each token the sum of its slots' rows times their gates (None = 1), in the
    order of slots. Empty slots add 0; nothing is divided.

    lay: Layout of t tokens. gates_txK: in out's dtype. out_RxD: what the experts return by row."""
    y = jnp.zeros((lay.rows.shape[0], out_RxD.shape[1]), out_RxD.dtype)
    for k in range(lay.rows.shape[1]):
        rows = lay.rows[:, k]
        own = out_RxD.at[rows].get(mode="clip")
        own = own if gates_txK is None else gates_txK[:, k, None] * own
        y += jnp.where((rows < out_RxD.shape[0])[:, None], own, 0)
    return y


def _cut(call: Call, x_TxD):
    return _Cut(x_TxD.shape[0], max(1, call.chunk // call.exchange.size))


class _Cut(NamedTuple):
    """How tokens are cut into chunks of equal size."""

    tokens: int
    most: int

    @property
    def count(self):
        return -(-self.tokens // self.most)

    @property
    def chunk(self):
        return -(-self.tokens // self.count)

    def walk(self, one, carry, arrays):
        """Returns (carry, results [n, t, ...]) of one(carry, a chunk of each of x, ids, gates, ...), the last chunk
        filled up with tokens whose slots are empty."""
        full = self.count * self.chunk - self.tokens
        fills = (-1 if jnp.issubdtype(a.dtype, jnp.integer) else 0 for a in arrays)
        xs = tuple(jnp.pad(a, [(0, full), (0, 0)], constant_values=fill).reshape(self.count, self.chunk, a.shape[1])
                   for a, fill in zip(arrays, fills, strict=True))
        return jax.lax.scan(one, carry, xs)

    def joined(self, results):
        return results.reshape(-1, results.shape[2])[:self.tokens]
