"""Kernels, showing 7: the embedded task in bfloat16 ends where it ends in float32.

python evidence/bf16.py            (three seeds of the README's main job, each from one warm start trained in float32)

Both runs of a seed start from the same export and differ in train.compute_dtype alone: activations, gathered weights, attention
and the sampler's copy are bfloat16 or float32; master weights, moments, logits and losses are float32 in both. Each is evaluated by
its own sampler in its own dtype. Exits with 1 where a seed differs by more than 3 points of held-out accuracy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import commit, record, table
from quickstart import ROOT, launch

MOST = 0.03


def one(folder: Path, seed: int) -> dict:
    first = launch(sys.executable, ROOT, folder / "fp32", f"run.seed={seed}", "train.compute_dtype=fp32")
    start = folder / "fp32" / "warm_start" / "export"
    other = launch(sys.executable, ROOT, folder / "bf16", f"run.seed={seed}", f"model.path={start}", "run.warm_start=",
                   "train.compute_dtype=bf16")
    ends = {name: done["summary"]["eval_after"]["accuracy"] for name, done in (("fp32", first), ("bf16", other))}
    return {"seed": seed, "before": first["summary"]["eval_before"]["accuracy"],
            "before_bf16": other["summary"]["eval_before"]["accuracy"], **ends, "difference": ends["bf16"] - ends["fp32"],
            "wall_s": {"fp32 with its warm start": first["wall_s"], "bf16": other["wall_s"]}}


def main():
    at, seeds = commit(), [int(a) for a in sys.argv[1:]] or [0, 1, 2]
    with tempfile.TemporaryDirectory() as folder:
        runs = [one(Path(folder) / str(seed), seed) for seed in seeds]
    names = ("seed", "before", "before_bf16", "fp32", "bf16", "difference")
    table(list(names), [[f"{r[n]:.3f}" if isinstance(r[n], float) else r[n] for n in names] for r in runs])
    record("bf16", {"runs": runs, "most": MOST}, at)
    raise SystemExit(any(abs(r["difference"]) > MOST for r in runs))


if __name__ == "__main__":
    main()
