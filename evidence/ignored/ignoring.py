"""Makes jaxrl read one option's default, whatever was set: the instrument of evidence/mutations.py.

What is changed is ml_collections' reading of a key, and only where jaxrl's own code asks: tests, config files and flags write
and read as ever, and so do the checks of a config (an option that is checked and then not read must be found out) and what
compares and shows configs. What jaxrl itself writes into a config, it reads back: `auto` values that it decides, a job that it
derives from another.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from ml_collections import config_dict
from ml_collections.config_dict import config_dict as inside

CHECKED_ONLY = {"rollout.penalties_in_training"}  # consent: all it does is what a config may say
PACKAGE = str(Path(importlib.util.find_spec("jaxrl").origin).parent)
TRUE_READERS = {f"{PACKAGE}/checkpoint/resume.py"}
_MARKED = "_jaxrl_wrote"

option = ""  # the ignored one; empty = none
_leaf, _siblings, _default = "", frozenset(), None


def ignore(name: str) -> None:
    """From now on `name` is read as its default; empty = every option is read as it is."""
    global option, _leaf, _siblings, _default
    option = name
    if not name:
        return
    from jaxrl.config.schema import SCHEMA, options

    *groups, _leaf = name.split(".")
    node = SCHEMA
    for group in groups:
        node = node[group]
    _siblings = frozenset(node)
    _default = {} if name == "user" else options()[name].default


def install() -> None:
    """Patches ConfigDict; once per process."""
    read, write, copy = (getattr(inside.ConfigDict, n) for n in ("__getitem__", "__setitem__", "copy_and_resolve_references"))

    def getitem(self, key):
        if isinstance(self, config_dict.FrozenConfigDict):  # a Spec: decided by jaxrl, from a copy that had the default (`copied`)
            return read(self, key)
        if option and key == _leaf and _is_group(self) and _MARKED not in vars(self) and _jaxrl_asks():
            return config_dict.ConfigDict() if isinstance(_default, dict) else _default
        return read(self, key)

    def setitem(self, key, value):
        if option and key == _leaf and _is_group(self) and _jaxrl_writes():
            object.__setattr__(self, _MARKED, True)
        return write(self, key, value)

    def copied(self, visit_map=None):
        out = copy(self, visit_map)
        if _MARKED in vars(self):
            object.__setattr__(out, _MARKED, True)
        decides = option and option not in CHECKED_ONLY and _is_group(out)
        if decides and next(_callers(), None) == (f"{PACKAGE}/resolve/spec.py", "resolve"):
            with out.unlocked(), out.ignore_type():
                write(out, _leaf, config_dict.ConfigDict() if isinstance(_default, dict) else _default)
        return out

    inside.ConfigDict.__getitem__, inside.ConfigDict.__setitem__ = getitem, setitem
    inside.ConfigDict.copy_and_resolve_references = copied


def _is_group(node) -> bool:
    return _siblings <= vars(node)["_fields"].keys()


def _callers():
    """(file, function) of everybody on the stack but ml_collections, nearest first."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in (inside.__file__, __file__):
            yield code.co_filename, code.co_name
        frame = frame.f_back


def _jaxrl_asks() -> bool:
    ours = None
    for file, function in _callers():
        if ours is None and file == f"{PACKAGE}/config/load.py":
            if function in ("redacted", "walk"):
                return False
            continue
        if ours is None:
            ours = file.startswith(PACKAGE) and file not in TRUE_READERS
            if not ours or option in CHECKED_ONLY:
                return ours
        if function == "check" and file == f"{PACKAGE}/resolve/checks/common.py":
            return False
    return bool(ours)


def _jaxrl_writes() -> bool:
    for file, function in _callers():
        if file == f"{PACKAGE}/config/load.py":
            if function == "load_config":
                return False
            continue
        return file.startswith(PACKAGE)
    return False
