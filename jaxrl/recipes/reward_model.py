"""Reward models: a score head behind a decoder, trained on pairs (Bradley-Terry) or on labelled steps.

for step:
    rows      <- the next data.prompts_per_step rows of the global shuffle
    sequences <- prompt + completion, both completions of a pair, with a slot after the last token (or after each step)
    scores    <- under the current model, on the layout of the update
    loss, dloss/dscore   on the host in float64, over the whole batch (algorithms.scores)
    one optimizer step with the derivatives as weights

which is the gradient of the loss for any packing, microbatches and mesh. (roles.reward_model scores with one in RL.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxrl import training
from jaxrl.algorithms.scores import bradley_terry, step_labels
from jaxrl.data.images.controls import controlled
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import summary, write_records
from jaxrl.roles import parameters
from jaxrl.roles.reference import precision
from jaxrl.roles.role import Policy, check_finite, host_scalars
from jaxrl.run.fit import StepResult, fit
from jaxrl.run.session import Session
from jaxrl.run.setup import Job, open_run
from jaxrl.training.score import make_value_score
from jaxrl.types import Pictures, Trajectories

EVAL_ROWS = 256  # of held-out rows scored at once


def run(config, inputs=None) -> dict:
    """Trains and returns the content of summary.json.

    Args:
      config: a checked ConfigDict, or a Spec.
      inputs: Python objects of the caller (jaxrl.run.python_api.PythonInputs), or None.

    Raises ConfigError for inputs that cannot be used, and as run.fit.fit does."""
    with Session(resolve(config), inputs) as s:
        job = scoring(open_run(s, with_engine=False))
        c, model = job.config, Scorer(job, s.total_steps)

        def open_step(speed):
            def step():
                with s.phase("data"):
                    rows, cursor = job.stream.take(s.progress.cursor)
                    batch = make_batch([example for _, example in rows], c, job.images)
                scored = score_batch(s, job, model, batch)
                with s.changing():
                    s.fault("update")
                    metrics = one_update(s, model, batch, scored)
                    metrics["flops/update"] = speed.operations.update(batch.traj, c.train.share_prompts, head=False)
                    metrics["flops/score"] = speed.operations.scoring(batch.traj, c.train.share_prompts, head=False)
                    s.advance(cursor, samples=len(rows))
                check_finite(model.state, c)
                return StepResult(metrics)

            return step

        return fit(s, job, model, open_step, evaluation=lambda sync: Evaluation(s, job, model))


@dataclasses.dataclass
class ScoringJob(Job):
    """A Job whose parameters are a decoder with a score head instead of its output matrix."""

    @property
    def tree(self):
        """Parameter table: the model with the scoring head in place of its output matrix."""
        return ValueModel(self.model, name=self.config.reward_model.head, bias=False)


def scoring(job: Job) -> ScoringJob:
    """Returns the job with a score head in place of the output matrix."""
    return ScoringJob(**{field.name: getattr(job, field.name) for field in dataclasses.fields(job)})


class Scorer(Policy):
    """The reward model that trains, with optimizer and update program.

    job: ScoringJob, whose `tree` names its parameters. updates: optimizer steps of the run, for the learning rate's
    schedule.
    """

    def __init__(self, job: ScoringJob, updates: int):
        super().__init__(job, training.Score(**precision(job)), updates, make_value_score(job.model, put=job.put))

    def start(self, arrays: dict | None) -> None:
        """Starts from a checkpoint; else from model.path, a language model (with a head of zeros) or a sequence
        classifier with one label; else random with a head of zeros. `abstract` has to be called before.

        arrays: those of a checkpoint, None if there is none."""
        if arrays is not None:
            return super().start(arrays)
        job, m = self.job, self.job.config.model
        dtype, where = parameters.DTYPES[job.config.train.param_dtype], parameters.param_shardings(job)
        if m.init == "pretrained":
            then = parameters.move_to_host if self.streamed_from_host else None
            params = hf.load_critic(job.tree, parameters.source_of(m.path), m.revision, where, dtype, then)
        else:
            init = lambda key: parameters.cast(job.tree, job.tree.init(key), dtype)  # noqa: E731
            params = jax.jit(init, out_shardings=where)(jax.random.key(job.config.run.seed))
        self.state = parameters.new_state(job, self.optimizer, self._abstract, params)

    def export(self, folder) -> None:
        """Writes a Hugging Face sequence classifier with one label, in checkpoint.export_dtype, into `folder`."""
        c, job = self.job.config.checkpoint, self.job
        hf.export(job.tree, training.merge(self.state.trainable, self.state.frozen), folder, job.hf_config,
                  c.export_dtype, tokenizer=job.tokenizer, shard_gb=c.shard_gb, eos_ids=job.eos_ids)


@dataclasses.dataclass
class Batch:
    """Sequences with the slots at which their scores are read, and the loss of these scores.

    Attributes:
      traj: prompts and completions with one token (0) after each, see training.scored_behind. loss_mask is True at the
        K slots: the token after the last one of a sequence, or after each step.
      loss: scores [K] in the order of the slots -> (loss, its derivative [K] float64 by the scores, metrics).
    """

    traj: Trajectories
    loss: Callable[[np.ndarray], tuple[float, np.ndarray, dict]]


def make_batch(examples, c, images=None) -> Batch:
    """Builds the batch of some examples.

    Sequences 2 i and 2 i + 1 are the chosen and the rejected completion of example i, and the loss is Bradley-Terry's
    with the margin of data.margin_column (0 where it is missing) and reward_model.center. With reward_model.kind=steps
    sequence i is that of example i, and the loss is the cross-entropy of the steps' labels.

    Args:
      examples: rows of the data. c: the config.
      images: the job's ImageSource; None for text.
    """
    options = c.reward_model
    shown = images and Pictures.of(
        [e.images for e in examples for _ in range(1 if options.kind == "steps" else 2)], images)
    if options.kind == "steps":
        traj = training.scored_behind([e.prompt_ids for e in examples], [e.target_ids for e in examples],
                                      np.arange(len(examples)), [np.flatnonzero(e.trained) for e in examples],
                                      pictures=shown)
        labels = np.concatenate([e.columns["labels"] for e in examples])
        return Batch(traj, lambda scores: step_labels(scores, labels))
    prompts = [e.prompt_ids for e in examples for _ in range(2)]
    answers = [ids for e in examples for ids in (e.target_ids, e.rejected_ids)]
    pairs = np.arange(len(examples))
    margin = np.array([e.columns.get(c.data.margin_column) or 0.0 for e in examples])
    traj = training.scored_behind(prompts, answers, np.repeat(pairs, 2), pictures=shown)
    return Batch(traj, lambda scores: bradley_terry(scores, 2 * pairs, 2 * pairs + 1, margin, options.center))


class Scored(NamedTuple):
    """A batch's scores under the current parameters: its layout, the derivative [K] float64 of the loss by the scores
    at the K slots, and the metrics `loss` and `score/*`."""

    layout: training.Layout
    derivative: np.ndarray
    metrics: dict[str, float]


def score_batch(s, job, model: Scorer, batch: Batch) -> Scored:
    """Scores all slots of a batch; changes nothing. Metrics are over all slots of the batch."""
    traj, share = batch.traj, job.config.train.share_prompts
    layout = training.make_layout(traj.sizes, job.row_shapes, share_prompts=share)
    with s.phase("score"):
        scores = model.score(traj, layout)[traj.loss_mask]
        loss, derivative, found = batch.loss(scores)
    metrics = {f"score/{name}": value for name, value in found.items()}
    return Scored(layout, derivative, metrics | {"loss": loss, "score/mean": float(scores.mean()),
                                                 "score/std": float(scores.std())})


def one_update(s, model: Scorer, batch: Batch, scored: Scored) -> dict[str, float]:
    """Runs one optimizer step on a scored batch; returns its metrics.

    Loss and `score/*` are those of the parameters before the step. Lengths are completion tokens, without the slot.
    """
    with s.phase("update"):
        weights, traj = training.score_weights(batch.traj, scored.derivative), model.shown(batch.traj)
        packed = (training.pack(traj, m, {}, weights) for m in scored.layout.minibatches[0].microbatches)
        metrics = host_scalars(model.update(map(model.put, packed)))
    lengths = traj.completion_lengths - 1  # without the slot
    return metrics | scored.metrics | {
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/prompt_tokens": float(traj.prompt_lengths.sum()),
        **scored.layout.metrics(),
    }


class Evaluation:
    """Measures accuracy on held-out rows: the share of pairs whose chosen completion scores higher (ties are wrong), or
    of steps whose score has the right sign; once more with other pictures for each of eval.controls.

    EVAL_ROWS rows are scored at once. Metrics of a set are means over its pairs or steps, `eval/accuracy` that over the
    pairs or steps of all sets, without controls.
    """

    def __init__(self, s, job, model: Scorer):
        self.s, self.job, self.model = s, job, model

    def __call__(self) -> tuple[dict[str, float], dict, dict]:
        """Returns (metrics, {}, entry of summary.json); all empty after a stop. Collective.

        Process 0 writes the scores of each row, without controls, to <run_dir>/eval (rl.evaluation.write_records)."""
        metrics, rows, judged = {}, {}, []
        for name, dataset in self.job.eval_sets.items():
            whole = [(i, dataset[i]) for i in range(len(dataset))]
            for control, batch in controlled(self.job.config, name, whole).items():
                pieces = []
                for start in range(0, len(batch), EVAL_ROWS):
                    if self.s.together("held-out rows", lambda: None if self.s.interrupted() else True) is None:
                        return {}, {}, {}
                    pieces.append(self._scored([e for _, e in batch[start:start + EVAL_ROWS]]))
                for key in dict.fromkeys(k for _, found, _ in pieces for k in found):
                    parts = [(n, found[key]) for n, found, _ in pieces if key in found]
                    metrics[f"eval/{name}{control}/{key}"] = sum(n * v for n, v in parts) / sum(n for n, _ in parts)
                if not control:
                    judged.append((sum(n for n, _, _ in pieces), metrics[f"eval/{name}/accuracy"]))
                    rows[name] = [row for *_, more in pieces for row in more]
        metrics["eval/accuracy"] = sum(n * v for n, v in judged) / sum(n for n, _ in judged)
        if self.s.peers.first:
            write_records(self.s.run_dir, self.s.step, rows)
        return metrics, {}, summary(metrics)

    def _scored(self, examples) -> tuple[int, dict, list[dict]]:
        """Returns (number of slots or pairs, metrics, records) of some rows."""
        job, batch = self.job, make_batch(examples, self.job.config, self.job.images)
        traj = batch.traj
        layout = training.make_layout(traj.sizes, job.score_shapes, share_prompts=job.config.train.share_prompts)
        scores = self.model.score(traj, layout)[traj.loss_mask].astype(np.float64)
        loss, _, found = batch.loss(scores)
        each = np.split(scores, np.cumsum(traj.total())[:-1])
        per = len(each) // len(examples)  # sequences of a row
        rows = [{"prompt": e.prompt_text, "scores": np.concatenate(each[per * i:per * (i + 1)]).round(6).tolist()}
                for i, e in enumerate(examples)]
        return len(scores) // per, found | {"loss": loss}, rows
