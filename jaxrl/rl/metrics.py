"""Numbers that a step reports: of its completions, advantages and layout, and means over its optimizer steps."""

from __future__ import annotations

import logging

import numpy as np

from jaxrl.errors import RunStopped

log = logging.getLogger("jaxrl")


def judged(c, result):
    """[N] raw values of the reward whose pass mark is accuracy; of the first one where that is a reward of evaluation
    only."""
    return result.parts.get(c.eval.accuracy_from, next(iter(result.parts.values())))


def averaged(steps: list[dict]) -> dict[str, float]:
    if not steps:
        return {}
    names = dict.fromkeys(k for s in steps for k in s)  # an adapter without rows in a minibatch says nothing of it
    over = lambda k: np.max if k.endswith(("/max", "_max")) else np.mean  # noqa: E731
    return {k: float(over(k)([s[k] for s in steps if k in s])) for k in names}


def check_gap(limits, step: int, metrics: dict[str, float]) -> None:
    """Warns, or ends the run, where the sampler's log-probs are too far from the trainer's on average."""
    of = "gap/stale_0" if "staleness/0" in metrics else "gap/mean"  # what is older differs by what was learnt since
    gap = metrics.get(of, 0.0)
    if limits.stop and gap > limits.stop:
        raise RunStopped(f"step {step}: the sampler's log-probs are {gap:.3g} nats per token away from the trainer's, "
                         f"more than algorithm.mismatch.stop={limits.stop:g}; --config.run.mode=parity looks for the "
                         "cause")
    if limits.warn and gap > limits.warn:
        log.warning("step %d: the sampler's log-probs are %.3g nats per token away from the trainer's "
                    "(algorithm.mismatch.warn=%g); --config.run.mode=parity looks for the "
                    "cause", step, gap, limits.warn)


def rollout_metrics(batch, zero_signal, per_completion, layout) -> dict[str, float]:
    """Host metrics of one batch of completions."""
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
        "packing/efficiency": layout.efficiency,
    }
    for name, values in batch.result.parts.items():
        if np.isfinite(values).any():
            out[f"reward/{name}"] = float(np.nanmean(values))
    sources = np.array([getattr(g.example, "source", "") for g in batch.groups])
    for name in sorted(set(sources.tolist()) - {""}):
        mine = sources == name
        out |= {f"source/{name}/length": float(lengths[mine].mean())}
        if np.isfinite(scores[mine]).any():
            out[f"source/{name}/reward"] = float(np.nanmean(scores[mine]))
        for part, values in batch.result.parts.items():
            if np.isfinite(values[mine]).any():
                out[f"source/{name}/reward/{part}"] = float(np.nanmean(values[mine]))
    return out | {k if "/" in k else f"reward/{k}": v for k, v in batch.result.metrics.items()} | batch.metrics


def histograms(batch, columns, per_completion) -> dict[str, np.ndarray]:
    """What telemetry.names.HISTOGRAMS tells of one batch. Log-probs under the current policy stay on the device."""
    traj, scores = batch.traj, batch.shaped
    out = {"length": traj.total(), "reward": scores[np.isfinite(scores)], "advantage": per_completion}
    if "old" in columns:
        out["log_ratio"] = (columns["old"] - columns["behaviour"])[traj.loss_mask]
    if "staleness" in columns:
        out["staleness"] = columns["staleness"][traj.loss_mask]
    return out
