"""Episodes in a run (env.*): opened, scored, counted and shown. How they are played: rollout.episodes."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from jaxrl.errors import RunStopped
from jaxrl.rewards.items import RewardResult, reward_metrics

PART = "env"  # the reward that an episode itself gives


def with_outcomes(result: RewardResult | None, outcomes, env) -> RewardResult | None:
    """The rewards, and before them what the episodes gave: the part `env`, with weight 1, and as its metrics their
    other rewards and notes. None where the pool was stopped, the same where episodes give nothing (env.tools).

    outcomes: [N] protocol.Outcome, or None of what is no episode.
    """
    gives = env.function or env.program or env.malformed_penalty
    if result is None or not gives:
        return result
    values = np.array([np.nan if o is None or o.value is None else o.value for o in outcomes], np.float64)
    known = np.isfinite(values)
    has = known | np.isfinite(result.total)
    total = np.where(has, np.where(known, values, 0.0) + np.nan_to_num(result.total), np.nan)
    told = [{PART: "ok" if ok else "none"} for ok in known]
    more = [{PART: {**o.rewards, **o.notes}} if o is not None and (o.rewards or o.notes) else {} for o in outcomes]
    said = [a | b for a, b in zip(told, result.outcomes, strict=True)]
    noted = [a | b for a, b in zip(more, result.item_metrics, strict=True)]
    metrics = reward_metrics(total, said, noted)
    return RewardResult(total, {PART: values} | result.parts, said, noted, metrics, result.by)


def check_failures(env, step: int, outcomes, asked: int) -> None:
    """Raises RunStopped where too many of a step's episodes failed by their environment's fault. outcomes: of `asked`
    episodes, None where one is no episode."""
    failed = [o for o in outcomes if o is not None and o.cause]
    if len(failed) <= env.max_failed_fraction * asked:
        return
    (cause, count), *_ = Counter(o.cause for o in failed).most_common(1)
    detail = next(o.detail for o in failed if o.cause == cause)
    raise RunStopped(f"step {step}: the environment failed in {len(failed)} of {asked} episodes, after env.retries="
                     f"{env.retries} further tries of each, more than env.max_failed_fraction="
                     f"{env.max_failed_fraction:g} allows; {count} times: {cause}. None of them was learnt from. Mend "
                     f"the environment, and the run goes on from its newest checkpoint{detail and chr(10) + detail}")


def episode_metrics(traj, outcomes, failed: dict[str, int], asked: int) -> dict[str, float]:
    """What a step's episodes were like. failed: cause -> episodes that are absent for it."""
    turns = np.maximum.reduceat(traj.columns["turn"], traj.spans[:-1]) + 1 if "turn" in traj.columns else np.ones(1)
    sequences = np.bincount(traj.trajectory)
    prompts = traj.prompt_lengths[traj.first].sum()
    observed = len(traj.tokens) - traj.total().sum() - prompts
    count = len(outcomes)
    out = {"env/turns": float(turns.mean()), "env/turns_max": float(turns.max()),
           "env/segments": float(sequences.mean()), "env/observation_tokens": float(observed / count),
           "env/absent_fraction": sum(failed.values()) / asked}
    for name in ("calls", "malformed", "late"):
        out[f"env/{name}"] = float(np.mean([o.counts.get(name, 0) for o in outcomes]))
    for name in ("engine", "environment"):
        out[f"perf/env_{name}_seconds"] = float(np.mean([o.counts.get(f"{name}_seconds", 0) for o in outcomes]))
    for cause, number in failed.items():
        out[f"env/absent/{re.sub('[^A-Za-z0-9]+', '_', cause)[:40].strip('_')}"] = number / asked
    return out


def conversations(traj, tokenizer) -> list[list[dict]]:
    """Of each trajectory what stands in it, as a person may read it: pieces {text, trained} in order, those that were
    sampled with their turn's number and reward; `opens` where a sequence begins."""
    mask, opens = traj.loss_mask, np.zeros(len(traj.tokens) + 1, bool)
    opens[traj.offsets] = True
    turn, reward = (traj.columns.get(name, np.zeros(len(mask))) for name in ("turn", "reward"))
    changes = np.flatnonzero(opens[1:-1] | (mask[1:] != mask[:-1]) | (mask[1:] & (turn[1:] != turn[:-1]))) + 1
    edges = np.unique(np.concatenate([changes, traj.offsets]))
    texts = tokenizer.batch_decode([traj.tokens[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    out = [[] for _ in range(traj.num_trajectories)]
    for a, b, text in zip(edges, edges[1:], texts, strict=False):
        whose = int(np.searchsorted(traj.spans, a, side="right")) - 1
        piece = {"text": text, "trained": bool(mask[a])}
        if mask[a]:
            piece |= {"turn": int(turn[a]), "reward": float(reward[a:b].sum())}
        out[whose].append(piece | ({"opens": True} if opens[a] else {}))
    return out
