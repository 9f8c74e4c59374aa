"""Public entry of the op on a key-value cache, and which implementation runs.

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from jaxrl.kernels.attention import sinks
from jaxrl.kernels.attention.cached import gpu, reference, tpu, xla
from jaxrl.kernels.attention.packed import api as packed
from jaxrl.kernels.fallback import first_that_serves, trusted
from jaxrl.kernels.platform import platform

IMPLEMENTATIONS = {"tpu": tpu.attention, "gpu": gpu.attention, "xla": xla.attention, "reference": reference.attention}
WORK = {"tpu": tpu.work_of, "gpu": gpu.work_of}  # see cached_work_of; these read shared prompts once
LEAST = {"tpu": tpu.least_shared, "gpu": gpu.least_shared}
ORDERS = {"cpu": ("xla",), "gpu": ("gpu", "xla"), "tpu": ("tpu", "xla")}


def cached_attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, window=0, softcap=0.0, scale=None,
                     implementation="auto", shared=None, work=None, sinks_H=None):
    """Computes attention of one query per slot over a slotted cache: softmax(softcap(scale * q.k), and the head's sink)
    @ v over the query's own position and those before it. Has no gradient.

    Args:
      q_Bx1xHxK: queries; head h reads key-value head h // (H / G).
      k_NxBxCxGK, v_NxBxCxGK: the cache of N layers, of any float dtype; entry c has position c.
      positions_Bx1: int; a slot at or beyond C is idle and returns a finite value without meaning.
      layer: int scalar, which of the N is read.
      window: number of positions a query sees, itself included; 0 = all (static).
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none (static).
      scale: factor on the scores; None = K ** -0.5 (static).
      implementation: "auto" (the first of the platform's ORDERS that serves the call) or a name; XLA's is tried after a
        kernel that refuses, and runs for an implementation of packed rows that has none for the cache.
      shared: shared.Shared, which slots have the same keys and values up to which position, or None. Its slots that are
        not idle are at or beyond that position. Where there is no window, a kernel reads these keys once per tile; XLA,
        and layers with a window, read every slot's own.
      work: of cached_work_of for the same positions, window, implementation and `shared` (then not read), or None.
      sinks_H: a score per head of a key that every query sees and that has no value (see sinks.py); None = none.

    Returns:
      out_Bx1xHxK in q's dtype; scores and softmax are fp32 or better.

    Raises ValueError for an unknown implementation."""
    scale = q_Bx1xHxK.shape[-1] ** -0.5 if scale is None else scale

    def ask(name):
        known = {}
        if name in WORK:
            known = {"work": work[name]} if work and name in work else {"shared": None if window else shared}
        return IMPLEMENTATIONS[name](q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, window=window,
                                     softcap=softcap, scale=scale, sinks=sinks.of(sinks_H, q_Bx1xHxK.dtype), **known)

    return first_that_serves("attention", order(implementation), ask)


def cached_work_of(positions_Bx1, shape_NxBxCxGK, dtype, heads, size, *, window=0, implementation="auto",
                   shared=None) -> dict:
    """Returns the work of `cached_attention`, the same for all layers of a window: made once per decoding step.

    Args:
      positions_Bx1: int32 positions of the queries; a slot at or beyond C is idle.
      shape_NxBxCxGK, dtype: of the cache's keys. heads, size: query heads H and head size K.
      window: number of positions a query sees, itself included; 0 = all.
      implementation: as the `cached_attention` call's.
      shared: shared.Shared, which slots hold the same prompt, or None; not read where there is a window.

    Returns:
      {name: work} of the first implementation that does not refuse the cache: a pytree of arrays, or None where no
      prompt is read for several slots (gpu, which refuses none here). Empty where the implementation needs none."""
    def ask(name):
        if name not in WORK:
            return {}
        return {name: WORK[name](positions_Bx1, shape_NxBxCxGK, dtype, window=window, heads=heads, size=size,
                                 shared=None if window else shared)}

    return first_that_serves("attention", order(implementation), ask)


def shares_prompts(implementation: str, mesh=None) -> bool:
    """Returns whether the implementation that cached_attention asks first reads `shared`, on the platform of `mesh`
    (None = the one in force). It may still refuse the call; XLA's, which runs then, does not read it."""
    return order(implementation, mesh)[0] in WORK


def least_shared(shape_BxCxGK, dtype, groups: int, implementation: str, mesh=None) -> int:
    """Returns the positions of a prompt from which on cached_attention reads it once for several slots. Where prompts
    are shorter, tiles would cost their part of every layer's result and save nothing.

    Call it only where `shares_prompts` is true: KeyError elsewhere.

    Args:
      shape_BxCxGK, dtype: of a layer's keys. groups: its key-value heads.
      implementation, mesh: as `shares_prompts` was given them."""
    return LEAST[order(implementation, mesh)[0]](shape_BxCxGK, dtype, groups)


def order(implementation: str, mesh=None) -> tuple[str, ...]:
    """Returns the names in IMPLEMENTATIONS to try, in order; the last one serves every call.

    "auto" gives the platform's ORDERS without kernels that are distrusted; a name gives itself and XLA's, one of packed
    rows alone XLA's. mesh: whose platform decides; None = the one in force. Raises ValueError for an unknown name."""
    if implementation == "auto":
        return trusted("attention", ORDERS[platform(mesh)])
    if implementation not in {**IMPLEMENTATIONS, **packed.IMPLEMENTATIONS}:
        raise ValueError(f"attention implementation {implementation!r}: choose auto, "
                         f"{', '.join({**packed.IMPLEMENTATIONS, **IMPLEMENTATIONS})}")
    return (implementation, "xla") if implementation in IMPLEMENTATIONS else ("xla",)
