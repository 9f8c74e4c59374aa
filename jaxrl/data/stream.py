"""The order of training data: one global shuffle, addressed by one global cursor."""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config.lengths import longest_sequence
from jaxrl.config.registry import recipe_of
from jaxrl.data.dataset import Dataset, Example
from jaxrl.data.mixing import Mix
from jaxrl.data.mixture import Mixture
from jaxrl.data.order import Epochs, Windows, parse_windows, shuffled_epochs
from jaxrl.data.pass_rates import PassRates
from jaxrl.errors import ConfigError

log = logging.getLogger("jaxrl")
ROWS_PER_STOP_CHECK = 256  # rows read between two checks for a stop request
MAX_PASSES_PER_STEP = 10  # passes over the data in one step


def data_seed(config) -> int:
    """Returns the seed of the shuffle and of the held-out split: data.seed, or run.seed if that is None."""
    return config.run.seed if config.data.seed is None else config.data.seed


class Interrupted(Exception):
    """A stop was requested while the rows of a step were being read. The incomplete step is discarded."""


class Curriculum(NamedTuple):
    """Options that order the rows of an epoch.

    Attributes:
      column: column with each row's difficulty, a number; "" keeps the drawn order.
      windows: (first step, lowest, highest) difficulty of the rows in use; empty for all rows, from easy to hard.
      keep: source number -> [rows] bool, the rows of an epoch that starts; None for all.
    """

    column: str = ""
    windows: tuple = ()
    keep: Callable[[int], np.ndarray] | None = None


class Stream:
    """Rows in training order. Position p (an integer >= 0) is row p of an endless sequence of epochs.

    Without a curriculum epoch e is positions [e n, (e + 1) n): each row once, in an order drawn from (seed, e) by
    Grain's index shuffle. Every position is computed directly, so a cursor alone resumes exactly; with pass rates the
    state of `pass_rates` belongs to it. Steps run across epoch boundaries.

    In a Mixture the positions are shared among its sources by `weights` (mixing.Mix), and each source has its own
    epochs and order; without pass rates what position p takes still depends on p alone.

    Args:
      dataset: gives the rows.
      per_step: prompts per step.
      seed: of the shuffles. shuffle: False keeps the order of the rows.
      epochs: the stream ends at epochs * n rows; 0 for never. With a Mixture and exhausted='repeat', n counts
        the rows of all sources. With a curriculum an epoch may have fewer rows than the data, but `epochs`
        still counts whole passes.
      drop_last: drops an incomplete last step instead of making it smaller.
      workers: threads that prepare the next `prefetch` steps; the rows are the same. 0 = rows are read when taken.
      weights: of each source of a Mixture a constant, or (step, weight) points with linear change between them.
      exhausted: what happens after `epochs` passes over a source: 'repeat' goes on with it, 'stop' ends the stream,
        'others' gives its weight to the other sources and ends the stream after the last of them.
      curriculum: order of the rows within an epoch; None = the shuffled order.

    Attributes:
      dataset, per_step: as given. mix: the Mix of a Mixture, else None.
      end: one past the last position; sys.maxsize for never.
      interrupted: () -> whether to stop reading rows; see `take`.
      pass_rates: PassRates if data.pass_rate_min or pass_rate_max drops rows, else None.

    Raises:
      ConfigError: with `epochs` and `drop_last`, all epochs together have fewer rows than one step; with a curriculum
        a difficulty is no number, or no row lies in a window.
    """

    def __init__(self, dataset: Dataset | Mixture, per_step: int, seed: int, shuffle: bool = True, epochs: int = 0,
                 drop_last: bool = True, workers: int = 0, prefetch: int = 2, weights: Sequence = (),
                 exhausted: str = "repeat", curriculum: Curriculum | None = None):
        import grain
        self.dataset = dataset
        self.rows, self.per_step = len(dataset), per_step
        self.end = epochs * self.rows if epochs else sys.maxsize
        self.mix = None
        if isinstance(dataset, Mixture):
            self.mix = Mix(weights, per_step, [epochs * n for n in dataset.sizes], exhausted)
            self._starts, self._sizes = dataset.starts, dict(zip(dataset.parts, dataset.sizes, strict=True))
            self.end = self.end if self.mix.end is None else self.mix.end
            _warn_of_weights(self.mix, list(dataset.parts), exhausted)
        self._least = per_step if drop_last else 1
        if epochs and drop_last:
            self.end -= self.end % per_step
        if self.end == 0:
            raise ConfigError(f"data.prompts_per_step={per_step} is more than data.epochs={epochs} x {self.rows} rows: "
                              "lower it, or set data.drop_last=false")
        self.orders = self._ordered(dataset, seed, shuffle, curriculum)
        self._examples: Any
        if self.mix is None and curriculum is None:
            self._examples = self.orders[0].map(lambda row: dataset[int(row)])
        else:
            self._examples = grain.MapDataset.range(min(self.end, sys.maxsize // 2)).map(
                lambda p: dataset[self.row(int(p))])
        self._read_ahead = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(1, prefetch * per_step))
        self._workers, self._at = workers, -1
        self._iterator: Any = None
        self.interrupted: Callable[[], bool] = lambda: False
        self.pass_rates: PassRates | None = None

    @classmethod
    def from_config(cls, config, dataset: Dataset, resumed_part: Callable = lambda name: None) -> Stream:
        """Builds the stream of a data set with the options `data.*`. Warns if one step takes more rows than the data
        has.

        Args:
          config: of the job. dataset: a Dataset, or a Mixture with its sources' weights in data.sources.
          resumed_part: part name -> its entry in the resumed checkpoint, or None.

        Raises ConfigError if one step takes more than MAX_PASSES_PER_STEP passes over the data, and as the class does:
        if it takes more rows than all epochs have (data.drop_last), or a curriculum does not fit the data."""
        d, rows = config.data, len(dataset)
        if d.prompts_per_step > rows:
            each = d.prompts_per_step / rows
            sequences = d.prompts_per_step * (config.rollout.group_size if recipe_of(config).samples else 1)
            size = (f"data.prompts_per_step={d.prompts_per_step} is {each:,.4g} times the {rows} rows of the data:"
                    f" every prompt would occur {each:,.4g} times in one step of {sequences:,} sequences with up to"
                    f" {sequences * longest_sequence(config):,} tokens, all in the memory of one process")
            if each > MAX_PASSES_PER_STEP:
                raise ConfigError(f"{size}; a step may take at most {MAX_PASSES_PER_STEP} passes over the data: lower "
                                  f"it")
            log.warning("%s; lower it so that each prompt occurs once", size)
        weights = [d.sources[name].get("weight", 1.0) for name in getattr(dataset, "parts", ())]
        rates = None
        if (d.pass_rate_min, d.pass_rate_max) != (0, 1):
            rates = PassRates(getattr(dataset, "sizes", [rows]), d.pass_rate_min, d.pass_rate_max,
                              lambda: resumed_part(PassRates.name))
        curriculum = Curriculum(d.difficulty, tuple(parse_windows(d.difficulty_window)), rates and rates.keep)
        out = cls(dataset, d.prompts_per_step, data_seed(config), d.shuffle, d.epochs, d.drop_last, d.workers,
                  d.prefetch, weights, d.exhausted, curriculum if any(curriculum) else None)
        if rates is not None:
            rates.orders, out.pass_rates = out.orders, rates
        return out

    def _ordered(self, dataset, seed: int, shuffle: bool, curriculum) -> list:
        """Returns the order of each source, or of the only data set. Sources of equal size get different orders."""
        parts = dataset.parts if self.mix is not None else {"the data": dataset}
        out = []
        for k, (name, part) in enumerate(parts.items()):
            own = False if not shuffle else [seed, zlib.crc32(name.encode())] if len(parts) > 1 else seed
            if curriculum is None:
                out.append(shuffled_epochs(len(part), own))
                continue
            difficulty: Any = part.numbers(curriculum.column) if curriculum.column else None
            if curriculum.windows:
                stages = [(self._rows_before(step * self.per_step, k), low, high)
                          for step, low, high in curriculum.windows]
                out.append(Windows(difficulty, own, stages, name))
            else:
                out.append(Epochs(len(part), own, difficulty, curriculum.keep and (lambda k=k: curriculum.keep(k))))
        return out

    def _rows_before(self, position: int, source: int) -> int:
        """Returns the number of rows a source gave before a position."""
        position = min(position, self.end)
        return position if self.mix is None else self.mix.rows_before(position)[source]

    def row(self, position: int) -> int:
        """Returns the row number in the data set of the prompt at a position in the order of the data. Raises
        IndexError past the end of a Mixture's order, RunStopped if the epoch that begins there keeps no row."""
        if self.mix is None:
            return int(self.orders[0][position])
        source, count = self.mix.place(position)
        return self._starts[source] + int(self.orders[source][count])

    @property
    def total_steps(self) -> int | None:
        """Number of steps from position 0 to the end; None if endless."""
        return None if self.end == sys.maxsize else -(-self.end // self.per_step)

    def take(self, cursor: int, count: int = 0) -> tuple[list[tuple[int, Example]], int]:
        """Returns ([(position, example)], next cursor) of the rows from `cursor` on.

        Args:
          count: number of rows, 0 for a whole step. Fewer are returned at the end of the stream, none
            once it is exhausted.

        Raises:
          Interrupted: `self.interrupted()` became true; it is checked every ROWS_PER_STOP_CHECK rows.
          RunStopped: an epoch begins from which pass rates drop all rows.
        """
        stop = min(cursor + (int(count) or self.per_step), self.end)
        if self._workers == 0:
            return [(p, self._examples[p]) for p in self.unless_interrupted(range(cursor, stop))], max(cursor, stop)
        if self._at != cursor:
            self.close()
            self._iterator = iter(self._examples.to_iter_dataset(self._read_ahead))
            self._iterator.set_state({"next_index": cursor})
        self._at = -1  # unknown while rows are being taken
        out = [(p, next(self._iterator)) for p in self.unless_interrupted(range(cursor, stop))]
        self._at = max(cursor, stop)
        return out, self._at

    def unless_interrupted(self, items):
        """Yields the items of a long loop; raises Interrupted if `self.interrupted()`,
        checked every ROWS_PER_STOP_CHECK items.
        """
        for i, item in enumerate(items):
            if i % ROWS_PER_STOP_CHECK == ROWS_PER_STOP_CHECK - 1 and self.interrupted():
                raise Interrupted
            yield item

    def exhausted(self, cursor: int) -> bool:
        """Returns whether no further step starts at `cursor`: no rows are left, or fewer than
        a step with `drop_last`.

        Steps that take extra rows (dynamic sampling) reach this before `total_steps`.
        """
        return self.end - cursor < self._least

    def record_pass_rates(self, rates: dict[int, float], cursor: int) -> dict[str, float]:
        """Stores pass rates by position and returns data/left_out_fraction and data/pass_rate (PassRates.metrics); {}
        if pass rates are not in use. State of epochs that end before `cursor` is dropped: their rows cannot be taken
        again.

        Args:
          rates: position -> pass rate of its row.
          cursor: the run's cursor from now on.
        """
        if self.pass_rates is None:
            return {}
        for position, rate in rates.items():
            self.pass_rates.rates[self.row(position)] = rate
        for k, order in enumerate(self.orders):
            order.forget(self._rows_before(cursor, k))
        return self.pass_rates.metrics()

    def sources(self, cursor: int) -> dict[str, tuple[float, float]]:
        """Returns source -> (its share of the last `per_step` rows before `cursor`, passes over it so far: its rows
        taken over its size); {} without sources and at cursor 0.
        """
        if self.mix is None or not cursor:
            return {}
        cursor = min(cursor, self.end)
        earlier = max(0, cursor - self.per_step)
        now, then = self.mix.rows_before(cursor), self.mix.rows_before(earlier)
        rows = zip(self._sizes.items(), now, then, strict=True)
        return {name: ((n - before) / (cursor - earlier), n / size) for (name, size), n, before in rows}

    def metrics(self, cursor: int) -> dict[str, float]:
        """Returns the metrics at `cursor`: data/epoch (passes over the data), data/filtered_fraction (share of rows
        dropped for their length), data/bad_rows (a count); of several sources also source/<name>/share of the last
        step's rows, and source/<name>/epoch, the passes over that source."""
        out = {"data/epoch": self.epoch(cursor), "data/filtered_fraction": self.dataset.filtered_fraction,
               "data/bad_rows": float(self.dataset.bad_rows.count)}
        if self.mix is not None:
            for name, (share, epoch) in self.sources(cursor).items():
                out |= {f"source/{name}/share": share, f"source/{name}/epoch": epoch}
        return out

    def epoch(self, cursor: int) -> float:
        """Returns the number of passes over the data up to `cursor`, for example 1.5: the cursor over all rows, also of
        epochs that drop rows."""
        return cursor / self.rows

    def close(self) -> None:
        """Stops the threads that read ahead."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def _warn_of_weights(mix: Mix, names: list[str], exhausted: str) -> None:
    """Warns of sources that are served before they have weight, and of rows that never come, with 'others'."""
    if exhausted != "others":
        return
    if mix.early:
        step, later = mix.early
        log.warning("data.sources: from step %d on, the sources that are not exhausted have weight 0; they get their "
                    "weights of step %d early. To choose others, give them weight from step %d on", step, later, step)
    for name, weight, rows in zip(names, mix.weights, mix.unserved(), strict=True):
        if rows and weight:
            log.warning("data.sources.%s: %d of its rows never come: it has no weight after the other sources are "
                        "exhausted. Give it a last weight above 0 to train on them", name, rows)
