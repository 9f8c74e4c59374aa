"""What both ops' TPU kernels share: limits of the chip, matrix products, scores in base 2."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

VMEM = 40 * 2**20       # what a kernel may take; a core has 128 MiB on v5e and v6e, 64 MiB on v5p
WORDS = 1 << 17         # entries of a work list (512 KiB of the 1 MiB of scalar memory)
LOG2E = math.log2(math.e)
HIDDEN = float(jnp.finfo(jnp.float32).min) / 2  # the score of a key that is not seen
LOWEST = HIDDEN / 2  # where running maxima start: 2 ** (HIDDEN - LOWEST) is 0, so what sees nothing sums nothing


def dot(a, b, over_a, over_b, exact):
    """Returns the fp32 product of two matrices, summed over axis over_a of a and over_b of b.

    exact: fp32 inputs are not rounded to bf16."""
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, (((over_a,), (over_b,)), ((), ())), precision=precision,
                               preferred_element_type=jnp.float32)


def masked_scores(products, mask, call):
    """Returns (scores in base 2 of the products q.k, HIDDEN outside the mask; the soft-cap's derivative 1 - tanh^2,
    None without one), both of the products' shape.

    products: q.k in fp32. mask: bool. call: has scale and softcap; the scores are softcap(scale * q.k) * log2(e)."""
    if not call.softcap:
        return jnp.where(mask, products * (call.scale * LOG2E), HIDDEN), None
    bent = jnp.tanh(products * (call.scale / call.softcap))
    return jnp.where(mask, bent * (call.softcap * LOG2E), HIDDEN), 1 - bent * bent
