"""The process between the trainer and a worker (Linux). It runs no user code, so it can kill whatever that has
started, including processes that left the worker's session or outlived it. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

TOO_LARGE = 251        # exit status: the worker and its child processes exceeded the memory limit
WATCH_SECONDS = 0.25   # between two checks of the memory
END_SECONDS = 5.0      # a process still alive this long after SIGKILL hangs in the kernel
END = signal.SIGUSR2   # sent by the trainer to end the worker, and by the system when the trainer's thread is gone


def supervise(memory: int) -> None:
    """Forks; the child returns and becomes the worker, the parent supervises it.

    The parent stays until the worker ends, the trainer sends END or is gone, or worker and descendants use more than
    `memory` bytes (0 = no limit). Then it kills all of them and exits as the worker did, with 0 after END and with
    TOO_LARGE over the limit. Does nothing on other systems than Linux.
    """
    if sys.platform != "linux":
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {
        END, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of the worker become children of this process
    libc.prctl(1, END, 0, 0, 0)  # PR_SET_PDEATHSIG
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # the trainer notices the worker's end by them
        os.dup2(nothing, fd)
    status = _watch(worker, memory)
    _end_all()
    _leave(status)


def _watch(worker: int, memory: int) -> int:
    """Waits until the process is over; returns the status to leave with, as os.waitpid gives it."""
    look = time.monotonic() + WATCH_SECONDS
    while True:
        got = signal.sigtimedwait({END, signal.SIGCHLD}, max(0.0, look - time.monotonic()))
        if got is not None and got.si_signo == END:
            return 0
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
        if time.monotonic() >= look:
            look = time.monotonic() + WATCH_SECONDS
            if memory and memory_held(process_tree(worker)) > memory:
                return TOO_LARGE << 8


def process_tree(pid: int, most: int = 1 << 20) -> list[int]:
    """Returns the ids of a process and its descendants, in levels; the search stops once there are more than `most`."""
    pids = [pid]
    for one in pids:
        pids += children(one)
        if len(pids) > most:
            break
    return pids


def memory_held(pids: list[int]) -> int:
    """Returns the bytes of memory that processes use, as /proc tells; shared memory counts once. A process that is gone
    counts 0."""
    resident = sum(_resident(pid) for pid in pids)
    return resident if len(pids) == 1 else min(resident, sum(map(_share, pids)))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _share(pid: int) -> int:
    """Returns the process's share of memory: its pages, each divided by the number of processes that have it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)


def children(pid: int) -> list[int]:
    """Returns the ids of a process's children, of all its threads; [] if it is gone, or the kernel does not tell."""
    found, tasks = [], ()
    with contextlib.suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
    for task in tasks:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:  # the thread has ended
            found += map(int, file.read().split())
    return found


def _end_all() -> None:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children(os.getpid()):  # their children are this process's next
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _leave(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has written one, if anybody
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 255)


if __name__ == "__main__":  # supervisor.py MEMORY WORD...: a program of the user's under it
    supervise(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as e:
        sys.exit(f"{sys.argv[2]}: {e.strerror}")
