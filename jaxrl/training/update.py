"""The jitted update: gradients accumulated over microbatches, then one optimizer step.

The loss of an optimizer step is a sum over scored tokens of weight * token loss, with weights 1/denominator from the
host. Metrics are sums with the weight "token" = 1 / (scored tokens of the step), so they add up over microbatches too.

Legend: R rows, S scored slots per row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict

from jaxrl.algorithms import (
    Tokens,
    adaptive_entropy_coef,
    kl_penalty,
    masked_exp,
    mismatch_ratio,
    mismatch_weight,
    nll_loss,
    off_policy_sequence_mask,
    policy_loss,
    value_loss,
)
from jaxrl.imports import imported
from jaxrl.kernels.platform import platform
from jaxrl.models.value import values
from jaxrl.sharding import memory
from jaxrl.training.score import forward_hidden, logprobs_of
from jaxrl.training.state import merge


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static choices of the loss. Columns read: advantage (policy); old, ref, behaviour, old_value, return where the choice
    needs them. Names below `policy_loss` are those of config.algorithm."""

    kind: str = "policy"  # policy, nll, or value (the critic's)
    temperature: float = 1.0
    policy_loss: str = "clip"  # a name of algorithms.POLICY_LOSSES, or an import path
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    delta: float = 0.0
    cispo_max_ratio: float = 5.0
    cispo_min_ratio: float = 0.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dppo_low: float = 0.2
    dppo_high: float = 0.2
    kl_coef: float = 0.0  # of the KL term in the loss
    kl_estimator: str = "k3_unbiased"
    entropy_coef: float = 0.0
    entropy_target: float = 0.0  # > 0: the coefficient adapts, see algorithms.adaptive_entropy_coef
    entropy_rate: float = 0.0
    entropy_max: float = 0.0
    positive_nll_coef: float = 0.0
    value_coef: float = 0.0  # > 0: the policy's own trunk has a value head, whose loss is added
    value_clip: float = 0.0
    old: str = "current"  # current: ratio 1 by construction; column: the column "old"
    mismatch: str = "none"  # none, or <token | sequence | geometric>_<tis | mis>
    mismatch_cap: float = 2.0
    mismatch_low: float = 0.0
    sequence_delta: float = 0.0
    early_stop_ratio: float = 0.0
    early_stop_kl: float = 0.0
    chunk: int = 1024
    max_grad_norm: float = 1.0
    staleness: tuple[int, ...] = ()  # first values of the buckets of column "staleness" in which the gap is shown
    fp16: bool = False
    user: FrozenConfigDict = FrozenConfigDict()  # config.user, for losses of a user's own


SUMS_TO_MAX = ("gap/max", "old_gap/max", "gap/ratio_max")  # metrics combined by maximum, all others by sum


def loss_and_metrics(trainable, frozen, batch, model, cfg: LossConfig, entropy_coef=None):
    """(weighted sum of token losses, metrics) of one microbatch.

    Policy: sum_t w_policy * (factor * policy loss + kl_coef * kl) - entropy_coef * w_token * entropy
    + positive_nll_coef * w_positive * nll + value_coef * w_token * value loss; factor = mismatch weight and sequence mask.
    NLL: -sum_t w_policy * logp. Value: sum_t w_token * value loss.

    Args:
      entropy_coef: [] coefficient of the bonus where it adapts; None = cfg's.
    """
    token = batch.weights["token"]
    mask = token > 0
    params = merge(trainable, frozen)
    hidden = forward_hidden(model, params, batch)
    if cfg.kind == "value":
        loss, metrics = _value_terms(params, hidden, batch, token, mask, cfg)
        return loss, metrics | {"loss": jax.lax.stop_gradient(loss)}
    logp, entropy = logprobs_of(
        model, params, hidden, batch, temperature=cfg.temperature, chunk=cfg.chunk, valid_RxS=mask
    )
    fixed = jax.lax.stop_gradient(logp)
    metrics = {
        "policy/entropy": jnp.sum(token * jax.lax.stop_gradient(entropy)),
        "policy/logprob": jnp.sum(token * fixed),
    }
    if cfg.kind == "nll":
        loss = -jnp.sum(batch.weights["policy"] * logp)
        return loss, metrics | {"loss": jax.lax.stop_gradient(loss)}
    loss, more = policy_terms(logp, entropy, fixed, batch, token, mask, cfg, entropy_coef)
    if cfg.value_coef:
        value, own = _value_terms(params, hidden, batch, token, mask, cfg)
        loss, more = loss + cfg.value_coef * value, more | own
    return loss, metrics | more | {"loss": jax.lax.stop_gradient(loss)}


@jax.named_scope("loss")
def policy_terms(logp, entropy, fixed, batch, token, mask, cfg, entropy_coef):
    """(sum of all terms of the policy's loss, metrics) from log-probs and entropies [R, S]. fixed: logp without gradient."""
    weight, columns = batch.weights["policy"], batch.columns
    old = columns["old"] if cfg.old == "column" else fixed
    behaviour, ref = columns.get("behaviour"), columns.get("ref")
    tokens = Tokens(logp, old, behaviour, ref, columns["advantage"], mask, batch.sequences, entropy, columns)
    token_loss, stats = find_policy_loss(cfg.policy_loss)(tokens, cfg)
    factor, metrics = _mismatch_factor(tokens, fixed, token, mask, cfg)
    loss = jnp.sum(weight * (token_loss if factor is None else token_loss * factor))
    metrics["policy/loss"] = jax.lax.stop_gradient(loss)
    if cfg.kl_coef:
        loss += cfg.kl_coef * jnp.sum(weight * kl_penalty(logp, ref, old, mask, cfg.kl_estimator))
    if ref is not None:
        metrics["policy/kl"] = jnp.sum(token * kl_penalty(fixed, ref, fixed, mask, "k3"))
    if cfg.entropy_coef or cfg.entropy_target:
        coef = cfg.entropy_coef if entropy_coef is None else entropy_coef
        loss -= coef * jnp.sum(token * entropy)
        metrics["policy/entropy_coef"] = jnp.sum(token) * coef
    if cfg.positive_nll_coef:
        nll = jnp.sum(batch.weights["positive"] * nll_loss(logp, mask))
        loss += cfg.positive_nll_coef * nll
        metrics["policy/positive_nll"] = jax.lax.stop_gradient(nll)
    return loss, metrics | _ratio_metrics(token, mask, fixed, old, stats) | _gap_metrics(token, mask, fixed, old, batch, cfg)


def find_policy_loss(name: str):
    """A registered policy loss, or the function an import path names. See algorithms.register_policy_loss."""
    return imported(name) if ":" in name else policy_loss(name)


def _mismatch_factor(tokens, fixed, token, mask, cfg):
    """(factor on the policy loss or None, metrics) of what corrects for answers that another policy drew."""
    factor, metrics = None, {}
    if cfg.mismatch != "none":
        level, _, action = cfg.mismatch.partition("_")
        action = {"tis": "truncate", "mis": "mask"}[action]
        options = dict(sequences=tokens.sequences, level=level)
        factor = mismatch_weight(
            tokens.old, tokens.behaviour, mask, cfg.mismatch_cap, action=action, low=cfg.mismatch_low, **options)
        raw = mismatch_ratio(tokens.old, tokens.behaviour, mask, **options)
        changed = (raw > cfg.mismatch_cap) | ((factor == 0) & mask)
        metrics = {
            "gap/weight_mean": jnp.sum(token * factor),
            "gap/ratio_mean": jnp.sum(token * raw),
            "gap/ratio_max": jnp.max(raw),
            "gap/corrected_fraction": jnp.sum(token * changed),
        }
    if cfg.sequence_delta:
        kept = off_policy_sequence_mask(
            fixed, tokens.behaviour, tokens.advantage, mask, tokens.sequences, cfg.sequence_delta)
        metrics["policy/sequence_masked_fraction"] = jnp.sum(token * (1 - kept))
        factor = kept if factor is None else factor * kept
    return factor, metrics


@jax.named_scope("critic")
def _value_terms(params, hidden, batch, token, mask, cfg):
    """(critic's loss, a token mean; metrics)."""
    predicted = values(params, hidden)
    token_loss, stats = value_loss(predicted, batch.columns["old_value"], batch.columns["return"], mask, cfg.value_clip)
    loss = jnp.sum(token * token_loss)
    return loss, {
        "value/loss": jax.lax.stop_gradient(loss),
        "value/clip_fraction": jnp.sum(token * stats["clipped"]),
        "value/mean": jnp.sum(token * jax.lax.stop_gradient(predicted)),
    }


# Metrics of the stats that the losses of this house return; those of other losses are policy/<name>.
STAT_NAMES = {"ratio": "ratio_mean", "clipped": "clip_fraction", "clipped_low": "clip_low_fraction",
              "clipped_high": "clip_high_fraction", "dual_clipped": "dual_clip_fraction"}


def _ratio_metrics(token, mask, fixed, old, stats):
    ratio = masked_exp(fixed - old, mask)
    out = {"policy/ratio_mean": jnp.sum(token * ratio),  # by token, unless the loss says what it used
           "policy/approx_kl": jnp.sum(token * (ratio - 1 - jnp.where(mask, fixed - old, 0)))}
    return out | {f"policy/{STAT_NAMES.get(name, name)}": jnp.sum(token * jax.lax.stop_gradient(x)) for name, x in stats.items()}


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
    } | _gap_by_staleness(token, mask, d, batch, cfg)


def _gap_by_staleness(token, mask, d, batch, cfg):
    """{"staleness/<first>": share of the tokens in a bucket, "gap/stale_<first>": its part of gap/mean}."""
    out = {}
    for first, following in zip(cfg.staleness, (*cfg.staleness[1:], jnp.inf), strict=False):
        inside = mask & (batch.columns["staleness"] >= first) & (batch.columns["staleness"] < following)
        out[f"staleness/{first}"] = jnp.sum(token * inside)
        out[f"gap/stale_{first}"] = jnp.sum(token * jnp.where(inside, jnp.abs(d), 0))
    return out


AT_ONCE_CPU = 8  # XLA for CPUs takes the temporaries of a call from the kernel anew, page by page: fewer calls, less of that


def at_once(state) -> int:
    """How many microbatches a call of `accumulate` gets: one, but where the state lies on one CPU device."""
    where = jax.tree.leaves(state.trainable)[0].sharding
    on = platform(where.mesh if isinstance(where, NamedSharding) else None)
    return AT_ONCE_CPU if on == "cpu" and where.num_devices == 1 else 1


def _together(microbatches, most: int):
    """(tuple of `most` microbatches of one shape, how many of them count): neighbours, and the last one again where there are fewer."""
    shape = lambda batch: tuple(x.shape for x in jax.tree.leaves(batch))  # noqa: E731
    for _, same in itertools.groupby(microbatches, shape):
        while some := tuple(itertools.islice(same, most)):
            yield some + some[-1:] * (most - len(some)), len(some)


def make_accumulate(model, cfg: LossConfig):
    """accumulate(trainable, frozen, stats, grads, metrics, batches, count) -> (grads, metrics) plus those of the first `count` of
    equally shaped microbatches, one after the other."""

    def one(trainable, frozen, stats, grads, metrics, batch):
        scale = stats["loss_scale"] if cfg.fp16 else 1.0
        coef = stats["entropy_applied"] if cfg.entropy_target else None

        def scaled(t):
            loss, m = loss_and_metrics(t, frozen, batch, model, cfg, coef)
            return loss * scale, m

        (_, new), g = jax.value_and_grad(scaled, has_aux=True)(trainable)
        grads = jax.tree.map(jnp.add, grads, g)
        metrics = {k: (jnp.maximum if k in SUMS_TO_MAX else jnp.add)(metrics[k], new[k]) for k in new}
        return grads, metrics

    def accumulate(trainable, frozen, stats, grads, metrics, batches, count):
        add = functools.partial(one, trainable, frozen, stats)
        if len(batches) == 1:
            return add(grads, metrics, batches[0])
        every = jax.tree.map(lambda *x: jnp.stack(x), *batches)
        return jax.lax.fori_loop(0, count, lambda i, sums: add(*sums, jax.tree.map(lambda x: x[i], every)), (grads, metrics))

    return accumulate


def make_apply(optimizer, schedule, cfg: LossConfig):
    """apply(state, grads, metrics) -> (state, metrics).

    Clips by global norm. A non-finite loss or gradient changes neither parameters nor optimizer state, and is counted. Nor
    does an update whose mean ratio or approximate KL is above cfg's limit, and no other one until `stats["stopped"]` is 0
    again: the decision is one of the whole optimizer step, so micro-batches cannot change it.
    """

    @jax.named_scope("optimizer")
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
        stopped = _stopped(state.stats["stopped"] > 0, metrics, cfg)
        taken = finite & ~stopped
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)  # noqa: E731
        good, moved = finite.astype(jnp.int32), taken.astype(jnp.int32)
        stats = {
            **state.stats,
            "skipped": state.stats["skipped"] + 1 - good,
            "nonfinite_streak": (state.stats["nonfinite_streak"] + 1) * (1 - good),
            "stopped": stopped.astype(jnp.int32),
        }
        if cfg.entropy_target:
            moved_on = _entropy_coefs(state.stats, metrics["policy/entropy"], cfg)
            stats |= {name: jnp.where(taken, new, state.stats[name]) for name, new in moved_on.items()}
        if cfg.fp16:
            stats |= _rescale(state.stats, finite)
        metrics = metrics | {
            "optim/grad_norm": norm,
            "optim/lr": jnp.asarray(schedule(state.step), norm.dtype),
            "optim/skipped": 1.0 - good,
        }
        if cfg.early_stop_ratio or cfg.early_stop_kl:
            metrics["policy/early_stopped"] = stopped.astype(norm.dtype)
        state = state.replace(
            trainable=keep(trainable, state.trainable),
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + moved,
            stats=stats,
        )
        return state, metrics

    return apply


def _stopped(already, metrics, cfg: LossConfig):
    """Whether the rest of this RL step's updates is left out."""
    if cfg.early_stop_ratio:
        already |= metrics["policy/ratio_mean"] > cfg.early_stop_ratio
    if cfg.early_stop_kl:
        already |= metrics["policy/approx_kl"] > cfg.early_stop_kl
    return already


def _entropy_coefs(stats, entropy, cfg: LossConfig):
    """The adaptive coefficient after this step, and what the next one applies of it."""
    coef, _ = adaptive_entropy_coef(stats["entropy_coef"], entropy, cfg.entropy_target, cfg.entropy_rate, cfg.entropy_max)
    coef = coef.astype(stats["entropy_coef"].dtype)
    return {"entropy_coef": coef, "entropy_applied": jnp.where(entropy <= cfg.entropy_target, coef, 0)}


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
        for batches, count in _together(microbatches, at_once(state)):
            carry = empty(state.trainable, state.frozen, batches[0]) if carry is None else carry
            carry = accumulate(state.trainable, state.frozen, state.stats, *carry, batches, count)
        return carry

    def update(state, microbatches):
        grads, metrics = gradients(state, microbatches)
        rests = jax.tree.map(lambda x: x.sharding, state.opt_state)  # in host memory, perhaps, while gradients are computed
        state = state.replace(opt_state=memory.to_devices(state.opt_state))
        state, metrics = compiled(state)[2](state, grads, metrics)
        return state.replace(opt_state=memory.to_host(state.opt_state, rests)), metrics

    update.gradients = gradients
    update.compiled = compiled  # of a state of shapes, too: run.mode=plan lowers the programs without running them
    return update
