"""A reward worker: reads JSON lines, calls reward functions, writes JSON lines. Standard library only, never jax.

Protocol (one JSON value per line):
  in   {functions: [[spec, name]], shared: {...}, limit: seconds}           once
  out  {ready: [{batched, asynchronous}]} or {fatal: message}
  in   {mode: "each" | "async" | "batch", items: [...], jobs: [[item, function], ...]}
  out  each:  one {value, outcome, metrics} per job, in order, as it is done
       async: one {job: k, ...} per job, as it is done
       batch: {results: [...]} or {wrong: message}

What reward functions print goes to standard error; their standard input is empty.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from jaxrl.rewards.calling import Call, RewardLoadError, failure, outcome


def main() -> None:
    """Serves until standard input ends, which it does when the parent goes, however it goes."""
    die_with_parent()
    # Schedulers send SIGTERM to every process of a job; the parent decides what happens then. (A handler rather than
    # SIG_IGN: programs that reward functions start must not inherit it.)
    signal.signal(signal.SIGTERM, lambda *_: None)
    lines, out = _private_streams()
    setup = json.loads(next(lines))
    try:
        calls = []
        for spec, name in setup["functions"]:
            try:
                calls.append(Call(spec, name))
            except RewardLoadError as e:
                _send(out, {"fatal": f"reward {name!r} ({spec}) cannot be used: {e}"})
                return
        _send(out, {"ready": [{"batched": c.batched, "asynchronous": c.asynchronous} for c in calls]})
        for line in lines:
            task = json.loads(line)
            # A loop in C that never lets go of the interpreter would outlive a dead parent where die_with_parent() does
            # not work: the kernel ends this process itself, well after the parent would have.
            _backstop(2.0 * setup["limit"] * max(1, len(task["jobs"])) + 60.0)
            SERVE[task["mode"]](calls, task, setup, out)
            _backstop(0.0)
    except BrokenPipeError:
        pass


def die_with_parent() -> None:
    """Linux: SIGKILL for this process when the thread that started it ends (PR_SET_PDEATHSIG = 1)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _backstop(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _private_streams():
    """The protocol's streams, moved away from the descriptors 0 and 1 that reward functions may use."""
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    return lines, out


def _send(out, message: dict) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def serve_each(calls, task, setup, out) -> None:
    for i, f in task["jobs"]:
        try:
            result = outcome(calls[f].one(task["items"][i], setup["shared"]))
        except (Exception, SystemExit) as e:
            result = failure(e)
        _send(out, result)


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
        _send(out, {"job": k, **result})

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
    except (Exception, SystemExit) as e:
        _send(out, {"results": [failure(e)] * len(items)})
        return
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        _send(out, {"wrong": f"returned {type(values).__name__}, expected a list of {len(items)} scores"})
    elif len(values) != len(items):
        _send(out, {"wrong": f"returned {len(values)} scores for {len(items)} completions"})
    else:
        results = [outcome(v) for v in values]
        for k, result in enumerate(results):
            if result["outcome"].startswith("error: returned"):
                result["outcome"] = f"error: item {k} of the list: {result['outcome'][7:]}"
        _send(out, {"results": results})


async def _awaited(values):
    return await values


SERVE = {"each": serve_each, "async": serve_async, "batch": serve_batch}
