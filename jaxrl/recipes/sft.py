"""Supervised fine-tuning: next-token loss on demonstrations, end-of-text included, packed like RL batches.

Its data is read by jaxrl.data, its loop is run.fit; the recipes preference and distill use its helpers.
"""

from __future__ import annotations

import zlib

import numpy as np

from jaxrl import training
from jaxrl.config import adapter_table
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import Evaluation, evaluate_only
from jaxrl.roles.reference import precision
from jaxrl.roles.role import Policy, check_finite, host_scalars
from jaxrl.run.fit import StepResult, fit
from jaxrl.run.session import Session
from jaxrl.run.setup import open_run
from jaxrl.types import Pictures, Trajectories


def run(config, inputs=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json.

    Args:
      config: a checked ConfigDict, or a Spec.
      inputs: Python objects of the caller (jaxrl.run.python_api.PythonInputs), or None.

    Raises ConfigError for inputs that cannot be used, and as run.fit.fit does."""
    held_out = bool(config.eval.sets or config.data.eval_fraction)
    with Session(resolve(config), inputs) as s:
        job = open_run(s, with_engine=held_out)
        c = job.config
        if c.run.mode == "eval":
            return evaluate_only(s, job)
        policy = Policy(job, training.NextToken(**precision(job)), s.total_steps)

        pending = PendingSteps(s, job, policy)

        def open_step(speed):
            def step():
                with s.phase("data"):
                    batch, cursor = job.stream.take(s.progress.cursor)
                    traj = demonstrations([e for _, e in batch], [p for p, _ in batch], c.train.loss_on_prompt,
                                          job.images)
                    traj = add_adapter_column(c, traj, [e for _, e in batch])
                with s.changing():
                    s.fault("update")
                    with s.phase("update"):
                        metrics, packing = one_update(job, policy, traj, s.step)
                    s.advance(cursor, samples=traj.num_trajectories)
                pending.steps.append((metrics, traj, packing, speed.operations.update(traj, shared=False)))
                return pending.line_if_due()

            return step

        return fit(s, job, policy, open_step, publish=job.engine.publish if held_out else None,
                   evaluation=lambda sync: Evaluation(s, job, sync), unlogged=pending.line)


class PendingSteps:
    """The steps since the last line of metrics, whose metrics stay on the devices until a line is due.

    Attributes:
      steps: (metrics on the device, Trajectories, Layout.metrics, operations) per step; cleared when logged."""

    def __init__(self, s, job, policy: Policy):
        self.s, self.job, self.policy, self.steps = s, job, policy, []

    def line_if_due(self):
        """Returns `line` if one is due, else {}: every log.every_steps steps, where an evaluation, save or export is
        due, and at the end. Collective."""
        s, every = self.s, self.job.config.log.every_steps
        return self.line() if s.step % every == 0 or s.ended() or s.anything_due() else {}

    def line(self):
        """Returns the StepResult of the pending steps, {} without any. Raises RunStopped after optimizer.max_nonfinite
        updates in a row that were not finite."""
        if not self.steps:
            return {}
        with self.s.phase("update"):  # where the devices are waited for
            metrics = line_metrics(self.steps)
            check_finite(self.policy.state, self.job.config)
        steps = len(self.steps)
        self.steps.clear()
        return StepResult(metrics, steps=steps)


def demonstrations(examples, positions, loss_on_prompt: bool, images=None) -> Trajectories:
    """Builds Trajectories of prompt + target, each a sequence; behaviour log-probs are 0, versions -1.

    The loss mask covers the target, end-of-text included; with several turns, the model's turns alone. Image tokens are
    never in it, nor is the first token of a sequence, which nothing predicts.

    Args:
      examples: N rows with 1-D int arrays prompt_ids and target_ids, and `trained`: bools of the last tokens of a
        sequence, True where the loss reads them; None = the whole target.
      positions: N ints, of the examples in the data; they become the groups.
      loss_on_prompt: the loss mask covers all tokens, those between turns too.
      images: the job's ImageSource; None for text.
    """
    tokens = [np.concatenate([e.prompt_ids, e.target_ids]).astype(np.int32) for e in examples]
    prompts = np.array([len(e.prompt_ids) for e in examples], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in tokens])]).astype(np.int64)
    first = np.where(loss_on_prompt, 1, np.maximum(prompts, 1))  # nothing predicts the very first token
    mask = np.concatenate([np.arange(len(t)) >= f for t, f in zip(tokens, first, strict=True)])
    if not loss_on_prompt:  # otherwise tokens between turns, the prompt of later turns, are trained on too
        for example, end in zip(examples, offsets[1:], strict=True):
            if example.trained is not None:
                mask[end - len(example.trained):end] &= example.trained
    pictures = images and Pictures.of([e.images for e in examples], images)
    if pictures:
        mask[pictures.tokens(offsets)] = False
    flat, n = np.concatenate(tokens), len(examples)
    zeros = np.zeros(len(flat), np.float32)
    return Trajectories(
        tokens=flat,
        offsets=offsets,
        loss_mask=mask,
        logprobs=zeros,
        versions=zeros.astype(np.int32) - 1,
        prompt_lengths=prompts,
        group=np.array(positions, np.int64),
        sample=np.zeros(n, np.int32),
        seed=np.zeros(n, np.uint32),
        finish=np.zeros(n, np.int8),
        pictures=pictures,
    )


def add_adapter_column(config, traj: Trajectories, examples) -> Trajectories:
    """Adds the token column `adapter`, [T] int32, to traj in place if lora.adapters names several; returns traj.

    A token has the number of the adapter that trains on its row's source. examples: one for each trajectory."""
    if config.lora.adapters:
        number = [adapter_table.number_of(config, "sources", example.source) for example in examples]
        traj.columns["adapter"] = traj.spread(np.array(number, np.int32))
    return traj


def one_update(job, policy: Policy, traj: Trajectories, step: int):
    """Runs one optimizer step on all sequences, with the mean of -log-prob over all loss tokens of the batch.

    In an adapter set the mean is over the loss tokens of each adapter. Returns (metrics, which stay on the device;
    Layout.metrics). step: completed steps; with lora.dropout it is in the seeds, so a resumed run repeats them.
    """
    layout, traj = training.make_layout(traj.sizes, job.row_shapes, share_prompts=False), policy.shown(traj)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")

    def columns(number: int) -> dict:
        """With lora.dropout each microbatch has its own seed, the same in a resumed run."""
        if not job.config.lora.dropout:
            return {}
        seed = zlib.crc32(f"{job.config.run.seed} {step} {number}".encode()) >> 1
        return {"dropout": np.full(len(traj.tokens), seed, np.int32)}

    metrics = policy.update(policy.put(training.pack(traj, m, columns(i), weights))
                            for i, m in enumerate(layout.minibatches[0].microbatches))
    return metrics, layout.metrics()


def line_metrics(pending) -> dict[str, float]:
    """Averages metrics, token counts and operations over the updates since the last line; one transfer per update.

    Metrics, `rollout/*` and `flops/update` are means over updates; `length/mean` and `length/max` are completion
    tokens, over all sequences.

    pending: (metrics on the device, Trajectories, Layout.metrics, operations) of each update.
    """
    steps = [training.adapter_set.mean_over_adapters(host_scalars(m)) for m, *_ in pending]
    names = dict.fromkeys(k for s in steps for k in s)
    out = {k: float(np.mean([s[k] for s in steps if k in s])) for k in names}
    lengths = np.concatenate([t.completion_lengths for _, t, *_ in pending])
    return out | {
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "rollout/tokens": float(lengths.sum()) / len(pending),
        "rollout/prompt_tokens": float(np.mean([t.prompt_lengths.sum() for _, t, *_ in pending])),
        **{name: float(np.mean([packing[name] for _, _, packing, _ in pending])) for name in pending[0][2]},
        "flops/update": float(np.mean([flops for *_, flops in pending])),
    }
