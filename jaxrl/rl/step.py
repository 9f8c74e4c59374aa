"""One step of reinforcement learning, by values: `lay_out`, `prepare` and `learn` read a spec, roles and a batch, and
change only the roles' parameters and statistics.

`one_step` calls them inside a run; replay, certify and a user's own loop call them (docs/reference/python.md).
Sampling is in rl.rollouts, losses and optimizer steps in jaxrl.training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import training
from jaxrl.algorithms import TOKEN_MASKS, StepTokens, explained_variance
from jaxrl.data.images.thumbnails import save
from jaxrl.rl import advantages
from jaxrl.rl.episodes import conversations
from jaxrl.rl.metrics import accuracy_rewards, check_logprob_gap, histograms, mean_metrics, rollout_metrics
from jaxrl.rl.roles import Roles, clear_early_stop
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step_kl import StepLimit
from jaxrl.rl.trajectories import records
from jaxrl.roles.role import check_finite, host_scalars
from jaxrl.run.fit import StepResult
from jaxrl.run.session import Session
from jaxrl.run.setup import Job
from jaxrl.telemetry.flops import Speed


class StepLayout(NamedTuple):
    """The assignment of a batch's sequences to rows and microbatches, from lengths alone."""

    update: Any  # training.Layout of the update, with its minibatches
    score: Any   # training.Layout of log-probs without gradient; `update` itself if the rows are the same
    seed: int    # of the shuffle into minibatches, the critic's too


class Prepared(NamedTuple):
    """The token columns that an update reads of a batch of T tokens, with the numbers that are logged.

    Values are float64 in units of the score; the KL is float64 in nats, before kl.coef. None: there is no critic, or
    the KL is not subtracted from the reward."""

    layout: StepLayout
    columns: dict[str, np.ndarray]  # [T] by name
    advantages: Any  # Advantages
    values: np.ndarray | None  # [T] of the critic
    kl: np.ndarray | None  # [T], where it is subtracted from the reward


class Loop(NamedTuple):
    """The arguments of `one_step`.

    Attributes:
      next_batch: progress -> Batch, or None after a stop: `Rollouts.next`, or `next_while_resting`.
      before_update: functions of (batch, prepared), called before the update.
      after_update: functions of (batch, metrics), called once the session has advanced to the next step; they may add
        metrics.
    """

    s: Session
    job: Job
    roles: Roles
    rollouts: Rollouts
    speed: Speed
    next_batch: Callable
    before_update: list[Callable]
    after_update: list[Callable]


def one_step(loop: Loop) -> StepResult | None:
    """Runs one RL step of a run: rollout, log-probs, advantages, update.

    Collective: every process calls it. The session advances by one step; records and histograms of the step are
    written.

    Args:
      loop: session, job, roles and callbacks of the run.

    Returns:
      StepResult, or None if a stop was requested before the update.

    Raises:
      RunStopped: rewards, episodes or updates failed beyond their limits, or the log-prob gap is too large. The gap is
        checked after the update, when the session has advanced.
      TimeoutError: completions are missing after rollout.timeout_seconds.
      ConfigError: a user's advantage or policy loss failed."""
    s, job, roles, rollouts, speed, *_ = loop
    c, batch = s.spec, loop.next_batch(s.progress)
    if batch is None or s.stopping():
        return None
    traj = batch.traj
    layout = lay_out(c, job.row_shapes, traj, s.step, job.score_shapes)
    with s.phase("score"):
        prepared = prepare(c, roles, batch, layout)
    per_completion = traj.total(prepared.advantages.tokens) / np.maximum(traj.total(), 1)  # means over loss tokens
    pictures = traj.pictures is not None and s.peers.first
    kept = save(s.run_dir, traj, batch.result.total, c.log.thumbnails) if pictures else {}
    rows = records(traj, [g.example for g in batch.groups], batch.texts, batch.result, per_completion,
                   conversations(traj, job.tokenizer) if c.episodes else None, kept)
    admitted = [{"admitted": group.admitted} for group in batch.groups]
    s.telemetry.rollouts(s.step + 1, [row | more for row, more in zip(rows, admitted, strict=True)])
    with s.phase("update"):
        for observe in tuple(loop.before_update):
            observe(batch, prepared)
    with s.changing():
        with s.phase("update"):
            s.fault("update")
            metrics = learn(c, roles, batch, prepared, s.step, meanwhile=rollouts.poll)
        s.advance(batch.cursor, samples=traj.num_trajectories)
        rollouts.release(batch.cursor)
        for observe in loop.after_update:
            observe(batch, metrics)
    s.telemetry.histograms(s.step, histograms(batch, prepared.columns, per_completion))
    metrics |= step_metrics(c, batch, prepared, per_completion)
    metrics |= roles.operations(s.step, speed.operations, traj)
    check_logprob_gap(c.algorithm.mismatch, s.step, metrics)
    return StepResult(metrics, rows)


def next_while_resting(s: Session, job: Job, policy, rollouts: Rollouts, progress):
    """Samples the next batch while the policy rests in host memory; afterwards the sampler rests, if mesh.roles says
    so.

    Returns what `rollouts.next(progress)` returns: a Batch, or None if a stop was requested."""
    with policy.resting(job.engine):
        batch = rollouts.next(progress)
    if batch is not None and not s.stopping() and job.rests("sampler"):
        job.engine.sleep()
    return batch


def lay_out(spec, row_shapes, traj, step: int, score_shapes=None) -> StepLayout:
    """Places the sequences of a batch in rows, microbatches and minibatches.

    The update has at most as many minibatches as the batch has prompt groups. Scoring has one minibatch where its
    shapes differ, else the update's.

    Args:
      spec: the job's Spec.
      row_shapes: training.RowShapes of the update. score_shapes: those of log-probs without gradient; None = the same.
      traj: Trajectories. step: completed steps of the run; with run.seed it decides the minibatches.

    Returns:
      StepLayout, the same on every process.
    """
    sizes, shared, seed = traj.sizes, spec.train.share_prompts, minibatch_seed(spec.run.seed, step)
    minibatches = min(spec.algorithm.num_minibatches, len(np.unique(traj.group)))
    update = score = training.make_layout(sizes, row_shapes, share_prompts=shared, num_minibatches=minibatches,
                                          seed=seed)
    if score_shapes not in (None, row_shapes):
        score = training.make_layout(sizes, score_shapes, share_prompts=shared)
    return StepLayout(update, score, seed)


def prepare(spec, roles: Roles, batch, layout: StepLayout) -> Prepared:
    """Computes the log-probs and values that the loss needs of a batch, and its advantages.

    Changes only the critic's running statistics of returns.

    Args:
      spec: the job's Spec. roles: policy, critic and reference.
      batch: rl.rollouts.Batch. layout: of `lay_out`.

    Returns:
      Prepared, whose columns are what `learn` packs: [T] by name, log-probs in nats, advantages as float32.

    Raises:
      ConfigError: a user's advantage function failed.
    """
    critic, traj, values = roles.critic, batch.traj, None
    columns = roles.columns(traj, layout.score)
    if critic is not None:
        values, raw = critic.values(roles.policy.state, traj, layout.score)
    if batch.staleness is not None:
        columns["staleness"] = batch.staleness
    kl = roles.kl(columns) if spec.kl_in_reward else None
    estimate = advantages.advantages
    if spec.data.sources:
        of_N = [getattr(g.example, "source", "") for g in batch.groups]
        estimate = functools.partial(advantages.advantages_by_source, spec.data.sources, of_N)
    found = estimate(spec.algorithm, traj, batch.scores, baseline=batch.baseline, kl=kl, values=values,
                     rewards=batch.result.parts, columns=columns, user=spec.user, scale=spec.reward.scale)
    columns["advantage"] = found.tokens.astype(np.float32)
    if critic is not None:
        columns |= critic.columns(found.returns, raw, traj.loss_mask)
    return Prepared(layout, columns, found, values, kl)


def learn(spec, roles: Roles, batch, prepared: Prepared, step: int, meanwhile=lambda: None) -> dict[str, float]:
    """Runs all optimizer steps on a batch, the critic's first; the policy's not in the first critic.warmup_steps steps.

    Args:
      spec: the job's Spec. roles: policy and critic, whose states it replaces.
      batch: rl.rollouts.Batch. prepared: of `prepare`.
      step: completed steps of the run. meanwhile: called after each optimizer step was dispatched,
        while the device works.

    Returns:
      Metrics: means over the optimizer steps, maxima of the gaps; with train.max_step_kl also those of
      step_kl.StepLimit.enforce. The critic's are named value/*.

    Raises:
      RunStopped: optimizer.max_nonfinite updates in a row were not finite.
    """
    limit, critic = spec.train.max_step_kl, roles.critic
    bounded = StepLimit(roles.policy, batch.traj, prepared.layout.update, prepared.columns) if limit else None
    of_critic = critic.learn(batch.traj, prepared.columns, prepared.layout.seed) if critic is not None else []
    warming_up = critic is not None and step < spec.critic.warmup_steps
    pending = [] if warming_up else update_policy(spec, roles.policy, batch, prepared, meanwhile)
    updates = [host_scalars(m) for m in pending]
    if roles.policy.adapters:
        updates = [training.adapter_set.mean_over_adapters(m) for m in updates]
    metrics = mean_metrics(updates)
    for name, value in mean_metrics([host_scalars(m) for m in of_critic]).items():
        metrics[name.replace("optim/", "value/") if name != "loss" else "value/loss"] = value
    for state in (roles.policy.state, *([critic.state] if critic is not None and of_critic else [])):
        check_finite(state, spec)
    return metrics | (bounded.enforce(limit) if bounded is not None else {})


def update_policy(spec, policy, batch, prepared: Prepared, meanwhile=lambda: None) -> list:
    """Runs the policy's optimizer steps on one batch, ppo_epochs passes over its minibatches; returns the metrics of
    each, which stay on the device.

    Args:
      spec: the job's Spec. policy: roles.role.Policy, whose state is replaced.
      batch: rl.rollouts.Batch. prepared: of `prepare`.
      meanwhile: called after each optimizer step was dispatched.
    """
    traj, a, pending = policy.shown(batch.traj), spec.algorithm, []
    weigh, masked_fractions = make_loss_weigher(spec, batch, prepared.columns)
    if a.early_stop_ratio or a.early_stop_kl:
        policy.state = clear_early_stop(policy.state)
    for _ in range(a.ppo_epochs):
        for minibatch in prepared.layout.update.minibatches:
            weights = weigh(minibatch.sequences)
            packed = (training.pack(traj, m, prepared.columns, weights) for m in minibatch.microbatches)
            metrics = policy.update(map(policy.put, packed))
            pending.append(metrics | masked_fractions)
            meanwhile()
    return pending


def make_loss_weigher(spec, batch, columns):
    """Returns for one batch (function of a minibatch's sequences (int indices) -> {loss term: weights [T] float64},
    metric -> share of the batch's loss tokens that its mask leaves out).

    Weights are 1/denominator of algorithm.aggregation, 0 where a token or its sequence is masked: groups that dynamic
    sampling masks, truncated completions with mask_truncated, and the token masks of the options (shared prefix, second
    moment, covariance, ratio of the completion). Masked tokens stay in the denominators.

    Args:
      spec: the job's Spec. batch: rl.rollouts.Batch.
      columns: [T] float32 by name: advantage, behaviour, and old where it is scored.
    """
    c, traj, a = spec, batch.traj, spec.algorithm
    dropped = batch.dropped | (a.mask_truncated & (traj.finish == 1))
    seen = StepTokens(traj.tokens, traj.loss_mask, traj.spans, traj.prompt_lengths[traj.first], traj.group,
                      batch.scores, columns, a)
    masks = {entry.metric: entry.function(seen) for option, entry in TOKEN_MASKS.items() if a[option]}
    keep = np.logical_and.reduce(list(masks.values())) if masks else None
    positive = None
    if a.positive_nll_coef:
        positive = accuracy_rewards(c, batch.result) >= c.reward.pass_mark  # absent: not positive
    weigh = functools.partial(training.loss_weights, traj, aggregation=a.aggregation, chunk=a.aggregation_sequences,
                              max_tokens=a.aggregation_constant or c.rollout.max_new_tokens, dropped=dropped, keep=keep,
                              positive=positive)
    return weigh, {name: float((~mask[traj.loss_mask]).mean()) for name, mask in masks.items()}


def step_metrics(spec, batch, prepared: Prepared, per_completion) -> dict[str, float]:
    """Returns name -> value of the host metrics of one step: of its completions, its advantages and the critic's
    values.

    Values and the KL (nats, before kl.coef) are means over loss tokens; accuracy/train is the share of completions
    whose raw reward reaches reward.pass_mark, an absent one counting as below it.

    Args:
      spec: the job's Spec. batch: rl.rollouts.Batch. prepared: of `prepare`.
      per_completion: [N] float64, mean advantage over the loss tokens of each completion.
    """
    found, mask = prepared.advantages, batch.traj.loss_mask
    out = rollout_metrics(batch, found.zero_signal, per_completion, prepared.layout.update) | found.metrics
    if prepared.values is not None:
        out["value/explained_variance"] = explained_variance(prepared.values, found.returns, mask)
        out["value/return_mean"] = float(found.returns[mask].mean())
    if prepared.kl is not None:
        out["policy/kl_in_reward"] = float(prepared.kl[mask].mean())
    if (spec.eval.accuracy_from or "") in ("", *batch.result.parts):  # else it is a reward of evaluation only
        out["accuracy/train"] = float((accuracy_rewards(spec, batch.result) >= spec.reward.pass_mark).mean())
    return out


def minibatch_seed(root: int, step: int) -> int:
    """Returns the seed of a step's minibatch shuffle, an unsigned 32-bit int. root: run.seed. step: completed steps."""
    return int(np.asarray(jax.random.bits(jax.random.fold_in(jax.random.key(root), step))))
