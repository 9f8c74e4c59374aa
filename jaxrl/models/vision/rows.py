"""The parameter table of towers. Sizes are fields of VisionConfig; Hugging Face names those of Qwen3-VL."""

from __future__ import annotations

import dataclasses

from jaxrl.models import parameters
from jaxrl.models.parameters import Entry, Row
from jaxrl.models.vision.config import VisionConfig

HF = "model.visual"


def _norm(path: str, hf: str, size: str) -> tuple[Row, Row]:
    return (Row(f"{path}/scale", ("norm",), f"{hf}.weight", init="unit", sizes=(size,)),
            Row(f"{path}/bias", ("norm",), f"{hf}.bias", init="zero", sizes=(size,)))


def _linear(path: str, hf: str, axes, sizes, inputs: int = 1, **more) -> tuple[Row, Row]:
    return (Row(f"{path}/kernel", axes, f"{hf}.weight", inputs, sizes=sizes, adapts=False, **more),
            Row(f"{path}/bias", axes[inputs:], f"{hf}.bias", init="zero", sizes=sizes[inputs:]))


def _of_each_head() -> tuple[Row, ...]:
    """Queries, keys and values, which are one tensor on disk."""
    rows = []
    for place, name in enumerate(("query", "key", "value")):
        own = _linear(f"attention/{name}", "attn.qkv", ("embed", "heads", "head_dim"), ("width", "heads", "head_dim"))
        rows += [dataclasses.replace(row, part=(1, place)) for row in own]
    return tuple(rows)


def _merger(hf: str, normed: str) -> tuple[Row, ...]:
    return (*_norm("norm", f"{hf}.norm", normed),
            *_linear("up", f"{hf}.linear_fc1", ("embed", "mlp"), ("merged", "merged")),
            *_linear("down", f"{hf}.linear_fc2", ("mlp", "embed"), ("merged", "out_size")))


INPUT = (
    *_linear("patch", f"{HF}.patch_embed.proj", (None, None, None, None, "embed"),
             ("channels", "frames", "patch", "patch", "width"), 4, whole=True),
    Row("positions/embedding", (None, "embed"), f"{HF}.pos_embed.weight", sizes=("positions", "width")),
)
LAYER = (
    *_norm("attention_norm", "norm1", "width"),
    *_of_each_head(),
    *_linear("attention/out", "attn.proj", ("heads", "head_dim", "embed"), ("heads", "head_dim", "width"), 2),
    *_norm("mlp_norm", "norm2", "width"),
    *_linear("mlp/up", "mlp.linear_fc1", ("embed", "mlp"), ("width", "mlp")),
    *_linear("mlp/down", "mlp.linear_fc2", ("mlp", "embed"), ("mlp", "width")),
)
MERGER = _merger(f"{HF}.merger", "width")  # norms each patch
TAP_MERGER = _merger(f"{HF}.deepstack_merger_list.{{}}", "merged")  # norms the patches of a feature together


def tap_rows(number: int) -> tuple[Row, ...]:
    return tuple(dataclasses.replace(row, hf=row.hf.format(number)) for row in TAP_MERGER)


def entries(config: VisionConfig, scan_layers: bool) -> list[Entry]:
    """Returns the parameter table of a tower. scan_layers: the layers of a group (VisionConfig.groups) are stacked."""
    out = parameters.entries(config, INPUT, ("vision",)) + parameters.entries(config, MERGER, ("vision", "merger"))
    for i in range(len(config.taps)):
        out += parameters.entries(config, tap_rows(i), ("vision", f"tap_{i}"))
    for i, group in enumerate(config.groups):
        if scan_layers:
            out += parameters.entries(config, LAYER, ("vision", f"group_{i}"), group, len(group), f"{HF}.blocks")
        else:
            for number in group:
                out += parameters.entries(config, LAYER, ("vision", f"layer_{number}"), [number], 0, f"{HF}.blocks")
    return out


def multiplied_by_patch(config: VisionConfig, entry: Entry) -> float:
    """Returns the count of numbers of a model's entry that one patch is multiplied with; 0 if it is not the tower's."""
    group, part, *_ = entry.path
    if group != "vision":
        return 0.0
    if part == "patch":  # of a still image, whose frames are equal, see tower
        return entry.multiplied / config.frames
    return entry.multiplied / (config.merge**2 if part == "merger" or part.startswith("tap_") else 1)
