"""A value head on any decoder: one number per position, for PPO's critic.

Legend: R rows, S scored slots per row, D hidden size.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxrl.models.model import Model


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """A Model with a value head: its parameters are the Model's and `value/kernel` [D], `value/bias` [].

    The head starts at zero, so that every state is worth 0 at first. With `keep_head` False the output matrix is left
    out: a critic that has a trunk of its own never reads it.
    """

    model: Model
    keep_head: bool = False

    def init(self, key):
        """Random trunk (see Model.init), zero value head; fp32. Pure."""
        return self.with_head(self.model.init(key))

    def with_head(self, params):
        """A Model's parameters with a value head at zero."""
        dtype = params["embed"]["embedding"].dtype
        value = {"kernel": jnp.zeros((self.model.config.hidden_size,), dtype), "bias": jnp.zeros((), dtype)}
        return {**self._kept(params), "value": value}

    def logical_axes(self):
        return {**self._kept(self.model.logical_axes()), "value": {"kernel": ("norm",), "bias": ()}}

    def _kept(self, tree):
        return tree if self.keep_head else {k: v for k, v in tree.items() if k != "head"}


def values(params, hidden_RxSxD):
    """Values [R, S] in fp32 or better: hidden . kernel + bias."""
    acc = jnp.promote_types(hidden_RxSxD.dtype, jnp.float32)
    head = params["value"]
    return jnp.einsum("rsd,d->rs", hidden_RxSxD.astype(acc), head["kernel"].astype(acc)) + head["bias"].astype(acc)
