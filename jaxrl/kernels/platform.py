"""For which devices the program that is being traced will run."""

from __future__ import annotations

import jax


def platform() -> str:
    """"cpu", "gpu" or "tpu": of the mesh in force, which may be of devices that are not here; without one, of jax's default."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.platform if device is not None else jax.default_backend()
