"""The truth for `logprob_and_entropy` and `divergence`: full logits, automatic differentiation. Memory grows with
tokens x vocabulary.

Legend: R rows, S loss tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def capped_logits(hidden, head, softcap, transposed):
    """Maps [..., D] x [D, V] (transposed: [V, D]) -> logits [..., V] in fp32 or better, soft-capped."""
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    contract = ((hidden.ndim - 1,), (1 if transposed else 0,)), ((), ())
    logits = jax.lax.dot_general(hidden, head.astype(hidden.dtype), contract, preferred_element_type=acc)
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


OUTSIDE = -1e30  # logit of a token outside the support: finite, so that 0 * it is 0


def allowed(support, vocab: int):
    """Returns the mask [..., V] of supports [..., K] of token ids, -1 = unused; all True where K is 0."""
    if not support.shape[-1]:
        return jnp.ones((*support.shape[:-1], vocab), bool)
    flat = support.reshape(-1, support.shape[-1])
    rows = jnp.arange(flat.shape[0])[:, None]
    mask = jnp.zeros((flat.shape[0], vocab), bool).at[rows, jnp.where(flat < 0, vocab, flat)].set(True, mode="drop")
    return mask.reshape(*support.shape[:-1], vocab)


def logprob_and_entropy(hidden_RxSxD, head, targets_RxS, valid_RxS, support_RxSxK, ids_RxSxK, temperature, softcap, top,
                        transposed):
    """See api.logprob_and_entropy."""
    logits = capped_logits(hidden_RxSxD, head, softcap, transposed) / temperature
    logits = jnp.where(allowed(support_RxSxK, logits.shape[-1]), logits, OUTSIDE)
    logp = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    chosen = jnp.take_along_axis(logp, targets_RxS[..., None], axis=-1)[..., 0]
    out = jnp.where(valid_RxS, chosen, 0), jnp.where(valid_RxS, entropy, 0)
    if top:
        logps, ids = jax.lax.stop_gradient(jax.lax.top_k(logp, top))
        out += jnp.where(valid_RxS[..., None], ids, -1), jnp.where(valid_RxS[..., None], logps, 0)
    if ids_RxSxK is not None:
        used = valid_RxS[..., None] & (ids_RxSxK >= 0)
        out += (jnp.where(used, jnp.take_along_axis(logp, jnp.where(used, ids_RxSxK, 0), axis=-1), 0),)
    return out


KINDS = ("forward", "reverse", "jsd")


def mixture(logp, logq, beta: float):
    """Returns log(beta q + (1 - beta) p), elementwise, of log-probs of student p and teacher q. 0 < beta < 1."""
    return jnp.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))


def divergence(logp, logq, kind: str, beta: float):
    """Returns the divergence in nats, [...], of log-probs [..., V] of student and teacher; kinds as in
    divergence.py."""
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), axis=-1)  # noqa: E731
    if kind == "forward":
        return kl(logq, logp)
    if kind == "reverse":
        return kl(logp, logq)
    between = mixture(logp, logq, beta)
    return beta * kl(logq, between) + (1 - beta) * kl(logp, between)
