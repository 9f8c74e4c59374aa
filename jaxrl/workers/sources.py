"""Digests the code that the user's functions consist of, so that results of other code are not taken for theirs.

Standard library only: workers import this file.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig

MAX_NEIGHBOURS = 200  # most Python files read from the folder of a function's file


def digest(functions, before: set[str], files=()) -> str:
    """Returns the digest of the functions' modules, the files next to them, and every module loaded with them.

    User code counts by content, installed packages by the sizes of their files, and the version of Python; the folder
    of a file and the standard library do not. Of the files next to them at most MAX_NEIGHBOURS per folder count.

    Args:
      functions: callables of the user.
      before: names of the modules that were loaded earlier.
      files: further files.
    """
    own = {getattr(f, "__module__", None) for f in functions}
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    parts, folders = {sys.version, *map(_content, files)}, set()
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or name in before and name not in own:
            continue
        installed = any(folder in path for folder in ("site-packages", "dist-packages"))
        if name in own or not installed and not path.startswith(standard):
            parts.add(_content(path))
            if name in own and not installed and not name.startswith("jaxrl."):
                folders.add(os.path.dirname(path))
        elif installed:
            parts.add(f"{name} {_size(path)}")
    for folder in folders:
        names = sorted(n for n in os.listdir(folder) if n.endswith(".py"))
        parts |= {_content(os.path.join(folder, name)) for name in names[:MAX_NEIGHBOURS]}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def folder_digest(folder: str) -> str:
    """Returns a digest, 16 hex digits, of the names and sizes of a folder's files; "" if it is not a folder."""
    try:
        found = sorted((e.name, e.stat().st_size) for e in os.scandir(folder) if e.is_file())
    except OSError:
        return ""
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _content(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return f"{os.path.basename(path)} {hashlib.sha256(file.read()).hexdigest()}"
    except OSError:
        return os.path.basename(path)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
