"""Fingerprints of parameters and optimizer states: two 32-bit hashes of every array, and a sample of the parameters.

The hashes are sums of integers over all elements (models.adapters.hashes), so mesh and layout do not change them; equal
hashes mean equal bits, except for a chance of 2^-64 per array. The sample (at most SAMPLE numbers of each trained
parameter, evenly spaced) measures how far apart two unequal states are. rl.recording and replay call it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.checkpoint.checkpointer import flatten
from jaxrl.models import adapters
from jaxrl.sharding import memory

SAMPLE = 16


class Look(NamedTuple):
    """The fingerprint of some states. hashes and sample are lists of device arrays until `on_host`.

    Attributes:
      names: of the arrays. hashes: [names, 2] uint32. sample: [P] float32, at most SAMPLE numbers of each trained
        array.
    """

    names: list[str]
    hashes: Any  # a list of parts, until `on_host` joins them
    sample: Any

    def on_host(self) -> Look:
        """Returns the fingerprint with hashes and sample as host arrays, whole on every process. Not for one
        that is on the host already."""
        whole = lambda parts: np.concatenate([np.asarray(x) for x in parts])  # noqa: E731
        return Look(self.names, whole(self.hashes), whole(self.sample))


def look_at(states: dict, frozen: bool = False) -> Look:
    """Computes the fingerprint of TrainStates; dispatches programs and waits for none.

    Arrays without elements are left out; names are <name of the state>/<path>. All processes of the mesh call it.

    states: name -> TrainState. frozen: also fingerprint frozen parameters, which some updates change."""
    names, hashes, sample = [], [], []
    for owner, state in states.items():
        held = {field: x for field, x in vars(state).items() if frozen or field != "frozen"}
        flat = {path: x for path, x in sorted(flatten(held).items()) if x.size}
        where = next(iter(flat.values())).sharding
        mesh = where.mesh if isinstance(where, NamedSharding) else None
        near = {path: x for path, x in flat.items() if not memory.rests(x)}
        for part in (near, *({path: x} for path, x in flat.items() if path not in near)):  # these one at a time
            found = _program(mesh)(part)
            names += [f"{owner}/{path}" for path in part]
            hashes.append(found[0])
            sample.append(found[1])
    return Look(names, hashes, sample)


@functools.cache
def _program(mesh):
    return jax.jit(_looked, out_shardings=None if mesh is None else NamedSharding(mesh, P()))


def _looked(flat):
    flat = memory.fetched(flat)
    sample = [_sample(x) for path, x in flat.items() if path.startswith("trainable/")]
    return (jnp.stack([adapters.hashes(x) for x in flat.values()]),
            jnp.concatenate([jnp.zeros(0, jnp.float32), *sample]))


def _sample(x):
    """Reads single elements, which a partitioned program takes from their devices."""
    if not x.ndim:
        return x.reshape(1).astype(jnp.float32)
    places = np.unravel_index(np.linspace(0, x.size - 1, min(SAMPLE, x.size)).round().astype(np.int64), x.shape)
    return x[places].astype(jnp.float32)


def differing(names, a, b) -> list[str]:
    """Returns the names of the arrays whose hashes differ. names: [n]. a, b: [n, 2] uint32 (Look.hashes)."""
    return [name for name, x, y in zip(names, a, b, strict=True) if not np.array_equal(x, y)]
