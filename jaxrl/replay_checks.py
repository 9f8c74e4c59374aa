"""Checks of what is recorded of a run, and of what is computed again of it."""

from __future__ import annotations

import re

from jaxrl.algorithm_checks import no_effect
from jaxrl.config import get
from jaxrl.registry import recipe_of
from jaxrl.schema_jobs import REPLAY

AGAIN = ("replay",)  # values of run.mode that read a record


def numbers(text: str) -> list[int]:
    """"10:20,30" -> [10, 11 ... 20, 30]; "" -> []. ValueError for what is no such list."""
    out = []
    for part in text.replace(" ", "").split(",") if text else ():
        if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", part)):
            raise ValueError(part)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last:
            raise ValueError(part)
        out += range(first, last + 1)
    return sorted(set(out))


def place(config) -> None:
    """Lets a job that computes recorded steps again work in the recorded run's directory."""
    if config.run.mode in AGAIN and config.replay.run:
        config.run.dir = config.replay.run


def replays(cfg) -> list[str]:
    """Every problem: field, value, remedy."""
    record, recipe, out = cfg.record, recipe_of(cfg), []
    if record.every and not (recipe.samples and recipe.judged):
        out.append(f"record.every={record.every} with run.recipe={cfg.run.recipe}: steps of reinforcement learning are "
                   "recorded; leave it out")
    if record.last and not record.every:
        out.append(no_effect("record.last", record.last, "with record.every=0", "set record.every"))
    if cfg.run.mode not in AGAIN:
        return out + [no_effect(f"replay.{name}", get(cfg.replay, name), f"with run.mode={cfg.run.mode}",
                                f"set run.mode to {' or '.join(AGAIN)}") for name in REPLAY if get(cfg.replay, name)]
    try:
        numbers(cfg.replay.steps)
    except ValueError as e:
        out.append(f"replay.steps={cfg.replay.steps!r}: {str(e)!r} is no step; expected steps from 1, as 812 or 10:20,30")
    return out
