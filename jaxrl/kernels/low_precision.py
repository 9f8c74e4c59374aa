"""Matrix products of rounded numbers (train.matmul), as a table of schemes.

A scheme rounds both operands of a product to few bits, each number to the nearest code times a scale:

    int8        a scale for each row of the contracted axes: max |x| / 127; codes are integers, their products exact
    fp8         the same with e4m3 codes, max |x| / 448
    fp8_tensor  one scale for an array, as it is now; e4m3, gradients e5m2 (max |x| / 57344)
    fp8_block   e4m3; a scale for 128 contracted numbers, of weights for 128 x 128 (DeepSeek-V3, arXiv 2412.19437, 3.3)
    mxfp8       e4m3; a power of two for 32 contracted numbers (OCP microscaling formats 1.0, section 6.3)
    nvfp4       e2m1; an e4m3 scale for 16 contracted numbers, times one for the array

The scales of whole rows stand outside of the sum, so that the codes themselves are multiplied; those of blocks do not,
and the rounded numbers are multiplied in fp32 (emulation: what the numbers are, not how fast). Sums are in fp32,
float64 where the operands are. Rows that hold an infinity or NaN give NaN.

`by_row`: a row of a product depends on that row of the left operand and on the right one alone, so that what a token
becomes does not depend on the tokens beside it. One scale for an array breaks that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.kernels.platform import platform

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"  # what an operand is
E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
LARGEST = {jnp.int8: 127.0, E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}


class Scheme(NamedTuple):
    """A scheme of train.matmul: how it rounds the operands of a product, and on which platforms codes are multiplied.

    coded(x, over, role) -> (codes, scale): of an operand that is contracted over the axes `over`. role: INPUT, WEIGHT
    or GRADIENT. scale: with axes of size 1 where it is one for all; None where `codes` are the rounded numbers
    themselves.

    by_row: a row of a product depends on that row of the left operand and on the right one alone, so what a token
    becomes does not depend on the tokens beside it. weights: the gradient of weights, whose rows are tokens, is a
    product of codes as well; else it is one of the numbers as they are. native: platforms that multiply such codes."""

    coded: Callable
    by_row: bool = True
    weights: bool = False
    native: tuple[str, ...] = ()


def _over(x, scale):
    """Returns x / scale, 0 where all is 0."""
    return x / jnp.where(scale == 0, 1, scale)


def _rounded(x, kind):
    """Returns the nearest codes of this kind; x is within its range but for rounding."""
    top = LARGEST[kind]
    x = jnp.clip(jnp.round(x) if kind == jnp.int8 else x, -top, top)
    return x.astype(kind)


def _scaled(kinds: dict, rows: bool):
    """Returns a rounding with one scale for each row, or for the array."""
    def coded(x, over, role):
        kind, acc = kinds.get(role, kinds[INPUT]), jnp.promote_types(x.dtype, jnp.float32)
        x = x.astype(acc)
        scale = jnp.max(jnp.abs(x), axis=over if rows else None, keepdims=True) / LARGEST[kind]
        return _rounded(_over(x, scale), kind), scale

    return coded


def _in_blocks(scale_of, kind, size: int, square: bool = False):
    """Returns rounded numbers: the contracted axes are cut into blocks of `size`; those of weights into squares where
    `square`. scale_of(largest of each block, largest of all) -> scale."""
    def coded(x, over, role):
        acc = jnp.promote_types(x.dtype, jnp.float32)
        last = tuple(range(x.ndim - len(over), x.ndim))
        y = jnp.moveaxis(x.astype(acc), over, last)
        shape = y.shape
        y = y.reshape(-1, math.prod(shape[len(shape) - len(over):]))
        rows, columns = y.shape
        high = size if square and role == WEIGHT else 1
        y = jnp.pad(y, [(0, -rows % high), (0, -columns % size)])
        y = y.reshape(y.shape[0] // high, high, -1, size)
        scale = scale_of(jnp.max(jnp.abs(y), axis=(1, 3), keepdims=True), jnp.max(jnp.abs(y)))
        y = _rounded(_over(y, scale), kind).astype(acc) * scale
        y = y.reshape(y.shape[0] * high, -1)[:rows, :columns].reshape(shape)
        return jnp.moveaxis(y, last, over), None

    return coded


def _e4m3_block(block, _):
    return block / LARGEST[E4M3]


def _power_of_two(block, _):
    exponent = jnp.frexp(jnp.where(block > 0, block, 1))[1] - 9  # exact; 2^8 is the largest power of two in e4m3
    scale = jnp.ldexp(jnp.ones_like(block), jnp.clip(exponent, -126, 127))  # exp2 and log2 are not exact everywhere
    return jnp.where(jnp.isfinite(block), scale, jnp.nan)


def _two_levels(block, largest):
    whole = largest / (LARGEST[E2M1] * LARGEST[E4M3])
    return _rounded(_over(block / LARGEST[E2M1], whole), E4M3).astype(block.dtype) * whole


SCHEMES = {
    "int8": Scheme(_scaled({INPUT: jnp.int8}, rows=True), native=("cpu", "gpu", "tpu")),
    "fp8": Scheme(_scaled({INPUT: E4M3}, rows=True), native=("gpu",)),
    "fp8_tensor": Scheme(_scaled({INPUT: E4M3, GRADIENT: E5M2}, rows=False), by_row=False, weights=True,
                         native=("gpu",)),
    "fp8_block": Scheme(_in_blocks(_e4m3_block, E4M3, 128, square=True)),
    "mxfp8": Scheme(_in_blocks(_power_of_two, E4M3, 32)),
    "nvfp4": Scheme(_in_blocks(_two_levels, E2M1, 16), by_row=False),
}
DEFAULT = "default"  # of train.matmul: products of the compute dtype's numbers


def check(name: str, kind: str, emulated: bool) -> None:
    """Raises ConfigError for a scheme whose codes a platform cannot multiply (Scheme.native), unless it is emulated.

    name: a key of SCHEMES, or DEFAULT, which always passes. kind: cpu, gpu or tpu. emulated: train.matmul_emulated."""
    if name != DEFAULT and kind not in SCHEMES[name].native and not emulated:
        there = [other for other, scheme in SCHEMES.items() if kind in scheme.native]
        raise ConfigError(f"train.matmul={name}: jaxrl has no product of such numbers for a {kind}; set train.matmul "
                          f"to {' or '.join(there)}, or train.matmul_emulated=True for the same numbers at the speed "
                          "of fp32")


def sampled(name: str) -> str:
    """Returns the scheme of the embedded sampler for a trainer's: the same, but DEFAULT where a row's result would
    depend on the rows beside it. name: a key of SCHEMES or DEFAULT."""
    return name if name == DEFAULT or SCHEMES[name].by_row else DEFAULT


def contracted(name: str, a, b, over_a: tuple[int, ...], over_b: tuple[int, ...], roles=(INPUT, WEIGHT)):
    """Returns the product of what a scheme rounds two arrays to, summed over axes over_a of a and over_b of b.

    In fp32, or float64 where a is; the axes that are left of a, then those of b, as of jax.lax.dot_general. Where the
    platform does not multiply such codes, their values are multiplied in that dtype. Not to be differentiated: rounding
    has no gradient.

    name: a key of SCHEMES. roles: what a and b are, each INPUT, WEIGHT or GRADIENT."""
    scheme, acc = SCHEMES[name], jnp.promote_types(a.dtype, jnp.float32)
    (a, scale_a), (b, scale_b) = (scheme.coded(x, over, role) for x, over, role in (
        (a, over_a, roles[0]), (b, over_b, roles[1])))
    whole = jnp.issubdtype(a.dtype, jnp.integer)
    if not whole and platform() not in scheme.native:
        a, b = a.astype(acc), b.astype(acc)
    y = jax.lax.dot_general(a, b, ((over_a, over_b), ((), ())), preferred_element_type=jnp.int32 if whole else acc)
    y = y.astype(acc)
    if scale_a is not None:
        scale_a, scale_b = jnp.squeeze(scale_a, over_a), jnp.squeeze(scale_b, over_b)
        y *= jnp.expand_dims(scale_a, tuple(range(scale_a.ndim, y.ndim))) * jax.lax.broadcast_to_rank(scale_b, y.ndim)
    return y
