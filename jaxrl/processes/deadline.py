"""Ends a process that a disk blocks: threads waiting in system calls can neither be stopped nor joined."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time

PRINT_SECONDS = 2.0
_leaving = threading.Lock()


@contextlib.contextmanager
def time_limit(seconds: float, text: str):
    """Limits the block to `seconds` (0: no limit). After that the process prints `text` and exits with status 1,
    since a call that hangs in the system allows nothing else.
    """
    timer = threading.Timer(seconds, leave, (text,)) if seconds else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def leave(text: str, status: int = 1) -> None:
    """Ends the process with this exit status, from any thread, after printing the text as a last line on standard
    error, where it can be written; nothing is flushed or cleaned up."""
    print_last(text)
    os._exit(status)


def print_last(text: str) -> None:
    """Writes a line to standard error before a forced exit, from any thread or signal handler. A reader that has gone
    raises nothing, and one that does not read delays it by PRINT_SECONDS."""
    poll = select.poll()  # a full pipe blocks a write for as long as its reader sleeps
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        if poll.poll(PRINT_SECONDS * 1000):
            os.write(2, f"\njaxrl: {text}\n".encode()[:select.PIPE_BUF])


def leave_with_main_thread() -> None:
    """Makes the process exit with its main thread, with status 1; hanging threads are not joined."""
    if _leaving.acquire(blocking=False):
        threading.Thread(target=_follow, name="leave", daemon=True).start()


def _follow() -> None:
    while threading.main_thread().is_alive():
        time.sleep(0.1)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
