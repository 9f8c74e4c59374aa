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
import logging

from jaxrl.replay import parity
from jaxrl.resolve.spec import resolve
from jaxrl.rl.algorithm import Algorithm
from jaxrl.rl.evaluation import Evaluation, evaluate_only
from jaxrl.rl.fork_source import Past, Remembering
from jaxrl.rl.precompile import Ahead
from jaxrl.rl.recording import Recording
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step import Parts, one_step
from jaxrl.roles.role import Policy, WeightSync
from jaxrl.run.session import Session
from jaxrl.run.setup import derived, describe, first_prompt, open_run
from jaxrl.telemetry.flops import Speed

log = logging.getLogger("jaxrl")


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
        past = Past(s, spec) if spec.fork.run else None
        if past is not None:
            job = dataclasses.replace(job, engine=Remembering(job.engine, past))
        algorithm = Algorithm(job, s.total_steps)
        rollouts = s.own(Rollouts(spec, s, engine=job.engine, stream=s.stream, rewards=job.rewards,
                                  decode=job.decode, steps=s.total_steps, judge=job.judge, past=past))
        policy = Policy(job, algorithm.loss, s.total_steps * algorithm.updates_per_step, algorithm.score)
        if past is not None:
            past.policy = policy
        algorithm.meet(policy)
        rates = [] if s.stream.pass_rates is None else [s.stream.pass_rates]
        s.restore(policy, [*algorithm.parts, *rates, rollouts])  # rollouts last: they draw rows
        s.introduce(describe(job), derived(spec))
        ahead = s.own(Ahead(job, policy, algorithm.loss))
        algorithm.begin(s, job.engine)
        sync = WeightSync(s, policy, rollouts.publish)
        sync()
        s.say(first_prompt(s, job))
        speed = Speed(job, policy.state.trainable)
        s.begin(s.given.comparison and s.given.comparison(spec, job, s.step), speed.rates)
        evaluate = Evaluation(s, job, sync, rollouts.queue.receive) if job.eval_sets else None
        s.before_first_step(evaluate)
        recording = Recording(s, job, algorithm, policy)
        parts = Parts(s, job, algorithm, policy, rollouts, speed, recording, ahead)
        while s.goes_on():
            done = one_step(parts)
            if done is None:  # asked to stop in the middle of a step: nothing of it is kept
                break
            metrics, records_ = done
            if s.step % spec.rollout.sync_every == 0:
                with s.phase("publish"):
                    sync()
            metrics |= job.engine.metrics()
            s.after_step(metrics, evaluate, policy.export, records=records_)
        out = s.finish(evaluate, policy.export)
        told = recording.told() | (past.told() if past is not None else {})
        s.telemetry.summary(told)
        return out | told
