"""Files of recorded steps: <run_dir>/record/step_<step>.<checksum>.npz, one for each.

`numpy.load` opens a file: arrays by name ("traj/tokens", "column/advantage", "reward/<function>" ...) and a
member `header.json` with everything else. The checksum in the name is of all bytes (BLAKE2b, 64 bits); zip adds
one for each member (CRC-32), which tells which array of a damaged file is lost. rl.recording writes the files,
replay and report read them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.telemetry.run_dir import write_atomic

FOLDER, HEADER = "record", "header.json"
THUMBNAILS = "images"  # folder of a run directory, see data.images.thumbnails
FORMAT = 1  # raised when an older jaxrl could not read what a newer one writes
# what reading a damaged file may raise: a flipped bit may ask for a compression that there is not, or for a password
DAMAGED = (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, zipfile.BadZipFile, zlib.error)
_NAME = re.compile(r"step_(\d{8,})\.([0-9a-f]{16})\.npz")


class Record(NamedTuple):
    """One recorded step: its number, header (JSON-able) and arrays by name."""

    step: int
    header: dict
    arrays: dict[str, np.ndarray]

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """Returns the arrays below `prefix/`, by the rest of their names."""
        return {name[len(prefix) + 1:]: x for name, x in self.arrays.items() if name.startswith(f"{prefix}/")}


def encoded(record: Record) -> bytes:
    """Returns the content of a record's file. Equal records with entries in the same order give equal bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        def add(name, content):
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 1)

        add(HEADER, json.dumps({"format": FORMAT, "step": record.step, **record.header}, ensure_ascii=False))
        for name, array in record.arrays.items():
            held = io.BytesIO()
            np.lib.format.write_array(held, np.asarray(array), allow_pickle=False)
            add(f"{name}.npy", held.getvalue())
    return out.getvalue()


def checksum(content: bytes) -> str:
    """Returns the 64-bit BLAKE2b digest of a file's content, 16 hex digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write(folder, record: Record) -> int:
    """Writes a record atomically, then deletes others of its step; returns its size in bytes. Makes the folder.

    A kill in between leaves two records of the step, which `steps` refuses until it is written again."""
    folder, content = Path(folder), encoded(record)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{record.step:08d}.{checksum(content)}.npz"
    tmp = folder / f".{path.name}.tmp-{os.getpid()}"
    try:
        tmp.write_bytes(content)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
    for step, other in _files(folder):
        if step == record.step and other != path:
            other.unlink()
    return len(content)


def write_config(folder, config: dict) -> str:
    """Writes the config of records unless an equal one exists; returns the file's name."""
    content = json.dumps({"config": config}, sort_keys=True, indent=1) + "\n"
    path = Path(folder) / f"config-{checksum(content.encode())}.json"
    if not path.exists():
        write_atomic(path, content)
    return path.name


def read_config(folder, name: str) -> dict:
    """Reads a config written by `write_config`. Raises ConfigError if it is missing or damaged."""
    path = Path(folder) / name
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}; records name it") from None
    if f"config-{checksum(content)}.json" != name:
        raise ConfigError(f"{path}: damaged: its content does not match the checksum in its name; restore the file")
    return json.loads(content)["config"]


def header(path) -> dict:
    """Reads the header of a record without its arrays or checksum, a dict with "format" and "step". Raises ConfigError
    if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:
            found = json.loads(file.read(HEADER))
        if not isinstance(found, dict):
            raise ValueError("it is no table")
        return found
    except DAMAGED as e:
        raise ConfigError(f"{path}: damaged: its header cannot be read ({type(e).__name__}: {e})") from None


def _files(folder) -> list[tuple[int, Path]]:
    """Returns (step, path) of every record, by step."""
    named = [(_NAME.fullmatch(p.name), p) for p in Path(folder).glob("step_*.npz")]
    return sorted((int(found[1]), p) for found, p in named if found)


def steps(folder) -> dict[int, Path]:
    """Returns recorded step -> file, in order. Raises ConfigError for two records of a step or a wrong file name."""
    out = {}
    for step, path in _files(folder):
        if step in out:
            raise ConfigError(f"{path}: step {step} has another record, {out[step].name}; delete the one that is not "
                              "of this run")
        out[step] = path
    named = set(out.values())
    if strange := sorted(p.name for p in Path(folder).glob("*.npz") if p not in named):
        raise ConfigError(f"{Path(folder) / strange[0]}: not the name of a record, step_<step>.<checksum>.npz")
    return out


def read(path) -> Record:
    """Reads and verifies a record. Raises ConfigError naming the damaged file and, if known, the damaged array, for a
    name or format that is not a record's, and for the header of another step; OSError if the file cannot be read."""
    path = Path(path)
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise ConfigError(f"{path}: no record: their names are step_00000001.<checksum>.npz")
    step, wanted = named.groups()
    content = path.read_bytes()
    if (found := checksum(content)) != wanted:
        raise ConfigError(f"{path}: damaged: its checksum is {found}, its name says {wanted} ({_damage(content)}); "
                          "restore the file, or replay steps from a later checkpoint")
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        header = json.loads(file.read(HEADER))
        if header["format"] > FORMAT:
            raise ConfigError(f"{path}: has format {header['format']} of records, this jaxrl reads up to {FORMAT}: "
                              "upgrade jaxrl")
        names = [name for name in file.namelist() if name != HEADER]
        arrays = {name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(file.read(name)), allow_pickle=False)
                  for name in names}
    if header["step"] != int(step):
        raise ConfigError(f"{path}: holds step {header['step']}")
    return Record(header["step"], header, arrays)


def _damage(content: bytes) -> str:
    """Describes which members of a damaged file cannot be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            broken = [name.removesuffix(".npy") for name in file.namelist() if not _whole(file, name)]
    except DAMAGED as e:
        return f"its table of contents: {e}"
    return f"in {', '.join(broken)}" if broken else "between its arrays"


def _whole(file, name) -> bool:
    try:
        file.read(name)
    except DAMAGED:
        return False
    return True


def keep_newest(folder, count: int) -> None:
    """Deletes all but the newest `count` records; 0 = deletes none."""
    for _, path in _files(folder)[:-count] if count else ():
        path.unlink(missing_ok=True)


def delete_after(folder, step: int) -> None:
    """Deletes the records of steps after `step`, which the resumed run records again."""
    for found, path in _files(folder):
        if found > step:
            path.unlink(missing_ok=True)
