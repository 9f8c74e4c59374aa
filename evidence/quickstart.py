"""Showings 1 and 9: the README's first line in a fresh clone, on three seeds, and that the gain is learning.

    python evidence/quickstart.py            # clone, install, three seeds with their controls: about 20 quiet minutes
    python evidence/quickstart.py --here     # this interpreter and this tree instead of a clone

Times are taken from outside, with an empty compilation cache for every run. Controls, each from the same warm start:
pass@8 at temperature 1, the demonstrations continued for as many seconds as the RL steps took, and GRPO with the
rewards of each batch shuffled. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import commit, record, table

ROOT = Path(__file__).resolve().parent.parent
TEST = ROOT / "jaxrl/data/embedded/arith/test.jsonl"
CONFIG = "configs/grpo.py"
FIRST_REWARD = re.compile(r"^step 1/\d+ .*reward")
BOUNDS = {  # name -> (figure, whether it is met)
    "install under 480 s": ("install_s", lambda v: v is None or v < 480),
    "training under 240 s": ("wall_s", lambda v: v < 240),
    "first reward within 60 s": ("first_reward_s", lambda v: v <= 60),
    "accuracy rises by 0.30": ("gain", lambda v: v >= 0.30),
    "ends at 0.80 or more": ("after", lambda v: v >= 0.80),
    "24 tokens or more on average": ("length_mean", lambda v: v >= 24),
    "lengths spread fourfold (99th over 1st percentile)": ("length_spread", lambda v: v >= 4),
    "a failing class is left": ("worst_kind", lambda v: v < 0.5),
    "shuffled rewards do not rise (0.05)": ("shuffled_gain", lambda v: v is None or v < 0.05),
}


def fresh_clone(folder: Path):
    """Clones the repository and installs it as the README says; returns (python, tree, seconds)."""
    tree, started = folder / "clone", time.monotonic()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    python = str(folder / "env/bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", str(tree)], check=True)
    return python, tree, time.monotonic() - started


def launch(python, tree, run_dir: Path, *overrides, config=CONFIG) -> dict:
    """One job from the command line. Returns seconds (wall, processor, until the first reward) and its summary."""
    command = [python, "-m", "jaxrl.main", f"--config={config}", f"--config.run.dir={run_dir}",
               f"--config.run.compile_cache={run_dir}_cache", "--config.log.console=plain",
               *[f"--config.{o}" for o in overrides]]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    started, first = time.monotonic(), None
    with subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if first is None and FIRST_REWARD.match(line):
                first = time.monotonic() - started
    if process.returncode:
        raise SystemExit("".join(printed[-30:]) + f"\n{' '.join(command)} ended with {process.returncode}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"wall_s": time.monotonic() - started, "processor_s": processor, "first_reward_s": first,
            "summary": json.loads((run_dir / "summary.json").read_text())}


def answers(run_dir: Path):
    """The last evaluation's records, with the kind of each problem."""
    kinds = {row["prompt"]: row["kind"] for row in map(json.loads, TEST.read_text().splitlines())}
    path = sorted((run_dir / "eval").glob("step_*_test.jsonl"))[-1]
    return [r | {"kind": kinds[r["prompt"]]} for r in map(json.loads, path.read_text().splitlines())]


def main_run(python, tree, folder: Path, seed: int) -> dict:
    done = launch(python, tree, folder / "rl", f"run.seed={seed}")
    summary, rows = done.pop("summary"), answers(folder / "rl")
    lengths = np.array([len(r["tokens"]) for r in rows])
    by_kind = collections.defaultdict(list)
    for r in rows:
        by_kind[r["kind"]].append(r["accurate"])
    kinds = {k: round(float(np.mean(v)), 3) for k, v in sorted(by_kind.items())}
    before, after = summary["eval_before"]["accuracy"], summary["eval_after"]["accuracy"]
    return done | {
        "seed": seed, "before": before, "after": after, "gain": after - before, "kinds": kinds,
        "worst_kind": min(kinds.values()), "length_mean": float(lengths.mean()),
        "length_spread": float(np.percentile(lengths, 99) / np.percentile(lengths, 1)),
        "truncated": summary["eval_after"]["sets"]["test"]["truncated_fraction"],
        "rl_s": sum(summary["seconds"][k] for k in ("rollout", "reward", "update", "publish")),
        "rl_steps": summary["steps"]}


def controls(python, tree, folder: Path, seed: int, rl_seconds: float) -> dict:
    start = folder / "rl" / "warm_start" / "export"
    same = (f"run.seed={seed}", f"model.path={start}", "run.warm_start=")
    sampled = launch(python, tree, folder / "pass8", *same, "run.mode=eval", "eval.samples=8", "eval.temperature=1.0")
    lines = (folder / "rl" / "warm_start" / "metrics.jsonl").read_text().splitlines()
    half = [json.loads(line) for line in lines[len(lines) // 2:]]  # without compilation
    each = sum(r["time"]["step"] for r in half) / len(half)  # a line has the mean of its steps
    more = launch(python, tree, folder / "sft", *same, "model.init=pretrained", "data.shuffle=true", f"data.seed={seed + 1000}",
                  f"train.steps={round(rl_seconds / each)}", "optimizer.lr=1e-3", f"eval.sets=test={TEST}",
                  "reward.functions=boxed", "eval.every_steps=0", config="configs/grpo_sft.py")
    reward = ROOT / "evidence/shuffled_reward.py"
    control = launch(python, tree, folder / "shuffled", *same, f"reward.functions={reward}:shuffled,boxed",
                     "reward.weights=1,0", "eval.accuracy_from=boxed")["summary"]
    return {"pass@8": sampled["summary"]["eval"]["pass@8"], "mean@8": sampled["summary"]["eval"]["mean@8"],
            "sft_more_steps": more["summary"]["steps"], "sft_more": more["summary"]["eval_after"]["accuracy"],
            "shuffled": control["eval_after"]["accuracy"],
            "shuffled_gain": control["eval_after"]["accuracy"] - control["eval_before"]["accuracy"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--here", action="store_true", help="no clone, no install")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--control-seeds", default="0,1,2", help="seeds that also run the controls; empty = none")
    parser.add_argument("--out", default="", help="keep the runs here")
    args = parser.parse_args()
    at = commit()  # before the tree may change
    folder = Path(args.out or tempfile.mkdtemp(prefix="quickstart"))
    folder.mkdir(parents=True, exist_ok=True)
    python, tree, install = (sys.executable, ROOT, None) if args.here else fresh_clone(folder)
    runs = []
    for seed in map(int, args.seeds.split(",")):
        run = {"install_s": install} | main_run(python, tree, folder / str(seed), seed)
        run["shuffled_gain"] = None
        if str(seed) in args.control_seeds.split(","):
            run |= controls(python, tree, folder / str(seed), seed, run["rl_s"])
        runs.append({k: round(v, 3) if isinstance(v, float) else v for k, v in run.items()})
        print(json.dumps(runs[-1]), flush=True)
    names = [n for n in runs[0] if n not in ("kinds", "seed")]
    table(["figure", *[f"seed {r['seed']}" for r in runs]], [[n, *[r.get(n, "") for r in runs]] for n in names])
    missed = [f"seed {r['seed']}: {name}, measured {r[figure]}" for r in runs for name, (figure, met) in BOUNDS.items()
              if not met(r[figure])]
    command = " ".join(["python evidence/quickstart.py", *sys.argv[1:]])
    record("quickstart", {"command": command, "runs": runs, "missed": missed}, at, python)
    print("\n".join(missed) or "every bound is met")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
