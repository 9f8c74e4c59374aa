"""Checkpoints whose matrices are stored in few bits with scales, which are read dequantized, in fp32; written folders
have none of them.

fp8, as DeepSeek publishes it, a scale per block of rows and columns:

    <module>.weight            e4m3 [N, M]
    <module>.weight_scale_inv  fp32 [N / rows, M / columns], rounded up: what a block of the codes is multiplied with

mxfp4, as gpt-oss is published, of experts' matrices [E, M, N], which fused.py reads (OCP Microscaling v1.0: a scale
of 32 numbers is a power of two, a code's bits are sign, exponent of two and mantissa of one):

    <name>_blocks              uint8 [E, N, M / 32, 16]: two inputs a byte, the first in its lower four bits
    <name>_scales              uint8 [E, N, M / 32]: the exponent of two, plus 127
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models.io import tensorfile

FP8, SUFFIX = "F8_E4M3", "_scale_inv"
BLOCKS, SCALES, EACH = "_blocks", "_scales", 32
_HALF = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4 = np.concatenate([_HALF, -_HALF])  # by code
_PAIRS = np.stack([np.tile(FP4, 16), np.repeat(FP4, 16)], axis=-1)  # by byte


@dataclasses.dataclass(frozen=True)
class Scaled(tensorfile.Stored):
    """An fp8 matrix [N, M] in a file, read dequantized as fp32: each e4m3 code times the scale of its block.

    scale: the file's tensor of scales, fp32 [N / rows, M / columns], rounded up. block: (rows, columns)."""

    scale: tensorfile.Stored
    block: tuple[int, int]

    def read(self, index: Any = ...) -> np.ndarray:
        """Returns the dequantized values at an index, fp32; computes the whole tensor."""
        codes = np.memmap(self.file, ml_dtypes.float8_e4m3fn, "r", self.start, self.shape).astype(np.float32)
        scale = np.asarray(self.scale.read(), np.float32)
        for axis, (size, each) in enumerate(zip(self.shape, self.block, strict=True)):
            scale = np.repeat(scale, each, axis).take(range(size), axis)
        return (codes * scale)[index]


@dataclasses.dataclass(frozen=True)
class Fours(tensorfile.Stored):
    """The mxfp4 matrices of E experts in a file (OCP Microscaling v1.0), read dequantized as fp32 [E, M inputs, N
    outputs]. A scale, a power of two, is shared by 32 consecutive inputs.

    scale: the file's tensor of scales, uint8 [E, N, M / 32], exponents of two plus 127. The codes lie as the module
    describes them."""

    scale: tensorfile.Stored

    def read(self, index: Any = ...) -> np.ndarray:
        """Returns the dequantized values at an index, fp32; computes only those. index: `...`, or (expert, ...,
        columns), all inputs; others are not served.
        """
        experts, inputs, outputs = self.shape
        shape = experts, outputs, inputs // EACH
        codes = np.memmap(self.file, np.uint8, "r", self.start, (*shape, EACH // 2))
        scale = np.memmap(self.scale.file, np.uint8, "r", self.scale.start, shape)
        own = ... if index is ... else (index[0], index[-1])
        exponents = scale[own].astype(np.int32)[..., None] - 127
        values = np.ldexp(_PAIRS[codes[own]].reshape(*exponents.shape[:-1], EACH), exponents)
        return values.reshape(*values.shape[:-2], inputs).swapaxes(-1, -2)


def plain(stored: dict[str, tensorfile.Stored], folder: Path) -> dict[str, tensorfile.Stored]:
    """Returns a folder's tensors with quantized ones dequantized and without their scales. folder: whose config.json
    has the size of fp8's blocks.

    Raises ConfigError for fp8 scales without a matrix in fp8, or of another shape than the codes and config.json's
    quantization_config require, for fp8 scales where that is none of fp8 (`check`), and for mxfp4 without codes and
    scales of fitting shape and dtype.
    """
    stored = _of_fours(stored, folder)
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
        out[codes.name] = Scaled(codes.name, codes.file, "F32", codes.shape, codes.start, codes.stop, scale, block)
    return out


def _of_fours(stored, folder: Path) -> dict[str, tensorfile.Stored]:
    out = {name: t for name, t in stored.items() if not name.endswith((BLOCKS, SCALES))}
    for name in sorted({name.removesuffix(BLOCKS).removesuffix(SCALES) for name in stored.keys() - out.keys()}):
        codes, scale = (stored.get(name + end) for end in (BLOCKS, SCALES))
        if codes is None or scale is None or {codes.dtype, scale.dtype} != {"U8"} or len(codes.shape) != 4 \
                or codes.shape[3] != EACH // 2 or scale.shape != codes.shape[:3] or name in out:
            found = [(t.name, t.dtype, t.shape) for t in (codes, scale, out.get(name)) if t is not None]
            raise ConfigError(f"{folder}: {name} in mxfp4 is {name}{BLOCKS}, U8 [E, N, G, {EACH // 2}], with "
                              f"{name}{SCALES}, U8 [E, N, G], and nothing else; here are {found}; fetch the checkpoint "
                              "again")
        experts, outputs, groups, _ = codes.shape
        shape = experts, groups * EACH, outputs
        out[name] = Fours(name, codes.file, "F32", shape, codes.start, codes.stop, scale)
    return out


def of_values(stored: dict[str, tensorfile.Stored]) -> list[tensorfile.Stored]:
    """Returns the tensors that determine a folder's dtype: all except fp8's scales."""
    return [t for t in stored.values() if not t.name.endswith(SUFFIX)]


def check(config: dict, kind: str) -> None:
    """Raises ConfigError unless a quantization_config is of this kind.

    kind: "mxfp4" (quant_method mxfp4), or any other text for fp8 in blocks (quant_method fp8, fmt e4m3, two whole
    numbers in weight_block_size).
    """
    if kind == "mxfp4":
        fits, expected = config.get("quant_method") == "mxfp4", "quant_method=mxfp4"
    else:
        size = config.get("weight_block_size")
        fits = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
        fits &= config.get("quant_method") == "fp8" and config.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
        expected = "fp8 in blocks is (quant_method=fp8, fmt=e4m3, weight_block_size of two numbers)"
    if not fits:
        raise ConfigError(f"model config: quantization_config={config!r} is not read; what is read of this family: "
                          f"{expected}; take the unquantized checkpoint, or dequantize it")


def _block(folder: Path) -> tuple[int, int]:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config") or {}
    except (OSError, ValueError):
        config = {}
    check(config, "fp8")
    return tuple(config["weight_block_size"])
