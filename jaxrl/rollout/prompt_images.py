"""The images of prompts for the embedded sampler: what identifies them, and rows of patches for a prefill call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.models.vision.config import VisionConfig
from jaxrl.models.vision.positions import Placed, image_rows, rotary_positions
from jaxrl.types import Images, Pictures


def identity(pictures: Pictures | None) -> tuple:
    """Returns what differs between prompts of the same tokens and other images, or images of another source."""
    return () if pictures is None else (pictures.patches, pictures.numbers.tobytes(), pictures.firsts.tobytes())


def prompt_images(vision: VisionConfig, pictures: Sequence[Pictures | None], lengths: Sequence[int], width: int,
                  patches: int) -> Images:
    """Returns the images of right-padded prompts, and the positions of all their tokens.

    Args:
      vision: of the model.
      pictures, lengths: images and tokens of each prompt.
      width: tokens of a row.
      patches: for which a row has room.
    """
    merge, placed = vision.merge, []
    rotary = np.zeros((len(lengths), width, 3), np.int32)
    for row, (own, length) in enumerate(zip(pictures, lengths, strict=True)):
        firsts, grids, pixels = ((), (), ()) if own is None else (own.firsts, own.grids, own.patches(own.numbers))
        rotary[row, :length] = rotary_positions(length, firsts, grids, merge)
        placed += [Placed(row, first + np.arange(len(values) // merge**2), grid, values)
                   for first, grid, values in zip(firsts, grids, pixels, strict=True)]
    return image_rows(placed, rotary, patches, merge, vision.channels * vision.patch**2, vision.window)
