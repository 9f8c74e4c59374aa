"""`cached_attention` on Hopper GPUs: reads the cache blocks that a slot's query sees, once for all query heads of a group.

The query heads of a group are the rows of one matrix product (64, of which R are used: decoding is bound by reading the cache,
not by multiplying). The whole stacked cache is the kernel's operand, in place. Where slots and groups are too few for the chip, a
slot's positions are split, and the parts' results are joined by their logsumexp.

Legend: B slots, C cache length, N layers, H query heads, G key-value heads, R = H / G, K head size.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.attention import gpu, tuned_gpu

ALIGNED = 8   # cache lengths are whole numbers of this
WIDEST = 192  # head size whose parts' fp32 results fit into shared memory beside the ring


def attention(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, positions_Bx1, layer, *, window, softcap, scale, interpret=None):
    """See api.cached_attention. Raises NotImplementedError for what `check` names. Has no gradient.

    interpret: as gpu.attention's.
    """
    splits = check(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, scale, interpret)
    from jaxrl.kernels.attention.decode_gpu_kernel import decode
    from jaxrl.kernels.attention.gpu_parts import Op

    batch, _, heads, size = q_Bx1xHxK.shape
    groups, interpret = k_NxBxCxGK.shape[3] // size, gpu.interpreted(interpret)
    rows = heads // groups
    q = q_Bx1xHxK.reshape(batch, groups, rows, size)
    q = jnp.pad(q, [(0, 0), (0, 0), (0, -rows % 8), (0, 0)])
    op = Op(float(scale), float(softcap), window, segments=False, in_registers=not interpret)
    positions, layer = positions_Bx1.reshape(-1).astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1)
    out, lse = decode(q, k_NxBxCxGK, v_NxBxCxGK, positions, layer, op, tuned_gpu.sizes(tuned_gpu.DECODE, size), splits, interpret)
    if splits > 1:
        weights = jnp.exp2(lse - lse.max(axis=0))
        out = (out * (weights / weights.sum(axis=0))[..., None]).sum(axis=0)
    else:
        out = out[0]
    return out[:, :, :rows].reshape(q_Bx1xHxK.shape).astype(q_Bx1xHxK.dtype)


def check(q_Bx1xHxK, k_NxBxCxGK, v_NxBxCxGK, scale, interpret=None) -> int:
    """The parts that a slot's positions are split into; NotImplementedError for what the kernel does not serve."""
    batch, _, heads, size = q_Bx1xHxK.shape
    length, width = k_NxBxCxGK.shape[2:]
    gpu.check_chip(q_Bx1xHxK.dtype, interpret)
    if not q_Bx1xHxK.dtype == k_NxBxCxGK.dtype == v_NxBxCxGK.dtype:
        raise NotImplementedError(f"queries of {q_Bx1xHxK.dtype}, a cache of {k_NxBxCxGK.dtype}; the decoding kernel takes one")
    if size % 16 or not 64 <= size <= 256 or heads * size > 64 * width or scale <= 0:
        raise NotImplementedError(f"head size {size}, {heads * size // width} query heads per key-value head, scale {scale}; the "
                                  "decoding kernel takes multiples of 16 from 64 to 256, up to 64, and positive ones")
    block = tuned_gpu.sizes(tuned_gpu.DECODE, size).keys
    if length % ALIGNED or length < block:
        raise NotImplementedError(f"cache length {length}; the decoding kernel takes multiples of {ALIGNED} from {block}")
    splits = splits_of(batch * width // size, length, block)
    if splits > 1 and size > WIDEST:
        raise NotImplementedError(f"{batch} slots of {width // size} key-value heads of size {size}; too few for the chip, "
                                  "and too wide to be split")
    return splits


def splits_of(pieces: int, length: int, block: int) -> int:
    """Parts of a slot's positions: enough for two pieces of work per multiprocessor, but none below 4 blocks."""
    return max(1, min(-(-2 * tuned_gpu.MULTIPROCESSORS // pieces), length // (4 * block)))
