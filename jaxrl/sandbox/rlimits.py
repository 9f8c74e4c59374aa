"""Backend with resource limits only, not a sandbox: protects against accidents, not malice.

A program can read and write what the user can, reach the network, signal the user's processes, and leave processes
behind that end only with the worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxrl.sandbox.bwrap import DESCRIPTORS, ENVIRONMENT
from jaxrl.sandbox.types import Limits, RunResult, Settings
from jaxrl.sandbox.watch import watch

START = """
import os, resource as r, sys
cpu, memory, disk, files = map(int, sys.argv[1:5])
for kind, soft, hard in ((r.RLIMIT_CPU, cpu, cpu + 1), (r.RLIMIT_AS, memory, memory), (r.RLIMIT_FSIZE, disk, disk),
                         (r.RLIMIT_CORE, 0, 0), (r.RLIMIT_NOFILE, files, files)):
    top = r.getrlimit(kind)[1]
    r.setrlimit(kind, [v if top == r.RLIM_INFINITY else min(v, top) for v in (soft, hard)])
try:
    os.execvp(sys.argv[5], sys.argv[5:])
except OSError as e:
    sys.exit(f"{sys.argv[5]}: {e}")
"""


def run(argv: list[str], stdin: bytes, files: dict[str, bytes], limits: Limits, settings: Settings) -> RunResult:
    """Runs one program in a temporary folder until it ends or hits a limit.

    Args:
      argv: the program and its arguments; "python" is this interpreter.
      stdin: its standard input. files: relative path -> content, in its folder.
      limits: of the run; cpu_seconds is rounded up to whole seconds. settings: not read.

    Raises OSError if no process can be started or its files cannot be written. A program that does not exist exits with
    status 1 and the reason on standard error.
    """
    deadline = time.monotonic() + limits.seconds
    numbers = (limits.whole_cpu_seconds, limits.memory_mb << 20, limits.disk_mb << 20, DESCRIPTORS)
    program = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
    with tempfile.TemporaryDirectory(prefix="sandbox", ignore_cleanup_errors=True) as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, *map(str, numbers), *program], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=folder, start_new_session=True,
            env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder})

        def kill():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

        try:
            out, err, limit = watch(process, stdin, limits, deadline, kill)
        except BaseException:
            kill()
            process.wait()
            raise
    code = process.returncode
    if not limit and code == -signal.SIGXCPU:
        limit = "cpu_seconds"
    return RunResult(None if limit and code == -signal.SIGKILL else code if code >= 0 else 128 - code,
                     out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), limit)
