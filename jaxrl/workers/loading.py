"""Worker's side of functions that the user names: loads them and describes errors in them. Standard library only."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback

MAX_REWARD = 1e15  # absolute value of a reward: sums of squares of larger ones overflow fp32


class LoadError(Exception):
    """What the user named cannot be loaded, or cannot be used by a worker; the text gives the reason."""


def load(spec: str):
    """Returns the callable of 'package.module:name' or '/path/file.py:name'; name may be dotted. A file is executed
    once per process, and its folder is appended to sys.path. Raises LoadError with the reason."""
    place, _, name = spec.rpartition(":")
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as e:
        raise LoadError(f"importing {place} failed: {describe(e)}") from None
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = (n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)
            raise LoadError(f"{place} has no function {name!r}; it has: {', '.join(own) or 'none'}")
        found = getattr(found, part)
    if not callable(found):
        raise LoadError(f"{spec} has type {type(found).__name__}; expected a function")
    return found


def _load_file(path: str):
    folder, stem = os.path.split(path)
    name = f"jaxrl_user_{stem[:-3]}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        if folder not in sys.path:
            sys.path.append(folder)  # so that the file finds its neighbours
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def number(value) -> float | None:
    """Returns an int, a float or a bool as a float, also that of an array scalar or an array of shape [] or [1]; None
    for anything else, such as a Decimal. Raises OverflowError for an integer beyond the range of floats."""
    if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):  # array scalars, without importing numpy
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else None


def safe_str(value) -> str:
    """Returns str(value) as `printable` writes it, or "" if that fails (integers with too many digits, lists nested too
    deeply)."""
    try:
        return printable(str(value))
    except Exception:
        return ""


def printable(text: str) -> str:
    """Returns the text with unpaired surrogates, which no file or console accepts, written as backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def describe(error: BaseException, own=()) -> str:
    """Returns 'ValueError: text (file.py:12 in score)': type, text and the innermost place outside `own`
    files and this one. Type and text are cut to 300 characters.
    """
    text = f"{type(error).__name__}: {safe_str(error)}".replace("\n", " ")
    if len(text) > 300:
        text = text[:300] + "..."
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if f.filename not in (__file__, *own) and not f.filename.startswith("<frozen")]
    if not frames:
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})"
