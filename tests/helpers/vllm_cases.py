"""Faults of real vLLM servers, each as a function that makes it happen and says what came of it: for tests and evidence.

A case returns (what the user sees, outcome). It raises AssertionError where an answer is lost or doubled, a deadline is
missed or a process stays behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np

from helpers.rollout_helpers import (
    END,
    HF,
    config,
    log_softmax,
    model,
    params,
    random_params,
    requests,
    teacher_logits,
    tokenizer,
    vllm_server,
)
from jaxrl import models
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io import hf
from jaxrl.rollout import EngineContext, EngineLost, generate
from jaxrl.rollout.vllm import adapter, transport
from jaxrl.rollout.vllm.engine import VllmEngine
from jaxrl.rollout.vllm.process import ServerProcess, free_port
from jaxrl.rollout.vllm.publish import WeightMismatch, sequence_logprobs
from jaxrl.vllm_plugin import start_time

TIMEOUT = 600.0


class Said(logging.Handler):
    """Warnings of jaxrl while a case runs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("jaxrl").addHandler(self)
        return self

    def __exit__(self, *exc):
        logging.getLogger("jaxrl").removeHandler(self)

    def about(self, *words) -> str:
        found = [line for line in self.lines if all(w in line for w in words)]
        assert found, (words, self.lines)
        return found[0]


@contextlib.contextmanager
def own_servers(replicas=1, eos=(END,), publish=True, of=None, hf_config=HF, patches=0, **options):
    """An engine with servers of its own; options are of rollout.vllm, or of rollout after 'rollout_'. of: (model, parameters) in the place
    of rollout_helpers', hf_config: that model's. patches: most patches of a prompt's images."""
    folder = tempfile.mkdtemp(prefix="vllm-case-")
    cfg = config(engine="vllm", seeded="true")
    cfg.run.dir = folder
    cfg.rollout.vllm.update({"replicas": replicas, "setup_seconds": TIMEOUT, "health_seconds": 5.0})
    for name, value in options.items():
        group, key = (cfg.rollout, name.removeprefix("rollout_")) if name.startswith("rollout_") else (cfg.rollout.vllm, name)
        group[key] = value
    served, values = of or (model(), params())
    made = VllmEngine(EngineContext(cfg, served, tokenizer(), None, eos, hf_config, patches))
    try:
        if publish:
            made.publish(values, 0)
        yield made
    finally:
        pids = [p.pid for p in made.fleet.processes]
        made.close()
        assert not any(group_alive(pid) for pid in pids), "a server process is left"
        shutil.rmtree(folder, ignore_errors=True)


def group_alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def on_url(url=None, **options):
    """An engine on a server that runs already."""
    return own_servers(rollout_servers=(url or vllm_server(),), **options)


def check_answers(asked, results):
    """Each request once, in order, with the log-probs of the weights."""
    assert [r.id for r in results] == [r.id for r in asked]
    for a, r in list(zip(asked, results, strict=True))[::16]:
        want = log_softmax(teacher_logits(a.prompt, r.tokens))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)


def agree(engine, model, params, version):
    """A server's log-probs are those of the trainer's model."""
    asked = requests(6, seed=40 + version)
    for a, r in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
        ours = sequence_logprobs(model, params, np.concatenate([a.prompt, r.tokens]).astype(np.int32))
        np.testing.assert_allclose(r.logprobs, np.asarray(ours)[len(a.prompt) - 1:], atol=1e-4)
        assert (r.versions == version).all()


def many(count=300):
    return [dataclasses.replace(r, group=i // 4) for i, r in enumerate(requests(count, seed=31, prompts=count // 4))]


def hit_while_generating(engine, blow, after=0.5):
    asked = many()
    timer = threading.Timer(after, blow)
    timer.start()
    results = generate(engine, asked, TIMEOUT)
    timer.join()
    check_answers(asked, results)
    assert all(r.finish != "abort" for r in results)
    return len(results)


def wait_until_ready(engine, count, seconds=120.0):
    end = time.monotonic() + seconds
    while sum(s == "ready" for s in engine.health().servers.values()) < count:
        assert time.monotonic() < end, engine.health()
        engine.poll(0.0)
        time.sleep(0.2)


def killed():
    with Said() as said, own_servers(replicas=2, max_requests=4) as engine:
        count = hit_while_generating(engine, lambda: os.killpg(engine.fleet.processes[0].pid, signal.SIGKILL))
        text = said.about("are rerouted")
        wait_until_ready(engine, 2)
        assert engine.publisher.last_probe < 1e-4
        return text, f"{count} of {count} answered; started again with the current weights"


def hung():
    with Said() as said, own_servers(replicas=2, max_requests=4) as engine:
        started = time.monotonic()
        count = hit_while_generating(engine, lambda: os.killpg(engine.fleet.processes[0].pid, signal.SIGSTOP))
        seconds = time.monotonic() - started
        text = said.about("no reply to /health", "are rerouted")
        assert seconds < 60
        wait_until_ready(engine, 2)
        return text, f"{count} of {count} answered after {seconds:.0f} s; started again with the current weights"


def all_lost():
    with own_servers(restarts=0) as engine:
        try:
            hit_while_generating(engine, lambda: os.killpg(engine.fleet.processes[0].pid, signal.SIGKILL), after=0.1)
        except EngineLost as e:
            return str(e), "the run saves, stops, and can be resumed"
    raise AssertionError("nothing was raised")


def refused_port():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    try:
        with on_url(url, setup_seconds=3.0):
            pass
    except EngineLost as e:
        return str(e), "stops before the first step"
    raise AssertionError("nothing was raised")


def refused_port_beside_a_good_one():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with Said() as said, own_servers(rollout_servers=(vllm_server(), url), setup_seconds=60.0) as engine:
        asked = many(40)
        check_answers(asked, generate(engine, asked, TIMEOUT))
        return said.about("does not reply"), "goes on with the other server"


def spoil(tensors):
    """One tensor changed after the trainer has taken its checksum."""
    return [(n, a + np.float32(0.01) if n.endswith("layers.1.mlp.up_proj.weight") else a) for n, a in tensors]


def other_weights(verify="always", named="layers.1.mlp.up_proj"):
    """What the server holds is not what was meant: the checksums name the tensor."""
    with on_url(rollout_verify_weights=verify) as engine:
        real = engine.publisher.transport.payload
        with mock.patch.object(engine.publisher.transport, "payload", lambda tensors, verify: real(spoil(tensors), verify)):
            try:
                engine.publish(params(), 1)
            except WeightMismatch as e:
                assert named in str(e)
                return str(e), "the run stops"
    raise AssertionError("nothing was raised")


def other_weights_without_checksums():
    return other_weights("never", "probe")


def dropped_tensor(times=1):
    """A publish that loses a tensor is noticed by the server and done again in full."""
    with Said() as said, on_url() as engine:
        real, left = engine.publisher.transport.payload, [times]

        def lossy(tensors, verify):
            left[0] -= 1
            return real(tensors[:-1] if left[0] >= 0 else tensors, verify)

        with mock.patch.object(engine.publisher.transport, "payload", lossy):
            engine.publish(params(1), 1)
        asked = requests(8, seed=12)
        for a, r in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
            want = log_softmax(teacher_logits(a.prompt, r.tokens, seed=1))
            np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)
        return said.about("did not reach"), "sent again in full; the run goes on"


def full_shared_memory():
    folder = Path(tempfile.mkdtemp(prefix="vllm-full-"))
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True, capture_output=True)
        try:
            with mock.patch.object(transport, "SHARED", folder), on_url(transport="shm"):
                pass
        except RunStopped as e:
            return str(e), "the run stops; nothing is lost"
        raise AssertionError("nothing was raised")
    finally:
        subprocess.run(["umount", str(folder)], check=False, capture_output=True)
        folder.rmdir()


def slow_answers():
    """Requests that take too long are tried again, then absent: never a wrong answer."""
    with Said() as said, on_url(request_seconds=0.002, retries=2) as engine:
        asked = requests(4, seed=32)
        results = generate(engine, asked, TIMEOUT)
        assert [r.id for r in results] == [r.id for r in asked] and {r.finish for r in results} == {"abort"}
        assert engine.router.counts["given_up"] == 4
        return said.about("its completion is absent"), "the answer is absent from its group"


def wrong_model():
    with tempfile.TemporaryDirectory() as folder, extra_server(Path(folder), vocab_size=96) as url:
        try:
            with on_url(url):
                pass
        except ConfigError as e:
            return str(e).replace(url, "http://127.0.0.1:PORT"), "stops before the first step"
    raise AssertionError("nothing was raised")


def wrong_version():
    with mock.patch.object(adapter, "OLDEST", (99, 0)):
        try:
            with own_servers(publish=False):
                pass
        except ConfigError as e:
            return str(e), "stops before a server starts"
    raise AssertionError("nothing was raised")


def stock_server():
    """vLLM's CPU build without the plugin answers 200 to a reload and, with tied embeddings, keeps its old weights."""
    tied = {**HF, "tie_word_embeddings": True}
    built = models.build(tied, compute_dtype=jnp.float32, scan_layers=False)
    values = random_params(built, 0, 0.15)
    here = mock.patch.multiple(sys.modules[__name__], HF=tied, model=lambda: built, params=lambda seed=0: values)
    with here, tempfile.TemporaryDirectory() as folder, extra_server(Path(folder), plugins=False) as url, Said() as said:
        try:
            with on_url(url):
                pass
        except WeightMismatch as e:
            said.about("no jaxrl plugin")
            return str(e).replace(url, "http://127.0.0.1:PORT"), "the run stops"
    raise AssertionError("nothing was raised")


@contextlib.contextmanager
def extra_server(folder: Path, plugins=True, **changes):
    """A server started as a user would, not by jaxrl."""
    m = model() if not changes else models.build({**HF, **changes}, compute_dtype=jnp.float32, scan_layers=False)
    own = random_params(m, 9, 0.15)  # weights of its own
    hf.export(m, own, folder / "model", {**HF, **changes, hf.SOURCE: {}}, "float32")
    port = free_port("127.0.0.1")
    command, env = adapter.launch(config(), str(folder / "model"), "float32", 64, port, cpu=True, key="")
    command[command.index("--load-format") + 1] = "auto"
    if not plugins:
        at = command.index("--weight-transfer-config")
        del command[at:at + 2]
        env["VLLM_PLUGINS"] = ""
    process = ServerProcess(command, env, folder / "server.log")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


TRAINER = """
import sys, time
sys.path.insert(0, {tests!r})
from helpers.vllm_cases import own_servers
with own_servers() as engine:
    print(*[p.pid for p in engine.fleet.processes], flush=True)
    time.sleep(600)
"""


def trainer_killed():
    """kill -9 of the trainer: its servers end by themselves."""
    code = TRAINER.format(tests=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    pid = int(trainer.stdout.readline())
    assert group_alive(pid)
    trainer.kill()
    trainer.wait()
    started = time.monotonic()
    while group_alive(pid):
        assert time.monotonic() - started < 15, "servers are left"
        time.sleep(0.1)
    assert not start_time(pid)
    return "(the trainer was killed with -9)", f"its servers ended within {time.monotonic() - started:.1f} s"


CASES = {
    "kill -9 of a server": killed, "SIGSTOP of a server (hang)": hung, "the last server is lost": all_lost,
    "a port that refuses": refused_port, "a port that refuses beside a good one": refused_port_beside_a_good_one,
    "a server with other weights": other_weights, "the same without checksums": other_weights_without_checksums,
    "a tensor dropped from a publish": dropped_tensor, "a full /dev/shm": full_shared_memory, "slow answers": slow_answers,
    "a wrong model": wrong_model, "a wrong version of vLLM": wrong_version,
    "the stock CPU server that keeps stale weights": stock_server, "kill -9 of the trainer": trainer_killed,
}
