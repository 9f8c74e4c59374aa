"""Detects anomalous steps in a run's metrics, and anomalous completions within a step. Used by report and replay.

A number is anomalous if it lies more than LIMIT robust deviations from the median of those it is compared with. The
deviation is 1.4826 times the median distance to the median (the standard deviation of a normal distribution, which
outliers do not move), or SLACK of the median if that is more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LIMIT, SLACK = 8.0, 0.05
WINDOW, LEAST = 20, 4  # steps before one that it is compared with, at most and at least
NEW = 3  # anomalous steps in a row, after which they count as usual
# metric -> (what it is called, whether a fall counts too, the difference below which nothing stands out)
WATCHED = {
    "optim/grad_norm": ("gradient norm", False, 1e-6),
    "optim/lr": ("learning rate", False, 0.0),
    "policy/kl": ("KL to the reference", False, 1e-4),
    "policy/approx_kl": ("KL of the update", False, 1e-4),
    "gap/mean": ("sampler-trainer gap", False, 1e-4),
    "gap/max": ("largest gap of a token", False, 1e-3),
    "length/mean": ("completion length", True, 1.0),
    "policy/entropy": ("entropy", True, 0.01),
    "reward/std": ("spread of rewards", False, 1e-3),
    "staleness/max": ("staleness", False, 0.5),
    "optim/skipped": ("updates that were not finite", False, 0.0),
}
HACKED = 0.05  # a held-out score that has fallen by so much from its best while the reward rose


class Anomaly(NamedTuple):
    """A metric of one step far from its usual values.

    Attributes:
      called: what the metric is, in words; of `hacked` what happened. usual: median of the steps before, NaN where none
        was usual; of `hacked` the best accuracy.
      deviations: absolute number of robust deviations from it; inf where none can be given, as for NaN.
    """

    step: int
    name: str      # of the metric
    called: str
    value: float
    usual: float   # median of the steps before
    deviations: float

    @property
    def text(self) -> str:
        """The anomaly as text for messages."""
        far = f", {self.deviations:.0f} deviations away" if np.isfinite(self.deviations) else ""
        usual = "" if np.isnan(self.usual) else f", usual were {self.usual:.4g}"
        return f"{self.called} ({self.name}) is {self.value:.4g}{usual}{far}"


def deviations(value, others, floor: float = 0.0) -> tuple[float, float]:
    """Returns (signed number of robust deviations of a value from the median of others, that median).

    A deviation is 1.4826 times the median distance of `others` to their median, or SLACK of the median if that is more.
    Where it is 0, the number is 0 for the median itself, else infinite. It is infinite for NaN.

    value: a number. others: [n] finite floats, n > 0. floor: smallest difference that counts as LIMIT deviations."""
    middle = float(np.median(others))
    spread = max(1.4826 * float(np.median(np.abs(others - middle))), SLACK * abs(middle), floor / LIMIT)
    apart = float(value) - middle
    if np.isnan(apart):
        return np.inf, middle
    return (apart / spread if spread else np.copysign(np.inf, apart) if apart else 0.0), middle


def of_run(lines: list[dict]) -> list[Anomaly]:
    """Returns the anomalies in lines of metrics.jsonl, sorted by step and metric, with those of `hacked`.

    Each metric of WATCHED is compared with its WINDOW usual values before, from LEAST on; a number that is not finite
    is anomalous wherever it stands (its usual value is NaN before the first finite one). Later steps are not compared
    with an anomalous one, unless NEW finite steps before it were anomalous, too. A learning rate counts only from twice
    the largest usual one on, since it rises during warm-up.

    lines: metric -> value, and `step`, of each line in order."""
    out = []
    for name, (called, falls, floor) in WATCHED.items():
        rows = [(line["step"], float(line[name])) for line in lines if name in line]
        warm = name == "optim/lr"  # rises during warm-up
        usual, in_a_row = [], 0
        for step, value in rows:
            stands, away, middle = not np.isfinite(value), np.inf, float(np.median(usual[-WINDOW:] or [np.nan]))
            if len(usual) >= LEAST and not stands:
                away, middle = deviations(value, np.array(usual[-WINDOW:]), floor)
                stands = away > LIMIT or (falls and away < -LIMIT)
                stands = stands and not (warm and value < 2 * max(usual))
            if stands:
                out.append(Anomaly(step, name, called, value, middle, abs(away)))
            if not np.isfinite(value):
                continue
            in_a_row = in_a_row + 1 if stands else 0
            if not stands or in_a_row > NEW:
                usual.append(value)
    return sorted([*out, *hacked(lines)], key=lambda a: (a.step, a.name))


def hacked(lines: list[dict]) -> list[Anomaly]:
    """Returns the evaluations, as Anomalies, whose held-out accuracy is at least HACKED below its best although the
    reward is higher than then. lines: as in `of_run`."""
    out, best = [], None  # (accuracy, reward)
    reward = 0.0
    for line in lines:
        now = float(line.get("reward/mean", reward))
        reward = now if np.isfinite(now) else reward
        if not np.isfinite(held := float(line.get("eval/accuracy", np.nan))):
            continue
        if best is None or held >= best[0]:
            best = (held, reward)
        elif best[0] - held >= HACKED and reward > best[1]:
            said = f"reward up from {best[1]:.4g} to {reward:.4g} while held-out accuracy fell"
            out.append(Anomaly(line["step"], "eval/accuracy", said, held, best[0], np.inf))
    return out


def outliers(values, floor: float = 0.0) -> np.ndarray:
    """Returns [N] float64 signed robust deviations (`deviations`) of each finite number from the median of all; 0 for
    numbers that are not finite.

    values: [N]. floor: smallest difference that counts as LIMIT deviations."""
    values, out = np.asarray(values, np.float64), np.zeros(len(values))
    known = np.flatnonzero(np.isfinite(values))
    if len(known):
        out[known] = [deviations(values[i], values[known], floor)[0] for i in known]
    return out
