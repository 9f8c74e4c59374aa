"""Checks of what is recorded of a run, and of what is computed again of it."""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl.certify.claims import CLAIMS
from jaxrl.checkpoint.resume import refusal_reason
from jaxrl.config.load import parse_value
from jaxrl.config.registry import recipe_of
from jaxrl.config.schema import options
from jaxrl.config.suggest import unknown_option
from jaxrl.errors import ConfigError

AGAIN = ("replay", "explain")  # values of run.mode that read a record


def numbers(text: str) -> list[int]:
    """Parses "10:20,30" -> [10, 11 ... 20, 30], sorted, each once; "" -> [].

    Numbers start at 1, and 10:20 includes 20. Raises ValueError for other text.
    """
    out = []
    for part in text.replace(" ", "").split(",") if text else ():
        if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", part)):
            raise ValueError(part)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last:
            raise ValueError(part)
        out += range(first, last + 1)
    return sorted(set(out))


def settings(text: str) -> list[tuple[str, object]]:
    """Parses "algorithm.clip_high=0.28,0.4;optimizer.lr=1e-6" -> [(option, value), ...], one for
    each value.

    Raises ConfigError for an unknown option, one outside `algorithm` and `optimizer` or with a list or table as its
    value, one whose change a resumed run refuses, and for a missing or wrong value.
    """
    out = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, values = entry.partition("=")
        if name not in options():
            raise ConfigError(unknown_option(name))
        if not name.startswith(("algorithm.", "optimizer.")) or isinstance(options()[name].default, tuple | dict):
            raise ConfigError(f"{name}: options of `algorithm` and `optimizer` with one value are tried")
        if why := refusal_reason(name):
            raise ConfigError(f"{name}: {why}")
        if not values:
            raise ConfigError(f"{entry!r}: a value is missing")
        out += [(name, parse_value(name, value.strip())) for value in values.split(",")]
    return out


def use_recorded_folder(config) -> None:
    """Sets run.dir to replay.run, if set, for jobs that compute recorded steps again. The config is changed."""
    if config.run.mode in AGAIN and config.replay.run:
        config.run.dir = config.replay.run


def forks(cfg) -> list[str]:
    """Returns every problem of fork.run; [] without it, for other modes than train, and for recipes without replay."""
    run, fork, recipe = cfg.run, cfg.fork, recipe_of(cfg)
    out, where = [], f"fork.run={fork.run!r}"
    if not fork.run or "replay" not in recipe.modes or run.mode != "train":  # it may be a fork's, for something else
        return []
    if not fork.step:
        out.append(f"fork.step=0 with {where}: set the first step that is to be computed anew, from 1")
    if Path(fork.run).absolute() == Path(run.dir).absolute():
        out.append(f"{where} is run.dir: a fork is a run of its own; set another run.dir")
    if run.resume not in ("auto", "must", "never") and Path(fork.run) not in Path(run.resume).parents:
        out.append(f"run.resume={run.resume!r} with {where}, which says where the run begins; leave it at auto")
    return out


def replays(cfg) -> list[str]:
    """Returns the problems of replays, of forks and of certify.accept: field, value, remedy. Of replay.steps and of
    replay.try it is the first one each."""
    out = [f"certify.accept={cfg.certify.accept}: {name!r} is no claim; choose of {', '.join(CLAIMS)}"
           for name in cfg.certify.accept if name not in CLAIMS]
    out += forks(cfg)
    if cfg.run.mode not in AGAIN:
        return out
    try:
        numbers(cfg.replay.steps)
    except ValueError as e:
        out.append(f"replay.steps={cfg.replay.steps!r}: {str(e)!r} is no step; expected steps from 1, as 812 or "
                   "10:20,30")
    if cfg.replay["try"] and cfg.lora.adapters:
        out.append("replay.try with lora.adapters: what it measures is of one set of adapters; leave it out")
    try:
        settings(cfg.replay["try"])
    except ConfigError as e:
        out.append(f"replay.try={cfg.replay['try']!r}: {e}")
    return out
