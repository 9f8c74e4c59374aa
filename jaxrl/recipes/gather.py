"""One step's batch: prompts -> answers -> scores, again and again where dynamic sampling wants groups with signal.

Nothing here counts until the step is done: the cursor that comes back is the run's only when its update has been made.

With several processes each samples and scores the groups it owns; then all hold all answers, in the order of the prompts.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from jaxrl import rewards as rewards_room
from jaxrl.algorithms.advantages import EQUAL, group_advantages
from jaxrl.data import Interrupted
from jaxrl.errors import RunStopped
from jaxrl.imports import imported
from jaxrl.processes.exchange import gather as gather_bytes
from jaxrl.recipes.supply import samples
from jaxrl.recipes.trajectories import (
    collect,
    completions,
    recorded_outcomes,
    results_from_bytes,
    results_to_bytes,
    reward_items,
)
from jaxrl.spec import longest_sequence

log = logging.getLogger("jaxrl")


class Batch(NamedTuple):
    """What a step learns from. N sequences; `dropped` marks those of groups that dynamic sampling masks."""

    traj: Any
    groups: list  # of each sequence
    texts: list[str]
    result: Any  # RewardResult
    shaped: np.ndarray  # [N] float64, NaN = absent
    scores: np.ndarray  # the same, normalised as reward.norm_* say
    baseline: np.ndarray | None  # [N] score of the greedy answer to the sequence's prompt
    dropped: np.ndarray  # [N] bool
    asked: int
    cursor: int
    metrics: dict[str, float]


class Answered(NamedTuple):
    """Answers to some prompts, each with its outcome as a record of RewardResult.records()."""

    requests: list
    results: list
    groups: list  # of each request
    texts: list
    records: list
    greedy: dict[int, float]  # group -> score of its greedy answer
    keep: dict[int, bool]  # group -> whether it has signal
    asked: int


def gather(r, values: dict) -> Batch | None:
    """The next batch, or None when a stop was asked for. `values`: the resolved algorithm options."""
    try:
        return gathered(r, values)
    except Interrupted:
        return None


def gathered(r, values: dict) -> Batch | None:
    mode, limit = values["dynamic_sampling"], r.config.algorithm.dynamic_sampling_rounds
    groups, cursor = take(r, r.cursor)
    got = ask(r, groups, values)
    rounds, wanted = [got], len(groups)
    while mode == "refill" and got is not None and len(rounds) < limit and (lack := wanted - kept(rounds)) > 0:
        groups, cursor = take(r, cursor, lack)
        if not groups:
            break
        got = ask(r, groups, values)
        rounds.append(got)
    if got is None:
        return None
    return assemble(r, rounds, values, wanted, cursor)


def take(r, cursor: int, count: int = 0):
    """(`count` groups from `cursor` on, asked for on this process or another; the next cursor). 0 = a step's groups."""
    with r.phase("rollout"):
        r.fault("rollout")
        return r.supply.take(cursor, count)


def kept(rounds) -> int:
    return sum(sum(one.keep.values()) for one in rounds)


def ask(r, groups, values: dict) -> Answered | None:
    """The answers to groups and their outcomes, on every process; None when a stop was asked for."""
    own = r.together("the answers", lambda: answer(r, [g for g in groups if g.mine], values))
    return own if own is None or r.peers.count == 1 else shared(r, own, groups)


def shared(r, own: Answered, groups) -> Answered:
    """What every process answered, as if this one had."""
    meta = {"texts": own.texts, "records": own.records, "greedy": list(own.greedy.items()), "keep": list(own.keep.items()),
            "asked": own.asked}
    parts = [results_from_bytes(data) for data in gather_bytes(r.peers, f"{r.place}: the answers' sizes",
                                                               results_to_bytes(own.results, meta))]
    found = {result.id: (result, text, record) for results, m in parts
             for result, text, record in zip(results, m["texts"], m["records"], strict=True)}
    rows = [(q, g, *found[q.id]) for g in groups for q in samples(g) if q.id in found]
    requests, of, results, texts, records = ([row[i] for row in rows] for i in range(5))
    keep = {g: k for _, m in parts for g, k in m["keep"]}
    return Answered(requests, results, of, texts, records, {g: s for _, m in parts for g, s in m["greedy"]},
                    {g.position: keep[g.position] for g in groups if g.position in keep}, sum(m["asked"] for _, m in parts))


def answer(r, groups, values: dict) -> Answered | None:
    """Waits for the answers to groups of this process and scores them; None when a stop was asked for."""
    c = r.config
    with r.phase("rollout"):
        if not r.supply.wait(groups):
            return None
    with r.phase("reward"):
        r.fault("reward")
        if not r.supply.scored(groups):
            return None
        baseline = {}
        best, results, of = present(groups, greedy=True)
        if best:
            traj, _, result = score(r, best, results, of)
            if result is None:
                return None
            baseline = dict(zip(traj.group.tolist(), shaped(r, values, traj, result).tolist(), strict=True))
        asked = len(groups) * c.rollout.group_size
        requests, results, of = present(groups)
        if not requests:
            return Answered([], [], [], [], [], baseline, {}, asked)
        traj, texts, result = score(r, requests, results, of)
        if result is None:
            return None
        asks = c.algorithm.keep_group
        own = imported(asks) if ":" in asks else None
        keep = {int(g): has_signal(own or asks, traj, texts, result, traj.group == g) for g in np.unique(traj.group)}
    return Answered(requests, results, of, texts, result.records(), baseline, keep, asked)


def present(groups, greedy: bool = False):
    """(requests, results, group of each) of what was answered: a failed generation is absent, it is not a wrong answer."""
    there = [(q, g.results[q.id], g) for g in groups for q in samples(g, greedy) if g.results[q.id].finish != "abort"]
    return [[row[i] for row in there] for i in range(3)]


def score(r, requests, results, groups, recorded=None, texts=None):
    """(trajectories, texts, RewardResult, or None when a stop was asked for). What is known already, or was recorded by an earlier
    try at this step, is not asked again. groups: that of each request."""
    traj = collect(requests, results, longest_sequence(r.config))
    texts = completions(traj, r.job.tokenizer) if texts is None else texts
    examples = [g.example for g in groups]
    if recorded is None:
        old = r.telemetry.read_rollouts(r.step + 1)
        earlier = recorded_outcomes(old, traj, examples, texts, r.rewards.key()) if old else [None] * len(requests)
        recorded = [g.outcomes.get(q.id, old) for q, g, old in zip(requests, groups, earlier, strict=True)]
    items = reward_items(traj, examples, texts, r.config.data.response_prefix)
    return traj, texts, r.rewards.score(items, recorded=recorded, stop=r.interrupted)


def shaped(r, values: dict, traj, result) -> np.ndarray:
    """Scores [N]: shaped as rewards.shape says."""
    c = r.config
    buffer = c.reward.overlong_buffer or round(values["overlong_buffer_fraction"] * c.rollout.max_new_tokens)
    return rewards_room.shape(result, traj.total(), traj.finish == 1, c.reward, c.rollout.max_new_tokens, buffer)


def normed(scores, groups, mean: str, std: str) -> np.ndarray:
    """reward.norm_mean and reward.norm_std; absent scores stay absent."""
    if mean == std == "none":
        return scores
    out, _ = group_advantages(scores, groups, mean=mean, std=std)
    return np.where(np.isfinite(scores), out, np.nan)


def has_signal(asks, traj, texts, result, members) -> bool:
    """Whether a group can teach something: its raw scores differ, or those of the reward named, or a user's function says so."""
    where = np.flatnonzero(members)
    if callable(asks):
        return bool(asks({
            "scores": result.total[where], "rewards": {name: part[where] for name, part in result.parts.items()},
            "completions": [texts[i] for i in where], "lengths": traj.total()[where], "truncated": traj.finish[where] == 1}))
    found = (result.parts[asks] if asks else result.total)[where]
    found = found[np.isfinite(found)]
    return len(found) > 1 and bool(found.max() - found.min() >= EQUAL)


def assemble(r, rounds: list[Answered], values: dict, wanted: int, cursor: int) -> Batch:
    """One batch of at most `wanted` groups: those with signal first (without refill: all of them), in the order asked."""
    mode, groups = values["dynamic_sampling"], [g for one in rounds for g in one.keep]
    keep = {g: k for one in rounds for g, k in one.keep.items()}
    taken = set(groups)
    if mode == "refill":
        good, rest = [g for g in groups if keep[g]], [g for g in groups if not keep[g]]
        taken = set((good + rest)[:wanted])
        if len(good) < wanted:
            log.warning("step %d: %d of %d groups have signal after %d rounds (algorithm.dynamic_sampling_rounds=%d); the others "
                        "teach nothing", r.step + 1, len(good), wanted, len(rounds), r.config.algorithm.dynamic_sampling_rounds)
    rows = [row for one in rounds for row in zip(one.requests, one.results, one.groups, one.records, one.texts, strict=True)
            if row[0].group in taken]
    if not rows:
        raise RunStopped("rollout: not one request of this step was answered; see the log for the engine's reasons")
    columns = [list(column) for column in zip(*rows, strict=True)]
    of = columns[2]
    traj, texts, result = score(r, *columns)
    c = r.config
    plain = shaped(r, values, traj, result)
    scores = normed(plain, traj.group, c.reward.norm_mean, c.reward.norm_std)
    best = {g: s for one in rounds for g, s in one.greedy.items()}
    baseline = np.array([best.get(int(g), np.nan) for g in traj.group]) if values["advantage_mean"] == "greedy" else None
    dropped = np.array([mode != "off" and not keep[int(g)] for g in traj.group])
    metrics = {}
    if mode == "refill":
        metrics = {"rollout/rounds": float(len(rounds)), "rollout/discarded_fraction": 1 - len(taken) / len(groups)}
    if mode != "off":
        metrics["rollout/masked_fraction"] = float(dropped.mean())
    asked = sum(one.asked for one in rounds) if mode != "refill" else len(taken) * c.rollout.group_size
    return Batch(traj, of, texts, result, plain, scores, baseline, dropped, asked, cursor, metrics)
