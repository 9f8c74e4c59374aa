"""The other layout in which experts lie on a disk: all of a layer in two tensors, as transformers 5 holds them,

    model.layers.<i>.mlp.experts.gate_up_proj  [E, 2 F, D]    every expert's gate, then its up
    model.layers.<i>.mlp.experts.down_proj     [E, D, F]

instead of the three matrices per expert that checkpoints were published with and that the parameter table names. One
is read as the other; a folder is written as it was read. Nemotron's experts have no gate: `mixer.experts.up_proj`
[E, F, D] and `down_proj`. Granite 4 has one layout alone, `block_sparse_moe.input_linear.weight` [E, 2 F, D] and
`output_linear.weight`.

gpt-oss has a layout of its own, and no other: matrices lie transposed, and gate and up take turns,

    gate_up_proj [E, D, 2 F],  gate_up_proj_bias [E, 2 F]     column 2 f is the gate's f, 2 f + 1 the up's
    down_proj    [E, F, D],    down_proj_bias    [E, D]

(or, of the matrices, mxfp4's blocks and scales in their place, see models.io.scaled).

Qwen3-VL's experts were published transposed, gate_up_proj [E, D, 2 F] with the gate's columns before the up's, and
down_proj [E, F, D]; transformers reads them as well as the first layout, and no matrix per expert.

Legend: E experts, D hidden size, F an expert's width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models.families import FAMILIES
from jaxrl.models.io import tensorfile
from jaxrl.models.parameters import CORRECTION, ROUTER

NAME = re.compile(r"model\.layers\.\d+\.(mlp\.experts\.gate_up_proj|mixer\.experts\.up_proj)")
_GATED = {"gate_up_proj": ("mlp/experts/gate/kernel", "mlp/experts/up/kernel"),
          "down_proj": ("mlp/experts/down/kernel",),
          "gate_up_proj_bias": ("mlp/experts/gate/bias", "mlp/experts/up/bias"),
          "down_proj_bias": ("mlp/experts/down/bias",)}
_KINDS = {  # by Family.fused_in
    "mlp.experts": _GATED,
    "mixer.experts": {"up_proj": ("mlp/experts/up/kernel",), "down_proj": _GATED["down_proj"]},
    "block_sparse_moe": {"input_linear.weight": _GATED["gate_up_proj"], "output_linear.weight": _GATED["down_proj"]}}


TRANSPOSED = "transposed"


class Fused(NamedTuple):
    """One fused tensor, and the matrices in it.

    Attributes:
      name: of the fused tensor.
      parts: names of each expert's matrices in it, in the order of the rows.
      whole: the tensor is its one part under another name.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]
    whole: bool = False  # the one part is the tensor itself

    def shape(self, part: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
        """Returns the fused tensor's shape from the shape of one part, [outputs, inputs] or a bias's [outputs].
        transposed: an expert's outputs are columns.
        """
        if self.whole:
            return part
        outputs, inputs = part[0] * len(self.parts[0]), part[1:]
        return (len(self.parts), *inputs, outputs) if transposed else (len(self.parts), outputs, *inputs)


@dataclasses.dataclass(frozen=True)
class Columns(tensorfile.Stored):
    """A part of a transposed tensor: columns of an expert, as rows.

    of: the whole tensor. expert: number of the expert. columns: which of its columns; shape is that of the part,
    [outputs, inputs], of a bias [outputs].
    """

    of: tensorfile.Stored
    expert: int
    columns: slice

    def read(self, index: Any = ...) -> np.ndarray:
        """Returns the part's values at an index of its shape, read from the whole tensor."""
        return self.of.read((self.expert, ..., self.columns)).T[index]


def interleaved(model) -> bool:
    """Whether a model's experts are stored in gpt-oss's layout."""
    return FAMILIES[model.config.family].interleaved


def always(model) -> bool:
    """Whether a model's experts have one layout alone, in which all of a layer's lie in one tensor (gpt-oss, Granite
    4).
    """
    return FAMILIES[model.config.family].fused_only


def is_fused(names: Iterable[str]) -> bool:
    """Whether a folder with these tensors has all of a layer's experts in one tensor, under the names of transformers
    5, gpt-oss (in mxfp4: once it is read by scaled.plain) or Nemotron. Granite 4's names, of its one layout (`always`),
    are not looked for.
    """
    return any(NAME.fullmatch(name) for name in names)


def layout(stored: dict[str, tensorfile.Stored], hf_config: dict) -> bool | str:
    """Returns how a folder has its experts: True (all of a layer's in one tensor, by its name), TRANSPOSED (the same
    with an expert's outputs as columns, of families that have this layout), else False.

    False is also returned for Granite 4's layout and gpt-oss in mxfp4, which `always` tells. stored: the folder's
    tensors by name. hf_config: of the text model.
    """
    first = next((name for name in stored if NAME.fullmatch(name)), None)
    family = FAMILIES.get(hf_config.get("model_type", ""))
    if first is not None and family is not None and family.transposed:
        hidden, down = hf_config["hidden_size"], stored.get(first.replace("gate_up_proj", "down_proj"))
        # One of the two may be square, [E, D, 2 F] with 2 F = D or [E, D, F] with F = D; then the other tells.
        if stored[first].shape[-1] != hidden or (down is not None and down.shape[1] != hidden):
            return TRANSPOSED
    return first is not None


def written_layout(model, source: bool | str) -> bool | str:
    """Returns the layout in which a model's experts are written: that of its source folder, or, where that is False,
    the one fused layout of models that have no other (True), TRANSPOSED for families with it, else False.

    source: of the source folder, as `layout` returns it.
    """
    return source or always(model) or (TRANSPOSED if FAMILIES[model.config.family].transposed else False)


def tensors(model) -> list[Fused]:
    """Returns the fused tensors of a model, by layer, and the routers and their corrections if that layout names them
    differently (`whole`).
    """
    by_layer: dict[tuple[str, str], list[str]] = {}
    for entry in model.entries:
        for name in entry.hf_names:
            if entry.row.stacked or entry.row.path in (ROUTER, CORRECTION):
                layer = ".".join(name.split(".")[:3])  # model.layers.<i>
                by_layer.setdefault((layer, entry.row.path), []).append(name)
    out = []
    family = FAMILIES[model.config.family]
    module, named = family.fused_in, _KINDS[family.fused_in]
    for layer in dict.fromkeys(layer for layer, _ in by_layer):
        for name, kinds in named.items():
            if (layer, kinds[0]) in by_layer:
                parts = zip(*(by_layer[layer, kind] for kind in kinds), strict=True)
                out.append(Fused(f"{layer}.{module}.{name}", tuple(parts)))
        router = by_layer.get((layer, ROUTER), [])
        if router and router[0] != f"{layer}.{module.removesuffix('.experts')}.gate.weight" and not always(model):
            out.append(Fused(f"{layer}.mlp.gate.weight", (tuple(router),), whole=True))
        correction = by_layer.get((layer, CORRECTION), [])
        if correction and ".block_sparse_moe." in correction[0]:
            out.append(Fused(correction[0].replace("block_sparse_moe", "mlp"), (tuple(correction),), whole=True))
    return out


def split(model, stored: dict[str, tensorfile.Stored]) -> dict[str, tensorfile.Stored]:
    """Returns a folder's tensors with every fused one split into its parts, which are views of the same file; unchanged
    if the folder has no fused layout.

    Raises ConfigError for a fused tensor of another shape or of a dtype that cannot be read, and for a folder that has
    the parts, too.
    """
    turns = interleaved(model)
    if not always(model) and not is_fused(stored):
        return stored
    out, sizes = dict(stored), {name: entry.hf_shape for entry in model.entries for name in entry.hf_names}
    across = turns or (FAMILIES[model.config.family].transposed and any(  # a square matrix does not tell
        own.name in stored and stored[own.name].shape != own.shape(sizes[own.parts[0][0]], False)
        for own in tensors(model)))
    for own in tensors(model):
        name, parts, _ = own
        found = out.pop(name, None)
        if found is None:
            continue
        if double := sorted(out.keys() & {part for own in parts for part in own}):
            raise ConfigError(f"{found.file.parent}: {name} stands beside {tensorfile.shortened(double)}, which it "
                              "holds; remove one of the two layouts")
        shape = own.shape(size := sizes[parts[0][0]], across)
        if found.shape != shape:
            raise ConfigError(f"{found.file.parent}: {name} has shape {found.shape}, the config needs {shape}; is "
                              "config.json the one of these weights?")
        if found.dtype not in tensorfile.DTYPES:
            found.read()  # which says so
        each = math.prod(size) * tensorfile.DTYPES[found.dtype].itemsize
        for i, (expert, j) in enumerate(np.ndindex(len(parts), len(parts[0]))):
            part = parts[expert][j]
            if across:
                count = size[0]
                columns = slice(j, None, len(parts[0])) if turns else slice(j * count, (j + 1) * count)
                where = found.file, found.dtype, size, found.start, found.stop
                out[part] = Columns(part, *where, found, expert, columns)
            else:
                out[part] = dataclasses.replace(found, name=part, shape=size, start=found.start + i * each)
    return out


def spread(model, by_name: dict) -> dict:
    """Returns {HF name: value} with the value of each fused tensor given to all of its parts, beside the fused tensor's
    own.
    """
    out = dict(by_name)
    for name, parts, _ in tensors(model) if by_name else ():
        out |= {part: by_name[name] for own in parts for part in own if name in by_name}
    return out


def fuse(model, planned: list[tensorfile.Planned], layout: bool | str) -> list[tensorfile.Planned]:
    """Converts the tensors to write to the fused layout: the matrices of each fused tensor are replaced by that tensor.

    Values are read and joined when a tensor is written, not here. layout: of `written_layout`, True or TRANSPOSED.
    """
    left, turns = {t.name: t for t in planned}, interleaved(model)
    for fused in tensors(model):
        name, parts, whole = fused
        own = [[left.pop(part) for part in expert] for expert in parts]
        first = own[0][0]
        if whole:
            left[name] = dataclasses.replace(first, name=name)
            continue
        across = turns or layout == TRANSPOSED
        shape = fused.shape(first.shape, across)
        join = _in_turns if turns else _across if across else _joined
        left[name] = tensorfile.Planned(name, first.dtype, shape, functools.partial(join, own, shape))
        assert math.prod(shape) == sum(math.prod(part.shape) for expert in own for part in expert)
    return list(left.values())


def _in_turns(own, shape) -> np.ndarray:
    return np.stack([np.stack([part.get().T for part in expert], axis=-1) for expert in own]).reshape(shape)


def _across(own, shape) -> np.ndarray:
    return np.stack([np.concatenate([part.get().T for part in expert], axis=-1) for expert in own]).reshape(shape)


def _joined(own, shape) -> np.ndarray:
    return np.concatenate([part.get() for expert in own for part in expert]).reshape(shape)
