"""Which data set each position of a mixed order takes, by weights that may change with the step.

Every position adds to each source's claim its share and takes 1 from the claim of the source that is served. Who is
served: of the sources whose claim is at least 1 / (2 K - 2), the one whose claim would be the first to reach
1 - 1 / (2 K - 2) (Tijdeman, "The chairman assignment problem", 1980). With K sources and constant weights, what a
source was given is then never 1 - 1 / (2 K - 2) rows or more off its share of any number of first positions, and never
2 rows off over any window. Claims are integers, so that every machine comes to the same order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MOST = 10**6  # shares are held as integers that add up to at most this
CHUNK = 4096  # positions worked out at once


def weight_at(weight, step: int) -> float:
    """A weight at a step: a number, or (step, weight) points with straight lines between them, constant outside."""
    if isinstance(weight, int | float):
        return float(weight)
    steps, values = zip(*weight, strict=True)
    return float(np.interp(step, steps, values))


def shares(weights: Sequence[float]) -> list[int]:
    """Integers in the proportion of weights, as small as can be; rounded to millionths where that takes more. [] where
    all weights are 0."""
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
        return [n + (k in rest) for k, n in enumerate(floors)]
    return [int(w * whole) for w in exact]


class Claims:
    """What each source is owed, in parts of `sum(shares)`; `serve` says whose turn it is."""

    def __init__(self, count: int):
        self.owed, self.whole = [0.0] * count, 1

    def scale(self, parts: list[int]) -> None:
        """Takes shares whose sum may be another than before."""
        self.parts, whole = parts, sum(parts)
        self.owed = [round(c * whole / self.whole) for c in self.owed]
        self.owed[int(np.argmax(parts))] -= sum(self.owed)  # rounding must owe nobody anything
        self.whole = whole
        self.alive = [k for k, part in enumerate(parts) if part]
        margin = 2 * len(self.alive) - 2
        self.least = whole / margin if margin else whole
        self.due = whole - self.least if margin else whole

    def serve(self) -> int:
        """The source of the next position."""
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
    """A stretch of positions, worked out as far as somebody asked: source and row number of each.

    parts(i): shares at its i-th position (a list that stays the same object while they do). period: after so many
    positions all repeats, and each source has been given its share of them (0: never). given: rows of each source
    before the stretch.
    """

    def __init__(self, start: int, given: Sequence[int], parts, period: int = 0):
        self.start, self.given, self.parts, self.period = start, np.array(given, np.int64), parts, period
        self._claims, self._counts, self._now = Claims(len(given)), [0] * len(given), None
        self._chunks: list[tuple[np.ndarray, np.ndarray, list[int]]] = []  # sources, rows, rows given before the chunk

    def at(self, i: int) -> tuple[int, int]:
        """(source, how many rows it had been given before) of the stretch's i-th position."""
        turns, i = divmod(i, self.period) if self.period else (0, i)
        self._reach(i + 1)
        sources, rows, _ = self._chunks[i // CHUNK]
        k = int(sources[i % CHUNK])
        each = int(self.parts(0)[k]) if self.period else 0
        return k, int(self.given[k]) + turns * each + int(rows[i % CHUNK])

    def before(self, i: int) -> np.ndarray:
        """[K] rows that each source was given before the stretch's i-th position."""
        turns, i = divmod(i, self.period) if self.period else (0, i)
        self._reach(i + 1)
        each = np.array(self.parts(0), np.int64) * turns if self.period else 0
        sources, _, counts = self._chunks[i // CHUNK]
        return self.given + each + counts + np.bincount(sources[:i % CHUNK], minlength=len(self.given))

    def row(self, k: int, wanted: int) -> int | None:
        """The position in the stretch at which source k is given its row number `wanted`; None where it never is."""
        wanted -= int(self.given[k])
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
    """position -> (source, which of its rows in turn): a function of the weights, the rows per step and the sizes
    alone.

    weights: of K sources, each as `weight_at` takes it; the step of position p is p // per_step. limits: rows that each
    source has to give in all. exhausted: what happens when one has given them: 'repeat' (limits do not count), 'stop'
    (the order ends where it would be asked for more) or 'others' (its weight goes to the others; the order ends when
    all have given theirs). Where weights settle (the end of a schedule, a source that is exhausted) claims begin anew.
    """

    def __init__(self, weights: Sequence, per_step: int, limits: Sequence[int], exhausted: str = "repeat"):
        self.weights, self.per_step, self.limits, self.exhausted = list(weights), per_step, list(limits), exhausted
        steps = [int(w[-1][0]) for w in weights if not isinstance(w, int | float)]
        self._settled = max(steps, default=0) * per_step
        self._parts: dict[tuple, list[int]] = {}
        self._lock = threading.RLock()  # rows are prepared by threads
        self._stretches: list[Stretch] = []
        self.end: int | None = None  # behind the last position, once known
        self._begin(0, [0] * len(weights))
        while self._follow():
            pass

    def place(self, position: int) -> tuple[int, int]:
        """(source, how many rows it gave before). IndexError behind the end."""
        with self._lock:
            stretch = self._of(position)
            return stretch.at(position - stretch.start)

    def given(self, position: int) -> list[int]:
        """Rows that each source gave before a position."""
        with self._lock:
            stretch = self._of(max(0, position - 1))
            return stretch.before(position - stretch.start).tolist()

    def _of(self, position: int) -> Stretch:
        if self.end is not None and position >= self.end:
            raise IndexError(position)
        return next(s for s in reversed(self._stretches) if s.start <= position)

    def _weights(self, step: int, given) -> list[float]:
        closed = [self.exhausted == "others" and n >= most for n, most in zip(given, self.limits, strict=True)]
        return [0.0 if over else weight_at(w, step) for w, over in zip(self.weights, closed, strict=True)]

    def _begin(self, start: int, given) -> bool:
        """A stretch from `start` on; False where nobody has a weight any more."""
        if start >= self._settled:
            parts = shares(self._weights(self._settled // self.per_step, given))
            if parts:
                self._stretches.append(Stretch(start, given, lambda i: parts, sum(parts)))
            return bool(parts)

        known: dict[int, list[int]] = {}

        def at(i):
            step = (start + i) // self.per_step
            if step not in known:
                found = shares([round(w, 6) for w in self._weights(step, given)])
                known[step] = self._parts.setdefault(tuple(found), found)
            return known[step]

        if at(0):
            self._stretches.append(Stretch(start, given, at))
        return bool(at(0))

    def _follow(self) -> bool:
        """Closes the last stretch where it does not go on for ever, and begins the next; False at the last one."""
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
        """The position from which on a source has nothing left ('stop': at which it would be asked for more)."""
        if self.exhausted == "repeat":
            return None
        more = self.exhausted == "others"
        if last.period:
            found = [last.row(k, most - more) for k, most in enumerate(self.limits)
                     if last.given[k] < most + (not more)]
            return min((last.start + i + more for i in found if i is not None), default=None)
        counts = np.array(last.given)
        for i in range(self._settled - last.start):
            k, _ = last.at(i)
            counts[k] += 1
            if counts[k] == self.limits[k] + (not more):
                return last.start + i + more
        return None
