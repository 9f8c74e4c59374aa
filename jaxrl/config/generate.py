"""Writes jaxrl/config/typed.py, the types of all options, from the schema, so that an editor knows
`spec.algorithm.kl.coef` and that it is a float.

    python -m jaxrl.config.generate        # tests/test_config.py compares the file with what this would write
"""

from __future__ import annotations

import keyword
from pathlib import Path

from jaxrl.config.option import Option
from jaxrl.config.schema import SCHEMA, element_kind

FILE = Path(__file__).parent / "typed.py"
DECIDED = {"algorithm"}  # groups whose None is replaced by a preset's value when a config is resolved
HEADER = '''"""Types of a resolved config's options, by group, for type checkers and editors: nothing is made of them.

Written by `python -m jaxrl.config.generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ml_collections import ConfigDict


class Group:
    """Options of one group, as attributes and as items. Those of a Config may be changed."""

    def __getitem__(self, name: str) -> Any: ...
    def __setitem__(self, name: str, value: Any) -> None: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: object) -> bool: ...
    def get(self, name: str, default: Any = None) -> Any: ...
    def keys(self) -> Any: ...
    def items(self) -> Any: ...
    def values(self) -> Any: ...
    def update(self, *others: Any, **values: Any) -> None: ...
    def unlocked(self) -> AbstractContextManager: ...
'''

CONFIG = '''class Config(Options, ConfigDict):
    """A config that is not resolved yet."""
'''


def kind_of(dotted: str, option: Option) -> str:
    """Returns the annotation of an option's resolved value: "float", "tuple[str, ...]", "int | None".

    dotted: name of the option. Tables are "Any"; a None of `algorithm` counts as replaced by the preset's value.
    """
    default = option.default
    if isinstance(default, dict):
        return "Any"
    if isinstance(default, tuple):
        return f"tuple[{element_kind(dotted).__name__}, ...]"
    if default is None:
        kind = (option.kind or str).__name__
        return kind if dotted.split(".")[0] in DECIDED else f"{kind} | None"
    return type(default).__name__


def classes(name: str, tree: dict, prefix: str) -> list[str]:
    """Returns the source of a group's class, after those of the groups in it.

    Options whose names are keywords of Python are left out.

    Args:
      name: of the class. tree: option's name -> Option, or the tree of a group.
      prefix: of the dotted names in it, such as "algorithm.".
    """
    before, lines = [], []
    for key, node in tree.items():
        dotted = f"{prefix}{key}"
        if keyword.iskeyword(key):
            continue  # read as an item: replay["try"]
        if isinstance(node, Option):
            lines.append(f"    {key}: {kind_of(dotted, node)}")
        elif not node:  # `user`, whose keys are the user's own
            lines.append(f"    {key}: Any")
        else:
            inner = "_".join(part.title().replace("_", "") for part in dotted.split("."))  # reward.model: Reward_Model
            before += classes(inner, node, f"{dotted}.")
            lines.append(f"    {key}: {inner}")
    return [*before, f"class {name}(Group):\n" + "\n".join(lines or ["    ..."]) + "\n"]


def source() -> str:
    """Returns the text of typed.py: a class of options per group of the schema."""
    return "\n\n".join([HEADER, *classes("Options", SCHEMA, ""), CONFIG])


if __name__ == "__main__":
    FILE.write_text(source(), "utf-8")
