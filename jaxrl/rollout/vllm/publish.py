"""Publishes the trainer's weights to servers, and verifies that they arrived.

A publish is done when every server confirms the version, its prefix cache is empty, its checksums are ours (at the
first publish, or always: `rollout.verify_weights`) and a probe's log-probs are the trainer's. Until then a server
gets no request.

A tower for images is sent where it changed. Servers keep images' features by the images' hashes, over weight updates,
so that a new tower goes with a cache that is empty, as the workers confirm. The probe of a model with a tower shows the
same two images at every publish: stale features of them fail it, too.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import secrets
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models import adapters
from jaxrl.models.io.fused import interleaved
from jaxrl.rollout import weights
from jaxrl.rollout.engines import EngineContext
from jaxrl.rollout.prompt_images import prompt_images
from jaxrl.rollout.protocol import Request, SamplingParams
from jaxrl.rollout.vllm import adapter, adapter_folders, transport
from jaxrl.rollout.vllm.options import PROBE_IMAGES, PROBE_PROMPT, PROBE_TOKENS, max_model_len, server_folder
from jaxrl.types import Pictures
from jaxrl.vllm_plugin import BACKEND, is_of_tower, machine

log = logging.getLogger("jaxrl")
PROBE_BOUNDS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.2}  # nats, mean over the probe's tokens
QUANTIZED_BOUND = 1.0  # upper limit of the bound that the first probe of a quantized engine sets


class WeightMismatch(RunStopped):
    """An engine that does not hold the weights it was given."""


class Publisher:
    """Publishes weights to servers; see `publish`. The router's states decide who gets requests.

    Args:
      context: of the engine.
      folder: of the run, for transport=checkpoint.
      fleet: the servers.
      run_id: part of every version, so that another run's weights are never taken for ours.

    Attributes:
      transport: a Stream or Checkpoint; None before `choose_transport`.
      verified: indexes of the servers whose weights were verified since they were started.
      last_publish: {"seconds", "bytes"} of the last publish, 0 before it.
      last_probe: mean absolute log-prob gap of the last probe, in nats; NaN before it.
    """

    def __init__(self, context: EngineContext, folder, fleet, run_id: str):
        self.config, self.options = context.config, context.config.rollout.vllm
        self.model, self.hf_config, self.dtype = context.model, context.hf_config, context.dtype
        self.folder, self.fleet, self.router, self.run_id = folder, fleet, fleet.router, run_id
        self.verified: set[int] = set()  # servers whose weights were verified since they were started
        self.transport: Any = None  # a Stream or a Checkpoint of transport.py, from `choose_transport` on
        # if adapters are published separately from the base
        self.adapter_folders: adapter_folders.AdapterFolders | None = None
        self._params, self.version = None, -1  # of a publish that is under way
        self.last_publish: dict = {"seconds": 0.0, "bytes": 0}
        self.last_probe = float("nan")
        self._bound: float | None = None  # of the probe of a quantised engine, measured
        self._digests: dict = {}  # by name, of the weights sent last, if they are verified
        # digests of a tower: that which all verified servers hold, empty if it is not known; that which was sent last
        self._tower, self._sent_tower = b"", b""
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=64, thread_name_prefix="vllm-weights")
        self._sender = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-sender")

    def close(self) -> None:
        """Waits for running transfers and deletes what the transport wrote."""
        self._sender.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        if self.transport is not None:
            self.transport.close()
        if self.adapter_folders is not None:
            self.adapter_folders.close()

    def choose_transport(self) -> None:
        """Chooses how weights are sent, from what the servers report. Raises ConfigError if the choice cannot work."""
        choice, infos = self.options.transport, [i for r in self.fleet.infos.values() for i in r]
        flag = f"--weight-transfer-config '{{\"backend\": \"{BACKEND}\"}}'"
        plugin = all(self.fleet.infos.values()) and all(i["backend"] == BACKEND for i in infos)
        if choice == "auto":
            known = server_folder(self.config.rollout.servers) is None  # else others may come from anywhere
            near = known and bool(infos) and all(i["machine"] == machine() for i in infos)
            choice = "checkpoint" if not plugin else "shm" if near else "network"
            if not plugin:
                lacking = [self.router.replicas[k].url for k, workers in self.fleet.infos.items()
                           if not workers or workers[0]["backend"] != BACKEND]
                log.warning("%s: no jaxrl plugin, or not started with %s; weights go through a checkpoint folder that "
                            "it must see", ", ".join(lacking), flag)
        elif choice != "checkpoint" and not plugin:
            raise ConfigError(f"rollout.vllm.transport={choice}: needs jaxrl in the servers' environment and {flag}; "
                              "or choose checkpoint")
        if choice == "checkpoint" and interleaved(self.model):
            raise ConfigError("rollout.vllm.transport=checkpoint with experts in the layout of gpt-oss: vLLM's reload "
                              "from a folder keeps the old experts and sinks; install jaxrl in the servers' "
                              f"environment and start them with {flag}")
        if choice == "checkpoint" and self.model.config.vision is not None:
            raise ConfigError("rollout.vllm.transport=checkpoint with images: servers take them through jaxrl's plugin "
                              f"alone; install jaxrl in their environment, start them with {flag}, and set auto")
        first = self.router.replicas[0].url
        makes = {"checkpoint": lambda: transport.Checkpoint(self.folder), "shm": transport.SharedMemory,
                 "network": lambda: transport.Network(self.options.weights_host or transport.address_towards(first)),
                 "nccl": lambda: transport.Broadcast(self.options.sync_seconds)}
        self.transport = makes[choice]()
        if self.model.adapter is not None:
            near = isinstance(self.transport, transport.SharedMemory)
            self.adapter_folders = adapter_folders.AdapterFolders(self.model, self.dtype,
                                       (self.transport.folder if near else self.folder) / "adapters")
        log.info("vLLM: weights by %s%s", choice,
                 f", adapters in {self.adapter_folders.folder}" if self.adapter_folders else "")

    # ---- one publish -------------------------------------------------------------------------------------------------

    def publish(self, replicas, params, version: int) -> None:
        """Sends these weights to servers; a failed try is repeated in full, rollout.vllm.retries times. Leaves each
        server ready, or dead with the reason; an exception leaves those that were not ready yet unsynced.

        Args:
          replicas: the router's Replicas to send to.
          params: the policy's parameter tree, all of whose shards this process reaches.
          version: number of the weights.

        Raises:
          WeightMismatch: a server reports weights that it does not have.
          RunStopped: /dev/shm is full."""
        self._params, self.version = params, version
        started, report = time.monotonic(), {"bytes": 0}
        for attempt in range(self.options.retries + 1):
            for r in replicas:
                self.router.set_state(r, "unsynced", "receiving weights")
            left = [r for r in replicas if r.state != "dead"]
            errors = self._push(left, report)
            for r in left:
                if errors.get(r.index) is None:
                    try:
                        self._verify(r)
                        self.router.set_state(r, "ready")
                    except (adapter.ServerError, adapter.Refused) as e:
                        errors[r.index] = e
            self._tower = b"" if errors else self._sent_tower
            replicas = [r for r in left if errors.get(r.index) is not None]
            if self.adapter_folders is not None:  # whole again, since their progress is unknown
                self.verified -= {r.index for r in replicas}
            if not replicas:
                break
            for r in replicas:
                log.warning("weights %d did not reach %s (try %d of %d): %s", version, r.url, attempt + 1,
                            self.options.retries + 1, errors[r.index])
        for r in replicas:
            self.router.counts["servers_lost"] += 1
            self.router.set_state(r, "dead", f"did not receive weights: {errors[r.index]}")
        self._params, self.last_publish = None, {"seconds": time.monotonic() - started, **report}

    def _push(self, replicas, report: dict) -> dict[int, Exception]:
        """Runs one full update of several servers; returns the error of each that failed."""
        version = f"{self.run_id}-{self.version}"
        errors: dict[int, Exception] = {}
        first = any(r.index not in self.verified for r in replicas)
        verify = self.config.rollout.verify_weights == "always" or (
            self.config.rollout.verify_weights == "first" and first)

        def each(action, among=replicas):
            live = [r for r in among if r.index not in errors]
            for r, future in [(r, self._pool.submit(action, self.fleet.controls[r.index])) for r in live]:
                try:
                    future.result()
                except (adapter.ServerError, adapter.Refused) as e:
                    errors[r.index] = e

        whole = [r for r in replicas if self._lacks_base(r)]
        tower, self._sent_tower = self._changed_tower(whole)
        if whole or not verify:
            kept = verify and not tower
            self._digests = {name: sha for name, sha in self._digests.items() if kept and is_of_tower(name)}
        each(self._open)
        to_whole = functools.partial(each, among=whole)
        self._tower = b""  # until it is verified
        if whole and (failure := self._bring(whole, to_whole, errors, report, version, verify, tower)):
            return {r.index: errors.get(r.index, failure) for r in replicas}
        if (folders := self.adapter_folders) is not None:
            written = folders.write(self._params, version)
            report["bytes"] += written.size
            self.router.model = version
            each(lambda c: folders.load(c, written, version))
        each(self._empty_cache)
        if tower:
            each(_forget_features)
        each(lambda c: _confirm(c, version))
        each(lambda c: self.fleet.memories[c.url].close())
        for r in replicas:
            if r.index not in errors:
                r.version = self.version  # of the tokens that it samples from here on
        each(lambda c: c.resume())  # one that slept runs since it has its cache again
        self.verified |= {r.index for r in replicas if r.index not in errors}
        return errors

    def _changed_tower(self, replicas) -> tuple[bool, bytes]:
        """Returns (whether a tower has to be sent to servers, its digest). A server keeps it until it sleeps."""
        if self.model.config.vision is None or self._params is None:
            return False, b""
        now = adapters.digest(self._params["vision"]).tobytes()
        held = all(r.index in self.verified and self.fleet.memories[r.url].state == "awake" for r in replicas)
        return now != self._tower or not held, now

    def _lacks_base(self, replica) -> bool:
        """Whether a server needs whole weights: always, unless it has the base and is given an adapter to it."""
        return (self.adapter_folders is None or replica.index not in self.verified
                or self.fleet.memories[replica.url].state != "awake")  # a sleeping server has no weights

    def _bring(self, replicas, each, errors, report, version: str, verify: bool, tower: bool) -> Exception | None:
        """Sends whole weights (with lora.publish=adapter: the base) to servers, those of a tower if `tower`. Returns
        the error of a step that they take together.
        """
        model = self.model.base
        if isinstance(self.transport, transport.Checkpoint):
            path = self.transport.write(model, self._params, self.hf_config, self.dtype, self.version)
            report["bytes"] = sum(f.stat().st_size for f in path.glob("*.safetensors"))
            each(lambda c: c.reload(str(path), version))
            return None
        names = weights.names(model, tower)
        greetings = self.transport.greet({r.url: len(self.fleet.infos[r.index]) for r in replicas})
        try:
            self.transport.meet(self._sender.submit(
                each, lambda c: c.init_transfer(names, self.transport.announcement(), greetings[c.url])))
            each(lambda c: c.start_update())
            self._stream(each, errors, report, verify, tower)
        except adapter.ServerError as e:
            self.transport.reset()
            return e
        each(lambda c: c.finish_update(version))
        each(_all_arrived)
        return None

    def _open(self, control) -> None:
        """Pauses a server that is awake; wakes one that sleeps, with memory for weights."""
        self.fleet.memories[control.url].open()
        if self.fleet.memories[control.url].state == "awake":
            control.pause()

    def _stream(self, each, errors, report, verify: bool, tower: bool) -> None:
        """Sends all chunks; each is converted and written while the servers read the one before."""
        most, pending, report["bytes"] = self.options.chunk_mb * 1_000_000, concurrent.futures.Future(), 0
        pending.set_result(None)  # nothing is on its way yet
        for chunk in weights.chunks(self.model.base, self._params, self.dtype, most, self.transport.host, tower):
            if verify:
                self._digests.update({name: np.asarray(array) for name, array in chunk} if self._needs_pieces() else {
                    name: transport.digest(np.asarray(array)) for name, array in chunk})
            payload = self.transport.payload(chunk, verify)
            report["bytes"] += sum(array.nbytes for _, array in chunk)
            pending.result()
            if errors and not self.transport.host:
                raise adapter.ServerError("another server failed in the middle of a broadcast")
            pending = self._sender.submit(each, functools.partial(adapter.Control.update, payload=payload))
            self.transport.send()
        pending.result()

    def _needs_pieces(self) -> bool:
        """Whether workers hold slices, so that whole tensors are needed to compare with."""
        return any(len(infos) > 1 for infos in self.fleet.infos.values())

    def _empty_cache(self, control) -> None:
        for _ in range(adapter.RESET_TRIES):
            if control.reset_prefix_cache():
                return
            time.sleep(0.05)
        raise adapter.ServerError(f"{control.url}: its prefix cache could not be emptied")

    # ---- proof -------------------------------------------------------------------------------------------------------

    def _verify(self, replica) -> None:
        """Checksums where they were taken, then the probe. Raises WeightMismatch."""
        infos = self.fleet.infos.get(replica.index) or []
        if self._digests and infos and not any(i["quantized"] for i in infos):
            self._compare(replica)
        control = self.fleet.controls[replica.index]
        if self.adapter_folders is not None and infos and (wrong := self.adapter_folders.check(control)):
            raise WeightMismatch(f"{replica.url} does not have the adapter of version {self.version}: {wrong}; "
                                 "adapters reach servers as folders: let it see this disk, or set lora.publish=merged")
        self._probe(replica)

    def _compare(self, replica) -> None:
        seen: set[str] = set()
        for found in self.fleet.controls[replica.index].digests():
            for name, (digest, dtype, shape, axis, ranges) in found.items():
                ours = self._digests.get(name)
                if ours is None:
                    raise WeightMismatch(f"{replica.url} computes with a tensor that the trainer does not have: {name} "
                                         f"({dtype} {shape}); it serves another model")
                if not isinstance(ours, str):  # a worker of several holds ranges along an axis; -1 = all of it
                    ours = transport.digest(ours if axis < 0 else np.concatenate(
                        [ours[(slice(None),) * axis + (slice(*ends),)] for ends in ranges], axis=axis))
                if digest != ours:
                    raise WeightMismatch(f"{replica.url} does not hold the weights of version {self.version}: tensor "
                                         f"{name} ({dtype} {shape}) differs from the trainer's")
                seen.add(name)
        lost = sorted(set(self._digests) - seen)
        if lost:
            raise WeightMismatch(f"{replica.url} does not hold {len(lost)} tensors of version {self.version}: "
                                 f"{', '.join(lost[:3])}")

    def _probe(self, replica) -> None:
        """Samples a few tokens, with a tower also behind images, and compares their log-probs with the trainer's."""
        gap = self.probe(replica)
        if self.model.config.vision is not None:
            gap = max(gap, self.probe(replica, self._probe_images))
        bound = self.options.probe_bound or self._bound or PROBE_BOUNDS[self.dtype]
        infos = self.fleet.infos.get(replica.index) or []
        if any(map(self._is_quantized, infos)) and self._bound is None and not self.options.probe_bound:
            self._bound = bound = min(max(PROBE_BOUNDS["bfloat16"], 3 * gap), QUANTIZED_BOUND)
            log.info("quantized engine: the probe's log-probs differ by %.3g on average; the bound is now %.3g",
                     gap, bound)
        self.last_probe = gap
        if not gap <= bound:
            raise WeightMismatch(
                f"{replica.url} samples from other weights than version {self.version}: a probe's log-probs are "
                f"{gap:.3g} away from the trainer's on average, more than {bound:g} (rollout.vllm.probe_bound). Its "
                "weights did not arrive (a stock CPU server keeps old ones: install jaxrl in its environment), its "
                "features of images are those of older weights, or it serves another model")

    def probe(self, replica, pictures: Pictures | None = None) -> float:
        """Returns the mean absolute difference of log-probs, trainer - engine, in nats, over the at most PROBE_TOKENS
        tokens that a server samples behind a fixed prompt; temperature 1, no truncation. Only during `publish`, whose
        weights it takes. Raises ServerError or Refused if the server does not reply as it should.

        replica: the server that is asked. pictures: images in the prompt, `_probe_images`. None: PROBE_PROMPT tokens of
        text."""
        length = PROBE_PROMPT + (0 if pictures is None else int(pictures.counts.sum()) // pictures.merge**2)
        prompt = np.random.default_rng(0).integers(0, self.model.config.vocab_size, length).astype(np.int32)
        new = min(PROBE_TOKENS, max_model_len(self.config) - length)
        request = Request(f"probe-{secrets.token_hex(4)}", prompt, SamplingParams(max_new_tokens=new), seed=1)
        payload = adapter.generate_payload(request, (), True, False, self.router.model)
        if pictures is not None:
            payload["features"] = self.router.items.features(pictures)
        tokens, logprobs, _, _ = adapter.parse_choice(self.fleet.controls[replica.index].generate(payload))
        whole = np.concatenate([prompt, tokens]).astype(np.int32)
        ours = sequence_logprobs(self.model, self._params, whole, pictures)
        return float(np.abs(np.asarray(ours)[length - 1:] - np.array(logprobs)).mean())

    @functools.cached_property
    def _probe_images(self) -> Pictures:
        """Two images of unlike shapes, the same at every publish, with text before, between and behind them."""
        vision, rng = self.model.config.vision, np.random.default_rng(1)
        grids = np.array(PROBE_IMAGES) * vision.merge
        pixels = [rng.integers(0, 256, (count, vision.patch_numbers), np.uint8) for count in grids.prod(axis=1)]
        firsts = [2, 4 + int(np.prod(PROBE_IMAGES[0]))]
        return Pictures(np.zeros(2, np.int64), np.array(firsts), grids, np.arange(2), vision.merge,
                        vision.patch_numbers, lambda numbers: [pixels[i] for i in numbers], vision.window)

    @property
    def quantized(self) -> bool:
        """Whether a server computes with other weights or cache than it was given; known after the first publish. A
        server without the plugin does not tell, and counts as one that does not."""
        return any(self._is_quantized(i) for infos in self.fleet.infos.values() for i in infos)

    def _is_quantized(self, info: dict) -> bool:
        return bool(info["quantized"]) or info["cache_dtype"] not in ("auto", self.dtype)


def _all_arrived(control) -> None:
    for info in control.workers():
        missing = info["missing"]
        if missing:
            raise adapter.ServerError(f"{control.url}: {len(missing)} tensors did not arrive: {', '.join(missing[:3])}")


def _forget_features(control) -> None:
    """Empties a server's cache of images' features. Raises WeightMismatch if it keeps some."""
    control.reset_encoder_cache()
    if kept := max((info["features"] for info in control.workers()), default=0):
        raise WeightMismatch(f"{control.url} keeps the features of {kept} images that an older tower made: its encoder "
                             "cache could not be emptied; start the server again")


def _confirm(control, version: str) -> None:
    found = control.weight_version()
    if found != version:
        raise adapter.ServerError(f"{control.url} reports weights {found!r} after a publish of {version!r}")


@functools.partial(jax.jit, static_argnums=0)
def _next_token_logits(model, params, tokens_1xL, images):
    ones, zeros = jnp.ones_like(tokens_1xL), jnp.zeros_like(tokens_1xL)
    positions = jnp.arange(tokens_1xL.shape[1], dtype=jnp.int32)[None]
    return model.logits(params, model.hidden(params, tokens_1xL, positions, ones, zeros, images=images))


def sequence_logprobs(model, params, tokens: np.ndarray, pictures: Pictures | None = None) -> np.ndarray:
    """Returns the log-probs [L - 1] of tokens 1..L-1 of a sequence at temperature 1, by the trainer's model: nats, in
    the dtype of its logits, fp32 or better.

    params: the model's parameter tree. tokens: [L] int32. pictures: the sequence's images; None = text.
    """
    images = None
    if pictures is not None:
        images = prompt_images(model.config.vision, [pictures], [len(tokens)], len(tokens), int(pictures.counts.sum()))
    logits = _next_token_logits(model, params, jnp.asarray(tokens)[None], images)[0, :-1]
    return np.asarray(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens[1:, None]), axis=-1)[:, 0])
