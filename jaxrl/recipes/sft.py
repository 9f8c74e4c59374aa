"""Supervised fine-tuning: next-token loss on demonstrations, end-of-text included, packed like RL batches."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl import training
from jaxrl.data import Interrupted
from jaxrl.recipes.evaluate import evaluate, evaluate_only
from jaxrl.recipes.run import Run
from jaxrl.recipes.setup import host_scalars
from jaxrl.types import Trajectories


def run(config, given=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json."""
    held_out = bool(config.eval.sets or config.data.eval_fraction)
    with Run(config, given, with_engine=held_out) as r:
        if config.run.mode == "eval":
            return evaluate_only(r)
        r.prepare(
            updates_per_step=1,
            loss=training.LossConfig(
                kind="nll",
                chunk=r.job.config.train.logprob_chunk,
                max_grad_norm=config.optimizer.max_grad_norm,
                fp16=r.job.compute_dtype == jnp.float16,
            ),
        )
        r.before_first_step(answers_by_engine)
        pending = []
        while not r.finished():
            with r.phase("data"):
                try:
                    batch, cursor = r.stream.take(r.cursor)
                except Interrupted:
                    break
                traj = demonstrations([e for _, e in batch], [p for p, _ in batch], config.train.loss_on_prompt)
            with r.changing():
                r.fault("update")
                with r.phase("update"):
                    metrics, efficiency = one_update(r, traj)
                r.advance(cursor, samples=traj.num_trajectories)
            pending.append((metrics, traj, efficiency, r.speed.operations.update(traj, shared=False)))
            if r.step % config.log.every_steps == 0 or r.ended():
                with r.phase("update"):
                    line = averaged(pending)
                    r.check_finite()
                r.after_step(line | r.stream_metrics(), publish_and_answer, steps=len(pending))
                pending = []
        return r.close_run(publish_and_answer)


def demonstrations(examples, positions, loss_on_prompt: bool) -> Trajectories:
    """Prompt + target as trajectories: each sequence its own group, loss on the target (end-of-text included)."""
    tokens = [np.concatenate([e.prompt_ids, e.target_ids]).astype(np.int32) for e in examples]
    prompts = np.array([len(e.prompt_ids) for e in examples], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in tokens])]).astype(np.int64)
    first = np.where(loss_on_prompt, 1, np.maximum(prompts, 1))  # nothing predicts the very first token
    mask = np.concatenate([np.arange(len(t)) >= f for t, f in zip(tokens, first, strict=True)])
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
    )


def one_update(r: Run, traj: Trajectories):
    """One optimizer step on all sequences; metrics stay on the device."""
    job = r.job
    layout = training.make_layout(traj.sizes, job.row_shapes, share_prompts=False)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    batches = (job.put(training.pack(traj, m, {}, weights)) for m in layout.minibatches[0].microbatches)
    r.state, metrics = r.update(r.state, batches)
    return metrics, layout.efficiency


def averaged(pending) -> dict[str, float]:
    """Means over the updates since the last line, counts of tokens and operations too; one transfer per update."""
    steps = [host_scalars(m) for m, *_ in pending]
    out = {k: float(np.mean([s[k] for s in steps])) for k in steps[0]}
    lengths = np.concatenate([t.completion_lengths for _, t, *_ in pending])
    return out | {
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "rollout/tokens": float(lengths.sum()) / len(pending),
        "rollout/prompt_tokens": float(np.mean([t.prompt_lengths.sum() for _, t, *_ in pending])),
        "packing/efficiency": float(np.mean([e for _, _, e, _ in pending])),
        "flops/update": float(np.mean([flops for *_, flops in pending])),
    }


def answers_by_engine(r: Run):
    return evaluate(r)


def publish_and_answer(r: Run):
    r.publish()
    return answers_by_engine(r)
