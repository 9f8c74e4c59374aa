"""Chooses the data set of each position in a mixed order, by weights that may change with the step.

At every position each source's claim grows by its share, and the claim of the source that is served falls by 1.
Served is, of the sources whose claim is at least 1 / (2 K - 2), the one whose claim would reach 1 - 1 / (2 K - 2)
first (Tijdeman, "The chairman assignment problem", 1980). With K sources and constant weights, the rows served from a
source are then never 1 - 1 / (2 K - 2) or more off its share of any number of first positions, and never 2 rows off
over any window. Claims are integers, so every machine computes the same order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MOST = 10**6  # shares are integers whose sum is at most this
CHUNK = 4096  # positions computed at once


def weight_at(weight, step: int) -> float:
    """Returns a weight at a step.

    weight: a constant, or (step, weight) points in the order of their steps, between which the weight changes linearly;
    before the first and after the last it is constant."""
    if isinstance(weight, int | float):
        return float(weight)
    steps, values = zip(*weight, strict=True)
    return float(np.interp(step, steps, values))


def shares(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers in the proportion of the weights; [] if all weights are 0.

    If their sum would exceed MOST, they are rounded so that it is MOST: down, and up where the remainder is largest.
    A weight below 1 / MOST of the sum then counts as 1 / MOST, which the largest one gives up: only a weight of 0 gives
    no rows.
    """
    exact = [Fraction(str(w)) for w in weights]
    total = sum(exact)
    if not total:
        return []
    exact = [w / total for w in exact]
    whole = math.lcm(*(w.denominator for w in exact))
    if whole > MOST:
        whole = MOST
        floors = [int(w * whole) for w in exact]
        rest = sorted(range(len(exact)), key=lambda k: floors[k] - exact[k] * whole)[:whole - sum(floors)]
        out = [n + (k in rest) for k, n in enumerate(floors)]
        for k, w in enumerate(exact):
            if w and not out[k]:
                out[k] = 1
                out[out.index(max(out))] -= 1
        return out
    return [int(w * whole) for w in exact]


class Claims:
    """The rows owed to each of `count` sources, in units of 1 / `sum(shares)`; `serve` chooses the next source, once
    `scale` has set the shares."""

    def __init__(self, count: int):
        self.owed: list[float] = [0.0] * count
        self.whole = 1

    def scale(self, parts: list[int]) -> None:
        """Sets new shares (`shares` of the weights), whose sum may differ from before; what is owed stays, rounded
        to whole units, and the source with the largest share makes up for the rounding. parts: a share per source."""
        self.parts, whole = parts, sum(parts)
        self.owed = [float(round(c * whole / self.whole)) for c in self.owed]
        self.owed[int(np.argmax(parts))] -= sum(self.owed)  # rounding must not change the total
        self.whole = whole
        self.alive = [k for k, part in enumerate(parts) if part]
        margin = 2 * len(self.alive) - 2
        self.least = whole / margin if margin else whole
        self.due = whole - self.least if margin else whole

    def serve(self) -> int:
        """Chooses the source of the next position and books the row; returns its index."""
        best, first, owed, parts = -1, math.inf, self.owed, self.parts
        for k in self.alive:
            owed[k] += parts[k]
            if owed[k] >= self.least and (wait := (self.due - owed[k]) / parts[k]) < first:
                best, first = k, wait
        if best < 0:  # only while shares change: the most owed
            best = max(self.alive, key=lambda k: owed[k])
        owed[best] -= self.whole
        return best


class Stretch:
    """Source and row number of each position in a range, computed on demand. K is the number of sources.

    Args:
      start: first position of the range.
      rows_before: [K] rows each source gave before the range.
      parts: i -> shares at the i-th position of the range; the same list object while they do not change.
      period: number of positions after which the pattern repeats, each source having received its share; 0 for never.
    """

    def __init__(self, start: int, rows_before: Sequence[int], parts, period: int = 0):
        self.start, self.rows_before, self.parts, self.period = start, np.array(rows_before, np.int64), parts, period
        self._claims, self._counts, self._now = Claims(len(rows_before)), [0] * len(rows_before), None
        self._chunks: list[tuple[np.ndarray, np.ndarray, list[int]]] = []  # sources, rows, rows before the chunk

    def at(self, i: int) -> tuple[int, int]:
        """Returns (index of the source, rows it gave before) of the range's i-th position, from 0."""
        turns, i = divmod(i, self.period) if self.period else (0, i)
        self._reach(i + 1)
        sources, rows, _ = self._chunks[i // CHUNK]
        k = int(sources[i % CHUNK])
        each = int(self.parts(0)[k]) if self.period else 0
        return k, int(self.rows_before[k]) + turns * each + int(rows[i % CHUNK])

    def before(self, i: int) -> np.ndarray:
        """Returns the rows that each source gave before the range's i-th position, int64 [K]."""
        turns, i = divmod(i, self.period) if self.period else (0, i)
        self._reach(i + 1)
        each = np.array(self.parts(0), np.int64) * turns if self.period else 0
        sources, _, counts = self._chunks[i // CHUNK]
        return self.rows_before + each + counts + np.bincount(sources[:i % CHUNK], minlength=len(self.rows_before))

    def row(self, k: int, wanted: int) -> int | None:
        """Returns the position within the range at which source k gives its row number `wanted` (from 0, counted from
        the first range on); None if the source has no share here, or if the range does not repeat (period 0).
        """
        wanted -= int(self.rows_before[k])
        each = int(self.parts(0)[k])
        if not self.period or not each:
            return None
        self._reach(self.period)
        turns, left = divmod(wanted, each)
        pattern = np.concatenate([sources for sources, *_ in self._chunks])[:self.period]
        return turns * self.period + int(np.flatnonzero(pattern == k)[left])

    def _reach(self, size: int) -> None:
        while (known := len(self._chunks) * CHUNK) < size:
            sources, rows, counts = np.zeros(CHUNK, np.int16), np.zeros(CHUNK, np.int64), list(self._counts)
            for j in range(CHUNK):
                parts = self.parts(known + j)
                if parts is not self._now:
                    self._claims.scale(parts)
                    self._now = parts
                k = self._claims.serve()
                sources[j], rows[j] = k, self._counts[k]
                self._counts[k] += 1
            self._chunks.append((sources, rows, counts))


class Mix:
    """Maps a position to (source, index among that source's rows); a function of weights, rows per
    step and sizes alone.

    Where weights become constant (the end of a schedule, an exhausted source) claims restart from 0. Threads may share
    one.

    Args:
      weights: of each source a constant, or (step, weight) points with linear change between them (`weight_at`).
      per_step: positions per step: the step of position p is p // per_step.
      limits: total rows each source has to give.
      exhausted: what happens once a source has given them: 'repeat' ignores the limits, 'stop' ends the order where
        the source would be asked for one more, 'others' gives its weight to the other sources and ends the order when
        all are exhausted. If those that are not have no weight at a step, they have that of the next step at which one
        of them has; if there is none, the order ends.

    Attributes:
      end: one past the last position; None for an endless order.
      early: (step, later step) where first the sources that are left have no weight and are served by those of a later
        step; None without such a step.
    """

    def __init__(self, weights: Sequence, per_step: int, limits: Sequence[int], exhausted: str = "repeat"):
        self.weights, self.per_step, self.limits, self.exhausted = list(weights), per_step, list(limits), exhausted
        steps = [int(w[-1][0]) for w in weights if not isinstance(w, int | float)]
        self._settled = max(steps, default=0) * per_step
        self._parts: dict[tuple, list[int]] = {}
        self._lock = threading.RLock()  # rows are prepared by threads
        self._stretches: list[Stretch] = []
        self.end: int | None = None  # one past the last position, once known
        self.early: tuple[int, int] | None = None
        self._begin(0, [0] * len(weights))
        while self._follow():
            pass

    def place(self, position: int) -> tuple[int, int]:
        """Returns (index of the source, rows it gave before) of a position. Raises IndexError past the end."""
        with self._lock:
            stretch = self._of(position)
            return stretch.at(position - stretch.start)

    def rows_before(self, position: int) -> list[int]:
        """Returns the number of rows each source gave before a position, which may be the end of the order; raises
        IndexError for one further."""
        with self._lock:
            stretch = self._of(max(0, position - 1))
            return stretch.before(position - stretch.start).tolist()

    def _of(self, position: int) -> Stretch:
        if self.end is not None and position >= self.end:
            raise IndexError(position)
        return next(s for s in reversed(self._stretches) if s.start <= position)

    def _weights(self, step: int, rows_before) -> list[float]:
        closed = [self.exhausted == "others" and n >= most for n, most in zip(rows_before, self.limits, strict=True)]

        def at(step):
            return [0.0 if over else weight_at(w, step) for w, over in zip(self.weights, closed, strict=True)]

        if any(now := at(step)) or not any(closed):
            return now
        points = {int(s) for w in self.weights if not isinstance(w, int | float) for s, _ in w}
        for later in sorted({p for point in points for p in (point, point + 1) if p > step}):
            if any(at(later)):
                self.early = self.early or (step, later)
                return at(later)
        return now

    def unserved(self) -> list[int]:
        """Returns how many rows of each source do not come before the end of the order; zeros for an endless order."""
        if self.end is None:
            return [0] * len(self.limits)
        return [most - n for most, n in zip(self.limits, self.rows_before(self.end), strict=True)]

    def _begin(self, start: int, rows_before) -> bool:
        """Starts a range at `start`; returns False if no source has weight left."""
        if start >= self._settled:
            parts = shares(self._weights(self._settled // self.per_step, rows_before))
            if parts:
                self._stretches.append(Stretch(start, rows_before, lambda i: parts, sum(parts)))
            return bool(parts)

        known: dict[int, list[int]] = {}

        def at(i):
            step = (start + i) // self.per_step
            if step not in known:
                weights = shares([round(w, 6) or w for w in self._weights(step, rows_before)])
                weights = weights or [1] * len(self.weights)  # past the end of the order, which `_over` finds
                known[step] = self._parts.setdefault(tuple(weights), weights)
            return known[step]

        begins = any(self._weights(start // self.per_step, rows_before))
        if begins:
            self._stretches.append(Stretch(start, rows_before, at))
        return begins

    def _follow(self) -> bool:
        """Closes the last range if it ends, and starts the next one; returns False at the last range."""
        last = self._stretches[-1]
        over = self._over(last)
        if over is not None and self.exhausted == "stop":
            self.end = over
            return False
        if over is None:
            over = self._settled if last.start < self._settled else None
        if over is None:
            return False
        if not self._begin(over, last.before(over - last.start)):
            self.end = over
            return False
        return True

    def _over(self, last: Stretch) -> int | None:
        """Returns the position from which a source has no rows left (with 'stop': at which it would be asked for one
        more), or no source that has rows has weight; None without such a position.
        """
        if self.exhausted == "repeat":
            return None
        more = self.exhausted == "others"
        if last.period:
            candidates = [last.row(k, most - more) for k, most in enumerate(self.limits)
                     if last.rows_before[k] < most + (not more)]
            return min((last.start + i + more for i in candidates if i is not None), default=None)
        counts, known = np.array(last.rows_before), -1
        for i in range(self._settled - last.start):
            if more and (step := (last.start + i) // self.per_step) != known:
                known = step
                if not any(self._weights(step, last.rows_before)):
                    return last.start + i
            k, _ = last.at(i)
            counts[k] += 1
            if counts[k] == self.limits[k] + (not more):
                return last.start + i + more
        return None
