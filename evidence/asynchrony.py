"""Asynchrony, showing 4: steps and seconds to 80 % on the embedded task with answers up to 0, 2 and 8 publications old.

python evidence/asynchrony.py [SEED ...] [--folder=DIR]     (default 0 1 2; a run that is finished in DIR is not made again)

configs/grpo_async.py (decoupled loss, partial rollouts) with max_staleness 0, 2 and 8; the three runs of a seed begin with the
same warm start. Held-out accuracy (126 problems, greedy) after every second step. Seconds are processor-seconds of the training
process from its first step on, evaluations included: they do not depend on what else the machine did. Writes
docs/explanations/asynchrony.svg. The ledger of every run is checked (tests/helpers/run_tools.py: ledger).
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

from common import commit, record, table  # noqa: E402
from helpers.run_tools import environment, ledger  # noqa: E402

STALENESS, STEPS, GOAL = (0, 2, 8), 40, 0.8
COLOURS = {0: "#333333", 2: "#1f77b4", 8: "#d62728"}


class Clock:
    """A sink of the run: processor-seconds of its process after every step, in clock.jsonl."""

    def __init__(self, run_dir, config):
        self._file = open(Path(run_dir) / "clock.jsonl", "a", buffering=1)  # noqa: SIM115  (held until close)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        print(json.dumps({"step": step, "cpu": time.process_time()}), file=self._file)

    def close(self) -> None:
        self._file.close()


def one(folder: Path, seed: int, k: int) -> dict:
    run, first = folder / f"{seed}_{k}", folder / f"{seed}_{STALENESS[0]}"
    options = [f"run.seed={seed}", f"rollout.max_staleness={k}", f"rollout.partial={k > 0}", f"train.steps={STEPS}",
               "eval.every_steps=2", "eval.max_rows=126", "checkpoint.export_at_end=False", "log.console=off",
               f"log.sinks={__file__}:Clock,"]
    if run != first:
        options += [f"model.path={first / 'warm_start' / 'export'}", "run.warm_start="]
    if not (run / "summary.json").exists():
        subprocess.run([sys.executable, "-m", "jaxrl.main", f"--config={ROOT / 'configs/grpo_async.py'}", f"--config.run.dir={run}",
                        *[f"--config.{o}" for o in options]], env=environment(), check=True)
    ledger(run, k)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = {row["step"]: row["cpu"] for row in map(json.loads, (run / "clock.jsonl").read_text().splitlines())}
    points = [(row["step"], row["eval/accuracy"], round(clock[row["step"]] - clock[0], 1)) for row in lines if "eval/accuracy" in row]
    steps = [row for row in lines if row["step"]]
    reached = next(((step, seconds) for step, accuracy, seconds in points if accuracy >= GOAL), (None, None))
    return {"seed": seed, "max_staleness": k, "points": points, "steps_to_goal": reached[0], "seconds_to_goal": reached[1],
            "final": points[-1][1], "staleness_mean": round(sum(row.get("staleness/mean", 0) for row in steps) / len(steps), 3),
            "staleness_max": max(row.get("staleness/max", 0) for row in steps),
            "gap_mean": round(sum(row["gap/mean"] for row in steps) / len(steps), 4)}


def plot(runs, path: Path) -> None:
    """Held-out accuracy over steps (left) and over processor-seconds (right), a line per run."""
    width, height, pad = 360, 240, 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width + 40}" height="{height + 50}" font-family="sans-serif" '
           'font-size="11"><rect width="100%" height="100%" fill="white"/>']
    for panel, (title, column) in enumerate((("steps", 0), ("processor-seconds", 2))):
        left, most = pad + panel * (width + 20), max(p[column] for run in runs for p in run["points"])
        at = lambda x, y, left=left, most=most: (left + x / most * (width - pad), height - 20 - y * (height - 60))  # noqa: E731
        out.append(f'<text x="{left}" y="18" font-weight="bold">held-out accuracy over {title}</text>')
        for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
            (x, y), (end, _) = at(0, tick), at(most, tick)
            out.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="{"#888" if tick == GOAL else "#ddd"}"/>'
                       f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:.1f}</text>')
        for part in range(5):
            out.append(f'<text x="{at(most * part / 4, 0)[0]}" y="{height - 4}" text-anchor="middle">{most * part / 4:.0f}</text>')
        for run in runs:
            line = " ".join("{:.1f},{:.1f}".format(*at(p[column], p[1])) for p in run["points"])
            out.append(f'<polyline fill="none" stroke-width="1.5" stroke="{COLOURS[run["max_staleness"]]}" points="{line}"/>')
    for i, k in enumerate(STALENESS):
        out.append(f'<rect x="{pad + 150 * i}" y="{height + 22}" width="14" height="4" fill="{COLOURS[k]}"/>'
                   f'<text x="{pad + 20 + 150 * i}" y="{height + 28}">max_staleness {k}</text>')
    path.write_text("\n".join(out) + "\n</svg>\n")


def main():
    seeds = [int(a) for a in sys.argv[1:] if not a.startswith("--")] or [0, 1, 2]
    given = [a.removeprefix("--folder=") for a in sys.argv[1:] if a.startswith("--folder=")]
    at = commit()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given[0] if given else temporary)
        runs = [one(folder, seed, k) for seed in seeds for k in STALENESS]
    names = ("seed", "max_staleness", "steps_to_goal", "seconds_to_goal", "final", "staleness_mean", "staleness_max", "gap_mean")
    table(list(names), [[run[n] for n in names] for run in runs])
    plot(runs, ROOT / "docs" / "explanations" / "asynchrony.svg")
    record("asynchrony", {"goal": GOAL, "runs": runs}, at)


if __name__ == "__main__":
    main()
