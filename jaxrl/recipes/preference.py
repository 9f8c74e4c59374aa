"""Preference training: DPO and related losses, on rows with a chosen and a rejected completion, or one with a label.

for step:
    completions <- those of the next data.prompts_per_step rows, both of a pair
    s, r        <- sums of their log-probs under policy and reference; r once per completion (roles.sums)
    f, df/ds    <- the losses, on these numbers of the whole step, on the host in float64
    one optimizer step of the next-token update, each token with the weight -df/ds of its completion

The gradient is that of f for any packing, microbatches and mesh (training.sequence_weights). The
losses are in algorithms.preference.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from jaxrl import training
from jaxrl.algorithms.preference import Table, needs_reference, preference_loss, weighted
from jaxrl.data.images.controls import controlled
from jaxrl.recipes.sft import PendingSteps, demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import Evaluation, evaluate, publish_latest, summary, write_records
from jaxrl.roles.reference import precision
from jaxrl.roles.role import Policy, Role
from jaxrl.roles.sums import ReferenceSums, logprob_sums
from jaxrl.run.data import sets_to_complete
from jaxrl.run.fit import fit
from jaxrl.run.session import Session
from jaxrl.run.setup import first_prompt, open_run
from jaxrl.training.score import make_score
from jaxrl.types import Places


def run(config, inputs=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json.

    Args:
      config: a checked ConfigDict, or a Spec.
      inputs: Python objects of the caller (jaxrl.run.python_api.PythonInputs), or None.

    Raises ConfigError for inputs that cannot be used, and as run.fit.fit does."""
    with Session(resolve(config), inputs) as s:
        job = open_run(s)
        c = job.config
        score = make_score(job.model, temperature=1.0, chunk=c.train.logprob_chunk, put=job.put)
        losses = Losses(s, job, score)
        if c.run.mode == "eval":
            return evaluate_only(s, job, losses, score)
        policy = Policy(job, training.NextToken(**precision(job)), s.total_steps, score)
        weights = ", ".join(f"{weight:g} x {name}" for name, weight in weighted(c.preference).items())
        first = first_prompt(s, job)

        pending = PendingSteps(s, job, policy)

        def open_step(speed):
            def step():
                with s.phase("data"):
                    batch, cursor = job.stream.take(s.progress.cursor)
                    pairs = PreferenceStep(job, [e for _, e in batch])
                with s.phase("score"):
                    _, derivative, metrics = losses(policy, pairs)
                with s.changing():
                    s.fault("update")
                    with s.phase("update"):
                        metrics = one_update(policy, pairs, derivative) | metrics
                    s.advance(cursor, samples=len(batch))
                metrics["flops/score"] = losses.passes * speed.operations.scoring(pairs.traj, c.train.share_prompts)
                needed = speed.operations.update(pairs.traj, c.train.share_prompts)
                pending.steps.append((metrics, pairs.traj, pairs.layout.metrics(), needed))
                return pending.line_if_due()

            return step

        return fit(s, job, policy, open_step, publish=None if job.engine is None else job.engine.publish,
                   evaluation=lambda sync: HeldOutEvaluation(s, job, policy, losses, sync),
                   about=f"loss      {weights}, beta {c.preference.beta:g}",
                   first_row=first and f"{first}\n{first_completions(job)}", unlogged=pending.line)


class Completion(NamedTuple):
    """A completion and its prompt as 1-D int token ids, in the form that recipes.sft.demonstrations takes.

    images: places of the prompt's images, None without. trained is None: all tokens of the completion are in the
    loss."""

    prompt_ids: np.ndarray
    target_ids: np.ndarray
    images: Places | None
    trained: None = None


class PreferenceStep:
    """The completions of some rows, in data order, the chosen one of a pair before the rejected one.

    A row has two completions if it has a rejected one, else one whose label is in data.label_column.

    Attributes:
      completions: list of N Completion. rows: N ints, the index of the row of each in `examples`.
      traj: Trajectories, one per completion; completions of a row share its prompt. layout: training.Layout.
      table: which completions form pairs, and labels: [N] bool, True for a chosen completion or a true label.
    """

    def __init__(self, job, examples):
        self.job, self.examples = job, examples
        completions, rows, good, chosen = [], [], [], []
        label = job.config.data.label_column
        for row, e in enumerate(examples):
            if e.rejected_ids is not None:
                chosen.append(len(completions))
            targets = [e.target_ids] if e.rejected_ids is None else [e.target_ids, e.rejected_ids]
            good += [bool(e.columns[label])] if e.rejected_ids is None else [True, False]
            completions += [Completion(e.prompt_ids, ids, e.images) for ids in targets]
            rows += [row] * len(targets)
        self.completions, self.rows, chosen = completions, rows, np.array(chosen, int)
        self.table = Table(chosen, chosen + 1, np.array(good, bool))
        self.traj, self.layout = lay_out(job, completions, rows)

    def mismatched_prompts(self):
        """Pairs each completion with the prompt of the previous row (the first row's with the last's), for KTO's z0.

        Returns (traj, layout), in the order of the completions. Each completion is cut so that it fits the longest
        sequence with its new prompt, to one token at least. A step of one row keeps its own prompt.
        """
        longest, count = self.job.config.longest, len(self.examples)
        before = [self.examples[(row - 1) % count] for row in self.rows]
        completions = [Completion(e.prompt_ids, a.target_ids[:max(1, longest - len(e.prompt_ids))], e.images)
                       for e, a in zip(before, self.completions, strict=True)]
        return lay_out(self.job, completions, self.rows)


def lay_out(job, completions, rows):
    """Returns (Trajectories, training.Layout) of completions, with the completions alone in the loss.

    rows: index of the row of each; completions of one row are one group.
    """
    traj = demonstrations(completions, rows, loss_on_prompt=False, images=job.images)
    return traj, training.make_layout(traj.sizes, job.row_shapes, share_prompts=job.config.train.share_prompts)


class Losses:
    """The preference losses of a job on a step's completions.

    score: (params, traj, layout) -> [T] float32 log-probs in nats, also the reference's where it is the same program.

    Attributes:
      reference: sums of log-probs under the reference (ReferenceSums), or None if no loss reads it.
      with_z0: preference.loss has kto, whose z0 needs a second batch of mismatched prompts.
      passes: forward passes over the completions per step, without the reference's."""

    def __init__(self, s, job, score):
        self.options = job.config.preference
        self.reference = None
        if needs_reference(self.options):
            other_mesh = job.mesh_of("reference") is not job.mesh
            if other_mesh or job.model.adapter is not None:
                score = make_score(job.model.base, temperature=1.0, chunk=job.config.train.logprob_chunk,
                                   put=functools.partial(job.put, role="reference"))
            self.reference = ReferenceSums(s, job, score)
        self.with_z0 = "kto" in self.options.loss
        self.passes = 1 + self.with_z0

    def __call__(self, role: Role, step: PreferenceStep):
        """Returns (loss, its derivative [N] float64 by the completions' sums of log-probs, metrics) under a role's
        parameters.

        Sums are over the tokens of a completion, in nats at temperature 1. KTO's z0 is max(0, mean of policy less
        reference sums over the step's mismatched prompts); the derivative takes it as constant.
        """
        z0, metrics = 0.0, {}
        policy, reference = self._sums(role, step.traj, step.layout)
        if self.with_z0:
            mismatched_policy, mismatched_reference = self._sums(role, *step.mismatched_prompts())
            z0 = metrics["preference/z0"] = max(0.0, float(np.mean(mismatched_policy - mismatched_reference)))
        loss, derivative, more = preference_loss(policy, reference, step.traj.total(), step.table, self.options, z0)
        return loss, derivative, {"loss": loss} | metrics | more

    def _sums(self, role, traj, layout):
        return logprob_sums(role, traj, layout), None if self.reference is None else self.reference(traj, layout, role)


def one_update(policy: Policy, step: PreferenceStep, derivative) -> dict[str, Any]:
    """Runs one optimizer step along a derivative; returns its metrics, which stay on the device.

    derivative: [N] float64, dloss/ds by the completions' sums of log-probs s, already divided by the loss's
    denominator. A loss token has the weight -dloss/ds of its completion."""
    weights, traj = training.sequence_weights(step.traj, derivative), policy.shown(step.traj)
    micro = step.layout.minibatches[0].microbatches
    return policy.update(policy.put(training.pack(traj, m, {}, weights)) for m in micro)


class HeldOutEvaluation:
    """Evaluates held-out sets. Returns what Session expects of an evaluation.

    Sets of pairs, or of completions with labels: loss and implicit rewards as in a training step, over the whole set at
    once, and once more with other pictures for each of eval.controls. Sets of prompts are completed and scored as in
    any job.

    role: whose parameters are evaluated. losses: of the job. sync: weight sync for the sets of prompts; None: these are
    left out."""

    def __init__(self, s, job, role: Role, losses: Losses, sync=None):
        self.role, self.losses = role, losses
        prompts, self.steps = sets_to_complete(job.config, job.eval_sets), {}
        for name, data in job.eval_sets.items():
            if name not in prompts:
                rows = [(i, data[i]) for i in range(len(data))]
                for control, shown in controlled(job.config, name, rows).items():
                    self.steps[name + control] = PreferenceStep(job, [e for _, e in shown])
        self.completions = None
        if sync is not None:
            self.completions = Evaluation(s, with_prompt_sets(job), sync)

    def __call__(self):
        """Returns (metrics, records of the sets of prompts, entry of summary.json); all empty if their evaluation
        returned none.
        """
        metrics, rows = {}, {}
        if self.completions is not None:
            metrics, rows, _ = self.completions()
            if not metrics:
                return {}, {}, {}
        metrics |= self.preferences()
        return metrics, rows, summary(metrics)

    def preferences(self) -> dict[str, float]:
        """Returns the metrics of the sets of pairs or labels.

        They are `eval/<set>/<metric of a step>`; with other pictures (`eval/<set><control>/...`) `loss` and `accuracy`
        alone. `eval/preference_accuracy` is the share of correctly ordered pairs (ties count half) over the pairs of
        all sets, without controls; it is absent if there are no pairs.
        """
        out, right, pairs = {}, 0.0, 0
        for name, step in self.steps.items():
            found = self.losses(self.role, step)[2]
            if "/" in name:  # a control
                kept = {"loss": "loss", "reward/accuracy": "accuracy"}
                out |= {f"eval/{name}/{kept[key]}": found[key] for key in kept if key in found}
                continue
            out |= {f"eval/{name}/{key}": value for key, value in found.items()}
            count = len(step.table.chosen)
            right, pairs = right + count * found.get("reward/accuracy", 0.0), pairs + count
        return out | ({"eval/preference_accuracy": right / pairs} if pairs else {})


def with_prompt_sets(job):
    """Returns the job with only the held-out sets of prompts, which need completions. Raises ConfigError for a set that
    mixes prompts with pairs or labels."""
    return dataclasses.replace(job, eval_sets=sets_to_complete(job.config, job.eval_sets))


def evaluate_only(s, job, losses: Losses, score) -> dict:
    """Runs run.mode=eval: evaluates what rl.evaluation.publish_latest loads, a checkpoint or the model of the config.

    Returns the content of summary.json. Raises as rl.evaluation.evaluate_only. Records of the sets of prompts replace
    those of an earlier evaluation at the same step.

    losses: of the job. score: (params, traj, layout) -> [T] float32 log-probs in nats."""
    role = Role("policy", job, score)
    role.state, where = publish_latest(s, job)
    s.console.start("eval")
    metrics, rows = evaluate(s, with_prompt_sets(job)) if job.engine is not None else ({}, {})
    metrics |= HeldOutEvaluation(s, job, role, losses).preferences()
    if s.peers.first:
        write_records(s.run_dir, s.step, rows)
    s.telemetry.samples(s.step, rows)
    s.say(f"evaluation of {where}\n" + "\n".join(f"  {k:40s} {v:.4f}" for k, v in sorted(metrics.items())))
    out = {"evaluated": str(where), "eval": summary(metrics)}
    s.telemetry.summary(out)
    return out


def first_completions(job) -> str:
    """Returns console lines with the completions of the first row."""
    e, c = job.stream.dataset[0], job.config
    shown = {"chosen": e.target_ids, "rejected": e.rejected_ids}
    if e.rejected_ids is None:
        shown = {f"{c.data.label_column}={e.columns[c.data.label_column]}": e.target_ids}
    return "\n".join(f"first completion, {what} ({len(ids)} tokens): {job.tokenizer.decode(ids)!r}"
                     for what, ids in shown.items())
