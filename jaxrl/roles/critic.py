"""PPO's critic: its model, its state and its steps. With critic.shared it is a value head on the policy's trunk.

rl.roles makes it, rl.step.learn trains it. Advantages from its values are in rl.advantages.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import training
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.roles import parameters
from jaxrl.roles.role import Role
from jaxrl.sharding import memory
from jaxrl.training.optimizer import critics_optimizer
from jaxrl.training.score import make_value_score


@dataclasses.dataclass
class Running:
    """The running mean and standard deviation of all returns (Chan et al.'s update of counts, means and squares).

    Attributes:
      count: number of returns added. mean: their mean. squares: sum of their squared deviations from it.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The standard deviation (divisor: count); 1 while it is undefined or zero."""
        return math.sqrt(self.squares / self.count) if self.count > 1 and self.squares > 0 else 1.0

    def add(self, x: np.ndarray) -> None:
        """Adds returns x [n] float to the statistics, in place; none (n = 0) changes nothing."""
        if not len(x):
            return
        n, mean = len(x), float(x.mean())
        delta, total = mean - self.mean, self.count + n
        self.squares += float(np.square(x - mean).sum()) + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total


class Critic(Role):
    """The critic of a job. A part of a run (see Session.restore): every checkpoint has its arrays and host values.

    Args:
      job: run.setup.Job, whose config.critic has the options.
      total_steps: RL steps of the run; with epochs and minibatches they give the optimizer steps of the schedule.

    Attributes:
      shared: whether it is a value head on the policy's trunk, with no state of its own (critic.shared).
      running: Running, the statistics of returns by which critic.normalize scales values.
    """

    def __init__(self, job, total_steps: int):
        self.options, self.shared = job.config.critic, job.config.critic.shared
        super().__init__("critic", job)
        self.device_role = "policy" if self.shared else "critic"
        # the policy's trunk with its adapters, or a separate trunk, all of which trains
        self.model = job.model if self.shared else job.model.base
        self._score = make_value_score(self.model, put=self.put)
        self.epochs, minibatches = job.config.updates
        self.num_minibatches, self.running = self.options.num_minibatches or minibatches, Running()
        if self.shared:
            return
        self.tree = ValueModel(self.model, name=self.options.head)
        config = critics_optimizer(job.config)
        total = max(1, total_steps * self.epochs * self.num_minibatches)
        about = parameters.flat_axes(self.tree), parameters.flat_layers(job.model, self.tree)
        self.optimizer, schedule = training.make_optimizer(config, total, *about)
        self.loss = training.Value(clip=self.options.value_clip, chunk=job.config.train.logprob_chunk,
                                   max_grad_norm=config.max_grad_norm, fp16=job.compute_dtype == jnp.float16,
                                   loss_scale=training.LossScale(**job.config.train.loss_scale))
        self.update = training.make_update(self.model, self.optimizer, schedule, self.loss,
                                           training.in_parts(config.name))

    # ---- a part of the run

    def abstract(self) -> Any:
        """Returns shapes, dtypes and shardings of the TrainState; {} for a shared trunk."""
        return {} if self.shared else parameters.abstract_state(
            self.job, self.optimizer, self.tree, everything=True, role=self.device_role)

    def start(self, arrays, host: dict | None) -> None:
        """Starts from a checkpoint's arrays and host values, or from critic.path or the policy's start (None).

        arrays: the TrainState, as `arrays` returns it. host: fields of Running, as `host` returns it."""
        if host:
            self.running = Running(**host)
        if not self.shared:
            with self.on():
                self.state = arrays if host else self._new()
            self.rest()

    def arrays(self):
        """Returns the TrainState for a checkpoint; {} for a shared trunk."""
        return {} if self.shared else self.state

    def host(self) -> dict:
        """Returns the running statistics of returns for a checkpoint: the fields of Running by name."""
        return dataclasses.asdict(self.running)

    def _new(self):
        """Loads the trunk of critic.path or the policy's start; the value head of a reward model, or zeros."""
        job, abstract = self.job, self.abstract()
        dtype = parameters.DTYPES[job.config.train.param_dtype]
        shardings = parameters.param_shardings(job, tree=self.tree, role=self.device_role)
        source = self.options.path or (job.config.model.path if job.config.model.init == "pretrained" else "")
        if source:
            revision = self.options.revision if self.options.path else job.config.model.revision
            then = parameters.move_to_host if self.streamed_from_host else None
            params = hf.load_critic(self.tree, parameters.source_of(source), revision, shardings, dtype, then)
        else:
            init = lambda key: parameters.cast(self.tree, self.tree.init(key), dtype)  # noqa: E731
            params = jax.jit(init, out_shardings=shardings)(jax.random.key(job.config.run.seed))
        return parameters.new_state(job, self.optimizer, abstract, params, everything=True)

    # ---- its steps

    def values(self, policy_state, traj, layout):
        """Computes values of the states that loss tokens were sampled in, before any update of this step.

        Args:
          policy_state: TrainState of the policy, read with critic.shared. traj: Trajectories. layout: how they are
            packed.

        Returns:
          (values [T] float64 in units of the score, outputs of the network [T] float32, 0 except at loss tokens). With
          critic.normalize values are mean + std * output, by the running statistics before this step's returns, so they
          are `mean` except at loss tokens; else both are equal.
        """
        if self.shared:
            raw = self._score(training.merge(policy_state.trainable, policy_state.frozen), traj, layout)
        else:
            with self.on():
                self.state = self._awake(self.state)
                raw = self._score(training.merge(self.state.trainable, self.state.frozen), traj, layout)
        if not self.options.normalize:
            return raw.astype(np.float64), raw
        return self.running.mean + self.running.std * raw.astype(np.float64), raw

    def _awake(self, state):
        """Returns the state on its devices, except optimizer state that stays in host memory until it is applied."""
        if not self.rests:
            return state
        woken = memory.to_devices(state.replace(opt_state=None))
        keep = self.job.config.optimizer.offload
        return woken.replace(opt_state=state.opt_state if keep else memory.to_devices(state.opt_state))

    def columns(self, returns, raw, mask) -> dict[str, np.ndarray]:
        """Returns the columns of the value loss, in the network's units, and updates the running statistics.

        With critic.normalize the mask's returns are added to the statistics first, then (return - mean) / std; `raw`
        stays as it is, in the units that the statistics had before.

        Args:
          returns: [T] float in units of the score. raw: [T] float32 outputs of the network. mask: [T] bool, loss
            tokens.

        Returns:
          {"return": [T] float32, "old_value": raw}.
        """
        if self.options.normalize:
            self.running.add(returns[mask])
            returns = (returns - self.running.mean) / self.running.std
        return {"return": returns.astype(np.float32), "old_value": raw}

    def learn(self, traj, columns, seed: int) -> list:
        """Runs all its optimizer steps on one batch. The loss is a mean over the loss tokens of each minibatch.

        Args:
          traj: Trajectories of T tokens.
          columns: with return and old_value, [T] float32 (`columns`); others are left out.
          seed: of the shuffle into minibatches, at most one for each prompt group. All epochs have the same ones.

        Returns:
          The metrics of each step, on the device; [] for a shared trunk, which the policy's update trains.
        """
        if self.shared:
            return []
        job, c, pending = self.job, self.job.config, []
        layout = training.make_layout(
            traj.sizes, job.row_shapes, share_prompts=c.train.share_prompts,
            num_minibatches=min(self.num_minibatches, len(np.unique(traj.group))), seed=seed)
        columns = {name: columns[name] for name in ("return", "old_value")}
        with self.on():
            for _ in range(self.epochs):
                for minibatch in layout.minibatches:
                    weights = {"token": training.loss_weights(traj, minibatch.sequences, "token_mean")["token"]}
                    batches = (self.put(training.pack(traj, m, columns, weights)) for m in minibatch.microbatches)
                    self.state, metrics = self.update(self.state, batches)
                    pending.append(metrics)
        self.rest()
        return pending
