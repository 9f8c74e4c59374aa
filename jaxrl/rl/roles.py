"""Policy, critic and reference of an RL job as its algorithm options require, and the programs of their log-probs.

Called by the recipes rl and distill, by replay and by loops of one's own (docs/reference/python.md). The roles
themselves are in jaxrl.roles.
"""

from __future__ import annotations

import functools
import logging
import math

import numpy as np
from ml_collections import FrozenConfigDict

from jaxrl import training
from jaxrl.algorithms import kl_value
from jaxrl.errors import ConfigError
from jaxrl.processes.exchange import put
from jaxrl.rl.rollouts import staleness_buckets
from jaxrl.roles.critic import Critic
from jaxrl.roles.reference import BaseReference, Reference, precision, training_temperature
from jaxrl.roles.role import Policy
from jaxrl.rollout import engine_row
from jaxrl.training.score import make_score

log = logging.getLogger("jaxrl")


class Roles:
    """Policy, critic and reference of an RL job, its loss, and its log-prob programs. A step changes the roles alone.

    Args:
      job: run.setup.Job. total_steps: RL steps of the whole run, for schedules.

    Attributes:
      critic, reference: roles.critic.Critic and roles.reference.Reference, or None where the algorithm needs none.
      loss: training.PolicyGradient. score: the policy's log-probs (`scorer`).
      updates_per_step: optimizer steps of an RL step. old_source: algorithm.old_logprobs as resolved.

    Raises:
      ConfigError: an algorithm option does not fit the model.
    """

    def __init__(self, job, total_steps: int):
        self.job, self.total_steps = job, total_steps
        c = self.config = job.config
        vocab = job.model.config.vocab_size
        if c.algorithm.sampled_support and c.rollout.top_k > vocab:
            raise ConfigError(f"rollout.top_k={c.rollout.top_k}: the vocabulary has {vocab} tokens; lower it")
        if c.algorithm.routes != "own" and not job.model.config.routes:
            raise ConfigError(f"algorithm.routes={c.algorithm.routes}: the model has no experts; leave it out")
        self.updates_per_step = math.prod(c.updates)
        self.old_source = c.algorithm.old_logprobs
        self.samples_on_mesh = engine_row(c).on_mesh
        self.score = self.scorer(job, "policy")
        self.loss = training.PolicyGradient(
            options=FrozenConfigDict({**c.algorithm, "user": c.user}), temperature=training_temperature(c),
            staleness=staleness_buckets(c.rollout) if c.ahead else (), images=job.model.config.vision is not None,
            value_clip=c.critic.value_clip, value_coef=c.critic.coef if c.shares_trunk else 0.0, **precision(job))
        self.critic = Critic(job, total_steps) if c.needs_critic else None
        self.reference = None
        if c.needs_reference:
            kind = Reference if job.model.adapter is None or c.reference.path else BaseReference
            self.reference = kind(job, self.scorer(job, "reference"))

    def scorer(self, job, role: str):
        """Returns score(params, traj, layout) -> [T] float32 log-probs of the sampled tokens in nats, at
        reference.training_temperature, 0 at other tokens, compiled for a role's devices.

        The policy has its adapters, any other role none. With algorithm.routes=scored the policy's returns a dict,
        "logprob" [T] float32 and "routes" [T, n * K] int16, instead (training.score.make_score).

        role: "policy", "reference", or another name of a role.
        """
        model = job.model if role == "policy" else job.model.base
        scored = job.config.algorithm.routes == "scored"
        if role != "policy" and job.mesh_of(role) is job.mesh and model is job.model and not scored:
            return self.score
        return make_score(model, temperature=training_temperature(job.config), chunk=job.config.train.logprob_chunk,
                          put=functools.partial(job.put, role=role), routes=scored and role == "policy")

    @functools.cached_property
    def policy(self) -> Policy:
        """The parameters that train, with their optimizer: a Policy, made on first use, when the reference gets it. A
        recipe may set its own instead, before that; a reference then needs its `policy` set, too."""
        policy = Policy(self.job, self.loss, self.total_steps * self.updates_per_step, self.score)
        if self.reference is not None:
            self.reference.policy = policy
        return policy

    @property
    def parts(self) -> list:
        """The roles that a checkpoint holds besides the policy, in order: critic and reference, where they exist."""
        return [part for part in (self.critic, self.reference) if part is not None]

    def report_corrections(self, s, engine) -> None:
        """Prints which mismatch correction is on, and whether recomputed proximal log-probs are superfluous; warns if
        none corrects for completions of older weights.

        Raises ConfigError for a quantised engine without a correction."""
        mismatch = self.config.algorithm.mismatch
        if mismatch.correction == "none" and engine.info.quantized:
            raise ConfigError("algorithm.mismatch.correction=none with a quantised engine: it samples from another "
                              "policy than the one that is trained; use token_tis")
        if mismatch.correction == "none" and self.config.ahead and self.old_source != "rollout":
            log.warning("algorithm.mismatch.correction=none with rollout.max_staleness=%d, sync_every=%d: nothing "
                        "corrects for completions of older weights; set token_tis, or "
                        "algorithm.preset=decoupled_ppo", self.config.rollout.max_staleness,
                        self.config.rollout.sync_every)
        if mismatch.correction != "none":
            s.say(f"mismatch correction: {mismatch.correction}, cap {mismatch.cap:g}")
        if self.old_source == "recompute" and self.updates_per_step == 1:
            s.say("proximal log-probs are recomputed at every step; one optimizer step per batch does not need them: "
                  "algorithm.old_logprobs=auto skips this forward pass")

    def columns(self, traj, layout) -> dict[str, np.ndarray]:
        """Computes the token columns of log-probs that the loss or the reward reads.

        Args:
          traj: Trajectories of the batch. layout: training.Layout to score it in.

        Returns:
          name -> [T] float32 log-probs in nats (behaviour; old unless old_logprobs is "current"; ref with a
          reference), `support` [T, K] int32, `behind_image` [T] float32 (1 or 0) where rows may have images, and
          `routes` [T, n * K] int16 where the update replays routes: sampled routes, which proximal log-probs replay
          too, or the routes of the pass for proximal log-probs. With `support` all log-probs are of the distribution
          cut to it."""
        out = {"behaviour": traj.logprobs}
        if "support" in traj.columns:  # every log-prob is then of the distribution cut to it, as the tokens were drawn
            out = {"behaviour": traj.logprobs - traj.columns["kept"], "support": traj.columns["support"]}
        routes = self.config.algorithm.routes
        if routes == "sampled":
            nothing = np.full((len(traj.tokens), self.job.model.config.routes), -1, np.int16)
            out["routes"] = traj.columns.get("routes", nothing)
        if self.old_source == "recompute" and routes == "scored":
            proximal = self.policy.score(traj, layout)
            out |= {"old": proximal["logprob"], "routes": proximal["routes"]}
        elif self.old_source == "recompute":
            out["old"] = self.policy.score(traj, layout, {n: out[n] for n in ("support", "routes") if n in out} or None)
        elif self.old_source == "rollout":
            out["old"] = out["behaviour"]
        if self.reference is not None:
            out["ref"] = self.reference.score(traj, layout)
        if self.loss.images:
            out["behind_image"] = traj.behind_image.astype(np.float32)
        return out

    def operations(self, step: int, count, traj) -> dict[str, float]:
        """Returns flops/<phase>, the floating-point operations of the step that was just completed, over the
        completions that it trained on: score, update, and rollout if sampling runs on the job's own devices. Sampling
        on servers is not counted.

        Args:
          step: completed steps. count: telemetry.flops operations. traj: Trajectories.
        """
        epochs, shared = self.config.algorithm.ppo_epochs, self.config.train.share_prompts
        passes = (self.old_source == "recompute") + (self.reference is not None)
        score = passes * count.scoring(traj, shared) if passes else 0.0
        updates = step > self.config.critic.warmup_steps or self.critic is None
        update = updates * epochs * count.update(traj, shared)
        if self.critic is not None:
            score += count.scoring(traj, shared, head=False)
            update += (not self.critic.shared) * epochs * count.update(traj, shared, head=False)
        out = {"flops/score": score, "flops/update": update}
        return out | ({"flops/rollout": count.generation(traj)} if self.samples_on_mesh else {})

    def after_step(self, step: int, epoch: float) -> dict[str, float]:
        """Resets the reference if that is due after `step` completed steps and `epoch` passes over the data.

        Returns the reference's metrics.
        """
        return {} if self.reference is None else self.reference.after_step(self.policy, step, epoch)

    def kl(self, columns):
        """Returns the KL estimates, float64 [T] in nats, that are subtracted from the reward, before kl.coef; None if
        kl.placement is not the reward.

        columns: as of `columns`, with old and ref, of which the estimate is taken (algorithms.kl_value).
        """
        c = self.config
        return kl_value(columns["old"], columns["ref"], c.algorithm.kl.estimator) if c.kl_in_reward else None


def clear_early_stop(state):
    """Returns the state with the flag of an early stop (algorithm.early_stop_*) cleared, for the next step."""
    def cleared(stats):
        flag = stats["stopped"]
        return {**stats, "stopped": put(np.zeros((), flag.dtype), flag.sharding)}

    if training.adapter_set.is_adapter_set(state):
        return state.replace(stats={name: cleared(stats) for name, stats in state.stats.items()})
    return state.replace(stats=cleared(state.stats))
