"""The parameter tables of towers, by kind. Sizes are fields of VisionConfig."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxrl.models import parameters
from jaxrl.models.parameters import Entry, Row
from jaxrl.models.vision.config import VisionConfig

HF, SIGLIP, PROJECTOR = "model.visual", "model.vision_tower", "model.multi_modal_projector"
TOWERS = tuple(f"{name}." for name in (HF, SIGLIP, PROJECTOR))  # how the names of a tower's tensors begin
Rows = tuple[Row, ...]


class Tables(NamedTuple):
    """Rows of a tower, by place.

    Attributes:
      input: of the product of patches and the learned positions.
      layer: of one layer.
      merger: of the map from patches to features.
      tap: of such a map behind a layer of VisionConfig.taps, with {} for its number in HF's names; () = there are none.
      layers: HF's name of the list of layers.
    """

    input: Rows
    layer: Rows
    merger: Rows
    tap: Rows = ()
    layers: str = f"{HF}.blocks"

    def of_tap(self, number: int) -> Rows:
        """Returns the rows of tap `number` (from 0), with the number in HF's names."""
        return tuple(dataclasses.replace(row, hf=row.hf.format(number)) for row in self.tap)


def _norm(path: str, hf: str, size: str, bias: bool = True) -> Rows:
    """A layer norm, or an RMS norm, which has no bias."""
    return (Row(f"{path}/scale", ("norm",), f"{hf}.weight", init="unit", sizes=(size,)),
            Row(f"{path}/bias", ("norm",), f"{hf}.bias", init="zero", sizes=(size,)))[:1 + bias]


def _linear(path: str, hf: str, axes, sizes, inputs: int = 1, bias: bool = True, **more) -> Rows:
    return (Row(f"{path}/kernel", axes, f"{hf}.weight", inputs, sizes=sizes, exact=True, **more),
            Row(f"{path}/bias", axes[inputs:], f"{hf}.bias", init="zero", sizes=sizes[inputs:]))[:1 + bias]


def _patch(bias: bool) -> Rows:
    return _linear("patch", f"{HF}.patch_embed.proj", (None, None, None, None, "embed"),
                   ("channels", "frames", "patch", "patch", "width"), 4, bias, whole=True,
                   adapts=False)


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


def _siglip() -> Tables:
    """Of SigLIP and of Gemma 3's projector: the last layer norm, and behind the mean over m x m patches an RMS norm and
    one matrix, which lies on a disk with its inputs first."""
    patch = _linear("patch", f"{SIGLIP}.embeddings.patch_embedding", (None, None, None, "embed"),
                    ("channels", "patch", "patch", "width"), 3, whole=True, adapts=False)
    positions = Row("positions/embedding", (None, "embed"), f"{SIGLIP}.embeddings.position_embedding.weight",
                    sizes=("positions", "width"))
    into, inner, wide = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed"), ("heads", "head_dim", "width")
    maps = [_linear(f"attention/{ours}", f"self_attn.{hf}_proj", into, ("width", "heads", "head_dim"))
            for ours, hf in (("query", "q"), ("key", "k"), ("value", "v"))]
    maps += [_linear("attention/out", "self_attn.out_proj", inner, wide, 2),
             _linear("mlp/up", "mlp.fc1", ("embed", "mlp"), ("width", "mlp")),
             _linear("mlp/down", "mlp.fc2", ("mlp", "embed"), ("mlp", "width"))]
    layer = (*_norm("attention_norm", "layer_norm1", "width"), *_norm("mlp_norm", "layer_norm2", "width"),
             *(row for rows in maps for row in rows))
    merger = (*_norm("norm", f"{SIGLIP}.post_layernorm", "width"),
              Row("soft_norm/scale", ("norm",), f"{PROJECTOR}.mm_soft_emb_norm.weight", init="one", sizes=("width",)),
              Row("project/kernel", ("embed", "mlp"), f"{PROJECTOR}.mm_input_projection_weight", 1,
                  sizes=("width", "out_size"), exact=True, adapts=False, straight=True))
    return Tables((*patch, positions), layer, merger, layers=f"{SIGLIP}.encoder.layers")


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
    "siglip": _siglip(),
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
            out += parameters.entries(config, tables.layer, ("vision", f"group_{i}"), group, len(group), tables.layers)
        else:
            for number in group:
                out += parameters.entries(config, tables.layer, ("vision", f"layer_{number}"), [number], 0,
                                          tables.layers)
    return out


def module_names(kind: str, layers: int = 64) -> list[str]:
    """Returns the HF names of the linear maps that towers of a kind have, each once, for `layers` layers and as many
    taps. kind: a key of TABLES.
    """
    tables = TABLES[kind]
    of_layers = [f"{tables.layers}.{i}.{row.hf}" for i in range(layers) for row in tables.layer if row.inputs]
    of_taps = [row.hf for i in range(layers) for row in tables.of_tap(i) if row.inputs]
    names = [*of_layers, *(row.hf for row in (*tables.input, *tables.merger) if row.inputs), *of_taps]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def multiplied_by_patch(config: VisionConfig, entry: Entry) -> float:
    """Returns the count of numbers of a model's entry that one patch is multiplied with; 0 if it is not the tower's.

    A merger's numbers count once for merge x merge patches, and of still images those of one frame count.
    """
    group, part, *_ = entry.path
    if group != "vision":
        return 0.0
    if part == "patch":  # of still images frames are equal, see tower
        return entry.multiplied / (1 if config.video else config.frames)
    return entry.multiplied / (config.merge**2 if part == "merger" or part.startswith("tap_") else 1)
