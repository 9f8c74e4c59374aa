"""What the algorithm options come to: the loss, who scores what, and the models beside the policy."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import FrozenConfigDict

from jaxrl import training
from jaxrl.algorithms import kl_value
from jaxrl.config_checks import resolved_algorithm
from jaxrl.errors import ConfigError
from jaxrl.processes.exchange import put
from jaxrl.recipes import setup
from jaxrl.recipes.critic import Critic
from jaxrl.recipes.evaluate import evaluate
from jaxrl.recipes.supply import stale_buckets
from jaxrl.sharding import memory
from jaxrl.training.score import cast_params, make_score

log = logging.getLogger("jaxrl")
SAME_NAME = ("policy_loss", "ratio", "clip_low", "clip_high", "dual_clip", "delta", "cispo_max_ratio", "cispo_min_ratio",
             "sapo_tau_pos", "sapo_tau_neg", "dppo_low", "dppo_high", "entropy_coef", "entropy_target", "positive_nll_coef")


class Algorithm:
    """The resolved algorithm row and what it needs per step: the loss, the scorer, the reference, the critic."""

    def __init__(self, r):
        c, v = r.config, resolved_algorithm(r.config)
        self.values = v
        if c.algorithm.sampled_support:
            check_support(c, r.job.model.config.vocab_size)
        self.updates_per_step = v["ppo_epochs"] * v["num_minibatches"]
        self.kl_in_reward = bool(v["kl.coef"]) and v["kl.placement"] == "reward"
        self.old_source = c.algorithm.old_logprobs
        self.score = self.scorer(r, "policy")
        self.loss = self._loss(r)
        self.critic = Critic(r, v, self.loss) if v["advantage"] == "gae" else None
        self.reference = Reference(r, self.scorer(r, "reference")) if v["kl.coef"] else None

    def scorer(self, r, role: str):
        """score(params, traj, layout) -> [T] log-probs, on a role's devices."""
        if role != "policy" and r.job.mesh_of(role) is r.job.mesh:
            return self.score
        return make_score(r.job.model, temperature=r.config.rollout.temperature, chunk=r.job.config.train.logprob_chunk,
                          put=functools.partial(r.job.put, role=role))

    def _loss(self, r) -> training.LossConfig:
        c, v = r.config, self.values
        return training.LossConfig(
            temperature=c.rollout.temperature,
            **{name: v[name] for name in SAME_NAME},
            entropy_rate=c.algorithm.entropy_rate,
            entropy_max=c.algorithm.entropy_max,
            kl_coef=0.0 if self.kl_in_reward else v["kl.coef"],
            kl_estimator=v["kl.estimator"],
            value_coef=c.critic.coef if v["advantage"] == "gae" and c.critic.shared else 0.0,
            value_clip=c.critic.value_clip,
            old="current" if self.old_source == "current" else "column",
            mismatch=c.algorithm.mismatch.correction,
            mismatch_cap=v["mismatch.cap"],
            mismatch_low=v["mismatch.low"],
            sequence_delta=v["mismatch.sequence_delta"],
            early_stop_ratio=c.algorithm.early_stop_ratio,
            early_stop_kl=c.algorithm.early_stop_kl,
            chunk=r.job.config.train.logprob_chunk,
            max_grad_norm=c.optimizer.max_grad_norm,
            staleness=stale_buckets(c.rollout) if c.ahead else (),
            fp16=r.job.compute_dtype == jnp.float16,
            user=FrozenConfigDict(c.user),
        )

    @property
    def parts(self) -> list:
        """What a checkpoint holds beside the policy."""
        return [part for part in (self.critic, self.reference) if part is not None]

    def begin(self, r) -> None:
        """Says what was decided and is not in the row."""
        if self.loss.mismatch == "none" and getattr(r.engine, "quantized", False):
            raise ConfigError("algorithm.mismatch.correction=none with a quantised engine: it samples from another policy than "
                              "the one that is trained; use token_tis")
        if self.loss.mismatch == "none" and r.config.ahead and self.old_source != "rollout":
            log.warning("algorithm.mismatch.correction=none with rollout.max_staleness=%d, sync_every=%d: nothing corrects for answers "
                        "of older weights; set token_tis, or algorithm.preset=decoupled_ppo", r.config.rollout.max_staleness,
                        r.config.rollout.sync_every)
        if self.loss.mismatch != "none":
            r.say(f"mismatch correction: {self.loss.mismatch}, cap {self.loss.mismatch_cap:g}")
        if self.old_source == "recompute" and self.updates_per_step == 1:
            r.say("old log-probs are scored at every step, which one optimizer step per batch would not need")

    def evaluate(self, r):
        return evaluate(r)

    def columns(self, r, traj, layout) -> dict[str, np.ndarray]:
        """Token columns [T] of log-probs that the loss or the reward reads."""
        out = {"behaviour": traj.logprobs}
        if "support" in traj.columns:  # every log-prob is then of the distribution cut to it, as the tokens were drawn
            out = {"behaviour": traj.logprobs - traj.columns["kept"], "support": traj.columns["support"]}
        if self.old_source == "recompute":
            out["old"] = self.score(training.merge(r.state.trainable, r.state.frozen), traj, layout)
        elif self.old_source == "rollout":
            out["old"] = out["behaviour"]
        if self.reference is not None:
            out["ref"] = self.reference.score(traj, layout)
        return out

    def operations(self, r, traj) -> dict[str, float]:
        """flops/<phase> of the step that has just been done, on the answers it learnt from (a server's sampling is its own)."""
        count, v, shared = r.speed.operations, self.values, r.config.train.share_prompts
        passes = (self.old_source == "recompute") + (self.reference is not None)
        score = passes * count.scoring(traj, shared)
        updates = r.step > r.config.critic.warmup_steps or self.critic is None
        update = updates * v["ppo_epochs"] * count.update(traj, shared)
        if self.critic is not None:
            score += count.scoring(traj, shared, head=False)
            update += (not self.critic.shared) * v["ppo_epochs"] * count.update(traj, shared, head=False)
        out = {"flops/score": score, "flops/update": update}
        return out | ({"flops/rollout": count.generation(traj)} if r.config.rollout.engine == "jax" else {})

    def kl(self, columns):
        """[T] KL that is subtracted from the reward, or None."""
        return kl_value(columns["old"], columns["ref"], self.values["kl.estimator"]) if self.kl_in_reward else None


def check_support(c, vocab: int) -> None:
    """ConfigError where algorithm.sampled_support cannot be had."""
    if c.rollout.engine != "jax":
        raise ConfigError(f"algorithm.sampled_support with rollout.engine={c.rollout.engine}: only the embedded sampler tells its "
                          "support; set rollout.engine=jax")
    if c.rollout.top_k > vocab:
        raise ConfigError(f"rollout.top_k={c.rollout.top_k}: the vocabulary has {vocab} tokens; lower it")


class Reference:
    """The frozen policy that the KL pulls towards. It is a part of the checkpoint only where it is reset on the way; else it
    can be made again. See Run.prepare for what a part is."""

    name = "reference"

    def __init__(self, r, scorer=None):
        self.run, self.options, self.scorer = r, r.config.reference, scorer
        self.dtype = setup.DTYPES[self.options.dtype]
        self.moves = bool(self.options.reset_steps or self.options.reset_epochs)
        self.params, self.epochs = None, 0.0

    def abstract(self):
        if not self.moves:
            return {}
        shapes = jax.eval_shape(self.run.job.model.init, jax.random.key(0))
        place = self._place()
        return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, self.dtype, sharding=where), shapes, place)

    def start(self, arrays, host: dict | None) -> None:
        if host and self.moves:
            self.params, self.epochs = arrays, host["epochs"]
        else:
            with self.run.job.on("reference"):
                self.params = cast_params(setup.initial_params(self.run.job, self.options.path, role="reference",
                                                               revision=self.options.revision), self.dtype)
        self._rest()

    def _place(self):
        return setup.param_shardings(self.run.job, tree=self.run.job.model, role="reference")

    def _rest(self) -> None:
        if self.run.job.rests("reference"):
            self.params = memory.to_host(self.params)

    def score(self, traj, layout) -> np.ndarray:
        """[T] log-probs of the scored tokens."""
        with self.run.job.on("reference"):
            return self.scorer(memory.to_devices(self.params), traj, layout)

    def arrays(self):
        return self.params if self.moves else {}

    def host(self) -> dict | None:
        return {"epochs": self.epochs} if self.moves else None

    def after_step(self, r) -> dict[str, float]:
        """Resets where it is due; called when the step counts."""
        if not self.moves:
            return {}
        steps, passes, epoch = self.options.reset_steps, self.options.reset_epochs, r.stream.epoch(r.cursor)
        due = bool(steps and r.step % steps == 0)
        if passes and epoch - self.epochs >= passes - 1e-9:
            due, self.epochs = True, self.epochs + passes * int((epoch - self.epochs + 1e-9) / passes)
        if due:
            self.params = cast_params(setup.policy_params(r.state), self.dtype)
            if r.job.mesh_of("reference") is not r.job.mesh:
                self.params = memory.moved(self.params, self._place())
            self._rest()
            if self.options.reset_optimizer:
                fresh = jax.jit(r.optimizer.init, out_shardings=jax.tree.map(lambda x: x.sharding, r.state.opt_state))
                r.state = r.state.replace(opt_state=keep_schedules(fresh(r.state.trainable), r.state.opt_state))
        return {"policy/reference_reset": float(due)}


def keep_schedules(fresh, old):
    """An optimizer state started anew whose learning-rate schedules go on where they were."""
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
    return jax.tree.map(lambda new, was: was if is_schedule(new) else new, fresh, old, is_leaf=is_schedule)


def start_of_step(state):
    """The state with the flag of an early stop cleared."""
    flag = state.stats["stopped"]
    return state.replace(stats={**state.stats, "stopped": put(np.zeros((), flag.dtype), flag.sharding)})


