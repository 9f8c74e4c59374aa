"""The one thread that issues device programs: tasks of each run in their order, and samples between them.

Tasks come from the HTTP thread. Those of a run are numbered from 0; a task waits until all lower numbers have run, and
is an error after GAP_SECONDS. Runs and sampling take turns.

Runs share the devices by tokens, not by requests: the next task is that of the run that was served least (start-time
fair queueing, Goyal et al. 1996), and passes (forward, forward_backward) of further runs join its own while they fit
CYCLE_TOKENS.

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
from typing import Any, NamedTuple

from jaxrl.service.packing import tokens_of
from jaxrl.service.refusals import Refused

log = logging.getLogger("jaxrl")
GAP_SECONDS = 300.0  # the client sends a request again for as long
SNAPSHOT_SECONDS = 30.0  # of a run's tasks, which a restart runs again at most
FULL_SNAPSHOT_SECONDS = 1800.0  # the same where a run is a whole model
RESIDENT = 8  # runs that are kept on the devices; whole models: one
CYCLE_TOKENS = 1 << 16  # of passes that are computed together; a larger one is computed alone
WAITING_BYTES = 256 << 20  # of bodies of a session that have not run
AHEAD = 1 << 16  # how far a number may be beyond the next one of its run
OTHER_TOKENS = 64  # what a task without tokens counts as
QUANTUM = 0.5  # seconds of sampling between two tasks


@dataclasses.dataclass(eq=False)
class Line:
    """The order of one run's tasks. run: service.trainer.Run, None before task 0 has run.

    Attributes:
      next: number of the next task. held: tasks that came before their turn.
      failure: why the window of gradients was emptied; the next optim_step says so.
      dropped: whether the window was emptied since the newest snapshot, which may still hold its gradients.
      seconds: of tasks since the newest snapshot; 0 = nothing has run since.
      served: tokens that this run has had, or would have had if it had never rested.
    """

    run: Any = None
    next: int = 0
    seconds: float = 0.0
    held: dict[int, Task] = dataclasses.field(default_factory=dict)
    failure: str = ""
    dropped: bool = False
    served: float = 0.0


class Pass(NamedTuple):
    """Work of a forward or forward_backward, which may be computed together with others.

    Attributes:
      batch: service.packing.Batch. learn: whether its gradient is added to the run's window.
      answer: (log-probs of each datum, sum of losses) -> result.
      placement: as in service.packing: of a pass that was computed with others; ALONE; None = not computed yet.
    """

    batch: Any
    learn: bool
    answer: Callable[[Any, float], Any]
    placement: list | None = None

    @property
    def joins(self) -> bool:
        """Whether it may be computed together with others: not as it was before, and not with images."""
        return self.placement is None and self.batch.pictures is None

    @property
    def tokens(self) -> int:
        """The tokens that it counts as: those of its rows, times 3 with a backward pass, which is about twice a forward
        pass."""
        return tokens_of(self.batch) * (3 if self.learn else 1)


ALONE: list = []  # placement of a pass that was computed by itself


@dataclasses.dataclass(eq=False)
class Task:
    """Work of one request.

    Attributes:
      name: for messages. work: run -> result, raises Refused; or a Pass. future: gets the result.
      clears: whether a failure empties the window of gradients. applies: whether it is an optim_step.
      snapshot: take a snapshot after it, because it cannot be run again with the same result.
      size: bytes of its body. since: when it was made, by time.monotonic.
      record: called with the result, or with the Refused, and the placement, before the future gets it.
    """

    name: str
    work: Callable[[Any], Any] | Pass
    future: Future
    clears: bool = False
    applies: bool = False
    snapshot: bool = False
    size: int = 0
    record: Callable[[Any, list | None], None] = lambda result, placement: None  # noqa: E731
    since: float = dataclasses.field(default_factory=time.monotonic)


class Turn(NamedTuple):
    """A task that was taken. model_id, line: its run and the run's Line; "" and an empty Line = of none."""

    model_id: str
    line: Line
    task: Task


class Worker:
    """Runs the tasks of runs in their order, and samples between them; see the module. `post`, `check_room` and `stop`
    may be called by any thread; the one that calls `serve` issues all device programs.

    Args:
      trainer: service.trainer.Trainer. sampler: service.sampler.Sampler. snapshots: service.snapshots.Snapshots.
    """

    def __init__(self, trainer, sampler, snapshots):
        self.trainer, self.sampler, self.snapshots = trainer, sampler, snapshots
        self._lines: dict[str, Line] = {}
        self._free: deque[Task] = deque()  # without an order: sampling jobs
        self._clock = 0.0  # what the run was served whose task was taken last
        self._change = threading.Condition()
        self._stopping = False

    # ---- from the HTTP thread

    def post(self, task: Task, model_id: str = "", number: int = 0) -> None:
        """Queues a task, of a run if `model_id` is given. Raises Refused: 422 for a number that ran or is queued, 503
        while stopping."""
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

    def check_room(self, session: str, model_id: str, number: int, size: int, name: str) -> None:
        """Raises Refused: 422 for a number that was used or is more than AHEAD beyond the next one, 429 if bodies of
        more than WAITING_BYTES of a session would wait. One that its run waits for has room always.

        Args:
          session: id. model_id: of the run. number: of the request in it. size: bytes of its body. name: for messages.
        """
        with self._change:
            line = self._lines.get(model_id)
            held = {} if line is None else line.held
            first = self.snapshots.next(model_id) if line is None else line.next
            if number < first or number > first + AHEAD:
                raise Refused(422, f"{name}: seq_id={number} " + (
                    "was used" if number < first else "is too far ahead") + f"; the next one is {first}")
            while first in held:
                first += 1
            waiting = sum(task.size for name, other in self._lines.items() if name.partition(":")[0] == session
                          for task in other.held.values())
            if number > first and waiting + size > WAITING_BYTES:
                raise Refused(429, f"{waiting} bytes of requests of this session wait already, at most {WAITING_BYTES} "
                              "may; the client sends this one again")

    def stop(self) -> None:
        """Refuses further tasks and lets `serve` return after the one it works on."""
        with self._change:
            self._stopping = True
            self._change.notify()

    # ---- the thread of the devices

    def serve(self) -> None:
        """Works until `stop`; the calling thread issues all device programs.

        At the end it saves snapshots and refuses (503) what has not run; samples that are at work get no answer, and a
        restart draws them again. Raises OSError, without that end, if a result or a snapshot cannot be written: a
        restart does it again."""
        while not self._stopping:
            group = self._take()
            if len(group) == 1 and not group[0].model_id:
                self._hand_over(group[0].task)
            elif group:
                self._run(group)
            else:
                self._close_gaps()
            if self.sampler.busy:
                self._sample()
            elif not group:
                with self._change:
                    if not self._stopping and not self._free and not self._ready():
                        self._change.wait(1.0)
        for model_id, line in self._lines.items():
            self._snapshot(model_id, line)
        for task in (*self._free, *(task for line in self._lines.values() for task in line.held.values())):
            task.future.set_exception(Refused(503, "the server was stopped before this ran; send it again"))

    def _take(self) -> list[Turn]:
        """Takes the tasks that are computed next: one, or passes that are computed together; [] = there are none."""
        with self._change:
            if self._free:
                return [Turn("", Line(), self._free.popleft())]
            if not (ready := self._ready()):
                return []
            self._clock = max(self._clock, self._lines[ready[0]].served)
            group = [self._pop(ready[0])]
            work = group[0].task.work
            if not isinstance(work, Pass) or not work.joins:
                return group
            room = CYCLE_TOKENS - work.tokens
            while len(group) < self.trainer.together:
                fitting = [model_id for model_id in self._ready() if self._joins(model_id, work.learn, room)]
                if not fitting:
                    break
                group.append(self._pop(fitting[0]))
                room -= group[-1].task.work.tokens
            return sorted(group, key=lambda turn: turn.model_id)  # the same rows for the same company

    def _joins(self, model_id: str, learn: bool, room: int) -> bool:
        line = self._lines[model_id]
        work = line.held[line.next].work
        return isinstance(work, Pass) and work.joins and work.learn == learn and work.tokens <= room

    def _pop(self, model_id: str) -> Turn:
        """Takes the next task of a run, which pays for it."""
        line = self._lines.pop(model_id)
        self._lines[model_id] = line  # used last
        task = line.held.pop(line.next)
        line.next += 1
        line.served = max(line.served, self._clock) + (
            task.work.tokens if isinstance(task.work, Pass) else OTHER_TOKENS)
        return Turn(model_id, line, task)

    def _ready(self) -> list[str]:
        """Returns the runs whose next task is here, the one that was served least first."""
        ready = [model_id for model_id, line in self._lines.items() if line.next in line.held]
        return sorted(ready, key=lambda model_id: max(self._lines[model_id].served, self._clock))

    def _close_gaps(self) -> None:
        """Fails tasks whose predecessor has not come in GAP_SECONDS, and goes on behind them, also after a restart."""
        closed = []
        with self._change:
            for model_id, line in self._lines.items():
                held, now = list(line.held.values()), time.monotonic()
                if not held or line.next in line.held or now - min(task.since for task in held) <= GAP_SECONDS:
                    continue
                why = (f"request {line.next} of this run has not come in {GAP_SECONDS:g} s, so those behind it cannot "
                       "run in order; its gradients were dropped")
                line.held, line.next = {}, max(line.held) + 1
                self._drop_gradients(line, why)
                closed.append((Turn(model_id, line, held[0]), held))
        for turn, held in closed:
            reasons = [Refused(422, f"{task.name}: {turn.line.failure}") for task in held]
            for task, reason in zip(held, reasons, strict=True):
                task.record(reason, None)
            try:
                self._load(turn)
            except Exception as e:  # it was not created, or cannot be read: its next task is told so
                log.warning("service: %s is not saved behind a gap of its requests: %s", turn.model_id, e)
            self._snapshot(turn.model_id, turn.line)
            for task, reason in zip(held, reasons, strict=True):
                task.future.set_exception(reason)

    def _run(self, group: list[Turn]) -> None:
        begin = time.monotonic()
        results = self._compute(group)
        seconds = time.monotonic() - begin
        for turn, (result, placement) in zip(group, results, strict=True):
            line, task = turn.line, turn.task
            if isinstance(result, Refused) and task.clears:
                self._drop_gradients(line, "" if task.applies else f"{task.name} before it failed: {result}")
            task.record(result, placement)
            line.seconds += seconds
        most = SNAPSHOT_SECONDS if self.trainer.rank else FULL_SNAPSHOT_SECONDS
        for turn in group:
            if turn.task.snapshot or turn.line.seconds > most:
                self._snapshot(turn.model_id, turn.line)
        for turn, (result, _) in zip(group, results, strict=True):
            if isinstance(result, Refused):
                turn.task.future.set_exception(result)
            else:
                turn.task.future.set_result(result)

    def _compute(self, group: list[Turn]) -> list[tuple[Any, list | None]]:
        """Returns (result or Refused, placement) of each task; together if there are several."""
        work = [turn.task.work for turn in group]
        if len(group) == 1 and not (isinstance(work[0], Pass) and work[0].placement):
            return [self._one(group[0])]
        try:
            for turn in group:
                self._load(turn)
            found = self.trainer.forward_backward_together(
                [(turn.line.run, own.batch) for turn, own in zip(group, work, strict=True)], work[0].learn,
                work[0].placement)
        except Exception as e:  # nothing was added yet
            log.warning("service: %d requests cannot be computed together and are computed apart: %s", len(group), e)
            return [self._one(turn) for turn in group]
        return [(one, None) if isinstance(one, Refused) else self._answered(turn.task, one)
                for turn, one in zip(group, found, strict=True)]

    def _answered(self, task: Task, found) -> tuple[Any, list | None]:
        try:
            return task.work.answer(*found[:2]), found[2]
        except Exception as e:
            return refusal(e, task.name), None

    def _one(self, turn: Turn) -> tuple[Any, list | None]:
        line, task = turn.line, turn.task
        try:
            self._load(turn)
            if task.applies and line.failure:
                why, line.failure = line.failure, ""
                raise Refused(422, f"{task.name}: nothing was applied, because {why}")
            if isinstance(task.work, Pass):
                one = task.work
                return one.answer(*self.trainer.forward_backward(line.run, one.batch, one.learn)), None
            result = task.work(line.run)
            if line.next == 1:
                line.run, result = result
            return result, None
        except Exception as e:
            return refusal(e, task.name), None

    def _hand_over(self, task: Task) -> None:
        """Runs a task without a run, which hands its future to the sampler."""
        assert not isinstance(task.work, Pass)
        try:
            task.work(None)
        except Exception as e:
            task.future.set_exception(refusal(e, task.name))

    def _load(self, turn: Turn) -> None:
        """Loads the snapshot of a run that is not here, and drops the runs that rested longest beyond RESIDENT."""
        line = turn.line
        most = max(RESIDENT, self.trainer.together) if self.trainer.rank else 1
        with self._change:
            here = [(name, other) for name, other in self._lines.items() if other.run is not None and other is not line]
        for name, other in here[:max(0, len(here) - most + 1)]:
            self._snapshot(name, other)
            other.run = None
        if line.run is None and line.next > 1:
            found = self.snapshots.load(turn.model_id)
            if found is None:
                raise Refused(422, f"{turn.task.name}: this run was not created; see the error of create_model")
            line.run = found.run
            if line.dropped:
                self._drop_gradients(line, line.failure)
            else:
                line.failure = found.failure

    def _drop_gradients(self, line: Line, why: str) -> None:
        """Empties the window of a run, also of one that is in its snapshot alone. why: Line.failure."""
        line.failure, line.dropped = why, True
        if line.run is not None:
            self.trainer.empty_window(line.run)

    def _snapshot(self, model_id: str, line: Line) -> None:
        if line.run is not None and (line.seconds or line.dropped):
            self.snapshots.save(model_id, line.run, line.next, line.failure)
            line.seconds, line.dropped = 0.0, False

    def _sample(self) -> None:
        try:
            self.sampler.work(0.0 if self._free or self._ready() else QUANTUM)
        except Exception as e:
            self.sampler.fail(refusal(e, "asample"))


def refusal(error: BaseException, name: str) -> Refused:
    """Returns an error as the client gets it: a Refused as it is, any other as Refused (500) with the number under
    which its traceback is logged. name: of the request, for the message."""
    if isinstance(error, Refused):
        return error
    incident = secrets.token_hex(4)
    log.error("service: incident %s in %s", incident, name, exc_info=error)
    return Refused(500, f"{name}: {type(error).__name__}: {str(error)[:300]} (incident {incident} in the server's log)")
