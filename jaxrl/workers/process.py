"""One worker process: how it is started, spoken to, watched over and ended. What it runs is not known here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxrl.workers.streams import CHANNEL_LOST
from jaxrl.workers.supervisor import END, END_SECONDS, TOO_LARGE

LONGEST = 1 << 28        # bytes of a reply
PRINTED_BYTES = 1 << 24  # of what the workers printed; older text beyond it is dropped
# The worker gets this process's import path instead of its own: what can be imported here can be imported there.
BOOT = ("import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl.workers.supervisor import"
        " supervise; supervise(int(sys.argv[2])); importlib.import_module(sys.argv[3]).main()")
# One of another interpreter keeps its own, and finds this jaxrl but not what is installed beside it.
BOOT_ELSEWHERE = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d; workers need Python 3.11 or later" % sys.version_info[:2])
import importlib, importlib.util
spec = importlib.util.spec_from_file_location("jaxrl", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
sys.modules["jaxrl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["jaxrl"])
from jaxrl.workers.supervisor import supervise
supervise(int(sys.argv[2]))
importlib.import_module(sys.argv[3]).main()
"""

# What Python and its packages need to start; all else stays here, reward.env and env.variables let through more.
ENVIRONMENT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|PWD|XDG_CACHE_HOME|PYTHON\w+|VIRTUAL_ENV|"
    r"CONDA_PREFIX|"
    r"(?:DYLD|LD)_(?:FALLBACK_)?LIBRARY_PATH|LD_PRELOAD|SSL_CERT_(?:FILE|DIR)|(?:OMP|MKL|OPENBLAS)_NUM_THREADS|"
    r"HF_HOME|HF_HUB_OFFLINE|HF_HUB_CACHE|TOKENIZERS_PARALLELISM|SYSTEMROOT")
OF_THIS_PYTHON = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


def environment(names, python: str = "") -> dict[str, str]:
    """Of a worker: what of this process's variables Python needs, and those named."""
    env = {k: v for k, v in os.environ.items() if ENVIRONMENT.fullmatch(k) or k in names}
    if python:
        env = {k: v for k, v in env.items() if k not in OF_THIS_PYTHON}
    return {"OMP_NUM_THREADS": "1"} | env | {"JAX_PLATFORMS": "cpu"}  # a worker's jax must not take the accelerator


class Died(Exception):
    """The worker process ended; the text says how."""


class Late(Exception):
    """Nothing came before the deadline."""


class Garbled(Exception):
    """What came is no reply to what was asked; the text shows it."""


def shown(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace")) + "..." * (len(data) > 60)


class Printed:
    """The file that takes what workers write to standard output and standard error."""

    def __init__(self):
        self.file = tempfile.TemporaryFile("a+b", buffering=0)
        self._dropped = 0  # bytes, since the last time
        # Without it a worker would write at its old place after the file was emptied: zeros before what it printed.
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) | os.O_APPEND)

    def bound(self, size: int = PRINTED_BYTES) -> None:
        """Drops all of it where it is more than so many bytes."""
        held = os.fstat(self.file.fileno()).st_size
        if held > size:
            self._dropped += held
            os.ftruncate(self.file.fileno(), 0)

    def lines(self) -> list[str]:
        """What was printed since the last time; first how much of it was dropped."""
        size, dropped = os.fstat(self.file.fileno()).st_size, self._dropped
        said = [f"({dropped >> 20} MiB of what was printed are not shown)"] if dropped else []
        self._dropped = 0
        if not size:
            return said
        text = os.pread(self.file.fileno(), min(size, 1 << 20), max(0, size - (1 << 20))).decode("utf-8", "replace")
        os.ftruncate(self.file.fileno(), 0)
        return said + text.splitlines()

    def last(self) -> str:
        """The end of a message."""
        lines = self.lines()[-10:]
        return "\nthe workers printed last:\n  " + "\n  ".join(lines) if lines else ""


class Channel:
    """Lines of JSON to and from a worker. Whoever inherits has `descriptors`, (into the worker, out of it), neither of
    which blocks; `gone()`, whether it is known to have ended; and `how()` it did."""

    lost = False  # it ended with its host: nobody's code was the cause

    def __init__(self):
        self._buffer = b""

    def send(self, message: str, deadline: float) -> None:
        """Sends one line of JSON."""
        data = memoryview(message.encode() + b"\n")
        while data:
            try:
                data = data[os.write(self.descriptors[0], data):]
            except BlockingIOError:
                self._wait(self.descriptors[0], selectors.EVENT_WRITE, deadline)
            except OSError:
                raise Died(self.how()) from None

    def receive(self, deadline: float, task: int | None = None) -> dict:
        """The next message, which must be a reply to the task of this number. What is there is taken even if late."""
        while b"\n" not in self._buffer:
            try:
                data = os.read(self.descriptors[1], 1 << 16)
            except BlockingIOError:
                self._wait(self.descriptors[1], selectors.EVENT_READ, deadline)
                continue
            if not data:
                raise Died(self.how())
            self._buffer += data
            if len(self._buffer) > LONGEST:
                raise Garbled(shown(self._buffer))
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise Garbled(shown(line)) from None
        if not isinstance(reply, dict) or reply.get("task") != task:
            raise Garbled(shown(line))
        return reply

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise Late

    def ended(self) -> bool:
        """Whether the worker is gone, though nothing was asked of it."""
        try:
            data = os.read(self.descriptors[1], 1 << 16)
        except BlockingIOError:
            return self.gone()
        self._buffer += data
        return not data


class WorkerProcess(Channel):
    """One spawned interpreter (exec, never a bare fork) in its own session, so that Ctrl-C does not reach it. On Linux
    a supervisor stands before it, so that a kill takes along all it started. It must be created by a thread that lives
    as long as it does (see streams.die_with_parent).

    Args:
      module: whose `main()` it runs. printed: takes its standard error. env: its environment, see `environment`.
      memory_gb: the worker with all it started may hold this much; 0 = no limit (and none but on Linux).
      group, who: of the options and of what runs there ("reward", "a reward"), for messages.
      python: another interpreter, "" = this one. inherit: descriptors that it gets too; arguments: further ones.
    """

    def __init__(self, module: str, printed: Printed, env: dict[str, str], memory_gb: float = 0.0, *,
                 group: str = "reward", who: str = "a reward", python: str = "", inherit=(), arguments=()):
        super().__init__()
        self._memory_gb, self._group, self._who = memory_gb, group, who
        path = [p or os.getcwd() for p in sys.path]
        boot, place = (BOOT_ELSEWHERE, str(Path(__file__).parents[1])) if python else (BOOT, json.dumps(path))
        self._process = subprocess.Popen(
            [python or sys.executable, "-c", boot, place, str(round(memory_gb * 2**30)), module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed.file, env=env, start_new_session=True,
            bufsize=0, pass_fds=inherit)
        self.descriptors = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in self.descriptors:
            os.set_blocking(fd, False)

    def gone(self) -> bool:
        return self._process.poll() is not None

    def how(self) -> str:
        """How it ended."""
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "it closed its streams"
        if code == CHANNEL_LOST:
            return (f"its streams to the trainer were closed: {self._who} must not close or write to file descriptors"
                    " that it did not open")
        if code == TOO_LARGE:
            return f"it held more memory than {self._group}.memory_gb={self._memory_gb:g} allows"
        if code >= 0:
            return f"it exited with status {code}"
        return f"it was ended by {signal.Signals(-code).name}"

    def signal_kill(self) -> None:
        """The order to end the worker and everything it started; any thread may give it."""
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                self._process.send_signal(END)
            elif self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """The same, and waits for the end. Only for the thread that created it."""
        self.signal_kill()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
