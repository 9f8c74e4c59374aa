"""Keeps prepared pictures in host memory, up to a limit. Threads prepare each picture once (Pillow releases the
interpreter's lock while it decodes and resizes); the least recently used pictures are dropped first."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrl.data.images.decode import Picture


class Store:
    """Pictures by key, each made once by a thread and kept up to a limit; the least recently used are dropped first.

    Args:
      limit: bytes of patches to keep. What one `get` asks for is kept until it returns, whatever its size.
      workers: threads that make pictures.
      make: key -> Picture; called in a thread. What it raises reaches every caller that waits, and is not kept.

    Attributes:
      made: number of pictures made since the start.
    """

    def __init__(self, limit: int, workers: int, make: Callable[[Any], Picture]):
        self.limit, self._make = limit, make
        self._threads = ThreadPoolExecutor(max(1, workers), "images")
        self._lock, self._kept = threading.Lock(), collections.OrderedDict[Hashable, Future[Picture]]()
        self._bytes = 0
        self.made = 0  # pictures made since the start

    def get(self, keys: Sequence[Hashable]) -> list[Picture]:
        """Returns the pictures of keys, in their order; those that are missing are made side by side. Raises what
        making one raises."""
        found = self.ask(keys)
        try:
            return [future.result() for future in found]
        finally:
            self._trim()

    def ask(self, keys: Sequence[Hashable]) -> list[Future[Picture]]:
        """Begins to make the pictures that are missing and returns at once, a Future for each key. Pictures over the
        limit are dropped at the end of the next `get` only."""
        with self._lock:
            return [self._future(key) for key in keys]

    def _future(self, key) -> Future[Picture]:
        if key not in self._kept:
            self._kept[key] = self._threads.submit(self._run, key)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _run(self, key) -> Picture:
        try:
            picture = self._make(key)
        except BaseException:
            with self._lock:
                del self._kept[key]
            raise
        with self._lock:
            self.made += 1
            self._bytes += picture.patches.nbytes
        return picture

    def _trim(self) -> None:
        with self._lock:
            for key, future in list(self._kept.items()):
                if self._bytes <= self.limit:
                    return
                if future.done() and not future.exception():
                    del self._kept[key]
                    self._bytes -= future.result().patches.nbytes

    def close(self) -> None:
        """Stops the threads, once the pictures under way are made. Those not begun are not made: whoever waits for one
        gets a CancelledError. `get` and `ask` of a missing picture raise RuntimeError afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)
