"""`attention` in XLA over the blocks of keys that each block of queries sees: the work follows the documents, not the row.

Neighbouring blocks of queries gather their key blocks together, as many for each as the one that needs most (of a few sizes,
chosen on the device; where that is all of them, nothing is gathered). The backward pass computes the scores again. At most SCORES
numbers exist at once, or those of one block of queries per row, so memory is linear in the row length.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size, C queries or keys per block,
N query blocks, M key blocks, m gathered ones.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import reference
from jaxrl.kernels.attention.blocks import NO_KEY, NO_QUERY, BlockLists, active_blocks, block_lists
from jaxrl.kernels.platform import platform

BLOCK = 64
WORTH_IT = 192  # queries from which `auto` prefers this to the reference
SCORES = 1 << 24  # numbers at once
SCORES_CPU = 1 << 20  # what its cache holds


def work_of(q_shape, kv_shape, dtype, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, *,
            window) -> BlockLists:
    """The key blocks of every query block, for all layers of a window. Looks at as many queries at once as have SCORES pairs.

    NotImplementedError for short rows: there `auto` runs the reference, which has no use for the lists.
    """
    del kv_shape, dtype
    if q_shape[1] < WORTH_IT:
        raise NotImplementedError(f"{q_shape[1]} queries: the reference is faster")
    return _lists(q_shape[0], q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, window)


def _lists(rows, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, window) -> BlockLists:
    blocks = -(-q_positions_BxL.shape[1] // BLOCK)
    at_once = max(1, SCORES // (rows * BLOCK * k_positions_BxS.shape[1]))
    count = -(-blocks // at_once)

    def cut(x, value):
        return None if x is None else _cut_blocks(_cut(x, value), count, -(-blocks // count))

    def some(ids):
        positions, segments, prefixes = (None if x is None else x.reshape(len(x), -1) for x in ids)
        return active_blocks(positions, k_positions_BxS, segments, k_segments_BxS, prefixes, window=window, block_q=BLOCK, block_k=BLOCK)

    found = jax.lax.map(some, (cut(q_positions_BxL, NO_QUERY), cut(q_segments_BxL, 0), cut(q_prefixes_BxL, 0)))
    return block_lists(_joined(found, blocks))


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
              q_prefixes_BxL, *, window, softcap, scale, chosen=True, work=None):
    """See api.attention. Without `chosen`, short rows are left to the reference (NotImplementedError)."""
    length = q_BxLxHxK.shape[1]
    if not chosen and length < WORTH_IT:
        raise NotImplementedError(f"{length} queries: the reference is faster")
    if work is None:
        work = _lists(len(q_BxLxHxK), q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, window)
    if q_segments_BxL is None:
        q_segments_BxL, k_segments_BxS = jnp.ones_like(q_positions_BxL), jnp.ones_like(k_positions_BxS)
    if q_prefixes_BxL is None:
        q_prefixes_BxL = jnp.zeros_like(q_segments_BxL)
    rows = len(q_BxLxHxK)
    ids = [_cut(jnp.broadcast_to(x, (rows, x.shape[1])), value) for x, value in (
        (q_positions_BxL, NO_QUERY), (q_segments_BxL, 0), (q_prefixes_BxL, 0), (k_positions_BxS, NO_KEY), (k_segments_BxS, 0))]
    work = BlockLists(*(jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in work))
    q, k, v = (_cut(x, 0) for x in (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK))
    out = _attention(q, k, v, ids, work, window, softcap, float(scale))
    return out.reshape(rows, -1, *out.shape[3:])[:, :length]


def _cut(x_BxLx, value):
    """[B, L, ...] -> [B, blocks, C, ...], the last one filled up."""
    x = jnp.pad(x_BxLx, [(0, 0), (0, -x_BxLx.shape[1] % BLOCK)] + [(0, 0)] * (x_BxLx.ndim - 2), constant_values=value)
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:])


def sizes_of(blocks: int) -> tuple[int, ...]:
    """The numbers of key blocks that may be gathered, each compiled: 2, 5, 12, 30 and so on, and all."""
    sizes = [2]
    while 4 * sizes[-1] <= 3 * blocks:
        sizes.append(sizes[-1] * 5 // 2)
    return (*sizes[:-1], blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attention(q_BxNxCxHxK, k_BxMxCxGxK, v_BxMxCxGxK, ids, work, window, softcap, scale):
    return _forward(q_BxNxCxHxK, k_BxMxCxGxK, v_BxMxCxGxK, ids, work, window, softcap, scale)[0]


def _forward(q, k, v, ids, work, window, softcap, scale):
    def group(_, xs):
        q, q_ids, at, counts = xs

        def run(m):
            return _some(q, k, v, q_ids, ids[3:], at[:, :, :m], counts, window, softcap, scale)

        return None, _sized(run, k.shape[1], counts)

    return _joined(jax.lax.scan(group, None, _groups(q, k, ids, work))[1], q.shape[1]), (q, k, v, ids, work)


def _backward(window, softcap, scale, saved, g):
    q, k, v, ids, work = saved

    def group(grads, xs):
        (q, q_ids, at, counts), g = xs

        def run(m):
            def out(q, k, v):
                return _some(q, k, v, q_ids, ids[3:], at[:, :, :m], counts, window, softcap, scale)

            gq, *more = jax.vjp(out, q, k, v)[1](g)
            return gq, jax.tree.map(jnp.add, grads, tuple(more))

        gq, grads = _sized(run, k.shape[1], counts)
        return grads, gq

    xs = _groups(q, k, ids, work)
    zeros = jnp.zeros_like(k), jnp.zeros_like(v)
    (gk, gv), gq = jax.lax.scan(group, zeros, (xs, _cut_blocks(g, xs[0].shape[0], xs[0].shape[2])))
    return _joined(gq, q.shape[1]), gk, gv, None, None


_attention.defvjp(_forward, _backward)


def _sized(run, blocks, counts):
    """run(m) for the smallest m of sizes_of that holds what each of these blocks of queries sees."""
    sizes = sizes_of(blocks)
    if len(sizes) == 1:
        return run(sizes[0])
    which = jnp.searchsorted(jnp.array(sizes), counts.max())
    return jax.lax.switch(which, [functools.partial(run, m) for m in sizes])


def _groups(q_BxNxCxHxK, k_BxMxCxGxK, ids, work):
    """(queries, their ids, the blocks they see, how many of those count), in groups of neighbouring blocks, which come first."""
    rows, blocks, _, heads, _ = q_BxNxCxHxK.shape
    at_once = SCORES_CPU if platform() == "cpu" else SCORES
    each = max(1, min(blocks, at_once // (rows * heads * BLOCK * BLOCK * k_BxMxCxGxK.shape[1])))
    count = -(-blocks // each)
    return jax.tree.map(lambda x: _cut_blocks(x, count, -(-blocks // count)), (q_BxNxCxHxK, ids[:3], work.blocks, work.counts))


def _cut_blocks(x_BxNx, count, each):
    """[B, N, ...] -> [count, B, each, ...], zeros at the end."""
    x = jnp.pad(x_BxNx, [(0, 0), (0, count * each - x_BxNx.shape[1])] + [(0, 0)] * (x_BxNx.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, each, *x.shape[2:]), 1, 0)


def _joined(x, blocks):
    """The inverse of _cut_blocks."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :blocks]


def _some(q_BxnxCxHxK, k_BxMxCxGxK, v_BxMxCxGxK, q_ids, k_ids, at_Bxnxm, counts_Bxn, window, softcap, scale):
    """[B, n, C, H, K]: the attention of some blocks of queries. at: the key blocks they see; where that may be all, none is gathered."""
    options = dict(window=window, softcap=softcap, scale=scale)
    rows, n, size = q_BxnxCxHxK.shape[:3]
    m = at_Bxnxm.shape[2]
    if m == k_BxMxCxGxK.shape[1]:
        flat = lambda x: x.reshape(rows, -1, *x.shape[3:])  # noqa: E731
        q, k, v, q_ids, k_ids = jax.tree.map(flat, (q_BxnxCxHxK, k_BxMxCxGxK, v_BxMxCxGxK, q_ids, k_ids))
        out = reference.attention(q, k, v, q_ids[0], k_ids[0], q_ids[1], k_ids[1], q_ids[2], **options)
        return out.reshape(q_BxnxCxHxK.shape)

    def gathered(x_BxMxCx):
        found = jax.vmap(lambda x, at: x[at])(x_BxMxCx, at_Bxnxm)
        return found.reshape(rows * n, m * size, *x_BxMxCx.shape[3:])

    counts = jnp.arange(m) < counts_Bxn[..., None]  # the lists repeat their last block
    positions, segments = (gathered(x) for x in k_ids)
    positions = jnp.where(jnp.repeat(counts.reshape(rows * n, m), size, axis=1), positions, NO_KEY)
    q, *q_ids = (x.reshape(rows * n, size, *x.shape[3:]) for x in (q_BxnxCxHxK, *q_ids))
    out = reference.attention(q, gathered(k_BxMxCxGxK), gathered(v_BxMxCxGxK), q_ids[0], positions, q_ids[1], segments, q_ids[2],
                              **options)
    return out.reshape(q_BxnxCxHxK.shape)
