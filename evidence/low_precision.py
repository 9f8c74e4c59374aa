"""Showing of train.matmul: configs/grpo.py, warm start and RL, with the layers' products in fp32, of int8 and of emulated fp8
numbers: the curves beside each other.

    python evidence/low_precision.py [schemes]      # default: default int8 fp8; two quiet minutes each

One seed (0). No mismatch correction for fp32; token_tis for the others, as train.matmul decides. The gap is the sampler's, which
computes the same schemes in other programs: where sums round apart, a code falls otherwise now and then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.config.load import load_config, put  # noqa: E402

QUIET = {"log.console": "off", "log.rollouts": False, "log.tensorboard": False, "log.level": "error",
         "checkpoint.every_steps": 0, "checkpoint.every_minutes": 0.0, "checkpoint.at_end": False}


def run(name: str, folder: Path, options: dict) -> list[dict]:
    """The lines of its metrics."""
    c = load_config(name)
    for option, value in (QUIET | {"run.dir": str(folder)} | options).items():
        put(c, option, value)
    jaxrl.train(c)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curves(scheme: str, top: Path) -> dict:
    began = time.monotonic()
    how = {"train.matmul": scheme, "train.matmul_emulated": scheme not in ("default", "int8")}
    warm = run("grpo_sft", top / f"{scheme}_warm", how)
    rows = run("grpo", top / scheme, how | {"run.warm_start": "", "model.path": str(top / f"{scheme}_warm" / "export"),
                                            "checkpoint.export_at_end": False})
    values = lambda name: [row[name] for row in rows if name in row]  # noqa: E731
    return {"scheme": scheme, "warm start's loss": [round(row["loss"], 4) for row in warm if "loss" in row],
            "reward": [round(x, 4) for x in values("reward/mean")], "accuracy": values("eval/accuracy"),
            "gap/mean": float(np.mean(values("gap/mean"))), "gap/max": float(np.max(values("gap/max"))),
            "seconds": round(time.monotonic() - began)}


def main(schemes: list[str]) -> None:
    at, results, top = commit(), [], Path(tempfile.mkdtemp())
    for scheme in schemes:
        results.append(curves(scheme, top))
        record("low_precision", results, at)
        print(json.dumps({k: v for k, v in results[-1].items() if not isinstance(v, list)}), flush=True)
    table(["scheme", "warm start's last loss", "accuracy", "reward, last ten steps", "gap/mean", "gap/max", "seconds"], [
        [r["scheme"], r["warm start's loss"][-1], " ".join(f"{x:.3f}" for x in r["accuracy"]), f"{np.mean(r['reward'][-10:]):.3f}",
         f"{r['gap/mean']:.1e}", f"{r['gap/max']:.1e}", r["seconds"]] for r in results])


if __name__ == "__main__":
    main(sys.argv[1:] or ["default", "int8", "fp8"])
