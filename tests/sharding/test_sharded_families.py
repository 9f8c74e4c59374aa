"""Families on a mesh of four simulated devices, fsdp 2 x tp 2, beside one device (helpers/sharded_families.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("names", [
    pytest.param(("phi3", "olmo2"), marks=pytest.mark.slow), pytest.param(("glm4", "hunyuan"), marks=pytest.mark.nightly),
    pytest.param(("granite4_dense", "falcon_h1_plain"), marks=pytest.mark.nightly),
    pytest.param(("qwen3_5_moe", "minimax_m2"), marks=pytest.mark.nightly),
    pytest.param(("seed_oss", "gemma3", "ministral3"), marks=pytest.mark.nightly),
    pytest.param(("granite", "smollm3", "olmo3", "ernie4_5"), marks=pytest.mark.nightly),
    pytest.param(("llama_bias", "mistral", "qwen2", "gemma"), marks=pytest.mark.nightly),
    pytest.param(("gemma2", "glm", "mixtral"), marks=pytest.mark.nightly),
    pytest.param(("qwen3_moe", "olmoe"), marks=pytest.mark.nightly),
    pytest.param(("glm4_moe", "glm4_moe_lite"), marks=pytest.mark.nightly)], ids=",".join)
def test_a_family_on_a_mesh_is_the_family_on_one_device(names):
    """float64: log-probs of plain, padded and packed rows and of a shared prompt, and the gradient by every parameter. A device holds a
    quarter of the matrices, but for vectors of heads and maps that tp does not divide."""
    worker = Path(__file__).parents[1] / "helpers" / "sharded_families.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, worker.parents[1:3]))}
    done = subprocess.run([sys.executable, worker, *names], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in found] == list(names)
    for row in found:
        assert row["log_probs"] < 1e-12 and row["gradient"] < 1e-12 and 0.25 <= row["held"] < 0.28, row
