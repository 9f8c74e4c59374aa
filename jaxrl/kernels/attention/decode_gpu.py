"""`attention` for one query per row on Hopper: reads the key blocks between a row's first and last visible key, once for
all query heads of a group.

The query heads of a group are the rows of one matrix product (64, of which R are used: decoding is bound by reading
the cache, not by multiplying). Where rows and groups are too few for the chip, a row's keys are split over several blocks
of threads, and their results are joined by their logsumexp.

Legend: B rows, C keys per row, H query heads, G key-value heads, R = H / G filled up to 8, K head size, P splits.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jaxrl.kernels.attention import gpu, tuned_gpu
from jaxrl.kernels.attention.reference import visible

ALIGNED = 16  # cache lengths the copy engine takes


def attention(q_BxLxHxK, k_BxCxGxK, v_BxCxGxK, q_positions_BxL, k_positions_BxC, q_segments_BxL, k_segments_BxC, q_prefixes_BxL, *,
              window, softcap, scale, chosen=True, lists_=None, interpret=False):
    """See api.attention; no gradient. Raises NotImplementedError for more than one query per row, for segments, and for
    shapes and types that the kernel does not serve."""
    del chosen, lists_
    batch, length, heads, size = q_BxLxHxK.shape
    keys, groups = k_BxCxGxK.shape[1:3]
    if length != 1:
        raise NotImplementedError(f"{length} queries per row")
    if q_segments_BxL is not None:
        raise NotImplementedError("segments; the decoding kernel takes caches of one sequence per row")
    gpu.check_chip(q_BxLxHxK.dtype, interpret)
    if not q_BxLxHxK.dtype == k_BxCxGxK.dtype == v_BxCxGxK.dtype:
        raise NotImplementedError(f"inputs of {q_BxLxHxK.dtype}, {k_BxCxGxK.dtype} and {v_BxCxGxK.dtype}; one type is taken")
    if size % 16 or not 64 <= size <= 256 or heads // groups > 64 or scale <= 0:
        raise NotImplementedError(f"head size {size}, {heads // groups} query heads per key-value head, scale {scale}; the decoding "
                                  "kernel takes multiples of 16 from 64 to 256, up to 64, and positive ones")
    block = tuned_gpu.sizes(tuned_gpu.DECODE, size).keys
    if keys % ALIGNED or keys < block:
        raise NotImplementedError(f"{keys} keys per row; the decoding kernel takes multiples of {ALIGNED} from {block}")
    splits = splits_of(batch * groups, keys, block)
    if splits > 1 and size > 192:
        raise NotImplementedError(f"{batch} rows of {groups} key-value heads of size {size}; too few for the chip, and too large to split")
    call = functools.partial(_decode, window=window, softcap=float(softcap), scale=float(scale), interpret=interpret,
                             splits=splits)
    return call(q_BxLxHxK, k_BxCxGxK, v_BxCxGxK, q_positions_BxL, k_positions_BxC)


def splits_of(blocks: int, keys: int, block: int) -> int:
    """Parts of a row's keys: enough for two pieces of work per multiprocessor, but none below 4 key blocks."""
    return max(1, min(-(-2 * tuned_gpu.MULTIPROCESSORS // blocks), keys // (4 * block)))


def ranges(q_positions_Bx1, k_positions_BxC, window, block):
    """int32 [B, 2]: the first block of `block` keys with a visible key, and the one behind the last."""
    seen = visible(q_positions_Bx1, k_positions_BxC, None, None, None, window)[:, 0]
    at = jnp.arange(seen.shape[1], dtype=jnp.int32) // block
    first = jnp.where(seen, at, seen.shape[1]).min(axis=1)
    end = jnp.where(seen, at + 1, 0).max(axis=1)
    return jnp.stack([jnp.minimum(first, end), end], axis=1)


def _decode(q, k, v, q_positions, k_positions, *, window, softcap, scale, splits, interpret):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxrl.kernels.attention.decode_gpu_kernel import decode
    from jaxrl.kernels.attention.gpu_parts import Op

    batch, _, heads, size = q.shape
    groups, sizes = k.shape[2], tuned_gpu.sizes(tuned_gpu.DECODE, size)
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    rows = heads // groups
    filled = -(-rows // 8) * 8
    q = jnp.pad(q.reshape(batch, groups, rows, size), [(0, 0), (0, 0), (0, filled - rows), (0, 0)])
    q_positions = jnp.broadcast_to(q_positions, (batch, 1)).astype(jnp.int32)
    k_positions = k_positions.astype(jnp.int32)
    work = jnp.concatenate([ranges(q_positions, k_positions, window, sizes.keys), q_positions], axis=1)
    op = Op(scale, softcap, window, segments=False, in_registers=not interpret)
    out, lse = decode(q, k, v, k_positions, work, op, sizes, splits, interpret or None)
    if splits > 1:
        weights = jnp.exp2(lse - lse.max(axis=0))
        out = (out * (weights / weights.sum(axis=0))[..., None]).sum(axis=0)
    else:
        out = out[0]
    return out[:, :, :rows].reshape(batch, 1, heads, size).astype(v.dtype)


