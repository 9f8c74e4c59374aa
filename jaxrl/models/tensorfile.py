"""Safetensors files: a reader whose tensors are views of the mapped file, and a writer that holds one tensor at a time.

The format: 8 bytes little-endian header size, a JSON header {name: {dtype, shape, data_offsets}}, raw data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxrl.errors import ConfigError

DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
          "BF16": np.dtype(ml_dtypes.bfloat16)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies. `dtype` is the format's code; tensors of other kinds than DTYPES can only be listed."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file

    def read(self, index=...) -> np.ndarray:
        """A read-only view of the mapped file, at an index. ConfigError for a dtype that is not a plain float."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.file}: tensor {self.name} has dtype {self.dtype}; only unquantized checkpoints "
                              f"({', '.join(DTYPES)}) can be loaded")
        if 0 in self.shape:
            return np.zeros(self.shape, DTYPES[self.dtype])[index]
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.start, self.shape)[index]


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. ConfigError for a file that is cut short or is no safetensors file."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{file}: not a safetensors file, or cut short ({size} bytes); fetch it again")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            out, end = {}, 0
            for name, row in header.items():
                start, stop = row["data_offsets"]
                shape = tuple(row["shape"])
                if row["dtype"] in DTYPES and stop - start != math.prod(shape) * DTYPES[row["dtype"]].itemsize:
                    raise ValueError(f"tensor {name} has {stop - start} bytes for shape {shape}")
                out[name] = Stored(name, file, row["dtype"], shape, 8 + length + start)
                end = max(end, 8 + length + stop)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"{file}: not a safetensors file ({e}); fetch it again") from None
    if end > size:
        raise ConfigError(f"{file}: cut short: {size} bytes where its header promises {end}; fetch it again")
    return out


def list_folder(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint folder, by its index or its single file. Empty where it holds no safetensors."""
    index = folder / INDEX
    if not index.is_file():
        return read_header(folder / SINGLE) if (folder / SINGLE).is_file() else {}
    try:
        where = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted(set(where.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(f"{index}: no weight_map that can be read ({e}); fetch it again") from None
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ConfigError(f"{folder}: {INDEX} names {', '.join(absent)}, not in the folder; fetch the checkpoint again")
    out = {}
    for name in files:
        out.update(read_header(folder / name))
    lost = [name for name in where if name not in out]
    if lost:
        raise ConfigError(f"{folder}: {INDEX} lists tensors that no file holds: {shortened(lost)}")
    return out


def shortened(names: Iterable[str], most: int = 5) -> str:
    """'a, b, c and 12 more'."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor to be written. `get()` returns its values as a numpy array of this shape and dtype."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    get: object

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(folder: Path | None, tensors: list[Planned], shard_bytes: float) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` (a larger tensor is alone) with their index.

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
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape),
                               "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.get())
            assert values.dtype == tensor.dtype and values.shape == tensor.shape, tensor.name
            f.write(values.view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
