"""The control of configs/vision.py and configs/env.py: what a trained policy does when rows and columns of its pictures are exchanged.

    python evidence/vision_places.py RUN.DIR [...]

Evaluates the newest checkpoint of each run as it is, and with row and column exchanged: of every patch in the tower (its learned and its
rotary positions), of an image's tokens in the text model (their rotary positions), in both, in the order of the image's tokens, or in all
three, which is the picture mirrored at its diagonal, cell by cell. The pixels stay. Writes evidence/results/vision_places.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import numpy as np  # noqa: E402
from common import record, table  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.config import load_config  # noqa: E402
from jaxrl.data import resolve  # noqa: E402
from jaxrl.envs.builtin import in_box  # noqa: E402
from jaxrl.models.vision import positions  # noqa: E402
from jaxrl.rollout import prompt_images  # noqa: E402

# name -> what is exchanged: places of patches in the tower, rotary positions of an image's tokens, the order of these tokens
KINDS = {"none": (), "tower": ("tower",), "rotary": ("rotary",), "both": ("tower", "rotary"), "order": ("order",),
         "all": ("tower", "rotary", "order")}
CELLS = 3  # per side of a scene of `spot`


def exchange(what: tuple[str, ...]) -> None:
    """Exchanges rows and columns of square images in this process."""
    places, rotary, rows = positions.patch_places, positions.rotary_positions, positions.image_rows

    def reordered(placed, *rest):
        sides = ((one, round(len(one.columns) ** 0.5)) for one in placed)
        return rows([one._replace(columns=one.columns.reshape(side, side).T.ravel()) for one, side in sides], *rest)

    if "tower" in what:
        positions.patch_places = lambda *a: places(*a)[:, [1, 0, 3, 2]]
    if "order" in what:
        prompt_images.image_rows = reordered
    if ("rotary" in what) != ("order" in what):  # in another order, the positions of places are already exchanged
        positions.rotary_positions = prompt_images.rotary_positions = lambda *a, **k: rotary(*a, **k)[:, [0, 2, 1]]


def evaluate(run_dir: Path) -> dict[str, float]:
    """Returns the accuracy on the set `test`. Of `spot` also that on shapes which lie elsewhere in the mirrored picture ("off the
    diagonal"), how often a first click hits these, and how often it would in the mirrored picture.
    """
    job = load_config(str(run_dir / "config.json"), {
        "run.dir": str(run_dir), "run.mode": "eval", "run.warm_start": "", "eval.controls": (), "log.console": "off"})
    out = {"accuracy": jaxrl.train(job)["eval"]["accuracy"]}
    newest = max((run_dir / "eval").glob("*_test*.jsonl"), key=lambda path: path.stat().st_mtime)
    done = sorted(map(json.loads, newest.read_text("utf-8").splitlines()), key=lambda row: row["group"])
    if job.env.function != "spot":
        return out
    rows, found = Path(resolve(job.eval.sets[0].partition("=")[2])).read_text("utf-8").splitlines(), []
    for row, own in zip(map(json.loads, rows), done, strict=True):
        shape, at = row["scene"][row["target"]], re.match("([0-9]) ([0-9])<", own["episode"][1]["text"])
        if int(shape[0]) * CELLS // row["side"] != int(shape[1]) * CELLS // row["side"]:
            x, y = (row["side"] * (int(part) + 0.5) / 10 for part in at.groups()) if at else (-1, -1)
            found.append((own["score"], in_box(shape, x, y), in_box(shape, y, x)))
    return out | dict(zip(("off the diagonal", "first click", "first click, mirrored"), np.mean(found, axis=0).tolist(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--one", choices=KINDS, help="prints the figures of one run as JSON")
    args = parser.parse_args()
    if args.one:
        exchange(KINDS[args.one])
        print(json.dumps(evaluate(args.runs[0])))
        return 0
    results = {}
    for run_dir in args.runs:
        found = {}
        for kind in KINDS:
            command = [sys.executable, __file__, str(run_dir), "--one", kind]
            found[kind] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        results[run_dir.name] = found
    record("vision_places", results)
    table(["run", "figure", *KINDS], [[name, figure, *(f"{of[figure]:.1%}" for of in found.values())]
                                      for name, found in results.items() for figure in found["none"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
