"""Rewards, metrics, failures and transcripts of a step's episodes (env.*).

`rl.rollouts` and `rl.evaluation` call it. rollout.episodes runs the episodes.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from jaxrl.errors import RunStopped
from jaxrl.rewards.items import RewardResult, reward_metrics

PART = "env"  # the reward that the environment gives


def add_episode_rewards(result: RewardResult | None, outcomes, env) -> RewardResult | None:
    """Adds the environments' own rewards to the rewards of N episodes: the part `env`, with weight 1.

    Args:
      result: of the reward functions; None if scoring was stopped.
      outcomes: [N] protocol.Outcome, None for a completion that is no episode. Their further rewards and notes become
        metrics of `env`.
      env: the group `env` of a Spec.

    Returns:
      A RewardResult; None if result is None; result unchanged if the environment gives no reward (env.tools alone).
    """
    gives = env.function or env.program or env.malformed_penalty
    if result is None or not gives:
        return result
    values = np.array([np.nan if o is None or o.value is None else o.value for o in outcomes], np.float64)
    known = np.isfinite(values)
    has = known | np.isfinite(result.total)
    total = np.where(has, np.where(known, values, 0.0) + np.nan_to_num(result.total), np.nan)
    states = [{PART: "ok" if ok else "none"} for ok in known]
    more = [{PART: {**o.rewards, **o.notes}} if o is not None and (o.rewards or o.notes) else {} for o in outcomes]
    merged = [a | b for a, b in zip(states, result.outcomes, strict=True)]
    noted = [a | b for a, b in zip(more, result.item_metrics, strict=True)]
    parts = {PART: values} | result.parts
    return RewardResult(total, parts, merged, noted, reward_metrics(total, merged, noted), result.by)


def check_failures(env, step: int, outcomes, requested: int) -> None:
    """Raises RunStopped if more than env.max_failed_fraction of a step's episodes failed because of their environment.

    Args:
      step: the step's number, for the message.
      outcomes: protocol.Outcome of episodes, None for a completion that is no episode.
      requested: number of episodes requested, of which the fraction is taken; in a step those of this process."""
    failed = [o for o in outcomes if o is not None and o.cause]
    if len(failed) <= env.max_failed_fraction * requested:
        return
    (cause, count), *_ = Counter(o.cause for o in failed).most_common(1)
    detail = next(o.detail for o in failed if o.cause == cause)
    raise RunStopped(f"step {step}: the environment failed in {len(failed)} of {requested} episodes, after env.retries="
                     f"{env.retries} further tries of each, more than env.max_failed_fraction="
                     f"{env.max_failed_fraction:g} allows; {count} times: {cause}. Failed episodes are not trained on. "
                     "Fix the environment and rerun the same command to resume from the latest checkpoint"
                     f"{detail and chr(10) + detail}")


def episode_metrics(traj, outcomes, failed: dict[str, int], requested: int) -> dict[str, float]:
    """Returns the metrics of a step's episodes: turns, segments (sequences), observed tokens, calls, seconds, absences.
    All but absences and env/turns_max are means over the episodes in traj. Observed tokens are those outside the loss
    and the first prompt, the prompts of later sequences among them.

    Args:
      traj: Trajectories of the episodes. outcomes: protocol.Outcome of each.
      failed: cause -> number of episodes that are absent because of it. requested: episodes requested, over which
        absences are shares."""
    turns = np.maximum.reduceat(traj.columns["turn"], traj.spans[:-1]) + 1 if "turn" in traj.columns else np.ones(1)
    sequences = np.bincount(traj.trajectory)
    prompts = traj.prompt_lengths[traj.first].sum()
    observed = len(traj.tokens) - traj.total().sum() - prompts
    count = len(outcomes)
    out = {"env/turns": float(turns.mean()), "env/turns_max": float(turns.max()),
           "env/segments": float(sequences.mean()), "env/observation_tokens": float(observed / count),
           "env/absent_fraction": sum(failed.values()) / requested}
    for name in ("calls", "malformed", "late"):
        out[f"env/{name}"] = float(np.mean([o.counts.get(name, 0) for o in outcomes]))
    for name in ("engine", "environment"):
        out[f"perf/env_{name}_seconds"] = float(np.mean([o.counts.get(f"{name}_seconds", 0) for o in outcomes]))
    for cause, number in failed.items():
        out[f"env/absent/{re.sub('[^A-Za-z0-9]+', '_', cause)[:40].strip('_')}"] = number / requested
    return out


def conversations(traj, tokenizer) -> list[list[dict]]:
    """Decodes each trajectory into pieces {text, trained} for people to read, in order; one list per trajectory.

    A sampled piece also has the number (`turn`, from 0) and `reward` of its turn; both are 0 without such columns.
    `opens` marks the beginning of a sequence.

    traj: Trajectories. tokenizer: decodes lists of token ids (batch_decode).
    """
    mask, opens = traj.loss_mask, np.zeros(len(traj.tokens) + 1, bool)
    opens[traj.offsets] = True
    turn, reward = (traj.columns.get(name, np.zeros(len(mask))) for name in ("turn", "reward"))
    changes = np.flatnonzero(opens[1:-1] | (mask[1:] != mask[:-1]) | (mask[1:] & (turn[1:] != turn[:-1]))) + 1
    edges = np.unique(np.concatenate([changes, traj.offsets]))
    texts = tokenizer.batch_decode([traj.tokens[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    out = [[] for _ in range(traj.num_trajectories)]
    for a, b, text in zip(edges, edges[1:], texts, strict=False):
        i = int(np.searchsorted(traj.spans, a, side="right")) - 1
        piece = {"text": text, "trained": bool(mask[a])}
        if mask[a]:
            piece |= {"turn": int(turn[a]), "reward": float(reward[a:b].sum())}
        out[i].append(piece | ({"opens": True} if opens[a] else {}))
    return out
