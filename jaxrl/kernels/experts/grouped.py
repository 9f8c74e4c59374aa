"""`experts` by kernels that multiply all blocks of a chunk at once: five of them, whatever the device.

Products that share rows are one kernel, and what follows them (activation, its derivative, gates) happens to a tile
before it is written, so that nothing of a block's width is kept in fp32 but what comes out:

    forward   hidden = act(x G, x U);  out = hidden D
    backward  x G, x U and dy D^T -> da, db, g hidden and, for the gates, the sum of hidden * (dy D^T);
              dx = da G^T + db U^T;  three products of x^T da, x^T db, (g hidden)^T dy, one sum per expert

A device has two kernels for it (see Kernels), which are told what to multiply and what to do with a tile.

Legend: D hidden size, F an expert's width, E experts, R rows of a chunk's blocks, I and O columns in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.experts.walk import Implementation, accumulator, sorted_out

ROW_SUM = "row sum"  # an output that is summed over its columns
ONES = 128           # columns of ones whose products sum up rows


class Product(NamedTuple):
    """One product of a Task: sums[into] += lefts[left] @ weights[right] of the block's expert; across: the weight
    transposed."""

    left: int
    right: int
    across: bool
    into: int


class Task(NamedTuple):
    """The work of one kernel on rows sorted by expert: products, then a function of their sums.

    after(sums, biases, gates) -> the outputs of a tile of rows and columns, all arrays of its shape. Its arguments:
    fp32 sums, the biases of the tile's columns, the gates of its rows.

    outputs: dtypes; ROW_SUM, at most one and the last: fp32, added over columns."""

    name: str
    products: tuple[Product, ...]
    after: Callable
    outputs: tuple


class Kernels(NamedTuple):
    """The two kernels of a device, of which the five of `experts` are made.

    rows(call, layout, task, lefts, weights, biases=(), gates_R=None) -> the outputs [R, O]; a ROW_SUM is [R].

    lefts: [R, I]; weights: [E, I, O], or [E, O, I] of a product across; biases: [E, O]. Rows after the used blocks
    mean nothing, on either side.

    sums(call, layout, left_RxI, right_RxO, sum_ExIxO) -> sum_ExIxO + the products left^T right of each expert's rows,
    where rows without a slot are 0. fresh: whether it takes a ShapeDtypeStruct for the sum, which then is the products
    alone, in its dtype.
    """

    rows: Callable
    sums: Callable
    fresh: bool = False


def implementation(kernels: Kernels) -> Implementation:
    """Returns the walk.Implementation whose passes run these kernels; its `room` is 0."""
    return Implementation(functools.partial(forward, kernels), functools.partial(backward, kernels), kernels.fresh)


def forward(kernels, call, lay, x, *weights):
    """Returns the experts' outputs by row, [R, D] in fp32 or better, with kernels on rows.

    See walk.Implementation. call: walk.Call. lay: Layout. x: walk.Rows of tokens. weights: gate, up and down and their
    biases, as api.experts orders them. Rows without a slot mean nothing."""
    dtype, acc = x.tokens.dtype, accumulator(x.tokens.dtype)
    into, down, biases = sorted_out(weights)

    def activated(sums, biases, _):
        return [call.activation(*_raised(sums, biases)).astype(dtype)]

    def raised(sums, biases, _):
        return _raised(sums, biases)

    inner = Task("hidden", tuple(Product(0, i, False, i) for i in range(len(into))), activated, (dtype,))
    hidden, = kernels.rows(call, lay, inner, (x.all(),), into, biases[:2])
    out = Task("out", (Product(0, 0, False, 0),), raised, (acc,))
    return kernels.rows(call, lay, out, (hidden,), (down,), biases[2:])[0]


def backward(kernels, call, lay, x, dy, gates_R, weights, sums):
    """Returns (dx [R, D], gradients of the gates [R], weights' sums), with kernels on rows.

    See walk.Implementation.

    Args:
      call: walk.Call. lay: Layout. x: walk.Rows of tokens. dy: walk.Rows of the output's cotangents. gates_R: fp32 or
        better.
      weights: gate, up and down and their biases, as api.experts orders them, one tuple.
      sums: the weights' gradients so far, to which the chunk's are added; () = not wanted; ShapeDtypeStructs = the
        chunk's own, in these dtypes (of fresh kernels only)."""
    dtype, acc = x.tokens.dtype, accumulator(x.tokens.dtype)
    into, down, biases = sorted_out(tuple(weights))
    count = len(into)
    x_R, dy_R = x.all(), dy.all()

    def derived(sums, biases, gates):
        *inner, d_hidden = sums
        hidden, back = jax.vjp(call.activation, *_raised(inner, biases))
        hidden = hidden.astype(dtype).astype(acc)
        d_inner = [d.astype(dtype) for d in back(gates * d_hidden)]
        return [*d_inner, (gates * hidden).astype(dtype), d_hidden * hidden]

    inner = Task("inner", (*(Product(0, i, False, i) for i in range(count)), Product(1, count, True, count)), derived,
                 (dtype,) * (count + 1) + (ROW_SUM,))
    *d_inner, weighed, d_gates = kernels.rows(call, lay, inner, (x_R, dy_R), (*into, down), biases[:2], gates_R)
    if biases:
        of_block = biases[2][lay.experts].astype(acc)
        in_blocks = dy_R.astype(acc).reshape(len(of_block), call.block, -1)
        d_gates += jnp.einsum("nbd,nd->nb", in_blocks, of_block, precision="highest").reshape(-1)
    back = Task("dx", tuple(Product(i, i, True, 0) for i in range(count)), lambda sums, *_: sums, (acc,))
    dx, = kernels.rows(call, lay, back, tuple(d_inner), into)
    if sums:
        pairs = *((x_R, d) for d in d_inner), (weighed, dy_R)
        added = [kernels.sums(call, lay, *pair, s) for pair, s in zip(pairs, sums[:count + 1], strict=True)]
        ones = jnp.ones((len(x_R), ONES), dtype)
        for d, s in zip((*d_inner, (gates_R[:, None] * dy_R).astype(dtype)), sums[count + 1:], strict=False):
            fresh = isinstance(s, jax.ShapeDtypeStruct)
            none = jax.ShapeDtypeStruct if kernels.fresh else jnp.zeros
            more = kernels.sums(call, lay, ones, d, none((s.shape[0], ONES, s.shape[1]), acc))[:, 0]
            added.append(more.astype(s.dtype) if fresh else s + more)
        sums = tuple(added)
    return dx, d_gates, sums


def _raised(sums, biases):
    return [s + b for s, b in zip(sums, biases, strict=True)] if biases else list(sums)
