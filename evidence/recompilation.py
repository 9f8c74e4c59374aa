"""Programs compiled per step: none once every shape has been seen.

Runs of tests/helpers/tiny_job.py with answers of all lengths, WARM_UP steps and then 50 more: `plain` (GRPO as it is), `rich` (reference,
two passes over two minibatches, prompts of two lengths, packed rows of two lengths, compaction to fewer slots, evaluation and checkpoints on the
way), `refill` (dynamic sampling, so that a step has one or several rounds) and `ppo` (a critic). Counted is every compilation jax
reports in the process, those fetched from the cache too, that a step waited for (`time/compilations`). Programs for fewer slots than
all are compiled in a thread beside the work (`time/compilations_beside`); they count too where they were called for before they were
there. Without that thread, one of `refill` was compiled at step 57.

    python evidence/recompilation.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import record, table
from tiny_runs import train

WARM_UP, STEPS = 50, 100  # what is compiled beside the second batch takes as long as forty of these steps
RUNS = {
    "plain": {},
    "rich": {"algorithm.kl.coef": 0.05, "algorithm.ppo_epochs": 2, "algorithm.num_minibatches": 2, "rollout.prompt_lengths": (48, 96),
             "train.row_lengths": (64, 128), "eval.sets": ("test=jaxrl://arith/test.jsonl",), "eval.max_rows": 6, "eval.every_steps": 5,
             "checkpoint.every_steps": 5, "checkpoint.keep": 2},
    "refill": {"algorithm.dynamic_sampling": "refill", "algorithm.dynamic_sampling_rounds": 3},
    "ppo": {"algorithm.preset": "ppo", "algorithm.kl.coef": 0.05},
}


def one(name: str, folder: Path, steps: int = STEPS) -> dict:
    """Compilations by step of one run, and how ragged its answers were."""
    rows = train(folder / name, folder / "cache", 0, {"train.steps": steps, "data.max_rows": 512, "optimizer.lr": 3e-3} | RUNS[name])["rows"]
    rows = [row for row in rows if row["step"] > 0]
    compiled = [int(row["time"]["compilations"]) for row in rows]
    beside = [int(row["time"]["compilations_beside"]) for row in rows]
    return {"compilations": compiled, "last_step_that_compiled": max((i + 1 for i, n in enumerate(compiled) if n), default=0),
            "after_warm_up": sum(compiled[WARM_UP:]), "beside": sum(beside),
            "last_step_that_compiled_beside": max((i + 1 for i, n in enumerate(beside) if n), default=0), "steps": len(rows),
            "shortest_answer": min(row["length/min"] for row in rows), "longest_answer": max(row["length/max"] for row in rows),
            "tokens_per_step": sorted({int(row["rollout/tokens"]) for row in rows})}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = {name: one(name, Path(folder)) for name in RUNS}
    table(["run", "first step", "last step that compiled", "beside the work, last at step", f"compiled in {STEPS - WARM_UP} steps after {WARM_UP}",
           "answers", "tokens a step"],
          [[name, r["compilations"][0], r["last_step_that_compiled"],
            f"{r['beside']}, {r['last_step_that_compiled_beside']}", r["after_warm_up"],
            f"{r['shortest_answer']:.0f} to {r['longest_answer']:.0f}", f"{r['tokens_per_step'][0]} to {r['tokens_per_step'][-1]}"]
           for name, r in found.items()])
    record("recompilation", found)
    return int(any(r["after_warm_up"] for r in found.values()))


if __name__ == "__main__":
    sys.exit(main())
