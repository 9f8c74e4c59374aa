"""Monitors one program: its streams, its limits, its end. Linux (other systems without memory and process limits)."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable

from jaxrl.sandbox.types import Limits
from jaxrl.workers.supervisor import memory_held, process_tree

POLL_SECONDS = 0.02   # between two checks of its processes
DRAIN_SECONDS = 1.0   # for the rest of its streams after its end


def watch(process: subprocess.Popen, stdin: bytes, limits: Limits, deadline: float, kill: Callable[[], None],
          own: int = 0) -> tuple[bytes, bytes, str]:
    """Waits until the program ended or was killed. Returns (stdout, stderr, the limit it hit or "").

    Each stream is cut to limits.output_bytes, which bounds both together. "seconds", "output_bytes", "processes" and
    "memory_mb" are noticed here; memory and processes are looked at every POLL_SECONDS.

    Args:
      process: with pipes for its three streams.
      stdin: is written to it.
      limits: of which output_bytes, processes and memory_mb are read.
      deadline: time.monotonic() at which it has used limits.seconds.
      kill: kills the program and its child processes; also called after the program ended by itself.
      own: number of its processes that are not the program's.
    """
    assert process.stdin and process.stdout and process.stderr  # all are pipes
    streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = streams.values()
    limit, unsent = "", memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for fd in streams:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        look = time.monotonic() + POLL_SECONDS
        while not limit and process.poll() is None:
            now = time.monotonic()
            for key, _ in selector.select(max(0.0, min(look, deadline) - now)):
                if key.fd not in streams:
                    unsent = _feed(process, selector, unsent)
                elif not _read(key.fd, streams[key.fd]):
                    selector.unregister(key.fd)
            now = time.monotonic()
            if len(out) + len(err) > limits.output_bytes:
                limit = "output_bytes"
            elif now >= deadline:
                limit = "seconds"
            elif now >= look:
                limit, look = _exceeded_limit(process.pid, limits, own), now + POLL_SECONDS
        kill()
        over = _drain(selector, streams, limits.output_bytes, 0.0 if limit else DRAIN_SECONDS)
        limit = limit or over
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        try:
            stream.close()
        except OSError:  # what it did not read
            pass
    return bytes(out[:limits.output_bytes]), bytes(err[:limits.output_bytes]), limit


def _feed(process, selector, unsent):
    """Writes as much as possible; returns the remaining bytes."""
    try:
        unsent = unsent[os.write(process.stdin.fileno(), unsent[:1 << 16]):] if unsent else unsent
    except BlockingIOError:
        return unsent
    except OSError:
        unsent = unsent[:0]
    if not unsent:
        selector.unregister(process.stdin.fileno())
        process.stdin.close()
    return unsent


def _read(fd: int, into: bytearray) -> bool:
    """Reads available output; returns False at the end."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    into += data
    return bool(data)


def _drain(selector, streams: dict, most: int, seconds: float) -> str:
    """Reads the streams, up to `seconds` for their end; returns "output_bytes" if they hold more than `most`."""
    deadline = time.monotonic() + seconds
    while any(fd in streams for fd in selector.get_map()):
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for key, _ in ready:
            if key.fd not in streams or not _read(key.fd, streams[key.fd]):
                selector.unregister(key.fd)
        if sum(map(len, streams.values())) > most:
            return "output_bytes"
    return ""


def _exceeded_limit(pid: int, limits: Limits, own: int) -> str:
    pids = process_tree(pid, most=limits.processes + own + 1)
    if len(pids) > limits.processes + own:
        return "processes"
    return "memory_mb" if memory_held(pids) > limits.memory_mb << 20 else ""
