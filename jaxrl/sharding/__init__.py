"""Mesh and sharding rules."""

from jaxrl.sharding.mesh import batch_sharding, data_shards, make_mesh, mesh_shape, replicated
from jaxrl.sharding.rules import ROLLOUT_RULES, TRAIN_RULES, param_shardings, spec_for

__all__ = [
    "ROLLOUT_RULES",
    "TRAIN_RULES",
    "batch_sharding",
    "data_shards",
    "make_mesh",
    "mesh_shape",
    "param_shardings",
    "replicated",
    "spec_for",
]
