"""Thins out a curve without losing its extremes."""

from __future__ import annotations

import numpy as np


def kept_points(columns: list[np.ndarray], points: int) -> np.ndarray:
    """Returns the ascending int indices of the points to keep.

    Where all columns are constant these are the first and the last.

    Args:
      columns: float arrays [n] that are drawn over the same steps.
      points: about how many to keep. If there are more, the n points are cut into equal ranges; kept are the smallest
        and largest value of every column in each, the first point that is not finite, and the first and last point
        overall: no spike, dip or gap is lost, only its frequency.
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
    """Returns a number with five significant digits for the page, an int if it is whole and below 1e15; None if it is
    not finite."""
    if not np.isfinite(x):
        return None
    x = float(f"{x:.5g}")
    return int(x) if x == int(x) and abs(x) < 1e15 else x


def shorts(values) -> list:
    """Returns `short` of each value."""
    return [short(x) for x in values]
