"""Which tokens of a row, and which of its scored slots, each rank of mesh.cp has: one of the equal parts that a row is
cut into. Layout decides it from lengths alone; what a model computes does not depend on it (models.placement).

Tokens go in tiles, every rank as many: the tiles with most work first, each to the rank that has least so far. The work
of a token is the number of keys it sees. So whatever stands in the row (several documents, shared prompts, padding),
attention's work is even; a tile is whole in the kernels' blocks, so that a block holds neighbours.

Legend: R rows, L row length.
"""

from __future__ import annotations

import math

import numpy as np

TILE = 128  # of attention's kernels; divided where a rank has fewer tokens or no whole number of tiles


def tile_of(length: int, ranks: int) -> int:
    return math.gcd(length // ranks, TILE)


def count_keys(positions, real, windows) -> np.ndarray:
    """Keys that each token sees, itself included, summed over layers; 0 for padding. A shared prompt is behind it as
    its own would be, so that its position says it.

    Args:
      positions, real: of the tokens, any shape.
      windows: the window of each layer, 0 = none.
    """
    seen = positions + 1
    counts = {w: windows.count(w) for w in dict.fromkeys(windows)}
    return np.where(real, sum(n * (np.minimum(seen, w) if w else seen) for w, n in counts.items()), 0)


def assign_tokens(pairs_RxL: np.ndarray, ranks: int) -> np.ndarray:
    """[R, L]: where each token of a row goes; rank k has the places k L / ranks to (k + 1) L / ranks."""
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
    """Work of the busiest rank over the mean, when all ranks wait for it in each row: 1 is even."""
    moved = np.empty_like(pairs_RxL)
    np.put_along_axis(moved, places_RxL, pairs_RxL, axis=1)
    each = moved.reshape(len(moved), ranks, -1).sum(axis=2)
    return float(each.max(axis=1).sum() / max(each.mean(axis=1).sum(), 1e-12))


def slots(numbers, counts, length: int, ranks: int) -> np.ndarray:
    """Where scored slots go: as many to each rank, in their order, front-packed.

    Args:
      numbers: 0, 1, ... of each slot in its row. counts: slots of that row, at most `length`.
    """
    each = -(-counts // ranks)
    return numbers // each * (length // ranks) + numbers % each
