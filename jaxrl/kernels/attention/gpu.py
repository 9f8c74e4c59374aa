"""`attention` for packed rows on Hopper GPUs: Pallas kernels on Mosaic GPU that visit only blocks with work.

Memory is linear in the row length in both passes; gradients are summed in one order. Queries that see no key, padding
among them, give 0. Off a GPU the kernels run interpreted (jax 0.12 or newer).

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import tuned_gpu
from jaxrl.kernels.attention.gpu_plan import PART, UNIT, Plan, plan
from jaxrl.kernels.platform import platform

OLDEST = (0, 11)       # jax
OLDEST_INTERPRETER = (0, 12)


class Work(NamedTuple):
    """The work of a call, made once for all layers of a window; leading axes are those of devices."""

    forward: Plan
    queries: Plan  # of dq
    keys: Plan     # of dk and dv


@dataclasses.dataclass(frozen=True)
class Sizes:
    forward: tuned_gpu.Forward
    queries: tuned_gpu.Queries
    keys: tuned_gpu.Keys


def sizes_of(head_size: int) -> Sizes:
    return Sizes(*(tuned_gpu.sizes(table, head_size) for table in (tuned_gpu.FORWARD, tuned_gpu.QUERIES, tuned_gpu.KEYS)))


def check(q_shape, kv_shape, dtype, interpret=None) -> None:
    """NotImplementedError for what the kernels do not serve."""
    size = q_shape[3]
    check_chip(dtype, interpret)
    if not 64 <= size <= 256 or size % (16 * sizes_of(size).keys.parts):
        raise NotImplementedError(f"head size {size}; the Mosaic GPU kernels take multiples of 16 from 64 to 128, of 32 to 256")
    if q_shape[1] == 1 and kv_shape[1] > 1:
        raise NotImplementedError("one query per row; the Mosaic GPU kernels take rows of queries")


def check_chip(dtype, interpret=None) -> None:
    """NotImplementedError where Mosaic GPU kernels for Hopper cannot run, or not with this type."""
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    if version < OLDEST:
        raise NotImplementedError(f"jax {jax.__version__}; the Mosaic GPU kernels need jax 0.11 or newer")
    if interpreted(interpret) and version < OLDEST_INTERPRETER:
        raise NotImplementedError(f"jax {jax.__version__}; off a GPU the Mosaic GPU kernels need jax 0.12's interpreter")
    if dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{dtype} inputs; the Mosaic GPU kernels take bfloat16 and float16")
    if interpreted(interpret):
        return
    kinds = {d.compute_capability for d in jax.devices() if d.platform == "gpu"}
    if kinds and kinds != {"9.0"}:
        raise NotImplementedError(f"compute capability {', '.join(sorted(kinds))}; the Mosaic GPU kernels are for Hopper (9.0)")


def interpreted(interpret):
    """What plgpu.kernel is told: None, or the interpreter's parameters."""
    if interpret is None:
        interpret = platform() != "gpu"
    if interpret is True:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return getattr(plgpu, "InterpretGPUParams", bool)() or True
    return interpret or None


def work_of(q_shape, kv_shape, dtype, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL, *,
          window, interpret=None) -> Work:
    """The work of calls with these shapes and ids. Raises NotImplementedError as `attention` does."""
    check(q_shape, kv_shape, dtype, interpret)
    sizes = sizes_of(q_shape[3])
    of = functools.partial(plan, q_shape[0], q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL,
                           window=window)
    made = Work(of(parts=2, block=sizes.forward.keys), of(parts=sizes.queries.consumers, block=sizes.queries.keys),
                of(parts=sizes.keys.consumers, block=sizes.keys.queries, transposed=True))
    return jax.tree.map(lambda x: x[None], made)


def attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS,
              q_prefixes_BxL, *, window, softcap, scale, chosen=True, work=None, interpret=None):
    """See api.attention. Raises NotImplementedError for what `check` names.

    work: of `work_of`, for these ids and this window; None = made here. interpret: False, True, or what the interpreter is told;
    None = where this is no GPU.
    """
    del chosen
    ids = q_positions_BxL, k_positions_BxS, q_segments_BxL, k_segments_BxS, q_prefixes_BxL
    call, arrays = _prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, work, interpret)
    return _attend(call, *arrays)[:, :q_BxLxHxK.shape[1]]


def computed_blocks(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, *ids, window=0, softcap=0.0, scale=1.0, interpret=None):
    """What each kernel computed, counted by itself: {"forward", "queries", "keys"}: (blocks int32 [B, heads, parts of the row],
    pairs of a query and a key in a block)."""
    from jaxrl.kernels.attention import gpu_backward, gpu_forward

    call, (work, *qkv) = _prepared(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, ids, window, softcap, scale, None, interpret)
    op, sizes = dataclasses.replace(call.op, count=True), call.sizes
    out, lse, forward = gpu_forward.forward(*qkv, work.forward, op, sizes.forward, call.interpret)
    rest = (*qkv, out, gpu_backward.stats(out, out, lse))
    queries = gpu_backward.dq(*rest, work.queries, op, sizes.queries, call.interpret)[-1]
    keys = gpu_backward.dkv(*rest, work.keys, op, sizes.keys, call.interpret)[-1]
    return {"forward": (forward, PART * sizes.forward.keys), "queries": (queries, PART * sizes.queries.keys),
            "keys": (keys, PART * sizes.keys.queries)}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part: gpu_parts.Op, Sizes, and how to interpret (None = compiled)."""

    op: Any
    sizes: Sizes
    interpret: Any


def _prepared(q, k, v, ids, window, softcap, scale, work, interpret):
    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(f"inputs of {q.dtype}, {k.dtype} and {v.dtype}; the Mosaic GPU kernels take one type")
    check(q.shape, k.shape, q.dtype, interpret)
    if scale <= 0:
        raise NotImplementedError(f"scale {scale}; the Mosaic GPU kernels take positive ones")
    from jaxrl.kernels.attention.gpu_parts import Op

    interpret = interpreted(interpret)
    sizes = sizes_of(q.shape[3])
    work = work or work_of(q.shape, k.shape, q.dtype, *ids, window=window, interpret=interpret or False)
    op = Op(float(scale), float(softcap), window, ids[2] is not None, in_registers=not interpret)
    full = [jnp.pad(x, [(0, 0), (0, -x.shape[1] % UNIT), (0, 0), (0, 0)]) for x in (q, k, v)]
    return Call(op, sizes, interpret), (jax.tree.map(lambda x: x[0], work), *full)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, work, q, k, v):
    return _forward(call, work, q, k, v)[0]


def _forward(call, work, q, k, v):
    from jaxrl.kernels.attention.gpu_forward import forward

    out, lse, _ = forward(q, k, v, work.forward, call.op, call.sizes.forward, call.interpret)
    return out, (work, q, k, v, out, lse)


def _backward(call, saved, d_out):
    from jaxrl.kernels.attention.gpu_backward import dkv, dq, stats

    work, q, k, v, out, lse = saved
    rest = (q, k, v, d_out, stats(out, d_out, lse))
    d_q, _ = dq(*rest, work.queries, call.op, call.sizes.queries, call.interpret)
    if call.interpret:
        rest, d_q = jax.lax.optimization_barrier((rest, d_q))  # the interpreter cannot run two kernels at once
    d_k, d_v, _ = dkv(*rest, work.keys, call.op, call.sizes.keys, call.interpret)
    return None, d_q, d_k, d_v


_attend.defvjp(_forward, _backward)
