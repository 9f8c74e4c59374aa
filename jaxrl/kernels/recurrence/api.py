"""Public entry of the op: the gated delta rule (Gated DeltaNet, arXiv 2412.06464, eq. 10) and, without the delta, the
state space of Mamba-2 (arXiv 2405.21060, eq. 1 and 16) over packed rows.

Legend: B rows, L tokens per row, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

from jaxrl.kernels.fallback import first_that_serves, trusted
from jaxrl.kernels.platform import platform
from jaxrl.kernels.recurrence import gpu, reference, tpu, xla
from jaxrl.kernels.recurrence.chunks import Chunks

IMPLEMENTATIONS = {"xla": xla.recurrence, "gpu": gpu.recurrence, "tpu": tpu.recurrence,
                   "reference": reference.recurrence}
ORDERS = {"cpu": ("xla",), "gpu": ("gpu", "xla"), "tpu": ("tpu", "xla")}


def recurrence(q_BxLxHxK, k_BxLxHxK, v_BxLxGxV, g_BxLxG, beta_BxLxG, chunks: Chunks, state_BxGxKxV=None,
               implementation="auto", delta: bool = True):
    """Computes the gated delta rule, or Mamba-2's recurrence, of packed rows; returns (outputs, last states).

    Per value head, token after token of a sequence, from the state S [K, V] before it:

        S <- exp(g) S;  S <- S + k (beta (v - k S))^T;  out = q S

    and without `delta` S <- exp(g) S + k (beta v)^T, which is Mamba-2 with k = B, q = C, v = x and beta = Delta.

    A sequence begins with zeros; a completion of a shared prompt begins with the state behind the prompt; the first
    token of a row that continues (chunks_of) with `state`. A token's output depends on its own sequence alone, to the
    bit within one program. Padding changes nothing, whatever it holds, and has output 0.

    Args:
      q_BxLxHxK, k_BxLxHxK: queries and keys, as they are multiplied (normalised and scaled); value head i reads key
        head i // (G / H).
      v_BxLxGxV: values.
      g_BxLxG: log of the decay, at most 0, fp32 or better. beta_BxLxG: factor on what is written, fp32 or better.
      chunks: of chunks_of, for these rows.
      state_BxGxKxV: where rows that continue begin; None = zeros.
      implementation: "auto" (the first of the platform's ORDERS that serves the call) or a name in IMPLEMENTATIONS; xla
        stands behind tpu and gpu where they cannot serve the call, and the reason is logged once.
      delta: whether what the state returns for a token's key is taken off before its value is written.

    Returns:
      out_BxLxGxV in v's dtype; state_BxGxKxV in fp32 or better, behind the last token of each row that enters it.
      Sums and the state are fp32 or better; gpu rounds q, k and what is multiplied with a state to v's dtype. Rows
      whose chunks do not fit (chunks_of) are NaN.

    Raises ValueError: unknown implementation, or G not a multiple of H."""
    heads, groups = v_BxLxGxV.shape[2], k_BxLxHxK.shape[2]
    if heads % groups:
        raise ValueError(f"recurrence: {heads} value heads are not a multiple of {groups} key heads")

    def ask(name):
        return IMPLEMENTATIONS[name](q_BxLxHxK, k_BxLxHxK, v_BxLxGxV, g_BxLxG, beta_BxLxG, chunks, state_BxGxKxV,
                                     delta=delta)

    return first_that_serves("recurrence", order(implementation), ask)


def order(implementation: str) -> tuple[str, ...]:
    """Returns the names in IMPLEMENTATIONS to try, in order; the last one serves every call.

    "auto" gives the platform's ORDERS without kernels that are distrusted, gpu and tpu give themselves and xla. Raises
    ValueError for an unknown name."""
    if implementation == "auto":
        return trusted("recurrence", ORDERS[platform()])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"recurrence implementation {implementation!r}: choose auto, {', '.join(IMPLEMENTATIONS)}")
    return (implementation, "xla") if implementation in ("gpu", "tpu") else (implementation,)
