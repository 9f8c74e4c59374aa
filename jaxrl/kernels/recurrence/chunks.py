"""Cuts packed rows into chunks for a recurrence: a chunk is up to C neighbouring tokens of one segment.

A row orders itself for a recurrence (training.pack): a prompt lies before its completions, and only one prompt's end is
needed at a time. Because chunks begin where segments begin, a completion computes the same numbers wherever it lies.

Legend: B rows, L tokens per row, N chunks per row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

CONTINUES, ZERO, PROMPT, GIVEN = range(4)  # the state that a chunk, or a token, begins with: that before it, or another
SAVES = 4          # in a chunk's word, beside its start: the state behind it is its prompt's
LONG = 1024        # rows from here on have long chunks
STRETCH = 16       # chunks between which the backward pass finds a state, at most
WINDOW = 64        # the same on GPUs
# Implementation -> how often compilers hold a stretch's fp32 numbers at once, forward and backward (TPUs: on chip).
HELD = {"xla": (2.5, 5.0), "gpu": (0.55, 1.5), "tpu": (0.0, 0.0)}


def tokens_per_chunk(length: int) -> int:
    """Returns C, the tokens of a chunk: 64 in rows of `length` >= LONG tokens, else 16."""
    return 64 if length >= LONG else 16


def tokens_per_room(length: int) -> int:
    """Returns how many tokens of a row there are for each chunk that it has room for: 32 in rows of `length` >= LONG
    tokens, else 4."""
    return 32 if length >= LONG else 4


def room(length: int) -> int:
    """Returns N, the chunks that rows of `length` tokens have room for; always enough for two segments. Rows that need
    more do not fit (`chunks_of`)."""
    return -(-length // min(tokens_per_room(length), max(length, 1))) + 2


def stretch(length: int, key: int, value: int) -> int:
    """Returns the chunks between which the backward pass of `xla` finds a state: STRETCH in rows of long chunks.

    In shorter rows the power of two, at most STRETCH, for which the states that are kept and the chunks that are
    computed again at once take the fewest bytes; where heads are small it is small, and chunks that no token fills are
    skipped sooner.

    length: tokens of a row. key, value: sizes of a head."""
    if length >= LONG:
        return STRETCH
    kept = 8 * key * value  # bytes of a pair of states
    again = HELD["xla"][1] * _numbers(tokens_per_chunk(length), key, value) * 4
    return min(STRETCH, 2 ** max(round(math.log2(room(length) * kept / again) / 2), 0))


def _numbers(size: int, key: int, value: int) -> int:
    """Of a chunk of `size` tokens that are computed at once, for a value head."""
    return (4 * size + 3 * key + 2 * value) * size


def flops(heads: int, key: int, value: int, size: int = 64, delta: bool = True) -> int:
    """Returns the floating-point operations of the rule for one token, in chunks of `size` tokens, of `heads` value
    heads.

    key, value: sizes of a head. delta: whether the rule has a delta."""
    if not delta:  # pairs of queries and keys, and their sum
        return heads * (2 * size * (key + value) + 4 * key * value)
    within = 2 * size * (3 * key + 2 * value)  # pairs of keys, of queries and keys, two solved systems, their sum
    return heads * (within + 6 * key * value + 2 * size * size // 3)


class Rule(NamedTuple):
    """Sizes of a recurrence: key and value heads, numbers of a key and of a value, whether it has a delta."""

    keys: int
    values: int
    key: int
    value: int
    delta: bool


def workspace(implementation: str, rule: Rule, length: int, width: int, backward: bool) -> float:
    """Returns the bytes that a recurrence holds for one row of `length` tokens beside inputs and output.

    They are the operands by chunk, what a stretch computes, and for the backward pass the gradients of both and the
    pairs of states between stretches. Within a fifth of what compilers take (tests/planning/test_plan.py).

    Args:
      implementation: xla, gpu or tpu; another name counts as xla. rule: sizes of the layer.
      width: bytes of a value. backward: whether the backward pass is counted, too."""
    size = tokens_per_chunk(length)
    chunks = {"gpu": WINDOW, "tpu": STRETCH}.get(implementation) or stretch(length, rule.key, rule.value)
    stretches = -(-room(length) // chunks)
    of_keys = 4 if rule.delta and implementation != "gpu" else width  # queries and keys of unit length are fp32
    outputs = rule.values * rule.value * width
    inputs = 2 * rule.keys * rule.key * of_keys + outputs + 4 * rule.values * (4 if implementation == "tpu" else 2)
    in_place = implementation not in ("gpu", "tpu")  # gradients take the place of the inputs
    token = (1 + backward) * (inputs + outputs) - in_place * backward * inputs
    each = rule.values * _numbers(size, rule.key, rule.value)
    computed = HELD.get(implementation, HELD["xla"])[backward] * each * chunks * 4
    pairs = 8 * rule.values * rule.key * rule.value * (stretches + 2 if backward else 1)
    return token * stretches * chunks * size + computed + pairs


class Chunks(NamedTuple):
    """Where the chunks of rows lie, as arrays of ints and, for saves, enters and fits, of bools. Padding is in no
    chunk.

    start [B, N], of each chunk: CONTINUES, ZERO, PROMPT or GIVEN. count [B, N]: its tokens. first [B, N]: its first.
    saves [B, N]: the state after it is a prompt's so far. enters [B, L]: tokens that become part of the state.
    chunk, slot [B, L]: where a token lies; chunk N = in none. begins [B, L]: as start, of the token.
    back [B, L]: tokens of its segment before it. prompt_end [B, N]: index after the last token of a PROMPT chunk's
    prompt; prompt_size [B, N]: that prompt's tokens. fits [B]: whether the row's chunks have room and its
    completions follow their prompt (see chunks_of)."""

    start: jax.Array
    count: jax.Array
    first: jax.Array
    saves: jax.Array
    enters: jax.Array
    chunk: jax.Array
    slot: jax.Array
    begins: jax.Array
    back: jax.Array
    prompt_end: jax.Array
    prompt_size: jax.Array
    fits: jax.Array

    @property
    def real(self):
        """Tokens that are no padding: [B, L] bool."""
        return self.chunk < self.start.shape[1]


def chunks_of(segments_BxL, prefixes_BxL=None, *, enters_BxL=None, continues: bool = False) -> Chunks:
    """Returns the Chunks of packed rows; the same for all layers, so it is made once per forward pass.

    Rows with more chunks than `room` gives do not fit (fits False: their output is NaN).

    Args:
      segments_BxL: int ids, 0 = padding; equal neighbours are one segment.
      prefixes_BxL: int id of the segment that a completion continues, 0 = none. It is the last segment without a prefix
        before it; rows with another order do not fit either.
      enters_BxL: bool, tokens that become part of the state; those of a row that do not are its last. None = all.
      continues: whether rows begin with a state that is given."""
    batch, length = segments_BxL.shape
    size, count = tokens_per_chunk(length), room(length)
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    segments_BxL = jnp.asarray(segments_BxL)
    prefixes = jnp.zeros_like(segments_BxL) if prefixes_BxL is None else jnp.asarray(prefixes_BxL)
    before = jnp.pad(segments_BxL, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    real, opens = segments_BxL > 0, segments_BxL != before
    back = at - jax.lax.cummax(jnp.where(opens, at, 0), axis=1)
    begin = real & (back % size == 0)
    chunk = jnp.cumsum(begin, axis=1, dtype=jnp.int32) - 1
    fits = chunk[:, -1] < count
    chunk = jnp.where(real & (chunk < count), chunk, count)
    owns = jax.lax.cummax(jnp.where(real & (prefixes == 0), at, -1), axis=1)  # the last token so far of a prompt
    owner = jnp.where(owns >= 0, jnp.take_along_axis(segments_BxL, jnp.maximum(owns, 0), axis=1), 0)
    fits &= jnp.all(~real | (prefixes == 0) | (prefixes == owner), axis=1)
    begins = jnp.where(back > 0, CONTINUES, jnp.where(prefixes > 0, PROMPT, ZERO))
    begins = begins.at[:, 0].set(GIVEN) if continues else begins
    rows = jnp.arange(batch)[:, None]
    where = jnp.where(begin, chunk, count)

    def of_first(values, blank=0):
        """[B, N] of [B, L]: that of each chunk's first token."""
        firsts = jnp.full((batch, count), blank, values.dtype)
        return firsts.at[rows, where].set(values, mode="drop")

    sizes = jnp.zeros((batch, count), jnp.int32).at[rows, chunk].add(1, mode="drop")
    behind = jnp.take_along_axis(back, jnp.maximum(owns, 0), axis=1) + 1
    return Chunks(
        start=of_first(begins), count=sizes, first=of_first(at), saves=of_first(real & (prefixes == 0), False),
        enters=real if enters_BxL is None else real & enters_BxL, chunk=chunk, slot=back % size, begins=begins,
        back=back, prompt_end=of_first(owns + 1), prompt_size=of_first(behind), fits=fits)


def into(x_BxLx, chunks: Chunks):
    """Returns [N, B, C, ...] of values by token [B, L, ...]; zeros where a chunk has none. Linear; its gradient is
    `back`."""
    return _into(x_BxLx, chunks)


def back(y_NxBxCx, chunks: Chunks):
    """Returns [B, L, ...] of values by chunk [N, B, C, ...]: the inverse of `into`, zeros at padding.

    Linear; its gradient is `into`."""
    return _back(y_NxBxCx, chunks)


def _masked(mask, x):
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, jnp.zeros((), x.dtype))


def gather(x, chunks):
    """Returns [N, B, C, ...] of an array by token [B, L, ...] that needs no gradient, such as bool; zeros where a chunk
    has no token."""
    batch, length = chunks.chunk.shape
    offsets = jnp.arange(tokens_per_chunk(length), dtype=jnp.int32)[None, None]
    index = jnp.minimum(chunks.first[..., None] + offsets, length - 1)
    mask = offsets < chunks.count[..., None]
    found = x[jnp.arange(batch)[:, None, None], index]
    return jnp.moveaxis(_masked(mask, found), 1, 0)


def _scatter(y, chunks):
    batch = chunks.chunk.shape[0]
    found = y[jnp.minimum(chunks.chunk, y.shape[0] - 1), jnp.arange(batch)[:, None], chunks.slot]
    return _masked(chunks.real, found)


@jax.custom_vjp
def _into(x, chunks):
    return gather(x, chunks)


@jax.custom_vjp
def _back(y, chunks):
    return _scatter(y, chunks)


_into.defvjp(lambda x, chunks: (gather(x, chunks), chunks), lambda chunks, g: (_scatter(g, chunks), None))
_back.defvjp(lambda y, chunks: (_scatter(y, chunks), chunks), lambda chunks, g: (gather(g, chunks), None))
