"""Several processes on one machine: the same run over 1, 2 and 4 of them, what happens when one dies or is asked to stop, and
checkpoints that go on elsewhere.

    python evidence/hosts.py

Real processes over gloo, each with its share of the simulated CPU devices; the tiny job of the tests, on answers that one run
recorded, so that rows, sampling seeds and layouts must be equal exactly and losses up to the order of sums.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

from common import record, table  # noqa: E402
from helpers.run_tools import ROOT, environment  # noqa: E402

STEPS, HALF, HEARTBEAT = 6, 3, 10
SAME = ("algorithm.entropy_coef=0.01", "algorithm.num_minibatches=2", "checkpoint.export_at_end=false",
        f"checkpoint.every_steps={HALF}", f"launch.heartbeat_seconds={HEARTBEAT}")
MESHES = {"fsdp 4": {"fsdp": 4}, "dp 2, fsdp 2": {"dp": 2, "fsdp": 2}}
WIDE, DEEP = {"fsdp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}


def job(folder, processes, devices, mesh, *options, recorded=None, steps=STEPS):
    """Runs tests/helpers/hosts_job.py; returns (exit status, everything printed, seconds from a planned fault to the end of all)."""
    flags = [f"--config.{o}" for o in (*SAME, f"train.steps={steps}", *(f"mesh.{a}={n}" for a, n in mesh.items()), *options)]
    command = [sys.executable, "-m", "jaxrl.launch", f"--processes={processes}", f"--devices={devices // processes}", "--grace=60",
               "--", str(ROOT / "tests" / "helpers" / "hosts_job.py"), str(folder), *flags, *([f"--recorded={recorded}"] if recorded else [])]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, struck = [], float("nan")
    for line in process.stdout:
        lines.append(line)
        struck = time.monotonic() if "planned fault:" in line else struck
    return process.wait(), "".join(lines), time.monotonic() - struck


def trained(*args, **kwargs):
    status, text, _ = job(*args, **kwargs)
    assert status == 0, text
    return args[0]


def metrics(folder):
    return {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def seen(folder):
    return [json.loads(f.read_text()) for f in sorted(folder.glob("seen_*.json"))]


def rollouts(folder):
    """Per step, every answer's place, seed and tokens in the order of the batch."""
    return {f.name: [(r["group"], r["sample"], r["seed"], r["tokens"]) for r in map(json.loads, f.read_text().splitlines())]
            for f in sorted((folder / "rollouts").glob("*.jsonl"))}


def asked(folder):
    return {tuple(pair) for s in seen(folder) for pair in s["seeds"]}


def furthest(a, b, first=1, relative=False):
    """Largest difference of the losses of two runs, in nats per token or relative."""
    ours, theirs = metrics(a), metrics(b)
    return max(abs(ours[k]["loss"] - theirs[k]["loss"]) / (abs(theirs[k]["loss"]) if relative else 1) for k in ours if k >= first)


def over_processes(base, recorded):
    """The same mesh over 1, 2 and 4 processes."""
    rows = []
    for name, mesh in MESHES.items():
        alone = trained(base / f"1 {name}", 1, 4, mesh, recorded=recorded)
        for processes in (1, 2, 4):
            run = alone if processes == 1 else trained(base / f"{processes} {name}", processes, 4, mesh, recorded=recorded)
            (one,), all_ = seen(alone), seen(run)
            held = sorted(row for s in all_ for row in s["held"][0])
            same = {k: all(s[k] == one[k] for s in all_) for k in ("layouts", "rows")}
            same["seeds"] = asked(run) == asked(alone)
            same["answers"] = rollouts(run) == rollouts(alone)
            rows.append([name, processes, *("equal" if same[k] else "DIFFERENT" for k in ("answers", "seeds", "layouts", "rows")),
                         f"{furthest(run, alone):.1e}", f"{furthest(run, alone, relative=True):.1e}", f"{len(held)} on {processes}"])
            print(*rows[-1], flush=True)
    return rows


def main_job(base, recorded):
    """The main job's own sampler over 2 processes: the answers of its first steps are those of one process."""
    run = trained(base / "sampling", 2, 4, {"fsdp": 4}, steps=2)
    ours, theirs = rollouts(run), rollouts(recorded)
    return [["own sampler, 2 processes, 2 steps", all(ours[k] == theirs[k] for k in ours), f"{furthest(run, recorded):.1e}"]]


def faults(base, recorded):
    """One process is killed, or asked to stop."""
    rows = []
    for process in (1, 0):
        plan = f"faults.plan='update.kill9@step=2,process={process}',"
        folder = base / f"killed {process}"
        status, text, seconds = job(folder, 2, 4, {"fsdp": 4}, plan, recorded=recorded)
        names = f"process {process}" in text.split("planned fault")[-1]
        said = [line for line in text.splitlines() if re.search(r"is gone:|failed first|leader task", line)]
        if seconds > HEARTBEAT + 15:
            names = False
        rows.append([f"kill -9 of process {process}", f"status {status}", f"all ended after {seconds:.0f} s",
                     "named" if names and status == 137 else "NOT NAMED IN TIME",
                     " / ".join(re.sub(r"^.*absl::Status: |\(pid \d+\) ", "", line)[:150] for line in said)])
        print(*rows[-1], flush=True)
    folder = base / "stopped"
    plan = "faults.plan='update.term@step=2,process=1',"
    status, text, seconds = job(folder, 2, 4, {"fsdp": 4}, plan, recorded=recorded)
    saved = sorted(p.name for p in (folder / "checkpoints").iterdir())
    again, text2, _ = job(folder, 1, 4, {"fsdp": 4}, recorded=recorded)
    fine = status == again == 0 and saved == ["00000002"] and len(metrics(folder)) == STEPS
    rows.append(["SIGTERM to process 1", f"status {status}", f"all ended after {seconds:.0f} s",
                 "saved by all, resumed alone" if fine else "NOT SAVED",
                 f"checkpoints {saved}; losses of the resumed run within {furthest(folder, base / '1 fsdp 4'):.1e}"])
    print(*rows[-1], flush=True)
    return rows


def elastic(base, recorded):
    """Checkpoints of one mesh and process count go on under another."""
    rows, unbroken = [], trained(base / "unbroken", 1, 8, WIDE, recorded=recorded)
    for name, processes, mesh, then in (("(1, 8, 1) on 1 process -> (2, 2, 2) on 1", 1, WIDE, DEEP),
                                        ("(1, 8, 1) on 4 processes -> (1, 8, 1) on 1", 4, WIDE, WIDE),
                                        ("(1, 8, 1) on 1 process -> (2, 2, 2) on 2", 1, WIDE, DEEP)):
        run = trained(base / name, processes, 8, mesh, recorded=recorded, steps=HALF)
        trained(run, 2 if name.endswith("2") else 1, 8, then, recorded=recorded)
        first = seen(run)[0]
        saved, restored = dict(map(tuple, first["saved"])), dict(map(tuple, first["restored"]))
        rows.append([name, "bit-equal" if restored == {HALF: saved[HALF]} else "DIFFERENT",
                     "equal" if rollouts(run) == rollouts(unbroken) and asked(run) == asked(unbroken) else "DIFFERENT",
                     "equal" if counters(run) == counters(unbroken) else "DIFFERENT", f"{furthest(run, unbroken, HALF + 1, relative=True):.1e}"])
        print(*rows[-1], flush=True)
    return rows


def counters(folder):
    """Step, cursor and samples of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    host = json.loads((newest / "host" / "metadata").read_text())["host"]
    return [host[k] for k in ("step", "cursor", "samples")]


def main():
    base = Path(tempfile.mkdtemp(prefix="jaxrl-hosts-"))
    recorded = trained(base / "recorded", 1, 4, {"fsdp": 4})
    found = {"processes": over_processes(base, recorded), "main_job": main_job(base, recorded), "faults": faults(base, recorded),
             "elastic": elastic(base, recorded)}
    print()
    table(["mesh", "processes", "answers", "seeds", "layouts", "rows", "loss, absolute", "relative", "row blocks"], found["processes"])
    table(["main job", "same answers", "loss"], found["main_job"])
    table(["fault", "launcher", "ended", "outcome", "said"], found["faults"])
    table(["resumed", "state", "order and seeds", "counters", "loss of the next 3 updates"], found["elastic"])
    record("hosts", {"steps": STEPS, "heartbeat_seconds": HEARTBEAT, **found})
    shutil.rmtree(base)
    bad = re.search(r"DIFFERENT|NOT |[Ff]alse", json.dumps(found))
    near = all(float(r[6]) <= 1e-6 for r in found["processes"]) and all(float(r[4]) <= 1e-5 for r in found["elastic"])
    return 0 if near and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
