"""Safetensors files: a reader whose tensors are views of the mapped file, and a writer that holds one tensor at a time.

The format: 8 bytes little-endian header size, a JSON header {name: {dtype, shape, data_offsets}}, raw data.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxrl.errors import ConfigError

log = logging.getLogger("jaxrl")
DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
          "BF16": np.dtype(ml_dtypes.bfloat16)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# Of every dtype that the safetensors library knows, in bits.
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
        "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Stored:
    """The location of one tensor in a file. `dtype`: the format's code; other kinds than DTYPES can only be listed."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes in the file, first and behind the last
    stop: int

    def read(self, index: Any = ...) -> np.ndarray:
        """Returns a read-only view of the mapped file, at an index; of a tensor without numbers a new array. Raises
        ConfigError unless the dtype is a plain float (DTYPES).
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.file}: tensor {self.name} has dtype {self.dtype}; only unquantized checkpoints "
                              f"({', '.join(DTYPES)}) can be loaded")
        if 0 in self.shape:
            return np.zeros(self.shape, DTYPES[self.dtype])[index]
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.start, self.shape)[index]


def read_header(file: Path) -> dict[str, Stored]:
    """Reads the header of a safetensors file; returns {name: Stored}.

    Raises ConfigError naming the file, and the tensor if it is one's fault, for a file that cannot be opened, is cut
    short, or is no safetensors file: tensors cover the data without gaps or overlaps, and have the bytes of their shape
    and dtype. A dtype that the format does not know passes here and is refused when the tensor is read.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise ConfigError(f"{file}: not a safetensors file, or cut short ({size} bytes); fetch it again")
            text = f.read(length)
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read: {e.strerror}; check its permissions") from None
    try:
        header = json.loads(text, object_pairs_hook=unique)
        if not isinstance(header, dict):
            raise ValueError(f"its header is a {type(header).__name__}, not a JSON object")
        header.pop("__metadata__", None)
        out = {name: _stored(name, file, row, 8 + length) for name, row in header.items()}
    except RecursionError:
        raise ConfigError(f"{file}: not a safetensors file (its header is nested too deeply); fetch it again") from None
    except ValueError as e:
        raise ConfigError(f"{file}: not a safetensors file ({e}); fetch it again") from None
    end, before = 8 + length, "the header"
    for tensor in sorted(out.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a gap behind"
            raise ConfigError(f"{file}: not a safetensors file (tensor {tensor.name} {what} {before}); fetch it again")
        end, before = tensor.stop, f"tensor {tensor.name}"
    if end > size:
        raise ConfigError(f"{file}: cut short: {size} bytes where its header promises {end}; fetch it again")
    if end < size:
        raise ConfigError(f"{file}: {size} bytes where its header promises {end}; fetch it again")
    return out


def _stored(name: str, file: Path, row, data: int) -> Stored:
    """Returns one entry of a header; `data`: offset of the file's data. Raises ValueError naming the tensor."""
    def whole(values) -> TypeGuard[list[int]]:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)

    if not isinstance(row, dict):
        raise ValueError(f"tensor {name} is described by {shown(row)}, not by a JSON object")
    code, shape, offsets = (row.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str):
        raise ValueError(f"tensor {name} has dtype {shown(code)}")
    if not whole(shape) or math.prod(n for n in shape if n) >= 2**63:
        raise ValueError(f"tensor {name} has shape {shown(shape)}")
    if not whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name} has data_offsets {shown(offsets)}")
    start, stop = offsets
    if code in BITS and (stop - start) * 8 != math.prod(shape) * BITS[code]:
        raise ValueError(f"tensor {name} has {stop - start} bytes for shape {tuple(shape)} of {code}")
    return Stored(name, file, code, tuple(shape), data + start, data + stop)


def shown(value) -> str:
    """Formats a value of a file for a message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unique(pairs: list) -> dict:
    """Returns a JSON object's dict, for `object_pairs_hook`. Raises ValueError naming a duplicate key."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(n for n in names if names.count(n) > 1)!r} more than once")
    return out


def list_folder(folder: Path) -> dict[str, Stored]:
    """Lists all tensors of a model folder; {} if it holds no safetensors.

    As transformers (4 and 5) reads a folder: model.safetensors if it is there, whatever an index beside it names (a
    warning is logged), else all tensors of the shards that the index names. Raises ConfigError as `read_header` does,
    for an index that cannot be read, names files that are not in the folder or tensors that no file holds, and for a
    tensor that two shards hold.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        if index.is_file():
            log.warning("%s: has %s and %s; %s is read and the index ignored, as transformers does: delete the one that"
                        " is not meant (vLLM takes the files that the index names)", folder, SINGLE, INDEX, SINGLE)
        return read_header(folder / SINGLE)
    if not index.is_file():
        return {}
    try:
        where = json.loads(index.read_text("utf-8"), object_pairs_hook=unique)["weight_map"]
        files = sorted(set(where.values()))
        wrong = [name for name in files if not isinstance(name, str) or Path(name).name != name or "\0" in name]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        raise ConfigError(f"{index}: no weight_map that can be read ({e}); fetch it again") from None
    except OSError as e:
        raise ConfigError(f"{index}: cannot be read: {e.strerror}; check its permissions") from None
    if wrong:
        raise ConfigError(f"{index}: weight_map names {shown(wrong[0])}, no file of this folder; fetch it again")
    here = {entry.name for entry in folder.iterdir() if entry.is_file()}
    absent = [name for name in files if name not in here]
    if absent:
        raise ConfigError(f"{folder}: {INDEX} names {shortened(absent)}, not in the folder; fetch the checkpoint again")
    out: dict[str, Stored] = {}
    for name in files:
        for key, tensor in read_header(folder / name).items():
            if key in out:
                raise ConfigError(f"{folder}: {out[key].file.name} and {name} both hold tensor {key}; fetch the "
                                  "checkpoint again")
            out[key] = tensor
    lost = [name for name in where if name not in out]
    if lost:
        raise ConfigError(f"{folder}: {INDEX} lists tensors that no file holds: {shortened(lost)}")
    return out


def shortened(names: Iterable[str], most: int = 5) -> str:
    """Formats names for a message: 'a, b, c and 12 more'."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor to be written. `get()` returns its values as a numpy array of this shape and dtype."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    get: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(folder: Path | None, tensors: list[Planned], shard_bytes: float) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` of tensor data (a larger tensor is alone; the header
    does not count) with their index. `folder` must exist.

    `folder=None` calls every `get` and writes nothing: for the processes of a run that only take part in gathering.
    """
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        if folder is None:
            for tensor in shard:
                tensor.get()
        else:
            _write_file(folder / name, shard)
    if folder is not None and len(shards) > 1:
        where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _write_file(file: Path, tensors: list[Planned]) -> None:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape),
                               "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = np.asarray(tensor.get(), order="C")  # np.ascontiguousarray would make () into (1,)
            assert values.dtype == tensor.dtype and values.shape == tensor.shape, tensor.name
            f.write(values.reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
