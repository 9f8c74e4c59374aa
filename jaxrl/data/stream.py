"""The order of training data: one global shuffle, addressed by one global cursor."""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.config.lengths import longest_sequence
from jaxrl.config.registry import recipe_of
from jaxrl.data.dataset import Dataset, Example
from jaxrl.data.mixing import Mix
from jaxrl.data.mixture import Mixture
from jaxrl.data.order import Epochs, Windows, endless, windows
from jaxrl.data.pass_rates import PassRates
from jaxrl.errors import ConfigError

log = logging.getLogger("jaxrl")
CHECKED = 256  # rows from one look for a stop to the next
MOST_PASSES = 10  # over the data in one step


def data_seed(config) -> int:
    """Seed of the shuffle and of the carve-out."""
    return config.run.seed if config.data.seed is None else config.data.seed


class Interrupted(Exception):
    """A stop was asked for while the rows of a step were being gathered; nothing of it counts."""


class Curriculum(NamedTuple):
    """column: of each row's difficulty, a number; "" = none: the rows are in the order drawn. windows: (first step,
    lowest, highest) of the rows that are given; none: all, from easy to hard. keep(source number) -> [rows] bool, the
    rows of an epoch that begins; None: all."""

    column: str = ""
    windows: tuple = ()
    keep: Callable[[int], np.ndarray] | None = None


class Stream:
    """Rows in training order. Position p (an integer >= 0) means row p of one endless sequence of epochs.

    Epoch e is positions [e n, (e + 1) n), each row once, in an order drawn anew from (seed, e) by Grain's index
    shuffle: any position is found without walking there, so a cursor alone resumes exactly. Steps run across the
    edges of epochs. With `epochs` > 0 the stream ends at epochs * n; what is then left over for the last step is
    dropped (`drop_last`) or a smaller step. `workers` > 0 threads prepare the next `prefetch` steps ahead; the rows
    are the same.

    Of a Mixture the positions go to its sources by `weights` (mixing.Mix), and each source has epochs and an order of
    its own: what position p takes still follows from p alone. `exhausted`: as of a Mix, after `epochs` passes over a
    source; with 'repeat' epochs count as many rows as all sources hold.

    curriculum: what orders the rows of an epoch; see Curriculum. With windows and with rows left out an epoch may have
    fewer rows than the data; `epochs` counts as many rows as so many whole passes hold.
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
            self.end = self.end if self.mix.end is None else self.mix.end
        self._least = per_step if drop_last else 1
        if epochs and drop_last:
            self.end -= self.end % per_step
        if self.end == 0:
            raise ConfigError(f"data.prompts_per_step={per_step} is more than data.epochs={epochs} x {self.rows} rows: "
                              "lower it, or set data.drop_last=false")
        self.orders = self._ordered(dataset, seed, shuffle, curriculum)
        if self.mix is None and curriculum is None:
            self._examples = self.orders[0].map(lambda row: dataset[int(row)])
        else:
            self._examples = grain.MapDataset.range(min(self.end, sys.maxsize // 2)).map(
                lambda p: dataset[self.row(int(p))])
        self._read_ahead = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(1, prefetch * per_step))
        self._workers, self._iterator, self._at = workers, None, -1
        self.interrupted: Callable[[], bool] = lambda: False
        self.pass_rates: PassRates | None = None

    @classmethod
    def from_config(cls, config, dataset: Dataset, held: Callable = lambda name: None) -> Stream:
        """held(name) -> what the checkpoint that is resumed holds of a part, or None."""
        d, rows = config.data, len(dataset)
        if d.prompts_per_step > rows:
            each = d.prompts_per_step / rows
            sequences = d.prompts_per_step * (config.rollout.group_size if recipe_of(config).samples else 1)
            size = (f"data.prompts_per_step={d.prompts_per_step} is {each:,.4g} times the {rows} rows of the data:"
                    f" every prompt would come {each:,.4g} times in one step of {sequences:,} sequences with up to"
                    f" {sequences * longest_sequence(config):,} tokens, all of which a process holds at once")
            if each > MOST_PASSES:
                raise ConfigError(f"{size}; at most {MOST_PASSES} passes over the data fit a step: lower it")
            log.warning("%s; lower it to have each prompt once", size)
        weights = [d.sources[name].get("weight", 1.0) for name in getattr(dataset, "parts", ())]
        rates = None
        if (d.pass_rate_min, d.pass_rate_max) != (0, 1):
            rates = PassRates(getattr(dataset, "sizes", [rows]), d.pass_rate_min, d.pass_rate_max,
                              lambda: held(PassRates.name))
        curriculum = Curriculum(d.difficulty, tuple(windows(d.difficulty_window)), rates and rates.keep)
        out = cls(dataset, d.prompts_per_step, data_seed(config), d.shuffle, d.epochs, d.drop_last, d.workers,
                  d.prefetch, weights, d.exhausted, curriculum if any(curriculum) else None)
        if rates is not None:
            rates.orders, out.pass_rates = out.orders, rates
        return out

    def _ordered(self, dataset, seed: int, shuffle: bool, curriculum) -> list:
        """The order of each source, or of the one data set. Of sources of equal size none is to be in the order of
        another."""
        parts = dataset.parts if self.mix is not None else {"the data": dataset}
        out = []
        for k, (name, part) in enumerate(parts.items()):
            own = False if not shuffle else [seed, zlib.crc32(name.encode())] if len(parts) > 1 else seed
            if curriculum is None:
                out.append(endless(len(part), own))
                continue
            difficulty = part.numbers(curriculum.column) if curriculum.column else None
            if curriculum.windows:
                stages = [(self._given(step * self.per_step, k), low, high) for step, low, high in curriculum.windows]
                out.append(Windows(difficulty, own, stages, name))
            else:
                out.append(Epochs(len(part), own, difficulty, curriculum.keep and (lambda k=k: curriculum.keep(k))))
        return out

    def _given(self, position: int, source: int) -> int:
        """Rows that a source gave before a position."""
        position = min(position, self.end)
        return position if self.mix is None else self.mix.given(position)[source]

    def row(self, position: int) -> int:
        """The number of the row at a position."""
        if self.mix is None:
            return int(self.orders[0][position])
        source, count = self.mix.place(position)
        return self.dataset.starts[source] + int(self.orders[source][count])

    @property
    def total_steps(self) -> int | None:
        """Steps from position 0 to the end, None if endless."""
        return None if self.end == sys.maxsize else -(-self.end // self.per_step)

    def take(self, cursor: int, count: int = 0) -> tuple[list[tuple[int, Example]], int]:
        """`count` rows from `cursor` on (0 = a whole step): [(position, example)] and the next cursor. Fewer at the end
        of the stream, none when it is exhausted. Raises Interrupted where `self.interrupted()` turned true."""
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
        """The items of a long loop; raises Interrupted once `self.interrupted()`, asked every CHECKED of them."""
        for i, item in enumerate(items):
            if i % CHECKED == CHECKED - 1 and self.interrupted():
                raise Interrupted
            yield item

    def exhausted(self, cursor: int) -> bool:
        """Whether no further step starts at `cursor`: nothing is left, or less than a whole step under `drop_last`.
        Steps that take more rows than a step has (dynamic sampling) come here before `total_steps`."""
        return self.end - cursor < self._least

    def measured(self, rates: dict[int, float], cursor: int) -> dict[str, float]:
        """Takes the pass rates of rows by their position; `cursor`: the run's from now on. Returns metrics; {} where
        none are kept."""
        if self.pass_rates is None:
            return {}
        for position, rate in rates.items():
            self.pass_rates.rates[self.row(position)] = rate
        for k, order in enumerate(self.orders):
            order.forget(self._given(cursor, k))
        return self.pass_rates.metrics()

    def sources(self, cursor: int) -> dict[str, tuple[float, float]]:
        """Source -> (its share of the last step's rows before `cursor`, passes over it); {} where there are none."""
        if self.mix is None or not cursor:
            return {}
        cursor = min(cursor, self.end)
        earlier = max(0, cursor - self.per_step)
        now, then = self.mix.given(cursor), self.mix.given(earlier)
        rows = zip(self.dataset.parts, now, then, self.dataset.sizes, strict=True)
        return {name: ((n - before) / (cursor - earlier), n / size) for name, n, before, size in rows}

    def epoch(self, cursor: int) -> float:
        """Passes over the data up to `cursor`, e.g. 1.5."""
        return cursor / self.rows

    def close(self) -> None:
        """Ends the threads that read ahead."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
