"""The truth for `cached_attention`: that of packed rows, over the cache's positions.

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.attention.packed import reference


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale,
              sinks=None):
    """Computes api.cached_attention with full scores (memory: B * H * C); returns out [B, 1, H, K] in q's dtype.

    Args:
      q_Bx1xHxK: queries. k_NxBxCxGK, v_NxBxCxGK: the cache of N layers, rounded to q's dtype here.
      positions_Bx1: int position of each query, which sees the entries up to it. layer: int scalar, which is read.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores, a number. sinks: [H] scores of keys without a value, or None."""
    batch, _, _, size = q_Bx1xHxK.shape
    k, v = (x[layer].astype(q_Bx1xHxK.dtype).reshape(batch, x.shape[2], -1, size) for x in (k_NxBxCxGK, v_NxBxCxGK))
    ids = reference.Ids(positions_Bx1, jnp.arange(k.shape[1], dtype=positions_Bx1.dtype)[None])
    return reference.attention(q_Bx1xHxK, k, v, ids, window=window, softcap=softcap, scale=scale, sinks=sinks)
