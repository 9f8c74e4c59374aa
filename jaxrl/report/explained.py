"""Results of run.mode=explain and replay.try for single steps of a run (docs/guides/replay.md), for the report."""

from __future__ import annotations

import math
from typing import Any

from jaxrl.records.anomalies import Anomaly
from jaxrl.report.runs import Run
from jaxrl.telemetry.run_dir import read_json

STEPS, COMPLETIONS, GROUPS, TEXT = 12, 8, 8, 600  # shown at most: steps of a run, answers and groups of one, characters
NUMBERS = ("score", "advantage", "length", "gap", "change", "share")
TRIED = ("step", "angle", "kl", "outside_clip", "predicted", "realised", "others")


def explained_steps(run: Run) -> list[dict]:
    """Returns [{step, why, replay: verdict, anomalies: texts, facts, groups: [[group, share]], answers}] of the newest
    steps of <run>/explain, at most STEPS; `answers` are at most COMPLETIONS completions, with a `reason` if they stand
    out, `groups` the GROUPS of largest |share|. Unreadable files are skipped.
    """
    found = [read_json(path) for path in sorted((run.folder / "explain").glob("step_*.json"))[-STEPS:]]
    return [_step(told) for told in found if isinstance(told.get("step"), int) and "groups" in told]


def _step(told: dict) -> dict:
    rows, seen = [], set()
    for answer in [a for name in ("suspects", "heaviest", "answers") for a in told.get(name, [])]:  # the guilty first
        if (key := (answer.get("group"), answer.get("sample"))) not in seen and len(rows) < COMPLETIONS:
            seen.add(key)
            rows.append({"group": key[0], "sample": key[1], "text": str(answer.get("text", ""))[:TEXT],
                         "reason": "; ".join(answer.get("reasons", ())), **{n: number(answer.get(n)) for n in NUMBERS}})
    groups = sorted(told["groups"], key=lambda g: -abs(number(g.get("share")) or 0))[:GROUPS]
    facts = {name: number(told.get(name)) for name in ("step_length", "gradient_norm", "kl", "clipped_fraction",
                                                       "corrected_fraction", "masked_answers", "truncated_answers")}
    return {"step": told["step"], "why": str(told.get("why", "")),
            "replay": (told.get("replay") or {}).get("result", ""), "facts": facts,
            "anomalies": [_said(a) for a in told.get("anomalies", [])],
            "groups": [[g.get("group"), number(g.get("share"))] for g in groups], "answers": rows}


def _said(a: dict) -> str:
    value, usual, away = (number(a.get(name), math.nan) for name in ("value", "usual", "deviations"))
    return Anomaly(a.get("step", 0), str(a.get("name")), str(a.get("called")), value, usual, away).text


def tried_changes(run: Run) -> list[dict]:
    """Returns the tables of the newest replay.try: [{step, rows}]; the first row is the run itself.

    A row has setting (text), step (length of the parameters' change), angle to the recorded change (degrees), kl (nats
    per token), outside_clip (share of tokens), and predicted, realised, others: mean change of log-prob per token
    (nats) of completions with a positive advantage, to first order and as it came, and of all other completions. None
    for a missing number.
    """
    row = lambda held: {"setting": str(held.get("setting")), **{n: number(held.get(n)) for n in TRIED}}  # noqa: E731
    return [{"step": told.get("step"), "rows": [row(held) for held in told.get("rows", [])]}
            for told in run.summary.get("tried") or []]


def number(value, absent: float | None = None) -> float | Any:
    """Returns a JSON value as a finite float, or `absent`."""
    try:
        return found if value is not None and math.isfinite(found := float(value)) else absent
    except (TypeError, ValueError):
        return absent
