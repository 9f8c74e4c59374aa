"""Preferences: DPO and its kin, on rows with a chosen and a rejected answer, or with an answer and a label.

for step:
    answers  <- those of the next data.prompts_per_step rows, both of a pair
    s, r     <- sums of their log-probs under the policy and under the reference; r once per answer (roles.sums)
    f, df/ds <- the losses, on these numbers of the whole step, on the host in float64
    one optimizer step of the next-token update, each token with the weight -df/ds of its answer

The gradient is that of f whatever packing, microbatches and mesh (training.sequence_weights).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from jaxrl import training
from jaxrl.algorithms.preference import Table, needs_reference, preference_loss, weighted
from jaxrl.data import Interrupted
from jaxrl.recipes.sft import demonstrations, line_of
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import Evaluation, evaluate, publish_newest, summary, write_rows
from jaxrl.roles.reference import precision
from jaxrl.roles.role import Policy, Role
from jaxrl.roles.sums import ReferenceSums, sums_of
from jaxrl.run.fit import fit
from jaxrl.run.session import Session
from jaxrl.run.setup import answered, first_prompt, open_run
from jaxrl.training.score import make_score


def run(config, given=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json."""
    with Session(resolve(config), given) as s:
        job = open_run(s)
        c = job.config
        score = make_score(job.model, temperature=1.0, chunk=c.train.logprob_chunk, put=job.put)
        losses = Losses(s, job, score)
        if c.run.mode == "eval":
            return evaluate_only(s, job, losses, score)
        policy = Policy(job, training.NextToken(**precision(job)), s.total_steps, score)
        weights = ", ".join(f"{weight:g} x {name}" for name, weight in weighted(c.preference).items())
        first = first_prompt(s, job)

        def open_step(speed):
            pending = []

            def step():
                with s.phase("data"):
                    try:
                        batch, cursor = job.stream.take(s.progress.cursor)
                    except Interrupted:
                        return None
                    pairs = Step(job, [e for _, e in batch])
                with s.phase("score"):
                    _, derivative, metrics = losses(policy, pairs)
                with s.changing():
                    s.fault("update")
                    with s.phase("update"):
                        metrics = one_update(policy, pairs, derivative) | metrics
                    s.advance(cursor, samples=len(batch))
                metrics["flops/score"] = losses.passes * speed.operations.scoring(pairs.traj, c.train.share_prompts)
                needed = speed.operations.update(pairs.traj, c.train.share_prompts)
                pending.append((metrics, pairs.traj, pairs.layout.efficiency, needed))
                return line_of(s, job, policy, pending)

            return step

        return fit(s, job, policy, open_step, publish=None if job.engine is None else job.engine.publish,
                   evaluation=lambda sync: HeldOut(s, job, policy, losses, sync),
                   about=f"loss      {weights}, beta {c.preference.beta:g}",
                   first_row=first and f"{first}\n{first_answers(job)}")


class Answer(NamedTuple):
    """One completion, as `demonstrations` takes it."""

    prompt_ids: np.ndarray
    target_ids: np.ndarray
    trained: None = None


class Step:
    """The answers of some rows, in the order of the rows, the chosen one of a pair before the rejected one: traj, where
    they go (layout), and which belong together (table). Answers of a row share its prompt."""

    def __init__(self, job, examples):
        self.job, self.examples = job, examples
        answers, rows, good, chosen = [], [], [], []
        label = job.config.data.label_column
        for row, e in enumerate(examples):
            if e.rejected_ids is not None:
                chosen.append(len(answers))
            mine = [e.target_ids] if e.rejected_ids is None else [e.target_ids, e.rejected_ids]
            good += [bool(e.columns[label])] if e.rejected_ids is None else [True, False]
            answers += [Answer(e.prompt_ids, ids) for ids in mine]
            rows += [row] * len(mine)
        self.answers, self.rows, chosen = answers, rows, np.array(chosen, int)
        self.table = Table(chosen, chosen + 1, np.array(good, bool))
        self.traj, self.layout = laid_out(job, answers, rows)

    def mismatched(self):
        """(traj, layout) of each answer behind the prompt of the row before, the first row's behind the last's; cut to
        the longest sequence."""
        longest, count = self.job.config.longest, len(self.examples)
        before = [self.examples[(row - 1) % count].prompt_ids for row in self.rows]
        answers = [Answer(p, a.target_ids[:max(1, longest - len(p))])
                   for p, a in zip(before, self.answers, strict=True)]
        return laid_out(self.job, answers, self.rows)


def laid_out(job, answers, rows):
    traj = demonstrations(answers, rows, loss_on_prompt=False)
    return traj, training.make_layout(traj.sizes, job.row_shapes, share_prompts=job.config.train.share_prompts)


class Losses:
    """The losses of a job on a step's answers.

    passes: forward passes over the answers that a step takes, the reference's not counted.
    """

    def __init__(self, s, job, score):
        self.options = job.config.preference
        self.reference = None
        if needs_reference(self.options):
            apart = job.mesh_of("reference") is not job.mesh
            if apart or job.model.adapter is not None:
                score = make_score(job.model.base, temperature=1.0, chunk=job.config.train.logprob_chunk,
                                   put=functools.partial(job.put, role="reference"))
            self.reference = ReferenceSums(s, job, score)
        self.with_z0 = "kto" in self.options.loss
        self.passes = 1 + self.with_z0

    def __call__(self, role: Role, step: Step):
        """(loss, derivative [N], metrics) under a role's parameters."""
        z0, metrics = 0.0, {}
        policy, reference = self._sums(role, step.traj, step.layout)
        if self.with_z0:
            ours, theirs = self._sums(role, *step.mismatched())
            z0 = metrics["preference/z0"] = max(0.0, float(np.mean(ours - theirs)))
        loss, derivative, more = preference_loss(policy, reference, step.traj.total(), step.table, self.options, z0)
        return loss, derivative, {"loss": loss} | metrics | more

    def _sums(self, role, traj, layout):
        return sums_of(role, traj, layout), None if self.reference is None else self.reference(traj, layout, role)


def one_update(policy: Policy, step: Step, derivative) -> dict[str, Any]:
    """One optimizer step along the derivative; metrics stay on the device."""
    weights = training.sequence_weights(step.traj, derivative)
    micro = step.layout.minibatches[0].microbatches
    return policy.update(policy.put(training.pack(step.traj, m, {}, weights)) for m in micro)


class HeldOut:
    """Held-out sets: of pairs (or of answers with labels) the loss, as of one step, and the rewards; those of prompts
    are answered and scored as in any job. See Session for what an evaluation returns."""

    def __init__(self, s, job, role: Role, losses: Losses, sync=None):
        self.role, self.losses = role, losses
        self.steps = {name: Step(job, [data[i] for i in range(len(data))])
                      for name, data in job.eval_sets.items() if name not in answered(job.config, job.eval_sets)}
        self.answers = None
        if sync is not None:
            self.answers = Evaluation(s, of_prompts(job), sync)

    def __call__(self):
        metrics, rows = {}, {}
        if self.answers is not None:
            metrics, rows, _ = self.answers()
            if not metrics:
                return {}, {}, {}
        metrics |= self.preferences()
        return metrics, rows, summary(metrics)

    def preferences(self) -> dict[str, float]:
        out, right, pairs = {}, 0.0, 0
        for name, step in self.steps.items():
            found = self.losses(self.role, step)[2]
            out |= {f"eval/{name}/{key}": value for key, value in found.items()}
            count = len(step.table.chosen)
            right, pairs = right + count * found.get("reward/accuracy", 0.0), pairs + count
        return out | ({"eval/preference_accuracy": right / pairs} if pairs else {})


def of_prompts(job):
    """The job with the held-out sets that are answered."""
    return dataclasses.replace(job, eval_sets=answered(job.config, job.eval_sets))


def evaluate_only(s, job, losses: Losses, score) -> dict:
    """run.mode=eval: the newest checkpoint of run.dir if there is one, else the model as given."""
    role = Role("policy", job, score)
    role.held, where = publish_newest(s, job)
    s.console.start("eval")
    metrics, rows = evaluate(s, of_prompts(job)) if job.engine is not None else ({}, {})
    metrics |= HeldOut(s, job, role, losses).preferences()
    if s.peers.first:
        write_rows(s.run_dir, s.step, rows)
    s.telemetry.samples(s.step, rows)
    s.say(f"evaluation of {where}\n" + "\n".join(f"  {k:40s} {v:.4f}" for k, v in sorted(metrics.items())))
    out = {"evaluated": str(where), "eval": summary(metrics)}
    s.telemetry.summary(out)
    return out


def first_answers(job) -> str:
    """What a person should see of the first row's answers."""
    e, c = job.stream.dataset[0], job.config
    shown = {"chosen": e.target_ids, "rejected": e.rejected_ids}
    if e.rejected_ids is None:
        shown = {f"{c.data.label_column}={e.columns[c.data.label_column]}": e.target_ids}
    return "\n".join(f"first answer, {what} ({len(ids)} tokens): {job.tokenizer.decode(ids)!r}"
                     for what, ids in shown.items())
