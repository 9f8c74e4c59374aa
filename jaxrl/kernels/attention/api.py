"""Public entry of the op: who sees whom, and which implementation runs.

Legend: B rows, L queries per row, S keys per row, C cache length, N layers, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import functools
import logging

from jaxrl.kernels.attention import blockwise, cudnn, decode, decode_gpu, decode_tpu, gpu, reference, tpu
from jaxrl.kernels.platform import platform

log = logging.getLogger("jaxrl")

# An implementation that cannot serve a call raises NotImplementedError(reason) and the next one is asked. The last one of
# each order serves every call.
IMPLEMENTATIONS = {
    "tpu": tpu.attention,
    "gpu": gpu.attention,
    "cudnn": cudnn.attention,
    "blockwise": blockwise.attention,
    "reference": reference.attention,
}
WORK = {"tpu": tpu.work_of, "gpu": gpu.work_of, "blockwise": blockwise.work_of}  # those that look for their work once per step: see work_of
XLA = ("blockwise", "reference")
ORDERS = {"cpu": XLA, "gpu": ("gpu", "cudnn", *XLA), "tpu": ("tpu", *XLA)}

CACHED = {"tpu": decode_tpu.attention, "gpu": decode_gpu.attention, "xla": decode.attention,
          "reference": decode.reference_attention}
CACHED_WORK = {"tpu": decode_tpu.work_of, "gpu": decode_gpu.work_of}
CACHED_ORDERS = {"cpu": ("xla",), "gpu": ("gpu", "xla"), "tpu": ("tpu", "xla")}


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL=None,
              k_segments_BxS=None, q_prefixes_BxL=None, window=0, softcap=0.0, scale=None, implementation="auto", work=None):
    """Grouped-query attention, softmax(softcap(scale * q.k) over the visible keys) @ v.

    Query i sees key j where all of these hold:
      k_positions[j] <= q_positions[i];
      k_segments[j] is q_segments[i], or q_prefixes[i] where that is not 0 (skipped where segments are None);
      q_positions[i] - k_positions[j] < window, where window > 0.
    A query that sees no key, and a query of padding (segment 0), returns a finite value without meaning, and gradients count
    only where such queries' cotangents are 0.

    Args:
      q_BxLxHxK: queries; head h reads key-value head h // (H / G).
      k_BxSxGxK, v_BxSxGxK: keys and values.
      q_positions_BxL, k_positions_BxS: int positions within the sequence; rows of 1 broadcast over B.
      q_segments_BxL, k_segments_BxS: int segment ids (0 = padding, which real queries never see), both or neither.
      q_prefixes_BxL: int id of a second visible segment (a shared prompt), 0 = none.
      window: number of positions a query sees, itself included; 0 = all (static).
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none (static).
      scale: factor on the scores; None = K ** -0.5 (static).
      implementation: "auto" (the platform's: the first of ORDERS that serves the call), or a name in IMPLEMENTATIONS, behind
        which stand those of XLA where it raises NotImplementedError. What a kernel refuses is logged once, with its reason.
      work: of work_of for the same ids, window and implementation; None = each call looks for itself.

    Returns:
      out_BxLxHxK in v's dtype; scores and softmax are fp32 or better.

    Raises:
      ValueError: unknown implementation, or H not a multiple of G.
    """
    heads, groups = q_BxLxHxK.shape[2], k_BxSxGxK.shape[2]
    if heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key-value heads")
    scale = q_BxLxHxK.shape[-1] ** -0.5 if scale is None else scale

    def ask(name):
        known = {"work": work[name]} if work and name in work else {}
        return IMPLEMENTATIONS[name](
            q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
            q_prefixes_BxL, window=window, softcap=softcap, scale=scale, chosen=implementation == name, **known)

    return _first(order(implementation), ask)


def work_of(q_shape, kv_shape, dtype, q_positions_BxL, k_positions_BxS, q_segments_BxL=None, k_segments_BxS=None,
            q_prefixes_BxL=None, *, window=0, implementation="auto") -> dict:
    """What `attention` looks for before it computes: the same for all layers of a window, so it is done once per step.

    Args as attention's, with shapes and dtype in place of queries and keys. Returns a pytree of arrays whose leading axes are
    rows, or devices' own lists; empty where the implementation that will run needs none.
    """
    def ask(name):
        if name not in WORK:
            return {}
        return {name: WORK[name](q_shape, kv_shape, dtype, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
                                 q_prefixes_BxL, window=window)}

    return _first(order(implementation), ask)


def cached_attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, window=0, softcap=0.0, scale=None,
                     implementation="auto", shared=None, work=None):
    """One query per slot over a slotted cache, of which it sees its own position and those before it.

    Args:
      q_Bx1xHxK, window, softcap, scale: as attention's.
      k_NxBxCxGK, v_NxBxCxGK: the cache of N layers, of any float dtype; entry c has position c.
      positions_Bx1: a slot at or beyond C is idle and returns a finite value without meaning.
      layer: int scalar, which of the N is read.
      implementation: as attention's; a name without an implementation for the cache takes XLA's.
      shared: shared.Shared, which slots have the same keys and values up to which position, or None. Its slots that are not idle
        are at or beyond that position. Where there is no window, a kernel reads these keys once per tile; XLA, and layers with
        a window, read every slot's own.
      work: of cached_work_of for the same positions, window, implementation and `shared` (which then is not read), or None.

    Returns:
      out_Bx1xHxK in q's dtype; scores and softmax are fp32 or better.
    """
    scale = q_Bx1xHxK.shape[-1] ** -0.5 if scale is None else scale

    def ask(name):
        known = {}
        if name in CACHED_WORK:
            known = {"work": work[name]} if work and name in work else {"shared": None if window else shared}
        return CACHED[name](q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, window=window, softcap=softcap, scale=scale,
                            **known)

    return _first(cached_order(implementation), ask)


def cached_work_of(positions_Bx1, shape_NxBxCxGK, dtype, heads, size, *, window=0, implementation="auto", shared=None) -> dict:
    """As work_of, for cached_attention of so many query heads of this size over a cache of this shape and dtype."""
    def ask(name):
        if name not in CACHED_WORK:
            return {}
        return {name: CACHED_WORK[name](positions_Bx1, shape_NxBxCxGK, dtype, window=window, heads=heads, size=size,
                                        shared=None if window else shared)}

    return _first(cached_order(implementation), ask)


def shares_prompts(implementation: str, mesh=None) -> bool:
    """Whether `shared` is of use to cached_attention on the platform of the mesh, or of the one in force."""
    return cached_order(implementation, mesh)[0] in CACHED_WORK


def order(implementation: str) -> tuple[str, ...]:
    """The implementations of `attention` that are asked, in order."""
    if implementation == "auto":
        return ORDERS[platform()]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r}: choose auto, {', '.join(IMPLEMENTATIONS)}")
    return (implementation, *(name for name in XLA if name != implementation))


def cached_order(implementation: str, mesh=None) -> tuple[str, ...]:
    """The implementations of `cached_attention` that are asked, in order; mesh: None = the one in force."""
    if implementation == "auto":
        return CACHED_ORDERS[platform(mesh)]
    return (implementation, "xla") if implementation in CACHED else ("xla",)


def _first(names, ask):
    for name in names[:-1]:
        try:
            return ask(name)
        except NotImplementedError as e:
            if name not in XLA:
                _say(name, str(e))
    return ask(names[-1])


@functools.cache
def _say(name: str, reason: str) -> None:
    log.warning("attention: %s does not serve this model (%s); the next implementation runs", name, reason)
