"""Moves arrays between device memory and host memory (pinned_host), under the same sharding.

Some arrays rest in host memory between their uses. Others stay there and are streamed, a few layers at a time,
through the programs that use them: the type of an argument tells a program that it is in host memory, and the program
copies the part it computes with (`fetched`, `part`, `written`). XLA for CPUs runs the same programs; its host memory
is the devices' own.

Called by roles (placement), models.decoder (layers) and training. Options that decide the placement are not read here.
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
WORTH_IT = 1 << 20  # bytes of the smallest whole array that is kept in host memory; a smaller one does not pay


def can_rest(device) -> bool:
    """Whether a device supports arrays in its host's pinned memory."""
    return HOST in {memory.kind for memory in device.addressable_memories()}


def resting(sharding):
    """Returns the same sharding in host memory."""
    return sharding.with_memory_kind(HOST)


def awake(sharding):
    """Returns the same sharding in the devices' own memory; unchanged unless it is in host memory."""
    if sharding.memory_kind != HOST:
        return sharding
    return sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)


def rests(x) -> bool:
    """Whether an array, or a shape with a sharding, is in host memory by its sharding."""
    return x.sharding.memory_kind == HOST


def moved(tree, shardings):
    """Moves a tree to `shardings`, which may name other devices.

    Devices of different processes cannot send to each other outside of a program. So an array that several processes
    hold, or shall hold, and that moves to other devices is first replicated on its present ones and copied to host
    memory, one array at a time. All processes of the present and of the new devices call this together; each of them
    must have some of the present ones, in a mesh (NamedSharding).
    """
    def one(x, where):
        near = x.is_fully_addressable and where.is_fully_addressable
        if near or x.sharding.device_set == where.device_set:
            return jax.device_put(x, where)
        whole = jax.jit(lambda a: a, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
        host = np.asarray(whole.addressable_data(0))
        return jax.make_array_from_callback(x.shape, where, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def _between(x, where):
    """Moves an array to the memory kind of `where`, which has the same sharding.

    Each process moves its own shards, since a program that did so would have to use the mesh in force.
    """
    if x.is_fully_addressable:
        return jax.device_put(x, where)
    parts = [jax.device_put(s.data, SingleDeviceSharding(s.device, memory_kind=where.memory_kind))
             for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, where, parts)


def to_devices(tree):
    """Moves the arrays of a tree that are in host memory to the devices' own memory; others are unchanged."""
    def move(x):
        if not rests(x):
            return x
        return _between(x, awake(x.sharding))

    return jax.tree.map(move, tree)


def to_host(tree, where=None):
    """Moves a tree of arrays to host memory, under the same shardings. where: a tree of shardings; only the leaves that
    are in host memory there move, others are unchanged. None = all move.
    """
    where = jax.tree.map(lambda x: resting(x.sharding), tree) if where is None else where
    return jax.tree.map(lambda x, s: _between(x, s) if s.memory_kind == HOST else x, tree, where)


def one_of(x, index: tuple[int, ...]):
    """Returns x[index], index along the first axes (() = x); of an array in host memory, a copy on the devices."""
    if not rests(x):
        return x[index] if index else x
    at = np.ravel_multi_index(index, x.shape[:len(index)]) if index else 0
    return _one_of(x, at, len(index))


@functools.partial(jax.jit, static_argnums=2)
def _one_of(x, at, axes):
    return fetched(jax.lax.dynamic_index_in_dim(x.reshape(-1, *x.shape[axes:]), at, keepdims=False) if axes else x)


# ---- streamed through programs


def worth_it(x) -> bool:
    """Whether an array, or its shape and dtype, is large enough to be kept in host memory: of at least WORTH_IT bytes
    (1 MiB), and no scalar.
    """
    return x.ndim > 0 and math.prod(x.shape) * x.dtype.itemsize >= WORTH_IT


def kept(tree):
    """Returns shapes with shardings of a tree of them, where large arrays (`worth_it`) are placed in host memory."""
    def one(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=resting(x.sharding)) if worth_it(x) else x

    return jax.tree.map(one, tree)


def in_host(x) -> bool:
    """Whether an array, in a program or outside, is in host memory by its type."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


class Streamed(NamedTuple):
    """A parameter in host memory with the sum of its gradients so far, also in host memory; replaces the parameter.

    `fetched` returns the parameter. Its gradient does not go to `value`: the gradient of `sum` is the sum plus this
    gradient, in host memory and in the sum's dtype. So a backward pass over stacked layers holds the gradient of one.
    Fetch a node once in a program: two uses would count the sum twice.
    """

    value: jax.Array
    sum: jax.Array


def fetched(tree):
    """Copies every leaf in host memory to the devices' memory, and returns the tree with a Streamed node replaced by
    its parameter; other leaves are unchanged. For use inside programs.
    """
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
    """Copies rows `start` to `start + size` of the first axis to the devices' memory. For use inside programs.

    start: int scalar, may be traced; one above len(x) - size is lowered to it. size: static.
    """
    return fetched(jax.lax.dynamic_slice_in_dim(x, start, size, 0))


def written(x, new, start):
    """Returns x, in its memory, with the rows from `start` on replaced by `new`; in place in a loop that carries x.

    new: rows of x's dtype. start: int scalar, may be traced; lowered so that `new` fits.
    """
    return jax.lax.dynamic_update_slice_in_dim(x, replaced(x, new), start, 0)


def replaced(x, new):
    """Returns `new` in the memory of x. For use inside programs."""
    return jax.device_put(new, jax.memory.Space.Host) if in_host(x) else new


def zeros(like, dtype, rows: int):
    """Returns zeros with the shape and the memory of `like`, in `dtype`. For use inside programs.

    rows: of the first axis, made at a time if `like` is in host memory; must divide its length.
    """
    shape = like.shape
    if not in_host(like):
        return jnp.zeros(shape, dtype)
    if rows == shape[0]:
        return jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)

    def one(carry, _):
        return carry, jax.device_put(jnp.zeros((rows, *shape[1:]), dtype), jax.memory.Space.Host)

    return jax.lax.scan(one, None, length=shape[0] // rows)[1].reshape(shape)
