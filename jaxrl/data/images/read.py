"""Finds the images of a row, unread: cells of a column, parts of messages, markers in text.

A cell is one image or a list of them, each in one of these forms: encoded bytes, {"bytes", "path"} (datasets.Image), a
path, a data URI, base64 text, a Pillow image, a uint8 array [H, W], [H, W, 3] or [H, W, 4].
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.errors import type_of

MARKER = "<image>"
EDGE = 4096  # bytes at each end of a file, which tell it from others
STARTS = ("iVBORw0KGgo", "/9j/", "UklGR", "Qk", "R0lGOD")  # of PNG, JPEG, WebP, BMP and GIF in base64
VALUES = ("image", "image_url", "url", "path", "bytes", "base64")  # fields of a content part that hold an image
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
FORMS = "encoded bytes, {bytes, path}, a path, a data URI, base64 text, a Pillow image or a uint8 array"


class ImageError(PromptError):
    """An image that cannot be used. The row is counted as a bad row; the text is the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """An image that is not read yet; one field is set.

    Attributes:
      encoded: the bytes of a file.
      path: a file.
      pixels: a uint8 array or a Pillow image.
    """

    encoded: bytes | None = None
    path: Path | None = None
    pixels: Any = None

    def __str__(self):
        return str(self.path) if self.path else "an image in memory" if self.encoded is None else "encoded bytes"

    @property
    def content(self) -> str:
        """Names what the image shows: a hash of its bytes or pixels; of a file, of its size, beginning and end."""
        if self.path is not None:
            with self.path.open("rb") as file:
                held = file.read(EDGE)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - EDGE))
                held = b"%d " % size + held + file.read()
        else:
            held = self.encoded if self.encoded is not None else np.asarray(self.pixels).tobytes()
        return hashlib.blake2b(held, digest_size=16).hexdigest()


def images_of(cell, root: Path | None) -> list[Image]:
    """Returns the images of a column's cell: none for None, one, or those of a list.

    Args:
      root: folder that paths are relative to and must lie in, after symbolic links are resolved; None refuses paths.

    Raises ImageError for a value in no known form, a URL, and a path outside `root` or without a file.
    """
    if cell is None:
        return []
    if isinstance(cell, list | tuple):
        return [image_of(value, root) for value in cell]
    return [image_of(cell, root)]


def image_of(value, root: Path | None) -> Image:
    """Returns one image; as `images_of`."""
    if isinstance(value, dict):
        held = {k: v for k, v in value.items() if v is not None}
        if not held or held.keys() - {"bytes", "path"}:
            shown = ", ".join(map(str, held)) or "nothing in it"
            raise ImageError(f"an image is a table with {shown}; give bytes or path")
        value = held.get("bytes", held.get("path"))
    if isinstance(value, bytes | bytearray | memoryview):
        return Image(encoded=bytes(value))
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (3, 4)):
            raise ImageError(f"an array of {value.dtype} {list(value.shape)}: expected uint8 [height, width, 3]")
        return Image(pixels=value)
    if hasattr(value, "convert") and hasattr(value, "getexif"):
        return Image(pixels=value)
    if isinstance(value, str):
        return _of_text(value, root)
    raise ImageError(f"an image is {type_of(value)}: expected {FORMS}")


def shown_image(cell) -> str:
    """Returns how a message names the image that a column's cell seems to hold, "" if it seems to hold none.

    cell: as in `images_of`. A text seems to be one if it is a data URI of an image, or ends as the name of a file."""
    value = cell[0] if isinstance(cell, list | tuple) and cell else cell
    if isinstance(value, dict) and "bytes" in value and not value.keys() - {"bytes", "path"}:
        return "{bytes, path}"
    if hasattr(value, "convert") and hasattr(value, "getexif"):
        return "a Pillow image"
    if isinstance(value, str) and value.startswith("data:image/"):
        return "a data URI"
    if isinstance(value, str) and value.lower().endswith(SUFFIXES) and "\n" not in value:
        return _shown(value)
    return ""


def _of_text(text: str, root: Path | None) -> Image:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ImageError(f"a data URI that begins {head[:40]!r}: only base64 is read")
        return Image(encoded=_decoded(body))
    if match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text):
        raise ImageError(f"{_shown(text)}: nothing is fetched ({match[1]}); store the image in the data or beside it")
    found = _file(text, root) if len(text) < 4096 and "\0" not in text else None
    if found is None and text.startswith(STARTS) and len(text) > 40:
        return Image(encoded=_decoded(text))
    if found is None:
        where = f"no such file in {root.resolve()}" if root else "there is no folder to look in"
        raise ImageError(f"{_shown(text)}: {where}; data.image_root names the folder that paths are relative to")
    return Image(path=found)


def _file(text: str, root: Path | None) -> Path | None:
    """Returns the file below `root` that a path names, None if there is none."""
    if root is None:
        return None
    top = root.resolve()
    try:
        path = (top / text).resolve()
        if not path.is_file():
            return None
    except (OSError, RuntimeError):  # a name too long, a loop of links
        return None
    if not path.is_relative_to(top):
        raise ImageError(f"{_shown(text)}: lies outside data.image_root={root}; set it to a folder that holds all "
                         "images")
    return path


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise ImageError(f"base64 text of {len(text)} characters, {text[:12]!r}..., cannot be read: {e}") from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def split_prompt(prompt: str | list, column: list[Image], marker: str, root: Path | None) -> tuple[Any, list[Image]]:
    """Splits a prompt into text and images.

    A message's content may be text or a list of parts: {"type": "text", "text"}, {"type": "image"} (takes the next
    image of the column), {"type": "image", "image": ...} and {"type": "image_url", "image_url": ... or {"url": ...}}.
    `marker` in text takes the next image of the column, too. If nothing takes one, the column's images come before the
    text of the first user message.

    Args:
      prompt: text or chat messages.
      column: images of the row's column, unread.

    Returns (messages whose contents are lists of {"type": "text", "text"} and {"type": "image"}, images in the order of
    these parts). A text prompt becomes one user message. Without images: (prompt, []).

    Raises ImageError where markers and images differ in number, for a video, and for parts in no known form.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rest, used = iter(column), []
    out = [_message(i, message, rest, used, marker, root) for i, message in enumerate(messages)]
    left = list(rest)
    if left and len(left) == len(column):
        at = next((i for i, message in enumerate(out) if message["role"] == "user"), 0)
        before = [part for message in out[:at] for part in message["content"] if part["type"] == "image"]
        used[len(before):len(before)] = left
        out[at] = {**out[at], "content": [{"type": "image"}] * len(left) + out[at]["content"]}
    elif left:
        raise ImageError(f"{len(column) - len(left)} markers ({marker} or image parts) for {len(column)} images")
    return (out, used) if used else (prompt, [])


def _message(number: int, message, rest, used: list, marker: str, root) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"message {number} is not {{role: ..., content: ...}}")
    content, parts, where = message.get("content"), [], f"message {number} ({message['role']})"

    def take():
        if (image := next(rest, None)) is None:
            raise ImageError(f"{where}: more markers ({marker} or image parts) than images ({len(used)}); "
                             "data.image_marker='' reads markers as text")
        used.append(image)
        parts.append({"type": "image"})

    def read(text: str):
        for i, piece in enumerate(text.split(marker) if marker else [text]):
            if i:
                take()
            if piece:
                parts.append({"type": "text", "text": piece})

    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            read(part["text"])
        elif kind in ("image", "image_url"):
            given = [part[name] for name in VALUES if part.get(name) is not None]
            if not given:
                take()
                continue
            value = given[0]
            value = value.get("url", value) if isinstance(value, dict) else value
            used.append(image_of(value, root))
            parts.append({"type": "image"})
        else:
            raise ImageError(f"{where} has a part of type {kind!r}: text and images are read")
    return {**message, "content": parts}
