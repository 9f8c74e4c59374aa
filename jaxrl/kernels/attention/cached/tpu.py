"""`cached_attention` on TPUs: a Pallas kernel that reads of each slot's cache what its query sees, and nothing else.

The whole stacked cache is the kernel's operand, in place: no layer of it is copied out. The grid is a list of (slot,
block of positions), made once per token for all layers; keys and values pass in blocks of whole width G * K, queries
are 0 outside their group's part as in xla.py, so heads of any size are read densely. (A width that is not whole lanes
XLA would store transposed, and copy for the kernel.)

A prompt that slots share (shared.py) passes once per tile, before the rest of each of its slots: the running sums of
all of them lie in scratch, a tile's entries follow each other, and so nothing is written and joined in between. Blocks
then begin at any multiple of ALIGNED positions, where the slots part.

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, K head size, T entries, W slots per tile.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention.cached import tuned
from jaxrl.kernels.attention.cached.shared import WIDTH
from jaxrl.kernels.attention.cached.xla import by_group, own_group
from jaxrl.kernels.attention.tpu_parts import LOG2E, LOWEST, VMEM, WORDS, dot, masked_scores
from jaxrl.kernels.platform import platform

ALIGNED = 16  # positions and query rows of whole tiles of memory, in every dtype


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "places", "count"], meta_fields=["width"])
@dataclasses.dataclass(frozen=True)
class Work:
    """The blocks of the cache that a decoding step reads, in order: T entries. The leading axis is that of devices."""

    words: jax.Array   # [1, T + 1] int32: place, whether read for the whole tile, where it starts; -1 past the end
    places: jax.Array  # [1, 3, B] int32, tile by tile: slot, first place of its tile, where its own positions begin
    count: jax.Array   # [1] int32, entries
    width: int         # slots per tile, 1 = nothing is shared


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call, and the layout of a word of the work list.

    From the highest bits, a word holds: place, whether it is a tile's (1 bit), and the start in units. window, softcap
    (0 = none) and scale are those of `attention`."""

    block: int   # positions
    length: int  # of the cache
    width: int   # as Work.width
    window: int = 0
    softcap: float = 0.0
    scale: float = 1.0

    @property
    def unit(self):
        """Positions that a word's start counts in: a block, or ALIGNED with tiles."""
        return self.block if self.width == 1 else ALIGNED

    @property
    def bits(self):
        """Bits of a word that hold where the block starts."""
        return max(1, ((self.length - 1) // self.unit).bit_length())

    def word(self, place, tile, start):
        """Returns the word, int32, of a block: its place, whether it is read for the whole tile (0 or 1), its first
        position."""
        return (place << 1 | tile) << self.bits | start // self.unit

    def place(self, word):
        """Returns the place of a word: the column of Work.places."""
        return word >> self.bits + 1

    def piece(self, word):
        """Returns the part of a word that entries adding to the same sums have in common: place and tile bit."""
        return word >> self.bits

    def start(self, word):
        """Returns the first position of a word's block."""
        return (word & (1 << self.bits) - 1) * self.unit

    def read(self, word):
        """Returns the position from which a word's block is read: with tiles, a last block ends with the cache."""
        return self.start(word) if self.width == 1 else jnp.minimum(self.start(word), self.length - self.block)


def check(shape_NxBxCxGK, dtype) -> None:
    """Raises NotImplementedError for a cache that the kernel does not serve: one whose G * K numbers per position (on
    one device) are no multiple of 128, of a dtype but float32 and bfloat16, or of more than WORDS blocks in all slots.

    shape_NxBxCxGK, dtype: of the cache's keys."""
    _, slots, length, width = shape_NxBxCxGK
    if width % 128:
        raise NotImplementedError(
            f"keys of {width} numbers per position on one device; the TPU kernel reads whole lanes of 128")
    if jnp.dtype(dtype) not in ("float32", "bfloat16"):
        raise NotImplementedError(f"a cache of {jnp.dtype(dtype)}; the TPU kernel takes float32 and bfloat16")
    entries = slots * -(-length // _block(shape_NxBxCxGK, dtype))
    if entries > WORDS:
        raise NotImplementedError(f"{slots} slots of {length} on one device; the TPU kernel's work list has room for "
                                  f"{WORDS} entries, not {entries}")


def least_shared(shape_BxCxGK, dtype, groups: int) -> int:
    """Returns the fewest positions of a prompt that a tile reads: a block.

    shape_BxCxGK, dtype: of a layer's keys. groups: not read."""
    del groups
    return _block((1, *shape_BxCxGK), dtype)


def _block(shape_NxBxCxGK, dtype) -> int:
    """Returns positions of one step."""
    return tuned.cache_block(shape_NxBxCxGK[2], shape_NxBxCxGK[3], jnp.dtype(dtype).itemsize)


def _width(shape_NxBxCxGK, block, shared) -> int:
    """Returns slots per tile: 1 where nothing is shared, or nothing can be gained or aligned."""
    _, slots, length, _ = shape_NxBxCxGK
    fits = length > block and length % ALIGNED == 0 and slots * (-(-length // block) + 1) <= WORDS
    return WIDTH if shared is not None and fits else 1


def _places(shared, position_B, busy_B, block):
    """Returns [3, B], see Work.places: slots tile by tile, then those in none, each a tile of its own."""
    slots = len(position_B)
    row, place = shared.row, shared.place
    counts = jnp.sum(shared.tiles >= 0, axis=1)
    tile = jnp.arange(len(counts))
    before = jnp.sum(jnp.where(tile[None] < row[:, None], counts, 0), axis=1)  # slots in the tiles before
    alone = row < 0
    at = jnp.where(alone, counts.sum() + jnp.cumsum(alone) - 1, before + place)
    length = shared.length // ALIGNED * ALIGNED
    length = jnp.where(length < block, 0, length)
    read = jnp.any((tile[:, None] == row[None]) & busy_B[None], axis=1)  # not for slots that have ended
    begin = jnp.where(alone, 0, jnp.where(read, length, 0)[row])
    by_slot = jnp.stack([jnp.arange(slots), at - place, begin])
    return by_slot[:, jnp.argsort(at)].astype(jnp.int32)


def work_of(positions_Bx1, shape_NxBxCxGK, dtype, *, window, shared=None, heads=0, size=0) -> Work:
    """Returns the Work of a decoding step: the blocks of the cache that queries at these positions see.

    Every slot has one block at least, where its output is written.

    Args:
      positions_Bx1: int positions of the queries; a slot at or beyond C is idle.
      shape_NxBxCxGK, dtype: of the cache's keys.
      window: positions that a query sees, itself included; 0 = all.
      shared: shared.Shared, which slots hold the same prompt, or None. Give None where there is a window.
      heads, size: not read.

    Raises NotImplementedError as `check` does."""
    del heads, size
    check(shape_NxBxCxGK, dtype)
    block, length = _block(shape_NxBxCxGK, dtype), shape_NxBxCxGK[2]
    slots, busy = len(positions_Bx1), positions_Bx1[:, 0] < length
    position = jnp.where(busy, positions_Bx1[:, 0], 0)
    width = _width(shape_NxBxCxGK, block, shared)
    here = jnp.arange(slots, dtype=jnp.int32)
    if width == 1:
        begin = jnp.maximum(position - window + 1, 0) // block * block if window else jnp.zeros_like(position)
        places = jnp.stack([here, here, begin])
        of_tile = jnp.zeros_like(position)
    else:
        places = _places(shared, position, busy, block)
        position, begin = position[places[0]], places[2]
        of_tile = jnp.where(places[1] == here, -(-begin // block), 0)
    own = jnp.maximum(position - begin, 0) // block + 1
    counts = jnp.stack([of_tile, own], axis=1).reshape(-1)  # a piece of the tile, maybe empty, and one of the slot
    ends = jnp.cumsum(counts)
    at = jnp.arange(slots * (-(-length // block) + (width > 1)) + 1, dtype=jnp.int32)
    piece = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
    inside = jnp.minimum(piece, 2 * slots - 1)
    first = jnp.stack([jnp.zeros_like(begin), begin], axis=1).reshape(-1) - (ends - counts) * block
    words = Call(block, length, width).word(inside >> 1, 1 - (inside & 1), first[inside] + at * block)
    words = jnp.where(piece < 2 * slots, words, -1)
    return Work(words[None].astype(jnp.int32), places[None].astype(jnp.int32), ends[-1:].astype(jnp.int32), width)


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale, shared=None,
              work=None, sinks=None, interpret=None):
    """Computes api.cached_attention with the Pallas TPU kernel; returns out [B, 1, H, K] in q's dtype. Has no gradient.

    Args:
      q_Bx1xHxK: queries. k_NxBxCxGK, v_NxBxCxGK: the cache of N layers. Each of float32 or bfloat16.
      positions_Bx1: int; at or beyond C = an idle slot, whose output means nothing. layer: int scalar, which is read.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores. sinks: [H] scores of keys without a value, or None.
      shared: shared.Shared or None; not read if there is `work`, of `work_of` (None = made here).
      interpret: for pallas_call; None = off a TPU.

    Raises NotImplementedError as `check` does, and for queries that are neither float32 nor bfloat16."""
    check(k_NxBxCxGK.shape, k_NxBxCxGK.dtype)
    if q_Bx1xHxK.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"{q_Bx1xHxK.dtype} queries; the TPU kernel takes float32 and bfloat16")
    if work is None:
        work = work_of(positions_Bx1, k_NxBxCxGK.shape, k_NxBxCxGK.dtype, window=window, shared=shared)
    batch, _, heads, size = q_Bx1xHxK.shape
    length, width = k_NxBxCxGK.shape[2:]
    call = Call(_block(k_NxBxCxGK.shape, k_NxBxCxGK.dtype), length, work.width, window, softcap, scale)
    groups, places = width // size, work.places[0]
    q = q_Bx1xHxK[:, 0]
    if call.width == 1:
        q = by_group(q, groups)
    else:  # a tile's queries follow each other, and its heads are whole tiles of memory
        q = jnp.pad(by_group(q[places[0]], groups), [(0, call.width), (0, -heads % ALIGNED), (0, 0)])
    queries, cache = _specs(call, q.shape[1:])
    rows, more = call.width * q.shape[1], ()
    if sinks is not None:
        of_rows = jnp.pad(sinks.astype(jnp.float32) * LOG2E, (0, q.shape[1] - heads))
        more = jnp.tile(of_rows, call.width)[:, None],
    whole = [pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in more]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4, grid=(work.count[0],), in_specs=[queries, cache, cache, *whole],
        out_specs=pl.BlockSpec((1, heads, width), lambda t, words, places, *_: (places[0, call.place(words[t])], 0, 0)),
        scratch_shapes=[pltpu.VMEM((rows, n), jnp.float32) for n in (1, 1, width)])
    out = pl.pallas_call(
        lambda words, places, positions, _, *refs: _decode(words, places, positions, *refs, call=call),
        out_shape=jax.ShapeDtypeStruct((batch, heads, width), q_Bx1xHxK.dtype), grid_spec=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM),
        interpret=platform() != "tpu" if interpret is None else interpret, name="attention_decode",
    )(work.words[0], places, positions_Bx1[:, 0].astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1), q,
      k_NxBxCxGK, v_NxBxCxGK, *more)
    return own_group(out, groups)[:, None]


def _specs(call, shape_HxGK):
    """Returns the block specs of the queries of an entry's tile, and of its block of keys or values; aligned by hand
    where there are tiles."""
    heads, width = shape_HxGK

    def source(t, words, places):
        """Returns the slot that is read: its own, or the first of its tile, which is where the place of a tile's
        entries is."""
        return places[0, call.place(words[t])]

    if call.width == 1:
        return (pl.BlockSpec((1, heads, width), lambda t, words, places, *_: (source(t, words, places), 0, 0)),
                pl.BlockSpec((None, None, call.block, width), lambda t, words, places, positions, layer: (
                    layer[0], source(t, words, places), call.start(words[t]) // call.block, 0)))
    block, heads, positions_read, width = map(pl.Element, (call.width, heads, call.block, width))
    return (pl.BlockSpec((block, heads, width), lambda t, words, places, *_: (places[1, call.place(words[t])], 0, 0)),
            pl.BlockSpec((None, None, positions_read, width), lambda t, words, places, positions, layer: (
                layer[0], source(t, words, places), pl.multiple_of(call.read(words[t]), ALIGNED), 0)))


def _decode(words, places, positions, q_ref, k_ref, v_ref, *refs, call):
    """Adds one entry's block to the running sums of its slot, or of all slots of its tile, and writes a slot's output
    last.

    words, places: of Work. positions [B]. q_ref [1 or W, H, G * K]; k_ref, v_ref: a block [block, G * K]. refs:
    sinks if there are any, the output [1, H, G * K], then scratch: running maximum, sum and weighted values of the
    tile's heads."""
    *sinks, out_ref, top_ref, sum_ref, acc_ref = refs
    t = pl.program_id(0)
    word = words[t]
    place, heads = call.place(word), q_ref.shape[1]
    slot, first, begin = (places[i, place] for i in range(3))
    position, of_tile, within = positions[slot], call.piece(word) & 1, place - first
    before = call.place(words[jnp.maximum(t, 1) - 1])

    @pl.when((t == 0) | (places[1, before] != first))
    def _():
        top_ref[...] = sinks[0][...] if sinks else jnp.full(top_ref.shape, LOWEST, jnp.float32)
        sum_ref[...] = jnp.full(sum_ref.shape, float(len(sinks)), jnp.float32)  # a sink is 2 ** (sink - sink)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def add(q, own, end):
        sums = [ref.at[own] for ref in (top_ref, sum_ref, acc_ref)]
        _add(q, (k_ref, v_ref), sums, call.start(word), call.read(word), end, call)

    if call.width > 1:
        own = pl.ds(pl.multiple_of(within * heads, ALIGNED), heads)
        pl.when(of_tile == 1)(lambda: add(q_ref[...].reshape(-1, q_ref.shape[2]), slice(None), begin))
        pl.when((of_tile == 0) & (position < call.length))(lambda: add(q_ref[within], own, position + 1))
    else:
        own = slice(None)
        pl.when(position < call.length)(lambda: add(q_ref[0], own, position + 1))

    @pl.when((of_tile == 0) & (call.piece(words[t + 1]) != call.piece(word)))
    def _():
        out = acc_ref[own] / jnp.maximum(sum_ref[own], jnp.finfo(jnp.float32).tiny)
        out_ref[0] = out[:out_ref.shape[1]].astype(out_ref.dtype)


def _add(q, kv, sums, start, read, end, call):
    """Adds the positions from `start` to the end of the block, which was read from `read` on, that lie before `end`."""
    (k_ref, v_ref), (top_ref, sum_ref, acc_ref), dtype = kv, sums, q.dtype
    exact = dtype == jnp.float32
    v = v_ref[...]
    if call.width == 1 and call.length % call.block:  # the last block ends beyond the cache, in whatever lies there
        v = jnp.where(start + jax.lax.broadcasted_iota(jnp.int32, (v.shape[0], 1), 0) < call.length, v, 0)
    at = read + jax.lax.broadcasted_iota(jnp.int32, (1, call.block), 1)
    mask = (at >= start) & (at < end)
    if call.window:
        mask &= end - at <= call.window
    s, _ = masked_scores(dot(q, k_ref[...].astype(dtype), 1, 1, exact), mask, call)
    top = jnp.maximum(top_ref[...], s.max(axis=1, keepdims=True))
    weights, shrink = jnp.exp2(s - top), jnp.exp2(top_ref[...] - top)
    top_ref[...] = top
    sum_ref[...] = sum_ref[...] * shrink + weights.sum(axis=1, keepdims=True)
    acc_ref[...] = acc_ref[...] * shrink + dot(weights.astype(dtype), v.astype(dtype), 1, 0, exact)
