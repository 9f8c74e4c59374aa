"""Files of the run directory that are written atomically, and the lock that keeps a second run out."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import jaxrl
from jaxrl.config.load import redacted
from jaxrl.errors import ConfigError

# What a fresh start moves away.
OWN_FILES = ("metrics.jsonl", "summary.json", "report.html", "rollouts", "record", "eval", "images", "tensorboard")


def write_atomic(path: Path, text: str) -> None:
    """Writes a file through a temporary one and a rename, so that readers and killed runs see the old or the new
    content. Makes its folder. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        tmp.write_text(text, encoding="utf-8")
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def jsonable(value: Any) -> Any:
    """Returns a value as strict JSON can hold it: numpy scalars and arrays as numbers and lists, tuples as lists, keys
    as text, non-finite numbers as the strings "nan", "inf", "-inf" (`float()` reads them back), other objects as str().
    """
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# Line ends of Unicode, which `str.splitlines` takes for the end of a record, and halves of characters, which UTF-8
# cannot write: escaped, all other text stays readable.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def dumps(value: Any, indent: int | None = None) -> str:
    """Returns strict JSON of `jsonable(value)`; the keys True, False and None may be "true", "false" and "null" in it.
    Without `indent` always on one line."""
    encode = functools.partial(json.dumps, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text = encode(value, default=jsonable)  # in C; rollouts are long
    except (TypeError, ValueError):  # numbers that are not finite, keys that are no text
        text = encode(jsonable(value))
    return _ESCAPED.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def read_json(path: Path) -> dict:
    """Returns the table in a JSON file; {} if the file is missing, unreadable or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_config(run_dir, config, derived: dict | None = None) -> Path:
    """Writes <run_dir>/config.json: the resolved config with secrets redacted, derived numbers, versions. Returns its
    path."""
    import jax

    path = Path(run_dir) / "config.json"
    content = {"config": redacted(config), "derived": derived or {}, "versions": {"jaxrl": jaxrl.__version__,
                                                                                "jax": jax.__version__}}
    write_atomic(path, dumps(content, indent=1) + "\n")
    return path


def merge(old: dict, new: dict) -> dict:
    """Returns `old` updated with `new`, table by table; neither is changed."""
    out = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def merge_json(path: Path, new: dict) -> dict:
    """Merges into a JSON file atomically and returns the whole. An unreadable file counts as empty."""
    whole = merge(read_json(path), jsonable(new))
    write_atomic(path, dumps(whole, indent=1) + "\n")
    return whole


def set_aside(run_dir: Path) -> Path | None:
    """Moves the files of an earlier run to <run_dir>/previous-<n>; returns that folder, or None if there were none.
    Checkpoints stay: the Checkpointer sets its own aside.
    """
    there = [run_dir / name for name in OWN_FILES if (run_dir / name).exists()]
    if not there:
        return None
    number = 1
    while (target := run_dir / f"previous-{number}").exists():
        number += 1
    target.mkdir()
    for path in there:
        shutil.move(path, target / path.name)
    return target


def require_free(run_dir, lock: bool = True) -> None:
    """Raises ConfigError unless `run_dir` is, or can become, a writable folder in which (with `lock`) no run writes.
    Leaves nothing in it.
    """
    run_dir = Path(run_dir)
    made = [p for p in (run_dir, *run_dir.parents) if not p.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        if lock and (run_dir / ".lock").exists():
            Lock(run_dir).close()
    except ConfigError:
        raise
    except OSError as e:
        why = "is not a folder" if run_dir.exists() and not run_dir.is_dir() else f"cannot be written: {e.strerror}"
        raise ConfigError(f"run.dir={str(run_dir)!r} {why}; choose another run.dir, or fix this one") from None
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


class Lock:
    """Held while a run writes its directory; the system releases it however the process ends.

    Raises ConfigError if another process, or another Lock of this one, holds it. On a file system without locks there
    is none.
    """

    def __init__(self, run_dir: Path):
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / ".lock"
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (held until close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise ConfigError(f"run.dir={str(run_dir)!r}: {owner} is writing there; stop it or choose another "
                              "run.dir") from None
        except OSError:
            return
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()
