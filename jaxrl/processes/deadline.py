"""Leaving a process that a disk does not let go: threads that wait in the system can neither be ended nor joined."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

_leaving = threading.Lock()


@contextlib.contextmanager
def within(seconds: float, text: str):
    """What is done inside has so many seconds (0: no limit). After that the process says `text` and ends with status 1:
    a call that hangs in the system gives nothing else a chance."""
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
    """Ends the process from any thread, after a last line."""
    os.write(2, f"\njaxrl: {text}\n".encode())
    os._exit(status)


def leave_with_main_thread() -> None:
    """From now on the process ends with its main thread, with status 1; threads that hang are not waited for."""
    if _leaving.acquire(blocking=False):
        threading.Thread(target=_follow, name="leave", daemon=True).start()


def _follow() -> None:
    while threading.main_thread().is_alive():
        time.sleep(0.1)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
