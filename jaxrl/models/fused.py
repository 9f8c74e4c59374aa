"""The other layout in which experts lie on a disk: all of a layer in two tensors, as transformers 5 holds them,

    model.layers.<i>.mlp.experts.gate_up_proj  [E, 2 F, D]    every expert's gate, then its up
    model.layers.<i>.mlp.experts.down_proj     [E, D, F]

instead of the three matrices per expert that checkpoints were published with and that the parameter table names. One
is read as the other; a folder is written as it was read.

Legend: E experts, D hidden size, F an expert's width.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models import tensorfile
from jaxrl.models.parameters import ROUTER

NAME = re.compile(r"model\.layers\.\d+\.mlp\.experts\.gate_up_proj")
_KINDS = {"gate_up_proj": ("mlp/experts/gate/kernel", "mlp/experts/up/kernel"),
          "down_proj": ("mlp/experts/down/kernel",)}


class Fused(NamedTuple):
    """One fused tensor, and the matrices in it: of each expert, in the order of its rows. Or another name of one."""

    name: str
    parts: tuple[tuple[str, ...], ...]
    whole: bool = False  # the one part is the tensor itself


def is_fused(names: Iterable[str]) -> bool:
    """Whether a folder with these tensors has the other layout."""
    return any(NAME.fullmatch(name) for name in names)


def tensors(model) -> list[Fused]:
    """The fused tensors of a model, by layer; with the routers where they are called otherwise in that layout."""
    by_layer: dict[tuple[str, str], list[str]] = {}
    for entry in model.entries:
        for name in entry.hf_names:
            if entry.row.stacked or entry.row.path == ROUTER:
                by_layer.setdefault((re.match(r"model\.layers\.\d+", name)[0], entry.row.path), []).append(name)
    out = []
    for layer in dict.fromkeys(layer for layer, _ in by_layer):
        for name, kinds in _KINDS.items():
            if (layer, kinds[0]) in by_layer:
                parts = zip(*(by_layer[layer, kind] for kind in kinds), strict=True)
                out.append(Fused(f"{layer}.mlp.experts.{name}", tuple(parts)))
        router = by_layer.get((layer, ROUTER), [])
        if router and router[0] != f"{layer}.mlp.gate.weight":
            out.append(Fused(f"{layer}.mlp.gate.weight", (tuple(router),), whole=True))
    return out


def split(model, stored: dict[str, tensorfile.Stored]) -> dict[str, tensorfile.Stored]:
    """A folder's tensors with every fused one as its parts, which are places in the same file.

    Raises ConfigError for a fused tensor of another shape, and where a folder has its parts too.
    """
    if not is_fused(stored):
        return stored
    out, sizes = dict(stored), {name: entry.hf_shape for entry in model.entries for name in entry.hf_names}
    for name, parts, whole in tensors(model):
        found = out.pop(name, None)
        if found is None:
            continue
        if double := sorted(out.keys() & {part for own in parts for part in own}):
            raise ConfigError(f"{found.file.parent}: {name} stands beside {tensorfile.shortened(double)}, which it "
                              "holds; remove one of the two layouts")
        rows, columns = sizes[parts[0][0]]
        shape = (rows, columns) if whole else (len(parts), rows * len(parts[0]), columns)
        if found.shape != shape:
            raise ConfigError(f"{found.file.parent}: {name} has shape {found.shape}, the config needs {shape}; is "
                              "config.json the one of these weights?")
        if found.dtype not in tensorfile.DTYPES:
            found.read()  # which says so
        size = rows * columns * tensorfile.DTYPES[found.dtype].itemsize
        for i, part in enumerate(part for own in parts for part in own):
            out[part] = dataclasses.replace(found, name=part, shape=(rows, columns), start=found.start + i * size)
    return out


def spread(model, by_name: dict) -> dict:
    """A table by the names of a folder, with what it says of fused tensors said of their parts."""
    out = dict(by_name)
    for name, parts, _ in tensors(model) if by_name else ():
        out |= {part: by_name[name] for own in parts for part in own if name in by_name}
    return out


def fuse(model, planned: list[tensorfile.Planned]) -> list[tensorfile.Planned]:
    """What is to be written, in the other layout."""
    left = {t.name: t for t in planned}
    for name, parts, whole in tensors(model):
        own = [[left.pop(part) for part in expert] for expert in parts]
        first = own[0][0]
        if whole:
            left[name] = dataclasses.replace(first, name=name)
            continue
        rows, columns = first.shape
        shape = (len(own), rows * len(own[0]), columns)
        left[name] = tensorfile.Planned(name, first.dtype, shape, lambda own=own, shape=shape: np.concatenate(
            [part.get() for expert in own for part in expert]).reshape(shape))
        assert math.prod(shape) == sum(math.prod(part.shape) for expert in own for part in expert)
    return list(left.values())
