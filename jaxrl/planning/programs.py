"""The programs of a run, lowered from shapes alone: nothing is loaded, nothing is executed.

They are the run's own: the recipes' functions are called with ShapeDtypeStructs in place of arrays, on any mesh, of
devices that need not exist.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl import sharding, training
from jaxrl.config.run_length import end
from jaxrl.kernels.attention import shares_prompts
from jaxrl.kernels.low_precision import sampled
from jaxrl.planning import workload
from jaxrl.rl import precompile
from jaxrl.rl.roles import Roles
from jaxrl.roles import parameters
from jaxrl.roles.reference import precision
from jaxrl.roles.role import policy_params
from jaxrl.rollout.embedded import _empty_table
from jaxrl.rollout.engines import DTYPES
from jaxrl.rollout.programs import Programs
from jaxrl.rollout.prompt_images import prompt_images
from jaxrl.rollout.shapes import from_config
from jaxrl.run import setup
from jaxrl.sharding import memory


@dataclasses.dataclass
class Lowering:
    """Programs by name, and what a run keeps on its devices by name (trees of ShapeDtypeStruct with shardings)."""

    programs: dict[str, Any] = dataclasses.field(default_factory=dict)  # name -> jax.stages.Lowered
    live: dict[str, Any] = dataclasses.field(default_factory=dict)


def lower(config, hf_config: dict, mesh, rollout_mesh, wanted=None) -> Lowering:
    """Returns the Lowering of a job: its programs at their largest shapes, and what it keeps on devices.

    Args:
      config: nothing in it is left to the platform (see spec.resolve).
      hf_config: the model's description.
      mesh: jax Mesh of the training programs.
      rollout_mesh: jax Mesh of the embedded sampler (one process's devices); None = no sampler.
      wanted: names of programs to lower; None = all. What is kept is complete in any case.

    Raises what setup.open_job raises, ConfigError for a mesh that cannot split the model.
    """
    out = Lowering()
    keep = lambda name: wanted is None or name in wanted  # noqa: E731
    job = setup.open_job(config, setup.ModelInputs(None, hf_config, (0,), None), mesh=mesh)
    if job.config.plan.image_tokens:
        job = dataclasses.replace(job, row_shapes=_with_room(job, job.row_shapes),
                                  score_shapes=_with_room(job, job.score_shapes))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if job.config.recipe.samples:
            params = _reinforcement(out, job, keep)
        else:
            params = _supervised(out, job, keep)
        if rollout_mesh is not None:
            weights = _publish(out, job, params, rollout_mesh, keep)
    if rollout_mesh is not None:
        with jax.sharding.use_abstract_mesh(rollout_mesh.abstract_mesh):
            _sampler(out, job, weights, rollout_mesh, keep)
    return out


def _with_room(job, shapes):
    """Returns row shapes with room for the images of plan.image_tokens."""
    return dataclasses.replace(shapes, patches=workload.room(job.config, job.model, shapes.lengths))


def _reinforcement(out: Lowering, job, keep):
    """Lowers the log-probs and updates of policy and critic. Returns the policy's parameters."""
    c = job.config
    steps = end(c)[0]
    roles = Roles(job, steps)
    optimizer, schedule = training.make_optimizer(
        c.optimizer, steps * roles.updates_per_step, parameters.flat_axes(job.tree),
        parameters.flat_layers(job.model, job.tree))
    update = training.make_update(job.model, optimizer, schedule, roles.loss, training.in_parts(c.optimizer.name))
    state = parameters.abstract_state(job, optimizer)
    params = training.merge(state.trainable, state.frozen)
    _update(out, job, "update", update, state, roles.loss, keep)
    reference = None
    if roles.reference is not None:
        dtype = parameters.DTYPES[c.reference.dtype]
        tree = job.model.tree(lambda entry: jax.ShapeDtypeStruct(entry.shape, entry.dtype(dtype)))
        reference = jax.tree.map(lambda s, w: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w), tree,
                                 parameters.param_shardings(job, tree=job.model))
        reference = memory.kept(reference) if job.streams("reference") else reference
        out.live["reference"] = reference
    routes = precompile.routes(c, job, "sampled")
    batch, fresh = (precompile.batch(job, precompile.max_rows(job.score_shapes), _support(c), ("scored",), routes, kept)
                    for kept in (True, False))
    if "old" in roles.loss.needs and keep("score"):
        out.programs["score"] = roles.score.program.lower(params, batch)
    if reference is not None and keep("score_reference"):
        shown = fresh if c.reference.path else batch
        out.programs["score_reference"] = roles.score.program.lower(reference, shown.replace(routes=None))
    critic = roles.critic
    if critic is not None and not critic.shared:
        critic_state = critic.abstract()
        _update(out, job, "critic", critic.update, critic_state, critic.loss, keep)
        params_of_critic = training.merge(critic_state.trainable, critic_state.frozen)
    else:
        params_of_critic = params
    if critic is not None and keep("value"):
        out.programs["value"] = critic._score.program.lower(params_of_critic, fresh.replace(routes=None))
    return policy_params(state.trainable, state.frozen)


def _supervised(out: Lowering, job, keep):
    c = job.config
    loss = training.NextToken(**precision(job))
    about = parameters.flat_axes(job.tree), parameters.flat_layers(job.model, job.tree)
    optimizer, schedule = training.make_optimizer(c.optimizer, end(c)[0], *about)
    update = training.make_update(job.model, optimizer, schedule, loss, training.in_parts(c.optimizer.name))
    state = parameters.abstract_state(job, optimizer)
    _update(out, job, "update", update, state, loss, keep)
    return training.merge(state.trainable, state.frozen)


def _support(c):
    return {"support": (jnp.int32, (c.rollout.top_k,))} if c.algorithm.sampled_support else {}


def _update(out: Lowering, job, name, update, state, objective, keep):
    """Lowers the programs of an update, on the largest microbatch: <name> adds a
    microbatch's gradients, <name>_apply steps.

    An optimizer state in host memory is on the devices while it is applied, if it cannot be applied in parts.
    """
    out.live |= {f"{name}_params": (state.trainable, state.frozen), f"{name}_optimizer": state.opt_state}
    if update.in_parts == "none":
        on_devices = jax.tree.map(lambda s: NamedSharding(job.mesh, s.sharding.spec), state.opt_state)
        state = state.replace(opt_state=precompile.shaped(state.opt_state, on_devices))
    batch = precompile.update_batch(job, objective, precompile.max_rows(job.row_shapes), name != "critic")
    carry = precompile.update_sums(job, update, state, batch)
    out.live |= {f"{name}_gradients": carry[0], f"{name}_batch": batch}
    if keep(name):
        out.programs[name] = precompile.lowered(update, state, carry, batch)
    if keep(f"{name}_apply"):
        out.programs[f"{name}_apply"] = precompile.lowered(update, state, carry)


class Lowered(Programs):
    """The sampler's programs; calling one lowers it and returns shapes.

    Attributes:
      lowered: name -> jax.stages.Lowered. keep: name -> whether to lower it; the shapes are found anyway.
    """

    def __init__(self, model, shapes, mesh, dtype, keep):
        super().__init__(model, shapes, mesh, dtype, mesh)
        self.lowered, self.keep = {}, keep

    def put(self, tree, sharding):
        """Returns the shapes of a tree of arrays with one sharding, in place of arrays on devices."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype, sharding=sharding), tree)

    def run(self, key, function, args, donate=(), out_shardings=None, mesh=None):
        """Lowers the program, if `keep` holds for its kind (key[0]), instead of running it.

        Returns ShapeDtypeStructs with the shardings of `out_shardings`. `mesh` is not used: the caller's is in force.
        """
        del mesh  # in force already
        if self.keep(key[0]):
            self.lowered[key[0]] = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*args)
        whole = isinstance(out_shardings, NamedSharding)
        spread = lambda where, part: precompile.shaped(part, where)  # noqa: E731
        found = jax.eval_shape(function, *args)
        return spread(out_shardings, found) if whole else jax.tree.map(spread, out_shardings, found)


def _sampler_of(job, mesh):
    """Returns (model, shapes) of one process's sampler."""
    c = job.config
    dtype = jnp.dtype(DTYPES[c.rollout.dtype])
    model = dataclasses.replace(job.model, compute_dtype=jnp.dtype(dtype), remat="none",
                                matmul=sampled(job.model.matmul))
    return model, from_config(c, sharding.data_shards(mesh), 1, max(1, job.mesh.size // mesh.size),
                              not shares_prompts(model.attention, mesh), model.config.routes,
                              workload.prompt_patches(c, model))


def _publish(out: Lowering, job, params, mesh, keep):
    """Lowers publish, on the whole mesh. Returns the copy's shapes as one process's sampler has them:
    its own shards.
    """
    model, shapes = _sampler_of(job, mesh)
    programs = Lowered(model, shapes, job.mesh, model.compute_dtype, keep)
    copy = programs.publish(params)
    out.programs |= programs.lowered
    axes = programs.model.logical_axes()
    return precompile.shaped(copy, sharding.param_shardings(mesh, axes, copy, sharding.ROLLOUT_RULES))


def _sampler(out: Lowering, job, weights, mesh, keep):
    """Lowers prefill, insert, decode and, for episodes, extend at the largest shapes, on one process's devices."""
    model, shapes = _sampler_of(job, mesh)
    programs = Lowered(model, shapes, mesh, model.compute_dtype, keep)
    cache, stash = programs.new_caches()
    out.live |= {"rollout_weights": weights, "rollout_cache": cache, "rollout_stash": stash}
    rows, longest = shapes.prefill_rows, shapes.prompt_lengths[-1]
    integers = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
    programs.prefill(weights, stash, integers(rows, longest), integers(rows), integers(rows))
    if shapes.patches:
        vision = model.config.vision
        room = shapes.patch_room(longest, vision.merge)
        images = prompt_images(vision, [None] * rows, [1] * rows, longest, room)
        programs.prefill(weights, stash, integers(rows, longest), integers(rows), integers(rows), None, images)
    programs.insert(cache, stash, integers(shapes.insert_width), integers(shapes.insert_width))
    if job.config.episodes:
        rows, new = shapes.extend
        programs.extend(weights, cache, integers(rows, new), integers(rows, new), integers(rows))
    progress, controls = _empty_table(shapes)
    history = programs.put(integers(shapes.slots, shapes.cache_lengths[-1]), programs.by_slot)
    programs.decode(weights, cache, progress, controls, history, 0, np.arange(shapes.slots, dtype=np.int32),
                    shapes.cache_lengths[-1], programs.shared([None] * shapes.slots, [0] * shapes.slots))
    out.programs |= {name: program for name, program in programs.lowered.items() if name != "caches"}


def device_bytes(tree, in_host: bool = False) -> int:
    """Returns the bytes of a tree on the device that holds the most of it. in_host: of its part in host memory."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(tree) if leaf is not None and memory.rests(leaf) == in_host)

