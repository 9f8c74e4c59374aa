"""Reinforcement learning from rewards: generate, score, update, publish.

for step:
    prompts      <- the next data.prompts_per_step rows of the global shuffle
    trajectories <- rollout.group_size answers to each, from the engine
    scores       <- rewards of the answers
    layout       <- where every sequence goes, from lengths alone
    old, ref     <- log-probs under the proximal policy and the reference, where the algorithm needs them
    advantages   <- scores relative to their group
    for each pass, for each minibatch: one optimizer step
    publish the new weights to the engine
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import rewards as rewards_room
from jaxrl import training
from jaxrl.algorithms import group_advantages
from jaxrl.config import ConfigError, RunStopped
from jaxrl.config_checks import longest_sequence, resolved_algorithm
from jaxrl.recipes import parity
from jaxrl.recipes.evaluate import evaluate
from jaxrl.recipes.run import Run
from jaxrl.recipes.setup import DTYPES, host_scalars, initial_params
from jaxrl.recipes.trajectories import (
    answers,
    collect,
    make_requests,
    recorded_outcomes,
    records,
    reward_items,
    sampling_params,
)
from jaxrl.rollout import EngineLost, chosen_engine, generate
from jaxrl.training.score import cast_params, make_score

log = logging.getLogger("jaxrl")


def run(config, rewards=None) -> dict:
    """Trains (or, with run.mode=eval, evaluates) and returns the content of summary.json.

    Args:
      config: a checked ConfigDict.
      rewards: reward callables given from Python; they replace reward.functions.
    """
    with Run(config, rewards, with_engine=True) as r:
        if config.run.mode == "eval":
            return r.evaluate_only()
        if config.run.mode == "parity":
            return parity.report(r)
        algorithm = Algorithm(r)
        r.prepare(updates_per_step=algorithm.updates_per_step, loss=algorithm.loss)
        algorithm.begin(r)
        r.before_first_step(algorithm.evaluate)
        while not r.finished():
            try:
                metrics = one_step(r, algorithm)
            except EngineLost:  # the policy is intact: keep it
                r.save()
                r.checkpointer.wait()
                raise
            if metrics is None:  # asked to stop in the middle of a step: nothing of it is kept
                break
            r.after_step(metrics, algorithm.evaluate)
        return r.close_run(algorithm.evaluate)


class Algorithm:
    """The resolved algorithm row and what it needs per step: the loss, the scorer, the reference."""

    def __init__(self, r: Run):
        c, v = r.config, resolved_algorithm(r.config)
        self.values = v
        self.updates_per_step = v["ppo_epochs"] * v["num_minibatches"]
        recompute = c.algorithm.old_logprobs == "recompute" or (
            c.algorithm.old_logprobs == "auto" and self.updates_per_step > 1
        )
        self.old_source = (
            "recompute" if recompute else ("rollout" if c.algorithm.old_logprobs == "rollout" else "current")
        )
        self.reference = None
        self.score = make_score(
            r.job.model, temperature=c.rollout.temperature, chunk=c.train.logprob_chunk, put=r.job.put
        )
        self.loss = training.LossConfig(
            temperature=c.rollout.temperature,
            clip_low=v["clip_low"],
            clip_high=v["clip_high"],
            kl_coef=v["kl.coef"],
            kl_estimator=v["kl.estimator"],
            entropy_coef=v["entropy_coef"],
            old="current" if self.old_source == "current" else "column",
            mismatch=self.mismatch(r),
            mismatch_cap=c.algorithm.mismatch.cap,
            chunk=c.train.logprob_chunk,
            max_grad_norm=c.optimizer.max_grad_norm,
            fp16=r.job.compute_dtype == jnp.float16,
        )

    def mismatch(self, r: Run) -> str:
        c = r.config
        choice = c.algorithm.mismatch.correction
        if choice == "auto":
            fp32 = c.rollout.dtype == "fp32" or (c.rollout.dtype == "auto" and r.job.compute_dtype == jnp.float32)
            exact = fp32 and chosen_engine(c) == "jax"
            choice = "none" if exact or self.old_source == "rollout" else "token_tis"
        return choice

    def begin(self, r: Run) -> None:
        """Says what was decided; loads the frozen reference only where a KL term reads it."""
        if self.loss.mismatch == "none" and getattr(r.engine, "quantized", False):
            raise ConfigError("algorithm.mismatch.correction=none with a quantised engine: it samples from another policy than "
                              "the one that is trained; use token_tis")
        if self.loss.mismatch != "none":
            r.say(f"mismatch correction: {self.loss.mismatch}, cap {self.loss.mismatch_cap}")
        if self.loss.kl_coef:
            dtype = DTYPES[r.config.reference.dtype]
            self.reference = cast_params(initial_params(r.job, r.config.reference.path), dtype)

    def evaluate(self, r: Run):
        return evaluate(r.job, r.engine, r.eval_rewards, r.eval_sets, r.stopping)


def one_step(r: Run, algorithm: Algorithm) -> dict | None:
    """One RL step. Returns its metrics, or None when a stop was asked for before the update began."""
    c, job = r.config, r.job
    with r.phase("rollout"):
        sampled = sample(r)
    if sampled is None:
        return None
    traj, examples, asked, cursor = sampled
    with r.phase("reward"):
        texts = answers(traj, job.tokenizer)
        earlier = recorded_outcomes(r.telemetry.read_rollouts(r.step + 1), traj)
        r.fault("reward")
        result = r.rewards.score(reward_items(traj, examples, texts, c.data.response_prefix), recorded=earlier)
        scores = rewards_room.shape(result, traj.answer_lengths, traj.finish == 1, c.reward, c.rollout.max_new_tokens)
        advantages, zero_signal = group_advantages(
            scores, traj.group, mean=algorithm.values["advantage_mean"], std=algorithm.values["advantage_std"]
        )
    r.telemetry.rollouts(r.step + 1, records(traj, examples, texts, result, advantages))
    if r.stopping():
        return None

    layout = training.make_layout(
        traj.prompt_lengths,
        traj.answer_lengths,
        traj.group,
        job.row_shapes,
        share_prompts=c.train.share_prompts,
        num_minibatches=algorithm.values["num_minibatches"],
        seed=hash_seed(c.run.seed, r.step),
    )
    columns = {"advantage": np.repeat(advantages, traj.lengths).astype(np.float32), "behaviour": traj.logprobs}
    with r.phase("score"):
        if algorithm.old_source == "recompute":
            columns["old"] = algorithm.score(training.merge(r.state.trainable, r.state.frozen), traj, layout)
        elif algorithm.old_source == "rollout":
            columns["old"] = traj.logprobs
        if algorithm.reference is not None:
            columns["ref"] = algorithm.score(algorithm.reference, traj, layout)
    with r.phase("update"):
        r.fault("update")
        metrics = update_all(r, algorithm, traj, layout, columns)
    r.advance(cursor, samples=traj.num_sequences)
    with r.phase("publish"):
        r.publish()
    metrics |= rollout_metrics(traj, scores, result, zero_signal, advantages, layout, asked) | r.stream_metrics()
    metrics |= r.engine.metrics() if hasattr(r.engine, "metrics") else {}
    check_gap(c.algorithm.mismatch, r.step, metrics)
    judge = c.eval.accuracy_from or next(iter(result.parts))
    if judge in result.parts:  # it may be a reward of evaluation only
        metrics["accuracy/train"] = float((result.parts[judge] >= c.reward.pass_mark).mean())
    return metrics


def sample(r: Run):
    """(trajectories, their examples, number of requests, cursor behind their prompts); None when a stop was asked for."""
    c = r.config
    batch, cursor = r.stream.take(r.cursor)
    sampling = sampling_params(
        c.rollout,
        c.rollout.max_new_tokens,
        c.rollout.stop,
        c.rollout.stop_token_ids,
        c.rollout.keep_stop,
        c.rollout.min_new_tokens,
    )
    requests = make_requests(batch, c.rollout.group_size, sampling, c.run.seed, "train", r.step)
    r.fault("rollout")
    results = generate(r.engine, requests, c.rollout.timeout_seconds, r.stopping)
    if results is None:
        return None
    examples = [e for _, e in batch for _ in range(c.rollout.group_size)]
    kept, results, examples = answered(requests, results, examples)
    return collect(kept, results, longest_sequence(c)), examples, len(requests), cursor


def update_all(r: Run, algorithm: Algorithm, traj, layout, columns) -> dict[str, float]:
    """All passes over all minibatches; metrics are means over the optimizer steps (maxima for the gaps)."""
    c, pending = r.config, []
    for _ in range(algorithm.values["ppo_epochs"]):
        for minibatch in layout.minibatches:
            weights = training.loss_weights(
                traj, minibatch.sequences, algorithm.values["aggregation"], c.algorithm.mask_truncated
            )
            batches = (r.job.put(training.pack(traj, m, columns, weights)) for m in minibatch.microbatches)
            r.state, metrics = r.update(r.state, batches)
            pending.append(metrics)
    steps = [host_scalars(m) for m in pending]
    r.check_finite()
    return {
        k: float(np.max([s[k] for s in steps]) if k.endswith("/max") else np.mean([s[k] for s in steps]))
        for k in steps[0]
    }


def check_gap(limits, step: int, metrics: dict[str, float]) -> None:
    """Warns, or ends the run, where the sampler's log-probs are too far from the trainer's on average."""
    gap = metrics.get("gap/mean", 0.0)
    if limits.stop and gap > limits.stop:
        raise RunStopped(f"step {step}: the sampler's log-probs are {gap:.3g} nats per token away from the trainer's, more than "
                         f"algorithm.mismatch.stop={limits.stop:g}; --config.run.mode=parity looks for the cause")
    if limits.warn and gap > limits.warn:
        log.warning("step %d: the sampler's log-probs are %.3g nats per token away from the trainer's (algorithm.mismatch.warn="
                    "%g); --config.run.mode=parity looks for the cause", step, gap, limits.warn)


def answered(requests, results, examples):
    """Leaves out what the engine gave up: a failed generation is absent, it is not a wrong answer."""
    kept = [i for i, result in enumerate(results) if result.finish != "abort"]
    if not kept:
        raise RunStopped("rollout: not one request of this step was answered; see the log for the engine's reasons")
    return ([values[i] for i in kept] for values in (requests, results, examples))


def rollout_metrics(traj, scores, result, zero_signal, advantages, layout, asked: int) -> dict[str, float]:
    """Host metrics of one batch of answers, of `asked` requests."""
    lengths = traj.answer_lengths
    known = scores[np.isfinite(scores)]
    out = {
        "reward/mean": float(known.mean()) if len(known) else 0.0,
        "reward/std": float(known.std()) if len(known) else 0.0,
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/min": float(lengths.min()),
        "rollout/truncated_fraction": float((traj.finish == 1).mean()),
        "rollout/zero_signal_fraction": float(zero_signal.mean()),
        "rollout/absent_fraction": float(1 - len(known) / asked),
        "rollout/tokens": float(lengths.sum()),
        "rollout/prompt_tokens": float(traj.prompt_lengths.sum()),
        "rollout/kept_mass_mean": float(np.exp(traj.columns["kept"][traj.loss_mask]).mean()),
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "packing/efficiency": layout.efficiency,
    }
    for name, values in result.parts.items():
        if np.isfinite(values).any():
            out[f"reward/{name}"] = float(np.nanmean(values))
    return out | {k if "/" in k else f"reward/{k}": v for k, v in result.metrics.items()}


def hash_seed(root: int, step: int) -> int:
    """Seed of the minibatch shuffle of a step."""
    return int(np.asarray(jax.random.bits(jax.random.fold_in(jax.random.key(root), step))))
