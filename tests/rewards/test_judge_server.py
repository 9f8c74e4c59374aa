"""Servers of judges that a run starts: real processes, a stand-in for vLLM's program."""

import logging
import sys
import time

import pytest
from helpers import tiny_job
from helpers.rollout_helpers import HF

from jaxrl.rollout.vllm.servers import OwnServers
from jaxrl.run import judge_server
from jaxrl.run.judge_server import JudgeServers

REPLIES_ONCE = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    log_message = lambda *_: None
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy)
for _ in range(int(sys.argv[2])):
    server.handle_request()
sys.exit("OSError: out of memory")
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of two judges without servers, on a machine where vLLM seems to be installed."""
    c = tiny_job.get_config()
    c.run.dir, c.reward.functions, c.rollout.vllm.restarts = str(tmp_path), ("judge", "other"), 0
    c.reward.judge.update({"model": "a"})
    c.reward.judges = {"other": {"model": "b"}}
    monkeypatch.setattr(judge_server.adapter, "installed", lambda *_: ("0.33.0", True))
    return c


def test_a_server_whose_restarts_are_used_up_is_an_error_in_the_log(config, monkeypatch, caplog):
    """Once, with its last words; the server that still runs is not mentioned."""
    monkeypatch.setattr(judge_server, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(judge_server, "server_command", lambda o, options, port, cpu, key: (
        [sys.executable, "-c", REPLIES_ONCE, str(port), "2" if o["model"] == "a" else "999"], {}))
    with caplog.at_level(logging.ERROR, "jaxrl"):
        servers = JudgeServers(config, config.reward.functions)
        try:
            servers.wait()
            end = time.monotonic() + 60
            while not caplog.records and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.2)
        finally:
            servers.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the server of judge 'judge' exited with status 1: OSError: out of memory; rollout.vllm.restarts=0 is used up" in said


@pytest.mark.parametrize("whose", ["judges", "policy"])
def test_servers_that_run_are_stopped_if_a_later_one_cannot_be_started(config, monkeypatch, whose, tmp_path):
    started, room = [], judge_server if whose == "judges" else sys.modules[OwnServers.__module__]
    process = room.ServerProcess

    def start(command, env, log_file):
        if started:
            raise OSError("no more processes")
        started.append(process([sys.executable, "-c", "import time; time.sleep(600)"], {}, log_file))
        return started[0]

    monkeypatch.setattr(room, "ServerProcess", start)
    with pytest.raises(OSError, match="no more processes"):
        if whose == "judges":
            JudgeServers(config, config.reward.functions)
        else:
            config.rollout.vllm.replicas = 2
            OwnServers(config, HF, "", tmp_path / "own", "key")
    assert started[0].exit_status() is not None
