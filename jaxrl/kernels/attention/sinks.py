"""Attention sinks: one number b per query head, which takes part in the softmax as a score does and has no value
(gpt-oss; a learned form of what Xiao et al., arXiv 2309.17453, found). The weight of key j is

    p_j = exp(s_j) / (exp(b) + sum over visible keys of exp(s))

With out and lse, the logarithm of the sum, of attention without it: lse' = log(exp(lse) + exp(b)), out' = out *
exp(lse - lse'). The gradients by queries, keys and values are those without sinks, of out' and lse' in the place of
out and lse: dS = P' (dP - delta'), delta' = sum(dout * out'). That of b, whose value is 0, is -sum over queries of
exp(b - lse') * delta'. So what keeps lse has sinks, and its kernels do not know of them.

The sink is neither scaled nor soft-capped.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

NATURAL = jnp.exp, jnp.logaddexp, 1.0
BASE_2 = jnp.exp2, jnp.logaddexp2, math.log2(math.e)


def of(sinks_H, dtype):
    """Returns the sinks [H] of a call in fp32 or better; None where there are none. dtype: of the queries."""
    return None if sinks_H is None else sinks_H.astype(jnp.promote_types(dtype, jnp.float32))


def share(lse, sinks, base=NATURAL):
    """Returns (factor to multiply the attention's output with, lse that includes the sinks), both of lse's shape.

    Args:
      lse: logarithm of the softmax's sum over the visible keys.
      sinks: natural scores, in a shape that broadcasts over lse from the right.
      base: NATURAL or BASE_2, that of lse; sinks are natural in both."""
    exp, add, unit = base
    both = add(lse, _beside(lse, sinks) * unit)
    return exp(lse - both), both


def gradient(lse, sinks, delta, base=NATURAL):
    """Returns the gradient of the sinks per query, of lse's shape; the caller sums it over queries.

    Args:
      lse: with the sinks, as `share` returns it. sinks: natural scores that broadcast over lse from the right.
      delta: sum(d_out * out) over the head size, of lse's shape; `out` with the sinks.
      base: NATURAL or BASE_2, that of lse."""
    exp, _, unit = base
    return -exp(_beside(lse, sinks) * unit - lse) * delta


def _beside(lse, sinks):
    return jax.lax.broadcast_to_rank(sinks, lse.ndim)
