"""PPO's critic: its model, its state and its steps. With critic.shared it is a head on the policy's own trunk."""

from __future__ import annotations

import dataclasses
import math

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
    """Mean and standard deviation of all returns so far (Chan et al.'s update of counts, means and squares)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count > 1 and self.squares > 0 else 1.0

    def add(self, x: np.ndarray) -> None:
        if not len(x):
            return
        n, mean = len(x), float(x.mean())
        delta, total = mean - self.mean, self.count + n
        self.squares += float(np.square(x - mean).sum()) + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total


class Critic(Role):
    """A part of a run (see Session.restore): its arrays and host values are in every checkpoint.

    Args:
      total_steps: of the run.
    """

    def __init__(self, job, total_steps: int):
        self.options, self.shared = job.config.critic, job.config.critic.shared
        super().__init__("critic", job)
        self.place = "policy" if self.shared else "critic"
        # of the policy's trunk with its adapters, or of a trunk of its own, which trains whole
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

    def abstract(self):
        return {} if self.shared else parameters.abstract_state(
            self.job, self.optimizer, self.tree, everything=True, role=self.place)

    def start(self, arrays, host: dict | None) -> None:
        """From a checkpoint's arrays and host values, or anew (None)."""
        if host:
            self.running = Running(**host)
        if not self.shared:
            with self.on():
                self.state = arrays if host else self._new()
            self.rest()

    def arrays(self):
        return {} if self.shared else self.state

    def host(self) -> dict:
        return dataclasses.asdict(self.running)

    def _new(self):
        """The trunk of critic.path, or the policy's at its start; the value head of a reward model, or zero."""
        job, abstract = self.job, self.abstract()
        dtype = parameters.DTYPES[job.config.train.param_dtype]
        shardings = parameters.param_shardings(job, tree=self.tree, role=self.place)
        source = self.options.path or (job.config.model.path if job.config.model.init == "pretrained" else "")
        if source:
            revision = self.options.revision if self.options.path else job.config.model.revision
            then = parameters.settled if self.streams else None
            params = hf.load_critic(self.tree, parameters.source_of(source), revision, shardings, dtype, then)
        else:
            init = lambda key: parameters.cast(self.tree, self.tree.init(key), dtype)  # noqa: E731
            params = jax.jit(init, out_shardings=shardings)(jax.random.key(job.config.run.seed))
        return parameters.new_state(job, self.optimizer, abstract, params, everything=True)

    # ---- its steps

    def values(self, policy_state, traj, layout):
        """(values [T] in units of the score, what the network says of them [T]) before any update of this step."""
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
        """The state where its devices can use it; what the optimizer keeps in host memory comes when it is applied."""
        if not self.rests:
            return state
        woken = memory.to_devices(state.replace(opt_state=None))
        keep = self.job.config.optimizer.offload
        return woken.replace(opt_state=state.opt_state if keep else memory.to_devices(state.opt_state))

    def columns(self, returns, raw, mask) -> dict[str, np.ndarray]:
        """Columns of the value loss, in the network's units."""
        if self.options.normalize:
            self.running.add(returns[mask])
            returns = (returns - self.running.mean) / self.running.std
        return {"return": returns.astype(np.float32), "old_value": raw}

    def learn(self, traj, columns, seed: int) -> list:
        """All its optimizer steps on one batch; returns their metrics on the device, none where the policy's update has
        them."""
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
