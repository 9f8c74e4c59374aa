"""Orders in which a data set gives its rows: maps the number of rows given so far to a row number.

`shuffled_epochs` is the default. The others are curricula: `Epochs` sorts each epoch from easy to hard, or drops rows
that are solved too often or too rarely; `Windows` changes the rows at given steps.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.errors import ConfigError, RunStopped

WINDOW = re.compile(r"(\d+):(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")


def shuffled_epochs(rows: int, seed):
    """Returns row numbers 0 .. rows - 1 by position, epoch after epoch without end, each with its own shuffle: a
    grain.MapDataset.

    Args:
      seed: an integer or several; False keeps the file order.
    """
    import grain

    order = grain.MapDataset.range(rows)
    if seed is not False:
        # Grain adds the epoch to the seed: spread seeds out, or seed 1 would begin with the second epoch of seed 0.
        order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return order.repeat(None)


def parse_windows(texts: Sequence[str]) -> list[tuple[int, float, float]]:
    """Parses entries such as '200:2..5' into (first step, lowest, highest). Raises ValueError naming the entry that has
    another form, a lowest above its highest, or a step that does not follow the one before; the first step is 0."""
    out = []
    for text in texts:
        match = WINDOW.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is not 'step:low..high', for example '200:2..5'")
        step, low, high = int(match[1]), float(match[2]), float(match[3])
        if low > high:
            raise ValueError(f"{text!r}: {low:g} is above {high:g}")
        if step <= out[-1][0] if out else step:
            raise ValueError(f"{text!r}: the first window begins at step 0, and each later than the one before")
        out.append((step, low, high))
    return out


class Epochs:
    """Row numbers epoch after epoch, each epoch in an order drawn from (seed, epoch).

    Args:
      rows: number of rows. seed: an integer or several; False keeps the file order.
      difficulty: [rows] numbers, sorts an epoch from low to high; ties stay in the drawn order.
      keep: () -> [rows] bool, the rows of an epoch; called when the epoch's first row is requested, not for the first
        epoch, which has all rows. Started epochs are part of the run's state. None keeps all rows, and the position
        alone determines the row.

    Attributes:
      started_epochs: (number, first position, [rows] bool of its rows) of each epoch that is still needed.

    Indexing raises RunStopped if `keep` leaves no row of an epoch that starts.
    """

    def __init__(self, rows: int, seed, difficulty=None, keep: Callable[[], np.ndarray] | None = None):
        self.rows, self._seed, self._difficulty, self._keep = rows, seed, difficulty, keep
        # number, first position, rows
        self.started_epochs: list[tuple[int, int, np.ndarray]] = [(0, 0, np.ones(rows, bool))]
        self._orders: dict[int, np.ndarray] = {}

    def __getitem__(self, position: int) -> int:
        if self._keep is None:
            number, at = divmod(position, self.rows)
            return int(self._order(number, None)[at])
        while position >= self._end():
            number, _, _ = self.started_epochs[-1]
            mask = self._keep()
            if not mask.any():
                raise RunStopped("no row is left: every pass rate lies outside data.pass_rate_min and "
                                 "pass_rate_max; widen them")
            self.started_epochs.append((number + 1, self._end(), mask))
        number, first, mask = next(e for e in reversed(self.started_epochs) if e[1] <= position)
        return int(self._order(number, mask)[position - first])

    def _end(self) -> int:
        _, first, mask = self.started_epochs[-1]
        return first + int(mask.sum())

    def forget(self, position: int) -> None:
        """Drops the state of epochs that end before a position; positions before it must not be requested again."""
        while len(self.started_epochs) > 1 and self.started_epochs[1][1] <= position:
            self._orders.pop(self.started_epochs.pop(0)[0], None)

    def _order(self, number: int, mask) -> np.ndarray:
        order = self._orders.get(number)
        if order is None:  # threads may run this concurrently; they compute the same
            if len(self._orders) > 2:
                self._orders.clear()
            order = np.arange(self.rows)
            if self._seed is not False:
                order = np.random.default_rng([*np.atleast_1d(self._seed), number]).permutation(self.rows)
            order = order if mask is None else order[mask[order]]
            if self._difficulty is not None:
                order = order[np.argsort(self._difficulty[order], kind="stable")]
            self._orders[number] = order
        return order


class Windows:
    """Row numbers whose difficulty is in a moving window: each stage gives its rows only,
    shuffled, epoch after epoch.

    Args:
      difficulty: [rows] numbers.
      seed: of the shuffles, an integer or several; False keeps the file order. name: of the data set, for messages.
      stages: (first position, lowest, highest difficulty, both included); the first stage begins at 0.

    Raises:
      ConfigError: a window has no rows."""

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
            stage_seed = seed is not False and [*np.atleast_1d(seed).tolist(), number]
            self._orders.append(shuffled_epochs(len(inside), stage_seed))

    def __getitem__(self, position: int) -> int:
        k = bisect.bisect_right(self._begins, position) - 1
        return int(self._rows[k][int(self._orders[k][position - self._begins[k]])])
