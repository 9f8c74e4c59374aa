"""The three Mosaic kernels of attention for training on TPUs: forward, gradient of queries, of keys and values.

Each keeps one tile of a side in place (queries; for the gradients of keys and values, keys) and lets the other side
pass by in blocks of several tiles. Its grid is (blocks of heads, entries of the work list): an entry names row,
resident tile, passing block and, bit by bit, the tiles of it with a visible pair; no other tile is computed, no other
block is read. Scores lie transposed, [keys, queries], so that maxima and sums run over sublanes and what belongs to a
query is a row of lanes.

Softmax is in base 2: p = 2^(s - m), with log2(e) in the scores' factor; `lse` is in base 2 too.

Legend: B rows, L queries, S keys (both whole blocks), H query heads, G key-value heads, K head size, P key-value heads
of a step, I id columns (position or reach; segment; prefix; position), T entries.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention.packed import tuned
from jaxrl.kernels.attention.packed.tuned import TILE
from jaxrl.kernels.attention.tpu_parts import LOWEST, VMEM, dot, masked_scores


class Walk(NamedTuple):
    """The order of a kernel's steps, and the layout of an entry of its work list.

    resident: tiles of the side that stays. passing: tiles of the side that passes by. tiles: how many of them pass
    at once."""

    resident: int
    passing: int
    tiles: int

    @property
    def fields(self) -> tuple[int, int, int]:
        """Bits of an entry, lowest first: one per passing tile with work, passing block, resident tile; the row has
        the rest."""
        blocks = self.passing // self.tiles
        return self.tiles, max(1, (blocks - 1).bit_length()), max(1, (self.resident - 1).bit_length())

    def where(self, entry):
        """Returns (row, resident tile, passing block) of an entry, an int32 scalar of the kernel."""
        low, middle, high = self.fields
        resident, passing = entry >> (low + middle) & ((1 << high) - 1), entry >> low & ((1 << middle) - 1)
        return entry >> (low + middle + high), resident, passing


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call: sizes (length, keys: filled up to whole tiles), options, and how it is run.

    segmented, prefixed: whether there are segment ids, and prefixes. heads, groups, size: query heads, key-value
    heads, head size."""

    batch: int
    length: int
    keys: int
    heads: int
    groups: int
    size: int
    dtype: str
    window: int
    softcap: float
    scale: float
    segmented: bool
    prefixed: bool
    interpret: object = False  # for pallas_call
    counted: bool = False      # kernels return how many tiles they computed too
    cores: int = 1             # over which blocks of heads are spread
    reaching: bool = False     # queries see keys up to their reach: it is their first id, their position the last one

    @property
    def per_group(self):
        """Query heads per key-value head."""
        return self.heads // self.groups

    @property
    def by_query(self):
        """The Walk of the forward pass and of dq: tiles of queries stay, blocks of key tiles pass."""
        return Walk(self.length // TILE, self.keys // TILE, tuned.tiles_of(self.keys))

    @property
    def by_key(self):
        """The Walk of dk and dv: tiles of keys stay, blocks of query tiles pass."""
        return Walk(self.keys // TILE, self.length // TILE, tuned.tiles_of(self.length))

    @property
    def exact(self):
        """Whether products are of fp32 numbers, not rounded to bf16."""
        return self.dtype == "float32"


# -- the work list ---------------------------------------------------------------------------------------------------


def work_list(active_BxNxM, tiles: int):
    """Returns the entries of every pair of a resident tile and a block of `tiles` passing tiles with an active one.

    Every resident tile has an entry, if need be one without active tiles: its output is written there.

    active_BxNxM: bool, whether passing tile m holds work for resident tile n; M is a multiple of `tiles`.

    Returns (int32 [T + 1], entries in order and then -1; how many, int32 [])."""
    batch, resident, passing = active_BxNxM.shape
    low, middle, high = Walk(resident, passing, tiles).fields
    grouped = active_BxNxM.reshape(batch, resident, passing // tiles, tiles)
    bits = jnp.sum(grouped << jnp.arange(tiles)[None, None, None], axis=3, dtype=jnp.int32)
    first = (jnp.arange(passing // tiles) == 0)[None, None] & ~active_BxNxM.any(axis=2, keepdims=True)
    row, tile, block = (jax.lax.broadcasted_iota(jnp.int32, bits.shape, axis) for axis in range(3))
    words = bits | block << low | tile << (low + middle) | row << (low + middle + high)
    keep = ((bits > 0) | first).reshape(-1)
    at = jnp.nonzero(keep, size=keep.size, fill_value=keep.size)[0]
    words = jnp.append(words.reshape(-1), jnp.int32(-1))
    return jnp.append(words[at], jnp.int32(-1)), jnp.sum(keep, dtype=jnp.int32)


def _turns(words, walk):
    """Returns, for the grid's second axis, whether this entry is its resident tile's first, its last."""
    t, low = pl.program_id(1), sum(walk.fields[:2])
    own = words[t] >> low
    return (t == 0) | (words[jnp.maximum(t, 1) - 1] >> low != own), words[t + 1] >> low != own


def _each_tile(word, tiles, compute, count):
    """Runs compute(start) for the active tiles of an entry; `count`: (reference, index) where they are counted."""
    def one(j, _):
        @pl.when(word >> j & 1 == 1)
        def _():
            compute(pl.multiple_of(j * TILE, TILE))
            if count is not None:
                counter, block = count
                counter[block] += 1

    jax.lax.fori_loop(0, tiles, one, None)


# -- what the kernels share ------------------------------------------------------------------------------------------


def _mask(q_ids, k_ids, call):
    """Returns bool [keys, queries] of a tile from ids [I, queries] and [keys, I]; a missing prefix is no segment's
    id."""
    q_pos, k_pos = q_ids[0:1], k_ids[:, 0:1]
    mask = k_pos <= q_pos
    if call.window:
        mask &= (q_ids[-1:] if call.reaching else q_pos) - k_pos < call.window
    if call.segmented:
        same = k_ids[:, 1:2] == q_ids[1:2]
        if call.prefixed:
            same |= k_ids[:, 1:2] == q_ids[2:3]
        mask &= same
    return mask


def _heads(groups, per_group):
    """Returns (query head, key-value head) within a step."""
    return [(p * per_group + r, p) for p in range(groups) for r in range(per_group)]


def _launch(kernel, products, call, walk, groups, work, operands, in_specs, outputs, out_specs, scratch):
    """Runs pallas_call over (blocks of heads, entries); returns its outputs, with `counted` also the tiles of each
    block.

    products: matrix products per tile, for the cost that XLA's scheduler is told: a row's that is one causal
    document. work: (words [T + 1], count). in_specs, out_specs: (block shape, (block of heads, row, resident,
    passing) -> indices). scratch: shapes in fp32."""
    def spec(shape, index):
        return pl.BlockSpec(shape, lambda g, t, words: index(g, *walk.where(words[t])))

    blocks = call.groups // groups
    out_specs = [spec(*s) for s in out_specs]
    if call.counted:
        outputs = [*outputs, jax.ShapeDtypeStruct((blocks,), jnp.int32)]
        out_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(blocks, work[1]), in_specs=[spec(*s) for s in in_specs], out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch])

    def body(words, *refs):
        inside, end = refs[:len(in_specs)], len(in_specs) + len(outputs)
        outs, counted = refs[len(in_specs):end], None
        if call.counted:
            *outs, counter = outs
            block = pl.program_id(0)
            counted = counter, block

            @pl.when(pl.program_id(1) == 0)
            def _():
                counter[block] = 0
        first, last = _turns(words, walk)
        kernel(words[pl.program_id(1)], first, last, counted, inside, outs, refs[end:], call, groups)

    order = ("arbitrary" if call.counted else "parallel", "arbitrary")
    scores = call.batch * call.heads * call.length * call.keys // 2
    cost = pl.CostEstimate(flops=2 * products * scores * call.size, transcendentals=scores,
                           bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *outputs)))
    return pl.pallas_call(
        body, out_shape=outputs, grid_spec=grid, interpret=call.interpret, cost_estimate=cost,
        name="attention" + kernel.__name__,
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=VMEM))(work[0], *operands)


# -- forward ---------------------------------------------------------------------------------------------------------


def forward(call: Call, work, q_BxHxLxK, k_BxGxSxK, v_BxGxSxK, q_ids_BxIxL, k_ids_BxSxI):
    """Returns (out [B, H, L, K] in q's dtype, lse [B, H, L] fp32 in base 2; the tiles computed by each block of heads,
    int32, where `counted`). A query that sees no key has out 0 and an lse below any score's.

    Args:
      work: of work_list, (entries, count): key blocks of each tile of queries.
      q_BxHxLxK, k_BxGxSxK, v_BxGxSxK: of one dtype, L and S whole tiles.
      q_ids_BxIxL, k_ids_BxSxI: int32 positions (or reach) and, if there are segments, segments and prefixes, as
        tpu.prepared returns them."""
    walk = call.by_query
    groups, heads = _heads_at_once("forward", call, walk)
    keys = _block(call, groups, walk)
    outputs = [jax.ShapeDtypeStruct(q_BxHxLxK.shape, q_BxHxLxK.dtype),
               jax.ShapeDtypeStruct((call.batch, call.groups // groups, heads, call.length), jnp.float32)]
    out, lse, *counts = _launch(
        _forward, 2, call, walk, groups, work, (q_BxHxLxK, k_BxGxSxK, v_BxGxSxK, q_ids_BxIxL, k_ids_BxSxI),
        [_tile(call, heads), keys, keys, _id_row(q_ids_BxIxL, TILE, _resident),
         _id_column(k_ids_BxSxI, walk.tiles * TILE, _passing)],
        outputs, [_tile(call, heads), _per_head(heads, TILE, _resident)],
        [(heads, TILE), (heads, TILE), (heads, call.size, TILE)])
    return (out, lse.reshape(call.batch, call.heads, call.length), *counts)


def _forward(word, first, last, count, inside, outs, scratch, call, groups):
    """Adds an entry's key tiles to the running softmax of a tile of queries; writes out and lse at the tile's last
    entry.

    inside: q [1, heads, TILE, K], k and v [1, groups, keys, K], ids. outs: out and lse (base 2). scratch: maximum
    and sum [heads, TILE], values [heads, K, TILE], fp32. first, last: whether the entry is its tile's."""
    q_ref, k_ref, v_ref, q_ids, k_ids = inside
    out_ref, lse_ref = outs
    top_ref, sum_ref, acc_ref = scratch
    heads = _heads(groups, call.per_group)

    @pl.when(first)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, LOWEST, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def compute(start):
        keys = pl.ds(start, TILE)
        mask = _mask(q_ids[0], k_ids[0, keys], call)
        for h, p in heads:
            s, _ = masked_scores(dot(k_ref[0, p, keys], q_ref[0, h], 1, 1, call.exact), mask, call)
            before = top_ref[h:h + 1]
            top = jnp.maximum(before, s.max(axis=0, keepdims=True))
            weights, shrink = jnp.exp2(s - top), jnp.exp2(before - top)
            top_ref[h:h + 1] = top
            sum_ref[h:h + 1] = sum_ref[h:h + 1] * shrink + weights.sum(axis=0, keepdims=True)
            v = v_ref[0, p, keys]
            acc_ref[h] = acc_ref[h] * shrink + dot(v, weights.astype(v.dtype), 0, 0, call.exact)

    _each_tile(word, call.by_query.tiles, compute, count)

    @pl.when(last)
    def _():
        total = jnp.maximum(sum_ref[...], jnp.finfo(jnp.float32).tiny)
        lse_ref[0, 0] = top_ref[...] + jnp.log2(total)
        for h, _ in heads:
            out_ref[0, h] = (acc_ref[h] / total[h:h + 1]).T.astype(out_ref.dtype)


# -- gradients -------------------------------------------------------------------------------------------------------


def query_gradient(call: Call, work, q_BxHxLxK, k_BxGxSxK, v_BxGxSxK, q_ids_BxIxL, k_ids_BxSxI, do_BxHxLxK, lse_BxHxL,
                   delta_BxHxL):
    """Returns (dq [B, H, L, K] in q's dtype; where `counted`, also the tiles computed by each block of heads, int32).

    Args:
      work: of work_list, (entries, count): key blocks of each tile of queries.
      q_BxHxLxK, k_BxGxSxK, v_BxGxSxK: of one dtype, L and S whole tiles.
      q_ids_BxIxL, k_ids_BxSxI: int32 positions (or reach), segments, prefixes, as tpu.prepared returns them.
      do_BxHxLxK: cotangent of out. lse_BxHxL: fp32, in base 2, with the sinks if there are any.
      delta_BxHxL: fp32, sum(do * out) over K."""
    walk = call.by_query
    groups, heads = _heads_at_once("queries", call, walk)
    keys, per_head = _block(call, groups, walk), _per_head(heads, TILE, _resident)
    return _launch(
        _query_gradient, 3, call, walk, groups, work,
        (q_BxHxLxK, k_BxGxSxK, v_BxGxSxK, q_ids_BxIxL, k_ids_BxSxI, do_BxHxLxK,
         *_by_block(call, heads, lse_BxHxL, delta_BxHxL)),
        [_tile(call, heads), keys, keys, _id_row(q_ids_BxIxL, TILE, _resident),
         _id_column(k_ids_BxSxI, walk.tiles * TILE, _passing),
         _tile(call, heads), per_head, per_head],
        [jax.ShapeDtypeStruct(q_BxHxLxK.shape, q_BxHxLxK.dtype)], [_tile(call, heads)], [(heads, call.size, TILE)])


def _query_gradient(word, first, last, count, inside, outs, scratch, call, groups):
    q_ref, k_ref, v_ref, q_ids, k_ids, do_ref, lse_ref, delta_ref = inside
    (dq_ref,), (acc_ref,) = outs, scratch
    heads = _heads(groups, call.per_group)

    @pl.when(first)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def compute(start):
        keys = pl.ds(start, TILE)
        mask = _mask(q_ids[0], k_ids[0, keys], call)
        for h, p in heads:
            k, v = (ref[0, p, keys] for ref in (k_ref, v_ref))
            _, ds = _weights_and_slopes(q_ref[0, h], k, v, do_ref[0, h], mask,
                                        lse_ref[0, 0, h:h + 1], delta_ref[0, 0, h:h + 1], call)
            acc_ref[h] += dot(k, ds.astype(k.dtype), 0, 0, call.exact)

    _each_tile(word, call.by_query.tiles, compute, count)

    @pl.when(last)
    def _():
        for h, _ in heads:
            dq_ref[0, h] = (acc_ref[h] * call.scale).T.astype(dq_ref.dtype)


def key_gradients(call: Call, work, q_BxHxLxK, k_BxGxSxK, v_BxGxSxK, q_ids_BxIxL, k_ids_BxSxI, do_BxHxLxK, lse_BxHxL,
                  delta_BxHxL):
    """Returns (dk, dv [B, G, S, K] in the dtypes of k and v, summed over a group's query heads; where `counted`, also
    the tiles computed by each block of heads, int32).

    work: of work_list, (entries, count): query blocks of each tile of keys. The other arguments are those of
    `query_gradient`."""
    walk = call.by_key
    groups, heads = _heads_at_once("keys", call, walk)
    queries, per_head = _block(call, heads, walk), _per_head(heads, walk.tiles * TILE, _passing)
    return _launch(
        _key_gradients, 4, call, walk, groups, work,
        (q_BxHxLxK, k_BxGxSxK, v_BxGxSxK, q_ids_BxIxL, k_ids_BxSxI, do_BxHxLxK,
         *_by_block(call, heads, lse_BxHxL, delta_BxHxL)),
        [queries, _tile(call, groups), _tile(call, groups), _id_row(q_ids_BxIxL, walk.tiles * TILE, _passing),
         _id_column(k_ids_BxSxI, TILE, _resident), queries, per_head, per_head],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BxGxSxK, v_BxGxSxK)],
        [_tile(call, groups), _tile(call, groups)],
        [(groups, TILE, call.size), (groups, TILE, call.size)])


def _key_gradients(word, first, last, count, inside, outs, scratch, call, groups):
    """Adds an entry's query tiles to dk and dv of a tile of keys; writes them at the tile's last entry.

    inside: q and do [1, heads, queries, K], k and v [1, groups, TILE, K], ids, lse and delta. outs, scratch: dk and
    dv [groups, TILE, K], scratch in fp32. first, last: whether the entry is its tile's."""
    q_ref, k_ref, v_ref, q_ids, k_ids, do_ref, lse_ref, delta_ref = inside
    (dk_ref, dv_ref), (dk_acc, dv_acc) = outs, scratch
    heads = _heads(groups, call.per_group)

    @pl.when(first)
    def _():
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)

    def compute(start):
        queries = pl.ds(start, TILE)
        mask = _mask(q_ids[0, :, queries], k_ids[0], call)
        for h, p in heads:
            q, do = (ref[0, h, queries] for ref in (q_ref, do_ref))
            weights, ds = _weights_and_slopes(
                q, k_ref[0, p], v_ref[0, p], do, mask, lse_ref[0, 0, h:h + 1, queries],
                delta_ref[0, 0, h:h + 1, queries], call)
            dv_acc[p] += dot(weights.astype(do.dtype), do, 1, 0, call.exact)
            dk_acc[p] += dot(ds.astype(q.dtype), q, 1, 0, call.exact)

    _each_tile(word, call.by_key.tiles, compute, count)

    @pl.when(last)
    def _():
        dk_ref[0] = (dk_acc[...] * call.scale).astype(dk_ref.dtype)
        dv_ref[0] = dv_acc[...].astype(dv_ref.dtype)


def _weights_and_slopes(q, k, v, do, mask, lse, delta, call):
    """Returns (softmax weights, gradient of scale * q.k) of one tile, both [keys, queries] fp32."""
    s, slope = masked_scores(dot(k, q, 1, 1, call.exact), mask, call)
    weights = jnp.exp2(s - lse)
    ds = weights * (dot(v, do, 1, 1, call.exact) - delta)
    return weights, ds if slope is None else ds * slope


# -- blocks: (shape, function (block of heads, row, resident tile, passing block) -> indices) --------------------------


def _heads_at_once(kernel, call, walk):
    """Returns (key-value heads, query heads) of one step."""
    itemsize = jnp.dtype(call.dtype).itemsize
    groups = tuned.groups_per_step(kernel, call.groups, call.per_group, call.size, itemsize, walk.tiles, call.cores)
    return groups, groups * call.per_group


def _resident(n, m):
    return n


def _passing(n, m):
    return m


def _tile(call, heads):
    return (1, heads, TILE, call.size), lambda g, b, n, m: (b, g, n, 0)


def _block(call, heads, walk):
    return (1, heads, walk.tiles * TILE, call.size), lambda g, b, n, m: (b, g, m, 0)


def _id_row(q_ids_BxIxL, width, which):
    return (1, q_ids_BxIxL.shape[1], width), lambda g, b, n, m: (b, 0, which(n, m))


def _id_column(k_ids_BxSxI, height, which):
    return (1, height, k_ids_BxSxI.shape[2]), lambda g, b, n, m: (b, which(n, m), 0)


def _per_head(heads, width, which):
    return (1, 1, heads, width), lambda g, b, n, m: (b, g, 0, which(n, m))


def _by_block(call, heads, *arrays_BxHxL):
    return [x.reshape(call.batch, call.heads // heads, heads, call.length) for x in arrays_BxHxL]
