"""Showing of replayed experts: GRPO on configs/grpo_moe.py with the update's own experts, those of the scoring pass (R2) and
those of the sampler (R3), beside a sampler whose routers are noisy.

    python evidence/routes.py [seeds]      # default: 0; about ten quiet minutes a seed; KEEP=folder keeps the runs; results of
                                           # other seeds stay as they are, each with its commit

Each run begins from the same warm start (configs/grpo_moe.py:sft), takes four optimizer steps per batch, so that old
log-probs are scored and the router moves within a step, and corrects for no mismatch: what the sampler does otherwise meets
the loss as it is. Noise: evidence/noisy_router.py, in publications for training and evaluation alike; so the accuracy of a
noisy run is that of its noisy sampler. Gaps are means over the run's steps, accuracies of the last evaluation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

import numpy as np  # noqa: E402
from common import RESULTS, commit, record, table  # noqa: E402

import jaxrl  # noqa: E402
from jaxrl.config.load import load_config, put  # noqa: E402

HERE = Path(__file__).resolve().parent
ROUTES, NOISE = ("own", "scored", "sampled"), (0.0, 0.3)
METRICS = ("gap/mean", "gap/max", "gap/k3", "gap/outside_clip", "policy/ratio_mean", "policy/clip_fraction", "router/replayed",
           "router/mismatch", "router/load_max_over_mean", "time/update", "time/rollout")
QUIET = {"log.console": "off", "log.rollouts": False, "log.tensorboard": False, "log.level": "error",
         "checkpoint.every_steps": 0, "checkpoint.every_minutes": 0.0, "checkpoint.at_end": False}


def run(name: str, folder: Path, options: dict) -> list[dict]:
    """The lines of its metrics; of a run that is there already ($KEEP), as it was."""
    if (folder / "summary.json").exists():
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    c = load_config(name)
    for option, value in (QUIET | {"run.dir": str(folder)} | options).items():
        put(c, option, value)
    jaxrl.train(c)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def warm(seed: int, top: Path) -> Path:
    """The export of the warm start; made once."""
    folder = top / f"warm_{seed}"
    if not (folder / "export").exists():
        run("grpo_moe:sft", folder, {"run.seed": seed})
    return folder / "export"


def measured(rows: list[dict]) -> dict:
    flat = [{**row, **row.get("time", {})} for row in rows]
    values = lambda name: [row[name] for row in flat if name in row]  # noqa: E731
    accuracy = values("eval/accuracy")
    return {"accuracy": {"first": accuracy[0], "last": accuracy[-1]}, "reward": values("reward/mean")[-1],
            "metrics": {name: float(np.mean(values(name))) for name in METRICS if values(name)}}


def main(seeds: list[int]) -> None:
    at, results = commit(), []
    if (RESULTS / "routes.json").exists():
        was = json.loads((RESULTS / "routes.json").read_text())
        results = [{"commit": was["commit"], **row} for row in was["results"] if row["seed"] not in seeds]
    top = Path(os.environ.get("KEEP", "") or tempfile.mkdtemp())
    for seed in seeds:
        start = warm(seed, top)
        for noise in NOISE:
            for routes in ROUTES:
                rows = run("grpo_moe", top / f"{seed}_{noise}_{routes}", {
                    "run.seed": seed, "run.warm_start": "", "model.path": str(start), "algorithm.routes": routes,
                    "algorithm.num_minibatches": 4, "algorithm.mismatch.correction": "none", "checkpoint.export_at_end": False,
                    "rollout.engine": f"{HERE / 'noisy_router.py'}:make_engine", "user.noise": noise})
                results.append({"commit": at, "seed": seed, "noise": noise, "routes": routes, **measured(rows)})
                print(json.dumps(results[-1]), flush=True)
                record("routes", results, at)
    table(["seed", "noise", "routes", "accuracy", "gap/mean", "outside clip", "mismatch", "replayed"], [
        [r["seed"], r["noise"], r["routes"], f"{r['accuracy']['last']:.3f}", f"{r['metrics']['gap/mean']:.2e}",
         f"{r['metrics']['gap/outside_clip']:.4f}", f"{r['metrics'].get('router/mismatch', float('nan')):.4f}",
         f"{r['metrics'].get('router/replayed', 0):.4f}"] for r in results])


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0])
