"""Assigns the tokens and loss slots of a row to the ranks of mesh.cp, each of which has an equal part of the row.

The assignment follows from lengths alone; what a model computes does not depend on it (models.placement). Tokens move
in tiles, the same number to every rank: tiles with most work first, each to the rank with least work so far. The work
of a token is the number of keys it sees. So attention's work is even for any content of the row (several documents,
shared prompts, padding). A tile is whole in the kernels' blocks, so that a block holds neighbours.

Called by training.pack and the planner.

Legend: R rows, L row length.
"""

from __future__ import annotations

import math

import numpy as np

TILE = 128  # of attention's kernels; divided where a rank has fewer tokens or no whole number of tiles


def tile_of(length: int, ranks: int) -> int:
    """Returns the tokens of one tile in rows of `length` tokens: the greatest common divisor of a rank's part and
    TILE."""
    return math.gcd(length // ranks, TILE)


def count_keys(positions, real, windows) -> np.ndarray:
    """Counts the keys that each token sees, itself included, summed over layers: int, the shape of positions; 0 for
    padding.

    The count follows from the position, since a shared prompt precedes a token as its own prompt would.

    Args:
      positions: int, of the tokens, any shape.
      real: bool, same shape; False = padding.
      windows: the window of each layer, 0 = none.
    """
    seen = positions + 1
    counts = {w: windows.count(w) for w in dict.fromkeys(windows)}
    return np.where(real, sum(n * (np.minimum(seen, w) if w else seen) for w, n in counts.items()), 0)


def assign_tokens(pairs_RxL: np.ndarray, ranks: int) -> np.ndarray:
    """Returns [R, L] int: the new place of each token of a row; rank k has the places k L / ranks to (k + 1) L / ranks.

    Whole tiles (`tile_of`) are moved, the heaviest first, each to the rank with the least work that has room.

    Args:
      pairs_RxL: work of each token, of `count_keys`. ranks: divides L."""
    rows, length = pairs_RxL.shape
    tile = tile_of(length, ranks)
    each = length // ranks // tile  # tiles of a rank
    work = pairs_RxL.reshape(rows, -1, tile).sum(axis=2)
    order = np.argsort(-work, axis=1, kind="stable")
    rank, load, count = np.zeros(work.shape, np.int64), np.zeros((rows, ranks)), np.zeros((rows, ranks), np.int64)
    here = np.arange(rows)
    for tiles in order.T:  # one of each row
        least = np.argmin(np.where(count < each, load, np.inf), axis=1)
        rank[here, tiles] = least
        load[here, least] += work[here, tiles]
        count[here, least] += 1
    places = np.empty_like(rank)
    np.put_along_axis(places, np.argsort(rank, axis=1, kind="stable"), np.arange(work.shape[1])[None], axis=1)
    return (places[:, :, None] * tile + np.arange(tile)).reshape(rows, length)


def imbalance(pairs_RxL: np.ndarray, places_RxL: np.ndarray, ranks: int) -> float:
    """Returns the work of the busiest rank over the mean, if all ranks wait for it in each row; 1 = even.

    Args:
      pairs_RxL: work of each token. places_RxL: of `assign_tokens`. ranks: parts of a row.
    """
    moved = np.empty_like(pairs_RxL)
    np.put_along_axis(moved, places_RxL, pairs_RxL, axis=1)
    each = moved.reshape(len(moved), ranks, -1).sum(axis=2)
    return float(each.max(axis=1).sum() / max(each.mean(axis=1).sum(), 1e-12))


def slots(numbers, counts, length: int, ranks: int) -> np.ndarray:
    """Returns the places of loss slots in rows of `length`, in order and front-packed in each rank's part: ceil(counts
    / ranks) of each rank, fewer or none of the last ones.

    Args:
      numbers: 0, 1, ... of each slot in its row. counts: slots of that row, at most `length`. ranks: parts of a row."""
    each = -(-counts // ranks)
    return numbers // each * (length // ranks) + numbers % each
