"""The truth for `attention`: all scores at once, grouped einsum without repeating keys or values.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, R = H / G, K head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Ids(NamedTuple):
    """The ids, all int32, that decide which query sees which key; see api.attention. B may be 1 for all rows.

    Positions count within the sequence. Segment 0 is padding; without segments all tokens are one. A prefix is a second
    segment that a query sees, 0 = none. A reach is the last position that a query sees; None = its own."""

    q_positions: jax.Array                # [B, L]
    k_positions: jax.Array                # [B, S]
    q_segments: jax.Array | None = None   # [B, L]
    k_segments: jax.Array | None = None   # [B, S]
    q_prefixes: jax.Array | None = None   # [B, L]
    q_reach: jax.Array | None = None      # [B, L]


def hidden_score(dtype):
    """Returns the score of a hidden key: half of the lowest number of `dtype`, so that a query that sees no key stays
    finite."""
    return jnp.finfo(dtype).min / 2


def visible(ids: Ids, window):
    """Returns the mask of api.attention, bool [B, L, S]: True where the query sees the key. More leading axes
    broadcast.

    It sees keys up to its position (or reach), less than `window` positions before it, of its segment or its prefix.
    Padding (segment 0) is no exception here: a padding query sees the padding keys before it.

    Args:
      ids: Ids, int32; if either side has no segments, all tokens are one segment.
      window: positions that a query sees, itself included; 0 = all."""
    q_pos, k_pos = ids.q_positions[..., :, None], ids.k_positions[..., None, :]
    mask = k_pos <= (q_pos if ids.q_reach is None else ids.q_reach[..., :, None])
    if window:
        mask &= q_pos - k_pos < window
    if ids.q_segments is not None and ids.k_segments is not None:
        k_seg = ids.k_segments[..., None, :]
        same = k_seg == ids.q_segments[..., :, None]
        if ids.q_prefixes is not None:
            prefix = ids.q_prefixes[..., :, None]
            same |= (k_seg == prefix) & (prefix != 0)
        mask &= same
    return mask


def capped_scores(q_BxLxGxRxK, k_BxSxGxK, mask_BxLxS, softcap, scale):
    """Returns the masked scores softcap(scale * q.k) [B, G, R, L, S] in fp32 or better; hidden keys get hidden_score.

    Args:
      q_BxLxGxRxK: queries, R query heads per key-value head. k_BxSxGxK: keys.
      mask_BxLxS: bool, True where the query sees the key, as `visible` returns it.
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none. scale: factor on the scores."""
    acc = jnp.promote_types(q_BxLxGxRxK.dtype, jnp.float32)
    scores = jnp.einsum("blgrk,bsgk->bgrls", q_BxLxGxRxK, k_BxSxGxK, preferred_element_type=acc) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(mask_BxLxS[:, None, None], scores, hidden_score(acc))


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, *, window, softcap, scale, chosen=True,
              sinks=None):
    """Computes api.attention with all scores at once; returns out [B, L, H, K] in v's dtype. Memory grows with L * S.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK: queries, keys and values; head h reads key-value head h // (H / G).
      ids: Ids, positions and segments, as `api.ids_of` returns them.
      window: positions that a query sees, itself included; 0 = all.
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none. scale: factor on the scores, a number.
      chosen: not read.
      sinks: [H], a score per head of a key that every query sees and that has no value; None = none."""
    del chosen
    scores, groups = _scores(q_BxLxHxK, k_BxSxGxK, ids, window, softcap, scale), k_BxSxGxK.shape[2]
    top = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
    else:
        sink = sinks.reshape(1, groups, -1, 1, 1).astype(scores.dtype)
        top = jnp.maximum(top, sink)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top)
    return _weighted(weights / total, v_BxSxGxK)


def _scores(q_BxLxHxK, k_BxSxGxK, ids: Ids, window, softcap, scale):
    """Returns [B, G, R, L, S], see capped_scores."""
    batch, length, heads, size = q_BxLxHxK.shape
    groups = k_BxSxGxK.shape[2]
    q = q_BxLxHxK.reshape(batch, length, groups, heads // groups, size)
    return capped_scores(q, k_BxSxGxK, visible(ids, window), softcap, scale)


def _weighted(weights_BxGxRxLxS, v_BxSxGxK):
    acc = jnp.promote_types(v_BxSxGxK.dtype, jnp.float32)
    weights = weights_BxGxRxLxS.astype(v_BxSxGxK.dtype)
    out = jnp.einsum("bgrls,bsgk->blgrk", weights, v_BxSxGxK, preferred_element_type=acc)
    return out.astype(v_BxSxGxK.dtype).reshape(*out.shape[:2], -1, out.shape[-1])


def forward_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, *, window, softcap, scale):
    """Returns (out [B, L, H, K] in v's dtype, lse [B, L, H] in fp32 or better) of attention to one part of a row's
    keys.

    lse is the natural logarithm of the softmax's sum over that part, -inf where a query sees no key of it; `out` means
    nothing there.

    Args:
      q, k, v: k and v of the part. ids: Ids of the queries [B, L] and of the part's keys [B, S].
      work: not read.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores."""
    del work
    scores = _scores(q_BxLxHxK, k_BxSxGxK, ids, window, softcap, scale)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    lse = jnp.where(top > hidden_score(scores.dtype) / 2, top + jnp.log(total), -jnp.inf)[..., 0]
    return _weighted(weights / total, v_BxSxGxK), lse.transpose(0, 3, 1, 2).reshape(q_BxLxHxK.shape[:3])


def gradients_of_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, out_BxLxHxK, lse_BxLxH, g_BxLxHxK, *, window,
                      softcap, scale):
    """Returns what one part of a row's keys adds to the gradients: q's [B, L, H, K], k's and v's [B, S, G, K], in their
    dtypes.

    With weights P = exp(score - lse), they are those of sum(g * P v) - sum(delta * P), where lse and delta = sum(g *
    out) are constants.

    Args:
      q, k, v: k and v of the part. ids: Ids of the queries [B, L] and of the part's keys [B, S]. work: not read.
      out_BxLxHxK, lse_BxLxH: of the whole row, all parts merged; lse natural logarithms, -inf where a query sees no
        key.
      g_BxLxHxK: cotangent of out.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores."""
    del work
    groups, acc = k_BxSxGxK.shape[2], lse_BxLxH.dtype

    def by_group(x_BxLxH):
        return x_BxLxH.reshape(*x_BxLxH.shape[:2], groups, -1).transpose(0, 2, 3, 1)[..., None]

    delta = by_group(jnp.sum(g_BxLxHxK.astype(acc) * out_BxLxHxK.astype(acc), axis=-1))
    lse = by_group(jnp.where(jnp.isneginf(lse_BxLxH), 0.0, lse_BxLxH))

    def total(q, k, v):
        weights = jnp.exp(_scores(q, k, ids, window, softcap, scale) - lse)
        return jnp.sum(g_BxLxHxK.astype(acc) * _weighted(weights, v).astype(acc)) - jnp.sum(delta * weights)

    return jax.grad(total, (0, 1, 2))(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK)
