"""The simulation of runs ahead against a real run: speeds fitted to every other step predict the seconds of the steps between.

    python evidence/simulation.py [--run DIR]

DIR: a synchronous run with its rollouts; without it configs/grpo.py runs here for 24 steps (a few minutes on two cores).
Writes evidence/results/simulation.json. Ends with 1 where the median step is more than 10 % off.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

import numpy as np
from common import record, table

from jaxrl.planning.asynchrony import WARM_UP, read_recorded_run, simulate

OVERRIDES = ("train.steps=24", "eval.before=false", "eval.after=false", "eval.every_steps=0", "checkpoint.export_at_end=false")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="")
    folder = parser.parse_args().run
    with tempfile.TemporaryDirectory() as scratch:
        if not folder:
            folder = f"{scratch}/run"
            subprocess.run([sys.executable, "-m", "jaxrl.main", "--config=grpo", f"--config.run.dir={folder}",
                            "--config.log.console=plain", *[f"--config.{o}" for o in OVERRIDES]], check=True)
        fitted, others = read_recorded_run(folder, slice(WARM_UP, None, 2)), read_recorded_run(folder, slice(WARM_UP + 1, None, 2))
    count = len(others.lengths)
    found = simulate(fitted.speeds, np.concatenate(others.lengths), per_step=others.per_step, group_size=others.group_size, steps=count)
    predicted, measured = np.array(found["seconds"][:count]), others.seconds
    off = float(np.median(predicted) / np.median(measured) - 1)
    result = {
        "steps": count, "speeds": vars(fitted.speeds), "measured_median": float(np.median(measured)),
        "predicted_median": float(np.median(predicted)), "measured_mean": float(measured.mean()), "predicted_mean": float(predicted.mean()),
        "mean_error_of_a_step": float(np.abs(predicted - measured).mean() / measured.mean()), "median_off": off}
    table(["figure", "value"], [[k, v] for k, v in result.items() if k != "speeds"])
    record("simulation", result)
    return 0 if abs(off) <= 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
