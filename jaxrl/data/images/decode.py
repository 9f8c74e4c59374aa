"""Reads image files: their size from the header, their pixels where a step needs them. The one file that uses Pillow.

EXIF orientation is applied and alpha dropped by a conversion to RGB, as transformers does. Formats outside FORMATS are
not opened; the stored size is checked before any pixel is decoded.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxrl.data.images.read import ORIENTATION, Image, ImageError, image_of
from jaxrl.data.images.resize import Rule, cut
from jaxrl.errors import ConfigError, type_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # of a GIF, the first frame
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
LATE = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks of a PNG that may say how it is turned


class Picture(NamedTuple):
    """An image as a model sees it.

    Attributes:
      digest: 16 bytes of pixels and grid.
      grid: (rows, columns) of patches.
      stored: (height, width) of the upright image before it was resized.
      patches: [N, C * p * p] uint8, channels, then the pixels of a patch, in the order of resize.cut; of T frames that
        a patch holds [N, C * T * p * p].
    """

    digest: bytes
    grid: tuple[int, int]
    stored: tuple[int, int]
    patches: np.ndarray


def size_of(image: Image, limit: int) -> tuple[int, int]:
    """Returns (height, width) of an upright image.

    Reads the header of a file and where its parts lie, and decodes pixels only if these do not show that the file is
    whole. Raises ImageError for what `pixels_of` would refuse, except errors inside compressed data; ConfigError
    without Pillow, except for an array.

    Args:
      limit: most pixels of a stored image.
    """
    if isinstance(image.pixels, np.ndarray):
        height, width = image.pixels.shape[:2]
        _checked_size(width, height, limit)
        return height, width
    with _opened(image, limit) as (opened, file):
        whole, late = _structure(opened, file)
        if not whole:
            opened.load()
        pillow = _pillow()
        exif = opened.getexif() if late else pillow.Image.getexif(opened)  # that of PNG would decode pixels
        width, height = opened.size
        return (width, height) if exif.get(ORIENTATION, 1) in (5, 6, 7, 8) else (height, width)


def pixels_of(image: Image, limit: int) -> np.ndarray:
    """Returns the upright image in RGB, uint8 [H, W, 3]. An array keeps its values, without alpha; grey is repeated.

    limit: most pixels of a stored image. Raises ImageError naming the reason if it cannot be read; ConfigError without
    Pillow, except for an array."""
    if isinstance(image.pixels, np.ndarray):
        height, width = image.pixels.shape[:2]
        _checked_size(width, height, limit)
        grey = image.pixels.ndim == 2
        return np.repeat(image.pixels[..., None], 3, axis=2) if grey else image.pixels[..., :3]
    from PIL import ImageOps
    with _opened(image, limit) as (opened, _):
        opened.load()
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


def picture_of(image: Image, rule: Rule, limit: int) -> Picture:
    """Decodes an image, resizes it by a rule and cuts it into patches.

    limit: most pixels of a stored image. Raises ImageError if it cannot be read or rule.size refuses its size,
    ConfigError without Pillow."""
    return picture_of_frames([image], rule, limit, rule.size)


def picture_of_frames(frames: Sequence[Image], rule: Rule, limit: int, size: Callable[..., tuple[int, int]]) -> Picture:
    """Decodes, resizes and cuts the T frames that a patch holds together.

    Args:
      frames: all of one size; with one, patches are [N, C * p * p].
      rule: patch size, merging and resampling.
      limit: most pixels of a stored image.
      size: stored height and width -> those of the resized frames.

    Raises ImageError for a frame that cannot be read, ConfigError without Pillow, and what `size` raises.
    """
    pixels = [pixels_of(frame, limit) for frame in frames]
    stored = pixels[0].shape[:2]
    height, width = size(*stored)
    pillow = _pillow()
    cuts = [cut(np.asarray(pillow.fromarray(own).resize((width, height), resample=rule.resample)), rule)
            for own in pixels]
    grid = height // rule.patch, width // rule.patch
    patches = cuts[0] if len(cuts) == 1 else together(cuts)
    digest = hashlib.blake2b(repr(grid).encode() + patches.tobytes(), digest_size=16).digest()
    return Picture(digest, grid, stored, patches)


def together(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the [N, C * T * p * p] patches of T frames, numbers ordered by (channel, frame, pixel).

    frames: of each frame its patches, [N, C * p * p], with C = 3."""
    return np.stack([own.reshape(len(own), 3, -1) for own in frames], axis=2).reshape(len(frames[0]), -1)


def animation(image: Image) -> tuple[float, ...] | None:
    """Returns the time of each frame of an animated GIF or WebP in seconds from the first, by the durations in the
    file (0.1 s for a frame without one); None for a still image or an array. Raises ImageError for a file that cannot
    be read, ConfigError without Pillow, except for an array."""
    if isinstance(image.pixels, np.ndarray):
        return None
    with _opened(image, sys.maxsize) as (opened, _):
        count = getattr(opened, "n_frames", 1)
        if count < 2:
            return None
        times, now = [], 0.0
        for number in range(count):
            opened.seek(number)
            if opened.format == "WEBP":  # tells a frame's duration when it is decoded
                opened.load()
            times.append(now)
            now += (opened.info.get("duration") or 100) / 1000
        opened.seek(0)
    return tuple(times)


def as_text(value) -> str | list:
    """Returns an image in memory as a data URI, which read.image_of takes, and an array of frames as a list of them:
    for files that hold text alone. An animated PIL image keeps its frames and their times, as an animated PNG. What
    read.image_of or Pillow refuses becomes the text of the error, not a data URI.

    value: a file's bytes, which are not examined; a PIL image; a uint8 array [H, W], [H, W, 3] or [H, W, 4]; or frames,
    [T, H, W, 3] or [T, H, W, 4]. Raises TypeError for another value, as a `default` of json.dumps must; ConfigError
    without Pillow for all but bytes.
    """
    if isinstance(value, np.ndarray) and value.ndim == 4:  # the frames of a video
        return [as_text(frame) for frame in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return "data:;base64," + base64.b64encode(bytes(value)).decode()
    if isinstance(value, np.ndarray) or (hasattr(value, "convert") and hasattr(value, "getexif")):
        try:
            image = image_of(value, None)
            return as_text(_animated_png(image) or png_of(image))
        except ImageError as e:  # a bad row, which is reported when it is read
            return str(e)
    raise TypeError(f"{type_of(value)} is no image")


def _animated_png(image: Image) -> bytes | None:
    """Returns an animated PIL image in memory as an animated PNG file, frames in RGB; None for a still image, an array,
    and frames of several sizes. Pillow writes equal neighbours as one frame, so the frames are put together here
    (PNG specification, third edition, 4.9 and 11.3.6). Raises ImageError if a frame cannot be read."""
    times = animation(image)
    if times is None:
        return None
    with _opened(image, sys.maxsize) as (opened, _):
        pillow, files, sizes, lasts = _pillow(), [], set(), []
        for number in range(len(times)):
            opened.seek(number)
            opened.load()
            lasts.append(float(opened.info.get("duration") or 0))
            sizes.add(opened.size)
            out, exif = io.BytesIO(), opened.getexif()
            pillow.fromarray(np.asarray(opened.convert("RGB"))).save(out, "PNG", **({"exif": exif} if exif else {}))
            files.append(out.getvalue())
        opened.seek(0)
    if len(sizes) > 1:
        return None
    (width, height), parts, count = sizes.pop(), [files[0][:8]], 0
    for number, (file, last) in enumerate(zip(files, lasts, strict=True)):
        delay = Fraction(last / 1000).limit_denominator(1000) if last < 65000 else Fraction(round(last / 1000))
        delays = min(delay.numerator, 65535), delay.denominator  # two bytes each
        control = struct.pack(">5I2H2B", count, width, height, 0, 0, *delays, 0, 0)
        count, begun = count + 1, False
        for kind, data in _png_chunks(file):
            if kind == b"IDAT":
                if not begun:
                    parts.append(_png_chunk(b"fcTL", control))
                begun = True
                if number:
                    kind, data, count = b"fdAT", struct.pack(">I", count) + data, count + 1
                parts.append(_png_chunk(kind, data))
            elif not number and kind != b"IEND":
                parts.append(_png_chunk(kind, data))
                if kind == b"IHDR":
                    parts.append(_png_chunk(b"acTL", struct.pack(">2I", len(files), 0)))
    return b"".join([*parts, _png_chunk(b"IEND", b"")])


def _png_chunks(file: bytes):
    """Yields (type, data) of the chunks of a PNG file."""
    at = 8
    while at < len(file):
        size = int.from_bytes(file[at:at + 4], "big")
        yield file[at + 4:at + 8], file[at + 8:at + 8 + size]
        at += 12 + size


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def upright(file: bytes):
    """Returns the image of a file as an upright PIL.Image.Image in RGB. Neither format nor size is checked: the file
    must have been examined before. Raises ConfigError without Pillow, and what Pillow raises."""
    from PIL import ImageOps
    return ImageOps.exif_transpose(_pillow().open(io.BytesIO(file))).convert("RGB")


def png_of(image: Image) -> bytes:
    """Returns an image in memory (Image.pixels) as a PNG file, in RGB if PNG does not have its colours, with its EXIF
    data; pixels are not turned upright. Raises ConfigError without Pillow."""
    pillow, out = _pillow(), io.BytesIO()
    with contextlib.ExitStack() as stack:
        stored = pillow.fromarray(image.pixels) if isinstance(image.pixels, np.ndarray) else stack.enter_context(
            image.at_frame())
        stored = stored if stored.mode in PNG_MODES else stored.convert("RGB")
        stored.save(out, "PNG", **({"exif": exif} if (exif := stored.getexif()) else {}))
    return out.getvalue()


def thumbnail(pixels_HxWx3: np.ndarray, longest: int) -> bytes:
    """Returns uint8 pixels [H, W, 3] as a PNG file, made smaller until no side is longer than `longest` pixels.
    Raises ConfigError without Pillow."""
    out, image = io.BytesIO(), _pillow().fromarray(pixels_HxWx3)
    image.thumbnail((longest, longest))  # bicubic
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _pillow():
    try:
        import PIL.Image
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'jaxrl[vision]'") from None
    return PIL.Image


@contextlib.contextmanager
def _opened(image: Image, limit: int):
    """Yields (Pillow image at the image's frame, whose pixels are not decoded, its file or None)."""
    pillow = _pillow()
    try:
        if image.pixels is not None:
            with image.at_frame() as opened:
                width, height = opened.size
                _checked_size(width, height, limit)
                yield opened, None
            return
        if image.encoded == b"":
            raise ImageError("no bytes")
        with io.BytesIO(image.encoded or b"") if image.path is None else open(image.path, "rb") as file:
            opened = pillow.open(file, formats=FORMATS)
            _checked_size(*opened.size, limit)
            if image.frame:
                opened.seek(image.frame)
            yield opened, file
    except (ImageError, ConfigError, MemoryError):
        raise
    except pillow.DecompressionBombError as e:
        raise ImageError(f"{image}: {e}") from None
    except Exception as e:  # Pillow's readers raise many kinds, all of which mean that the file cannot be read
        raise ImageError(f"{image}: cannot be read as {', '.join(FORMATS)}: {_reason(e)}") from None


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    return "another format, or no image" if kind == "UnidentifiedImageError" else f"{kind}: {error}"


def _checked_size(width: int, height: int, limit: int) -> None:
    """Raises ImageError for a size without pixels, or with more than the limit."""
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width}x{height} pixels")
    if width * height > limit:
        raise ImageError(f"an image of {width}x{height} pixels, data.image_decode_limit={limit}")


def _structure(opened, file) -> tuple[bool, bool]:
    """Returns (whether the parts of a file show that it is whole, whether a PNG says behind its pixels how it is
    turned)."""
    if file is None:
        return True, False
    end, kind = file.seek(0, os.SEEK_END), opened.format
    if kind == "PNG":
        return _chunks(file, end)
    file.seek(0)
    head = file.read(12)
    if kind == "WEBP":
        return int.from_bytes(head[4:8], "little") + 8 <= end, False
    if kind == "BMP":
        return 0 < int.from_bytes(head[2:6], "little") <= end, False
    file.seek(max(0, end - 2048))
    tail = file.read()
    return (b"\xff\xd9" in tail if kind == "JPEG" else tail.rstrip(b"\0").endswith(b";")), False


def _chunks(file, end: int) -> tuple[bool, bool]:
    """`_structure` of a PNG: length, type, data and a checksum per chunk."""
    at, seen, late = 8, False, False
    while at + 12 <= end:
        file.seek(at)
        head = file.read(8)
        size, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND":
            return True, late
        seen |= kind == b"IDAT"
        late |= seen and kind in LATE
        at += 12 + size
    return False, late
