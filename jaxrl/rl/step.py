"""One step of reinforcement learning: a batch of completions is laid out, scored, given advantages and learnt from."""

from __future__ import annotations

import functools
import logging
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import training
from jaxrl.algorithms import covariance_mask, explained_variance, second_moment_mask, shared_prefix_mask
from jaxrl.errors import RunStopped
from jaxrl.rl.advantages import advantages_by_source
from jaxrl.rl.algorithm import Algorithm, start_of_step
from jaxrl.rl.episodes import conversations
from jaxrl.rl.precompile import Ahead
from jaxrl.rl.recording import Recording
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step_kl import Bounded
from jaxrl.rl.trajectories import records
from jaxrl.roles.role import Policy, check_finite
from jaxrl.run.session import Session
from jaxrl.run.setup import Job, host_scalars, stream_metrics
from jaxrl.telemetry.flops import Speed

log = logging.getLogger("jaxrl")


class Parts(NamedTuple):
    """What a step works with; only what policy, critic and reference hold changes."""

    s: Session
    job: Job
    algorithm: Algorithm
    policy: Policy
    rollouts: Rollouts
    speed: Speed
    recording: Recording | None = None
    ahead: Ahead | None = None


class Prepared(NamedTuple):
    """What the update reads of a batch, and what is told of it."""

    layout: Any
    columns: dict[str, np.ndarray]  # [T] by name
    found: Any  # Advantages
    values: np.ndarray | None  # [T] of the critic
    kl: np.ndarray | None  # [T], where it is taken from the reward
    seed: int  # of the mini-batches


def one_step(parts: Parts) -> tuple[dict, list[dict]] | None:
    """One RL step. Returns its metrics and the records of its completions, or None when a stop was asked for before the
    update."""
    s, job, algorithm, policy, rollouts, speed, recording, _ = parts
    c, critic = s.spec, algorithm.critic
    with policy.resting(job.engine):
        batch = rollouts.next(s.progress)
    if batch is None or s.stopping():
        return None
    if job.rests("sampler"):
        job.engine.rest()
    prepared, traj = prepare(parts, batch), batch.traj
    layout, columns, found, values, kl, _ = prepared
    per_completion = traj.total(found.tokens) / np.maximum(traj.total(), 1)  # [N] means over scored tokens
    rows = records(traj, [g.example for g in batch.groups], batch.texts, batch.result, per_completion,
                   conversations(traj, job.tokenizer) if c.episodes else None)
    admitted = [{"admitted": group.admitted} for group in batch.groups]
    s.telemetry.rollouts(s.step + 1, [row | more for row, more in zip(rows, admitted, strict=True)])
    begun = recording.begin(batch, prepared) if recording is not None else None
    with s.changing():
        metrics = learn(parts, batch, prepared)
        if begun is not None:
            recording.end(begun, metrics)
        metrics |= rollouts.metrics(batch) | s.stream.record_pass_rates(batch.pass_rates, batch.cursor)
    s.telemetry.histograms(s.step, histograms(batch, columns, per_completion))
    metrics |= rollout_metrics(batch, found.zero_signal, per_completion, layout) | stream_metrics(s, job)
    metrics |= found.metrics
    metrics |= algorithm.operations(s.step, speed.operations, traj)
    if critic is not None:
        metrics["value/explained_variance"] = explained_variance(values, found.returns, traj.loss_mask)
        metrics["value/return_mean"] = float(found.returns[traj.loss_mask].mean())
    if kl is not None:
        metrics["policy/kl_in_reward"] = float(kl[traj.loss_mask].mean())
    check_gap(c.algorithm.mismatch, s.step, metrics)
    if (c.eval.accuracy_from or "") in ("", *batch.result.parts):  # else it is a reward of evaluation only
        metrics["accuracy/train"] = float((judged(c, batch.result) >= c.reward.pass_mark).mean())
    return metrics, rows


def prepare(parts: Parts, batch) -> Prepared:
    """Where every sequence goes, log-probs under the policies that the loss asks for, advantages."""
    s, job, algorithm, policy = parts.s, parts.job, parts.algorithm, parts.policy
    c, critic, traj, values = s.spec, algorithm.critic, batch.traj, None
    seed = hash_seed(c.run.seed, s.step)
    lay_out = functools.partial(training.make_layout, traj.sizes, share_prompts=c.train.share_prompts)
    minibatches = min(c.algorithm.num_minibatches, len(np.unique(traj.group)))
    layout = lay_out(job.row_shapes, num_minibatches=minibatches, seed=seed)
    scored = layout if job.score_shapes is job.row_shapes else lay_out(job.score_shapes)
    with s.phase("score"):
        columns = algorithm.columns(policy, traj, scored)
        if critic is not None:
            values, raw = critic.values(policy.state, traj, scored)
        if batch.staleness is not None:
            columns["staleness"] = batch.staleness
        kl = algorithm.kl(columns)
        found = advantages_by_source(
            c.algorithm, c.data.sources, [getattr(g.example, "source", "") for g in batch.groups], traj, batch.scores,
            baseline=batch.baseline, kl=kl, values=values, rewards=batch.result.parts, columns=columns, user=c.user,
            scale=c.reward.scale)
        columns["advantage"] = found.tokens.astype(np.float32)
        if critic is not None:
            columns |= critic.columns(found.returns, raw, traj.loss_mask)
    return Prepared(layout, columns, found, values, kl, seed)


def learn(parts: Parts, batch, prepared: Prepared) -> dict[str, float]:
    """All that a step changes: the update, then it counts. Returns the update's metrics."""
    s, reference, bound, bounded = parts.s, parts.algorithm.reference, parts.s.spec.train.max_step_kl, None
    with s.phase("update"):
        s.fault("update")
        if bound:
            bounded = Bounded(parts.policy, batch.traj, prepared.layout, prepared.columns)
        metrics = update_all(parts, batch, prepared.layout, prepared.columns, prepared.seed)
        if bounded is not None:
            metrics |= bounded.keep(bound)
    s.advance(batch.cursor, samples=batch.traj.num_trajectories)
    parts.rollouts.release(batch.cursor)
    return metrics | (reference.after_step(s, parts.policy) if reference is not None else {})


def judged(c, result):
    """[N] raw values of the reward whose pass mark is accuracy; of the first one where that is a reward of evaluation
    only."""
    return result.parts.get(c.eval.accuracy_from, next(iter(result.parts.values())))


def update_all(parts: Parts, batch, layout, columns, seed: int) -> dict[str, float]:
    """All passes over all minibatches, the critic's first; metrics are means over the optimizer steps (maxima for the
    gaps)."""
    s, critic = parts.s, parts.algorithm.critic
    of_critic = critic.learn(batch.traj, columns, seed) if critic is not None else []
    warming_up = critic is not None and s.step < s.spec.critic.warmup_steps
    pending = [] if warming_up else policy_steps(parts, batch, layout, columns)
    metrics = averaged([training.several.over_all(host_scalars(m)) for m in pending])
    for bucket in [name for name in metrics if "gap/stale_" in name]:  # from a part of the mean to a mean
        share, part = metrics[bucket.replace("gap/stale_", "staleness/")], metrics.pop(bucket)
        metrics |= {bucket: part / share} if share else {}
    for name, value in averaged([host_scalars(m) for m in of_critic]).items():
        metrics[name.replace("optim/", "value/") if name != "loss" else "value/loss"] = value
    for state in (parts.policy.state, *([critic.state] if of_critic else [])):
        check_finite(state, s.spec)
    return metrics


def policy_steps(parts: Parts, batch, layout, columns) -> list:
    """The policy's optimizer steps on one batch; returns their metrics on the device."""
    c, policy, traj, pending = parts.s.spec, parts.policy, batch.traj, []
    a, weigh = c.algorithm, weigher(parts, batch, columns)
    if a.early_stop_ratio or a.early_stop_kl:
        policy.held = start_of_step(policy.state)
    if parts.ahead is not None:
        parts.ahead.needed(layout)
    for _ in range(a.ppo_epochs):
        for minibatch in layout.minibatches:
            weights = weigh(minibatch)
            packed = (training.pack(traj, m, columns, weights) for m in minibatch.microbatches)
            metrics = policy.update(map(policy.put, packed))
            pending.append(metrics | weigh.left_out)
            parts.rollouts.poll()  # while the device works
    return pending


def weigher(parts: Parts, batch, columns):
    """A function minibatch -> {loss term: weights [T]}; its `left_out` has the shares of tokens that are, by metric."""
    c, traj = parts.s.spec, batch.traj
    a = c.algorithm
    dropped = batch.dropped | (a.mask_truncated & (traj.finish == 1))
    kept = {}
    if a.shared_prefix_tokens:
        kept["policy/prefix_masked_fraction"] = shared_prefix_mask(
            traj.tokens, traj.spans, traj.prompt_lengths[traj.first], traj.group, batch.scores, a.shared_prefix_tokens)
    if a.m2_threshold:
        kept["policy/m2_masked_fraction"] = second_moment_mask(columns["behaviour"], columns["old"], traj.loss_mask,
                                                               a.m2_threshold)
    if a.cov_share:
        kept["policy/cov_masked_fraction"] = covariance_mask(
            columns["old"], columns["advantage"], traj.loss_mask, a.cov_share, a.cov_low, a.cov_high,
            zlib.crc32(np.ascontiguousarray(traj.tokens)))  # the same wherever the step is computed again
    keep = np.logical_and.reduce(list(kept.values())) if kept else None
    positive = None
    if a.positive_nll_coef:
        positive = np.nan_to_num(judged(c, batch.result), nan=-np.inf) >= c.reward.pass_mark
    constant = a.aggregation_constant or c.rollout.max_new_tokens

    def weigh(minibatch):
        return training.loss_weights(traj, minibatch.sequences, a.aggregation, max_tokens=constant,
                                     together=a.aggregation_sequences, dropped=dropped, keep=keep, positive=positive)

    weigh.left_out = {name: float((~mask[traj.loss_mask]).mean()) for name, mask in kept.items()}
    return weigh


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


def hash_seed(root: int, step: int) -> int:
    """Seed of the minibatch shuffle of a step."""
    return int(np.asarray(jax.random.bits(jax.random.fold_in(jax.random.key(root), step))))
