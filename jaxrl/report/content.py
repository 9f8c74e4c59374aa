"""Builds the content of a report as one JSON-able table."""

from __future__ import annotations

import datetime

import jaxrl
from jaxrl.config.load import default_config, get, options
from jaxrl.diff import IGNORED_OPTIONS
from jaxrl.report import curves, timeline
from jaxrl.report.explained import explained_steps, tried_changes
from jaxrl.report.findings import findings
from jaxrl.report.runs import Run, labels, read_run
from jaxrl.report.samples import pictures, samples

FACTS = ("run.recipe", "algorithm.preset", "model.path", "rollout.engine", "run.seed")


def content(folders, steps: list[int] | None = None, watch: float = 0.0) -> dict:
    """Returns the page's data of these run directories.

    Args:
      steps: training steps whose completions are shown; None for some, evenly spaced.
      watch: seconds between refreshes of runs that are in progress; 0 for a static page.

    Raises:
      ConfigError: a folder is not a run directory.
    """
    folders = list({str(f): f for f in folders})
    runs = [read_run(folder) for folder in folders]
    for run, name in zip(runs, labels(runs), strict=True):
        run.name = name
    grouped = curves.groups(runs)
    charts = curves.charts(runs, grouped)
    shown = samples(runs, steps)
    return {
        "jaxrl": jaxrl.__version__, "watch": watch,
        "made": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "runs": [_run(run) for run in runs], "groups": [_group(runs, members) for members in grouped],
        "charts": charts, "sections": curves.sections(charts), "phases": [timeline.phases(run) for run in runs],
        "plan": [timeline.plan(run) for run in runs], "findings": [findings(run) for run in runs],
        "explained": [explained_steps(run) for run in runs], "tried": [tried_changes(run) for run in runs],
        "samples": shown, "pictures": pictures(runs, shown), "differ": _differences(runs),
        "options": [_options(run) for run in runs],
    }


def _run(run: Run) -> dict:
    summary, (steps, _) = run.summary, run.column("time/step")
    accuracy = lambda when: (summary.get(f"eval_{when}") or {}).get("accuracy")  # noqa: E731
    state = "ended by an error" if summary.get("error") else "finished" if summary.get("finished") else "not finished"
    facts = {"state": state, "steps": int(steps[-1]) if len(steps) else 0, "seconds": summary.get("wall_seconds"),
             "devices": summary.get("devices"), "accuracy before": accuracy("before"),
             "accuracy after": accuracy("after")}
    facts |= {name: run.config.get(name) for name in FACTS} | {f"{k} version": v for k, v in run.versions.items()}
    return {"name": run.name, "facts": {k: v for k, v in facts.items() if v not in (None, "")}}


def _group(runs: list[Run], members: list[int]) -> dict:
    if len(members) == 1:
        return {"name": runs[members[0]].name, "runs": members}
    names, seeds = [runs[i].name for i in members], ", ".join(str(runs[i].config.get("run.seed")) for i in members)
    shared = names[0]
    while shared and not all(n.startswith(shared) for n in names):
        shared = shared[:-1]
    return {"name": f"{shared.rstrip('_-/.') or 'runs'} (seeds {seeds})", "runs": members}


def _differences(runs: list[Run]) -> list[list]:
    """Returns [[option or version, a value per run], ...] in which runs differ, without paths and log options."""
    tables = [run.config | {f"version of {k}": v for k, v in run.versions.items()} for run in runs]
    names = sorted({n for t in tables for n in t if not n.startswith(IGNORED_OPTIONS)})
    return [[n, *(_option_text(t.get(n)) for t in tables)]
            for n in names if len({_option_text(t.get(n)) for t in tables}) > 1]


def _options(run: Run) -> list[list]:
    """Returns [[option, value, whether it differs from the default]] of a run's config."""
    known, defaults = options(), default_config()
    out = []
    for name, value in sorted(run.config.items()):
        # What is no option is an entry of a table, or a table without any.
        default = _option_text(get(defaults, name)) if name in known else "(empty)"
        out.append([name, _option_text(value), _option_text(value) != default])
    return out


def _option_text(value) -> str:
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "(empty)"
    return str(value) if value not in ("", {}) else "(empty)"
