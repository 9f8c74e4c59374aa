"""Role, a set of parameters of a run on the devices that mesh.roles gives it; Policy, the one that trains; WeightSync.

A Role knows where its parameters are, whether they leave their devices between uses, and how to score tokens under
them. Reference, critic, teacher and reward model are roles, too. The engine owns and moves the sampler's copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import unflatten_dict

from jaxrl import training
from jaxrl.config import adapter_table
from jaxrl.errors import RunStopped
from jaxrl.models.adapters import adapter_set, peft
from jaxrl.models.io import hf
from jaxrl.processes.exchange import gather, put
from jaxrl.processes.group import peers
from jaxrl.roles import parameters
from jaxrl.roles.kept_features import KeptFeatures, keeps_features
from jaxrl.sharding import memory
from jaxrl.sharding.mesh import batch_sharding, processes_of
from jaxrl.telemetry.health import finite
from jaxrl.types import TrainState


class NothingFinite(RunStopped):
    """Raised after optimizer.max_nonfinite updates in a row whose loss or gradient was not finite."""


class Role:
    """A set of parameters on the devices of a role.

    Args:
      name: of the role: "policy", "reference", "critic" ...
      job: run.setup.Job, which knows the role's mesh and whether it rests in host memory.
      score: (params, traj, layout) -> [T] float32, compiled for the role's devices; None for one that is not scored.

    Attributes:
      state: the parameters (nested tree), or the TrainState around them; None before `start`.
      device_role: name of the role whose devices it uses.
    """

    state: Any

    def __init__(self, name: str, job, score: Any = None):
        self.name = self.device_role = name
        self.job, self._score = job, score
        self.state = None

    @functools.cached_property
    def rests(self) -> bool:
        """Whether the parameters move to host memory between uses."""
        return self.job.rests(self.device_role)

    @functools.cached_property
    def streamed_from_host(self) -> bool:
        """Whether the parameters stay in host memory and are streamed through the programs that use them."""
        return self.job.streams(self.device_role)

    @functools.cached_property
    def put(self):
        """A function that puts a host PackedBatch on the role's devices (sharding.mesh.batch_sharding)."""
        return functools.partial(put, sharding=batch_sharding(self.job.mesh_of(self.device_role)))

    def on(self):
        """Returns a context in which programs run on the role's devices."""
        return self.job.on(self.device_role)

    def params(self):
        """Returns the parameters as one nested tree, on the devices; those of a streamed role stay in host memory.

        Trap: of a TrainState the arrays are shared with `state`, and an update donates them."""
        state = self.state
        tree = training.merge(state.trainable, state.frozen) if isinstance(state, TrainState) else state
        return tree if self.streamed_from_host else memory.to_devices(tree)

    def shown(self, traj):
        """Returns a batch (Trajectories) as this role's passes read it: as it is, unless a role that keeps image
        features replaces patches by them. Collective."""
        return traj

    def score(self, traj, layout, columns=None) -> np.ndarray:
        """Scores a batch under these parameters. Collective: processes without devices of the role receive the result.

        Args:
          traj: Trajectories of T tokens. layout: their training.layout.Layout, by which they are packed.
          columns: {name: [T, ...]} token columns to pack with the batch; None = those that scoring takes by default.

        Returns:
          [T] float32, log-probs (nats) or values at loss tokens, 0 on the others; read-only where it was received. What
          the role's own score function gives may be a dict instead (training.score.make_score with routes).
        """
        where, sent, traj = self.scored_by, b"", self.shown(traj)
        if where is None or jax.process_index() in where:
            with self.on():
                scored = self._score(self.params(), traj, layout, *([] if columns is None else [columns]))
            if where is None:
                return scored
            sent = scored.tobytes() if jax.process_index() == where[0] else b""
        return np.frombuffer(gather(peers(), f"scores of the {self.name}", sent)[where[0]], np.float32)

    @functools.cached_property
    def scored_by(self) -> list[int] | None:
        """The indices of the processes that have its devices; None = all."""
        found = processes_of(self.job.mesh_of(self.device_role))
        return None if len(found) == jax.process_count() else found

    def rest(self) -> None:
        """Moves the parameters to host memory if mesh.roles.<role>.rest asks for it."""
        if self.rests:
            self.state = memory.to_host(self.state)


class Policy(Role):
    """The parameters that train, with optimizer and update program. A session checkpoints it (see Session.restore).

    Args:
      job: run.setup.Job.
      objective: training.Objective that the update minimises.
      updates: optimizer steps of the whole run, at least 1, for the learning-rate schedule.
      score: (params, traj, layout) -> [T] float32 log-probs in nats; None = it is not scored.

    Attributes:
      state: TrainState; its `trainable` and `frozen` are flat dicts.
      adapters: names of an adapter set; () without one.
    """

    def __init__(self, job, objective, updates: int, score=None):
        super().__init__("policy", job, score)
        self.optimizer, schedule = parameters.policy_optimizer(job, max(1, updates))
        self.program = training.make_update(job.model, self.optimizer, schedule, objective, parameters.in_parts(job))
        self.adapters = adapter_table.names(job.config)  # of an adapter set; () without one

    @functools.cached_property
    def features(self) -> KeptFeatures | None:
        """The features of images that are kept; None if the tower trains, train.image_features is "fresh", or no row
        has an image."""
        if self.job.images is None or not keeps_features(self.job.config, self.job.model):
            return None

        def tower():
            flat = {name: x for name, x in self.state.frozen.items() if name.startswith("vision/")}
            return memory.to_devices(unflatten_dict(flat, sep="/"))["vision"]

        return KeptFeatures(self.job, tower, self.put)

    def shown(self, traj):
        """Returns a batch (Trajectories) with kept image features in place of patches, if the policy keeps any; else
        the batch itself. Collective."""
        return traj if self.features is None else self.features.shown(traj)

    def update(self, batches) -> dict:
        """Runs one optimizer step on the microbatches of a minibatch; returns its metrics, on the device.

        batches: device PackedBatches whose loss weights are divided for the whole optimizer step
        (training.loss_weights). The TrainState's buffers are donated: copies of the old state have to be made before.
        """
        self.state, metrics = self.program(self.state, batches)
        return metrics

    def gradients(self, state, batches):
        """Returns (gradient of the objective, metrics) of a state on microbatches, or None without any. Changes
        nothing.

        The gradient is a flat dict by the names of state.trainable, the sum over microbatches, neither clipped nor
        averaged; in fp16 it is that of the loss times stats["loss_scale"]. batches: device PackedBatches, as for
        `update`."""
        return self.program.gradients(state, batches)

    def restart_optimizer(self) -> None:
        """Resets the optimizer's state; learning-rate schedules continue."""
        state = self.state
        fresh = training.streaming.init_in_parts(self.optimizer, state.trainable, state.opt_state)
        self.state = state.replace(opt_state=keep_schedules(fresh, state.opt_state))

    def export(self, folder) -> None:
        """Writes a Hugging Face folder, in checkpoint.export_dtype; one that is there is replaced. Collective.

        It holds the merged model, or with lora.export=adapter the adapter in PEFT's files; each of an adapter set is in
        a subfolder of its name."""
        job = self.job
        for k, name in enumerate(adapter_set.adapter_names(job.model)):
            own = adapter_set.take_leaves(job.model, k, {**self.state.trainable, **self.state.frozen})
            one = dataclasses.replace(job, model=adapter_set.select_model(job.model, k))
            options = adapter_table.lora_of(job.config, name)
            self._write(one, options, policy_params({}, own), Path(folder) / name)
        if not adapter_set.adapter_names(job.model):
            params = policy_params(self.state.trainable, self.state.frozen)
            self._write(job, job.config.lora, params, folder)

    @staticmethod
    def _write(job, options, params, folder) -> None:
        c = job.config.checkpoint
        if job.model.adapter is not None and options.export == "adapter":
            peft.write(folder, job.model, params, options, job.config.model.path, c.export_dtype)
            return
        hf.export(job.model.base, parameters.merge_adapters(job, params), folder, job.hf_config, c.export_dtype,
                  tokenizer=job.tokenizer, shard_gb=c.shard_gb, eos_ids=job.eos_ids)

    @functools.cached_property
    def merges_adapters(self) -> bool:
        """Whether the engine gets a copy in which adapters are merged (lora.publish)."""
        return parameters.engine_model(self.job) is not self.job.model

    def weights(self):
        """Returns the language model's parameters (nested tree, no value head) as the engine takes them: adapters
        merged unless lora.publish=adapter. Arrays that are not merged are shared with the state."""
        params = policy_params(self.state.trainable, self.state.frozen)
        return parameters.merge_adapters(self.job, params) if self.merges_adapters else params

    @contextlib.contextmanager
    def resting(self, engine):
        """Context in which the policy is in host memory, if mesh.roles.policy.rest asks for it.

        The engine gets the moved weights, which it may have to send to a server; otherwise it would keep
        the old arrays alive.
        """
        if not self.rests:
            yield
            return
        where = jax.tree.map(lambda x: x.sharding, self.state)
        merged = self.merges_adapters  # the engine has its own copy
        if merged:
            engine.weights_moved(memory.to_host(self.weights()))
        self.state = memory.to_host(self.state)
        if not merged:
            engine.weights_moved(self.weights())
        try:
            yield
        finally:
            self.state = jax.device_put(self.state, where)
            if not merged:
                engine.weights_moved(self.weights())

    # ---- what a session keeps

    def abstract(self) -> dict:
        """Returns shapes, dtypes and shardings of a checkpoint's arrays: the fields of the TrainState; with adapters
        without their base, but with its digest, "base_digest". `start` needs it to have been called."""
        self._abstract = parameters.abstract_state(self.job, self.optimizer)
        fields = parameters.checkpoint_fields(self.job, dict(vars(self._abstract)))
        return fields if self.job.model.adapter is None else {**fields, "base_digest": np.zeros(32, np.uint8)}

    def start(self, arrays: dict | None) -> None:
        """Starts from a checkpoint's arrays, or from the config's model (None). `abstract` has to be called before.

        arrays: TrainState field -> value as `arrays` returns it, with "base_digest" ([32] uint8) for adapters.

        Raises ConfigError if the base of adapters is not the one that they were trained on."""
        if arrays is None:
            start = parameters.start_params(self.job)
            self.state = parameters.new_state(self.job, self.optimizer, self._abstract, start)
        else:
            arrays = dict(arrays)
            was = arrays.pop("base_digest", None)
            self.state = TrainState(**parameters.fields_from_checkpoint(self.job, self._abstract, arrays))
        if self.job.model.adapter is not None:
            self.base_digest = parameters.base_digest(self.state.frozen)
            if arrays is not None:
                parameters.check_base(self.base_digest, was)

    def arrays(self) -> dict:
        """Returns the arrays of a checkpoint, by field of the TrainState. With adapters the frozen base is left out and
        "base_digest" ([32] uint8) identifies it."""
        fields = parameters.checkpoint_fields(self.job, dict(vars(self.state)))
        return fields if self.job.model.adapter is None else {**fields, "base_digest": self.base_digest}


def policy_params(trainable, frozen):
    """Merges trainable and frozen parameters (flat dicts by name) to the language model's nested tree, without a
    value head. Arrays are shared, not copied."""
    return {name: node for name, node in training.merge(trainable, frozen).items() if name != "value"}


class WeightSync:
    """Syncs the policy's weights to the engine, with completed steps as their version. A call syncs now. Collective.

    Args:
      s: the Session, whose `step` counts completed steps. policy: whose weights are synced.
      publish: (params, version) -> hands weights (Policy.weights) to the engine or to the queue before it.

    Attributes:
      version: steps completed at the last sync; -1 before the first.
    """

    def __init__(self, s, policy: Policy, publish):
        self.s, self.policy, self.publish, self.version = s, policy, publish, -1

    def __call__(self) -> None:
        self.s.together("new weights", lambda: self.publish(self.policy.weights(), self.s.step) or True)
        self.version = self.s.step

    def catch_up(self) -> None:
        """Syncs if the engine has the weights of an earlier step."""
        if self.version != self.s.step:
            self()


def check_finite(state: TrainState, config) -> None:
    """Raises NothingFinite after optimizer.max_nonfinite updates in a row whose loss or gradient was not finite.

    state: TrainState; the streak is read from its stats, for each adapter of a set by itself. Waits for the update."""
    limit = config.optimizer.max_nonfinite
    tables = state.stats if isinstance(state.step, dict) else {"": state.stats}  # an adapter set has a table for each
    for adapter, stats in tables.items():
        streak = int(np.asarray(stats["nonfinite_streak"]))
        if streak < limit:
            continue
        where = f" of the adapter {adapter}" * bool(adapter)
        raise NothingFinite(
            f"{streak} updates{where} in a row had a non-finite loss or gradient (optimizer.max_nonfinite={limit});"
            f" parameters are unchanged since: {finite(config, config.run.dir)}")


def host_scalars(metrics) -> dict[str, float]:
    """Converts the metrics of an update, name -> [] device scalar, to Python floats, in one transfer."""
    return {k: float(np.asarray(v)) for k, v in jax.device_get(metrics).items()}


def keep_schedules(fresh, old):
    """Returns the optax state `fresh` with the learning-rate schedules' step counts of `old`.

    Both are trees of one structure; every optax.ScaleByScheduleState is taken from `old`."""
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
    return jax.tree.map(lambda new, was: was if is_schedule(new) else new, fresh, old, is_leaf=is_schedule)
