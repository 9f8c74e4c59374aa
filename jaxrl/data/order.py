"""Orders in which one data set gives its rows: row numbers by how many it gave before.

`endless` is the shuffle of every run. The others are curricula: `Epochs` from easy to hard, or without rows that are
solved too often or too seldom; `Windows` with other rows from some steps on.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.errors import ConfigError, RunStopped

WINDOW = re.compile(r"(\d+):(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")


def endless(rows: int, seed):
    """Row numbers 0 .. rows - 1 by position, epoch after epoch, each in an order of its own. seed: an integer or
    several; False: in file order."""
    import grain

    order = grain.MapDataset.range(rows)
    if seed is not False:
        # Grain adds the epoch to the seed: spread seeds out, or seed 1 would begin with the second epoch of seed 0.
        order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return order.repeat(None)


def windows(texts: Sequence[str]) -> list[tuple[int, float, float]]:
    """(first step, lowest, highest) of entries such as '200:2..5'. Raises ValueError naming what is wrong."""
    out = []
    for text in texts:
        found = WINDOW.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is not 'step:low..high', for example '200:2..5'")
        step, low, high = int(found[1]), float(found[2]), float(found[3])
        if low > high:
            raise ValueError(f"{text!r}: {low:g} is above {high:g}")
        if step <= out[-1][0] if out else step:
            raise ValueError(f"{text!r}: the first window begins at step 0, and each later than the one before")
        out.append((step, low, high))
    return out


class Epochs:
    """Rows epoch after epoch, each epoch in an order drawn from (seed, epoch).

    difficulty: [rows], sorts an epoch from low to high, equal ones in the order drawn. keep() -> [rows] bool: asked
    when an epoch begins (when its first row is asked for) which rows it has; epochs that have begun are a part of the
    run's state. None: all, and a position alone tells its row.
    """

    def __init__(self, rows: int, seed, difficulty=None, keep: Callable[[], np.ndarray] | None = None):
        self.rows, self._seed, self._difficulty, self._keep = rows, seed, difficulty, keep
        self.begun: list[tuple[int, int, np.ndarray]] = [(0, 0, np.ones(rows, bool))]  # number, first position, rows
        self._orders: dict[int, np.ndarray] = {}

    def __getitem__(self, position: int) -> int:
        if self._keep is None:
            number, at = divmod(position, self.rows)
            return int(self._order(number, None)[at])
        while position >= self._end():
            number, _, _ = self.begun[-1]
            kept = self._keep()
            if not kept.any():
                raise RunStopped("no row is left: the pass rate of every one lies outside data.pass_rate_min and "
                                 "pass_rate_max; widen them")
            self.begun.append((number + 1, self._end(), kept))
        number, first, kept = next(e for e in reversed(self.begun) if e[1] <= position)
        return int(self._order(number, kept)[position - first])

    def _end(self) -> int:
        _, first, kept = self.begun[-1]
        return first + int(kept.sum())

    def forget(self, position: int) -> None:
        """Nothing before this position will be asked for again."""
        while len(self.begun) > 1 and self.begun[1][1] <= position:
            self._orders.pop(self.begun.pop(0)[0], None)

    def _order(self, number: int, kept) -> np.ndarray:
        order = self._orders.get(number)
        if order is None:  # threads may come here at once, and find the same
            if len(self._orders) > 2:
                self._orders.clear()
            order = np.arange(self.rows)
            if self._seed is not False:
                order = np.random.default_rng([*np.atleast_1d(self._seed), number]).permutation(self.rows)
            order = order if kept is None else order[kept[order]]
            if self._difficulty is not None:
                order = order[np.argsort(self._difficulty[order], kind="stable")]
            self._orders[number] = order
        return order


class Windows:
    """Rows whose difficulty lies in a window that moves: from each stage's first position on only its rows are given,
    shuffled, epoch after epoch.

    stages: (first position, lowest, highest), the first one at 0. Raises ConfigError for a window without rows.
    """

    def __init__(self, difficulty: np.ndarray, seed, stages: Sequence[tuple[int, float, float]],
                 name: str = "the data"):
        self._begins, self._rows, self._orders = [], [], []
        for number, (first, low, high) in enumerate(stages):
            inside = np.flatnonzero((difficulty >= low) & (difficulty <= high))
            if not len(inside):
                raise ConfigError(f"data.difficulty_window: no row of {name} lies in {low:g}..{high:g}; difficulties "
                                  f"there are {difficulty.min():g} to {difficulty.max():g}")
            self._begins.append(first)
            self._rows.append(inside)
            self._orders.append(endless(len(inside), seed is not False and [*np.atleast_1d(seed).tolist(), number]))

    def __getitem__(self, position: int) -> int:
        k = bisect.bisect_right(self._begins, position) - 1
        return int(self._rows[k][int(self._orders[k][position - self._begins[k]])])
