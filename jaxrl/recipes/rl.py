"""Reinforcement learning from rewards: generate, score, update, publish.

for step:
    prompts      <- the next data.prompts_per_step rows of the global shuffle
    trajectories <- rollout.group_size completions of each, from the engine
    scores       <- rewards of the completions
    layout       <- where every sequence goes, from lengths alone
    old, ref     <- log-probs under the proximal policy and the reference, where the algorithm needs them
    advantages   <- scores relative to their group
    for each pass, for each minibatch: one optimizer step
    publish the new weights to the engine

With rollout.max_staleness the completions of the next steps are on their way meanwhile (rollout.queue,
docs/explanations/asynchrony.md).
"""

from __future__ import annotations

import dataclasses

from jaxrl.replay import parity
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import Evaluation, evaluate_only
from jaxrl.rl.fork_source import CachedEngine, ForkSource
from jaxrl.rl.precompile import Ahead
from jaxrl.rl.recording import Recording
from jaxrl.rl.roles import Roles
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step import Loop, one_step
from jaxrl.run.fit import Line, fit
from jaxrl.run.session import Session
from jaxrl.run.setup import open_run


def run(config, given=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json.

    Args:
      config: a checked ConfigDict, or a Spec.
      given: what was handed over from Python (jaxrl.run.python_api).
    """
    with Session(resolve(config), given) as s:
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
        rollouts = Rollouts.of(s, job, fork=fork)
        if fork is not None:
            fork.policy = roles.policy
        reports = [] if fork is None else [fork]  # entries of summary.json

        def open_step(speed):
            ahead, recording = s.own(Ahead(job, roles.policy, roles.loss)), Recording(s, job, roles)
            roles.begin(s, job.engine)
            reports.append(recording)
            observers = [ahead] * ahead.works + [recording] * bool(spec.record.every)
            loop = Loop(s, job, roles, rollouts, speed, tuple(observers))

            def step():
                done = one_step(loop)
                return done and Line(*done)

            return step

        rates = [] if s.stream.pass_rates is None else [s.stream.pass_rates]
        out = fit(s, job, roles.policy, open_step, publish=rollouts.publish, sync_every=spec.rollout.sync_every,
                  parts=[*roles.parts, *rates, rollouts],  # rollouts last: they draw rows
                  evaluation=lambda sync: Evaluation(s, job, sync, rollouts.queue.receive))
        told = {name: entry for report in reports for name, entry in report.told().items()}
        s.telemetry.summary(told)
        return out | told
