"""Objectives: what an update minimises, as a value.

An objective names the token columns and weights it reads and the roles whose log-probs or values it needs, and
computes the loss of a microbatch from the model's outputs. Updates, log-probs and the planner read the same value. The
formulas of policy losses are in jaxrl.algorithms; divergences of distillation are in training.distillation.

A loss is a masked sum of weight * token loss. Weights are 1/denominator of one optimizer step and come from the
host, so losses and metrics add up over microbatches and data shards. Metrics have the weight "token" = 1 / (loss
tokens of the step).

An objective of sequences (preferences, say) is the weighted update of NextToken, with
the weights of `sequence_weights`.

Legend: R rows, S loss slots per row, N trajectories, T tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.value import values
from jaxrl.training.score import forward_hidden, logprobs_of


class Outputs:
    """Outputs of a model for one packed microbatch; log-probs and values are computed when an objective reads them.

    Attributes:
      model: jaxrl.models.Model. params: nested parameter tree. batch: PackedBatch on the devices.
      objective: whose temperature and chunk the log-probs take.
      hidden: [R, S, D] in the compute dtype, the states that predict the loss slots, from one forward pass.
      token: [R, S] float32 weight "token"; mask: bool, where it is positive.
      auxiliary: {name: output of the layers summed over them} (balance of experts ...); {} for a dense model.

    A column "dropout" in the batch switches on the adapters' dropout; its largest number is the seed.
    """

    def __init__(self, model, params, batch, objective: Objective):
        if "dropout" in batch.columns:  # the same number at all tokens of a microbatch
            params = adapters.noisy(model, params, jnp.max(batch.columns["dropout"]))
        self.model, self.params, self.batch, self.objective = model, params, batch, objective
        self.token = batch.weights["token"]
        self.mask = self.token > 0
        self.hidden, self.auxiliary = forward_hidden(model, params, batch)

    def of(self, batch, objective: Objective) -> Outputs:
        """Returns the outputs of the same forward pass with another objective and with the weights of `batch`.

        Log-probs and entropies are still those of the first objective's temperature, 0 outside its mask."""
        part = copy.copy(self)
        part.batch, part.objective, part.token = batch, objective, batch.weights["token"]
        part.mask = part.token > 0
        part._of_targets = self._of_targets  # computed once
        return part

    @functools.cached_property
    def _of_targets(self):
        return logprobs_of(self.model, self.params, self.hidden, self.batch, valid_RxS=self.mask,
                           temperature=self.objective.temperature, chunk=self.objective.chunk)

    def logprobs(self):
        """Returns (log-probs of the targets [R, S], entropies [R, S], {metric: their token means, []}): fp32, in nats,
        0 where mask is False. The metrics carry no gradient.
        """
        logp, entropy = self._of_targets
        mean = lambda x: jnp.sum(self.token * jax.lax.stop_gradient(x))  # noqa: E731
        return logp, entropy, {"policy/entropy": mean(entropy), "policy/logprob": mean(logp)}

    def values(self):
        """Returns the values [R, S] of the value head, in fp32 or better, at all slots, not masked. Raises KeyError for
        parameters without a value head."""
        return values(self.params, self.hidden)


class LossScale(NamedTuple):
    """Dynamic loss scaling of fp16: the factor on the loss doubles after `window` finite updates in a row and is halved
    at each non-finite update from the `patience`-th in a row on, between `min` and `max`.

    initial: the first factor."""

    initial: float = 2.0**15
    min: float = 1.0
    max: float = 2.0**24
    window: int = 200
    patience: int = 1


@dataclasses.dataclass(frozen=True)
class Objective:
    """The options and the interface that all objectives share.

    Attributes:
      columns, weights: names in PackedBatch that the loss reads.
      needs: whose log-probs or values the loss needs: "old" (the policy before the step), "reference", "critic".
      temperature: logits are divided by it.
      chunk: loss tokens whose logits exist at once.
      max_grad_norm: global norm to which the gradient is clipped; 0 = no clipping.
      fp16, loss_scale: whether the loss is scaled, and how the scale moves.
      router_balance, router_z, router_bias_rate: of a model with experts, the coefficients of the loss terms and the
        step of the bias, see training.router; 0 = off.
      routers: whether the loss and metrics include these terms.
      entropy_target: target of an adaptive entropy bonus in nats per token; 0 = none.
      may_stop: whether updates may be skipped (`stops`).
    """

    temperature: float = 1.0
    chunk: int = 1024          # loss tokens whose logits exist at once
    max_grad_norm: float = 1.0
    fp16: bool = False
    loss_scale: LossScale = LossScale()
    router_balance: float = 0.0  # coefficients of training.router, if the model has experts
    router_z: float = 0.0
    router_bias_rate: float = 0.0

    weights = ("policy", "token")
    columns = needs = ()
    entropy_target, may_stop = 0.0, False  # target of an adaptive entropy bonus; whether updates may be skipped
    routers = True  # whether the loss and metrics include the terms of training.router

    def loss(self, outputs: Outputs, batch, entropy_coef=None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the loss of one microbatch, before fp16's loss scale.

        Args:
          outputs: Outputs of the forward pass. batch: PackedBatch, whose weights hold 1/denominator.
          entropy_coef: [] adaptive coefficient of the entropy bonus; None = the fixed one.

        Returns:
          (sum of weight * token loss, [] fp32, with weight 0 outside the loss; {metric: [] contribution of the
          microbatch}, which training.update.reduction_of combines: a few by maximum, all others by sum).

        Raises TypeError here: every subclass that trains has a loss of its own.
        """
        raise TypeError(f"{type(self).__name__} has no loss")

    def stops(self, already, metrics):
        """Returns [] bool: whether this optimizer step and the RL step's remaining ones are skipped; here `already`.

        already: [] bool, whether an earlier optimizer step of the RL step was skipped. metrics: of this one."""
        return already


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Minimises -sum_t w_policy * logp: supervised fine-tuning, and with `sequence_weights` any loss of sequences."""

    def loss(self, outputs, batch, entropy_coef=None):
        """Returns (-sum of the weights "policy" [R, S] times log-probs in nats, []; policy/entropy and policy/logprob,
        token means without gradient).

        outputs, batch: as of Objective.loss. entropy_coef: not read.
        """
        logp, _, metrics = outputs.logprobs()
        return -jnp.sum(batch.weights["policy"] * logp), metrics


@dataclasses.dataclass(frozen=True)
class Score(Objective):
    """Minimises sum_t w_policy * score at the slots of training.slots: with `score_weights` any loss of scores."""

    @jax.named_scope("score")
    def loss(self, outputs, batch, entropy_coef=None):
        """Returns (sum of the weights "policy" [R, S] times the value head's scores where the weight "token" is
        positive, []; no metrics).

        outputs, batch: as of Objective.loss. entropy_coef: not read."""
        return jnp.sum(batch.weights["policy"] * jnp.where(outputs.mask, outputs.values(), 0)), {}


@dataclasses.dataclass(frozen=True)
class Value(Objective):
    """Minimises the critic's loss, sum_t w_token * value loss: a mean over the loss tokens of the optimizer step.

    clip: bound on the change of a value from "old_value", see algorithms.value_loss; 0 = off.
    """

    clip: float = 0.0

    weights = ("token",)
    columns = ("return", "old_value")
    routers = False

    @jax.named_scope("critic")
    def loss(self, outputs, batch, entropy_coef=None):
        """Returns (sum of the weights "token" [R, S] times algorithms.value_loss, []; metrics value/loss,
        value/clip_fraction and value/mean, token means without gradient).

        outputs, batch: as of Objective.loss, with the columns "old_value" and "return". entropy_coef: not read."""
        predicted, token = outputs.values(), outputs.token
        old, returns = batch.columns["old_value"], batch.columns["return"]
        token_loss, stats = value_loss(predicted, old, returns, outputs.mask, self.clip)
        loss = jnp.sum(token * token_loss)
        return loss, {
            "value/loss": jax.lax.stop_gradient(loss),
            "value/clip_fraction": jnp.sum(token * stats["clipped"]),
            "value/mean": jnp.sum(token * jax.lax.stop_gradient(predicted)),
        }


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """Minimises the policy's loss in reinforcement learning:

    sum_t w_policy * (factor * policy loss + kl_coef * kl) - entropy_coef * w_token * entropy
    + positive_nll_coef * w_positive * nll + value_coef * value loss; factor = mismatch weight and sequence mask.

    Attributes:
      options: the resolved config.algorithm, and `user`, the table config.user. A policy loss gets them as its `cfg`,
        so a new option of a loss needs a row in the schema and nothing here.
      staleness: first values of the buckets of column "staleness" in which the log-prob gap is shown; () = none.
      images: whether rows may have images: the gap is shown by column "behind_image", too.
      value_coef: > 0: the policy's own trunk has a value head, whose loss is added with this factor.
      value_clip: bound on the change of a value in that loss; 0 = off.
    """

    options: Any = None
    staleness: tuple[int, ...] = ()  # first values of the buckets of column "staleness" in which the gap is shown
    images: bool = False  # whether rows may have images: the gap is shown by column "behind_image", too
    value_coef: float = 0.0  # > 0: the policy's own trunk has a value head, whose loss is added
    value_clip: float = 0.0

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL term in the loss; 0 if KL is part of the reward."""
        return self.options.kl.coef if self.options.kl.placement == "loss" else 0.0

    @property
    def scores_old(self) -> bool:
        """Whether ratios are taken to the column "old" (algorithm.old_logprobs is not "current"); otherwise to the
        current policy without gradient, so that they are 1 by construction."""
        return self.options.old_logprobs != "current"

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probs or values a step needs: "old" if old_logprobs is "recompute", "reference" if kl.coef is set,
        "critic" with the advantage gae.
        """
        o = self.options
        return (*["old"] * (o.old_logprobs == "recompute"), *["reference"] * bool(o.kl.coef),
                *["critic"] * (o.advantage == "gae"))

    @property
    def columns(self) -> tuple[str, ...]:
        """Token columns of the batch: always behaviour and advantage; staleness and behind_image if the gap is shown by
        them; old unless old_logprobs is "current"; ref if kl.coef is set; support with sampled_support; with the
        advantage gae return and old_value, which the loss reads only with a value head on the policy's trunk.
        """
        o = self.options
        return ("behaviour", "advantage", *["staleness"] * bool(self.staleness),
                *["behind_image"] * self.images, *["old"] * self.scores_old,
                *["ref"] * bool(o.kl.coef), *["support"] * o.sampled_support,
                *(("return", "old_value") if o.advantage == "gae" else ()))

    @property
    def weights(self) -> tuple[str, ...]:
        """Token weights that the loss reads: "policy", "token", and "positive" if positive_nll_coef is set."""
        return ("policy", "token", *["positive"] * bool(self.options.positive_nll_coef))

    @property
    def entropy_target(self) -> float:
        """Target of the adaptive entropy bonus in nats per token; 0 = no adaptive bonus."""
        return self.options.entropy_target

    @property
    def may_stop(self) -> bool:
        """Whether early_stop_ratio or early_stop_kl may skip updates."""
        return bool(self.options.early_stop_ratio or self.options.early_stop_kl)

    def loss(self, outputs, batch, entropy_coef=None):
        """Computes the policy's terms, plus value_coef times the value loss (weight "token") if the trunk has a value
        head.

        Args:
          outputs: Outputs of the forward pass. batch: PackedBatch with the columns and weights that this names.
          entropy_coef: [] adaptive coefficient of the entropy bonus; None = options.entropy_coef.

        Returns ([] sum of weight * token loss; {metric: [] contribution of the microbatch}).

        Raises as `policy_terms`.
        """
        logp, entropy, metrics = outputs.logprobs()
        loss, more = self.policy_terms(logp, entropy, batch, outputs.token, outputs.mask, entropy_coef)
        if self.value_coef:
            value, own = Value(clip=self.value_clip).loss(outputs, batch)
            loss, more = loss + self.value_coef * value, more | own
        return loss, metrics | more

    @jax.named_scope("loss")
    def policy_terms(self, logp, entropy, batch, token, mask, entropy_coef):
        """Computes all terms of the policy's loss from log-probs and entropies [R, S]: policy loss, KL, entropy bonus,
        positive NLL. Policy loss and KL have the weight "policy", the entropy bonus the weight "token", the NLL
        "positive". The policy loss alone is also multiplied by algorithm.mismatch's weight and sequence mask.

        Args:
          logp, entropy: [R, S] of the current policy, in nats, with gradient.
          batch: PackedBatch, whose weights hold 1/denominator.
          token, mask: [R, S] weights of a token mean, and bool: where they are positive.
          entropy_coef: [] adaptive coefficient; None = options.entropy_coef.

        Returns ([] weighted sum of the terms; {metric: [] contribution of the microbatch}).

        Raises, while tracing, what `applied_policy_loss` raises: ConfigError for a user's policy loss that fails.
        """
        o, weight, columns, fixed = self.options, batch.weights["policy"], batch.columns, jax.lax.stop_gradient(logp)
        old = columns["old"] if self.scores_old else fixed
        behaviour, ref = columns.get("behaviour"), columns.get("ref")
        tokens = Tokens(logp, old, behaviour, ref, columns["advantage"], mask, batch.sequences, entropy, columns)
        token_loss, stats = applied_policy_loss(tokens, o)
        factor, metrics = self._mismatch_factor(tokens, fixed, token, mask)
        loss = jnp.sum(weight * (token_loss if factor is None else token_loss * factor))
        metrics["policy/loss"] = jax.lax.stop_gradient(loss)
        if self.kl_coef:
            loss += self.kl_coef * jnp.sum(weight * kl_penalty(logp, ref, old, mask, o.kl.estimator))
        if ref is not None:
            metrics["policy/kl"] = jnp.sum(token * kl_penalty(fixed, ref, fixed, mask, "k3"))
        if o.entropy_coef or o.entropy_target:
            coef = o.entropy_coef if entropy_coef is None else entropy_coef
            loss -= coef * jnp.sum(token * entropy)
            metrics["policy/entropy_coef"] = jnp.sum(token) * coef
        if o.positive_nll_coef:
            nll = jnp.sum(batch.weights["positive"] * nll_loss(logp, mask))
            loss += o.positive_nll_coef * nll
            metrics["policy/positive_nll"] = jax.lax.stop_gradient(nll)
        metrics |= _ratio_metrics(token, mask, fixed, old, stats)
        return loss, metrics | self._gap_metrics(token, mask, fixed, old, batch)

    def _mismatch_factor(self, tokens, fixed, token, mask):
        """Returns (factor on the policy loss or None, metrics): the off-policy correction of the config."""
        o, factor, metrics = self.options.mismatch, None, {}
        if o.correction != "none":
            level, _, action = o.correction.partition("_")
            options = dict(sequences=tokens.sequences, level=level)
            action = {"tis": "truncate", "mis": "mask"}[action]
            factor = mismatch_weight(tokens.old, tokens.behaviour, mask, o.cap, action=action, low=o.low, **options)
            raw = mismatch_ratio(tokens.old, tokens.behaviour, mask, **options)
            changed = (raw > o.cap) | ((factor == 0) & mask)
            metrics = {
                "gap/weight_mean": jnp.sum(token * factor),
                "gap/ratio_mean": jnp.sum(token * raw),
                "gap/ratio_max": jnp.max(raw),
                "gap/corrected_fraction": jnp.sum(token * changed),
            }
        if o.sequence_delta:
            in_range = off_policy_sequence_mask(
                fixed, tokens.behaviour, tokens.advantage, mask, tokens.sequences, o.sequence_delta)
            metrics["policy/sequence_masked_fraction"] = jnp.sum(token * (1 - in_range))
            factor = in_range if factor is None else factor * in_range
        return factor, metrics

    def _gap_metrics(self, token, mask, fixed, old, batch):
        """Computes metrics of the log-prob gap d (trainer minus engine): mean and max of |d|, k3, share of tokens
        outside the clip range; of each bucket of `_gap_buckets` its share of the tokens and its part of gap/mean."""
        if "behaviour" not in batch.columns:
            return {}
        d = jnp.where(mask, old - batch.columns["behaviour"], 0)
        ratio = masked_exp(d, mask)
        outside = (ratio > 1 + self.options.clip_high) | (ratio < 1 - self.options.clip_low)
        out = {
            "gap/mean": jnp.sum(token * jnp.abs(d)),
            "gap/max": jnp.max(jnp.abs(d)),
            "gap/k3": jnp.sum(token * (ratio - 1 - d)),
            "gap/outside_clip": jnp.sum(token * (outside & mask)),
            "old_gap/max": jnp.max(jnp.abs(jnp.where(mask, fixed - old, 0))),
        }
        for share, part, inside in self._gap_buckets(mask, batch.columns):
            out[share] = jnp.sum(token * inside)
            out[part] = jnp.sum(token * jnp.where(inside, jnp.abs(d), 0))
        return out

    def _gap_buckets(self, mask, columns):
        """Yields (name of a bucket's share of the tokens, name of its part of gap/mean, [R, S] bool: its tokens)."""
        for first, following in zip(self.staleness, (*self.staleness[1:], jnp.inf), strict=False):
            inside = mask & (columns["staleness"] >= first) & (columns["staleness"] < following)
            yield f"staleness/{first}", f"gap/stale_{first}", inside
        if self.images:
            behind = columns["behind_image"] > 0
            yield "rollout/image_fraction", "gap/images", mask & behind
            yield "rollout/text_fraction", "gap/text", mask & ~behind

    def stops(self, already, metrics):
        """Returns [] bool: `already`, or whether policy/ratio_mean is above early_stop_ratio or policy/approx_kl above
        early_stop_kl; a bound of 0 is not applied.

        already: [] bool, whether an earlier optimizer step of the RL step was skipped. metrics: of this one."""
        o = self.options
        if o.early_stop_ratio:
            already |= metrics["policy/ratio_mean"] > o.early_stop_ratio
        if o.early_stop_kl:
            already |= metrics["policy/approx_kl"] > o.early_stop_kl
        return already

    def entropy_coefs(self, stats, entropy):
        """Returns the next stats of the adaptive entropy bonus, [] each: "entropy_coef", entropy_rate
        higher below the target and lower above it, within [0, entropy_max]; and "entropy_applied", the same, or 0 where
        entropy is above the target.

        stats: those of the state. entropy: [] token mean of this optimizer step, in nats."""
        o = self.options
        coef, _ = adaptive_entropy_coef(stats["entropy_coef"], entropy, o.entropy_target, o.entropy_rate, o.entropy_max)
        coef = coef.astype(stats["entropy_coef"].dtype)
        return {"entropy_coef": coef, "entropy_applied": jnp.where(entropy <= o.entropy_target, coef, 0)}


def applied_policy_loss(tokens: Tokens, options):
    """Computes (loss of each token [R, S], stats) with options.policy_loss; nothing is weighted or summed.

    Args:
      tokens: inputs of the loss. options: the resolved config.algorithm with `user`; passed on as the loss's cfg.

    Raises, while tracing: ConfigError if the function of an import path cannot be imported or raises, or if any loss
    returns anything but a tuple of a floating-point array of the shape of tokens.logp and a dict; what a registered
    loss raises, unchanged; ValueError for a name that is not registered.
    """
    name, shape = options.policy_loss, tokens.logp.shape
    wanted = "a loss per token with the shape and dtype of tokens.logp, and a dict to log (docs/guides/extend.md)"
    try:
        result = find_policy_loss(name)(tokens, options)
    except ConfigError:
        raise
    except Exception as e:  # any error of the user's function while it is traced
        if ":" not in name:
            raise
        frames = traceback.extract_tb(e.__traceback__)
        at = next((f for f in reversed(frames) if f.filename.endswith(_file_of(name))), frames[-1])
        message = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"algorithm.policy_loss={name}, line {at.lineno}, {at.line!r}: {message}. Expected is "
                          f"{wanted}; options of your own are user.*") from e
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ConfigError(f"algorithm.policy_loss={name}: it returned {type(result).__name__}; expected {wanted}")
    loss = result[0]
    if jnp.shape(loss) != shape or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ConfigError(f"algorithm.policy_loss={name}: the loss has shape {jnp.shape(loss)} and dtype"
                          f" {jnp.result_type(loss)}, tokens.logp has {shape} and {tokens.logp.dtype}: expected"
                          f" {wanted}. Neither sum nor average it: jaxrl weighs the tokens of the whole optimizer step")
    return result


def _file_of(name: str) -> str:
    """Returns the last part of the path of the file that "./my_loss.py:f" or "package.module:f" names."""
    place = name.rpartition(":")[0]
    return place.rpartition("/")[2] if place.endswith(".py") else place.replace(".", "/") + ".py"


def find_policy_loss(name: str):
    """Returns the policy loss registered as `name`, or the function of an import path such as "./my_loss.py:f".

    It takes (Tokens, options) and returns (loss [R, S], stats). Raises ValueError for a name that is not registered,
    and whatever the import raises."""
    return imported(name) if ":" in name else policy_loss(name)


# Metric names of the stats that jaxrl's losses return; stats of other losses are policy/<name>.
STAT_NAMES = {"ratio": "ratio_mean", "clipped": "clip_fraction", "clipped_low": "clip_low_fraction",
              "clipped_high": "clip_high_fraction", "dual_clipped": "dual_clip_fraction"}


def _ratio_metrics(token, mask, fixed, old, stats):
    ratio = masked_exp(fixed - old, mask)
    out = {"policy/ratio_mean": jnp.sum(token * ratio),  # per token, unless the loss's stats replace it
           "policy/approx_kl": jnp.sum(token * (ratio - 1 - jnp.where(mask, fixed - old, 0)))}
    return out | {f"policy/{STAT_NAMES.get(name, name)}": jnp.sum(token * jax.lax.stop_gradient(x))
                  for name, x in stats.items()}


def sequence_weights(traj, derivative_N) -> dict[str, np.ndarray]:
    """Returns weights [T] with which NextToken minimises any loss L(s_1 ... s_N) of the sums s_i
    of a trajectory's log-probs.

    By the chain rule the gradient of L is sum_i dL/ds_i sum_t grad logp_t; NextToken's is -sum_t w_t grad logp_t, so
    w_t = -dL/ds_i. The derivatives are taken on the host in float64 over the whole batch (see algorithms.preference),
    so packing, microbatches and mesh cannot change the gradient.

    Args:
      traj: Trajectories with N trajectories.
      derivative_N: [N] dL/ds_i, already divided by L's denominator.

    Returns:
      {"policy": w at the loss tokens; "token": 1 / number of loss tokens there}, float64 [T], 0 elsewhere.
    """
    count = max(int(traj.loss_mask.sum()), 1)
    return {"policy": np.where(traj.loss_mask, -traj.spread(np.asarray(derivative_N, np.float64)), 0.0),
            "token": np.where(traj.loss_mask, 1.0 / count, 0.0)}


def score_weights(traj, derivative_K) -> dict[str, np.ndarray]:
    """Returns token weights [T] with which Score minimises any loss L(s_1 ... s_K) of the scores at the slots of a
    batch.

    w = dL/ds, by the chain rule.

    Args:
      traj: Trajectories with K loss tokens, as training.slots builds them.
      derivative_K: [K] dL/ds of the slots in the order of the batch, already divided by L's denominator.

    Returns:
      {"policy": w at the loss tokens; "token": 1 / number of loss tokens there}, float64 [T], 0 elsewhere.
    """
    weights = np.zeros(len(traj.tokens))
    weights[traj.loss_mask] = derivative_K
    return {"policy": weights, "token": traj.loss_mask / max(int(traj.loss_mask.sum()), 1)}
