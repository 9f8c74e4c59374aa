"""`attention` for packed rows on Hopper GPUs: Pallas kernels on Mosaic GPU that visit only blocks with work.

Memory is linear in the row length in both passes; gradients are summed in one order. Queries that see no key, padding
among them, give 0. Off a GPU the kernels run interpreted (jax 0.12 or newer).

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import sinks as at_sinks
from jaxrl.kernels.attention.gpu_chip import HIDDEN, Op, check_chip, interpreted, sizes_of
from jaxrl.kernels.attention.packed import tuned
from jaxrl.kernels.attention.packed.gpu_plan import UNIT, plan
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.types import custom_vjp

LOG2E, UNSEEN = math.log2(math.e), -HIDDEN  # the logarithm that the kernels have where a query sees no key


class Kernels(NamedTuple):
    """One value for each of the three kernels: its Sizes, or its Plan.

    The plans, whose leading axes are those of devices, are the work of a call, made once for all layers of a window."""

    forward: Any
    queries: Any  # dq
    keys: Any     # dk and dv


def sizes_for(head_size: int) -> Kernels:
    """Returns the Sizes of the three kernels for a head size. Raises ValueError for one above 256."""
    return Kernels(**{kernel: sizes_of(table, head_size) for kernel, table in tuned.GPU.items()})


def check(q_shape, kv_shape, dtype, interpret=None) -> None:
    """Raises NotImplementedError for calls that the kernels do not serve.

    They need a Hopper GPU and jax 0.11 (interpreted: jax 0.12), bfloat16 or float16, head sizes that are multiples of
    16 from 64 to 128 or of 32 up to 256, and more than one query per row, unless there is one key only.

    q_shape [B, L, H, K] and kv_shape [B, S, G, K] as tuples. interpret: as `attention`'s."""
    size = q_shape[3]
    check_chip(dtype, interpret)
    if not 64 <= size <= 256 or size % (16 * sizes_for(size).keys.parts):
        raise NotImplementedError(
            f"head size {size}; the Mosaic GPU kernels take multiples of 16 from 64 to 128, of 32 to 256")
    if q_shape[1] == 1 and kv_shape[1] > 1:
        raise NotImplementedError("one query per row; the Mosaic GPU kernels take rows of queries")


def work_of(q_shape, kv_shape, dtype, ids: Ids, *, window, interpret=None) -> Kernels:
    """Returns the Kernels of Plans for calls with these shapes and ids; every array has a leading axis of 1, the
    device.

    Args:
      q_shape, kv_shape: (B, L, H, K) of the queries, (B, S, G, K) of the keys. dtype: theirs.
      ids: Ids, int positions and segments of queries [B, L] and keys [B, S]; rows of 1 broadcast over B.
      window: positions that a query sees, itself included; 0 = all. interpret: as `attention`'s.

    Raises NotImplementedError as `check` does."""
    check(q_shape, kv_shape, dtype, interpret)
    made = Kernels(*(plan(q_shape[0], ids, window=window, parts=one.consumers, block=one.block, transposed=transposed)
                     for one, transposed in zip(sizes_for(q_shape[3]), (False, False, True), strict=True)))
    return jax.tree.map(lambda x: x[None], made)


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, *, window, softcap, scale, chosen=True, work=None,
              sinks=None, interpret=None):
    """Computes api.attention with the Mosaic GPU kernels; returns out [B, L, H, K] in v's dtype.

    Queries that see no key give 0.

    Args:
      q_BxLxHxK, k_BxSxGxK, v_BxSxGxK: all of one dtype, bfloat16 or float16.
      ids: Ids, positions and segments, as `api.ids_of` returns them.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: positive factor on the scores. chosen: not read.
      work: of `work_of`, for these ids and this window; None = made here.
      sinks: [H] fp32 scores of keys that every query sees and that have no value; None = none.
      interpret: False, True, or what the interpreter is told; None = interpret where this is no GPU.

    Raises NotImplementedError for mixed dtypes, a scale that is not positive, and as `check` does."""
    del chosen
    call, arrays = prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    return _attend(call, sinks, *arrays)[:, :q_BxLxHxK.shape[1]]


def forward_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, *, window, softcap, scale, interpret=None):
    """Returns (out [B, L, H, K] in v's dtype, lse [B, L, H] fp32) of attention to one part of a row's keys.

    lse is the natural logarithm of the softmax's sum over that part, -inf where a query sees no key of it.

    Args:
      q, k, v: of one dtype.
      ids: Ids, int32 positions and segments of queries [B, L] and keys [B, S]. work: of `work_of` for them; None = made
        here.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: positive factor on the scores. interpret: False, True, or what the interpreter is told; None = where this
        is no GPU.

    Raises NotImplementedError for mixed dtypes, a scale that is not positive, and as `check` does."""
    call, arrays = prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    out, (*_, lse) = _forward(call, None, *arrays)
    lse = lse[:, :, :q_BxLxHxK.shape[1]].swapaxes(1, 2)
    return out[:, :q_BxLxHxK.shape[1]], jnp.where(lse < UNSEEN / 2, lse / LOG2E, -jnp.inf)


def gradients_of_part(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids: Ids, work, out_BxLxHxK, lse_BxLxH, g_BxLxHxK, *, window,
                      softcap, scale, interpret=None):
    """Returns what one part of a row's keys adds to the gradients: q's [B, L, H, K], k's and v's [B, S, G, K].

    They have the dtype of q.

    Args:
      q, k, v: of one dtype, k and v of the part.
      ids: Ids, int32 positions and segments of queries [B, L] and keys [B, S]. work: of `work_of` for them; None = made
        here.
      window: positions that a query sees, itself included; 0 = all. softcap: cap * tanh(score / cap); 0 = none.
      scale: positive factor on the scores. interpret: False, True, or what the interpreter is told; None = where this
        is no GPU.
      out, lse: of the whole row, all parts merged; lse natural logarithms, -inf where a query sees no key.
      g: cotangent of out.

    Raises NotImplementedError for mixed dtypes, a scale that is not positive, and as `check` does."""
    call, arrays = prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    length = arrays[1].shape[1]
    lse = jnp.where(jnp.isneginf(lse_BxLxH), UNSEEN, lse_BxLxH * LOG2E).swapaxes(1, 2)
    lse = jnp.pad(lse, [(0, 0), (0, 0), (0, length - lse.shape[2])], constant_values=UNSEEN)
    out, g = (jnp.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)]) for x in (out_BxLxHxK, g_BxLxHxK))
    _, _, *grads = _backward(call, (None, *arrays, out, lse), g)
    return tuple(x[:, :like.shape[1]] for x, like in zip(grads, (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK), strict=True))


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    op: scale, soft-cap, window. sizes: Sizes of the three kernels. interpret: None = compiled, else the interpreter's
    parameters."""

    op: Op
    sizes: Kernels
    interpret: Any


def prepared(q, k, v, ids, window, softcap, scale, work, interpret):
    """Returns (Call, (plans, q, k, v)): both sides filled up with zeros to multiples of UNIT, the plans of this device.

    The arguments are those of `attention`. Raises NotImplementedError for mixed dtypes, a scale that is not positive,
    and as `check` does."""
    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(f"inputs of {q.dtype}, {k.dtype} and {v.dtype}; the Mosaic GPU kernels take one type")
    check(q.shape, k.shape, q.dtype, interpret)
    if scale <= 0:
        raise NotImplementedError(f"scale {scale}; the Mosaic GPU kernels take positive ones")
    interpret = interpreted(interpret)
    sizes = sizes_for(q.shape[3])
    work = work or work_of(q.shape, k.shape, q.dtype, ids, window=window, interpret=interpret or False)
    op = Op(float(scale), float(softcap), window, ids.q_segments is not None, in_registers=not interpret,
            reach=ids.q_reach is not None)
    full = [jnp.pad(x, [(0, 0), (0, -x.shape[1] % UNIT), (0, 0), (0, 0)]) for x in (q, k, v)]
    return Call(op, sizes, interpret), (jax.tree.map(lambda x: x[0], work), *full)


@custom_vjp(0)
def _attend(call, sinks, work, q, k, v):
    return _forward(call, sinks, work, q, k, v)[0]


def _forward(call, sinks, work, q, k, v):
    from jaxrl.kernels.attention.packed.gpu_forward import forward

    out, lse, _ = forward(q, k, v, work.forward, call.op, call.sizes.forward, call.interpret)
    if sinks is not None:
        share, lse = at_sinks.share(lse, sinks[:, None], at_sinks.BASE_2)
        out = (out * share.swapaxes(1, 2)[..., None]).astype(out.dtype)
    return out, (sinks, work, q, k, v, out, lse)


def _backward(call, saved, d_out):
    from jaxrl.kernels.attention.packed.gpu_backward import dkv, dq, stats

    sinks, work, q, k, v, out, lse = saved
    both = stats(out, d_out, lse)
    rest = (q, k, v, d_out, both)
    d_q, _ = dq(*rest, work.queries, call.op, call.sizes.queries, call.interpret)
    if call.interpret:
        rest, d_q = jax.lax.optimization_barrier((rest, d_q))  # the interpreter cannot run two kernels at once
    d_k, d_v, _ = dkv(*rest, work.keys, call.op, call.sizes.keys, call.interpret)
    d_sinks = sinks if sinks is None else at_sinks.gradient(
        lse, sinks[:, None], both[:, :, 1], at_sinks.BASE_2).sum(axis=(0, 2))
    return d_sinks, None, d_q, d_k, d_v


_attend.defvjp(_forward, _backward)
