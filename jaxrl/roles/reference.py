"""The reference policy of the KL penalty, and the options that it shares with the policy: temperature and precision.

rl.roles makes it; roles.sums caches its sums for preference losses.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl import training
from jaxrl.models import adapters
from jaxrl.roles import parameters
from jaxrl.roles.role import Policy, Role, policy_params
from jaxrl.sharding import memory
from jaxrl.training.score import cast_params, make_score


def training_temperature(config) -> float:
    """Returns the temperature of the trainer's log-probs: algorithm.temperature, or else rollout.temperature."""
    return config.algorithm.temperature or config.rollout.temperature


def precision(job) -> dict:
    """Returns the keyword arguments that every objective of a job takes: chunk, max_grad_norm, fp16, router_balance,
    router_z, router_bias_rate and loss_scale, from the options of train and optimizer."""
    c = job.config
    fp16 = job.compute_dtype == jnp.float16
    return dict(chunk=c.train.logprob_chunk, max_grad_norm=c.optimizer.max_grad_norm, fp16=fp16,
                router_balance=c.train.router_balance, router_z=c.train.router_z,
                router_bias_rate=c.train.router_bias_rate,
                loss_scale=training.LossScale(**c.train.loss_scale))


class Reference(Role):
    """The frozen policy of the KL penalty, in reference.dtype.

    A part of checkpoints (see Session.restore); they hold its arrays only if it is reset during the run, otherwise it
    is loaded again.

    Args:
      job: run.setup.Job. score: (params, traj, layout) -> [T] float32 log-probs in nats.

    Attributes:
      policy: the Policy whose base it is where adapters train, and whose image features it reads; rl.roles.Roles and
        sums.ReferenceSums set it before its first use.
      moves: whether it is reset during the run (reference.reset_steps, reference.reset_epochs).
      epochs: passes over the data at which a reset was last due.
    """

    # whose base it is where adapters train, and whose features it reads: set by rl.roles.Roles and sums.ReferenceSums
    policy: Policy

    def __init__(self, job, score=None):
        super().__init__("reference", job, score)
        self.options = job.config.reference
        self.dtype = parameters.DTYPES[self.options.dtype]
        self.moves = bool(self.options.reset_steps or self.options.reset_epochs)
        self.epochs = 0.0

    def shown(self, traj):
        """Returns a batch (Trajectories) with the features that the policy keeps of its pictures, if it keeps any.

        A batch without pictures is returned unchanged. So is any batch if reference.path is set: that model has its own
        image tower. Collective."""
        return traj if traj.pictures is None or self.options.path else self.policy.shown(traj)

    def abstract(self):
        """Returns shapes, dtypes and shardings of its checkpointed arrays; {} if it never changes."""
        if not self.moves:
            return {}
        shapes = jax.eval_shape(self.job.model.base.init, jax.random.key(0))
        placed = lambda s, where: jax.ShapeDtypeStruct(s.shape, self.dtype, sharding=where)  # noqa: E731
        found = jax.tree.map(placed, shapes, self._place())
        return memory.kept(found) if self.streamed_from_host else found

    def start(self, arrays, host: dict | None) -> None:
        """Starts from a checkpoint, or from reference.path or the policy's start (None).

        arrays: nested tree as `arrays` returns it. host: as `host` returns it. Both are read only if it is reset during
        the run. Processes without devices of the reference load nothing."""
        if host and self.moves:
            self.state, self.epochs = arrays, host["epochs"]
        elif self.job.here(self.name):
            with self.on():
                path, revision = self.options.path, self.options.revision
                start = parameters.initial_params(self.job, path, role=self.name, revision=revision)
                self.state = self._cast(start)
        self.rest()

    def _cast(self, params):
        """Returns a copy in the reference's dtype; made array by array if it is streamed from host memory."""
        if not self.streamed_from_host:
            return cast_params(params, self.dtype)
        cast = functools.partial(cast_params, dtype=self.dtype)
        return jax.tree.map(lambda x: memory.to_host(cast(x)) if memory.worth_it(x) else cast(x), params)

    def _place(self):
        return parameters.param_shardings(self.job, tree=self.job.model.base, role=self.name)

    def arrays(self):
        """Returns its arrays for a checkpoint (nested tree in reference.dtype); {} if it never changes."""
        return self.state if self.moves else {}

    def host(self) -> dict | None:
        """Returns its host values for a checkpoint, {"epochs": of the last reset}; None if it never changes."""
        return {"epochs": self.epochs} if self.moves else None

    def after_step(self, policy, step: int, epoch: float) -> dict[str, float]:
        """Copies the policy if a reset is due after `step` completed steps and `epoch` passes over the data.

        With reference.reset_optimizer the policy's optimizer starts again, too.

        Returns {"policy/reference_reset": 1.0 if it was reset, else 0.0}; {} if it is never reset."""
        if not self.moves:
            return {}
        steps, passes = self.options.reset_steps, self.options.reset_epochs
        due = bool(steps and step % steps == 0)
        if passes and epoch - self.epochs >= passes - 1e-9:
            due, self.epochs = True, self.epochs + passes * int((epoch - self.epochs + 1e-9) / passes)
        if due:
            self.take(policy)
            if self.options.reset_optimizer:
                policy.restart_optimizer()
        return {"policy/reference_reset": float(due)}

    def take(self, policy) -> None:
        """Copies the policy's weights as the engine takes them (Policy.weights), in reference.dtype, to its devices."""
        self.state = self._cast(policy.weights())
        if self.job.mesh_of(self.name) is not self.job.mesh:
            self.state = memory.moved(self.state, self._place())
        self.rest()


class BaseReference(Reference):
    """The reference of a policy that trains adapters: its own frozen base, without a second copy.

    The model without adapters scores it on the policy's layout, bitwise as the model that the base was read from (on
    CPUs). If the policy does not begin as its base (lora.path, modules that train whole), or if the reference is reset,
    copies of the few trained arrays are scored with the same base; a checkpoint holds them.
    """


    def __init__(self, job, score):
        super().__init__(job, score)
        self.device_role = "policy"
        self.alone = not (self.moves or job.config.lora.path or job.model.adapter.saved)
        if not self.alone:
            self._score = make_score(job.model, temperature=training_temperature(job.config),
                                     chunk=job.config.train.logprob_chunk, put=self.put)

    def abstract(self):
        """Returns shapes, dtypes and shardings of its checkpointed arrays, a flat dict by name; {} for the base alone.
        """
        return {} if self.alone else _of_model(self.policy.abstract()["trainable"])

    def start(self, arrays, host: dict | None) -> None:
        """Starts from a checkpoint's arrays and host values, or as a copy of the policy (None); does nothing for the
        base alone.

        arrays: flat dict of what the policy trains. host: {"epochs": of the last reset}."""
        if self.alone:
            return
        if host is None:
            self.take(self.policy)
        else:
            self.state, self.epochs = arrays, host["epochs"]

    def take(self, policy) -> None:
        """Copies the arrays that the policy trains, without a value head, in their dtypes."""
        def copy(x):
            return parameters.move_to_host(cast_params(x, x.dtype)) if memory.rests(x) else jnp.copy(x)

        self.state = jax.tree.map(copy, _of_model(policy.state.trainable))

    def params(self):
        """Returns the parameters (nested tree): the policy's frozen base, with the copied adapters if there are any."""
        frozen = self.policy.state.frozen
        if self.alone:
            return adapters.without(policy_params({}, frozen))
        return policy_params(self.state, frozen)

    def arrays(self):
        """Returns its arrays for a checkpoint, a flat dict by name; {} for the base alone."""
        return {} if self.alone else self.state

    def host(self) -> dict | None:
        """Returns its host values for a checkpoint, {"epochs": of the last reset}; None for the base alone."""
        return None if self.alone else {"epochs": self.epochs}


def _of_model(flat: dict) -> dict:
    """Returns the parameters that do not belong to a value head."""
    return {name: x for name, x in flat.items() if not name.startswith("value/")}
