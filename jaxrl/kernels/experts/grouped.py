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

from jaxrl.kernels.experts.walk import Implementation, accumulator

ROW_SUM = "row sum"  # an output that is summed over its columns
ONES = 128           # columns of ones whose products sum up rows


class Product(NamedTuple):
    """sums[into] += lefts[left] @ weights[right] of the block's expert, or its transpose where `across`."""

    left: int
    right: int
    across: bool
    into: int


class Task(NamedTuple):
    """What one kernel on rows does. after(sums, biases, gates) -> the outputs of a tile of rows and columns, all of
    them arrays of its shape: fp32 sums, the biases of the tile's columns, the gates of its rows.

    outputs: dtypes; ROW_SUM, at most one and the last: fp32, added over columns.
    """

    name: str
    products: tuple[Product, ...]
    after: Callable
    outputs: tuple


class Kernels(NamedTuple):
    """rows(call, layout, task, lefts, weights, biases=(), gates_R=None) -> the outputs [R, O]; a ROW_SUM is [R].

    lefts: [R, I]; weights: [E, I, O], or [E, O, I] of a product across; biases: [E, O]. Rows behind the used blocks
    mean nothing, on either side.

    sums(call, layout, left_RxI, right_RxO, sum_ExIxO) -> sum_ExIxO + the products left^T right of each expert's rows,
    where rows without a slot are 0. fresh: whether it takes a ShapeDtypeStruct for the sum, which then is the products
    alone, in its dtype.
    """

    rows: Callable
    sums: Callable
    fresh: bool = False


def implementation(kernels: Kernels) -> Implementation:
    return Implementation(functools.partial(forward, kernels), functools.partial(backward, kernels), kernels.fresh)


def forward(kernels, call, lay, x, gate, up, down, *biases):
    """See walk.Implementation."""
    dtype, acc = x.tokens.dtype, accumulator(x.tokens.dtype)

    def activated(sums, biases, _):
        return [call.activation(*_raised(sums, biases)).astype(dtype)]

    def raised(sums, biases, _):
        return _raised(sums, biases)

    into = Task("hidden", (Product(0, 0, False, 0), Product(0, 1, False, 1)), activated, (dtype,))
    hidden, = kernels.rows(call, lay, into, (x.all(),), (gate, up), biases[:2])
    out = Task("out", (Product(0, 0, False, 0),), raised, (acc,))
    return kernels.rows(call, lay, out, (hidden,), (down,), biases[2:])[0]


def backward(kernels, call, lay, x, dy, gates_R, weights, sums):
    """See walk.Implementation."""
    dtype, acc = x.tokens.dtype, accumulator(x.tokens.dtype)
    (gate, up, down), biases = weights[:3], weights[3:]
    x_R, dy_R = x.all(), dy.all()

    def derived(sums, biases, gates):
        *inner, d_hidden = sums
        hidden, back = jax.vjp(call.activation, *_raised(inner, biases))
        hidden = hidden.astype(dtype).astype(acc)
        da, db = back(gates * d_hidden)
        return [da.astype(dtype), db.astype(dtype), (gates * hidden).astype(dtype), d_hidden * hidden]

    inner = Task("inner", (Product(0, 0, False, 0), Product(0, 1, False, 1), Product(1, 2, True, 2)), derived,
                 (dtype, dtype, dtype, ROW_SUM))
    da, db, weighed, d_gates = kernels.rows(call, lay, inner, (x_R, dy_R), (gate, up, down), biases[:2], gates_R)
    if biases:
        of_block = biases[2][lay.experts].astype(acc)
        in_blocks = dy_R.astype(acc).reshape(len(of_block), call.block, -1)
        d_gates += jnp.einsum("nbd,nd->nb", in_blocks, of_block, precision="highest").reshape(-1)
    back = Task("dx", (Product(0, 0, True, 0), Product(1, 1, True, 0)), lambda sums, *_: sums, (acc,))
    dx, = kernels.rows(call, lay, back, (da, db), (gate, up))
    if sums:
        pairs = (x_R, da), (x_R, db), (weighed, dy_R)
        added = [kernels.sums(call, lay, *pair, s) for pair, s in zip(pairs, sums[:3], strict=True)]
        ones = jnp.ones((len(x_R), ONES), dtype)
        for d, s in zip((da, db, (gates_R[:, None] * dy_R).astype(dtype)), sums[3:], strict=False):
            fresh = isinstance(s, jax.ShapeDtypeStruct)
            none = jax.ShapeDtypeStruct if kernels.fresh else jnp.zeros
            more = kernels.sums(call, lay, ones, d, none((s.shape[0], ONES, s.shape[1]), acc))[:, 0]
            added.append(more.astype(s.dtype) if fresh else s + more)
        sums = tuple(added)
    return dx, d_gates, sums


def _raised(sums, biases):
    return [s + b for s, b in zip(sums, biases, strict=True)] if biases else list(sums)
