"""Device meshes, sharding rules, host memory, and the table of chips that plans are made for."""

from jaxrl.sharding.mesh import (
    ROLES,
    batch_sharding,
    check_experts,
    check_recurrent,
    data_shards,
    make_mesh,
    mesh_shape,
    replicated,
    role_meshes,
    rollout_mesh,
)
from jaxrl.sharding.rules import ROLLOUT_RULES, TRAIN_RULES, param_shardings, spec_for

__all__ = [
    "ROLES",
    "ROLLOUT_RULES",
    "TRAIN_RULES",
    "batch_sharding",
    "check_experts",
    "check_recurrent",
    "data_shards",
    "make_mesh",
    "mesh_shape",
    "param_shardings",
    "replicated",
    "role_meshes",
    "rollout_mesh",
    "spec_for",
]
