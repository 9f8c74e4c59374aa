"""Runs of tests/helpers/tiny_job.py in this process, as the algorithm scripts need them, and what they reward and compare with."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))


def zeros(inputs):
    """An advantage that teaches nothing."""
    return np.zeros(len(inputs.scores))


def first_digits(prompt, completion, **columns):
    """Share of digits among the answer's first four characters: settled early, so that a critic can know it."""
    return sum(c.isdigit() for c in completion[:4]) / 4


def distinct_digits(prompt, completion, **columns):
    """Share of the ten digits that the answer holds: a policy that goes too far into one of them is worse than before."""
    return len({c for c in completion if c.isdigit()}) / 10


def train(folder: Path, cache: Path, seed: int, options: dict) -> dict:
    """One run without checkpoints, export and (unless options name eval sets) evaluation.

    Args:
      folder: its run directory. cache: XLA's compilation cache, shared by runs.
      options: dotted option -> value.

    Returns:
      {"rows": metrics per step, "seconds": wall time}.
    """
    from helpers import tiny_job

    import jaxrl
    from jaxrl.config.load import put

    c, started = tiny_job.get_config(), time.monotonic()
    base = {"run.dir": str(folder), "run.seed": seed, "run.compile_cache": str(cache), "eval.sets": (), "eval.before": False,
            "eval.every_steps": 0, "checkpoint.every_steps": 0, "checkpoint.every_minutes": 0.0, "checkpoint.at_end": False,
            "checkpoint.export_at_end": False, "log.console": "off", "log.rollouts": False, "log.level": "error"}
    for name, value in (base | options).items():
        put(c, name, value)
    jaxrl.train(c)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"rows": rows, "seconds": time.monotonic() - started}


def column(run: dict, name: str) -> np.ndarray:
    """A metric over the steps of a run; NaN where a step lacks it."""
    return np.array([row.get(name, np.nan) for row in run["rows"]])


def standard_errors(differences) -> float:
    """The mean of some differences in standard errors of itself."""
    d = np.asarray(differences, float)
    return float(d.mean() / max(d.std(ddof=1) / np.sqrt(len(d)), 1e-12))
