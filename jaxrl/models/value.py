"""A head of one number on any decoder: the value of a state, for PPO's critic, or the score of a
sequence, for reward models.

Legend: R rows, S loss slots per row, D hidden size.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from jaxrl.models import parameters
from jaxrl.models.model import Model
from jaxrl.sharding.memory import fetched


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """A Model with a value head: its parameters are the Model's and `value/kernel` [D], `value/bias` [].

    The head starts at zero, so that every state is worth 0 at first. With `keep_head` False the output matrix is left
    out: a critic that has a trunk of its own never reads it.

    name: of the head in HF's files, `<name>.weight` [1, D]. bias: a critic has one; a reward model has none, as
    transformers' sequence classifiers, so that all of it is in its files.
    """

    model: Model
    keep_head: bool = False
    name: str = "score"
    bias: bool = True

    @property
    def config(self):
        """ModelConfig of the model within."""
        return self.model.config

    @functools.cached_property
    def entries(self) -> tuple[parameters.Entry, ...]:
        """Returns the parameter table of the Model, without the output matrix unless `keep_head`, and of its value
        head.
        """
        trunk = [entry for entry in self.model.entries if self.keep_head or entry.path[0] != "head"]
        kernel, bias = parameters.VALUE
        rows = [dataclasses.replace(kernel, hf=f"{self.name}.weight")] + [bias] * self.bias
        return (*trunk, *parameters.entries(self.config, rows))

    def tree(self, function):
        """Returns the parameter tree (nested dicts, one leaf per parameters.Entry) with `function(entry)` at every
        leaf.
        """
        return parameters.tree(self.entries, function)

    def init(self, key):
        """Draws fp32 parameters from a jax PRNG key: a random trunk (see Model.init) and a zero value head. Pure."""
        return self.with_head(self.model.init(key))

    def with_head(self, params, dtype=None):
        """Returns a Model's parameters with a zero value head added, and without the output matrix unless `keep_head`.

        dtype: of the head; None = the embedding's.
        """
        dtype = params["embed"]["embedding"].dtype if dtype is None else dtype
        return self.tree(lambda entry: jnp.zeros(entry.shape, dtype) if entry.path[0] == "value" else entry.of(params))

    def logical_axes(self):
        """Returns the parameter tree whose leaves are tuples of logical axis names, one per dimension."""
        return self.tree(lambda entry: entry.axes)


def values(params, hidden_RxSxD):
    """Computes values [R, S] in fp32 or better: hidden . kernel + bias (if there is one).

    params: a ValueModel's tree, of which `value` is read. hidden_RxSxD: of any float dtype.
    """
    acc = jnp.promote_types(hidden_RxSxD.dtype, jnp.float32)
    head = fetched(params["value"])
    out = jnp.einsum("rsd,d->rs", hidden_RxSxD.astype(acc), head["kernel"].astype(acc))
    return out + head["bias"].astype(acc) if "bias" in head else out
