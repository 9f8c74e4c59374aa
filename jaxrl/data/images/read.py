"""Finds the images of a row, unread: cells of a column, parts of messages, markers in text.

A cell is one image or a list of them, each in one of these forms: encoded bytes, {"bytes", "path"} (datasets.Image), a
path, a data URI, base64 text, a Pillow image, a uint8 array [H, W], [H, W, 3] or [H, W, 4].
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data.chat_template import PromptError
from jaxrl.errors import type_of

MARKER, VIDEO_MARKER = "<image>", "<video>"
EDGE = 4096  # bytes at each end of a file, which tell it from others
STARTS = ("iVBORw0KGgo", "/9j/", "UklGR", "Qk", "R0lGOD")  # of PNG, JPEG, WebP, BMP and GIF in base64
VALUES = ("image", "image_url", "url", "path", "bytes", "base64")  # fields of a content part that hold an image
VIDEO_VALUES = ("video", "frames", "path")  # and of one that holds a video
SUFFIXES = (  # of files of images
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
ORIENTATION = 0x0112  # EXIF tag; its values 5 to 8 exchange height and width
LOCKS = [threading.RLock() for _ in range(64)]  # of Pillow images in memory, by their id
FORMS = "encoded bytes, {bytes, path}, a path, a data URI, base64 text, a Pillow image or a uint8 array"


class ImageError(PromptError):
    """An image that cannot be used. The row is counted as a bad row; the text is the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """An image that is not read yet; one of the first three fields is set.

    Attributes:
      encoded: the bytes of a file.
      path: a file.
      pixels: a uint8 array or a Pillow image.
      frame: which one of an animation, beside one of these.
    """

    encoded: bytes | None = None
    path: Path | None = None
    pixels: Any = None
    frame: int = 0

    def __str__(self):
        return str(self.path) if self.path else "an image in memory" if self.encoded is None else "encoded bytes"

    @property
    def content(self) -> str:
        """Hash (32 hex digits) of what the image shows: of encoded bytes, or of a file its size and the first and last
        EDGE bytes; of an array its shape and values; of a Pillow image its size, values, mode, palette and orientation;
        of all of these the number of the frame. Raises OSError for a file that cannot be read."""
        if self.path is not None:
            with self.path.open("rb") as file:
                held = file.read(EDGE)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - EDGE))
                held = b"%d " % size + held + file.read()
        elif self.encoded is not None:
            held = self.encoded
        elif isinstance(self.pixels, np.ndarray):
            held = repr(self.pixels.shape).encode() + self.pixels.tobytes()
        else:
            with self.at_frame() as shown:
                held = shown.tobytes()
                traits = shown.mode, shown.size, shown.getpalette(), shown.getexif().get(ORIENTATION, 1)
            held = repr(traits).encode() + held
        return hashlib.blake2b(held + b"frame %d" % self.frame * (self.frame > 0), digest_size=16).hexdigest()

    @contextlib.contextmanager
    def at_frame(self) -> Iterator[Any]:
        """Yields the Pillow image in memory, `pixels`, at this image's frame. Other threads that ask for it wait: it
        shows one frame at a time."""
        with LOCKS[id(self.pixels) // 64 % len(LOCKS)]:
            try:
                self.pixels.seek(self.frame)
            except EOFError:
                if self.frame:  # some formats count from 1
                    raise
            yield self.pixels


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
    """Returns the image of a value in one of the module's forms, unread.

    root: folder that paths are relative to and must lie in, after symbolic links are resolved; None refuses paths.
    Raises ImageError for a list, a value in no known form, a URL, and a path outside `root` or without a file."""
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


def shows_video(cell) -> bool:
    """Returns whether a column's cell seems to hold a video: a table (dict) with `video` or `frames`, a list that
    begins with one, or a list of several images."""
    value = cell[0] if isinstance(cell, list | tuple) and cell else cell
    if isinstance(value, dict):
        return any(value.get(name) is not None for name in ("video", "frames"))
    return value is not cell and len(cell) > 1 and bool(shown_image(value))


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


def split_prompt(prompt: str | list, column: list[Image], marker: str, root: Path | None, videos=(),
                 video_of: Any = None) -> tuple[Any, list]:
    """Splits a prompt into text, images and videos.

    A message's content is text or a list of parts. Images are taken in these ways:
      - The parts {"type": "image"} take the next image of the row's column, and so does `marker` in text.
      - The parts {"type": "image", "image": ...} and {"type": "image_url", "image_url": ... or {"url": ...}} bring
        their own.
      - If nothing takes an image of the column, all of them come before the text of the first user message.

    The same holds for videos, with parts {"type": "video"} and the marker <video>. In rows without a column of videos,
    <video> is plain text. If neither images nor videos are marked, images come before videos.

    Args:
      prompt: text or chat messages.
      column: images of the row's column, unread.
      marker: text that stands for an image; "" = none does.
      root: folder that paths are relative to and must lie in; None refuses paths.
      videos: videos of the row's column, unread.
      video_of: (value of a part, root, the part) -> a video; None = the model reads no videos.

    Returns:
      (messages whose contents are lists of {"type": "text", "text"}, {"type": "image"} and {"type": "video"}; images
        and videos in the order of these parts). A text prompt becomes one user message. Without images: (prompt, []).

    Raises:
      ImageError: the number of markers differs from that of images, or a part has no known form.
      PromptError: a message is no table with a role.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rest, used = {"image": iter(column), "video": iter(videos)}, []
    markers = {"image": marker, "video": VIDEO_MARKER if videos else ""}
    out = [_message(i, message, rest, used, markers, root, video_of) for i, message in enumerate(messages)]
    for kind, whole in (("video", videos), ("image", column)):  # the last ones come first
        left = list(rest[kind])
        if left and len(left) == len(whole):
            at = next((i for i, message in enumerate(out) if message["role"] == "user"), 0)
            before = [part for message in out[:at] for part in message["content"] if part["type"] != "text"]
            used[len(before):len(before)] = left
            out[at] = {**out[at], "content": [{"type": kind}] * len(left) + out[at]["content"]}
        elif left:
            marked = f"{len(whole) - len(left)} markers ({markers[kind]} or {kind} parts)"
            raise ImageError(f"{marked} for {len(whole)} {kind}s")
    return (out, used) if used else (prompt, [])


def _message(number: int, message, rest, used: list, markers: dict[str, str], root, video_of) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"message {number} is not {{role: ..., content: ...}}")
    content, parts, where = message.get("content"), [], f"message {number} ({message['role']})"

    def take(kind: str):
        if (found := next(rest[kind], None)) is None:
            what = f"{where}: more markers ({markers[kind] or VIDEO_MARKER} or {kind} parts) than {kind}s ({len(used)})"
            raise ImageError(what + "; data.image_marker='' reads markers as text" * (kind == "image"))
        put(kind, found)

    def put(kind: str, found):
        used.append(found)
        parts.append({"type": kind})

    def read(text: str):
        kinds = {text: kind for kind, text in markers.items() if text}
        for piece in re.split("(" + "|".join(map(re.escape, kinds)) + ")", text) if kinds else [text]:
            if piece in kinds:
                take(kinds[piece])
            elif piece:
                parts.append({"type": "text", "text": piece})

    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            read(part["text"])
        elif kind in ("image", "image_url"):
            given = [part[name] for name in VALUES if part.get(name) is not None]
            if not given:
                take("image")
                continue
            value = given[0]
            value = value.get("url", value) if isinstance(value, dict) else value
            put("image", image_of(value, root))
        elif kind == "video" and video_of is not None:
            value = next((part[name] for name in VIDEO_VALUES if part.get(name) is not None), None)
            if value is None:
                take("video")
            else:
                put("video", video_of(value, root, part))
        else:
            raise ImageError(f"{where} has a part of type {kind!r}: text and images are read"
                             + ", and videos by Qwen's towers" * (kind == "video"))
    return {**message, "content": parts}
