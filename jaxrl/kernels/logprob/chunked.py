"""`logprob_and_entropy` in chunks of tokens with a custom vjp: logits of one chunk exist at a time.

The forward pass keeps nothing but its inputs; the backward pass computes each chunk's logits again and writes
    d logits = g_logp * (onehot - p) - g_entropy * p * (log p + H)
(H the entropy), then applies the chain rule of temperature and soft-cap. Chunks without a valid token are skipped.

Legend: R rows, S scored tokens per row, C tokens per chunk and row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl.kernels.logprob.reference import OUTSIDE, allowed, scaled_logits


def _chunks(x, size):
    """[R, S, ...] -> [S/size, R, size, ...], zero-padded; scanning keeps the row axis (and its sharding) whole."""
    pad = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _unchunk(x, length):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _statistics(logits, targets):
    """logits [R, C, V] -> log-prob of the targets and entropy, both [R, C]."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - top
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    log_total = jnp.log(total)
    chosen = jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return chosen - log_total, log_total - jnp.sum(weights * shifted, axis=-1) / total


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def logprob_and_entropy(hidden_RxSxD, head_DxV, targets_RxS, valid_RxS, support_RxSxK, temperature, softcap, chunk):
    """See api.logprob_and_entropy; `chunk` is the number of tokens per row whose logits exist at once."""
    return _forward(hidden_RxSxD, head_DxV, targets_RxS, valid_RxS, support_RxSxK, temperature, softcap, chunk)[0]


def _cut(logits, support):
    """Logits with those outside the support at OUTSIDE; as they are where the whole vocabulary is the support."""
    return jnp.where(allowed(support, logits.shape[-1]), logits, OUTSIDE) if support.shape[-1] else logits


def _forward(hidden, head, targets, valid, support, temperature, softcap, chunk):
    acc = jnp.promote_types(hidden.dtype, jnp.float32)

    def one(_, xs):
        h, t, ok, kept = xs

        def compute():
            logp, entropy = _statistics(_cut(scaled_logits(h, head, temperature, softcap), kept), t)
            return jnp.where(ok, logp, 0), jnp.where(ok, entropy, 0)

        def skip():
            return jnp.zeros(t.shape, acc), jnp.zeros(t.shape, acc)

        return None, jax.lax.cond(jnp.any(ok), compute, skip)

    _, (logp, entropy) = jax.lax.scan(one, None, tuple(_chunks(x, chunk) for x in (hidden, targets, valid, support)))
    length = targets.shape[1]
    return (_unchunk(logp, length), _unchunk(entropy, length)), (
        hidden, head, targets, valid, support, temperature)


def _backward(softcap, chunk, saved, grads):
    hidden, head, targets, valid, support, temperature = saved
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    grads = tuple(jnp.where(valid, g, 0) for g in grads)

    def one(grad_head, xs):
        h, t, ok, kept, g_logp, g_entropy = xs

        def compute(grad_head):
            logits = scaled_logits(h, head, temperature, softcap)
            logp = jax.nn.log_softmax(_cut(logits, kept), axis=-1)
            p = jnp.exp(logp)
            entropy = -jnp.sum(p * logp, axis=-1, keepdims=True)
            onehot = jax.nn.one_hot(t, logits.shape[-1], dtype=acc)
            d = g_logp[..., None] * (onehot - p) - g_entropy[..., None] * p * (logp + entropy)
            d = d / temperature
            if softcap:
                d = d * (1 - jnp.square(logits * temperature / softcap))
            d = d.astype(h.dtype)
            grad_h = jax.lax.dot_general(d, head.astype(h.dtype), (((2,), (1,)), ((), ())), preferred_element_type=acc)
            grad_w = jax.lax.dot_general(h, d, (((0, 1), (0, 1)), ((), ())), preferred_element_type=acc)
            return grad_head + grad_w, grad_h.astype(h.dtype)

        def skip(grad_head):
            return grad_head, jnp.zeros_like(h)

        return jax.lax.cond(jnp.any(ok), compute, skip, grad_head)

    xs = tuple(_chunks(x, chunk) for x in (hidden, targets, valid, support, *grads))
    grad_head, grad_hidden = jax.lax.scan(one, jnp.zeros(head.shape, acc), xs)
    return _unchunk(grad_hidden, targets.shape[1]), grad_head.astype(head.dtype), None, None, None, None


logprob_and_entropy.defvjp(_forward, _backward)
