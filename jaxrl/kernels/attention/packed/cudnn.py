"""`attention` by cuDNN where every row holds one sequence, decided on the device; where any row does not, by our
kernels for Hopper or, where those do not serve the call, blockwise.

`auto` takes it on GPUs older than Hopper only. cuDNN may sum gradients in another order each time.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention.packed import blockwise, gpu
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.kernels.platform import platform


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, *, window, softcap, scale, chosen=True, work=None,
              sinks=None):
    """Computes api.attention with cuDNN where every row holds one sequence, else with the implementation of `beside`.

    The device decides at run time; both are compiled. Returns out [B, L, H, K] in v's dtype.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK: all of one dtype, bfloat16 or float16, with S = L > 1.
      ids: Ids, positions and segments, as `api.ids_of` returns them.
      window: positions that a query sees, itself included; 0 = all. scale: factor on the scores.
      chosen: not read. work: of `work_of`, for these ids and this window; None = made by `beside`'s implementation.

    Raises NotImplementedError off a GPU; for other or mixed dtypes; a reach, `sinks` or a soft-cap; head sizes that are
    no multiple of 8 or above `largest_head`; rows of one token; and where there are not as many queries as keys."""
    del chosen
    if platform() != "gpu":
        raise NotImplementedError("cuDNN needs an NVIDIA GPU")
    if q_BxLxHxK.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{q_BxLxHxK.dtype} inputs; cuDNN takes bfloat16 and float16")
    if not q_BxLxHxK.dtype == k_BxSxGxK.dtype == v_BxSxGxK.dtype:
        raise NotImplementedError(
            f"inputs of {q_BxLxHxK.dtype}, {k_BxSxGxK.dtype} and {v_BxSxGxK.dtype}; cuDNN takes one type")
    if ids.q_reach is not None:
        raise NotImplementedError("queries that see later keys within a window; cuDNN is not asked for them")
    if sinks is not None:
        raise NotImplementedError("attention sinks; cuDNN is not asked for them")
    if softcap:
        raise NotImplementedError(f"softcap {softcap}; cuDNN has none")
    _, length, _, size = q_BxLxHxK.shape
    if size % 8 or size > largest_head():
        raise NotImplementedError(f"head size {size}; cuDNN takes multiples of 8 up to {largest_head()} here")
    if length != k_BxSxGxK.shape[1] or length == 1:
        raise NotImplementedError(f"{length} queries for {k_BxSxGxK.shape[1]} keys; cuDNN is asked for whole rows")
    options = dict(window=window, softcap=softcap, scale=scale)
    other = beside(q_BxLxHxK.shape, k_BxSxGxK.shape, q_BxLxHxK.dtype)
    single, lengths_B = one_sequence(q_BxLxHxK.shape[:2], ids)
    return jax.lax.cond(single, lambda q, k, v: causal(q, k, v, lengths_B, window, scale),
                        lambda q, k, v: other.attention(q, k, v, ids, work=work, **options),
                        q_BxLxHxK, k_BxSxGxK, v_BxSxGxK)


def work_of(q_shape, kv_shape, dtype, ids: Ids, *, window):
    """Returns the work of the implementation beside cuDNN (`beside`), for the rows that cuDNN does not run: gpu.Kernels
    or BlockLists.

    q_shape, kv_shape: (B, L, H, K), (B, S, G, K). ids: Ids, int positions and segments [B, L] and [B, S]. window:
    positions that a query sees, 0 = all. Where blockwise is beside it, raises NotImplementedError for rows shorter than
    blockwise.WORTH_IT, though `attention` serves them."""
    return beside(q_shape, kv_shape, dtype).work_of(q_shape, kv_shape, dtype, ids, window=window)


def beside(q_shape, kv_shape, dtype):
    """Returns the module (gpu, or blockwise where that does not serve the shapes) that runs rows holding several
    sequences.

    q_shape, kv_shape: (B, L, H, K), (B, S, G, K). dtype: of queries and keys."""
    try:
        gpu.check(q_shape, kv_shape, dtype, interpret=False)
    except NotImplementedError:
        return blockwise
    return gpu


def largest_head() -> int:
    """Returns the largest head size that cuDNN serves on this host's GPUs: 256 from Hopper on, 128 before."""
    generations = {float(d.compute_capability) for d in jax.devices() if d.platform == "gpu"}
    return 128 if min(generations, default=9.0) < 9.0 else 256


def one_sequence(shape, ids: Ids):
    """Returns (bool scalar: in every row each real query sees every real key up to its own index; real tokens of each
    row [B] int32, at least 1).

    So it is where a row holds one sequence from position 0 on, then padding: one segment, or a prompt and one
    completion behind it, whose prefix is the prompt.

    shape: (B, L). ids: Ids of as many queries as keys; a reach is not read."""
    q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, _ = ids
    at = jnp.arange(shape[1])[None]
    if q_segments_BxL is None:
        real = jnp.ones(shape, bool)
    else:
        real = jnp.broadcast_to(q_segments_BxL != 0, shape)
    lengths_B = real.sum(axis=1, dtype=jnp.int32)
    single = ((q_positions_BxL == at) & (k_positions_BxS == at) | ~real).all()
    single &= (real == (at < lengths_B[:, None])).all()
    if q_segments_BxL is not None:
        first_Bx1 = q_segments_BxL[:, :1]
        own = q_segments_BxL == first_Bx1
        single &= (q_segments_BxL == k_segments_BxS).all()
        if q_prefixes_BxL is None:
            single &= (own | ~real).all()
        else:
            last_B = jnp.take_along_axis(jnp.broadcast_to(q_segments_BxL, shape), lengths_B[:, None] - 1, axis=1)
            behind = (q_segments_BxL == last_B) & (q_prefixes_BxL == first_Bx1) & ~own
            alone = own & ((q_prefixes_BxL == 0) | (q_prefixes_BxL == first_Bx1))
            single &= (alone | behind | ~real).all() & (own[:, :-1] | ~own[:, 1:]).all()
    return single, jnp.maximum(lengths_B, 1)


def causal(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, lengths_B, window, scale):
    """Computes causal attention with cuDNN; returns out [B, L, H, K], 0 from a row's length on.

    q, k, v: of one dtype, bfloat16 or float16. lengths_B: int32, at least 1. window: positions that a query sees,
    itself included; 0 = all. scale: factor on the scores."""
    out = jax.nn.dot_product_attention(
        q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, scale=scale, is_causal=True, query_seq_lengths=lengths_B,
        key_value_seq_lengths=lengths_B, local_window_size=(window - 1, 0) if window else None, implementation="cudnn")
    real = jnp.arange(out.shape[1])[None] < lengths_B[:, None]
    return jnp.where(real[..., None, None], out, 0)
