"""Running ahead of the trainer: which groups may be requested now, and their completions until their step uses them.

Step s always uses the groups that a synchronous run would use, the next ones in the order of the data, whatever
finished first: no batch prefers short completions. So admission needs no clock, and every process computes the same
from the step alone: a group meant for step s may be requested as soon as the published version is at most
`max_staleness` before the one that step s itself would publish first. The bound then holds by construction; nothing is
sampled and thrown away.

    step c begins, version of step c published
    groups, cursor = queue.request_groups(c, cursor)    requests all that the bound allows, steps c .. last_step(c, ...)
    queue.wait(groups, timeout)                 polls the engine until these groups are done, stores the others' results
    ... the update; queue.poll() in between takes in what an engine finished meanwhile ...
    queue.release(cursor)                       these groups count as used
    queue.publish(params, c + 1)                at every `sync_every`-th step

A *version* is the number of completed steps of the weights; *staleness* counts weight syncs between the version a token
was drawn from and the step that uses it (`staleness`). With refill (dynamic sampling) groups are used earlier than
meant, never later. A group keeps the seeds of the step it was meant for (`planned`).

With max_staleness=0 and sync_every=1 the engine sees submit(one step's requests), poll ..., publish, exactly
as without a queue.

No jax and no session here: a simulated engine and trainer drive this very code (`clock` is then theirs).
One thread drives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.rollout.protocol import UNFINISHED, EngineLost, Request, Result


def last_step(step: int, max_staleness: int, sync_every: int, steps: int) -> int:
    """Returns the last step whose groups may be requested while `step` is the next to train. Steps count from 0.

    (step // sync_every + max_staleness + 1) * sync_every - 1, at most the last of the run's `steps`."""
    return min((step // sync_every + max_staleness + 1) * sync_every, steps) - 1


def staleness(step: int, versions, sync_every: int):
    """Returns the number of weight syncs between the versions that drew tokens and the step that uses them; 0 = up to
    date: step // sync_every - versions // sync_every.

    step: int, from 0. versions: int or int array, of the result's shape: completed steps of the weights. sync_every:
    steps between syncs."""
    return step // sync_every - versions // sync_every


@dataclasses.dataclass(eq=False)
class PromptGroup:
    """The requests for one prompt: waiting, running or finished."""

    position: int   # of the prompt in the order of the data
    example: Any
    planned: int    # the step it is planned for: its seeds are of this step, and it is used then or earlier
    requests: list[Request]
    mine: bool      # whether this process samples it; groups of other processes have no results here
    admitted: int = -1  # version that was published when it was first requested
    results: dict[str, Result] = dataclasses.field(default_factory=dict)  # by request id
    outcomes: dict[str, dict] = dataclasses.field(default_factory=dict)   # of rewards, by request id; the caller's

    @property
    def done(self) -> bool:
        """Whether all its results have arrived; true for a group of another process."""
        return not self.mine or len(self.results) == len(self.requests)


class RolloutQueue:
    """The requested groups from the run's cursor on, in order, with their results so far.

    Args:
      engine: a protocol.Engine.
      per_step: prompts per step.
      max_staleness, sync_every, partial: options of config.rollout. partial: completions continue across a weight
        sync; else a sync holds new completions and waits for started ones.
      steps: of the run; no group is requested ahead for this step or a later one.
      draw: (cursor, count) -> ([(position, example)], next cursor); fewer at the end of the data.
      requests: (prompts, step) -> their requests, in submission order; a request's group is its position.
      mine: position -> whether this process samples it.
      finished: called with every own group whose last result arrived, in `restore` too.
      clock: returns seconds.

    Attributes:
      version: of the weights published last; -1 before the first.
      groups: position -> PromptGroup, requested and not released yet.
      counts: totals of the run: "admitted_groups", "used_groups", and "asked_again", requests that a resumed run
        repeats.
    """

    def __init__(self, engine, *, per_step: int, max_staleness: int, sync_every: int, partial: bool, steps: int,
                 draw: Callable, requests: Callable, mine: Callable[[int], bool] = lambda position: True,
                 finished: Callable[[PromptGroup], None] = lambda group: None,
                 clock: Callable[[], float] = time.monotonic):
        self.engine, self.per_step, self.steps = engine, per_step, steps
        self.max_staleness, self.sync_every, self.partial = max_staleness, sync_every, partial
        self._draw, self._requests, self._mine, self._finished, self._clock = draw, requests, mine, finished, clock
        self.version = -1  # published last
        self.groups: dict[int, PromptGroup] = {}  # by position, requested and not yet used
        self.counts = dict.fromkeys(("admitted_groups", "used_groups", "asked_again"), 0)
        self._end = 0  # position after the last group
        self._waiting: list[Request] = []
        self._unfinished: dict[str, PromptGroup] = {}

    # ---- a step

    def request_groups(self, step: int, cursor: int, count: int = 0) -> tuple[list[PromptGroup], int]:
        """Requests groups and returns (`count` groups from `cursor` on for the next step, the cursor after them).

        Submits these, and all later ones that the bound allows. Fewer at the end of the data. They
        stay here until `release`.

        Args:
          count: 0 for one step's groups.
        """
        self._end = max(cursor, self._end)
        own = cursor + (count or self.per_step)
        last = last_step(step, self.max_staleness, self.sync_every, self.steps)
        for planned in range(step, max(step, last) + 1):
            end = own + (planned - step) * self.per_step
            if end > self._end:
                prompts, self._end = self._draw(self._end, end - self._end)
                self.counts["admitted_groups"] += len(prompts)
                self._add(prompts, planned)
        for request in self._waiting:
            group = self.groups[request.group]
            group.admitted = self.version if group.admitted < 0 else group.admitted
        submitted, self._waiting = [r for r in self._waiting if self.groups[r.group].mine], []
        if submitted:
            self._unfinished |= {r.id: self.groups[r.group] for r in submitted}
            self.engine.submit(submitted)
        out = [self.groups[p] for p in range(cursor, min(own, self._end))]
        return out, cursor + len(out)

    def _add(self, prompts, planned: int) -> None:
        requests = self._requests(prompts, planned) if prompts else []
        for position, example in prompts:
            self.groups[position] = PromptGroup(position, example, planned, [], self._mine(position))
        for request in requests:
            self.groups[request.group].requests.append(request)
        self._waiting += requests

    def wait(self, groups: list[PromptGroup] | None, timeout: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Polls until these groups are done (None: all that the engine has started) and returns True. Returns False if
        `stop()` became true first; unfinished requests are then aborted, and the next `request_groups` submits them
        again.

        Args:
          timeout: seconds.
          stop: called before every poll, of at most a second each.

        Raises:
          TimeoutError: the groups are not done in time. Unfinished requests are aborted as after a stop.
          RuntimeError: the engine returned a result that was not requested. Also what the engine's poll raises
            (EngineLost)."""
        end = self._clock() + timeout
        while True:
            if groups is None:
                missing = self.engine.health().running if self._unfinished else 0
            else:
                missing = sum(len(g.requests) - len(g.results) for g in groups if g.mine)
            if not missing:
                return True
            left = end - self._clock()
            stopped = stop()
            if stopped or left <= 0:
                self._abort()
                if stopped:
                    return False
                raise TimeoutError(f"rollout: {missing} completions are missing after {timeout:g} s; raise "
                                   "rollout.timeout_seconds, or sample fewer or shorter completions")
            self.receive(self.engine.poll(min(left, 1.0)))

    def receive(self, results: list[Result]) -> None:
        """Stores results of the engine, and calls `finished` with every group that is complete now.

        Raises RuntimeError for a result that was not requested here."""
        for result in results:
            group = self._unfinished.pop(result.id, None)
            if group is None:
                raise RuntimeError(f"rollout: the engine returned {result.id!r}, which was not requested")
            group.results[result.id] = result
            if group.done:
                self._finished(group)

    def poll(self) -> None:
        """Stores finished results of a concurrent engine without waiting; does nothing with another one.

        Suppresses EngineLost: the next `wait` raises it, so the running update completes. Raises RuntimeError as
        `receive`."""
        if self._unfinished and self.engine.info.concurrent:
            with contextlib.suppress(EngineLost):
                self.receive(self.engine.poll(0.0))

    def _abort(self) -> None:
        """Aborts unfinished requests and queues them again."""
        if self._unfinished:
            self.engine.abort(sorted(self._unfinished))
            self.engine.poll(0.0)
            lost = [r for g in self.groups.values() for r in g.requests if r.id in self._unfinished]
            self._waiting, self._unfinished = lost + self._waiting, {}

    def release(self, cursor: int) -> None:
        """Drops the groups at positions before `cursor`, which were trained on."""
        for position in [p for p in self.groups if p < cursor]:
            del self.groups[position]
            self.counts["used_groups"] += 1

    def publish(self, params, version: int, timeout: float = float("inf"),
                stop: Callable[[], bool] = lambda: False) -> None:
        """Gives the engine the weights after `version` completed steps.

        Without `partial` it first holds new completions and waits for those that have started: at most `timeout`
        seconds (then all unfinished requests are aborted, TimeoutError is raised and nothing is published), or until
        stop() is true (then they are aborted and the weights are published). Aborted ones are requested again later.

        params: the model's parameter tree."""
        if self._unfinished and not self.partial:
            self.engine.hold(True)
            try:
                self.wait(None, timeout, stop)
            finally:
                self.engine.hold(False)
        self.engine.publish(params, version)
        self.version = int(version)

    # ---- a checkpoint

    def state(self) -> tuple[dict, list[Result]]:
        """Returns (state, results): what `restore` needs of the groups that are not used yet.

        state can be written as JSON: "groups", [position, planned step, admitted version] of each, equal on all
        processes, and "counts". The results are this process's, with finished turns of unfinished episodes."""
        groups = self.groups.values()
        rows = [[g.position, g.planned, g.admitted] for g in groups]
        results = [r for g in groups for r in g.results.values()]
        return {"groups": rows, "counts": dict(self.counts)}, results + self.engine.unfinished_results()

    def restore(self, state: dict, results: list[Result], step: int, cursor: int, outcomes: dict[str, dict]) -> None:
        """Restores `state`, in an empty queue, as it was when `step` was next and the run's cursor was `cursor`. Calls
        `finished` with the own groups that are complete.

        Unfinished requests are submitted again, with the same seeds, at the next `request_groups`; an engine
        continues from their finished turns. Groups that the current options would use too late (they may have
        changed) are sampled again.

        Args:
          state: the first part of `state()`.
          results: the second part, of all processes.
          step: the next step to train.
          cursor: position of the first prompt that no step has used.
          outcomes: request id -> known results of its rewards, which go to PromptGroup.outcomes.
        """
        self.counts |= state["counts"]
        last = last_step(step, self.max_staleness, self.sync_every, self.steps)
        end = cursor + self.per_step * (last + 1 - step)
        rows = [row for row in state["groups"] if cursor <= row[0] < end]
        self.counts["admitted_groups"] -= len([row for row in state["groups"] if row[0] >= end])
        prompts, self._end = self._draw(cursor, len(rows)) if rows else ([], cursor)
        known = {r.id: r for r in results}
        for prompt, (position, planned, admitted) in zip(prompts, rows, strict=True):
            self._add([prompt], planned)
            group = self.groups[position]
            group.admitted = admitted
            use = step + (position - cursor) // self.per_step
            for request in group.requests if group.mine else ():
                result = known.get(request.id)
                if result is None or not self._fresh(result, use):
                    continue
                if result.finish == UNFINISHED:
                    self.engine.restore_unfinished([result])
                else:
                    group.results[request.id] = result
                    if request.id in outcomes:
                        group.outcomes[request.id] = outcomes[request.id]
        finished = {i for g in self.groups.values() for i in g.results}
        self._waiting = [r for r in self._waiting if r.id not in finished]
        self.counts["asked_again"] += sum(self.groups[r.group].mine for r in self._waiting)
        for group in self.groups.values():
            if group.mine and group.done:
                self._finished(group)

    def _fresh(self, result: Result, step: int) -> bool:
        oldest = int(np.min(result.versions, initial=np.iinfo(np.int32).max))
        return staleness(step, oldest, self.sync_every) <= self.max_staleness
