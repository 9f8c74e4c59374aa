"""The servers of an engine, our child processes or given ones: start, checks, restarts, newcomers."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import shutil
import time
from pathlib import Path

from jaxrl.config.lengths import longest_prompt
from jaxrl.errors import ConfigError
from jaxrl.models.config import ModelConfig, model_config
from jaxrl.models.families import FAMILIES, IMAGES, family_of
from jaxrl.models.io.hf import SOURCE
from jaxrl.processes.addresses import join_host_port
from jaxrl.processes.group import Peers
from jaxrl.rollout.engines import EngineContext
from jaxrl.rollout.protocol import EngineLost
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.adapter_folders import required_rank
from jaxrl.rollout.vllm.options import max_model_len, read_urls, server_folder
from jaxrl.rollout.vllm.process import ServerProcess, free_port
from jaxrl.rollout.vllm.router import Replica, Router
from jaxrl.rollout.vllm.sleeping import ServerMemory
from jaxrl.vllm_plugin import PROTOCOL, architecture, machine

log = logging.getLogger("jaxrl")
LATECOMER_SECONDS = 30.0  # wait for further servers once one is up
USAGE_ERROR = 2  # exit status of a server that does not know an option


class OwnServers:
    """Servers started here, `rollout.vllm.replicas` of them, with dummy weights.

    Args:
      config: the whole config.
      hf_config: of the model.
      dtype: a numpy name; "" = the compute dtype of this vLLM build.
      folder: for their logs and the model's config.
      key: their API key.
      first: number of servers before them on this host, from which ports are counted (rollout.vllm.port).
      lora_rank: largest rank of adapters that are published separately; 0 = none.

    Attributes (one entry per server, in order):
      urls, processes: address and ServerProcess.
      restarts: how often it was restarted. up: whether it has replied since its start, as `look` sees it.
      cpu: whether this is vLLM's build for CPUs (one value).

    Raises:
      ConfigError: vLLM cannot be started here.
      OSError: a server's process cannot be created; those that run are stopped first.
    """

    def __init__(self, config, hf_config: dict, dtype: str, folder: Path, key: str, first: int = 0,
                 lora_rank: int = 0):
        v = config.rollout.vllm
        version, self.cpu = adapter.installed(v.python)
        if notice := adapter.check_version(version, "rollout.engine=vllm"):
            log.warning(notice)
        self.config, self.folder, self.key, self.lora_rank = config, folder, key, lora_rank
        self.recurrent = bool(family_of(hf_config).recurrent)
        self.image_tokens = longest_prompt(config) if IMAGES in hf_config else 0
        self.dtype = dtype or ("float32" if self.cpu else "bfloat16")
        write_model_folder(folder / "model", hf_config)
        self.ports = [v.port + first + i if v.port else free_port(v.host) for i in range(v.replicas)]
        self.urls = [f"http://{join_host_port(v.host, port)}" for port in self.ports]
        self.restarts, self._silent = [0] * v.replicas, [0] * v.replicas
        self.up, self._began = [False] * v.replicas, [0.0] * v.replicas  # up: has replied since its start
        self.processes: list[ServerProcess] = []
        try:
            for i in range(v.replicas):
                self.processes.append(self._started(i))
        except BaseException:
            self.stop()
            raise

    def _started(self, i: int) -> ServerProcess:
        self.up[i], self._silent[i], self._began[i] = False, 0, time.monotonic()
        command, env = adapter.launch(self.config, str(self.folder / "model"), self.dtype, max_model_len(self.config),
                                      self.ports[i], self.cpu, self.key, self.lora_rank, self.recurrent,
                                      self.image_tokens)
        if devices := self.config.rollout.vllm.devices:
            env["CUDA_VISIBLE_DEVICES"] = devices[i]
        return ServerProcess(command, env, self.folder / f"server_{i}.log")

    def look(self, i: int, control: adapter.Control, seconds: float) -> str:
        """Returns "" while a server is well or starting, else what is wrong: it ended, is late, or was silent twice
        in a row.

        i: number of the server. control: its client. seconds: to wait for a reply."""
        process, setup = self.processes[i], self.config.rollout.vllm.setup_seconds
        if process.exit_status() is not None:
            return f"{process.ended()}: {process.last_errors()}"
        try:
            control.check_health(seconds)
            self.up[i], self._silent[i] = True, 0
            return ""
        except (adapter.ServerError, adapter.Refused) as e:
            why = str(e)
        if not self.up[i]:
            late = time.monotonic() - self._began[i] > setup
            return f"is not up within rollout.vllm.setup_seconds={setup:g}: {why}" if late else ""
        self._silent[i] += 1
        return f"hangs: {why}" if self._silent[i] > 1 else ""

    def restart(self, i: int) -> bool:
        """Ends server number i and starts it again; returns False if it has used up rollout.vllm.restarts.

        Raises EngineLost if its process does not end."""
        if self.restarts[i] >= self.config.rollout.vllm.restarts:
            return False
        self.processes[i].kill()
        self.restarts[i] += 1
        self.processes[i] = self._started(i)
        return True

    def stop(self) -> None:
        """Stops all servers at the same time, and waits for it; a process that does not end is left."""
        with concurrent.futures.ThreadPoolExecutor(max(1, len(self.processes))) as pool:
            for process in self.processes:
                pool.submit(process.stop)


def write_model_folder(folder: Path, hf_config: dict) -> None:
    """Writes a folder with a config and no weights, in place of an existing one: servers start from dummy weights and
    receive the policy's. For a model with a tower it has a preprocessor_config.json, too.

    hf_config: as in config.json, of the text model, with models.io.hf.SOURCE and IMAGES for a tower."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    family = family_of(hf_config)
    config = {"architectures": [family.architecture], **family.says, **hf_config}
    for key in (SOURCE, IMAGES, "quantization_config"):  # what they receive is in plain numbers
        config.pop(key, None)
    if family.router == "sigmoid":
        config["scoring_func"] = "sigmoid"  # without it vLLM's DeepSeek takes softmax
    if grows := query_growth(model_config(hf_config)):
        config["llama_4_scaling"] = grows
    if family.stored_type:
        config |= {"model_type": family.stored_type, "architectures": [FAMILIES[family.stored_type].architecture]}
    if (tower := hf_config.get(IMAGES)) is not None:
        del config["architectures"]
        config = {**hf_config[SOURCE]["outer"], "architectures": [architecture(family.architecture)],
                  "text_config": config, "tie_word_embeddings": config.get("tie_word_embeddings", False)}
        pixels = {f"image_{name}": list(tower.get(name, (0.5,) * 3)) for name in ("mean", "std")}
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def query_growth(config: ModelConfig) -> dict | None:
    """Returns what vLLM reads of a config.json as `llama_4_scaling`, {"beta", "original_max_position_embeddings"}: how
    queries grow with their position, which published folders have in the rotary table (models.rope.growth). None for a
    model whose queries do not."""
    rope = next((r for r in config.ropes if r.query_beta), None)
    return rope and {"beta": rope.query_beta, "original_max_position_embeddings": rope.original_max}


def check_growth(url: str, infos: list[dict], grows: dict | None, length: int) -> None:
    """Raises ConfigError if queries of a server's model do not grow as `grows` says and sequences are long enough to
    differ.

    url: of the server. infos: what its workers report; empty without the plugin: growth is then unknown, which is an
    error. grows: of `query_growth`; None = nothing is checked. length: tokens of the longest sequence."""
    window = grows["original_max_position_embeddings"] if grows else length
    if length <= window or infos and all(info.get("query_growth") == grows for info in infos):
        return
    raise ConfigError(f"{url} computes queries that do not grow with their position as this model's, which vLLM reads "
                      f"from llama_4_scaling: start it with jaxrl's plugin and --hf-overrides "
                      f"'{json.dumps({'llama_4_scaling': grows})}', or keep sequences within {window} tokens")


def first_servers(config, group: Peers) -> list[str]:
    """Returns the URLs of rollout.servers; for a folder, once it names a server for every process, or those that it
    names after rollout.vllm.setup_seconds. The same on all processes. Raises EngineLost if it names none.

    group: the processes of the run."""
    folder, seconds = server_folder(config.rollout.servers), config.rollout.vllm.setup_seconds
    if folder is None:
        return list(config.rollout.servers)

    def found():
        end = time.monotonic() + seconds
        while len(urls := read_urls(folder)) < group.count and time.monotonic() < end:
            time.sleep(0.5)
        return urls

    urls = group.decide("the first servers", found)
    if not urls:
        raise EngineLost(f"rollout.servers={str(folder)!r}: no server was announced there within "
                         f"rollout.vllm.setup_seconds={seconds:g}; jaxrl serve starts and announces them")
    return urls


def servers_of_process(servers, group: Peers) -> list[str]:
    """Returns the URLs of this process's servers, every `group.count`-th from its index on. Raises ConfigError if there
    are fewer servers than processes."""
    if len(servers) < group.count:
        raise ConfigError(f"rollout.servers={tuple(servers)}: {len(servers)} for {group.count} processes, and each "
                          "drives its own; start at least one per process, or train with fewer processes")
    return [url.rstrip("/") for url in servers[group.index::group.count]]


class Fleet:
    """The servers of one engine.

    Args:
      context: of the engine.
      key: the servers' API key.
      group: the processes of the run, among which given servers are distributed.
      own: OwnServers, or None for given ones.
      known: URLs of all given servers so far, on all processes.
      router: the Router whose replicas they are.

    Attributes:
      controls: of the router's replicas, in order.
      memories: by URL.
      infos: replica's index -> what each worker of an examined server reports, empty without the plugin.
      own: as given. processes: those of `own`, [] for given servers.
    """

    def __init__(self, context: EngineContext, key: str, group: Peers, own: OwnServers | None, known: list[str],
                 router: Router):
        self.config, self.model, self.options = context.config, context.model, context.config.rollout.vllm
        self.key = key
        self.group, self.own, self.router = group, own, router
        self.processes = own.processes if own else []
        self.controls: list[adapter.Control] = []
        self.memories: dict[str, ServerMemory] = {}
        self.infos: dict[int, list[dict]] = {}
        self._folder, self._known, self._looked = server_folder(self.config.rollout.servers), known, 0
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=64, thread_name_prefix="vllm-control")
        for replica in router.replicas:
            self._control(replica.url)

    def _control(self, url: str) -> None:
        self.controls.append(adapter.Control(url, self.key, self.options.sync_seconds))
        self.memories[url] = ServerMemory(self.controls[-1])

    def close(self) -> None:
        """Stops our servers and closes all clients."""
        if self.own:
            self.own.stop()
        self._pool.shutdown(wait=True)
        for control in self.controls:
            control.close()

    # ---- start ------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Waits until the servers reply, and checks them: at most rollout.vllm.setup_seconds, for further given ones
        LATECOMER_SECONDS once one is up. All of ours must reply; of given ones at least one, and others may join later.

        Raises:
          ConfigError: a restart would not help: wrong options, a refused call, or servers that cannot serve this run.
          EngineLost: any other failure."""
        end, up, waiting = time.monotonic() + self.options.setup_seconds, [], list(self.router.replicas)
        found = dict(zip(waiting, self._pool.map(lambda r: self._wait_healthy(r, end, up), waiting), strict=True))
        for replica, why in found.items():
            if why and self.own:
                wrong = self.processes[replica.index].exit_status() == USAGE_ERROR
                raise (ConfigError if wrong else EngineLost)(f"vLLM server {replica.url} did not start: {why}")
            if why:
                log.warning("vLLM server %s does not reply: %s; it may join later", replica.url, why)
                self.router.set_state(replica, "dead", why)
        if all(found.values()):
            raise EngineLost("rollout.servers: none of them responds: "
                             + "; ".join(f"{r.url}: {why}" for r, why in found.items()))
        for replica in (r for r, why in found.items() if not why):
            try:
                self.examine(replica)
            except (adapter.ServerError, adapter.Refused) as e:
                kind = ConfigError if isinstance(e, adapter.Refused) else EngineLost
                raise kind(f"{e}; is it a vLLM server started with VLLM_SERVER_DEV_MODE=1 and with the key of this run "
                           "(VLLM_API_KEY in both environments), and rollout.vllm.sync_seconds="
                           f"{self.options.sync_seconds:g} long enough?") from None
            self.router.set_state(replica, "unsynced")
        log.info("vLLM: %d of %d servers", sum(not why for why in found.values()), len(waiting))

    def _wait_healthy(self, replica: Replica, end: float, up: list[float]) -> str:
        """Returns "" once the server replies, else the reason at `end`.

        If another server is `up`, a given one is waited for LATECOMER_SECONDS more; it may join later.
        """
        logged = False
        while True:
            if self.own and (process := self.processes[replica.index]).exit_status() is not None:
                return f"{process.ended()}: {process.last_errors()} (whole log: {process.log_file})"
            try:
                self.controls[replica.index].check_health(5.0)
                up.append(time.monotonic())
                return ""
            except (adapter.ServerError, adapter.Refused) as e:
                why = str(e)
            patience = min(end, up[0] + LATECOMER_SECONDS if up and not self.own else end) - time.monotonic()
            if patience <= 0:
                return why if up else f"{why} (waited rollout.vllm.setup_seconds={self.options.setup_seconds:g})"
            if not self.own and not logged and patience < self.options.setup_seconds - 5:
                logged = log.info("waiting for %s: %s", replica.url, why) or True
            time.sleep(0.25)

    def examine(self, replica: Replica) -> None:
        """Checks version, plugin and model of a server, and stores what its workers report in `infos`.

        Raises ConfigError if it cannot serve this run, ServerError or Refused if it does not reply as it should."""
        control, length = self.controls[replica.index], max_model_len(self.config)
        if not self.own and control.is_open():
            log.warning("%s accepts weights and control calls without a key: start it with --middleware %s and "
                        "VLLM_API_KEY in its environment (docs/guides/vllm.md)", replica.url, adapter.GUARD)
        if notice := adapter.check_version(control.version(), replica.url):
            log.warning(notice)
        model = control.served()
        if (model.get("max_model_len") or length) < length:
            raise ConfigError(f"{replica.url} serves sequences up to {model['max_model_len']} tokens, this run needs "
                              f"{length}; start it with --max-model-len {length}")
        infos = self.infos[replica.index] = control.workers()
        check_growth(replica.url, infos, query_growth(self.model.config), length)
        self.memories[replica.url].meet()
        if self.config.rollout.placement == "colocated":
            _can_share(replica.url, infos)
        for info in infos:
            if info["protocol"] != PROTOCOL:
                raise ConfigError(f"{replica.url}: its jaxrl plugin speaks protocol {info['protocol']}, this jaxrl "
                                  f"{PROTOCOL}; install the same jaxrl on both sides")
            if (rank := required_rank(self.model.adapter)) > info.get("lora_rank", 0):
                raise ConfigError(f"{replica.url} serves adapters up to rank {info.get('lora_rank', 0)}, this run "
                                  f"needs {rank}: start it with --enable-lora --max-lora-rank {rank} and with "
                                  "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, or set lora.publish=merged")
            if self.model.config.vision is not None and not info.get("images"):
                raise ConfigError(f"{replica.url} serves {info['model']}, which makes images of its own: start servers "
                                  "of a model with a tower by jaxrl serve, or by rollout.engine=vllm itself")
            if info["vocab_size"] != self.model.config.vocab_size:
                raise ConfigError(f"{replica.url} serves {info['model']} with a vocabulary of {info['vocab_size']}, "
                                  f"this model has {self.model.config.vocab_size}: it is another model")
        replica.examined = True

    def take_newcomers(self) -> None:
        """Adds servers announced in the folder of rollout.servers since the last call, distributed like the first ones;
        each gets weights once it replies. Collective; does nothing without a folder."""
        if self._folder is None:
            return
        found = self.group.decide(f"servers at publish {self._looked}", read_urls, self._folder)
        self._looked += 1
        new = [url for url in found if url not in self._known]
        mine = [url for i, url in enumerate(new, len(self._known)) if i % self.group.count == self.group.index]
        self._known = self._known + new
        for url in mine:
            log.info("vLLM server %s was announced", url)
            self._control(url)
            self.router.add(url)

    # ---- restarts ----------------------------------------------------------------------------------------------

    def notice_deaths(self) -> None:
        """Marks those of our servers whose process has ended as dead; the router watches the others by health
        checks."""
        for replica, process in zip(self.router.replicas, self.processes, strict=False):
            if replica.state in ("ready", "unsynced", "asleep") and process.exit_status() is not None:
                self.router.counts["servers_lost"] += 1
                log.warning("vLLM server %s %s; %d requests are rerouted", replica.url, process.ended(),
                            len(replica.running))
                self.router.set_state(replica, "dead", process.ended())

    def revive(self) -> None:
        """Restarts our servers that died, and checks which restarted ones are up. Raises EngineLost as `restart`."""
        own = self.own
        if own is None:
            return
        for replica in self.router.replicas:
            if replica.state == "dead":
                self.restart(replica)
            elif replica.state == "starting" and own.restarts[replica.index]:
                why = own.look(replica.index, self.controls[replica.index], 1.0)
                if why or own.up[replica.index]:
                    self.router.set_state(replica, "dead" if why else "unsynced", why)

    def restart(self, replica: Replica) -> None:
        """Restarts a server of ours unless it has used up rollout.vllm.restarts; does nothing for a given one. Raises
        EngineLost if its process does not end."""
        if self.own and self.own.restart(replica.index):
            log.warning("vLLM server %s is restarted (%d of rollout.vllm.restarts=%d)", replica.url,
                        self.own.restarts[replica.index], self.options.restarts)
            self.memories[replica.url] = ServerMemory(self.controls[replica.index])
            self.router.set_state(replica, "starting")

    def lost(self) -> str:
        """Returns what happened to the servers, as text for a message, if none is left; else ""."""
        gone = all(r.state == "dead" for r in self.router.replicas)
        return "; ".join(f"{r.url}: {r.why}" for r in self.router.replicas) if gone else ""

    # ---- GPU memory ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Frees the GPU memory of all servers. Ends one of ours that is starting or does not sleep; `revive` restarts
        it.

        Raises:
          EngineLost: a given server does not sleep, or the process of one of ours does not end."""
        here = [r for r in self.router.replicas if r.state in ("ready", "unsynced", "starting")]
        for r in here:  # from now on it takes no request
            self.router.set_state(r, "asleep" if r.state != "starting" else "starting")
        for replica, why in zip(here, self._pool.map(self._put_to_sleep, here), strict=True):
            if why and not self.own:
                raise EngineLost(f"vLLM server {replica.url} does not sleep, and rollout.placement=colocated leaves "
                                 f"the update no room beside it: {why}")
            if why:
                log.warning("vLLM server %s is ended to make room for the update: %s", replica.url, why)
                self.processes[replica.index].kill()
                self.router.set_state(replica, "dead", why)

    def _put_to_sleep(self, replica: Replica) -> str:
        """Puts a server to sleep; returns "" or the reason why it does not sleep."""
        if replica.state == "starting":
            return "it was still being started"
        try:
            self.memories[replica.url].sleep()
        except (adapter.ServerError, adapter.Refused) as e:
            return str(e)
        return ""


def _can_share(url: str, infos: list[dict]) -> None:
    """Raises ConfigError for a server that cannot lend its memory to this trainer."""
    if not infos or not all(i.get("sleeps") for i in infos):
        raise ConfigError(f"{url} cannot sleep, which rollout.placement=colocated needs: start it with "
                          "--enable-sleep-mode and with this jaxrl in its environment, or set "
                          "rollout.placement=disaggregated")
    if any(i["machine"] != machine() for i in infos):
        raise ConfigError(f"{url} runs on another host and shares no GPU with this trainer; set "
                          "rollout.placement=disaggregated")
