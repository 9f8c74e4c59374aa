"""Pages of real runs in a real browser: what is shown, what the console says, how large and how fast they are.

    python evidence/report.py [--use NAME=RUN ...] [--screenshots FOLDER]

Runs configs/grpo.py:tiny with three seeds, configs/grpo_async.py:tiny, configs/env.py:calc and a tiny job two of whose steps are explained
and tried under other settings, unless --use names runs that
are there already (quickstart, three_seeds, asynchronous, environment, explained; of several runs with commas between), and makes of one a
run of 10,000 steps with all its metrics. Each page is opened in headless chromium (Debian's package `chromium`), which tells
its texts, its drawings and every line of its console; the pictures are for eyes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import record, table

from jaxrl.report import write_report
from jaxrl.telemetry.run_dir import dumps

JOBS = {
    "quickstart": [("configs/grpo.py:tiny", ["run.seed=0"])],
    "three_seeds": [("configs/grpo.py:tiny", [f"run.seed={seed}"]) for seed in range(3)],
    "asynchronous": [("configs/grpo_async.py:tiny", ["train.steps=12"])],
    "environment": [("configs/env.py:calc", ["train.steps=6"])],
    "explained": [("tests/helpers/tiny_job.py", ["train.steps=5", "record.every=1", "rollout.group_size=4", "checkpoint.export_at_end=false"])],
}
AGAIN = {  # options of further calls on a run, by its own config
    "explained": [["run.mode=explain", "replay.steps=3"],
                  ["run.mode=replay", "replay.steps=4", "replay.try=optimizer.lr=0.003,0.1;algorithm.kl.coef=0.5;algorithm.ppo_epochs=2"]],
}
EXPECTED = {  # texts that have to stand on the page
    "quickstart": ["reward/mean", "seconds per step by phase", "measured / planned", "boxed", "gap/mean"],
    "three_seeds": ["seeds 0, 1, 2", "mean of 3", "smallest", "largest", "run.seed"],
    "asynchronous": ["staleness/mean", "publications", "rollout.max_staleness"],
    "environment": ["model, turn 1", "env/turns", "env/calls"],
    "explained": ["Steps that were explained", "groups by share", "Other settings on one batch", "optimizer.lr=0.1", "what each setting gained"],
    "10000 steps": ["each column is the mean of up to", "reward/mean"],
}
STEPS = 10_000


def made(name: str, folder: Path) -> list[Path]:
    out = []
    for number, (config, options) in enumerate(JOBS[name]):
        run = folder / f"{name}_{number}"
        for source, said in [(config, options), *((run / "config.json", more) for more in AGAIN.get(name, ()))]:
            flags = [f"--config.{o}" for o in (*said, f"run.dir={run}", "log.console=plain")]
            subprocess.run([sys.executable, "-m", "jaxrl.main", f"--config={source}", *flags], check=True, stdout=subprocess.DEVNULL)
        assert (run / "report.html").exists(), "the run wrote no report"
        out.append(run)
    return out


def long_run(of: Path, folder: Path) -> Path:
    """A run of STEPS steps with the metrics of `of`, each with some noise on it, and its rollouts."""
    lines = [json.loads(t) for t in (of / "metrics.jsonl").read_text().splitlines()]
    line, draw = max(lines, key=lambda line: len(line)), random.Random(0)
    folder.mkdir()
    for name in ("config.json", "summary.json", "rollouts", "eval", "export/tokenizer.json"):
        if (of / name).is_dir():
            shutil.copytree(of / name, folder / name)
        elif (of / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(of / name, folder / name)
    noisy = lambda x: x * draw.uniform(0.8, 1.2) + draw.gauss(0, 1e-3) if isinstance(x, float) else x  # noqa: E731
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            row = {k: noisy(v) for k, v in line.items()} | {"step": step, "time": {k: noisy(v) for k, v in line["time"].items()}}
            file.write(dumps(row) + "\n")
    return folder


def opened(page: Path, picture: Path | None = None, width: int = 1280, height: int = 6000, dark: bool = False) -> dict:
    """What chromium makes of a page."""
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=5000",
                 f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        flags += ["--no-sandbox"] * (os.getuid() == 0) + ["--blink-settings=preferredColorScheme=0"] * dark
        run = lambda *more: subprocess.run(["chromium", *flags, *more, page.as_uri()], capture_output=True, text=True, timeout=300)  # noqa: E731
        done = run("--dump-dom")
        if picture is not None:
            run(f"--screenshot={picture}")
    dom = done.stdout.partition('<script type="application/json"')[0]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    drawn = re.search(r'data-drawn="(\d+)"', done.stdout)
    return {"dom": dom, "console": console, "drawings": dom.count("<canvas"), "milliseconds": int(drawn[1]) if drawn else None}


def look(name: str, runs: list[Path], folder: Path, pictures: Path | None) -> dict:
    page, began, spent = folder / f"{name.replace(' ', '_')}.html", time.perf_counter(), time.process_time()
    write_report(runs, page)
    if name == "environment":
        assert '"trained":false,"text"' in page.read_text(), "nothing that was put between turns"
    out = {"bytes": page.stat().st_size, "write_seconds": round(time.perf_counter() - began, 2),
           "write_processor_seconds": round(time.process_time() - spent, 2)}
    seen = opened(page, pictures and pictures / f"{page.stem}.png")
    if pictures:
        opened(page, pictures / f"{page.stem}_dark.png", dark=True)
        opened(page, pictures / f"{page.stem}_narrow.png", width=500, height=9000)
    text = re.sub(r"<[^>]*>", " ", seen["dom"])
    missing = [t for t in EXPECTED[name] if t not in text]
    assert not missing and not seen["console"], (name, missing, seen["console"])
    assert out["bytes"] < 3e6 and out["write_seconds"] < 5 and seen["milliseconds"] < 5000, (out, seen["milliseconds"])
    return out | {"draw_milliseconds": seen["milliseconds"], "drawings": seen["drawings"], "texts_found": len(EXPECTED[name]),
                  "console_lines": len(seen["console"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--use", action="append", default=[], metavar="NAME=RUN[,RUN ...]")
    parser.add_argument("--screenshots", type=Path)
    args = parser.parse_args()
    given = {name: [Path(p) for p in runs.split(",")] for name, _, runs in (text.partition("=") for text in args.use)}
    if args.screenshots:
        args.screenshots.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        for name in JOBS:
            found[name] = look(name, given.get(name) or made(name, work), work, args.screenshots)
            given.setdefault(name, [work / f"{name}_0"])
        found["10000 steps"] = look("10000 steps", [long_run(given["quickstart"][0], work / "long")], work, args.screenshots)
        found["10000 steps"]["metrics_bytes"] = (work / "long" / "metrics.jsonl").stat().st_size
    table(["page", "MB", "written in s", "drawn in ms", "drawings", "console lines"],
          [[n, f"{f['bytes'] / 1e6:.2f}", f["write_seconds"], f["draw_milliseconds"], f["drawings"], f["console_lines"]]
           for n, f in found.items()])
    version = subprocess.run(["chromium", "--version"], capture_output=True, text=True).stdout.split()
    record("report", {"browser": " ".join(version[:2]), "pages": found})


if __name__ == "__main__":
    main()
