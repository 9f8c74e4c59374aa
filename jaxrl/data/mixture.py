"""Several data sets as one (`data.sources`): options per source, row filters and the combined data set."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib

import numpy as np

from jaxrl.config.load import editable
from jaxrl.data.dataset import Dataset, Example, Tables
from jaxrl.data.sources import DataError

# Options of `data` that a source may override, and options that only a source has.
OWN = ("path", "subset", "split", "revision", "prompt_column", "answer_column", "answer_pattern", "completion_column",
       "chosen_column", "rejected_column", "label_column", "margin_column", "train_turns", "assistant_mask",
       "system_prompt", "chat", "add_generation_prompt", "chat_template_kwargs", "max_rows", "overlong_prompt",
       "overlong_completion", "bad_rows")
SOURCE_ONLY = ("weight", "where", "rewards", "algorithm", "coef")
# Options that a source's table `algorithm` may override: those that turn scores into advantages, on the host.
ALGORITHM = ("advantage", "advantage_mean", "advantage_std", "whiten", "advantage_low", "advantage_high", "gamma",
             "turn_gamma", "anchor_coef")


class Mixture:
    """Several data sets as one, in the order of their names; rows are numbered through, first set first.

    Its Examples carry their source and the names of the reward functions that score them. Of a Dataset's attributes
    it has, combined: prompt_lengths, target_lengths, rejected_lengths and patches ([N] int64), bad_rows,
    filtered_fraction, fingerprint, commits and first_rows; `heldout` is None.

    Args:
      parts: name of a source -> its Dataset.
      rewards: name -> names of the reward functions that score its rows; None for all, of sources that are not in it.

    Attributes:
      parts: as given. name: "train".
      starts: number of each source's first row, and of all rows at the end."""

    def __init__(self, parts: dict[str, Dataset], rewards: dict[str, tuple[str, ...]]):
        self.parts, self.name = parts, "train"
        self.heldout: Dataset | None = None
        self._names, self._sets, self._rewards = list(parts), list(parts.values()), rewards
        self.starts = np.cumsum([0, *map(len, self._sets)]).tolist()
        for lengths in ("prompt_lengths", "target_lengths", "rejected_lengths", "patches"):
            setattr(self, lengths, np.concatenate([getattr(part, lengths) for part in self._sets]))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, i: int) -> Example:
        k = bisect.bisect_right(self.starts, i) - 1
        name = self._names[k]
        return dataclasses.replace(self._sets[k][i - self.starts[k]], source=name, rewards=self._rewards.get(name))

    @property
    def sizes(self) -> list[int]:
        """Number of examples of each source; a row that was split has several."""
        return [len(part) for part in self._sets]

    @property
    def first_rows(self) -> list[int]:
        """Indices of the first two rows at most of every source, used to try out reward functions."""
        return [start + i for start, part in zip(self.starts, self._sets, strict=False) for i in part.first_rows]

    @property
    def bad_rows(self):
        """BadRowTotals of the rows that could not be read."""
        bad = [part.bad_rows for part in self._sets]
        return BadRowTotals(sum(rows.count for rows in bad), [m for rows in bad for m in rows.messages])

    @property
    def filtered_fraction(self) -> float:
        """Share of the rows dropped for their length among these and the rows that stay, bad rows not counted."""
        left_out = sum(len(part.filtered) for part in self._sets)
        return left_out / (left_out + sum(part.kept_rows for part in self._sets))

    @property
    def fingerprint(self) -> str:
        """Hash of the sources' fingerprints (first 16 hex digits) and the sources' names, as text."""
        named = "; ".join(f"{name}: {part.fingerprint}" for name, part in self.parts.items())
        return f"{hashlib.sha256(named.encode()).hexdigest()[:16]}, {', '.join(self._names)}"

    @property
    def commits(self) -> list[str]:
        """Hub commits of the rows, without duplicates."""
        return list(dict.fromkeys(commit for part in self._sets for commit in part.commits))

    def describe(self) -> str:
        """Returns one line per source: number of examples, shortest, longest and mean prompt in tokens, and how many
        rows were dropped, cut, split or bad."""
        return "\n".join(part.describe() for part in self._sets)


@dataclasses.dataclass(frozen=True)
class BadRowTotals:
    """Number of bad rows (`count`) and their messages, the first ones of each source, over all sources of a Mixture."""

    count: int
    messages: list[str]


def source_config(config, name: str):
    """Returns an editable copy of the config in which a source's entries override those of `data`; of
    chat_template_kwargs only the keys that it has. Entries that only a source has (weight, where, rewards, algorithm,
    coef) are left out. Raises KeyError for a name that is not in data.sources."""
    out = editable(config)
    for key, value in config.data.sources[name].items():
        if key in ("path", "split") and isinstance(value, str):
            value = (value,)
        if key in OWN and key != "chat_template_kwargs":
            out.data[key] = value
        elif key in OWN:
            out.data[key].update(value)
    return out


def select_rows(tables: Tables, where, name: str):
    """Returns the numbers, a list of int, of the rows that match a source's filter. A missing value is "None".

    Args:
      where: column -> a value or several, compared as text; a row must match every column.
      name: of the source, for messages.

    Raises DataError if no row matches."""
    wanted = {column: [str(v) for v in (values if isinstance(values, list | tuple) else [values])]
              for column, values in where.items()}
    selected = [i for i in range(len(tables))
            if all(str(tables[i][0].get(column)) in values for column, values in wanted.items())]
    if not selected:
        column = next(iter(wanted))
        names = list(dict.fromkeys(str(tables[i][0].get(column)) for i in range(len(tables))))
        raise DataError(f"data.sources.{name}.where={ {c: list(v) for c, v in wanted.items()} }: no row of"
                        f" {len(tables)} matches; column {column!r} holds {', '.join(names[:8])}"
                        + (", ..." if len(names) > 8 else ""))
    return selected
