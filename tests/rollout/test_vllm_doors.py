"""Who may do what with a real vLLM server that jaxrl started: without a key, with a wrong one, with the right one, as another user."""

import contextlib
import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.rollout_helpers import log_softmax, params, requests, teacher_logits
from helpers.vllm_cases import own_servers

from jaxrl.errors import ConfigError
from jaxrl.rollout import generate
from jaxrl.rollout.vllm import adapter
from jaxrl.rollout.vllm.process import free_port

pytestmark = pytest.mark.vllm
NOBODY = 65534
HERE = Path(__file__).parents[1]
CONTROL = ("/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "/sleep",
           "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/inference/v1/generate", "/v1/models", "/metrics", "/version", "/ping")


@pytest.fixture(scope="module")
def engine():
    """One server, with the key of this run; a middleware of the user's stands behind the guard."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with own_servers(engine_kwargs={"middleware": ["helpers.vllm_routes.Routes"]}, env={"PYTHONPATH": paths}, transport="shm") as made:
        yield made


@pytest.fixture
def url(engine):
    return engine.router.replicas[0].url


def processes(engine):
    """Ids of the server's processes: its session."""
    found = []
    for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        with contextlib.suppress(ProcessLookupError):
            found += [pid] if os.getsid(pid) == engine.fleet.processes[0].pid else []
    return found


def test_every_endpoint_asks_for_the_key(engine, url):
    """All routes that the application has at run time, with all their methods."""
    right = {"Authorization": f"Bearer {engine.key}"}
    routes = httpx.get(f"{url}/routes", headers=right).json()
    paths = {path for path, _ in routes}
    assert len(paths) > 30 and paths >= set(CONTROL) - {"/metrics"}
    wrong = [{}, *({"Authorization": text} for text in (
        "Bearer wrong", "Bearer", f"Bearer {engine.key[:-1]}", engine.key, f"Basic {engine.key}"))]
    with httpx.Client(base_url=url) as http:
        for path, methods in [*routes, ["/metrics", ["GET"]], ["/", ["GET"]], ["/no/such/path", ["GET"]]]:
            path = re.sub(r"{[^}]*}", "x", path)
            for method in {*methods, "OPTIONS"}:
                if path == "/health":
                    assert method != "GET" or http.request(method, path).status_code == 200
                    continue
                for headers in wrong:
                    answer = http.request(method, path, headers=headers)
                    assert answer.status_code == 401 and (method == "HEAD" or answer.json() == {"error": "Unauthorized"}), (method, path)
            if path != "/health":
                assert http.request("OPTIONS", path, headers=right).status_code != 401, path
        for odd in ("/health/", "//health", "/health/../version", "/%2e/version", "/HEALTH"):
            assert http.get(odd).status_code == 401, odd


def test_the_key_is_this_runs_and_nowhere_to_be_read(engine):
    """Not on a command line, not in what the run writes (the servers' logs, its config), not another run's, which has other ports too."""
    pids = processes(engine)
    assert len(pids) > 1 and len(engine.key) > 40
    port = free_port("127.0.0.1")
    with own_servers(publish=False, port=port, devices=("",)) as other:  # on the port and devices that it was given
        assert other.router.replicas[0].url.endswith(f":{port}") and other.fleet.own.ports != engine.fleet.own.ports
        assert len(other.key) > 40 and other.key != engine.key
    for pid in pids:
        assert engine.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    files = [p for p in Path(engine.config.run.dir).rglob("*") if p.is_file()]
    assert any(p.name == "server_0.log" for p in files)
    for path in files:
        assert engine.key.encode() not in path.read_bytes(), path


def test_servers_listen_on_loopback_alone(engine):
    pids, sockets = set(map(str, processes(engine))), set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)) if link.is_symlink() else None
            sockets |= {found[1]} if found else set()
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and row[9] in sockets}
    assert listening and {address.partition(":")[0] for address in listening} == {"0100007F"}, listening


def test_another_user_gets_in_nowhere(engine, url):
    """Weights on their way and the processes' environment, where the key is, are the user's alone."""
    folder = engine.publisher.transport.folder
    chunk, environment = next(p for p in folder.iterdir() if p.name.isdigit()), [f"/proc/{pid}/environ" for pid in processes(engine)]
    assert engine.key.encode() in Path(environment[0]).read_bytes() and chunk.stat().st_size > 100_000
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and {stat.S_IMODE(os.stat(p).st_mode) for p in environment} == {0o400}
    if os.getuid() == 0:  # else the modes have to do: another user cannot be had
        for path in (str(chunk), str(folder / "lock"), *environment):
            tried = subprocess.run(["cat", path], capture_output=True, user=NOBODY, group=NOBODY, extra_groups=[])
            assert tried.returncode and not tried.stdout and b"ermission denied" in tried.stderr, (path, tried)
        tried = subprocess.run(["ls", str(folder)], capture_output=True, user=NOBODY, group=NOBODY, extra_groups=[])
        assert tried.returncode and not tried.stdout
        lines = subprocess.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], capture_output=True, user=NOBODY, group=NOBODY, extra_groups=[])
        assert b"jaxrl.vllm_plugin.Guard" in lines.stdout and engine.key.encode() not in lines.stdout


def test_weights_are_taken_from_the_announced_trainer_only(engine, url):
    """With the key, too, no file and no other host is read. The next publish mends what such a try leaves."""
    control, seen = engine.fleet.controls[0], []
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        announced = engine.publisher.transport.announcement()
        for where in ({"folder": "../etc"}, {"folder": "etc"}, {"address": f"127.0.0.1:{port}/latest"}, {"address": "file:///etc/passwd"}):
            with pytest.raises((adapter.ServerError, adapter.Refused)):
                control.init_transfer(["a"], where, {})
        control.init_transfer(["a"], announced, {})
        control.start_update()
        for source in ("file:/etc/passwd", f"http://127.0.0.1:{port}/1", "http:1", "shm:/etc/passwd", f"shm:../{announced['folder']}/0"):
            with pytest.raises((adapter.ServerError, adapter.Refused)):
                control.update({"source": source, "size": 16, "tensors": [["a", "float32", [4], 0, 16, ""]]})
        foreign.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            seen.append(foreign.accept())
    assert not seen
    engine.publish(params(1), 7)
    asked = requests(4, seed=3)
    for a, r in zip(asked, generate(engine, asked, 120.0), strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens, seed=1))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)


def test_a_given_server_with_the_guard_wants_the_runs_key(engine, url, monkeypatch):
    """And without its key the run stops before it begins, with the remedy."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for key in ("", "wrong"):
        with pytest.raises(ConfigError, match="401: .*Unauthorized.*the key of this run"):
            with own_servers(rollout_servers=(url,), api_key=key):
                pass
    monkeypatch.setenv("VLLM_API_KEY", engine.key)
    with own_servers(rollout_servers=(url,)) as second:
        assert second.key == engine.key and second.publisher.last_probe < 1e-4
