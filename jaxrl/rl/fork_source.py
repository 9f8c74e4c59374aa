"""Reuses completions and rewards of a recorded run in its fork (replay.fork), and counts how many were reused.

    completion  <- (hash of the weights, prompt, seed, sampling options)
    reward      <- (code of the function and options that reach it, all that it is passed of the completion)

recipes.rl opens a ForkSource when fork.run is set. docs/guides/replay.md lists what is compared, and what is not.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np

from jaxrl.records import files, states
from jaxrl.rewards import item_hash
from jaxrl.rl.recording import sampling_options
from jaxrl.rl.rollouts import GREEDY, SAMPLES
from jaxrl.roles.role import Policy
from jaxrl.rollout import Engine, Result
from jaxrl.types import FINISH


class RecordedStep:
    """The completions of one recorded step, by prompt and by what rewards were passed.

    Args:
      record: records.files.Record of the step.
      sampling: name -> value, the fork's options that a completion depends on (recording.sampling_options).

    Attributes:
      rows: (group, sample) -> number of the completion.
      scores: address of what reward functions were passed (items.address) -> number of the completion.
      functions: name of a reward function of the recorded run -> its key (RewardPool.keys).
      changed_options: sampling options whose values differ from the fork's.
      usable: the record has its sampling options, and none of these differ.
    """

    def __init__(self, record, sampling: dict):
        self.step, self.header, self.traj = record.step, record.header, record.part("traj")
        self.columns, self.parts = record.part("token"), record.part("reward")
        self.sampled = np.split(np.flatnonzero(self.traj["loss_mask"]), _ends(self.traj))
        pairs = zip(self.traj["group"].tolist(), self.traj["sample"].tolist(), strict=True)
        self.rows = {pair: i for i, pair in enumerate(pairs)}
        self.functions = self.header.get("functions", {})
        addresses = record.arrays.get("batch/addresses")
        self.scores = {} if addresses is None else {int(a): i for i, a in enumerate(addresses)}
        then = self.header.get("sampling")
        self.changed_options = sorted(n for n in sampling if then is not None and then.get(n) != sampling[n])
        self.usable = then is not None and not self.changed_options

    def outcomes(self, i: int) -> dict:
        """Returns the i-th completion's rewards as one record of RewardResult.records(): {"parts", "outcomes",
        "metrics"}."""
        recorded = self.header["outcomes"][i]
        parts = {name: float(self.parts[name][i]) for name in self.functions if np.isfinite(self.parts[name][i])}
        noted = {name: {k: float(x) for k, x in own.items()} for name, own in self.header["noted"][i].items()}
        return {"parts": parts, "outcomes": {**dict.fromkeys(parts, "ok"), **recorded}, "metrics": noted}

    def result_for(self, i: int, request, wants_support: bool, wants_routes: bool) -> Result | None:
        """Returns the i-th completion as the Result of a request.

        None if its prompt, seed or adapter differs, or if it lacks the sampled support or the routes that are
        wanted."""
        traj, at = self.traj, self.sampled[i]
        first, last, size = *traj["offsets"][i:i + 2], traj["prompt_lengths"][i]
        adapter = self.columns["adapter"][first] if "adapter" in self.columns else 0
        lacks = wants_support and "support" not in self.columns or wants_routes and "routes" not in self.columns
        if lacks or traj["seed"][i] != request.seed or adapter != request.adapter or \
                not np.array_equal(traj["tokens"][first:first + size], request.prompt):
            return None
        return Result(request.id, traj["tokens"][at], traj["logprobs"][at], self.columns["kept"][at],
                      traj["versions"][at], FINISH[traj["finish"][i]], request.seed,
                      self.columns["support"][at] if wants_support else None,
                      self.columns["routes"][first:last] if wants_routes else None)


def _ends(traj) -> np.ndarray:
    """Returns where each completion's sampled tokens end among all sampled ones, without the last."""
    return np.concatenate([[0], np.cumsum(traj["loss_mask"])])[traj["offsets"][1:-1]]


class ForkSource:
    """The recorded run that a fork continues: a source of completions and rewards, with counts of what was reused.

    Weights equal the recorded ones up to the version `last_identical_version`, by the hashes of all that trains. A
    completion is reused if all its tokens were drawn from such weights. One thread may ask for completions while
    another asks for rewards.

    Args:
      s: the fork's session. spec: its Spec; fork.run is the recorded run.

    Attributes:
      policy: the fork's Policy, which the recipe sets before the first `on_publish`.
      last_identical_version: -1 before a comparison found equal weights. diverged: whether one found others.
    """

    policy: Policy  # the fork's; the recipe sets it

    def __init__(self, s, spec):
        self.s, self.spec, self.folder = s, spec, Path(spec.fork.run)
        recorded = files.steps(self.folder / files.FOLDER)
        self.paths = {step: path for step, path in recorded.items() if step >= spec.fork.step}
        self.last_identical_version, self.diverged = -1, False
        self.steps: dict[int, RecordedStep] = {}
        self.counts: dict[int, Counter] = {}
        self._one, self._said = threading.Lock(), False
        self.sampling = sampling_options(spec)
        self.reuses_completions = not spec.episodes and ":" not in spec.rollout.engine

    def on_publish(self, version: int) -> None:
        """Loads the records that apply to completions sampled from these weights of the policy, and compares the
        weights with the recorded ones until they differ once.

        Args:
          version: completed steps of the weights that the engine has from now on."""
        ahead = (self.spec.rollout.max_staleness + 1) * self.spec.rollout.sync_every
        wanted = [n for n in range(version + 1, version + 1 + ahead) if n in self.paths]
        steps = {n: self.steps.get(n) or RecordedStep(files.read(self.paths[n]), self.sampling) for n in wanted}
        self.steps = steps  # in one assignment: another thread may read
        if not self.diverged and self.reuses_completions and steps:
            same = self._same(version)
            self.last_identical_version, self.diverged = version if same else self.last_identical_version, not same
        first = next(iter(steps.values()), None)
        if first is not None and not self._said:
            self._said = True
            self.s.say(f"fork      of {self.folder}, from step {version + 1} on: {self._intention(first)}")

    def _intention(self, first: RecordedStep) -> str:
        why = ""
        if not self.reuses_completions:
            why = "episodes and user-defined engines are not content-addressed"
        elif first.changed_options:
            why = f"{', '.join(first.changed_options)} differ"
        elif not first.usable:
            why = "an older jaxrl recorded them"
        elif self.diverged:
            why = "the weights differ from the recorded ones"
        return f"completions are sampled ({why})" if why else "completions are reused while the weights are identical"

    def _same(self, version: int) -> bool:
        """Whether the policy equals, bit for bit, the one recorded after `version` steps."""
        before, after = self.paths.get(version + 1), self.paths.get(version)
        if before is None and after is None:
            return False
        record = files.read(before or after)
        hashes = record.arrays["state/before" if before else "state/after"]
        then = dict(zip(record.header["states"], hashes, strict=True))
        look = states.look_at({"policy": self.policy.state}, bool(self.spec.train.router_bias_rate)).on_host()
        now = {name: x for name, x in zip(look.names, look.hashes, strict=True)
               if name.startswith(("policy/trainable/", "policy/frozen/"))}
        return all(name in then and np.array_equal(x, then[name]) for name, x in now.items())

    def find_result(self, request) -> Result | None:
        """Returns the recorded result of a request; None if there is none under these weights and options, and for
        greedy completions, which are always sampled. Counts which it was; other requests (evaluation) have none and do
        not count."""
        key, found = request.key, None
        if key is None or key.stream not in (SAMPLES, GREEDY):
            return None
        for step in self.steps.values() if self.reuses_completions and key.stream == SAMPLES else ():
            row = step.rows.get((key.prompt, key.sample))
            if step.step <= key.step + 1 and step.usable and row is not None:
                a = self.spec.algorithm
                found = found or step.result_for(row, request, bool(a.sampled_support), a.routes == "sampled")
        if found is not None and (not len(found.tokens) or found.versions.max() <= self.last_identical_version):
            self._count("completions_taken")
            return found
        self._count("completions_sampled")
        return None

    def score(self, pool, items, recorded: list[dict | None] | None = None, **how):
        """Scores items with a reward pool, reusing recorded rewards of the same functions and inputs.

        A function that scores items together is reused for a whole call or not at all.

        Args:
          pool: RewardPool. items: RewardItem of each completion.
          recorded: per item None, or a record of RewardResult.records() whose functions are not called again.
          how: further arguments of RewardPool.score: part, stop.

        Returns:
          RewardResult in the order of the items, or None after a stop. Raises what RewardPool.score raises.
        """
        steps = list(self.steps.values())
        recorded = list(recorded or [None] * len(items))
        keys = pool.keys() if steps else {}
        usable = [{n for n, key in keys.items() if h.functions.get(n) == key} for h in steps]
        whole, taken = pool.batched() if any(usable) else set(), []
        for i, item in enumerate(items if any(usable) else ()):
            known, where = recorded[i] or {"outcomes": {}}, item_hash(item)
            for names, h in zip(usable, steps, strict=True):
                if where in h.scores:
                    own = h.outcomes(h.scores[where])
                    taken += [(i, n, own) for n in names if n in own["outcomes"] and n not in known["outcomes"]]
                    break
        for name in whole:  # its scores may depend on one another: all of a call or none
            if sum(n == name for _, n, _ in taken) < len(items):
                taken = [entry for entry in taken if entry[1] != name]
        for i, name, own in taken:
            old = recorded[i] or {"parts": {}, "outcomes": {}, "metrics": {}}
            more = {part: {name: own[part][name]} if name in own[part] else {} for part in own}
            recorded[i] = {**old, **{part: {**old.get(part, {}), **more[part]} for part in own}}
        result = pool.score(items, recorded=recorded, **how)
        if result is not None:
            self._count(Counter(f"taken/{name}" for _, name, _ in taken))
            self._count(Counter(f"computed/{name}" for old, outcomes in zip(recorded, result.outcomes, strict=True)
                                for name in outcomes if old is None or name not in old["outcomes"]))
        return result

    def _count(self, what) -> None:
        with self._one:
            self.counts.setdefault(self.s.step + 1, Counter()).update([what] if isinstance(what, str) else what)

    def metrics(self) -> dict[str, float]:
        """Returns the last completed step's counts fork/completions_taken, fork/completions_sampled, fork/rewards_taken
        and fork/rewards_computed.

        "taken" counts recorded completions and rewards that were reused."""
        own = self.counts.get(self.s.step, Counter())
        total = lambda kind: float(sum(n for name, n in own.items() if name.startswith(f"{kind}/")))  # noqa: E731
        completions = {f"fork/{kind}": float(own[kind]) for kind in ("completions_taken", "completions_sampled")}
        return completions | {"fork/rewards_taken": total("taken"), "fork/rewards_computed": total("computed")}

    def summary(self) -> dict:
        """Returns the entry `fork` of summary.json: the first step, and the steps in which anything was reused."""
        out = {}
        for step, own in self.counts.items():
            names = sorted({name.split("/", 1)[1] for name in own if "/" in name})
            rewards = {name: {kind: own[f"{kind}/{name}"] for kind in ("taken", "computed")} for name in names}
            if step == self.spec.fork.step or own["completions_taken"] or any(r["taken"] for r in rewards.values()):
                completions = {kind: own[kind] for kind in ("completions_taken", "completions_sampled")}
                out[str(step)] = completions | {"rewards": rewards}
        return {"fork": {"run": str(self.folder), "step": self.spec.fork.step, "steps": out}}


class CachedEngine(Engine):
    """An engine that takes results from a ForkSource (`fork`) where it has them and passes other requests to `engine`.

    See protocol.Engine for the methods; those that are not defined here are the wrapped engine's.
    """

    def __init__(self, engine, fork: ForkSource):
        self._engine, self._fork = engine, fork
        self._ready: list[Result] = []
        for name in ("hold", "forget", "unfinished_results", "restore_unfinished", "sleep", "weights_moved"):
            setattr(self, name, getattr(engine, name))

    @property
    def info(self):
        """The wrapped engine's EngineInfo."""
        return self._engine.info

    def submit(self, requests) -> None:
        """Takes the results of requests that the fork's source recorded; passes the other requests to the wrapped
        engine."""
        found = {r.id: self._fork.find_result(r) for r in requests}
        self._engine.submit([r for r in requests if found[r.id] is None])
        self._ready += [result for result in found.values() if result is not None]

    def poll(self, deadline_s: float) -> list[Result]:
        """Returns recorded results at once, with those that the wrapped engine has; else waits for it at most
        deadline_s seconds."""
        ready, self._ready = self._ready, []
        return ready + self._engine.poll(0.0 if ready else deadline_s)

    def abort(self, ids=None) -> None:
        """Aborts the requests with these ids (None = all) that were passed on; recorded results are still returned
        whole."""
        ready = {r.id for r in self._ready}
        self._engine.abort(ids and [i for i in ids if i not in ready])

    def publish(self, params, version: int) -> None:
        """Hands weights to the wrapped engine and loads the records that apply to them (ForkSource.on_publish)."""
        self._engine.publish(params, version)
        self._fork.on_publish(int(version))

    def metrics(self) -> dict[str, float]:
        """Returns the wrapped engine's metrics and ForkSource.metrics."""
        return self._engine.metrics() | self._fork.metrics()

    def health(self):
        """Returns the wrapped engine's Health."""
        return self._engine.health()

    def close(self) -> None:
        """Closes the wrapped engine."""
        self._engine.close()
