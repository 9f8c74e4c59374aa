"""Jobs of a tiny model with recurrent layers: each kind runs, and one that is killed goes on bitwise."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_job
from helpers.run_tools import fingerprint, ledger, run

import jaxrl
from jaxrl.config import load_config

SHORT = ("train.steps=5", "eval.every_steps=0", "eval.max_rows=2")

DIGITS = {"reward.functions": (f"{Path(tiny_job.__file__).resolve()}:digits",)}

CALC = {"train.steps": 2, "data.prompts_per_step": 4, "rollout.slots": 16, "eval.max_rows": 4, "data.max_rows": 16} | DIGITS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", pytest.param("nemotron", marks=pytest.mark.nightly), pytest.param("falcon", marks=pytest.mark.nightly)])
def test_killed_and_resumed_is_bitwise_an_unbroken_run(tmp_path, kind):
    job = f"tests/helpers/tiny_job.py:{kind}"
    assert run(tmp_path / "unbroken", *SHORT, config=job)[0] == 0
    status, _ = run(tmp_path / "killed", *SHORT, "faults.plan='update.kill9@step=5',", config=job)
    assert status == -signal.SIGKILL
    status, text = run(tmp_path / "killed", *SHORT, config=job)
    assert status == 0 and "resumed" in text, text
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "unbroken")


@pytest.mark.vllm
@pytest.mark.slow
def test_killed_and_resumed_with_vllm(tmp_path):
    """A new server gets the weights anew: every sample is used once, and its log-probs are the trainer's in every step."""
    served = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24}  # which vLLM serves on CPUs
    options = ("train.steps=3", "eval.every_steps=0", "eval.max_rows=2", f"model.config={tiny_job.HYBRID | served}", "rollout.engine=vllm",
               "rollout.slots=0", "rollout.prompt_lengths=()", "rollout.compaction=True", "rollout.vllm.setup_seconds=600.0",
               "rollout.verify_weights=always")
    job = "tests/helpers/tiny_job.py:hybrid"
    status, text = run(tmp_path / "killed", *options, "faults.plan='update.kill9@step=3',", config=job, timeout=900)
    assert status == -signal.SIGKILL, text
    status, text = run(tmp_path / "killed", *options, config=job, timeout=900)
    assert status == 0 and "resumed" in text, text
    steps = [row for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines() if "loss" in (row := json.loads(line))]
    assert [row["step"] for row in steps] == [1, 2, 3] and all(row["optim/grad_norm"] > 0 for row in steps)
    assert all(row["gap/max"] < 1e-4 and row["publish/probe"] < 1e-5 for row in steps)
    assert [len(rows) for rows in ledger(tmp_path / "killed", 0)] == [32] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", [
    ("ppo:tiny", DIGITS), ("ppo:tiny", DIGITS | {"model.config": tiny_job.MAMBA, "train.steps": 2}), ("dpo:tiny", {}), ("reward_model:tiny", {}),
    ("ppo:tiny", DIGITS | {"model.config": tiny_job.FALCON, "train.steps": 2}), ("env:calc", CALC),
    pytest.param("env:calc", CALC | {"model.config": tiny_job.MAMBA}, marks=pytest.mark.nightly),
    pytest.param("env:calc", CALC | {"model.config": tiny_job.FALCON}, marks=pytest.mark.nightly),
])
def test_every_kind_of_job_runs(tmp_path, name, changes):
    c = load_config(name, {"run.dir": str(tmp_path / "run"), "run.warm_start": "", "model.init": "random", "model.config": tiny_job.HYBRID,
                           "log.console": "off", "log.tensorboard": False, "reward.workers": 1} | changes)
    if not c.model.tokenizer:
        c.model.tokenizer = "jaxrl://chat/tokenizer" if name.startswith("env") else "jaxrl://arith/tokenizer"
    summary = jaxrl.train(c)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["finished"] and all(np.isfinite(row["loss"]) for row in rows if "loss" in row)
    assert any(row.get("optim/grad_norm", 0) > 0 for row in rows) and any(0 < row.get("packing/chunk_fill", 0) <= 1 for row in rows)
