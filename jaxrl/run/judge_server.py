"""vLLM servers of the run's own behind judges: stock servers with the weights of their folder, on devices and ports of
their own. Nothing is published to them; they end with the run."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import time
from pathlib import Path

import httpx

from jaxrl.errors import ConfigError
from jaxrl.rewards.services import Server, judges_to_serve
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.process import ServerProcess, free_port

log = logging.getLogger("jaxrl")
HOST, LOOK_SECONDS = "127.0.0.1", 1.0


def launch(o: dict, options, port: int, cpu: bool, key: str) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of a judge's server. o: options of the judge. options: rollout.vllm, of which interpreter
    and level of the log count. Its endpoints under /v1 ask for the key, which goes by the environment."""
    flags = {"model": o["model"], "host": HOST, "port": port, "seed": 0, "uvicorn-log-level": "warning",
             "generation-config": "vllm"}
    if cpu:  # as for the policy's servers
        flags |= {"enforce-eager": True, "block-size": 32}
    flags |= {name.replace("_", "-"): value for name, value in o["server_args"].items()}
    command = [options.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for name, value in flags.items() for word in adapter.option_words(name, value)]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": options.log_level.upper(), adapter.KEY: key}
    if cpu:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    return command, env | ({"CUDA_VISIBLE_DEVICES": o["devices"]} if o["devices"] else {})


class JudgeServers:
    """One server for each judge among these functions that has a model and no servers. They start at once; one that
    ends is started again, rollout.vllm.restarts times, and what is asked meanwhile has no score.

    Args: config; functions: of the run's rewards; count: processes of the run.

    Raises ConfigError: several processes, no vLLM.
    """

    def __init__(self, config, functions, count: int = 1):
        wanted = judges_to_serve(config, functions)
        self._options, self._key = config.rollout.vllm, secrets.token_urlsafe(32)
        self._folder = Path(config.run.dir or ".") / "vllm"
        self._launched: dict[str, tuple] = {}
        self._processes: dict[str, ServerProcess] = {}
        self.found: dict[str, Server] = {}
        self._closing, self._watcher = threading.Event(), None
        if not wanted:
            return
        name, o = next(iter(wanted.items()))
        if count > 1:
            raise ConfigError(f"reward {name!r}: model={o['model']!r} without servers, in {count} processes: each "
                              "would start a server; start it with vllm serve and name it in servers")
        version, cpu = adapter.installed(self._options.python)
        if notice := adapter.check_version(version, f"the server of judge {name!r}"):
            log.warning(notice)
        for name, o in wanted.items():
            if not cpu and not o["devices"]:
                log.warning("judge %r: its server takes the devices that jaxrl takes, too; name others in devices, or "
                            "give it a part of their memory by server_args={'gpu_memory_utilization': ...}", name)
            port = free_port(HOST)
            self._launched[name] = launch(o, self._options, port, cpu, self._key)
            self.found[name] = Server(f"http://{HOST}:{port}/v1", self._key)
            self._start(name)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="judge-servers")
        self._watcher.start()

    def _start(self, name: str) -> None:
        command, env = self._launched[name]
        self._processes[name] = ServerProcess(command, env, self._folder / f"judge_{name}.log")

    def wait(self) -> None:
        """Returns when all answer. Raises ConfigError for one that ends or is not up in rollout.vllm.setup_seconds."""
        end, said = time.monotonic() + self._options.setup_seconds, False
        for name, server in self.found.items():
            while not _answers(server):
                process = self._processes[name]
                if process.exit_status() is not None or time.monotonic() > end:
                    late = f"not up within rollout.vllm.setup_seconds={self._options.setup_seconds:g}"
                    how = late if process.exit_status() is None else process.ended()
                    raise ConfigError(f"the server of judge {name!r}: {how}: {process.last_errors()} (whole log: "
                                      f"{process.log_file})")
                said = said or log.info("waiting for the server of judge %r", name) or True
                time.sleep(0.25)

    def _watch(self) -> None:
        left = dict.fromkeys(self.found, self._options.restarts)
        up = set()
        while not self._closing.wait(LOOK_SECONDS):
            for name, server in self.found.items():
                process = self._processes[name]
                if process.exit_status() is None:
                    process.bound_log()
                    up |= {name} if name not in up and _answers(server) else set()
                elif name in up and left[name]:  # (one that never came up is `wait`'s)
                    left[name] -= 1
                    log.warning("the server of judge %r %s: %s; it is started again", name, process.ended(),
                                process.last_errors())
                    self._start(name)

    def close(self) -> None:
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        for process in self._processes.values():
            process.stop()


def _answers(server: Server) -> bool:
    try:
        return httpx.get(server.url.removesuffix("/v1") + "/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
