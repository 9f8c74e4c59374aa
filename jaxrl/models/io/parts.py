"""HF tensors that hold several parameters: the outputs of a linear map, or channels of a convolution, lie group after
group, and in each group part after part (Row.part):

    q_proj of gated attention     by head      [query | gate]
    in_proj_qkv, conv1d           one group    [query | key | value]
    in_proj_qkvz of Qwen3-Next    by key head  [query | key | values | gates]

Here every part is a parameter of its own, so that tp splits heads. Its name is the tensor's with the part's place in
brackets; those names never reach a disk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models.io import tensorfile


class Packed(NamedTuple):
    """One HF tensor that holds several parameters.

    Attributes:
      groups: of outputs, see the module.
      names, shapes, outputs: of its parts, in order: name, shape (as Entry.hf_shape) and number of outputs.
      rest: axes behind the outputs.
    """

    groups: int
    names: list[str]
    shapes: list[tuple[int, ...]]
    outputs: list[int]
    rest: tuple[int, ...]  # axes behind the outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed tensor: (outputs of all parts, *rest)."""
        return sum(self.outputs), *self.rest


@dataclasses.dataclass(frozen=True)
class Part(tensorfile.Stored):
    """A part of a packed tensor: `size` outputs of every group, from `first` on.

    of: the packed tensor. groups: its groups of outputs. shape is that of the part.
    """

    of: tensorfile.Stored
    groups: int
    first: int
    size: int

    def read(self, index: Any = ...) -> np.ndarray:
        """Returns the part's values at an index; reads the whole packed tensor."""
        whole = self.of.read()
        grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
        return grouped[:, self.first:self.first + self.size].reshape(self.shape)[index]


def groups_of(row, config) -> int:
    """Returns the number of groups of the HF tensor that a row is a part of; 1 for a row that is a whole tensor."""
    groups = row.part[0] if row.part else 1
    return groups if isinstance(groups, int) else getattr(config, groups)


def whole_of(hf_name: str) -> str:
    """Returns the HF tensor's name, of a part's name or its own."""
    return hf_name.partition("[")[0]


def pack(arrays: list, groups: int) -> Any:
    """Returns one array [outputs, ...] from its parts [outputs of the part, ...], group by group; numpy or jax, as
    they are."""
    grouped = [x.reshape(groups, -1, *x.shape[1:]) for x in arrays]
    join = jnp if isinstance(arrays[0], jax.Array) else np
    return join.concatenate(grouped, axis=1).reshape(-1, *arrays[0].shape[1:])


def unpack(array, groups: int, outputs: list[int]) -> list:
    """Splits a packed array [outputs, ...] into its parts; the inverse of `pack`. outputs: of each part."""
    grouped = array.reshape(groups, -1, *array.shape[1:])
    ends = np.cumsum([n // groups for n in outputs])[:-1]
    return [x.reshape(-1, *array.shape[1:]) for x in np.split(grouped, ends, axis=1)]


def tensors(model) -> dict[str, Packed]:
    """Returns {HF name: Packed} of the HF tensors that hold several parameters of a model."""
    found: dict[str, dict[int, tuple]] = {}
    for entry in model.entries:
        for name in entry.hf_names if entry.row.part else ():
            found.setdefault(name[:name.rindex("[")], {})[entry.row.part[1]] = name, entry
    out = {}
    for whole, by_place in found.items():
        rows = [by_place[place] for place in sorted(by_place)]
        entry = rows[0][1]
        shape = entry.hf_shape
        convolves = not entry.inputs and len(shape) > 1
        rest = (1, shape[-1]) if convolves else shape[1:]  # a convolution has one input a channel
        shapes = [entry.hf_shape for _, entry in rows]
        groups = groups_of(entry.row, model.config)
        outputs = [math.prod(shape) // math.prod(rest) for shape in shapes]
        out[whole] = Packed(groups, [name for name, _ in rows], shapes, outputs, rest)
    return out


def split(model, stored: dict[str, tensorfile.Stored]) -> dict[str, tensorfile.Stored]:
    """Returns a folder's tensors with every packed one split into its parts, named as in the parameter table. Raises
    ConfigError for a packed tensor of another shape.
    """
    out = dict(stored)
    for whole, packed in tensors(model).items():
        if (found := out.pop(whole, None)) is None:
            continue
        if found.shape != packed.shape:
            raise ConfigError(f"{found.file.parent}: {whole} has shape {found.shape}, the config needs {packed.shape}; "
                              "is config.json the one of these weights?")
        first = 0
        for name, shape, outputs in zip(packed.names, packed.shapes, packed.outputs, strict=True):
            size = outputs // packed.groups
            where = found.file, found.dtype, shape, found.start, found.stop
            out[name] = Part(name, *where, found, packed.groups, first, size)
            first += size
    return out


def spread(model, by_name: dict) -> dict:
    """Returns {HF name: value} with the value of each packed tensor given to all of its parts, beside the packed
    tensor's own."""
    out = dict(by_name)
    for whole, packed in tensors(model).items() if by_name else ():
        out |= {name: by_name[whole] for name in packed.names if whole in by_name}
    return out


def join(model, planned: list[tensorfile.Planned]) -> list[tensorfile.Planned]:
    """Returns the tensors to write under HF's names: the parts of each packed tensor are replaced by that tensor.

    Values are read and packed when a tensor is written, not here. planned: every parameter, under its name here.
    """
    left = {t.name: t for t in planned}
    for whole, packed in tensors(model).items():
        own = [left.pop(name) for name in packed.names]
        left[whole] = tensorfile.Planned(whole, own[0].dtype, packed.shape, functools.partial(_joined, own, packed))
    return list(left.values())


def join_arrays(model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns {HF name: array} of {name here: array}: the parts of each packed tensor are packed into that tensor."""
    left = dict(arrays)
    for whole, packed in tensors(model).items():
        if packed.names[0] in left:
            left[whole] = pack([left.pop(name).reshape(-1, *packed.rest) for name in packed.names], packed.groups)
    return left


def _joined(own, packed: Packed) -> np.ndarray:
    return pack([part.get().reshape(-1, *packed.rest) for part in own], packed.groups)
