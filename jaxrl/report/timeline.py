"""Seconds of each step by phase, and the plan's predictions."""

from __future__ import annotations

import numpy as np

from jaxrl.report.runs import Run
from jaxrl.report.thin import short, shorts
from jaxrl.telemetry.console import DOING, NO_PHASES

ORDER = ("start", "data", "rollout", "reward", "wait", "score", "update", "publish", "eval", "checkpoint",
         "export")  # in which a step goes through them; `other` comes last
BINS, SLOWEST = 300, 8


def phases(run: Run) -> dict:
    """Returns the seconds of a run's steps by phase, for the page; {} without times.

    Entries: names and doing (what each phase does); x: first step of each range, last; y: [phases][ranges] mean seconds
    per step; per: most steps of a range; usual, newest, slow: single steps ({step, seconds by phase}). Many steps are
    combined into BINS equal ranges, so that the seconds still add up; usual is the step of median seconds, slow the
    SLOWEST slowest ones."""
    steps, total = run.column("time/step")
    fine = (steps > 0) & np.isfinite(total)  # line 0 is the evaluation before the first step
    steps, total = steps[fine], total[fine]
    if not len(steps):
        return {}
    known = {n[5:] for n in run.series if n.startswith("time/") and n[5:] not in NO_PHASES}
    names = [n for n in ORDER if n in known] + sorted(known - set(ORDER) - {"other"}) + ["other"] * ("other" in known)
    table = np.zeros((len(names), len(steps)))
    for row, name in zip(table, names, strict=True):
        own, seconds = run.column(f"time/{name}")
        at = np.searchsorted(steps, own).clip(max=len(steps) - 1)
        there = (steps[at] == own) & np.isfinite(seconds)
        row[at[there]] = seconds[there]
    edges = np.unique(np.linspace(0, len(steps), min(BINS, len(steps)) + 1).astype(int))
    means = np.add.reduceat(table, edges[:-1], axis=1) / np.diff(edges)
    usual = np.argsort(total, kind="stable")[len(total) // 2]
    slow = np.argsort(-total, kind="stable")[:min(SLOWEST, len(steps))]
    told = lambda i: {"step": int(steps[i]), "seconds": shorts(table[:, i])}  # noqa: E731
    return {"names": names, "doing": [DOING.get(n, "") for n in names], "x": shorts(steps[edges[:-1]]),
            "last": int(steps[-1]), "y": [shorts(row) for row in means], "per": int(np.diff(edges).max()),
            "usual": told(usual), "newest": told(len(steps) - 1), "slow": [told(i) for i in slow]}


def plan(run: Run) -> list[list]:
    """Returns [[what, unit, planned, measured], ...] of summary.json, None for what one side lacks; bytes are in MiB.
    """
    planned, measured = run.summary.get("planned") or {}, run.summary.get("measured") or {}
    rows = []
    for name in sorted(planned.keys() | measured.keys(), key=lambda n: (n != "step_seconds", n)):
        kind = name.rpartition("_")[2]
        scale, unit = (2**20, "MiB on a device") if kind == "bytes" else (1, "s") if kind == "seconds" else (1, "")
        pair = [short(side[name] / scale) if isinstance(side.get(name), int | float) else None
                for side in (planned, measured)]
        rows.append([name.rpartition("_")[0].replace("_", " ") if unit else name, unit, *pair])
    return rows
