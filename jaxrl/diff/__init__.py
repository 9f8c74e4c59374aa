"""Finds where two runs diverge: jaxrl diff RUN_A RUN_B [--rounding 1e-4]

Reads two run directories (config.json, metrics.jsonl, rollouts/, eval/, export/), recomputes nothing and writes
nothing. It lists the options and versions that differ, and then compares what both runs recorded, step by step, in the
order in which a step makes it: prompts, seeds, completions, the sampler's log-probs, rewards, advantages, the update's
numbers. The runs diverge at the first of these boundaries that differs by more than rounding; all later differences
may follow from it.

Two numbers differ by rounding if |a - b| <= rounding * max(1, |a|, |b|); for gradient norm and learning rate, which may
be small, if |a - b| <= rounding * max(|a|, |b|). In fp32 another packing, mesh or processor moves log-probs by up to
about 1e-5; the default allows ten times that.

Exit status: 0 equal, or equal within rounding; 1 the runs diverge; 2 a directory holds no run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from jaxrl.config.load import flat
from jaxrl.errors import ConfigError
from jaxrl.telemetry.names import CLOCKED

ROUNDING = 1e-4
# Prefixes of options that change no result.
IGNORED_OPTIONS = ("run.dir", "run.compile_cache", "log.", "profile.", "checkpoint.", "plan.")
# Prefixes of metrics that show neither a result nor its cause: rates, compilations, cache contents. The boundaries of
# evaluation and optimizer compare eval/ and optim/.
IGNORED_METRICS = ("time", *CLOCKED, "rollout/ahead_complete", "flops/", "step", "compile", "engine/", "memory/",
                   "packing/", "eval/", "optim/")


# ---- what is compared


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A stage of a step whose content is compared.

    Attributes:
      name: as it is printed.
      of: record (a line of rollouts/, or with `lines` a line of metrics) -> {field: value}.
      lines: compare lines of metrics.
      floor: smallest magnitude that a difference is taken relative to.
    """

    name: str
    of: Callable[[dict], dict]
    lines: bool = False
    floor: float = 1.0


def select_fields(*names: str) -> Callable[[dict], dict]:
    """Returns a function that selects the fields `names` of a record."""
    return lambda record: {name: record[name] for name in names if name in record}


def select_prefixes(*beginnings: str) -> Callable[[dict], dict]:
    """Returns a function that selects the metrics whose names start with one of `beginnings`."""
    return lambda line: {name: value for name, value in line.items() if name.startswith(beginnings)}


def scores(record: dict) -> dict:
    """Returns a record's score with the parts and outcomes of its reward: {"score", "reward <part>", "outcome <name>"}.
    """
    reward = record.get("reward") or {}
    return {"score": record.get("score"), **{f"reward {k}": v for k, v in (reward.get("parts") or {}).items()},
            **{f"outcome {k}": v for k, v in (reward.get("outcomes") or {}).items()}}


BOUNDARIES = (
    Boundary("prompts", select_fields("group", "sample", "prompt", "asked", "answer", "source")),
    Boundary("seeds", select_fields("seed")),
    Boundary("versions that sampled", select_fields("version", "last_version")),
    Boundary("completions", select_fields("tokens", "finish")),
    Boundary("the sampler's log-probs", select_fields("logprobs")),
    Boundary("code of the rewards", lambda record: {"code": (record.get("reward") or {}).get("by")}),
    Boundary("rewards", scores),
    Boundary("advantages", select_fields("advantage")),
    Boundary("the update's metrics", lambda line: {k: line[k] for k in line if not k.startswith(IGNORED_METRICS)},
             lines=True),
    Boundary("gradient and learning rate", select_prefixes("optim/"), lines=True, floor=1e-30),
    Boundary("evaluation", select_prefixes("eval/"), lines=True),
)


@dataclasses.dataclass
class Comparison:
    """The result at one boundary over all steps: the first unequal place, and the first one beyond rounding.

    Attributes:
      steps: that both runs recorded there. largest: relative difference within rounding. rounded: first step with one;
        None = none has. first: text of the first unequal place; "" = all equal.
      parts: (step, text) of the first place beyond rounding, or None.
    """

    steps: int = 0
    largest: float = 0.0  # of the differences within rounding, as shares of the larger number or of 1
    rounded: int | None = None
    first: str = ""
    parts: tuple[int, str] | None = None  # step, text


def difference(a, b, rounding: float, floor: float = 1.0) -> tuple[float, str]:
    """Compares two JSON values: (0 if equal, the relative difference if within rounding, else inf; text of the worst).

    The relative difference is |a - b| / max(floor, |a|, |b|). Two unequal integers, lists of unequal lengths, and
    unequal values of which one is no number are inf apart. A key that one dict lacks counts as None there.

    Args:
      a, b: values; dicts and equally long lists are compared item by item.
      rounding: largest relative difference that counts as rounding.
      floor: smallest magnitude that a difference is taken relative to.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b])]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return _of_values(a, b, rounding, floor)
    worst, text = 0.0, ""
    for key, x, y in pairs:
        away, inner = difference(x, y, rounding, floor) if x is not y else (0.0, "")
        if away > worst:
            worst, text = away, f"{key}{'' if inner.startswith(':') else ' '}{inner}"
        if math.isinf(worst):
            break
    return worst, text


def _of_values(a, b, rounding, floor):
    said = f": {_short(a)} and {_short(b)}"
    if a == b or (a != a and b != b):  # NaN in both
        return 0.0, ""
    number = lambda x: isinstance(x, float | int) and not isinstance(x, bool)  # noqa: E731
    if not (number(a) and number(b)) or (isinstance(a, int) and isinstance(b, int)):
        return math.inf, said
    share = abs(a - b) / max(floor, abs(a), abs(b))
    return (share if share <= rounding else math.inf), said


def _short(value) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- runs


class Run:
    """A run directory; config and metrics are read at once, rollouts when asked for.

    Attributes:
      config: dotted option -> value. versions: package -> version. lines: step -> its metrics.

    Raises ConfigError for a folder without a readable config.json and for lines that are not JSON.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        try:
            held = json.loads((self.folder / "config.json").read_text("utf-8"))
            self.config, self.versions = flat(held.get("config", {})), dict(held.get("versions", {}))
        except (OSError, ValueError, TypeError, AttributeError) as e:
            raise ConfigError(f"{folder}: no run directory ({e}); name the folder that holds config.json and "
                              "metrics.jsonl") from e
        self.lines = {}
        if (self.folder / "metrics.jsonl").exists():
            for line in self._lines("metrics.jsonl"):
                self.lines.setdefault(line.get("step", -1), {}).update(line)

    def _lines(self, name: str) -> list[dict]:
        out = []
        for number, text in enumerate((self.folder / name).read_text("utf-8").split("\n"), 1):
            try:
                out += [dict(json.loads(text))] if text else []
            except (ValueError, TypeError) as e:
                raise ConfigError(f"{self.folder / name}:{number}: not a line of JSON with a table ({e})") from e
        return out

    def steps(self) -> list[int]:
        """Returns the sorted steps with recorded completions."""
        return sorted(int(p.stem.split("_")[1]) for p in (self.folder / "rollouts").glob("step_*.jsonl"))

    def records(self, step: int) -> list[dict]:
        """Reads the recorded completions of a step. Raises OSError without their file, ConfigError for a line
        that is not JSON.
        """
        return self._lines(f"rollouts/step_{step:08d}.jsonl")


def differing_options(a: Run, b: Run) -> list[str]:
    """Returns a text for each option that differs and may change a result, and for each version that differs."""
    names = [n for n in sorted(a.config.keys() | b.config.keys()) if not n.startswith(IGNORED_OPTIONS)]
    out = [f"{n}: {_short(a.config.get(n))} and {_short(b.config.get(n))}" for n in names
           if a.config.get(n) != b.config.get(n)]
    return out + [f"version of {n}: {a.versions.get(n)} and {b.versions.get(n)}"
                  for n in sorted(a.versions.keys() | b.versions.keys()) if a.versions.get(n) != b.versions.get(n)]


def compare(a: Run, b: Run, rounding: float = ROUNDING) -> dict[str, Comparison]:
    """Compares two runs over the steps that both recorded; returns {boundary's name: Comparison}.

    rounding: as in `difference`. Raises ConfigError for a line of rollouts that is not JSON."""
    out = {boundary.name: Comparison() for boundary in BOUNDARIES}
    steps = sorted((a.lines.keys() & b.lines.keys()) | (set(a.steps()) & set(b.steps())))
    recorded = set(a.steps()) & set(b.steps())
    for step in steps:
        pairs = _pairs(a.records(step), b.records(step)) if step in recorded else []
        for boundary in BOUNDARIES:
            both = [(f"step {step}", a.lines.get(step), b.lines.get(step))] if boundary.lines else [
                (f"step {step}, {where}", x, y) for where, x, y in pairs]
            _look(out[boundary.name], boundary, step, both, rounding)
    return out


def _pairs(a: list[dict], b: list[dict]) -> list[tuple]:
    """Pairs the records of two runs by their place in the step; a record that one side lacks is {}."""
    size = max(len(a), len(b))
    a, b = a + [{}] * (size - len(a)), b + [{}] * (size - len(b))
    return [(f"completion {i + 1}", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]


def _look(found: Comparison, boundary: Boundary, step: int, both, rounding: float) -> None:
    if not both or both[0][1] is None or both[0][2] is None:
        return
    found.steps += 1
    for where, x, y in both:
        away, text = difference(boundary.of(x), boundary.of(y), rounding, boundary.floor)
        if not away:
            continue
        found.first = found.first or f"{where}: {text}"
        if math.isinf(away):
            found.parts = found.parts or (step, f"{where}: {text}")
        else:
            found.largest = max(found.largest, away)
            found.rounded = step if found.rounded is None else found.rounded


def first_divergence(found: dict[str, Comparison]) -> tuple[str, Comparison] | None:
    """Returns (name, Comparison) of the first boundary, in the earliest step, that differs beyond rounding; None if
    none does. found: of `compare`."""
    apart = [(f.parts[0], i, name) for i, (name, f) in enumerate(found.items()) if f.parts]
    return (min(apart)[2], found[min(apart)[2]]) if apart else None


def compare_exports(a: Run, b: Run) -> str:
    """Describes in one line how the exported models differ; "" unless both runs have an export.

    Numbers are compared in float64, tensor by tensor, so dtypes may differ; NaN differs from NaN. The line has the
    largest |a - b| and its tensor.
    """
    import numpy as np

    from jaxrl.models.io.tensorfile import read_header

    def tensors(run):
        files = sorted((run.folder / "export").glob("*.safetensors"))
        return {name: t for file in files for name, t in read_header(file).items()}

    mine, theirs = tensors(a), tensors(b)
    if not mine or not theirs:
        return ""
    other = [n for n in mine.keys() ^ theirs.keys()] + [n for n in mine.keys() & theirs.keys()
                                                        if mine[n].shape != theirs[n].shape]
    if other:
        return f"{len(other)} tensors are not in both, or have other shapes, such as {sorted(other)[0]}"
    moved, worst = [], (0.0, "")
    for name in mine:
        x, y = (t[name].read().astype(np.float64) for t in (mine, theirs))
        if not np.array_equal(x, y):
            moved.append(name)
            worst = max(worst, (float(np.abs(x - y).max()), name))
    if not moved:
        return "equal bit by bit"
    return f"{len(moved)} of {len(mine)} tensors differ, most {worst[1]}, by {worst[0]:.2g}"


# ---- report


def report(a: Run, b: Run, rounding: float) -> tuple[list[str], bool]:
    """Returns (lines of the printed report on runs a and b, whether they diverge: a boundary differs beyond rounding).

    rounding: as in `difference`. Exports are described, and do not count. Raises ConfigError as `compare`."""
    changed, found = differing_options(a, b), compare(a, b, rounding)
    out = [f"A {a.folder}, steps with metrics: {len(a.lines)}", f"B {b.folder}, steps with metrics: {len(b.lines)}", ""]
    out += ["Options and versions that differ:", *[f"  {text}" for text in changed or ["none"]], ""]
    for name, f in found.items():
        said = "nothing that both recorded" if not f.steps else "equal" if not f.first else (
            f"within rounding (up to {f.largest:.1e}), from {f.first}" if not f.parts else f"differ from {f.parts[1]}")
        out.append(f"  {name}: {said}")
    out += [f"  exported weights: {said}"] if (said := compare_exports(a, b)) else []
    where = first_divergence(found)
    if where:
        name, f = where
        step, text = f.parts or (0, "")
        out += ["", f"The runs diverge at {name}, {text}"]
        place = (step, list(found).index(name))
        earlier = [n for i, (n, g) in enumerate(found.items()) if g.rounded is not None and (g.rounded, i) < place]
        out += [f"Before it only rounding differs ({', '.join(earlier)})."] if earlier else ["All before it is equal."]
    elif not any(f.steps for f in found.values()):
        out += ["", "Both recorded nothing of the same steps: there is nothing to compare."]
    else:
        out += ["", "The runs are equal" + (" within rounding." if any(f.first for f in found.values()) else ".")]
    return out, where is not None


def main(argv=None) -> int:
    """Runs `jaxrl diff`: prints the comparison of two run directories and returns the exit status. argv: None =
    sys.argv."""
    parser = argparse.ArgumentParser(prog="jaxrl diff", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run directory")
    parser.add_argument("--rounding", type=float, default=ROUNDING,
                        help=f"differences that count as rounding (default {ROUNDING:g})")
    args = parser.parse_args(argv)
    if not 0 <= args.rounding < 1:
        parser.error(f"--rounding={args.rounding}: must be at least 0 and below 1")
    try:
        lines, apart = report(Run(args.runs[0]), Run(args.runs[1]), args.rounding)
    except ConfigError as e:
        print(f"jaxrl: {e}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return int(apart)
