"""Runs one program under limits with the configured backend, after probing it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from jaxrl.sandbox import bwrap, remote, rlimits
from jaxrl.sandbox.probe import check
from jaxrl.sandbox.refusals import refusal
from jaxrl.sandbox.types import Limits, RunResult, SandboxError, Settings
from jaxrl.workers.loading import LoadError

BACKENDS = {"bwrap": bwrap.run, "rlimits": rlimits.run, "remote": remote.run}
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3800  # bytes; Linux takes 255, and 4096 with the folder above
_LIMITS = tuple(field.name for field in dataclasses.fields(Limits))
_state = {"settings": Settings(), "limits": Limits(), "probed": None}
_lock = threading.Lock()


def configure(options: Mapping[str, Any]) -> None:
    """Sets the config's `sandbox` options for this process, after which the next `run` probes the sandbox again.
    Workers call it first.

    options: option -> value, limits included; missing ones have the defaults of Limits and Settings. Raises TypeError
    for an unknown one."""
    settings_given: dict[str, Any] = {**options, "paths": tuple(options.get("paths", ()))}
    limits = Limits(**{name: settings_given.pop(name) for name in _LIMITS if name in settings_given})
    settings = Settings(**settings_given)
    _state.update(settings=settings, limits=limits, probed=None)


def run(argv: list[str], stdin: str | bytes = "", files: Mapping[str, str | bytes] | None = None,
        **limits) -> RunResult:
    """Runs a program until it ends or hits a limit. Blocks; any thread may call it.

    Args:
      argv: the program and its arguments; "python" is this interpreter with its packages (sandbox.backend=remote: the
        service's). It starts in a temporary folder, without this process's environment variables.
      stdin: its standard input.
      files: relative path -> content, in that folder.
      limits: seconds, cpu_seconds, memory_mb, disk_mb, output_bytes, processes; override the config's.

    Returns:
      The RunResult; of a program that does not exist, one with a status above 0 and the reason in stderr.

    Raises:
      SandboxError: the sandbox failed, or does not isolate programs (see `probe`). Not the program's fault.
      ValueError, TypeError: invalid arguments.
    """
    limits = dataclasses.replace(_state["limits"], **limits)
    for field in dataclasses.fields(limits):
        value, kind = getattr(limits, field.name), type(field.default)
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < math.inf:
            raise ValueError(f"{field.name}={value!r}: expected a {'whole ' * (kind is int)}number above 0")
    argv, stdin, files = _check_arguments(argv, stdin, files or {})
    probe()
    return _run(argv, stdin, files, limits, _state["settings"])


def _run(argv, stdin, files, limits: Limits, settings: Settings) -> RunResult:
    try:
        return BACKENDS[settings.backend](argv, stdin, files, limits, settings)
    except (OSError, subprocess.SubprocessError) as e:
        raise refusal(f"sandbox.backend={settings.backend}: a program cannot be started", e) from None


async def run_async(argv, stdin="", files=None, **limits) -> RunResult:
    """Runs a program until it ends or hits a limit, in a thread, for asynchronous rewards and episodes. Cancelling the
    call does not end the program.

    Args:
      argv: the program and its arguments; "python" is this interpreter with its packages.
      stdin: its standard input, str or bytes. files: relative path -> content, in its folder.
      limits: seconds, cpu_seconds, memory_mb, disk_mb, output_bytes, processes; override the config's.

    Returns the RunResult. Raises SandboxError if the sandbox failed; ValueError, TypeError for invalid arguments.
    """
    return await asyncio.to_thread(run, argv, stdin, files, **limits)


def limits() -> Limits:
    """Returns the limits that `configure` set in this process, else the defaults."""
    return _state["limits"]


def probe() -> None:
    """Tries what a program must not be able to do, once per process and configuration. `run` calls it first.

    Raises SandboxError, with the remedy, if the sandbox fails or does not isolate programs.
    """
    settings, limits = _state["settings"], _state["limits"]
    with _lock:
        if _state["probed"] != (os.getpid(), settings, limits):
            check(settings, limits, _run)
            _state["probed"] = os.getpid(), settings, limits


def prepare() -> None:
    """Probes the sandbox before a worker reports ready. Raises LoadError if it fails or does not isolate programs."""
    try:
        probe()
    except SandboxError as e:
        raise LoadError(str(e)) from None


def _check_arguments(argv, stdin, files):
    if not isinstance(argv, (list, tuple)) or not argv or not all(isinstance(a, str) and "\0" not in a for a in argv):
        raise TypeError(f"argv is a list of texts, got {argv!r}"[:200])
    if not isinstance(files, Mapping):
        raise TypeError(f"files is a dict of relative path -> content, got {type(files).__name__}")
    for name in files:
        if not isinstance(name, str):
            raise TypeError(f"the name of a file is a text, got {name!r}; write str(...)"[:200])
        parts = name.split("/")
        if not name or name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"a file's name must be a relative path inside the program's folder, got {name!r}")
        if len(os.fsencode(name)) > MAX_PATH_BYTES or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
            raise ValueError(f"the name of a file has at most {MAX_NAME_BYTES} bytes, its path {MAX_PATH_BYTES}, got "
                             f"{name[:40]!r}...")
        if above := next((above for k in range(1, len(parts)) if (above := "/".join(parts[:k])) in files), None):
            raise ValueError(f"{above!r} is a file and the folder of {name!r}")
    contents = {name: _bytes(f"the file {name!r}", data) for name, data in files.items()}
    return list(argv), _bytes("stdin", stdin), contents


def _bytes(what: str, data) -> bytes:
    """Returns text or bytes as bytes. what: they are of, for messages. Raises TypeError for anything else."""
    if isinstance(data, str):
        return data.encode("utf-8", "surrogatepass")
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what} is text or bytes, got {type(data).__name__}")
    return bytes(data)
