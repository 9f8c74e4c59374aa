r"""The reward pool: scores completions in spawned worker processes, with a wall-clock limit after which
a worker is killed.

Outcomes, per completion and function (also written to rollouts/step_*.jsonl):
  ok          a finite number
  none        the function returned None, no score for this row; not a failure
  nan         NaN or infinite                       \
  error: ...  raised, returned no number, or died    > failures; counted against reward.max_failed_fraction
  timeout     ran longer than the limit             /
Only 'ok' gives a number; every other outcome leaves that part absent (NaN, not 0). A completion whose parts are all
absent has no score (NaN).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.rewards import services
from jaxrl.rewards.agreement import Agreement, read_labelled_rows
from jaxrl.rewards.items import (
    CAUSE,
    NON_FAILURES,
    RewardItem,
    RewardResult,
    failed_items,
    item_json,
    reward_metrics,
    weighted_sum,
)
from jaxrl.rewards.specs import FunctionFolder, check_specs, short_names, to_spec
from jaxrl.rewards.workers import RewardFailure, Workers

log = logging.getLogger("jaxrl.rewards")
TIMEOUT_NOTE_SECONDS = 600.0  # between two warnings about timeouts


class RewardPool:
    """Worker processes that score completions.

    Workers start in the background when the pool is created. `wait()` returns when they are ready or raises
    ConfigError (for example, a function that cannot be imported); `score()` waits by itself.

    Args:
      config: `reward.*`, `user`, and the folder `run.dir` (for functions written in a notebook).
      functions: specs or Python callables that replace `reward.functions`, with reward.weights in their order.
      names: specs that replace `reward.functions` (for example `eval.rewards`); each keeps the weight that it has
        there, 1 if it is not among them.
      servers: services.Server of the run's judges, by name.

    Attributes:
      specs, names, weights: of the functions; weights by name.

    Raises:
      ConfigError: options that do not fit, or a function that cannot be passed to workers; see specs.check_specs.
    """

    def __init__(self, config, functions=None, names=None, servers=None):
        self._reward, self._from_config = config.reward, names is None
        reward = config.reward
        chosen = functions if functions is not None else names if names is not None else reward.functions
        self._folder = FunctionFolder(config.run.dir)
        named = {f for f in chosen if isinstance(f, str)}
        self._services = services.find_services(config, named, servers or {})
        options, locations, env = self._services
        self.specs = [to_spec(f, self._folder, options) for f in chosen]
        self.names = short_names(chosen, self.specs)
        self.weights = check_specs(config, self.specs, self.names, names is not None, options)
        shared = {"user": json.loads(config.user.to_json_best_effort()), "format_pattern": reward.format_pattern,
                  "code_score": reward.code_score}
        setup = {"functions": list(zip(self.specs, self.names, strict=True)), "limit": reward.timeout_seconds,
                 "shared": shared, "sandbox": config.sandbox.to_dict(), "services": options,
                 "arguments": {name: dict(value) for name, value in reward.arguments.items()}}
        named = [[name, spec.rpartition("/")[2]] for name, spec in zip(self.names, self.specs, strict=True)]
        decides = {**setup, "functions": named, "column": reward.column, "env": sorted(reward.env),
                   "memory_gb": reward.memory_gb}
        self._decides = decides
        self._busy = threading.Lock()
        self._last_timeout_note = -TIMEOUT_NOTE_SECONDS
        missing = [name for name in reward.env if name not in os.environ]
        if missing:
            log.warning("reward.env names variables that are not set on this host: %s", ", ".join(missing))
        self._workers = Workers(reward, self.specs, self.names, setup | {"places": locations}, decides, env)
        atexit.register(self.close)

    def wait(self) -> None:
        """Waits until every worker is ready. Raises ConfigError if one cannot start, RunStopped if its process cannot
        be created or workers could start earlier in the run, RuntimeError if the pool is closed."""
        self._workers.ready()

    def key(self) -> str:
        """Returns a digest (16 hex digits) of everything except the completions that decides scores: the functions'
        code and the options that reach them. Equal on all hosts where these are equal; "" without functions.

        Waits for the first worker, which computes the code digest. Raises as `wait` if it cannot start.
        """
        if self.specs:
            self._workers.ready(1)
        return self._workers.key

    def keys(self) -> dict[str, str]:
        """Returns function name -> digest (16 hex digits) of what decides its scores apart from the item: its code
        (workers.reached), its service's options, and the options that all functions share, of which reward.arguments
        are those of every function. The code of other functions has no part in it. Waits for the first worker; raises
        as `wait` if it cannot start.
        """
        if self.specs:
            self._workers.ready(1)
        common = {n: x for n, x in self._decides.items() if n not in ("functions", "services", "column")}
        out = {}
        for name, spec, kind in zip(self.names, self.specs, self._workers.kinds, strict=True):
            own = common | {"code": kind["code"], "service": self._decides["services"].get(spec)}
            out[name] = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]
        return out

    def batched(self) -> set[str]:
        """Returns the names of the functions that score several completions in one call. Waits for the first worker,
        which loads them; raises as `wait` if it cannot start."""
        if self.specs:
            self._workers.ready(1)
        return {name for name, kind in zip(self.names, self._workers.kinds, strict=True) if kind["batched"]}

    def score(self, items: list[RewardItem], recorded: list[dict | None] | None = None, part: bool = False,
              stop: Callable[[], bool] = lambda: False) -> RewardResult | None:
        """Scores items. Results are in the order of the items, whichever finishes first.

        One call at a time uses the workers. A call whose items are all recorded gives them nothing to do, and waits
        only until the first one has been ready, for the key.

        Args:
          items: completions; in a step those of this process, to which reward.max_failed_fraction applies.
          recorded: per item None, or a record of `RewardResult.records()`: functions it covers are not
            called again and their outcome is reused, including a timeout. A record whose `by` is another key
            comes from other code, which is not checked here.
          part: the items are part of a step's completions; reward.max_failed_fraction is not applied yet.
          stop: checked about twice a second, from when the first worker is ready and no other call is under way.

        Returns:
          The result, or None if `stop()` became true before the end; the workers' unfinished work is then discarded.

        Raises:
          RewardFailure: more than reward.max_failed_fraction of the items have a failed part, or a batched function
            did not return one score per item.
          ConfigError: no worker can be started, a value has no JSON form, reward.column or a source's rewards name an
            unknown function.
          RunStopped, RuntimeError: as `wait`.
        """
        applied = self._functions_of_items(items)
        known = {}
        for i, record in enumerate(recorded or ()):
            if record is None:
                continue
            outcomes = record["outcomes"]
            for f in applied[i]:
                if (name := self.names[f]) in outcomes:
                    known[i, f] = {"value": record["parts"].get(name), "outcome": outcomes[name],
                                   "metrics": record.get("metrics", {}).get(name, {})}
        jobs = [(i, f) for i, functions in enumerate(applied) for f in functions if (i, f) not in known]
        most_failed = len(items) if part else self._reward.max_failed_fraction * len(items)
        with self._busy if jobs else contextlib.nullcontext():
            texts = self._texts(items, {i for i, _ in jobs})
            done = not jobs or self._workers.run(texts, jobs, known, most_failed, stop)
            if done and len(failed_items(known)) > most_failed:
                raise RewardFailure(self._failure_text(known, len(items)))
            if jobs:
                self._log_problems(jobs if done else (), known)
        return self._result(applied, known) if done else None

    def trial(self, items: list[RewardItem]) -> None:
        """Calls every function on a few items before a run depends on them. Keeps no scores. Logs a warning about a
        function that gives 0 or no score to all of them if the first reference answer is no text.

        Raises:
          ConfigError: names each function that fails on all items it applies to. Also if no worker can be started, a
            value has no JSON form, or a batched function does not return one score per item.
          RunStopped, RuntimeError: as `wait`.
        """
        results: dict[tuple[int, int], dict] = {}
        jobs = [(i, f) for i, functions in enumerate(self._functions_of_items(items)) for f in functions]
        with self._busy:
            try:
                self._workers.run(self._texts(items, range(len(items))), jobs, results, len(items))
            except RewardFailure as e:
                raise ConfigError(f"reward.functions, trial on the first rows: {e}") from None
            lines = []
            for f, name in enumerate(self.names):
                mine = [r for (_, g), r in sorted(results.items()) if g == f]
                if mine and all(r["outcome"] not in NON_FAILURES for r in mine):
                    lines.append(f"  {name}: {mine[0]['outcome']}")
                answer = next((item.columns.get("answer") for item in items), None)
                text = answer is None or isinstance(answer, str)
                if not text and mine and not any(r["value"] for r in mine):
                    log.warning("reward %s gives 0 to the reference answers themselves: %r is %s and never equals a"
                                " completion's text; compare with str(answer)", name, answer, type(answer).__name__)
            if lines:
                raise ConfigError(self._trial_text(lines))

    def agreements(self) -> list[Agreement]:
        """Returns the agreement of each judge that the pool uses with its labelled rows (reward.judge.labelled), if it
        has any, to show before training.

        Raises:
          ConfigError: the rows cannot be read, or a judge agrees with fewer than its min_agreement.
          ConfigError, RunStopped, RuntimeError: as `wait`.
        """
        out = []
        for name, (_, o) in services.service_options(self._reward).items():
            if name not in self._services.options or not o.get("labelled"):
                continue
            items, labels = read_labelled_rows(o)
            f, results = self.names.index(name), {}
            with self._busy:
                jobs = [(i, f) for i in range(len(items))]
                self._workers.run(self._texts(items, range(len(items))), jobs, results, len(items))
            out.append(Agreement.from_results(name, o, labels, [results[job] for job in jobs]))
        return out

    def close(self) -> None:
        """Stops the workers. Safe to call twice."""
        atexit.unregister(self.close)
        self._workers.close()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def _texts(self, items: list[RewardItem], wanted) -> list[str]:
        """Returns the JSON of the items that are needed, "" for the others."""
        if wanted and self.specs and not self._workers.kinds:  # without functions there is no worker to wait for
            self._workers.ready(1)
        uses = {"context_ids": ("context",), "images": ("images",), "image_sizes": ("images", "image_sizes")}
        without = tuple(name for name, traits in uses.items()
                        if not any(kind[trait] for kind in self._workers.kinds for trait in traits))
        return [item_json(item, i, without) if i in wanted else "" for i, item in enumerate(items)]

    # -- one score() -----------------------------------------------------------------------------------------------

    def _functions_of_items(self, items: list[RewardItem]) -> list[list[int]]:
        """Returns the functions that apply to each item: all, or those its source has or its `reward.column` names (a
        name, a list, or 'a,b').
        """
        column, known = self._reward.column, {name: f for f, name in enumerate(self.names)}
        if not column and all(item.functions is None for item in items):
            return [list(known.values())] * len(items)
        out = []
        for i, item in enumerate(items):
            if item.functions is not None or not column:
                out.append(self._source_functions(item.functions, known))
                continue
            value = item.columns.get(column)
            wanted = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value or ())
            if not wanted or not known.keys() >= set(wanted):
                raise ConfigError(f"item {i}: reward.column={column!r} holds {value!r}; it must name functions of "
                                  f"reward.functions: {', '.join(self.names)}")
            out.append(sorted({known[n] for n in wanted}))
        return out

    def _source_functions(self, wanted, known: dict[str, int]) -> list[int]:
        """Returns functions by name. A pool with other functions than reward.functions (eval.rewards) uses those of
        them it has.
        """
        if wanted is None or not self._from_config:
            return list(known.values())
        if unknown := [name for name in wanted if name not in known]:
            raise ConfigError(f"data.sources: rewards names {unknown[0]!r}, which is not among reward.functions: "
                              f"{', '.join(self.names)}")
        return sorted(known[name] for name in wanted)

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
        by = (self._workers.key or self.key()) if results else ""
        return RewardResult(total, parts, outcomes, item_metrics, reward_metrics(total, outcomes, item_metrics), by)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _log_problems(self, jobs, results: dict) -> None:
        """Logs timeouts from time to time, and what reward functions printed, at most 20 lines per step."""
        late = [self.names[f] for i, f in jobs if results[i, f]["outcome"] == "timeout"]
        if late and time.monotonic() - self._last_timeout_note >= TIMEOUT_NOTE_SECONDS:
            self._last_timeout_note = time.monotonic()
            log.warning("rewards: %d of %d calls exceeded reward.timeout_seconds=%g (%s) and have no score; each one"
                        " blocks its worker that long and restarts it", len(late), len(jobs),
                        self._reward.timeout_seconds, ", ".join(dict.fromkeys(late)))
        lines = self._workers.printed.lines()
        for line in lines[:20]:
            log.info("printed by a reward function: %s", line)
        if len(lines) > 20:
            log.info("... and %d more lines", len(lines) - 20)

    def _failure_text(self, results: dict, count: int) -> str:
        by_name: dict[str, Counter] = {}
        texts: dict[tuple[int, str], str] = {}
        for (_, f), r in sorted(results.items()):
            if r["outcome"] not in NON_FAILURES:
                cause = CAUSE.match(r["outcome"])  # texts of one cause may differ, for example by server
                text = texts.setdefault((f, cause[1] if cause else r["outcome"]), r["outcome"])
                by_name.setdefault(self.names[f], Counter())[text] += 1
        lines = [f"  {name}: " + ", ".join(f"{outcome} (x{n})" for outcome, n in kinds.most_common(3))
                 for name, kinds in by_name.items()]
        remedy = "fix the function, or let it return None for rows it cannot score"
        if failed_services := [name for name in by_name if name in self._services.options]:
            remedy = f"fix the service of {', '.join(failed_services)} and resume"
        if any("timeout" in kinds for kinds in by_name.values()):
            remedy += f"; raise reward.timeout_seconds={self._reward.timeout_seconds:g} if it needs more time"
        return (f"rewards failed for {len(failed_items(results))} of {count} completions so far, more than "
                f"reward.max_failed_fraction={self._reward.max_failed_fraction:g} allows:\n" + "\n".join(lines)
                + f"\n{remedy}{self._workers.printed.last()}")

    def _trial_text(self, lines: list[str]) -> str:
        known, missing = str(lines), re.findall(r"KeyError: '(\w+)'", str(lines))
        lines = lines + [f"  (workers do not see the variable {n} of this environment unless reward.env names it)"
                         for n in missing if n in os.environ and n not in self._reward.env]
        slow = f" or raise reward.timeout_seconds={self._reward.timeout_seconds:g}," if "timeout" in known else ""
        return ("reward.functions fail on the first rows, with the reference answers as completions:\n"
                + "\n".join(lines)
                + f"\nfix the function or its service,{slow} or set reward.trial=false if it should fail there"
                + self._workers.printed.last())
