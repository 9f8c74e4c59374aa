"""Bulk communication between processes: all completions to every process, arrays in parts, and checks for equality.

The completions of a step are sampled and scored on their prompts' owner (`owner_process`), then gathered, so that every
process holds the whole batch as host arrays in one order that does not depend on how many processes there are.
Advantages, layout and packing then run everywhere alike, and each process gives its devices their rows (`put`).

Cost: a completion token travels as 16 bytes (id, log-prob, kept mass, version), its text (about 5), and 4 per token of
a kept support. 64 hosts with 1024 completions of 8192 tokens: 8.4 M tokens, 0.18 GB per step, which every host receives
once: 0.2 s at 1 GB/s, beside minutes of sampling. It passes through one device per process in pieces of CHUNK bytes,
all of one shape, so that one program is compiled for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl
from jaxrl.errors import ConfigError
from jaxrl.processes.group import Peers
from jaxrl.sharding import memory
from jaxrl.sharding.rules import ROLLOUT_RULES, TRAIN_RULES, param_shardings

CHUNK = 1 << 20  # bytes of each process per transfer
# Options that may differ between hosts: places, and the identity of the process.
PER_HOST = ("launch.coordinator", "launch.process", "run.compile_cache", "rollout.vllm.devices", "rollout.vllm.env",
            "rollout.vllm.host", "rollout.vllm.port", "rollout.vllm.python", "rollout.vllm.weights_host")


def owner_process(position: int, count: int) -> int:
    """Returns the process that samples and scores the prompt group at a position of the data."""
    return position % count


# ---- bytes


def encode(meta, arrays: dict[str, np.ndarray]) -> bytes:
    """Returns JSON and arrays as bytes: the length of a JSON head (8 bytes, little-endian), the head, then the arrays
    in order.

    meta: JSON-able. arrays: by name, of any shape ([] comes back as [1]), of a plain dtype of numpy: structured dtypes
    and those of other packages, such as bfloat16, come back as raw bytes ("V2").
    """
    arrays = {name: np.asarray(a) for name, a in arrays.items()}
    head = json.dumps({"meta": meta, "arrays": [[name, a.dtype.str, list(a.shape)] for name,
                                                a in arrays.items()]}).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *(a.tobytes() for a in arrays.values())])


def decode(data: bytes):
    """Returns (meta, arrays) of `encode`. Non-empty arrays are read-only views of `data`."""
    (size,) = struct.unpack_from("<Q", data)
    head, at = json.loads(data[8:8 + size]), 8 + size
    arrays = {}
    for name, kind, shape in head["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, np.dtype(kind), count, at).reshape(shape) if count else np.zeros(shape, kind)
        at += arrays[name].nbytes
    return head["meta"], arrays


def gather(peers: Peers, what: str, payload: bytes) -> list[bytes]:
    """Returns every process's payload, by process. Collective.

    Payloads may differ in length; they pass through one device of each process, CHUNK bytes at a time. A late process
    is waited for, and named (PeerLost), before the devices are busy.

    what: tag of the call, the same on every process.
    """
    if peers.count == 1:
        return [payload]
    sizes = peers.all_gather(what, len(payload))
    parts: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, max(sizes), CHUNK):
        piece = np.zeros(CHUNK, np.uint8)
        mine = np.frombuffer(payload, np.uint8, min(CHUNK, max(0, len(payload) - start)), min(start, len(payload)))
        piece[:len(mine)] = mine
        for i, row in enumerate(_everywhere(piece)):
            if start < sizes[i]:
                parts[i].append(row[:sizes[i] - start].tobytes())
    return [b"".join(p) for p in parts]


@functools.cache
def _ring():
    """Returns (sharding by process over one device of each, the program that copies it
    everywhere, this process's device).
    """
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[i] for i in sorted(first)]), ("process",))
    split = NamedSharding(mesh, P("process"))
    with jax.set_mesh(mesh):  # the run's own mesh may be another one
        shape = jax.ShapeDtypeStruct((len(first), CHUNK), np.uint8, sharding=split)
        copy = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P())).lower(shape).compile()
    return split, copy, first[jax.process_index()]


def _everywhere(piece: np.ndarray) -> np.ndarray:
    """Gathers [CHUNK] of this process to [processes, CHUNK]."""
    split, copy, device = _ring()
    local = jax.device_put(piece[None], device)
    whole = jax.make_array_from_single_device_arrays((jax.process_count(), len(piece)), split, [local])
    return np.asarray(copy(whole).addressable_data(0))


# ---- arrays


def put(tree, sharding):
    """Turns host arrays that every process holds into global arrays; each process sends its devices their parts only.

    tree: of numpy arrays, the same on all processes. sharding: one for all of them.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__), tree)


def to_host(array) -> np.ndarray:
    """Returns the whole array in host memory on every process; collective if other processes hold parts of it."""
    if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(_replicate(NamedSharding(array.sharding.mesh, P()))(array))


@functools.cache
def _replicate(sharding):
    return jax.jit(lambda x: x, out_shardings=sharding)


def local_mesh(mesh: Mesh) -> Mesh:
    """Returns this process's devices of a mesh as a mesh of the same axes (dp, fsdp, cp, ep, tp), of sizes [copies
    here, 1, 1, ep, tp]: each ep x tp group holds one copy of the rollout weights.

    Arrays split over ep and tp alone (the rollout layout) lie on each device in the same way under both meshes. A mesh
    of this process alone is returned as it is.

    Raises:
      ConfigError: such a group crosses processes.
    """
    if not mesh.is_multi_process:
        return mesh
    if copy_crosses(mesh):
        sizes = [f"mesh.{a}={mesh.shape[a]}" for a in ("ep", "tp") if mesh.shape[a] > 1]
        raise ConfigError(f"{', '.join(sizes)}: the devices that share the sampler's weights would be in several "
                          "processes, and the embedded sampler serves the devices of one process each; lower "
                          f"{' or '.join(s.partition('=')[0] for s in sizes)}, or sample with rollout.engine=vllm")
    here = [group for group in _copies(mesh) if group.flat[0].process_index == jax.process_index()]
    return Mesh(np.array(here)[:, None], mesh.axis_names, axis_types=mesh.axis_types)


def _copies(mesh: Mesh):
    """Returns the devices of each copy of the rollout weights, [copies, cp 1, ep, tp]."""
    return mesh.devices.reshape(-1, 1, *mesh.devices.shape[3:])


def copy_crosses(mesh: Mesh) -> bool:
    """Returns whether devices of several processes hold one copy of the rollout weights, an ep x tp group."""
    return any(len({d.process_index for d in group.flat}) > 1 for group in _copies(mesh))


def as_local_arrays(tree, mesh: Mesh):
    """Returns a tree of global arrays in the rollout layout as arrays of the local mesh, without a copy: the same
    buffers. Arrays on devices of this process alone stay as they are. mesh: of this process's devices (`local_mesh`).
    """
    def one(array):
        if getattr(array, "is_fully_addressable", True):  # a plan has shapes in their place
            return array
        sharding = NamedSharding(mesh, array.sharding.spec)
        parts = {s.device: s.data for s in array.addressable_shards}
        return jax.make_array_from_single_device_arrays(array.shape, sharding, [parts[d] for d in mesh.devices.flat])

    return jax.tree.map(one, tree)


def local_copies(mesh: Mesh, logical_axes, params, dtype):
    """Returns (program, mesh): program(params) is a copy in `dtype` that this process can use without the others.

    It lies on that mesh of its devices: split over ep and tp if these stay within the process, else whole on each
    device. Calling the program is collective.

    Args:
      mesh: of the parameters, over all processes.
      logical_axes: tree of the parameters' logical axes.
      params: tree of the arrays, or of their shapes, that `program` will take.
      dtype: of floating-point parameters; others keep theirs.
    """
    if copy_crosses(mesh):
        own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        here, rules = Mesh(np.array(own).reshape(-1, *(1 for _ in mesh.axis_names[1:])), mesh.axis_names,
                           axis_types=mesh.axis_types), dict.fromkeys(TRAIN_RULES)
    else:
        here, rules = local_mesh(mesh), ROLLOUT_RULES

    def cast(tree):
        return jax.tree.map(lambda a: jnp.copy(a).astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating)
                            else jnp.copy(a), memory.fetched(tree))

    program = jax.jit(cast, out_shardings=param_shardings(mesh, logical_axes, params, rules))
    return lambda tree: as_local_arrays(program(tree), here), here


# ---- are all equal?


def facts(config: dict) -> dict[str, str]:
    """Returns what must be equal on all hosts, as text by name: options (without PER_HOST), versions, a hash of jaxrl's
    code.

    config: plain nested dicts without secrets, as config.load.redacted returns them.
    """
    out = {}

    def walk(node, prefix):
        for name, value in node.items():
            if prefix + name not in PER_HOST:
                walk(value, f"{prefix}{name}.") if isinstance(value,
                                                              dict) and value else out.update({prefix
                                                                                               + name: repr(value)})

    walk(config, "")
    root, code = Path(jaxrl.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        code.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return out | {"version of Python": platform.python_version(), "version of jax": jax.__version__,
                  "version of jaxlib": jax.lib.__version__, "version of jaxrl": jaxrl.__version__,
                  "code of jaxrl": code.hexdigest()[:16]}


def check_equal(peers: Peers, found: dict[str, str]) -> None:
    """Compares facts over all processes. Collective. found: of `facts`.

    Raises ConfigError, on every process, with at most 20 lines: a fact in which a process differs from process 0, with
    both hosts and values. Raises PeerLost as `all_gather` does.
    """
    if peers.count == 1:
        return
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    if len(set(peers.all_gather("comparing hosts", digest))) == 1:
        return
    ours, *others = peers.all_gather("comparing hosts in full", found)
    lines = []
    for i, theirs in enumerate(others, 1):
        lines += [f"  - {name}: {theirs.get(name, 'absent')} on {peers.who(i)}, {ours.get(name, 'absent')} on "
                  f"{peers.who(0)}"
                  for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    raise ConfigError("the processes of this run differ:\n" + "\n".join(lines[:20]))
