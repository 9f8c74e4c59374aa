"""A reward worker: reads JSON lines, calls reward functions, writes JSON lines. Standard library only, never jax.

Protocol (one JSON value per line):
  in   {functions: [[spec, name]], shared, sandbox, services, places, arguments: {...}, limit: seconds}  once
  out  {ready: [{batched, asynchronous, size, seconds, context, images, image_sizes, code}], sources: digest} or
       {fatal: message}
  in   {task: number, mode: "each" | "async" | "batch", items: [...], jobs: [[item, function], ...]}
  out  each, async: {task, job: k, value, outcome, metrics}, one per job when it is done (each: in order)
       batch:       {task, results: [{value, outcome, metrics}, ...]} or {task, wrong: message}

Every reply carries the number of its task, so that the parent mistakes nothing else for a score. What reward functions
print goes to standard error; their standard input is empty. A process that they fork takes no part in the protocol.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from jaxrl import sandbox
from jaxrl.rewards.calling import Call, failure, outcome
from jaxrl.workers.loading import LoadError
from jaxrl.workers.streams import CHANNEL_LOST, Replies, begin, private_descriptors


def main() -> None:
    """Serves reward tasks from standard input until it ends, which it does when the parent exits in any way."""
    begin("reward")
    to_read, to_write = private_descriptors()
    lines, out = os.fdopen(to_read, "r", encoding="utf-8"), Replies(to_write)
    setup = json.loads(next(lines))
    try:
        before = set(sys.modules)
        sandbox.configure(setup["sandbox"])
        calls = []
        for spec, name in setup["functions"]:
            try:
                calls.append(Call(spec, name, setup))
            except LoadError as e:
                out.send({"fatal": f"reward {name!r} ({spec}) cannot be used: {e}"})
                return
        from jaxrl.workers.reached import function_digest
        from jaxrl.workers.sources import digest
        kinds = [c.traits() | {"code": function_digest(c.fn, spec, before)}
                 for c, (spec, _) in zip(calls, setup["functions"], strict=True)]
        out.send({"ready": kinds, "sources": digest([c.fn for c in calls], before)})
        for line in lines:
            task = json.loads(line)
            out.task = task["task"]
            # A C loop that never releases the interpreter would outlive a dead parent where die_with_parent() does
            # not work: the kernel ends this process, well after the parent would have.
            longest = max([setup["limit"], *(calls[f].seconds for _, f in task["jobs"])])
            _backstop(2.0 * longest * max(1, len(task["jobs"])) + 60.0)
            SERVE[task["mode"]](calls, task, setup, out)
            _backstop(0.0)
    except BrokenPipeError:
        pass
    except OSError:
        if not out.lost():
            raise
        os._exit(CHANNEL_LOST)


def _backstop(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def serve_each(calls, task, setup, out) -> None:
    """Runs the jobs of a task one after the other and sends one reply per job, {job, value, outcome, metrics}. What a
    function raises becomes an outcome.

    calls: Calls by function. task: {jobs: [[item, function], ...], items}. setup: the worker's first message. out:
    Replies."""
    for k, (i, f) in enumerate(task["jobs"]):
        try:
            result = outcome(calls[f].call_one(task["items"][i], setup["shared"]))
        except (Exception, SystemExit) as e:
            result = failure(e)
        out.send({"job": k, **result})


def serve_async(calls, task, setup, out) -> None:
    """Runs all jobs of a task at once and sends one reply per job; a job that takes longer than its function's limit,
    without one setup["limit"] seconds, is cancelled and has the outcome "timeout".

    calls: Calls by function. task: {jobs: [[item, function], ...], items}. setup: the worker's first message. out:
    Replies."""
    import asyncio

    async def one(k, i, f):
        limit = calls[f].seconds or setup["limit"]
        try:
            result = outcome(await asyncio.wait_for(calls[f].call_one(task["items"][i], setup["shared"]), limit))
        except TimeoutError as e:
            late = asyncio.get_running_loop().time() - started >= limit
            result = {"value": None, "outcome": "timeout", "metrics": {}} if late else failure(e)
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
    """Runs a batched function, that of the first job, on all items of a task and sends one reply: {results}, or {wrong}
    if it did not return a list of one score per item. What it raises becomes the outcome of every item.

    calls: Calls by function. task: {jobs: [[item, function], ...], items}. setup: the worker's first message. out:
    Replies."""
    call = calls[task["jobs"][0][1]]
    items = task["items"]
    try:
        values = call.call_batch(items, setup["shared"])
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
