"""Worker's side of its pipes: private streams, replies written only by its own process, ending with the parent.
Standard library only.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys

RUNNING = ""  # kind of this worker; user files imported here must not start a job
CHANNEL_LOST = 252  # exit status: the streams to the parent were closed by something in this process


def begin(kind: str) -> None:
    """Sets up a worker process: it ends with its parent and ignores SIGTERM. Every worker calls it first.

    kind: of worker, stored in RUNNING, from which user files see that they must not start a job."""
    global RUNNING
    RUNNING = kind
    die_with_parent()
    # Schedulers send SIGTERM to every process of a job; the parent decides what happens then. (A handler rather than
    # SIG_IGN: programs that a worker starts must not inherit it.)
    signal.signal(signal.SIGTERM, lambda *_: None)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends (Linux, PR_SET_PDEATHSIG = 1)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Replies:
    """The stream to the parent. Only the process that opened it may write: a forked child that returns from
    user code exits here.

    fd: of the stream, from `private_descriptors`.

    Attributes:
      task: number of the task that replies are for, which every message carries; None before the first one.
    """

    def __init__(self, fd: int):
        self._out, self._owner, self.task = os.fdopen(fd, "w", encoding="utf-8"), os.getpid(), None

    def send(self, message: dict) -> None:
        """Sends a message as one JSON line that carries the number `task`. Ends the process with status 1 if it is not
        the one that opened the stream."""
        if os.getpid() != self._owner:
            os._exit(1)
        self._out.write(json.dumps({"task": self.task, **message}) + "\n")
        self._out.flush()

    def lost(self) -> bool:
        """Returns whether the stream was closed by this process."""
        try:
            os.fstat(self._out.fileno())
            return False
        except (OSError, ValueError):
            return True


def private_descriptors() -> tuple[int, int]:
    """Moves the protocol's streams away from descriptors 0 and 1, which user code may use, and returns them: (to read,
    to write). Standard input is empty afterwards, and standard output goes to standard error; forked children lose
    both streams."""
    streams = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")

    def in_child():
        """It neither takes this process's tasks nor keeps its stream open, and SIGTERM ends
        it (as multiprocessing wants)."""
        for fd in streams:
            os.dup2(nothing, fd, inheritable=False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    if hasattr(os, "register_at_fork"):  # (SIGTERM must not reach a child before its handler is the default one)
        os.register_at_fork(before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
                            after_in_child=in_child,
                            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}))
    return streams
