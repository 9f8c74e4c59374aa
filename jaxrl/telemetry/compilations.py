"""Counts every program that jax compiles, or loads from its compilation cache, in this process; returns the memory
that long compilations leave to the system; and compiles programs in a background thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
WAITED = "/jaxrl/compile/waited"  # seconds that a call waited for a program of a background thread
BACKGROUND = "compile"                # prefix of the names of background threads
LONG = 1.0                        # seconds of compiling after which memory is returned to the system


class Count(NamedTuple):
    """Number of programs.

    Attributes:
      waited: those that the main work waited for. background: those that a background thread compiled.
    """

    waited: int = 0
    background: int = 0


class Compilations:
    """Counts programs since its creation: `total`, and `take()` since the last take.

    The count is one for the process, as jax's listeners are: it includes the engine's programs and the small ones of
    single operations. A program compiled in the background that was needed before it was ready counts as both.
    """

    _seen, _listens = Count(), False

    def __init__(self):
        if not Compilations._listens:
            Compilations._listens = True
            jax.monitoring.register_event_duration_secs_listener(_heard)
        self._start = self._taken = Compilations._seen

    @property
    def total(self) -> Count:
        """The counts since creation."""
        return Count(*(now - start for now, start in zip(Compilations._seen, self._start, strict=True)))

    def take(self) -> Count:
        """Returns the counts since the last call, the first time since creation."""
        before, self._taken = self._taken, Compilations._seen
        return Count(self._taken.waited - before.waited, self._taken.background - before.background)


class BackgroundCompiler:
    """Compiles programs, by key, in background threads, in the order in which they were queued. The process has one
    thread for every four cores, at least one and at most four: the main work needs the other cores.

    Attributes:
      coming: key -> Future of each program that was queued and not taken.
    """

    _threads = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4)), BACKGROUND)

    def __init__(self):
        self.coming: dict[Any, Future] = {}

    def begin(self, key, compiled, *args) -> None:
        """Queues a program under `key`; compiled(*args), called in a background thread, returns it."""
        self.coming[key] = self._threads.submit(compiled, *args)

    def begun(self, key) -> bool:
        """Returns whether a program is being compiled, is ready or has failed; False while it is queued, or is not."""
        coming = self.coming.get(key)
        return coming is not None and (coming.running() or coming.done())

    def take(self, key):
        """Returns a program, waiting until it is ready; raises what its compilation raised. None if none is queued
        under `key`, or its compilation has not started, which is then cancelled: the caller compiles it sooner."""
        coming = self.coming.pop(key, None)
        if coming is None or coming.cancel():
            return None
        began, late = time.perf_counter(), not coming.done()
        program = coming.result()
        if late:
            jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)
        return program

    def idle(self) -> bool:
        """Returns whether no program is queued or being compiled."""
        return all(coming.done() for coming in self.coming.values())

    def stop(self) -> None:
        """Cancels compilations that have not started."""
        self.coming = {key: coming for key, coming in self.coming.items() if not coming.cancel()}


def give_back() -> None:
    """Returns unused heap memory to the system, if libc can: compiling a training step leaves hundreds of MiB that
    glibc keeps, and programs allocate their buffers elsewhere.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _heard(event: str, duration_secs: float, **details: Any) -> None:
    if event == EVENT and duration_secs > LONG:
        give_back()
    seen = Compilations._seen
    if event == EVENT and threading.current_thread().name.startswith(BACKGROUND):
        Compilations._seen = seen._replace(background=seen.background + 1)
    elif event in (EVENT, WAITED):
        Compilations._seen = seen._replace(waited=seen.waited + 1)
