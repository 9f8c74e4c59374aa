"""The sets of parameters of a run, each on devices of its own choice: the policy, which learns, and those that stand
beside it.

All are of one type: where the parameters are (`mesh.roles`), whether they leave their devices between their uses, and
one `score` of tokens under them. A teacher or a reward model is another row of the same. The sampler's copy belongs to
the engine, which rests and wakes by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import optax

from jaxrl import training
from jaxrl.config import adapter_table
from jaxrl.errors import RunStopped
from jaxrl.models.adapters import adapter_set, peft
from jaxrl.models.io import hf
from jaxrl.processes.exchange import gather
from jaxrl.processes.group import peers
from jaxrl.roles import parameters
from jaxrl.sharding import memory
from jaxrl.sharding.mesh import processes_of
from jaxrl.telemetry.health import finite
from jaxrl.types import TrainState


class NothingFinite(RunStopped):
    """Too many updates in a row were not finite."""


class Role:
    """Parameters on the devices of a role.

    Args:
      name: of the role; "policy", "reference", "critic" ...
      job: what knows the role's mesh and whether it rests.
      score: (params, traj, layout) -> [T], compiled for the role's devices.
    """

    def __init__(self, name: str, job, score=None):
        self.name = self.place = name  # place: the role whose devices it has
        self.job, self._score = job, score
        self.held = None  # parameters, or the TrainState around them

    @functools.cached_property
    def rests(self) -> bool:
        return self.job.rests(self.place)

    @functools.cached_property
    def streams(self) -> bool:
        return self.job.streams(self.place)

    @functools.cached_property
    def put(self):
        """Host PackedBatch -> the role's devices."""
        return functools.partial(self.job.put, role=self.place)

    def on(self):
        """A context in which programs are those of the role's devices."""
        return self.job.on(self.place)

    def params(self):
        """The parameters as one tree, where the programs of its devices can use them."""
        held = self.held
        tree = training.merge(held.trainable, held.frozen) if isinstance(held, TrainState) else held
        return tree if self.streams else memory.to_devices(tree)

    def score(self, traj, layout, columns=None) -> np.ndarray:
        """[T] numbers of the scored tokens under these parameters: log-probs, or values. A role on some processes tells
        the others; all of them call this. columns: what is packed beside the tokens; None = what scoring takes."""
        where, scored = self.scored_by, None
        if where is None or jax.process_index() in where:
            with self.on():
                scored = self._score(self.params(), traj, layout, *([] if columns is None else [columns]))
        if where is None:
            return scored
        told = scored.tobytes() if jax.process_index() == where[0] else b""
        return np.frombuffer(gather(peers(), f"scores of the {self.name}", told)[where[0]], np.float32)

    @functools.cached_property
    def scored_by(self) -> list[int] | None:
        """Numbers of the processes that have its devices; None = all."""
        found = processes_of(self.job.mesh_of(self.place))
        return None if len(found) == jax.process_count() else found

    def rest(self) -> None:
        """Leaves its devices, where mesh.roles says so."""
        if self.rests:
            self.held = memory.to_host(self.held)


class Policy(Role):
    """The parameters that learn, with optimizer and update program. A session keeps it (see Session.restore).

    Args:
      objective: what the update minimises. updates: optimizer steps of the whole run, for the schedule.
    """

    def __init__(self, job, objective, updates: int, score=None):
        super().__init__("policy", job, score)
        self.optimizer, schedule = parameters.policy_optimizer(job, max(1, updates))
        self.program = training.make_update(job.model, self.optimizer, schedule, objective, parameters.in_parts(job))

    @property
    def state(self) -> TrainState:
        return self.held

    def update(self, batches) -> dict:
        """One optimizer step on microbatches; metrics stay on the device."""
        self.held, metrics = self.program(self.held, batches)
        return metrics

    def gradients(self, state, batches):
        """(gradient of the objective, metrics) of a state on microbatches, None without any; changes nothing."""
        return self.program.gradients(state, batches)

    def restart_optimizer(self) -> None:
        """The optimizer's state as at its start; learning-rate schedules go on where they are."""
        state = self.held
        fresh = training.streaming.init_in_parts(self.optimizer, state.trainable, state.opt_state)
        self.held = state.replace(opt_state=keep_schedules(fresh, state.opt_state))

    def export(self, folder) -> None:
        """Writes the model as a Hugging Face folder; of adapters what lora.export says, of several a folder in it for
        each."""
        job = self.job
        for k, name in enumerate(adapter_set.adapter_names(job.model)):
            own = adapter_set.take_leaves(job.model, k, {**self.held.trainable, **self.held.frozen})
            one = dataclasses.replace(job, model=adapter_set.select_model(job.model, k))
            options = adapter_table.lora_of(job.config, name)
            self._write(one, options, parameters.policy_params({}, own), Path(folder) / name)
        if not adapter_set.adapter_names(job.model):
            params = parameters.policy_params(self.held.trainable, self.held.frozen)
            self._write(job, job.config.lora, params, folder)

    @staticmethod
    def _write(job, options, params, folder) -> None:
        c = job.config.checkpoint
        if job.model.adapter is not None and options.export == "adapter":
            peft.write(folder, job.model, params, options, job.config.model.path, c.export_dtype)
            return
        hf.export(job.model.base, parameters.merged(job, params), folder, job.hf_config, c.export_dtype,
                  tokenizer=job.tokenizer, shard_gb=c.shard_gb, eos_ids=job.eos_ids)

    def weights(self):
        """The language model's parameters (nested tree), as the engine takes them; a copy where adapters are merged."""
        return parameters.published(self.job, parameters.policy_params(self.held.trainable, self.held.frozen))

    @contextlib.contextmanager
    def resting(self, engine):
        """In host memory meanwhile, where mesh.roles says so. The engine is told where the weights are that it may have
        to give to a server; else it would keep their old place alive."""
        if not self.rests:
            yield
            return
        where = jax.tree.map(lambda x: x.sharding, self.held)
        merged = parameters.engine_model(self.job) is not self.job.model  # the engine has a copy of its own
        if merged:
            engine.moved(memory.to_host(self.weights()))
        self.held = memory.to_host(self.held)
        if not merged:
            engine.moved(self.weights())
        try:
            yield
        finally:
            self.held = jax.device_put(self.held, where)
            if not merged:
                engine.moved(self.weights())

    # ---- what a session keeps

    def abstract(self) -> dict:
        self._abstract = parameters.abstract_state(self.job, self.optimizer)
        kept = parameters.kept(self.job, dict(vars(self._abstract)))
        return kept if self.job.model.adapter is None else {**kept, "base_digest": np.zeros(32, np.uint8)}

    def start(self, arrays: dict | None) -> None:
        if arrays is None:
            start = parameters.start_params(self.job)
            self.held = parameters.new_state(self.job, self.optimizer, self._abstract, start)
        else:
            arrays = dict(arrays)
            was = arrays.pop("base_digest", None)
            self.held = TrainState(**parameters.restored(self.job, self._abstract, arrays))
        if self.job.model.adapter is not None:
            self.base_digest = parameters.base_digest(self.held.frozen)
            if arrays is not None:
                parameters.check_base(self.base_digest, was)

    def arrays(self) -> dict:
        held = parameters.kept(self.job, dict(vars(self.held)))
        return held if self.job.model.adapter is None else {**held, "base_digest": self.base_digest}


class WeightSync:
    """Gives the engine the policy's weights, under the version = completed steps. give(params, version): the engine's,
    or that of what stands before it."""

    def __init__(self, s, policy: Policy, give):
        self.s, self.policy, self.give, self.version = s, policy, give, -1

    def __call__(self) -> None:
        self.s.together("new weights", lambda: self.give(self.policy.weights(), self.s.step) or True)
        self.version = self.s.step

    def catch_up(self) -> None:
        """Where the engine has the weights of an earlier step."""
        if self.version != self.s.step:
            self()


def check_finite(state: TrainState, config) -> None:
    """Raises NothingFinite after optimizer.max_nonfinite updates in a row that were not."""
    limit = config.optimizer.max_nonfinite
    for adapter, count in training.adapter_set.counter_by_adapter(state, "nonfinite_streak").items():
        streak = int(np.asarray(count))
        if streak < limit:
            continue
        whose = f" of the adapter {adapter}" * bool(adapter)
        raise NothingFinite(
            f"{streak} updates{whose} in a row had a non-finite loss or gradient (optimizer.max_nonfinite={limit});"
            f" parameters are unchanged since: {finite(config, config.run.dir)}")


def keep_schedules(fresh, old):
    """An optimizer state started anew whose learning-rate schedules go on where they were."""
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
    return jax.tree.map(lambda new, was: was if is_schedule(new) else new, fresh, old, is_leaf=is_schedule)
