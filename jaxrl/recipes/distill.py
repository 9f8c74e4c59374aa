"""Distillation: trains a student towards a teacher on the student's completions (GKD), on the
rows' completions, or both.

for step:
    rows         <- the next data.prompts_per_step rows of the global shuffle
    trajectories <- the student's completions for a share distill.on_policy of them, the rows' own for the others
    layout       <- where every sequence goes, from lengths alone
    teacher      <- for each token log-probs, the most probable tokens, or the whole distribution
    sampled: the difference of log-probs is the advantage of a policy loss; else: a divergence at every token
    for each pass, for each minibatch: one optimizer step
    sync the new weights to the engine

Rewards, if any, are metrics only. docs/guides/distillation.md
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxrl import training
from jaxrl.algorithms.distillation import sampled_advantages
from jaxrl.data import Interrupted
from jaxrl.data.images.thumbnails import save
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.rl.episodes import conversations
from jaxrl.rl.evaluation import Evaluation, evaluate_only
from jaxrl.rl.metrics import accuracy_rewards, check_logprob_gap, histograms, mean_metrics, rollout_metrics
from jaxrl.rl.roles import Roles, clear_early_stop
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step import minibatch_seed
from jaxrl.rl.trajectories import records
from jaxrl.roles import teacher_files, teachers
from jaxrl.roles.reference import precision
from jaxrl.roles.role import Policy, check_finite, host_scalars
from jaxrl.run.fit import StepResult, fit
from jaxrl.run.session import Progress, Session
from jaxrl.run.setup import Job, open_run
from jaxrl.telemetry.flops import Speed
from jaxrl.types import Pictures, Trajectories


class StepInputs(NamedTuple):
    """The arguments of `one_step`; `teacher` is that of teachers.open_teacher."""

    s: Session
    job: Job
    roles: Roles
    student: Student  # their policy
    teacher: Any
    rows: MixedRows
    rollouts: Rollouts | None  # None: all rows bring their completions
    speed: Speed


def run(config, inputs=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json.

    Args:
      config: a checked ConfigDict, or a Spec.
      inputs: Python objects of the caller (jaxrl.run.python_api.PythonInputs), or None.

    Raises ConfigError for inputs or a teacher that cannot be used, and as run.fit.fit does."""
    with Session(resolve(config), inputs) as s:
        drawn = round(s.spec.distill.on_policy * s.spec.data.prompts_per_step)
        samples = bool(drawn) or bool(s.spec.eval.sets or s.spec.data.eval_fraction)
        job = open_run(s, with_engine=samples)
        c = job.config
        if c.run.mode == "eval":
            return evaluate_only(s, job)
        teachers.check(c, job.tokenizer, job.images)
        roles, rows, rollouts = Roles(job, s.total_steps), MixedRows(s.stream, c), None
        if drawn:
            rollouts = Rollouts.open(s, job, stream=rows, reward_model=None, per_step=drawn)
        teacher = s.close_at_end(teachers.open_teacher(job))
        updates = s.total_steps * roles.updates_per_step
        student = roles.policy = Student(job, objective(job, roles, teacher), updates, roles.score)

        def open_step(speed):
            student.extra_params = teacher.head()
            if c.distill.loss == "sampled":
                roles.report_corrections(s, job.engine)
            parts = StepInputs(s, job, roles, student, teacher, rows, rollouts, speed)

            def step():
                done = one_step(parts)
                return done and StepResult(*done)

            return step

        publish = rollouts.publish if rollouts is not None else job.engine.publish if samples else None
        return fit(s, job, student, open_step, parts=[] if rollouts is None else [rollouts], publish=publish,
                   sync_every=0 if rollouts is None else c.rollout.sync_every, about=describe_distillation(c),
                   evaluation=lambda sync: Evaluation(s, job, sync, rollouts and rollouts.queue.receive))


def describe_distillation(c) -> str:
    """Returns the console line about loss, on-policy share and teacher."""
    d = c.distill
    over = "" if d.loss == "sampled" else f" over {f'top {d.top_k}' if d.top_k else 'the whole vocabulary'}"
    return (f"distill   {d.loss}{over}, {100 * d.on_policy:g} % of the rows on policy, teacher "
            f"{c.teacher.files or ', '.join(c.teacher.servers) or c.teacher.path}")


def objective(job, roles: Roles, teacher):
    """Returns the objective of the update.

    It is the policy loss of the roles for distill.loss=sampled, else training.Distillation, a divergence between
    teacher and student at every loss token.

    teacher: of teachers.open_teacher. Its model is passed on only for a divergence over the whole vocabulary, where the
    update computes the teacher's logits from its hidden states.
    """
    d = job.config.distill
    if d.loss == "sampled":
        return roles.loss
    whole = teachers.needed_part(job.config) == "hidden"
    return training.Distillation(
        kind=d.loss, beta=d.beta, coef=d.coef, tail=d.tail, ce=d.ce, temperature=d.temperature,
        teacher=teacher.model if whole else None, vocab=teacher.vocab, teacher_temperature=d.teacher_temperature,
        **precision(job))


class Student(Policy):
    """The policy that trains.

    extra_params: name -> parameters that its update reads and does not keep: the teacher's head. {} for other losses
    than a divergence over the whole vocabulary.
    """

    extra_params: dict = {}

    @functools.cached_property
    def reader(self):
        """Function read(params, traj, layout) -> the student's own outputs at the loss tokens, 0 elsewhere.

        They are "logprob" [T] float32 and, with distill.top_k, "ids" [T, top_k] int32 and "logprobs" [T, top_k] float32
        of the most probable tokens, in nats at distill.temperature.
        """
        c = self.job.config
        return training.make_reader(self.job.model, temperature=c.distill.temperature, chunk=c.train.logprob_chunk,
                                    put=self.put, top=c.distill.top_k)

    def most_probable(self, traj, layout) -> np.ndarray:
        """Returns the student's most probable token ids, [T, distill.top_k] int32, the highest first; 0 at other tokens
        than loss tokens.
        """
        return self.reader(self.params(), self.shown(traj), layout)["ids"]

    def update(self, batches) -> dict:
        """Runs one optimizer step on the packed microbatches `batches`, which are on the device.

        During the step the teacher's head is among the frozen parameters. Returns the step's metrics, on the device.
        """
        if not self.extra_params:
            return super().update(batches)
        self.state = self.state.replace(frozen={**self.state.frozen, **self.extra_params})
        metrics = super().update(batches)
        frozen = dict(self.state.frozen)  # the update gave their buffers back
        self.extra_params = {name: frozen.pop(name) for name in self.extra_params}
        self.state = self.state.replace(frozen=frozen)
        return metrics


class MixedRows:
    """The rows of a stream in two parts, evenly mixed at any step size.

    The student completes the row at position p if floor((p + 1) share) > floor(p share), with the share
    distill.on_policy. `take` is a stream of these rows alone, numbered from 0, for Rollouts.
    """

    def __init__(self, stream, config):
        self.stream, self.size = stream, config.data.prompts_per_step
        self.share = Fraction(config.distill.on_policy).limit_denominator(10**6)
        self.unless_interrupted = stream.unless_interrupted

    def count_before(self, position: int) -> int:
        """Returns how many positions before this one the student completes."""
        return int(position * self.share)

    def position(self, number: int) -> int:
        """Returns the position of the `number`-th row that the student completes."""
        return -int(-(number + 1) // self.share) - 1

    def is_on_policy(self, position: int) -> bool:
        """Returns whether the row at a position is completed by the student, not taken from the data."""
        return self.count_before(position + 1) > self.count_before(position)

    def step(self, cursor: int) -> tuple[list, int]:
        """Returns ([(position, example)] of a step's rows with their own completion, the next cursor).

        Both are positions in the data, of all rows: the cursor advances over those that the student completes, too. The
        list is empty with distill.on_policy=1. Raises Interrupted if a stop was requested while rows were read.
        """
        if self.share == 1:  # no row brings a completion
            return [], min(cursor + self.size, self.stream.end)
        found, after = self.stream.take(cursor)
        return [row for row in found if not self.is_on_policy(row[0])], after

    def take(self, number: int, count: int) -> tuple[list, int]:
        """Returns ([(number, example)], next number) of `count` on-policy rows from the row `number` on.

        Same form as Stream.take, with numbers that count on-policy rows alone; fewer rows at the end of the stream.
        """
        if self.share == 1:
            return self.stream.take(number, count)
        first, last = self.position(number), self.position(number + count - 1)
        found, _ = self.stream.take(first, last - first + 1)
        mine = [example for position, example in found if self.is_on_policy(position)]
        return [(number + i, example) for i, example in enumerate(mine)], number + len(mine)


def one_step(parts: StepInputs) -> tuple[dict, list[dict]] | None:
    """Runs one step. Returns (metrics, records of the student's completions), or None if a stop was requested before
    the update. Raises RunStopped if rewards, episodes, the teacher or updates fail beyond their limits or the log-prob
    gap is too large, TimeoutError if completions are missing after rollout.timeout_seconds."""
    s, job, policy, rollouts = parts.s, parts.job, parts.roles.policy, parts.rollouts
    c, batch, pieces = s.spec, None, []
    with s.phase("data"):
        try:
            inputs, cursor = parts.rows.step(s.progress.cursor)
        except Interrupted:
            return None
    at = Progress(s.step, parts.rows.count_before(s.progress.cursor))
    if rollouts is not None and parts.rows.count_before(cursor) > at.cursor:
        with policy.resting(job.engine):
            batch = rollouts.next(at)
        if batch is None:
            return None
        pieces.append(batch.traj)
        if job.rests("sampler"):
            job.engine.sleep()
    if s.stopping():
        return None
    if inputs:
        pieces.append(demonstrations([e for _, e in inputs], [p for p, _ in inputs], False, job.images))
    traj = join_batches(pieces, c.distill.on_prompt)
    from_rows = np.arange(traj.num_trajectories) >= traj.num_trajectories - len(inputs)
    layout, of_scoring = lay_out(c, job, traj, s.step)
    with s.phase("score"):
        columns, found = teacher_columns(parts, batch, traj, of_scoring)
    rows, per_completion = [], None
    if batch is not None:
        known = columns.get("advantage", np.zeros(len(traj.tokens)))[:len(batch.traj.tokens)]
        per_completion = batch.traj.total(known) / np.maximum(batch.traj.total(), 1)
        rows = records(batch.traj, [g.example for g in batch.groups], batch.texts, batch.result, per_completion,
                       conversations(batch.traj, job.tokenizer) if c.episodes else None,
                       save(s.run_dir, batch.traj, batch.result.total, c.log.thumbnails)
                       if batch.traj.pictures is not None and s.peers.first else {})
        s.telemetry.rollouts(s.step + 1, rows)
    with s.changing():
        with s.phase("update"):
            s.fault("update")
            metrics = update_all(parts, traj, layout, columns, from_rows)
        s.advance(cursor, samples=traj.num_trajectories)
        if batch is not None and rollouts is not None:
            rollouts.release(batch.cursor)
            metrics |= rollouts.metrics(batch)
    metrics |= found | step_metrics(parts, batch, traj, layout, columns, per_completion)
    if c.distill.loss == "sampled":
        check_logprob_gap(c.algorithm.mismatch, s.step, metrics)
    if rollouts is None and job.engine is not None:
        metrics |= job.engine.metrics()
    return metrics, rows


def shares_prompts(c) -> bool:
    """Whether a group's prompt is in its rows once: train.share_prompts, unless distill.on_prompt has its tokens in the
    loss of every completion."""
    return c.train.share_prompts and not c.distill.on_prompt


def lay_out(c, job, traj, step: int):
    """Returns (training.Layout of the update, that of scoring); one object if both have rows of the same shapes.

    c: Spec. job: its `row_shapes` and `score_shapes` are read.
    step: completed steps, for the shuffle of minibatches."""
    make = functools.partial(
        training.make_layout, traj.sizes, share_prompts=shares_prompts(c), seed=minibatch_seed(c.run.seed, step),
        num_minibatches=min(c.algorithm.num_minibatches, len(np.unique(traj.group))))
    layout = make(job.row_shapes)
    return layout, layout if job.score_shapes == job.row_shapes else make(job.score_shapes)


def join_batches(pieces: list[Trajectories], on_prompt: bool) -> Trajectories:
    """Joins the student's completions and the rows', in this order, to one batch.

    Args:
      pieces: one batch, or two. Two have one sequence for each trajectory. Their token columns (`columns`) are dropped,
        and each row of the second is a group of its own, numbered after the groups of the first.
      on_prompt: prompt tokens are in the loss mask too, except the first of each sequence, which nothing predicts, and
        those of images.
    """
    if len(pieces) == 2:
        a, b = pieces
        both = lambda name: np.concatenate([getattr(a, name), getattr(b, name)])  # noqa: E731
        names = ("tokens", "loss_mask", "logprobs", "versions", "prompt_lengths", "sample", "seed", "finish")
        joined: dict[str, Any] = {name: both(name) for name in names}
        traj = Trajectories(**joined,
                            offsets=np.concatenate([a.offsets, a.offsets[-1] + b.offsets[1:]]),
                            group=np.concatenate([a.group, a.group.max() + 1 + np.arange(len(b.group))]),
                            pictures=Pictures.joined(pieces))
    else:
        traj = pieces[0]
    if not on_prompt:
        return traj
    mask = traj.loss_mask.copy()
    for start, prompt in zip(traj.offsets, traj.prompt_lengths, strict=False):
        mask[start + 1:start + prompt] = True
    if traj.pictures is not None:
        mask[traj.pictures.tokens(traj.offsets)] = False
    fields = ("tokens", "offsets", "logprobs", "versions", "prompt_lengths", "group", "sample", "seed", "finish",
              "columns", "trajectory", "prefix", "pictures")
    return Trajectories(**{name: getattr(traj, name) for name in fields}, loss_mask=mask)


def teacher_columns(parts: StepInputs, batch, traj, layout) -> tuple[dict, dict]:
    """Scores a batch with the teacher, and with policy and reference where the loss needs them.

    Returns (token columns of the loss, metrics). With distill.loss=sampled the columns are those of the policy loss and
    "advantage", [T] float32, of algorithms.distillation.sampled_advantages. The metrics are means over loss tokens, in
    nats: distill/divergence of the policy's log-probs (recomputed ones if the loss reads them, else the engine's) less
    the teacher's, and distill/teacher_logprob.

    With other losses the columns are the teacher's outputs at loss tokens, without metrics: "teacher_hidden" [T, D]
    (compute dtype) for the whole vocabulary, else "teacher_ids" [T, K] int32, -1 = none, and "teacher_logprobs" [T, K]
    float32 in nats. With teacher.save, process 0 also writes the ids and log-probs to a file.

    batch: the student's completions, read with distill.loss=sampled only. traj: Trajectories of the step. layout: of
    scoring."""
    s, d = parts.s, parts.s.spec.distill
    targets = parts.teacher.targets(traj, layout, lambda: parts.student.most_probable(traj, layout))
    if d.loss == "sampled":
        columns = parts.roles.columns(traj, layout)
        if batch.staleness is not None:
            columns["staleness"] = batch.staleness
        own, mask = columns.get("old", columns["behaviour"]), traj.loss_mask
        found = sampled_advantages(own, targets["teacher"], mask, traj.spans, coef=d.coef, gamma=d.gamma)
        columns["advantage"] = found.astype(np.float32)
        apart = float((own - targets["teacher"])[mask].mean(dtype=np.float64))
        return columns, {"distill/divergence": apart, "distill/teacher_logprob": float(targets["teacher"][mask].mean())}
    t = s.spec.teacher
    if t.save and s.peers.first:
        teacher_files.write(t.save, f"{s.step:08d}", traj, targets["teacher_ids"], targets["teacher_logprobs"],
                            vocabulary=teachers.vocabulary(parts.job.tokenizer), teacher=t.path,
                            temperature=d.teacher_temperature)
    return targets, {}


def update_all(parts: StepInputs, traj, layout, columns, from_rows) -> dict[str, float]:
    """Runs all optimizer steps of a batch; returns the means of their metrics. Raises RunStopped after
    optimizer.max_nonfinite updates in a row that were not finite.

    Loss tokens are weighted by algorithm.aggregation over their minibatch. With algorithm.mask_truncated completions
    that were cut at their longest have the weight 0 and still count in the denominators.

    Args:
      traj: Trajectories of the step. layout: training.Layout of the update.
      columns: token columns of `teacher_columns`.
      from_rows: [N] bool, trajectories from the data, the only ones in the cross-entropy term of distill.ce."""
    c, policy, pending = parts.s.spec, parts.roles.policy, []
    traj = policy.shown(traj)
    a = c.algorithm
    dropped = a.mask_truncated & (traj.finish == 1)
    if a.early_stop_ratio or a.early_stop_kl:
        policy.state = clear_early_stop(policy.state)
    for _ in range(a.ppo_epochs):
        for minibatch in layout.minibatches:
            weights = training.loss_weights(
                traj, minibatch.sequences, a.aggregation, max_tokens=a.aggregation_constant or c.rollout.max_new_tokens,
                chunk=a.aggregation_sequences, dropped=dropped, positive=from_rows if c.distill.ce else None)
            packed = (training.pack(traj, m, columns, weights) for m in minibatch.microbatches)
            pending.append(policy.update(map(policy.put, packed)))
            if parts.rollouts is not None:
                parts.rollouts.poll()  # while the device works
    metrics = mean_metrics([host_scalars(m) for m in pending])
    check_finite(policy.state, c)
    return metrics


def step_metrics(parts: StepInputs, batch, traj, layout, columns, per_completion) -> dict[str, float]:
    """Returns the host metrics of one step; sends histograms to the telemetry if the student completed rows.

    `length/*` are loss tokens per trajectory, which are completion tokens unless distill.on_prompt is set;
    `flops/update` are the operations of all passes, with a group's prompt once if the layout shares it.

    Args:
      batch: the student's completions, or None if all rows bring theirs.
      traj: Trajectories of the step. layout: of the update. columns: of `teacher_columns`.
      per_completion: [N] float, mean advantage of each of the batch's completions over its loss tokens; None without a
        batch."""
    s, c, count = parts.s, parts.s.spec, parts.speed.operations
    lengths, prompts = traj.total(), float(traj.prompt_lengths.sum())
    out = {"length/mean": float(lengths.mean()), "length/max": float(lengths.max()), "length/min": float(lengths.min()),
           "rollout/tokens": float(lengths.sum()), "rollout/prompt_tokens": prompts,
           **layout.metrics(),
           "flops/update": c.algorithm.ppo_epochs * count.update(traj, shares_prompts(c))}
    if batch is None:
        return out
    nothing = np.zeros(batch.traj.num_trajectories)
    out = rollout_metrics(batch, nothing, per_completion, layout) | out
    s.telemetry.histograms(s.step, histograms(batch, {**columns, "behaviour": traj.logprobs}, per_completion))
    if batch.result.parts and (c.eval.accuracy_from or "") in ("", *batch.result.parts):
        out["accuracy/train"] = float((accuracy_rewards(c, batch.result) >= c.reward.pass_mark).mean())
    return out
