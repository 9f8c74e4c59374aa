"""A thread and a bounded queue for one slow place that telemetry writes to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Writer:
    """Runs what is put into it, one after the other, in a thread of its own; no other writer waits for it.

    Args:
      limit: how many actions may wait. A place that is merely slow then slows the run down instead of filling its memory.
    """

    def __init__(self, name: str, limit: int):
        self._queue: queue.Queue = queue.Queue(limit)
        threading.Thread(target=self._work, name=f"telemetry-{name}", daemon=True).start()

    def put(self, action: Callable[[], object], seconds: float) -> bool:
        """Whether there was room for it within so many seconds. It must not raise."""
        try:
            self._queue.put(action, timeout=max(0.0, seconds))
        except queue.Full:
            return False
        return True

    def mark(self, deadline: float) -> Callable[[], bool]:
        """wait() -> whether everything put before this call is done by the deadline (`time.monotonic`)."""
        done = threading.Event()
        there = self.put(done.set, deadline - time.monotonic())
        return lambda: there and done.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """The thread ends when it has done all, or never where an action hangs."""
        self.put(None, 0.0)

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            action()
