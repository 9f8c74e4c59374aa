"""The programs of an update, from shapes alone: what run.mode=plan counts, and what a run compiles beside its first
rollout.

The first rollout of a run has work for one core and the accelerator, and the update's programs take as long to compile.
So a thread compiles them meanwhile: that of the microbatches which a step of full length has, and the step's. What
microbatches of another shape need is compiled where the layout of the step is known, beside that. jax keeps a program
by what it was lowered from, so that the call of the jitted function finds it; one that nobody calls has cost time and
changed nothing.

    ahead = Ahead(job, policy, objective)   # begins
    ahead.needed(layout)                    # before an update: all of its programs are there
"""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp

from jaxrl import sharding, training
from jaxrl.sharding import memory
from jaxrl.telemetry import compilations
from jaxrl.types import PackedBatch

log = logging.getLogger("jaxrl")

# Where compiling neither runs kernels (as it does on GPUs, to choose among them) nor asks other processes.
PLATFORMS = ("cpu", "tpu")


# ---- shapes


def columns(c, objective) -> dict:
    """Columns that an objective reads -> (dtype, further dimensions)."""
    return {name: (jnp.int32, (c.rollout.top_k,)) if name == "support" else (jnp.float32, ())
            for name in objective.columns}


def routes(c, job, *where) -> int:
    """Expert ids per token of a batch that replays routes of one of these kinds."""
    return job.model.config.routes if c.algorithm.routes in where else 0


def max_rows(shapes) -> tuple[int, int]:
    """(rows, row length) of the microbatch with the most tokens."""
    return max(((counts[0], length) for length, counts in zip(shapes.lengths, shapes.counts, strict=True)),
               key=lambda shape: shape[0] * shape[1])


def batch(job, shape, columns, weights, routes: int = 0) -> PackedBatch:
    """A microbatch of ShapeDtypeStructs. shape: (rows, row length). columns: as `columns` gives them."""
    rows, length = shape
    where = sharding.batch_sharding(job.mesh)
    array = lambda dtype, more=(): jax.ShapeDtypeStruct((rows, length, *more), dtype, sharding=where)  # noqa: E731
    integers = ("tokens", "positions", "segments", "prefixes", "sources", "targets", "sequences")
    return PackedBatch(**{name: array(jnp.int32) for name in integers},
                       columns={name: array(*kind) for name, kind in columns.items()},
                       weights={name: array(jnp.float32) for name in weights},
                       routes=array(jnp.int16, (routes,)) if routes else None)


def of_update(job, objective, shape) -> PackedBatch:
    """A microbatch of an update."""
    found = routes(job.config, job, "sampled", "scored") if objective.routers else 0
    return batch(job, shape, columns(job.config, objective), objective.weights, found)


def shaped(tree, where):
    """Shapes of `tree`, lying as `where` says: a sharding, or a tree of them."""
    shape = lambda s, w: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w, weak_type=s.weak_type)  # noqa: E731
    return jax.tree.map(lambda s: shape(s, where), tree) if isinstance(where, jax.sharding.Sharding) else (
        jax.tree.map(shape, tree, where))


def sums(job, update, state, microbatch) -> tuple:
    """(gradients, metrics) that an update adds up, as shapes. state: a TrainState of arrays or of shapes."""
    grads, metrics = jax.eval_shape(update.compiled(state)[0], state.trainable, state.frozen, microbatch)
    return (shaped(grads, jax.tree.map(lambda p: p.sharding, state.trainable)),
            shaped(metrics, sharding.replicated(job.mesh)))


def lowered(update, state, carry, microbatch=None):
    """jax.stages.Lowered of the program that adds a microbatch's gradients to `carry` (`sums`); of the one that steps,
    where there is none."""
    if microbatch is None:
        state = state.replace(frozen={k: x for k, x in state.frozen.items() if not memory.rests(x)})
        return update.compiled(state)[2].lower(state, *carry)
    together = (microbatch,) * training.microbatches_per_call(state)
    count = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True) if len(together) > 1 else None
    return update.compiled(state)[1].lower(state.trainable, state.frozen, state.stats, *carry, together, count)


# ---- beside a run


class Ahead:
    """Compiles the programs of a policy's update before they are called. Does nothing where several processes share
    them, on GPUs, and where some of the state is in host memory."""

    def __init__(self, job, policy, objective):
        self.job, self.policy, self.objective = job, policy, objective
        self.beside, self.there = compilations.Beside(), set()
        away = policy.rests or any(map(memory.rests, jax.tree.leaves(policy.state)))
        self.works = (jax.process_count() == 1 and job.mesh.devices.flat[0].platform in PLATFORMS and not away
                      and policy.program.in_parts != "none")
        if self.works:
            whole = self._expected()
            for shape in (whole, None):
                self.beside.begin(shape, self._compile, self._state(), whole, shape)

    def needed(self, layout) -> None:
        """Compiles what an update of this layout calls and is not there, and waits for what is being compiled."""
        shapes = {(len(m.rows), m.row_length): None for part in layout.minibatches for m in part.microbatches}
        missing = [shape for shape in (*shapes, None) if shape not in self.there] if self.works else []
        for shape in sorted(missing, key=self.beside.begun):  # meanwhile the thread goes on
            if self.beside.take(shape) is None:
                self._compile(self._state(), next(iter(shapes)), shape)
            self.there.add(shape)

    def before_update(self, batch, prepared) -> None:
        self.needed(prepared.layout.update)

    def after_update(self, metrics) -> None: ...

    def close(self) -> None:
        self.beside.stop()

    def _expected(self) -> tuple[int, int]:
        """(rows, row length) of the microbatches of a step whose answers are as long as they may be."""
        c, shapes = self.job.config, self.job.row_shapes
        _, length = max_rows(shapes)
        own = c.longest - c.data.max_prompt_tokens
        most = c.data.prompts_per_step * (c.data.max_prompt_tokens + c.rollout.group_size * own)
        counts = shapes.counts[shapes.lengths.index(length)]
        return min((n for n in counts if n * length >= most), default=counts[0]), length

    def _state(self):
        state = self.policy.state
        return shaped(state, jax.tree.map(lambda x: x.sharding, state))

    def _compile(self, state, whole, shape):
        """The program of microbatches of a shape; of the step, for None. whole: the shape of some microbatch. What
        cannot be made from shapes (a loss of the user's that reads more columns than it names) is left to the call."""
        update, one = self.policy.program, functools.partial(of_update, self.job, self.objective)
        try:
            with jax.set_mesh(self.job.mesh_of("policy")):
                carry = sums(self.job, update, state, one(whole))
                return lowered(update, state, carry, shape and one(shape)).compile()
        except Exception as e:
            log.info("the update is compiled where it is called: %s: %s", type(e).__name__, str(e)[:300])
            return e
