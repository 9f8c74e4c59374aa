"""VisionConfig, the tower of a model, read from the vision_config of a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.models.families import ACTIVATIONS, number

OF_IMAGE = "mm_tokens_per_image"  # an entry of the config around vision_config
_ALL = {"depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "initializer_range": 0.02, "rope_parameters": None}
DEFAULTS = {  # transformers' by kind (Family.vision)
    "qwen3": {**_ALL, "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304,
              "patch_size": 16, "out_hidden_size": 3584, "num_position_embeddings": 2304,
              "deepstack_visual_indexes": (8, 16, 24)},
    "qwen2_5": {**_ALL, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "out_hidden_size": 3584,
                "window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
    "qwen2": {**_ALL, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    "siglip": {"depth": 12, "num_heads": 12, "num_channels": 3, "patch_size": 16, "image_size": 224, "hidden_size": 768,
               "intermediate_size": 3072, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
               "vision_use_head": True, "attention_dropout": 0.0, OF_IMAGE: 256},
}
_SIZES = {"depth": "depth", "heads": "num_heads", "patch": "patch_size", "merge": "spatial_merge_size",
          "frames": "temporal_patch_size", "channels": "in_channels", "width": "hidden_size",
          "out_size": "out_hidden_size", "mlp": "intermediate_size"}
SIZES = {  # our field -> HF's
    "qwen3": {**_SIZES, "positions": "num_position_embeddings"},
    "qwen2_5": _SIZES,
    "qwen2": {**_SIZES, "width": "embed_dim", "out_size": "hidden_size", "mlp": "mlp_ratio"},  # of the width
    "siglip": {"depth": "depth", "heads": "num_heads", "patch": "patch_size", "channels": "num_channels",
               "width": "hidden_size", "mlp": "intermediate_size"},
}
NAMES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
SAME = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}  # in published files, not read by transformers
OF_NO_NUMBER = {"model_type", "dtype", "torch_dtype", "transformers_version", "architectures", "fullatt_block_indexes",
                "tokens_per_second"}


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """A tower: patches with rotary positions by row and column (Qwen3-VL: with learned ones, too; SigLIP: with these
    alone), layers of attention within each image or within windows of it, and mergers of m x m patches into one
    feature."""

    kind: str               # row of vision.rows.TABLES
    depth: int
    width: int
    mlp: int
    heads: int
    patch: int              # pixels per side
    merge: int              # patches per side of a feature
    frames: int             # times that a still image is repeated along time
    out_size: int           # of a feature, the decoder's hidden size
    activation: str
    theta: float            # of the rotary positions; 0 = there are none
    init_std: float | None  # of random matrices; None: the decoder's, as SigLIP's config has none
    positions: int = 0      # learned ones, a square; 0 = none
    taps: tuple[int, ...] = ()  # layers behind which features are taken, for the first layers of the decoder
    window: int = 0         # features per side of a window, 0 = every layer sees the whole image
    full: tuple[int, ...] = ()  # layers that see the whole image where there are windows
    channels: int = 3
    eps: float = 1e-6
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of pixels from 0 to 1, by channel; see data.images.resize
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    video: bool = False     # a patch holds `frames` frames, which may differ; else one, of a still image
    two_way: bool = False   # the tokens of an image see each other in the decoder, where they have one position each

    norm_offset = 0.0  # norms scale by their weight

    @property
    def head_dim(self) -> int:
        """Size of one attention head: the width divided by the heads."""
        return self.width // self.heads

    @property
    def image_side(self) -> int:
        """Pixels per side of every image, where all have one size; else 0."""
        return 0 if self.theta else self.side * self.patch

    @property
    def merged(self) -> int:
        """Length of the vector that a merger reads for one feature: width times its merge x merge patches."""
        return self.width * self.merge**2

    @property
    def patch_numbers(self) -> int:
        """Length of the vector of pixels that the tower reads for one patch: channels x patch x patch, x frames for
        videos."""
        return self.channels * self.patch**2 * (self.frames if self.video else 1)

    @property
    def side(self) -> int:
        """Learned positions per side of their square; 0 = none."""
        return math.isqrt(self.positions)

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer (number from 0) attends within windows; others see the whole image."""
        return self.window > 0 and layer not in self.full

    def pair_flops(self, grid: tuple[int, int]) -> int:
        """FLOPs of attention (scores and values) over all layers for an image of (rows, columns) of patches; of layers
        with windows only the pairs within a window count.
        """
        windowed = sum(map(self.is_windowed, range(self.depth)))
        pairs = (self.depth - windowed) * math.prod(grid) ** 2
        if windowed:
            side = self.window * self.merge
            squares = [(size // side) * side**2 + (size % side)**2 for size in grid]  # of a side's windows
            pairs += windowed * math.prod(squares)
        return 4 * self.width * pairs

    @property
    def groups(self) -> list[range]:
        """Ranges of consecutive layers: each up to and with a tap, and the rest."""
        cuts = [i + 1 for i in self.taps if i + 1 < self.depth]
        return [range(a, b) for a, b in zip([0, *cuts], [*cuts, self.depth], strict=True)]


def vision_config(given: dict, kind: str, out_size: int, layers: int) -> VisionConfig:
    """Reads a vision_config as transformers reads it.

    Args:
      given: the table. Its entries `mean`, `std` and `video`, which no HF config has, are the fields of this name.
      kind: Family.vision.
      out_size, layers: hidden size and number of layers of the decoder.

    Raises ConfigError naming the field for what is not computed here.
    """
    defaults, names = DEFAULTS[kind], SIZES[kind]
    given = {NAMES.get(key, key): value for key, value in given.items()
             if key not in OF_NO_NUMBER or key in defaults}
    pixels: dict[str, Any] = {key: tuple(given.pop(key)) for key in ("mean", "std") if key in given}
    pixels["video"] = bool(given.pop("video", False))
    same = {key: given.pop(key) for key in SAME if key in given}
    if unknown := sorted(key for key in given.keys() - defaults.keys() if given[key] is not None):
        raise ConfigError(f"model config: vision_config has {', '.join(unknown)}, which is not read here and may "
                          "change features; leave it out if it does not")
    hf = {**defaults, **given}
    for key, value in same.items():
        if value not in (None, hf[SAME[key]]):
            raise _refused({key: value}, key, f"{SAME[key]} is {hf[SAME[key]]}, and that is read; leave {key} out")
    sizes: dict[str, Any] = {ours: number(hf, name, least=1, kind=int) for ours, name in names.items()}
    if kind == "qwen2":
        sizes["mlp"] *= sizes["width"]
    multiple = 1 if kind == "siglip" else 4
    if sizes["width"] % sizes["heads"] or sizes["width"] // sizes["heads"] % multiple:
        raise _refused(hf, "num_heads", f"heads of {names['width']}={sizes['width']} need a size that is a multiple of "
                       f"{multiple}")
    if math.isqrt(sizes.get("positions", 0))**2 != sizes.get("positions", 0):
        raise _refused(hf, "num_position_embeddings", "give a square number")
    if sizes["channels"] != 3:
        raise _refused(hf, names["channels"], "images have 3")
    if hf["hidden_act"] not in (*ACTIVATIONS, "quick_gelu"):
        raise _refused(hf, "hidden_act", f"choose {', '.join(ACTIVATIONS)}, quick_gelu")
    if kind == "siglip":
        return VisionConfig(kind, **sizes, **_squares(hf, sizes["patch"]), out_size=out_size,
                            activation=hf["hidden_act"], **pixels)
    if sizes["out_size"] != out_size:
        raise _refused(hf, names["out_size"], f"the decoder's hidden_size is {out_size}; make them equal")
    rope = {"rope_theta": 10000.0, **(hf["rope_parameters"] or {})}
    if rope.get("rope_type", "axial") != "axial" or rope.keys() - {"rope_type", "rope_theta"}:
        raise _refused(hf, "rope_parameters", "towers have an axial one, of which rope_theta is read")
    theta, init_std = float(number(rope, "rope_theta", above=0)), number(hf, "initializer_range", least=0)
    return VisionConfig(kind, **sizes, **_taps(hf, sizes["depth"], layers), **_windows(hf, sizes),
                        activation=hf["hidden_act"], theta=theta, init_std=init_std, **pixels)


def _squares(hf, patch: int) -> dict:
    """Returns the fields of a tower whose images are squares of one size, each pooled into a square of features."""
    if hf["vision_use_head"]:
        raise _refused(hf, "vision_use_head", "its pooling head is not read; set it to false if features are those of "
                       "patches")
    if hf["attention_dropout"]:
        raise _refused(hf, "attention_dropout", "towers train without; set it to 0")
    size, tokens = (number(hf, key, least=1, kind=int) for key in ("image_size", OF_IMAGE))
    side, features = size // patch, math.isqrt(tokens)
    if size % patch or features**2 != tokens or side % features:
        sides = f"{size / patch:g} x {size / patch:g}"
        raise ConfigError(f"model config: vision_config.image_size={size} has {sides} patches "
                          f"of {patch}, which do not make {OF_IMAGE}={tokens} features of equal squares of patches")
    eps = float(number(hf, "layer_norm_eps", least=0))
    return dict(merge=side // features, frames=1, positions=side**2, theta=0.0, eps=eps, init_std=None, two_way=True)


def _taps(hf, depth: int, layers: int) -> dict:
    taps = hf.get("deepstack_visual_indexes", ())
    if not isinstance(taps, list | tuple) or not all(type(i) is int and 0 <= i < depth for i in taps) \
            or sorted(set(taps)) != list(taps) or len(taps) > layers:
        raise _refused(hf, "deepstack_visual_indexes", f"give rising numbers of the {depth} layers, at most "
                       f"as many as the decoder has layers ({layers})")
    return {"taps": tuple(taps)}


def _windows(hf, sizes) -> dict:
    if "window_size" not in hf:
        return {}
    window = number(hf, "window_size", least=1, kind=int) // sizes["merge"] // sizes["patch"]
    full = hf["fullatt_block_indexes"]
    if not window:
        raise _refused(hf, "window_size", f"give pixels of at least one feature ({sizes['merge'] * sizes['patch']})")
    if not isinstance(full, list | tuple) or not all(type(i) is int for i in full):
        raise _refused(hf, "fullatt_block_indexes", "give a list of layers' numbers from 0")
    return {"window": window, "full": tuple(sorted({i for i in full if 0 <= i < sizes["depth"]}))}


def _refused(hf, key: str, remedy: str) -> ConfigError:
    return ConfigError(f"model config: vision_config.{key}={hf[key]!r}: {remedy}")
