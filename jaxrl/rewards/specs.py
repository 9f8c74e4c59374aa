"""Parent side: turns a reward as the user gives it (name, import path, file, function) into a spec
that workers can load.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re

from jaxrl.errors import ConfigError
from jaxrl.rewards.builtin import BUILT_IN, registered_rewards
from jaxrl.rewards.services import service_options
from jaxrl.workers.handing import FunctionFolder, check_place, file_spec, function_spec


def to_spec(function, folder: FunctionFolder, services=()) -> str:
    """Returns a spec: a built-in reward's or a service's name, 'package.module:function' or
    '/absolute/file.py:function'. A name registered elsewhere becomes its function's spec; an unknown name stays as it
    is, for check_specs.

    Args:
      function: such a text, or a plain function, which is passed by reference if workers can import it.
      folder: receives the source of functions that they cannot import, such as those of a notebook.
      services: names of reward services.

    Raises ConfigError for other objects, and for functions that cannot be passed (closures, lambdas).
    """
    if isinstance(function, str):
        if function in services:
            return function
        if ":" not in function and function in registered_rewards():
            fn = registered_rewards()[function]
            return function if fn.__module__ in BUILT_IN else to_spec(fn, folder)
        return file_spec(function)
    if not inspect.isfunction(function):
        raise ConfigError(f"reward {function!r}: pass a plain function (def ...), its name, or "
                          f"'package.module:function'; a {type(function).__name__} cannot be passed to worker "
                          "processes")
    return function_spec(function, folder)


def short_names(functions, specs: list[str]) -> list[str]:
    """Returns names of reward functions for parts and metrics: the registered or the function's name.

    The whole spec where two would be equal. functions: texts or functions. specs: of each, from `to_spec`."""
    short = [g.rpartition(":")[2] if isinstance(g, str) else g.__name__ for g in functions]
    return [n if short.count(n) == 1 else s for n, s in zip(short, specs, strict=True)]


def check_specs(config, specs, names, replaced: bool, services=()) -> dict[str, float]:
    """Checks everything that needs no import and returns name -> weight, 1 without reward.weights. Raises ConfigError
    naming the option and the remedy: for numbers out of range, functions that are unknown or listed twice, a missing or
    invalid reward.format_pattern, and reward.arguments, eval.accuracy_from or reward.weights that do not fit the
    functions.

    Args:
      config: options `reward.*`, eval.accuracy_from, eval.rewards and env.
      specs, names: of the functions, in order. services: names of reward services.
      replaced: the functions are not those of `reward.functions`; a weight then follows the function's name there."""
    r = config.reward
    for field in ("workers", "timeout_seconds"):
        if r[field] <= 0:
            raise ConfigError(f"reward.{field}={r[field]}: must be above 0")
    if not 0 <= r.max_failed_fraction <= 1:
        raise ConfigError(f"reward.max_failed_fraction={r.max_failed_fraction}: must lie in [0, 1]")
    env = config.env.function or config.env.program or config.env.malformed_penalty
    given = {"env": ("env.*", env), "reward_model": ("reward.model", r.model.path)}  # parts that no function computes
    for spec, name in zip(specs, names, strict=True):
        if name in given and given[name][1]:
            raise ConfigError(f"reward function {name!r}: it has the name of the score of {given[name][0]}; rename the "
                              "function")
        if specs.count(spec) > 1:
            raise ConfigError(f"reward function {name!r} is listed twice; set its weight with reward.weights")
        if spec not in services:
            _check_spec(spec, service_options(r))
    if "format" in specs:
        if not r.format_pattern:
            raise ConfigError("reward 'format' needs reward.format_pattern, a regex the whole completion must match")
        try:
            re.compile(r.format_pattern)
        except re.error as e:
            raise ConfigError(f"reward.format_pattern={r.format_pattern!r} is not a valid regex: {e}") from None
    unnamed = [name for name in r.arguments if name not in (*names, *short_names(r.functions, list(r.functions)))]
    if unnamed:
        raise ConfigError(f"reward.arguments: {unnamed[0]!r} is none of the reward functions {', '.join(names)}; leave "
                          "it out, or name the function in reward.functions")
    accuracy = config.eval.accuracy_from
    if config.env.function or config.env.program:
        names = [*names, "env"]  # the part that episodes give
    if accuracy and accuracy not in names and (replaced or not config.eval.rewards):
        raise ConfigError(f"eval.accuracy_from={accuracy!r} is not one of the reward functions: {', '.join(names)}")
    return _weights(r, names[:len(specs)], replaced)


def _check_spec(spec: str, services) -> None:
    if ":" not in spec:
        if spec.endswith(".py"):
            raise ConfigError(f"reward.functions: {spec!r} is a file without a function; write {spec}:function")
        if spec not in registered_rewards():
            known = {*registered_rewards(), *services}
            near = difflib.get_close_matches(spec, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"reward.functions: there is no reward {spec!r}; {hint}known: "
                              f"{', '.join(sorted(known))}; name your own as package.module:function or "
                              "./file.py:function")
    else:
        check_place("reward.functions", spec)


def _weights(r, names, replaced: bool) -> dict[str, float]:
    weights = [float(w) for w in r.weights]
    if replaced:
        by_name = dict(zip(short_names(r.functions, list(r.functions)), weights, strict=False))
        return {n: by_name.get(n, 1.0) for n in names}
    if weights and len(weights) != len(names):
        raise ConfigError(f"reward.weights has {len(weights)} entries for {len(names)} functions ({', '.join(names)})")
    if not all(math.isfinite(w) for w in weights):
        raise ConfigError(f"reward.weights={tuple(weights)}: must be finite numbers")
    return dict(zip(names, weights or [1.0] * len(names), strict=True))
