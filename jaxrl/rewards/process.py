"""Parent side of one worker process: start, send, receive with a deadline, kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time

from jaxrl.rewards.supervisor import END, END_SECONDS, TOO_LARGE
from jaxrl.rewards.worker import CHANNEL_LOST

LONGEST = 1 << 28  # bytes of a reply
# The worker gets this process's import path instead of its own: what can be imported here can be imported there.
BOOT = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl.rewards.supervisor import supervise; "
        "supervise(int(sys.argv[2])); from jaxrl.rewards.worker import main; main()")


# What Python and its packages need to start; all else stays here, reward.env lets through more.
ENVIRONMENT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|PWD|XDG_CACHE_HOME|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(?:DYLD|LD)_(?:FALLBACK_)?LIBRARY_PATH|LD_PRELOAD|SSL_CERT_(?:FILE|DIR)|(?:OMP|MKL|OPENBLAS)_NUM_THREADS|"
    r"HF_HOME|HF_HUB_OFFLINE|HF_HUB_CACHE|TOKENIZERS_PARALLELISM|SYSTEMROOT")


def environment(names) -> dict[str, str]:
    """Of a worker: what of this process's variables Python needs, and those named."""
    env = {k: v for k, v in os.environ.items() if ENVIRONMENT.fullmatch(k) or k in names}
    return {"OMP_NUM_THREADS": "1"} | env | {"JAX_PLATFORMS": "cpu"}  # should a reward import jax, it must not take the accelerator


class Died(Exception):
    """The worker process ended; the text says how."""


class Late(Exception):
    """Nothing came before the deadline."""


class Garbled(Exception):
    """What came is no reply to what was asked; the text shows it."""


def shown(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace")) + "..." * (len(data) > 60)


class WorkerProcess:
    """One spawned interpreter (exec, never a bare fork) in its own session, so that Ctrl-C does not reach it. On Linux
    a supervisor stands before it, so that a kill takes along all it started. It must be created by a thread that lives
    as long as it does (see worker.die_with_parent).

    Args:
      memory_gb: the worker with all it started may hold this much; 0 = no limit (and none but on Linux).
    """

    def __init__(self, stderr, env: dict[str, str], memory_gb: float = 0.0):
        self._memory_gb = memory_gb
        path = [p or os.getcwd() for p in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(path), str(round(memory_gb * 2**30))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=stderr, env=env, start_new_session=True, bufsize=0)
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._buffer = b""

    def send(self, message: str, deadline: float) -> None:
        """Sends one line of JSON."""
        data = memoryview(message.encode() + b"\n")
        while data:
            try:
                data = data[os.write(self._in, data):]
            except BlockingIOError:
                self._wait(self._in, selectors.EVENT_WRITE, deadline)
            except OSError:
                raise Died(self._how()) from None

    def receive(self, deadline: float, task: int | None = None) -> dict:
        """The next message, which must be a reply to the task of this number. One that is there is taken even if it is
        late."""
        while b"\n" not in self._buffer:
            try:
                data = os.read(self._out, 1 << 16)
            except BlockingIOError:
                self._wait(self._out, selectors.EVENT_READ, deadline)
                continue
            if not data:
                raise Died(self._how())
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
            data = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return self._process.poll() is not None
        self._buffer += data
        return not data

    def _how(self) -> str:
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "it closed its streams"
        if code == CHANNEL_LOST:
            return ("its streams to the trainer were closed: a reward must not close or write to file descriptors that it did "
                    "not open")
        if code == TOO_LARGE:
            return f"it held more memory than reward.memory_gb={self._memory_gb:g} allows"
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
