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
    """One rotary embedding. `kind`: default, linear, dynamic, yarn, llama3 or longrope, or axial: the frequencies of
    half a head twice, for rows and for columns. The other fields are as in HF's configs; attention_factor and
    original_max are longrope's, too.

    `dynamic` is computed as `default`, and `longrope` with its short factors, which holds inside the original window
    alone; `Model.check_length` refuses lengths beyond it, those of longrope only if its long factors differ.
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
    short_factor: tuple[float, ...] = ()   # longrope: of each pair of dimensions, inside the original window
    long_factor: tuple[float, ...] = ()    # and beyond it
    axes: tuple[int, ...] = ()             # of each frequency, which of a token's several positions it reads
    query_beta: float = 0.0                # of `growth`; 0 = none

    @property
    def window(self) -> int:
        """Returns the tokens up to which longrope's short factors hold, if its long ones differ; else 0 (no limit), as
        for every other kind.
        """
        return self.original_max if self.kind == "longrope" and self.short_factor != self.long_factor else 0


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the angle in radians per position for each pair of dimensions: [head_dim / 2] float32. `longrope` has its
    short factors, `dynamic` none (see Rope).
    """
    if rope.kind == "axial":
        return np.tile(frequencies(Rope(theta=rope.theta), head_dim // 2), 2)
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


def _longrope(rope, head_dim, plain):
    return plain / np.asarray(rope.short_factor, np.float32)


_SCALINGS = {
    "default": lambda rope, head_dim, plain: plain,
    "dynamic": lambda rope, head_dim, plain: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
KINDS = {kind: kind for kind in _SCALINGS if kind != "longrope"}  # names in configs -> kinds


def magnitude(rope: Rope) -> float:
    """Returns the factor on cos and sin: 1 except for yarn and longrope.

    There it is rope.attention_factor; if that is None:
    yarn: with m(s) = 0.1 s ln(factor) + 1, m(mscale) / m(mscale_all_dim) where both are given, else m(1);
    longrope: sqrt(1 + ln(factor) / ln(original_max)). Both are 1 for a factor of at most 1.
    """
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max)) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all_dim)
    return _mscale(rope, 1.0)


def score_factor(rope: Rope) -> float:
    """Returns the factor on the scores of attention over latents (DeepSeek-V3): (0.1 mscale_all_dim ln(factor) + 1)^2
    for yarn with mscale_all_dim and a factor above 1, else 1.
    """
    return _mscale(rope, rope.mscale_all_dim) ** 2 if rope.kind == "yarn" and rope.mscale_all_dim else 1.0


def growth(rope: Rope, positions_BxL):
    """Returns [B, L, 1, 1] fp32: what queries are multiplied with, 1 + beta log(1 + floor(position / window)) with the
    window before scaling, rope.original_max (Ministral 3, as Llama 4). beta: rope.query_beta. positions_BxL: int.
    """
    windows = (positions_BxL // rope.original_max).astype(jnp.float32)
    return (1 + rope.query_beta * jnp.log1p(windows))[:, :, None, None]


def _mscale(rope: Rope, mscale: float) -> float:
    return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rotations(rope: Rope, head_dim: int, positions_BxL, dtype):
    """Computes cos and sin of the angles, times `magnitude`, each [B, L, 1, F] in `dtype` (fp32 or better), for
    `rotate`.

    positions_BxL: int, or [B, L, A], of which each frequency reads the one that `rope.axes` names.

    On CPUs a loop over the two halves of F makes them once for all layers: XLA fuses anything less into every use, and
    computes them for every head of every layer, forward and backward.
    """
    def both(given):
        frequencies_F, axes_F = given
        by_axis = axes_F is not None
        at = jnp.take(positions_BxL, axes_F, axis=-1)[:, :, None] if by_axis else positions_BxL[:, :, None, None]
        angles = at.astype(dtype) * jax.lax.broadcast_to_rank(frequencies_F, 4)
        return jnp.cos(angles) * magnitude(rope), jnp.sin(angles) * magnitude(rope)

    found = jnp.asarray(frequencies(rope, head_dim), dtype)
    axes = jnp.asarray(rope.axes, jnp.int32) if positions_BxL.ndim == 3 else None
    if platform() != "cpu" or len(found) % 2:
        return both((found, axes))
    halves = jax.lax.map(both, jax.tree.map(lambda x: x.reshape(2, -1), (found, axes)))
    return jax.tree.map(lambda x: jnp.concatenate([x[0], x[1]], axis=-1), halves)


def rotate(x_BxLxHxK, rotation, interleaved: bool = False):
    """Turns the first 2F dimensions of a head, in pairs (i, i + F) by their angle, in the rotation's dtype; returns x's
    dtype and shape. The others, if any, stay.

    rotation: (cos, sin) of `rotations`. interleaved: in pairs (2i, 2i + 1), which come out at i and i + F.
    """
    cos, sin = rotation
    size = 2 * cos.shape[-1]
    if x_BxLxHxK.shape[-1] > size:
        turned, rest = jnp.split(x_BxLxHxK, [size], axis=-1)
        return jnp.concatenate([rotate(turned, rotation, interleaved), rest], axis=-1)
    x = x_BxLxHxK.astype(cos.dtype)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x_BxLxHxK.dtype)
