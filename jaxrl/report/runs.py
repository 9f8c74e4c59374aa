"""Reads run directories as far as possible: killed and running runs have reports too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxrl.config.load import flat
from jaxrl.errors import ConfigError
from jaxrl.telemetry.names import CLOCKED
from jaxrl.telemetry.run_dir import read_json


@dataclasses.dataclass
class Run:
    """Content of a run directory.

    Attributes:
      series: metric -> (steps, values), float64 [n] each, in the order of steps; names as in telemetry/names.py, so
        that seconds of phases are time/<phase>.
      broken: number of unreadable lines of metrics.jsonl.
      name: of the folder, in a report its label (`labels`). versions: package -> version.
      summary: content of summary.json, {} without one.
    """

    folder: Path
    name: str
    config: dict[str, object]  # option -> value
    versions: dict[str, str]
    summary: dict
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    broken: int = 0

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps, values) of a metric; both empty if there is none."""
        return self.series.get(name, (np.zeros(0), np.zeros(0)))

    def rows(self, file: Path) -> list[dict]:
        """Returns the records of a file of rollouts/ or eval/; unreadable lines are skipped."""
        out = []
        for text in file.read_text("utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(text) if text else None
            except ValueError:
                continue
            out += [row] if isinstance(row, dict) else []
        return out


def read_run(folder) -> Run:
    """Reads a run directory. Raises ConfigError if it has neither a readable config.json nor metrics.jsonl."""
    folder = Path(folder)
    lines = folder / "metrics.jsonl"
    held, summary = read_json(folder / "config.json"), read_json(folder / "summary.json")
    if not held and not lines.exists():
        raise ConfigError(f"{folder} is not a run directory; name the folder that has config.json and metrics.jsonl")
    series, broken = _series(lines) if lines.exists() else ({}, 0)
    config, versions = (held[k] if isinstance(held.get(k), dict) else {} for k in ("config", "versions"))
    versions = {k: str(v) for k, v in versions.items()}
    return Run(folder, folder.resolve().name, flat(config), versions, summary, series, broken)


def _series(path: Path) -> tuple[dict, int]:
    """Returns (metric -> (steps, values), lines that cannot be read)."""
    found, broken = {}, 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                row = json.loads(text)
                step = float(row.pop("step"))
                clock = row.pop("time", {})
                for key, value in clock.items():
                    row[key if key.startswith(CLOCKED) else f"time/{key}"] = value
                numbers = [(name, float(value)) for name, value in row.items()]  # "nan" and "inf" are text in JSON
            except (ValueError, KeyError, TypeError, AttributeError):
                broken += 1  # cut off by a kill, or being written now
                continue
            for name, value in numbers:
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in found.items()}, broken


def labels(runs: list[Run]) -> list[str]:
    """Returns short names that distinguish the runs: the folder's, with as many parent folders as necessary."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]
