"""The first AdamW update of jaxrl, TRL, Tunix and the torch loop from one checkpoint and one recorded batch, compared.

    python benchmarks/peers/same_update.py [--shape tiny_tail] [--systems jaxrl,trl] [--envs DIR] [--json FILE]

Matched by configuration: fp32, the loss as a mean over all answer tokens, no KL, clip 0.2 (ratios are 1), gradients clipped to norm
1, AdamW with decay 0.01 on matrices only. The batch is tokens and rewards (from the answers' text); the sampler's
log-probs play no part where a batch gets one update. Two cases test the update, two more show differences by their names:

  gradient      eps 1 and a large rate: the step is proportional to the gradient, so this compares gradients and decay.
  adamw         eps 1e-8 as in every benchmark: where an element's gradient is noise, AdamW's first step is noise of full size.
  own_scale     the same with each library's own division by the group's standard deviation: TRL adds 1e-4 to it, the others 1e-6.
  microbatches  Tunix averages the token means of microbatches, so with answers of different lengths it weights tokens otherwise.

Distance of two systems: the norm of the difference of their steps (parameters after less before) over the norm of jaxrl's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import run
from shapes import SHAPES, Work, make

SYSTEMS = ("jaxrl", "torch_loop", "trl", "tunix")
CASES = {  # case -> options of every script
    "gradient": ["--unscaled", "--eps", "1", "--lr", "10", "--microbatch", "{all}"],
    "adamw": ["--unscaled", "--lr", "1e-3", "--microbatch", "{all}"],
    "own_scale": ["--eps", "1", "--lr", "10", "--microbatch", "{all}"],
    "microbatches": ["--unscaled", "--eps", "1", "--lr", "10"],
}
BOUNDS = {"gradient": 1e-4, "adamw": 1e-2}
NAMED = {("own_scale", "trl"): "1e-4 instead of 1e-6 is added to the group's standard deviation",
         ("microbatches", "tunix"): "token means are averaged over microbatches of different token counts"}


def checkpoint(work: Work) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {k: v.astype(np.float32) for k, v in load_file(work.folder / "model.safetensors").items()}


def update_of(name: str, python: str, work: Work, options: list[str]) -> dict[str, np.ndarray]:
    """HF name -> parameters after one update less before. Raises RuntimeError with what the system said."""
    options = [option.format(all=work.shape.sequences) for option in options]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "after.npz"
        done = subprocess.run(
            [python, str(run.HERE / run.SYSTEMS[name].script), "--work", str(work.folder), "--steps", "0", "--replay", "--save",
             str(file), *options], capture_output=True, text=True, env=run.surroundings(1))
        if not file.exists():
            raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
        after = dict(np.load(file))
    before = checkpoint(work)
    assert set(after) == set(before), set(after) ^ set(before)
    return {key: after[key].astype(np.float64) - before[key] for key in before}


def distance(ours: dict, theirs: dict) -> dict[str, float]:
    """`relative`: norm of the difference over ours, all parameters together; `worst`: the same of the worst tensor."""
    gaps = {key: np.linalg.norm(theirs[key] - ours[key]) for key in ours}
    sizes = {key: np.linalg.norm(x) for key, x in ours.items()}
    worst = max(gaps, key=lambda k: gaps[k] / max(sizes[k], 1e-30))
    total = np.sqrt(sum(g**2 for g in gaps.values()) / sum(s**2 for s in sizes.values()))
    return {"relative": float(total), "worst": float(gaps[worst] / max(sizes[worst], 1e-30)), "worst_tensor": worst}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny_tail")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--envs", type=Path, default=run.HERE / ".envs")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    work = Work(make(SHAPES[args.shape], args.envs / "work" / args.shape))
    names, at = args.systems.split(","), run.commit()
    results, rows = [], []
    for case, options in CASES.items():
        updates = {name: update_of(name, run.interpreter(run.SYSTEMS[name].environment, args.envs), work, options)
                   for name in names}
        for name in [n for n in names if n != "jaxrl"]:
            found, why = distance(updates["jaxrl"], updates[name]), NAMED.get((case, name), "")
            bound = BOUNDS.get(case, BOUNDS["gradient"])
            verdict = "equal" if found["relative"] <= bound else f"differs: {why}" if why else "NOT EXPLAINED"
            results.append({"case": case, "system": name, **found, "bound": bound, "verdict": verdict})
            rows.append([case, name, f"{found['relative']:.1e}", f"{found['worst']:.1e}", found["worst_tensor"], f"{bound:.0e}",
                         verdict])
    run.table(["case", "system", "distance to jaxrl", "worst tensor", "", "bound", "verdict"], rows)
    if args.json:
        Path(args.json).write_text(json.dumps({"shape": args.shape, "commit": at, "results": results}, indent=1) + "\n")
    return int(any(r["verdict"] == "NOT EXPLAINED" for r in results))


if __name__ == "__main__":
    sys.exit(main())
