"""jax's compilation cache finds a program with kernels again, whatever the process that looks for it has lowered before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("kind", [pytest.param("tpu", marks=pytest.mark.full), pytest.param("gpu", marks=pytest.mark.mosaic)])
def test_keys_are_equal_in_processes_with_different_histories(kind):
    def keys(*names):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "PYTHONHASHSEED": "random"}
        return subprocess.Popen([sys.executable, str(HERE / "helpers" / "cache_key_worker.py"), kind, *names], env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    processes = [keys("decode", "update"), keys("prefill", "update", "decode")]
    (first, error), (other, more) = (p.communicate(timeout=600) for p in processes)
    assert first and other, error + more
    first, other = json.loads(first), json.loads(other)
    assert first == {name: other[name] for name in first}
    assert {name: kernels for name, (_, kernels) in first.items()} == {"decode": 1, "update": 4}
