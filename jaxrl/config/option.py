"""What an option of the schema is."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]  # the package


class Option(NamedTuple):
    """One option.

    Attributes:
      default, doc: its default and its meaning. kind: its type, needed only where the default is None.
      choices: values that a string may have; or_path: or an import path. bound: key of BOUNDS for a number.
      needs: condition on other options without which nothing reads it: terms joined by `or`, clauses of them by `and`.
        A term is `option` (it is on), `not option`, `option=a|b`, `option!=a|b`, `option>1` or `option<1`.
      read_by: the recipes that read it; () = all. A recipe of the user's own may read any.
    """

    default: Any
    doc: str
    kind: type | None = None
    choices: Collection | None = None
    bound: str = ""
    or_path: bool = False
    needs: str = ""
    read_by: tuple[str, ...] = ()


def shared(tree: dict[str, Any], needs: str = "", read_by: tuple[str, ...] = (), but: Collection[str] = ()) -> dict:
    """Returns a copy of a group in which the condition `needs` stands before every option's own, and options without a
    `read_by` have this one.

    tree: option's name -> Option, or the tree of a group in it. but: options of the group itself, not of groups in it,
    that do not get the condition.
    """
    out = {}
    for name, node in tree.items():
        if isinstance(node, Option):
            both = " and ".join(filter(None, (needs * (name not in but), node.needs)))
            out[name] = node._replace(needs=both, read_by=node.read_by or read_by)
        else:
            out[name] = shared(node, needs, read_by)
    return out


class Rows(Collection):
    """The names of the rows of tables `module:TABLE`, as choices.

    Names come from the source of the modules, whose import may take seconds (jax). `in` also finds a name that was
    registered later in an imported table; iteration and length have the source's alone. Raises LookupError at first use
    for a table that the module's source does not assign.
    """

    def __init__(self, *tables: str):
        self._tables = tables

    @functools.cached_property
    def _written(self) -> tuple[str, ...]:
        return tuple(name for table in self._tables for name in _keys(*table.split(":")))

    def __iter__(self):
        return iter(self._written)

    def __len__(self):
        return len(self._written)

    def __contains__(self, name):
        loaded = (getattr(sys.modules.get(module), table, ()) for module, table in (t.split(":") for t in self._tables))
        return name in self._written or any(name in table for table in loaded)


def _keys(module: str, table: str) -> list[str]:
    """Keys of the dict that a module's source assigns to a name."""
    package, _, name = module.rpartition(".")
    tree = ast.parse(ROOT.joinpath(*package.split(".")[1:], f"{name}.py").read_text("utf-8"))
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == table:
            found = next(n for n in ast.walk(node) if isinstance(n, ast.Dict))
            return [ast.literal_eval(key) for key in found.keys if key is not None]
    raise LookupError(f"{module}:{table}")


BOUNDS = {  # name -> (whether a number keeps it, what to say where it does not)
    ">0": (lambda x: x > 0, "must be above 0"),
    ">=0": (lambda x: x >= 0, "must not be negative"),
    ">=1": (lambda x: x >= 1, "must be at least 1"),
    "1..256": (lambda x: 1 <= x <= 256, "must lie in 1..256"),
    "1..8192": (lambda x: 1 <= x <= 8192, "must lie in 1..8192"),
    "0..1": (lambda x: 0 <= x <= 1, "must lie in 0..1"),
    "(0, 1)": (lambda x: 0 < x < 1, "must lie between 0 and 1"),
    "[0, 1)": (lambda x: 0 <= x < 1, "must lie in [0, 1)"),
    "(0, 1]": (lambda x: 0 < x <= 1, "must lie above 0 and at most at 1 (1 = off)"),
    "0 or >1": (lambda x: x == 0 or x > 1, "must be above 1, or 0 for off"),
    "-1 or >0": (lambda x: x == -1 or x > 0, "must be above 0, or -1 for all"),
}


def is_finite(number) -> bool:
    """Returns whether a float can hold a number: False for NaN, infinities and integers beyond float64."""
    return abs(number) <= sys.float_info.max


def no_effect(name: str, value, without: str, remedy: str) -> str:
    """Returns the problem of an option that nothing would read. without: reason, such as "without
    rollout.engine=vllm".
    """
    return f"{name}={value!r} has no effect {without}; {remedy}"


def not_chosen(option: Option, value) -> str:
    """Returns the problem of a value, or of the entries of a list, that must be among the choices; "" = none. With
    option.or_path any text with a colon is allowed, too."""
    values = value if isinstance(option.default, tuple) else (value,)
    if not option.choices or all(v in option.choices or option.or_path and ":" in str(v) for v in values):
        return ""
    path = ", or an import path (module:function, ./file.py:function)" if option.or_path else ""
    return f"choose one of {', '.join(map(str, option.choices))}{path}"
