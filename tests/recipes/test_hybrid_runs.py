"""Jobs of a tiny model with recurrent layers: each kind runs, and one that is killed goes on bitwise."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_job
from helpers.run_tools import fingerprint, run

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
