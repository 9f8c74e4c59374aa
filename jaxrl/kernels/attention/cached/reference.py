"""The truth for `cached_attention`: that of packed rows, over the cache's positions.

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.attention.packed import reference


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale,
              sinks=None):
    """Computes api.cached_attention with full scores; same arguments and result. Memory grows with B * H * C."""
    batch, _, _, size = q_Bx1xHxK.shape
    k, v = (x[layer].astype(q_Bx1xHxK.dtype).reshape(batch, x.shape[2], -1, size) for x in (k_NxBxCxGK, v_NxBxCxGK))
    ids = reference.Ids(positions_Bx1, jnp.arange(k.shape[1], dtype=positions_Bx1.dtype)[None])
    return reference.attention(q_Bx1xHxK, k, v, ids, window=window, softcap=softcap, scale=scale, sinks=sinks)
