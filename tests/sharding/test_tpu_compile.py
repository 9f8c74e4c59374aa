"""The TPU kernels of attention and of recurrent layers, compiled for chips that are not here: needs libtpu, no TPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]


@pytest.mark.parametrize("target", [pytest.param("v5e:2x2", marks=pytest.mark.slow),
                                    pytest.param("v5p:2x2x1", marks=pytest.mark.nightly),
                                    pytest.param("v6e:2x2", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_kernels_compile_alone_and_in_a_sharded_job(target):
    """Forward and backward at every head size, in both dtypes; the update, prefill and decode of a job over fsdp x tp
    take the kernels because their mesh is a TPU's, and decoding, with shared prompts and without, makes no second
    cache."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(HERE / "helpers" / "tpu_compile_worker.py"), target], env=env, capture_output=True,
                          text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found["rows"]) == 8 and len(found["caches"]) == 7 and len(found["recurrences"]) == 3
    job = found["job"]
    assert job["update"]["kernels"] == ["attention_forward", "attention_key_gradients", "attention_query_gradient"]
    assert job["prefill"]["kernels"] == ["attention_forward"] and job["decode"]["kernels"] == ["attention_decode"]
    assert job["decode"]["shared_prompts"] and not job["prefill"]["shared_prompts"]
    assert job["decode"]["temporaries"] < job["cache"] / 4
