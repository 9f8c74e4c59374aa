"""Attention of rows whose tokens lie over several devices, keys and values going from device to device (Liu et al.,
Ring Attention, arXiv 2310.01889): none ever has those of a whole row.

A device keeps its queries. In n steps the keys of all n devices come by, and what a kernel gives of each part is merged
by the logarithms of its sums, as blocks are inside of a kernel:

    lse = log(sum_t exp(lse_t)),   out = sum_t exp(lse_t - lse) * out_t

The backward pass sends keys and values round again, and beside them their gradients, which are home after n steps: with
out and lse of the whole row in place of a part's, a kernel's gradients by a part's keys are the whole's. Sums are in
another order on every device, so numbers agree with one device's to rounding.

Legend: B rows, L queries and keys per device, n devices, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention import sinks as at_sinks
from jaxrl.kernels.attention.packed import api, blockwise, gpu, reference, tpu
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.kernels.fallback import first_that_serves
from jaxrl.types import custom_vjp

# Implementations that tell the logarithm of a part's sum (-inf: no key seen) and take that of the whole:
#   forward_part(q, k, v, ids, work, **options) -> (out_BxLxHxK, lse_BxLxH in fp32 or better)
#   gradients_of_part(q, k, v, ids, work, out, lse, g, **options) -> those of q, k and v
PARTS = {"tpu": tpu, "gpu": gpu, "blockwise": blockwise, "reference": reference}


class Ring(NamedTuple):
    """The work of attention in a ring of n devices.

    parts: {name of an implementation: api.work_of for the keys of each device}, of at most one name; the leaves have an
    axis n after their leading axis."""

    parts: Any


class _How(NamedTuple):
    name: str
    axis: str
    count: int
    options: tuple


def work_of(q_shape, kv_shape, dtype, q_positions_BxL, k_positions_BxS, q_segments_BxL=None, k_segments_BxS=None,
            q_prefixes_BxL=None, q_reach_BxL=None, *, count: int, **options) -> Ring:
    """Returns the Ring of attention over `count` devices: api.work_of for the keys of each of them.

    Args:
      q_shape, kv_shape: (B, L, H, K) of one device's queries, (B, L, G, K) of one device's keys. dtype: theirs.
      q_positions_BxL, q_segments_BxL, q_prefixes_BxL, q_reach_BxL: int ids of this device's queries, or None, as
        api.attention describes them; rows of 1 broadcast over B.
      k_positions_BxS, k_segments_BxS: of the keys of all devices, one device's after another's; S = count * L.
      count: n, devices of the ring.
      options: api.work_of's window (0 = all) and implementation."""
    def cut(x):
        return None if x is None else x.reshape(len(x), count, -1).swapaxes(0, 1)

    def of_part(keys):
        positions, segments = keys
        return api.work_of(q_shape, kv_shape, dtype, q_positions_BxL, positions, q_segments_BxL, segments,
                           q_prefixes_BxL, q_reach_BxL, among=PARTS, **options)

    found = jax.lax.map(of_part, (cut(k_positions_BxS), cut(k_segments_BxS)))
    return Ring(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found))


def attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, q_positions_BxL, k_positions_BxL, q_segments_BxL=None,
              k_segments_BxL=None, q_prefixes_BxL=None, *, axis: str, work: Ring, window=0, softcap=0.0, scale=None,
              implementation="auto", sinks_H=None, q_reach_BxL=None):
    """Computes api.attention of this device's queries over the keys of all devices of `axis`, within a shard_map.

    All arrays are this device's part, L tokens of each row. Implementations that cannot return the logarithms of their
    softmax sums are skipped. No device ever holds the keys of a whole row.

    Args:
      q_BxLxHxK, k_BxLxGxK, v_BxLxGxK: queries, keys and values; head h reads key-value head h // (H / G).
      q_positions_BxL, k_positions_BxL: int positions within the sequence; rows of 1 broadcast over B.
      q_segments_BxL, k_segments_BxL: int segment ids, 0 = padding; both or neither.
      q_prefixes_BxL: int id of a second visible segment (a shared prompt), 0 = none.
      axis: name of the mesh axis.
      work: of `work_of`, for these ids, window and implementation.
      window: number of positions a query sees, itself included; 0 = all (static).
      softcap: cap * tanh(score / cap) on the scaled scores; 0 = none. scale: factor on the scores; None = K ** -0.5.
      implementation: "auto" or a name, as api.attention's.
      sinks_H: a score per head of a key that every query sees and that has no value; None = none.
      q_reach_BxL: int, the last position that a query sees; None = its own.

    Returns out [B, L, H, K] of this device's queries, in v's dtype. Raises ValueError for an unknown implementation."""
    scale = q_BxLxHxK.shape[-1] ** -0.5 if scale is None else scale
    ids = api.ids_of(q_positions_BxL, k_positions_BxL, q_segments_BxL, k_segments_BxL, q_prefixes_BxL, q_reach_BxL,
                     window)
    ids = Ids(*(x if x is None else jnp.broadcast_to(x, (len(q_BxLxHxK), x.shape[1])) for x in ids))
    options = ("window", window), ("softcap", softcap), ("scale", float(scale))

    def ask(name):
        if name not in PARTS:
            raise NotImplementedError(f"{name} does not tell the sums of its softmax, which a ring merges")
        if name == "blockwise" and name != implementation and q_BxLxHxK.shape[1] < blockwise.WORTH_IT:
            raise NotImplementedError("short rows: the reference is faster")
        how = _How(name, axis, jax.lax.axis_size(axis), options)
        return _attend(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, at_sinks.of(sinks_H, q_BxLxHxK.dtype), ids,
                       work.parts.get(name), how)

    return first_that_serves("attention", api.order(implementation), ask, silent=api.XLA)


@custom_vjp(6)
def _attend(q, k, v, sinks, ids, work, how):
    return _forward(q, k, v, sinks, ids, work, how)[0]


def _forward(q, k, v, sinks, ids, work, how):
    """Returns (out [B, L, H, K] in v's dtype, what `_backward` needs), merging the parts of n devices as the module
    describes."""
    acc = jnp.promote_types(v.dtype, jnp.float32)

    def merged(sums, keys, step):
        out, top, total = sums
        own, lse = PARTS[how.name].forward_part(q, *keys[:2], _seen(ids, keys), _of_part(work, step, how),
                                                **dict(how.options))
        above = jnp.maximum(top, lse)
        base = jnp.where(jnp.isneginf(above), 0.0, above)  # of queries that have seen no key so far
        shrink, weight = jnp.exp(top - base), jnp.exp(lse - base)
        out = out * shrink[..., None] + own.astype(acc) * weight[..., None]
        return out, above, total * shrink + weight

    def step(carry, number):
        sums, keys = carry
        return (merged(sums, keys, number), _sent(keys, how)), None

    none = jnp.zeros((*q.shape[:3], v.shape[3]), acc), jnp.full(q.shape[:3], -jnp.inf, acc), jnp.zeros(q.shape[:3], acc)
    (sums, keys), _ = jax.lax.scan(step, (none, _keys(k, v, ids)), jnp.arange(how.count - 1))
    out, top, total = merged(sums, keys, how.count - 1)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out, lse = out / total[..., None], jnp.where(seen, top + jnp.log(total), -jnp.inf)
    if sinks is not None:
        share, lse = at_sinks.share(lse, sinks)
        out = out * share[..., None]
    out = out.astype(v.dtype)
    return out, (q, k, v, sinks, ids, work, out, lse)


def _backward(how, saved, g):
    q, k, v, sinks, ids, work, out, lse = saved
    acc = jnp.promote_types(q.dtype, jnp.float32)

    def added(gq, keys, grads, step):
        own = PARTS[how.name].gradients_of_part(q, *keys[:2], _seen(ids, keys), _of_part(work, step, how), out, lse, g,
                                                **dict(how.options))
        more, *of_keys = (x.astype(acc) for x in own)
        return gq + more, tuple(a + b for a, b in zip(grads, of_keys, strict=True))

    def step(carry, number):
        gq, keys, grads = carry
        gq, grads = added(gq, keys, grads, number)
        return (gq, *_sent((keys, grads), how)), None

    none = tuple(jnp.zeros(x.shape, acc) for x in (q, k, v))
    carry = none[0], _keys(k, v, ids), none[1:]
    (gq, keys, grads), _ = jax.lax.scan(step, carry, jnp.arange(how.count - 1))
    gq, grads = added(gq, keys, grads, how.count - 1)
    gk, gv = _sent(grads, how)
    gs = None
    if sinks is not None:
        delta = jnp.sum(g.astype(acc) * out.astype(acc), axis=-1)
        gs = at_sinks.gradient(lse, sinks, delta).sum(axis=(0, 1)).astype(sinks.dtype)
    return gq.astype(q.dtype), gk.astype(k.dtype), gv.astype(v.dtype), gs, None, None


_attend.defvjp(_forward, _backward)


def _keys(k, v, ids: Ids):
    """Returns what goes round."""
    return k, v, ids.k_positions, ids.k_segments


def _seen(ids: Ids, keys) -> Ids:
    return ids._replace(k_positions=keys[2], k_segments=keys[3])


def _of_part(work, step, how):
    """Returns the part of the work with the keys that are here in this step: those of the device so many before this
    one."""
    if work is None:
        return None
    part = (jax.lax.axis_index(how.axis) - step) % how.count
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, part, 1, keepdims=False), work)


def _sent(tree, how):
    """Returns what the device before this one had."""
    pairs = [(i, (i + 1) % how.count) for i in range(how.count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, how.axis, pairs), tree)
