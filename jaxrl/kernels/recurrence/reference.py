"""The truth for `recurrence`: one token after another.

Legend: B rows, L tokens per row, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence.chunks import GIVEN, PROMPT, ZERO, Chunks

EXACT = jax.lax.Precision.HIGHEST


def step(q_BxHxK, k_BxHxK, v_BxGxV, g_BxG, beta_BxG, state_BxGxKxV, delta: bool = True):
    """Computes one token of each row: returns (out [B, G, V] in v's dtype, the state after it [B, G, K, V]).

    The rule is api.recurrence's: S <- exp(g) S; S <- S + k (beta (v - k S))^T; out = q S; without `delta`, v stands for
    v - k S.

    Args:
      q_BxHxK, k_BxHxK: queries and keys; value head i reads key head i // (G / H). v_BxGxV: values.
      g_BxG: log of the decay, at most 0. beta_BxG: factor on what is written.
      state_BxGxKxV: the state before the token; all is computed, and the state returned, in its dtype."""
    acc, repeats = state_BxGxKxV.dtype, v_BxGxV.shape[1] // k_BxHxK.shape[1]
    q, k = (jnp.repeat(x.astype(acc), repeats, axis=1) for x in (q_BxHxK, k_BxHxK))
    state = state_BxGxKxV * jnp.exp(g_BxG.astype(acc))[..., None, None]
    value = v_BxGxV.astype(acc)
    if delta:
        value = value - jnp.einsum("bgk,bgkv->bgv", k, state, precision=EXACT)
    written = beta_BxG.astype(acc)[..., None] * value
    state = state + k[..., None] * written[..., None, :]
    return jnp.einsum("bgk,bgkv->bgv", q, state, precision=EXACT).astype(v_BxGxV.dtype), state


def recurrence(q, k, v, g, beta, chunks: Chunks, state=None, *, delta: bool = True):
    """Computes api.recurrence token by token: returns (out [B, L, G, V] in v's dtype, the last state [B, G, K, V]).

    The state is fp32 or better. Padding has output 0; rows whose chunks do not fit are NaN.

    Args:
      q, k: [B, L, H, K]. v: [B, L, G, V]. g, beta: [B, L, G], log of the decay and factor on what is written.
      chunks: of chunks_of, for these rows. state: [B, G, K, V], where rows that continue begin; None = zeros.
      delta: whether what the state returns for a token's key is taken off before its value is written."""
    acc = jnp.promote_types(v.dtype, jnp.float32)
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    given = jnp.zeros(shape, acc) if state is None else state.astype(acc)
    of_rows = lambda x, like: x.reshape(-1, *(1,) * (like.ndim - 1))  # noqa: E731

    def token(carry, given_of):
        now, prompt = carry
        arrays, begins, real, enters, saves = given_of
        start = of_rows(begins, now)
        start = jnp.select([start == ZERO, start == PROMPT, start == GIVEN], [jnp.zeros_like(now), prompt, given], now)
        arrays = [jnp.where(of_rows(real, x), x, 0) for x in arrays]
        out, after = step(*arrays, start, delta)
        now = jnp.where(of_rows(real & enters, now), after, jnp.where(of_rows(real, now), start, now))
        return (now, jnp.where(of_rows(saves, now), now, prompt)), jnp.where(of_rows(real, out), out, 0)

    saves = jnp.take_along_axis(chunks.saves, jnp.minimum(chunks.chunk, chunks.saves.shape[1] - 1), axis=1)
    by_token = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    flags = [jnp.moveaxis(x, 1, 0) for x in (chunks.begins, chunks.real, chunks.enters, saves & chunks.real)]
    (now, _), out = jax.lax.scan(token, (given, jnp.zeros_like(given)), (by_token, *flags))
    bad = lambda x: jnp.where(of_rows(chunks.fits, x), x, jnp.nan)  # noqa: E731
    return bad(jnp.moveaxis(out, 0, 1)), bad(now)
