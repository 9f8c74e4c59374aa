"""Jobs of another kind than a system's table is about: how a source is recognised as one, and what reads it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.migrate.source import Setting, Source, switch


@dataclass(frozen=True)
class Job:
    """A job of another kind than its system's table is about. It is recognised by a pattern of the command, or by one
    of some keys (`a.b`, `a.**`, or `a.b=value`) where none of `unless` is set; with `file`, by keys only in a source
    without a command.

    what: the job by name, for the report. table: `module:NAME` of the Table below jaxrl.migrate.systems that reads it.
    Without one the config is refused for this reason alone, no rule is run, and `ours` is what does it in jaxrl."""

    what: str
    ours: str = ""
    command: str = ""
    keys: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    file: bool = False
    table: str = ""

    def reader(self) -> Any:
        """Returns the Table that reads the job, importing its module. Call it only where `table` is set."""
        module, _, name = self.table.partition(":")
        return getattr(importlib.import_module(f"jaxrl.migrate.systems.{module}"), name)


SFT = "run.recipe=sft (configs/sft_chat.py)"
PREFERENCE = "run.recipe=preference (configs/dpo.py, docs/guides/preferences.md)"
DISTILL = "run.recipe=distill (configs/distill.py, docs/guides/distillation.md)"
EVAL = "run.mode=eval, with eval.sets and model.path"
EPISODES = "an environment (configs/env.py, docs/guides/environments.md)"


def job_of(jobs: tuple[Job, ...], source: Source) -> tuple[str, Job] | None:
    """Returns (the key or the words of the command that say so, the first of the jobs that a source describes); None
    where it describes none."""
    for job in jobs:
        if job.command and (found := re.search(job.command, source.command)):
            return found[0].strip(), job
        if job.file and source.command or any(_set(source.settings, key) for key in job.unless):
            continue
        for key in job.keys:
            if setting := _set(source.settings, key):
                return setting.key, job
    return None


def _set(settings: Mapping[str, Setting], key: str) -> Setting | None:
    """Returns the first setting of `a.b=value`, or of `a.b` or `a.**` with another value than null, false or {}."""
    name, eq, value = key.partition("=")
    pattern = re.compile(pattern_of(name))
    of = (s for s in settings.values() if pattern.fullmatch(s.key))
    values = ((s, switch(s.value)) for s in of)
    return next((s for s, v in values if (str(v) == value if eq else v not in (None, False, {}, ""))), None)


def pattern_of(name: str) -> str:
    """Returns the regex of a dotted name, in which `*` stands for one part and `**` for one or more."""
    return re.escape(name).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
