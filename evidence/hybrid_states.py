"""The control of configs/grpo_hybrid.py: what a trained policy answers when its completions begin from empty states.

    python evidence/hybrid_states.py RUN.DIR [...]

Evaluates the newest checkpoint of each run twice, as it is and with states and windows of recurrent layers set to zero where a prompt's are
copied into its slot; keys and values of attention stay. Writes evidence/results/hybrid_states.json. Exits with 1 if more than half of a
run's accuracy is left without the states.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
from common import record, table  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.config import load_config  # noqa: E402
from jaxrl.models import recurrent  # noqa: E402
from jaxrl.models.model import Model  # noqa: E402


def accuracy(config: str, run_dir: Path) -> float:
    job = load_config(config, {"run.dir": str(run_dir), "run.mode": "eval", "log.console": "off"})
    return jaxrl.train(job)["eval"]["accuracy"]


def empty(insert):
    """Model.insert with zeros in place of a prompt's states."""
    def without(self, cache, kv, rows_K, slots_K):
        kv = jax.tree_util.tree_map_with_path(lambda path, x: x * 0 if recurrent.is_by_slot(path) else x, kv)
        return insert(self, cache, kv, rows_K, slots_K)

    return without


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--config", default="grpo_hybrid", help="that the runs were started with")
    parser.add_argument("--one", choices=("whole", "empty"), help="prints the accuracy of one run (a process of its own: programs are kept in one)")
    args = parser.parse_args()
    if args.one:
        with mock.patch.object(Model, "insert", empty(Model.insert)) if args.one == "empty" else contextlib.nullcontext():
            print(accuracy(args.config, args.runs[0]))
        return 0
    results = {}
    for run_dir in args.runs:
        found = {}
        for which in ("whole", "empty"):
            command = [sys.executable, __file__, str(run_dir), "--config", args.config, "--one", which]
            found[which] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        results[run_dir.name] = {"accuracy": found["whole"], "empty_states": found["empty"]}
    table(["run", "accuracy", "with empty states"], [[name, *row.values()] for name, row in results.items()])
    record("hybrid_states", results)
    return int(any(row["empty_states"] > row["accuracy"] / 2 for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
