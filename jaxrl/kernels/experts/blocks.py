"""`experts` in XLA: a loop over the experts that hold rows, and in it over their blocks of rows.

An expert's weights are cut out once per chunk, not once per block (XLA for CPUs copies what it cuts out). All products
have one fixed shape, so that a token's output does not depend on the tokens beside it.

Legend: D hidden size, F an expert's width, R rows of a chunk's blocks, b rows of a block.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from jaxrl.kernels.experts import tuned
from jaxrl.kernels.experts.walk import Implementation, accumulator, sorted_out
from jaxrl.kernels.low_precision import DEFAULT, GRADIENT, INPUT, WEIGHT, contracted


def product(a, b, over_a, over_b, matmul=DEFAULT, role=INPUT):
    """Returns the product of two matrices in fp32 or better, summed over axis over_a of a and over_b of b.

    matmul: scheme of kernels.low_precision that rounds both, a in this role and b as weights."""
    if matmul != DEFAULT:
        return contracted(matmul, a, b, (over_a,), (over_b,), (role, WEIGHT))
    return jax.lax.dot_general(a, b, (((over_a,), (over_b,)), ((), ())), preferred_element_type=accumulator(a.dtype))


def forward(call, lay, x, *weights):
    """Returns the experts' outputs by row, [R, D] in fp32 or better, block by block in XLA.

    See walk.Implementation. call: walk.Call. lay: Layout. x: walk.Rows of tokens. weights: gate, up and down and their
    biases, as api.experts orders them. Rows without a slot mean nothing."""
    def group(expert, blocks, out):
        into, down, biases = sorted_out([_of(w, expert) for w in weights])

        def block(n, out):
            own = x.at(n * call.block, call.block)
            inner = _raised([product(own, w, 1, 0, call.matmul) for w in into], biases[:2])
            hidden = call.activation(*inner).astype(own.dtype)
            y, = _raised([product(hidden, down, 1, 0, call.matmul)], biases[2:])
            return _put(out, y, n * call.block)

        return jax.lax.fori_loop(blocks[0], blocks[1], block, out)

    dtype = accumulator(x.tokens.dtype)
    return _each_expert(lay, group, jnp.zeros((lay.slots.size, x.tokens.shape[1]), dtype))


def backward(call, lay, x, dy, gates_R, weights, sums):
    """Returns (dx [R, D], gradients of the gates [R], weights' sums), block by block in XLA.

    See walk.Implementation.

    Args:
      call: walk.Call. lay: Layout. x: walk.Rows of tokens. dy: walk.Rows of the output's cotangents. gates_R: fp32 or
        better.
      weights: gate, up and down and their biases, as api.experts orders them, one tuple.
      sums: the weights' gradients so far, to which the chunk's are added; () = not wanted."""
    acc, dtype = accumulator(x.tokens.dtype), x.tokens.dtype

    def group(expert, blocks, state):
        into, down, biases = sorted_out([_of(w, expert) for w in weights])
        dx, dgates, sums = state

        def block(n, state):
            dx, dgates, own = state
            start = n * call.block
            x_b, dy_b = x.at(start, call.block), dy.at(start, call.block)
            gates = jax.lax.dynamic_slice(gates_R, (start,), (call.block,))[:, None]
            inner = _raised([product(x_b, w, 1, 0, call.matmul) for w in into], biases[:2])
            hidden, back = jax.vjp(call.activation, *inner)
            hidden = hidden.astype(dtype).astype(acc)
            d_hidden = product(dy_b, down, 1, 1, call.matmul, GRADIENT)
            d_gates = jnp.sum(d_hidden * hidden, axis=1)
            for bias in biases[2:]:
                d_gates += product(dy_b, bias[:, None], 1, 0)[:, 0]
            d_inner = [d.astype(dtype) for d in back(gates * d_hidden)]
            of_x = [product(d, w, 1, 1, call.matmul, GRADIENT) for d, w in zip(d_inner, into, strict=True)]
            dx_b = functools.reduce(operator.add, of_x)
            if own:
                pairs = *((x_b, d) for d in d_inner), ((gates * hidden).astype(dtype), dy_b)
                more = [product(*pair, 0, 0) for pair in pairs]
                more += [jnp.sum(d.astype(acc), axis=0) for d in (*d_inner, gates * dy_b)[:len(biases)]]
                own = tuple(s + m for s, m in zip(own, more, strict=True))
            return _put(dx, dx_b, start), jax.lax.dynamic_update_slice(dgates, d_gates, (start,)), own

        own = tuple(_of(s, expert) for s in sums)
        dx, dgates, own = jax.lax.fori_loop(blocks[0], blocks[1], block, (dx, dgates, own))
        return dx, dgates, tuple(_put(s, o[None], expert) for s, o in zip(sums, own, strict=True))

    start = jnp.zeros((lay.slots.size, x.tokens.shape[1]), acc), jnp.zeros(lay.slots.shape, acc), sums
    return _each_expert(lay, group, start)


BLOCKS = Implementation(forward, backward)


def serving(x_TxD, weights, **_) -> tuple[Implementation, int]:
    """Returns (the implementation in XLA, rows of its blocks); it serves every call. The arguments are
    not read."""
    return BLOCKS, tuned.BLOCK


def _raised(products, biases):
    """Returns products and, where there are some, the biases of their outputs."""
    return [p + b.astype(p.dtype)[None] for p, b in zip(products, biases, strict=True)] if biases else products


def _each_expert(lay, group, state):
    """Runs group(expert, (first block, the one behind its last), state) for every expert that holds rows."""
    def one(carry):
        n, state = carry
        expert = lay.experts[n]
        end = lay.ends[expert]
        return end, group(expert, (n, end), state)

    return jax.lax.while_loop(lambda carry: carry[0] < lay.used, one, (jnp.int32(0), state))[1]


def _of(w_Ex, expert):
    return jax.lax.dynamic_index_in_dim(w_Ex, expert, keepdims=False)


def _put(x, part, at):
    return jax.lax.dynamic_update_slice_in_dim(x, part, at, 0)
