"""Measures how well a judge agrees with rows labelled by people (`reward.judge.labelled`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import ConfigError
from jaxrl.rewards.items import RewardItem

MAX_ROWS_SHOWN = 3  # rows listed in the message


class Agreement(NamedTuple):
    """Agreement of a judge with labelled rows.

    Attributes:
      name: of the judge. rows: number of labelled rows.
      share: of all rows, those whose judge score and label lie on the same side of the scale's middle (the middle
        counts as the upper side).
      difference: mean of |judge - label| over the scored rows, in points of the scale; NaN if none is scored.
      absent: number of rows without a judge score, which agree with nothing; why: the first reason.
      differ: (row, label, judge's score) of at most MAX_ROWS_SHOWN rows, largest difference first; rows from 0.
    """

    name: str
    rows: int
    share: float
    difference: float
    absent: int
    differ: tuple[tuple[int, float, float], ...]
    why: str = ""

    @classmethod
    def from_results(cls, name: str, o: dict, labels: list[float], results: list[dict]) -> Agreement:
        """Compares labels with the results of workers. Raises ConfigError if the share is below min_agreement.

        Args:
          name: of the judge. o: its options: lowest, highest and min_agreement.
          labels: points of the scale, one per row.
          results: {value, outcome, metrics} per row; values are shares of the scale.

        The share counts rows where label and score lie on the same side of the scale's middle, over all labelled
        rows."""
        lowest, highest = o["lowest"], o["highest"]
        middle = 0.5 * (lowest + highest)
        scores = [None if r["value"] is None else lowest + r["value"] * (highest - lowest) for r in results]
        both = [(i, label, s) for i, (label, s) in enumerate(zip(labels, scores, strict=True)) if s is not None]
        share = sum((label >= middle) == (s >= middle) for _, label, s in both) / len(labels)
        apart = sorted(both, key=lambda row: (-abs(row[1] - row[2]), row[0]))
        difference = sum(abs(label - s) for _, label, s in both) / len(both) if both else float("nan")
        why = next((r["outcome"] for r in results if r["value"] is None), "")
        agreement = cls(name, len(labels), share, difference, len(labels) - len(both),
                        tuple(row for row in apart[:MAX_ROWS_SHOWN] if row[1] != row[2]), why)
        if share < o["min_agreement"]:
            raise ConfigError(f"{agreement.text()}\nbelow min_agreement={o['min_agreement']:g}: change the judge's "
                              "prompt, rubric or model, or lower the bound")
        return agreement

    def text(self) -> str:
        """Returns a summary for the console: shares, mean difference in points, the rows furthest apart, rows
        without a score."""
        out = (f"judge {self.name!r} and {self.rows} labelled rows: {self.share:.1%} on the same side of the scale's "
               f"middle, {self.difference:.2f} points apart on average")
        if self.differ:
            out += "; furthest apart: " + ", ".join(f"row {i} (label {a:g}, judge {b:g})" for i, a, b in self.differ)
        return out + (f"; {self.absent} not judged ({self.why})" if self.absent else "")


def read_labelled_rows(o: dict) -> tuple[list[RewardItem], list[float]]:
    """Returns (items, labels in points of the scale) of the rows of a judge's `labelled` file, JSON lines.

    o: the judge's options: labelled, lowest and highest. A row has prompt, completion and score, a number within them;
    its other keys become columns. Raises ConfigError naming file and line for another row, and for a file that cannot
    be read or has no rows."""
    where, items, labels = o["labelled"], [], []
    try:
        lines = Path(where).expanduser().read_text("utf-8").split("\n")  # not the other line ends of Unicode
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"labelled={where!r}: {e}") from None
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, completion, label = row.pop("prompt"), row.pop("completion"), float(row.pop("score"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            raise ConfigError(f"labelled={where!r}, line {i}: {type(e).__name__}: {e}; a row has prompt, completion "
                              "and score, a number") from None
        if not o["lowest"] <= label <= o["highest"]:
            raise ConfigError(f"labelled={where!r}, line {i}: score {label:g} is not within lowest={o['lowest']:g} "
                              f"and highest={o['highest']:g}")
        items.append(RewardItem(prompt=prompt, completion=completion, columns=row))
        labels.append(label)
    if not labels:
        raise ConfigError(f"labelled={where!r} has no rows; add some")
    return items, labels
