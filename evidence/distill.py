"""Distillation: steps to 80 % on the embedded task for every loss, beside the reinforcement learning that made the teacher.

python evidence/distill.py [SEED ...] [--folder=DIR]     (default 0; a run that is finished in DIR is not made again)

configs/grpo.py makes the teacher (its export) and the student (its warm start); configs/distill.py brings one to the other: at
every token of what the student writes (forward, reverse, jsd; over the whole vocabulary, reverse also over the student's top 4
tokens with and without a tail, forward also on the completions of the data alone), or by its sampled tokens. Greedy accuracy on
126 held-out problems after every second step. Seconds are processor-seconds of the process from its first step on, evaluations
included: they do not depend on what else the machine did.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "evidence"), str(ROOT / "tests")]

from common import record, table  # noqa: E402
from helpers.run_tools import environment  # noqa: E402

GOAL = 0.8
RUNS = {
    "sampled": {},
    "forward": {"distill.loss": "forward"},
    "reverse": {"distill.loss": "reverse"},
    "jsd": {"distill.loss": "jsd"},
    "reverse, top 4": {"distill.loss": "reverse", "distill.top_k": 4},
    "reverse, top 4, no tail": {"distill.loss": "reverse", "distill.top_k": 4, "distill.tail": False},
    "forward, data alone": {"distill.loss": "forward", "distill.on_policy": 0.0, "data.path": "jaxrl://arith/sft.jsonl",
                            "data.prompts_per_step": 128},
}
EVERYWHERE = {"eval.every_steps": 2, "eval.max_rows": 126, "log.console": "off"}


class Clock:
    """A sink of the run: processor-seconds of its process after every step, in clock.jsonl."""

    def __init__(self, run_dir, config):
        self._file = open(Path(run_dir) / "clock.jsonl", "a", buffering=1)  # noqa: SIM115  (held until close)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        print(json.dumps({"step": step, "cpu": time.process_time()}), file=self._file)

    def close(self) -> None:
        self._file.close()


def one(run: Path, config: str, options: dict) -> dict:
    """Makes a run and reads it."""
    options = EVERYWHERE | options | {"log.sinks": f"{__file__}:Clock,"}
    if not (run / "summary.json").exists():
        subprocess.run([sys.executable, "-m", "jaxrl.main", f"--config={ROOT / 'configs' / config}", f"--config.run.dir={run}",
                        *[f"--config.{name}={value}" for name, value in options.items()]], env=environment(), check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = {row["step"]: row["cpu"] for row in map(json.loads, (run / "clock.jsonl").read_text().splitlines())}
    points = [(row["step"], row["eval/accuracy"], round(clock[row["step"]] - clock[0], 1)) for row in lines if "eval/accuracy" in row]
    reached = next(((step, seconds) for step, accuracy, seconds in points if accuracy >= GOAL), (None, None))
    return {"steps_to_goal": reached[0], "seconds_to_goal": reached[1], "final": points[-1][1], "points": points}


def main() -> None:
    seeds = [int(word) for word in sys.argv[1:] if not word.startswith("--")] or [0]
    given = next((word.partition("=")[2] for word in sys.argv if word.startswith("--folder=")), "")
    with tempfile.TemporaryDirectory(prefix="distill") as scratch:
        top, results = Path(given or scratch), []
        for seed in seeds:
            grpo = top / f"grpo_{seed}"
            results.append({"seed": seed, "run": "grpo"} | one(grpo, "grpo.py", {"run.seed": seed}))
            for name, options in RUNS.items():
                both = {"run.seed": seed, "teacher.path": grpo / "export", "model.path": grpo / "warm_start" / "export",
                        "checkpoint.export_at_end": False}
                results.append({"seed": seed, "run": name} | one(top / f"{name}_{seed}".replace(", ", "_").replace(" ", "_"), "distill.py",
                                                                 both | options))
                print(results[-1]["run"], results[-1]["steps_to_goal"], results[-1]["final"], flush=True)
    table(["seed", "run", "steps to 80 %", "processor-seconds", "held-out at the end"],
          [[r["seed"], r["run"], r["steps_to_goal"], r["seconds_to_goal"], f"{100 * r['final']:.1f} %"] for r in results])
    record("distill", results)


if __name__ == "__main__":
    main()
