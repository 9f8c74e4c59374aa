"""python -m jaxrl.serve, and rollout.servers as a folder: servers are announced, found, and join with the current weights."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.rollout_helpers import HF, params, vllm_server
from helpers.vllm_cases import many, on_url, wait_until_ready
from test_vllm_parts import interpreter, runnable  # noqa: F401  (a fixture)

from jaxrl import serve
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check
from jaxrl.rollout import engine_name, generate
from jaxrl.rollout.vllm import adapter, servers, transport
from jaxrl.rollout.vllm.options import read_urls, server_folder

ROOT = Path(__file__).parents[2]


def test_a_folder_names_servers(tmp_path, monkeypatch):
    assert server_folder(("http://127.0.0.1:1",)) is None and server_folder(("/a", "/b")) is None and server_folder(("./s",)) == Path("s")
    assert read_urls(tmp_path / "none") == []
    serve.announce(tmp_path / "s", "b_0", "http://b:2")
    serve.announce(tmp_path / "s", "a_0", "http://a:1")
    (tmp_path / "s" / ".c_3").write_text("http://c:3")
    (tmp_path / "s" / "d").write_text("http://b:2/ http://a:1\nhttp://b:2")  # a server that is announced again stays one
    assert read_urls(tmp_path / "s") == ["http://a:1", "http://b:2"]
    c = runnable(rollout__servers=(str(tmp_path / "s"),))
    check(c)
    assert engine_name(c) == "vllm"
    far = runnable(rollout__servers=("http://gpu7:8000",))
    with pytest.raises(ConfigError, match="set rollout.vllm.api_key"):
        check(far)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    check(far)
    assert adapter.server_key(far.rollout.vllm) == "k" and adapter.server_key(runnable(rollout__vllm__api_key="mine").rollout.vllm) == "mine"


def test_gpus_are_dealt_out():
    assert serve.shares(["0", "1", "2", "3"], 2, 2) == ("0,1", "2,3") and serve.shares([], 2, 2) == ()
    with pytest.raises(ConfigError, match="replicas=3 with tensor_parallel=2: needs 6 GPUs, this host has 4"):
        serve.shares(["0", "1", "2", "3"], 3, 2)


def test_the_address_of_this_host_is_the_one_on_the_way():
    assert transport.address_towards("http://127.0.0.1:80") == "127.0.0.1"


@pytest.fixture
def no_process(monkeypatch):
    """Servers are commands that nothing runs."""
    monkeypatch.setenv("VLLM_API_KEY", "k")
    monkeypatch.setattr(servers, "ServerProcess", lambda command, env, log_file: command)
    monkeypatch.setattr(servers, "free_port", lambda host: 8123)  # a machine may lack IPv6
    monkeypatch.setattr(adapter, "installed", lambda python: adapter.VllmInstallation("0.32.0", cpu=False))


def test_announcements_of_an_earlier_serve_of_this_host_are_withdrawn(tmp_path, no_process):
    """Of one with more servers, too; not those of other hosts."""
    own = socket.gethostname()
    for name in (f"{own}_0", f"{own}_7", f"{own}_gpu_0", f"{own}2_0", f"{own}"):
        serve.announce(tmp_path / "servers", name, "http://a:1")
    serve.Host(runnable(), tmp_path / "servers", tmp_path / "own").pool.shutdown()
    assert {path.name for path in (tmp_path / "servers").iterdir()} == {f"{own}_gpu_0", f"{own}2_0", own}


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_has_brackets_in_urls_alone(tmp_path, monkeypatch, no_process, host):
    monkeypatch.setenv("JAXRL_SERVE_HOST", "fd00::7")
    made = serve.Host(runnable(rollout__vllm__host=host), tmp_path / "servers", tmp_path / "own")
    port, command = made.servers.ports[0], made.servers.processes[0]
    assert made.servers.urls == [made.controls[0].url] == [f"http://[::1]:{port}"] and made.urls == [f"http://[fd00::7]:{port}"]
    assert command[command.index("--host") + 1] == "::1"
    check(runnable(rollout__servers=tuple(made.urls)))
    made.pool.shutdown()


SERVER = """
import http.server, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

flag = lambda name: sys.argv[sys.argv.index(name) + 1]
http.server.ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Healthy).serve_forever()
"""


@pytest.mark.slow
def test_a_hung_server_is_started_again_and_then_given_up(tmp_path, monkeypatch, caplog, interpreter):  # noqa: F811
    """A process that answers /health as vLLM does, stopped by SIGSTOP. By default it listens on loopback, and is announced so."""
    caplog.set_level("INFO")
    monkeypatch.setenv("VLLM_API_KEY", "k")
    (tmp_path / "server.py").write_text(SERVER)
    python = Path(interpreter("vllm==0.33.0+cpu"))
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exec "{sys.executable}" "{tmp_path}/server.py" "$@"\n{python.read_text().split(chr(10), 1)[1]}')
    c = runnable(rollout__vllm__python=str(python), rollout__vllm__health_seconds=5.0, rollout__vllm__restarts=1)
    monkeypatch.setattr(sys, "argv", ["serve", "--config.rollout.vllm.api_key=k"])
    host = serve.Host(c, tmp_path / "servers", tmp_path / "own")
    try:
        def until(done, goes_on=True):
            end = time.monotonic() + 300
            while not done():
                assert host.look() is goes_on or done()
                assert time.monotonic() < end
                time.sleep(0.05)

        until(lambda: host.announced)
        assert read_urls(tmp_path / "servers") == [f"http://127.0.0.1:{host.servers.ports[0]}"]
        assert "servers listen on loopback" in caplog.text
        assert "rollout.vllm.api_key is on the command line, where every user of this machine reads it" in caplog.text
        first = host.servers.processes[0]
        os.kill(first.pid, signal.SIGSTOP)
        until(lambda: host.servers.processes[0] is not first and host.servers.up[0])
        assert first.exit_status() == -signal.SIGKILL and "hangs: " in caplog.text and "restarting it" in caplog.text
        os.kill(host.servers.processes[0].pid, signal.SIGSTOP)
        until(lambda: host.servers.processes[0].exit_status() is not None)
        assert not host.look()  # none is left: jaxrl.serve ends with 1
    finally:
        host.stop()


def test_what_serve_cannot_do_ends_with_2(caplog):
    assert serve.main(["--config=grpo"]) == 2 and "name the folder in which servers are announced" in caplog.text
    assert serve.main([]) == 2 and serve.main(["--config=grpo", "--config.rollout.servers=/tmp/s"]) == 2
    assert "servers need a key that trainers know" in caplog.text


def test_the_launch_files_start_trainers_and_servers():
    """The JobSet gives both the same folder and ends with the trainers; the Slurm script is a script."""
    jobs = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())["spec"]
    assert jobs["successPolicy"]["targetReplicatedJobs"] == ["train"]
    train, vllm = (j["template"]["spec"]["template"]["spec"]["containers"][0] for j in jobs["replicatedJobs"])
    folder = [a for a in train["args"] if a.startswith("--config.rollout.servers=")]
    assert folder and folder[0] in vllm["args"] and vllm["command"][-1] == "jaxrl.serve"
    assert "--config.rollout.vllm.host=$(JAXRL_SERVE_HOST)" in vllm["args"]  # the pod's address alone
    subprocess.run(["bash", "-n", str(ROOT / "launch/slurm.sbatch")], check=True)


CONFIG = """
from jaxrl.config.load import default_config

def get_config(arg=None):
    c = default_config()
    c.model.init, c.train.compute_dtype = "random", "fp32"
    c.model.config.update({hf})
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = 20, 24
    return c
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_that_is_announced_later_joins_with_the_current_weights(tmp_path, monkeypatch):
    """Training on one announced server; `jaxrl.serve` brings another: after the next publish it answers, its probe agrees. Killed, it
    is started again by jaxrl.serve and joins anew; so it is when it hangs. SIGTERM ends serve and its servers."""
    monkeypatch.setenv("VLLM_API_KEY", "k")
    folder, file = tmp_path / "servers", tmp_path / "conf.py"
    file.write_text(CONFIG.format(hf=HF))
    serve.announce(folder, "first", vllm_server())
    flags = [f"--config={file}", f"--config.run.dir={tmp_path}/run", f"--config.rollout.servers={folder}",
             "--config.rollout.vllm.health_seconds=5"]
    host = subprocess.Popen([sys.executable, "-m", "jaxrl.serve", *flags], env={**os.environ, "JAXRL_SERVE_HOST": "127.0.0.1"})
    try:
        with on_url(str(folder), health_seconds=5.0, max_requests=4) as engine:
            assert len(engine.health().servers) == 1 and engine.publisher.transport.name == "network"
            end = time.monotonic() + 200
            while len(read_urls(folder)) < 2:
                assert time.monotonic() < end and host.poll() is None
                time.sleep(0.5)
            engine.publish(params(), 1)
            wait_until_ready(engine, 2)
            assert engine.publisher.last_probe < 1e-4 and engine.publisher.verified == {0, 1}
            assert all(r.finish != "abort" for r in generate(engine, many(40), 120.0))
            second = engine.router.replicas[1]
            for blow in (signal.SIGKILL, signal.SIGSTOP):
                os.killpg(os.getpgid(engine.fleet.controls[1].workers()[0]["pid"]), blow)
                end = time.monotonic() + 60
                while second.state != "dead":
                    assert time.monotonic() < end
                    engine.poll(0.0)
                    time.sleep(0.2)
                wait_until_ready(engine, 2, 200.0)
        host.terminate()
        assert host.wait(60) == 0
    finally:
        host.kill()
