"""The order of training data: one global shuffle, addressed by one global cursor."""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.data.dataset import Dataset, Example
from jaxrl.data.mixing import Mix
from jaxrl.data.mixture import Mixture
from jaxrl.errors import ConfigError
from jaxrl.lengths import longest_sequence
from jaxrl.registry import recipe_of

log = logging.getLogger("jaxrl")
CHECKED = 256  # rows from one look for a stop to the next
MOST_PASSES = 10  # over the data in one step


def data_seed(config) -> int:
    """Seed of the shuffle and of the carve-out."""
    return config.run.seed if config.data.seed is None else config.data.seed


def endless(rows: int, seed):
    """Row numbers 0 .. rows - 1 by position, epoch after epoch, each in an order of its own. seed: an integer or
    several; False: in file order."""
    import grain

    order = grain.MapDataset.range(rows)
    if seed is not False:
        # Grain adds the epoch to the seed: spread seeds out, or seed 1 would begin with the second epoch of seed 0.
        order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return order.repeat(None)


class Interrupted(Exception):
    """A stop was asked for while the rows of a step were being gathered; nothing of it counts."""


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
    """

    def __init__(self, dataset: Dataset | Mixture, per_step: int, seed: int, shuffle: bool = True, epochs: int = 0,
                 drop_last: bool = True, workers: int = 0, prefetch: int = 2, weights: Sequence = (),
                 exhausted: str = "repeat"):
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
        if self.mix is None:
            self._examples = endless(self.rows, seed if shuffle else False).map(lambda row: dataset[int(row)])
        else:  # of sources of equal size none is to be in the order of another
            seeds = [[seed, zlib.crc32(name.encode())] if len(dataset.parts) > 1 else seed for name in dataset.parts]
            self._orders = [endless(n, own if shuffle else False) for n, own in zip(dataset.sizes, seeds, strict=True)]
            self._examples = grain.MapDataset.range(min(self.end, sys.maxsize // 2)).map(
                lambda p: dataset[self._row(int(p))])
        self._read_ahead = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(1, prefetch * per_step))
        self._workers, self._iterator, self._at = workers, None, -1
        self.interrupted: Callable[[], bool] = lambda: False

    @classmethod
    def from_config(cls, config, dataset: Dataset) -> Stream:
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
        return cls(dataset, d.prompts_per_step, data_seed(config), d.shuffle, d.epochs, d.drop_last, d.workers,
                   d.prefetch, weights, d.exhausted)

    def _row(self, position: int) -> int:
        """The row of a Mixture at a position."""
        source, count = self.mix.place(position)
        return self.dataset.starts[source] + int(self._orders[source][count])

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
