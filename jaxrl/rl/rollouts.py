"""Rollouts: prompts -> completions -> scores, repeated where dynamic sampling needs more groups with signal.

    batch = rollouts.next(progress)            the groups that this step uses, in data order
    rollouts.poll()                            during the update: takes results that the engine has finished
    rollouts.release(batch.cursor)             after the update: the run continues from this cursor
    rollouts.publish(params, version)          weight sync

With several processes each samples the groups it owns and runs their rewards; then every process gets all of them, in
the order of the prompts. The recipes rl and distill call it. Engines are in jaxrl.rollout, reward functions in
jaxrl.rewards; nothing here trains.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from jaxrl import rewards as jaxrl_rewards
from jaxrl.algorithms.advantages import EQUAL, group_advantages
from jaxrl.config import adapter_table
from jaxrl.config.user_code import imported
from jaxrl.data import Interrupted
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.exchange import gather, owner_process
from jaxrl.rewards.background import BackgroundScorer
from jaxrl.rl.episodes import add_episode_rewards, check_failures, episode_metrics
from jaxrl.rl.metrics import accuracy_source
from jaxrl.rl.trajectories import (
    collect,
    exchange_results,
    make_requests,
    recorded_outcomes,
    results_from_bytes,
    results_to_bytes,
    reward_items,
    sampling_params,
)
from jaxrl.rollout.queue import PromptGroup, RolloutQueue, staleness

log = logging.getLogger("jaxrl")
SAMPLES, GREEDY = "train", "greedy"  # kinds: completions to train on; the greedy completion of each group


class Batch(NamedTuple):
    """N trajectories with their rewards, which one step trains on; T tokens.

    Shaped scores are the weighted sums of rewards with the length penalties of reward.* and algorithm.overlong_*.

    traj: Trajectories. baseline: NaN = absent; None unless advantage_mean is greedy. texts: of the completions.
    metrics: of sampling and rewards."""

    traj: Any
    groups: list  # PromptGroup of each
    texts: list[str]
    result: Any  # RewardResult
    shaped: np.ndarray  # [N] float64, NaN = absent
    scores: np.ndarray  # [N] float64: shaped, normalised per reward.norm_*
    baseline: np.ndarray | None  # [N] score of the greedy completion of the trajectory's prompt
    dropped: np.ndarray  # [N] bool: trajectories of groups that dynamic sampling masks
    staleness: np.ndarray | None  # [T] float32: see queue.staleness; 0 where not sampled. None where nothing runs ahead
    asked: int  # number of requested completions
    cursor: int  # position of the data after this step
    metrics: dict[str, float]
    pass_rates: dict[int, float]  # position -> share of its completions that pass, over all requested groups, if used
    addresses: np.ndarray | None = None  # [N] uint64 hashes of reward inputs (items.address), where steps are recorded


class Round(NamedTuple):
    """The scored completions of some prompt groups; `asked` counts the completions requested."""

    rows: list  # (request, result, group, text, record of RewardResult.records()) of every completion
    greedy: dict[int, float]  # group -> score of its greedy completion
    keep: dict[int, bool]  # group -> whether it has signal
    asked: int
    failed: dict[str, int]  # cause -> number of absent episodes


class Rollouts:
    """Produces a run's batches; a part of its checkpoints: unused completions of all processes and their rewards.

    Args:
      spec: of the job. session: its phases, faults, collectives and stop (`phase`, `fault`, `together`,
        `interrupted`, `peers`, `collective_tag`), the checkpoint (`resumed_part`, `progress`), the rollouts of
        an interrupted attempt (`telemetry`).
      engine, stream, rewards: opened by run.setup. decode: as returned by data.completion_texts.
      steps: of the whole run. per_step: prompts per step; 0 = data.prompts_per_step.
      reward_model: roles.reward_model.RewardModel, or None.
      fork: the recorded run that this run forks (rl.fork_source.ForkSource), or None.
      images: the job's ImageSource, or None.

    Raises:
      ConfigError: the engine lacks something that the options need.
    """

    name = "ahead"  # in checkpoints

    def __init__(self, spec, session, *, engine, stream, rewards, decode, steps: int, per_step: int = 0,
                 reward_model=None, fork=None, images=None):
        self.spec, self.session, self.stream, self.fork, self.images = spec, session, stream, fork, images
        self.rewards, self.decode, self.reward_model = rewards, decode, reward_model
        rollout, peers = spec.rollout, session.peers
        if spec.ahead and not rollout.partial and not engine.info.holds:
            raise ConfigError(f"rollout.partial=False: the engine {rollout.engine} has no hold(); set it to True")
        if spec.algorithm.sampled_support and not engine.info.support:
            raise ConfigError(f"algorithm.sampled_support: the engine {rollout.engine} does not return its support "
                              "(EngineInfo.support); set rollout.engine=jax")
        if spec.algorithm.routes == "sampled" and not engine.info.routes:
            raise ConfigError(f"algorithm.routes=sampled: the engine {rollout.engine} does not return the experts of "
                              "its tokens (EngineInfo.routes); set scored or own, or rollout.engine=jax")
        scorer = self.scorer = BackgroundScorer(self._run_rewards_early) if spec.ahead else None
        self.queue = RolloutQueue(
            engine, per_step=per_step or spec.data.prompts_per_step, max_staleness=rollout.max_staleness,
            sync_every=rollout.sync_every, partial=rollout.partial, steps=steps, draw=stream.take,
            requests=self._requests, mine=lambda position: owner_process(position, peers.count) == peers.index,
            finished=scorer.add if scorer is not None else lambda group: None)
        self.poll, self.release = self.queue.poll, self.queue.release
        how = sampling_params(rollout, rollout.max_new_tokens, rollout.stop, rollout.stop_token_ids, rollout.keep_stop,
                              rollout.min_new_tokens)
        self.sample_kinds = [(SAMPLES, rollout.group_size, how)]  # name, samples per prompt, sampling
        if spec.algorithm.advantage_mean == "greedy":
            self.sample_kinds.append((GREEDY, 1, dataclasses.replace(how, temperature=0.0)))
        numbers = adapter_table.numbers(spec, "sources")
        self._adapter = (lambda example: numbers[example.source]) if numbers else None
        longest = rollout.max_new_tokens
        if spec.episodes:
            longest = spec.env.max_sampled_tokens or longest * spec.env.max_turns
        buffer = spec.reward.overlong_buffer or round(spec.algorithm.overlong_buffer_fraction * longest)
        # total rewards [N] with the length penalties of reward.* and algorithm.overlong_*
        self._shape = functools.partial(jaxrl_rewards.shape, reward=spec.reward, max_new_tokens=longest, buffer=buffer)
        self._payloads: list[bytes] = []

    @classmethod
    def open(cls, s, job, **changes) -> Rollouts:
        """Opens the rollouts of a job (run.setup.open_run); the session closes them at its end.

        changes: arguments of Rollouts that replace the job's."""
        own = {"engine": job.engine, "stream": s.stream, "rewards": job.rewards, "decode": job.decode,
               "reward_model": job.reward_model, "steps": s.total_steps, "images": job.images}
        return s.close_at_end(cls(job.config, s, **own | changes))

    def close(self) -> None:
        """Stops running rewards in the background."""
        if self.scorer is not None:
            self.scorer.close()

    # ---- a step

    def next(self, progress) -> Batch | None:
        """Samples the next batch and runs its rewards; returns None if a stop was requested.

        Args:
          progress: run.session.Progress of the run, which this does not change.

        Raises:
          RunStopped: no request was completed, too many rewards or episodes failed, or another process raised
            TimeoutError.
          TimeoutError: completions are missing after rollout.timeout_seconds."""
        mode, limit = self.spec.algorithm.dynamic_sampling, self.spec.algorithm.dynamic_sampling_rounds
        rounds, cursor, wanted, lack = [], progress.cursor, 0, 0
        while not rounds or (mode == "refill" and len(rounds) < limit and lack > 0):
            try:
                with self.session.phase("rollout"):
                    self.session.fault("rollout")
                    groups, cursor = self.queue.request_groups(progress.step, cursor, lack)
            except Interrupted:
                return None
            if rounds and not groups:
                break
            mine = [g for g in groups if g.mine]
            own = self.session.together("the completions", lambda mine=mine: self._complete(mine, progress.step))
            if own is None:
                return None
            rounds.append(own if self.session.peers.count == 1 else self._gather_round(own, groups))
            wanted = wanted or len(groups)
            lack = wanted - sum(sum(one.keep.values()) for one in rounds)
        return self._assemble(rounds, wanted, cursor, progress.step)

    def _requests(self, prompts, step: int) -> list:
        """Returns the requests of a step's prompts: group_size each, then one greedy request each if used."""
        seed = self.spec.run.seed
        return [request for kind, samples, how in self.sample_kinds for request in make_requests(
            self.stream.unless_interrupted(prompts), samples, how, seed, kind, step, self._adapter, self.images)]

    def _complete(self, groups, step: int) -> Round | None:
        """Waits for groups of this process and runs their rewards; None if a stop was requested."""
        session, filters = self.session, self.spec.algorithm.dynamic_sampling != "off"
        with session.phase("rollout"):
            if not self.queue.wait(groups, self.spec.rollout.timeout_seconds, session.interrupted):
                return None
        with session.phase("reward"):
            session.fault("reward")
            if self.scorer is not None and not self.scorer.wait(groups, session.interrupted):
                return None
            rows, greedy, keep = [], {}, {}
            failed = self._failed(groups, step) if self.spec.episodes else {}
            for kind in (GREEDY, SAMPLES):
                done = completed(groups, kind)
                if not done:
                    continue
                traj, texts, items = self._items(done)
                recorded = [None] * len(done)
                if step + 1 in session.telemetry.earlier_rollouts:  # of an interrupted attempt at this step
                    earlier, examples = session.telemetry.read_rollouts(step + 1), [g.example for _, _, g in done]
                    recorded = recorded_outcomes(earlier, traj, examples, texts, self.rewards.key())
                recorded = [g.outcomes.get(q.id, old) for (q, _, g), old in zip(done, recorded, strict=True)]
                result = self._run_rewards(done, items, recorded=recorded, stop=session.interrupted)
                if result is None:
                    return None
                if kind == GREEDY:
                    greedy = dict(zip(traj.group.tolist(), self._shape(result, traj.total(), traj.finish == 1).tolist(),
                                      strict=True))
                    continue
                rows = [(*row, *more) for row, *more in zip(done, texts, result.records(), strict=True)]
                keep = self._has_signal(traj, texts, result) if filters else dict.fromkeys(traj.group.tolist(), True)
        return Round(rows, greedy, keep, len(groups) * self.spec.rollout.group_size, failed)

    def _has_signal(self, traj, texts, result) -> dict[int, bool]:
        """Returns group -> whether it has signal by algorithm.keep_group."""
        criterion = self.spec.algorithm.keep_group
        criterion = imported(criterion) if ":" in criterion else criterion
        return {int(g): has_signal(criterion, traj, texts, result, traj.group == g) for g in np.unique(traj.group)}

    def _failed(self, groups, step: int) -> dict[str, int]:
        """Counts the absent episodes of these groups by cause. Raises RunStopped if they are too many."""
        outcomes = [r.outcome for g in groups for r in g.results.values()]
        check_failures(self.spec.env, step + 1, outcomes, len(outcomes))
        return dict(Counter(o.cause for o in outcomes if o is not None and o.cause))

    def _run_rewards(self, rows, items, **how) -> Any:
        """Runs the rewards of rows (request, result, group, ...). how: arguments of RewardPool.score."""
        score = self.rewards.score if self.fork is None else functools.partial(self.fork.score, self.rewards)
        result = score(items, **how)
        if self.spec.episodes:
            result = add_episode_rewards(result, [row[1].outcome for row in rows], self.spec.env)
        return result

    def _items(self, rows, texts=None):
        """Returns (Trajectories, texts, reward items) of rows (request, result, group)."""
        requests, results, groups = zip(*rows, strict=True)
        traj = collect(requests, results, self.spec.longest, self.images)
        examples, prefix = [g.example for g in groups], self.spec.data.response_prefix
        return traj, *reward_items(traj, examples, self.decode, prefix, texts, self.images)

    def _run_rewards_early(self, groups: list[PromptGroup]) -> None:
        """Runs the rewards of finished groups during the rollout, samples and greedy completions separately."""
        for kind in (SAMPLES, GREEDY):
            rows = [(q, r, g) for q, r, g in completed(groups, kind) if q.id not in g.outcomes]
            if rows:
                records = self._run_rewards(rows, self._items(rows)[2], part=True).records()
                for (request, _, group), record in zip(rows, records, strict=True):
                    group.outcomes = group.outcomes | {request.id: record}

    def _gather_round(self, own: Round, groups) -> Round:
        """Merges the rounds of all processes. Collective."""
        meta = [list(own.greedy.items()), list(own.keep.items()), own.asked, own.failed]
        results, more = [row[1] for row in own.rows], [row[3:] for row in own.rows]
        known, metas = exchange_results(self.session, "the completions' sizes", results, more, meta)
        greedy, keep = (dict(pair for meta in metas for pair in meta[i]) for i in (0, 1))
        rows = [(q, known[q.id][0], g, *known[q.id][1:]) for g in groups for q in g.requests if q.id in known]
        keep = {g.position: keep[g.position] for g in groups if g.position in keep}
        failed = sum((Counter(meta[3]) for meta in metas), Counter())
        return Round(rows, greedy, keep, sum(meta[2] for meta in metas), dict(failed))

    def _assemble(self, rounds: list[Round], wanted: int, cursor: int, step: int) -> Batch:
        """Builds one batch of at most `wanted` groups: those with signal first (without refill: all), in data order."""
        c, mode = self.spec, self.spec.algorithm.dynamic_sampling
        keep = {g: k for one in rounds for g, k in one.keep.items()}
        chosen, metrics, requested = set(keep), {}, sum(one.asked for one in rounds)
        if mode == "refill":
            chosen = self._choose(keep, wanted, len(rounds), step)
            metrics = {"rollout/rounds": float(len(rounds)),
                       "rollout/discarded_fraction": 1 - len(chosen) / max(len(keep), 1)}
            requested = len(chosen) * c.rollout.group_size
        rows = [row for one in rounds for row in one.rows if row[2].position in chosen]
        if not rows:
            raise RunStopped(f"rollout: all {requested} requests of step {step + 1} failed; the log has their errors")
        traj, texts, items = self._items([row[:3] for row in rows], [row[3] for row in rows])
        result = self._run_rewards(rows, items, recorded=[row[4] for row in rows], stop=self.session.interrupted)
        if self.reward_model is not None:
            with self.session.phase("reward"):
                result = self.reward_model.add_scores(traj, [row[2].example for row in rows], texts, result)
        if c.episodes:
            failed = sum((Counter(one.failed) for one in rounds), Counter())
            metrics |= episode_metrics(traj, [row[1].outcome for row in rows], failed, requested)
        shaped, addresses = self._shape(result, traj.total(), traj.finish == 1), None
        if c.record.every:
            addresses = np.array([jaxrl_rewards.item_hash(item) for item in items], np.uint64)
        passed = {}
        if getattr(self.stream, "pass_rates", None) is not None:
            passed = pass_rates([row for one in rounds for row in one.rows], c)
        greedy = {g: s for one in rounds for g, s in one.greedy.items()}
        baseline = np.array([greedy.get(int(g), np.nan) for g in traj.group])
        dropped = np.array([mode != "off" and not keep[int(g)] for g in traj.group])
        if mode != "off":
            metrics["rollout/masked_fraction"] = float(dropped.mean())
        stale = None
        if c.ahead:
            stale = np.where(traj.loss_mask, staleness(step, traj.versions, c.rollout.sync_every), 0)
        scores, normalized = shaped, (c.reward.norm_mean, c.reward.norm_std)
        if normalized != ("none", "none"):
            scores = normalize_scores(shaped, traj.group, *normalized)
        return Batch(traj, [row[2] for row in rows], texts, result, shaped, scores,
                     baseline if c.algorithm.advantage_mean == "greedy" else None, dropped,
                     None if stale is None else stale.astype(np.float32), requested, cursor,
                     metrics, passed, addresses)

    def _choose(self, keep: dict[int, bool], wanted: int, rounds: int, step: int) -> set[int]:
        """Returns the `wanted` groups that a refilled step uses, those with signal first; warns if they are too few.

        keep: group -> whether it has signal, in data order."""
        good = [g for g in keep if keep[g]]
        if len(good) < wanted:
            log.warning("step %d: %d of %d groups have signal after %d rounds "
                        "(algorithm.dynamic_sampling_rounds=%d); the others have no gradient", step + 1, len(good),
                        wanted, rounds, self.spec.algorithm.dynamic_sampling_rounds)
        return set((good + [g for g in keep if not keep[g]])[:wanted])

    def publish(self, params, version: int) -> None:
        """Hands the weights after `version` completed steps to the engine.

        Without rollout.partial it first waits for completions that have started. Raises TimeoutError if that takes more
        than rollout.timeout_seconds. params: the model's parameter tree.
        """
        self.queue.publish(params, version, self.spec.rollout.timeout_seconds, self.session.interrupted)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns metrics of a released batch; {} where nothing is sampled ahead.

        staleness/mean and staleness/max are over its loss tokens; rollout/ahead_groups counts the groups sampled
        ahead, rollout/ahead_complete those of this process that are complete."""
        if batch.staleness is None:
            return {}
        own, groups = batch.staleness[batch.traj.loss_mask], self.queue.groups.values()
        return {"staleness/mean": float(own.mean()), "staleness/max": float(own.max()),
                "rollout/ahead_groups": float(len(groups)),
                "rollout/ahead_complete": float(sum(g.done for g in groups if g.mine))}

    # ---- a part of checkpoints

    def abstract(self):
        """Returns the shapes of the arrays that the resumed checkpoint holds: number of a process -> [bytes] uint8."""
        sizes = (self.session.resumed_part(self.name) or {}).get("sizes", ())
        return {str(i): np.zeros(n, np.uint8) for i, n in enumerate(sizes)}

    def start(self, arrays, host: dict | None) -> None:
        """Restores unused completions and their rewards from a checkpoint; starts empty for host=None. Rewards that
        other code or options computed are computed again.

        arrays, host: as `arrays` and `host` return them."""
        if host:
            parts = [results_from_bytes(arrays[str(i)].tobytes()) for i in range(len(host["sizes"]))]
            by = self.rewards.key()  # rewards computed by other code or options are computed again
            outcomes = {name: record for _, meta in parts for name, record in meta.items() if record.get("by") == by}
            results = [result for results, _ in parts for result in results]
            progress = self.session.progress
            self.queue.restore(host["state"], results, progress.step, progress.cursor, outcomes)

    def host(self) -> dict | None:
        """Returns the queue's state for a checkpoint, or None if it is empty. Collective: completions are gathered."""
        state, results = self.queue.state()
        if not state["groups"]:
            return None
        outcomes = {name: record for g in self.queue.groups.values() for name, record in g.outcomes.items()}
        what = f"{self.session.collective_tag}: completions ahead, for a checkpoint"
        self._payloads = gather(self.session.peers, what, results_to_bytes(results, outcomes))
        return {"state": state, "sizes": [len(p) for p in self._payloads]}

    def arrays(self):
        """Returns the arrays that belong to the last `host`: number of a process -> its encoded completions, [bytes]
        uint8."""
        return {str(i): np.frombuffer(p, np.uint8) for i, p in enumerate(self._payloads)}


def pass_rates(rows, config) -> dict[int, float]:
    """Returns position of a group -> share of its completions whose accuracy reward reaches reward.pass_mark.

    That reward is eval.accuracy_from, or the row's first function where that one does not apply (accuracy_source).
    Completions to which it gave no score are not counted, groups of such completions left out.

    rows: of Round. config: of the job.
    """
    values: dict[int, list[float]] = {}
    for _, _, group, _, record in rows:
        parts = record["parts"]
        value = parts.get(accuracy_source(config, parts))
        if value is not None:
            values.setdefault(group.position, []).append(float(value >= config.reward.pass_mark))
    return {position: float(np.mean(passed)) for position, passed in values.items()}


def completed(groups, kind: str) -> list:
    """Returns [(Request, Result, PromptGroup)] of requests with a completion.

    Failed generations are dropped, not scored as wrong. groups: PromptGroup, done. kind: SAMPLES or GREEDY.
    """
    requested = [(q, g.results[q.id], g) for g in groups for q in g.requests if q.key.stream == kind]
    return [row for row in requested if row[1].finish != "abort"]


def has_signal(criterion, traj, texts, result, members) -> bool:
    """Returns whether a prompt group has a gradient.

    Args:
      criterion: a function of a dict (scores, rewards, completions, lengths, truncated of the group) that returns a
        bool; or the name of a reward; or "" or None. Without a function, a group has signal if at least two of the raw
        scores (of that reward, else the total) are present and the largest exceeds the smallest by 1e-8 or more.
      traj, texts, result: Trajectories, completion texts and RewardResult of N completions.
      members: [N] bool, the group's completions among them."""
    where = np.flatnonzero(members)
    if callable(criterion):
        return bool(criterion({
            "scores": result.total[where], "rewards": {name: part[where] for name, part in result.parts.items()},
            "completions": [texts[i] for i in where], "lengths": traj.total()[where],
            "truncated": traj.finish[where] == 1}))
    scores = (result.parts[criterion] if criterion else result.total)[where]
    scores = scores[np.isfinite(scores)]
    return len(scores) > 1 and bool(scores.max() - scores.min() >= EQUAL)


def normalize_scores(scores, groups, mean: str, std: str) -> np.ndarray:
    """Returns scores [N] normalised over their groups or the batch, float64; NaN (absent) stays NaN.

    (score - mean) / (standard deviation + 1e-6), as algorithms.group_advantages computes it; "none" leaves a part out,
    and scores that are all equal are not divided.

    Args:
      scores: [N] float64, NaN = absent: left out of both statistics. groups: [N] int group ids.
      mean, std: reward.norm_mean and norm_std, names of algorithms.group_advantages."""
    out, _ = group_advantages(scores, groups, mean=mean, std=std)
    return np.where(np.isfinite(scores), out, np.nan)


def staleness_buckets(rollout) -> tuple[int, ...]:
    """Returns the first values of the staleness buckets in metrics: 0, 1, 2, 4, 8 ... up to rollout.max_staleness."""
    return (0, *(2**i for i in range(rollout.max_staleness.bit_length())))
