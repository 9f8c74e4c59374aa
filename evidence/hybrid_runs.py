"""Held-out accuracy of finished runs of configs/grpo_hybrid.py, by step and kind of problem.

    python evidence/hybrid_runs.py NAME=RUN.DIR [...]

Reads the evaluations that each run wrote; trains nothing. Writes evidence/results/hybrid_runs.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path

from common import record, table

TEST = Path(__file__).resolve().parents[1] / "jaxrl/data/embedded/arith/test.jsonl"


def by_step(run_dir: Path) -> dict:
    """Accuracy of each evaluation, in all and by kind."""
    kinds = {row["prompt"]: row["kind"] for row in map(json.loads, TEST.read_text("utf-8").splitlines())}
    found = {}
    for path in sorted((run_dir / "eval").glob("step_*_test.jsonl")):
        rows = collections.defaultdict(list)
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            for key in ("all", kinds[row["prompt"]]):
                rows[key].append(row["accurate"])
        found[int(path.name.split("_")[1])] = {key: round(sum(v) / len(v), 3) for key, v in sorted(rows.items())}
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+")
    runs = {name: by_step(Path(path)) for name, _, path in (run.partition("=") for run in parser.parse_args().runs)}
    names = sorted({key for steps in runs.values() for row in steps.values() for key in row})
    table(["run", "step", *names], [[name, step, *(row[key] for key in names)] for name, steps in runs.items() for step, row in steps.items()])
    record("hybrid_runs", runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
