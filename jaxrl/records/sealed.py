"""JSON files with a digest of their content, and digests of files, so that damage is detected when they are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def sealed(value, indent: int | None = None) -> str:
    """Returns JSON text of a JSON-able value with its SHA-256. Keys become text; `opened` reads it."""
    value = json.loads(json.dumps(value))  # as it will be read: keys become text
    return json.dumps({"sha256": _digest(value), "content": value}, indent=indent)


def opened(text: str):
    """Returns the value of a text of `sealed`. Raises ValueError for other text, and if its digest does not match."""
    held = json.loads(text)
    if not isinstance(held, dict) or held.get("sha256") != _digest(held.get("content")):
        raise ValueError("its content does not match its digest")
    return held["content"]


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
