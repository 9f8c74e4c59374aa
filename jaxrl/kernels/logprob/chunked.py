"""`logprob_and_entropy` in chunks of tokens with a custom vjp: logits of one chunk exist at a time.

The forward pass keeps nothing but its inputs; the backward pass computes each chunk's logits again and writes
    d logits = g_logp * (onehot - p) - g_entropy * p * (log p + H)
(H the entropy), then applies the chain rule of temperature and soft-cap. Chunks without a valid token are skipped.

On a mesh (`Split`) every device works on its own rows and its own part of the vocabulary: logits are never gathered, a
device skips its own empty chunks, and the head's gradient is summed over the rows' devices once, after the last chunk.

Legend: R rows, S scored tokens per row, C tokens per chunk and row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.logprob.reference import OUTSIDE, allowed, scaled_logits


class Split(NamedTuple):
    """Mesh axes that rows and vocabulary are split over under `jax.set_mesh`. None = whole."""

    rows: tuple[str, ...] | None
    vocab: str | None

    def devices_of_rows(self) -> int:
        return math.prod(jax.sharding.get_abstract_mesh().shape[a] for a in self.rows or ())


def _chunks(x, size):
    """[R, S, ...] -> [S/size, R, size, ...], zero-padded; scanning keeps the row axis (and its sharding) whole."""
    pad = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _unchunk(x, length):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _over(axis, reduce, x):
    """x reduced over the devices that share the vocabulary."""
    return x if axis is None else reduce(x, axis)


def _first_token(vocab: int, axis):
    """The first token id of this device's part of the vocabulary."""
    return 0 if axis is None else jax.lax.axis_index(axis) * vocab


def held(tokens, vocab: int, axis):
    """(index into this device's `vocab` tokens, whether it holds the token), both in the shape of `tokens`. axis: the mesh axis
    that the vocabulary is split over, None = whole."""
    at = tokens - _first_token(vocab, axis)
    return at, (at >= 0) & (at < vocab)


def _picked(logits, targets, axis):
    """logits[..., target], whichever device holds it."""
    at, here = held(targets, logits.shape[-1], axis)
    found = jnp.take_along_axis(logits, jnp.where(here, at, 0)[..., None], axis=-1)[..., 0]
    return found if axis is None else jax.lax.psum(jnp.where(here, found, 0), axis)


def _normalised(logits, axis):
    """Of logits [R, C, V]: (logits - top, exp of that, both [R, C, V / devices of the axis]; its sum and the entropy, [R, C]). A
    log-prob is the first less the logarithm of the sum. Top, sum and entropy are of the whole vocabulary."""
    top = _over(axis, jax.lax.pmax, jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    weights = jnp.exp(shifted)
    total = _over(axis, jax.lax.psum, jnp.sum(weights, axis=-1))
    mean = _over(axis, jax.lax.psum, jnp.sum(weights * shifted, axis=-1)) / total
    return shifted, weights, total, jnp.log(total) - mean


def _most_probable(logp, count: int, axis):
    """(ids, log-probs) [R, C, count] of the whole vocabulary, the highest first; of equal ones the lowest id."""
    found, ids = jax.lax.top_k(logp, min(count, logp.shape[-1]))
    ids = ids + _first_token(logp.shape[-1], axis)
    if axis is not None:  # each device's own best, in the order of their ids
        found, ids = (jax.lax.all_gather(x, axis, axis=2, tiled=True) for x in (found, ids))
        found, places = jax.lax.top_k(found, count)
        ids = jnp.take_along_axis(ids, places, axis=-1)
    return ids, found


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def logprob_and_entropy(
        hidden_RxSxD, head_DxV, targets_RxS, valid_RxS, support_RxSxK, temperature, softcap, top, chunk, split):
    """See api.logprob_and_entropy; `chunk` is the number of tokens per row whose logits exist at once."""
    return _forward(hidden_RxSxD, head_DxV, targets_RxS, valid_RxS, support_RxSxK, temperature, softcap, top, chunk, split)[0]


def _placed(local, split, inputs: str, outputs: str):
    """`local` on every device's part. r = split by rows, v = by vocabulary in the second dimension, w = whole."""
    if split is None:
        return local
    specs = {"r": P(split.rows), "v": P(None, split.vocab), "w": P()}
    return jax.shard_map(local, in_specs=tuple(specs[c] for c in inputs), out_specs=tuple(specs[c] for c in outputs),
                         check_vma=False)


def _cut(logits, support, axis):
    """Logits with those outside the support at OUTSIDE; as they are where the whole vocabulary is the support."""
    if not support.shape[-1]:
        return logits
    first = _first_token(logits.shape[-1], axis)
    return jnp.where(allowed(jnp.where(support < first, -1, support - first), logits.shape[-1]), logits, OUTSIDE)


def _forward(hidden, head, targets, valid, support, temperature, softcap, top, chunk, split):
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    axis = split.vocab if split else None

    def local(hidden, head, targets, valid, support, temperature):
        def one(_, xs):
            h, t, ok, kept = xs

            def compute():
                logits = _cut(scaled_logits(h, head, temperature, softcap), kept, axis)
                shifted, _, total, entropy = _normalised(logits, axis)
                out = jnp.where(ok, _picked(shifted, t, axis) - jnp.log(total), 0), jnp.where(ok, entropy, 0)
                if top:
                    ids, logps = _most_probable(shifted - jnp.log(total)[..., None], top, axis)
                    out += jnp.where(ok[..., None], ids, -1), jnp.where(ok[..., None], logps, 0)
                return out

            def skip():
                out = jnp.zeros(t.shape, acc), jnp.zeros(t.shape, acc)
                return out + (jnp.full((*t.shape, top), -1, jnp.int32), jnp.zeros((*t.shape, top), acc)) if top else out

            return None, jax.lax.cond(jnp.any(ok), compute, skip)

        _, out = jax.lax.scan(one, None, tuple(_chunks(x, chunk) for x in (hidden, targets, valid, support)))
        return tuple(_unchunk(x, targets.shape[1]) for x in out)

    saved = hidden, head, targets, valid, support, temperature
    return _placed(local, split, "rvrrrw", "rrrr" if top else "rr")(*saved), saved


def _backward(softcap, top, chunk, split, saved, grads):
    hidden, head, targets, valid, support, temperature = saved
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    axis = split.vocab if split else None

    def local(hidden, head, targets, valid, support, temperature, g_logp, g_entropy):
        def one(grad_head, xs):
            h, t, ok, kept, g_logp, g_entropy = xs

            def compute(grad_head):
                logits = scaled_logits(h, head, temperature, softcap)
                shifted, weights, total, entropy = _normalised(_cut(logits, kept, axis), axis)
                logp, p = shifted - jnp.log(total)[..., None], weights / total[..., None]
                onehot = jax.nn.one_hot(t - _first_token(logits.shape[-1], axis), logits.shape[-1], dtype=acc)
                d = g_logp[..., None] * (onehot - p) - g_entropy[..., None] * p * (logp + entropy[..., None])
                d = d / temperature
                if softcap:
                    d = d * (1 - jnp.square(logits * temperature / softcap))
                d = d.astype(h.dtype)
                grad_h = jax.lax.dot_general(
                    d, head.astype(h.dtype), (((2,), (1,)), ((), ())), preferred_element_type=acc)
                grad_w = jax.lax.dot_general(h, d, (((0, 1), (0, 1)), ((), ())), preferred_element_type=acc)
                return grad_head + grad_w, _over(axis, jax.lax.psum, grad_h).astype(h.dtype)

            def skip(grad_head):
                return grad_head, jnp.zeros_like(h)

            return jax.lax.cond(jnp.any(ok), compute, skip, grad_head)

        xs = tuple(_chunks(x, chunk) for x in (hidden, targets, valid, support, g_logp, g_entropy))
        grad_head, grad_hidden = jax.lax.scan(one, jnp.zeros(head.shape, acc), xs)
        grad_head = jax.lax.psum(grad_head, split.rows) if split and split.rows else grad_head
        return _unchunk(grad_hidden, targets.shape[1]), grad_head.astype(head.dtype)

    grads = tuple(jnp.where(valid, g, 0) for g in grads[:2])  # the most probable tokens' have none
    grad_hidden, grad_head = _placed(local, split, "rvrrrwrr", "rv")(*saved, *grads)
    return grad_hidden, grad_head, None, None, None, None


logprob_and_entropy.defvjp(_forward, _backward)
