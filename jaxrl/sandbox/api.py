"""`run`: one program under limits, by the backend that the config names, which has been probed."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import subprocess
import threading

from jaxrl.sandbox import bwrap, remote, rlimits
from jaxrl.sandbox.probe import check
from jaxrl.sandbox.refusals import refusal
from jaxrl.sandbox.types import Limits, Ran, SandboxError, Settings
from jaxrl.workers.loading import LoadError

BACKENDS = {"bwrap": bwrap.run, "rlimits": rlimits.run, "remote": remote.run}
LONGEST_NAME, LONGEST_PATH = 255, 3800  # bytes; Linux takes 255, and 4096 with the folder above
_LIMITS = tuple(field.name for field in dataclasses.fields(Limits))
_state = {"settings": Settings(), "limits": Limits(), "probed": None}
_lock = threading.Lock()


def configure(options: dict) -> None:
    """The config's `sandbox`, for this process; workers do it first of all."""
    options = dict(options)
    limits = Limits(**{name: options.pop(name) for name in _LIMITS if name in options})
    settings = Settings(**options | {"paths": tuple(options.get("paths", ()))})
    _state.update(settings=settings, limits=limits, probed=None)


def run(argv: list[str], stdin: str | bytes = "", files: dict[str, str | bytes] | None = None, **limits) -> Ran:
    """Runs a program to its end, or to a limit. Blocks; any thread may call it.

    Args:
      argv: the program and its arguments; "python" is this interpreter with its packages. It starts in a folder of its
        own, which is gone afterwards, without the environment variables of this process.
      stdin: its standard input. files: relative path -> content, in that folder.
      limits: seconds, cpu_seconds, memory_mb, disk_mb, output_bytes, processes, in place of the config's.

    Raises:
      SandboxError: the sandbox failed, or does not keep what it promises (see `probe`). No fault of the program.
      ValueError, TypeError: arguments that no sandbox takes.
    """
    limits = dataclasses.replace(_state["limits"], **limits)
    for field in dataclasses.fields(limits):
        value, kind = getattr(limits, field.name), type(field.default)
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < math.inf:
            raise ValueError(f"{field.name}={value!r}: expected a {'whole ' * (kind is int)}number above 0")
    argv, stdin, files = _checked(argv, stdin, files or {})
    probe()
    return _run(argv, stdin, files, limits, _state["settings"])


def _run(argv, stdin, files, limits: Limits, settings: Settings) -> Ran:
    try:
        return BACKENDS[settings.backend](argv, stdin, files, limits, settings)
    except (OSError, subprocess.SubprocessError) as e:
        raise refusal(f"sandbox.backend={settings.backend}: a program cannot be started", e) from None


async def run_async(argv, stdin="", files=None, **limits) -> Ran:
    """The same for asynchronous rewards and episodes: in a thread."""
    return await asyncio.to_thread(run, argv, stdin, files, **limits)


def limits() -> Limits:
    """The config's."""
    return _state["limits"]


def probe() -> None:
    """Tries once per process what a program must not be able to do. Raises SandboxError with what to do instead.
    `run` does it before the first program."""
    settings, limits = _state["settings"], _state["limits"]
    with _lock:
        if _state["probed"] != (os.getpid(), settings, limits):
            check(settings, limits, _run)
            _state["probed"] = os.getpid(), settings, limits


def prepare() -> None:
    """The same for what workers load: they report ready after it. Raises LoadError."""
    try:
        probe()
    except SandboxError as e:
        raise LoadError(str(e)) from None


def _checked(argv, stdin, files):
    if not isinstance(argv, (list, tuple)) or not argv or not all(isinstance(a, str) and "\0" not in a for a in argv):
        raise TypeError(f"argv is a list of texts, got {argv!r}"[:200])
    for name in files:
        parts = name.split("/")
        if not name or name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the name of a file is a relative path inside of the program's folder, got {name!r}")
        if len(os.fsencode(name)) > LONGEST_PATH or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            raise ValueError(f"the name of a file has at most {LONGEST_NAME} bytes, its path {LONGEST_PATH}, got "
                             f"{name[:40]!r}...")
        if above := next((above for k in range(1, len(parts)) if (above := "/".join(parts[:k])) in files), None):
            raise ValueError(f"{above!r} is a file and the folder of {name!r}")
    return list(argv), _bytes(stdin), {name: _bytes(data) for name, data in files.items()}


def _bytes(data: str | bytes) -> bytes:
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
