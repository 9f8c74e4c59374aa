"""Makes files survive a power failure: their contents, then their names. Called by app, journal, snapshots, store."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

# what reading a damaged .npz may raise: a flipped bit may ask for a compression that there is not, or for a password
DAMAGED = (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, SyntaxError, zipfile.BadZipFile,
           zlib.error)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_tree(folder: Path) -> None:
    """Waits until the disk has all files in a folder and below, and their names."""
    for path, _, names in os.walk(folder):
        for name in names:
            with open(Path(path) / name, "rb") as f:
                os.fsync(f.fileno())
        sync_folder(Path(path))


def write(path: Path, content: bytes) -> None:
    """Writes a file at once: after a kill or a power failure it has its old or its new content."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    replace(temporary, path)


def replace(temporary: Path, path: Path) -> None:
    """Renames a file or folder whose contents the disk has, and waits until the disk has its name, too."""
    os.replace(temporary, path)
    sync_folder(path.parent)
