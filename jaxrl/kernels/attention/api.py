"""Public entry of the op: who sees whom, and which implementation runs.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from jaxrl.kernels.attention import blockwise, decode, reference

# Tried in order; an implementation that cannot serve a call raises NotImplementedError(reason) and the next one is
# asked. The last one serves every call.
IMPLEMENTATIONS = {
    "decode": decode.attention,
    "blockwise": blockwise.attention,
    "reference": reference.attention,
}
AUTO = ("decode", "blockwise", "reference")


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL=None,
              k_segments_BxS=None, q_prefixes_BxL=None, window=0, softcap=0.0, scale=None, implementation="auto"):
    """Grouped-query attention, softmax(softcap(scale * q.k) over the visible keys) @ v.

    Query i sees key j where all of these hold:
      k_positions[j] <= q_positions[i];
      k_segments[j] is q_segments[i], or q_prefixes[i] where that is not 0 (skipped where segments are None);
      q_positions[i] - k_positions[j] < window, where window > 0.
    A query that sees no key returns a finite value without meaning.

    Args:
      q_BxLxHxK: queries; head h reads key-value head h // (H / G).
      k_BxSxGxK, v_BxSxGxK: keys and values.
      q_positions_BxL, k_positions_BxS: int positions within the sequence; rows of 1 broadcast over B.
      q_segments_BxL, k_segments_BxS: int segment ids (0 = padding, which sees only padding), both or neither.
      q_prefixes_BxL: int id of a second visible segment (a shared prompt), 0 = none.
      window: number of positions a query sees, itself included; 0 = all (static).
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none (static).
      scale: factor on the scores; None = K ** -0.5 (static).
      implementation: "auto" (the first that serves the call), or a name in IMPLEMENTATIONS, which falls back to
        "reference" where it raises NotImplementedError.

    Returns:
      out_BxLxHxK in v's dtype; scores and softmax are fp32 or better.

    Raises:
      ValueError: unknown implementation, or H not a multiple of G.
    """
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r}: choose auto, {', '.join(IMPLEMENTATIONS)}")
    heads, groups = q_BxLxHxK.shape[2], k_BxSxGxK.shape[2]
    if heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key-value heads")
    scale = q_BxLxHxK.shape[-1] ** -0.5 if scale is None else scale
    names = AUTO if implementation == "auto" else (implementation, "reference")
    for name in names:
        try:
            return IMPLEMENTATIONS[name](
                q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
                q_prefixes_BxL, window=window, softcap=softcap, scale=scale, chosen=implementation != "auto")
        except NotImplementedError:
            if name == names[-1]:
                raise
    raise AssertionError("the last implementation serves every call")
