"""The update of several adapters in one batch: each has an objective over the tokens that are its own, an optimizer, a
learning rate, a clipped norm, counters and metrics; what they share is the forward and the backward pass.

The loss of a microbatch is the sum of theirs, and their parameters are different numbers (models.several), so the
gradient of each is that of its own loss. Weights are 1/denominator over an adapter's own tokens. An adapter of which an
optimizer step holds no token is left as it is: parameters, optimizer and counters.

A TrainState holds `trainable` and `frozen` of all adapters side by side; `opt_state`, `step` and `stats` are tables by
adapter. Metrics are `adapter/<name>/<metric>`, and under their plain names the mean over the adapters of the step
(maxima for what is a maximum).

Legend: R rows, L row length, S scored slots per row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.adapters import several
from jaxrl.models.placement import at_sources
from jaxrl.training.objective import Outputs
from jaxrl.training.state import init_state as init_one
from jaxrl.training.state import merge
from jaxrl.types import TrainState

PREFIX = "adapter/"
HELD = "held"  # 1 where the step holds tokens of the adapter


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one adapter learns by. rule: an optax transformation of its own leaves; schedule: of its updates."""

    name: str
    rule: Any
    schedule: Any
    max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """Those of a model's adapters, in the order of their numbers; takes the place of one optax transformation."""

    model: Any
    each: tuple[Rule, ...]

    def init(self, trainable) -> dict:
        """Adapter -> its optimizer's state before the first update."""
        return {one.name: one.rule.init(several.taken(self.model, k, trainable)) for k, one in enumerate(self.each)}

    def objectives(self, objective) -> dict:
        """Adapter -> the objective with its norm to clip by."""
        return {one.name: dataclasses.replace(objective, max_grad_norm=one.max_grad_norm) for one in self.each}


def init_state(trainable, frozen, optimizer: Optimizers, fp16: bool = False, router_load=None,
               loss_scale: float = 2.0**15) -> TrainState:
    """As training.init_state, with the tables by adapter."""
    each = {one.name: init_one(several.taken(optimizer.model, k, trainable), {}, one.rule, fp16, loss_scale=loss_scale)
            for k, one in enumerate(optimizer.each)}
    tables = [{name: getattr(state, field) for name, state in each.items()} for field in ("opt_state", "step", "stats")]
    return TrainState(trainable, frozen, *tables)


def plain(name: str) -> str:
    """A metric's name without the adapter that it is of."""
    return name.split("/", 2)[2] if name.startswith(PREFIX) else name


def of_adapter(metrics: dict, name: str) -> dict:
    """The metrics of one adapter under their plain names."""
    return {plain(key): x for key, x in metrics.items() if key.startswith(f"{PREFIX}{name}/")}


def make_scaled(model, objectives: dict):
    """scaled(trainable, frozen, batch, stats) -> (sum of the adapters' losses, each times its scale in fp16; metrics of
    each). objectives: by adapter, in the order of their numbers."""
    first = next(iter(objectives.values()))

    def scaled(trainable, frozen, batch, stats):
        outputs = Outputs(model, merge(trainable, frozen), batch, first)
        whose_RxS = at_sources(batch.adapters, batch.sources)
        total, told = 0.0, {}
        for k, (name, objective) in enumerate(objectives.items(), 1):
            weights = {term: jnp.where(whose_RxS == k, w, 0) for term, w in batch.weights.items()}
            own = batch.replace(weights=weights)
            coef = stats[name]["entropy_applied"] if objective.entropy_target else None
            loss, metrics = objective.loss(outputs.of(own, objective), own, coef)
            metrics |= {"loss": jax.lax.stop_gradient(loss), HELD: jnp.sum(weights["token"])}
            total += loss * stats[name]["loss_scale"] if objective.fp16 else loss
            told |= {f"{PREFIX}{name}/{metric}": x for metric, x in metrics.items()}
        return total, told

    return scaled


def make_apply(optimizers: Optimizers, applies: list):
    """apply(state, grads, metrics) -> (state, metrics). applies: of update.make_apply, one for each adapter."""
    model = optimizers.model

    def apply(state, grads, metrics):
        each, told = [], {}
        for k, (one, step) in enumerate(zip(optimizers.each, applies, strict=True)):
            own = TrainState(several.taken(model, k, state.trainable), {}, state.opt_state[one.name],
                             state.step[one.name], state.stats[one.name])
            found = of_adapter(metrics, one.name)
            held = found.pop(HELD) > 0.5
            new, said = step(own, several.taken(model, k, grads), found)
            each.append(jax.tree.map(lambda a, b, held=held: jnp.where(held, a, b), new, own))
            told |= {f"{PREFIX}{one.name}/{metric}": x for metric, x in said.items()}
            told[f"{PREFIX}{one.name}/{HELD}"] = held.astype(jnp.float32)
        names = [one.name for one in optimizers.each]
        tables = {field: {name: getattr(own, field) for name, own in zip(names, each, strict=True)}
                  for field in ("opt_state", "step", "stats")}
        trainable = several.joined(model, [own.trainable for own in each])
        return state.replace(trainable=trainable, **tables), told

    return apply


def over_all(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of a step on the host: those of adapters that had no token in it are left out, and the plain names are
    added, means over the others (maxima for what is a maximum). Of one adapter or none they are what they were."""
    names = [name.split("/")[1] for name in metrics if name.startswith(PREFIX) and plain(name) == HELD]
    out = {name: x for name, x in metrics.items() if not name.startswith(PREFIX)}
    known: dict[str, list] = {}
    for name in names:
        own = of_adapter(metrics, name)
        if own.pop(HELD):
            out |= {f"{PREFIX}{name}/{metric}": x for metric, x in own.items()}
            for metric, x in own.items():
                known.setdefault(metric, []).append(x)
    whole = {metric: max(found) if metric.endswith(("/max", "_max")) else sum(found) / len(found)
             for metric, found in known.items()}
    return out | whole


def flagged(state: TrainState, name: str) -> dict:
    """Adapter -> a counter of its `stats`; "" -> that of a state without several adapters."""
    return {key: table[name] for key, table in state.stats.items()} if is_several(state) else {"": state.stats[name]}


def is_several(state: TrainState) -> bool:
    return isinstance(state.step, dict)
