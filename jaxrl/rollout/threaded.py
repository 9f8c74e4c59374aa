"""Polls an engine in a thread, so that an engine which works inside `poll` runs concurrently with its caller.

For engines whose programs run on their own devices, in one process: then the order in which two threads
issue programs does not matter. Every call of the caller waits for the poll in progress (one chunk), and
the thread pauses meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

from jaxrl.rollout.protocol import Engine, EngineInfo, Health, Request, Result


class ThreadedEngine(Engine):
    """Runs an engine in a thread of its own, so that it works without being polled; see protocol.Engine.

    Results do not depend on time if all requests are waited for; which of them are done at a weight sync does."""

    def __init__(self, engine):
        self._engine = engine
        self._one = threading.Lock()  # held while the engine is called
        self._state = threading.Condition()
        self._calls = 0  # calls of the caller that wait for the engine or use it
        self._work = False  # whether a poll may find something to do
        self._open = 0  # requests without a result
        self._results: list[Result] = []
        self._error: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._drive, daemon=True, name="engine")
        self._thread.start()

    @contextlib.contextmanager
    def _paused(self):
        """Yields the engine to the caller while its thread pauses; the thread looks for work afterwards. Raises
        RuntimeError if this engine is closed."""
        self._check_open()
        with self._state:
            self._calls += 1
        try:
            with self._one:
                yield self._engine
        finally:
            with self._state:
                self._calls -= 1
                self._work = self._engine.health().version >= 0
                self._state.notify_all()

    def _drive(self) -> None:
        while True:
            with self._state:
                while not self._closing and (self._calls or not self._work or self._error is not None):
                    self._state.wait()
                if self._closing:
                    return
            with self._one:
                if self._calls:  # the caller came first
                    continue
                done, error = [], None
                try:
                    done = self._engine.poll(0.0)
                except Exception as e:  # the next poll raises it
                    error = e
                with self._state:
                    self._results += done
                    self._error = error
                    self._work = bool(done) or self._engine.health().running > 0
                    self._state.notify_all()

    @property
    def info(self) -> EngineInfo:
        """The engine's EngineInfo, with `concurrent`."""
        return dataclasses.replace(self._engine.info, concurrent=True)

    def submit(self, requests: list[Request]) -> None:
        """Queues requests once the poll in progress is over. Raises the engine's ValueError, queueing none, for one
        that it cannot serve."""
        with self._paused() as engine:
            engine.submit(requests)
            self._open += len(requests)

    def poll(self, deadline_s: float) -> list[Result]:
        """Returns results that the thread has stored, waiting at most deadline_s seconds for the first one.

        Raises RuntimeError if the engine is closed or has requests and no weights, and once whatever the engine raised
        in the thread."""
        self._check_open()
        end, health = time.monotonic() + deadline_s, self._engine.health()
        if self._open and health.version < 0:
            raise RuntimeError("rollout: no weights yet; call publish(params, version) before polling")
        with self._state:
            while not self._results and self._error is None and self._open and (left := end - time.monotonic()) > 0:
                self._state.wait(left)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            done, self._results = self._results, []
            self._open -= len(done)
            return done

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (None = all): the next poll returns each with its tokens so far and finish "abort"."""
        with self._paused() as engine:
            engine.abort(ids)
            with self._state:
                self._results += engine.poll(0.0)

    def forget(self, ids: list[str]) -> None:
        """Declares that no request will continue these, as Engine.forget."""
        with self._paused() as engine:
            engine.forget(ids)

    def hold(self, on: bool) -> None:
        """Prevents new completions from starting while on, as Engine.hold."""
        with self._paused() as engine:
            engine.hold(on)

    def publish(self, params, version: int) -> None:
        """Gives the engine new weights between two of the thread's polls, as Engine.publish."""
        with self._paused() as engine:
            engine.publish(params, version)

    def sleep(self) -> None:
        """Frees the engine's devices until the next publish, as Engine.sleep."""
        with self._paused() as engine:
            engine.sleep()

    def weights_moved(self, params) -> None:
        """Gives the engine the published weights at their new place, as Engine.weights_moved."""
        with self._paused() as engine:
            engine.weights_moved(params)

    def unfinished_results(self) -> list[Result]:
        """Returns the finished turns of unfinished requests, as Engine.unfinished_results."""
        with self._paused() as engine:
            return engine.unfinished_results()

    def restore_unfinished(self, results: list[Result]) -> None:
        """Restores finished turns, as Engine.restore_unfinished."""
        with self._paused() as engine:
            engine.restore_unfinished(results)

    def health(self) -> Health:
        """Returns the engine's state without waiting for the thread."""
        health = self._engine.health()
        return dataclasses.replace(health, ok=health.ok and not self._closing, closed=health.closed or self._closing)

    def metrics(self) -> dict[str, float]:
        """Returns the engine's metrics, without waiting for the thread."""
        self._check_open()
        return self._engine.metrics()

    def close(self) -> None:
        """Stops the thread after the poll in progress, then closes the engine."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join()
        self._engine.close()

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("rollout: the engine is closed")
