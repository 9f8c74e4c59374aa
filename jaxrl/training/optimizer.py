"""Makes optax optimizers and schedules from the config. Schedules count optimizer updates.

Called by roles. The update itself is in training.update.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.config.load import editable, put
from jaxrl.errors import ConfigError


def warmup_updates(config, total_updates: int) -> int:
    """Returns how many updates of a run the learning rate rises: warmup_fraction of total_updates, rounded, if that is
    positive, else warmup_steps. config: config.optimizer.
    """
    return round(config.warmup_fraction * total_updates) if config.warmup_fraction > 0 else config.warmup_steps


def schedule_text(config, total_updates: int) -> str:
    """Returns the schedule of the learning rate in words, with its warm-up, and whether the run ends within it.

    config: config.optimizer. total_updates: of the run.
    """
    warmup = warmup_updates(config, total_updates)
    ends = f", which this run of {total_updates} does not leave" if total_updates <= warmup else ""
    return config.schedule + (f" after {warmup} updates of warm-up{ends}" if warmup else "")


def make_schedule(config, total_updates: int):
    """Returns the learning rate as a function of the number of applied updates.

    Linear warm-up from warmup_start * lr to lr (the first update already moves: update i of w, from 0, uses (i + 1) / w
    of the way), then constant; linear or cosine, both to floor * lr over decay_steps, by default all remaining updates,
    and constant from there; or wsd: constant and a decay to floor * lr over the last decay_steps, by default a tenth of
    the run, shaped by decay_shape. A decay that is longer than the rest of the run begins after the warm-up and is not
    finished at the end.

    Args:
      config: config.optimizer.
      total_updates: optimizer updates of the whole run.
    """
    c = config
    warmup = warmup_updates(c, total_updates)
    rest = max(total_updates - warmup, 1)
    floor = c.floor * c.lr
    if c.schedule == "constant":
        after = optax.constant_schedule(c.lr)
    elif c.schedule == "linear":
        after = optax.linear_schedule(c.lr, floor, c.decay_steps or rest)
    elif c.schedule == "cosine":
        after = optax.cosine_decay_schedule(c.lr, c.decay_steps or rest, alpha=c.floor)
    else:
        decay = c.decay_steps or max(total_updates // 10, 1)
        begin, shape = max(rest - decay, 0), _SHAPES[c.decay_shape]
        after = lambda i: floor + (c.lr - floor) * shape(jnp.clip((i - begin) / decay, 0, 1))  # noqa: E731
    if not warmup:
        return after
    # The first update already moves: update i of the warm-up uses (i + 1) / warmup of the way.
    start = c.warmup_start * c.lr
    ramp = lambda i: start + (c.lr - start) * (i + 1) / warmup  # noqa: E731
    return optax.join_schedules([ramp, after], [warmup])


# Remaining share of the way from lr to the floor, after a share x of wsd's decay.
_SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + jnp.cos(jnp.pi * x)) / 2,
    "sqrt": lambda x: 1 - jnp.sqrt(x),  # Hägele et al., arXiv 2405.18392
}
_NAMED = {
    "adamw": lambda c: optax.scale_by_adam(c.b1, c.b2, c.eps),
    "adam": lambda c: optax.scale_by_adam(c.b1, c.b2, c.eps),
    "sgd": lambda c: optax.trace(c.b1) if c.b1 else optax.identity(),
    "lion": lambda c: optax.scale_by_lion(c.b1, c.b2),
    "adafactor": lambda c: optax.scale_by_factored_rms(),
}
DECOUPLED_DECAY = ("adamw", "lion", "adafactor")
BY_NUMBER = ("adamw", "adam", "sgd", "lion")  # the update of a number reads no other number of the parameter
BY_PARAMETER = (*BY_NUMBER, "adafactor")      # the update of a number reads at most its own parameter


def make_optimizer(config, total_updates: int, logical_axes: dict[str, tuple], layers: dict[str, tuple] | None = None):
    """Returns (optax transformation over a flat dict of parameters, schedule).

    Weight decay is decoupled and of adamw, lion and adafactor alone. It skips vectors: biases, convolutions, DoRA's
    magnitudes, and parameters with at most one axis besides "layers". `optimizer.groups` maps name patterns to {lr:
    multiplier, weight_decay: value}; the first match wins.
    `optimizer.layer_decay` g multiplies the learning rate of layer l of L by g^(L - l) (as ELECTRA, arXiv 2003.10555,
    and BEiT, 2106.08254, which count the head as one more layer), on top of a group's multiplier.
    Nothing here clips: training.update does. A factory of an import path is called with learning_rate alone:
    resolve.checks refuses weight_decay, b1, b2 and eps beside it.

    Args:
      config: config.optimizer.
      total_updates: updates of the whole run, for schedules.
      logical_axes: parameter name -> logical axis names.
      layers: parameter name -> numbers of its layers (models.decoder.layers_of), more than one if it is stacked; needed
        only with layer_decay.

    Raises ConfigError for unknown keys of a group, a pattern that matches no parameter, and a name that is neither
    jaxrl's nor can be imported; TypeError for layer_decay without layers.
    """
    if config.layer_decay != 1 and layers is None:
        raise TypeError("optimizer.layer_decay needs the argument layers, the layer numbers of every parameter")
    schedule = make_schedule(config, total_updates)
    groups = [(p, dict(g)) for p, g in config.groups.items()]
    for pattern, group in groups:
        extra = set(group) - {"lr", "weight_decay"}
        if extra:
            raise ConfigError(
                f"optimizer.groups[{pattern!r}]: unknown keys {sorted(extra)}; known are lr and weight_decay"
            )
        if not any(re.search(pattern, name) for name in logical_axes):
            shown = ", ".join(list(logical_axes)[:3])
            raise ConfigError(f"optimizer.groups: pattern {pattern!r} matches no parameter; names look like {shown}")

    def decays(params: Any):
        return {name: _decays(name, logical_axes[name]) for name in params}

    def chain(multiplier=1.0, decay=config.weight_decay):
        if config.name not in _NAMED:
            return _imported(config.name)(learning_rate=lambda i: multiplier * schedule(i))
        parts = [_NAMED[config.name](config)]
        if config.name in DECOUPLED_DECAY and decay:
            parts.append(optax.add_decayed_weights(decay, mask=decays))
        return optax.chain(*parts, optax.scale_by_learning_rate(lambda i: multiplier * schedule(i)))

    if not groups:
        return _by_layer(chain(), config.layer_decay, layers or {}), schedule
    transforms: dict[Hashable, Any] = {"default": chain()}
    for pattern, group in groups:
        transforms[pattern] = chain(group.get("lr", 1.0), group.get("weight_decay", config.weight_decay))

    def labels(params: Any):
        return {name: next((p for p, _ in groups if re.search(p, name)), "default") for name in params}

    grouped = optax.partition(transforms, labels)
    return _by_layer(grouped, config.layer_decay, layers or {}), schedule


def _by_layer(optimizer, decay: float, layers: dict[str, tuple]):
    """Returns the optimizer with its steps multiplied by decay^(L - l). The structure of its state is unchanged, so a
    run can resume with another decay."""
    if decay == 1:
        return optimizer
    last = max(map(max, layers.values()))

    def factor(name, step, at):
        numbers = jnp.asarray([decay ** (last - number) for number in layers[name]], step.dtype)
        lead = (len(numbers),) * (len(numbers) > 1)
        if lead and at is not None:
            lead = step.shape[:1]
            numbers = jax.lax.dynamic_slice(numbers, (at,), lead)
        return numbers.reshape(*lead, *(1,) * (step.ndim - len(lead)))

    def update(updates, state, params=None, *, at=None, **more) -> Any:
        """at: first row of the stacked layers in `updates`, which are some consecutive rows; None = all rows."""
        steps: Any  # a flat dict, as `updates`
        steps, state = optax.with_extra_args_support(optimizer).update(updates, state, params, **more)
        return {name: step * factor(name, step, at) for name, step in steps.items()}, state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def in_parts(name: str) -> str:
    """Returns how an optimizer can update in parts (see training.make_update): "rows", "parameter" or "none".

    "rows": by rows of a parameter; "parameter": by whole parameters; "none": all at once, assumed of import paths."""
    return "rows" if name in BY_NUMBER else "parameter" if name in BY_PARAMETER else "none"


CRITICS_OWN = ("name", "b1", "b2", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_steps",
               "warmup_fraction", "warmup_start", "decay_steps", "decay_shape", "floor", "layer_decay")

ADAPTERS_OWN = ("lr", *CRITICS_OWN)


def critics_optimizer(config):
    """Returns the critic's optimizer config: config.optimizer with critic.lr and the entries of critic.optimizer,
    without groups, whose patterns are of the policy's names. config: of the job.
    """
    c = editable(config)
    for name, value in config.critic.optimizer.items():
        put(c, f"optimizer.{name}", value)
    c.optimizer.lr = config.critic.lr
    with c.optimizer.unlocked():
        c.optimizer.groups = {}  # patterns of the policy's names
    return c.optimizer


def adapters_optimizer(config, adapter: str):
    """Returns an adapter's optimizer config: config.optimizer with those of the adapter's entries in lora.adapters that
    ADAPTERS_OWN names; others are left out."""
    c = editable(config)
    for name, value in config.lora.adapters[adapter].items():
        if name in ADAPTERS_OWN:
            put(c, f"optimizer.{name}", value)
    return c.optimizer


def _decays(name: str, axes) -> bool:
    vector = name.endswith(("/bias", "/lora/m", "_taps/weight"))  # of all heads or experts, too; DoRA's; convolutions
    return len([a for a in axes if a != "layers"]) > 1 and not vector


def check_name(name: str) -> None:
    """Raises ConfigError unless `optimizer.name` is one of jaxrl's or an import path, which is imported."""
    if name not in _NAMED:
        _imported(name)


def _imported(path: str):
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(
            f"optimizer.name={path!r}: not one of {', '.join(_NAMED)} and not an importable optax factory"
            " such as optax.contrib.muon"
        ) from None
