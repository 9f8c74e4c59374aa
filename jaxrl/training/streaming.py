"""Runs an optimizer step on moments, parameters and gradients in host memory, a part at a time on the devices.

A part is some rows of a parameter's first axis (the repetitions of the layers if these are stacked) with the same rows
of its gradient and of its moments. It is the whole parameter if the optimizer reads more than one number of it at a
time, or if its first axis is split over devices. Small arrays stay where they are and are updated together. The result
is that of the plain step (training.update.make_apply) up to rounding, since the programs differ.

Called by training.update and, for the first state, by roles. sharding.memory moves the arrays.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from jaxrl.sharding import memory

PART_BYTES = 16 << 20  # bytes of a parameter's part on one device
TILE = 16           # rows of a matrix that accelerators lay out together


def rows_at_once(x, whole: bool = False) -> int:
    """Returns how many rows of a parameter's first axis are updated at a time.

    It is the largest divisor of the axis (for a matrix: a multiple of TILE) whose rows, of 4 bytes a number or more,
    fit into PART_BYTES on one device; if none fits, the smallest one. It is the whole axis of a vector, of a matrix
    without such a divisor, and of an axis that is split over devices; 1 for a scalar.

    Args:
      x: array, or its shape, dtype and sharding.
      whole: update the whole parameter at once.
    """
    if whole or x.ndim < 2 or x.sharding.shard_shape(x.shape)[0] != x.shape[0]:
        return x.shape[0] if x.ndim else 1
    one = math.prod(x.sharding.shard_shape(x.shape)[1:]) * max(4, x.dtype.itemsize)
    fit = [n for n in range(1, x.shape[0] + 1) if x.shape[0] % n == 0 and (x.ndim > 2 or n % TILE == 0)]
    return max([n for n in fit if n * one <= PART_BYTES], default=min(fit, default=x.shape[0]))


def names_in_host_memory(state) -> list[str]:
    """Returns the sorted names of the parameters of a TrainState that are in host memory or whose moments are."""
    moments = {name for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
               if memory.rests(x) and (name := _name(path, state.trainable))}
    return sorted({name for name, x in state.trainable.items() if memory.rests(x)} | moments)


def global_norm(grads, rows: dict[str, int], unscaled):
    """Returns the global L2 norm of all gradients, a scalar in their dtype; those in host memory are read in parts.

    Args:
      grads: flat dict of gradients.
      rows: name -> rows at a time, of those in host memory.
      unscaled: gradient -> gradient without fp16's loss scale."""
    if not any(map(memory.in_host, grads.values())):
        return optax.global_norm(jax.tree.map(unscaled, grads))
    dtype = jnp.result_type(*grads.values())
    near = [jnp.sum(jnp.square(unscaled(g))) for g in grads.values() if not memory.in_host(g)]
    total = sum(near, jnp.zeros((), dtype))
    for name, g in grads.items():
        if memory.in_host(g):
            def add(i, total, g=g, size=rows[name]):
                return total + jnp.sum(jnp.square(unscaled(memory.part(g, i * size, size))))

            total = jax.lax.fori_loop(0, len(g) // rows[name], add, total)
    return jnp.sqrt(total)


def step_in_parts(optimizer, state, grads, rows: dict[str, int], prepared, taken):
    """Runs one optimizer step and returns the new (trainable, opt_state).

    Args:
      optimizer: optax transformation that treats every parameter by itself.
      state: TrainState. grads: flat dict of gradients, placed like the parameters.
      rows: name -> `rows_at_once` of the parameters of `names_in_host_memory`.
      prepared: stored gradient -> unscaled and clipped gradient for the optimizer.
      taken: [] bool; False leaves parameters and state unchanged.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    found, form = jax.tree_util.tree_flatten_with_path(state.opt_state)
    everything, trainable = dict(found), dict(state.trainable)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)  # noqa: E731

    def step(grads, params, leaves, at):
        """Returns (parameters, leaves of the optimizer state) of one step of `params` alone."""
        about, own = jax.tree_util.tree_flatten_with_path(jax.eval_shape(optimizer.init, params))
        old = own.unflatten([leaves[path] for path, _ in about])
        updates, new = optimizer.update({k: prepared(g) for k, g in grads.items()}, old, params, at=at)
        new, params = keep(new, old), keep(optax.apply_updates(params, updates), params)
        return params, {path: x for (path, _), x in zip(about, own.flatten_up_to(new), strict=True)}

    near = {k: x for k, x in state.trainable.items() if k not in rows}
    moved, leaves = step({k: grads[k] for k in near}, near, everything, None)
    trainable |= moved
    for name, size in rows.items():
        g, paths = grads[name], [path for path in everything if _name(path, trainable) == name]

        def one(i, sums, name=name, size=size, g=g, paths=paths):
            (param, own), at = sums, i * size
            cut = (lambda x: memory.part(x, at, size)) if size < len(g) else memory.fetched
            put = (lambda x, new: memory.written(x, new, at)) if size < len(g) else memory.replaced
            parts = dict(zip(paths, map(cut, own), strict=True))
            params, new = step({name: cut(g)}, {name: cut(param)}, everything | parts, at)
            return put(param, params[name]), [put(x, new[path]) for path, x in zip(paths, own, strict=True)]

        start = state.trainable[name], [everything[path] for path in paths]
        trainable[name], moved = jax.lax.fori_loop(0, len(g) // size, one, start)
        leaves |= dict(zip(paths, moved, strict=True))
    return trainable, form.unflatten([leaves[path] for path, _ in found])


def init_in_parts(optimizer, trainable, abstract):
    """Returns the optimizer state before the first update; state for host memory is made one parameter at a time.

    Args:
      optimizer: optax transformation, or adapter_set.Optimizers, whose state is made at once since it is small.
      trainable: flat dict of parameters, on the devices or in host memory.
      abstract: shapes of the state, with shardings.
    """
    if not isinstance(optimizer, optax.GradientTransformation):  # of an adapter set, which is small
        places = jax.tree.map(lambda x: x.sharding, abstract)
        return jax.jit(lambda x: optimizer.init(memory.fetched(x)), out_shardings=places)(trainable)
    found, form = jax.tree_util.tree_flatten_with_path(abstract)
    where, leaves = {path: x.sharding for path, x in found}, {}
    far = {name for path, x in found if memory.rests(x) and (name := _name(path, trainable))}
    for names in [[k for k in trainable if k not in far], *([name] for name in sorted(far))]:
        params = {k: trainable[k] for k in names}
        about, own = jax.tree_util.tree_flatten_with_path(jax.eval_shape(optimizer.init, params))
        places = own.unflatten([where[path] for path, _ in about])
        made = jax.jit(lambda x: optimizer.init(memory.fetched(x)), out_shardings=places)(params)
        leaves |= {path: x for (path, _), x in zip(about, own.flatten_up_to(made), strict=True)}
    return form.unflatten([leaves[path] for path, _ in found])


def _name(path, names) -> str:
    """Returns the parameter that a leaf of optimizer state belongs to, the last key of its path; "" = none."""
    name = getattr(path[-1], "key", "") if path else ""
    return name if name in names else ""
