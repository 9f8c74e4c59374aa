"""Rollouts through vLLM servers: protocol.Engine on top of the router, the publisher and the server processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import queue
import secrets
import shutil
import time
from pathlib import Path

import jax
import numpy as np

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.exchange import local_copies
from jaxrl.processes.group import Peers, peers
from jaxrl.rollout.protocol import Engine, EngineInfo, EngineLost, Health, Request, Result, check_ids, check_request
from jaxrl.rollout.select import listed, server_folder
from jaxrl.rollout.stops import text_decoder
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.process import ServerProcess, free_port
from jaxrl.rollout.vllm.publish import PROBE_PROMPT, Publisher
from jaxrl.rollout.vllm.router import Router
from jaxrl.rollout.vllm.sleeping import Memory
from jaxrl.sharding import memory
from jaxrl.vllm_plugin import PROTOCOL, machine

log = logging.getLogger("jaxrl")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LATECOMERS = 30.0  # seconds
USAGE = 2  # status of a server that does not know an option
ROUTER_COUNTS = ("reissued", "request_failures", "given_up", "servers_lost")


def make_engine(config, model, tokenizer, mesh, eos_ids, hf_config):
    """See rollout.make_engine. Starts the servers and returns at once; the first publish waits for them."""
    dtype = np.dtype(model.compute_dtype).name
    if config.rollout.dtype != "auto":
        dtype = DTYPES[config.rollout.dtype]
    return VllmEngine(config, model, tokenizer, tuple(int(i) for i in eos_ids), hf_config, dtype)


class VllmEngine(Engine):
    """See protocol.Engine. `logprobs` are those of the distribution drawn from and `kept` is 0: vLLM reports log-probs after
    its own truncation, so under top-p, top-k or min-p the gap to the trainer's includes the mass that was cut.

    Of several processes each has an engine with servers of its own, or with its share of rollout.servers. A publish begins
    with a copy of the weights in every process, which is collective; from there on each can try again by itself."""


    def __init__(self, config, model, tokenizer, eos_ids, hf_config, dtype: str):
        self.config, self.options, self.model = config, config.rollout.vllm, model
        self.hf_config, self.dtype = hf_config, dtype
        adapter.warn_of_visible_key()
        self.own = not config.rollout.servers
        self.key = adapter.key_of(self.options) or (secrets.token_urlsafe(32) if self.own else "")
        self.longest_prompt, self.total = config.data.max_prompt_tokens, longest(config)
        self.length = self.options.max_model_len or max(self.total, PROBE_PROMPT + 1)
        self.group = group = peers()
        self._copy = self._here = None  # of a policy that is spread over processes
        self.folder = Path(config.run.dir) / "vllm" / ("" if group.count == 1 else f"process_{group.index}")
        self.run_id = secrets.token_hex(4)  # in every version, so that another run's weights are never taken for ours
        self._version, self._params, self._synced = -1, None, False
        self._paused = self._closed = self._resting = False
        self._ids: dict[str, Request] = {}
        self._counts = dict.fromkeys(("requests", "finished", "aborted", "absent", "tokens", "restarts", "publishes"), 0)
        self._processes: dict[int, ServerProcess] = {}
        self._restarts: dict[int, int] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=64, thread_name_prefix="vllm-control")
        self._folder, self._known = server_folder(config.rollout.servers), []  # where servers are announced; those found so far
        urls = self._start_all() if self.own else share_of(self._first_listed() if self._folder else config.rollout.servers, group)
        seeded = config.rollout.seeded == "true" or (config.rollout.seeded == "auto" and self._seeds_are_free())
        decode = text_decoder(tokenizer) if tokenizer is not None else None
        self.controls = [adapter.Control(u, self.key, self.options.sync_seconds) for u in urls]
        self.memories = {c.url: Memory(c) for c in self.controls}
        seconds = self.options.request_seconds or config.rollout.timeout_seconds / 2
        self.router = Router(urls, self.key, self.options, seconds, seeded, eos_ids, decode, self._parse_version)
        self.publisher = Publisher(config, model, hf_config, dtype, self.folder, self.length, self.controls, self.router,
                                   self.memories, self.run_id)
        if config.log.trace_requests:
            Path(config.run.dir).mkdir(parents=True, exist_ok=True)
            number = "" if group.count == 1 else f"_{group.index}"
            self._trace_file = (Path(config.run.dir) / f"requests{number}.jsonl").open("a", encoding="utf-8")
            self.router.trace = lambda row: print(json.dumps(row), file=self._trace_file, flush=True)

    # ---- the protocol -------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        self._check_open()
        has_text = self.router.decode is not None
        for r in requests:
            check_request(r, self.longest_prompt, self.total, self.model.config.vocab_size, has_text)
        check_ids(requests, self._ids)
        requests = [self._bounded(r) for r in requests]
        self._ids.update({r.id: r for r in requests})
        self._counts["requests"] += len(requests)
        self.router.submit(requests)

    def poll(self, deadline_s: float) -> list[Result]:
        self._check_open()
        end = time.monotonic() + deadline_s
        if self._ids and not self._paused and (self._version < 0 or self._resting):
            raise RuntimeError("rollout: no weights yet; call publish(params, version) before polling")
        done: list[Result] = []
        while True:
            self._maintain()
            try:
                wait = 0.0 if done or not self._ids else max(0.0, min(0.25, end - time.monotonic()))
                item = self.router.results.get(timeout=wait) if wait else self.router.results.get_nowait()
            except queue.Empty:
                if done or not self._ids or self._paused or time.monotonic() >= end:
                    return done
                continue
            if isinstance(item, Exception):
                raise RunStopped(f"vLLM refused a request: {item}")
            if item.id in self._ids:  # not one that was aborted meanwhile
                del self._ids[item.id]
                self._counts["finished"] += 1
                self._counts["tokens"] += len(item.tokens)
                self._counts["absent"] += item.finish == "abort"
                done.append(item)

    def abort(self, ids: list[str] | None = None) -> None:
        self._check_open()
        gone = set(self._ids) if ids is None else set(ids) & set(self._ids)
        self._counts["aborted"] += len(gone)
        self.router.abort(gone)

    def pause(self) -> None:
        self._check_open()
        self._paused = True
        self.router.pause(True)
        self._on_ready(lambda c: c.pause())

    def resume(self) -> None:
        self._check_open()
        self._on_ready(lambda c: c.resume())
        self._paused = False
        self.router.pause(False)

    def hold(self, on: bool) -> None:
        self._check_open()
        self.router.pause(on or self._paused)

    def publish(self, params, version: int) -> None:
        self._check_open()
        for process in self._processes.values():
            process.bound_log()
        self._params, self._version = self._own_copy(params), int(version)
        self._meet_servers()
        self._take_newcomers()
        self._notice_deaths()
        self._counts["publishes"] += 1
        self._give([r for r in self.router.replicas if r.state in ("ready", "unsynced", "asleep")])
        self._synced, self._resting = True, False
        self._maintain()

    def rest(self) -> None:
        """Frees the servers' GPU memory until the next publish; waits for servers that are being started.

        Raises RuntimeError while requests are there, EngineLost for a given server that does not sleep. One of ours is ended then,
        and started again at the next publish.
        """
        self._check_open()
        if self._ids:
            raise RuntimeError(f"rollout: {len(self._ids)} requests are on their way; abort them first")
        self._meet_servers()
        self._resting = True
        here = [r for r in self.router.replicas if r.state in ("ready", "unsynced", "starting")]
        for r in here:  # from now on it takes no request
            self.router.set_state(r, "asleep" if r.state != "starting" else "starting")
        for replica, why in zip(here, self._pool.map(self._put_to_sleep, here), strict=True):
            if why and not self.own:
                raise EngineLost(f"vLLM server {replica.url} does not sleep, and rollout.placement=colocated leaves the update no "
                                 f"room beside it: {why}")
            if why:
                log.warning("vLLM server %s is ended to make room for the update: %s", replica.url, why)
                self._processes[replica.index].kill()
                self.router.set_state(replica, "dead", why)

    def _put_to_sleep(self, replica) -> str:
        """Empty when the server sleeps, else why not."""
        if replica.state == "starting":
            return "it was still being started"
        try:
            self.memories[replica.url].sleep()
        except (adapter.ServerError, adapter.Refused) as e:
            return str(e)
        return ""

    def _own_copy(self, params):
        """The weights where this process can reach all of them: as they are, or copied to its own devices (collective)."""
        leaves = jax.tree.leaves(params)
        if all(getattr(a, "is_fully_addressable", True) for a in leaves):
            return params
        if self._copy is None:
            self._copy, self._here = local_copies(leaves[0].sharding.mesh, self.model.logical_axes(), params, self.dtype)
        self._params = None  # the old copy goes before the new one comes
        self.publisher.params = None
        return self._copy(params)

    def moved(self, params) -> None:
        """The published weights lie here from now on, in host memory perhaps; servers that join are given them from there."""
        if self._copy is None:
            self._params = self.publisher.params = params

    def _give(self, replicas) -> None:
        if not replicas:
            return
        params = memory.to_devices(self._params)
        with jax.set_mesh(self._here) if self._here is not None else contextlib.nullcontext():
            self.publisher.give(replicas, params, self._version, self._paused)
        self.publisher.params = self._params

    def metrics(self) -> dict[str, float]:
        """Of the engines and of the last publish, for the line of a step."""
        shown = ("restarts", "reissued", "servers_lost", "given_up")
        out = {f"engine/{name.removeprefix('engine_')}": float(value) for name, value in self.counters().items()
               if name.startswith("engine_") or name in shown}
        seconds, size = self.publisher.last_publish["seconds"], self.publisher.last_publish["bytes"]
        return out | {"publish/seconds": seconds, "publish/gb_per_second": size / 1e9 / seconds,
                      "publish/probe": self.publisher.last_probe}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(concurrent=True, holds=True, sleeps=True, quantized=self.publisher.quantized)

    def health(self) -> Health:
        replicas, running = self.router.replicas, self._running()
        return Health(not self._closed and any(r.state == "ready" for r in replicas), self._closed, self._paused, self._version,
                      len(self._ids) - running, running, self.options.max_requests * len(replicas),
                      servers={r.url: r.state + (f" ({r.why})" if r.why else "") for r in replicas})

    def counters(self) -> dict:
        """Totals since the start, and the engines' own counters summed over servers. Compiled: vLLM compiles for itself."""
        out = {"compiled": 0, **self._counts, **dict.fromkeys(ROUTER_COUNTS, 0), **self.router.counts}
        for r in self.router.replicas:
            if r.state == "ready":
                try:
                    for name, value in self.controls[r.index].gauges().items():
                        out[f"engine_{name}"] = out.get(f"engine_{name}", 0.0) + value
                except adapter.ServerError:
                    continue
        return out

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.router.close()
        for process in self._processes.values():
            self._pool.submit(process.stop)
        self._pool.shutdown(wait=True)
        self.publisher.close()
        for control in self.controls:
            control.close()
        if getattr(self, "_trace_file", None):
            self._trace_file.close()
        self._params = None

    # ---- servers ------------------------------------------------------------------------------------------------------

    def _start_all(self) -> list[str]:
        v = self.options
        version, self._cpu = adapter.installed(v.python)
        notice = adapter.check_version(version, "rollout.engine=vllm")
        if notice:
            log.warning(notice)
        write_model_folder(self.folder / "model", self.hf_config)
        first = v.port + self.group.index * v.replicas  # several processes may share a host
        self._ports = [first + i if v.port else free_port(v.host) for i in range(v.replicas)]
        for i in range(v.replicas):
            self._start(i)
        return [f"http://{v.host}:{port}" for port in self._ports]

    def _start(self, i: int) -> None:
        command, env = adapter.launch(self.config, str(self.folder / "model"), self.dtype, self.length, self._ports[i],
                                      self._cpu, self.key)
        if self.options.devices:
            env["CUDA_VISIBLE_DEVICES"] = self.options.devices[i]
        self._processes[i] = ServerProcess(command, env, self.folder / f"server_{i}.log")

    def _first_listed(self) -> list[str]:
        """Waits until the folder names a server for every process; the same on all."""
        def found():
            end = time.monotonic() + self.options.setup_seconds
            while len(urls := listed(self._folder)) < self.group.count and time.monotonic() < end:
                time.sleep(0.5)
            return urls

        self._known = self.group.decide("the first servers", found)
        if not self._known:
            raise EngineLost(f"rollout.servers={str(self._folder)!r}: no server was announced there within rollout.vllm.setup_seconds="
                             f"{self.options.setup_seconds:g}; python -m jaxrl.serve starts and announces them")
        return self._known

    def _take_newcomers(self) -> None:
        """Servers announced since the last publish, dealt out as the first ones were; a poll gives each its weights once it answers."""
        if self._folder is None:
            return
        new = [u for u in self.group.decide(f"servers at publish {self._counts['publishes']}", listed, self._folder) if u not in self._known]
        mine = [u for i, u in enumerate(new, len(self._known)) if i % self.group.count == self.group.index]
        self._known = self._known + new
        for url in mine:
            log.info("vLLM server %s was announced", url)
            self.controls.append(adapter.Control(url, self.key, self.options.sync_seconds))
            self.memories[url] = Memory(self.controls[-1])
            self.router.add(url)

    def _meet_servers(self) -> None:
        """Once: waits until the servers answer, and checks what they are. At least one must; others may join later.

        Raises ConfigError for what another start would not change, EngineLost for the rest."""
        if self.publisher.transport is not None:
            return
        end = time.monotonic() + self.options.setup_seconds
        waiting = list(self.router.replicas)
        up: list[float] = []
        found = list(self._pool.map(lambda r: self._wait_healthy(r, end, up), waiting))
        for replica, why in zip(waiting, found, strict=True):
            if why:
                if self.own:
                    wrong = self._processes[replica.index].exit_status() == USAGE
                    raise (ConfigError if wrong else EngineLost)(f"vLLM server {replica.url} did not start: {why}")
                log.warning("vLLM server %s is not there: %s; it may join later", replica.url, why)
                self.router.set_state(replica, "dead", why)
        if all(found):
            raise EngineLost("rollout.servers: none of them answers: " + "; ".join(
                f"{r.url}: {why}" for r, why in zip(waiting, found, strict=True)))
        for replica, why in zip(waiting, found, strict=True):
            if not why:
                try:
                    self._examine(replica)
                except (adapter.ServerError, adapter.Refused) as e:
                    kind = ConfigError if isinstance(e, adapter.Refused) else EngineLost
                    raise kind(f"{e}; is it a vLLM server started with VLLM_SERVER_DEV_MODE=1 and with the key of this run "
                               "(VLLM_API_KEY in both environments), and rollout.vllm.sync_seconds="
                               f"{self.options.sync_seconds:g} long enough?") from None
                self.router.set_state(replica, "unsynced")
        self.publisher.choose_transport()
        log.info("vLLM: %d of %d servers, weights by %s", len(waiting) - sum(map(bool, found)), len(waiting),
                 self.publisher.transport.name)

    def _wait_healthy(self, replica, end: float, up: list[float]) -> str:
        """Empty when the server answers before `end`, else why not. Given servers are waited for LATECOMERS seconds once one
        is `up`; they may join later."""
        control, why, said = self.controls[replica.index], "", False
        while True:
            process = self._processes.get(replica.index)
            if process is not None and process.exit_status() is not None:
                return f"{process.ended()}: {process.complaint()} (whole log: {process.log_file})"
            try:
                control.healthy(5.0)
                up.append(time.monotonic())
                return ""
            except (adapter.ServerError, adapter.Refused) as e:
                why = str(e)
            patience = min(end, up[0] + LATECOMERS if up and not self.own else end) - time.monotonic()
            if patience <= 0 and up:
                return why
            if patience <= 0:
                return f"{why} (waited rollout.vllm.setup_seconds={self.options.setup_seconds:g})"
            if not self.own and not said and patience < self.options.setup_seconds - 5:
                said = log.info("waiting for %s: %s", replica.url, why) or True
            time.sleep(0.25)

    def _examine(self, replica) -> None:
        """Version, plugin and model of a server that has answered. Raises ConfigError for one that cannot serve this run."""
        control = self.controls[replica.index]
        if not self.own and control.is_open():
            log.warning("%s takes weights and control calls from whoever reaches it: start it with --middleware %s and VLLM_API_KEY in "
                        "its environment (docs/vllm.md)", replica.url, adapter.GUARD)
        notice = adapter.check_version(control.version(), replica.url)
        if notice:
            log.warning(notice)
        served = control.served()
        if (served.get("max_model_len") or self.length) < self.length:
            raise ConfigError(f"{replica.url} serves sequences up to {served['max_model_len']} tokens, this run needs "
                              f"{self.length}; start it with --max-model-len {self.length}")
        infos = self.publisher.infos[replica.index] = control.workers()
        self.memories[replica.url].meet()
        if self.config.rollout.placement == "colocated":
            _can_share(replica.url, infos)
        for info in infos:
            if info["protocol"] != PROTOCOL:
                raise ConfigError(f"{replica.url}: its jaxrl plugin speaks protocol {info['protocol']}, this jaxrl {PROTOCOL}; "
                                  "install the same jaxrl on both sides")
            if info["vocab_size"] != self.model.config.vocab_size:
                raise ConfigError(f"{replica.url} serves {info['model']} with a vocabulary of {info['vocab_size']}, this model "
                                  f"has {self.model.config.vocab_size}: it is another model")

    def _maintain(self) -> None:
        """Restarts servers of ours that died, and gives servers that came back the current weights."""
        self._notice_deaths()
        for replica in self.router.replicas:
            process = self._processes.get(replica.index)
            if self._resting:  # the trainer has the memory
                continue
            if replica.state == "dead" and process is not None:
                self._restart(replica, process)
            elif replica.state == "starting" and replica.index in self._restarts:
                self._look_at_start(replica, process)
            elif replica.state == "unsynced" and self._synced and not self._overtaken():
                self._join(replica)
        if all(r.state == "dead" for r in self.router.replicas) and (self.own or self._ids) and not self._resting:
            states = "; ".join(f"{r.url}: {r.why}" for r in self.router.replicas)
            raise EngineLost(f"no vLLM server is left: {states}. The policy is intact; the same command goes on from the "
                              "newest checkpoint")

    def _notice_deaths(self) -> None:
        for replica in self.router.replicas:
            process = self._processes.get(replica.index)
            if process is not None and replica.state in ("ready", "unsynced", "asleep") and process.exit_status() is not None:
                self.router.counts["servers_lost"] += 1
                log.warning("vLLM server %s %s; %d requests go elsewhere", replica.url, process.ended(), len(replica.running))
                self.router.set_state(replica, "dead", process.ended())

    def _restart(self, replica, process) -> None:
        tries = self._restarts.get(replica.index, 0)
        if tries >= self.options.restarts:
            return
        process.kill()
        self._restarts[replica.index] = tries + 1
        self._counts["restarts"] += 1
        log.warning("vLLM server %s is started again (%d of rollout.vllm.restarts=%d)", replica.url, tries + 1,
                    self.options.restarts)
        self._start(replica.index)
        self.memories[replica.url] = Memory(self.controls[replica.index])
        self.router.set_state(replica, "starting")

    def _look_at_start(self, replica, process) -> None:
        if process.exit_status() is not None:
            self.router.set_state(replica, "dead", f"{process.ended()}: {process.complaint()}")
        elif time.monotonic() - replica.since > self.options.setup_seconds:
            self.router.set_state(replica, "dead", f"not up within rollout.vllm.setup_seconds={self.options.setup_seconds:g}")
        else:
            try:
                self.controls[replica.index].healthy(1.0)
                self.router.set_state(replica, "unsynced")
            except (adapter.ServerError, adapter.Refused):
                pass

    def _overtaken(self) -> bool:
        """Whether an update has taken the buffers of the weights that were published last; the next publish is near."""
        return any(getattr(a, "is_deleted", bool)() for a in jax.tree.leaves(self._params))

    def _join(self, replica) -> None:
        """A server that came, or came back: it is examined and verified anew. One that does not fit is left out."""
        self.publisher.met.discard(replica.index)
        try:
            self._examine(replica)
            self._give([replica])
            log.info("vLLM server %s takes part from version %d on", replica.url, self._version)
        except (adapter.ServerError, adapter.Refused, ConfigError) as e:
            log.warning("vLLM server %s cannot take part: %s", replica.url, e)
            self.router.set_state(replica, "dead", str(e))

    # ---- small things -------------------------------------------------------------------------------------------------

    def _parse_version(self, text: str) -> int:
        run, _, number = text.rpartition("-")
        if run != self.run_id:
            raise adapter.ServerError(f"an answer was sampled from weights {text!r}, which this run did not publish")
        return int(number)

    def _on_ready(self, action) -> None:
        for r in self.router.replicas:
            if r.state == "ready":
                try:
                    action(self.controls[r.index])
                except (adapter.ServerError, adapter.Refused) as e:
                    self.router.set_state(r, "dead", str(e))

    def _seeds_are_free(self) -> bool:
        """On the CPU every request draws from a stream of its own anyway; on GPUs seeds cost vLLM's fast sampler."""
        return self.own and self._cpu

    def _bounded(self, request: Request) -> Request:
        """The request with no more tokens than fit beside its prompt."""
        room = self.total - len(request.prompt)
        if request.sampling.max_new_tokens <= room:
            return request
        sampling = dataclasses.replace(request.sampling, max_new_tokens=room,
                                       min_new_tokens=min(request.sampling.min_new_tokens, room))
        return dataclasses.replace(request, sampling=sampling)

    def _running(self) -> int:
        return sum(len(r.running) for r in self.router.replicas)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("rollout: the engine is closed")


def write_model_folder(folder: Path, hf_config: dict) -> None:
    """A folder with a config and no weights: servers start from dummy weights and receive the policy's."""
    from jaxrl.models.config import family_of
    from jaxrl.models.hf import SOURCE

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = {"architectures": [family_of(hf_config).architecture], **{k: v for k, v in hf_config.items() if k != SOURCE}}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _can_share(url: str, infos: list[dict]) -> None:
    """Raises ConfigError for a server that cannot lend its memory to this trainer."""
    if not infos or not all(i.get("sleeps") for i in infos):
        raise ConfigError(f"{url} cannot sleep, which rollout.placement=colocated needs: start it with --enable-sleep-mode and with "
                          "this jaxrl in its environment, or set rollout.placement=disaggregated")
    if any(i["machine"] != machine() for i in infos):
        raise ConfigError(f"{url} runs on another machine: it shares no GPU with this trainer; set rollout.placement=disaggregated")


def share_of(servers, group: Peers) -> list[str]:
    """The servers of this process. Raises ConfigError where there are fewer servers than processes."""
    if len(servers) < group.count:
        raise ConfigError(f"rollout.servers={tuple(servers)}: {len(servers)} for {group.count} processes, and each drives its own; start "
                          "at least one per process, or train with fewer processes")
    return [url.rstrip("/") for url in servers[group.index::group.count]]


def longest(config) -> int:
    """Most tokens of a prompt and its answer."""
    total = config.data.max_prompt_tokens + max(config.rollout.max_new_tokens, config.eval.max_new_tokens)
    return min(total, config.train.max_sequence_tokens or total)
