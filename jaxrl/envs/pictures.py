"""Images in the messages of environments, as text that pipes and JSON carry. Standard library only.

A content part {"type": "image", "image": ...} may hold the bytes of a file, a path (pathlib), a uint8 array [H, W],
[H, W, 3] or [H, W, 4], a Pillow image, or text: a data URI, base64, or the path of a file in data.image_root. The
trainer reads the file (jaxrl.data.images).
"""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path

from jaxrl.envs.tools import BadEnvironment, result_text

FIELDS = ("image", "image_url", "url", "path", "bytes", "base64")  # of a part, that may hold an image
KINDS = ("image", "image_url")
COLOURS = {1: 0, 3: 2, 4: 6}  # channels of an array -> PNG's colour type
MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # of Pillow that a PNG can hold
FORMS = "bytes, a pathlib.Path, a uint8 array [height, width, 3], a Pillow image, a data URI or base64 text"


def is_image(value) -> bool:
    """Returns whether a value is a Pillow image or a uint8 array [H, W] or [H, W, C] with C of 1, 3 or 4."""
    return is_pillow(value) or (is_array(value) and str(value.dtype) == "uint8" and len(value.shape) in (2, 3)
                                and (len(value.shape) == 2 or value.shape[2] in COLOURS))


def is_pillow(value) -> bool:
    """Returns whether a value is a Pillow image (it has `convert` and `getexif`)."""
    return hasattr(value, "convert") and hasattr(value, "getexif")


def is_array(value) -> bool:
    """Returns whether a value is an array of numpy, or of a library with its interface (dtype, shape, tobytes)."""
    return all(hasattr(value, name) for name in ("dtype", "shape", "tobytes"))


def is_part(value) -> bool:
    """Returns whether a value is a part of a message's content: a dict without `role`, of type text, image or
    image_url."""
    return isinstance(value, dict) and "role" not in value and value.get("type") in ("text", *KINDS)


def shows(value) -> bool:
    """Returns whether a value is a part of type image or image_url, or a list of parts of which at least one is."""
    parts = value if isinstance(value, list) else [value]
    return all(map(is_part, parts)) and any(part["type"] in KINDS for part in parts)


def as_text(value, where: str):
    """Returns an image as text: text (a data URI, base64 or path) unchanged; a file, bytes or picture as a data URI.

    value: see the module; also a dict with one of these under "bytes", "path" or "url". where: named in errors.

    Raises BadEnvironment for what cannot be read as an image, and what Pillow raises for a picture that it cannot write
    (OSError where its file is cut off)."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, os.PathLike):
        try:
            value = Path(value).read_bytes()
        except OSError as e:
            raise BadEnvironment(f"{where}: an image cannot be read: {type(e).__name__}") from None
    elif is_pillow(value):
        value = of_pillow(value)
    elif value is not None and is_array(value):
        if not is_image(value):
            raise BadEnvironment(f"{where}: an array of {value.dtype} {list(value.shape)}: expected uint8 "
                                 "[height, width, 3]")
        value = png(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return "data:;base64," + base64.b64encode(bytes(value)).decode()
    if isinstance(value, str):
        return value
    raise BadEnvironment(f"{where}: an image is of type {type(value).__name__}: expected {FORMS}")


def content_of(content, where: str):
    """Returns a message's content with every image as text (see `as_text`). where: named in errors.

    Text, parts of other kinds and image parts without an image (the row's next image) stay as they are.

    Raises BadEnvironment for what cannot be read as an image."""
    if not isinstance(content, list):
        return content
    out = []
    for part in content:
        given = next((name for name in FIELDS if part.get(name) is not None), "") if is_part(part) else ""
        if given and part["type"] in KINDS:
            part = {"type": "image", "image": as_text(part[given], where)}
        out.append(part)
    return out


def result_content(name: str, value) -> str | list:
    """Returns a tool's result as the content of a message: parts where it is an image, a part with one, or a list of
    parts, images and texts with one; else text (`result_text`). Images are not converted (see `content_of`).

    name: of the tool. Raises BadEnvironment for a value of no such form that JSON cannot hold, such as a list of an
    image and a number.
    """
    if is_image(value):
        value = [{"type": "image", "image": value}]
    elif isinstance(value, list | tuple) and any(is_image(one) or shows(one) for one in value):
        kinds = {True: "image", False: "text"}
        value = [{"type": kinds[image], kinds[image]: one} if (image := is_image(one)) or isinstance(one, str)
                 else one for one in value]
    if shows(value):
        return value if isinstance(value, list) else [value]
    return result_text(name, value)


def png(array) -> bytes:
    """Returns a uint8 array [H, W] or [H, W, 1] (grey), [H, W, 3] (RGB) or [H, W, 4] (RGBA) as a PNG file."""
    height, width, *channels = array.shape
    return png_of(array.tobytes(), height, width, channels[0] if channels else 1)


def png_of(data: bytes, height: int, width: int, count: int) -> bytes:
    """Returns pixels of `count` bytes each (1 grey, 3 RGB, 4 RGBA), row after row, as a PNG file of 8 bits a channel.

    data: height * width * count bytes. height, width: in pixels."""
    line = width * count
    lines = b"".join(b"\0" + data[i:i + line] for i in range(0, len(data), line))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, COLOURS[count], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 1)) + chunk(b"IEND", b"")


def of_pillow(image) -> bytes:
    """Returns a Pillow image as a PNG file with its Exif data, in RGB if PNG does not have its mode (MODES)."""
    out, exif = io.BytesIO(), image.getexif()
    image = image if image.mode in MODES else image.convert("RGB")
    image.save(out, "PNG", **({"exif": exif} if exif else {}))
    return out.getvalue()
