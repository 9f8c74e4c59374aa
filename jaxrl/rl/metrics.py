"""Metrics of a step: of its completions, advantages and layout, and means over its optimizer steps.

Called by rl.step and recipes.distill, on the host. Losses compute their own metrics (jaxrl.training).
"""

from __future__ import annotations

import itertools
import logging

import numpy as np

from jaxrl.errors import RunStopped

log = logging.getLogger("jaxrl")


def accuracy_rewards(spec, result):
    """Returns the raw values, float64 [N], of the reward that defines each row's accuracy, NaN where it is absent.

    That reward is `accuracy_source` of the functions that apply to the row. result: RewardResult with at least one
    reward.
    """
    names = [accuracy_source(spec, own or result.parts) for own in result.outcomes]
    return np.array([result.parts[name][i] for i, name in enumerate(names)])


def accuracy_source(spec, names) -> str | None:
    """Returns eval.accuracy_from if it is among `names`, the rewards that apply to a row, else the first of them."""
    return spec.eval.accuracy_from if spec.eval.accuracy_from in names else next(iter(names), None)


# Parts of gap/mean over a bucket of tokens, and the bucket's share of the tokens, by which they become its means.
BUCKETS = {"gap/stale_": "staleness/", "gap/images": "rollout/image_fraction", "gap/text": "rollout/text_fraction"}


def mean_metrics(steps: list[dict]) -> dict[str, float]:
    """Averages the metrics of several optimizer steps by name, each over the steps that have it; takes the maximum of
    names that end in /max or _max.

    Parts of gap/mean over a bucket of tokens (BUCKETS) become means over the bucket; empty buckets are left out, and so
    is rollout/text_fraction. {} without steps."""
    if not steps:
        return {}
    names = dict.fromkeys(k for s in steps for k in s)  # an adapter without rows in a minibatch has no metrics of it
    over = lambda k: np.max if k.endswith(("/max", "_max")) else np.mean  # noqa: E731
    out = {k: float(over(k)([s[k] for s in steps if k in s])) for k in names}
    for name, (part, share) in itertools.product(names, BUCKETS.items()):
        if part in name:
            value, tokens = out.pop(name), out[name.replace(part, share)]
            out |= {name: value / tokens} if tokens else {}
    return {k: v for k, v in out.items() if not k.endswith(BUCKETS["gap/text"])}  # 1 less rollout/image_fraction


def check_logprob_gap(limits, step: int, metrics: dict[str, float]) -> None:
    """Warns, or raises RunStopped, if the mean log-prob gap between engine and trainer exceeds a limit.

    Args:
      limits: algorithm.mismatch, whose `warn` and `stop` are in nats per token; 0 = no limit.
      metrics: of the step; the gap is that of completions of staleness 0, or where there are none `gap/mean`, which
        includes what the policy has learnt since. A gap that is not finite exceeds every limit; without a gap (a step
        that trains no policy) nothing is checked.
    """
    gap = metrics.get("gap/stale_0", metrics.get("gap/mean", 0.0))
    since = " (all of earlier weights: this includes what the policy has learnt since)"
    found = (f"step {step}: the engine's log-probs are {gap:.3g} nats per token away from the trainer's"
             + since * ("staleness/0" in metrics and "gap/stale_0" not in metrics))
    if limits.stop and not gap <= limits.stop:
        raise RunStopped(f"{found}, more than algorithm.mismatch.stop={limits.stop:g}; find the cause with "
                         "--config.run.mode=parity")
    if limits.warn and not gap <= limits.warn:
        log.warning("%s, more than algorithm.mismatch.warn=%g; find the cause with --config.run.mode=parity", found,
                    limits.warn)


def rollout_metrics(batch, zero_signal, per_completion, layout) -> dict[str, float]:
    """Returns the metrics of one batch of N completions: rewards, lengths, absences, packing, per source.

    reward/mean and reward/std (ddof 0; 0 if all are absent) are of shaped rewards, those of single rewards raw; absent
    ones are left out. Lengths are in loss tokens. rollout/absent_fraction, without a score, is over batch.asked, the
    truncated and zero-signal fractions over N. The batch's metrics are added as they are.

    Args:
      batch: rl.rollouts.Batch. zero_signal: [N] bool, completions of groups without signal (advantages.Advantages).
      per_completion: [N] float64, mean advantages. layout: training.Layout of the update.
    """
    traj, scores = batch.traj, batch.shaped
    lengths = traj.total()
    known = scores[np.isfinite(scores)]
    out = {
        "reward/mean": float(known.mean()) if len(known) else 0.0,
        "reward/std": float(known.std()) if len(known) else 0.0,
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/min": float(lengths.min()),
        "rollout/truncated_fraction": float((traj.finish == 1).mean()),
        "rollout/zero_signal_fraction": float(zero_signal.mean()),
        "rollout/absent_fraction": float(1 - len(known) / batch.asked),
        "rollout/tokens": float(lengths.sum()),
        "rollout/prompt_tokens": float(len(traj.tokens) - lengths.sum()),
        "rollout/kept_mass_mean": float(np.exp(traj.columns["kept"][traj.loss_mask]).mean()),
        "advantage/abs_mean": float(np.abs(per_completion).mean()),
        **layout.metrics(),
    }
    for name, values in batch.result.parts.items():
        if np.isfinite(values).any():
            out[f"reward/{name}"] = float(np.nanmean(values))
    sources = [getattr(g.example, "source", "") for g in batch.groups]
    if any(sources):
        out |= source_metrics(batch, np.array(sources))
    return out | {k if "/" in k else f"reward/{k}": v for k, v in batch.result.metrics.items()} | batch.metrics


def source_metrics(batch, sources) -> dict[str, float]:
    """Returns source/<name>/length (tokens), source/<name>/reward and source/<name>/reward/<part>: means per data
    source.

    Rewards are shaped for the total and raw for the parts; absent ones are left out. sources: [N] names, "" = none."""
    out, lengths, scores = {}, batch.traj.total(), batch.shaped
    for name in sorted(set(sources.tolist()) - {""}):
        mine = sources == name
        out[f"source/{name}/length"] = float(lengths[mine].mean())
        if np.isfinite(scores[mine]).any():
            out[f"source/{name}/reward"] = float(np.nanmean(scores[mine]))
        for part, values in batch.result.parts.items():
            if np.isfinite(values[mine]).any():
                out[f"source/{name}/reward/{part}"] = float(np.nanmean(values[mine]))
    return out


def histograms(batch, columns, per_completion) -> dict[str, np.ndarray]:
    """Returns name -> values of the histograms of one batch: length (loss tokens), reward (shaped, where present) and
    advantage per completion; log_ratio (old less behaviour, nats) and staleness per loss token, where they are columns.

    Current-policy log-probs have no histogram: they stay on the device.

    Args:
      batch: rl.rollouts.Batch. columns: [T] by name, as `prepare` makes them.
      per_completion: [N] float64, mean advantages."""
    traj, scores = batch.traj, batch.shaped
    out = {"length": traj.total(), "reward": scores[np.isfinite(scores)], "advantage": per_completion}
    if "old" in columns:
        out["log_ratio"] = (columns["old"] - columns["behaviour"])[traj.loss_mask]
    if "staleness" in columns:
        out["staleness"] = columns["staleness"][traj.loss_mask]
    return out
