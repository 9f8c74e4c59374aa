"""Distillation: bring a student to a teacher on what the student writes itself (GKD), on given completions, or on both.

for step:
    rows         <- the next data.prompts_per_step rows of the global shuffle
    trajectories <- of a share distill.on_policy of them the student's completions, of the others the rows' own
    layout       <- where every sequence goes, from lengths alone
    teacher      <- what it says of their tokens: log-probs, its most probable tokens, or all of its distribution
    sampled: the difference of log-probs is the advantage of a policy loss; else: a divergence at every token
    for each pass, for each minibatch: one optimizer step
    publish the new weights to the engine

Rewards, where there are any, are metrics. docs/guides/distillation.md
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxrl import training
from jaxrl.algorithms.distillation import sampled_advantages
from jaxrl.data import Interrupted
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.spec import resolve
from jaxrl.rl.episodes import conversations
from jaxrl.rl.evaluation import Evaluation, evaluate_only
from jaxrl.rl.metrics import averaged, check_gap, histograms, judged, rollout_metrics
from jaxrl.rl.roles import Roles, start_of_step
from jaxrl.rl.rollouts import Rollouts
from jaxrl.rl.step import hash_seed
from jaxrl.rl.trajectories import records
from jaxrl.roles import teacher_files, teachers
from jaxrl.roles.reference import precision
from jaxrl.roles.role import Policy, check_finite
from jaxrl.run.fit import Line, fit
from jaxrl.run.session import Progress, Session
from jaxrl.run.setup import Job, host_scalars, open_run, stream_metrics
from jaxrl.telemetry.flops import Speed
from jaxrl.types import Trajectories


class Parts(NamedTuple):
    """What a step works with."""

    s: Session
    job: Job
    roles: Roles  # their policy is the Student
    teacher: Any
    rows: Rows
    rollouts: Rollouts | None  # None: all rows bring their completions
    speed: Speed


def run(config, given=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json."""
    with Session(resolve(config), given) as s:
        drawn = round(s.spec.distill.on_policy * s.spec.data.prompts_per_step)
        samples = bool(drawn) or bool(s.spec.eval.sets or s.spec.data.eval_fraction)
        job = open_run(s, with_engine=samples)
        c = job.config
        if c.run.mode == "eval":
            return evaluate_only(s, job)
        teachers.check(c, job.tokenizer)
        roles, rows, rollouts = Roles(job, s.total_steps), Rows(s.stream, c), None
        if drawn:
            rollouts = Rollouts.of(s, job, stream=rows, judge=None, per_step=drawn)
        teacher = s.own(teachers.open_teacher(job))
        updates = s.total_steps * roles.updates_per_step
        student = roles.policy = Student(job, objective(job, roles, teacher), updates, roles.score)

        def open_step(speed):
            student.beside = teacher.head()
            if c.distill.loss == "sampled":
                roles.begin(s, job.engine)
            parts = Parts(s, job, roles, teacher, rows, rollouts, speed)

            def step():
                done = one_step(parts)
                return done and Line(*done)

            return step

        publish = rollouts.publish if rollouts is not None else job.engine.publish if samples else None
        return fit(s, job, student, open_step, parts=[] if rollouts is None else [rollouts], publish=publish,
                   sync_every=0 if rollouts is None else c.rollout.sync_every, about=what(c),
                   evaluation=lambda sync: Evaluation(s, job, sync, rollouts and rollouts.queue.receive))


def what(c) -> str:
    """A line of what is distilled, for a person."""
    d = c.distill
    over = "" if d.loss == "sampled" else f" over {f'top {d.top_k}' if d.top_k else 'the whole vocabulary'}"
    return (f"distill   {d.loss}{over}, {100 * d.on_policy:g} % of the rows on policy, teacher "
            f"{c.teacher.files or ', '.join(c.teacher.servers) or c.teacher.path}")


def objective(job, roles: Roles, teacher):
    """What the update minimises."""
    d = job.config.distill
    if d.loss == "sampled":
        return roles.loss
    whole = teachers.wanted(job.config) == "hidden"
    return training.Distillation(
        kind=d.loss, beta=d.beta, coef=d.coef, tail=d.tail, ce=d.ce, temperature=d.temperature,
        teacher=teacher.model if whole else None, vocab=teacher.vocab, teacher_temperature=d.teacher_temperature,
        **precision(job))


class Student(Policy):
    """The policy that learns. beside: name -> parameters that its update reads and does not keep: the teacher's
    head."""

    beside: dict = {}

    @functools.cached_property
    def reader(self):
        c = self.job.config
        return training.make_reader(self.job.model, temperature=c.distill.temperature, chunk=c.train.logprob_chunk,
                                    put=self.put, top=c.distill.top_k)

    def most_probable(self, traj, layout) -> np.ndarray:
        """[T, distill.top_k] token ids."""
        return self.reader(self.params(), traj, layout)["ids"]

    def update(self, batches) -> dict:
        if not self.beside:
            return super().update(batches)
        self.held = self.held.replace(frozen={**self.held.frozen, **self.beside})
        metrics = super().update(batches)
        frozen = dict(self.held.frozen)  # the update gave their buffers back
        self.beside = {name: frozen.pop(name) for name in self.beside}
        self.held = self.held.replace(frozen=frozen)
        return metrics


class Rows:
    """The rows of a stream in two parts, evenly mixed whatever a step's size: position p is the student's to answer
    where floor((p + 1) share) > floor(p share), with the share distill.on_policy. `take` is a stream of those alone,
    numbered from 0, as Rollouts wants one."""

    def __init__(self, stream, config):
        self.stream, self.size = stream, config.data.prompts_per_step
        self.share = Fraction(config.distill.on_policy).limit_denominator(10**6)
        self.unless_interrupted = stream.unless_interrupted

    def before(self, position: int) -> int:
        """How many positions before this one are the student's."""
        return int(position * self.share)

    def position(self, number: int) -> int:
        """The position of its `number`-th row."""
        return -int(-(number + 1) // self.share) - 1

    def mine(self, position: int) -> bool:
        return self.before(position + 1) > self.before(position)

    def step(self, cursor: int) -> tuple[list, int]:
        """([(position, example)] of a step's rows that bring their completion, the next cursor)."""
        if self.share == 1:  # what is there is known without reading it twice
            return [], min(cursor + self.size, self.stream.end)
        found, after = self.stream.take(cursor)
        return [row for row in found if not self.mine(row[0])], after

    def take(self, number: int, count: int) -> tuple[list, int]:
        if self.share == 1:
            return self.stream.take(number, count)
        first, last = self.position(number), self.position(number + count - 1)
        found, _ = self.stream.take(first, last - first + 1)
        mine = [example for position, example in found if self.mine(position)]
        return [(number + i, example) for i, example in enumerate(mine)], number + len(mine)


def one_step(parts: Parts) -> tuple[dict, list[dict]] | None:
    """One step. Returns its metrics and the records of the student's completions, or None when a stop was asked for
    before the update."""
    s, job, policy, rollouts = parts.s, parts.job, parts.roles.policy, parts.rollouts
    c, batch, pieces = s.spec, None, []
    with s.phase("data"):
        try:
            given, cursor = parts.rows.step(s.progress.cursor)
        except Interrupted:
            return None
    at = Progress(s.step, parts.rows.before(s.progress.cursor))
    if rollouts is not None and parts.rows.before(cursor) > at.cursor:
        with policy.resting(job.engine):
            batch = rollouts.next(at)
        if batch is None:
            return None
        pieces.append(batch.traj)
        if job.rests("sampler"):
            job.engine.rest()
    if s.stopping():
        return None
    if given:
        pieces.append(demonstrations([e for _, e in given], [p for p, _ in given], False))
    traj = joined(pieces, c.distill.on_prompt)
    from_rows = np.arange(traj.num_trajectories) >= traj.num_trajectories - len(given)
    seed = hash_seed(c.run.seed, s.step)
    lay_out = functools.partial(training.make_layout, traj.sizes, num_minibatches=min(
        c.algorithm.num_minibatches, len(np.unique(traj.group))), seed=seed,
        share_prompts=c.train.share_prompts and not c.distill.on_prompt)
    layout = lay_out(job.row_shapes)
    with s.phase("score"):
        columns, found = ask(parts, batch, traj,
                             layout if job.score_shapes is job.row_shapes else lay_out(job.score_shapes))
    rows, per_completion = [], None
    if batch is not None:
        known = columns.get("advantage", np.zeros(len(traj.tokens)))[:len(batch.traj.tokens)]
        per_completion = batch.traj.total(known) / np.maximum(batch.traj.total(), 1)
        rows = records(batch.traj, [g.example for g in batch.groups], batch.texts, batch.result, per_completion,
                       conversations(batch.traj, job.tokenizer) if c.episodes else None)
        s.telemetry.rollouts(s.step + 1, rows)
    with s.changing():
        with s.phase("update"):
            s.fault("update")
            metrics = update_all(parts, traj, layout, columns, from_rows)
        s.advance(cursor, samples=traj.num_trajectories)
        if batch is not None:
            rollouts.release(batch.cursor)
            metrics |= rollouts.metrics(batch)
    metrics |= found | stream_metrics(s, job) | step_metrics(parts, batch, traj, layout, columns, per_completion)
    if rollouts is None and job.engine is not None:
        metrics |= job.engine.metrics()
    return metrics, rows


def joined(pieces: list[Trajectories], on_prompt: bool) -> Trajectories:
    """One batch of the student's completions and of the rows', in this order. on_prompt: prompt tokens are scored too,
    but the first, which nothing predicts."""
    if len(pieces) == 2:
        a, b = pieces
        both = lambda name: np.concatenate([getattr(a, name), getattr(b, name)])  # noqa: E731
        names = ("tokens", "loss_mask", "logprobs", "versions", "prompt_lengths", "sample", "seed", "finish")
        traj = Trajectories(**{name: both(name) for name in names},
                            offsets=np.concatenate([a.offsets, a.offsets[-1] + b.offsets[1:]]),
                            group=np.concatenate([a.group, a.group.max() + 1 + np.arange(len(b.group))]))
    else:
        traj = pieces[0]
    if not on_prompt:
        return traj
    mask = traj.loss_mask.copy()
    for start, prompt in zip(traj.offsets, traj.prompt_lengths, strict=False):
        mask[start + 1:start + prompt] = True
    fields = ("tokens", "offsets", "logprobs", "versions", "prompt_lengths", "group", "sample", "seed", "finish",
              "columns", "trajectory", "prefix")
    return Trajectories(**{name: getattr(traj, name) for name in fields}, loss_mask=mask)


def ask(parts: Parts, batch, traj, layout) -> tuple[dict, dict]:
    """(token columns of the loss, metrics) after the teacher has spoken; policy and reference as in rl."""
    s, policy, d = parts.s, parts.roles.policy, parts.s.spec.distill
    said = parts.teacher.ask(traj, layout, lambda: policy.most_probable(traj, layout))
    if d.loss == "sampled":
        columns = parts.roles.columns(traj, layout)
        if batch.staleness is not None:
            columns["staleness"] = batch.staleness
        own, mask = columns.get("old", columns["behaviour"]), traj.loss_mask
        found = sampled_advantages(own, said["teacher"], mask, traj.spans, coef=d.coef, gamma=d.gamma)
        columns["advantage"] = found.astype(np.float32)
        apart = float((own - said["teacher"])[mask].mean(dtype=np.float64))
        return columns, {"distill/divergence": apart, "distill/teacher_logprob": float(said["teacher"][mask].mean())}
    t = s.spec.teacher
    if t.save and s.peers.first:
        teacher_files.write(t.save, f"{s.step:08d}", traj, said["teacher_ids"], said["teacher_logprobs"],
                            vocabulary=teachers.vocabulary(parts.job.tokenizer), teacher=t.path,
                            temperature=d.teacher_temperature)
    return said, {}


def update_all(parts: Parts, traj, layout, columns, from_rows) -> dict[str, float]:
    """All passes over all minibatches; metrics are means over the optimizer steps."""
    c, policy, pending = parts.s.spec, parts.roles.policy, []
    a = c.algorithm
    dropped = a.mask_truncated & (traj.finish == 1)
    if a.early_stop_ratio or a.early_stop_kl:
        policy.held = start_of_step(policy.state)
    for _ in range(a.ppo_epochs):
        for minibatch in layout.minibatches:
            weights = training.loss_weights(
                traj, minibatch.sequences, a.aggregation, max_tokens=a.aggregation_constant or c.rollout.max_new_tokens,
                together=a.aggregation_sequences, dropped=dropped, positive=from_rows if c.distill.ce else None)
            packed = (training.pack(traj, m, columns, weights) for m in minibatch.microbatches)
            pending.append(policy.update(map(policy.put, packed)))
            if parts.rollouts is not None:
                parts.rollouts.poll()  # while the device works
    metrics = averaged([host_scalars(m) for m in pending])
    check_finite(policy.state, c)
    return metrics


def step_metrics(parts: Parts, batch, traj, layout, columns, per_completion) -> dict[str, float]:
    """Host metrics of one step."""
    s, c, count = parts.s, parts.s.spec, parts.speed.operations
    lengths, prompts = traj.total(), float(traj.prompt_lengths.sum())
    out = {"length/mean": float(lengths.mean()), "length/max": float(lengths.max()), "length/min": float(lengths.min()),
           "rollout/tokens": float(lengths.sum()), "rollout/prompt_tokens": prompts,
           "packing/efficiency": layout.efficiency,
           "flops/update": c.algorithm.ppo_epochs * count.update(traj, c.train.share_prompts)}
    if batch is None:
        return out
    nothing = np.zeros(batch.traj.num_trajectories)
    out = rollout_metrics(batch, nothing, per_completion, layout) | out
    s.telemetry.histograms(s.step, histograms(batch, {**columns, "behaviour": traj.logprobs}, per_completion))
    if c.distill.loss == "sampled":
        check_gap(c.algorithm.mismatch, s.step, out)
    if batch.result.parts and (c.eval.accuracy_from or "") in ("", *batch.result.parts):
        out["accuracy/train"] = float((judged(c, batch.result) >= c.reward.pass_mark).mean())
    return out
