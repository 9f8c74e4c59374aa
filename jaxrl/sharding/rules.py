"""Sharding rules: one table from logical axes of parameters to mesh axes per layout (training, rollout).

Every parameter carries one logical axis name per dimension (`Model.logical_axes()`); a layout says which mesh axis, or
axes, each one is split over. A dimension that these do not divide is split over those of them that do, as far as it
can be (DeepSeek-V3's 512 latents on fsdp 128 x ep 8: over fsdp), or stays whole.

Experts lie over ep, whole ones, and by their width over tp: so each device of tp computes as much, whatever the
routing. All other parameters take ep for a second fsdp, and all of them cp.
"""

from __future__ import annotations

import itertools
import math

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Training: parameters and optimizer state split over fsdp, cp, ep and tp.
TRAIN_RULES = {
    "vocab": "tp",
    "embed": ("fsdp", "cp", "ep"),
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
    "expert": "ep",
    "expert_embed": ("fsdp", "cp"),  # the hidden size of an expert's matrices
    "layers": None,
    "norm": None,
}

# Rollout, and weights in use: decoding reads every weight for every token, so weights are split over tp only, and
# experts over ep, whose tokens come to them.
ROLLOUT_RULES = {**TRAIN_RULES, "embed": None, "expert_embed": None}


def spec_for(name: str, axes: tuple, shape: tuple, mesh: Mesh | AbstractMesh, rules: dict = TRAIN_RULES) -> P:
    """Returns the PartitionSpec of one parameter with logical `axes` and `shape`.

    A dimension is split over the largest part of its mesh axes in `rules` whose size divides it, None = whole. Where
    all of these have size 1, the first one is named, which splits nothing. name: for messages.

    Raises ValueError naming the parameter for an axis missing from the table, two dimensions on one mesh axis (one of
    size 1, too), or another number of axes than of dimensions.
    """
    if len(axes) != len(shape):
        raise ValueError(f"parameter {name}: {len(axes)} logical axes {axes} for shape {shape}")
    out, taken = [], set()
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"parameter {name}: logical axis {axis!r} is not in the sharding rules {sorted(rules)}")
        over = _mesh_axes(rules[axis] if axis is not None else None)
        over = tuple(a for a in over if mesh.shape.get(a, 1) > 1) or over[:1]  # the others split nothing
        over = max(_subsets(over), key=lambda part: _divides(part, size, mesh))
        if twice := taken & {*over}:
            raise ValueError(f"parameter {name}: two of its axes {axes} are split over mesh axis {min(twice)!r}")
        taken |= {*over}
        out.append(over if len(over) > 1 else over[0] if over else None)
    return P(*out)


def _subsets(axes: tuple) -> list[tuple]:
    """Returns all subsets of mesh axes, larger ones first, in the table's order."""
    return [part for n in range(len(axes), -1, -1) for part in itertools.combinations(axes, n)]


def _divides(axes: tuple, size: int, mesh) -> int:
    """Returns over how many devices `axes` split a dimension of `size`; 0 if they do not divide it."""
    count = math.prod(mesh.shape.get(a, 1) for a in axes)
    return 0 if size % count else count


def _mesh_axes(target) -> tuple[str, ...]:
    return () if target is None else target if isinstance(target, tuple) else (target,)


def param_shardings(mesh: Mesh, logical_axes, shapes, rules: dict = TRAIN_RULES):
    """Returns the tree of NamedShardings for a parameter tree; errors as `spec_for`.

    Args:
      mesh: the device mesh.
      logical_axes: tree of tuples, one logical name per dimension.
      shapes: tree of the same structure whose leaves have `.shape`.
      rules: the layout, TRAIN_RULES or ROLLOUT_RULES.
    """
    flat_shapes, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    flat_axes = treedef.flatten_up_to(logical_axes)
    specs = [
        NamedSharding(mesh, spec_for(jax.tree_util.keystr(path), tuple(axes), leaf.shape, mesh, rules))
        for (path, leaf), axes in zip(flat_shapes, flat_axes, strict=True)
    ]
    return treedef.unflatten(specs)
