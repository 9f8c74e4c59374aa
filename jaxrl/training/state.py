"""Splits parameters into two disjoint flat dicts (trainable, frozen) and makes the state that an update changes.

Called by roles.parameters. States of adapter sets are made in training.adapter_set.
"""

from __future__ import annotations

import re

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxrl.errors import ConfigError
from jaxrl.types import TrainState


def partition(tree, trainable_patterns, frozen_patterns):
    """Splits a nested parameter tree by patterns into (trainable, frozen), flat dicts keyed by 'layer_0/attn/q/kernel'.

    A parameter trains if a trainable pattern matches its name (re.search) and no frozen pattern does. Raises
    ConfigError for a pattern that matches nothing, and if nothing trains.
    """
    flat = flatten_dict(tree, sep="/", is_leaf=lambda _, x: not isinstance(x, dict))
    for option, patterns in (("model.trainable", trainable_patterns), ("model.frozen", frozen_patterns)):
        for p in patterns:
            if not any(re.search(p, name) for name in flat):
                raise ConfigError(
                    f"{option}: pattern {p!r} matches no parameter; names look like {', '.join(list(flat)[:3])}"
                )

    def trains(name):
        return any(re.search(p, name) for p in trainable_patterns) and not any(
            re.search(p, name) for p in frozen_patterns
        )

    trainable = {k: v for k, v in flat.items() if trains(k)}
    if not trainable:
        raise ConfigError("model.trainable and model.frozen together leave no parameter to train")
    return trainable, {k: v for k, v in flat.items() if not trains(k)}


def split(tree, names):
    """Splits a nested parameter tree into flat dicts (trainable, frozen), named "a/b/c"; parameters in `names`
    train."""
    flat = flatten_dict(tree, sep="/", is_leaf=lambda _, x: not isinstance(x, dict))
    return {k: v for k, v in flat.items() if k in names}, {k: v for k, v in flat.items() if k not in names}


def init_state(trainable, frozen, optimizer, fp16: bool = False, router_load=None,
               loss_scale: float = 2.0**15) -> TrainState:
    """Returns the TrainState before the first update. Pure, so it can be jitted with out_shardings or eval_shaped.

    Args:
      trainable, frozen: flat dicts of parameters.
      optimizer: optax transformation.
      fp16: keep counters for dynamic loss scaling.
      router_load: [n, E], training.router.even_load of a model with experts; None without experts.
      loss_scale: first loss scale in fp16.
    """
    stats = {name: jnp.zeros((), jnp.int32) for name in ("skipped", "nonfinite_streak", "stopped")}
    stats |= {name: jnp.zeros((), jnp.float32) for name in ("entropy_coef", "entropy_applied")}
    if fp16:
        stats |= {"loss_scale": jnp.asarray(loss_scale, jnp.float32), "finite_streak": jnp.zeros((), jnp.int32)}
    if router_load is not None:
        stats["router_load"] = jnp.asarray(router_load)
    return TrainState(trainable, frozen, optimizer.init(trainable), jnp.zeros((), jnp.int32), stats)
