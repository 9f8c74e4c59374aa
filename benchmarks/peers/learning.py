"""Whether jaxrl learns what TRL learns: the rewards of the same GRPO run, step by step, over seeds of the sampler.

    python benchmarks/peers/learning.py [--steps 50] [--seeds 0,1,2] [--envs DIR] [--json FILE]

Both start from one checkpoint with the same prompts, reward (the share of even tokens in an answer), batch, loss and optimizer;
what differs is what the samplers draw. Compared are means over windows of WINDOW steps: jaxrl's, over its seeds, has to lie
within TRL's mean plus and minus two standard deviations over TRL's seeds. Ends with 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import run
from shapes import SHAPES, make

WINDOW = 10
SYSTEMS = ("jaxrl", "trl")


def rewards_of(name: str, python: str, work: Path, steps: int, seed: int, lr: float) -> list[float]:
    """Mean reward of each of `steps` steps. Raises RuntimeError with what the system said."""
    command = [python, str(run.HERE / run.SYSTEMS[name].script), "--work", str(work), "--steps", str(steps - 1), "--seed", str(seed),
               "--lr", str(lr)]
    said = run.run_alone(command, run.surroundings(2), 1200)
    lines = [line for line in said.splitlines() if line.startswith('{"system"')]
    if not lines:
        raise RuntimeError(f"{name}: {said[-3000:]}")
    rewards = json.loads(lines[-1])["rewards"]
    assert len(rewards) == steps, f"{name}: {len(rewards)} rewards of {steps} steps"
    return rewards


def compare(curves: dict[str, list[list[float]]]) -> list[dict]:
    """One row per window from `curves` (system -> seeds x steps)."""
    windows = {name: np.asarray(rows).reshape(len(rows), -1, WINDOW).mean(axis=2) for name, rows in curves.items()}
    ours, theirs = windows["jaxrl"], windows["trl"]
    mean, spread = theirs.mean(axis=0), 2 * theirs.std(axis=0, ddof=1)
    return [{"steps": f"{i * WINDOW + 1} to {(i + 1) * WINDOW}", "jaxrl": ours[:, i].tolist(), "trl": theirs[:, i].tolist(),
             "jaxrl_mean": float(ours[:, i].mean()), "trl_mean": float(mean[i]), "trl_two_deviations": float(spread[i]),
             "within": bool(abs(ours[:, i].mean() - mean[i]) <= spread[i])} for i in range(ours.shape[1])]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help=f"a multiple of {WINDOW}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--envs", type=Path, default=run.HERE / ".envs")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    at, work = run.commit(), make(SHAPES["learning"], args.envs / "work" / "learning")
    curves: dict[str, list] = {name: [] for name in SYSTEMS}
    for seed in map(int, args.seeds.split(",")):
        for name in SYSTEMS:
            python = run.interpreter(run.SYSTEMS[name].environment, args.envs)
            curves[name].append(rewards_of(name, python, work, args.steps, seed, args.lr))
            print(f"{name}, seed {seed}: {curves[name][-1][0]:.3f} to {np.mean(curves[name][-1][-WINDOW:]):.3f}", file=sys.stderr, flush=True)
    rows = compare(curves)
    show = lambda values: ", ".join(f"{v:.3f}" for v in values)  # noqa: E731
    run.table(["steps", "jaxrl", "TRL", "means", "two deviations of TRL", "within"], [
        [r["steps"], show(r["jaxrl"]), show(r["trl"]), show((r["jaxrl_mean"], r["trl_mean"])), f"{r['trl_two_deviations']:.3f}",
         "yes" if r["within"] else "NO"] for r in rows])
    if args.json:
        Path(args.json).write_text(json.dumps({"commit": at, "machine": run.machine(), "lr": args.lr, "windows": rows, "curves": curves},
                                              indent=1) + "\n")
    return int(not all(r["within"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
