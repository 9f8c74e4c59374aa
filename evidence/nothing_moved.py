"""Whether a change of the code changed a number: the same runs on two trees, compared bit by bit.

    python evidence/nothing_moved.py BEFORE [AFTER]       two checkouts; AFTER is this one where it is left out

Cases (tests/tiny_job.py, a two-layer model from scratch): GRPO with a KL and two updates a batch, PPO with a critic, GRPO at the
synchronous limit of configs/grpo_async.py, GRPO ahead of its steps, SFT, two processes, a run that is stopped and goes on, and a
checkpoint that BEFORE writes and AFTER goes on from. Compared are all metrics but those of the clock and of compilations, the rollouts
but for the key of the code that scored them, and the exported weights. Writes evidence/results/nothing_moved.json; about five minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import record, table

ROOT = Path(__file__).resolve().parent.parent
GRPO = ("algorithm.kl.coef=0.05", "algorithm.num_minibatches=2", "train.steps=4")
CASES = {  # name -> (argument of the config, options of the first run, of the run that goes on, processes)
    "grpo": ("", GRPO, None, 1),
    "ppo": ("", ("algorithm.preset=ppo", "train.steps=3"), None, 1),
    "synchronous": ("", ("rollout.max_staleness=0", "rollout.sync_every=1", "algorithm.preset=decoupled_ppo", "train.steps=3"), None, 1),
    "ahead": ("", ("rollout.max_staleness=2", "train.steps=4"), None, 1),
    "sft": (":sft", ("train.steps=4",), None, 1),
    "two_processes": ("", ("train.steps=2", "mesh.fsdp=2"), None, 2),
    "resumed": ("", ("train.steps=2", "checkpoint.every_steps=1"), ("train.steps=4", "checkpoint.every_steps=1"), 1),
}
CLOCK = ("time", "perf/", "rollout/ahead_answered")


def run(tree: Path, folder: Path, argument: str, options, processes: int) -> None:
    command = [sys.executable, "-m"]
    command += ["jaxrl.launch", f"--processes={processes}", "--devices=1", "--"] if processes > 1 else ["jaxrl.main"]
    flags = ["checkpoint.export_at_end=True", "log.console=plain", f"run.dir={folder}", *options]
    command += [f"--config={tree / 'tests' / 'tiny_job.py'}{argument}", *(f"--config.{flag}" for flag in flags)]
    env = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def seen(folder: Path) -> dict:
    """What a run has left: metrics by step, rollouts by step, hashes of exported weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    out = {"metrics": [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines], "rollouts": {}, "weights": {}}
    for file in sorted(folder.glob("rollouts/*.jsonl")):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for row in rows:
            row.get("reward", {}).pop("by", None)
        out["rollouts"][file.name] = rows
    for file in sorted(folder.glob("export/*.safetensors")):
        out["weights"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return out


def differences(a, b, where: str = "") -> list[str]:
    """Paths of what is not equal; NaN equals NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for key in sorted(a.keys() | b.keys()) for d in differences(a.get(key), b.get(key), f"{where}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {str(a)[:60]} -> {str(b)[:60]}"]


def main() -> int:
    before, after = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT
    rows, failed = [], {}
    with tempfile.TemporaryDirectory() as place:
        for name, (argument, first, again, processes) in CASES.items():
            found = []
            for side, tree in (("before", before), ("after", after)):
                folder = Path(place) / side / name
                for options in (first, *([again] if again else [])):
                    run(tree, folder, argument, options, processes)
                found.append(seen(folder))
            failed[name] = differences(*found)
            rows.append([name, len(found[0]["metrics"]), sum(map(len, found[0]["rollouts"].values())), len(found[0]["weights"]), len(failed[name])])
        folder = Path(place) / "across"  # the checkpoint of before, the code of after
        argument, first, again, processes = CASES["resumed"]
        run(before, folder, argument, first, processes)
        run(after, folder, argument, again, processes)
        mine = seen(Path(place) / "before" / "resumed")
        failed["a checkpoint of before"] = differences(mine, seen(folder))
        rows.append(["a checkpoint of before", len(mine["metrics"]), sum(map(len, mine["rollouts"].values())), len(mine["weights"]),
                     len(failed["a checkpoint of before"])])
    table(["case", "lines of metrics", "rollouts", "files of weights", "differences"], rows)
    for name, found in failed.items():
        print("\n".join(f"{name}: {d}" for d in found[:5]))
    git = subprocess.run(["git", "-C", str(before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    names = ("lines", "rollouts", "weights", "differences")
    record("nothing_moved", {"before": git.stdout.strip(), "cases": {name: dict(zip(names, counts, strict=True)) for name, *counts in rows}})
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
