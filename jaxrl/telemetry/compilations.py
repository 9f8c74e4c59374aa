"""Every program that jax compiles, or fetches from its compilation cache, in this process: counted, and the memory that
a long compilation leaves behind given back. And the thread that compiles programs before they are called."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
WAITED = "/jaxrl/compile/waited"  # of a program compiled beside the work: what called for it before it was there
BESIDE = "compile"                # names of threads that compile beside the work begin so
LONG = 1.0                        # seconds of compiling after which memory is given back


class Count(NamedTuple):
    """Of programs: those that the work waited for, and those that a thread beside it compiled."""

    waited: int = 0
    beside: int = 0


class Compilations:
    """Counts from its making on: `total`, and `take()` since the last take.

    The count is one for the process, as jax's listeners are: the engine's programs are in it, and the small ones of
    single operations. A program compiled beside the work that was called for before it was there counts as both.
    """

    _seen = None  # None: jax does not report to us yet

    def __init__(self):
        if Compilations._seen is None:
            Compilations._seen = Count()
            jax.monitoring.register_event_duration_secs_listener(_heard)
        self._start = self._taken = Compilations._seen

    @property
    def total(self) -> Count:
        return Count(*(now - start for now, start in zip(Compilations._seen, self._start, strict=True)))

    def take(self) -> Count:
        before, self._taken = self._taken, Compilations._seen
        return Count(self._taken.waited - before.waited, self._taken.beside - before.beside)


class Beside:
    """Programs, by key, that threads compile beside the work, in the order in which they were begun. The process has
    one of them for every four cores, at most four: the work wants the other cores."""

    _threads = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4)), BESIDE)

    def __init__(self):
        self.coming: dict[Any, Future] = {}

    def begin(self, key, compiled, *args) -> None:
        """compiled(*args) returns the program."""
        self.coming[key] = self._threads.submit(compiled, *args)

    def begun(self, key) -> bool:
        """Whether it is being compiled, or there."""
        coming = self.coming.get(key)
        return coming is not None and (coming.running() or coming.done())

    def take(self, key):
        """The program, as soon as it is there. None for what has not begun, which then never does: it is here sooner
        than its turn comes."""
        coming = self.coming.pop(key, None)
        if coming is None or coming.cancel():
            return None
        began, late = time.perf_counter(), not coming.done()
        program = coming.result()
        if late:
            jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)
        return program

    def stop(self) -> None:
        """Takes back what has not begun."""
        self.coming = {key: coming for key, coming in self.coming.items() if not coming.cancel()}


def give_back() -> None:
    """Returns to the system what the heap holds and nobody uses, where libc can: compiling a training step leaves
    hundreds of MiB, which glibc keeps, and programs put their buffers elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _heard(event: str, seconds: float, **details) -> None:
    if event == EVENT and seconds > LONG:
        give_back()
    seen = Compilations._seen
    if event == EVENT and threading.current_thread().name.startswith(BESIDE):
        Compilations._seen = seen._replace(beside=seen.beside + 1)
    elif event in (EVENT, WAITED):
        Compilations._seen = seen._replace(waited=seen.waited + 1)
