"""The images of prompts for the embedded sampler: what identifies them, and rows of patches for a prefill call or for
new tokens of conversations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.models.vision.config import VisionConfig
from jaxrl.models.vision.positions import Placed, image_rows, rotary_positions, token_positions
from jaxrl.types import Images, Pictures


def identity(pictures: Pictures | None, length: int | None = None) -> tuple:
    """Returns a hashable value that differs between prompts of equal tokens and other images, or images of another
    source.

    length: count only the images among the first `length` tokens; None = all. () without images."""
    own = slice(None) if pictures is None or length is None else pictures.firsts < length
    if pictures is None or not len(pictures.firsts[own]):
        return ()
    of_time = () if pictures.delays is None else (pictures.delays[own].tobytes(),)
    return pictures.patches, pictures.numbers[own].tobytes(), pictures.firsts[own].tobytes(), *of_time


def rows_of_slots(of: Sequence[int], rows: int, shards: int, slots: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Assigns slots to the rows of one call: returns ([(index into `of`, row)], indices left for further calls).

    Each data shard has an equal part of the call's rows and of all slots, and a slot gets a row of its own shard.

    Args:
      of: numbers of the slots to place. rows: number of rows of the call, a multiple of `shards`. shards: number of
        data shards. slots: number of all slots."""
    free = [list(range(i, i + rows // shards)) for i in range(0, rows, rows // shards)]
    taken, left = [], []
    for i, slot in enumerate(of):
        own = free[slot * shards // slots]
        if own:
            taken.append((i, own.pop(0)))
        else:
            left.append(i)
    return taken, left


def suffix_images(vision: VisionConfig, suffixes: Sequence[tuple[int, Pictures, int, int]], rows: int,
                  rooms: Sequence[int]) -> Images:
    """Returns the images among new tokens of conversations, and the positions of these tokens: an Images with `rotary`
    [rows, L, 3] int32 and `inserts` [rows, L] int32, L tokens of the longest suffix, and padding of 0 and -1.

    An image counts as new if its first token is; positions are those in the whole prompt.

    Args:
      vision: config of the model's tower, one without `two_way`.
      suffixes: of each conversation (row of the result, images of the whole prompt, index of the first new token, index
        after the last).
      rows: number of rows of the result.
      rooms: ascending numbers of patches per row, of which the first that is enough is taken; the last must be.
    """
    merge, placed, used = vision.merge, [], np.zeros(rows, int)
    rotary = np.zeros((rows, max(stop - start for _, _, start, stop in suffixes), 3), np.int32)
    for row, pictures, start, stop in suffixes:
        whole = rotary_positions(stop, pictures.firsts, pictures.grids, merge, pictures.delays)
        rotary[row, :stop - start] = whole[start:]
        new = np.flatnonzero(pictures.firsts >= start)
        for i, values in zip(new, pictures.patches(pictures.numbers[new]), strict=True):
            columns = pictures.firsts[i] - start + np.arange(len(values) // merge**2)
            placed.append(Placed(row, columns, pictures.grids[i], values))
            used[row] += len(values)
    room = next(n for n in rooms if n >= used.max())
    return image_rows(placed, rotary, room, merge, vision.patch_numbers, vision.window)


def prompt_images(vision: VisionConfig, pictures: Sequence[Pictures | None], lengths: Sequence[int], width: int,
                  patches: int) -> Images:
    """Returns the images of B right-padded prompts, and the positions of all their tokens: an Images with `rotary`
    [B, width, 3] int32, or `reach` [B, width] int32 for a tower with `two_way`; padding has 0.

    Args:
      vision: config of the model's tower.
      pictures: images of each prompt, None for one without.
      lengths: number of tokens of each prompt.
      width: tokens of a row, padding included.
      patches: number of patches for which a row has room, in whole image tokens.

    Raises ValueError where a prompt's images have more patches.
    """
    merge, placed = vision.merge, []
    of_tokens = np.zeros((len(lengths), width, *(() if vision.two_way else (3,))), np.int32)
    for row, (own, length) in enumerate(zip(pictures, lengths, strict=True)):
        firsts, grids, pixels, delays = ((), (), (), ()) if own is None else (
            own.firsts, own.grids, own.patches(own.numbers), own.delays)
        of_tokens[row, :length] = token_positions(vision.two_way, length, firsts, grids, merge, delays)
        placed += [Placed(row, first + np.arange(len(values) // merge**2), grid, values)
                   for first, grid, values in zip(firsts, grids, pixels, strict=True)]
    return image_rows(placed, of_tokens, patches, merge, vision.patch_numbers, vision.window)


def suffix_pieces(images: Images, suffixes: Sequence[tuple[int, int, int, np.ndarray]], shape: tuple[int, int],
                  slots: int, length: int):
    """Yields ((tokens, positions, slots) of an extend call, inserts, rotary) until all new tokens are run.

    tokens, positions and inserts are int32 [K, L], rotary int32 [K, L, 3], slots int32 [K]. Padding tokens have
    positions from `length` on and inserts -1; a row without tokens has slot `slots`. Programs.extend drops both.

    Args:
      images: of `suffix_images`, with the rows that `suffixes` name.
      suffixes: (row, slot, first position, tokens [n] int32) of each conversation.
      shape: (K, L) of a call.
      slots, length: number of slots and of positions of the cache.
    """
    rows, width = shape
    for begin in range(0, images.inserts.shape[1], width):
        tokens, which = np.zeros(shape, np.int32), np.full(rows, slots, np.int32)
        positions = np.tile(length + np.arange(width, dtype=np.int32), (rows, 1))
        inserts, rotary = np.full(shape, -1, np.int32), np.zeros((*shape, 3), np.int32)
        for row, slot, start, new in suffixes:
            if len(part := new[begin:begin + width]):
                tokens[row, :len(part)], which[row] = part, slot
                positions[row, :len(part)] = start + begin + np.arange(len(part))
        part = images.inserts[:, begin:begin + width]
        inserts[:, :part.shape[1]], rotary[:, :part.shape[1]] = part, images.rotary[:, begin:begin + width]
        yield (tokens, positions, which), inserts, rotary
