"""The systems whose configs are read: one file each, with a TABLE."""

from __future__ import annotations

import importlib

from jaxrl.migrate.source import Unreadable
from jaxrl.migrate.table import Table

SYSTEMS = ("areal", "cosmos_rl", "rlinf", "roll", "skyrl", "trl", "tunix", "verl")


def table_of(system: str) -> Table:
    """Returns the table of a system (`trl`, `cosmos-rl`) or of one of its other jobs (`trl/sft`). Case does not count,
    and hyphens are read as underscores. Raises Unreadable for an unknown system or job."""
    name, _, job = system.lower().replace("-", "_").partition("/")
    if name not in SYSTEMS:
        raise Unreadable(system, "", f"no such system; there are {', '.join(SYSTEMS)}")
    table = importlib.import_module(f"jaxrl.migrate.systems.{name}").TABLE
    if not job:
        return table
    found = {reader.job: reader for reader in (other.reader() for other in table.jobs if other.table)}
    if job not in found:
        raise Unreadable(system, "", f"no such job; there are {', '.join(f'{name}/{j}' for j in found) or 'none'}")
    return found[job]


def tables() -> list[str]:
    """Returns the names of all tables: `trl`, `trl/sft` ..."""
    jobs = {name: [job.reader().job for job in table_of(name).jobs if job.table] for name in SYSTEMS}
    return [full for name in SYSTEMS for full in (name, *(f"{name}/{job}" for job in jobs[name]))]
