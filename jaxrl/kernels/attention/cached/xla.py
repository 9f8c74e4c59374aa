"""`cached_attention` in XLA: two plain batched matrix products on the cache as it lies in memory.

Keys stay [C, G * K]: the queries of group g become rows of width G * K that are zero outside g's block. That costs G
times the multiplications of the grouped einsum and saves the transposed copy of the cache that its two batch
dimensions ask for; decoding is bound by reading the cache. Scores are [C, H], keys on the left: XLA for CPUs packs the
right operand of a product anew, which would be the cache (2 cores, 128 slots x 576 positions, 2 groups of 64, scores of
a layer: 4.8 ms this way, 24 ms with the keys on the right, 21 ms by the grouped einsum).

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, R = H / G, K head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention.packed.reference import Ids, hidden_score, visible


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale,
              sinks=None):
    """Computes api.cached_attention in XLA, reading the cache in its layout; returns out [B, 1, H, K] in q's dtype.

    Scores are [B, C, H], in fp32 or better.

    Args:
      q_Bx1xHxK: queries. k_NxBxCxGK, v_NxBxCxGK: the cache of N layers, rounded to q's dtype here.
      positions_Bx1: int position of each query, which sees the entries up to it. layer: int scalar, which is read.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores, a number. sinks: [H] scores of keys without a value, or None."""
    batch, _, heads, size = q_Bx1xHxK.shape
    k_BxCxGK, v_BxCxGK = (x[layer].astype(q_Bx1xHxK.dtype) for x in (k_NxBxCxGK, v_NxBxCxGK))
    groups = k_BxCxGK.shape[2] // size
    acc = jnp.promote_types(q_Bx1xHxK.dtype, jnp.float32)
    q_BxHxGK = by_group(q_Bx1xHxK[:, 0], groups)
    scores = jnp.einsum("bsk,bhk->bsh", k_BxCxGK, q_BxHxGK, preferred_element_type=acc) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = visible(Ids(positions_Bx1, jnp.arange(k_BxCxGK.shape[1], dtype=positions_Bx1.dtype)[None]), window)
    scores = jnp.where(mask.swapaxes(1, 2), scores, hidden_score(acc))
    top = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        sinks = jax.lax.broadcast_to_rank(sinks.astype(acc), 3)
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    weights = (weights / total).astype(v_BxCxGK.dtype)
    out = jnp.einsum("bsh,bsk->bhk", weights, v_BxCxGK, preferred_element_type=acc)
    return own_group(out, groups).astype(v_BxCxGK.dtype)[:, None]


def by_group(q_BxHxK, groups):
    """Returns [B, H, G * K]: each head's query [B, H, K] in its group's part of the width, 0 elsewhere."""
    batch, heads, size = q_BxHxK.shape
    q = q_BxHxK.reshape(batch, groups, heads // groups, 1, size)
    own = jnp.eye(groups, dtype=bool)[:, None, :, None]
    return jnp.where(own, q, 0).reshape(batch, heads, groups * size)


def own_group(out_BxHxGK, groups):
    """Returns [B, H, K]: of each head's row [B, H, G * K] its group's part; the inverse of `by_group`."""
    batch, heads, width = out_BxHxGK.shape
    out = out_BxHxGK.reshape(batch, groups, heads // groups, groups, width // groups)
    return jnp.stack([out[:, g, :, g] for g in range(groups)], axis=1).reshape(batch, heads, width // groups)
