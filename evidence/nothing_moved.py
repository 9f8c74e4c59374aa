"""Whether a change of the code changed a number: the same runs on two trees, compared bit by bit.

    python evidence/nothing_moved.py BEFORE [AFTER]       two checkouts; AFTER is this one where it is left out

Cases: some steps of configs/grpo.py, ppo.py and grpo_async.py (at its synchronous limit), all tiny, and of configs/grpo_sft.py; then
of tests/helpers/tiny_job.py (a two-layer model from scratch) GRPO with a KL and two updates a batch, GRPO ahead of its steps, two processes, a
run that is stopped and goes on, and a checkpoint that BEFORE writes and AFTER goes on from. Compared are all metrics but those of the
clock and of compilations, the rollouts but for the key of the code that scored them, the exported weights, and the options with their
defaults. Writes evidence/results/nothing_moved.json; about ten minutes.
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
TINY, SHORT = "tests/helpers/tiny_job.py", ("eval.before=False", "eval.after=False")
KL = ("algorithm.kl.coef=0.05", "algorithm.num_minibatches=2", "train.steps=4")
SYNCHRONOUS = ("rollout.max_staleness=0", "rollout.partial=False", "train.steps=3", *SHORT)
CASES = {  # name -> (config, options of the first run, of the run that goes on, processes)
    "configs/grpo.py:tiny": ("configs/grpo.py:tiny", ("train.steps=3", *SHORT), None, 1),
    "configs/ppo.py:tiny": ("configs/ppo.py:tiny", ("train.steps=3", *SHORT), None, 1),
    "configs/grpo_async.py:tiny, synchronous": ("configs/grpo_async.py:tiny", SYNCHRONOUS, None, 1),
    "configs/grpo_sft.py": ("configs/grpo_sft.py", ("train.steps=4", *SHORT), None, 1),
    "kl": (TINY, KL, None, 1),
    "ahead": (TINY, ("rollout.max_staleness=2", "train.steps=4"), None, 1),
    "two processes": (TINY, ("train.steps=2", "mesh.fsdp=2"), None, 2),
    "resumed": (TINY, ("train.steps=2", "checkpoint.every_steps=1"), ("train.steps=4", "checkpoint.every_steps=1"), 1),
}
CLOCK = ("time", "perf/", "rollout/ahead_complete")


def run(tree: Path, folder: Path, config: str, options, processes: int) -> None:
    if config == TINY and not (tree / config).exists():
        config = "tests/tiny_job.py"  # of a tree older than tests/helpers
    command = [sys.executable, "-m"]
    command += ["jaxrl.launch", f"--processes={processes}", "--devices=1", "--"] if processes > 1 else ["jaxrl.main"]
    flags = ["checkpoint.export_at_end=True", "log.console=plain", f"run.dir={folder}", *options]
    command += [f"--config={tree / config}", *(f"--config.{flag}" for flag in flags)]
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


KEYS = "import jaxrl; import json; print(json.dumps(json.loads(jaxrl.default_config().to_json_best_effort())))"


def defaults(tree: Path) -> dict:
    """Every option of a tree -> its default."""
    done = subprocess.run([sys.executable, "-c", KEYS], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True,
                          check=True)
    return json.loads(done.stdout)


def row(name: str, found: dict, differences: list) -> list:
    return [name, len(found["metrics"]), sum(map(len, found["rollouts"].values())), len(found["weights"]), len(differences)]


def main() -> int:
    before, after = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT
    rows, failed = [], {}
    with tempfile.TemporaryDirectory() as place:
        for name, (config, first, again, processes) in CASES.items():
            found = []
            for side, tree in (("before", before), ("after", after)):
                folder = Path(place) / side / "".join(c if c.isalnum() else "_" for c in name)
                for options in (first, *([again] if again else [])):
                    run(tree, folder, config, options, processes)
                found.append(seen(folder))
            failed[name] = differences(*found)
            rows.append(row(name, found[0], failed[name]))
        folder = Path(place) / "across"  # the checkpoint of before, the code of after
        config, first, again, processes = CASES["resumed"]
        run(before, folder, config, first, processes)
        run(after, folder, config, again, processes)
        mine = seen(Path(place) / "before" / "resumed")
        failed["a checkpoint of before"] = differences(mine, seen(folder))
        rows.append(row("a checkpoint of before", mine, failed["a checkpoint of before"]))
    failed["options and their defaults"] = differences(defaults(before), defaults(after))
    table(["case", "lines of metrics", "rollouts", "files of weights", "differences"], rows)
    for name, found in failed.items():
        for difference in found[:5]:
            print(f"{name}: {difference}")
    git = subprocess.run(["git", "-C", str(before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    names = ("lines", "rollouts", "weights", "differences")
    record("nothing_moved", {"before": git.stdout.strip(), "cases": {name: dict(zip(names, counts, strict=True)) for name, *counts in rows}})
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
