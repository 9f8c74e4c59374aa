"""The truth for `experts`: every token through every expert, then those that it chose. Plain automatic differentiation.

Legend: T tokens, K slots per token, E experts, D hidden size, F an expert's width.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.experts.walk import sorted_out
from jaxrl.kernels.low_precision import DEFAULT, contracted


def experts(x_TxD, ids_TxK, gates_TxK, weights, activation, exchange, matmul=DEFAULT):
    """Computes api.experts with every expert on every token; returns y [T, D] in x's dtype. Memory and work are T * E.

    Args:
      x_TxD: tokens. ids_TxK: int32; one outside 0 <= id < E is an empty slot, which adds 0. gates_TxK: fp32 or float64.
      weights: gate, up and down and their biases, as api.experts orders them.
      activation: elementwise (gate, up) -> hidden, or up -> hidden without a gate.
      exchange: Exchange, of the experts' mesh axis.
      matmul: scheme of kernels.low_precision; with any but the default it has no gradient."""
    into, down_ExFxD, biases = sorted_out(weights)
    x_TxD, ids_TxK, gates_TxK = exchange.gathered(x_TxD, ids_TxK, gates_TxK)
    ids_TxK = exchange.own(ids_TxK, len(down_ExFxD))
    count, acc = down_ExFxD.shape[0], jnp.promote_types(x_TxD.dtype, jnp.float32)
    biases = biases or [jnp.zeros((count, w.shape[2]), acc) for w in (*into, down_ExFxD)]
    *of_inner, of_out = (b.astype(acc)[None] for b in biases)
    if matmul == DEFAULT:
        inner = (jnp.einsum("td,edf->tef", x_TxD, w, preferred_element_type=acc) for w in into)
        hidden = activation(*(a + b for a, b in zip(inner, of_inner, strict=True))).astype(x_TxD.dtype)
        out_TxExD = jnp.einsum("tef,efd->ted", hidden, down_ExFxD, preferred_element_type=acc)
    else:  # not to be differentiated: rounding has no gradient
        low = lambda x, w: contracted(matmul, x, w, (1,), (0,))  # noqa: E731
        each = [activation(*(low(x_TxD, w[e]) + b[0, e][None] for w, b in zip(into, of_inner, strict=True)))
                for e in range(count)]
        out_TxExD = jnp.stack([low(hidden.astype(x_TxD.dtype), d)
                               for hidden, d in zip(each, down_ExFxD, strict=True)], axis=1)
    out_TxExD += of_out
    y = jnp.zeros(x_TxD.shape, acc)
    for k in range(ids_TxK.shape[1]):
        used = (ids_TxK[:, k] >= 0) & (ids_TxK[:, k] < count)
        own = jnp.take_along_axis(out_TxExD, jnp.where(used, ids_TxK[:, k], 0)[:, None, None], axis=1)[:, 0]
        y += jnp.where(used[:, None], gates_TxK[:, k, None].astype(acc) * own, 0)
    return exchange.returned(y.astype(x_TxD.dtype))
