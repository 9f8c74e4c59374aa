"""Showing 5: kill -9 in every phase, then resume; final parameters, metrics (but time) and rollouts must equal an unbroken run.

    python evidence/resume.py

For each phase three kills at different steps (planned points: rollout, reward, update, four points of a checkpoint
write, of which one lies between the last tensor and the commit, and two of a resume), then kills from outside at
random times. A reward that times out once and never again shows that outcomes are not decided twice. The last case
truncates the newest checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

from common import record, table  # noqa: E402
from helpers.run_tools import command, environment, fingerprint, run  # noqa: E402

STEPS, EVERY = 8, 2  # of tests/helpers/tiny_job.py
REWARD = '''
import pathlib, time
def slow_once(prompt, completion, answer, user):
    """Times out the first time it sees one answer, and is quick ever after."""
    flag = pathlib.Path(user["flags"]) / "seen"
    if answer == user["slow_answer"] and not flag.exists():
        flag.touch()
        time.sleep(60)
    return float("\\\\boxed{" + answer + "}" in completion)
'''


def options(extra=()):
    return (
        f"train.steps={STEPS}",
        f"checkpoint.every_steps={EVERY}",
        "eval.every_steps=4",
        "checkpoint.keep=10",
        *extra,
    )


def cases(rng):
    for phase in ("rollout", "reward", "update"):
        for step in rng.sample(range(2, STEPS + 1), 3):
            yield f"{phase}, step {step}", [f"{phase}.kill9@step={step}"]
    for point in ("before", "tensors", "commit", "after"):
        for step in (2, 4, 6):
            yield f"checkpoint {point}, step {step}", [f"checkpoint.kill9@step={step},phase={point}"]
    for point in ("before", "arrays"):
        for step in (2, 4, 6):
            yield (
                f"resume {point}, after step {step}",
                [f"update.kill9@step={step + 1}", f"resume.kill9@step={step},phase={point}"],
            )


def killed_and_resumed(folder, plans):
    """Runs once per plan entry (each dies), then to the end. Returns the number of processes that died of SIGKILL."""
    died = 0
    for plan in plans:
        # a kill while resuming needs a checkpoint to resume from: it must be whole before the first kill
        written = ("checkpoint.asynchronous=false",) if any("resume" in p for p in plans) else ()
        status, _ = run(folder, *options((f"faults.plan={plan!r},", *written)))
        died += status == -signal.SIGKILL
    status, text = run(folder, *options())
    assert status == 0, text
    return died


def random_kills(folder, rng, count=3):
    """Kills from outside at random times of one run."""
    times = []
    for _ in range(count):
        process = subprocess.Popen(
            command(folder, *options()), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        delay = rng.uniform(2, 6)
        time.sleep(delay)
        if process.poll() is None:
            process.kill()
            times.append(round(delay, 1))
        process.wait()
    status, text = run(folder, *options())
    assert status == 0, text
    return times


def timeout_case(base):
    """The unbroken run saw a timeout; the killed one must keep its own record of it. Both see it at the same answer."""
    (base / "reward.py").write_text(REWARD)
    prints = []
    for name, plans in (("unbroken", []), ("killed", ["update.kill9@step=2"])):
        folder, flags = base / f"timeout_{name}", base / f"flags_{name}"
        flags.mkdir()
        extra = (
            f"reward.functions={base / 'reward.py'}:slow_once",
            "reward.timeout_seconds=2",
            "reward.max_failed_fraction=1",
            "reward.workers=1",
            f"user.flags={flags}",
            "user.slow_answer='9'",
            "train.steps=4",
            "eval.before=false",
            "eval.after=false",
            "eval.every_steps=0",
        )
        for plan in plans:
            run(folder, *options((*extra, f"faults.plan={plan!r},")))
        status, text = run(folder, *options(extra))
        assert status == 0, text
        prints.append(fingerprint(folder))
    return prints[0] == prints[1]


def main():
    rng = random.Random(0)
    base = Path(tempfile.mkdtemp(prefix="jaxrl-resume-"))
    unbroken = base / "unbroken"
    status, text = run(unbroken, *options())
    assert status == 0, text
    truth, rows = fingerprint(unbroken), []
    for k, (name, plans) in enumerate(cases(rng)):
        folder = base / f"case{k}"
        died = killed_and_resumed(folder, plans)
        same = fingerprint(folder) == truth
        rows.append([name, f"{died} of {len(plans)}", "equal" if same else "DIFFERENT"])
        print(*rows[-1], flush=True)
        shutil.rmtree(folder)
    for k in range(3):
        times = random_kills(base / f"random{k}", rng)
        rows.append(
            [
                f"random times (s): {times}",
                f"{len(times)} of 3",
                "equal" if fingerprint(base / f"random{k}") == truth else "DIFFERENT",
            ]
        )
        print(*rows[-1], flush=True)
    rows.append(["reward timeout, then kill in the update", "1 of 1", "equal" if timeout_case(base) else "DIFFERENT"])
    rows.append(truncated_case(base, truth))
    print()
    table(["killed in", "processes killed", "final parameters, metrics, rollouts"], rows)
    record("resume", {"steps": STEPS, "checkpoint_every": EVERY, "rows": rows})
    shutil.rmtree(base)
    killed = all(died.split(" of ")[0] == died.split(" of ")[1] for name, died, _ in rows if "random" not in name)
    return 0 if killed and all(r[-1].startswith("equal") for r in rows) else 1


def truncated_case(base, truth):
    """A newest checkpoint that lost half of a file: the run says so, falls back and still ends equal."""
    folder = base / "truncated"
    run(folder, *options(("faults.plan='update.kill9@step=7',", "checkpoint.asynchronous=false")))
    newest = sorted(p for p in (folder / "checkpoints").iterdir() if p.name.isdigit())[-1]
    victim = max((p for p in (newest / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    status, text = run(folder, *options())
    said = next((line for line in text.splitlines() if "DAMAGED" in line), "nothing was said")
    same = status == 0 and fingerprint(folder) == truth
    return [f"newest checkpoint truncated: {said[-120:].strip()}", "1 of 1", "equal" if same else "DIFFERENT"]


if __name__ == "__main__":
    sys.exit(main())
