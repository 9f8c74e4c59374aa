"""Digests the code that one user function consists of: its def, what that names in its file, and every file imported
from there, transitively. Other functions of the same file, or of files next to it, are not included.

The source is parsed, so comments do not count. If code can reach what its text does not name (an import by name,
exec), the whole folder counts (`sources.digest`). Standard library only: workers import this file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig

from jaxrl.workers.sources import digest

ANYWHERE = {"importlib", "import_module", "__import__", "exec", "eval", "runpy", "modules"}  # may load any file
ANYTHING = ANYWHERE | {"globals", "locals", "vars", "getattr", "__dict__", "inspect"}  # may name what is in its own
DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def function_digest(fn, spec: str, before: set[str]) -> str:
    """Returns the digest of a function's code, of the Python version and of everything that it imports: user code by
    its parsed source, installed packages by name, version and size of the file. The standard library does not count.
    If the code may load files that its text does not name, it is `sources.digest` of the function instead.

    Args:
      fn: the function.
      spec: 'module:name', 'file.py:name' or a registered name.
      before: names of the modules loaded before the user's (`sources.digest`).
    """
    place, _, name = spec.rpartition(":")
    own = getattr(fn, "__module__", None) or type(fn).__module__
    file = os.path.abspath(place) if place.endswith(".py") else None
    files = {getattr(x, "__file__", None): m for m, x in list(sys.modules.items())} if file else {}
    module = files.get(file, place or own)
    reached = _ReachedCode()
    try:
        reached.add(module, (name if place else getattr(fn, "__name__", "")).partition(".")[0])
        if own != module:
            reached.add(own, getattr(fn, "__name__", ""))
    except UnboundedImports:
        return digest([fn], before)
    return hashlib.sha256("\n".join([sys.version, *sorted(reached.parts)]).encode()).hexdigest()


class UnboundedImports(Exception):
    """The code may load files that its text does not name."""


class _ReachedCode:
    def __init__(self):
        self.parts: set[str] = set()
        self._seen: set[str] = set()

    def add(self, module: str, root: str = "") -> None:
        """Adds a module, or the parts of it that its function `root` needs, and everything that is imported there."""
        path = _path(module)
        if module in self._seen or path is None or path.startswith(STANDARD) and "-packages" not in path:
            return
        self._seen.add(module)
        top = module.partition(".")[0]
        installed = any(folder in path for folder in ("site-packages", "dist-packages"))
        if installed and top != "jaxrl" and not root:
            self.parts.add(f"{top} {_version(top)} {os.path.getsize(path)}")
            return
        with open(path, "rb") as file:
            content = file.read()
        if not path.endswith(".py"):
            self.parts.add(f"{module} {hashlib.sha256(content).hexdigest()}")
            return
        body = ast.parse(content).body
        if top != "jaxrl" and ANYWHERE & _names(body):
            raise UnboundedImports
        body = _needed(body, root) if root else body
        # of a file that is loaded by its path, its place is a part of the module's name, and counts for nothing
        known = os.path.basename(path) if module.startswith("jaxrl_user_") else module
        self.parts.add(f"{known} " + hashlib.sha256("\n".join(map(ast.dump, body)).encode()).hexdigest())
        for name in sorted(_imports(body, module, path)):
            self.add(name)


def _needed(body: list, root: str) -> list:
    """Returns the statements of a file without its plain functions that `root` does not reach; all of them
    if that is unknown.
    """
    plain = {s.name: s for s in body if isinstance(s, DEFS) and not s.decorator_list}
    if root not in {s.name for s in body if isinstance(s, DEFS)} or ANYTHING & _names(body):
        return body
    if len(plain) != sum(isinstance(s, DEFS) and not s.decorator_list for s in body):  # a name that is defined twice
        return body
    needed = [s for s in body if s not in plain.values() or s.name == root]
    used, missing = _names(needed), True
    while missing:
        missing = [s for name, s in plain.items() if name in used and s not in needed]
        needed += missing
        used |= _names(missing)
    return [s for s in body if s in needed]


def _names(body: list) -> set[str]:
    """Returns all names in these statements: variables, attributes, imports, and texts that might be names."""
    out = set()
    for node in (n for s in body for n in ast.walk(s)):
        if isinstance(node, ast.Name):
            out.add(node.id)
        elif isinstance(node, ast.Attribute):
            out.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.add(node.value)
        elif isinstance(node, ast.alias):
            out |= {*node.name.split("."), node.asname or ""}
        elif isinstance(node, ast.ImportFrom):
            out |= set((node.module or "").split("."))
    return out


def _imports(body: list, module: str, path: str) -> set[str]:
    """Returns the names of the modules that these statements may import, and of their parent packages."""
    found = set()
    package = module if os.path.basename(path) == "__init__.py" else module.rpartition(".")[0]
    for node in (n for s in body for n in ast.walk(s)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    parts = [name.split(".") for name in found]
    return {".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)} - {""}


def _path(module: str) -> str | None:
    """Returns the file of a module, loaded or not; None without a file or module."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    above = module.rpartition(".")[0]
    if above and above not in sys.modules:
        package = _path(above)
        return None if package is None else _inside(package, module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec is not None and spec.origin and os.path.exists(spec.origin) else None


def _inside(package: str, module: str) -> str | None:
    """Returns the file of a module of a package (given by its file) that is not loaded."""
    folder = os.path.join(os.path.dirname(package), module.rpartition(".")[2])
    return next((p for p in (f"{folder}.py", os.path.join(folder, "__init__.py")) if os.path.exists(p)), None)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
