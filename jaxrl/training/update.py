"""The jitted update: gradients accumulated over microbatches, then one optimizer step.

The loss of an optimizer step is a sum over scored tokens of weight * token loss, with weights 1/denominator from the
host. Metrics are sums with the weight "token" = 1 / (scored tokens of the step), so they add up over microbatches too.

Legend: R rows, S scored slots per row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.algorithms.losses import clipped_policy_loss, kl_penalty, masked_exp, mismatch_weight
from jaxrl.training.score import forward_logprobs
from jaxrl.training.state import merge


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static choices of the loss. Columns read: advantage (policy); old, ref, behaviour where the choice needs them."""

    kind: str = "policy"  # policy or nll
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_estimator: str = "k3_unbiased"
    entropy_coef: float = 0.0
    old: str = "current"  # current: ratio 1 by construction; column: the column "old"
    mismatch: str = "none"  # none or token_tis
    mismatch_cap: float = 2.0
    chunk: int = 1024
    max_grad_norm: float = 1.0
    fp16: bool = False


SUMS_TO_MAX = ("gap/max", "old_gap/max")  # metrics combined by maximum, all others by sum


def loss_and_metrics(trainable, frozen, batch, model, cfg: LossConfig):
    """(weighted sum of token losses, metrics) of one microbatch.

    Policy: sum_t w_policy * mismatch * clipped + kl_coef * w_kl * kl - entropy_coef * w_entropy * entropy.
    NLL: -sum_t w_policy * logp.
    """
    token = batch.weights["token"]
    mask = token > 0
    logp, entropy = forward_logprobs(
        model, merge(trainable, frozen), batch, temperature=cfg.temperature, chunk=cfg.chunk, valid_RxS=mask
    )
    policy_weight = batch.weights["policy"]
    fixed = jax.lax.stop_gradient(logp)
    metrics = {
        "policy/entropy": jnp.sum(token * jax.lax.stop_gradient(entropy)),
        "policy/logprob": jnp.sum(token * fixed),
    }
    if cfg.kind == "nll":
        loss = -jnp.sum(policy_weight * logp)
        return loss, metrics | {"loss": jax.lax.stop_gradient(loss)}

    old = batch.columns["old"] if cfg.old == "column" else fixed
    token_loss, stats = clipped_policy_loss(logp, old, batch.columns["advantage"], mask, cfg.clip_low, cfg.clip_high)
    if cfg.mismatch == "token_tis":
        weight = mismatch_weight(old, batch.columns["behaviour"], mask, cfg.mismatch_cap)
        token_loss = token_loss * weight
        metrics["gap/weight_mean"] = jnp.sum(token * weight)
    loss = jnp.sum(policy_weight * token_loss)
    metrics["policy/loss"] = jax.lax.stop_gradient(loss)
    if cfg.kl_coef:
        loss += cfg.kl_coef * jnp.sum(
            policy_weight * kl_penalty(logp, batch.columns["ref"], old, mask, cfg.kl_estimator)
        )
        metrics["policy/kl"] = jnp.sum(token * kl_penalty(fixed, batch.columns["ref"], fixed, mask, "k3"))
    if cfg.entropy_coef:
        loss -= cfg.entropy_coef * jnp.sum(token * entropy)
    metrics |= _ratio_metrics(token, mask, fixed, old, stats) | _gap_metrics(token, mask, fixed, old, batch, cfg)
    return loss, metrics | {"loss": jax.lax.stop_gradient(loss)}


def _ratio_metrics(token, mask, fixed, old, stats):
    return {
        "policy/clip_fraction": jnp.sum(token * stats["clipped"]),
        "policy/ratio_mean": jnp.sum(token * jax.lax.stop_gradient(stats["ratio"])),
        "policy/approx_kl": jnp.sum(token * (masked_exp(fixed - old, mask) - 1 - jnp.where(mask, fixed - old, 0))),
    }


def _gap_metrics(token, mask, fixed, old, batch, cfg):
    """Sampler-trainer difference of log-probs: mean and max of |d|, k3, share of tokens outside the clip range."""
    if "behaviour" not in batch.columns:
        return {}
    d = jnp.where(mask, old - batch.columns["behaviour"], 0)
    ratio = masked_exp(d, mask)
    outside = (ratio > 1 + cfg.clip_high) | (ratio < 1 - cfg.clip_low)
    return {
        "gap/mean": jnp.sum(token * jnp.abs(d)),
        "gap/max": jnp.max(jnp.abs(d)),
        "gap/k3": jnp.sum(token * (ratio - 1 - d)),
        "gap/outside_clip": jnp.sum(token * (outside & mask)),
        "old_gap/max": jnp.max(jnp.abs(jnp.where(mask, fixed - old, 0))),
    }


def make_accumulate(model, cfg: LossConfig):
    """accumulate(trainable, frozen, stats, grads, metrics, batch) -> (grads, metrics) plus this microbatch's."""

    def accumulate(trainable, frozen, stats, grads, metrics, batch):
        scale = stats["loss_scale"] if cfg.fp16 else 1.0

        def scaled(t):
            loss, m = loss_and_metrics(t, frozen, batch, model, cfg)
            return loss * scale, m

        (_, new), g = jax.value_and_grad(scaled, has_aux=True)(trainable)
        grads = jax.tree.map(jnp.add, grads, g)
        metrics = {k: (jnp.maximum if k in SUMS_TO_MAX else jnp.add)(metrics[k], new[k]) for k in new}
        return grads, metrics

    return accumulate


def make_apply(optimizer, schedule, cfg: LossConfig):
    """apply(state, grads, metrics) -> (state, metrics).

    Clips by global norm. A non-finite loss or gradient changes neither parameters nor optimizer state, and is counted.
    """

    def apply(state, grads, metrics):
        scale = state.stats["loss_scale"] if cfg.fp16 else 1.0
        grads = jax.tree.map(lambda g: g / scale, grads) if cfg.fp16 else grads
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        if cfg.max_grad_norm:
            factor = jnp.minimum(1.0, cfg.max_grad_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        good = finite.astype(jnp.int32)
        stats = {
            **state.stats,
            "skipped": state.stats["skipped"] + 1 - good,
            "nonfinite_streak": (state.stats["nonfinite_streak"] + 1) * (1 - good),
        }
        if cfg.fp16:
            stats |= _rescale(state.stats, finite)
        metrics = metrics | {
            "optim/grad_norm": norm,
            "optim/lr": jnp.asarray(schedule(state.step), norm.dtype),
            "optim/skipped": 1.0 - good,
        }
        state = state.replace(
            trainable=keep(trainable, state.trainable),
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + good,
            stats=stats,
        )
        return state, metrics

    return apply


def _rescale(stats, finite):
    """Dynamic loss scaling for fp16: halve on overflow, double after 200 finite updates in a row."""
    streak = jnp.where(finite, stats["finite_streak"] + 1, 0)
    grow = streak >= 200
    scale = jnp.where(finite, jnp.where(grow, stats["loss_scale"] * 2, stats["loss_scale"]), stats["loss_scale"] / 2)
    return {"loss_scale": jnp.clip(scale, 1.0, 2.0**24), "finite_streak": jnp.where(grow, 0, streak)}


def _empty(trainable, frozen, batch, model, cfg):
    """(zero gradients in fp32 or better, zero metrics)."""
    names = jax.eval_shape(functools.partial(loss_and_metrics, model=model, cfg=cfg), trainable, frozen, batch)[1]
    zeros = {k: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)) for k, p in trainable.items()}
    return zeros, {k: jnp.zeros(m.shape, m.dtype) for k, m in names.items()}


def make_update(model, optimizer, schedule, cfg: LossConfig):
    """`update(state, microbatches) -> (state, metrics)`: one optimizer step; `state` is donated.

    `microbatches` yields device PackedBatches of the static shapes. Metrics stay on the device.
    """
    programs = {}  # by where the state lies: (empty, accumulate, finish)

    def compiled(state):
        """Gradients lie where their parameters do from the first microbatch on, and the new state where the old one did:
        so each program is compiled once."""
        where = jax.tree.map(lambda x: x.sharding, state)
        key = tuple(jax.tree.leaves(where))
        if key not in programs:
            grads = where.trainable
            one = next(iter(grads.values()))
            everywhere = NamedSharding(one.mesh, P()) if isinstance(one, NamedSharding) else one
            programs[key] = (
                jax.jit(functools.partial(_empty, model=model, cfg=cfg), out_shardings=(grads, everywhere)),
                jax.jit(make_accumulate(model, cfg), donate_argnums=(3, 4), out_shardings=(grads, everywhere)),
                jax.jit(make_apply(optimizer, schedule, cfg), donate_argnums=0, out_shardings=(where, everywhere)),
            )
        return programs[key]

    def gradients(state, microbatches):
        empty, accumulate, _ = compiled(state)
        carry = None
        for batch in microbatches:
            carry = empty(state.trainable, state.frozen, batch) if carry is None else carry
            carry = accumulate(state.trainable, state.frozen, state.stats, *carry, batch)
        return carry

    def update(state, microbatches):
        grads, metrics = gradients(state, microbatches)
        return compiled(state)[2](state, grads, metrics)

    update.gradients = gradients
    return update
