"""How each family of models resizes an image and cuts it into patches, as data.

Pixels equal those of transformers' Pillow image processors to the bit. Its torchvision ones, which it takes where
torchvision is installed, differ by up to 30 of 255 (evidence/torchvision_pixels.py). `preprocessor_config.json` is
read; a field of it that would change pixels and is not computed here is refused.

Legend: H, W height and width in pixels, C 3 channels, p patch side, m merged patches per side, N patches of an image.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from jaxrl.data.images.read import ImageError
from jaxrl.errors import ConfigError

VERSION = 1  # of the rules below, in every key of what was made with them
LONGEST = 200  # times the other side
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What turns pixels into patches.

    Attributes:
      patch: pixels per side of a patch.
      merge: patches per side of an image token.
      frames: frames that a patch holds; a still image is repeated so often.
      least, most: bounds of the pixels H * W of a resized image, not read if `side` is set.
      mean, std: per channel, of pixels divided by 255.
      resample: Pillow's number of the filter, BILINEAR or BICUBIC.
      side: pixels per side of the square that every image becomes; 0 = an image keeps its proportions, roughly.
    """

    patch: int
    merge: int = 2
    frames: int = 2  # times that a still image is repeated along time, by the first product of the tower
    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    mean: tuple[float, ...] = CLIP[0]
    std: tuple[float, ...] = CLIP[1]
    resample: int = BICUBIC
    side: int = 0

    @property
    def factor(self) -> int:
        """Pixels per side of one image token."""
        return self.patch * self.merge

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of the resized image: (side, side), or multiples of `factor` near the stored sides,
        shrunk or grown in proportion where their product is not within `least` and `most`.

        Raises ImageError for an image without pixels or of one, and, without `side`, for a side more than LONGEST
        times the other."""
        if not height or not width or height * width == 1:
            raise ImageError(f"an image of {width}x{height} pixels")
        if self.side:
            return self.side, self.side
        if max(height, width) / min(height, width) > LONGEST:
            raise ImageError(f"an image of {width}x{height} pixels: one side is more than {LONGEST} times the other")
        sides = height, width
        new = [round(side / self.factor) * self.factor for side in sides]
        if math.prod(new) > self.most:
            shrink = math.sqrt(height * width / self.most)
            new = [max(self.factor, math.floor(side / shrink / self.factor) * self.factor) for side in sides]
        elif math.prod(new) < self.least:
            grow = math.sqrt(self.least / (height * width))
            new = [math.ceil(side * grow / self.factor) * self.factor for side in sides]
        return new[0], new[1]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the (rows, columns) of patches of an image of this stored size in pixels. Raises ImageError for a
        size that `size` refuses."""
        new = self.size(height, width)
        return new[0] // self.patch, new[1] // self.patch

    def tokens(self, grid: tuple[int, int]) -> int:
        """Returns the number of image tokens of a grid of patches: rows x columns / merge^2."""
        return grid[0] * grid[1] // self.merge**2


_QWEN3 = Rule(patch=16, least=256 * 256, most=4096 * 4096, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
RULES = {  # by the model_type of config.json, with what its checkpoints say where they say nothing
    "qwen2_vl": Rule(patch=14),
    "qwen2_5_vl": Rule(patch=14),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "gemma3": Rule(patch=14, merge=4, frames=1, mean=(0.5,) * 3, std=(0.5,) * 3, resample=BILINEAR, side=896),
}
READ = {"patch_size": "patch", "merge_size": "merge", "temporal_patch_size": "frames", "min_pixels": "least",
        "max_pixels": "most", "image_mean": "mean", "image_std": "std"}
SERVED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "do_center_crop": False,
          "do_pad": False, "resample": BICUBIC, "rescale_factor": 1 / 255, "input_data_format": "channels_last",
          "data_format": "channels_first",
          "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")}
SERVED_OF_SQUARES = {
    **SERVED, "resample": BILINEAR, "do_pan_and_scan": False,
    "image_processor_type": ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil")}
READ_OF_SQUARES = {"height": "side", "width": "side", "image_mean": "mean", "image_std": "std"}
OF_NO_PIXEL = {"processor_class", "feature_extractor_type", "default_to_square", "device", "disable_grouping",
               "return_tensors", "auto_map", "_valid_processor_keys", "backend", "transformers_version",
               "image_seq_length", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops",
               "pan_and_scan_min_ratio_to_activate"}


def rule_of(model_type: str, folder: Path | None = None, least: int | None = None, most: int | None = None,
            tower: dict | None = None, stored: tuple[str, dict] | None = None) -> Rule:
    """Returns the rule of a checkpoint.

    Args:
      model_type: of its config.json.
      folder: where preprocessor_config.json, or the image_processor table of processor_config.json, may be; None or
        without one: the family's defaults.
      least, most: bounds that replace the checkpoint's.
      tower: the vision_config of its config.json, whose sizes hold where the folder names none; None: the family's.
      stored: (name, fields) to read instead of the folder's.

    Raises ConfigError for a family without a rule, an unreadable file, fields that would change pixels otherwise or do
    not fit the tower, bounds without room for one image token, and any bounds for a family that sees squares.
    """
    if model_type not in RULES:
        raise ConfigError(f"model_type={model_type!r} has no rule for images; choose one of {', '.join(RULES)}")
    of_tower = OF_SQUARES if RULES[model_type].side else OF_TOWER
    sizes = {ours: tower[theirs] for ours, theirs in of_tower.items() if tower and tower.get(theirs) is not None}
    if RULES[model_type].side and tower:
        sizes["merge"] = pooled(tower)
    rule, (name, given) = dataclasses.replace(RULES[model_type], **sizes), stored or _stored(folder)
    squares, read, known = bool(rule.side), *((READ_OF_SQUARES, SERVED_OF_SQUARES) if rule.side else (READ, SERVED))
    for option, bound in (("data.image_min_pixels", least), ("data.image_max_pixels", most)):
        if squares and bound is not None:
            raise ConfigError(f"{option}={bound}: a {model_type} model sees every image as {rule.side} x {rule.side} "
                              "pixels; leave it out")
    size = given.pop("size", None) or {}
    if squares and size.get("height") != size.get("width"):
        raise ConfigError(f"{name}: size={size!r}: a {model_type} model sees squares; give one number for both sides")
    given = {**{READ_SIZE.get(k, k): v for k, v in size.items()}, **{k: v for k, v in given.items() if v is not None}}
    for key, value in given.items():
        if key in known:
            served = known[key] if isinstance(known[key], tuple) else (known[key],)
            if not any(value == one or (isinstance(value, float) and math.isclose(value, one)) for one in served):
                raise ConfigError(f"{name}: {key}={value!r} is not supported; images are made with {served[0]!r}")
        elif key not in read and key not in OF_NO_PIXEL:
            raise ConfigError(f"{name}: {key}={value!r} is not read here and may change pixels; leave it out if it "
                              "does not")
    fields = {read[key]: tuple(map(float, v)) if isinstance(v, list) else v for key, v in given.items() if key in read}
    bounds = {"least": least, "most": most}
    rule = dataclasses.replace(rule, **fields | {name: bound for name, bound in bounds.items() if bound is not None})
    _check(rule, name)
    if wrong := [f"{theirs}={sizes[ours]}" for ours, theirs in of_tower.items()
                 if ours in sizes and sizes[ours] != getattr(rule, ours)]:
        raise ConfigError(f"{name} does not cut images for this tower: vision_config has {', '.join(wrong)}; fetch "
                          "both files of one checkpoint")
    return rule


def as_fields(rule: Rule) -> dict:
    """Returns the fields of a preprocessor_config.json that says what a rule does."""
    if rule.side:
        return {"image_processor_type": SERVED_OF_SQUARES["image_processor_type"][0], "image_mean": rule.mean,
                "image_std": rule.std, "resample": rule.resample, "size": {"height": rule.side, "width": rule.side}}
    names = {ours: theirs for theirs, ours in READ.items() if ours not in ("least", "most")}
    return {"image_processor_type": SERVED["image_processor_type"][1],
            **{theirs: getattr(rule, ours) for ours, theirs in names.items()},
            "size": {"shortest_edge": rule.least, "longest_edge": rule.most}}


def pooled(tower: dict) -> int:
    """Returns how many patches per side make one image token, by a tower's image_size, patch_size and
    mm_tokens_per_image (of the config around it)."""
    patches, tokens = tower.get("image_size", 0) // tower.get("patch_size", 1), tower.get("mm_tokens_per_image", 256)
    return max(1, patches // max(1, math.isqrt(tokens)))


OF_SQUARES = {"patch": "patch_size", "side": "image_size"}
OF_TOWER = {"patch": "patch_size", "merge": "spatial_merge_size", "frames": "temporal_patch_size"}
READ_SIZE = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def _stored(folder: Path | None) -> tuple[str, dict]:
    """Returns (file, its fields) of a folder's image processor."""
    if folder is None:
        return "", {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            found = json.loads((folder / name).read_text("utf-8"))
            found = found.get("image_processor", {}) if name == "processor_config.json" else found
            return str(folder / name), dict(found)
        except (ValueError, TypeError, AttributeError) as e:
            raise ConfigError(f"{folder / name}: not a JSON object ({e}); fetch the checkpoint again") from None
    return "", {}


def _check(rule: Rule, name: str) -> None:
    counts = {"patch_size": rule.patch, "merge_size": rule.merge, "temporal_patch_size": rule.frames}
    for key, value in counts.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}: {key}={value!r}; give a positive integer")
    for key, value in (("image_mean", rule.mean), ("image_std", rule.std)):
        numbers = isinstance(value, tuple) and len(value) == 3 and all(map(math.isfinite, value))
        if not numbers or (key == "image_std" and 0 in value):
            raise ConfigError(f"{name}: {key}={value!r}; give three numbers")
    if not 0 < rule.least <= rule.most or rule.most < rule.factor**2:
        raise ConfigError(f"data.image_min_pixels={rule.least}, data.image_max_pixels={rule.most}: an image token is "
                          f"{rule.factor}x{rule.factor} pixels; give 0 < min <= max, and at least one token's")


def cut(pixels_HxWxC: np.ndarray, rule: Rule) -> np.ndarray:
    """Cuts a resized image into patches, [N, C * p * p] uint8, in the order of merged blocks: N runs over (H / mp,
    W / mp, m, m), numbers within a patch over (C, p, p).

    pixels_HxWxC: uint8, H and W multiples of rule.factor (m * p). rule: of which patch (p) and merge (m) are read."""
    height, width, channels = pixels_HxWxC.shape
    m, p = rule.merge, rule.patch
    blocks = pixels_HxWxC.reshape(height // (m * p), m, p, width // (m * p), m, p, channels)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, channels * p * p)


def join(patches: np.ndarray, grid: tuple[int, int], merge: int, frames: int = 1) -> np.ndarray:
    """Returns the [H, W, 3] uint8 pixels that `cut` cut, of several frames in a patch the first.

    Args:
      patches: [N, 3 * frames * p * p] uint8, N = rows x columns, in the order of `cut`.
      grid: rows and columns of patches. merge: Rule.merge. frames: that a patch holds."""
    (rows, columns), p = grid, math.isqrt(patches.shape[1] // (3 * frames))
    first = patches.reshape(len(patches), 3, frames, -1)[:, :, 0]
    blocks = first.reshape(rows // merge, columns // merge, merge, merge, 3, p, p)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p, columns * p, 3)
