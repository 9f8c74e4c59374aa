"""Scores completions during the rollout: a thread scores finished groups, all that are waiting at once."""

from __future__ import annotations

import threading
from collections import deque


class BackgroundScorer:
    """Scores groups of completions in a thread, in the order they arrive.

    Args:
      score: function that scores a list of groups in place: all that wait when it is called. Each group has a
        `position`."""

    def __init__(self, score):
        self._score, self._state = score, threading.Condition()
        self._queue, self._open = deque(), set()  # groups not yet started; positions without an outcome
        self._error, self._closing = None, False
        self._thread = threading.Thread(target=self._work, daemon=True, name="rewards-ahead")
        self._thread.start()

    def add(self, group) -> None:
        """Queues a group for scoring; returns at once."""
        with self._state:
            self._queue.append(group)
            self._open.add(group.position)
            self._state.notify_all()

    def wait(self, groups, stop=lambda: False) -> bool:
        """Waits until the groups are scored; returns False if `stop()` became true first, which is checked twice a
        second. Raises what scoring any groups raised first, also at later calls, and RuntimeError if `close` was called
        before the groups were taken for scoring.
        """
        wanted = {g.position for g in groups}
        with self._state:
            while self._error is None and self._open & wanted:
                if stop():
                    return False
                if self._closing and any(g.position in wanted for g in self._queue):
                    raise RuntimeError("the background scorer was closed before it scored these groups")
                self._state.wait(0.5)
            if self._error is not None:
                raise self._error
        return True

    def close(self) -> None:
        """Stops the thread once the groups that are being scored are done; does not wait. Closing the reward pool
        ends those. Groups still queued are never scored; `wait` raises for them."""
        with self._state:
            self._closing = True
            self._state.notify_all()

    def _work(self) -> None:
        while True:
            with self._state:
                while not self._queue and not self._closing:
                    self._state.wait()
                if self._closing:
                    return
                groups, error = list(self._queue), None
                self._queue.clear()
            try:
                self._score(groups)
            except Exception as e:  # the main thread raises it
                error = e
            with self._state:
                self._error = self._error or error
                self._open.difference_update(g.position for g in groups)
                self._state.notify_all()
