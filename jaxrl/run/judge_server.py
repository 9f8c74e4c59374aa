"""Starts and watches vLLM servers for judges (reward.judge*) that name a model but no servers.

They are stock servers with the weights of their model folder, on their own devices and ports. They get no weight syncs
and end with the run. run.setup starts them; rewards.judge sends the requests.
"""

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


def server_command(o: dict, options, port: int, cpu: bool, key: str) -> tuple[list[str], dict[str, str]]:
    """Returns (words of the command, environment variables to add) that start a judge's server.

    Args:
      o: options of the judge. options: rollout.vllm, whose `python` and `log_level` are used. port: to listen on.
      cpu: whether the installed vLLM runs on CPUs. key: required by the endpoints under /v1, passed by environment."""
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
    """One vLLM server for each judge that has a model and no servers. The constructor starts them and a thread that
    watches them; `wait` returns once they respond, and `close` ends all.

    A server that has replied once and ends is restarted, up to rollout.vllm.restarts times; requests meanwhile get no
    score. A server that ends after its last restart is logged as an error and stays down.

    Args:
      config: of the run. functions: names of the run's reward functions. count: processes of the run.

    Attributes:
      servers: name of a judge -> its Server (address and key).

    Raises:
      ConfigError: a judge needs a server, and the run has several processes, or vLLM is not installed or too old.
      OSError: a server's process cannot be created; those that run are stopped first."""

    def __init__(self, config, functions, count: int = 1):
        wanted = judges_to_serve(config, functions)
        self._options, self._key = config.rollout.vllm, secrets.token_urlsafe(32)
        self._folder = Path(config.run.dir or ".") / "vllm"
        self._launched: dict[str, tuple] = {}
        self._processes: dict[str, ServerProcess] = {}
        self.servers: dict[str, Server] = {}
        self._closing, self._watcher = threading.Event(), None
        if not wanted:
            return
        name, o = next(iter(wanted.items()))
        if count > 1:
            raise ConfigError(f"reward {name!r}: model={o['model']!r} without servers, in {count} processes: each "
                              "would start a server; start it with vllm serve and name it in servers")
        where = "reward.judge" if name == "judge" else f"reward.judges.{name}"
        version, cpu = adapter.installed(self._options.python, f"{where}.model={o['model']} without servers",
                                         f"name a server that runs in {where}.servers, or take {name} out of "
                                         "reward.functions and eval.rewards")
        if notice := adapter.check_version(version, f"the server of judge {name!r}"):
            log.warning(notice)
        try:
            for name, o in wanted.items():
                if not cpu and not o["devices"]:
                    log.warning("judge %r: its server uses the same devices as jaxrl; set other `devices`, or limit its"
                                " memory with server_args={'gpu_memory_utilization': ...}", name)
                port = free_port(HOST)
                self._launched[name] = server_command(o, self._options, port, cpu, self._key)
                self.servers[name] = Server(f"http://{HOST}:{port}/v1", self._key)
                self._start(name)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="judge-servers")
        self._watcher.start()

    def _start(self, name: str) -> None:
        command, env = self._launched[name]
        self._processes[name] = ServerProcess(command, env, self._folder / f"judge_{name}.log")

    def wait(self) -> None:
        """Waits until all servers respond.

        Raises ConfigError if one ends or does not respond within rollout.vllm.setup_seconds.
        """
        end, logged = time.monotonic() + self._options.setup_seconds, False
        for name, server in self.servers.items():
            while not _answers(server):
                process = self._processes[name]
                if process.exit_status() is not None or time.monotonic() > end:
                    late = f"not up within rollout.vllm.setup_seconds={self._options.setup_seconds:g}"
                    how = late if process.exit_status() is None else process.ended()
                    raise ConfigError(f"the server of judge {name!r}: {how}: {process.last_errors()} (whole log: "
                                      f"{process.log_file})")
                logged = logged or log.info("waiting for the server of judge %r", name) or True
                time.sleep(0.25)

    def _watch(self) -> None:
        left: dict[str, int] = {name: self._options.restarts for name in self.servers}
        up = set()
        while not self._closing.wait(LOOK_SECONDS):
            for name, server in self.servers.items():
                process = self._processes[name]
                if process.exit_status() is None:
                    process.bound_log()
                    up |= {name} if name not in up and _answers(server) else set()
                elif name in up and left[name]:  # `wait` handles a server that never came up
                    left[name] -= 1
                    log.warning("the server of judge %r %s: %s; restarting it", name, process.ended(),
                                process.last_errors())
                    self._start(name)
                elif name in up:
                    up.discard(name)
                    log.error("the server of judge %r %s: %s; rollout.vllm.restarts=%d is used up: it stays down, and "
                              "the judge gives no scores; stop the run, fix the server (whole log: %s) and rerun the "
                              "same command to resume", name, process.ended(), process.last_errors(),
                              self._options.restarts, process.log_file)

    def close(self) -> None:
        """Stops all servers and the thread that watches them."""
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
