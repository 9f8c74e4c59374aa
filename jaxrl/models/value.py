"""A value head on any decoder: one number per position, for PPO's critic.

Legend: R rows, S scored slots per row, D hidden size.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from jaxrl.models import parameters
from jaxrl.models.model import Model


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """A Model with a value head: its parameters are the Model's and `value/kernel` [D], `value/bias` [].

    The head starts at zero, so that every state is worth 0 at first. With `keep_head` False the output matrix is left
    out: a critic that has a trunk of its own never reads it.
    """

    model: Model
    keep_head: bool = False

    @functools.cached_property
    def entries(self) -> tuple[parameters.Entry, ...]:
        """As Model.entries, with those of the value head."""
        trunk = [entry for entry in self.model.entries if self.keep_head or entry.path[0] != "head"]
        return (*trunk, *parameters.entries(self.model.config, parameters.VALUE))

    def tree(self, function):
        """The parameter tree with `function(entry)` at every leaf."""
        return parameters.tree(self.entries, function)

    def init(self, key):
        """Random trunk (see Model.init), zero value head; fp32. Pure."""
        return self.with_head(self.model.init(key))

    def with_head(self, params, dtype=None):
        """A Model's parameters with a value head at zero. dtype: of the head; None = the embedding's."""
        dtype = params["embed"]["embedding"].dtype if dtype is None else dtype
        return self.tree(lambda entry: jnp.zeros(entry.shape, dtype) if entry.path[0] == "value" else entry.of(params))

    def logical_axes(self):
        return self.tree(lambda entry: entry.axes)


def values(params, hidden_RxSxD):
    """Values [R, S] in fp32 or better: hidden . kernel + bias."""
    acc = jnp.promote_types(hidden_RxSxD.dtype, jnp.float32)
    head = params["value"]
    return jnp.einsum("rsd,d->rs", hidden_RxSxD.astype(acc), head["kernel"].astype(acc)) + head["bias"].astype(acc)
