"""Routes requests to vLLM servers: least-loaded with group affinity, re-issued when a server dies.

One background thread runs an event loop that owns everything here; the engine talks to it through `submit`, `results`
and a few calls. A job gets one result: from the first server that replies, or an absent one after the last try.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Callable

import httpx
import numpy as np

from jaxrl.errors import RunStopped
from jaxrl.rollout.protocol import Request, Result
from jaxrl.rollout.stops import find_stop
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.items import ItemWriter

log = logging.getLogger("jaxrl")
CONNECTION_TRIES = 20  # lost connections that count as one failed try
MAX_GROUPS_REMEMBERED = 10_000  # number of latest groups whose servers are remembered
AFFINITY_SLACK = 4  # requests by which a group's server may be busier than another before the group is split


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way to a server, with its tries.

    attempts: failed tries so far; one without a connection counts 1 / CONNECTION_TRIES. done: whether it has a
    result."""

    request: Request
    attempts: float = 0
    done: bool = False
    times: list = dataclasses.field(default_factory=list)  # (seconds, event, server) for the trace


@dataclasses.dataclass(eq=False)
class Replica:
    """One server as the router sees it.

    state: starting, unsynced (healthy, but with other weights), ready, asleep or dead. why: the reason, for
    messages. misses: health checks in a row without a reply. examined: whether it was found to fit this run since it
    came up; what it held before is gone with the process that was there before. version: of the weights it samples
    with, set by a publish between its pause and its resume; -1 = none yet."""

    index: int
    url: str
    state: str = "starting"
    why: str = ""
    examined: bool = False
    version: int = -1
    running: dict = dataclasses.field(default_factory=dict)  # job -> task
    misses: int = 0


class Router:
    """Sends requests to the servers of a run, each to the one that has its prompt or least to do, and tries them again
    elsewhere when a server fails. Its event loop runs in a thread of its own, which starts here and ends with `close`.

    Attributes:
      results: queue of Result, or an exception that ends the run.
      replicas: a Replica per server; `add` appends. counts: totals since the start, by name. items: the ItemWriter.
      model, routed: name of the adapter ("" = the base), and the ExpertRouting if experts are asked for; set from
        outside before requests are sent.
      trace: called with a dict for each request (log.trace_requests); None = not.

    Args:
      urls: of the replicas.
      key: bearer key, or empty.
      options: config.rollout.vllm.
      request_seconds: longest try of one request.
      seeded: whether requests carry their seeds.
      end_ids: end-of-text token ids.
      decode: token ids -> text, or None without stop strings.
      parse_version: weight version string -> number; raises ServerError for another run's.
    """

    def __init__(self, urls, key, options, request_seconds, seeded, end_ids, decode, parse_version):
        self.replicas = [Replica(i, url) for i, url in enumerate(urls)]
        self.results: queue.Queue = queue.Queue()  # Result, or an exception that ends the run
        self.options, self.seeded, self.end_ids, self.decode = options, seeded, tuple(end_ids), decode
        self.parse_version, self.request_seconds = parse_version, request_seconds
        self.counts, self.items = collections.Counter(), ItemWriter()
        self.trace: Callable[[dict], None] | None = None  # for log.trace_requests
        self._waiting: collections.deque[Job] = collections.deque()
        self._jobs: dict[str, Job] = {}
        self._paused = False
        self._homes: dict[int, Replica] = {}  # group -> the server that has its prompt
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="vllm-router")
        self._thread.start()
        self.call(self._open)

    # ---- from the engine's thread ---------------------------------------------------------------------------------

    def call(self, function, *args):
        """Runs a function or coroutine function in the loop's thread; returns its value or raises what it raised. Not
        for that thread itself, which would wait without end."""
        async def run():
            value = function(*args)
            return await value if asyncio.iscoroutine(value) else value

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def submit(self, requests: list[Request]) -> None:
        """Queues requests, which are sent to servers as these have room; results arrive in `results`."""
        self.call(self._submit, requests)

    def abort(self, ids: set[str]) -> None:
        """Ends the requests of these ids; each gets an `absent_result`, without the tokens sampled so far. Ids of
        requests that have a result or are unknown are ignored."""
        self.call(self._abort, ids)

    def pause(self, on: bool) -> None:
        """Stops (True) or resumes sending requests; sent ones continue."""
        self.call(self._pause, on)

    def set_state(self, replica: Replica, state: str, why: str = "") -> None:
        """Sets a replica's state (see `Replica`); requests of a server that is dead or starting are sent again, with
        the same seeds. why: the reason, for messages."""
        self.call(self._set_state, replica, state, why)

    def add(self, url: str) -> None:
        """Adds a server at the end; it joins once it replies to /health and has received weights."""
        self.call(self.replicas.append, Replica(len(self.replicas), url, "dead", "announced, no reply yet"))

    def close(self) -> None:
        """Cancels everything and ends the loop's thread; unfinished requests get no result."""
        if self._loop.is_running():
            self.call(self._close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
        self._loop.close()

    # ---- in the loop's thread -------------------------------------------------------------------------------------

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=False)
        self._watcher = self._loop.create_task(self._watch())

    async def _close(self):
        tasks = [self._watcher, *(task for r in self.replicas for task in r.running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def _submit(self, requests):
        for request in requests:
            job = Job(request)
            self._jobs[request.id] = job
            self._note(job, "queued")
            self._waiting.append(job)
        self._dispatch()

    def _abort(self, ids):
        for replica in self.replicas:
            for job, task in list(replica.running.items()):
                if job.request.id in ids:
                    task.cancel()
                    replica.running.pop(job, None)
        for i in ids & set(self._jobs):
            self._finish(self._jobs[i], absent_result(self._jobs[i].request))
        self._waiting = collections.deque(j for j in self._waiting if not j.done)

    def _pause(self, on):
        self._paused = on
        self._dispatch()

    def _set_state(self, replica, state, why=""):
        replica.state, replica.why, replica.misses = state, why, 0
        if state in ("dead", "starting"):
            replica.examined = False
            self._recall(replica)  # requests of an unsynced one continue under the new weights
        self._dispatch()

    def _recall(self, replica):
        """Takes back what a server is working on; it goes to the front of the queue, with the same seeds."""
        jobs = list(replica.running)
        for task in replica.running.values():
            task.cancel()
        replica.running.clear()
        self._homes = {g: r for g, r in self._homes.items() if r is not replica}
        for job in reversed(jobs):
            self._note(job, "recalled", replica)
            self.counts["reissued"] += 1
            self._waiting.appendleft(job)

    def _dispatch(self):
        while self._waiting and not self._paused:
            replica = self._choose(self._waiting[0].request.group)
            if replica is None:
                return
            job = self._waiting.popleft()
            self._homes.pop(job.request.group, None)  # the last one in use is the last in order
            self._homes[job.request.group] = replica
            if len(self._homes) > MAX_GROUPS_REMEMBERED:
                del self._homes[next(iter(self._homes))]
            self._note(job, "sent", replica)
            replica.running[job] = self._loop.create_task(self._serve(job, replica))

    def _choose(self, group: int) -> Replica | None:
        open_ = [r for r in self.replicas if r.state == "ready" and len(r.running) < self.options.max_requests]
        if not open_:
            return None
        least = min(open_, key=lambda r: len(r.running))
        home = self._homes.get(group)
        return home if home in open_ and len(home.running) <= len(least.running) + AFFINITY_SLACK else least

    async def _serve(self, job: Job, replica: Replica):
        try:
            result = await asyncio.wait_for(self._ask(job.request, replica), self.request_seconds)
        except asyncio.CancelledError:
            raise
        except (adapter.Refused, RunStopped) as e:  # RunStopped: an image that cannot be decoded any more
            replica.running.pop(job, None)
            self.results.put(e)
            return
        except Exception as e:  # any error: the job must not be lost
            replica.running.pop(job, None)
            self._failed(job, replica, e)
            return
        replica.running.pop(job, None)
        self._note(job, "answered", replica)
        self._finish(job, result)
        self._dispatch()

    def _failed(self, job, replica, error):
        """Retries a request whose try failed while its server lives, here or elsewhere, at most `retries` times."""
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, TimeoutError):
            why = f"no reply within rollout.vllm.request_seconds={self.request_seconds:g}"
        self.counts["request_failures"] += 1
        self._note(job, "failed", replica)
        if isinstance(error, httpx.TransportError):  # the server's fault: the watcher soon says whether it is gone
            job.attempts += 1 / CONNECTION_TRIES
        else:
            job.attempts += 1
        if job.attempts > self.options.retries:
            self.counts["given_up"] += 1
            log.warning("request %s failed after %d tries, its completion is absent: %s: %s", job.request.id,
                        round(job.attempts), replica.url, why)
            self._finish(job, absent_result(job.request))
        else:
            log.info("request %s is retried: %s: %s", job.request.id, replica.url, why)
            self._homes.pop(job.request.group, None)
            self._loop.call_later(0.2 + 0.2 * job.attempts, self._again, job)

    def _again(self, job):
        if not job.done:
            self._waiting.append(job)
            self._dispatch()

    def _finish(self, job, result):
        if job.done:
            return
        job.done = True
        self._jobs.pop(job.request.id, None)
        if self.trace:
            self.trace({"id": job.request.id, "finish": result.finish, "tokens": len(result.tokens),
                        "events": job.times})
        self.results.put(result)

    def _note(self, job, event, replica=None):
        if self.trace:
            job.times.append([round(time.time(), 4), event, replica.url if replica else ""])

    # ---- one request ----------------------------------------------------------------------------------------------

    async def _ask(self, request: Request, replica: Replica) -> Result:
        stops = request.sampling.stop
        payload = adapter.generate_payload(request, self.end_ids, self.seeded, bool(stops), self.model)
        if request.pictures is not None:
            payload["features"] = await asyncio.to_thread(self.items.features, request.pictures)
        url, choice = replica.url + adapter.GENERATE, None
        if stops:
            tokens, logprobs, finish, spans, versions = await self._streamed(url, payload, request, replica)
        else:
            reply = await self._http.post(url, json=payload)
            _raise_for(reply.status_code, reply.text, url)
            choice = adapter.first_choice(reply.json(), url)
            tokens, logprobs, finish, spans = adapter.parse_choice(choice)
            versions = [-1] * len(tokens)
        if finish not in ("stop", "length"):
            raise adapter.ServerError(f"{url}: the completion ended with {finish!r}")
        versions = np.array(versions, np.int32)
        for span in spans:
            versions[span["start"]:span["end"]] = self.parse_version(str(span["version"]))
        if len(tokens) and versions.min() < 0:
            raise adapter.ServerError(f"{url}: tokens without a weight version")
        if not np.isfinite(logprobs).all() or (len(logprobs) and max(logprobs) > 1e-3):
            raise adapter.ServerError(f"{url}: a log-prob that is not finite or positive")
        routes = None
        if self.routed is not None and choice is not None:
            routes = self.routed.parse(choice.get("routed_experts"), len(request.prompt) + len(tokens))
            self.counts["unrouted"] += bool((routes < 0).all())
        return Result(request.id, np.array(tokens, np.int32), np.array(logprobs, np.float32),
                      np.zeros(len(tokens), np.float32), versions, finish, request.seed, routes=routes)

    model = ""  # name of the adapter to sample from, "" = the base
    routed: adapter.ExpertRouting | None = None  # if algorithm.routes=sampled

    async def _streamed(self, url, payload, request, replica):
        """Reads tokens event by event; leaving the stream at a stop string ends the request in the server.

        Returns (token ids, log-probs, finish, spans of versions, version of each token). Spans come with the last
        event, which a stream that is left never sends: a token has the version of its server when it comes."""
        s, tokens, logprobs, finish, spans, versions = request.sampling, [], [], None, [], []
        async with self._http.stream("POST", url, json=payload) as reply:
            if reply.status_code >= 400:
                _raise_for(reply.status_code, (await reply.aread()).decode(), url)
            async for line in reply.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                piece = json.loads(line[5:])
                if "error" in piece:
                    raise adapter.ServerError(f"{url}: {piece['error']}")
                for choice in piece.get("choices", []):
                    new, logp, finish, spans = adapter.parse_choice(choice)
                    tokens, logprobs = tokens + new, logprobs + logp
                    versions += [replica.version] * len(new)
                    stop = find_stop(self.decode, tokens, len(new), s.stop, s.min_new_tokens) if new else None
                    if stop:
                        count = stop[0] if s.keep_stop else stop[1]
                        return tokens[:count], logprobs[:count], "stop", spans, versions[:count]
        return tokens, logprobs, finish, spans, versions

    # ---- watching -------------------------------------------------------------------------------------------------

    async def _watch(self):
        """Checks every server's health; one that is silent twice in a row is dead, and unsynced when it replies again.
        """
        while True:
            await asyncio.gather(*(self._look(r) for r in self.replicas))
            await asyncio.sleep(min(1.0, self.options.health_seconds / 2))

    async def _look(self, replica):
        state = replica.state
        if state == "starting":
            return  # the code that starts it waits for it
        try:
            reply = await asyncio.wait_for(self._http.get(replica.url + "/health"), self.options.health_seconds)
            ok, why = reply.status_code == 200, f"/health returned {reply.status_code}"
        except Exception as e:
            silent = f"no reply to /health within rollout.vllm.health_seconds={self.options.health_seconds:g}"
            ok, why = False, silent if isinstance(e, TimeoutError) else f"/health: {type(e).__name__} {e}".rstrip()
        if replica.state != state:
            return
        if ok:
            replica.misses = 0
            if state == "dead":
                self._set_state(replica, "unsynced")
        elif state != "dead":
            replica.misses += 1
            if replica.misses >= 2:
                log.warning("vLLM server %s is gone: %s; %d requests are rerouted", replica.url, why,
                            len(replica.running))
                self.counts["servers_lost"] += 1
                self._set_state(replica, "dead", why)


def absent_result(request: Request) -> Result:
    """Returns the result of a request without a completion: empty arrays and finish "abort", never scored as wrong."""
    nothing = np.zeros(0, np.float32)
    return Result(request.id, np.zeros(0, np.int32), nothing, nothing, np.zeros(0, np.int32), "abort", request.seed)


def _raise_for(status: int, text: str, url: str) -> None:
    if status >= 400:
        message = f"{url}: {status}: {adapter._reason(text)}"
        raise adapter.Refused(message) if status in (400, 401, 403, 404, 422) else adapter.ServerError(message)
