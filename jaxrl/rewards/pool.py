"""The pool: scores answers in spawned worker processes, under a wall-clock limit that kills.

Outcomes, per answer and function (also what the journal of a step keeps):

  ok          a finite number
  none        the function returned None: it has nothing to say about this row; not a failure
  nan         NaN or infinite                       \
  error: ...  it raised, returned no number, died    > failures; counted against reward.max_failed_fraction
  timeout     it ran longer than the limit          /

Only 'ok' gives a number; every other outcome leaves that part absent (NaN, not 0). An answer whose parts are all
absent has no score at all (NaN).
"""

from __future__ import annotations

import atexit
import dataclasses
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.rewards.items import RewardItem, RewardResult, as_json, failed_items, is_failure, is_result, metrics_of
from jaxrl.rewards.process import Died, Garbled, Late, WorkerProcess, environment, shown
from jaxrl.rewards.shaping import weighted_sum
from jaxrl.rewards.specs import FunctionFolder, check_specs, short_names, to_spec

log = logging.getLogger("jaxrl.rewards")
START_SECONDS = 300.0  # importing the reward functions
ASYNC_AT_ONCE = 64     # calls of an asynchronous function in flight per worker
CHUNK_SECONDS = 0.01   # work handed to a worker at once, as far as it can be foreseen
SLOW_SECONDS = 30.0    # rewards that take longer are said to, again and again
TIMEOUT_NOTE_SECONDS = 600.0  # between two warnings that rewards time out
PRINTED_BYTES = 1 << 24       # of what the workers printed; older text beyond it is dropped


class RewardFailure(RunStopped):
    """Too many rewards of a step failed. The message names the function, the first errors and the remedy."""


@dataclasses.dataclass
class _Task:
    """Jobs for one worker: mode 'each' (one after the other), 'async' (at once) or 'batch' (one call)."""

    mode: str
    jobs: list[tuple[int, int]]  # (item, function)


class RewardPool:
    """Worker processes that score answers.

    Workers start in the background as soon as the pool exists, one thread of this process per worker. `wait()` returns
    when they are ready or raises ConfigError (a function that cannot be imported, say); `score()` waits by itself.

    Args:
      config: `reward.*` is read; `user` and the folder `run.dir` (for functions written in a notebook) too.
      functions: specs or Python callables that replace `reward.functions`.
      names: specs that replace `reward.functions` (`eval.rewards`, say).
    """

    def __init__(self, config, functions=None, names=None):
        self._reward = config.reward
        given = functions if functions is not None else names if names is not None else config.reward.functions
        self._folder = FunctionFolder(config.run.dir)
        self.specs = [to_spec(f, self._folder) for f in given]
        self.names = short_names(given, self.specs)
        self.weights = check_specs(config, self.specs, self.names, replaced=names is not None)
        self._setup = json.dumps({
            "functions": list(zip(self.specs, self.names, strict=True)), "limit": config.reward.timeout_seconds,
            "shared": {"user": json.loads(config.user.to_json_best_effort()),
                       "format_pattern": config.reward.format_pattern}})
        self._limit = config.reward.timeout_seconds
        self._state = threading.Condition()
        self._busy = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._items: list[str] = []             # of the score() in progress, as JSON
        self._results: dict[tuple[int, int], dict] = {}
        self._wanted = 0                        # results that complete it
        self._failed: set[int] = set()          # items with a failed part
        self._most_failed = 0.0
        self._round = 0
        self._numbers = itertools.count(1)      # of the tasks handed to workers
        self._kinds: list[dict] | None = None   # of each function, told by the first worker that is ready
        self._sources = ""                      # digest of their code, too
        self._ready = 0
        self._fatal: Exception | None = None
        self._closing = False
        self._seconds_per_job = CHUNK_SECONDS
        self._noted = -TIMEOUT_NOTE_SECONDS
        missing = [name for name in self._reward.env if name not in os.environ]
        if missing:
            log.warning("reward.env names variables that are not set here: %s", ", ".join(missing))
        self._stderr = tempfile.TemporaryFile("a+b", buffering=0)
        # Without it a worker would write at its old place after the file was emptied: zeros before what it printed.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, fcntl.fcntl(self._stderr, fcntl.F_GETFL) | os.O_APPEND)
        self._workers: dict[int, WorkerProcess] = {}
        self._threads = [threading.Thread(target=self._serve, args=(k,), daemon=True, name=f"reward-{k}")
                         for k in range(config.reward.workers if self.specs else 0)]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    # -- the caller's side -----------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Returns when every worker is ready; raises ConfigError if one cannot be."""
        with self._state:
            while self._ready < len(self._threads) and self._fatal is None and not self._closing:
                self._state.wait(0.5)
            if self._fatal is not None:
                raise self._fatal

    def key(self) -> str:
        """What decides scores beside the answers: the functions' code and the options that reach them. Equal on all
        machines where these are. Waits for the first worker, which tells the code."""
        if not self.specs:
            return ""
        self._wait_for_one()
        named = [[name, spec.rpartition("/")[2]] for name, spec in zip(self.names, self.specs, strict=True)]
        setup = {**json.loads(self._setup), "functions": named, "column": self._reward.column, "env": sorted(self._reward.env),
                 "memory_gb": self._reward.memory_gb,
                 "sources": self._sources}
        return hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:16]

    def score(self, items: list[RewardItem], recorded: list[dict | None] | None = None, part: bool = False,
              stop: Callable[[], bool] = lambda: False) -> RewardResult | None:
        """Scores items. Results are in the order of the items whatever finishes first. One call at a time has the
        workers; one whose items are all recorded needs none. None where `stop` (asked about twice a second) turned true
        before the end: what the workers are at then is of no use to anyone.

        Args:
          items: answers.
          recorded: per item None, or a record of `RewardResult.records()`: functions it covers are not called again
            and their outcome is taken as it was, a timeout included. (Whose `by` is another key was given by other
            code.)
          part: they are a part of a step's answers, to which reward.max_failed_fraction is not applied yet.

        Raises:
          RewardFailure: more than reward.max_failed_fraction of the items have a failed part, or a batched function
            returned something else than one score per item.
          ConfigError: no worker can be started, a value has no JSON form, reward.column names an unknown function.
        """
        applied = [self._applied(item, i) for i, item in enumerate(items)]
        known = self._recorded(recorded or [None] * len(items), applied)
        jobs = [(i, f) for i, functions in enumerate(applied) for f in functions if (i, f) not in known]
        open_items = {i for i, _ in jobs}
        most_failed = len(items) if part else self._reward.max_failed_fraction * len(items)
        if jobs:
            with self._busy:
                texts = [as_json(item, i) if i in open_items else "" for i, item in enumerate(items)]
                done = self._run(texts, jobs, known, most_failed, stop)
                self._forward_output()
            if not done:
                return None
            self._note_timeouts(jobs, known)
        elif len(failed_items(known)) > most_failed:
            raise RewardFailure(self._failure_text(known, len(items)))
        return self._result(applied, known)

    def trial(self, items: list[RewardItem]) -> None:
        """Calls every function on a few items, before a run depends on them. Keeps no scores.

        Raises ConfigError naming each function that fails on all items it applies to (see `score` for the rest).
        """
        with self._busy:
            applied = [self._applied(item, i) for i, item in enumerate(items)]
            results: dict[tuple[int, int], dict] = {}
            jobs = [(i, f) for i, functions in enumerate(applied) for f in functions]
            try:
                self._run([as_json(item, i) for i, item in enumerate(items)], jobs, results, len(items))
            except RewardFailure as e:
                raise ConfigError(f"reward.functions, tried on the first rows: {e}") from None
            lines = []
            for f, name in enumerate(self.names):
                outcomes = [r["outcome"] for (_, g), r in sorted(results.items()) if g == f]
                if outcomes and all(map(is_failure, outcomes)):
                    lines.append(f"  {name}: {outcomes[0]}")
                answer = next((item.columns.get("answer") for item in items), None)
                scores = [r["value"] for (_, g), r in results.items() if g == f]
                if answer is not None and not isinstance(answer, str) and scores and not any(scores):
                    log.warning("reward %s gives 0 to the reference answers themselves, %r for one, which is of type %s and equal to no text: "
                                "compare with str(answer)", name, answer, type(answer).__name__)
            if lines:
                unseen = [n for n in re.findall(r"KeyError: '(\w+)'", str(lines)) if n in os.environ and n not in self._reward.env]
                lines += [f"  (workers do not see the variable {n} of this environment unless reward.env names it)" for n in unseen]
                slow = f" or raise reward.timeout_seconds={self._limit:g}," if "timeout" in str(lines) else ""
                raise ConfigError("reward.functions fail on the first rows, tried with the reference answers as completions:\n"
                                  + "\n".join(lines) + f"\nmend the function,{slow} or set reward.trial=false if it is right to"
                                  f" fail there{self._tail()}")

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        atexit.unregister(self.close)
        with self._state:
            self._closing = True
            self._state.notify_all()
            workers = list(self._workers.values())
        for worker in workers:
            worker.signal_kill()
        for thread in self._threads:
            thread.join()
        self._stderr.close()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    # -- one score() -----------------------------------------------------------------------------------------------

    def _applied(self, item: RewardItem, i: int) -> list[int]:
        """Functions that apply to an item: all, or those its `reward.column` names (a name, a list, or 'a,b')."""
        column = self._reward.column
        if not column:
            return list(range(len(self.names)))
        value = item.columns.get(column)
        wanted = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value or ())
        known = {n: f for f, n in enumerate(self.names)}
        unknown = [n for n in wanted if n not in known]
        if unknown or not wanted:
            raise ConfigError(f"item {i}: reward.column={column!r} holds {value!r}; it must name functions of "
                              f"reward.functions: {', '.join(self.names)}")
        return sorted({known[n] for n in wanted})

    def _recorded(self, recorded, applied) -> dict[tuple[int, int], dict]:
        known = {}
        for i, record in enumerate(recorded):
            for f in applied[i]:
                name = self.names[f]
                if record is not None and name in record["outcomes"]:
                    known[i, f] = {"value": record["parts"].get(name), "outcome": record["outcomes"][name],
                                   "metrics": record.get("metrics", {}).get(name, {})}
        return known

    def _run(self, items: list[str], jobs: list, known: dict, most_failed: float, stop=lambda: False) -> bool:
        """Has the jobs done by the workers; `known` receives the results. More than `most_failed` items with a failed
        part end it. False if `stop` did."""
        if jobs:
            self._wait_for_one()
        with self._state:
            self._items, self._results, self._wanted = items, known, len(known) + len(jobs)
            self._failed, self._most_failed = failed_items(known), most_failed
            self._tasks.extend(self._split(jobs))
            self._state.notify_all()
            began, said = time.monotonic(), 0
            try:
                while not self._finished():
                    self._state.wait(0.5)
                    self._bound_output()
                    if (passed := int((time.monotonic() - began) / SLOW_SECONDS)) > said:
                        said = passed
                        log.info("rewards: %d of %d done after %.0f s", len(known), self._wanted, time.monotonic() - began)
                    if not self._finished() and stop():
                        return False
                if self._fatal is not None:
                    raise self._fatal
                if self._closing:
                    raise RuntimeError("the reward pool was closed while it scored")
                if len(self._failed) > self._most_failed:
                    raise RewardFailure(self._failure_text(self._results, len(items)))
                return True
            finally:
                self._tasks.clear()
                self._round += 1  # what is still on its way belongs to no one
                self._items, self._results = [], {}

    def _finished(self) -> bool:
        return (len(self._results) >= self._wanted or len(self._failed) > self._most_failed
                or self._fatal is not None or self._closing)

    def _wait_for_one(self) -> None:
        with self._state:
            while self._kinds is None and self._fatal is None and not self._closing:
                self._state.wait(0.5)
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            if self._fatal is not None:
                raise self._fatal

    def _split(self, jobs: list[tuple[int, int]]) -> list[_Task]:
        tasks, each = [], []
        by_function: dict[int, list] = {}
        for job in jobs:
            kind = self._kinds[job[1]]
            if kind["batched"] or kind["asynchronous"]:
                by_function.setdefault(job[1], []).append(job)
            else:
                each.append(job)
        for f, group in by_function.items():
            if self._kinds[f]["batched"]:
                tasks.append(_Task("batch", group))
            else:
                size = min(ASYNC_AT_ONCE, -(-len(group) // len(self._threads)))
                tasks += [_Task("async", group[k:k + size]) for k in range(0, len(group), size)]
        if each:
            tasks.append(_Task("each", each))
        return tasks

    def _failure_text(self, results: dict, count: int) -> str:
        by_name: dict[str, dict[str, int]] = {}
        for (_, f), r in sorted(results.items()):
            if is_failure(r["outcome"]):
                kinds = by_name.setdefault(self.names[f], {})
                kinds[r["outcome"]] = kinds.get(r["outcome"], 0) + 1
        lines = [f"  {name}: " + ", ".join(f"{outcome} (x{n})" for outcome, n in list(kinds.items())[:3])
                 for name, kinds in by_name.items()]
        remedy = "mend the function, or let it return None for rows it cannot judge"
        if any("timeout" in kinds for kinds in by_name.values()):
            remedy += f"; raise reward.timeout_seconds={self._limit:g} if it needs longer"
        return (f"rewards failed for {len(failed_items(results))} of {count} answers so far, more than "
                f"reward.max_failed_fraction={self._reward.max_failed_fraction:g} allows:\n" + "\n".join(lines)
                + f"\n{remedy}{self._tail()}")

    def _result(self, applied, results) -> RewardResult:
        n = len(applied)
        parts = {name: np.full(n, np.nan) for name in self.names}
        outcomes: list[dict] = [{} for _ in range(n)]
        item_metrics: list[dict] = [{} for _ in range(n)]
        for i, functions in enumerate(applied):
            for f in functions:
                name, r = self.names[f], results[i, f]
                outcomes[i][name] = r["outcome"]
                if r["outcome"] == "ok":
                    parts[name][i] = r["value"]
                if r["metrics"]:
                    item_metrics[i][name] = r["metrics"]
        total = weighted_sum(parts, self.weights, n)
        by = self.key() if results else ""
        return RewardResult(total, parts, outcomes, item_metrics, metrics_of(total, outcomes, item_metrics), by)

    def _note_timeouts(self, jobs: list, results: dict) -> None:
        late = [self.names[f] for i, f in jobs if results[i, f]["outcome"] == "timeout"]
        if late and time.monotonic() - self._noted >= TIMEOUT_NOTE_SECONDS:
            self._noted = time.monotonic()
            log.warning("rewards: %d of %d calls ran into reward.timeout_seconds=%g (%s) and have no score; each costs its worker that "
                        "long and a new start", len(late), len(jobs), self._limit, ", ".join(dict.fromkeys(late)))

    def _bound_output(self) -> None:
        if os.fstat(self._stderr.fileno()).st_size > PRINTED_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)

    def _forward_output(self) -> None:
        """What reward functions printed goes to the log, 20 lines per step."""
        lines = self._printed()
        for line in lines[:20]:
            log.info("printed by a reward function: %s", line)
        if len(lines) > 20:
            log.info("... and %d more lines", len(lines) - 20)

    def _printed(self) -> list[str]:
        size = os.fstat(self._stderr.fileno()).st_size
        if not size:
            return []
        text = os.pread(self._stderr.fileno(), min(size, 1 << 20), max(0, size - (1 << 20))).decode("utf-8", "replace")
        os.ftruncate(self._stderr.fileno(), 0)
        return text.splitlines()

    def _tail(self) -> str:
        lines = self._printed()[-10:]
        return "\nthe workers printed last:\n  " + "\n  ".join(lines) if lines else ""

    # -- the workers' side: one thread each -------------------------------------------------------------------------

    def _serve(self, k: int) -> None:
        worker, calls = None, 0
        try:
            while not self._closing:
                if worker is None:
                    worker, calls = self._start(k), 0
                task, number, items = self._next()
                if task is None:
                    return
                if worker.ended():  # while it had nothing to do: no job's fault
                    worker.kill()
                    worker, calls = self._start(k), 0
                calls += len(task.jobs)
                done = self._do(worker, task, number, items)
                if not done or 0 < self._reward.recycle <= calls and not self._tasks:  # replaced while there is nothing to do
                    worker.kill()
                    worker = None
        except Exception as e:  # nothing may end a thread in silence: the caller would wait for ever
            with self._state:
                if self._fatal is None:
                    self._fatal = e
                self._state.notify_all()
        finally:
            if worker is not None:
                worker.kill()

    def _start(self, k: int) -> WorkerProcess:
        try:
            worker = WorkerProcess(self._stderr, environment(self._reward.env), self._reward.memory_gb)
        except OSError as e:
            raise RunStopped(f"a reward worker cannot be started: {e}") from None
        with self._state:
            self._workers[k] = worker
            if self._closing:
                worker.signal_kill()
        try:
            deadline = time.monotonic() + START_SECONDS
            worker.send(self._setup, deadline)
            reply = worker.receive(deadline)
        except (Died, Late, Garbled) as e:
            worker.kill()
            if self._closing:
                raise ConfigError("the reward pool was closed while it started") from None
            why = f"not ready after {START_SECONDS:g} s" if isinstance(e, Late) else f"{e}"
            raise self._unstartable(f"a reward worker cannot start: {why} while importing {', '.join(self.specs)}{self._tail()}") from None
        if "fatal" in reply:
            worker.kill()
            raise self._unstartable(reply["fatal"])
        with self._state:
            if self._sources not in ("", reply["sources"]):
                log.warning("a reward worker was started anew and found other code than the run began with (%s): from here on "
                            "answers are scored by the code of now", ", ".join(self.specs))
            self._kinds, self._sources = reply["ready"], reply["sources"]
            self._ready += 1
            self._state.notify_all()
        return worker

    def _unstartable(self, why: str) -> Exception:
        """A mistake in the config, unless workers could start before."""
        return ConfigError(why) if self._kinds is None else RewardFailure(f"{why}\nReward workers of this run could start before")

    def _next(self):
        """(task, its round, the round's items); (None, ...) when closing. A long 'each' task is cut to a chunk."""
        with self._state:
            while not self._tasks and not self._closing:
                self._state.wait()
            if self._closing:
                return None, 0, []
            task = self._tasks.popleft()
            if task.mode == "each":
                foreseen = int(CHUNK_SECONDS / max(self._seconds_per_job, 1e-6))
                size = max(1, min(foreseen, 64, -(-len(task.jobs) // len(self._threads))))
                if size < len(task.jobs):
                    self._tasks.appendleft(_Task("each", task.jobs[size:]))
                    task = _Task("each", task.jobs[:size])
            return task, self._round, self._items

    def _do(self, worker: WorkerProcess, task: _Task, number: int, items: list[str]) -> bool:
        """Does a task. False if the worker is of no use any more; what it left undone is queued again."""
        left = dict(enumerate(task.jobs))
        grace = 1.0 + 0.25 * self._limit if task.mode == "async" else 0.0  # there the worker keeps the limit itself
        local = list(dict.fromkeys(i for i, _ in task.jobs))
        place = {i: k for k, i in enumerate(local)}
        jobs = json.dumps([(place[i], f) for i, f in task.jobs])
        asked = next(self._numbers)
        message = (f'{{"task": {asked}, "mode": "{task.mode}", "jobs": {jobs}, '
                   f'"items": [{", ".join(items[i] for i in local)}]}}')
        try:
            started = time.monotonic()
            worker.send(message, started + self._limit + grace)
            deadline = time.monotonic() + self._limit + grace
            while left:
                reply = worker.receive(deadline, asked)
                if task.mode == "batch":
                    self._batch_reply(task, reply, number)
                    return True
                k = reply.get("job")
                if k not in left or not is_result(reply):
                    raise Garbled(shown(json.dumps(reply).encode()))
                self._record(number, {left.pop(k): reply})
                if task.mode == "each":
                    deadline = time.monotonic() + self._limit
            if task.mode == "each":
                self._seconds_per_job = 0.5 * (self._seconds_per_job + (time.monotonic() - started) / len(task.jobs))
            return True
        except Late:
            self._blame(task, left, number, "timeout")
        except Died as e:
            if not self._closing:
                self._blame(task, left, number, f"error: the worker process died: {e}")
        except Garbled as e:
            self._blame(task, left, number, f"error: instead of a reply came {e}: a reward must not write to file descriptors "
                                            "that it did not open")
        return False

    def _blame(self, task: _Task, left: dict, number: int, outcome: str) -> None:
        """Books a lost worker on the job it was at; the others of the task get another try."""
        verdict = {"value": None, "outcome": outcome, "metrics": {}}
        jobs = list(left.values())
        if task.mode == "batch" or len(jobs) == 1:
            self._record(number, {job: verdict for job in jobs})
            return
        if task.mode == "each":
            self._record(number, {jobs[0]: verdict})
            again = [_Task("each", jobs[1:])]
        else:  # one blocks the event loop; alone, each shows whether it is the one
            again = [_Task("async", [job]) for job in jobs]
        with self._state:
            if number == self._round:
                self._tasks.extendleft(reversed(again))
                self._state.notify_all()

    def _batch_reply(self, task: _Task, reply: dict, number: int) -> None:
        if "wrong" in reply:
            name = self.names[task.jobs[0][1]]
            with self._state:
                if number == self._round:
                    self._fatal = RewardFailure(f"batched reward {name!r} {reply['wrong']}; it must return one score "
                                                "(or None) per completion, in their order")
                    self._state.notify_all()
            return
        results = reply.get("results", ())
        if len(results) != len(task.jobs) or not all(map(is_result, results)):
            raise Garbled(shown(json.dumps(reply).encode()))
        self._record(number, dict(zip(task.jobs, results, strict=True)))

    def _record(self, number: int, results: dict) -> None:
        with self._state:
            if number == self._round:
                self._results.update(results)
                self._failed.update(i for (i, _), r in results.items() if is_failure(r["outcome"]))
                if self._finished():
                    self._state.notify_all()
