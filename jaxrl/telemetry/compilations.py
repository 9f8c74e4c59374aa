"""Every program that jax compiles, or fetches from its compilation cache, in this process."""

from __future__ import annotations

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts from its making on: `total`, and `take()` since the last take. The count is one for the process, jax's listeners being
    so, and the engine's programs are in it, as are the small ones of single operations."""

    _seen = None  # None: jax does not report to us yet

    def __init__(self):
        if Compilations._seen is None:
            Compilations._seen = 0
            jax.monitoring.register_event_duration_secs_listener(_heard)
        self._start = self._taken = Compilations._seen

    @property
    def total(self) -> int:
        return Compilations._seen - self._start

    def take(self) -> int:
        new, self._taken = Compilations._seen - self._taken, Compilations._seen
        return new


def _heard(event: str, seconds: float, **details) -> None:
    if event == EVENT:
        Compilations._seen += 1
