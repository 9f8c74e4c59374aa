"""The control of configs/vision.py: what a trained policy answers when rows and columns of its pictures are exchanged.

    python evidence/vision_places.py RUN.DIR [...]

Evaluates the newest checkpoint of each run as it is, and with row and column of every patch exchanged in the tower (its learned and its
rotary positions), in the text model (its rotary positions), or in both, which is the picture mirrored at its diagonal. The pixels stay.
Writes evidence/results/vision_places.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from common import record, table  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.config import load_config  # noqa: E402
from jaxrl.models.vision import positions  # noqa: E402
from jaxrl.rollout import prompt_images  # noqa: E402

KINDS = ("neither", "tower", "text", "both")


def exchange(kind: str) -> None:
    """Exchanges rows and columns in this process."""
    places, rotary = positions.patch_places, positions.rotary_positions
    if kind in ("tower", "both"):
        positions.patch_places = lambda *a: places(*a)[:, [1, 0, 3, 2]]
    if kind in ("text", "both"):
        positions.rotary_positions = prompt_images.rotary_positions = lambda *a, **k: rotary(*a, **k)[:, [0, 2, 1]]


def accuracy(config: str, run_dir: Path) -> float:
    job = load_config(config, {"run.dir": str(run_dir), "run.mode": "eval", "eval.controls": (), "log.console": "off"})
    return jaxrl.train(job)["eval"]["accuracy"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--config", default="vision", help="that the runs were started with")
    parser.add_argument("--one", choices=KINDS, help="prints the accuracy of one run")
    args = parser.parse_args()
    if args.one:
        exchange(args.one)
        print(accuracy(args.config, args.runs[0]))
        return 0
    results = {}
    for run_dir in args.runs:
        found = {}
        for kind in KINDS:
            command = [sys.executable, __file__, str(run_dir), "--config", args.config, "--one", kind]
            found[kind] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        results[run_dir.name] = found
    record("vision_places", results)
    table(["run", *KINDS], [[name, *(f"{x:.1%}" for x in found.values())] for name, found in results.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
