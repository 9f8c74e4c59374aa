"""Public entry of the op on packed rows: who sees whom, and which implementation runs.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from jaxrl.kernels.attention import sinks
from jaxrl.kernels.attention.packed import blockwise, cudnn, gpu, reference, tpu
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.kernels.fallback import first_that_serves, trusted
from jaxrl.kernels.platform import platform

# An implementation that cannot serve a call raises NotImplementedError(reason) and the next one is asked. The last one
# of each order serves every call.
IMPLEMENTATIONS = {
    "tpu": tpu.attention,
    "gpu": gpu.attention,
    "cudnn": cudnn.attention,
    "blockwise": blockwise.attention,
    "reference": reference.attention,
}
WORK = {  # see work_of
    "tpu": tpu.work_of, "gpu": gpu.work_of, "cudnn": cudnn.work_of, "blockwise": blockwise.work_of,
}
XLA = ("blockwise", "reference")
ORDERS = {"cpu": XLA, "gpu": ("gpu", "cudnn", *XLA), "tpu": ("tpu", *XLA)}


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL=None,
              k_segments_BxS=None, q_prefixes_BxL=None, window=0, softcap=0.0, scale=None, implementation="auto",
              work=None, sinks_H=None, q_reach_BxL=None):
    """Computes grouped-query attention, softmax(softcap(scale * q.k) over the visible keys, and the head's sink) @ v.

    Query i sees key j where all of these hold:
      k_positions[j] <= q_positions[i], or q_reach[i] where it is given;
      k_segments[j] is q_segments[i], or q_prefixes[i] where that is not 0 (skipped where segments are None);
      q_positions[i] - k_positions[j] < window, where window > 0.
    A query that sees no key, and a query of padding (segment 0), returns a finite value without meaning, and gradients
    count only where such queries' cotangents are 0.

    Args:
      q_BxLxHxK: queries of a float dtype; head h reads key-value head h // (H / G).
      k_BxSxGxK, v_BxSxGxK: keys and values.
      q_positions_BxL, k_positions_BxS: int positions within the sequence; rows of 1 broadcast over B.
      q_segments_BxL, k_segments_BxS: int segment ids (0 = padding, which real queries never see), both or neither.
      q_prefixes_BxL: int id of a second visible segment (a shared prompt), 0 = none.
      window: number of positions a query sees, itself included; 0 = all (static).
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none (static).
      scale: factor on the scores; None = K ** -0.5 (static).
      implementation: "auto" (the platform's: the first of ORDERS that serves the call), or a name in IMPLEMENTATIONS:
        XLA's are tried after it if it raises NotImplementedError. A kernel's refusal is logged once.
      work: of work_of for the same ids, window and implementation; None = each call looks for itself.
      sinks_H: a score per head of a key that every query sees and that has no value (see sinks.py); None = there is
        none.
      q_reach_BxL: int, the last position that a query sees, its own or a later one; None = its own. Queries of an image
        whose tokens see each other have the position of its last token.

    Returns:
      out_BxLxHxK in v's dtype; scores and softmax are fp32 or better.

    Raises:
      ValueError: unknown implementation, or H not a multiple of G."""
    heads, groups = q_BxLxHxK.shape[2], k_BxSxGxK.shape[2]
    if heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key-value heads")
    scale = q_BxLxHxK.shape[-1] ** -0.5 if scale is None else scale

    ids = ids_of(q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, q_reach_BxL, window)

    def ask(name):
        known = {"work": work[name]} if work and name in work else {}
        return IMPLEMENTATIONS[name](q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window=window, softcap=softcap, scale=scale,
                                     chosen=implementation == name, sinks=sinks.of(sinks_H, q_BxLxHxK.dtype), **known)

    return first_that_serves("attention", order(implementation), ask, silent=XLA)


def work_of(q_shape, kv_shape, dtype, q_positions_BxL, k_positions_BxS, q_segments_BxL=None, k_segments_BxS=None,
            q_prefixes_BxL=None, q_reach_BxL=None, *, window=0, implementation="auto", among=None) -> dict:
    """Returns the lists of blocks that `attention` visits, made from the ids: the same for all layers of a window, so
    they are made once per step.

    Args:
      q_shape, kv_shape: (B, L, H, K) of the queries, (B, S, G, K) of keys and values. dtype: theirs.
      q_positions_BxL, k_positions_BxS: int positions within the sequence; rows of 1 broadcast over B.
      q_segments_BxL, k_segments_BxS: int segment ids, 0 = padding; both or neither.
      q_prefixes_BxL: int id of a second visible segment (a shared prompt), 0 = none.
      q_reach_BxL: int, the last position that a query sees; None = its own.
      window: number of positions a query sees, itself included; 0 = all.
      implementation: as the `attention` call's.
      among: names of the implementations that may run; None = all.

    Returns:
      {name: work} of the first implementation that serves these shapes, a pytree of arrays whose leading axes are rows,
      or devices' own lists; empty where the implementation that will run needs none, or makes its own (blockwise, by
      its name, of rows shorter than blockwise.WORTH_IT).

    Raises ValueError for an unknown implementation."""
    ids = ids_of(q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, q_reach_BxL, window)

    def ask(name):
        return {name: WORK[name](q_shape, kv_shape, dtype, ids, window=window)} if name in WORK else {}

    asked = [name for name in order(implementation) if among is None or name in among]
    return first_that_serves("attention", asked, ask, silent=XLA)


def ids_of(q_positions, k_positions, q_segments, k_segments, q_prefixes, q_reach, window) -> Ids:
    """Returns the Ids of a call from api.attention's arguments: int arrays [B, L] and [B, S], or None.

    Without a window (0) a query's position says nothing but how far it sees, so a reach takes its place and `q_reach`
    is None: there every implementation serves a reach."""
    if q_reach is not None and not window:
        q_positions, q_reach = q_reach, None
    return Ids(q_positions, k_positions, q_segments, k_segments, q_prefixes, q_reach)


def order(implementation: str) -> tuple[str, ...]:
    """Returns the names in IMPLEMENTATIONS to try, in order; the last one serves every call.

    "auto" gives the platform's ORDERS without kernels that are distrusted; a name gives itself and XLA's behind it.
    Raises ValueError for an unknown name."""
    if implementation == "auto":
        return trusted("attention", ORDERS[platform()])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r}: choose auto, {', '.join(IMPLEMENTATIONS)}")
    return (implementation, *(name for name in XLA if name != implementation))
