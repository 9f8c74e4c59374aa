"""Arrays that rest in host memory (pinned_host) between their uses, under the sharding they have on the devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

HOST = "pinned_host"


def can_rest(device) -> bool:
    """Whether arrays of this device can rest in its host's memory."""
    return HOST in {memory.kind for memory in device.addressable_memories()}


def resting(sharding):
    """The same sharding in host memory."""
    return sharding.with_memory_kind(HOST)


def rests(x) -> bool:
    return x.sharding.memory_kind == HOST


def moved(tree, shardings):
    """The tree on the devices of `shardings`, which may be others. Over several processes, whose devices cannot send to
    each other's outside of a program, each array is made whole on its own devices first, one at a time."""
    def one(x, where):
        near = x.is_fully_addressable and where.is_fully_addressable
        if near or x.sharding.device_set == where.device_set:
            return jax.device_put(x, where)
        whole = jax.jit(lambda a: a, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
        host = np.asarray(whole.addressable_data(0))
        return jax.make_array_from_callback(x.shape, where, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def _between(x, where):
    """The array in the memory of `where`, which splits it as it is. Of several processes each moves its own parts: a
    program that did would have to be of the mesh in force."""
    if x.is_fully_addressable:
        return jax.device_put(x, where)
    parts = [jax.device_put(s.data, SingleDeviceSharding(s.device, memory_kind=where.memory_kind))
             for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, where, parts)


def to_devices(tree):
    """The tree with all that rests moved to the devices' own memory; what is there stays as it is."""
    def move(x):
        if not rests(x):
            return x
        own = next(iter(x.sharding.device_set)).default_memory().kind
        return _between(x, x.sharding.with_memory_kind(own))

    return jax.tree.map(move, tree)


def to_host(tree, where=None):
    """The tree in host memory; with `where`, a tree of shardings, only what rests there."""
    where = jax.tree.map(lambda x: resting(x.sharding), tree) if where is None else where
    return jax.tree.map(lambda x, s: _between(x, s) if s.memory_kind == HOST else x, tree, where)
