"""Public entry of the op.

Legend: R rows, S loss tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.kernels.logprob import chunked, reference


def logprob_and_entropy(
    hidden_RxSxD,
    head,
    targets_RxS,
    valid_RxS=None,
    support_RxSxK=None,
    ids_RxSxK=None,
    few_RxSxr=None,
    more_rxV=None,
    *,
    temperature=1.0,
    softcap=0.0,
    top=0,
    chunk=1024,
    split=None,
    transposed=False,
    implementation="chunked",
) -> tuple[jax.Array, ...]:
    """Computes log-prob of targets and entropy of softmax(softcap(hidden @ head + few @ more) / temperature).

    Args:
      hidden_RxSxD: hidden states that predict the targets, compute dtype.
      head: output matrix [D, V], or [V, D] where `transposed`; cast to the compute dtype, its gradient summed in fp32.
      targets_RxS: int token ids.
      valid_RxS: bool; where False results and gradients are 0, and "chunked" computes no logits. None = all valid.
      support_RxSxK: int token ids, -1 = unused: the distribution is cut to these tokens and renormalised (the target is
        one of them; 0 of them where not valid). None = the whole vocabulary.
      ids_RxSxK: int token ids, different within a token, -1 = unused: their log-probs are returned too. None = none.
      few_RxSxr, more_rxV: their product is added to the logits: an adapter of the head, which has no gradient then.
      temperature: positive number (may be traced); no gradient flows to it with "chunked".
      softcap: Gemma-style cap on the logits, 0 = none (static).
      top: how many of the most probable tokens to return too, 0 = none (static); beyond a support, -1e30 is added.
      chunk: valid tokens of a device whose logits exist at once (static); memory is O(chunk * V). One CPU device keeps
        all logits for the backward pass if they are at most chunked.KEPT_CPU numbers; else they are computed again.
      split: chunked.Split, the mesh axes that rows and vocabulary are split over (static). None = no mesh.
      transposed: the head is an embedding table [V, D] (static). It is read as it lies, not copied per call.
      implementation: "chunked", or "reference" (full logits).

    Returns:
      (logprob_RxS, entropy_RxS) in nats, fp32 (float64 for float64 input). With `top` also their (ids_RxSxtop int32,
      logprobs_RxSxtop), the highest first; -1 and 0 where not valid. No gradient flows through those. With `ids` at
      last their logprobs_RxSxK, 0 where unused or not valid; gradients flow through these: scatter(g) - p sum g.
      Where the head is not differentiated its gradient is not computed.

    Raises:
      ValueError: top outside 0..V; ids together with a support; a head that is differentiated beside `more`
        (chunked only); another implementation."""
    reference.check_implementation("logprob_and_entropy", implementation)
    vocab = head.shape[0 if transposed else 1]
    if not 0 <= top <= vocab:
        raise ValueError(f"logprob_and_entropy: top={top} of a vocabulary of {vocab}")
    if ids_RxSxK is not None and support_RxSxK is not None:
        raise ValueError("logprob_and_entropy: ids together with a support: a token outside it has no log-prob")
    valid_RxS = jnp.ones(targets_RxS.shape, bool) if valid_RxS is None else valid_RxS
    support_RxSxK = jnp.zeros((*targets_RxS.shape, 0), jnp.int32) if support_RxSxK is None else support_RxSxK
    temperature = jnp.asarray(temperature, jnp.promote_types(hidden_RxSxD.dtype, jnp.float32))
    inputs = hidden_RxSxD, head, targets_RxS, valid_RxS, support_RxSxK, ids_RxSxK, temperature, few_RxSxr, more_rxV
    if implementation == "reference":
        return reference.logprob_and_entropy(*inputs, softcap, top, transposed)
    return chunked.logprob_and_entropy(*inputs, softcap, top, chunk, split, transposed)
