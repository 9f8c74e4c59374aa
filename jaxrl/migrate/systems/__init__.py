"""The systems whose configs are read: one file each, with a TABLE."""

from __future__ import annotations

import importlib

from jaxrl.migrate.source import Unreadable
from jaxrl.migrate.table import Table

SYSTEMS = ("areal", "cosmos_rl", "rlinf", "roll", "skyrl", "trl", "verl")


def table_of(system: str) -> Table:
    """The table of a system by its name. Raises Unreadable for another name."""
    name = system.lower().replace("-", "_")
    if name not in SYSTEMS:
        raise Unreadable(system, "", f"no such system; there are {', '.join(SYSTEMS)}")
    return importlib.import_module(f"jaxrl.migrate.systems.{name}").TABLE
