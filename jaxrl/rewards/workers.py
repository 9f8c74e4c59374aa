"""Worker processes that call reward functions, on this host or others (reward.executor=ray). One thread of this
process per worker hands it work and kills it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections import deque

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.rewards.items import NON_FAILURES, failed_items, is_result
from jaxrl.workers.process import (
    PRINTED_BYTES,
    BadReply,
    Channel,
    PrintedOutput,
    ReplyTimeout,
    WorkerDied,
    WorkerProcess,
    environment,
    excerpt,
)

log = logging.getLogger("jaxrl.rewards")
START_SECONDS = 300.0    # importing the reward functions
RETRY_SECONDS = 1.0      # pause before a retry if a host is lost while its worker starts
ASYNC_AT_ONCE = 64       # calls of an asynchronous function in flight per worker
CHUNK_SECONDS = 0.01     # estimated duration of the work handed to a worker at once
PROGRESS_SECONDS = 30.0      # interval of progress messages for slow rewards


class RewardFailure(RunStopped):
    """The rewards of a step cannot be had: too many failed, a batched function returned another number of scores than
    it had completions, or a worker cannot start again. The message names the functions, or the worker's error."""


@dataclasses.dataclass
class Round:
    """One call of `Workers.run`.

    Attributes:
      texts: the items as JSON.
      results: (item, function) -> {value, outcome, metrics}. wanted: how many complete the round.
      most_failed: the round ends early if more items than this have a failed part.
      failed: items with a failed part.
      is_over: whether it is complete or ended early."""

    texts: list[str]
    results: dict[tuple[int, int], dict]
    wanted: int  # number of results that complete it
    most_failed: float
    failed: set[int]
    is_over: bool


@dataclasses.dataclass
class Task:
    """Jobs for one worker: mode 'each' (one after the other), 'async' (at once) or 'batch' (one call). jobs: (item,
    function) pairs, in the modes 'async' and 'batch' of one function. round: the Round that they belong to."""

    mode: str
    jobs: list[tuple[int, int]]  # (item, function)
    round: Round


class Workers:
    """Worker processes, started in the background.

    Args:
      reward: config.reward.
      specs, names: of the functions.
      setup: the first message to a worker: functions, shared arguments, reward.arguments, sandbox, services, places,
        limit in seconds.
      decides: JSON-able, what decides scores apart from the functions' code.
      env: environment variables of workers in addition to reward.env.

    Attributes:
      kinds: per function, `calling.Call.traits` and the digest of its code; [] before the first worker is ready.
      sources: digest of all functions' code; key: digest of this and of `decides`. Both "" before the first worker is
        ready.
      printed: PrintedOutput, what the functions wrote to standard output and error.
    """

    def __init__(self, reward, specs: list[str], names: list[str], setup: dict, decides: dict, env: dict):
        self._reward, self._limit, self._env = reward, reward.timeout_seconds, env
        self._specs, self._names, self._setup, self._decides = specs, names, json.dumps(setup), decides
        self._variables = (*reward.env, setup["sandbox"]["key_env"])
        self.kinds: list[dict] = []
        self.sources = self.key = ""
        self._state = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._round: Round | None = None
        self._numbers = itertools.count(1)  # task numbers
        self._ready, self._fatal, self._closing = 0, None, False
        if specs and reward.executor == "ray":
            from jaxrl.workers.ray_process import join
            join(reward, "reward")
        self._seconds_per_job = CHUNK_SECONDS
        self.printed = PrintedOutput()
        self._processes: dict[int, Channel] = {}
        self._threads = [threading.Thread(target=self._serve, args=(k,), daemon=True, name=f"reward-{k}")
                         for k in range(reward.workers if specs else 0)]
        for thread in self._threads:
            thread.start()

    # -- the caller's side: one call at a time ---------------------------------------------------------------------

    def ready(self, count: int | None = None) -> None:
        """Waits until `count` (None: all) workers are ready. Raises the error that keeps a worker from starting,
        RuntimeError if the workers are closed."""
        with self._state:
            while self._ready < (len(self._threads) if count is None else count) and not (self._fatal or self._closing):
                self._state.wait(0.5)
            self._raise()

    def _raise(self) -> None:
        if self._closing:
            raise RuntimeError("the reward pool is closed")
        if self._fatal is not None:
            raise self._fatal

    def run(self, texts: list[str], jobs: list, results: dict, most_failed: float, stop=lambda: False) -> bool:
        """Runs jobs and adds their results to `results`.

        Args:
          texts: the items as JSON.
          jobs: (item, function) pairs.
          results: (item, function) -> {value, outcome, metrics}; holds the results known before.
          most_failed: ends early, with True, if more items have a failed part.
          stop: checked about twice a second, once a worker is ready.

        Returns:
          False if `stop()` became true before the end.

        Raises:
          ConfigError, RunStopped: workers cannot work. RewardFailure: a batched function did not return one score per
            item. Later calls raise the same. RuntimeError: the workers are closed.
        """
        if jobs and not self.kinds:
            self.ready(1)
        failed = failed_items(results)
        with self._state:
            this = self._round = Round(texts, results, len(results) + len(jobs), most_failed, failed,
                                       is_over=not jobs or len(failed) > most_failed)
            self._tasks.extend(self._split(jobs, this))
            self._state.notify_all()
            began, logged = time.monotonic(), 0
            try:
                while not (this.is_over or self._fatal or self._closing):
                    self._state.wait(0.5)
                    self.printed.bound(PRINTED_BYTES)
                    passed = time.monotonic() - began
                    if passed // PROGRESS_SECONDS > logged:
                        logged = passed // PROGRESS_SECONDS
                        log.info("rewards: %d of %d done after %.0f s", len(results), this.wanted, passed)
                    if not (this.is_over or self._fatal or self._closing) and stop():
                        return False
                self._raise()
                return True
            finally:
                self._tasks.clear()
                self._round = None  # late replies are ignored

    def _split(self, jobs: list[tuple[int, int]], this: Round) -> list[Task]:
        each, tasks, by_function = [], [], {}
        for job in jobs:
            kind = self.kinds[job[1]]
            together = kind["batched"] or kind["asynchronous"]
            (by_function.setdefault(job[1], []) if together else each).append(job)
        for f, group in by_function.items():
            mode, size = "batch", self.kinds[f]["size"] or len(group)
            if not self.kinds[f]["batched"]:
                mode, size = "async", min(ASYNC_AT_ONCE, -(-len(group) // len(self._threads)))
            tasks += [Task(mode, group[k:k + size], this) for k in range(0, len(group), size)]
        return [*tasks, Task("each", each, this)] if each else tasks

    def close(self) -> None:
        """Stops the workers. Safe to call twice."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            processes = list(self._processes.values())
        for process in processes:
            process.signal_kill()
        for thread in self._threads:
            thread.join()
        self.printed.file.close()

    # -- the workers' side: one thread each -------------------------------------------------------------------------

    def _serve(self, k: int) -> None:
        worker, calls = None, 0
        try:
            while not self._closing:
                if worker is None:
                    worker, calls = self._start(k), 0
                task = self._next()
                if task is None:
                    return
                if worker.ended():  # died while idle, so no job is to blame
                    worker.kill()
                    worker, calls = self._start(k), 0
                calls += len(task.jobs)
                done = self._do(worker, task)
                if not done or 0 < self._reward.recycle <= calls and not self._tasks:  # only when idle
                    worker.kill()
                    worker = None
        except Exception as e:  # a thread must not end silently: the caller would wait forever
            self._fail(e)
        finally:
            if worker is not None:
                worker.kill()

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._fatal = self._fatal or error
            self._state.notify_all()

    def _launch(self) -> Channel:
        printed, memory_gb = self.printed, self._reward.memory_gb
        if self._reward.executor == "ray":
            from jaxrl.workers.ray_process import RemoteProcess
            named = {name: os.environ[name] for name in self._variables if name in os.environ} | self._env
            return RemoteProcess("jaxrl.rewards.worker", printed, named, memory_gb, group="reward", who="a reward",
                                 cpus=self._reward.ray_cpus)
        return WorkerProcess("jaxrl.rewards.worker", printed, environment(self._variables) | self._env, memory_gb)

    def _start(self, k: int, until: float | None = None) -> Channel:
        """Starts a worker. until: time after which a worker whose host was lost is not retried."""
        until = until or time.monotonic() + START_SECONDS
        try:
            worker = self._launch()
        except OSError as e:
            raise RunStopped(f"a reward worker cannot be started: {e}") from None
        with self._state:
            self._processes[k] = worker
            if self._closing:
                worker.signal_kill()
        specs = ", ".join(self._specs)
        try:
            deadline = time.monotonic() + START_SECONDS
            worker.send(self._setup, deadline)
            reply = worker.receive(deadline)
        except (WorkerDied, ReplyTimeout, BadReply) as e:
            worker.kill()
            if self._closing:
                raise ConfigError("the reward pool was closed while it started") from None
            if worker.lost and time.monotonic() < until:
                with self._state:
                    self._state.wait_for(lambda: self._closing, RETRY_SECONDS)
                return self._start(k, until)
            why = f"not ready after {START_SECONDS:g} s" if isinstance(e, ReplyTimeout) else f"{e}"
            why = f"a reward worker cannot start: {why} while importing {specs}{self.printed.last()}"
            raise self._unstartable(why) from None
        if "fatal" in reply:
            worker.kill()
            raise self._unstartable(reply["fatal"])
        with self._state:
            if self.sources not in ("", reply["sources"]):
                log.warning("a restarted reward worker loaded other code than the run started with (%s): from now on"
                            " completions are scored by the new code", specs)
            self.kinds, self.sources = reply["ready"], reply["sources"]
            decides = json.dumps(self._decides | {"sources": self.sources}, sort_keys=True)
            self.key = hashlib.sha256(decides.encode()).hexdigest()[:16]
            self._ready += 1
            self._state.notify_all()
        return worker

    def _unstartable(self, why: str) -> Exception:
        """Returns a ConfigError, or a RewardFailure if workers of this run could start before."""
        if not self.kinds:
            return ConfigError(why)
        return RewardFailure(f"{why}\nReward workers of this run started before, so their code or environment changed")

    def _next(self) -> Task | None:
        """Returns the next task, None when closing. A long 'each' task is cut into chunks."""
        with self._state:
            while not self._tasks and not self._closing:
                self._state.wait()
            if self._closing:
                return None
            task = self._tasks.popleft()
            if task.mode == "each":
                foreseen = int(CHUNK_SECONDS / max(self._seconds_per_job, 1e-6))
                size = max(1, min(foreseen, 64, -(-len(task.jobs) // len(self._threads))))
                if size < len(task.jobs):
                    self._tasks.appendleft(Task("each", task.jobs[size:], task.round))
                    task = Task("each", task.jobs[:size], task.round)
            return task

    def _do(self, worker: Channel, task: Task) -> bool:
        """Runs a task on a worker. Returns False if the worker must be replaced; unfinished jobs are queued again,
        all of them if the worker's host was lost.
        """
        left, texts = dict(enumerate(task.jobs)), task.round.texts
        limit = self.kinds[task.jobs[0][1]]["seconds"] or self._limit
        seconds = limit + (1.0 + 0.25 * limit) * (task.mode == "async")  # the worker enforces the limit itself
        position = {i: k for k, i in enumerate(dict.fromkeys(i for i, _ in task.jobs))}
        number, jobs = next(self._numbers), json.dumps([(position[i], f) for i, f in task.jobs])
        message = (f'{{"task": {number}, "mode": "{task.mode}", "jobs": {jobs}, '
                   f'"items": [{", ".join(texts[i] for i in position)}]}}')
        try:
            started = time.monotonic()
            worker.send(message, started + seconds)
            deadline = time.monotonic() + seconds
            while left:
                reply = worker.receive(deadline, number)
                if task.mode == "batch":
                    self._batch_reply(task, reply)
                    return True
                k = reply.get("job")
                if k not in left or not is_result(reply):
                    raise BadReply(excerpt(json.dumps(reply).encode()))
                self._record(task, {left.pop(k): reply})
                if task.mode == "each" and left:
                    _, following = next(iter(left.values()))
                    deadline = time.monotonic() + (self.kinds[following]["seconds"] or self._limit)
            if task.mode == "each":
                taken = (time.monotonic() - started) / len(task.jobs)
                self._seconds_per_job = 0.5 * (self._seconds_per_job + taken)
            return True
        except ReplyTimeout:
            self._record_lost_worker(task, left, "timeout")
        except WorkerDied as e:
            if worker.lost:
                self._requeue(task, [Task(task.mode, list(left.values()), task.round)])
            elif not self._closing:
                self._record_lost_worker(task, left, f"error: the worker process died: {e}")
        except BadReply as e:
            self._record_lost_worker(task, left, f"error: received {e} instead of a reply: a reward must not write to"
                                     " file descriptors that it did not open")
        return False

    def _record_lost_worker(self, task: Task, left: dict, outcome: str) -> None:
        """Records the outcome for the job that the lost worker was running; the task's other jobs are queued again."""
        verdict = {"value": None, "outcome": outcome, "metrics": {}}
        jobs = list(left.values())
        if task.mode == "batch" or len(jobs) == 1:
            self._record(task, {job: verdict for job in jobs})
            return
        if task.mode == "each":
            self._record(task, {jobs[0]: verdict})
            again = [Task("each", jobs[1:], task.round)]
        else:  # one of them blocks the event loop; run alone, each shows whether it does
            again = [Task("async", [job], task.round) for job in jobs]
        self._requeue(task, again)

    def _requeue(self, task: Task, again: list[Task]) -> None:
        with self._state:
            if task.round is self._round:
                self._tasks.extendleft(reversed(again))
                self._state.notify_all()

    def _batch_reply(self, task: Task, reply: dict) -> None:
        if "wrong" in reply:
            error = RewardFailure(f"batched reward {self._names[task.jobs[0][1]]!r} {reply['wrong']}; it must return"
                                  " one score (or None) per completion, in their order")
            with self._state:
                if task.round is self._round:
                    self._fail(error)
            return
        results = reply.get("results", ())
        if len(results) != len(task.jobs) or not all(map(is_result, results)):
            raise BadReply(excerpt(json.dumps(reply).encode()))
        self._record(task, dict(zip(task.jobs, results, strict=True)))

    def _record(self, task: Task, results: dict) -> None:
        with self._state:
            if (this := task.round) is self._round:
                this.results.update(results)
                this.failed.update(i for (i, _), r in results.items() if r["outcome"] not in NON_FAILURES)
                if len(this.results) >= this.wanted or len(this.failed) > this.most_failed:
                    this.is_over = True
                    self._state.notify_all()
