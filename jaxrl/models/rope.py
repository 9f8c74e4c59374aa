"""Rotary position embedding and its scalings.

Legend: B rows, L tokens per row, H heads, K head size, F = K / 2 frequencies.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.platform import platform


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary embedding. `kind`: default, linear, dynamic, yarn or llama3; the other fields as in HF's configs.

    `dynamic` equals `default` inside the original window; `Model.check_length` refuses lengths beyond it.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0                  # window before scaling (yarn, llama3, dynamic)
    low_freq_factor: float = 1.0           # llama3
    high_freq_factor: float = 4.0          # llama3
    beta_fast: float = 32.0                # yarn
    beta_slow: float = 1.0                 # yarn
    truncate: bool = True                  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float | None = None  # yarn: factor on cos and sin; None = from mscale, else 0.1 ln(factor) + 1
    mscale: float = 0.0                    # yarn
    mscale_all_dim: float = 0.0            # yarn
    query_beta: float = 0.0                # of `growth`; 0 = none


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the angle per position for each pair of dimensions: [F] float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = 1.0 / np.float32(rope.theta) ** exponents
    return _SCALINGS[rope.kind](rope, head_dim, plain).astype(np.float32)


def _linear(rope, head_dim, plain):
    return plain / np.float32(rope.factor)


def _llama3(rope, head_dim, plain):
    """Stretches long wavelengths by `factor`, leaves short ones, interpolates those between (Llama 3.1)."""
    turns = rope.original_max * plain / np.float32(2 * math.pi)  # rotations over the original window
    with np.errstate(divide="ignore", invalid="ignore"):  # equal factors: a step, and nothing is between them
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        stretched = plain / np.float32(rope.factor)
        between = np.where(turns <= rope.high_freq_factor, (1 - blend) * stretched + blend * plain, plain)
    return np.where(turns < rope.low_freq_factor, stretched, between)


def _yarn(rope, head_dim, plain):
    """Computes YaRN (arXiv:2309.00071), "NTK-by-parts": a ramp over dimensions
    between interpolation and extrapolation.
    """
    def dimension(turns):
        return head_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
    ramp = np.clip(ramp, 0.0, 1.0)
    return plain / np.float32(rope.factor) * ramp + plain * (1 - ramp)


_SCALINGS = {
    "default": lambda rope, head_dim, plain: plain,
    "dynamic": lambda rope, head_dim, plain: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
KINDS = tuple(_SCALINGS)


def magnitude(rope: Rope) -> float:
    """Returns the factor on cos and sin: 1 except for yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all_dim)
    return _mscale(rope, 1.0)


def score_factor(rope: Rope) -> float:
    """Returns the factor on the scores of attention over latents (DeepSeek-V3): that of mscale_all_dim, squared."""
    return _mscale(rope, rope.mscale_all_dim) ** 2 if rope.kind == "yarn" and rope.mscale_all_dim else 1.0


def growth(rope: Rope, positions_BxL):
    """Returns [B, L, 1, 1] fp32: what queries are multiplied with, 1 + beta log(1 + floor(position / window)) with the
    window before scaling (Ministral 3, as Llama 4)."""
    windows = (positions_BxL // rope.original_max).astype(jnp.float32)
    return (1 + rope.query_beta * jnp.log1p(windows))[:, :, None, None]


def _mscale(rope: Rope, mscale: float) -> float:
    return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rotations(rope: Rope, head_dim: int, positions_BxL, dtype):
    """Computes cos and sin, each [B, L, 1, F] in `dtype` (fp32 or better), for `rotate`.

    On CPUs a loop over the two halves of F makes them once for all layers: XLA fuses anything less into every use, and
    computes them for every head of every layer, forward and backward.
    """
    def both(frequencies_F):
        angles = positions_BxL[:, :, None, None].astype(dtype) * jax.lax.broadcast_to_rank(frequencies_F, 4)
        return jnp.cos(angles) * magnitude(rope), jnp.sin(angles) * magnitude(rope)

    found = jnp.asarray(frequencies(rope, head_dim), dtype)
    if platform() != "cpu" or len(found) % 2:
        return both(found)
    halves = jax.lax.map(both, found.reshape(2, -1))
    return jax.tree.map(lambda x: jnp.concatenate([x[0], x[1]], axis=-1), halves)


def rotate(x_BxLxHxK, rotation, interleaved: bool = False):
    """Turns the first 2F dimensions of a head, in pairs (i, i + F) by their angle, in the rotation's dtype; returns x's
    dtype. The others, if any, stay. interleaved: all of them, in pairs (2i, 2i + 1), which come out at i and i + F."""
    cos, sin = rotation
    size = 2 * cos.shape[-1]
    if x_BxLxHxK.shape[-1] > size:
        turned, rest = jnp.split(x_BxLxHxK, [size], axis=-1)
        return jnp.concatenate([rotate(turned, rotation), rest], axis=-1)
    x = x_BxLxHxK.astype(cos.dtype)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x_BxLxHxK.dtype)
