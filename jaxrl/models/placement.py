"""Where activations and weights live while a model runs under `jax.set_mesh`; without a mesh nothing happens here.

Rows are split over the data axes, heads and widths over tp. Weights are gathered over fsdp before they are used, so
the sums inside a layer are the same for every split of the data axes.

Legend: B rows, L tokens per row, V vocabulary, D hidden size, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.attention import attention
from jaxrl.sharding import ROLLOUT_RULES, TRAIN_RULES, spec_for
from jaxrl.sharding.mesh import AXES, DATA_AXES


def _mesh():
    """The mesh in force, or None where there is nothing to place."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return None
    return mesh if all(kind == AxisType.Auto for kind in mesh.axis_types) else None


def _data_axes(mesh, rows: int):
    return DATA_AXES if rows % math.prod(mesh.shape[a] for a in DATA_AXES) == 0 else None


def gathered(weight, axes):
    """The weight whole over fsdp and split over tp, as every rank uses it."""
    mesh = _mesh()
    if mesh is None:
        return weight
    spec = spec_for("/".join(map(str, axes)), axes, weight.shape, mesh, ROLLOUT_RULES)
    return jax.lax.with_sharding_constraint(weight, spec)


def whole(x):
    """x on every device."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, P())


def stored(weights, axes):
    """[N, *weight] split as parameters are kept, the first axis whole."""
    mesh = _mesh()
    if mesh is None:
        return weights
    spec = spec_for("/".join(map(str, axes)), axes, weights.shape[1:], mesh, TRAIN_RULES)
    return jax.lax.with_sharding_constraint(weights, P(None, *spec))


def rows(x):
    """[B, ...] split by rows, whole in the rest."""
    mesh = _mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, P(_data_axes(mesh, x.shape[0])))


def embed(table_VxD, tokens_BxL):
    """Rows of the table, [B, L, D]. Each fsdp shard looks all tokens up in its columns; the table is never gathered.

    (Decoding, L = 1, uses tables that are whole over fsdp.)
    """
    mesh = _mesh()
    if mesh is None or tokens_BxL.shape[1] == 1:
        return rows(jnp.take(table_VxD, tokens_BxL, axis=0))
    dp = "dp" if tokens_BxL.shape[0] % mesh.shape["dp"] == 0 else None
    fsdp = "fsdp" if table_VxD.shape[1] % mesh.shape["fsdp"] == 0 else None
    tokens = jax.lax.with_sharding_constraint(tokens_BxL, P(dp))
    x = jnp.take(table_VxD, tokens, axis=0)
    return rows(jax.lax.with_sharding_constraint(x, P(dp, None, fsdp)))


def sharded_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions, k_positions, q_segments=None, k_segments=None,
                      q_prefixes=None, **options):
    """kernels.attention, each device on its own rows and heads."""
    arguments = (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions, k_positions, q_segments, k_segments, q_prefixes)
    local = functools.partial(attention, **options)
    mesh = _mesh()
    if mesh is None:
        return local(*arguments)
    batch = q_BxLxHxK.shape[0]
    data, tp = _data_axes(mesh, batch), _head_axis(mesh, k_BxSxGxK.shape[2])
    heads = P(data, None, tp, None)
    specs = [None if x is None else heads if x.ndim == 4 else P(data if x.shape[0] == batch else None)
             for x in arguments]
    return jax.shard_map(local, in_specs=tuple(specs), out_specs=heads, check_vma=False)(*arguments)


def write(cache, x_Sx1xGxK, positions_Sx1, index):
    """Puts one token per slot into the cache at its position, each device in its own slots and heads.

    Args:
      cache: [S, C, G, K], or [N, S, C, G, K] with `index` saying which of the N is meant.
      x_Sx1xGxK: what is written, cast to the cache's dtype.
      positions_Sx1: a position at or beyond C writes nothing.
      index: int scalar, or None.

    Returns the cache; inside a jitted loop it is updated in place (a scatter whose indices XLA sees to be distinct; the
    partitioner would gather it, hence the shard_map).
    """
    def local(cache, x, positions, *index):
        slots = jnp.arange(x.shape[0])
        return cache.at[(*index, slots, positions[:, 0])].set(x[:, 0].astype(cache.dtype), mode="drop",
                                                              unique_indices=True)

    arguments = (cache, x_Sx1xGxK, positions_Sx1) + (() if index is None else (index,))
    mesh = _mesh()
    if mesh is None:
        return local(*arguments)
    data, tp = _data_axes(mesh, x_Sx1xGxK.shape[0]), _head_axis(mesh, x_Sx1xGxK.shape[2])
    lead = () if index is None else (None,)
    out = P(*lead, data, None, tp, None)
    specs = (out, P(data, None, tp, None), P(data), P())[:len(arguments)]
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*arguments)


def _head_axis(mesh, groups: int):
    return "tp" if groups % mesh.shape["tp"] == 0 else None
