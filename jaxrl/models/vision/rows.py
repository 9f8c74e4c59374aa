"""The parameter tables of towers, by kind. Sizes are fields of VisionConfig."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxrl.models import parameters
from jaxrl.models.parameters import Entry, Row
from jaxrl.models.vision.config import VisionConfig

HF = "model.visual"
Rows = tuple[Row, ...]


class Tables(NamedTuple):
    """Rows of a tower. tap: of a tower whose features are taken behind several layers."""

    input: Rows
    layer: Rows
    merger: Rows
    tap: Rows = ()

    def of_tap(self, number: int) -> Rows:
        return tuple(dataclasses.replace(row, hf=row.hf.format(number)) for row in self.tap)


def _norm(path: str, hf: str, size: str, bias: bool = True) -> Rows:
    """A layer norm, or an RMS norm, which has no bias."""
    return (Row(f"{path}/scale", ("norm",), f"{hf}.weight", init="unit", sizes=(size,)),
            Row(f"{path}/bias", ("norm",), f"{hf}.bias", init="zero", sizes=(size,)))[:1 + bias]


def _linear(path: str, hf: str, axes, sizes, inputs: int = 1, bias: bool = True, **more) -> Rows:
    return (Row(f"{path}/kernel", axes, f"{hf}.weight", inputs, sizes=sizes, adapts=False, **more),
            Row(f"{path}/bias", axes[inputs:], f"{hf}.bias", init="zero", sizes=sizes[inputs:]))[:1 + bias]


def _patch(bias: bool) -> Rows:
    return _linear("patch", f"{HF}.patch_embed.proj", (None, None, None, None, "embed"),
                   ("channels", "frames", "patch", "patch", "width"), 4, bias, whole=True)


def _attention() -> Rows:
    """Of each head queries, keys and values, which are one tensor on disk."""
    rows = []
    for place, name in enumerate(("query", "key", "value")):
        own = _linear(f"attention/{name}", "attn.qkv", ("embed", "heads", "head_dim"), ("width", "heads", "head_dim"))
        rows += [dataclasses.replace(row, part=(1, place)) for row in own]
    out = _linear("attention/out", "attn.proj", ("heads", "head_dim", "embed"), ("heads", "head_dim", "width"), 2)
    return (*rows, *out)


def _layer(rms: bool, mlp: dict[str, str]) -> Rows:
    """mlp: HF's names of up, down and, of a gated one, gate."""
    into, out = (("embed", "mlp"), ("width", "mlp")), (("mlp", "embed"), ("mlp", "width"))
    maps = [_linear(f"mlp/{name}", f"mlp.{hf}", *(out if name == "down" else into)) for name, hf in mlp.items()]
    return (*_norm("attention_norm", "norm1", "width", not rms), *_attention(),
            *_norm("mlp_norm", "norm2", "width", not rms), *(row for rows in maps for row in rows))


def _merger(hf: str, names: tuple[str, str, str], normed: str, rms: bool = False) -> Rows:
    """names: HF's of the norm and of the two linear maps. normed: the numbers that are normed together."""
    norm, up, down = (f"{hf}.{name}" for name in names)
    return (*_norm("norm", norm, normed, not rms), *_linear("up", up, ("embed", "mlp"), ("merged", "merged")),
            *_linear("down", down, ("mlp", "embed"), ("merged", "out_size")))


_OF_3, _OF_2 = ("norm", "linear_fc1", "linear_fc2"), ("ln_q", "mlp.0", "mlp.2")
TABLES = {  # Family.vision
    "qwen3": Tables(
        (*_patch(bias=True),
         Row("positions/embedding", (None, "embed"), f"{HF}.pos_embed.weight", sizes=("positions", "width"))),
        _layer(False, {"up": "linear_fc1", "down": "linear_fc2"}),
        _merger(f"{HF}.merger", _OF_3, "width"),  # norms each patch
        _merger(f"{HF}.deepstack_merger_list.{{}}", _OF_3, "merged")),  # norms the patches of a feature together
    "qwen2_5": Tables(
        _patch(bias=False), _layer(True, {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
        _merger(f"{HF}.merger", _OF_2, "width", rms=True)),
    "qwen2": Tables(
        _patch(bias=False), _layer(False, {"up": "fc1", "down": "fc2"}), _merger(f"{HF}.merger", _OF_2, "width")),
}


def entries(config: VisionConfig, scan_layers: bool) -> list[Entry]:
    """Returns the parameter table of a tower. scan_layers: the layers of a group (VisionConfig.groups) are stacked."""
    tables = TABLES[config.kind]
    out = parameters.entries(config, tables.input, ("vision",))
    out += parameters.entries(config, tables.merger, ("vision", "merger"))
    for i in range(len(config.taps)):
        out += parameters.entries(config, tables.of_tap(i), ("vision", f"tap_{i}"))
    for i, group in enumerate(config.groups):
        if scan_layers:
            out += parameters.entries(config, tables.layer, ("vision", f"group_{i}"), group, len(group), f"{HF}.blocks")
        else:
            for number in group:
                out += parameters.entries(config, tables.layer, ("vision", f"layer_{number}"), [number], 0,
                                          f"{HF}.blocks")
    return out


def multiplied_by_patch(config: VisionConfig, entry: Entry) -> float:
    """Returns the count of numbers of a model's entry that one patch is multiplied with; 0 if it is not the tower's."""
    group, part, *_ = entry.path
    if group != "vision":
        return 0.0
    if part == "patch":  # of a still image, whose frames are equal, see tower
        return entry.multiplied / config.frames
    return entry.multiplied / (config.merge**2 if part == "merger" or part.startswith("tap_") else 1)
