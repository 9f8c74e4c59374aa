"""Held-out accuracy of finished runs by step: of the set `test`, under its blind controls, and by kind of problem where its rows are `arith`'s.

    python evidence/runs.py hybrid_runs|vision_runs NAME=RUN.DIR [...]

Reads the metrics and evaluations that each run wrote; trains nothing. Writes evidence/results/hybrid_runs.json or vision_runs.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path

from common import record, table

TEST = Path(__file__).resolve().parents[1] / "jaxrl/data/embedded/arith/test.jsonl"
CONTROLS = ("blank", "swapped")


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """Accuracy of each evaluation: "all", by kind, and under each control."""
    kinds = {row["prompt"]: row["kind"] for row in rows_of(TEST)}
    found = {}
    for path in sorted((run_dir / "eval").glob("step_*_test.jsonl")):
        rows = collections.defaultdict(list)
        for row in rows_of(path):
            for key in ("all", *filter(None, [kinds.get(row["prompt"])])):
                rows[key].append(row["accurate"])
        found[int(path.name.split("_")[1])] = {key: round(sum(v) / len(v), 3) for key, v in sorted(rows.items())}
    for line in rows_of(run_dir / "metrics.jsonl"):
        under = {name: line.get(f"eval/test/{name}/accuracy") for name in CONTROLS}
        found.get(line["step"], {}).update({name: round(value, 3) for name, value in under.items() if value is not None})
    if not found:
        sys.exit(f"{run_dir} holds no evaluation of a set `test`")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", choices=("hybrid_runs", "vision_runs"))
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN.DIR")
    args = parser.parse_args()
    runs = {name: by_step(Path(path)) for name, _, path in (run.partition("=") for run in args.runs)}
    names = list(dict.fromkeys(key for steps in runs.values() for row in steps.values() for key in row))
    rows = [(name, step, row) for name, steps in runs.items() for step, row in steps.items()]
    table(["run", "step", *names], [[name, step, *(row.get(key, "") for key in names)] for name, step, row in rows])
    record(args.results, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
