"""One table from logical axes to mesh axes, per layout.

Every parameter carries one logical axis name per dimension (`Model.logical_axes()`); a layout says which mesh axis
each one is split over. A dimension that the mesh axis does not divide stays whole.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Training: parameters and optimizer state split over fsdp and tp.
TRAIN_RULES = {
    "vocab": "tp",
    "embed": "fsdp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
    "expert": None,
    "layers": None,
    "norm": None,
}

# Rollout: decoding reads every weight for every token, so weights are split over tp only.
ROLLOUT_RULES = {**TRAIN_RULES, "embed": None}


def spec_for(name: str, axes: tuple, shape: tuple, mesh: Mesh, rules: dict = TRAIN_RULES) -> P:
    """PartitionSpec of one parameter.

    Raises ValueError naming the parameter for an axis missing from the table, or two dimensions on one mesh axis.
    """
    if len(axes) != len(shape):
        raise ValueError(f"parameter {name}: {len(axes)} logical axes {axes} for shape {shape}")
    out = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"parameter {name}: logical axis {axis!r} is not in the sharding rules {sorted(rules)}")
        target = rules[axis] if axis is not None else None
        if target is not None and size % mesh.shape[target]:
            target = None
        if target is not None and target in out:
            raise ValueError(f"parameter {name}: two of its axes {axes} are split over mesh axis {target!r}")
        out.append(target)
    return P(*out)


def param_shardings(mesh: Mesh, logical_axes, shapes, rules: dict = TRAIN_RULES):
    """NamedSharding tree for a parameter tree.

    Args:
      mesh: the device mesh.
      logical_axes: tree of tuples, one logical name per dimension.
      shapes: tree of the same structure whose leaves have `.shape`.
      rules: the layout.
    """
    flat_shapes, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    flat_axes = treedef.flatten_up_to(logical_axes)
    specs = [
        NamedSharding(mesh, spec_for(jax.tree_util.keystr(path), tuple(axes), leaf.shape, mesh, rules))
        for (path, leaf), axes in zip(flat_shapes, flat_axes, strict=True)
    ]
    return treedef.unflatten(specs)
