"""Showing 4 of the algorithms: every preset trains, against a control whose advantages are zero.

    python evidence/presets.py [--presets grpo,ppo]      # all: about 15 quiet minutes; some: the last result's others stay

tests/helpers/tiny_job.py, a two-layer model from scratch, 24 steps, three seeds. Every preset runs twice: as its row is, with one
optimizer step per batch, and with four, where ratios and bounds act. The control has the same options, seeds and data, and
zeros for advantages. Reward is what the preset trains on: DAPO's includes its length penalty, which is 1 for every answer
until the model learns to end.
With one optimizer step per batch every ratio is 1: rows that differ in ratios and bounds alone then have the same numbers.
VAPO has a second teacher, the NLL of answers that reach reward.pass_mark: its control lacks both, and two more rows have
each of them alone. Its lambda is 0 for answers this short (1 - 1/(0.05 * 12) < 0), so its advantages are as good as the
critic, which starts with nothing: with one update per batch it is the slowest.

Rises: the last five steps are above the first five, and above the control's last five, each by more than two standard errors
over the seeds. Exits with 1 where one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from common import RESULTS, commit, record, table  # noqa: E402
from tiny_runs import HERE, column, standard_errors, train  # noqa: E402

from jaxrl.algorithms import PRESETS  # noqa: E402

SINGLE = tuple(name for name, row in PRESETS.items() if row["advantage"] != "gigpo")  # the task has one turn and no states
SEEDS = (0, 1, 2)
EVERYWHERE = {"train.steps": 24, "optimizer.lr": 1e-2}
CRITIC = {"critic.lr": 1e-2}  # the default is meant for a pretrained trunk
ZEROS = {"algorithm.advantage": f"{HERE / 'tiny_runs.py'}:zeros"}
NO_NLL = {"algorithm.positive_nll_coef": 0.0}


def cases(preset: str) -> list[tuple]:
    """(label, options beside the preset's own, what of them the control lacks) of each row of the table."""
    own = CRITIC if PRESETS[preset]["advantage"] == "gae" else {}
    if not PRESETS[preset]["positive_nll_coef"]:
        return [(preset, own, {})]
    return [(preset, own, NO_NLL), (f"{preset}, NLL off", own | NO_NLL, NO_NLL), (f"{preset}, NLL alone", ZEROS, NO_NLL)]


def measure(label: str, preset: str, own: dict, still: dict, minibatches: int, folder: Path, cache: Path) -> dict:
    """All seeds of a row with their controls."""
    options = EVERYWHERE | {"algorithm.preset": preset}
    if minibatches > 1:
        options["algorithm.num_minibatches"] = minibatches
    runs = [train(folder / f"run_{seed}", cache, seed, options | own) for seed in SEEDS]
    controls = [train(folder / f"control_{seed}", cache, seed, options | ZEROS | still) for seed in SEEDS]
    reward, control = (np.array([column(r, "reward/mean") for r in rs]) for rs in (runs, controls))
    start, end, unmoved = reward[:, :5].mean(1), reward[:, -5:].mean(1), control[:, -5:].mean(1)
    result = {
        "preset": label, "minibatches": minibatches, "start": start.tolist(), "end": end.tolist(), "control": unmoved.tolist(),
        "rise_se": standard_errors(end - start), "above_control_se": standard_errors(end - unmoved),
        "digits": float(np.mean([column(r, "reward/digits")[-5:].mean() for r in runs])),
        "clipped": float(np.mean([column(r, "policy/clip_fraction").mean() for r in runs])),
        "seconds": float(np.mean([r["seconds"] for r in runs])),
    }
    result["settings"] = ", ".join(f"{k}={v:g}" for k, v in own.items() if k not in ZEROS)
    result["rises"] = result["rise_se"] > 2 and result["above_control_se"] > 2
    return result


def shown(r: dict) -> list:
    mean = lambda name: f"{np.mean(r[name]):.3f}"  # noqa: E731
    return [r["preset"], r["minibatches"], mean("start"), mean("end"), mean("control"), f"{r['rise_se']:.1f}",
            f"{r['above_control_se']:.1f}", f"{r['digits']:.3f}", f"{r['clipped']:.3f}", f"{r['seconds']:.1f}",
            "yes" if r["rises"] else "NO", r["settings"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--presets", default=",".join(SINGLE))
    args = parser.parse_args()
    at, results = commit(), []
    with tempfile.TemporaryDirectory(prefix="presets") as top:
        for preset in args.presets.split(","):
            for minibatches in (1, 4):
                for n, (label, own, still) in enumerate(cases(preset)):
                    folder = Path(top) / preset / f"{minibatches}_{n}"
                    results.append(measure(label, preset, own, still, minibatches, folder, Path(top) / "xla"))
                    print(*shown(results[-1]), flush=True)
            jax.clear_caches()
    print()
    table(["preset", "updates per batch", "start", "end", "control's end", "rise, se", "above control, se", "digits at the end",
           "clipped", "seconds", "rises", "beside lr 1e-2"], [shown(r) for r in results])
    last = json.loads((RESULTS / "presets.json").read_text())
    kept = [{"commit": last["commit"]} | run for run in last["results"]["runs"] if run["preset"].split(",")[0] not in args.presets.split(",")]
    record("presets", {"options": EVERYWHERE, "seeds": SEEDS, "runs": [*kept, *({**run, "commit": at} for run in results)]}, at)
    return 0 if all(r["rises"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
