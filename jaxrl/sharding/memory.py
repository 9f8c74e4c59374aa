"""Arrays in host memory (pinned_host), under the sharding they have on the devices: those that rest there between their
uses, and those that stay there and are streamed, a few layers at a time, through the programs that use them.

A program sees in the type of an argument that it is in host memory, and copies what it computes with, where it does
(`fetched`, `part`, `written`). XLA for CPUs runs the same programs; its host memory is its devices' own.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

HOST = "pinned_host"
WORTH_IT = 1 << 20  # bytes of a whole array from which on it is kept in host memory; a smaller one does not pay


def can_rest(device) -> bool:
    """Whether arrays of this device can rest in its host's memory."""
    return HOST in {memory.kind for memory in device.addressable_memories()}


def resting(sharding):
    """The same sharding in host memory."""
    return sharding.with_memory_kind(HOST)


def awake(sharding):
    """The same sharding in the devices' own memory."""
    if sharding.memory_kind != HOST:
        return sharding
    return sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)


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
        return _between(x, awake(x.sharding))

    return jax.tree.map(move, tree)


def to_host(tree, where=None):
    """The tree in host memory; with `where`, a tree of shardings, only what rests there."""
    where = jax.tree.map(lambda x: resting(x.sharding), tree) if where is None else where
    return jax.tree.map(lambda x, s: _between(x, s) if s.memory_kind == HOST else x, tree, where)


def one_of(x, index: tuple[int, ...]):
    """x[index]; of an array that rests, on the devices."""
    if not rests(x):
        return x[index] if index else x
    at = np.ravel_multi_index(index, x.shape[:len(index)]) if index else 0
    return _one_of(x, at, len(index))


@functools.partial(jax.jit, static_argnums=2)
def _one_of(x, at, axes):
    return fetched(jax.lax.dynamic_index_in_dim(x.reshape(-1, *x.shape[axes:]), at, keepdims=False) if axes else x)


# ---- streamed through programs


def worth_it(x) -> bool:
    """Whether an array, or its shape and dtype, is large enough to be kept in host memory."""
    return x.ndim > 0 and math.prod(x.shape) * x.dtype.itemsize >= WORTH_IT


def kept(tree):
    """Shapes with shardings, those that are worth it in host memory."""
    def one(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=resting(x.sharding)) if worth_it(x) else x

    return jax.tree.map(one, tree)


def in_host(x) -> bool:
    """Whether an array, in a program or outside, is in host memory by its type."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


class Streamed(NamedTuple):
    """A parameter in host memory in the place of the parameter, and the sum of its gradients so far (host memory too).

    `fetched` gives the parameter. Its gradient does not go to `value`: that of `sum` is the sum with this gradient
    added, in host memory and in the sum's dtype. So a backward pass over stacked layers holds the gradient of one.
    A node may be fetched once in a program: two uses would count the sum twice.
    """

    value: jax.Array
    sum: jax.Array


def fetched(tree):
    """The tree with a copy in the devices' memory of every leaf that is in host memory. For programs."""
    def one(x):
        if isinstance(x, Streamed):
            return _learning(*x)
        return jax.device_put(x, jax.memory.Space.Device) if in_host(x) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Streamed))


@jax.custom_vjp
def _learning(value, total):
    return jax.device_put(value, jax.memory.Space.Device)


def _learning_forward(value, total):
    return _learning(value, total), total


def _learning_backward(total, gradient):
    more = jax.device_put(total, jax.memory.Space.Device)
    return None, jax.device_put(more + gradient.astype(more.dtype), jax.memory.Space.Host)


_learning.defvjp(_learning_forward, _learning_backward)


def part(x, start, size: int):
    """`size` of the first axis from `start` on, in the devices' memory. For programs."""
    return fetched(jax.lax.dynamic_slice_in_dim(x, start, size, 0))


def written(x, new, start):
    """x, wherever it is, with `new` in the place of a `part`. In a loop that carries x this is done in place."""
    return jax.lax.dynamic_update_slice_in_dim(x, replaced(x, new), start, 0)


def replaced(x, new):
    """`new` where x is. For programs."""
    return jax.device_put(new, jax.memory.Space.Host) if in_host(x) else new


def zeros(like, dtype, rows: int):
    """Zeros of the shape of an array, where it is; in host memory made `rows` of the first axis at a time. For
    programs."""
    shape = like.shape
    if not in_host(like):
        return jnp.zeros(shape, dtype)
    if rows == shape[0]:
        return jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)

    def one(carry, _):
        return carry, jax.device_put(jnp.zeros((rows, *shape[1:]), dtype), jax.memory.Space.Host)

    return jax.lax.scan(one, None, length=shape[0] // rows)[1].reshape(shape)
