"""Reinforcement learning from rewards: sample, score, update, sync weights.

for step:
    prompts      <- the next data.prompts_per_step rows of the global shuffle
    trajectories <- rollout.group_size completions of each, from the engine
    scores       <- rewards of the completions
    layout       <- where every sequence goes, from lengths alone
    old, ref     <- log-probs under the proximal policy and the reference, where the algorithm needs them
    advantages   <- scores relative to their group
    for each pass, for each minibatch: one optimizer step
    sync the new weights to the engine

With rollout.max_staleness the engine samples completions of the next steps during the update (rollout.queue,
docs/explanations/asynchrony.md). The step itself is rl.step, the loop run.fit.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxrl.replay import parity
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import Evaluation, evaluate_only
from jaxrl.rl.fork_source import CachedEngine, ForkSource
from jaxrl.rl.precompile import UpdatePrecompiler
from jaxrl.rl.recording import Recording
from jaxrl.rl.roles import Roles
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step import Loop, next_while_resting, one_step
from jaxrl.run.fit import fit
from jaxrl.run.session import Session
from jaxrl.run.setup import open_run


def run(config, inputs=None) -> dict:
    """Trains and returns the content of summary.json.

    With run.mode=eval it evaluates instead, with run.mode=parity it measures the log-prob gaps of the engine.

    Args:
      config: a checked ConfigDict, or a Spec.
      inputs: Python objects of the caller (jaxrl.run.python_api.PythonInputs), or None.

    Raises ConfigError for inputs that cannot be used, and as run.fit.fit does."""
    with Session(resolve(config), inputs) as s:
        job = open_run(s)
        spec = job.config
        if spec.run.mode == "eval":
            return evaluate_only(s, job)
        if spec.run.mode == "parity":
            return parity.report(s, job)
        fork = ForkSource(s, spec) if spec.fork.run else None
        if fork is not None:
            job = dataclasses.replace(job, engine=CachedEngine(job.engine, fork))
        roles = Roles(job, s.total_steps)
        rollouts = Rollouts.open(s, job, fork=fork)
        if fork is not None:
            fork.policy = roles.policy
        reports: list[ForkSource | Recording] = [] if fork is None else [fork]  # entries of summary.json

        def open_step(speed):
            precompiler = s.close_at_end(UpdatePrecompiler(job, roles.policy, roles.loss))
            recording, next_batch = Recording(s, job, roles), rollouts.next
            roles.report_corrections(s, job.engine)
            reports.append(recording)
            before, after = [], []
            precompiler.join(before)
            if roles.reference is not None:
                after.append(lambda batch, metrics: metrics.update(
                    roles.after_step(s.step, s.stream.epoch(s.progress.cursor))))
            if spec.record.every:
                before.append(recording.before_update)
                after.append(recording.after_update)
            if spec.ahead:
                after.append(lambda batch, metrics: metrics.update(rollouts.metrics(batch)))
            if rates:
                after.append(lambda batch, metrics: metrics.update(
                    s.stream.record_pass_rates(batch.pass_rates, batch.cursor)))
            if roles.policy.rests or job.rests("sampler"):
                next_batch = functools.partial(next_while_resting, s, job, roles.policy, rollouts)
            return functools.partial(one_step, Loop(s, job, roles, rollouts, speed, next_batch, before, after))

        rates = [] if s.stream.pass_rates is None else [s.stream.pass_rates]
        return fit(s, job, roles.policy, open_step, publish=rollouts.publish, sync_every=spec.rollout.sync_every,
                   parts=[*roles.parts, *rates, rollouts],  # rollouts last: they draw rows
                   evaluation=lambda sync: Evaluation(s, job, sync, rollouts.queue.receive), reports=reports)
