"""VisionConfig, the tower of a model, read from the vision_config of a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.models.families import ACTIVATIONS, number

DEFAULTS = {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304,
            "num_heads": 16, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": 3584, "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
            "initializer_range": 0.02, "rope_parameters": None}  # transformers' of Qwen3-VL
NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
OF_NO_NUMBER = {"model_type", "dtype", "torch_dtype", "transformers_version", "architectures", "fullatt_block_indexes"}
KINDS = ("qwen3_vl_vision", "qwen3_vl", None)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """A tower of Qwen3-VL: patches with learned positions and rotary ones by row and column, layers of attention within
    each image, and mergers of m x m patches into one feature."""

    depth: int
    width: int
    mlp: int
    heads: int
    patch: int              # pixels per side
    merge: int              # patches per side of a feature
    frames: int             # times that a still image is repeated along time
    out_size: int           # of a feature, the decoder's hidden size
    positions: int          # learned ones, a square
    taps: tuple[int, ...]   # layers behind which features are taken, for the first layers of the decoder
    activation: str
    theta: float
    init_std: float
    channels: int = 3
    eps: float = 1e-6
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of pixels from 0 to 1, by channel; see data.images.resize
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def merged(self) -> int:
        """Numbers of the patches of one feature."""
        return self.width * self.merge**2

    @property
    def side(self) -> int:
        return math.isqrt(self.positions)

    @property
    def pair_flops(self) -> int:
        """FLOPs of a patch for each patch that it attends to, over all layers."""
        return 4 * self.width * self.depth

    @property
    def groups(self) -> list[range]:
        """Consecutive layers up to and with each tap, and those behind the last one."""
        ends = [tap + 1 for tap in self.taps if tap + 1 < self.depth] + [self.depth]
        return [range(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def vision_config(given: dict, out_size: int, layers: int) -> VisionConfig:
    """Reads a vision_config as transformers reads it.

    Args:
      given: the table. Its entries `mean` and `std`, which no HF config has, are those of the pixels.
      out_size, layers: hidden size and number of layers of the decoder.

    Raises ConfigError naming the field for what is not computed here.
    """
    given = {NAMES.get(key, key): value for key, value in given.items() if key not in OF_NO_NUMBER}
    pixels: dict[str, Any] = {key: tuple(given.pop(key)) for key in ("mean", "std") if key in given}
    if unknown := sorted(key for key in given.keys() - DEFAULTS.keys() if given[key] is not None):
        raise ConfigError(f"model config: vision_config has {', '.join(unknown)}, which is not read here and may "
                          "change features; leave it out if it does not")
    hf = {**DEFAULTS, **given}
    sizes: dict[str, Any] = {ours: number(hf, name, least=1, kind=int) for ours, name in (
        ("depth", "depth"), ("width", "hidden_size"), ("mlp", "intermediate_size"), ("heads", "num_heads"),
        ("patch", "patch_size"), ("merge", "spatial_merge_size"), ("frames", "temporal_patch_size"),
        ("out_size", "out_hidden_size"), ("positions", "num_position_embeddings"), ("channels", "in_channels"))}
    if sizes["width"] % sizes["heads"] or sizes["width"] // sizes["heads"] % 4:
        raise _refused(hf, "num_heads", f"heads of hidden_size={sizes['width']} need a size that is a multiple of 4")
    if math.isqrt(sizes["positions"])**2 != sizes["positions"]:
        raise _refused(hf, "num_position_embeddings", "give a square number")
    if sizes["channels"] != 3:
        raise _refused(hf, "in_channels", "images have 3")
    if sizes["out_size"] != out_size:
        raise _refused(hf, "out_hidden_size", f"the decoder's hidden_size is {out_size}; make them equal")
    if hf["hidden_act"] not in ACTIVATIONS:
        raise _refused(hf, "hidden_act", f"choose {', '.join(ACTIVATIONS)}")
    taps = hf["deepstack_visual_indexes"]
    if not isinstance(taps, list | tuple) or not all(type(i) is int and 0 <= i < sizes["depth"] for i in taps) \
            or sorted(set(taps)) != list(taps) or len(taps) > layers:
        raise _refused(hf, "deepstack_visual_indexes", f"give rising numbers of the {sizes['depth']} layers, at most "
                       f"as many as the decoder has layers ({layers})")
    rope = {"rope_theta": 10000.0, **(hf["rope_parameters"] or {})}
    if rope.get("rope_type", "axial") != "axial" or rope.keys() - {"rope_type", "rope_theta"}:
        raise _refused(hf, "rope_parameters", "towers have an axial one, of which rope_theta is read")
    theta, init_std = float(number(rope, "rope_theta", above=0)), number(hf, "initializer_range", least=0)
    return VisionConfig(**sizes, taps=tuple(taps), activation=hf["hidden_act"], theta=theta,
                        init_std=init_std, **pixels)


def _refused(hf, key: str, remedy: str) -> ConfigError:
    return ConfigError(f"model config: vision_config.{key}={hf[key]!r}: {remedy}")
