"""Updates an adapter set: several LoRA adapters trained together in one batch.

Each adapter has its own objective (over its own tokens), optimizer, learning rate, clipped norm, counters and metrics.
All of them share one forward and one backward pass. The loss of a microbatch is the sum of the adapters' losses, and
adapters share no parameters (models.adapters.adapter_set), so the gradient of each adapter is that of its own loss.
Weights are 1/denominator over an adapter's own tokens. An adapter without a token in an optimizer step keeps its
parameters, optimizer state and counters.

A TrainState holds `trainable` and `frozen` of all adapters side by side; `opt_state`, `step` and `stats` are tables by
adapter. Metrics are named `adapter/<name>/<metric>`; `mean_over_adapters` adds them under their unprefixed names.

Called by training.update, which builds the step, and by roles.parameters, which builds the optimizers.

Legend: R rows, S loss slots per row, K adapters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.adapters import adapter_set
from jaxrl.models.placement import at_sources
from jaxrl.training.objective import Outputs
from jaxrl.training.state import init_state as init_one
from jaxrl.types import TrainState, merge

PREFIX = "adapter/"
HAS_TOKENS = "held"  # metric: 1 if the step has tokens of the adapter, else 0


@dataclasses.dataclass(frozen=True)
class Rule:
    """The optimizer of one adapter.

    Attributes:
      name: of the adapter.
      rule: optax transformation of the adapter's leaves.
      schedule: learning rate by number of the adapter's updates.
      max_grad_norm: global norm to which the adapter's gradient is clipped; 0 = no clipping.
    """

    name: str
    rule: Any
    schedule: Any
    max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """The optimizers of an adapter set, in the order of the adapters' numbers; replaces one optax transformation.

    Attributes:
      model: jaxrl.models.Model with the adapter set.
      each: Rule of every adapter.
    """

    model: Any
    each: tuple[Rule, ...]

    def init(self, trainable) -> dict:
        """Returns the optimizer state before the first update: {name of an adapter: state}. trainable: flat dict of
        all adapters."""
        return {one.name: one.rule.init(adapter_set.take_leaves(self.model, k, trainable))
                for k, one in enumerate(self.each)}

    def objectives(self, objective) -> dict:
        """Returns {name of an adapter: the objective with that adapter's max_grad_norm}."""
        return {one.name: dataclasses.replace(objective, max_grad_norm=one.max_grad_norm) for one in self.each}


def init_state(trainable, frozen, optimizer: Optimizers, fp16: bool = False, router_load=None,
               loss_scale: float = 2.0**15) -> TrainState:
    """Returns the state of an adapter set before the first update; `opt_state`, `step` and `stats` are tables by
    adapter.

    Pure, so it can be jitted.

    Args:
      trainable, frozen: flat dicts of parameters; `trainable` holds those of all adapters.
      optimizer: those of the adapters.
      fp16: keep counters for dynamic loss scaling, of each adapter.
      router_load: not used.
      loss_scale: first loss scale in fp16.
    """
    model = optimizer.model
    each = {one.name: init_one(adapter_set.take_leaves(model, k, trainable), {}, one.rule, fp16, loss_scale=loss_scale)
            for k, one in enumerate(optimizer.each)}
    tables = [{name: getattr(state, field) for name, state in each.items()} for field in ("opt_state", "step", "stats")]
    return TrainState(trainable, frozen, *tables)


def without_adapter_prefix(name: str) -> str:
    """Returns a metric's name without its prefix `adapter/<name>/`; other names are returned unchanged."""
    return name.split("/", 2)[2] if name.startswith(PREFIX) else name


def metrics_of_adapter(metrics: dict, name: str) -> dict:
    """Returns the metrics of one adapter, named `adapter/<name>/<metric>` in `metrics`, under their unprefixed
    names."""
    return {without_adapter_prefix(key): x for key, x in metrics.items() if key.startswith(f"{PREFIX}{name}/")}


def make_scaled(model, objectives: dict):
    """Returns scaled(trainable, frozen, batch, stats) -> ([] sum of the adapters' losses, metrics of all adapters).

    A token's weights count for the adapter of the token that predicts it and are 0 for the others. In fp16 each
    adapter's loss is multiplied by the adapter's loss scale before the sum. Metrics are named adapter/<name>/<metric>,
    with `held`, 1 if the step has tokens of the adapter. Temperature and chunk are those of the first objective.

    Args:
      model: jaxrl.models.Model with an adapter set.
      objectives: {adapter: objective}, in the order of the adapters' numbers.
    """
    first = next(iter(objectives.values()))

    def scaled(trainable, frozen, batch, stats):
        outputs = Outputs(model, merge(trainable, frozen), batch, first)
        whose_RxS = at_sources(batch.adapters, batch.sources)
        total, all_metrics = 0.0, {}
        for k, (name, objective) in enumerate(objectives.items(), 1):
            weights = {term: jnp.where(whose_RxS == k, w, 0) for term, w in batch.weights.items()}
            own = batch.replace(weights=weights)
            coef = stats[name]["entropy_applied"] if objective.entropy_target else None
            loss, metrics = objective.loss(outputs.of(own, objective), own, coef)
            metrics |= {"loss": jax.lax.stop_gradient(loss), HAS_TOKENS: jnp.sum(weights["token"])}
            total += loss * stats[name]["loss_scale"] if objective.fp16 else loss
            all_metrics |= {f"{PREFIX}{name}/{metric}": x for metric, x in metrics.items()}
        return total, all_metrics

    return scaled


def make_apply(optimizers: Optimizers, applies: list):
    """Returns apply(state, grads, metrics) -> (state, metrics): one optimizer step of each adapter that has tokens.

    An adapter without a token in the step keeps its parameters, optimizer state and counters. `grads` is a flat dict of
    all adapters' gradients; the metrics are named adapter/<name>/<metric>, with `held` (1 or 0: whether it has tokens).

    Args:
      optimizers: those of the adapter set.
      applies: one function of update.make_apply per adapter, in the order of the adapters' numbers.
    """
    model = optimizers.model

    def apply(state, grads, metrics):
        each, all_metrics = [], {}
        for k, (one, step) in enumerate(zip(optimizers.each, applies, strict=True)):
            own = TrainState(adapter_set.take_leaves(model, k, state.trainable), {}, state.opt_state[one.name],
                             state.step[one.name], state.stats[one.name])
            own_metrics = metrics_of_adapter(metrics, one.name)
            has_tokens = own_metrics.pop(HAS_TOKENS) > 0.5
            new, step_metrics = step(own, adapter_set.take_leaves(model, k, grads), own_metrics)
            each.append(jax.tree.map(lambda a, b, keep_new=has_tokens: jnp.where(keep_new, a, b), new, own))
            all_metrics |= {f"{PREFIX}{one.name}/{metric}": x for metric, x in step_metrics.items()}
            all_metrics[f"{PREFIX}{one.name}/{HAS_TOKENS}"] = has_tokens.astype(jnp.float32)
        names = [one.name for one in optimizers.each]
        tables = {field: {name: getattr(own, field) for name, own in zip(names, each, strict=True)}
                  for field in ("opt_state", "step", "stats")}
        trainable = adapter_set.join_leaves(model, [own.trainable for own in each])
        return state.replace(trainable=trainable, **tables), all_metrics

    return apply


def mean_over_adapters(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics with, under each unprefixed name, the mean over the adapters that have tokens in the step.

    Metrics whose names end in "/max" or "_max" are combined by maximum. The metrics of adapters without a token in the
    step are dropped, and so is `held` of all adapters. Without an adapter set the metrics are returned unchanged.

    Args:
      metrics: of one optimizer step, numbers on the host.
    """
    names = [name.split("/")[1] for name in metrics
             if name.startswith(PREFIX) and without_adapter_prefix(name) == HAS_TOKENS]
    out = {name: x for name, x in metrics.items() if not name.startswith(PREFIX)}
    by_metric: dict[str, list] = {}
    for name in names:
        own = metrics_of_adapter(metrics, name)
        if own.pop(HAS_TOKENS):
            out |= {f"{PREFIX}{name}/{metric}": x for metric, x in own.items()}
            for metric, x in own.items():
                by_metric.setdefault(metric, []).append(x)
    combined = {metric: max(xs) if metric.endswith(("/max", "_max")) else sum(xs) / len(xs)
                for metric, xs in by_metric.items()}
    return out | combined


def is_adapter_set(state: TrainState) -> bool:
    """Returns whether a state holds an adapter set: its counters are then tables by adapter."""
    return isinstance(state.step, dict)
