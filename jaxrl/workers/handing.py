"""Trainer's side: turns a function passed as a Python object into a spec that workers can load."""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import os
import re
import sys
import tempfile
import textwrap
import types
import typing
from pathlib import Path

from jaxrl.errors import ConfigError


class FunctionFolder:
    """Folder for the source of functions passed from Python: `<run_dir>/<name>`, or a temporary folder (removed by
    `cleanup`) if run_dir is empty or a URL. Created on first use.
    """

    def __init__(self, run_dir: str, name: str = "reward_functions"):
        self._run_dir, self._name, self._temporary = run_dir, name, None

    def path(self) -> Path:
        """Returns the folder, created if necessary. A temporary one is not made again after `cleanup`."""
        if self._run_dir and "://" not in self._run_dir:
            folder = Path(self._run_dir).absolute() / self._name
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix=f"jaxrl_{self._name}_")
        return Path(self._temporary.name)

    def cleanup(self) -> None:
        """Removes the folder if it is a temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()


def function_spec(fn, folder: FunctionFolder, who: str = "reward function", annotations: bool = False) -> str:
    """Returns 'package.module:function' or '/absolute/file.py:function' of a function.

    A function that workers can import is passed by reference. Others (a notebook cell, `__main__`) are written from
    their source, with what they need, into `folder`.

    Args:
      fn: a function. folder: receives its source.
      who: name of the function's kind in messages.
      annotations: whether the names in its annotations are needed too.

    Raises:
      ConfigError: impossible, with the remedy: closures, lambdas, no source, and globals that cannot be rebuilt. Those
        that can: plain values, regular expressions, modules, importable names, and functions as this one.
    """
    return _reference_spec(fn) or _source_spec(fn, folder, who, annotations)


def file_spec(spec: str) -> str:
    """Returns a spec, 'file.py:name', with the path of its file made absolute and ~ replaced; other specs unchanged."""
    place, _, name = spec.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if place.endswith(".py") else spec


def check_place(field: str, spec: str) -> None:
    """Checks 'package.module:name' or 'file.py:name' as far as possible without an import. Raises ConfigError for a
    file that does not exist, or a spec of another form. field: the option, for the message."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ConfigError(f"{field}: {place} does not exist (needed for its function {name!r})")
    elif not re.fullmatch(r"[\w.]+", place) or not re.fullmatch(r"[\w.]+", name):
        raise ConfigError(f"{field}: {spec!r} is neither a name, nor package.module:function, nor "
                          "./file.py:function")


def _reference_spec(fn) -> str | None:
    """Returns 'module:qualname' or 'file.py:qualname' if that leads to the same function in another
    process, else None.
    """
    module = sys.modules.get(fn.__module__)
    if fn.__module__ == "__main__" or module is None or "<" in fn.__qualname__:
        return None
    found = module
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not fn:
        return None
    if _reachable(fn.__module__):
        return f"{fn.__module__}:{fn.__qualname__}"
    path = getattr(module, "__file__", None)
    return f"{Path(path).absolute()}:{fn.__qualname__}" if path and path.endswith(".py") else None


def _reachable(module: str) -> bool:
    """Returns whether `import module` finds the same file in another process with this one's import path.
    (sys.modules does not tell: config files and the like are loaded by path.)
    """
    top = module.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__spec__", None)
    for finder in sys.meta_path:
        try:
            found = finder.find_spec(top, None)
        except (ImportError, ValueError, AttributeError):
            continue
        if found is not None:
            return loaded is not None and found.origin == loaded.origin
    return False


def _source_spec(fn, folder: FunctionFolder, who: str, annotations: bool) -> str:
    body = _Source(fn.__name__, who, annotations).function(fn)
    path = folder.path() / f"{fn.__name__}_{hashlib.sha256(body.encode()).hexdigest()[:8]}.py"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(body, encoding="utf-8")
        os.replace(part, path)
    return f"{path}:{fn.__name__}"


class _Source:
    """Writes a module that defines a function and the globals it reads, from the live objects."""

    def __init__(self, name: str, who: str, annotations: bool):
        self.name, self.who, self.annotations, self.seen, self.lines = name, who, annotations, {}, []

    def function(self, fn) -> str:
        self._define(fn.__name__, fn)
        return "from __future__ import annotations\n\n" + "\n".join(self.lines) + "\n"

    def refuse(self, why: str):
        raise ConfigError(f"{self.who} {self.name!r} cannot be passed to worker processes: {why}. Put it into a "
                          f"file and pass './file.py:{self.name}', or make it self-contained (imports, helpers inside)")

    def _define(self, name: str, value) -> None:
        """Appends whatever makes `name` mean `value`."""
        if name in self.seen:
            if self.seen[name] is not value:
                self.refuse(f"the name {name!r} means two things in what it uses")
            return
        self.seen[name] = value
        if isinstance(value, types.ModuleType):
            self.lines.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif isinstance(value, (types.FunctionType, type)) and self._importable(value):
            self.lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif isinstance(value, types.FunctionType):
            self._write(name, value)
        elif isinstance(value, re.Pattern):
            self._define("re", re)
            self.lines.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif (text := self._literal(value)) is not None:
            self.lines.append(f"{name} = {text}")
        elif isinstance(value, types.BuiltinFunctionType) and self._importable(value):
            self.lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif (known := getattr(value, "_name", None)) and getattr(typing, known, None) is value:  # Literal, Any
            self.lines.append(f"from typing import {known} as {name}")
        else:
            self.refuse(f"it uses the global {name!r}, a {type(value).__name__}, which cannot be rebuilt there")

    def _write(self, name: str, fn) -> None:
        if fn.__closure__:
            self.refuse(f"{fn.__qualname__} uses variables of the function around it "
                        f"({', '.join(fn.__code__.co_freevars)})")
        if fn.__name__ != name or fn.__name__ == "<lambda>":
            self.refuse(f"{name!r} is a lambda or another name of {fn.__name__!r}; define it with def")
        try:
            text = textwrap.dedent(inspect.getsource(fn))
            node = ast.parse(text).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            self.refuse(f"the source of {name!r} is not available")
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != name:
            self.refuse(f"the source of {name!r} is not a def")
        parts = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        if self.annotations:
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            parts += filter(None, (*(a.annotation for a in arguments), node.returns))
        outside = [n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)]
        for used in dict.fromkeys([*outside, *_globals_of(fn.__code__)]):
            if used in fn.__globals__:
                self._define(used, fn.__globals__[used])
            elif not hasattr(builtins, used):
                self.refuse(f"{name!r} uses {used!r}, which is not defined")
        self.lines.append("\n\n" + text)

    def _importable(self, value) -> bool:
        module, name = getattr(value, "__module__", None), value.__qualname__
        if module in (None, "__main__") or "." in name or "<" in name:
            return False
        return getattr(sys.modules.get(module), name, None) is value and (module == "builtins" or _reachable(module))

    @staticmethod
    def _literal(value) -> str | None:
        try:
            text = repr(value)
            return text if type(value) in (int, float, str, bytes, bool, type(None), list, tuple, dict, set) and \
                ast.literal_eval(text) == value else None
        except (ValueError, SyntaxError):
            return None


def _globals_of(code: types.CodeType) -> list[str]:
    """Returns the names of globals the code reads, nested functions and comprehensions included."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _globals_of(inner)
    return names
