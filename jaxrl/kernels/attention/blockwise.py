"""`attention` over blocks of queries, each recomputed in the backward pass: memory is linear in the row length.

At most BLOCK x S scores exist at once in either pass.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size, N blocks, C queries
per block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import reference

BLOCK = 256
WORTH_IT = 2048  # queries from which `auto` prefers this to the reference


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
              q_prefixes_BxL, *, window, softcap, scale, chosen=True):
    """See api.attention. Without `chosen`, short rows are left to the reference (NotImplementedError)."""
    length = q_BxLxHxK.shape[1]
    if not chosen and length < WORTH_IT:
        raise NotImplementedError(f"{length} queries: the reference is faster")

    def block(queries):
        q, positions, segments, prefixes = queries
        return reference.attention(q, k_BxSxGxK, v_BxSxGxK, positions, k_positions_BxS, segments, k_segments_BxS,
                                   prefixes, window=window, softcap=softcap, scale=scale)

    positions = jnp.broadcast_to(q_positions_BxL, q_BxLxHxK.shape[:2])
    queries = (q_BxLxHxK, positions, q_segments_BxL, q_prefixes_BxL)
    out_NxBxCxHxK = jax.lax.map(jax.checkpoint(block), jax.tree.map(_blocks, queries))
    out = jnp.moveaxis(out_NxBxCxHxK, 0, 1).reshape(q_BxLxHxK.shape[0], -1, *q_BxLxHxK.shape[2:])
    return out[:, :length]


def _blocks(x):
    """[B, L, ...] -> [N, B, C, ...], zero-padded at the end (padded queries are cut off again)."""
    size = min(BLOCK, x.shape[1])
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)
