"""Files of checkpoints: which checkpoints exist, their manifests, and disk errors.

On a disk a checkpoint becomes visible by a rename. Stores (`in_store`) have no atomic rename: there it is visible by
the file COMMITTED, which Orbax writes last, its files lie under their final name before, and their manifest has sizes
only, since checksums would need the files to be fetched again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from etils import epath

MANIFEST = "manifest.json"
COMMITTED = "commit_success.txt"
LATE_FILES = ("_CHECKPOINT_METADATA", COMMITTED)  # Orbax writes these after the manifest
LEFTOVER, DELETING, SET_ASIDE = ".orbax-checkpoint-tmp", ".deleting", ".set-aside"
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


class DamagedCheckpoint(Exception):
    """A checkpoint whose files do not match its manifest."""


def folder_of(where: str | Path) -> Any:
    """Returns a folder as a path: Orbax's type for an address (gs://, s3://; file:// treats a disk as a store), else
    a local path.
    """
    if "://" in str(where):
        return epath.Path(str(where).removeprefix("file://"))
    return Path(where).expanduser().absolute()


def in_store(path) -> bool:
    """Returns whether a path of `folder_of` is in a store (gs://, s3://, file://) rather than on a local disk."""
    return not isinstance(path, Path)


def is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a visible checkpoint: named by at least eight digits, in a store also marked as
    committed."""
    named = bool(re.fullmatch(r"\d{8,}", path.name)) and path.is_dir()
    return named and (not in_store(path) or (path / COMMITTED).exists())


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the visible checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if is_checkpoint(p)), key=lambda p: int(p.name))


def remove_leftovers(folder: Any) -> None:
    """Removes the unfinished folders that killed saves and deletions left in a folder of checkpoints.

    Call it only while no save runs. Checkpoints that were set aside stay."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if in_store(path):
            if re.fullmatch(r"\d{8,}", path.name) and not is_checkpoint(path) and not (path / SET_ASIDE).exists():
                path.rmtree()
        elif LEFTOVER in path.name or path.name.endswith(DELETING):
            shutil.rmtree(path, ignore_errors=True)


def delete(path: Any) -> None:
    """Deletes a checkpoint. It becomes invisible first, so that a killed deletion leaves no half checkpoint."""
    if in_store(path):
        (path / COMMITTED).unlink()
        path.rmtree()
        return
    doomed = path.with_name(path.name + DELETING)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path) -> str:
    """Makes a checkpoint invisible without deleting it, and returns its new name for messages.

    On a disk the folder is renamed; in a store its commit mark is removed and "without <mark>" returned."""
    if in_store(path):
        (path / SET_ASIDE).write_text("jaxrl")
        (path / COMMITTED).unlink()
        return f"without {COMMITTED}"
    target = next(p for i in range(10_000)
                  if not (p := path.with_name(path.name + SET_ASIDE + (f"-{i}" if i else ""))).exists())
    os.rename(path, target)
    return target.name


def manifest_of(folder: Path) -> dict[str, list[int | None]]:
    """Returns path below the folder -> [bytes, CRC-32] of a checkpoint's files; in a store the CRC is None.

    The manifest itself and files that are written after it (LATE_FILES) are left out."""
    files = (p for p in sorted(_files(folder)) if p.name not in (*LATE_FILES, MANIFEST))
    return {p.relative_to(folder).as_posix(): [_bytes(p), None if in_store(p) else crc_of(p)] for p in files}


def _files(folder: Path) -> list[Path]:
    return [file for p in folder.iterdir() for file in (_files(p) if p.is_dir() else [p])]


def _bytes(path: Path) -> int:
    stat: Any = path.stat()
    return stat.length if in_store(path) else stat.st_size


def crc_of(path: Path) -> int:
    """Returns the CRC-32 of a file."""
    value = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def verify(path: Path) -> None:
    """Compares the size and CRC-32 of every file of a checkpoint with its manifest (in a store the size only).

    Raises DamagedCheckpoint naming the first file, or the manifest, that is missing, cannot be read or differs."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = [(name, size, crc) for name, (size, crc) in dict(manifest).items()]
    except (OSError, ValueError, TypeError) as e:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({first_line(e)})") from None
    for name, size, crc in files:
        file = path / name
        try:
            if not file.is_file():
                raise DamagedCheckpoint(f"{name} is missing")
            if (there := _bytes(file)) != size:
                raise DamagedCheckpoint(f"{name} has {there} bytes instead of {size}")
            if crc is not None and crc_of(file) != crc:
                raise DamagedCheckpoint(f"{name} has other content than was written")
        except OSError as e:
            raise DamagedCheckpoint(f"{name} cannot be read ({first_line(e)})") from None


def disk_trouble(error: BaseException | None) -> str:
    """Returns the disk's error message if a failure, or one that caused it, is the disk's (an OSError of DISK_TROUBLE,
    or TensorStore's text for one), else ""."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_TROUBLE:
            return first_line(error)
        for text in map(os.strerror, DISK_TROUBLE):
            if text in str(error):
                return text
        error = error.__cause__ or error.__context__
    return ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, at most 300 characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [type(error).__name__])[0][:300]


def size_text(count: float) -> str:
    """Returns a number of bytes with its unit, in powers of 1000: "12 bytes", "3.4 GB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def not_orbax(record: logging.LogRecord) -> bool:
    """Returns False for log records of Orbax's own code; a filter for logging."""
    return "orbax" not in record.pathname


def not_tensorstore(record: logging.LogRecord) -> bool:
    """Returns False for TensorStore's reports of failed arrays; a filter for logging."""
    return "OCDBT" not in record.getMessage()
