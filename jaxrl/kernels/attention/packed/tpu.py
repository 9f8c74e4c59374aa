"""`attention` for packed rows on TPUs: Pallas kernels that read and compute only what the row's documents need.

Memory is linear in the row length in both passes; gradients are summed in one order. Queries that see no key, padding
among them, give 0. Off a TPU the kernels run interpreted.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size, I ids, T entries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import sinks as at_sinks
from jaxrl.kernels.attention.packed import tpu_kernels, tuned
from jaxrl.kernels.attention.packed.blocks import NO_QUERY, active_blocks, filled_ids
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.kernels.attention.packed.tpu_kernels import Call, Walk, work_list
from jaxrl.kernels.attention.packed.tuned import TILE
from jaxrl.kernels.attention.tpu_parts import LOG2E, LOWEST, WORDS
from jaxrl.kernels.platform import cores, platform
from jaxrl.types import custom_vjp


class Work(NamedTuple):
    """The entries that the kernels visit, made once for all layers of a window; leading axes are those of devices."""

    words: jax.Array        # [1, T + 1] int32, see tpu_kernels.work_list: key blocks of each tile of queries
    count: jax.Array        # [1] int32
    key_words: jax.Array    # [1, T' + 1] int32: query blocks of each tile of keys
    key_count: jax.Array    # [1] int32


def check(q_shape, kv_shape, dtype) -> None:
    """Raises NotImplementedError for calls that the kernels do not serve.

    They take float32 and bfloat16, head sizes that are multiples of 8 up to 256, more than one query per row (unless
    there is one key only), and rows whose work list has room: at most WORDS entries in all, of 31 bits.

    q_shape [B, L, H, K] and kv_shape [B, S, G, K] as tuples."""
    batch, length, _, size = q_shape
    keys = kv_shape[1]
    if jnp.dtype(dtype) not in ("float32", "bfloat16"):
        raise NotImplementedError(f"{jnp.dtype(dtype)} inputs; the TPU kernel takes float32 and bfloat16")
    if size % 8 or size > 256:
        raise NotImplementedError(f"head size {size}; the TPU kernel takes multiples of 8 up to 256")
    if length == 1 and keys > 1:
        raise NotImplementedError("one query per row; the TPU kernel takes rows of queries")
    for mine, other in ((length, keys), (keys, length)):
        walk = Walk(_tiles(mine), _tiles(other), tuned.tiles_of(other))
        bits = sum(walk.fields) + max(1, (batch - 1).bit_length())
        entries = batch * walk.resident * (walk.passing // walk.tiles)
        if bits > 31 or entries > WORDS:
            raise NotImplementedError(f"{batch} rows of {length} x {keys} on one device; the TPU kernel's work list "
                                      f"has room for {WORDS} entries, not {entries}")


def _tiles(length: int) -> int:
    """Returns tiles of a side, in whole steps."""
    step = tuned.tiles_of(length) * TILE
    return -(-length // step) * (step // TILE)


def work_of(q_shape, kv_shape, dtype, ids: Ids, *, window) -> Work:
    """Returns the Work of calls with these shapes and ids.

    Args:
      q_shape, kv_shape: (B, L, H, K) of the queries, (B, S, G, K) of the keys. dtype: theirs.
      ids: Ids, int positions and segments of queries [B, L] and keys [B, S]; rows of 1 broadcast over B.
      window: positions that a query sees, itself included; 0 = all.

    Raises NotImplementedError as `check` does."""
    check(q_shape, kv_shape, dtype)
    length, keys = q_shape[1], kv_shape[1]
    active = active_blocks(ids, window=window, block_q=TILE, block_k=TILE)
    active = jnp.broadcast_to(active, (q_shape[0], *active.shape[1:]))
    active = jnp.pad(active, [(0, 0), (0, _tiles(length) - active.shape[1]), (0, _tiles(keys) - active.shape[2])])
    both = work_list(active, tuned.tiles_of(keys)), work_list(active.swapaxes(1, 2), tuned.tiles_of(length))
    return Work(*(x[None] for pair in both for x in pair))


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, *, window, softcap, scale, chosen=True, work=None,
              sinks=None, interpret=None):
    """Computes api.attention with the Pallas TPU kernels; returns out [B, L, H, K] in v's dtype.

    Queries that see no key give 0.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK: all of one dtype, float32 or bfloat16.
      ids: Ids, positions and segments, as `api.ids_of` returns them.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores. chosen: not read.
      work: of `work_of`, for these ids and this window; None = made here.
      sinks: [H] fp32 scores of keys that every query sees and that have no value; None = none.
      interpret: for pallas_call; None = off a TPU.

    Raises NotImplementedError for mixed dtypes and as `check` does."""
    del chosen
    call, arrays = prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    return _attend(call, sinks, *arrays)[:, :, :q_BxLxHxK.shape[1]].swapaxes(1, 2)


def forward_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, *, window, softcap, scale, interpret=None):
    """Returns (out [B, L, H, K] in v's dtype, lse [B, L, H] fp32) of attention to one part of a row's keys.

    lse is the natural logarithm of the softmax's sum over that part, -inf where a query sees no key of it.

    Args:
      q, k, v: of one dtype, float32 or bfloat16; k and v of the part.
      ids: Ids of the queries [B, L] and of the part's keys [B, S]. work: of `work_of` for them; None = made here.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores. interpret: for pallas_call; None = off a TPU.

    Raises NotImplementedError for mixed dtypes and as `check` does."""
    call, (work, *arrays) = prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    out, lse = tpu_kernels.forward(call, (work.words[0], work.count[0]), *arrays)
    out, lse = (x[:, :, :q_BxLxHxK.shape[1]].swapaxes(1, 2) for x in (out, lse))
    return out, jnp.where(lse > LOWEST / 2, lse / LOG2E, -jnp.inf)


def gradients_of_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, out_BxLxHxK, lse_BxLxH, g_BxLxHxK, *, window,
                      softcap, scale, interpret=None):
    """Returns what one part of a row's keys adds to the gradients: q's [B, L, H, K], k's and v's [B, S, G, K], in their
    dtype.

    Args:
      q, k, v: of one dtype, float32 or bfloat16; k and v of the part.
      ids: Ids of the queries [B, L] and of the part's keys [B, S]. work: of `work_of` for them; None = made here.
      out_BxLxHxK, lse_BxLxH: of the whole row, all parts merged; lse natural logarithms, -inf where a query sees no
        key.
      g_BxLxHxK: cotangent of out.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: factor on the scores. interpret: for pallas_call; None = off a TPU.

    Raises NotImplementedError for mixed dtypes and as `check` does."""
    call, (work, *arrays) = prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    lse = jnp.where(jnp.isneginf(lse_BxLxH), LOWEST, lse_BxLxH * LOG2E)
    out, g, lse = (_by_head(x, call.length) for x in (out_BxLxHxK, g_BxLxHxK, lse[..., None]))
    _, _, *grads, _, _ = _attend_backward(call, (None, work, arrays, out, lse[..., 0]), g)
    return tuple(x[:, :, :like.shape[1]].swapaxes(1, 2)
                 for x, like in zip(grads, (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK), strict=True))


def _by_head(x_BxLxHxK, length):
    """Returns [B, H, length, K], zeros at the end."""
    return jnp.pad(x_BxLxHxK.swapaxes(1, 2), [(0, 0), (0, 0), (0, length - x_BxLxHxK.shape[1]), (0, 0)])


def prepared(q, k, v, ids: Ids, window, softcap, scale, work, interpret):
    """Returns (tpu_kernels.Call, arrays of the core: work, q, k, v by head [B, H, L, K], ids of queries and of keys).

    Both sides are filled up to whole tiles. The ids are int32 [B, I, L] and [B, S, I]: position (or reach), then
    segment and prefix where there are some, last the position of queries that have a reach. The arguments are those of
    `attention`. Raises NotImplementedError for mixed dtypes and as `check` does."""
    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(f"inputs of {q.dtype}, {k.dtype} and {v.dtype}; the TPU kernel takes one type")
    interpret = platform() != "tpu" if interpret is None else interpret
    if work is None:
        work = work_of(q.shape, k.shape, q.dtype, ids, window=window)
    check(q.shape, k.shape, q.dtype)
    batch, _, heads, size = q.shape
    length, keys = _tiles(q.shape[1]) * TILE, _tiles(k.shape[1]) * TILE
    call = Call(batch, length, keys, heads, k.shape[2], size, str(q.dtype), window, float(softcap), float(scale),
                ids.q_segments is not None, ids.q_segments is not None and ids.q_prefixes is not None, interpret,
                cores=cores(), reaching=ids.q_reach is not None)

    q_position, k_position, q_segment, k_segment, prefix, reach = (
        x if x is None else jnp.broadcast_to(x, (batch, x.shape[1])) for x in filled_ids(ids, length, keys))
    q_ids, k_ids = [reach if call.reaching else q_position], [k_position]
    if call.segmented:
        q_ids = [jnp.where(q_segment == 0, NO_QUERY, q_ids[0]), q_segment]
        k_ids.append(k_segment)
    if call.prefixed:
        q_ids.append(jnp.where(prefix == 0, NO_QUERY, prefix))
    q_ids += [q_position] * call.reaching
    return call, (work, _by_head(q, length), _by_head(k, keys), _by_head(v, keys), jnp.stack(q_ids, axis=1),
                  jnp.stack(k_ids, axis=2))


@custom_vjp(0)
def _attend(call, sinks, work, q, k, v, q_ids, k_ids):
    return _attend_forward(call, sinks, work, q, k, v, q_ids, k_ids)[0]


def _attend_forward(call, sinks, work, *arrays):
    out, lse = tpu_kernels.forward(call, (work.words[0], work.count[0]), *arrays)
    if sinks is not None:
        share, lse = at_sinks.share(lse, sinks[:, None], at_sinks.BASE_2)
        out = (out * share[..., None]).astype(out.dtype)
    return out, (sinks, work, arrays, out, lse)


def _attend_backward(call, saved, do_BxHxLxK):
    sinks, work, arrays, out, lse = saved
    delta_BxHxL = (do_BxHxLxK.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    rest = (*arrays, do_BxHxLxK, lse, delta_BxHxL)
    dq, = tpu_kernels.query_gradient(call, (work.words[0], work.count[0]), *rest)
    dk, dv = tpu_kernels.key_gradients(call, (work.key_words[0], work.key_count[0]), *rest)
    ds = None
    if sinks is not None:
        ds = at_sinks.gradient(lse, sinks[:, None], delta_BxHxL, at_sinks.BASE_2).sum(axis=(0, 2))
    return ds, None, dq, dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)
