"""A reward worker: reads JSON lines, calls reward functions, writes JSON lines. Standard library only, never jax.

Protocol (one JSON value per line):
  in   {functions: [[spec, name]], shared: {...}, limit: seconds}                    once
  out  {ready: [{batched, asynchronous}], sources: digest} or {fatal: message}
  in   {task: number, mode: "each" | "async" | "batch", items: [...], jobs: [[item, function], ...]}
  out  each, async: {task, job: k, value, outcome, metrics}, one per job as it is done (each: in order)
       batch:       {task, results: [{value, outcome, metrics}, ...]} or {task, wrong: message}

Every reply carries the number of its task, so that the parent takes nothing else for a score. What reward functions
print goes to standard error; their standard input is empty. A process that they fork has no part in the protocol.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from jaxrl.rewards.calling import Call, RewardLoadError, failure, outcome

RUNNING = False  # whether this process is a worker: it imports user's files, and none of them may start a job
CHANNEL_LOST = 252  # exit status: the streams to the parent were closed by something in this process


def main() -> None:
    """Serves until standard input ends, which it does when the parent goes, however it goes."""
    global RUNNING
    RUNNING = True
    die_with_parent()
    # Schedulers send SIGTERM to every process of a job; the parent decides what happens then. (A handler rather than
    # SIG_IGN: programs that reward functions start must not inherit it.)
    signal.signal(signal.SIGTERM, lambda *_: None)
    lines, out = _private_streams()
    setup = json.loads(next(lines))
    try:
        before = set(sys.modules)
        calls = []
        for spec, name in setup["functions"]:
            try:
                calls.append(Call(spec, name))
            except RewardLoadError as e:
                out.send({"fatal": f"reward {name!r} ({spec}) cannot be used: {e}"})
                return
        from jaxrl.rewards.sources import digest
        out.send({"ready": [{"batched": c.batched, "asynchronous": c.asynchronous} for c in calls],
                  "sources": digest([c.fn for c in calls], before)})
        for line in lines:
            task = json.loads(line)
            out.task = task["task"]
            # A loop in C that never lets go of the interpreter would outlive a dead parent where die_with_parent() does
            # not work: the kernel ends this process itself, well after the parent would have.
            _backstop(2.0 * setup["limit"] * max(1, len(task["jobs"])) + 60.0)
            SERVE[task["mode"]](calls, task, setup, out)
            _backstop(0.0)
    except BrokenPipeError:
        pass
    except OSError:
        if not out.lost():
            raise
        os._exit(CHANNEL_LOST)


def die_with_parent() -> None:
    """Linux: SIGKILL for this process when the thread that started it ends (PR_SET_PDEATHSIG = 1)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _backstop(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


class _Replies:
    """The stream to the parent. Only the process that opened it writes there: one that a reward function forked, and
    that comes back from the function, ends here."""

    def __init__(self, fd: int):
        self._out, self._owner, self.task = os.fdopen(fd, "w", encoding="utf-8"), os.getpid(), None

    def send(self, message: dict) -> None:
        if os.getpid() != self._owner:
            os._exit(1)
        self._out.write(json.dumps({"task": self.task, **message}) + "\n")
        self._out.flush()

    def lost(self) -> bool:
        try:
            os.fstat(self._out.fileno())
            return False
        except (OSError, ValueError):
            return True


def _private_streams():
    """The protocol's streams, moved away from the descriptors 0 and 1 that reward functions may use."""
    streams = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")

    def in_child():
        """It neither takes this process's tasks nor keeps its stream open, and SIGTERM ends it (as multiprocessing
        wants)."""
        for fd in streams:
            os.dup2(nothing, fd, inheritable=False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    if hasattr(os, "register_at_fork"):  # (SIGTERM must not reach a child before its handler is the default one)
        os.register_at_fork(before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
                            after_in_child=in_child,
                            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}))
    return os.fdopen(streams[0], "r", encoding="utf-8"), _Replies(streams[1])


def serve_each(calls, task, setup, out) -> None:
    for k, (i, f) in enumerate(task["jobs"]):
        try:
            result = outcome(calls[f].one(task["items"][i], setup["shared"]))
        except (Exception, SystemExit) as e:
            result = failure(e)
        out.send({"job": k, **result})


def serve_async(calls, task, setup, out) -> None:
    """All jobs at once; one that waits longer than the limit is cancelled."""
    import asyncio

    async def one(k, i, f):
        try:
            result = outcome(await asyncio.wait_for(calls[f].one(task["items"][i], setup["shared"]), setup["limit"]))
        except TimeoutError as e:
            limit = asyncio.get_running_loop().time() - started >= setup["limit"]
            result = {"value": None, "outcome": "timeout", "metrics": {}} if limit else failure(e)
        except (Exception, SystemExit, asyncio.CancelledError) as e:
            result = failure(e)
        out.send({"job": k, **result})

    async def everything():
        nonlocal started
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(one(k, i, f) for k, (i, f) in enumerate(task["jobs"])))

    started = 0.0
    asyncio.run(everything())


def serve_batch(calls, task, setup, out) -> None:
    call = calls[task["jobs"][0][1]]
    items = task["items"]
    try:
        values = call.many(items, setup["shared"])
        if call.asynchronous:
            import asyncio
            values = asyncio.run(_awaited(values))
        if hasattr(values, "tolist"):
            values = values.tolist()
    except (Exception, SystemExit) as e:
        out.send({"results": [failure(e)] * len(items)})
        return
    if not isinstance(values, (list, tuple)):
        out.send({"wrong": f"returned {type(values).__name__}, expected a list of {len(items)} scores"})
    elif len(values) != len(items):
        out.send({"wrong": f"returned {len(values)} scores for {len(items)} completions"})
    else:
        results = [outcome(v) for v in values]
        for k, result in enumerate(results):
            if result["outcome"].startswith("error: returned"):
                result["outcome"] = f"error: item {k} of the list: {result['outcome'][7:]}"
        out.send({"results": results})


async def _awaited(values):
    return await values


SERVE = {"each": serve_each, "async": serve_async, "batch": serve_batch}
