"""`attention` for one query per row: two plain batched matrix products on the cache as it lies in memory.

Keys stay [S, G * K]: the queries of group g become rows of width G * K that are zero outside g's block. That costs G
times the multiplications of the grouped einsum and saves the transposed copy of the cache that its two batch
dimensions ask for; decoding is bound by reading the cache (2 cores, 128 slots x 128 positions, 2 groups of 64: 9 ms
for 4 layers, 21 ms for the einsum).

Legend: B rows, S keys per row, H query heads, G key-value heads, R = H / G, K head size.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.attention.reference import hidden_score, visible


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
              q_prefixes_BxL, *, window, softcap, scale, chosen=True):
    """See api.attention. Raises NotImplementedError for more than one query per row."""
    del chosen
    batch, length, heads, size = q_BxLxHxK.shape
    keys, groups = k_BxSxGxK.shape[1:3]
    if length != 1:
        raise NotImplementedError(f"{length} queries per row")
    acc = jnp.promote_types(q_BxLxHxK.dtype, jnp.float32)
    q = q_BxLxHxK.reshape(batch, groups, heads // groups, 1, size)
    own = jnp.eye(groups, dtype=bool)[:, None, :, None]
    q_BxHxGK = jnp.where(own, q, 0).reshape(batch, heads, groups * size)
    k_BxSxGK, v_BxSxGK = (x.reshape(batch, keys, groups * size) for x in (k_BxSxGxK, v_BxSxGxK))

    scores = jnp.einsum("bhk,bsk->bhs", q_BxHxGK, k_BxSxGK, preferred_element_type=acc) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = visible(q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, window)
    scores = jnp.where(mask, scores, hidden_score(acc))
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(v_BxSxGxK.dtype)
    out = jnp.einsum("bhs,bsk->bhk", weights, v_BxSxGK, preferred_element_type=acc)
    out = out.reshape(batch, groups, heads // groups, groups, size)
    out = jnp.stack([out[:, g, :, g] for g in range(groups)], axis=1)
    return out.astype(v_BxSxGxK.dtype).reshape(batch, 1, heads, size)
