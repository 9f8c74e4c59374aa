"""`attention` in XLA over the blocks of keys that each block of queries sees: work follows the documents, not the row.

Neighbouring blocks of queries gather their key blocks together, as many for each as the one that needs most (of a few
sizes, chosen on the device; where that is all of them, nothing is gathered). The backward pass computes the scores
again. At most SCORES numbers exist at once, or those of one block per row: memory is linear in its length.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size, C queries or keys per
block, N query blocks, M key blocks, m gathered ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import sinks as at_sinks
from jaxrl.kernels.attention.packed import reference
from jaxrl.kernels.attention.packed.blocks import NO_KEY, NO_QUERY, BlockLists, active_blocks, block_lists
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.kernels.platform import platform
from jaxrl.types import custom_vjp

BLOCK = 64
WORTH_IT = 192  # queries from which `auto` prefers this to the reference
SCORES = 1 << 24  # numbers at once
SCORES_CPU = 1 << 20  # what its cache holds


def work_of(q_shape, kv_shape, dtype, ids: Ids, *, window) -> BlockLists:
    """Returns the BlockLists of key blocks of every query block (of BLOCK tokens), for all layers of a window.

    At most SCORES pairs are compared at once, or those of one query block of each row.

    Args:
      q_shape: (B, L, H, K) of the queries. kv_shape, dtype: not read.
      ids: Ids, int positions and segments of queries [B, L] and keys [B, S]; the lists have as many rows as they do.
      window: positions that a query sees, itself included; 0 = all.

    Raises NotImplementedError for rows shorter than WORTH_IT, where `auto` runs the reference, which needs no lists."""
    del kv_shape, dtype
    if q_shape[1] < WORTH_IT:
        raise NotImplementedError(f"{q_shape[1]} queries: the reference is faster")
    return _lists(q_shape[0], ids, window)


def _lists(rows, ids: Ids, window) -> BlockLists:
    blocks = -(-ids.q_positions.shape[1] // BLOCK)
    at_once = max(1, SCORES // (rows * BLOCK * ids.k_positions.shape[1]))
    count = -(-blocks // at_once)

    def cut(x, value):
        return None if x is None else _cut_blocks(_cut(x, value), count, -(-blocks // count))

    def some(of_queries):
        positions, segments, prefixes, reach = (None if x is None else x.reshape(len(x), -1) for x in of_queries)
        own = ids._replace(q_positions=positions, q_segments=segments, q_prefixes=prefixes, q_reach=reach)
        return active_blocks(own, window=window, block_q=BLOCK, block_k=BLOCK)

    found = jax.lax.map(some, (cut(ids.q_positions, NO_QUERY), cut(ids.q_segments, 0), cut(ids.q_prefixes, 0),
                               cut(ids.q_reach, NO_QUERY)))
    return block_lists(_joined(found, blocks))


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, *, window, softcap, scale, chosen=True, work=None,
              sinks=None):
    """Computes api.attention in XLA, block by block of queries over the key blocks they see: out [B, L, H, K] in v's
    dtype.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK: queries, keys and values; scores and softmax are fp32 or better.
      ids: Ids, positions and segments, as `api.ids_of` returns them.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores, a number.
      chosen: False leaves rows shorter than WORTH_IT to the reference (NotImplementedError).
      work: of `work_of`, for these ids and this window; None = made here.
      sinks: [H] scores of keys that every query sees and that have no value; None = none."""
    rows, length = q_BxLxHxK.shape[:2]
    if not chosen and length < WORTH_IT:
        raise NotImplementedError(f"{length} queries: the reference is faster")
    ids, work = _prepared(rows, ids, work, window)
    return _attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, sinks, ids, work, _Options(window, softcap, float(scale)))


def forward_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, **options):
    """Returns (out [B, L, H, K] in v's dtype, lse [B, L, H] in fp32 or better) of attention to one part of a row's
    keys.

    lse is the natural logarithm of the softmax's sum over that part, -inf where a query sees no key of it; `out` means
    nothing there.

    Args:
      q, k, v: k and v of the part. ids: Ids of the queries [B, L] and of the part's keys [B, S].
      work: of `work_of` for them; None = made here.
      options: window (positions that a query sees, 0 = all), softcap (0 = none) and scale (a number), all of them."""
    ids, work = _prepared(len(q_BxLxHxK), ids, work, options["window"])
    out, log_sum, cut = _computed(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, work, _Options(**options))
    return cut.joined(out), cut.joined(log_sum[..., None])[..., 0]


def gradients_of_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, out_BxLxHxK, lse_BxLxH, g_BxLxHxK, **options):
    """Returns what one part of a row's keys adds to the gradients: q's [B, L, H, K], k's and v's [B, S, G, K], in their
    dtypes.

    Args:
      q, k, v: k and v of the part. ids: Ids of the queries [B, L] and of the part's keys [B, S].
      work: of `work_of` for them; None = made here.
      out_BxLxHxK, lse_BxLxH: of the whole row, all parts merged; lse natural logarithms, -inf where a query sees no
        key.
      g_BxLxHxK: cotangent of out.
      options: window (positions that a query sees, 0 = all), softcap (0 = none) and scale (a number), all of them."""
    ids, work = _prepared(len(q_BxLxHxK), ids, work, options["window"])
    cut = _Cut.of(q_BxLxHxK.shape, _keys(k_BxSxGxK).shape)
    log_sum = cut.queries(_finite(lse_BxLxH)[..., None])[..., 0]
    saved = q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, None, ids, work, out_BxLxHxK, log_sum
    return _backward(_Options(**options), saved, g_BxLxHxK)[:3]


def _prepared(rows, ids: Ids, work, window):
    """Returns (ids in blocks, of every row and kind, the work)."""
    if work is None:
        work = _lists(rows, ids, window)
    if ids.q_segments is None:
        ids = ids._replace(q_segments=jnp.ones_like(ids.q_positions), k_segments=jnp.ones_like(ids.k_positions))
    if ids.q_prefixes is None:
        ids = ids._replace(q_prefixes=jnp.zeros_like(ids.q_segments))
    ids = Ids(*(x if x is None else _cut(jnp.broadcast_to(x, (rows, x.shape[1])), value)
                for x, value in zip(ids, (NO_QUERY, NO_KEY, 0, 0, 0, NO_QUERY), strict=True)))
    return ids, BlockLists(*(jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in work))


class _Options(NamedTuple):
    window: int
    softcap: float
    scale: float


def _cut(x_BxLx, value):
    """Maps [B, L, ...] -> [B, blocks, C, ...], the last one filled up."""
    x = jnp.pad(x_BxLx, [(0, 0), (0, -x_BxLx.shape[1] % BLOCK)] + [(0, 0)] * (x_BxLx.ndim - 2), constant_values=value)
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:])


def sizes_of(blocks: int) -> tuple[int, ...]:
    """Returns the numbers of key blocks that may be gathered, each compiled: 2, 5, 12, 30 and so on, and all."""
    sizes = [2]
    while 4 * sizes[-1] <= 3 * blocks:
        sizes.append(sizes[-1] * 5 // 2)
    return (*sizes[:-1], blocks)


@custom_vjp(6)
def _attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, sinks_H, ids, work, options):
    return _forward(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, sinks_H, ids, work, options)[0]


def _forward(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, sinks_H, ids, work, options):
    out, log_sum, cut = _computed(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, work, options)
    log_sum = _finite(log_sum)
    if sinks_H is not None:
        share, log_sum = at_sinks.share(log_sum, cut.of_heads(sinks_H))
        out = (out * share[..., None]).astype(out.dtype)
    out = cut.joined(out)
    return out, (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, sinks_H, ids, work, out, log_sum)


def _finite(log_sum):
    """Returns the logarithm, 0 for a query that saw no key, so that in the backward pass it weights none."""
    return jnp.where(jnp.isneginf(log_sum), 0.0, log_sum)


def _computed(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, work, options):
    """Returns (out and logarithms of the sums as `cut` has queries, cut)."""
    k, v = _keys(k_BxSxGxK), _keys(v_BxSxGxK)
    cut = _Cut.of(q_BxLxHxK.shape, k.shape)

    def group(_, xs):
        q, q_ids, at, counts = xs

        def run(m):
            return _some(q, k, v, _bias(q_ids, ids, at[:, :, :m], counts, options.window), at[:, :, :m], options)

        return None, _sized(run, k.shape[2], counts)

    xs = cut.queries(q_BxLxHxK), *cut.blocks((_of_queries(ids), work.blocks, work.counts))
    _, (out, log_sum) = jax.lax.scan(group, None, xs)
    return out, log_sum, cut


def _backward(options, saved, g_BxLxHxK):
    q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, sinks_H, ids, work, out_BxLxHxK, log_sum = saved
    acc = jnp.promote_types(g_BxLxHxK.dtype, jnp.float32)
    k, v = _keys(k_BxSxGxK), _keys(v_BxSxGxK)
    cut = _Cut.of(q_BxLxHxK.shape, k.shape)
    delta = jnp.sum(g_BxLxHxK.astype(acc) * out_BxLxHxK.astype(acc), axis=-1, keepdims=True)

    def group(grads, xs):
        q, g, delta, log_sum, q_ids, at, counts = xs

        def run(m):
            bias = _bias(q_ids, ids, at[:, :, :m], counts, options.window)
            return _some_grads(grads, q, k, v, g, delta[..., 0], log_sum, bias, at[:, :, :m], options)

        return _sized(run, k.shape[2], counts)

    q, g, delta = map(cut.queries, (q_BxLxHxK, g_BxLxHxK, delta))
    xs = q, g, delta, log_sum, *cut.blocks((_of_queries(ids), work.blocks, work.counts))
    (gk, gv), gq = jax.lax.scan(group, (jnp.zeros(k.shape, acc), jnp.zeros(v.shape, acc)), xs)
    gk, gv = (_from_keys(x, like) for x, like in ((gk, k_BxSxGxK), (gv, v_BxSxGxK)))
    gs = None
    if sinks_H is not None:
        of_each = at_sinks.gradient(log_sum, cut.of_heads(sinks_H), delta[..., 0])
        gs = of_each.sum(axis=(0, 1, 3, 5)).reshape(-1).astype(sinks_H.dtype)
    return cut.joined(gq), gk, gv, gs, None, None


_attention.defvjp(_forward, _backward)


def _keys(x_BxSxGxK):
    """Returns [B, G, M, C, K]: heads before positions, so that every product of a block finds its operands as they
    lie."""
    return _cut(x_BxSxGxK, 0).transpose(0, 3, 1, 2, 4)


def _from_keys(x_BxGxMxCxK, like_BxSxGxK):
    x = x_BxGxMxCxK.transpose(0, 2, 3, 1, 4).astype(like_BxSxGxK.dtype)
    return x.reshape(len(x), -1, *x.shape[3:])[:, :like_BxSxGxK.shape[1]]


class _Cut(NamedTuple):
    """How queries are cut: into `count` groups of `each` neighbouring blocks."""

    length: int
    groups: int  # of heads
    count: int
    each: int

    @classmethod
    def of(cls, q_shape_BxLxHxK, k_shape_BxGxMxCxK):
        (rows, length, heads, _), (_, groups, key_blocks, *_) = q_shape_BxLxHxK, k_shape_BxGxMxCxK
        blocks = -(-length // BLOCK)
        at_once = SCORES_CPU if platform() == "cpu" else SCORES
        each = max(1, min(blocks, at_once // (rows * heads * BLOCK * BLOCK * key_blocks)))
        count = -(-blocks // each)
        return cls(length, groups, count, -(-blocks // count))

    def blocks(self, tree_BxNx):
        """Maps [B, N, ...] -> [count, B, n, ...], zeros at the end."""
        return jax.tree.map(lambda x: _cut_blocks(x, self.count, self.each), tree_BxNx)

    def queries(self, x_BxLxHxK):
        """Returns [count, B, G, n, R, C, K]"""
        x = _cut_blocks(_cut(x_BxLxHxK, 0), self.count, self.each)
        return x.reshape(*x.shape[:4], self.groups, -1, x.shape[5]).transpose(0, 1, 4, 2, 5, 3, 6)

    def of_heads(self, x_H):
        """Returns numbers of heads, beside those of queries' without their last axis."""
        return x_H.reshape(self.groups, 1, -1, 1)

    def joined(self, x):
        """Returns the inverse of `queries`."""
        x = x.transpose(1, 0, 3, 5, 2, 4, 6)
        return x.reshape(len(x), -1, x.shape[4] * x.shape[5], x.shape[6])[:, :self.length]


def _sized(run, blocks, counts):
    """Runs run(m) for the smallest m of sizes_of that holds what each of these blocks of queries sees."""
    sizes = sizes_of(blocks)
    if len(sizes) == 1:
        return run(sizes[0])
    which = jnp.searchsorted(jnp.array(sizes), counts.max())
    return jax.lax.switch(which, [functools.partial(run, m) for m in sizes])


def _cut_blocks(x_BxNx, count, each):
    """Maps [B, N, ...] -> [count, B, each, ...], zeros at the end."""
    x = jnp.pad(x_BxNx, [(0, 0), (0, count * each - x_BxNx.shape[1])] + [(0, 0)] * (x_BxNx.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, each, *x.shape[2:]), 1, 0)


def _joined(x, blocks):
    """Returns the inverse of _cut_blocks."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :blocks]


def _of_queries(ids: Ids):
    return ids.q_positions, ids.q_segments, ids.q_prefixes, *(() if ids.q_reach is None else (ids.q_reach,))


def _bias(q_ids, ids: Ids, at_Bxnxm, counts_Bxn, window):
    """Returns [B, j, S, i, C]: 0 where the key is seen, else so low that it has no weight. The n blocks of queries are
    j batches of i blocks: one batch, of all keys, where nothing is gathered, else n batches of one block.

    A sum, not a choice: XLA for CPUs adds what it makes once for all heads, where it evaluates the mask of a `where`
    for every score."""
    rows, n, m = at_Bxnxm.shape
    k_ids = ids.k_positions, ids.k_segments
    if m == k_ids[0].shape[1]:
        q_ids, k_ids = ([x.reshape(rows, 1, -1) for x in ids] for ids in (q_ids, k_ids))
    else:
        k_ids = [jax.vmap(lambda x, at: x[at])(x, at_Bxnxm) for x in k_ids]
        counted = jnp.arange(m)[None, None] < counts_Bxn[..., None]  # the lists repeat their last block
        k_ids = [x.reshape(rows, n, -1) for x in (jnp.where(counted[..., None], k_ids[0], NO_KEY), k_ids[1])]
    mask = reference.visible(Ids(q_ids[0], k_ids[0], q_ids[1], k_ids[1], *q_ids[2:]), window)
    bias = jnp.where(mask, 0.0, reference.hidden_score(jnp.float32)).swapaxes(-1, -2)
    return bias.reshape(*bias.shape[:3], -1, BLOCK)


def _gathered(x_BxGxMxCxK, at_Bxnxm):
    """Returns [B, G, j, S, K]: the keys of each batch of queries."""
    x, flat = x_BxGxMxCxK, (*x_BxGxMxCxK.shape[:2], -1, at_Bxnxm.shape[2] * BLOCK, x_BxGxMxCxK.shape[4])
    if at_Bxnxm.shape[2] < x.shape[2]:
        x = jax.vmap(lambda x_GxMxCxK, at: x_GxMxCxK[:, at])(x, at_Bxnxm)
    return x.reshape(flat)


def _batched(x_BxGxnxRxCx, batches):
    """Returns [B, G, j, i, R, C, ...]"""
    return x_BxGxnxRxCx.reshape(*x_BxGxnxRxCx.shape[:2], batches, -1, *x_BxGxnxRxCx.shape[3:])


def _product(a, b, over_a, over_b):
    """Returns products of matrices over the first three axes, in fp32 or better."""
    batch = (0, 1, 2)
    return jax.lax.dot_general(a, b, (((over_a,), (over_b,)), (batch, batch)),
                               preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _flat(x_BxGxjxSxixRxC):
    return x_BxGxjxSxixRxC.reshape(*x_BxGxjxSxixRxC.shape[:4], -1)


def _rows(x_BxGxjxixRxCxK):
    """Returns [B, G, j, i * R * C, K]"""
    return x_BxGxjxixRxCxK.reshape(*x_BxGxjxixRxCxK.shape[:3], -1, x_BxGxjxixRxCxK.shape[-1])


def _scores(q_BxGxjxixRxCxK, k_BxGxjxSxK, options):
    """Returns (scores [B, G, j, S, i, R, C] before the mask, what softcap's derivative needs). Keys first: fastest in
    XLA."""
    q = q_BxGxjxixRxCxK
    scores = _product(k_BxGxjxSxK, _rows(q), 4, 4).reshape(*k_BxGxjxSxK.shape[:4], *q.shape[3:6]) * options.scale
    if not options.softcap:
        return scores, None
    capped = jnp.tanh(scores / options.softcap)
    return options.softcap * capped, capped


def _some(q_BxGxnxRxCxK, k_BxGxMxCxK, v_BxGxMxCxK, bias_BxjxSxixC, at_Bxnxm, options):
    """Returns (out [B, G, n, R, C, K], logarithm of the sum of exp(score) [B, G, n, R, C]) of some blocks of queries
    over the blocks `at`; -inf for the logarithm where a query sees no key."""
    q = _batched(q_BxGxnxRxCxK, bias_BxjxSxixC.shape[1])
    k, v = _gathered(k_BxGxMxCxK, at_Bxnxm), _gathered(v_BxGxMxCxK, at_Bxnxm)
    scores = _scores(q, k, options)[0] + bias_BxjxSxixC[:, None, :, :, :, None]
    top = scores.max(axis=3, keepdims=True)
    weights = jnp.exp(scores - top)
    total, top = weights.sum(axis=3), top[:, :, :, 0]
    out = _product(v, _flat(weights.astype(v.dtype)), 3, 3) / total.reshape(*total.shape[:3], 1, -1)
    out = out.astype(v.dtype).swapaxes(3, 4).reshape(*q_BxGxnxRxCxK.shape[:-1], v.shape[-1])
    log_sum = jnp.where(top > reference.hidden_score(jnp.float32) / 2, top + jnp.log(total), -jnp.inf)
    return out, log_sum.reshape(q_BxGxnxRxCxK.shape[:-1])


def _some_grads(grads, q_BxGxnxRxCxK, k_BxGxMxCxK, v_BxGxMxCxK, g_BxGxnxRxCxK, delta_BxGxnxRxC, log_sum_BxGxnxRxC,
                bias_BxjxSxixC, at_Bxnxm, options):
    """Returns (grads and those of k and v added, gradient of q). delta: sum of out * g over K."""
    batches = bias_BxjxSxixC.shape[1]
    of_queries = q_BxGxnxRxCxK, g_BxGxnxRxCxK, delta_BxGxnxRxC, log_sum_BxGxnxRxC
    q, g, delta, log_sum = (_batched(x, batches) for x in of_queries)
    k, v = _gathered(k_BxGxMxCxK, at_Bxnxm), _gathered(v_BxGxMxCxK, at_Bxnxm)
    scores, capped = _scores(q, k, options)
    weights = jnp.exp(scores + (bias_BxjxSxixC[:, None, :, :, :, None] - log_sum[:, :, :, None]))
    d = weights * (_product(v, _rows(g), 4, 4).reshape(weights.shape) - delta[:, :, :, None]) * options.scale
    if options.softcap:
        d = d * (1 - jnp.square(capped))
    d, weights = _flat(d.astype(q.dtype)), _flat(weights.astype(g.dtype))
    gq = _product(k, d, 3, 3).astype(q.dtype).swapaxes(3, 4).reshape(q_BxGxnxRxCxK.shape)
    more = _product(d, _rows(q), 4, 3), _product(weights, _rows(g), 4, 3)
    return tuple(_added(total, x, at_Bxnxm) for total, x in zip(grads, more, strict=True)), gq


def _added(total_BxGxMxCxK, x_BxGxjxSxK, at_Bxnxm):
    """Returns gradients of gathered keys added where they came from."""
    if at_Bxnxm.shape[2] == total_BxGxMxCxK.shape[2]:
        return total_BxGxMxCxK + x_BxGxjxSxK.reshape(total_BxGxMxCxK.shape)
    x = x_BxGxjxSxK.reshape(*x_BxGxjxSxK.shape[:2], *at_Bxnxm.shape[1:], *total_BxGxMxCxK.shape[3:])
    return jax.vmap(lambda total, x, at: total.at[:, at].add(x))(total_BxGxMxCxK, x, at_Bxnxm)
