"""`cached_attention` on TPUs: a Pallas kernel that reads of each slot's cache what its query sees, and nothing else.

The whole stacked cache is the kernel's operand, in place: no layer of it is copied out. The grid is a list of (slot, block of
positions), made once per token for all layers; keys and values pass in blocks of whole width G * K, queries are 0 outside their
group's part as in decode.py, so heads of any size are read densely.
(A width that is not whole lanes XLA would store transposed, and copy for the kernel.)

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, K head size, T entries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention import tuned
from jaxrl.kernels.attention.decode import by_group, own_group
from jaxrl.kernels.attention.tpu_kernels import HIDDEN, LOG2E, LOWEST
from jaxrl.kernels.platform import platform


class Work(NamedTuple):
    """The blocks to read; the leading axis is that of devices."""

    words: jax.Array  # [1, T + 1] int32: slot and block of positions in the lower bits; -1 past the end
    count: jax.Array  # [1] int32


def check(shape_NxBxCxGK, dtype) -> None:
    """NotImplementedError for what the kernel does not serve."""
    _, slots, length, width = shape_NxBxCxGK
    if width % 128:
        raise NotImplementedError(f"keys of {width} numbers per position on one device; the TPU kernel reads whole lanes of 128")
    if jnp.dtype(dtype) not in ("float32", "bfloat16"):
        raise NotImplementedError(f"a cache of {jnp.dtype(dtype)}; the TPU kernel takes float32 and bfloat16")
    entries = slots * -(-length // _block(shape_NxBxCxGK, dtype))
    if entries > tuned.WORDS:
        raise NotImplementedError(f"{slots} slots of {length} on one device; the TPU kernel's work list has room for "
                                  f"{tuned.WORDS} entries, not {entries}")


def _block(shape_NxBxCxGK, dtype) -> int:
    """Positions of one step."""
    return tuned.cache_block(shape_NxBxCxGK[2], shape_NxBxCxGK[3], jnp.dtype(dtype).itemsize)


def work_of(positions_Bx1, shape_NxBxCxGK, dtype, *, window) -> Work:
    """The blocks that queries at these positions see: one at least for every slot, where its output is written."""
    check(shape_NxBxCxGK, dtype)
    block, length = _block(shape_NxBxCxGK, dtype), shape_NxBxCxGK[2]
    blocks = -(-length // block)
    position = jnp.where(positions_Bx1[:, 0] < length, positions_Bx1[:, 0], 0)
    first = jnp.maximum(position - window + 1, 0) // block if window else jnp.zeros_like(position)
    counts = position // block - first + 1
    ends = jnp.cumsum(counts)
    at = jnp.arange(len(counts) * blocks + 1, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
    inside = jnp.minimum(slot, len(counts) - 1)
    words = slot * _slots_unit(blocks) + first[inside] + at - (ends - counts)[inside]
    return Work(jnp.where(slot < len(counts), words, -1)[None].astype(jnp.int32), ends[-1:].astype(jnp.int32))


def _slots_unit(blocks: int) -> int:
    """What a slot counts in a word: a power of two above the blocks."""
    return 1 << max(1, (blocks - 1).bit_length())


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale, work=None, interpret=None):
    """See api.cached_attention. Raises NotImplementedError for what `check` names. Has no gradient.

    work: of `work_of`, or None. interpret: for pallas_call; None = where this is no TPU.
    """
    check(k_NxBxCxGK.shape, k_NxBxCxGK.dtype)
    if q_Bx1xHxK.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"{q_Bx1xHxK.dtype} queries; the TPU kernel takes float32 and bfloat16")
    if work is None:
        work = work_of(positions_Bx1, k_NxBxCxGK.shape, k_NxBxCxGK.dtype, window=window)
    batch, _, heads, size = q_Bx1xHxK.shape
    _, _, length, width = k_NxBxCxGK.shape
    block = _block(k_NxBxCxGK.shape, k_NxBxCxGK.dtype)
    bits = _slots_unit(-(-length // block)).bit_length() - 1

    def of_slot(t, words, positions, layer):
        return words[t] >> bits, 0, 0

    def of_block(t, words, positions, layer):
        return layer[0], words[t] >> bits, words[t] & ((1 << bits) - 1), 0

    cache = pl.BlockSpec((1, 1, block, width), of_block)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3, grid=(work.count[0],), in_specs=[pl.BlockSpec((1, heads, width), of_slot), cache, cache],
        out_specs=pl.BlockSpec((1, heads, width), of_slot),
        scratch_shapes=[pltpu.VMEM((heads, 1), jnp.float32), pltpu.VMEM((heads, 1), jnp.float32),
                        pltpu.VMEM((heads, width), jnp.float32)])

    def body(words, positions, _, *refs):
        _decode(words, positions, *refs, bits=bits, length=length, window=window, softcap=softcap, scale=scale)

    groups = width // size
    out = pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct((batch, heads, width), q_Bx1xHxK.dtype), grid_spec=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=tuned.VMEM),
        interpret=platform() != "tpu" if interpret is None else interpret, name="attention_decode",
    )(work.words[0], positions_Bx1[:, 0].astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1),
      by_group(q_Bx1xHxK[:, 0], groups), k_NxBxCxGK, v_NxBxCxGK)
    return own_group(out, groups)[:, None]


def _decode(words, positions, q_ref, k_ref, v_ref, out_ref, top_ref, sum_ref, acc_ref, *, bits, length, window, softcap, scale):
    t = pl.program_id(0)
    word = words[t]
    slot, start = word >> bits, (word & ((1 << bits) - 1)) * k_ref.shape[2]
    position, dtype = positions[slot], q_ref.dtype
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def dot(a, b, over_b):
        return jax.lax.dot_general(a, b, (((1,), (over_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

    @pl.when((t == 0) | (words[jnp.maximum(t, 1) - 1] >> bits != slot))
    def _():
        top_ref[...] = jnp.full(top_ref.shape, LOWEST, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    @pl.when(position < length)
    def _():
        v = v_ref[0, 0]
        if length % k_ref.shape[2]:  # the last block ends beyond the cache, in whatever lies there
            v = jnp.where(start + jax.lax.broadcasted_iota(jnp.int32, (v.shape[0], 1), 0) < length, v, 0)
        s = dot(q_ref[0], k_ref[0, 0].astype(dtype), 1)
        s = jnp.tanh(s * (scale / softcap)) * (softcap * LOG2E) if softcap else s * (scale * LOG2E)
        at = start + jax.lax.broadcasted_iota(jnp.int32, (1, k_ref.shape[2]), 1)
        mask = at <= position
        if window:
            mask &= position - at < window
        s = jnp.where(mask, s, HIDDEN)
        top = jnp.maximum(top_ref[...], s.max(axis=1, keepdims=True))
        weights, shrink = jnp.exp2(s - top), jnp.exp2(top_ref[...] - top)
        top_ref[...] = top
        sum_ref[...] = sum_ref[...] * shrink + weights.sum(axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * shrink + dot(weights.astype(dtype), v.astype(dtype), 0)

    @pl.when(words[t + 1] >> bits != slot)
    def _():
        out_ref[0] = (acc_ref[...] / jnp.maximum(sum_ref[...], jnp.finfo(jnp.float32).tiny)).astype(out_ref.dtype)
