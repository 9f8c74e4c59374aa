"""A long run with every service on: what it holds and what a step costs, from its first tenth to its last.

    python benchmarks/long_run.py --out benchmarks/results/long_run.json        # with vLLM installed; about an hour on two cores
    python benchmarks/long_run.py --engine=jax                                  # the embedded sampler instead of vLLM
    python benchmarks/long_run.py --steps=20                                    # to see that it runs

Steps of configs/env.py:calc from its warm start at a small learning rate, 16 episodes each: turns with a tool in environment
workers, rewards in theirs, two steps of staleness with completions that cross weight syncs, vLLM, a record of the newest 50
steps, a checkpoint every 50, an evaluation every 200, metrics, TensorBoard, the report page. Every five seconds what is held
is read from /proc: by the trainer, by all other processes of the job (workers, the server) and by all: resident memory, threads, open
files, seconds of processor; and the files of the run's folder. The table has tenths of the run behind its first twentieth, in which
programs are compiled. Seconds of processor do not depend on what else the machine does; those of the clock do.

Ends with 1 where, from its first tenth to its last, the processor's seconds of a step or the trainer's memory grow by more
than 3 %, or threads or open files by more than two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "evidence"))
from common import commit, machine, table  # noqa: E402

TENTHS, COMPILING, GROWTH, MORE = 10, 0.05, 0.03, 2
EVERY = 5.0  # seconds
TICKS = os.sysconf("SC_CLK_TCK")


def command(folder: Path, steps: int, engine: str) -> list[str]:
    often = max(1, min(50, steps // 4))
    options = {
        "run.dir": folder / "run", "train.steps": steps, "data.prompts_per_step": 4, "rollout.group_size": 4, "optimizer.lr": 1e-6,
        "rollout.engine": engine, "rollout.slots": 0 if engine == "vllm" else 16, "rollout.compaction": engine == "vllm",
        "rollout.max_staleness": 2, "rollout.partial": True, "env.workers": 1, "reward.workers": 1, "record.every": 1,
        "record.last": often, "checkpoint.every_steps": often, "checkpoint.keep": 2, "eval.every_steps": 4 * often,
        "log.tensorboard": True, "log.report": True, "log.console": "plain", "algorithm.kl.coef": 0.01}
    return [sys.executable, "-m", "jaxrl.main", "--config=configs/env.py:calc", *(f"--config.{k}={v}" for k, v in options.items())]


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    out = [pid]
    for one in out:
        out += parents.get(one, ())
    return out


def held(pids: list[int]) -> dict[str, float]:
    """MiB resident, threads, open files and seconds of processor (with those of children that have ended) of processes."""
    out = dict.fromkeys(("mib", "threads", "files", "processor"), 0.0)
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has ended meanwhile
            continue
        out["files"] += files
        out["processor"] += sum(map(int, fields[11:15])) / TICKS
        out["threads"] += int(fields[17])
        out["mib"] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return out


def watched(folder: Path, steps: int, engine: str) -> list[dict]:
    """Runs the job; one line per reading: the step it was at, and what is held."""
    lines = []
    with (folder / "log").open("w") as log, subprocess.Popen(command(folder, steps, engine), cwd=ROOT, stdout=log, stderr=log) as job:
        while job.poll() is None:
            time.sleep(EVERY)
            metrics = folder / "run/metrics.jsonl"
            if not metrics.exists():
                continue
            last = [json.loads(x)["step"] for x in metrics.read_text().splitlines(True)[-1:] if x.endswith("\n")]
            everyone = family(job.pid)
            sizes = sizes_of(folder / "run")
            lines.append({"step": last[0] if last else 0, "clock": time.monotonic(), "trainer": held([job.pid]), "others": held(everyone[1:]),
                          "all": held(everyone), "names": len(sizes), "disk_mib": sum(sizes) / 2**20})
    if job.returncode:
        sys.exit("".join((folder / "log").read_text().splitlines(True)[-30:]) + f"ended with {job.returncode}")
    return lines


def sizes_of(folder: Path) -> list[int]:
    """Bytes of each file below it; of those that go meanwhile none."""
    out = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            out += [path.stat().st_size] if path.is_file() else []
    return out


def tenths(lines: list[dict], steps: int) -> list[dict]:
    """The table: tenths of the steps behind those that compile."""
    first = COMPILING * steps
    size = (steps - first) / TENTHS
    return [cost([x for x in lines if first + k * size <= x["step"] < first + (k + 1) * size]) for k in range(TENTHS)]


def cost(lines: list[dict]) -> dict:
    """What a step costs, and what is held at the median."""
    if len(lines) < 2 or lines[0]["step"] == lines[-1]["step"]:
        sys.exit("too few readings in a tenth of the run: more steps, please")
    begin, end = lines[0], lines[-1]
    steps = end["step"] - begin["step"]

    def at(who, what):
        return round(statistics.median(x[who][what] for x in lines), 1)

    def processor(who):
        return round((end[who]["processor"] - begin[who]["processor"]) / steps, 4)

    return {"steps": f"{begin['step']}-{end['step']}", "seconds": round((end["clock"] - begin["clock"]) / steps, 4),
            "processor_all": processor("all"), "processor_trainer": processor("trainer"), "trainer_mib": at("trainer", "mib"),
            "others_mib": at("others", "mib"), "all_mib": at("all", "mib"), "threads": at("all", "threads"),
            "open_files": at("all", "files"), "names": statistics.median(x["names"] for x in lines),
            "disk_mib": round(statistics.median(x["disk_mib"] for x in lines), 1)}


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--steps", type=int, default=2000)
    args.add_argument("--engine", choices=("vllm", "jax"), default="vllm")
    args.add_argument("--out", type=Path)
    given = args.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = tenths(watched(Path(folder), given.steps, given.engine), given.steps)
    table(list(rows[0]), [list(row.values()) for row in rows])
    first, last = rows[0], rows[-1]
    grown = {name: round(last[name] / first[name] - 1, 4) for name in ("processor_all", "processor_trainer", "seconds", "trainer_mib", "all_mib")}
    wrong = [name for name in ("processor_all", "trainer_mib") if grown[name] > GROWTH]
    wrong += [name for name in ("threads", "open_files") if last[name] > first[name] + MORE]
    print("growth from the first tenth to the last:", grown)
    if given.out:
        given.out.write_text(json.dumps({"commit": commit(), "machine": machine(), "engine": given.engine, "tenths": rows, "growth": grown,
                                         "missed": wrong}, indent=1) + "\n")
    if wrong:
        sys.exit(f"grew: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
