"""rollout.placement with vLLM: the state machine of a server's memory, against a small HTTP server that answers as vLLM's documentation
says and against the real one, whose CPU build goes through the same states and frees nothing."""

import dataclasses
import http.server
import json
import os
import signal
import threading
import time
import urllib.parse
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.rollout_helpers import HF, config, log_softmax, model, params, requests, teacher_logits
from helpers.vllm_cases import Said, on_url, own_servers, wait_until_ready

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.rollout import EngineContext, EngineLost, generate
from jaxrl.rollout.engines import shared_gpus
from jaxrl.rollout.vllm import adapter, publish, transport
from jaxrl.rollout.vllm import router as router_module
from jaxrl.rollout.vllm.engine import VllmEngine
from jaxrl.rollout.vllm.options import memory_fraction
from jaxrl.rollout.vllm.servers import OwnServers
from jaxrl.rollout.vllm.sleeping import ServerMemory
from jaxrl.run.setup import share_gpus
from jaxrl.vllm_plugin import BACKEND


class Documented(http.server.BaseHTTPRequestHandler):
    """/sleep, /wake_up and /is_sleeping as docs/features/sleep_mode.md and serve/dev/sleep of vLLM 0.32 have them: level 2 drops what
    the tags hold, a partial wake leaves the engine asleep, a wake of all schedules again."""

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.server.calls.append(self.path)
        self.answer(200, {"is_sleeping": bool(self.server.asleep)})

    def do_POST(self):
        server, url = self.server, urllib.parse.urlparse(self.path)
        query = urllib.parse.parse_qs(url.query)
        server.calls.append(self.path)
        if server.failures and server.failures.pop(0):
            return self.answer(500, {"error": {"message": "CUDA out of memory"}})
        if url.path == "/sleep":
            server.asleep, server.weights = {"weights", "kv_cache"}, server.weights if query["level"] == ["1"] else None
            return self.answer(200, {"status": "sleeping", "level": int(query["level"][0])})
        server.asleep -= set(query.get("tags", ("weights", "kv_cache"))) if not server.deaf else set()
        self.answer(200, {"status": "sleeping" if server.asleep else "awake", "tags": query.get("tags")})

    def log_message(self, *args):
        pass


@pytest.fixture
def documented():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Documented)
    server.asleep, server.weights, server.calls, server.failures, server.deaf = set(), "old", [], [], False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.control = adapter.Control(f"http://127.0.0.1:{server.server_port}", "", 5.0)
    yield server
    server.control.close()
    server.shutdown()
    server.server_close()


def test_one_step_in_order(documented):
    memory = ServerMemory(documented.control)
    seen = []
    for move in (memory.sleep, memory.open, memory.close):
        move()
        seen.append((memory.state, sorted(documented.asleep), documented.weights))
        if memory.state == "filling":
            documented.weights = "new"
    assert seen == [("asleep", ["kv_cache", "weights"], None), ("filling", ["kv_cache"], None), ("awake", [], "new")]
    assert documented.calls == ["/sleep?level=2&mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


def test_an_awake_server_is_left_alone(documented):
    memory = ServerMemory(documented.control)
    memory.open()
    memory.close()
    assert memory.state == "awake" and not documented.calls


LEGAL = {"sleep": ["awake"], "close": ["filling", "awake"]}


@pytest.mark.parametrize("state", ["awake", "asleep", "filling", "lost"])
def test_what_is_not_legal_reaches_no_server(documented, state):
    for name, legal in LEGAL.items():
        memory = ServerMemory(documented.control)
        memory.state = state
        if state in legal:
            getattr(memory, name)()
            continue
        before = len(documented.calls)
        with pytest.raises(RuntimeError, match=f"its memory is {state}; this needs {' or '.join(legal)}"):
            getattr(memory, name)()
        assert memory.state == state and len(documented.calls) == before


@pytest.mark.parametrize("at", range(3))
def test_after_a_failure_on_the_way_all_is_woken_and_filled_anew(documented, at):
    """The sleep, the wake of the weights or that of the cache fails: weights that may be gone are never taken for good."""
    memory, documented.failures = ServerMemory(documented.control), [i == at for i in range(3)]
    with pytest.raises(adapter.ServerError, match="CUDA out of memory"):
        for move in (memory.sleep, memory.open, memory.close):
            move()
    assert memory.state == "lost"
    memory.open()
    assert memory.state == "filling" and not documented.asleep
    memory.close()
    assert memory.state == "awake"


def test_a_server_that_does_not_wake_is_not_awake(documented):
    memory, documented.deaf = ServerMemory(documented.control), True
    memory.sleep()
    memory.open()
    with pytest.raises(adapter.ServerError, match="says it is 'sleeping' after it was woken"):
        memory.close()
    assert memory.state == "lost"


def test_a_server_that_an_earlier_trainer_left_asleep_is_woken_first(documented):
    ServerMemory(documented.control).sleep()
    memory = ServerMemory(documented.control)
    memory.meet()
    assert memory.state == "lost"
    memory.open()
    assert memory.state == "filling" and not documented.asleep
    ServerMemory(documented.control).meet()


# ---- shares of a GPU ------------------------------------------------------------------------------------------------------------


def test_memory_shares_follow_the_placement():
    from test_vllm_parts import flag, runnable

    def shares(engine="vllm", environ=(), **options):
        c, env = runnable(rollout__engine=engine, **{f"rollout__{k}": v for k, v in options.items()}), dict(environ)
        share_gpus(shared_gpus(c), memory_fraction(c), env)
        return memory_fraction(c), env

    half, given = "XLA_PYTHON_CLIENT_MEM_FRACTION", {"XLA_CLIENT_MEM_FRACTION": "0.3"}
    assert shares() == (0.45, {half: "0.45"}) and shares(vllm__memory_fraction=0.6) == (0.6, {half: "0.30"})
    assert shares(environ=given) == (0.45, given) and shares("jax") == (0.45, {})
    assert shares(vllm__devices=("1",)) == (0.85, {}) and shares(servers=("http://127.0.0.1:1",))[1] == {}
    for devices in ((), ("0",)):
        assert shares(placement="colocated", vllm__devices=devices) == (0.45, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})
    command, _ = adapter.launch(runnable(rollout__placement="colocated"), "m", "bfloat16", 64, 1, cpu=False, key="k")
    assert "--enable-sleep-mode" in command and flag(command, "--gpu-memory-utilization") == "0.45"
    for cpu, placement in ((True, "colocated"), (False, "auto")):
        assert "--enable-sleep-mode" not in adapter.launch(runnable(rollout__placement=placement), "m", "float32", 64, 1, cpu=cpu, key="k")[0]


# ---- requests on their way ------------------------------------------------------------------------------------------------------


class Answering(Documented):
    """/inference/v1/generate as well: the first try of each request gets no answer while the server is `slow`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tries = self.server.calls.count(body["request_id"])
        self.server.calls.append(body["request_id"])
        if self.server.slow and not tries:
            self.server.slow.wait(60)
            return
        spans = [{"start": 0, "end": 1, "version": self.server.version}]
        self.answer(200, {"choices": [{"token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "length",
                                       "weight_versions": spans}]})


@pytest.fixture
def answering(request, tmp_path):
    """(server, router of an engine that was given this server alone); a test's parameter: further options"""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads, server.asleep, server.calls, server.slow, server.silent = True, set(), [], None, threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    cfg = config(engine="vllm", servers=(f"http://127.0.0.1:{server.server_port}",), timeout_seconds=6.0, **getattr(request, "param", {}))
    cfg.run.dir, cfg.log.trace_requests = str(tmp_path), True
    engine = VllmEngine(EngineContext(cfg, model(), eos_ids=(1,), hf_config=HF))
    server.version, server.engine = f"{engine.run_id}-0", engine
    engine.router.set_state(engine.router.replicas[0], "ready")
    yield server, engine.router
    if server.slow:
        server.slow.set()
    engine.router.close()
    server.shutdown()
    server.server_close()


@pytest.mark.full
def test_a_request_is_tried_again_within_the_wait_for_its_batch(answering):
    """By default half of rollout.timeout_seconds goes by before a request without an answer is sent again."""
    server, router = answering
    assert router.request_seconds == 3.0 and default_config().rollout.vllm.request_seconds == 0
    server.slow = threading.Event()
    router.submit(requests(1))
    assert router.results.get(timeout=300).tokens.tolist() == [5] and server.calls.count("r0") == 2
    assert router.counts["request_failures"] == 1 and not router.counts["given_up"]


@pytest.mark.parametrize("answering", [{"vllm": {"request_seconds": 0.3, "retries": 0}}], indirect=True)
def test_a_request_is_given_up_after_the_tries_asked_for(answering, tmp_path):
    """rollout.vllm.retries=0 within rollout.vllm.request_seconds: one try, and the answer is absent."""
    server, router = answering
    server.slow = threading.Event()
    router.submit(requests(1))
    assert router.results.get(timeout=300).finish == "abort"
    assert server.calls.count("r0") <= 1  # none where 0.3 seconds are too few to reach it
    assert router.request_seconds == 0.3 and router.counts["given_up"] == 1
    (row,) = map(json.loads, (tmp_path / "requests.jsonl").read_text().splitlines())  # log.trace_requests
    assert (row["id"], row["finish"], [e[1] for e in row["events"]]) == ("r0", "abort", ["queued", "sent", "failed"])


@pytest.mark.parametrize("answering", [{"vllm": {"max_requests": 3}, "seeded": "true"}], indirect=True)
def test_a_server_has_max_requests_at_once(answering):
    """The others wait here; each carries its seed where rollout.seeded says so."""
    server, router = answering
    server.slow = threading.Event()
    router.submit(requests(8))
    assert router.call(lambda: (len(router.replicas[0].running), len(router._waiting))) == (3, 5)
    assert router.seeded and router.replicas[0].url == f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("answering", [{"vllm": {"health_seconds": 0.2}}], indirect=True)
def test_a_server_that_is_silent_twice_is_given_up(answering, caplog):
    """Each time for rollout.vllm.health_seconds."""
    server, router = answering
    server.RequestHandlerClass.do_GET, answer = lambda self: server.silent.wait(60), server.RequestHandlerClass.do_GET
    try:
        end = time.monotonic() + 30
        while router.replicas[0].state != "dead" and time.monotonic() < end:
            time.sleep(0.02)
        assert "no reply to /health within rollout.vllm.health_seconds=0.2" in caplog.text
    finally:
        server.silent.set()
        server.RequestHandlerClass.do_GET = answer


class Reached(Exception):
    pass


@pytest.mark.parametrize("answering", [{"verify_weights": "always", "vllm": {
    "transport": "network", "weights_host": "127.0.0.9", "probe_bound": 1e-5, "sync_seconds": 7.0, "chunk_mb": 3, "restarts": 0}}],
    indirect=True)
def test_a_publish_goes_by_its_options(answering, monkeypatch):
    """Carrier and its address, chunks, checksums at a later publish too, bound of the probe, deadline of a call; and no restart."""
    engine, publisher, asked = answering[0].engine, answering[0].engine.publisher, []
    engine.fleet.infos = {0: [{"backend": BACKEND, "machine": publish.machine(), "quantized": False,
                               "cache_dtype": "auto"}]}
    carriers = []
    monkeypatch.setattr(transport, "Network", lambda host: carriers.append(host) or SimpleNamespace(host=True, close=lambda: None))
    publisher.choose_transport()
    assert carriers == ["127.0.0.9"] and engine.fleet.controls[0]._http.timeout.read == 7.0

    def chunks(model, params, dtype, most, host, tower):
        asked.append(most)
        raise Reached

    monkeypatch.setattr(publish.weights, "chunks", chunks)
    with pytest.raises(Reached):
        publisher._stream(None, {}, {}, verify=False, tower=True)
    assert asked == [3_000_000]
    monkeypatch.setattr(publisher, "probe", lambda replica: 1e-4)
    with pytest.raises(publish.WeightMismatch, match="more than 1e-05 .rollout.vllm.probe_bound."):
        publisher._probe(engine.router.replicas[0])
    publisher.verified = {0}

    def opened(control):
        raise Reached

    monkeypatch.setattr(publisher, "_open", opened)
    with pytest.raises(Reached):
        publisher._push([engine.router.replicas[0]], {})
    assert publisher._digests == {}  # they are taken
    own = OwnServers.__new__(OwnServers)
    own.config, own.restarts = engine.config, [0]
    assert own.restart(0) is False


def test_servers_that_do_not_come_are_waited_for_as_long_as_asked():
    cfg = config(engine="vllm", servers=("http://127.0.0.1:1",), vllm={"setup_seconds": 0.3})
    engine = VllmEngine(EngineContext(cfg, model(), eos_ids=(1,), hf_config=HF))
    with pytest.raises(EngineLost, match="waited rollout.vllm.setup_seconds=0.3"):
        engine.publish(params(), 0)
    engine.router.close()


def test_the_servers_of_old_groups_are_forgotten(answering, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_GROUPS_REMEMBERED", 4)
    _, router = answering
    for group in range(12):
        router.submit([dataclasses.replace(requests(1)[0], id=f"g{group}", group=group)])
        assert router.results.get(timeout=300).finish == "length"
    assert list(router._homes) == [8, 9, 10, 11]


# ---- the real server ------------------------------------------------------------------------------------------------------------


def answers_are_of(engine, seed):
    asked = requests(8, seed=12)
    for a, r in zip(asked, generate(engine, asked, 120.0), strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens, seed=seed))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)


@pytest.mark.vllm
def test_a_given_server_sleeps_through_the_update():
    """Through the real endpoints: asleep it schedules nothing, the next publish wakes it; one left asleep is met again; a publish
    that loses a tensor after a sleep is done again in full."""
    with on_url(rollout_placement="colocated", publish=False) as engine:
        control, memory = engine.fleet.controls[0], engine.fleet.memories[engine.fleet.controls[0].url]
        engine.sleep()  # before there are any weights
        assert (memory.state, control.is_sleeping(), engine.health().ok) == ("asleep", True, False)
        for seed in (0, 1):
            engine.publish(params(seed), seed)
            assert (memory.state, control.is_sleeping()) == ("awake", False)
            answers_are_of(engine, seed)
            engine.submit(requests(1, seed=5))
            with pytest.raises(RuntimeError, match="1 requests are unfinished"):
                engine.sleep()
            generate_rest = engine.poll(60.0)
            assert len(generate_rest) == 1
            engine.sleep()
            assert control.is_sleeping()
        engine.submit(requests(1, seed=6))
        with pytest.raises(RuntimeError, match="call publish"):
            engine.poll(1.0)
        engine.abort()
    with Said() as said, on_url(rollout_placement="colocated") as engine:  # met asleep
        answers_are_of(engine, 0)
        engine.sleep()
        real, left = engine.publisher.transport.payload, [1]

        def lossy(tensors, verify):
            left[0] -= 1
            return real(tensors[:-1] if left[0] >= 0 else tensors, verify)

        engine.publisher.transport.payload = lossy
        engine.publish(params(1), 1)
        assert "did not arrive" in said.about("did not reach")
        answers_are_of(engine, 1)


@pytest.mark.vllm
def test_a_given_server_that_does_not_sleep_ends_the_run():
    with on_url(rollout_placement="colocated") as engine:
        engine.fleet.controls[0].sleep = lambda level: (_ for _ in ()).throw(adapter.ServerError("no"))
        with pytest.raises(EngineLost, match="does not sleep, and rollout.placement=colocated leaves"):
            engine.sleep()
    with on_url(rollout_placement="colocated", publish=False) as engine:
        real = engine.fleet.controls[0].workers
        for change, message in (({"sleeps": False}, "start it with --enable-sleep-mode"), ({"machine": "x"}, "runs on another host")):
            engine.fleet.controls[0].workers = lambda change=change: [{**i, **change} for i in real()]
            with pytest.raises(ConfigError, match=message):
                engine.sleep()


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_of_ours_that_fails_asleep_comes_back():
    """One that does not sleep, and one that is killed asleep, are ended and started again; nothing is asked of them meanwhile."""
    with Said() as said, own_servers(rollout_placement="colocated") as engine:
        process, control = engine.fleet.processes[0], engine.fleet.controls[0]
        sleep, control.sleep = control.sleep, lambda level: (_ for _ in ()).throw(adapter.ServerError("no"))
        engine.sleep()
        said.about("is ended to make room for the update")
        assert process.exit_status() is not None
        engine.poll(0.0)
        assert engine.health().servers[control.url].startswith("dead")  # not started while the trainer has the memory
        control.sleep = sleep
        engine.publish(params(1), 1)
        wait_until_ready(engine, 1)
        answers_are_of(engine, 1)
        engine.sleep()
        os.killpg(engine.fleet.processes[0].pid, signal.SIGKILL)
        engine.fleet.processes[0]._process.wait()
        engine.publish(params(), 2)
        wait_until_ready(engine, 1)
        answers_are_of(engine, 0)
        said.about("ended by SIGKILL")
        assert engine.metrics()["engine/restarts"] == 2
