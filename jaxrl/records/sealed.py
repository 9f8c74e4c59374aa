"""What is kept on disk and read again: JSON with a digest of it, and digests of files, so that what is not what was
written is seen when it is opened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def sealed(value, indent: int | None = None) -> str:
    """Text of a JSON-able value and its digest."""
    value = json.loads(json.dumps(value))  # as it will be read: keys are text
    return json.dumps({"sha256": _digest(value), "content": value}, indent=indent)


def opened(text: str):
    """The value of such a text; ValueError where it is not what was written."""
    held = json.loads(text)
    if not isinstance(held, dict) or held.get("sha256") != _digest(held.get("content")):
        raise ValueError("its digest says that it is not what was written")
    return held["content"]


def file_digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
