"""The one thread that issues device programs: tasks of each run in their order, and samples between them.

Tasks come from the HTTP thread. Those of a run are numbered from 0; a task waits until all lower numbers have run, and
is an error after GAP_SECONDS. Runs and sampling take turns.

Called by service.operations (post) and service.app (serve).
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxrl.service.refusals import Refused

log = logging.getLogger("jaxrl")
GAP_SECONDS = 300.0  # the client sends a request again for as long
SNAPSHOT_SECONDS = 30.0  # of a run's tasks, which a restart runs again at most
RESIDENT = 8  # runs that are kept on the devices
QUANTUM = 0.5  # seconds of sampling between two tasks


@dataclasses.dataclass(eq=False)
class Line:
    """The order of one run's tasks. run: service.trainer.Run, None before task 0 has run.

    Attributes:
      next: number of the next task. held: tasks that came before their turn.
      failure: why the window of gradients was emptied; the next optim_step says so.
      seconds: of tasks since the newest snapshot; 0 = nothing has run since.
    """

    run: Any = None
    next: int = 0
    seconds: float = 0.0
    held: dict[int, Task] = dataclasses.field(default_factory=dict)
    failure: str = ""


@dataclasses.dataclass(eq=False)
class Task:
    """Work of one request.

    Attributes:
      name: for messages. work: run -> result; raises Refused. future: gets the result.
      clears: whether a failure empties the window of gradients. applies: whether it is an optim_step.
      snapshot: take a snapshot behind it, because it cannot be run again with the same result.
      record: called with the result, or with the Refused, before the future gets it.
    """

    name: str
    work: Callable[[Any], Any]
    future: Future
    clears: bool = False
    applies: bool = False
    snapshot: bool = False
    record: Callable[[Any], None] = lambda result: None  # noqa: E731
    since: float = dataclasses.field(default_factory=time.monotonic)


class Worker:
    """Runs tasks and samples; see the module.

    Args:
      trainer: service.trainer.Trainer. sampler: service.sampler.Sampler. snapshots: service.snapshots.Snapshots.
    """

    def __init__(self, trainer, sampler, snapshots):
        self.trainer, self.sampler, self.snapshots = trainer, sampler, snapshots
        self._lines: dict[str, Line] = {}
        self._free: deque[Task] = deque()  # without an order: sampling jobs
        self._change = threading.Condition()
        self._stopping = False

    # ---- from the HTTP thread

    def post(self, task: Task, model_id: str = "", number: int = 0) -> None:
        """Queues a task, of a run if `model_id` is given. Raises Refused for a number that ran, and while stopping."""
        with self._change:
            if self._stopping:
                raise Refused(503, "the server is stopping; it answers again once it is restarted")
            if model_id:
                line = self._lines.setdefault(model_id, Line(next=self.snapshots.next(model_id)))
                if number < line.next or number in line.held:
                    raise Refused(422, f"{task.name}: seq_id={number} was used; the next one is {line.next}")
                line.held[number] = task
            else:
                self._free.append(task)
            self._change.notify()

    def stop(self) -> None:
        """Refuses further tasks and lets `serve` return after the one it works on."""
        with self._change:
            self._stopping = True
            self._change.notify()

    # ---- the thread of the devices

    def serve(self) -> None:
        """Works until `stop`. Raises OSError if a result or a snapshot cannot be written: a restart does it again."""
        while not self._stopping:
            line, task, model_id = self._take()
            if task is not None:
                self._run(line, task, model_id)
            if self.sampler.busy:
                self._sample()
            elif task is None:
                with self._change:
                    if not self._stopping and not self._free and self._ready() is None:
                        self._change.wait(1.0)
        for model_id, line in self._lines.items():
            self._snapshot(model_id, line)
        for task in (*self._free, *(task for line in self._lines.values() for task in line.held.values())):
            task.future.set_exception(Refused(503, "the server was stopped before this ran; send it again"))

    def _take(self) -> tuple[Line | None, Task | None, str]:
        with self._change:
            if self._free:
                return None, self._free.popleft(), ""
            if (model_id := self._ready()) is None:
                self._close_gaps()
                return None, None, ""
            line = self._lines.pop(model_id)
            self._lines[model_id] = line  # the others come first next time
            task = line.held.pop(line.next)
            line.next += 1
            return line, task, model_id

    def _ready(self) -> str | None:
        return next((model_id for model_id, line in self._lines.items() if line.next in line.held), None)

    def _close_gaps(self) -> None:
        """Fails tasks whose predecessor has not come in GAP_SECONDS, and goes on behind them."""
        for line in self._lines.values():
            if line.held and time.monotonic() - min(task.since for task in line.held.values()) > GAP_SECONDS:
                missing, last = line.next, max(line.held)
                why = (f"request {missing} of this run has not come in {GAP_SECONDS:g} s, so those behind it cannot "
                       "run in order; its gradients were dropped")
                for task in line.held.values():
                    task.future.set_exception(Refused(422, f"{task.name}: {why}"))
                line.held, line.next = {}, last + 1
                if line.run is not None:
                    self.trainer.empty_window(line.run)
                line.failure = why

    def _run(self, line: Line | None, task: Task, model_id: str) -> None:
        if line is None:
            self._hand_over(task)
            return
        begin = time.monotonic()
        try:
            self._load(model_id, line, task)
            if task.applies and line.failure:
                why, line.failure = line.failure, ""
                raise Refused(422, f"{task.name}: nothing was applied, because {why}")
            result = task.work(line.run)
            if line.next == 1:
                line.run, result = result
        except Exception as e:
            result = refusal(e, task.name)
            if line.run is not None and task.clears:
                self.trainer.empty_window(line.run)
                line.failure = "" if task.applies else f"{task.name} before it failed: {result}"
        task.record(result)
        line.seconds += time.monotonic() - begin
        if task.snapshot or line.seconds > SNAPSHOT_SECONDS:
            self._snapshot(model_id, line)
        if isinstance(result, Refused):
            task.future.set_exception(result)
        else:
            task.future.set_result(result)

    def _hand_over(self, task: Task) -> None:
        """Runs a task without a run, which hands its future to the sampler."""
        try:
            task.work(None)
        except Exception as e:
            task.future.set_exception(refusal(e, task.name))

    def _load(self, model_id: str, line: Line, task: Task) -> None:
        """Loads the snapshot of a run that is not here, and drops the run that rested longest beyond RESIDENT."""
        if line.run is None and line.next > 1:
            found = self.snapshots.load(model_id)
            if found is None:
                raise Refused(422, f"{task.name}: this run was not created; see the error of create_model")
            line.run, line.failure = found.run, found.failure
        with self._change:
            here = [(name, other) for name, other in self._lines.items() if other.run is not None and other is not line]
        for name, other in here[:max(0, len(here) - RESIDENT + 1)]:
            self._snapshot(name, other)
            other.run = None

    def _snapshot(self, model_id: str, line: Line) -> None:
        if line.run is not None and line.seconds:
            self.snapshots.save(model_id, line.run, line.next, line.failure)
            line.seconds = 0.0

    def _sample(self) -> None:
        try:
            self.sampler.work(0.0 if self._free or self._ready() is not None else QUANTUM)
        except Exception as e:
            self.sampler.fail(refusal(e, "asample"))


def refusal(error: BaseException, name: str) -> Refused:
    """Returns an error as the client gets it; of a bug, the number under which its traceback is logged."""
    if isinstance(error, Refused):
        return error
    incident = secrets.token_hex(4)
    log.error("service: incident %s in %s", incident, name, exc_info=error)
    return Refused(500, f"{name}: {type(error).__name__}: {str(error)[:300]} (incident {incident} in the server's log)")
