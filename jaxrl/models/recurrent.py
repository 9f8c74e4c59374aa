"""The gated delta rule as a mixer (Gated DeltaNet, arXiv 2412.06464, figure 1): a short convolution over queries, keys
and values, kernels.recurrence, and a gated norm of its output.

Legend: B rows, L tokens per row, D hidden size, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

import itertools
import math
import zlib

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence import convolution, recurrence
from jaxrl.models.placement import by_rows_and_heads, gathered

EPS = 1e-6           # of the length of queries and keys
RATES = (1e-2, 16.0)  # between which decay rates begin


def initial_rates(key, entry):
    """The log of rates drawn evenly between RATES, fp32; the same for scanned and unrolled layers."""
    draw = lambda name: jax.random.uniform(  # noqa: E731
        jax.random.fold_in(key, zlib.crc32(name.encode())), entry.kind[0], jnp.float32, *RATES)
    return jnp.log(jnp.stack([draw(name) for name in entry.hf_names]).reshape(entry.shape))


def gated_delta(own, layer, implementation: str, x_BxLxD, shared, cache, index):
    """A mixer, see models.feed_forward.Part. Padding is not read."""
    del layer, implementation, index
    if cache is not None:
        raise NotImplementedError("recurrent layers against a cache")
    tokens = tuple(own.linears("recurrent", x_BxLxD, "query", "key", "value"))
    tokens += tuple(own.linear(f"recurrent/{name}", x_BxLxD) for name in ("decay", "beta"))
    of_heads = tuple(_parameter(own, f"{name}_taps/weight", x_BxLxD.dtype) for name in ("query", "key", "value"))
    of_heads += tuple(_parameter(own, name, _wide(x_BxLxD.dtype)) for name in ("rate", "shift"))
    out = by_rows_and_heads(_rule, own.config.linear_key_heads, shared.chunks, tokens, of_heads)
    return own.linear("recurrent/out", _gated_norm(own, out, own.linear("recurrent/gate", x_BxLxD))), {}


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _parameter(own, name: str, dtype):
    path = f"recurrent/{name}"
    return gathered(own.values[path], own.rows[path].axes, dtype)


def _rule(chunks, tokens, of_heads):
    """[B, L, G, V] of queries, keys and values before the convolution, decay and beta before their gates."""
    (q, k, v, decay, beta), (q_taps, k_taps, v_taps, rate, shift) = tokens, of_heads
    q, k, v = _convolved((q, k, v), (q_taps, k_taps, v_taps), chunks)
    g, beta = gates(decay, beta, rate, shift)
    return recurrence(unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, beta, chunks)[0]


def _convolved(arrays, taps, chunks):
    """silu of the convolution of each [B, L, heads, size] with its taps [heads, size, T], as one over all channels."""
    joined = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in arrays], axis=2)
    weight = jnp.concatenate([w.reshape(-1, w.shape[-1]) for w in taps])
    ends = list(itertools.accumulate(math.prod(x.shape[2:]) for x in arrays))
    parts = jnp.split(jax.nn.silu(convolution(joined, weight, chunks)), ends[:-1], axis=2)
    return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]


def gates(decay_BxLxG, beta_BxLxG, rate_G, shift_G):
    """(log of the decay, at most 0; share that is written), in fp32 or better."""
    acc, wide = rate_G.dtype, lambda x: jax.lax.broadcast_to_rank(x, decay_BxLxG.ndim)
    decay = jax.nn.softplus(decay_BxLxG.astype(acc) + wide(shift_G))
    return -jnp.exp(wide(rate_G)) * decay, jax.nn.sigmoid(beta_BxLxG.astype(acc))


def unit(x):
    """x divided by its length over the last axis, in fp32 or better."""
    x = x.astype(_wide(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def _gated_norm(own, x, gate):
    """RMS norm of each value head, times its scale (without the model's norm_offset) and silu(gate)."""
    acc = _wide(x.dtype)
    scale = jax.lax.broadcast_to_rank(own.values["recurrent/norm/scale"].astype(acc), x.ndim)
    y = x.astype(acc)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + own.config.norm_eps)
    return (y * scale * jax.nn.silu(gate.astype(acc))).astype(x.dtype)
