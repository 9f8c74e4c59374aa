"""The loop of every recipe: restore, print the summary, sync weights, evaluate, step until the run ends, finish.

Recipes and loops of one's own call `fit` (docs/reference/python.md). A step's content is the recipe's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl.data import Interrupted
from jaxrl.roles.role import WeightSync
from jaxrl.run.setup import derived_numbers, describe, first_prompt
from jaxrl.telemetry.flops import Speed


class StepResult(NamedTuple):
    """What a step returns.

    Attributes:
      metrics: name -> value per step, means over the last `steps` steps.
      records: of the step's completions, for callbacks.
      steps: number of steps since the last result.
    """

    metrics: dict
    records: list = []
    steps: int = 1


def fit(s, job, policy, open_step, *, parts=(), publish=None, sync_every: int = 0, evaluation=None, reports=(),
        about: str = "", first_row: str | None = None, unlogged: Callable[[], Any] = dict) -> dict:
    """Runs a job until it ends or is stopped, and returns the content of summary.json.

    Args:
      s, job: session and job. policy: roles.role.Policy, not yet started.
      open_step: speed -> step; called once the policy is restored. step() runs one step, advances the session and
        returns its StepResult, {} if no metrics are due yet (then nothing is evaluated, saved or exported either), or
        None if a stop was requested before the update; data.Interrupted, which a stream of rows raises, means the same.
      parts: further parts of a checkpoint (see Session.restore).
      publish: (weights, version) -> hands weights to the engine; None = no engine needs them.
      sync_every: steps between weight syncs; 0 = only before the first step and before evaluations.
      evaluation: factory, given the WeightSync (or None); returns evaluate() -> (metrics, records by set, summary). Not
        called without held-out sets.
      reports: objects whose summary() returns further entries of summary.json; a list may grow during the run.
      about: further lines of the start-up summary. first_row: line about the data; default the first prompt.
      unlogged: () -> StepResult of the steps that have no line of metrics when a stop ends the loop, {} without any.

    Raises:
      ConfigError: a checkpoint or option does not fit. RunStopped: the run had to stop, or a callback failed; what was
        saved can be resumed. Also what step() raises, such as TimeoutError."""
    s.restore(policy, parts)
    s.print_summary(f"{describe(job)}{about and chr(10) + about}", derived_numbers(job.config))
    speed = Speed(job, policy.state.trainable)
    step = open_step(speed)
    sync = None if publish is None else WeightSync(s, policy, publish)
    if sync is not None:
        sync()
    s.say(first_prompt(s, job) if first_row is None else first_row)
    plan = s.inputs.comparison if "plan" in job.config.recipe.modes else None
    s.begin(plan and plan(job.config, job, s.step), speed.rates)
    evaluate = evaluation(sync) if evaluation is not None and job.eval_sets else None
    s.before_first_step(evaluate)

    over = False
    while not over:
        result = None
        if s.should_continue():
            with contextlib.suppress(Interrupted):
                result = step()
        over = result is None
        if over:
            result = unlogged()
        elif sync is not None and sync_every and s.step % sync_every == 0:
            with s.phase("publish"):
                sync()
        if result:
            metrics = result.metrics | s.stream.metrics(s.progress.cursor) | {
                "data/samples": float(s.progress.samples),
                "time/compiled_programs": float(job.engine.health().compiled) if job.engine else 0.0,
            } | (job.engine.metrics() if sync_every else {})
            s.after_step(metrics, evaluate, policy.export, steps=result.steps, records=result.records)
    out = s.finish(evaluate, policy.export)
    entries = {name: entry for report in reports for name, entry in report.summary().items()}
    s.telemetry.summary(entries)
    s.callbacks.due("on_end", out | entries)
    s.callbacks.call()
    return out | entries
