"""Sends chunks of weights to vLLM's workers: a file in shared memory, HTTP from the trainer, a broadcast from GPU to
GPU, or a checkpoint folder.

A streaming transport turns each chunk into the payload of vLLM's /update_weights (see vllm_plugin.UpdateInfo); every
worker reads the whole tensors and vLLM's loaders take their slices. Two chunks are kept, so that one can be written
while the other is read.
"""

from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io import hf
from jaxrl.processes import http_server
from jaxrl.processes.addresses import bare_host, join_host_port
from jaxrl.rollout.vllm.adapter import ServerError
from jaxrl.vllm_plugin import Nccl

SHARED = Path("/dev/shm")
ALIGN = 64
CONNECTIONS = 1024  # of workers that fetch weights over HTTP


def digest(array: np.ndarray) -> str:
    """Returns the SHA-256, in hex, of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def describe(tensors, verify: bool) -> tuple[list[list], int]:
    """Returns (rows of UpdateInfo.tensors, total bytes with padding) of (name, array) pairs.

    A row: [name, dtype, shape, offset, bytes, SHA-256, or "" unless `verify`]; offsets are multiples of ALIGN."""
    rows, offset = [], 0
    for name, array in tensors:
        sha = digest(np.asarray(array)) if verify else ""
        rows.append([name, array.dtype.name, list(array.shape), offset, array.nbytes, sha])
        offset += -(-array.nbytes // ALIGN) * ALIGN
    return rows, offset


def fill(buffer, tensors, rows) -> None:
    """Copies the arrays of `tensors` (name, array) into a byte buffer at the offsets of `rows`, which `describe`
    returned."""
    view = np.frombuffer(buffer, np.uint8)
    for (_, array), (_, _, _, offset, size, _) in zip(tensors, rows, strict=True):
        unsigned = np.dtype(f"u{array.dtype.itemsize}")  # numpy copies bfloat16 one number at a time, integers at once
        np.copyto(view[offset:offset + size].view(unsigned).reshape(array.shape), array.view(unsigned))


class Stream:
    """A transport that sends chunk after chunk. Each defines `name`, `payload` and `close`; one whose workers fetch
    chunks themselves also `announcement`.

    Attributes:
      host: whether it takes chunks in host memory. False: on the device, and all servers take part in each together."""

    host = True  # wants chunks in host memory; False: on the device, and all servers take part in each chunk together

    def announcement(self) -> dict[str, str]:
        """Returns where this trainer's chunks are (fields of vllm_plugin.InitInfo): servers accept
        them from nowhere else.
        """
        return {}

    def greet(self, servers: dict[str, int]) -> dict[str, dict]:
        """Returns url -> fields that each server has to know before the first chunk. servers: url -> number of its
        workers."""
        return dict.fromkeys(servers, {})

    def meet(self, greeted: concurrent.futures.Future) -> None:
        """Waits until the workers are ready. greeted: completes when every server has replied; raises what that
        raised."""
        greeted.result()

    def send(self) -> None:
        """Sends the last payload's bytes, after the servers have its description. Nothing to do where servers fetch
        them."""

    def reset(self) -> None:
        """Forgets the servers after a failure: the next `greet` starts from scratch. Nothing to do unless a
        transport overrides it."""


LOCK = "lock"


class SharedMemory(Stream):
    """Two files in /dev/shm, only for servers on this host. The folder is private and removed with the transport; those
    that killed trainers left are removed at the start. Raises ConfigError without /dev/shm.

    It belongs to the process that holds the lock of the file in it: process ids are ambiguous across containers.

    Attributes:
      folder: its path, where other files may be put."""

    name = "shm"

    def __init__(self):
        if not SHARED.is_dir():
            raise ConfigError("rollout.vllm.transport=shm: there is no /dev/shm here; choose network")
        for left in SHARED.glob("jaxrl-*"):
            remove_unowned(left)
        made = Path(tempfile.mkdtemp(prefix=".jaxrl-", dir=SHARED))
        self._lock = lock_file(made / LOCK, os.O_CREAT)
        self.folder = made.rename(SHARED / made.name[1:])  # only now others see it, and its lock
        self._turn = 0
        self._maps: dict[Path, np.memmap] = {}  # mapping a file again would cost as much as filling it

    def payload(self, tensors, verify: bool) -> dict:
        """Copies tensors into one of two files, by turns, so that a chunk stays until the next but one; returns its
        description (fields of vllm_plugin.UpdateInfo).

        tensors: (name, array in host memory). verify: whether it has their SHA-256. Raises RunStopped if /dev/shm is
        full."""
        rows, size = describe(tensors, verify)
        path = self.folder / str(self._turn)
        self._turn = 1 - self._turn
        fill(self._mapped(path, max(size, 1)), tensors, rows)
        return {"source": f"shm:{path.name}", "size": max(size, 1), "tensors": rows}

    def announcement(self) -> dict[str, str]:
        """Returns the name of the folder below /dev/shm from which servers may read."""
        return {"folder": self.folder.name}

    def _mapped(self, path: Path, size: int) -> np.memmap:
        if path not in self._maps or len(self._maps[path]) < size:
            with open(path, "a+b") as f:
                try:
                    os.posix_fallocate(f.fileno(), 0, size)  # a full disk is an error here and a SIGBUS later
                except OSError as e:
                    if e.errno != errno.ENOSPC:
                        raise
                    free = shutil.disk_usage(SHARED).free
                    raise RunStopped(f"/dev/shm is full: a chunk of weights needs {size / 1e6:.1f} MB, "
                                     f"{free / 1e6:.1f} MB are free; free some, lower rollout.vllm.chunk_mb, or set "
                                     "rollout.vllm.transport=network"
                                     ) from None
                self._maps[path] = np.memmap(f, np.uint8, "r+", shape=(size,))
        return self._maps[path]

    def close(self) -> None:
        """Deletes the folder and releases its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def lock_file(path: Path, flags: int = 0) -> int | None:
    """Returns a descriptor that holds a file's lock until it is closed or the process ends; None if another descriptor
    holds it, also one of this process, or if the file cannot be opened (missing, not ours, or a link). flags: further
    flags of os.open.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def remove_unowned(folder: Path) -> None:
    """Deletes a folder of a trainer that was killed: one with a lock file whose lock no process holds. Others stay."""
    lock = lock_file(folder / LOCK)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def address_towards(url: str) -> str:
    """Returns this host's address on the route to a server's URL. Connecting a datagram socket sends nothing. Raises
    OSError if the name is unknown or there is no route."""
    there = urllib.parse.urlparse(url)
    kind, _, _, _, address = socket.getaddrinfo(there.hostname, there.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as s:
        s.connect(address)
        return s.getsockname()[0]


class Network(Stream):
    """Serves chunks over HTTP from this process: no shared disk, any number of hosts. Readers use a key
    made for this run.

    host: address under which servers reach this process, an IPv6 address with or without brackets."""

    name = "network"

    def __init__(self, host: str):
        self.key, self._count = secrets.token_urlsafe(32), 0
        self._chunks: dict[str, bytearray] = {}
        made = http_server.Server(bare_host(host), 0, self._answer, self._admit, connections=CONNECTIONS)
        self._server = made.start("weights")
        self.address = join_host_port(host, self._server.port)

    def _admit(self, request: http_server.Request) -> http_server.Reply | None:
        return None if request.has_key(self.key) else http_server.error(401, "the key of this run is missing or wrong")

    async def _answer(self, request: http_server.Request) -> http_server.Reply:
        chunk = self._chunks.get(request.path.rpartition("/")[2])
        if chunk is None:
            return http_server.error(404, f"{request.path}: no such chunk of weights")
        return http_server.Reply(200, chunk, "application/octet-stream")

    def payload(self, tensors, verify: bool) -> dict:
        """Copies tensors into one chunk that servers fetch; returns its description (fields of vllm_plugin.UpdateInfo).
        The last two chunks stay.

        tensors: (name, array in host memory). verify: whether the description has their SHA-256."""
        rows, size = describe(tensors, verify)
        buffer = bytearray(size)
        fill(buffer, tensors, rows)
        self._count += 1
        self._chunks[str(self._count)] = buffer
        self._chunks.pop(str(self._count - 2), None)
        return {"source": f"http:{self._count}", "size": size, "tensors": rows}

    def announcement(self) -> dict[str, str]:
        """Returns the address and the key under which servers fetch chunks."""
        return {"address": self.address, "key": self.key}

    def close(self) -> None:
        """Stops the HTTP server and drops the chunks."""
        self._server.close()
        self._chunks.clear()


class Broadcast(Stream):
    """One NCCL broadcast per chunk, from this process's first device to every worker of every server.

    The communicator is rebuilt when the servers change or something failed. NCCL is loaded by name through ctypes, so
    neither torch nor vLLM is needed here; vllm_plugin.Nccl is the other end.

    deadline: seconds that joining may take. Raises ConfigError if NCCL cannot be loaded."""

    name, host = "nccl", False

    def __init__(self, deadline: float):
        try:
            self._nccl = Nccl()
        except OSError as e:
            raise ConfigError(f"rollout.vllm.transport=nccl: NCCL cannot be loaded ({e}); pip install "
                              "nvidia-nccl-cu12, name the library in the environment variable JAXRL_NCCL, or choose "
                              "another transport") from None
        self.deadline, self._joined = deadline, False
        self._servers: dict[str, int] = {}  # url -> workers, of the communicator
        self._buffer: Any = None  # on the device, of the chunk that is sent next

    def greet(self, servers):
        """Returns NCCL id, rank and size for each server, after leaving a group of other servers; {} each if they
        have joined."""
        if self._joined and servers == self._servers:
            return dict.fromkeys(servers, {})
        self.reset()
        self._servers, self._id = servers, self._nccl.unique_id()
        ranks = 1 + np.cumsum([0, *servers.values()])
        return {url: {"id": self._id.hex(), "rank": int(rank), "size": int(ranks[-1])}
                for url, rank in zip(servers, ranks[:-1], strict=True)}

    def meet(self, greeted):
        """Joins the NCCL group together with the servers' workers, unless they have joined. Raises ServerError if
        joining fails or takes more than `deadline` seconds, and what the greeting raised."""
        if self._joined:
            return greeted.result()
        size, joining = 1 + sum(self._servers.values()), concurrent.futures.Future()

        def join():
            try:
                joining.set_result(self._nccl.join(size, self._id, 0))
            except RuntimeError as e:
                joining.set_exception(e)

        threading.Thread(target=join, daemon=True, name="nccl-join").start()  # NCCL waits for the others without end
        try:
            joining.result(self.deadline)
        except (TimeoutError, RuntimeError) as e:
            raise ServerError(f"the trainer and {size - 1} workers did not connect over NCCL within "
                              f"rollout.vllm.sync_seconds={self.deadline:g}: {e or 'no reply'}") from None
        greeted.result()
        self._joined = True

    def payload(self, tensors, verify: bool) -> dict:
        """Packs tensors into one chunk on the device; returns its description (fields of vllm_plugin.UpdateInfo).

        tensors: (name, array on the device). verify: whether it has their SHA-256, which copies them to the host."""
        rows, size = describe(tensors, verify)
        self._buffer = jax.block_until_ready(_packed([array for _, array in tensors])).addressable_data(0)
        if self._buffer.nbytes != size:
            raise AssertionError(f"a chunk of {size} bytes was packed into {self._buffer.nbytes}")
        return {"source": "nccl:", "size": size, "tensors": rows}

    def send(self):
        """Broadcasts the last chunk. Raises ServerError if that fails."""
        try:
            self._nccl.broadcast(self._buffer.unsafe_buffer_pointer(), self._buffer.nbytes)
        except RuntimeError as e:
            raise ServerError(f"the broadcast of a chunk failed: {e}") from None

    def reset(self):
        """Aborts the NCCL group; the next greeting starts a new one."""
        self._nccl.abort()
        self._joined, self._servers = False, {}

    def close(self) -> None:
        """Leaves the NCCL group and frees the chunk."""
        self.reset()
        self._buffer = None


@jax.jit
def _packed(arrays):
    """Returns uint8 [bytes]: the arrays one after another, each padded to ALIGN."""
    flat = [jax.lax.bitcast_convert_type(a, jnp.uint8).reshape(-1) for a in arrays]
    return jnp.concatenate([jnp.pad(f, (0, -f.size % ALIGN)) for f in flat])


class Checkpoint:
    """A checkpoint folder that a server without the plugin reloads; it must see the same disk."""

    name = "checkpoint"

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def write(self, model, params, hf_config: dict, dtype, version: int) -> Path:
        """Writes the weights as a Hugging Face folder and returns its path; deletes folders of other versions.

        model: jaxrl.models.Model, of which params is the parameter tree. hf_config: as in config.json. dtype: of the
        tensors. version: number of the weights, which names the folder."""
        path = self.folder / f"weights_{version}"
        hf.export(model, params, path, hf_config, dtype)
        for old in self.folder.glob("weights_*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def close(self) -> None:
        """Deletes all weights_* folders."""
        for old in self.folder.glob("weights_*"):
            shutil.rmtree(old, ignore_errors=True)
