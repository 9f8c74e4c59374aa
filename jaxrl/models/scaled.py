"""Checkpoints whose matrices are stored in fp8 with a scale per block of rows and columns, as DeepSeek publishes them:

    <module>.weight            e4m3 [N, M]
    <module>.weight_scale_inv  fp32 [N / rows, M / columns], rounded up: what a block of the codes is multiplied with

They are read as the matrices that they stand for, in fp32; a folder that is written has none of them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models import tensorfile

FP8, SUFFIX = "F8_E4M3", "_scale_inv"


@dataclasses.dataclass(frozen=True)
class Scaled(tensorfile.Stored):
    """Codes in a file, read with their scales."""

    scale: tensorfile.Stored
    block: tuple[int, int]

    def read(self) -> np.ndarray:
        codes = np.memmap(self.file, ml_dtypes.float8_e4m3fn, "r", self.start, self.shape).astype(np.float32)
        scale = np.asarray(self.scale.read(), np.float32)
        for axis, (size, each) in enumerate(zip(self.shape, self.block, strict=True)):
            scale = np.repeat(scale, each, axis).take(range(size), axis)
        return codes * scale


def plain(stored: dict[str, tensorfile.Stored], folder: Path) -> dict[str, tensorfile.Stored]:
    """A folder's tensors with those in fp8 as what they stand for, and without their scales.

    Raises ConfigError for scales of another shape than quantization_config.weight_block_size of its config.json says.
    """
    scales = {name for name in stored if name.endswith(SUFFIX)}
    if not scales:
        return stored
    block = _block(folder)
    out = {name: t for name, t in stored.items() if name not in scales}
    for name in scales:
        codes, scale = out.get(name.removesuffix(SUFFIX)), stored[name]
        if codes is None or codes.dtype != FP8 or len(codes.shape) != 2:
            raise ConfigError(f"{folder}: {name} has no matrix in {FP8} beside it; fetch the checkpoint again")
        wanted = tuple(-(-size // each) for size, each in zip(codes.shape, block, strict=True))
        if scale.shape != wanted:
            raise ConfigError(f"{folder}: {name} has shape {scale.shape}; blocks of {block} need {wanted}")
        out[codes.name] = Scaled(codes.name, codes.file, "F32", codes.shape, codes.start, scale, block)
    return out


def of_values(stored: dict[str, tensorfile.Stored]) -> list[tensorfile.Stored]:
    """The tensors that say in which dtype a folder is: all, but scales."""
    return [t for t in stored.values() if not t.name.endswith(SUFFIX)]


def check(given: dict) -> None:
    """ConfigError for a quantization_config that is not the one of this module."""
    size = given.get("weight_block_size")
    fits = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if given.get("quant_method") != "fp8" or given.get("fmt", "e4m3") != "e4m3" or not fits:
        raise ConfigError(f"model config: quantization_config={given!r} is not read; fp8 in blocks is "
                          "(quant_method=fp8, fmt=e4m3, weight_block_size of two numbers); take the unquantized "
                          "checkpoint, or dequantize it")


def _block(folder: Path) -> tuple[int, int]:
    try:
        given = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config") or {}
    except (OSError, ValueError):
        given = {}
    check(given)
    return tuple(given["weight_block_size"])
