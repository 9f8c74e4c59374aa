"""Objects that a config names by import path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path


def imported(path: str):
    """Returns the object of an import path, package.module:name or ./file.py:name.

    A file is executed once in a process, as a module is; again only if it raised, or after an edit (in a notebook,
    say), and then its state starts over. Relative files start at the working directory. Raises whatever the import
    raises, and AttributeError for a name that is not there.
    """
    where, _, name = path.rpartition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    file = Path(where).absolute()
    code = file.read_bytes()
    known, module = _FILES.get(file, (None, None))
    if known != code:
        alias = f"jaxrl_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(alias, file)
        if spec is None:
            raise ImportError(f"{file} is no Python file")
        module = sys.modules[alias] = importlib.util.module_from_spec(spec)
        try:  # not from cached bytecode, which knows an edit by its second
            exec(compile(code, str(file), "exec", dont_inherit=True), vars(module))
        except BaseException:
            del sys.modules[alias]
            raise
        _FILES[file] = code, module
    return getattr(module, name)


_FILES: dict[Path, tuple] = {}  # path -> (its content, the module)
