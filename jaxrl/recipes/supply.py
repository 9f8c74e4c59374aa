"""A run's supply of answers: rollout.ahead with this run's prompts, seeds, rewards and checkpoints around it."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.processes.exchange import gather as gather_bytes
from jaxrl.processes.exchange import owner
from jaxrl.recipes.trajectories import (
    collect,
    completions,
    make_requests,
    results_from_bytes,
    results_to_bytes,
    reward_items,
    sampling_params,
)
from jaxrl.rollout.ahead import Ahead, Group, staleness
from jaxrl.spec import longest_sequence


def stale_buckets(rollout) -> tuple[int, ...]:
    """First values of the buckets in which staleness is shown: 0, 1, 2, 4, 8 ... up to the bound."""
    return (0, *(2**i for i in range(rollout.max_staleness.bit_length())))


class Supply:
    """The groups of the next steps: asked for, answered and, where the run is ahead, scored before their step. A part of the
    run's checkpoints (see Session.restore): answers not yet used, with what their rewards said, from all processes.

    Args:
      r: the Run, its engine and data open. greedy: whether every group gets a likeliest answer beside its samples.
    """

    name = "ahead"

    def __init__(self, r, greedy: bool):
        c = r.config
        r.supply = self
        self.run, self.greedy, self.on = r, greedy, c.ahead
        if self.on and not c.rollout.partial and not hasattr(r.engine, "hold"):
            raise ConfigError(f"rollout.partial=False: the engine {c.rollout.engine} has no hold(); set rollout.partial=True")
        self.scorer = Scorer(self._score) if self.on else None
        self.ahead = Ahead(
            r.engine, per_step=c.data.prompts_per_step, max_staleness=c.rollout.max_staleness, sync_every=c.rollout.sync_every,
            partial=c.rollout.partial, steps=r.total_steps, draw=r.stream.take, ask=self._ask,
            mine=lambda position: owner(position, r.peers.count) == r.peers.index,
            finished=self.scorer.add if self.on else lambda group: None)
        self._payloads: list[bytes] = []

    # ---- asking and scoring -----------------------------------------------------------------------------------------

    def _ask(self, prompts, step: int) -> list:
        """Requests of prompts meant for a step: rollout.group_size each, then those of the likeliest answers."""
        c = self.run.config

        def requests(samples, name, greedy):
            sampling = sampling_params(c.rollout, c.rollout.max_new_tokens, c.rollout.stop, c.rollout.stop_token_ids,
                                       c.rollout.keep_stop, c.rollout.min_new_tokens, greedy)
            return [request for prompt in self.run.stream.unless_interrupted(prompts)
                    for request in make_requests([prompt], samples, sampling, c.run.seed, name, step)]

        return requests(c.rollout.group_size, "train", False) + (requests(1, "greedy", True) if self.greedy else [])

    def take(self, cursor: int, count: int = 0) -> tuple[list[Group], int]:
        """Groups for the step that is next; see Ahead.take."""
        return self.ahead.take(self.run.step, cursor, count)

    def wait(self, groups: list[Group]) -> bool:
        """Until these groups of ours are answered; False when a stop was asked for."""
        return self.ahead.wait(groups, self.run.config.rollout.timeout_seconds, self.run.interrupted)

    def scored(self, groups: list[Group]) -> bool:
        """Until they are scored, where rewards run beside generation; False when a stop was asked for."""
        return self.scorer is None or self.scorer.wait([g for g in groups if g.mine], self.run.interrupted)

    def publish(self, params, version: int) -> None:
        self.ahead.publish(params, version, self.run.config.rollout.timeout_seconds, self.run.interrupted)

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()

    def _score(self, groups: list[Group]) -> None:
        """Rewards of finished groups, samples and likeliest answers apart."""
        found: dict[str, dict] = {}
        for greedy in (False, True):
            asked = [(q, g.results[q.id], g.example) for g in groups for q in samples(g, greedy)
                     if g.results[q.id].finish != "abort" and q.id not in g.outcomes]
            if asked:
                requests, results, examples = map(list, zip(*asked, strict=True))
                traj = collect(requests, results, longest_sequence(self.run.config))
                texts = completions(traj, self.run.job.tokenizer)
                items = reward_items(traj, examples, texts, self.run.config.data.response_prefix)
                records = self.run.rewards.score(items, part=True).records()
                found |= {q.id: record for q, record in zip(requests, records, strict=True)}
        for group in groups:
            group.outcomes = group.outcomes | {q.id: found[q.id] for q in group.requests if q.id in found}

    # ---- what a step shows ------------------------------------------------------------------------------------------

    def staleness(self, traj) -> np.ndarray:
        """[T] float32, publications between the version that drew a token and this step; 0 where none was drawn."""
        found = staleness(self.run.step, traj.versions, self.run.config.rollout.sync_every)
        return np.where(traj.loss_mask, found, 0).astype(np.float32)

    def metrics(self, traj, stale_T) -> dict[str, float]:
        if not self.on:
            return {}
        own = stale_T[traj.loss_mask]
        answered = sum(g.done for g in self.ahead.groups.values() if g.mine)
        return {"staleness/mean": float(own.mean()), "staleness/max": float(own.max()),
                "rollout/ahead_groups": float(len(self.ahead.groups)), "rollout/ahead_answered": float(answered)}

    # ---- a part of the run --------------------------------------------------------------------------------------------

    def abstract(self):
        sizes = (self.run.held(self.name) or {}).get("sizes", ())
        return {str(i): np.zeros(n, np.uint8) for i, n in enumerate(sizes)}

    def start(self, arrays, host: dict | None) -> None:
        """From a checkpoint, or with nothing (None)."""
        if host:
            parts = [results_from_bytes(arrays[str(i)].tobytes()) for i in range(len(host["sizes"]))]
            by = self.run.rewards.key()  # what other code or options scored is scored anew
            outcomes = {name: record for _, meta in parts for name, record in meta.items() if record.get("by") == by}
            self.ahead.restore(host["state"], [x for results, _ in parts for x in results], self.run.step, self.run.cursor, outcomes)

    def host(self) -> dict | None:
        """Collective where processes are several: each gives all the others its answers."""
        state, results = self.ahead.state()
        if not state["groups"]:
            return None
        outcomes = {name: record for g in self.ahead.groups.values() for name, record in g.outcomes.items()}
        payload = results_to_bytes(results, outcomes)
        self._payloads = gather_bytes(self.run.peers, f"{self.run.place}: answers ahead, for a checkpoint", payload)
        return {"state": state, "sizes": [len(p) for p in self._payloads]}

    def arrays(self):
        """What goes with the `host` of just before."""
        return {str(i): np.frombuffer(p, np.uint8) for i, p in enumerate(self._payloads)}


def samples(group: Group, greedy: bool = False) -> list:
    """A group's requests: those it learns from, or that of its likeliest answer."""
    return [q for q in group.requests if q.id.startswith("greedy/") == greedy]


class Scorer:
    """Scores finished groups in a thread of its own, all that wait at once. score: fills the outcomes of a list of groups."""

    def __init__(self, score):
        self._score, self._state = score, threading.Condition()
        self._queue, self._open = deque(), set()  # groups not yet begun; those without an outcome, by position
        self._error, self._closing = None, False
        self._thread = threading.Thread(target=self._work, daemon=True, name="rewards-ahead")
        self._thread.start()

    def add(self, group: Group) -> None:
        with self._state:
            self._queue.append(group)
            self._open.add(group.position)
            self._state.notify_all()

    def wait(self, groups, stop=lambda: False) -> bool:
        """Until these have their outcomes; False if `stop` turned true before. Raises what scoring raised."""
        wanted = {g.position for g in groups}
        with self._state:
            while self._error is None and self._open & wanted:
                if stop():
                    return False
                self._state.wait(0.5)
            if self._error is not None:
                raise self._error
        return True

    def close(self) -> None:
        """No further group is begun. What is being scored ends with the reward pool."""
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
