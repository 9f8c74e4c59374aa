"""Issue 22, showing 5: turns a second of environments on Ray's workers beside those of this host, one after the other in turn.

    python evidence/ray_workers.py          (in an environment with ray; two minutes; --rounds 3 --seconds 10)

Each round is benchmarks/environments.py --env=null with --executor=local and ray, two workers, 128 episodes at once. On a machine that
does other things the rounds differ; so each has its load (the system's mean of the minute before): a turn through Ray passes more processes,
each of which waits for a core. (That no episode is lost or doubled with a killed node: pytest -m compat
tests/envs/test_env_ray.py.)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import commit, record, table

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks/environments.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    at, rows = commit(), []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(args.rounds):
            for executor in ("local", "ray"):
                out, load = Path(folder) / "out.json", os.getloadavg()[0]
                subprocess.run([sys.executable, BENCHMARK, "--env=null", f"--executor={executor}", "--seconds", str(args.seconds), "--out", out],
                               check=True)
                rows.append({"round": k, "load": round(load, 1)} | json.loads(out.read_text()))
    table(list(rows[0]), [list(row.values()) for row in rows])
    median = {e: statistics.median(r["turns_per_second"] for r in rows if r["executor"] == e) for e in ("local", "ray")}
    print(f"median turns a second: {median['local']:.0f} here, {median['ray']:.0f} through Ray")
    record("ray_workers", {"ray": importlib.metadata.version("ray"), "rounds": rows, "median_turns_per_second": median}, at)


if __name__ == "__main__":
    main()
