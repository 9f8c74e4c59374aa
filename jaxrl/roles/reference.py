"""The reference policy that the KL pulls towards, and what it shares with the policy: temperature and precision of
log-probs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl import training
from jaxrl.models import adapters
from jaxrl.roles import parameters
from jaxrl.roles.role import Role
from jaxrl.sharding import memory
from jaxrl.training.score import cast_params, make_score


def trained_at(config) -> float:
    """The temperature of the trainer's log-probs."""
    return config.algorithm.temperature or config.rollout.temperature


def precision(job) -> dict:
    """The options of every objective of a job."""
    c = job.config
    fp16 = job.compute_dtype == jnp.float16
    return dict(chunk=c.train.logprob_chunk, max_grad_norm=c.optimizer.max_grad_norm, fp16=fp16,
                router_balance=c.train.router_balance, router_z=c.train.router_z,
                router_bias_rate=c.train.router_bias_rate,
                loss_scale=training.LossScale(**c.train.loss_scale))


class Reference(Role):
    """The frozen policy that the KL pulls towards. It is a part of the checkpoint only where it is reset on the way;
    else it can be made again. See Session.restore for what a part is."""

    def __init__(self, job, score=None):
        super().__init__("reference", job, score)
        self.options = job.config.reference
        self.dtype = parameters.DTYPES[self.options.dtype]
        self.moves = bool(self.options.reset_steps or self.options.reset_epochs)
        self.epochs = 0.0

    def abstract(self):
        if not self.moves:
            return {}
        shapes = jax.eval_shape(self.job.model.base.init, jax.random.key(0))
        placed = lambda s, where: jax.ShapeDtypeStruct(s.shape, self.dtype, sharding=where)  # noqa: E731
        found = jax.tree.map(placed, shapes, self._place())
        return memory.kept(found) if self.streams else found

    def start(self, arrays, host: dict | None) -> None:
        if host and self.moves:
            self.held, self.epochs = arrays, host["epochs"]
        elif self.job.here(self.name):
            with self.on():
                path, revision = self.options.path, self.options.revision
                start = parameters.initial_params(self.job, path, role=self.name, revision=revision)
                self.held = self._cast(start)
        self.rest()

    def _cast(self, params):
        """A copy in the reference's dtype; of one that streams, made array by array."""
        if not self.streams:
            return cast_params(params, self.dtype)
        cast = functools.partial(cast_params, dtype=self.dtype)
        return jax.tree.map(lambda x: memory.to_host(cast(x)) if memory.worth_it(x) else cast(x), params)

    def _place(self):
        return parameters.param_shardings(self.job, tree=self.job.model.base, role=self.name)

    def arrays(self):
        return self.held if self.moves else {}

    def host(self) -> dict | None:
        return {"epochs": self.epochs} if self.moves else None

    def after_step(self, policy, step: int, epoch: float) -> dict[str, float]:
        """Becomes the policy where a reset is due after `step` completed steps, at `epoch` passes over the data."""
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
        """Becomes the policy."""
        self.held = self._cast(policy.weights())
        if self.job.mesh_of(self.name) is not self.job.mesh:
            self.held = memory.moved(self.held, self._place())
        self.rest()


class BaseReference(Reference):
    """The reference of a policy that trains adapters: its own frozen base, so that there is no second copy. Scored by
    the model without adapters on the policy's layout, it is bitwise the model that the base was read from (on CPUs).

    Where the policy does not begin as its base (lora.path, modules that train whole), or where the reference moves, the
    few arrays that train are kept as they were then and scored with the same base; a checkpoint holds them.
    """

    policy = None  # set by rl.roles.Roles

    def __init__(self, job, score):
        super().__init__(job, score)
        self.place = "policy"
        self.alone = not (self.moves or job.config.lora.path or job.model.adapter.saved)
        if not self.alone:
            self._score = make_score(job.model, temperature=trained_at(job.config),
                                     chunk=job.config.train.logprob_chunk, put=self.put)

    def abstract(self):
        return {} if self.alone else _of_model(self.policy.abstract()["trainable"])

    def start(self, arrays, host: dict | None) -> None:
        if self.alone:
            return
        if host is None:
            self.take(self.policy)
        else:
            self.held, self.epochs = arrays, host["epochs"]

    def take(self, policy) -> None:
        copy = lambda x: parameters.settled(cast_params(x, x.dtype)) if memory.rests(x) else jnp.copy(x)  # noqa: E731
        self.held = jax.tree.map(copy, _of_model(policy.state.trainable))

    def params(self):
        frozen = self.policy.state.frozen
        if self.alone:
            return adapters.without(parameters.policy_params({}, frozen))
        return parameters.policy_params(self.held, frozen)

    def arrays(self):
        return {} if self.alone else self.held

    def host(self) -> dict | None:
        return None if self.alone else {"epochs": self.epochs}


def _of_model(flat: dict) -> dict:
    """The leaves that are not a value head's."""
    return {name: x for name, x in flat.items() if not name.startswith("value/")}
