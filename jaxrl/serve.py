"""vLLM servers of one host, for trainers elsewhere: python -m jaxrl.serve --config=configs/grpo_gsm8k.py --config.rollout.servers=/shared/s ...

Takes the trainers' own command line. Starts `rollout.vllm.replicas` servers, each with its share of the GPUs, with dummy weights;
the trainers give them theirs. Every server that answers is announced by a file in the folder that rollout.servers names, its URL as
content; trainers read the folder at every publish. A server that dies, hangs (twice no answer to /health within
`rollout.vllm.health_seconds`) or does not come up is started again at the same URL (`rollout.vllm.restarts` times).
Ends on SIGTERM or Ctrl-C with status 0, with 1 when no server is left, with 2 for a config that cannot work.

Servers ask for the key in $VLLM_API_KEY (or rollout.vllm.api_key), everywhere but at /health. They listen on rollout.vllm.host: by
default on loopback, for trainers of this host; for others name this host's address in the cluster's network. They are announced under
$JAXRL_SERVE_HOST, else under the address they listen on, else (listening on all) under this host's name. Touches no device itself.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

from jaxrl.config import load_config, parse_flags
from jaxrl.config_checks import LOOPBACK
from jaxrl.errors import ConfigError
from jaxrl.launch import visible_gpus
from jaxrl.models import hf
from jaxrl.rollout.protocol import EngineLost
from jaxrl.rollout.select import server_folder
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.engine import DTYPES, longest, write_model_folder
from jaxrl.rollout.vllm.process import ServerProcess, free_port
from jaxrl.rollout.vllm.publish import PROBE_PROMPT

log = logging.getLogger("jaxrl")


def shares(gpus: list[str], replicas: int, each: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each server; () without GPUs. Raises ConfigError where there are too few."""
    if gpus and len(gpus) < replicas * each:
        raise ConfigError(f"rollout.vllm.replicas={replicas} of tensor_parallel={each} want {replicas * each} GPUs, this host has {len(gpus)}")
    return tuple(",".join(gpus[i * each:(i + 1) * each]) for i in range(replicas)) if gpus else ()


def reached_at(host: str) -> tuple[str, str]:
    """(name in URLs, name for this process) of servers that listen on `host`."""
    everywhere = host in ("0.0.0.0", "::")
    here = "127.0.0.1" if everywhere else f"[{host}]" if ":" in host else host
    return os.environ.get("JAXRL_SERVE_HOST") or (socket.gethostname() if everywhere else here), here


class Host:
    """The servers of this host. `folder`: where they are announced; `own`: for logs and the model's description."""

    def __init__(self, config, folder: Path, own: Path):
        v = config.rollout.vllm
        if not adapter.key_of(v):
            raise ConfigError("VLLM_API_KEY is not set in the environment: servers need a key that trainers know")
        adapter.warn_of_visible_key()
        self.config, self.folder, self.own, self.processes = config, folder, own, {}
        self.cpu = adapter.installed(v.python).cpu
        v.devices = v.devices or shares(visible_gpus(os.environ), v.replicas, v.tensor_parallel)
        self.ports = [v.port + i if v.port else free_port(v.host) for i in range(v.replicas)]
        self.restarts, self.announced = dict.fromkeys(range(v.replicas), 0), set()
        name, here = reached_at(v.host)
        if LOOPBACK.fullmatch(v.host):
            log.info("servers listen on loopback: trainers of other hosts need --config.rollout.vllm.host=<this host's address>")
        self.urls = [f"http://{name}:{port}" for port in self.ports]
        self.names = [f"{socket.gethostname()}_{i}" for i in range(v.replicas)]
        for name in self.names:  # what an earlier serve of this host announced
            (folder / name).unlink(missing_ok=True)
        self.controls = [adapter.Control(f"http://{here}:{port}", adapter.key_of(v), v.health_seconds) for port in self.ports]
        self.began, self.silent, self.up = {}, {}, {}
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=v.replicas)
        m = load_config(config.run.warm_start).model if config.run.warm_start else config.model
        hf_config = hf.load_config(m.path, m.revision, m.config.to_dict(), weights=False)
        self.dtype = DTYPES.get(config.rollout.dtype) or DTYPES.get(config.train.compute_dtype) or ("float32" if self.cpu else "bfloat16")
        write_model_folder(own / "model", hf_config)
        for i in range(v.replicas):
            self.start(i)

    def start(self, i: int) -> None:
        v = self.config.rollout.vllm
        length = v.max_model_len or max(longest(self.config), PROBE_PROMPT + 1)
        command, env = adapter.launch(self.config, str(self.own / "model"), self.dtype, length, self.ports[i], self.cpu,
                                      adapter.key_of(v))
        if v.devices:
            env["CUDA_VISIBLE_DEVICES"] = v.devices[i]
        self.processes[i] = ServerProcess(command, env, self.own / f"server_{i}.log")
        self.began[i], self.silent[i], self.up[i] = time.monotonic(), 0, False

    def look(self) -> bool:
        """Announces servers that have come up, starts those that died or hang again; False when none is left."""
        for i, why in zip(self.processes, self.pool.map(self._examined, list(self.processes)), strict=True):
            process = self.processes[i]
            process.bound_log()
            if why and self.restarts[i] < self.config.rollout.vllm.restarts:
                self.restarts[i] += 1
                log.warning("%s %s; it is started again", self.urls[i], why)
                process.kill()
                self.start(i)
            elif why:
                process.kill()
            elif self.up[i] and i not in self.announced:
                self.announced.add(i)
                announce(self.folder, self.names[i], self.urls[i])
                log.info("%s is announced in %s", self.urls[i], self.folder)
        return any(p.exit_status() is None for p in self.processes.values())

    def _examined(self, i: int) -> str:
        """Empty while a server is well or is being started, else what is wrong."""
        process, v = self.processes[i], self.config.rollout.vllm
        if process.exit_status() is not None:
            return f"{process.ended()}: {process.complaint()}"
        try:
            self.controls[i].healthy(v.health_seconds)
            self.up[i], self.silent[i] = True, 0
            return ""
        except (adapter.ServerError, adapter.Refused) as e:
            why = str(e)
        if not self.up[i]:
            late = time.monotonic() - self.began[i] > v.setup_seconds
            return f"is not up within rollout.vllm.setup_seconds={v.setup_seconds:g}: {why}" if late else ""
        self.silent[i] += 1
        return f"hangs: {why}" if self.silent[i] > 1 else ""

    def stop(self) -> None:
        self.pool.shutdown(wait=False)
        for process in self.processes.values():
            process.stop()


def announce(folder: Path, name: str, url: str) -> None:
    """A file of its own for a URL; whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}"
    temporary.write_text(url + "\n", "utf-8")
    temporary.rename(folder / name)


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="jaxrl.serve: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        spec, overrides = parse_flags(sys.argv[1:] if argv is None else argv)
        if spec is None:
            raise ConfigError("--config=FILE is missing")
        config = load_config(spec, overrides)
        folder = server_folder(config.rollout.servers)
        if folder is None:
            raise ConfigError("rollout.servers: name the folder in which servers are announced, --config.rollout.servers=/shared/servers")
        host = Host(config, folder, Path(config.run.dir) / "vllm" / socket.gethostname())
    except ConfigError as e:
        log.error("%s", e)
        return 2
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stopping.append(number))
    try:
        while not stopping:
            if not host.look():
                log.error("no server is left; their logs are in %s", host.own)
                return 1
            time.sleep(1.0)
        return 0
    except EngineLost as e:
        log.error("%s", e)
        return 1
    finally:
        host.stop()


if __name__ == "__main__":
    sys.exit(main())
