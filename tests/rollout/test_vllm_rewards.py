"""Rewards behind real vLLM: a judge that a run starts, and a sequence classifier behind its endpoints."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.service_cases import service_scores

from jaxrl import models
from jaxrl.data import load_tokenizer
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.rewards import RewardItem
from jaxrl.rewards.judge import Judge
from jaxrl.rollout.vllm.process import ServerProcess, free_port
from jaxrl.workers.supervisor import children

pytestmark = pytest.mark.vllm
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
LONG = {**tiny_job.MODEL, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2}


def exported(folder, tree, seed):
    tokenizer = load_tokenizer(tiny_job.get_config())
    tokenizer.chat_template = TEMPLATE
    params = tree.init(jax.random.key(seed))
    if "value" in params:
        params["value"]["kernel"] = 0.1 * jax.random.normal(jax.random.key(seed + 1), params["value"]["kernel"].shape)
    hf.export(tree, params, folder, {**LONG, hf.SOURCE: {}}, tokenizer=tokenizer, eos_ids=(tokenizer.eos_token_id,))
    return tokenizer


def judged(folder, **more):
    """(command of a run whose judge is a random model that is held to digits, ids of the digits)"""
    tokenizer = exported(folder / "judge", models.build(LONG, compute_dtype=jnp.float32, scan_layers=False), 3)
    digits = {tokenizer.convert_tokens_to_ids(str(d)): d for d in range(10)}
    (folder / "prompt.txt").write_text("{prompt}\n{completion}\nscore from {lowest} to {highest}")
    rows = [{"prompt": "a", "completion": "b", "score": 5}, {"prompt": "c", "completion": "d", "score": 6}]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    extra = {"logit_bias": {str(k): 100 for k in digits}}
    flags = {"reward.functions": "judge", "reward.judge.model": folder / "judge", "reward.judge.prompt_file": folder / "prompt.txt",
             "reward.judge.pattern": r"(\d)", "reward.judge.highest": 9, "reward.judge.max_new_tokens": 1, "reward.judge.extra": extra,
             "reward.judge.labelled": folder / "labelled.jsonl", "reward.judge.server_args": {"dtype": "float32", "max_model_len": 1024},
             "train.steps": 3, "eval.sets": "", "run.dir": folder / "run", "run.compile_cache": ""} | more
    return [sys.executable, "-m", "jaxrl.main", f"--config={Path(tiny_job.__file__)}",
            *(f"--config.{name}={value}" for name, value in flags.items())], digits


def test_a_run_starts_its_judge_and_learns_from_it(tmp_path):
    """A random model, held to digits, is a deterministic judge: what transformers draws from the same weights is every recorded score."""
    command, digits = judged(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "judge 'judge' and 2 labelled rows" in done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len([x for x in lines if "reward/judge" in x]) == 3 and all(x.get("reward/failed_fraction", 0) == 0 for x in lines)

    import torch
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "judge")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "judge", dtype=torch.float32)
    told = {"prompt": (tmp_path / "prompt.txt").read_text(), "model": str(tmp_path / "judge"), "rubric": "", "rubric_column": "",
            "lowest": 0.0, "highest": 9.0, "deadline_seconds": 1.0, "concurrency": 1, "pattern": r"(\d)"}
    judge = Judge(told, {"urls": [], "key_env": "", "cache": ""})
    told = [json.loads(line) for file in sorted((tmp_path / "run/rollouts").iterdir()) for line in file.read_text().splitlines()]
    assert len(told) == 3 * 32 and len({r["reward"]["parts"]["judge"] for r in told}) > 1
    for row in told[::7]:
        messages = judge.messages(row["prompt"], row["completion"], None, row["answer"])
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        best = sorted((logits[k].item() for k in digits), reverse=True)
        drawn = digits[max(digits, key=lambda k: logits[k].item())]
        assert best[0] - best[1] < 1e-4 or row["reward"]["parts"]["judge"] == pytest.approx(drawn / 9)


def servers_below(pid):
    """Processes of vLLM's API server below one."""
    found = [p for child in children(pid) for p in servers_below(child)]
    return found + [pid] * (b"vllm.entrypoints" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_judge_that_is_killed_is_started_again_and_what_was_asked_meanwhile_is_asked_again(tmp_path):
    """Its server dies behind the first step; no reward of the other five is absent."""
    command, _ = judged(tmp_path, **{"train.steps": 6, "reward.judge.retries": 30, "reward.judge.deadline_seconds": 400.0})
    with (tmp_path / "log").open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            end = time.monotonic() + 400
            while not list((tmp_path / "run/rollouts").glob("*.jsonl")):  # a step's scores are there
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.1)
            first = servers_below(process.pid)
            assert first
            os.kill(first[-1], signal.SIGKILL)
            assert process.wait(500) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            process.kill()
    assert "the server of judge 'judge'" in (tmp_path / "log").read_text() and "restarting it" in (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    scored = [x for x in lines if "reward/judge" in x]
    assert len(scored) == 6 and all(x.get("reward/failed_fraction", 0) == 0 for x in scored)


@contextlib.contextmanager
def serving(folder, log, *more):
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port), "--host", "127.0.0.1",
               "--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--block-size", "32", *more]
    process = ServerProcess(command, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}, log)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while time.monotonic() < end and process.exit_status() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.5)
        assert process.exit_status() is None, process.last_errors()
        yield url
    finally:
        process.stop()


def test_a_classifiers_scores_are_those_of_transformers(tmp_path):
    """/classify and /pooling on token ids, to 1e-5; a server with another tokenizer is found out."""
    import torch
    import transformers
    model = models.build(LONG, compute_dtype=jnp.float32, scan_layers=True)
    tokenizer = exported(tmp_path / "rm", ValueModel(model, name="score", bias=False), 1)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    rng = np.random.default_rng(0)
    texts = ["12 + 3 = 15", "so 4 * 5 = 20", "7"] * 3
    rows = [RewardItem("", text, token_ids=tokenizer(text, add_special_tokens=False)["input_ids"],
                       context_ids=rng.integers(4, 90, 5 + 3 * i).tolist()) for i, text in enumerate(texts)]
    with torch.no_grad():
        wanted = [reference(torch.tensor([[*row.context_ids, *row.token_ids]])).logits[0, 0].item() for row in rows]
    assert np.ptp(wanted) > 0.5
    with serving(tmp_path / "rm", tmp_path / "log", "--runner", "pooling") as url:
        for options in ({"format": "classify"}, {"format": "pooling", "task": "classify"}):
            np.testing.assert_allclose(service_scores("remote", rows, servers=(url,), batch=4, **options), wanted, atol=1e-5)
        others = [RewardItem("", "another text", token_ids=row.token_ids, context_ids=row.context_ids) for row in rows]
        assert service_scores("remote", others, servers=(url,), format="classify") == ["tokenizer"] * len(rows)
