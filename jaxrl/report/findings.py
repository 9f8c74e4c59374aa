"""Findings of a report: what the run's warnings would have been at every step, and what its files lack."""

from __future__ import annotations

import re

import numpy as np

from jaxrl.report.runs import Run
from jaxrl.telemetry.health import RULES, message

GAP_RATIO = 2.0  # measured over planned, or the other way round, from which on it is said
SETTLED = 10     # steps after which no program should be compiled any more


def findings(run: Run) -> list[dict]:
    """Returns [{text, grave: bool, steps: ranges as text, count, of}] about a run, grave ones first."""
    found = [*_ending(run), *_rules(run), *_numbers(run), *_programs(run), *_planned(run)]
    return sorted(found, key=lambda f: not f["grave"])


def _ending(run: Run):
    if run.summary.get("error"):
        yield finding(f"the run failed: {run.summary['error']}")
    elif run.summary.get("ended_by"):
        yield finding(f"the run was stopped by {run.summary['ended_by']}", grave=False)
    elif not run.summary.get("finished"):
        yield finding("the run has not finished: it is running, was stopped or was killed", grave=False)
    if run.summary.get("diverged"):
        yield finding(f"training diverged: {run.summary['diverged']}; lower optimizer.lr")
    if run.broken:
        yield finding(f"{run.broken} lines of metrics.jsonl cannot be read and are skipped", grave=run.broken > 1)
    if not run.series:
        yield finding("there are no metrics yet", grave=False)


def _rules(run: Run):
    """Yields findings of the rules of the first steps (telemetry/health.py), applied to every step with an update."""
    steps, _ = run.column("optim/grad_norm")
    if not len(steps):
        return
    config = _groups(run.config)
    table = {name: dict(zip(s.tolist(), v.tolist(), strict=True)) for name, (s, v) in run.series.items()}
    for rule in RULES:
        broken = []
        for seen, step in enumerate(steps.tolist(), 1):
            values = lambda name, seen=seen, step=step: (  # noqa: E731
                float(seen) if name == "seen" else table.get(name, {}).get(step, float("nan")))
            if rule.wrong(values):
                broken.append(step)
        if broken:
            at = {name: column[broken[0]] for name, column in table.items() if broken[0] in column}
            yield finding(message(rule, config, run.folder, at), broken, len(steps),
                          grave=len(broken) > len(steps) / 2 or rule.name == "nonfinite")


class _Group(dict):
    """A group of options by attribute; of a run of another version of jaxrl some may be missing."""

    def __getattr__(self, name):
        return self.get(name, "not known")


def _groups(config: dict) -> dict[str, _Group]:
    out: dict[str, _Group] = {name: _Group() for rule in RULES for name in re.findall(r"{(\w+)[.}]", rule.message)}
    for option, value in config.items():
        group, _, name = option.partition(".")
        out.setdefault(group, _Group())[name] = value
    return out


def _numbers(run: Run):
    for name, (steps, values) in run.series.items():
        bad = steps[~np.isfinite(values)]
        if len(bad):
            grave = name.startswith(("optim/", "loss"))
            yield finding(f"{name} is not a finite number", bad.tolist(), len(steps), grave)


def _programs(run: Run):
    steps, count = run.column("time/compilations")
    late = steps[(count > 0) & (steps > SETTLED + (steps[0] if len(steps) else 0))]
    if len(late):
        yield finding("a program was compiled in the middle of the run: the step waited for it", late.tolist(),
                      len(steps), grave=False)


def _planned(run: Run):
    for name, planned in (run.summary.get("planned") or {}).items():
        measured = (run.summary.get("measured") or {}).get(name)
        if isinstance(measured, int | float) and isinstance(planned, int | float) and min(measured, planned) > 0 and (
                name == "step_seconds") and max(measured / planned, planned / measured) > GAP_RATIO:
            yield finding(f"a step took {measured:.3g} s where {planned:.3g} s were planned", grave=False)


def finding(text: str, steps=(), of: int = 0, grave: bool = True) -> dict:
    """Returns one finding, with its steps as ranges of text and their count. of: number of steps that were looked at.
    grave: whether it is listed before the others."""
    return {"text": text, "grave": grave, "steps": ranges(steps), "count": len(steps), "of": of}


def ranges(steps) -> str:
    """Returns steps as text: [1, 2, 3, 7] -> '1-3, 7'; of many ranges the first few and the last."""
    out: list[list[int]] = []
    for step in map(int, steps):
        if out and step == out[-1][1] + 1:
            out[-1][1] = step
        else:
            out.append([step, step])
    said = [f"{a}" if a == b else f"{a}-{b}" for a, b in out]
    return ", ".join(said if len(said) <= 8 else [*said[:6], "...", said[-1]])
