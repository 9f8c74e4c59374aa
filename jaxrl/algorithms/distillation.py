"""Distillation losses, which move a student p towards a teacher q, from log-probs.

Dense: a divergence per token. Of the whole vocabulary, straight from hidden states, it is kernels.logprob.divergence;
here are its sparse forms, of log-probs at K given tokens, with automatic derivatives:

    forward  KL(q || p)
    reverse  KL(p || q)
    jsd      beta KL(q || M) + (1 - beta) KL(p || M), M = beta q + (1 - beta) p

A tail adds one outcome for all other tokens, with probability 1 - sum of the K probabilities: a divergence of two
distributions over K + 1 outcomes, so it is never negative, 0 where they are equal, and by the log-sum inequality at
most the divergence over the whole vocabulary. Without it the sum over the K is no divergence: the two KLs can be
negative, they move a student that equals its teacher, and they leave p outside the K unconstrained.

Sampled: the tokens that the student drew, with the reward -c (log p(y) - log q(y)). With discount 0 the expectation of
grad log p(y) times it is minus the gradient of c KL(p || q) at the visited state.

Legend: K tokens, T tokens of a host batch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.advantages import token_returns

DENSE = ("forward", "reverse", "jsd")


def with_tail(logp_K, used_K):
    """Appends the log-prob of all tokens that are not listed: [..., K] -> [..., K+1], log(1 - sum of the K
    probabilities).

    Args:
      logp_K: [..., K] log-probs of the listed tokens, in nats.
      used_K: [..., K] bool; False = the place holds no token: its log-prob is returned as 0 and its mass is not
        counted.

    If the listed mass rounds to 1 or more, the tail is the log of one rounding error of logp_K's dtype."""
    logp = jnp.where(used_K, logp_K, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(logp, axis=-1, keepdims=True))
    total = top + jnp.log(jnp.sum(jnp.where(used_K, jnp.exp(logp - top), 0), axis=-1, keepdims=True))
    tail = jnp.log1p(-jnp.exp(jnp.minimum(total, -jnp.finfo(logp_K.dtype).eps)))
    return jnp.concatenate([jnp.where(used_K, logp_K, 0), tail], axis=-1)


def sparse_divergence(logp_K, logq_K, used_K, *, kind: str, beta: float = 0.5, tail: bool = True):
    """Computes the divergence [...] of student p and teacher q in nats, from log-probs [..., K] at the same K tokens:

        forward  KL(q || p)
        reverse  KL(p || q)
        jsd      beta KL(q || M) + (1 - beta) KL(p || M), M = beta q + (1 - beta) p

    Nothing is averaged; the result has the dtype of the log-probs, and is 0 where no place is used.

    Args:
      logp_K, logq_K: [..., K] log-probs in nats of student and teacher.
      used_K: [..., K] bool; where False a place holds no token (its log-probs are finite and mean nothing). At least
        one is True wherever the result counts.
      kind: forward, reverse or jsd; another name is not refused, it is taken for jsd.
      beta: of jsd, in (0, 1).
      tail: add one outcome for all other tokens (`with_tail`), so that this is a divergence: up to rounding never
        negative, and 0 where the two are equal. Without it the sum over the K alone, neither renormalised nor clipped.
    """
    counts = used_K
    if tail:
        some = jnp.any(used_K, axis=-1, keepdims=True)
        safe = jnp.where(some, used_K, True)  # a token without any place is somebody else's 0
        logp_K, logq_K = with_tail(jnp.where(some, logp_K, -1.0 - math.log(logp_K.shape[-1])), safe), with_tail(
            jnp.where(some, logq_K, -1.0 - math.log(logq_K.shape[-1])), safe)
        counts = jnp.concatenate([used_K, some], axis=-1)
    logp, logq = jnp.where(counts, logp_K, 0), jnp.where(counts, logq_K, 0)
    kl = lambda a, b: jnp.sum(jnp.where(counts, jnp.exp(a) * (a - b), 0), axis=-1)  # noqa: E731
    if kind == "forward":
        return kl(logq, logp)
    if kind == "reverse":
        return kl(logp, logq)
    between = jnp.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
    return beta * kl(logq, between) + (1 - beta) * kl(logp, between)


def sampled_advantages(logp_T, logq_T, mask_T, spans, *, coef: float, gamma: float) -> np.ndarray:
    """Returns advantages [T] float64: A_t = r_t + gamma A_next, r = -coef (log p(y) - log q(y)); 0 outside mask_T.

    Next is the trajectory's next loss token. Nothing is divided: no baseline, no normalisation by group. With coef 1
    and gamma 1 this is R_t of MiniLLM (arXiv 2306.08543, sec. 2.2), the return of reverse KL's policy gradient.

    Args:
      logp_T, logq_T: [T] log-probs in nats of the drawn tokens under the policy that is updated and under the teacher.
      mask_T: [T] bool, the loss tokens; the others' log-probs are not read.
      spans: [N+1] int; trajectory i owns tokens spans[i]:spans[i+1].
      coef: factor on the rewards.
      gamma: discount; 0 = each token gets its own term only, above 0 also the discounted terms of later tokens.
    """
    rewards = -coef * (np.asarray(logp_T, np.float64) - np.asarray(logq_T, np.float64))
    return token_returns(np.where(mask_T, rewards, 0.0), mask_T, spans, gamma)
