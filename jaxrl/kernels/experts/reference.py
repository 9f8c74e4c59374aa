"""The truth for `experts`: every token through every expert, then those that it chose. Plain automatic differentiation.

Legend: T tokens, K slots per token, E experts, D hidden size, F an expert's width.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.low_precision import DEFAULT, contracted


def experts(x_TxD, ids_TxK, gates_TxK, weights, activation, exchange, matmul=DEFAULT):
    """See api.experts. Memory and work grow with T * E."""
    (gate_ExDxF, up_ExDxF, down_ExFxD), biases = weights[:3], weights[3:]
    x_TxD, ids_TxK, gates_TxK = exchange.gathered(x_TxD, ids_TxK, gates_TxK)
    ids_TxK = exchange.own(ids_TxK, len(gate_ExDxF))
    count, acc = gate_ExDxF.shape[0], jnp.promote_types(x_TxD.dtype, jnp.float32)
    biases = biases or [jnp.zeros((count, w.shape[2]), acc) for w in weights[:3]]
    into_gate, into_up, into_out = (b.astype(acc)[None] for b in biases)
    if matmul == DEFAULT:
        a, b = (jnp.einsum("td,edf->tef", x_TxD, w, preferred_element_type=acc) for w in (gate_ExDxF, up_ExDxF))
        hidden = activation(a + into_gate, b + into_up).astype(x_TxD.dtype)
        out_TxExD = jnp.einsum("tef,efd->ted", hidden, down_ExFxD, preferred_element_type=acc)
    else:  # not to be differentiated: rounding has no gradient
        low = lambda x, w: contracted(matmul, x, w, (1,), (0,))  # noqa: E731
        each = [(activation(low(x_TxD, g) + g_b[None], low(x_TxD, u) + u_b[None]).astype(x_TxD.dtype), d)
                for g, u, d, g_b, u_b in zip(*weights[:3], into_gate[0], into_up[0], strict=True)]
        out_TxExD = jnp.stack([low(hidden, d) for hidden, d in each], axis=1)
    out_TxExD += into_out
    y = jnp.zeros(x_TxD.shape, acc)
    for k in range(ids_TxK.shape[1]):
        used = (ids_TxK[:, k] >= 0) & (ids_TxK[:, k] < count)
        own = jnp.take_along_axis(out_TxExD, jnp.where(used, ids_TxK[:, k], 0)[:, None, None], axis=1)[:, 0]
        y += jnp.where(used[:, None], gates_TxK[:, k, None].astype(acc) * own, 0)
    return exchange.returned(y.astype(x_TxD.dtype))
