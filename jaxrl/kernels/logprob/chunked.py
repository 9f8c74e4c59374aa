"""`logprob_and_entropy` in chunks of tokens with a custom vjp: logits of one chunk exist at a time.

The valid tokens of all rows are lined up first, so that every chunk but the last is full and those without a token are skipped.
The forward pass keeps its inputs and three numbers per token (see _normaliser); the backward pass computes each chunk's logits
again and writes
    d logits = g_logp * (onehot - p) - g_entropy * p * (log p + H)
(H the entropy), then applies the chain rule of temperature and soft-cap.

On a mesh (`Split`) every device works on its own rows and its own part of the vocabulary: logits are never gathered, a
device skips its own empty chunks, and the head's gradient is summed over the rows' devices once, after the last chunk.

Legend: R rows, S scored tokens per row, N = R * S, C tokens per chunk, T chunks, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.logprob.reference import OUTSIDE, allowed, scaled_logits


class Split(NamedTuple):
    """Mesh axes that rows and vocabulary are split over under `jax.set_mesh`. None = whole."""

    rows: tuple[str, ...] | None
    vocab: str | None


class Line(NamedTuple):
    """The valid ones among N tokens, in order, cut into T chunks."""

    at: jax.Array     # [T, C] int32, where each place's token is among the N; N = none
    place: jax.Array  # [N] int32, each valid token's place among the T * C
    valid: jax.Array  # [N] bool

    def chunks(self, x_RxSx):
        """[R, S, ...] -> [T, C, ...]; 0 at places without a token."""
        return jnp.take(x_RxSx.reshape(len(self.valid), *x_RxSx.shape[2:]), self.at, axis=0, mode="fill", fill_value=0)

    def back(self, x_TxCx, shape_RxS, empty=0):
        """[T, C, ...] -> [R, S, ...], `empty` where not valid."""
        found = x_TxCx.reshape(self.at.size, *x_TxCx.shape[2:])[self.place]
        found = jnp.where(self.valid.reshape(-1, *[1] * (found.ndim - 1)), found, empty)
        return found.reshape(*shape_RxS, *found.shape[1:])


def _line(valid_RxS, chunk: int) -> Line:
    valid = valid_RxS.reshape(-1)
    count = len(valid)
    at = jnp.nonzero(valid, size=-(-count // chunk) * chunk, fill_value=count)[0].astype(jnp.int32)
    return Line(at.reshape(-1, chunk), jnp.maximum(jnp.cumsum(valid.astype(jnp.int32)) - 1, 0), valid)


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


def _normaliser(logits, axis):
    """(top, logarithm of the sum of exp(logits - top), entropy) [C] of logits [C, V / devices of the axis], over the whole
    vocabulary. A log-prob is logit - top - that logarithm."""
    top = _over(axis, jax.lax.pmax, jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    weights = jnp.exp(shifted)
    total = _over(axis, jax.lax.psum, jnp.sum(weights, axis=-1))
    mean = _over(axis, jax.lax.psum, jnp.sum(weights * shifted, axis=-1)) / total
    return top[:, 0], jnp.log(total), jnp.log(total) - mean


def _most_probable(logp, count: int, axis):
    """(ids, log-probs) [C, count] of the whole vocabulary, the highest first; of equal ones the lowest id."""
    found, ids = jax.lax.top_k(logp, min(count, logp.shape[-1]))
    ids = ids + _first_token(logp.shape[-1], axis)
    if axis is not None:  # each device's own best, in the order of their ids
        found, ids = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (found, ids))
        found, places = jax.lax.top_k(found, count)
        ids = jnp.take_along_axis(ids, places, axis=-1)
    return ids, found


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def logprob_and_entropy(
        hidden_RxSxD, head_DxV, targets_RxS, valid_RxS, support_RxSxK, temperature, softcap, top, chunk, split):
    """See api.logprob_and_entropy."""
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
    axis = split.vocab if split else None

    def local(hidden, head, targets, valid, support, temperature):
        line = _line(valid, min(chunk, valid.size))

        def one(_, xs):
            at, h_CxD, t_C, kept_CxK = xs

            def compute():
                logits = _cut(scaled_logits(h_CxD, head, temperature, softcap), kept_CxK, axis)
                highest, log_sum, entropy = _normaliser(logits, axis)
                out = _picked(logits, t_C, axis) - highest - log_sum, entropy, highest, log_sum
                return out + (_most_probable(logits - highest[:, None] - log_sum[:, None], top, axis) if top else ())

            def skip():
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))

            return None, jax.lax.cond(at[0] < valid.size, compute, skip)

        _, out = jax.lax.scan(one, None, (line.at, *(line.chunks(x) for x in (hidden, targets, support))))
        return tuple(line.back(x, valid.shape, empty) for x, empty in zip(out, (0, 0, 0, 0, -1, 0), strict=False))

    inputs = hidden, head, targets, valid, support, temperature
    logp, entropy, highest, log_sum, *most = _placed(local, split, "rvrrrw", "rrrrrr" if top else "rrrr")(*inputs)
    return (logp, entropy, *most), (*inputs, highest, log_sum, entropy)


def _backward(softcap, top, chunk, split, saved, grads):
    hidden, head = saved[:2]
    acc = jnp.promote_types(hidden.dtype, jnp.float32)
    axis = split.vocab if split else None

    def local(hidden, head, targets, valid, support, temperature, *numbers):
        line = _line(valid, min(chunk, valid.size))

        def one(grad_head, xs):
            at, h_CxD, t_C, kept_CxK, *numbers = xs

            def compute(grad_head):
                highest, log_sum, entropy, g_logp, g_entropy = (x[:, None] for x in numbers)
                logits = scaled_logits(h_CxD, head, temperature, softcap)
                logp = _cut(logits, kept_CxK, axis) - highest - log_sum
                p, ids = jnp.exp(logp), _first_token(logits.shape[-1], axis) + jnp.arange(logits.shape[-1])
                d = g_logp * ((t_C[:, None] == ids) - p) - g_entropy * p * (logp + entropy)
                d = d / temperature
                if softcap:
                    d = d * (1 - jnp.square(logits * temperature / softcap))
                d = d.astype(h_CxD.dtype)
                grad_h = jax.lax.dot_general(d, head.astype(d.dtype), (((1,), (1,)), ((), ())), preferred_element_type=acc)
                grad_w = jax.lax.dot_general(h_CxD, d, (((0,), (0,)), ((), ())), preferred_element_type=acc)
                return grad_head + grad_w, _over(axis, jax.lax.psum, grad_h).astype(d.dtype)

            def skip(grad_head):
                return grad_head, jnp.zeros_like(h_CxD)

            return jax.lax.cond(at[0] < valid.size, compute, skip, grad_head)

        per_token = (hidden, targets, support, *numbers)
        grad_head, grad_hidden = jax.lax.scan(
            one, jnp.zeros(head.shape, acc), (line.at, *(line.chunks(x) for x in per_token)))
        grad_head = jax.lax.psum(grad_head, split.rows) if split and split.rows else grad_head
        return line.back(grad_hidden, valid.shape), grad_head.astype(head.dtype)

    grad_hidden, grad_head = _placed(local, split, "rvrrrwrrrrr", "rv")(*saved, *grads[:2])  # the most probable tokens have none
    return grad_hidden, grad_head, None, None, None, None


logprob_and_entropy.defvjp(_forward, _backward)
