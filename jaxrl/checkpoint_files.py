"""The folders of checkpoints and what may be wrong with them: which there are, their manifests, what a disk says."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from pathlib import Path

MANIFEST = "manifest.json"
LATE_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes these after the manifest
LEFTOVER, DELETING, SET_ASIDE = ".orbax-checkpoint-tmp", ".deleting", ".set-aside"
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


class Damaged(Exception):
    """A checkpoint whose files are not what its manifest says."""


def is_checkpoint(path: Path) -> bool:
    return bool(re.fullmatch(r"\d{8,}", path.name)) and path.is_dir()


def checkpoints_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if is_checkpoint(p)), key=lambda p: int(p.name))


def remove_leftovers(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if LEFTOVER in path.name or path.name.endswith(DELETING):
            shutil.rmtree(path, ignore_errors=True)


def manifest_of(folder: Path) -> dict[str, list[int]]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in (*LATE_FILES, MANIFEST))
    return {str(p.relative_to(folder)): [p.stat().st_size, crc_of(p)] for p in files}


def crc_of(path: Path) -> int:
    value = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def verify(path: Path) -> None:
    """Compares every file of a checkpoint with its manifest. Raises Damaged saying what is wrong."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise Damaged(f"{MANIFEST} cannot be read ({first_line(e)})") from None
    for name, (size, crc) in manifest.items():
        file = path / name
        if not file.is_file():
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if crc_of(file) != crc:
            raise Damaged(f"{name} has other content than was written")


def disk_trouble(error: BaseException | None) -> str:
    """What the disk said, if a failure is the disk's: an OSError, or TensorStore's text for one; else ''."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_TROUBLE:
            return first_line(error)
        for text in map(os.strerror, DISK_TROUBLE):
            if text in str(error):
                return text
        error = error.__cause__ or error.__context__
    return ""


def first_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [type(error).__name__])[0][:300]


def size_text(count: int) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def not_tensorstore(record: logging.LogRecord) -> bool:
    return "OCDBT" not in record.getMessage()
