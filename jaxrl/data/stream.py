"""The order of training data: one global shuffle, addressed by one global cursor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import numpy as np

from jaxrl.data.dataset import Dataset, Example
from jaxrl.errors import ConfigError
from jaxrl.lengths import longest_sequence
from jaxrl.registry import recipe_of

log = logging.getLogger("jaxrl")
CHECKED = 256  # rows from one look for a stop to the next
MOST_PASSES = 10  # over the data in one step


def data_seed(config) -> int:
    """Seed of the shuffle and of the carve-out."""
    return config.run.seed if config.data.seed is None else config.data.seed


class Interrupted(Exception):
    """A stop was asked for while the rows of a step were being gathered; nothing of it counts."""


class Stream:
    """Rows in training order. Position p (an integer >= 0) means row p of one endless sequence of epochs.

    Epoch e is positions [e n, (e + 1) n), each row once, in an order drawn anew from (seed, e) by Grain's index
    shuffle: any position is found without walking there, so a cursor alone resumes exactly. Steps run across the
    edges of epochs. With `epochs` > 0 the stream ends at epochs * n; what is then left over for the last step is
    dropped (`drop_last`) or a smaller step. `workers` > 0 threads prepare the next `prefetch` steps ahead; the rows
    are the same.
    """

    def __init__(self, dataset: Dataset, per_step: int, seed: int, shuffle: bool = True, epochs: int = 0,
                 drop_last: bool = True, workers: int = 0, prefetch: int = 2):
        import grain
        self.dataset = dataset
        self.rows, self.per_step = len(dataset), per_step
        self.end = epochs * self.rows if epochs else sys.maxsize
        self._least = per_step if drop_last else 1
        if epochs and drop_last:
            self.end -= self.end % per_step
        if self.end == 0:
            raise ConfigError(f"data.prompts_per_step={per_step} is more than data.epochs={epochs} x {self.rows} rows: "
                              "lower it, or set data.drop_last=false")
        order = grain.MapDataset.range(self.rows)
        if shuffle:
            # Grain adds the epoch to the seed: spread seeds out, or seed 1 would begin with the second epoch of seed 0.
            order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._examples = order.repeat(None).map(lambda row: dataset[int(row)])
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
        return cls(dataset, d.prompts_per_step, data_seed(config), d.shuffle, d.epochs, d.drop_last, d.workers,
                   d.prefetch)

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

    def epoch(self, cursor: int) -> float:
        """Passes over the data up to `cursor`, e.g. 1.5."""
        return cursor / self.rows

    def close(self) -> None:
        """Ends the threads that read ahead."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
