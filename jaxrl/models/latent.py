"""Attention over latents (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are expanded
from few numbers of a token, and a part of every key, the one that turns, is the same for all heads.

Packed rows and prompts expand them; values are filled up to a key's width, or keys to a value's. Against a cache, which
holds the latents alone, queries are brought to them instead (all heads read one "key" of R + T numbers, whose first R
are the "value"), and what was read is expanded.

Legend: B rows, L tokens per row, D hidden size, H heads, R latent size, N and T a key's dimensions that stand and that
turn, V a value's.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.models.placement import extended_attention, gathered, sharded_attention, sharded_cached_attention, write
from jaxrl.models.rope import rotate

EPS = 1e-6  # of the latents' norms, whatever the layers' is


def attention(own, layer, implementation: str, x_BxLxD, shared, cache, index):
    """Computes attention over latents (the module's docstring explains it); a mixer, see models.feed_forward.Part.

    Args:
      own, layer: decoder.Weights and Layer. implementation: of kernels.attention.
      x_BxLxD: normed hidden states.
      shared: decoder.Shared.
      cache: {"latent": [S, C, R + T]}, or [N, S, C, R + T] with `index` of the repetition; None = packed rows.
      index: int scalar or None.

    Returns (y [B, L, D] in x's dtype; {"latent": the rows' [B, L, R + T], or the cache with the new tokens written}).
    """
    cfg = own.config
    rotation = shared.rotations[cfg.ropes.index(layer.rope)]
    turn = lambda x: rotate(x, rotation, cfg.rope_interleaved)  # noqa: E731
    stands, turns = jnp.split(_queries(own, x_BxLxD), [cfg.head_dim - cfg.rotary_size], axis=-1)
    turns = turn(turns)
    latent, key = jnp.split(own.linear("attention/latent", x_BxLxD), [cfg.latent_size], axis=-1)
    latent, key = own.norm("attention/latent_norm", latent, EPS), turn(key[:, :, None])
    now = jnp.concatenate([latent, key[:, :, 0]], axis=-1)
    options = dict(window=layer.window, softcap=cfg.attention_softcap, scale=cfg.query_scale,
                   implementation=implementation, work=shared.work[layer.window])
    positions, segments = shared.positions, shared.segments
    if cache is None:
        k, v = jnp.split(own.linear("attention/expand", latent), [cfg.head_dim - cfg.rotary_size], axis=-1)
        k = jnp.concatenate([k, jnp.broadcast_to(key, (*k.shape[:3], cfg.rotary_size))], axis=-1)
        q, k, v = (_wide(x, cfg.row_head_size) for x in (jnp.concatenate([stands, turns], axis=-1), k, v))
        out = sharded_attention(q, k, v, positions, positions, segments, segments, shared.prefixes, **options)
        return own.linear("attention/out", out[..., :cfg.value_width]), {"latent": now}
    written = write(cache["latent"], now[:, :, None], positions, index)
    of_keys, of_values = jnp.split(_expansion(own, x_BxLxD.dtype), [cfg.head_dim - cfg.rotary_size], axis=-1)
    q = jnp.concatenate([jnp.einsum("blhn,rhn->blhr", stands, of_keys), turns], axis=-1)
    attend = sharded_cached_attention if positions.shape[1] == 1 else extended_attention
    read = attend(q, written, written, positions, index, **options)[..., :cfg.latent_size]
    return own.linear("attention/out", jnp.einsum("blhr,rhv->blhv", read, of_values)), {"latent": written}


def _queries(own, x):
    """Returns the queries [B, L, H, N + T], from latents of their own if the model has them."""
    if not own.config.query_rank:
        return own.linear("attention/query", x)
    few = own.norm("attention/query_norm", own.linear("attention/query_down", x), EPS)
    return own.linear("attention/query_up", few)


def _expansion(own, dtype):
    """Returns [R, H, N + V] of the linear map "attention/expand", including adapters."""
    row, values = own.rows["attention/expand/kernel"], own.values
    if "attention/expand/kernel" in values and "attention/expand/lora/a" not in values:
        return gathered(values["attention/expand/kernel"], row.axes, dtype)
    return own.linear("attention/expand", jnp.eye(own.config.latent_size, dtype=dtype))


def _wide(x, size: int):
    return jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]) if x.shape[-1] < size else x
