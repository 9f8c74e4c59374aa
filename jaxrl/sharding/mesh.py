"""The device mesh: axes dp (replicas), fsdp (shards of parameters), tp (shards of heads, width, vocabulary)."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.config import ConfigError

AXES = ("dp", "fsdp", "tp")
DATA_AXES = ("dp", "fsdp")  # the batch is split over both


def mesh_shape(mesh_config, num_devices: int) -> tuple[int, int, int]:
    """(dp, fsdp, tp) with one -1 filled so that the product is `num_devices`.

    Raises ConfigError when the sizes cannot cover the devices.
    """
    sizes = [mesh_config.dp, mesh_config.fsdp, mesh_config.tp]
    given = ", ".join(f"mesh.{a}={s}" for a, s in zip(AXES, sizes, strict=True))
    if any(s == 0 or s < -1 for s in sizes):
        raise ConfigError(f"{given}: sizes are positive, or -1 for the rest of the devices")
    if sizes.count(-1) > 1:
        raise ConfigError(f"{given}: only one axis can be -1")
    known = math.prod(s for s in sizes if s > 0)
    if -1 in sizes:
        if num_devices % known:
            fixed = " x ".join(f"mesh.{a}" for a, s in zip(AXES, sizes, strict=True) if s > 1)
            raise ConfigError(f"{given}: {num_devices} device(s) cannot be divided by {fixed} = {known}; lower {fixed}")
        sizes[sizes.index(-1)] = num_devices // known
    elif known != num_devices:
        raise ConfigError(f"{given}: needs {known} devices, {num_devices} are here; set one axis to -1")
    return tuple(sizes)


def make_mesh(mesh_config, devices=None) -> Mesh:
    """Mesh over all devices (or those given), in the order jax finds best for the topology."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(mesh_config, len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def data_shards(mesh: Mesh) -> int:
    """Number of shards the batch is split into."""
    return math.prod(mesh.shape[a] for a in DATA_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over dp x fsdp, the rest whole."""
    return NamedSharding(mesh, P(DATA_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())
