"""Freed memory that stays in the process on CPUs (jaxrl/run/heap.py)."""

import importlib.metadata
import importlib.util
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.run import heap

SIDE, CALLS = 2048, 30  # 16 MiB an array


def faults_of_calls() -> int:
    """The page faults of CALLS calls of a program with temporaries of at least an array."""
    chain = jax.jit(lambda x: jnp.sum(jax.nn.softmax(x @ x.T) @ x))
    x = jnp.ones((SIDE, 8))
    for _ in range(5):
        jax.block_until_ready(chain(x))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        jax.block_until_ready(chain(x))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.full
def test_temporaries_of_a_call_stay_for_the_next_unless_the_environment_says_otherwise():
    counts = {}
    for name, more in (("kept", {}), ("set by the user", {"MALLOC_TRIM_THRESHOLD_": "131072"})):
        code = "from test_heap import *; print(heap.keep_freed_memory(), faults_of_calls())"
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
        out = subprocess.run([sys.executable, "-c", code], env=clean | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | more,
                             capture_output=True, text=True, check=True).stdout.split()
        assert out[0] == str(name == "kept")
        counts[name] = int(out[1])
    whole = CALLS * SIDE**2 * 4 // resource.getpagesize()
    # Under load a call may begin before the last one has freed its arrays, so that the heap grows by a few more: not by one a call.
    assert counts["set by the user"] > whole > 2 * counts["kept"], counts


def test_only_where_jax_has_cpus_alone(monkeypatch):
    def only(platforms, plugins=(), packages=()):
        monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platforms)))
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins if group == "jax_plugins" else ())
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)
        return heap.only_cpus()

    assert only("cpu", ["cuda13"], ["libtpu"])
    assert only(None) and only("")
    for other in (("cuda,cpu",), ("tpu",), (None, ["cuda13"]), (None, (), ["libtpu"]), (None, (), ["jax_plugins"])):
        assert not only(*other), other
        assert not heap.keep_freed_memory()
