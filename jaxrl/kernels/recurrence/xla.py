"""The chunked form of `recurrence` (Gated DeltaNet, arXiv 2412.06464, section 3.3) in plain XLA.

Within a chunk with state S before it, G the cumulative sum of g and rows i, j of its tokens:

    A = strictly lower (beta_i k_i.k_j e^(G_i - G_j)),  T = (I + A)^-1
    U = T (beta v) - T (beta e^G k) S
    out = (e^G q) S + lower (q_i.k_j e^(G_i - G_j)) U
    S <- e^G_end S + (e^(G_end - G) k)^T U

Without the delta U = beta v: nothing is solved (Mamba-2, arXiv 2405.21060, section 6).

The backward pass runs STRETCH chunks forward again from the state before them, so nothing but the inputs and one pair
of states per stretch is kept. Sums over the completions of a prompt run in the order of the row.

Legend: N chunks of a stretch, B rows, C tokens per chunk, h key heads, r value heads of each, K key size, V value size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence.chunks import GIVEN, PROMPT, STRETCH, ZERO, Chunks, back, gather, into

EXACT = jax.lax.Precision.HIGHEST
BASE = 16  # rows of an inverse by substitution; larger ones are merged of these


def recurrence(q, k, v, g, beta, chunks: Chunks, state=None, *, delta: bool = True):
    """See api.recurrence."""
    acc = jnp.promote_types(v.dtype, jnp.float32)
    batch, length, heads, key = k.shape
    repeats, value = v.shape[2] // heads, v.shape[3]
    given = jnp.zeros((batch, heads, repeats, key, value), acc)
    if state is not None:
        given = state.astype(acc).reshape(given.shape)
    grouped = lambda x: x.reshape(batch, length, heads, repeats, *x.shape[3:])  # noqa: E731
    g, beta = grouped(g.astype(acc)), grouped(beta.astype(acc))
    arrays = [into(x, chunks) for x in (q, k, grouped(v), g, beta)] + [gather(chunks.enters, chunks)]
    flags = [x.T for x in (chunks.start, chunks.saves)]
    count = arrays[0].shape[0]
    missing = -count % STRETCH

    def cut(x):
        """[N, ...] as [stretches, STRETCH, ...], filled up with chunks without tokens."""
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, STRETCH, *x.shape[1:])

    stretches = jax.tree.map(cut, (arrays, flags))
    used = jnp.any(cut(chunks.count.T) > 0, axis=(1, 2))

    def stretch(carry, this):
        own, used = this
        blank = jnp.zeros((*own[0][2].shape[:3], heads, repeats, value), v.dtype)
        return jax.lax.cond(used, _STRETCHES[delta], lambda carry, given, own: (carry, blank), carry, given, own)

    stretch = jax.checkpoint(stretch, prevent_cse=False)
    (now, _), out = jax.lax.scan(stretch, (given, jnp.zeros_like(given)), (stretches, used))
    out = back(out.reshape(-1, *out.shape[2:])[:count], chunks).reshape(v.shape)
    bad = lambda x: jnp.where(chunks.fits.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)  # noqa: E731
    return bad(out), bad(now.reshape(batch, heads * repeats, key, value))


def _stretch(delta, carry, given, own):
    """(states behind N chunks, their outputs [N, B, C, h, r, V])."""
    (q, k, v, g, beta, enters), (start, saves) = own
    acc, dtype = carry[0].dtype, v.dtype
    size = q.shape[2]
    row = jnp.arange(size)
    wide = lambda mask: mask.reshape(*(1,) * 4, size, size)  # noqa: E731
    lower, strictly = wide(row[:, None] >= row[None]), wide(row[:, None] > row[None])
    by_head = lambda x: jnp.moveaxis(x, 2, -1)  # noqa: E731  [N, B, h, r, C]
    total, beta = by_head(jnp.cumsum(g, axis=2)), by_head(beta)
    gap = total[..., :, None] - total[..., None, :]
    decay = jnp.where(lower, jnp.exp(jnp.where(lower, gap, 0)), 0)
    pairs = lambda a, b: jnp.einsum(  # noqa: E731
        "nbihk,nbjhk->nbhij", a, b, preferred_element_type=acc, precision=EXACT)[:, :, :, None]
    system = jnp.where(strictly, pairs(k, k) * decay * beta[..., None], 0) if delta else None
    solved = inverse(system) if delta else None
    attended = pairs(q, k) * decay
    q, k, v = (x.astype(acc) for x in (q, k, v))
    q, k = (jnp.moveaxis(x, 2, 3)[:, :, :, None] for x in (q, k))  # [N, B, h, 1, C, K]
    v = jnp.moveaxis(v, 2, 4)                                      # [N, B, h, r, C, V]
    product = lambda a, b: jnp.matmul(a, b, precision=EXACT)  # noqa: E731
    faded = jnp.exp(total)[..., None]
    reads, writes = (product(solved, beta[..., None] * faded * k), product(solved, beta[..., None] * v)) if delta else (
        None, beta[..., None] * v)
    end = jnp.sum(jnp.where(enters[:, :, None, None], by_head(g), 0), axis=-1)[..., None, None]
    kept = jnp.where(enters[:, :, None, None, :, None], jnp.exp(at_most_zero(end - total[..., None])) * k, 0)
    asked = faded * q

    def one(carry, this):
        now, prompt = carry
        start, saves, reads, writes, attended, asked, kept, end = this
        start = start.reshape(-1, 1, 1, 1, 1)
        now = jnp.select([start == ZERO, start == PROMPT, start == GIVEN], [jnp.zeros_like(now), prompt, given], now)
        update = writes - product(reads, now) if delta else writes
        out = product(asked, now) + product(attended, update)
        now = jnp.exp(end) * now + product(jnp.swapaxes(kept, -1, -2), update)
        return (now, jnp.where(saves.reshape(start.shape), now, prompt)), out.astype(dtype)

    carry, out = jax.lax.scan(one, carry, (start, saves, reads, writes, attended, asked, kept, end))
    return carry, jnp.moveaxis(out, 4, 2)


_STRETCHES = {delta: functools.partial(_stretch, delta) for delta in (True, False)}  # traced once each


def at_most_zero(gap):
    """Returns min(gap, 0) with the gradient of gap everywhere: only rounding makes gap positive."""
    return gap - jax.lax.stop_gradient(jnp.maximum(gap, 0))


@jax.custom_vjp
def inverse(lower_xCxC):
    """Returns (I + A)^-1 of strictly lower triangular matrices A [..., C, C], C a power of two.

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
