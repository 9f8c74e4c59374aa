"""The first AdamW update of jaxrl, TRL, Tunix and the torch loop from one checkpoint and one recorded batch, compared.

    python benchmarks/peers/same_update.py [--shape tiny_tail|tiny_lora|tiny_pairs|tiny_turns] [--systems jaxrl,trl] [--envs DIR] [--json FILE]

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
LINEAR, WHOLE = ["--eps", "1", "--lr", "10"], ["--microbatch", "{all}"]
CASES = {  # case -> options of every script, bound on the distance, {system: why it is expected beyond it}
    "gradient": ([*LINEAR, *WHOLE, "--unscaled"], 1e-4, {}),
    "adamw": ([*WHOLE, "--unscaled", "--lr", "1e-3"], 1e-2, {}),
    "own_scale": ([*LINEAR, *WHOLE], 1e-4, {"trl": "1e-4 instead of 1e-6 is added to the group's standard deviation"}),
    "microbatches": ([*LINEAR, "--unscaled"], 1e-4,
                     {"tunix": "token means are averaged over microbatches of different token counts"}),
}


def checkpoint(work: Work) -> dict[str, np.ndarray]:
    """What trains, before it does."""
    from safetensors.numpy import load_file

    file = "adapter/adapter_model.safetensors" if work.shape.lora else "model.safetensors"
    return {k: v.astype(np.float32) for k, v in load_file(work.folder / file).items()}


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
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="jaxrl comes first")
    parser.add_argument("--envs", type=Path, default=run.HERE / ".envs")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    work = Work(make(SHAPES[args.shape], args.envs / "work" / args.shape))
    names, at, results = args.systems.split(","), run.commit(), []
    for case, (options, bound, expected) in CASES.items():
        ours = None
        for name in names:
            found = update_of(name, run.interpreter(run.SYSTEMS[name].environment, args.envs), work, options)
            if name == "jaxrl":
                ours = found
                continue
            away = distance(ours, found)
            equal = away["relative"] <= bound
            verdict = "equal" if equal else f"differs: {expected[name]}" if name in expected else "NOT EXPLAINED"
            results.append({"case": case, "system": name, **away, "bound": bound, "verdict": verdict})
            print(f"{case}, {name}: {away['relative']:.1e}, {verdict}", file=sys.stderr, flush=True)
    run.table(["case", "system", "distance to jaxrl", "worst tensor", "", "bound", "verdict"], [
        [r["case"], r["system"], f"{r['relative']:.1e}", f"{r['worst']:.1e}", r["worst_tensor"], f"{r['bound']:.0e}", r["verdict"]]
        for r in results])
    if args.json:
        Path(args.json).write_text(json.dumps({"shape": args.shape, "commit": at, "results": results}, indent=1) + "\n")
    return int(any(r["verdict"] == "NOT EXPLAINED" for r in results))


if __name__ == "__main__":
    sys.exit(main())
