"""The truth for `logprob_and_entropy`: full logits, automatic differentiation. Memory grows with tokens x vocabulary.

Legend: R rows, S scored tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scaled_logits(hidden, head, temperature, softcap):
    """[..., D] x [D, V] -> logits [..., V] in fp32 or better: soft-capped, then divided by the temperature."""
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jax.lax.dot_general(
        hidden, head.astype(hidden.dtype), (((hidden.ndim - 1,), (0,)), ((), ())), preferred_element_type=acc
    )
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    return logits / temperature


def logprob_and_entropy(hidden_RxSxD, head_DxV, targets_RxS, valid_RxS, temperature, softcap):
    """See api.logprob_and_entropy."""
    logits = scaled_logits(hidden_RxSxD, head_DxV, temperature, softcap)
    logp = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    chosen = jnp.take_along_axis(logp, targets_RxS[..., None], axis=-1)[..., 0]
    return jnp.where(valid_RxS, chosen, 0), jnp.where(valid_RxS, entropy, 0)
