"""Which slots of a cache hold the same prompt, so that a kernel reads it once for several of them.

The cache itself does not change: every slot keeps a whole copy. Slots of one prompt are put into tiles, of which a
kernel reads the first slot's copy. A slot alone is a tile too, so that where its positions are cut depends on its
prompt's length alone, and its numbers not on its neighbours.

Legend: S slots, W slots per tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Slots of a tile, W. On Hopper the query heads of a group, padded to 8, times 8 slots fill the 64 rows of a product
# (models with more than 8 query heads per key-value head take several products). On TPUs a tile multiplies W times all
# query heads: 96 to 256 rows with usual models, about where products take as long as reading what they multiply (v5e:
# 240 operations per byte).
WIDTH = 8


class Shared(NamedTuple):
    """Tiles of up to W slots that share a prompt, made by the host once per chunk of decoding (`share`).

    S rows, some of which may be empty."""

    tiles: Any   # [S, W] int32: slots of one prompt, those that there are first; -1 = none. No slot is in two tiles
    length: Any  # [S] int32: positions, from 0, at which all slots of the tile have the same keys and values
    row: Any     # [S] int32: the tile of each slot, -1 = none
    place: Any   # [S] int32: its place in that tile


def share(prompts, lengths, shards: int = 1) -> Shared:
    """Returns the Shared of slots with equal prompts, as numpy arrays: tiles of up to WIDTH slots, the longest prompts
    of a part first, which kernels start with.

    Args:
      prompts: per slot what identifies its prompt's keys and values (hashable), None where it is idle.
      lengths: per slot the positions that it shares with the slots of the same prompt.
      shards: parts of equal size that the slots are split into over devices. Tiles stay inside a part, lie in its rows,
        and count its slots from 0, as slots count its rows."""
    count = len(prompts)
    out = Shared(np.full((count, WIDTH), -1, np.int32), np.zeros(count, np.int32), np.full(count, -1, np.int32),
                 np.zeros(count, np.int32))
    part = count // shards
    for start in range(0, count, part):
        groups: dict = {}
        for slot in range(start, start + part):
            if prompts[slot] is not None:
                groups.setdefault(prompts[slot], []).append(slot)
        tiles = [slots[i:i + WIDTH] for slots in groups.values() for i in range(0, len(slots), WIDTH)]
        tiles.sort(key=lambda slots: -lengths[slots[0]])
        for row, slots in enumerate(tiles, start):
            out.tiles[row, :len(slots)] = np.array(slots) - start
            out.length[row] = lengths[slots[0]]
            out.row[slots], out.place[slots] = row - start, np.arange(len(slots))
    return out
