"""Builds the jitted update: gradients accumulated over microbatches, then one optimizer step.

Called by every trainable role (roles.role) and, on shapes alone, by the planner. Packing and layout come first, in
training.pack and training.layout; losses are defined in training.objective.

The loss of an optimizer step is a sum over loss tokens of weight * token loss, with weights 1/denominator from the
host. Metrics are sums with the weight "token" = 1 / (loss tokens of the step), so they add up over microbatches too.

Legend: R rows, S loss slots per row.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.platform import platform
from jaxrl.sharding import memory
from jaxrl.training import adapter_set, router, streaming
from jaxrl.training.objective import Objective, Outputs
from jaxrl.types import merge

IN_PLACE = jax.__version_info__ >= (0, 11)  # jax 0.10 mixes up gradients where a scan has some with a Ref, some without
SUMS_TO_MAX = ("gap/max", "old_gap/max", "gap/ratio_max")  # metrics combined by maximum, all others by sum


def reduction_of(name: str):
    """Returns the function that combines a metric's values of two microbatches: jnp.maximum for the names of
    SUMS_TO_MAX, also with an adapter's prefix, jnp.add for all others."""
    return jnp.maximum if adapter_set.without_adapter_prefix(name) in SUMS_TO_MAX else jnp.add


def loss_and_metrics(trainable, frozen, batch, model, objective: Objective, entropy_coef=None, router_load=None):
    """Computes the loss of one microbatch, a sum of weighted token losses, before fp16's loss scale.

    Args:
      trainable, frozen: flat dicts of parameters; gradients are taken with respect to `trainable`.
      batch: device PackedBatch. Its weights are 1/denominator of the whole optimizer step, 0 outside the loss.
      model: jaxrl.models.Model.
      objective: what is minimised.
      entropy_coef: [] adaptive coefficient of the policy's entropy bonus; None = the objective's fixed one.
      router_load: [n, E] load of the balance term (training.router); None = even.

    Returns:
      ([] loss with the routers' terms, {metric: its contribution, which `reduction_of` combines over microbatches}).
    """
    params = merge(trainable, frozen)
    if objective.routers and objective.router_balance and model.config.num_expert_layers:
        load = router.even_load(model.config) if router_load is None else router_load
        params = router.with_load(model, params, load)
    outputs = Outputs(model, params, batch, objective)
    loss, metrics = objective.loss(outputs, batch, entropy_coef)
    if objective.routers and "routes" in outputs.auxiliary:
        router_loss, router_metrics = router.loss_terms(outputs, batch, objective)
        loss, metrics = loss + router_loss, metrics | router_metrics
    return loss, metrics | {"loss": jax.lax.stop_gradient(loss)}


# XLA for CPUs allocates a call's temporaries from the kernel again each time, page by page; fewer calls cost less.
MICROBATCHES_PER_CALL_CPU = 8


def microbatches_per_call(state) -> int:
    """Returns how many microbatches one call of `accumulate` gets: 8 if the state is on a single CPU device, else 1."""
    where = jax.tree.leaves(state.trainable)[0].sharding
    on = platform(where.mesh if isinstance(where, NamedSharding) else None)
    return MICROBATCHES_PER_CALL_CPU if on == "cpu" and where.num_devices == 1 else 1


def _group_microbatches(microbatches, most: int):
    """Yields (tuple of `most` consecutive microbatches of one shape, how many of them count).

    A shorter group is filled up with copies of its last microbatch, which do not count.
    """
    shape = lambda batch: tuple(x.shape for x in jax.tree.leaves(batch))  # noqa: E731
    for _, same in itertools.groupby(microbatches, shape):
        while some := tuple(itertools.islice(same, most)):
            yield some + some[-1:] * (most - len(some)), len(some)


def make_scaled(model, objective: Objective):
    """Returns scaled(trainable, frozen, batch, stats) -> ([] loss, in fp16 times the loss scale; metrics, without it).

    The four are flat dicts of parameters, a device PackedBatch, and a TrainState's stats, which hold the loss scale,
    the applied entropy coefficient and the routers' load.

    Args:
      model: jaxrl.models.Model. objective: what is minimised.
    """

    def scaled(trainable, frozen, batch, stats):
        scale = stats["loss_scale"] if objective.fp16 else 1.0
        coef = stats["entropy_applied"] if objective.entropy_target else None
        loss, m = loss_and_metrics(trainable, frozen, batch, model, objective, coef, stats.get("router_load"))
        return loss * scale, m

    return scaled


def make_accumulate(scaled):
    """Returns accumulate(trainable, frozen, stats, grads, metrics, batches, count) -> (grads, metrics).

    It adds the gradients and metrics of the first `count` of the equally shaped microbatches `batches`, one after the
    other. Gradients are summed, never averaged, in the dtype of `grads`; metrics as `reduction_of` says. A single
    microbatch always counts.

    Args:
      scaled: of `make_scaled`.
    """

    def one(trainable, frozen, stats, grads, metrics, batch):
        on_device = {k: x for k, x in trainable.items() if not memory.in_host(x)}
        in_host = {k: x for k, x in trainable.items() if k not in on_device}

        def loss_of(on_device, sums):  # memory.Streamed: the cotangent of `sums` is the accumulated gradient
            streamed = {k: memory.Streamed(x, sums[k]) for k, x in in_host.items()}
            streamed = {k: x if k.startswith("layer") else memory.fetched(x) for k, x in streamed.items()}  # once
            return scaled(on_device | streamed, frozen, batch, stats)

        sums = {k: grads[k] for k in in_host}
        loss, backward, new = jax.vjp(loss_of, on_device, sums, has_aux=True)
        # The backward pass adds to a Ref where it computes, layer by layer: the gradient of all layers never exists.
        refs = {k: jax.new_ref(grads[k]) for k, x in on_device.items() if IN_PLACE and x.dtype == grads[k].dtype}
        more, sums = backward.with_refs(on_device | refs, sums)(jnp.ones_like(loss))
        grads = {k: jax.freeze(refs[k]) if k in refs else grads[k] + more[k] for k in on_device} | sums
        metrics = {k: reduction_of(k)(metrics[k], new[k]) for k in new}
        return grads, metrics

    def accumulate(trainable, frozen, stats, grads, metrics, batches, count):
        add = functools.partial(one, trainable, frozen, stats)
        if len(batches) == 1:
            return add(grads, metrics, batches[0])
        every = jax.tree.map(lambda *x: jnp.stack(x), *batches)
        next_sums = lambda i, sums: add(sums[0], sums[1], jax.tree.map(lambda x: x[i], every))  # noqa: E731
        return jax.lax.fori_loop(0, count, next_sums, (grads, metrics))

    return accumulate


def make_apply(optimizer, schedule, objective: Objective, model=None, rows=None):
    """Returns apply(state, grads, metrics) -> (state, metrics): one optimizer step with accumulated gradients.

    It divides by fp16's loss scale, then clips by global norm. A non-finite loss or gradient changes neither parameters
    nor optimizer state, and is counted in `stats["skipped"]`. An update whose mean ratio or approximate KL is above the
    objective's limit is not applied either, nor is any further one until `stats["stopped"]` is 0 again. The decision is
    made for the whole optimizer step, so microbatches cannot change it. `state.step` counts applied updates alone.

    Args:
      optimizer: optax transformation.
      schedule: update number -> learning rate, for the metric optim/lr.
      objective: its clipping, loss scaling and limits.
      model: needed if the objective corrects the routers' bias (router_bias_rate).
      rows: name -> rows updated at a time, of the parameters with state in host memory (training.streaming); None or
        {} = the whole state is updated at once.

    The metrics gain optim/grad_norm (before clipping), optim/lr, optim/skipped (1 if loss or gradient is not finite,
    else 0), and policy/early_stopped (1 or 0) if the objective may stop; router/load becomes the metrics of
    router.summarize_load.
    """

    @jax.named_scope("optimizer")
    def apply(state, grads, metrics):
        scale = state.stats["loss_scale"] if objective.fp16 else 1.0
        unscaled = (lambda g: g / scale) if objective.fp16 else lambda g: g
        if rows:
            norm = streaming.global_norm(grads, rows, unscaled)
        else:
            grads = jax.tree.map(unscaled, grads)
            norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        clipped = lambda g: g  # noqa: E731
        if objective.max_grad_norm:
            factor = jnp.minimum(1.0, objective.max_grad_norm / jnp.maximum(norm, 1e-12))
            clipped = lambda g: g * factor.astype(g.dtype)  # noqa: E731
        stopped = objective.stops(state.stats["stopped"] > 0, metrics)
        taken = finite & ~stopped
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)  # noqa: E731
        if rows:
            trainable, opt_state = streaming.step_in_parts(optimizer, state, grads, rows,
                                                     lambda g: clipped(unscaled(g)), taken)
        else:
            updates, opt_state = optimizer.update(jax.tree.map(clipped, grads), state.opt_state, state.trainable)
            trainable = optax.apply_updates(state.trainable, updates)
            trainable, opt_state = keep(trainable, state.trainable), keep(opt_state, state.opt_state)
        frozen, load = state.frozen, metrics.get("router/load")
        if objective.router_bias_rate and load is not None:
            frozen = keep(router.correct_bias(model, frozen, load, objective.router_bias_rate), frozen)
        stats, metrics = _step_stats(state, metrics, objective, finite, stopped, norm, schedule)
        step = state.step + taken.astype(jnp.int32)
        return state.replace(trainable=trainable, frozen=frozen, opt_state=opt_state, step=step, stats=stats), metrics

    return apply


def _step_stats(state, metrics, objective, finite, stopped, norm, schedule):
    """Returns the updated stats and the step's metrics."""
    good, taken = finite.astype(jnp.int32), finite & ~stopped
    stats = {
        **state.stats,
        "skipped": state.stats["skipped"] + 1 - good,
        "nonfinite_streak": (state.stats["nonfinite_streak"] + 1) * (1 - good),
        "stopped": stopped.astype(jnp.int32),
    }
    if objective.entropy_target:
        coefs = objective.entropy_coefs(state.stats, metrics["policy/entropy"])
        stats |= {name: jnp.where(taken, new, state.stats[name]) for name, new in coefs.items()}
    if "router/load" in metrics:
        stats["router_load"] = jnp.where(taken, metrics["router/load"], state.stats["router_load"])
    if objective.fp16:
        stats |= _next_loss_scale(state.stats, finite, objective.loss_scale)
    metrics = router.summarize_load(metrics) | {
        "optim/grad_norm": norm,
        "optim/lr": jnp.asarray(schedule(state.step), norm.dtype),
        "optim/skipped": 1.0 - good,
    }
    if objective.may_stop:
        metrics["policy/early_stopped"] = stopped.astype(norm.dtype)
    return stats, metrics


def _next_loss_scale(stats, finite, how):
    """Returns the entries of stats that dynamic loss scaling changes in fp16; see objective.LossScale."""
    streak, scale = jnp.where(finite, stats["finite_streak"] + 1, 0), stats["loss_scale"]
    grow, fall = streak >= how.window, stats["nonfinite_streak"] + 1 >= how.patience
    scale = jnp.where(finite, jnp.where(grow, scale * 2, scale), jnp.where(fall, scale / 2, scale))
    return {"loss_scale": jnp.clip(scale, how.min, how.max), "finite_streak": jnp.where(grow, 0, streak)}


def _zero_sums(trainable, frozen, batch, stats, scaled, rows):
    """Returns (zero gradients in fp32 or better, zero metrics). stats: shapes suffice."""
    names = jax.eval_shape(scaled, trainable, frozen, batch, stats)[1]
    zeros = {k: memory.zeros(p, jnp.promote_types(p.dtype, jnp.float32), rows.get(k)) for k, p in trainable.items()}
    return zeros, {k: jnp.zeros(m.shape, m.dtype) for k, m in names.items()}


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _make_loss_and_apply(model, optimizer, schedule, objective):
    """Returns (function of make_scaled, function rows -> apply) for a model or for its adapter set."""
    if not isinstance(optimizer, adapter_set.Optimizers):
        finish = lambda rows: make_apply(optimizer, schedule, objective, model, rows)  # noqa: E731
        return make_scaled(model, objective), finish
    objectives = optimizer.objectives(objective)
    apply = adapter_set.make_apply(optimizer, [make_apply(one.rule, one.schedule, own) for one, own in zip(
        optimizer.each, objectives.values(), strict=True)])
    return adapter_set.make_scaled(model, objectives), lambda rows: apply


def _jit_programs(state, where, scaled, finish, in_parts: str):
    """Returns the jitted (zero sums, accumulate, apply) for a state's shardings `where`, which gradients share."""
    grads = where.trainable
    one = next(iter(grads.values()))
    everywhere = NamedSharding(one.mesh, P()) if isinstance(one, NamedSharding) else memory.awake(one)
    rows = {k: streaming.rows_at_once(state.trainable[k], in_parts != "rows")
            for k in streaming.names_in_host_memory(state)}
    return (
        jax.jit(functools.partial(_zero_sums, stats=_shapes(state.stats), scaled=scaled, rows=rows),
                out_shardings=(grads, everywhere)),
        jax.jit(make_accumulate(scaled), donate_argnums=(3, 4), out_shardings=(grads, everywhere)),
        jax.jit(finish({} if in_parts == "none" else rows), donate_argnums=0, out_shardings=(where, everywhere)),
    )


def make_update(model, optimizer, schedule, objective: Objective, in_parts: str = "rows"):
    """Returns update(state, microbatches) -> (state, metrics): one optimizer step; `state` is donated.

    `microbatches` yields device PackedBatches of the static shapes, at least one. Metrics stay on the device. Arrays of
    the state that are in host memory stay there; the forward and backward pass copies such parameters, and computes
    their gradients, a layer at a time.

    Args:
      model: jaxrl.models.Model. objective: what is minimised.
      optimizer: optax transformation, or adapter_set.Optimizers for one step of each adapter of a set.
      schedule: update number -> learning rate; not used with adapter_set.Optimizers.
      in_parts: the part of the state in host memory that an optimizer step moves to the devices at a time.
        "rows": some rows of one parameter; "parameter": one parameter; "none": everything at once.

    `update.gradients(state, microbatches)` returns the accumulated (gradients, metrics) alone, None without any
    microbatch; `update.compiled(state)` the jitted programs (zero sums, accumulate, apply), of a state of shapes, too.
    `update.in_parts` is the argument.
    """
    scaled, finish = _make_loss_and_apply(model, optimizer, schedule, objective)
    known = {}  # shardings of a state -> (its programs, microbatches that one call of `accumulate` gets)

    def programs(state):
        where = jax.tree.map(lambda x: x.sharding, state)
        key = tuple(jax.tree.leaves(where))
        if key not in known:
            known[key] = _jit_programs(state, where, scaled, finish, in_parts), microbatches_per_call(state)
        return known[key]

    def gradients(state, microbatches):
        (empty, accumulate, _), most = programs(state)
        carry: Any = None
        for batches, count in _group_microbatches(microbatches, most):
            carry = empty(state.trainable, state.frozen, batches[0]) if carry is None else carry
            count = jax.device_put(count) if len(batches) > 1 else None  # one microbatch always counts
            carry = accumulate(state.trainable, state.frozen, state.stats, *carry, batches, count)
        return carry

    def update(state, microbatches):
        grads, metrics = gradients(state, microbatches)
        in_host = {name: x for name, x in state.frozen.items() if memory.rests(x)}  # stay there
        state = state.replace(frozen={name: x for name, x in state.frozen.items() if name not in in_host})
        if in_parts != "none":
            state, metrics = programs(state)[0][2](state, grads, metrics)
            return state.replace(frozen=state.frozen | in_host), metrics
        shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)
        state = state.replace(opt_state=memory.to_devices(state.opt_state))
        state, metrics = programs(state)[0][2](state, grads, metrics)
        return state.replace(frozen=state.frozen | in_host,
                             opt_state=memory.to_host(state.opt_state, shardings)), metrics

    update.gradients, update.in_parts = gradients, in_parts
    # of a state of shapes, too: run.mode=plan lowers the programs without running them
    update.compiled = lambda state: programs(state)[0]
    return update
