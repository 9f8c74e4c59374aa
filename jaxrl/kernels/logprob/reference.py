"""The truth for `logprob_and_entropy` and `divergence`: full logits, automatic differentiation. Memory grows with
tokens x vocabulary.

Legend: R rows, S loss tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def capped_logits(hidden, head, softcap, transposed, few=None, more=None):
    """Returns hidden [..., D] x head [D, V] (transposed: [V, D]) as logits [..., V] in fp32 or better, soft-capped.

    Args:
      softcap: cap * tanh(logit / cap); 0 = none. transposed: whether the head is [V, D].
      few [..., r], more [r, V]: their product is added before the cap; None = there is none."""
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    contract = ((hidden.ndim - 1,), (1 if transposed else 0,)), ((), ())
    logits = jax.lax.dot_general(hidden, head.astype(hidden.dtype), contract, preferred_element_type=acc)
    if few is not None:
        logits = logits + capped_logits(few, more, 0.0, False)
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


OUTSIDE = -1e30  # logit of a token outside the support: finite, so that 0 * it is 0


def allowed(support, vocab: int):
    """Returns the mask [..., V], True at the ids of supports [..., K] (int, -1 = unused); all True where K is 0.

    vocab: V; ids from V on are dropped."""
    if not support.shape[-1]:
        return jnp.ones((*support.shape[:-1], vocab), bool)
    flat = support.reshape(-1, support.shape[-1])
    rows = jnp.arange(flat.shape[0])[:, None]
    mask = jnp.zeros((flat.shape[0], vocab), bool).at[rows, jnp.where(flat < 0, vocab, flat)].set(True, mode="drop")
    return mask.reshape(*support.shape[:-1], vocab)


def logprob_and_entropy(hidden_RxSxD, head, targets_RxS, valid_RxS, support_RxSxK, ids_RxSxK, temperature, few_RxSxr,
                        more_rxV, softcap, top, transposed):
    """Computes log-prob and entropy of softmax(softcap(hidden @ head + few @ more) / temperature) from full logits [R,
    S, V], in fp32 or better and in nats.

    Args:
      hidden_RxSxD, head: hidden states and output matrix [D, V], or [V, D] where `transposed`.
      targets_RxS: int token ids. valid_RxS: bool; where False results are 0.
      support_RxSxK: int ids, -1 = unused, to which the distribution is cut; K = 0: the whole vocabulary.
      ids_RxSxK: int ids, -1 = unused, whose log-probs are returned too; None = none.
      temperature: positive number. few_RxSxr, more_rxV: their product is added to the logits; None = none.
      softcap: cap * tanh(logit / cap), 0 = none. top: how many of the most probable tokens to return, 0 = none.

    Returns (logprob_RxS, entropy_RxS), with `top` also (ids_RxSxtop, logprobs_RxSxtop) without gradient, with ids_RxSxK
    at last their log-probs; 0 where not valid or unused (ids: -1)."""
    logits = capped_logits(hidden_RxSxD, head, softcap, transposed, few_RxSxr, more_rxV) / temperature
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
IMPLEMENTATIONS = ("chunked", "reference")


def check_implementation(op: str, name: str) -> None:
    """Raises ValueError for a name that is not in IMPLEMENTATIONS. op: name of the op, for the message."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{op} implementation {name!r}: choose {', '.join(IMPLEMENTATIONS)}")


def mixture(logp, logq, beta: float):
    """Returns log(beta q + (1 - beta) p), elementwise, of log-probs of student p and teacher q. 0 < beta < 1."""
    return jnp.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))


def divergence(logp, logq, kind: str, beta: float):
    """Returns the divergence in nats, [...], of log-probs [..., V] of the student (logp) from the teacher's (logq).

    kind: forward KL(q || p), reverse KL(p || q), or jsd = beta KL(q || M) + (1 - beta) KL(p || M) with M = beta q +
    (1 - beta) p; beta is read for jsd alone."""
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), axis=-1)  # noqa: E731
    if kind == "forward":
        return kl(logq, logp)
    if kind == "reverse":
        return kl(logp, logq)
    between = mixture(logp, logq, beta)
    return beta * kl(logq, between) + (1 - beta) * kl(logp, between)
