"""What an option of the schema is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option. `kind` is needed only where the default is None; `choices` bounds a string (`or_path`: an import
    path will do, too), `bound` (a key of BOUNDS) a number."""

    default: Any
    doc: str
    kind: type | None = None
    choices: Collection | None = None
    bound: str = ""
    or_path: bool = False


BOUNDS = {  # name -> (whether a number keeps it, what to say where it does not)
    ">0": (lambda x: x > 0, "must be above 0"),
    ">=0": (lambda x: x >= 0, "must not be negative"),
    ">=1": (lambda x: x >= 1, "must be at least 1"),
    "0..1": (lambda x: 0 <= x <= 1, "must lie in 0..1"),
    "(0, 1)": (lambda x: 0 < x < 1, "must lie between 0 and 1"),
    "[0, 1)": (lambda x: 0 <= x < 1, "must lie in [0, 1)"),
    "(0, 1]": (lambda x: 0 < x <= 1, "must lie above 0 and at most at 1 (1 = off)"),
    "0 or >1": (lambda x: x == 0 or x > 1, "must be above 1, or 0 for off"),
    "-1 or >0": (lambda x: x == -1 or x > 0, "must be above 0, or -1 for all"),
}


def no_effect(name: str, value, without: str, remedy: str) -> str:
    """The problem of an option that would be read by nothing."""
    return f"{name}={value!r} has no effect {without}; {remedy}"
