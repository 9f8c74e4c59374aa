"""A sign of life for logs that are read later: which phase a run is in, when it has said nothing for long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from jaxrl.telemetry.names import duration

FIRST = 10.0     # seconds of silence before the first sign; each further one comes after twice as long
LONGEST = 600.0  # between two signs
POLL = 1.0
DOING = {"start": "reading, loading, starting the engine", "rollout": "generating answers", "reward": "scoring answers",
         "score": "log-probs of the answers", "update": "learning", "publish": "new weights for the engine",
         "eval": "answering held-out prompts", "checkpoint": "saving", "export": "writing the model", "data": "reading rows",
         "wait": "for the other processes"}


class Still:
    """Says "still in <phase> after <N>s" when nothing was said for FIRST seconds, or for twice the time that the fastest step took.

    Args:
      say: prints a line; called in a thread of this object's, which `phase` starts and `close` ends.
      clock: seconds, monotonic.
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._phase, self._since = "", clock()
        self._heard, self._stepped, self._fastest = self._since, None, float("inf")
        self._usual = self._patience = FIRST
        self._thread, self._closed = None, threading.Event()

    def phase(self, name: str) -> None:
        self._phase, self._since = name, self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="still", daemon=True)
            self._thread.start()

    def line(self) -> None:
        """Something was said."""
        self._heard, self._patience = self._clock(), self._usual

    def step(self) -> None:
        """A step was said: the next may take twice as long as the fastest so far in silence. The first one compiles, and does not count."""
        now = self._clock()
        if self._stepped is not None:
            self._fastest = min(self._fastest, now - self._stepped)
            self._usual = max(FIRST, min(LONGEST, 2 * self._fastest))
        self._stepped = now

    def check(self) -> str:
        """The line that is due; "" for none."""
        now, name, since = self._clock(), self._phase, self._since
        if now - self._heard < self._patience:
            return ""
        self._patience += min(self._patience, LONGEST)
        doing = "a program is being compiled" if compiling() else DOING.get(name, "")
        return f"still {f'in {name}' if name else 'between phases'} after {duration(now - since)}" + f": {doing}" * bool(doing)

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(POLL):
            if text := self.check():
                try:
                    self._say(text)
                except (OSError, ValueError):  # nobody reads
                    return


def compiling() -> bool:
    """Whether a thread of this process is in jax's compiler now."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename.endswith("jax/_src/compiler.py"):
                return True
            frame = frame.f_back
    return False
