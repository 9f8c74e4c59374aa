"""Worker side: finding a reward function, handing it its arguments, reading what it returns.

Standard library only. A spec is a registered name, 'package.module:function' or '/path/file.py:function'.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback

EXTRAS = ("token_ids", "finish", "group", "sample")     # of the item, for functions that name them
SHARED = ("user", "format_pattern")                      # of the run, for functions that name them


class RewardLoadError(Exception):
    """A spec that leads to no callable function."""


def load_function(spec: str):
    """The function behind a spec. Raises RewardLoadError with the reason."""
    place, _, name = spec.rpartition(":")
    if not place:
        from jaxrl.rewards.builtin import registered
        if name not in registered():
            raise RewardLoadError(f"there is no built-in reward {name!r}")
        fn = registered()[name]
    else:
        try:
            module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
        except (Exception, SystemExit) as e:
            raise RewardLoadError(f"importing {place} failed: {describe(e)}") from None
        fn = module
        for part in name.split("."):
            if not hasattr(fn, part):
                own = (n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)
                raise RewardLoadError(f"{place} has no function {name!r}; it has: {', '.join(own) or 'none'}")
            fn = getattr(fn, part)
    if not callable(fn):
        raise RewardLoadError(f"{spec} is a {type(fn).__name__}, not a function")
    return fn


def _load_file(path: str):
    folder, stem = os.path.split(path)
    name = f"jaxrl_reward_{stem[:-3]}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        if folder not in sys.path:
            sys.path.append(folder)  # so that the file finds its neighbours
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class Call:
    """A reward function with its calling convention, read off its signature.

    batched: a parameter is named `completions`; asynchronous: a coroutine function. Prompt and completion go by name
    where the signature has `completion(s)`, else as the first two positional arguments. Columns go by name: all of
    them to `**columns`, else only those that are named. EXTRAS and SHARED are passed only to functions naming them.
    """

    def __init__(self, spec: str, name: str):
        self.fn, self.name = load_function(spec), name
        if hasattr(self.fn, "prepare"):
            self.fn.prepare()
        try:
            parameters = list(inspect.signature(self.fn).parameters.values())
        except (TypeError, ValueError):  # some builtins have no signature
            parameters = []
        names = [p.name for p in parameters]
        self.batched = "completions" in names
        self.asynchronous = inspect.iscoroutinefunction(self.fn) or inspect.iscoroutinefunction(
            getattr(self.fn, "__call__", None))  # noqa: B004
        self.first = ("prompts", "completions") if self.batched else ("prompt", "completion")
        self.by_name = self.first[1] in names and not any(p.kind is p.POSITIONAL_ONLY for p in parameters)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not self.by_name:
            plain = [p for p in plain if p not in parameters[:2]]
        self.named = {p.name: p.default is p.empty for p in plain if p.name not in self.first}
        self.wants_prompt = self.first[0] in names or self.takes_all

    def arguments(self, prompt, completion, columns: dict, extras: dict, shared: dict):
        """(args, kwargs). Raises TypeError naming an argument that is nowhere to be found."""
        kwargs = {k: v for k, v in columns.items() if k not in self.first} if self.takes_all else {}
        available = {**columns, **extras, **shared}
        for name, required in self.named.items():
            if name in available:
                kwargs[name] = available[name]
            elif required:
                raise TypeError(f"it asks for {name!r}, which is neither a data column "
                                f"({', '.join(columns) or 'none'}) nor one of "
                                f"{', '.join((*self.first, *EXTRAS, 'user'))}")
        if not self.by_name:
            return (prompt, completion), kwargs
        kwargs[self.first[1]] = completion
        if self.wants_prompt:
            kwargs[self.first[0]] = prompt
        return (), kwargs

    def one(self, item: dict, shared: dict):
        """Calls for one item; a coroutine if asynchronous."""
        extras = {k: item[k] for k in EXTRAS}
        args, kwargs = self.arguments(item["prompt"], item["completion"], item["columns"], extras, shared)
        return self.fn(*args, **kwargs)

    def many(self, items: list[dict], shared: dict):
        """Calls for a batch; a column that some items lack is None there."""
        names = dict.fromkeys(name for item in items for name in item["columns"])
        columns = {n: [item["columns"].get(n) for item in items] for n in names}
        extras = {k: [item[k] for item in items] for k in EXTRAS}
        args, kwargs = self.arguments([i["prompt"] for i in items], [i["completion"] for i in items], columns, extras,
                                      shared)
        return self.fn(*args, **kwargs)


def outcome(value) -> dict:
    """What a function returned for one item, as {value, outcome, metrics}. value is None unless outcome is 'ok'.

    None -> 'none'; NaN and infinities -> 'nan'; anything that is no number -> 'error: ...'. Never raises.
    """
    try:
        return _outcome(value)
    except Exception as e:  # an integer beyond every float, an object that cannot be shown
        return failure(e)


def _outcome(value) -> dict:
    metrics = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, metrics = value
        metrics = {_plain(str(k)): _number(v) for k, v in metrics.items()}
        wrong = [k for k, v in metrics.items() if v is None]
        if wrong:
            return {"value": None, "outcome": f"error: metric {wrong[0]!r} is not a number", "metrics": {}}
    if value is None:
        return {"value": None, "outcome": "none", "metrics": metrics}
    number = _number(value)
    if number is None:
        text = f"error: returned {type(value).__name__} {_shown(value)[:80]!r}, expected a number or None"
        return {"value": None, "outcome": text, "metrics": {}}
    if not math.isfinite(number):
        return {"value": None, "outcome": "nan", "metrics": metrics}
    return {"value": number, "outcome": "ok", "metrics": metrics}


def _number(value) -> float | None:
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):  # array scalars, without importing numpy
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else None


def _shown(value) -> str:
    """str(value), or nothing where that is impossible (integers of too many digits, lists nested too deep)."""
    try:
        return _plain(str(value))
    except Exception:
        return ""


def _plain(text: str) -> str:
    """Without halves of characters, which no file and no console takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def failure(error: BaseException) -> dict:
    return {"value": None, "outcome": f"error: {describe(error)}", "metrics": {}}


def describe(error: BaseException) -> str:
    """'ValueError: text (file.py:12 in score)': kind, text and the innermost place outside this file."""
    text = f"{type(error).__name__}: {_shown(error)}".replace("\n", " ")
    if len(text) > 300:
        text = text[:300] + "..."
    own = (__file__, os.path.join(os.path.dirname(__file__), "worker.py"))
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if f.filename not in own and not f.filename.startswith("<frozen")]
    if not frames:
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})"
