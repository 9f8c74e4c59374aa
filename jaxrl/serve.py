"""Starts and watches the vLLM servers of one host, for trainers on other hosts:

    jaxrl serve --config=configs/grpo_gsm8k.py --config.rollout.servers=/shared/s ...

Takes the trainers' command line. Starts `rollout.vllm.replicas` servers, each with its share of the GPUs, with
dummy weights; the trainers sync theirs. Every server that responds is announced by a file in the folder
rollout.servers, with its URL as content; trainers read the folder at every weight sync. A server that dies, hangs
(two requests to /health without a response within `rollout.vllm.health_seconds`) or does not come up is restarted
at the same URL, up to `rollout.vllm.restarts` times. Ends on SIGTERM or Ctrl-C with status 0; with 1 if no server
is left; with 2 for an invalid config.

`jaxrl serve tinker --help` is another program: a server for training loops of the tinker SDK (jaxrl.service).

Servers require the key in $VLLM_API_KEY (or rollout.vllm.api_key) everywhere but at /health. They listen on
rollout.vllm.host: by default on loopback, for trainers on this host; for other hosts set this host's address in the
cluster's network. They are announced under $JAXRL_SERVE_HOST, else under the address they listen on, else (listening on
all) under this host's name. Touches no device.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

from jaxrl.__main__ import run
from jaxrl.config import help
from jaxrl.config.load import load_config, parse_flags
from jaxrl.errors import ConfigError
from jaxrl.launch import visible_gpus
from jaxrl.processes.addresses import bare_host, join_host_port
from jaxrl.rollout.engines import DTYPES
from jaxrl.rollout.protocol import EngineLost
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.options import LOOPBACK, server_folder

log = logging.getLogger("jaxrl")


def shares(gpus: list[str], replicas: int, each: int) -> tuple[str, ...]:
    """Returns CUDA_VISIBLE_DEVICES of each server; () without GPUs. Raises ConfigError if there are too few."""
    if gpus and len(gpus) < replicas * each:
        raise ConfigError(f"rollout.vllm.replicas={replicas} with tensor_parallel={each}: needs {replicas * each} "
                          f"GPUs, this host has {len(gpus)}; lower one of them")
    return tuple(",".join(gpus[i * each:(i + 1) * each]) for i in range(replicas)) if gpus else ()


def reached_at(host: str) -> tuple[str, str]:
    """Returns (host name in announced URLs, which is $JAXRL_SERVE_HOST if set, host name for this process) of servers
    that listen on `host`."""
    everywhere = bare_host(host) in ("0.0.0.0", "::")
    here = "127.0.0.1" if everywhere else host
    return os.environ.get("JAXRL_SERVE_HOST") or (socket.gethostname() if everywhere else here), here


class Host:
    """The vLLM servers of this host, started by the constructor; `look` watches them. Announcements that an earlier
    serve on this host left are deleted.

    Args:
      config: of the run; an empty rollout.vllm.devices is set to the servers' shares of the GPUs.
      folder: where they are announced. own: folder for logs and the model's description.

    Raises:
      ConfigError: no key is set, there are too few GPUs, or the model's config cannot be read.
    """

    def __init__(self, config, folder: Path, own: Path):
        from jaxrl.data.images.resize import rule_of
        from jaxrl.models.families import IMAGES
        from jaxrl.models.io import hf  # these import jax: only after the config could be read
        from jaxrl.rollout.vllm.adapter_folders import configured_rank
        from jaxrl.rollout.vllm.servers import OwnServers

        v = config.rollout.vllm
        key = adapter.server_key(v)
        if not key:
            raise ConfigError("VLLM_API_KEY is not set in the environment: servers need a key that trainers know")
        adapter.warn_of_visible_key()
        self.config, self.folder, self.own, self.announced = config, folder, own, set()
        v.devices = v.devices or shares(visible_gpus(os.environ), v.replicas, v.tensor_parallel)
        if LOOPBACK.fullmatch(v.host):
            log.info("servers listen on loopback: trainers of other hosts need --config.rollout.vllm.host=<this host's "
                     "address>")
        self.names = [f"{socket.gethostname()}_{i}" for i in range(v.replicas)]
        own_name = re.compile(re.escape(socket.gethostname()) + r"_\d+")
        for path in folder.glob("*"):  # announced by an earlier serve on this host, which may have had more
            if own_name.fullmatch(path.name):
                path.unlink(missing_ok=True)
        m = load_config(config.run.warm_start).model if config.run.warm_start else config.model
        hf_config = hf.load_config(m.path, m.revision, m.config.to_dict(), weights=False, images=True)
        if tower := hf_config.pop(IMAGES, None):
            files = hf.folder_of(m.path, m.revision, hf.TEXT_FILES) if m.path else None
            rule = rule_of(hf_config[hf.SOURCE]["outer"]["model_type"], files, tower=tower)
            hf_config[IMAGES] = {**tower, "mean": rule.mean, "std": rule.std}
        dtype = DTYPES.get(config.rollout.dtype) or DTYPES.get(config.train.compute_dtype, "")
        rank = configured_rank(config.lora) if config.lora.publish == "adapter" else 0
        self.servers = OwnServers(config, hf_config, dtype, own, key, lora_rank=rank)
        name, here = reached_at(v.host)
        self.urls = [f"http://{join_host_port(name, port)}" for port in self.servers.ports]
        self.controls = [adapter.Control(f"http://{join_host_port(here, port)}", key, v.health_seconds)
                         for port in self.servers.ports]
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=v.replicas)

    def look(self) -> bool:
        """Announces servers that came up and restarts those that died, hang or do not come up, at most
        rollout.vllm.restarts times each; returns False if none is left. Raises EngineLost if a process does not end."""
        processes, seconds = self.servers.processes, self.config.rollout.vllm.health_seconds
        found = self.pool.map(self.servers.look, range(len(processes)), self.controls, [seconds] * len(processes))
        for i, why in enumerate(found):
            processes[i].bound_log()
            if why and self.servers.restart(i):
                log.warning("%s %s; restarting it", self.urls[i], why)
            elif why:
                processes[i].kill()
            elif self.servers.up[i] and i not in self.announced:
                self.announced.add(i)
                announce(self.folder, self.names[i], self.urls[i])
                log.info("%s is announced in %s", self.urls[i], self.folder)
        return any(p.exit_status() is None for p in processes)

    def stop(self) -> None:
        """Ends all servers."""
        self.pool.shutdown(wait=False)
        self.servers.stop()


def announce(folder: Path, name: str, url: str) -> None:
    """Writes the file `name` with the URL into the folder, atomically; makes the folder if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}"
    temporary.write_text(url + "\n", "utf-8")
    temporary.rename(folder / name)


def main(argv: list[str] | None = None) -> int:
    """Runs `jaxrl serve` with these arguments (default sys.argv); returns its exit status: 0 after a signal or --help,
    1 if no server is left, 2 for an invalid config. First argument tinker: runs service.app.main instead."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["tinker"]:
        from jaxrl.service import app

        return app.main(argv[1:])
    if help.requested(argv) is not None:
        print((__doc__ or "").rstrip() + "\n\nIts options: jaxrl train --help=rollout.vllm")
        return 0
    logging.basicConfig(level=logging.INFO, format="jaxrl.serve: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        spec, overrides = parse_flags(argv)
        if spec is None:
            raise ConfigError("--config=FILE is missing")
        config = load_config(spec, overrides)
        folder = server_folder(config.rollout.servers)
        if folder is None:
            raise ConfigError("rollout.servers: name the folder in which servers are announced, "
                              "--config.rollout.servers=/shared/servers")
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
    sys.exit(run(main))
