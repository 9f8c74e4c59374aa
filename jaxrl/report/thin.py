"""Fewer points of a curve without losing what stands out of it."""

from __future__ import annotations

import numpy as np


def kept(columns: list[np.ndarray], points: int) -> np.ndarray:
    """Indices, ascending, of the points that stay.

    Args:
      columns: arrays [n] that are drawn over the same steps.
      points: about how many may stay. With more, the n points are cut into equal stretches, of each of which the
        smallest and the largest value of every column stay and the first point that is not finite, and of all the first
        and the last point: no spike, no dip and no gap is lost, only how often they came.
    """
    n = len(columns[0])
    if all(np.array_equal(c, np.full(n, c[0]), equal_nan=True) for c in columns if n):  # a line has two ends
        return np.unique([0, n - 1]) if n else np.zeros(0, int)
    if n <= points:
        return np.arange(n)
    edges = np.unique(np.linspace(0, n, max(2, points // (2 * len(columns))) + 1).astype(int))
    keep = {0, n - 1}
    for a, b in zip(edges, edges[1:], strict=False):
        for column in columns:
            part = column[a:b]
            fine = np.flatnonzero(np.isfinite(part))
            if len(fine):
                keep |= {a + fine[np.argmin(part[fine])], a + fine[np.argmax(part[fine])]}
            if len(fine) < len(part):
                keep.add(a + np.flatnonzero(~np.isfinite(part))[0])
    return np.array(sorted(keep))


def short(x: float) -> float | int | None:
    """A number of five digits for the page; None for what is not finite."""
    if not np.isfinite(x):
        return None
    x = float(f"{x:.5g}")
    return int(x) if x == int(x) and abs(x) < 1e15 else x


def shorts(values) -> list:
    return [short(x) for x in values]
