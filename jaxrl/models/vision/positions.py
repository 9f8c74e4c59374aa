"""Where images and tokens lie, in numpy on the host: positions of tokens, rows and columns of patches, rows of patches.

A token of text has three equal positions. An image whose first token has position p has (p, p + row, p + column), rows
and columns being those of its tokens; the next token has p + the larger of the two sides. Where the tokens of an image
see each other (VisionConfig.two_way), every token has one position, its index, and a reach.

A video whose frames follow each other without text (Qwen2-VL, Qwen2.5-VL) is several images that begin at one p, each
delayed in time; the next token comes after the largest position of any of the three. Qwen2-VL's paper, vLLM 0.32 and
transformers up to 5.2 count so; transformers 5.3 to 5.24 take p + the larger side, also where a video lasts longer.

Legend: R rows, L tokens per row, P patches per row, m patches per side of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxrl.types import Images


def rotary_positions(length: int, firsts: Iterable[int], grids: Iterable[Iterable[int]], merge: int,
                     delays: Iterable[int] | None = None) -> np.ndarray:
    """Returns positions by (time, row, column) of a sequence, [length, 3] int32.

    Args:
      length: tokens of the sequence, those of its images included.
      firsts: index of the first token of each image, rising.
      grids: (rows, columns) of patches of each image, multiples of `merge`.
      merge: m, patches per side of a token.
      delays: as Pictures.delays: positions in time by which a frame of a video is behind the first of its video; below
        0 = not a further frame. None = each image stands alone.

    Raises AssertionError for an image that is not within the sequence, and for a further frame that does not follow the
    one before it. Raises ValueError if firsts, grids and delays differ in length.
    """
    steps, inside, end = np.ones(length, np.int64), np.zeros((length, 3), np.int64), 0
    for first, (grid, delay) in zip(firsts, _with_delays(grids, delays), strict=True):
        height, width = (side // merge for side in grid)
        count = height * width
        assert 0 <= first and first + count <= length, f"an image of {count} tokens at {first} of {length}"
        if delay >= 0:
            assert first == end, f"frames of a video end at token {end}, the next begin at {first}"
            steps[end - 1] = 0
        end = first + count
        steps[first:end] = 0
        steps[end - 1] = max(height, width, delay + 1)
        inside[first:end, 0] = max(delay, 0)
        inside[first:end, 1:] = np.indices((height, width)).reshape(2, -1).T
    start = np.cumsum(steps) - steps
    return (start[:, None] + inside).astype(np.int32)


def _with_delays(grids: Iterable[Iterable[int]], delays: Iterable[int] | None) -> Iterable[tuple[Iterable[int], int]]:
    if delays is None:
        return ((grid, -1) for grid in grids)
    return zip(grids, delays, strict=True)


def reach_positions(length: int, firsts: Iterable[int], grids: Iterable[Iterable[int]], merge: int) -> np.ndarray:
    """Returns the last position that each token of a sequence sees, [length] int32: that of the last token of its
    image, its own elsewhere.

    length, firsts, grids, merge as in `rotary_positions`: tokens of the sequence, first token and (rows, columns) of
    patches of each image, patches per side of a token. Raises AssertionError for an image that is not within the
    sequence.
    """
    out = np.arange(length, dtype=np.int32)
    for first, (height, width) in zip(firsts, grids, strict=True):
        count = height * width // merge**2
        assert 0 <= first and first + count <= length, f"an image of {count} tokens at {first} of {length}"
        out[first:first + count] = first + count - 1
    return out


def token_positions(two_way: bool, length: int, firsts, grids, merge: int, delays=None) -> np.ndarray:
    """Returns what a sequence's images change about its tokens' positions: `reach_positions` [length] int32 for a tower
    whose images are read both ways (`two_way`), else `rotary_positions` [length, 3] int32. Further arguments as there.
    """
    if two_way:
        return reach_positions(length, firsts, grids, merge)
    return rotary_positions(length, firsts, grids, merge, delays)


def rotary_shift(grids: Iterable[Iterable[int]], merge: int, delays: Iterable[int] | None = None) -> int:
    """Returns the position of text behind images of these grids, minus its index: 0 or below, but for long videos.

    grids: (rows, columns) of patches of each image. merge: patches per side of a token. delays: as in
    `rotary_positions`. Raises ValueError if there is not one for each image.
    """
    shift = step = 0
    for (height, width), delay in _with_delays(grids, delays):
        shift -= height * width // merge**2 + (step if delay >= 0 else 0)
        step = max(height // merge, width // merge, delay + 1)
        shift += step
    return int(shift)


def patch_places(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Returns (row, column, rows, columns) of an image's patches, [N, 4] int32, in the order of data.images.resize.cut:
    the merge x merge patches of one token after those of another.

    grid: (rows, columns) of patches. merge: patches per side of a token; must divide both.
    """
    height, width = grid
    at = np.indices(grid).reshape(2, height // merge, merge, width // merge, merge)
    at = at.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    return np.concatenate([at, np.broadcast_to(np.array(grid), at.shape)], axis=1).astype(np.int32)


def window_order(grid: tuple[int, int], merge: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (an image's tokens [F], window after window; the window of each [F], from 0, rising), as int. Tokens are
    numbered by row and column; windows are squares of `window` tokens per side, cut at the image's right and lower
    border.

    grid: (rows, columns) of patches. merge: patches per side of a token.
    """
    height, width = (side // merge for side in grid)
    row, column = np.indices((height, width)).reshape(2, -1) // window
    number = row * -(-width // window) + column
    order = np.argsort(number, kind="stable")
    return order, number[order]


class Placed(NamedTuple):
    """An image of a packed row.

    Attributes:
      row: number of the row.
      columns: int, indices of the image's tokens in the row.
      grid: (rows, columns) of its patches.
      patches: [patches, width] uint8 pixels, or [F, size] features (see `feature_rows`).
    """

    row: int
    columns: np.ndarray
    grid: tuple[int, int]
    patches: np.ndarray


def image_rows(placed: Iterable[Placed], positions_RxL: np.ndarray, patches: int, merge: int, width: int,
               window: int = 0) -> Images:
    """Puts images into rows of patches, one behind the other, and of each image one window behind the other.

    Args:
      placed: the images of all rows.
      positions_RxL: int32, of the tokens, as `token_positions` returns those of a sequence: [R, L, 3] or [R, L].
      patches: P, a multiple of m * m.
      merge: m, patches per side of a token.
      width: numbers of a patch.
      window: tokens per side of a window, 0 = the tower has none.

    Returns Images in numpy (the dtypes stand there); patches behind a row's images are 0, in segment 0.

    Raises ValueError for a row whose images have more patches than P.
    """
    count, length = positions_RxL.shape[:2]
    out = Images(patches=np.zeros((count, patches, width), np.uint8), places=np.zeros((count, patches, 4), np.int32),
                 segments=np.zeros((count, patches), np.int32), inserts=np.full((count, length), -1, np.int32),
                 **{"rotary" if positions_RxL.ndim == 3 else "reach": positions_RxL},
                 windows=np.zeros((count, patches), np.int32) if window else None)
    used, number, windows = (np.zeros(count, np.int64) for _ in range(3))
    for row, columns, grid, own in placed:
        begin, end = used[row], used[row] + len(own)
        if end > patches:
            raise ValueError(f"row {row} has images of {end} patches or more, a row has room for {patches}")
        number[row] += 1
        places, features = patch_places(grid, merge), np.arange(begin, end, merge**2) // merge**2
        if window:
            order, of_window = window_order(grid, merge, window)
            own, places = (x.reshape(len(order), -1)[order].reshape(x.shape) for x in (own, places))
            out.windows[row, begin:end] = windows[row] + 1 + np.repeat(of_window, merge**2)
            windows[row] += of_window[-1] + 1
            features[order] = features.copy()
        out.patches[row, begin:end], out.places[row, begin:end] = own, places
        out.segments[row, begin:end] = number[row]
        out.inserts[row, columns] = features
        used[row] = end
    return out


def feature_rows(placed: Iterable[Placed], positions_RxL: np.ndarray, features: int) -> Images:
    """Puts images whose features are known into rows of features, in the order of their tokens.

    Args:
      placed: the images of all rows, at least one; patches are the features [F, size] of one, of any float dtype.
      positions_RxL: int32 [R, L, 3] or [R, L], as in `image_rows`.
      features: that a row has room for.

    Returns Images with `features` [R, features, size] in the images' dtype, 0 behind a row's images, and without
    patches.

    Raises ValueError for a row whose images have more.
    """
    placed = list(placed)
    count, length = positions_RxL.shape[:2]
    values = np.zeros((count, features, placed[0].patches.shape[1]), placed[0].patches.dtype)
    inserts, used = np.full((count, length), -1, np.int32), np.zeros(count, np.int64)
    for row, columns, _, own in placed:
        begin, end = used[row], used[row] + len(own)
        if end > features:
            raise ValueError(f"row {row} has images of {end} features or more, a row has room for {features}")
        values[row, begin:end], inserts[row, columns], used[row] = own, np.arange(begin, end), end
    return Images(None, None, None, inserts, features=values,
                  **{"rotary" if positions_RxL.ndim == 3 else "reach": positions_RxL})
