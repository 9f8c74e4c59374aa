"""Start-up: seconds from the start of the process to the end of the first training step, cold and warm, by part.

    python benchmarks/startup.py [--rounds 3] [--out benchmarks/results/startup.json]

Cold: an empty folder of compiled programs. Warm: the folder that the cold run left. Both on the README's task: `sft`, the first
thing `--config=configs/grpo.py` does, `grpo`, its reinforcement learning from random weights, and `w1`, the same with the model and the
batch of benchmarks/peers' W1 and the defaults of a job in the place of that config's; without evaluation and
checkpoints, which the first step does not need. Parts: `import` is Python, its modules and reading the config; `start` inputs, data,
model and weights; the phases of the step follow, compilation in them; seconds are the clock's, the median of the rounds by their sum.
Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ONE_STEP = {"train.steps": 1, "log.every_steps": 1, "eval.before": False, "eval.after": False, "checkpoint.at_end": False,
            "checkpoint.export_at_end": False, "checkpoint.every_steps": 0, "eval.every_steps": 0, "log.console": "off"}
MODEL = ("qwen3", 128, 96, 3, 3, 3, 32, 256, 256)
W1 = ("qwen2", 8192, 256, 4, 4, 2, 64, 704, 256)
NAMES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "max_position_embeddings")
JOBS = {
    "sft": ("grpo_sft", {}),
    "grpo": ("grpo", {"run.warm_start": "", "model.init": "random", "model.tokenizer": "jaxrl://arith/tokenizer",
                      "model.config": {**dict(zip(NAMES, MODEL, strict=True)), "tie_word_embeddings": True}}),
    "w1": ("grpo", {"run.warm_start": "", "model.init": "random", "model.tokenizer": "jaxrl://arith/tokenizer",
                    "model.config": {**dict(zip(NAMES, W1, strict=True)), "tie_word_embeddings": True},
                    "rollout.max_new_tokens": 64, "rollout.min_new_tokens": 64, "rollout.prompt_lengths": (), "rollout.slots": 0,
                    "rollout.compaction": True, "train.row_lengths": (), "train.row_counts": 2, "train.tokens_per_microbatch": 0}),
}


def first_step(config: str, options: dict, folder: Path, cache: Path) -> dict[str, float]:
    """Seconds by part of one process, with their sum as `total`."""
    options = ONE_STEP | options | {"run.dir": folder, "run.compile_cache": cache}
    command = [sys.executable, "-m", "jaxrl.main", f"--config={ROOT / 'configs' / config}.py",
               *(f"--config.{name}={value}" for name, value in options.items())]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    parts = {"start": json.loads((folder / "summary.json").read_text())["seconds"]["start"]}
    parts |= {name: line[name] for name in ("data", "rollout", "reward", "score", "update", "publish", "other") if name in line}
    total = line["wall"] - began
    return {"import": total - sum(parts.values()), **parts, "total": total, "programs": line["compilations"]}


def main(argv=None) -> int:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--jobs", default=",".join(JOBS))
    args.add_argument("--out", type=Path)
    args = args.parse_args(argv)
    runs = {f"{job}, {state}": [] for job in args.jobs.split(",") for state in ("cold", "warm")}
    for _ in range(args.rounds):
        for job in args.jobs.split(","):
            config, options = JOBS[job]
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    runs[f"{job}, {state}"].append(first_step(config, options, Path(folder) / state, Path(folder) / "cache"))
    medians = {name: sorted(found, key=lambda parts: parts["total"])[len(found) // 2] for name, found in runs.items()}
    for name, parts in medians.items():
        print(f"{name:12s} {parts['total']:6.2f} s   " + "  ".join(
            f"{part} {seconds:.2f}" for part, seconds in parts.items() if part not in ("total", "programs")), flush=True)
    if args.out:
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "orbax-checkpoint", "transformers")}
        args.out.write_text(json.dumps({"machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
                                        "python": platform.python_version(), "versions": versions, "medians": medians,
                                        "rounds": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
