"""What cannot work among the options of `data`, said before anything is read: problems as texts with their remedy."""

from __future__ import annotations

import difflib
import re

from jaxrl.config.lengths import episodes
from jaxrl.config.option import BOUNDS, is_finite, not_chosen
from jaxrl.config.registry import recipe_of
from jaxrl.config.schema import SCHEMA
from jaxrl.data.mixing import weight_at
from jaxrl.data.mixture import OWN, SOURCE_ONLY
from jaxrl.data.order import parse_windows

RENDERED = ("system_prompt", "chat", "add_generation_prompt", "chat_template_kwargs")  # what episodes render with


def sources(cfg) -> list[str]:
    """Returns the problems of data.sources, data.exhausted and options that do not work with them; that all weights are
    0 at some step only if there is no other. [] without data.sources."""
    d, out = cfg.data, []
    if not d.sources:
        return []
    if d.exhausted != "repeat" and not d.epochs:
        out.append(f"data.exhausted={d.exhausted} with data.epochs=0: nothing is ever exhausted; set data.epochs=1")
    if d.eval_fraction:
        out.append(f"data.eval_fraction={d.eval_fraction} with data.sources: held-out rows are sets of their own; name "
                   "them in eval.sets")
    if d.path and all("path" in source for source in d.sources.values() if hasattr(source, "keys")):
        out.append(f"data.path={d.path}: every one of data.sources has a path of its own; leave it out, or set "
                   "data.sources={} to train on it alone")
    for name, source in d.sources.items():
        out += _source(cfg, name, source)
    return out or _weights(d.sources)


def conversations(cfg) -> list[str]:
    """Returns the problems of data.overlong_completion."""
    d, out = cfg.data, []
    if d.overlong_completion == "split" and cfg.train.loss_on_prompt:
        out.append("data.overlong_completion=split with train.loss_on_prompt: what stands before a piece would be "
                   "trained on twice; leave one of them out")
    return out


def curricula(cfg) -> list[str]:
    """Returns the problem of data.pass_rate_min and pass_rate_max, alone or beside data.workers or a window, else that
    of data.difficulty_window, as a list; [] without one."""
    d = cfg.data
    thresholds = f"data.pass_rate_min={d.pass_rate_min}, data.pass_rate_max={d.pass_rate_max}"
    if (d.pass_rate_min, d.pass_rate_max) != (0, 1):
        if d.pass_rate_min > d.pass_rate_max:
            return [f"{thresholds}: no rate lies between; lower the first or raise the second"]
        if d.workers or d.difficulty_window:
            with_ = f"data.workers={d.workers}" if d.workers else f"data.difficulty_window={d.difficulty_window}"
            why = "rows read ahead" if d.workers else "a window"
            return [f"{thresholds} with {with_}: {why} would be chosen before the rates are known; leave one out"]
    try:
        parse_windows(d.difficulty_window)
    except ValueError as e:
        return [f"data.difficulty_window: {e}"]
    return []


def _source(cfg, name, source):
    where = f"data.sources.{name}"
    if not re.fullmatch(r"[\w-]+", name):
        return [f"data.sources: the name {name!r} is not made of letters, digits, '_' and '-'"]
    if not hasattr(source, "keys"):
        return [f"{where}={source!r}: must be a table such as {{'path': 'math.jsonl', 'weight': 0.5}}"]
    out = []
    for key in source.keys():
        if key not in (*OWN, *SOURCE_ONLY):
            near = difflib.get_close_matches(key, (*OWN, *SOURCE_ONLY), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            out.append(f"{where}.{key}: unknown; {hint}a source has {', '.join((*SOURCE_ONLY, *OWN))}")
        elif key in OWN:
            out += entry(f"{where}.{key}", SCHEMA["data"][key], source[key])
    if "path" not in source and not cfg.data.path:
        out.append(f"{where} has no path, and data.path is empty: name at least one file, folder or hub id")
    if not _is_weight(source.get("weight", 1.0)):
        out.append(f"{where}.weight={source['weight']!r}: must be a number that is not negative, or points such as "
                   "((0, 0.9), (500, 0.1)): (step, weight), steps rising from 0")
    if not hasattr(source.get("where", {}), "keys"):
        out.append(f"{where}.where={source['where']!r}: must be a table, {{'column': ('value', 'another')}}")
    if source.get("rewards") and not recipe_of(cfg).samples:
        out.append(f"{where}.rewards: run.recipe={cfg.run.recipe} has no rewards; leave it out")
    if source.get("rewards") and cfg.reward.column:
        out.append(f"{where}.rewards with reward.column={cfg.reward.column!r}: both say which functions judge a row; "
                   "leave one of them out")
    if not _is_number(source.get("coef", 1.0)):
        out.append(f"{where}.coef={source['coef']!r}: must be a number that is not negative; 1 leaves its advantages as"
                   " they are")
    if "coef" in source and not (recipe_of(cfg).samples and recipe_of(cfg).judged):
        out.append(f"{where}.coef: run.recipe={cfg.run.recipe} has no advantages; leave it out")
    rendered = [key for key in RENDERED if key in source]
    if rendered and episodes(cfg):
        out.append(f"{where}.{rendered[0]}: the turns of an episode are rendered alike for all sources; set "
                   f"data.{rendered[0]}")
    return out


def entry(name, opt, value):
    """Returns the problems of an entry of a source or an adapter that is an option: its kind, choices and bound.

    None is refused, also where it is the option's default. Lists must be texts, at least one, or one text; their
    choices, and what a table holds, are not looked at, nor whether a number is finite, which holds for all tables
    (common.check). name: of the entry, for the text. opt: the Option that the entry replaces.
    """
    kind = opt.kind or type(opt.default)
    value = float(value) if kind is float and type(value) is int else value
    if kind is tuple:
        texts = (value,) if isinstance(value, str) else value
        fits = isinstance(texts, list | tuple) and texts and all(isinstance(v, str) for v in texts)
        return [] if fits else [f"{name}={value!r}: must be text, or several"]
    if kind is dict:
        return [] if hasattr(value, "keys") else [f"{name}={value!r}: must be a table"]
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        return [f"{name}={value!r}: must be of type {kind.__name__}"]
    if wrong := not_chosen(opt, value):
        return [f"{name}={value!r}: {wrong}"]
    if opt.bound and not BOUNDS[opt.bound][0](value):
        return [f"{name}={value}: {BOUNDS[opt.bound][1]}"]
    return []


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value) and value >= 0


def _is_weight(value) -> bool:
    if isinstance(value, int | float):
        return _is_number(value)
    if not isinstance(value, list | tuple) or not value:
        return False
    pairs = [p for p in value if isinstance(p, list | tuple) and len(p) == 2 and all(map(_is_number, p))]
    steps = [p[0] for p in pairs]
    return len(pairs) == len(value) and steps[0] == 0 and all(isinstance(s, int) for s in steps) and steps == sorted(
        set(steps))


def _weights(sources):
    """Returns a problem if no source has a weight at some step; weights are linear between the points,
    so the points decide.
    """
    weights = [source.get("weight", 1.0) for source in sources.values()]
    steps = {0, *(int(step) for w in weights if not isinstance(w, int | float) for step, _ in w)}
    empty = [step for step in sorted(steps) if not sum(weight_at(w, step) for w in weights)]
    return [f"data.sources: every weight is 0 at step {empty[0]}; give one of them more"] if empty else []


def evaluation(cfg):
    """Returns the problems of eval.sets (form, names used twice), and of several completions at temperature 0."""
    out, seen = [], set()
    for entry in cfg.eval.sets:
        name, eq, path = entry.partition("=")
        if not eq or not name or not path:
            out.append(f"eval.sets entry {entry!r}: expected 'name=path', for example 'test={entry}'")
        elif name in seen:
            out.append(f"eval.sets: the name {name!r} is used twice; give one of them another name")
        seen.add(name)
    if cfg.eval.samples > 1 and cfg.eval.temperature == 0:
        out.append(
            f"eval.samples={cfg.eval.samples} with eval.temperature=0: greedy completions are all equal; set a "
            "temperature"
        )
    return out
