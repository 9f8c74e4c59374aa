"""Metrics over steps: one curve per run, or a mean with a band for runs that differ in their seed only."""

from __future__ import annotations

import fnmatch
import json

import numpy as np

from jaxrl.diff import IGNORED_OPTIONS
from jaxrl.report.runs import Run
from jaxrl.report.thin import kept_points, shorts
from jaxrl.telemetry.names import METRICS, describe

POINTS = 60_000  # most points of all curves together: about a megabyte
MIN_POINTS, MAX_POINTS = 60, 1200  # fewest and most points of one curve
STRETCHES = 100  # means that are drawn over a curve of more than twice as many points

# Titles and metrics, as patterns in the order in which they are shown; all others stand under "All other metrics".
SECTIONS = (
    ("Learning", ("reward/mean", "accuracy/train", "eval/accuracy", "eval/pass@*", "eval/mean@*",
                  "eval/preference_accuracy", "reward/accuracy", "reward/margin", "score/accuracy",
                  "distill/divergence", "loss", "reward/std", "length/mean", "rollout/truncated_fraction",
                  "rollout/zero_signal_fraction",
                  "env/turns", "env/calls")),
    ("Update", ("optim/grad_norm", "optim/lr", "policy/entropy", "policy/kl", "policy/approx_kl",
                "policy/clip_fraction", "policy/ratio_mean", "value/loss", "value/explained_variance",
                "router/load_max_over_mean")),
    ("Staleness and gap", ("gap/mean", "gap/max", "gap/k3", "gap/corrected_fraction", "gap/stale_*", "gap/images",
                           "gap/text", "old_gap/max", "staleness/mean", "staleness/max", "rollout/ahead_groups")),
    ("Speed", ("time/step", "time/tokens_per_second", "perf/mfu", "perf/tokens_per_second", "perf/tflops",
               "packing/efficiency")),
)
# Units by pattern of the name, the first that fits; a share is shown in percent.
UNITS = (
    ("time/wall", ""), ("time/compil*", "programs"), ("time/tokens_per_second", "tokens / s"), ("time/*", "s"),
    ("perf/*tokens_per_second", "tokens / s per device"), ("perf/*mfu", "%"), ("perf/*tflops", "TFLOP/s per device"),
    ("perf/env_*", "s"), ("flops/*", "operations"), ("*_fraction", "%"), ("*accuracy*", "%"), ("eval/*pass@*", "%"),
    ("eval/*mean@*", "%"), ("packing/efficiency", "%"), ("source/*/share", "%"), ("staleness/mean", "weight syncs"),
    ("staleness/max", "weight syncs"), ("staleness/*", "%"), ("*length*", "tokens"), ("rollout/*tokens", "tokens"),
    ("env/observation_tokens", "tokens"), ("env/turns*", "turns"), ("env/calls", "calls"), ("policy/entropy", "nats"),
    ("policy/logprob", "nats"), ("policy/*kl", "nats"), ("gap/mean", "nats"), ("gap/max", "nats"),
    ("gap/stale_*", "nats"), ("gap/images", "nats"), ("gap/text", "nats"), ("gap/k3", "nats"),
    ("old_gap/max", "nats"), ("distill/*", "nats"),
    ("publish/seconds", "s"), ("publish/gb_per_second", "GB/s"), ("data/epoch", "passes"), ("data/samples", "samples"),
)
OPTIONS_OF_REPEATS = ("run.seed", "run.resume")  # options in which runs of one curve may differ
IGNORED_METRICS = ("time/wall",)


def unit(name: str) -> str:
    """Returns a metric's unit, by the first pattern that matches its name; "" for a plain number."""
    found = next((u for pattern, u in UNITS if fnmatch.fnmatchcase(name, pattern)), None)
    if found is None:
        found = "%" if any(m.name == name and m.format == "percent" for m in METRICS) else ""
    return found


def groups(runs: list[Run]) -> list[list[int]]:
    """Returns lists of indices of runs whose configs differ only in run.seed, run.resume and IGNORED_OPTIONS, which
    change no result. Versions are not compared. A run without a config is a group of its own."""
    out: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        own = str(run.config.get("run.dir") or "\0")
        say = lambda v, own=own: v.replace(own, "<run.dir>") if isinstance(v, str) else v  # noqa: E731
        same = {k: say(v) for k, v in run.config.items()
                if not k.startswith(IGNORED_OPTIONS) and k not in OPTIONS_OF_REPEATS}
        key = json.dumps(same, sort_keys=True, default=str) if same else f"{i}"
        out.setdefault(key, []).append(i)
    return list(out.values())


def charts(runs: list[Run], grouped: list[list[int]]) -> dict[str, dict]:
    """Returns metric -> {doc, unit, lines: [{g: group, x: steps, y: values, ...}]}, thinned out (thin.kept_points).

    A line of one run has its values; of several runs that have the metric the mean as y, and lo, hi, of: the smallest,
    the largest and the number of runs, at the steps that all of them have (no line without any). Long ones have tx, ty,
    per: means of STRETCHES parts.

    grouped: indices of the runs of each group (`groups`)."""
    names = [name for name in dict.fromkeys(n for run in runs for n in run.series) if name not in IGNORED_METRICS]
    curves = sum(sum(any(name in runs[i].series for i in g) for g in grouped) for name in names)
    points = int(np.clip(POINTS / max(1, curves), MIN_POINTS, MAX_POINTS))
    out = {}
    for name in sorted(names):
        lines = [{"g": g} | line for g, members in enumerate(grouped)
                 if (line := _line([runs[i].column(name) for i in members], points))]
        out[name] = {"doc": describe(name) or "", "unit": unit(name), "lines": lines}
    return out


def _line(columns: list[tuple[np.ndarray, np.ndarray]], points: int) -> dict:
    """Returns one run's values; of several runs the mean, smallest and largest at the steps that all of them have."""
    columns = [c for c in columns if len(c[0])]
    if not columns:
        return {}
    if len(columns) == 1:
        steps, values = columns[0]
        at = kept_points([values], points)
        return {"x": shorts(steps[at]), "y": shorts(values[at])} | _trend(steps, values)
    shared = columns[0][0]
    for steps, _ in columns[1:]:
        shared = np.intersect1d(shared, steps)
    if not len(shared):
        return {}
    values = np.stack([v[np.searchsorted(s, shared)] for s, v in columns])
    mean, low, high = values.mean(0), values.min(0), values.max(0)
    at = kept_points([mean, low, high], points)
    return {"x": shorts(shared[at]), "y": shorts(mean[at]), "lo": shorts(low[at]), "hi": shorts(high[at]),
            "of": len(columns)} | _trend(shared, mean)


def _trend(steps: np.ndarray, values: np.ndarray) -> dict:
    """Returns the means of a long curve's stretches, at their middle steps, from all its finite values."""
    if len(steps) <= 2 * STRETCHES:
        return {}
    edges = np.linspace(0, len(steps), STRETCHES + 1).astype(int)
    parts = [(steps[a:b], values[a:b][np.isfinite(values[a:b])]) for a, b in zip(edges, edges[1:], strict=False)]
    return {"tx": shorts(s[len(s) // 2] for s, _ in parts),
            "ty": shorts(v.mean() if len(v) else np.nan for _, v in parts), "per": int(np.diff(edges).max())}


def sections(names) -> list[list]:
    """Returns [[title, [metric, ...]], ...] of the existing metrics; the last section has all the rest."""
    left, out = list(names), []
    for title, patterns in SECTIONS:
        own = list(dict.fromkeys(n for p in patterns for n in left if fnmatch.fnmatchcase(n, p)))
        left = [n for n in left if n not in own]
        out += [[title, own]] if own else []
    return [*out, ["All other metrics", left]] if left else out
