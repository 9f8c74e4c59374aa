"""The truth for `experts`: every token through every expert, then those that it chose. Plain automatic differentiation.

Legend: T tokens, K slots per token, E experts, D hidden size, F an expert's width.
"""

from __future__ import annotations

import jax.numpy as jnp


def experts(x_TxD, ids_TxK, gates_TxK, gate_ExDxF, up_ExDxF, down_ExFxD, activation, exchange):
    """See api.experts. Memory and work grow with T * E."""
    x_TxD, ids_TxK, gates_TxK = exchange.gathered(x_TxD, ids_TxK, gates_TxK)
    ids_TxK = exchange.own(ids_TxK, len(gate_ExDxF))
    count, acc = gate_ExDxF.shape[0], jnp.promote_types(x_TxD.dtype, jnp.float32)
    a, b = (jnp.einsum("td,edf->tef", x_TxD, w, preferred_element_type=acc) for w in (gate_ExDxF, up_ExDxF))
    hidden = activation(a, b).astype(x_TxD.dtype)
    out_TxExD = jnp.einsum("tef,efd->ted", hidden, down_ExFxD, preferred_element_type=acc)
    y = jnp.zeros(x_TxD.shape, acc)
    for k in range(ids_TxK.shape[1]):
        used = (ids_TxK[:, k] >= 0) & (ids_TxK[:, k] < count)
        own = jnp.take_along_axis(out_TxExD, jnp.where(used, ids_TxK[:, k], 0)[:, None, None], axis=1)[:, 0]
        y += jnp.where(used[:, None], gates_TxK[:, k, None].astype(acc) * own, 0)
    return exchange.returned(y.astype(x_TxD.dtype))
