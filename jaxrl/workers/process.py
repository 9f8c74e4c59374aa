"""One worker process: start, messages, monitoring and end, independent of what it runs."""

from __future__ import annotations

import abc
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

MAX_REPLY_BYTES = 1 << 28        # bytes of a reply
PRINTED_BYTES = 1 << 24  # most text printed by workers that is kept
# The worker gets this process's import path, so that it can import what this process can.
BOOT = ("import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl.workers.supervisor import"
        " supervise; supervise(int(sys.argv[2])); importlib.import_module(sys.argv[3]).main()")
# Another interpreter keeps its import path, and finds this jaxrl but not the packages installed with it.
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

# What Python and its packages need to start; reward.env and env.variables pass further variables.
ENVIRONMENT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|PWD|XDG_CACHE_HOME|PYTHON\w+|VIRTUAL_ENV|"
    r"CONDA_PREFIX|"
    r"(?:DYLD|LD)_(?:FALLBACK_)?LIBRARY_PATH|LD_PRELOAD|SSL_CERT_(?:FILE|DIR)|(?:OMP|MKL|OPENBLAS)_NUM_THREADS|"
    r"HF_HOME|HF_HUB_OFFLINE|HF_HUB_CACHE|TOKENIZERS_PARALLELISM|SYSTEMROOT")
PYTHON_VARIABLES = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


def environment(names, python: str = "") -> dict[str, str]:
    """Returns a worker's environment: the variables Python needs, the named ones, OMP_NUM_THREADS=1 if it is not set,
    and JAX_PLATFORMS=cpu always.

    names: of further variables of this process. python: another interpreter, which does not get PYTHON_VARIABLES; "" =
    this one."""
    env = {k: v for k, v in os.environ.items() if ENVIRONMENT.fullmatch(k) or k in names}
    if python:
        env = {k: v for k, v in env.items() if k not in PYTHON_VARIABLES}
    return {"OMP_NUM_THREADS": "1"} | env | {"JAX_PLATFORMS": "cpu"}  # a worker's jax must not take the accelerator


class WorkerDied(Exception):
    """The worker process ended; the text says how."""


class ReplyTimeout(Exception):
    """No reply arrived before the deadline."""


class BadReply(Exception):
    """A message that is not a valid reply; the text shows it."""


def excerpt(data: bytes) -> str:
    """Returns the first 60 bytes of a message for display, quoted."""
    return repr(data[:60].decode("utf-8", "replace")) + "..." * (len(data) > 60)


class PrintedOutput:
    """File that receives what workers write to standard output and standard error. `lines` reads and empties it.

    Attributes:
      file: a temporary file without a buffer, in append mode."""

    def __init__(self):
        self.file = tempfile.TemporaryFile("a+b", buffering=0)
        self._dropped = 0  # bytes since the last call of lines()
        # O_APPEND: else a worker would write at its old offset after the file was emptied, after a block of zeros.
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) | os.O_APPEND)

    def bound(self, size: int = PRINTED_BYTES) -> None:
        """Drops the whole text if it exceeds `size` bytes."""
        size_now = os.fstat(self.file.fileno()).st_size
        if size_now > size:
            self._dropped += size_now
            os.ftruncate(self.file.fileno(), 0)

    def lines(self) -> list[str]:
        """Returns the lines printed since the last call, of the last MiB of text, and empties the file; first how much
        `bound` dropped."""
        size, dropped = os.fstat(self.file.fileno()).st_size, self._dropped
        lines = [f"({dropped >> 20} MiB of printed text were dropped)"] if dropped else []
        self._dropped = 0
        if not size:
            return lines
        text = os.pread(self.file.fileno(), min(size, 1 << 20), max(0, size - (1 << 20))).decode("utf-8", "replace")
        os.ftruncate(self.file.fileno(), 0)
        return lines + text.splitlines()

    def last(self) -> str:
        """Returns the last ten printed lines as the end of a message, "" without any; empties the file."""
        lines = self.lines()[-10:]
        return "\nlast output of the workers:\n  " + "\n  ".join(lines) if lines else ""


class Channel(abc.ABC):
    """JSON lines to and from a worker.

    Attributes:
      descriptors: (to the worker, from it), both non-blocking.
      lost: whether it ended with its host, not because of its code.
    """

    descriptors: tuple[int, int]  # to the worker, from it; both are non-blocking
    lost = False  # it ended with its host, not because of its code

    def __init__(self):
        self._buffer = b""

    @abc.abstractmethod
    def gone(self) -> bool:
        """Returns whether the worker has ended."""

    @abc.abstractmethod
    def how(self) -> str:
        """Returns how the worker ended, as text."""

    @abc.abstractmethod
    def signal_kill(self) -> None:
        """Starts killing the worker and its child processes; any thread may call it."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kills the worker and waits for its end. Only for the thread that created it."""

    def send(self, message: str, deadline: float) -> None:
        """Sends one line of JSON. Raises ReplyTimeout if the worker does not read it before the deadline
        (time.monotonic()): a part may have been sent, so that the worker has to be killed. WorkerDied if it has ended.
        """
        data = memoryview(message.encode() + b"\n")
        while data:
            try:
                data = data[os.write(self.descriptors[0], data):]
            except BlockingIOError:
                self._wait(self.descriptors[0], selectors.EVENT_WRITE, deadline)
            except OSError:
                raise WorkerDied(self.how()) from None

    def receive(self, deadline: float, task: int | None = None) -> dict:
        """Returns the next message, which must be a reply to the task of this number (None: without one). A reply that
        has arrived is returned even after the deadline (time.monotonic()).

        Raises ReplyTimeout at the deadline, WorkerDied if the worker has ended, BadReply for a message that is no JSON
        object, has another number, or exceeds MAX_REPLY_BYTES.
        """
        while b"\n" not in self._buffer:
            try:
                data = os.read(self.descriptors[1], 1 << 16)
            except BlockingIOError:
                self._wait(self.descriptors[1], selectors.EVENT_READ, deadline)
                continue
            if not data:
                raise WorkerDied(self.how())
            self._buffer += data
            if len(self._buffer) > MAX_REPLY_BYTES:
                raise BadReply(excerpt(self._buffer))
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise BadReply(excerpt(line)) from None
        if not isinstance(reply, dict) or reply.get("task") != task:
            raise BadReply(excerpt(line))
        return reply

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise ReplyTimeout

    def ended(self) -> bool:
        """Returns whether the worker ended while idle; what it has sent is kept for `receive`."""
        try:
            data = os.read(self.descriptors[1], 1 << 16)
        except BlockingIOError:
            return self.gone()
        self._buffer += data
        return not data


class WorkerProcess(Channel):
    """One spawned interpreter (exec, never a bare fork) in its own session, so that Ctrl-C does not reach it.

    On Linux a supervisor process precedes it, so that a kill includes all its child processes. It must be created by
    a thread that lives as long as it does (see streams.die_with_parent).

    Args:
      module: its `main()` runs in the worker.
      printed: receives its standard error.
      env: its whole environment, as `environment` returns it.
      memory_gb: limit of the worker with its child processes; 0 = none (Linux only).
      group, who: option group and kind of worker ("reward", "a reward"), for messages.
      python: another interpreter, "" = this one.
      inherit: descriptors to inherit; arguments: further arguments.
    """

    def __init__(self, module: str, printed: PrintedOutput, env: dict[str, str], memory_gb: float = 0.0, *,
                 group: str = "reward", who: str = "a reward", python: str = "", inherit=(), arguments=()):
        super().__init__()
        self._memory_gb, self._group, self._who = memory_gb, group, who
        path = [p or os.getcwd() for p in sys.path]
        boot, place = (BOOT_ELSEWHERE, str(Path(__file__).parents[1])) if python else (BOOT, json.dumps(path))
        self._process = subprocess.Popen(
            [python or sys.executable, "-c", boot, place, str(round(memory_gb * 2**30)), module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed.file, env=env, start_new_session=True,
            bufsize=0, pass_fds=inherit)
        assert self._process.stdin and self._process.stdout  # both are pipes
        self._streams = self._process.stdin, self._process.stdout
        self.descriptors = self._streams[0].fileno(), self._streams[1].fileno()
        for fd in self.descriptors:
            os.set_blocking(fd, False)

    def gone(self) -> bool:
        """Returns whether the process has ended."""
        return self._process.poll() is not None

    def how(self) -> str:
        """Returns how the process ended, as text for messages; waits up to 10 s for its end."""
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "it closed its streams"
        if code == CHANNEL_LOST:
            return (f"its streams to the trainer were closed: {self._who} must not close or write to file descriptors"
                    " that it did not open")
        if code == TOO_LARGE:
            return f"it used more memory than {self._group}.memory_gb={self._memory_gb:g} allows"
        if code >= 0:
            return f"it exited with status {code}"
        return f"it was killed by {signal.Signals(-code).name}"

    def signal_kill(self) -> None:
        """Asks for the end of the process and its child processes; does not wait."""
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                self._process.send_signal(END)
            elif self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process with its child processes and waits for its end."""
        self.signal_kill()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in self._streams:
            stream.close()
