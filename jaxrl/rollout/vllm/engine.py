"""Rollouts through vLLM servers: protocol.Engine on top of the router, the publisher and the servers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import queue
import secrets
import time
from pathlib import Path
from typing import TextIO

import jax

from jaxrl.config.lengths import longest_prompt
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.exchange import local_copies
from jaxrl.processes.group import peers
from jaxrl.rollout.engines import ENGINES, EngineContext
from jaxrl.rollout.protocol import Engine, EngineInfo, EngineLost, Health, Request, Result, check_ids, check_request
from jaxrl.rollout.stops import text_decoder
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.adapter_folders import required_rank
from jaxrl.rollout.vllm.options import longest_request
from jaxrl.rollout.vllm.publish import Publisher
from jaxrl.rollout.vllm.router import Replica, Router
from jaxrl.rollout.vllm.servers import Fleet, OwnServers, first_servers, servers_of_process

log = logging.getLogger("jaxrl")


def make_engine(context: EngineContext):
    """Returns the VllmEngine of a context. Its servers start in the background; the first publish waits for them."""
    return VllmEngine(context)


class VllmEngine(Engine):
    """Samples through vLLM servers; see protocol.Engine.

    `logprobs` are those of the distribution drawn from and `log_kept_mass` is 0: vLLM reports log-probs after its
    truncation, so under top-p, top-k or min-p the log-prob gap includes the mass that was cut.

    With several processes each has an engine with its own servers, or with its share of rollout.servers. A publish
    begins with a copy of the weights in every process, which is collective; after that each process can retry by
    itself.

    context: EngineContext. Raises ConfigError if vLLM cannot start here, cannot serve the adapter or has fewer servers
    than processes, EngineLost if a folder of rollout.servers names none."""

    def __init__(self, context: EngineContext):
        self.config = config = context.config
        self.model, self.dtype, self.patches, self.group = context.model, context.dtype, context.patches, peers()
        adapter.warn_of_visible_key()
        own, options = not config.rollout.servers, config.rollout.vllm
        self.key = adapter.server_key(options) or (secrets.token_urlsafe(32) if own else "")
        self.total = longest_request(config)
        folder = Path(config.run.dir) / "vllm" / ("" if self.group.count == 1 else f"process_{self.group.index}")
        self.run_id = secrets.token_hex(4)  # in every version, so that another run's weights are never taken for ours
        self._copy = self._here = None  # of a policy that is spread over processes
        self._version, self._params, self._synced = -1, None, False
        self._closed = self._asleep = self._warned = False  # warned: that counters are missing
        self._ids: set[str] = set()  # of unfinished requests
        first = self.group.index * options.replicas  # several processes may share a host
        rank = required_rank(context.model.adapter)
        started = OwnServers(config, context.hf_config, self.dtype, folder, self.key, first, rank) if own else None
        known = [] if own else first_servers(config, self.group)
        urls = servers_of_process(known, self.group) if started is None else started.urls
        # on the CPU every request draws from a stream of its own anyway; on GPUs seeds cost vLLM's fast sampler
        on_cpu = started is not None and started.cpu
        seeded = config.rollout.seeded == "true" or (config.rollout.seeded == "auto" and on_cpu)
        decode = text_decoder(context.tokenizer) if context.tokenizer is not None else None
        seconds = options.request_seconds or config.rollout.timeout_seconds / 2
        ends = tuple(int(i) for i in context.eos_ids)
        self.router = Router(urls, self.key, options, seconds, seeded, ends, decode, self._parse_version)
        if config.algorithm.routes == "sampled":
            self.router.routed = adapter.ExpertRouting.of(context.model.config)
        self.fleet = Fleet(context, self.key, self.group, started, known, self.router)
        self.publisher = Publisher(context, folder, self.fleet, self.run_id)
        self._trace_file = self._open_trace() if config.log.trace_requests else None

    def _open_trace(self) -> TextIO:
        """Opens the file of log.trace_requests, which gets a line for every request that ends."""
        path = Path(self.config.run.dir) / f"requests{'' if self.group.count == 1 else f'_{self.group.index}'}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
        self.router.trace = lambda row: print(json.dumps(row), file=file, flush=True)
        return file

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        """Queues requests and sends them to servers, with max_new_tokens cut to what fits behind the prompt.

        Raises ValueError, queueing none, naming one that cannot be served, RuntimeError if the engine is closed."""
        self._check_open()
        most, has_text = longest_prompt(self.config), self.router.decode is not None
        for r in requests:
            check_request(r, most, self.total, self.model.config.vocab_size, has_text, patches=self.patches)
        check_ids(requests, self._ids)
        requests = [self._fit_request(r) for r in requests]
        self._ids.update(r.id for r in requests)
        self.router.submit(requests)

    def _fit_request(self, request: Request) -> Request:
        """Returns the request, limited to the tokens that fit beside its prompt."""
        room, sampling = self.total - len(request.prompt), request.sampling
        if sampling.max_new_tokens <= room:
            return request
        sampling = dataclasses.replace(sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room))
        return dataclasses.replace(request, sampling=sampling)

    def poll(self, deadline_s: float) -> list[Result]:
        """Returns results finished since the last poll, as soon as there is one, waiting at most deadline_s seconds;
        restarts servers that died meanwhile and sends weights to those that came back, which may take longer.

        Raises RuntimeError if there are requests and no weights (before the first publish, after `sleep`), EngineLost
        if no server is left, RunStopped if a server refused a request or an image cannot be read, WeightMismatch as
        `publish`."""
        self._check_open()
        end = time.monotonic() + deadline_s
        if self._ids and (self._version < 0 or self._asleep):
            raise RuntimeError("rollout: no weights yet; call publish(params, version) before polling")
        done: list[Result] = []
        while True:
            self._maintain()
            try:
                wait = 0.0 if done or not self._ids else max(0.0, min(0.25, end - time.monotonic()))
                item = self.router.results.get(timeout=wait) if wait else self.router.results.get_nowait()
            except queue.Empty:
                if done or not self._ids or time.monotonic() >= end:
                    return done
                continue
            if isinstance(item, RunStopped):
                raise item
            if isinstance(item, Exception):
                raise RunStopped(f"vLLM refused a request: {item}")
            if item.id in self._ids:  # not one that was aborted meanwhile
                self._ids.remove(item.id)
                done.append(item)

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (None = all): the next poll returns each as "abort", without the tokens sampled so far. Raises
        RuntimeError if the engine is closed."""
        self._check_open()
        self.router.abort(set(self._ids) if ids is None else self._ids.intersection(ids))

    def hold(self, on: bool) -> None:
        """Stops sending requests to servers while on; sent ones continue. Raises RuntimeError if the engine is
        closed."""
        self._check_open()
        self.router.pause(on)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def publish(self, params, version: int) -> None:
        """Sends the weights to every server that can take them; the first call waits for the servers to start.

        params: the policy's parameter tree; spread over processes, it is copied first, which is collective. version: of
        the weights, which their tokens carry in Result.versions.

        Raises EngineLost if no server is left (of given ones only while requests are unfinished), WeightMismatch if one
        computes with other weights, RunStopped if /dev/shm is full, ConfigError if the servers cannot serve this run.
        """
        self._check_open()
        for process in self.fleet.processes:
            process.bound_log()
        self._params, self._version = self._own_copy(params), int(version)
        self._meet_servers()
        self.fleet.take_newcomers()
        self.fleet.notice_deaths()
        up = [r for r in self.router.replicas if r.state in ("ready", "unsynced", "asleep")]
        self._send_weights([r for r in up if self._fits(r)])
        self._synced, self._asleep = True, False
        self._maintain()

    def sleep(self) -> None:
        """Frees the servers' GPU memory until the next publish; waits for servers that are starting.

        Raises:
          RuntimeError: there are unfinished requests, or the engine is closed.
          EngineLost: a given server does not sleep, a process of ours does not end, or no server starts.
          ConfigError: the servers cannot serve this run."""
        self._check_open()
        if self._ids:
            raise RuntimeError(f"rollout: {len(self._ids)} requests are unfinished; abort them first")
        self._meet_servers()
        self._asleep = True
        self.fleet.sleep()

    def weights_moved(self, params) -> None:
        """Notes where the published weights are now, possibly in host memory; servers that join receive them from
        there. Does nothing if this engine has its own copy of them. Raises RuntimeError if the engine is closed."""
        self._check_open()
        if self._copy is None:
            self._params = params

    def _own_copy(self, params):
        """Returns the weights if this process reaches all of them, else a copy on its own devices. Collective."""
        leaves = jax.tree.leaves(params)
        if all(getattr(a, "is_fully_addressable", True) for a in leaves):
            return params
        if self._copy is None:
            mesh = leaves[0].sharding.mesh
            self._copy, self._here = local_copies(mesh, self.model.logical_axes(), params, self.dtype)
        self._params = None  # the old copy goes before the new one comes
        return self._copy(params)

    def _send_weights(self, replicas: list[Replica]) -> None:
        if not replicas:
            return
        params = self._params  # in host memory perhaps: they come to the devices a layer at a time
        with jax.set_mesh(self._here) if self._here is not None else contextlib.nullcontext():
            self.publisher.publish(replicas, params, self._version)

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _meet_servers(self) -> None:
        """Waits for the servers and chooses the transport, at the first call."""
        if self.publisher.transport is None:
            self.fleet.meet()
            self.publisher.choose_transport()

    def _maintain(self) -> None:
        """Restarts servers of ours that died, and gives servers that came back the current weights."""
        self.fleet.notice_deaths()
        if self._asleep:  # the trainer has the memory
            return
        for replica in [r for r in self.router.replicas if r.state == "unsynced"]:
            if self._synced and not self._weights_replaced():
                self._join(replica)
        self.fleet.revive()
        if (self.fleet.own or self._ids) and (states := self.fleet.lost()):
            raise EngineLost(f"no vLLM server is left: {states}. The policy is intact; rerun the same command to "
                             "resume from the latest checkpoint")

    def _weights_replaced(self) -> bool:
        """Whether an update has taken the buffers of the weights that were published last; the next publish is near."""
        return any(getattr(a, "is_deleted", bool)() for a in jax.tree.leaves(self._params))

    def _fits(self, replica: Replica) -> bool:
        """Examines a server that came or came back, which has none of our weights; marks it dead if it does not fit."""
        if not replica.examined:
            self.publisher.verified.discard(replica.index)
            self._attempt(replica, self.fleet.examine, replica)
        return replica.examined

    def _attempt(self, replica: Replica, action, *arguments) -> None:
        """Calls action(*arguments); marks the server dead if it fails."""
        try:
            action(*arguments)
        except (adapter.ServerError, adapter.Refused, ConfigError) as e:
            log.warning("vLLM server %s cannot join: %s", replica.url, e)
            self.router.set_state(replica, "dead", str(e))

    def _join(self, replica: Replica) -> None:
        """Examines a server that came or came back, and gives it the current weights."""
        if self._fits(replica):
            self._attempt(replica, self._send_weights, [replica])
            if replica.state == "ready":
                log.info("vLLM server %s joined at version %d", replica.url, self._version)

    def _parse_version(self, text: str) -> int:
        run, _, number = text.rpartition("-")
        if run != self.run_id:
            raise adapter.ServerError(f"a completion was sampled from weights {text!r}, which this run did not publish")
        return int(number)

    # ---- state --------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The registry's EngineInfo of vllm; `quantized` is known after the first publish."""
        return dataclasses.replace(ENGINES["vllm"].info, quantized=self.publisher.quantized)

    def health(self) -> Health:
        """Returns the engine's state, ok if a server is ready, with the state of every server by URL. `waiting` counts
        finished requests until they are polled, too."""
        replicas = self.router.replicas
        running = sum(len(r.running) for r in replicas)
        return Health(not self._closed and any(r.state == "ready" for r in replicas), self._closed, self._version,
                      len(self._ids) - running, running,
                      servers={r.url: r.state + (f" ({r.why})" if r.why else "") for r in replicas})

    def metrics(self) -> dict[str, float]:
        """Returns engine/...: counts of servers and requests since the start, and the servers' counters
        (`_server_counters`); publish/...: of the last publish, its seconds, gb_per_second (1e9 bytes per second; both 0
        before the first) and probe, the mean absolute log-prob gap in nats (NaN before the first). Raises RuntimeError
        if the engine is closed."""
        self._check_open()
        found = collections.Counter(restarts=sum(self.fleet.own.restarts) if self.fleet.own else 0)
        counted = ("reissued", "given_up", "servers_lost", *["unrouted"] * (self.router.routed is not None))
        found.update({name: self.router.counts[name] for name in counted})
        found.update(self._server_counters())
        seconds, size = self.publisher.last_publish["seconds"], self.publisher.last_publish["bytes"]
        return {f"engine/{name}": float(value) for name, value in found.items()} | {
            "publish/seconds": seconds, "publish/gb_per_second": size / 1e9 / seconds if seconds else 0.0,
            "publish/probe": self.publisher.last_probe}

    def _server_counters(self) -> dict[str, float]:
        """Returns the counters (adapter.GAUGES) that every ready server reports, summed over these servers; {} if the
        page of one cannot be read, of which it warns once: a sum over the others would look like a fall."""
        pages: list[dict[str, float]] = []
        for replica in self.router.replicas:
            if replica.state != "ready":
                continue
            try:
                pages.append(self.fleet.controls[replica.index].gauges())
            except (adapter.ServerError, adapter.Refused) as e:
                if not self._warned:
                    log.warning("vLLM's counters (engine/running, engine/preemptions, ...) are missing from the "
                                "metrics of steps at which a server does not report them: %s", e)
                self._warned = True
                return {}
        names = [name for name in adapter.GAUGES.values() if pages and all(name in page for page in pages)]
        return {name: sum(page[name] for page in pages) for name in names}

    def close(self) -> None:
        """Ends requests and our servers and frees everything; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.router.close()
        self.fleet.close()
        self.publisher.close()
        if self._trace_file:
            self._trace_file.close()
        self._params = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("rollout: the engine is closed")
