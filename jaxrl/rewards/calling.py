"""Worker side: loads a reward function, passes its arguments, reads its return value.

Standard library only. A spec is a registered name, 'package.module:function', '/path/file.py:function', or the name
of a service (see services.py).
"""

from __future__ import annotations

import importlib
import inspect
import math
import os

from jaxrl.rewards import images
from jaxrl.workers.loading import MAX_REWARD, LoadError, describe, load, number, printable, safe_str

# of the item, passed to functions that name them
EXTRAS = ("token_ids", "context_ids", "finish", "group", "sample", "images", "image_sizes")
SHARED = ("user", "format_pattern", "code_score")  # of the run, passed to functions that name them
OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "worker.py"))  # left out of tracebacks


class ServiceError(Exception):
    """A service gave no score.

    Attributes:
      cause: one word, counted in the metrics as reward/<name>/failed_<cause>.
      again: whether a retry may succeed; after: seconds to wait before it, None for the default.
    """

    def __init__(self, cause: str, text: str, again: bool = False, after: float | None = None):
        super().__init__(text)
        self.cause, self.again, self.after = cause, again, after


def load_function(spec: str, setup: dict):
    """Returns the function of a spec. Raises LoadError with the reason.

    Args:
      spec: name of a service in `setup`, 'module:function', 'file.py:function', or name of a built-in reward.
      setup: the worker's first message (worker.py): services and places by name, limit in seconds, which lowers
        builtin.LIMIT to builtin.SHARE of it."""
    if spec in setup.get("services", ()):
        options = setup["services"][spec]
        return importlib.import_module(f"jaxrl.rewards.{options['kind']}").make(options, setup["places"][spec])
    if ":" in spec:
        return load(spec)
    from jaxrl.rewards import builtin
    if spec not in builtin.registered_rewards():
        raise LoadError(f"there is no built-in reward {spec!r}")
    builtin.LIMIT = min(builtin.LIMIT, builtin.SHARE * setup.get("limit", math.inf))
    return builtin.registered_rewards()[spec]


def _prepare(fn) -> None:
    """Calls fn.prepare(). Raises LoadError where it fails."""
    try:
        fn.prepare()
    except LoadError:
        raise
    except (Exception, SystemExit) as e:
        raise LoadError(f"its prepare() failed: {describe(e)}") from None


class Call:
    """A reward function with its calling convention, read from its signature.

    If the signature has `completion(s)` and no positional-only parameter, the completion is passed by name, and the
    prompt, too, if it has `prompt(s)` or `**columns`. Otherwise both are the first two positional arguments. Columns
    are passed by name: all of them to `**columns`, else only named ones. EXTRAS and SHARED are passed only to
    functions that name them. Its arguments in reward.arguments go before all of these.

    Args:
      spec: of the function, as `load_function` takes it. name: for messages and reward.arguments.
      setup: the worker's first message.

    Attributes:
      fn, name: the function, and its name as given.
      batched: a parameter is named `completions`.
      asynchronous: it is a coroutine function.
      size: completions per call of a batched function, 0 for all.
      seconds: time limit of a call of a batched function, 0 for the run's.

    Raises LoadError if it cannot be loaded, its prepare() fails, or reward.arguments names an argument that it does not
    have."""

    def __init__(self, spec: str, name: str, setup: dict):
        self.fn, self.name = load_function(spec, setup), name
        self.size, self.seconds = getattr(self.fn, "size", 0), getattr(self.fn, "seconds", 0.0)
        if hasattr(self.fn, "prepare"):
            _prepare(self.fn)
        try:
            parameters = list(inspect.signature(self.fn).parameters.values())
        except (TypeError, ValueError):  # some built-in callables have no signature
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
        self.own = setup.get("arguments", {}).get(name, {})  # reward.arguments
        if unknown := sorted(set(self.own) - set(names)):
            raise LoadError(f"reward.arguments: {name} has no argument {unknown[0]!r}; it has {', '.join(names)}")

    def traits(self) -> dict:
        """Returns what the parent process needs to know of the function, as a JSON-able dict.

        {batched, asynchronous, size, seconds} as of the class, and context, images and image_sizes: whether it names
        context_ids, images and image_sizes, which are sent only if one of the functions does."""
        return {"batched": self.batched, "asynchronous": self.asynchronous, "size": self.size, "seconds": self.seconds,
                "context": "context_ids" in self.named, "images": "images" in self.named,
                "image_sizes": "image_sizes" in self.named}

    def arguments(self, prompt, completion, columns: dict, extras: dict, shared: dict):
        """Returns (args, kwargs) of a call, from prompt, completion, data columns, extras and shared arguments. Of
        equal names reward.arguments go before shared arguments, these before extras, and extras before columns.

        Raises TypeError naming a required argument that is not available."""
        kwargs = {k: v for k, v in columns.items() if k not in self.first} if self.takes_all else {}
        available = {**columns, **extras, **shared, **self.own}
        for name, required in self.named.items():
            if name in available:
                kwargs[name] = available[name]
            elif required:
                raise TypeError(f"it has the parameter {name!r}, which is neither a data column "
                                f"({', '.join(columns) or 'none'}) nor one of "
                                f"{', '.join((*self.first, *EXTRAS, 'user'))}")
        if not self.by_name:
            return (prompt, completion), kwargs
        kwargs[self.first[1]] = completion
        if self.wants_prompt:
            kwargs[self.first[0]] = prompt
        return (), kwargs

    def call_one(self, item: dict, shared: dict):
        """Calls the function for one item; returns its value, or a coroutine if it is asynchronous.

        Args:
          item: the JSON of a RewardItem (items.item_json).
          shared: arguments that all items share: user, format_pattern, code_score.

        Raises TypeError for a required argument that is not available, and whatever the function raises.
        """
        extras = self._extras(item)
        args, kwargs = self.arguments(item["prompt"], item["completion"], item["columns"], extras, shared)
        return self.fn(*args, **kwargs)

    def _extras(self, item: dict) -> dict:
        """Returns the item's EXTRAS; those of images only for functions that name them."""
        out = {k: item[k] for k in EXTRAS if k in item and (k not in ("images", "image_sizes") or k in self.named)}
        if "images" in out:
            out["images"] = images.from_json(item["images"], item["image_sizes"])
        if "image_sizes" in out:
            out["image_sizes"] = images.sizes_from_json(item["image_sizes"])
        return out

    def call_batch(self, items: list[dict], shared: dict):
        """Calls the function for a batch of JSON items; returns its values, or a coroutine if it is asynchronous.

        Args:
          items: each the JSON of a RewardItem (items.item_json). A column that some lack is None for them.
          shared: arguments that all items share: user, format_pattern, code_score.

        Raises TypeError for a required argument that is not available, and whatever the function raises."""
        names = dict.fromkeys(name for item in items for name in item["columns"])
        columns = {n: [item["columns"].get(n) for item in items] for n in names}
        each = [self._extras(item) for item in items]
        extras = {k: [own[k] for own in each] for k in each[0]}
        args, kwargs = self.arguments([i["prompt"] for i in items], [i["completion"] for i in items], columns, extras,
                                      shared)
        return self.fn(*args, **kwargs)


def outcome(value) -> dict:
    """Returns {value, outcome, metrics} of a function's return value for one item; value is None unless outcome is
    'ok'.

    value: a number, None or (one of these, {metric: number}). None -> 'none'; NaN and infinities -> 'nan'; anything
    that is not a number, is beyond MAX_REWARD in absolute value, or has a metric that is no number -> 'error: ...'; a
    ServiceError as `failure` has it. Never raises."""
    if isinstance(value, ServiceError):
        return failure(value)
    try:
        return _outcome(value)
    except Exception as e:  # an integer beyond the float range, an object whose repr fails
        return failure(e)


def _outcome(value) -> dict:
    metrics = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, metrics = value
        metrics = {printable(str(k)): number(v) for k, v in metrics.items()}
        wrong = [k for k, v in metrics.items() if v is None]
        if wrong:
            return {"value": None, "outcome": f"error: metric {wrong[0]!r} is not a number", "metrics": {}}
    if value is None:
        return {"value": None, "outcome": "none", "metrics": metrics}
    score = number(value)
    if score is None:
        text = f"error: returned {type(value).__name__} {safe_str(value)[:80]!r}, expected a number or None"
        return {"value": None, "outcome": text, "metrics": {}}
    if not math.isfinite(score):
        return {"value": None, "outcome": "nan", "metrics": metrics}
    if abs(score) > MAX_REWARD:
        wanted = f"a number of at most {MAX_REWARD:g}, whose square fp32 can hold: scale it"
        return {"value": None, "outcome": f"error: returned {score:g}, expected {wanted}", "metrics": {}}
    return {"value": score, "outcome": "ok", "metrics": metrics}


def failure(error: BaseException) -> dict:
    """Returns {value: None, outcome, metrics: {}} of an exception raised by a reward function or a service: outcome is
    'error: cause: text' of a ServiceError, else 'error: ' with type, text and place of the error."""
    if isinstance(error, ServiceError):
        return {"value": None, "outcome": f"error: {error.cause}: {printable(str(error))}", "metrics": {}}
    return {"value": None, "outcome": f"error: {describe(error, OWN_FILES)}", "metrics": {}}
