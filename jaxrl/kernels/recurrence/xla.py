"""The chunked form of `recurrence` (Gated DeltaNet, arXiv 2412.06464, section 3.3) in plain XLA.

Within a chunk with state S before it, G the cumulative sum of g and rows i, j of its tokens:

    A = strictly lower (beta_i k_i.k_j e^(G_i - G_j)),  T = (I + A)^-1
    U = T (beta v) - T (beta e^G k) S
    out = (e^G q) S + lower (q_i.k_j e^(G_i - G_j)) U
    S <- e^G_end S + (e^(G_end - G) k)^T U

Without the delta U = beta v: nothing is solved (Mamba-2, arXiv 2405.21060, section 6).

The backward pass runs a stretch of chunks (chunks.stretch) forward again from the state before it, so nothing but the
inputs and one pair of states per stretch is kept. Sums over the completions of a prompt run in the order of the row.

Legend: N chunks of a stretch, B rows, C tokens per chunk, h key heads, r value heads of each, K key size, V value size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence.chunks import GIVEN, PROMPT, ZERO, Chunks, back, gather, into, stretch

EXACT = jax.lax.Precision.HIGHEST
BASE = 16  # rows of an inverse by substitution; larger ones are merged of these


def recurrence(q, k, v, g, beta, chunks: Chunks, state=None, *, delta: bool = True):
    """Computes api.recurrence in XLA, by chunks: returns (out [B, L, G, V] in v's dtype, last state [B, G, K, V]).

    Sums and the state are fp32 or better. Padding has output 0; rows whose chunks do not fit are NaN.

    Args:
      q, k: [B, L, H, K]. v: [B, L, G, V]. g, beta: [B, L, G], log of the decay and factor on what is written.
      chunks: of chunks_of, for these rows. state: [B, G, K, V], where rows that continue begin; None = zeros.
      delta: whether what the state returns for a token's key is taken off before its value is written."""
    given = by_group(k, v, state)
    (arrays, flags), used = in_stretches(stretch(k.shape[1], k.shape[3], v.shape[3]), q, k, v, g, beta, chunks)
    out, now = _through(delta, given, arrays[:5], (arrays[5], flags), jnp.sum(used, dtype=jnp.int32))
    return in_rows(out, now, chunks)


def _plainly(delta, given, arrays, rest, used):
    """Returns (out [stretches, N, B, C, h, r, V], the last states [B, h, r, K, V]) of the first `used` stretches.

    Chunks fill a row from its start: later stretches have no tokens, cost nothing and are 0. given, arrays, rest: of
    `by_group` and `in_stretches`."""
    return _forward(delta, given, arrays, rest, used, keep=False)[0]


_through: Any = jax.custom_vjp(_plainly, nondiff_argnums=(0,))


def _forward(delta, given, arrays, rest, used, keep=True):
    """Returns (the results of `_plainly`, what its backward pass needs). keep: the states before each stretch, too."""

    def one(i, carry):
        pair, out, kept = carry
        kept = jax.tree.map(lambda all_, x: _put(all_, x, i), kept, pair if keep else ())
        pair, found = _STRETCHES[delta](pair, given, *_at(i, arrays, rest))
        return pair, _put(out, found, i), kept

    pair = given, jnp.zeros_like(given)
    many = lambda x: jnp.zeros((len(arrays[0]), *x.shape), x.dtype)  # noqa: E731
    kept = jax.tree.map(many, pair if keep else ())
    pair, out, kept = jax.lax.fori_loop(0, used, one, (pair, jnp.zeros_like(arrays[2]), kept))
    return (out, pair[0]), (given, arrays, rest, used, kept)


def _backward(delta, found, cotangents):
    """Returns the gradients of given and arrays, from the last used stretch to the first, each run forward again."""
    given, arrays, rest, used, kept = found

    def one(j, carry):
        pair, of_given, arrays = carry  # a stretch's gradients take the place of its arrays
        i = used - 1 - j
        own, others = _at(i, arrays, rest)
        step = lambda pair, given, own: _STRETCHES[delta](pair, given, own, others)  # noqa: E731
        _, pull = jax.vjp(step, _at(i, kept), given, own)
        pair, more, of_own = pull((pair, _at(i, cotangents[0])))
        return pair, of_given + more, jax.tree.map(lambda all_, x: _put(all_, x, i), arrays, of_own)

    start = (cotangents[1], jnp.zeros_like(given)), jnp.zeros_like(given), arrays  # which are 0 where no token is
    pair, of_given, of_arrays = jax.lax.fori_loop(0, used, one, start)
    return of_given + pair[0], of_arrays, None, None


_through.defvjp(_forward, _backward)


def _at(i, *trees):
    """Returns stretch i of each tree; of one tree by itself."""
    found = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), trees)
    return found if len(trees) > 1 else found[0]


def _put(all_, one, i):
    return jax.lax.dynamic_update_index_in_dim(all_, one, i, 0)


def by_group(k, v, state):
    """Returns the states before the rows by key head, [B, h, r, K, V] in fp32 or better; zeros if `state` is None.

    k, v: [B, L, h, K] and [B, L, h * r, V], of which shapes and v's dtype are read. state: [B, h * r, K, V] or None."""
    (batch, _, heads, key), acc = k.shape, jnp.promote_types(v.dtype, jnp.float32)
    shape = batch, heads, v.shape[2] // heads, key, v.shape[3]
    return jnp.zeros(shape, acc) if state is None else state.astype(acc).reshape(shape)


def in_stretches(length: int, q, k, v, g, beta, chunks: Chunks):
    """Cuts tokens into stretches of `length` chunks.

    Args:
      length: chunks of a stretch.
      q, k: [B, L, h, K]. v: [B, L, h * r, V]. g, beta: [B, L, h * r]; they come out in fp32 or better.
      chunks: of chunks_of, for these rows.

    Returns:
      (arrays, flags), used.
      arrays: q, k, v, g, beta and chunks.enters, [stretches, N, B, C, ...], with value heads as h, r.
      flags: start, saves and count of the chunks, [stretches, N, B].
      used: [stretches] bool, whether a stretch has tokens. Chunks that fill up the last stretch have none."""
    acc, heads = jnp.promote_types(v.dtype, jnp.float32), k.shape[2]
    repeats = v.shape[2] // heads
    grouped = lambda x: x.reshape(*x.shape[:2], heads, repeats, *x.shape[3:])  # noqa: E731
    g, beta = grouped(g.astype(acc)), grouped(beta.astype(acc))
    arrays = [into(x, chunks) for x in (q, k, grouped(v), g, beta)] + [gather(chunks.enters, chunks)]
    flags = [x.T for x in (chunks.start, chunks.saves, chunks.count)]
    missing = -arrays[0].shape[0] % length

    def cut(x):
        """[N, ...] as [stretches, length, ...], filled up with chunks without tokens."""
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, length, *x.shape[1:])

    return jax.tree.map(cut, (arrays, flags)), jnp.any(cut(chunks.count.T) > 0, axis=(1, 2))


def in_rows(out, now, chunks: Chunks):
    """Returns (out [B, L, G, V], state [B, G, K, V]) of out [stretches, N, B, C, h, r, V] and the last states [B, h, r,
    K, V]; NaN for rows that do not fit."""
    out = back(out.reshape(-1, *out.shape[2:])[:chunks.start.shape[1]], chunks)
    out, now = out.reshape(*out.shape[:2], -1, out.shape[-1]), now.reshape(len(now), -1, *now.shape[3:])
    return tuple(jnp.where(chunks.fits.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan) for x in (out, now))


class Prepared(NamedTuple):
    """The parts of chunks that depend on no state, in fp32 or better, all [N, B, h, r, ...].

    With S the state before a chunk, and the module's equations:

        U = writes - reads S,   out = faded q S + attended U,   S <- end S + (left k)^T U
    """

    reads: Any             # [..., C, K]; None without the delta
    writes: jax.Array      # [..., C, V]
    attended: jax.Array    # [..., C, C] weights of the chunk's own updates
    faded: jax.Array       # [..., C] share of S that is left at each token
    left: jax.Array        # [..., C] share of a token that is left after the chunk; 0: the token does not enter
    end: jax.Array         # [...] share of S that is left after the chunk


def prepared(delta: bool, arrays, precision=EXACT) -> Prepared:
    """Computes the Prepared of the chunks of a stretch.

    Args:
      delta: whether the update is a delta rule; without it, `reads` is None.
      arrays: q, k, v, g, beta and enters of `in_stretches`, of one stretch.
      precision: of the products with the inverse.
    """
    q, k, v, g, beta, enters = arrays
    acc, size = g.dtype, q.shape[2]
    row = jnp.arange(size)
    wide = lambda mask: mask.reshape(*(1,) * 4, size, size)  # noqa: E731
    lower, strictly = wide(row[:, None] >= row[None]), wide(row[:, None] > row[None])
    by_head = lambda x: jnp.moveaxis(x, 2, -1)  # noqa: E731  [N, B, h, r, C]
    total, beta = by_head(jnp.cumsum(g, axis=2)), by_head(beta)
    gap = total[..., :, None] - total[..., None, :]
    decay = jnp.where(lower, jnp.exp(jnp.where(lower, gap, 0)), 0)
    pairs = lambda a, b: jnp.einsum(  # noqa: E731
        "nbihk,nbjhk->nbhij", a, b, preferred_element_type=acc, precision=EXACT)[:, :, :, None]
    attended, faded = pairs(q, k) * decay, jnp.exp(total)
    reads, writes = None, beta[..., None] * jnp.moveaxis(v.astype(acc), 2, 4)  # [N, B, h, r, C, V]
    if delta:
        solved = inverse(jnp.where(strictly, pairs(k, k) * decay * beta[..., None], 0))
        reads = beta[..., None] * faded[..., None] * by_key(k.astype(acc))
        reads, writes = (jnp.matmul(solved, x, precision=precision) for x in (reads, writes))
    end = jnp.sum(jnp.where(enters[:, :, None, None], by_head(g), 0), axis=-1)
    left = jnp.where(enters[:, :, None, None], jnp.exp(at_most_zero(end[..., None] - total)), 0)
    return Prepared(reads, writes, attended, faded, left, jnp.exp(end))


def by_key(x_NxBxCxhxK):
    """Moves key heads before tokens: [N, B, C, h, K] -> [N, B, h, 1, C, K]."""
    return jnp.moveaxis(x_NxBxCxhxK, 2, 3)[:, :, :, None]


def _stretch(delta, carry, given, arrays, rest):
    """Returns (pair, out [N, B, C, h, r, V]) of a stretch.

    carry: the state before it and that behind the prompt, each [B, h, r, K, V] in fp32 or better; pair: those behind
    it. given: the state before the rows. arrays: q, k, v, g, beta of `in_stretches`; rest: (enters, its flags).
    """
    enters, (start, saves, _) = rest
    (q, k, v, *_), acc = arrays, carry[0].dtype
    made = prepared(delta, [*arrays, enters])
    product = lambda a, b: jnp.matmul(a, b, precision=EXACT)  # noqa: E731
    kept, asked = (x[..., None] * by_key(y.astype(acc)) for x, y in ((made.left, k), (made.faded, q)))

    def one(carry, this):
        now, prompt = carry
        start, saves, reads, writes, attended, asked, kept, end = this
        start = start.reshape(-1, 1, 1, 1, 1)
        now = jnp.select([start == ZERO, start == PROMPT, start == GIVEN], [jnp.zeros_like(now), prompt, given], now)
        update = writes - product(reads, now) if delta else writes
        out = product(asked, now) + product(attended, update)
        now = end[..., None, None] * now + product(jnp.swapaxes(kept, -1, -2), update)
        return (now, jnp.where(saves.reshape(start.shape), now, prompt)), out.astype(v.dtype)

    carry, out = jax.lax.scan(
        one, carry, (start, saves, made.reads, made.writes, made.attended, asked, kept, made.end))
    return carry, jnp.moveaxis(out, 4, 2)


_STRETCHES = {delta: functools.partial(_stretch, delta) for delta in (True, False)}  # traced once each


def at_most_zero(gap):
    """Returns min(gap, 0) with gradient 1 everywhere. Exactly computed, gap is never positive; rounding can make it so.
    """
    return gap - jax.lax.stop_gradient(jnp.maximum(gap, 0))


@jax.custom_vjp
def inverse(lower_xCxC):
    """Returns (I + A)^-1 of strictly lower triangular matrices A [..., C, C], C a power of two, in A's dtype.

    By substitution within BASE rows and merges above, [[P, 0], [-Q A21 P, Q]]: stable where keys repeat, which
    powers of A are not."""
    size = lower_xCxC.shape[-1]
    lead = lower_xCxC.shape[:-2]
    width = min(BASE, size)
    count = size // width
    blocks = lower_xCxC.reshape(*lead, count, width, count, width)
    diagonal = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)  # [..., count, width, width]
    found = _by_rows(diagonal.reshape(-1, width, width)).reshape(diagonal.shape)
    while width < size:
        count //= 2
        blocks = lower_xCxC.reshape(*lead, count, 2, width, count, 2, width)
        below = jnp.moveaxis(jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        pair = found.reshape(*lead, count, 2, width, width)
        upper, under = pair[..., 0, :, :], pair[..., 1, :, :]
        corner = -jnp.matmul(jnp.matmul(under, below, precision=EXACT), upper, precision=EXACT)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        found = jnp.concatenate([top, jnp.concatenate([corner, under], axis=-1)], axis=-2)
        width *= 2
    return found.reshape(*lead, size, size)


def _by_rows(lower_MxCxC):
    """`inverse` row by row. (XLA for CPUs crashes on the unrolled sums, which it fuses.)"""
    identity = jnp.eye(lower_MxCxC.shape[-1], dtype=lower_MxCxC.dtype)[None]

    def one(i, found):
        row = jax.lax.dynamic_slice_in_dim(lower_MxCxC, i, 1, axis=1)
        row = jax.lax.dynamic_slice_in_dim(identity, i, 1, axis=1) - jnp.matmul(row, found, precision=EXACT)
        return jax.lax.dynamic_update_slice_in_dim(found, row, i, axis=1)

    return jax.lax.fori_loop(0, lower_MxCxC.shape[-1], one, jnp.zeros_like(lower_MxCxC))


def _inverse_gradient(found, g):
    """d(M^-1) = -M^-1 dM M^-1."""
    turned = jnp.swapaxes(found, -1, -2)
    grad = -jnp.matmul(jnp.matmul(turned, g, precision=EXACT), turned, precision=EXACT)
    return (jnp.tril(grad, -1),)


inverse.defvjp(lambda a: (found := inverse(a), found), _inverse_gradient)
