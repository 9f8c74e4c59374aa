"""Lowers and compiles the programs of an update from shapes alone: for run.mode=plan (jaxrl.planning), and in the
background during a run's first rollout.

The first rollout uses one core and the accelerator, and the update's programs take as long to compile. So a thread
compiles them in the meantime: for microbatches of a step of full length, and for the optimizer step. Programs for
microbatches of other shapes are compiled once the step's layout is known. jax caches a program by what it was lowered
from, so the call of the jitted function finds it; a program that is never called costs time and changes nothing.

    precompiler = UpdatePrecompiler(job, policy, objective)   # starts
    precompiler.join(loop.before_update)                      # the first updates wait for their programs
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import sharding, training
from jaxrl.roles.kept_features import keeps_features
from jaxrl.sharding import memory
from jaxrl.telemetry import compilations
from jaxrl.types import Images, PackedBatch

log = logging.getLogger("jaxrl")


def may_precompile(platform: str, processes: int) -> bool:
    """Returns whether a process may compile at any time, independently of the other processes.

    A GPU's compiler runs kernels to choose among them. XLA lets no other program run at the same time, but the
    processes of a job share the results: each waits, up to a day, for a result that another may never compute.

    platform: "cpu", "gpu" or "tpu". processes: of the job.
    """
    return processes == 1 or platform in ("cpu", "tpu")


# ---- shapes


def columns(c, objective) -> dict:
    """Returns name -> (dtype, further dimensions) of the token columns that an objective reads. c: config of the
    job."""
    return {name: (jnp.int32, (c.rollout.top_k,)) if name == "support" else (jnp.float32, ())
            for name in objective.columns}


def routes(c, job, *where) -> int:
    """Returns the number of expert ids per token of a batch that replays routes of one of the kinds in `where`, else 0.

    Kinds are values of algorithm.routes, such as "sampled" and "scored"."""
    return job.model.config.routes if c.algorithm.routes in where else 0


def max_rows(shapes) -> tuple[int, int, int]:
    """Returns (rows, row length, patches of a row) of the microbatch with the most tokens. shapes: training.RowShapes.
    """
    i = max(range(len(shapes.lengths)), key=lambda i: shapes.counts[i][0] * shapes.lengths[i])
    return shapes.counts[i][0], shapes.lengths[i], shapes.patches[i] if shapes.patches else 0


def shape_of(micro, patches) -> tuple[int, int, int]:
    """Returns (rows, row length, patches of a row) of a training.layout.Microbatch as it is packed: one without images
    has no patches, whatever its rows have room for. patches: as Sizes.patches.
    """
    shown = patches is not None and patches[[i for row in micro.rows for block in row for i in block.sequences]].any()
    return len(micro.rows), micro.row_length, micro.patches if shown else 0


def batch(job, shape, columns, weights, routes: int = 0, kept: bool = True) -> PackedBatch:
    """Returns a microbatch of ShapeDtypeStructs, sharded as the job's batches are.

    Args:
      job: run.setup.Job.
      shape: (rows, row length, patches of a row; 0 = no image).
      columns: name -> (dtype, further dimensions), as returned by `columns`. weights: names of the loss terms.
      routes: expert ids per token, 0 = none are replayed.
      kept: the policy's features are read where they are kept (roles.kept_features), not patches.
    """
    rows, length, patches = shape
    where = sharding.batch_sharding(job.mesh)
    array = lambda dtype, more=(): jax.ShapeDtypeStruct((rows, length, *more), dtype, sharding=where)  # noqa: E731
    integers = ("tokens", "positions", "segments", "prefixes", "sources", "targets", "sequences")
    tokens: dict[str, Any] = {name: array(jnp.int32) for name in integers}
    return PackedBatch(**tokens,
                       columns={name: array(*kind) for name, kind in columns.items()},
                       weights={name: array(jnp.float32) for name in weights},
                       routes=array(jnp.int16, (routes,)) if routes else None,
                       images=_images(job, rows, length, patches, where, kept) if patches else None)


def _images(job, rows: int, length: int, patches: int, where, kept: bool) -> Images:
    vision = job.model.config.vision
    array = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=where)  # noqa: E731
    of_tokens = {"inserts": array(length)} | (
        {"reach": array(length)} if vision.two_way else {"rotary": array(length, 3)})
    if kept and keeps_features(job.config, job.model):
        size, dtype = (1 + len(vision.taps)) * vision.out_size, job.model.compute_dtype
        features = array(patches // vision.merge**2, size, dtype=dtype)
        return Images(None, None, None, **of_tokens, features=features)
    return Images(patches=array(patches, vision.patch_numbers, dtype=jnp.uint8), places=array(patches, 4),
                  segments=array(patches), **of_tokens,
                  windows=array(patches) if vision.window else None)


def update_batch(job, objective, shape, kept: bool = True) -> PackedBatch:
    """Returns a microbatch of an update, of ShapeDtypeStructs.

    Args:
      job: run.setup.Job. objective: names the columns and weights that the update reads.
      shape: (rows, row length, patches of a row; 0 = no image).
      kept: the policy's features are read where they are kept (roles.kept_features), not patches.
    """
    found = routes(job.config, job, "sampled", "scored") if objective.routers else 0
    return batch(job, shape, columns(job.config, objective), objective.weights, found, kept)


def shaped(tree, where):
    """Returns the tree's jax.ShapeDtypeStructs with the shardings `where`: one sharding for all leaves, or a tree of
    them."""
    shape = lambda s, w: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w, weak_type=s.weak_type)  # noqa: E731
    return jax.tree.map(lambda s: shape(s, where), tree) if isinstance(where, jax.sharding.Sharding) else (
        jax.tree.map(shape, tree, where))


def update_sums(job, update, state, microbatch) -> tuple:
    """Returns (gradients, metrics) that an update accumulates over microbatches, as trees of jax.ShapeDtypeStruct.

    Gradients are sharded as their parameters; metrics are replicated. state: a TrainState of arrays or shapes."""
    grads, metrics = jax.eval_shape(update.compiled(state)[0], state.trainable, state.frozen, microbatch)
    return (shaped(grads, jax.tree.map(lambda p: p.sharding, state.trainable)),
            shaped(metrics, sharding.replicated(job.mesh)))


def lowered(update, state, carry, microbatch=None):
    """Lowers the program that adds a microbatch's gradients to `carry`; without a microbatch the program of the
    optimizer step. Returns jax.stages.Lowered.

    Args:
      update: of training.make_update. state: a TrainState of arrays or shapes.
      carry: shapes of (gradients, metrics), of `update_sums`. microbatch: PackedBatch of shapes, or None.
    """
    if microbatch is None:
        state = state.replace(frozen={k: x for k, x in state.frozen.items() if not memory.rests(x)})
        return update.compiled(state)[2].lower(state, *carry)
    together = (microbatch,) * training.microbatches_per_call(state)
    count = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True) if len(together) > 1 else None
    return update.compiled(state)[1].lower(state.trainable, state.frozen, state.stats, *carry, together, count)


# ---- during a run


class UpdatePrecompiler:
    """Compiles the programs of a policy's update before they are called.

    Disabled (`enabled` is False, and the methods do nothing) if several processes share GPUs' programs
    (`may_precompile`), if some of the state is in host memory, and for an optimizer that updates all at once: one of an
    import path, or those of an adapter set.

    The constructor queues two programs for the process's background threads: that of the expected microbatches and that
    of the optimizer step. Only shapes of the state are read.

    job: run.setup.Job. policy: roles.role.Policy, started. objective: its training.Objective."""

    def __init__(self, job, policy, objective):
        self.job, self.policy, self.objective = job, policy, objective
        self.compiler, self.there = compilations.BackgroundCompiler(), set()
        away = policy.rests or any(map(memory.rests, jax.tree.leaves(policy.state)))
        self.enabled = (may_precompile(job.mesh.devices.flat[0].platform, jax.process_count()) and not away
                      and policy.program.in_parts != "none")
        if self.enabled:
            whole = self._expected()
            for shape in (whole, None):
                self.compiler.begin(shape, self._compile, self._state(), whole, shape)

    def compile_for(self, layout, patches=None) -> None:
        """Compiles the missing programs of an update of this layout, and waits for those being compiled.

        patches: of the images of its sequences, as Sizes.patches; None = there is none.
        """
        shapes = {shape_of(m, patches): None for part in layout.minibatches for m in part.microbatches}
        missing = [shape for shape in (*shapes, None) if shape not in self.there] if self.enabled else []
        for shape in sorted(missing, key=self.compiler.begun):  # the thread continues meanwhile
            if self.compiler.take(shape) is None:
                self._compile(self._state(), next(iter(shapes)), shape)
            self.there.add(shape)

    def join(self, before_update: list) -> None:
        """Joins rl.step.Loop.before_update, if enabled, until nothing is compiled in the background any more. Programs
        of later layouts are compiled by the update that calls them first.
        """
        def observe(batch, prepared) -> None:
            self.compile_for(prepared.layout.update, batch.traj.patches)
            if self.compiler.idle():
                before_update.remove(observe)

        if self.enabled:
            before_update.append(observe)

    def close(self) -> None:
        """Cancels compilations that have not begun: the update that calls these programs compiles them. One that runs
        continues."""
        self.compiler.stop()

    def _expected(self) -> tuple[int, int, int]:
        """Returns (rows, row length, patches of a row) of the microbatches of a step whose completions have the maximum
        length, and whose prompts have images if any has.
        """
        c, shapes = self.job.config, self.job.row_shapes
        _, length, patches = max_rows(shapes)
        own = c.longest - c.data.max_prompt_tokens
        most = c.data.prompts_per_step * (c.data.max_prompt_tokens + c.rollout.group_size * own)
        counts = shapes.counts[shapes.lengths.index(length)]
        return min((n for n in counts if n * length >= most), default=counts[0]), length, patches

    def _state(self):
        state = self.policy.state
        return shaped(state, jax.tree.map(lambda x: x.sharding, state))

    def _compile(self, state, whole, shape):
        """Compiles the program of microbatches of a shape, or of the optimizer step for None.

        whole: shape of some microbatch. A program that cannot be lowered from shapes (a user's loss that reads columns
        that it does not name) is compiled when it is called.
        """
        update, one = self.policy.program, functools.partial(update_batch, self.job, self.objective)
        try:
            with jax.set_mesh(self.job.mesh_of("policy")):
                carry = update_sums(self.job, update, state, one(whole))
                return lowered(update, state, carry, shape and one(shape)).compile()
        except Exception as e:
            log.info("the update could not be compiled ahead of its first call: %s: %s", type(e).__name__, str(e)[:300])
            return e
