"""Towers on meshes of eight simulated devices: rows of patches are cut as rows of tokens are (dp, fsdp, cp), heads over tp."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiers import nightly

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_vl", "qwen2_5_vl", "qwen2_5_vl_video")),
                                  nightly("qwen2_vl"), nightly("qwen3_vl_moe")])
def test_a_tower_computes_the_same_on_every_mesh(kind):
    """Log-probs and every gradient are those of one device: with taps, windows, videos and experts, on context- and tensor-parallel meshes,
    where the images are on one data shard and the other has rows of text alone, and no process waits for another's tower."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    done = subprocess.run([sys.executable, TESTS / "helpers/sharded_vision.py", kind, "2,1,2,2", "1,2,4,1", "4,2,1,1", "1,1,2,4"], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 4 and any(row["text_alone"] for row in rows)
    for row in rows:
        assert row["logprobs"] < 2e-5 and row["gradient"] < 1e-4 and row["tower_learns"], row
        assert row["split"] > 0 or row["mesh"] == "1,1,1,1", row
