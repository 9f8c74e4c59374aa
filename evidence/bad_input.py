"""Showing 7: wrong inputs, each through the real command line, and what a user gets to read.

    python evidence/bad_input.py [NAME ...]

Every case of bad_input_cases.py runs `python -m jaxrl.main` in a process of its own, in an empty folder. Expected of each:

- exit status 2, no traceback, and a message with the field or file, the value and the remedy (texts named by the case);
- less than CPU_SECONDS of processor time with everything the command started (not wall time: machines are shared);
- no device work before the message: no backend is opened and nothing is compiled (the column says where this is impossible:
  a reward function that fails when it is called needs answers to be called with);
- nothing half-written: no temporary file of any kind, every JSON and JSONL in the run directory parses, and every file
  that was there before is there unchanged;
- no process is left.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

from bad_input_cases import CASES, Place, Unavailable  # noqa: E402
from common import record, table  # noqa: E402
from helpers.run_tools import ROOT, environment, run  # noqa: E402

CPU_SECONDS = 8.0
HALF_WRITTEN = re.compile(r"\.tmp|\.part(ial)?$|\.old$|orbax-checkpoint-tmp|\.deleting$|~$")
MARK = "JAXRL_BAD_INPUT_CASE"  # in the environment of a case and of all its children


def base_run(base: Path) -> Path:
    """A run of four steps with two checkpoints, for the cases about resuming; fills the compilation cache of all cases."""
    folder = base / "base" / "run"
    status, text = run(folder, "train.steps=4", f"run.compile_cache={base / 'xla'}", "log.tensorboard=true")
    assert status == 0, text
    return folder


def execute(case, base: Path, good: Path) -> dict:
    """Runs one case; returns what was measured and the list of complaints about it."""
    place = Place(base / re.sub(r"\W+", "_", case.name), good)
    for folder in (place.inputs, place.root / "tmp"):
        folder.mkdir(parents=True)
    try:
        overrides = case.prepare(place)
        before = contents(place.run_dir)
        done = start(case, place, overrides, base / "xla")
        text, device = split_log(done["output"])
        return {
            "name": case.name,
            "group": case.group,
            "status": done["status"],
            "cpu_seconds": round(done["cpu"], 1),
            "wall_seconds": round(done["wall"], 1),
            "device": device,
            "message": message(text).replace(str(place.root), "...").replace(str(ROOT), "..."),
            "left_in_run_dir": sorted(p.name for p in place.run_dir.iterdir()) if place.run_dir.is_dir() else [],
            "problems": complaints(case, done, text, device) + leftovers(place, before, case) + survivors(place),
            "text": text,
        }
    finally:
        place.cleanup()


def complaints(case, done: dict, text: str, device: str) -> list[str]:
    """What is wrong with the status, the message, the time and the device work."""
    said, out = message(text), []
    if done["status"] != case.status:
        out.append(f"exit status {done['status']}")
    if "Traceback" in text or not said:
        out.append("traceback" if "Traceback" in text else "no message")
    out += [f"does not say {t!r}" for t in case.says if t not in said]
    if done["cpu"] > case.seconds:
        out.append(f"{done['cpu']:.1f} s")
    if device != "none" and not case.device:
        out.append(f"device work: {device}")
    return out


def start(case, place: Place, overrides: list[str], cache: Path) -> dict:
    """Runs the command in the case's folder; status, output, processor seconds of it and all it waited for."""
    arguments = case.command if case.command is not None else ["--config={tiny}"]
    arguments = [a.format(inputs=place.inputs, tiny=ROOT / "tests/helpers/tiny_job.py") for a in arguments]
    common = {"run.dir": place.run_dir, "run.compile_cache": cache, "log.console": "plain"}
    given = {o.partition("=")[0] for o in overrides}
    flags = [f"--config.{k}={v}" for k, v in common.items() if k not in given]
    env = {
        **environment(),
        "TMPDIR": str(place.root / "tmp"),
        MARK: str(place.root),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "JAX_LOG_COMPILES": "1",
        "JAX_DEBUG_LOG_MODULES": "jax._src.xla_bridge",
        **case.env,
    }
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl.main", *arguments, *flags, *[f"--config.{o}" for o in overrides]],
        cwd=place.root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output: list[bytes] = []
    reader = threading.Thread(target=lambda: output.append(process.stdout.read()), daemon=True)
    reader.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - begin
    reader.join(5)
    return {
        "status": process.returncode,
        "output": b"".join(output).decode("utf-8", "replace"),
        "cpu": usage.ru_utime + usage.ru_stime,
        "wall": wall,
    }


def split_log(output: str) -> tuple[str, str]:
    """(what the user would see, device work): jax's own log lines, which only these runs ask for, are taken out."""
    lines = output.splitlines()
    compiled = [m[1] for line in lines if (m := re.search(r"Compiling (?:jit\()?([\w<>.]+)", line)) and "jax" in line]
    opened = any("xla_bridge" in line and "Initializing backend" in line for line in lines)
    own = re.compile(r"jax\._src|^Finished |^Compiling |^Persistent compilation cache|Argument mapping")
    kept = "\n".join(line for line in lines if not own.search(line))
    return kept, f"{len(compiled)} compiled" if compiled else "backend" if opened else "none"


def message(text: str) -> str:
    """From the last line that begins with 'jaxrl: ' (the message of main) to the end."""
    parts = re.split(r"(?m)^jaxrl: ", text)
    return parts[-1].strip() if len(parts) > 1 else ""


def contents(folder: Path) -> dict[str, str]:
    return (
        {
            str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in folder.rglob("*")
            if p.is_file() and p.name != ".lock"
        }
        if folder.is_dir()
        else {}
    )


def leftovers(place: Place, before: dict[str, str], case) -> list[str]:
    """Half-written files anywhere below the case's folder, JSON that does not parse, files that were lost or changed."""
    ours = [p for p in place.root.rglob("*") if not p.is_relative_to(place.inputs)]
    out = [
        f"left: {p.relative_to(place.root)}"
        for p in ours
        if HALF_WRITTEN.search(p.name) or p.parent == place.root / "tmp"
    ]
    out += [f"left: {p.name}" for p in place.root.iterdir() if p.name not in ("in", "tmp", "run")]
    for path in ours:
        if path.is_file() and path.suffix in (".json", ".jsonl"):
            try:
                for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                    json.loads(text)
            except ValueError:
                out.append(f"half-written: {path.relative_to(place.root)}")
    now = contents(place.run_dir)
    grows = ("metrics.jsonl",) if case.device else ()
    out += [
        f"{'changed' if name in now else 'lost'}: {name}"
        for name, sha in before.items()
        if now.get(name) != sha and name not in grows
    ]
    return out


def survivors(place: Place) -> list[str]:
    """Processes that still carry the case's mark, a moment after the command ended (Linux; elsewhere none are seen)."""
    mark = f"{MARK}={place.root}".encode()
    for _ in range(20):
        alive = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes().split(b"\0") and int(entry.parent.name) not in place.helpers():
                    alive.append(entry.parent.name)
            except OSError:
                continue
        if not alive:
            return []
        time.sleep(0.1)
    return [f"{len(alive)} processes left"]


def main(names: list[str]) -> int:
    base = Path(tempfile.mkdtemp(prefix="jaxrl-bad-input-"))
    rows = []
    try:
        good = base_run(base)
        for case in CASES:
            if names and not any(n in case.name for n in names):
                continue
            try:
                row = execute(case, base, good)
            except Unavailable as e:
                print(f"not run: {case.name}: {e}", flush=True)
                continue
            text = row.pop("text")
            rows.append(row)
            print(
                f"{'ok ' if not row['problems'] else 'BAD'} {row['cpu_seconds']:4.1f} s  {row['name']}: {row['message'][:1500]}",
                flush=True,
            )
            if row["problems"]:
                print(
                    f"    {row['problems']}\n" + "".join(f"    | {line}\n" for line in text.splitlines()[-25:]),
                    flush=True,
                )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print()
    table(
        ["kind", "case", "status", "cpu s", "device", "left", "verdict"],
        [
            [
                r["group"],
                r["name"],
                r["status"],
                r["cpu_seconds"],
                r["device"],
                len(r["left_in_run_dir"]),
                "; ".join(r["problems"]) or "ok",
            ]
            for r in rows
        ],
    )
    if not rows:
        return 1
    bad = sum(bool(r["problems"]) for r in rows)
    slowest = max(rows, key=lambda r: r["cpu_seconds"])
    print(
        f"\n{len(rows)} cases, {bad} with complaints; most processor time: {slowest['cpu_seconds']} s ({slowest['name']})"
    )
    if not names:
        record(
            "bad_input",
            {
                "cases": len(rows),
                "with_complaints": bad,
                "most_cpu_seconds": slowest["cpu_seconds"],
                "limit_cpu_seconds": CPU_SECONDS,
                "rows": rows,
            },
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
