"""For which devices the program that is being traced will run."""

from __future__ import annotations

import jax


def platform(mesh=None) -> str:
    """Returns "cpu", "gpu" or "tpu": of the mesh, or of the one in force (its devices may be elsewhere), else jax's
    default."""
    device = getattr(jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh, "abstract_device", None)
    return device.platform if device is not None else jax.default_backend()


def cores() -> int:
    """Returns the number of cores of a device of the mesh in force, over which a kernel's parallel axes are spread: 2
    on a v5p, whose chip is one device; 1 without a mesh, or where it does not tell."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "num_cores", None) or 1
