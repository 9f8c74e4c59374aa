"""The images of a row as reward functions receive them, with the boxes and points that completions name in them.

A function that names `images` gets a list of RowImage, one for each image of the row's prompt; one that names
`image_sizes` their sizes alone, without any file being read. Standard library only; Pillow and numpy where a function
asks for pixels.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import re
from typing import Any

FRAMES = ("thousandths", "seen", "stored")  # what numbers of a completion count
NUMBER = r"-?\d{1,7}(?:\.\d{1,6})?"
Box = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an upright image, (height, width) in pixels: `stored` as it is stored, `seen` as the model sees
    it."""

    stored: tuple[int, int]
    seen: tuple[int, int]


class RowImage:
    """One image of a row, as reward functions get it.

    file: the bytes of its file. sizes: height and width as stored and as the model sees it."""

    def __init__(self, file: bytes, sizes: Sizes):
        self.file, self.sizes = file, sizes

    @functools.cached_property
    def pillow(self) -> Any:
        """The upright image in RGB, a PIL.Image.Image; decoded at the first access. Raises ConfigError without
        Pillow."""
        from jaxrl.data.images.decode import upright
        return upright(self.file)

    @functools.cached_property
    def pixels(self) -> Any:
        """The upright image in RGB as a uint8 array [height, width, 3]. Raises ConfigError without Pillow."""
        import numpy as np
        return np.asarray(self.pillow)


def sizes_from_json(value: list) -> list[Sizes]:
    """Returns the Sizes of a list of [stored, seen], each (height, width) in pixels."""
    return [Sizes(tuple(stored), tuple(seen)) for stored, seen in value]


def from_json(files: list[str], sizes: list) -> list[RowImage]:
    """Returns the RowImages of files in base64 and their sizes as [stored, seen]."""
    return [RowImage(base64.b64decode(file), one) for file, one in zip(files, sizes_from_json(sizes), strict=True)]


def last_numbers(text: str, count: int) -> tuple[float, ...] | None:
    """Returns `count` numbers of a text, from the last row of as many numbers; None without such a row.

    The numbers of a row are divided by commas, spaces or brackets: `[1, 2, 3, 4]`, `(1,2),(3,4)`, `37 62`. Of a longer
    row, the last brackets that together hold exactly `count` numbers give them, without such brackets its last `count`
    numbers: of `Image 1 (37, 62)` and 2, 37 and 62; of `1, 2, 3`, 2 and 3. The last 4096 characters are read; a number
    has at most 7 digits before and 6 after its point.
    """
    text, row = text[-4096:], rf"(?<![\w.-]){NUMBER}(?:[\s,()\[\]]+{NUMBER})*(?![\w]|\.\d)"
    rows = [match for match in re.finditer(row, text) if len(re.findall(NUMBER, match.group())) >= count]
    if not rows:
        return None
    begin, end = rows[-1].span()
    begin = len(text[:begin].rstrip(" \t\n,(["))  # the brackets before the first number
    groups: list[tuple[list[str], bool]] = []  # numbers between two brackets, whether the first one opens
    opener = False
    for piece in re.split(r"([()\[\]])", text[begin:end]):
        if piece and piece in "()[]":
            opener = piece in "(["
        elif numbers := re.findall(NUMBER, piece):
            groups.append((numbers, opener))
    return tuple(map(float, _last_bracketed(groups, count) or sum((numbers for numbers, _ in groups), [])[-count:]))


def _last_bracketed(groups: list[tuple[list[str], bool]], count: int) -> list[str]:
    """Returns the numbers of the last neighbouring groups in brackets that hold `count` numbers together; [] without
    such. groups: (numbers, whether they are in brackets)."""
    for last in range(len(groups), 0, -1):
        numbers: list[str] = []
        for found, bracketed in reversed(groups[:last]):
            numbers = found + numbers
            if not bracketed or len(numbers) > count:
                break
            if len(numbers) == count:
                return numbers
    return []


def as_stored(values, frame: str, sizes: Sizes | None) -> tuple[float, ...]:
    """Returns coordinates x, y, x, y ... converted to pixels of the stored image.

    Args:
      values: x and y by turns. sizes: of the image; needed unless the frame is "stored".
      frame: of the values, one of FRAMES: "stored" (pixels of the stored image), "thousandths" (of width and height),
        or "seen" (pixels of the image as the model sees it).

    Raises ValueError for another frame or missing sizes."""
    if frame not in FRAMES:
        raise ValueError(f"frame={frame!r}: choose from {', '.join(FRAMES)}")
    if frame == "stored":
        return tuple(values)
    if sizes is None:
        raise ValueError(f"frame={frame!r} needs the image's size, and the row has no such image")
    (height, width), whole = sizes.stored, (1000, 1000) if frame == "thousandths" else sizes.seen
    scale = width / whole[1], height / whole[0]
    return tuple(value * scale[i % 2] for i, value in enumerate(values))


def reference_box(answer) -> Box:
    """Returns the box (x1, y1, x2, y2) of an answer, with x1 <= x2 and y1 <= y2: four numbers in pixels of the stored
    image, or text, of which `last_numbers` takes four.

    Raises ValueError if there are not four, TypeError for an answer that is neither text nor a sequence of numbers."""
    found = last_numbers(answer, 4) if isinstance(answer, str) else tuple(map(float, answer))
    if found is None or len(found) != 4:
        raise ValueError(f"answer={answer!r}: expected a box, [x1, y1, x2, y2]")
    return ordered(found)


def ordered(box) -> Box:
    """Returns a box of two opposite corners as (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2."""
    a, b, c, d = box
    return min(a, c), min(b, d), max(a, c), max(b, d)


def iou(a: Box, b: Box) -> float:
    """Returns the area that two boxes share over the area that they cover together, in 0..1; 0 for two without area.

    a, b: (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2, of one unit."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    whole = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - shared
    return shared / whole if whole > 0 else 0.0
