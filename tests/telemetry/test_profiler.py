"""profile.steps: the trace holds the steps asked for and no others. profile.memory: what devices hold, after the steps asked for."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_job

from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check
from jaxrl.telemetry.profiler import Profiler, memory_of


def run(profiler, steps, begin=0):
    """A loop as recipes have it: told where it begins and after every step; each step leaves its name in the trace."""
    profiler.at(begin)
    for step in range(begin + 1, begin + steps + 1):
        with jax.profiler.TraceAnnotation(f"step_{step}"):
            jnp.arange(8.0).sum().block_until_ready()
        profiler.at(step)
    profiler.close()


def traced(folder):
    """Numbers of the steps whose annotation is in the trace."""
    files = list(folder.rglob("*.trace.json.gz"))
    assert len(files) == 1
    events = json.loads(gzip.open(files[0]).read())["traceEvents"]
    names = {e.get("name", "") for e in events}
    found = sorted(int(n[5:]) for n in names if n.startswith("step_"))
    marked = sorted(int(e["args"]["step_num"]) for e in events if e.get("name") == "step")
    assert marked[:len(found)] == found and len(marked) <= len(found) + 1  # what came after a run's last step is one more
    assert not any(n.startswith("$") for n in names)  # without profile.python
    return found


@pytest.mark.parametrize(
    "steps, begin, expected", [((2, 3), 0, [2, 3]), ((1, 1), 0, [1]), ((2, 4), 2, [3, 4]), ((4, 9), 0, [4, 5])]
)
@pytest.mark.slow
def test_the_steps_asked_for_are_traced(tmp_path, steps, begin, expected):
    run(Profiler(steps, tmp_path / "profile"), 5 - begin, begin)
    assert traced(tmp_path / "profile") == expected


@pytest.mark.parametrize("steps, begin", [((), 0), ((7, 8), 0), ((1, 2), 2)])
def test_nothing_is_written_without_a_step_in_range(tmp_path, steps, begin):
    run(Profiler(steps, tmp_path / "profile"), 3, begin)
    assert not (tmp_path / "profile").exists()


def test_memory_is_written_after_the_steps_asked_for(tmp_path):
    held = jnp.zeros((1 << 20,), jnp.float32)
    run(Profiler((), tmp_path, memory=(0, 2)), 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory_00000000_0.prof", "memory_00000002_0.prof"]
    text = gzip.decompress((tmp_path / "memory_00000002_0.prof").read_bytes())  # a pprof Profile: its strings are plain in it
    assert b"test_profiler.py" in text and b"test_memory_is_written_after_the_steps_asked_for" in text and held.nbytes == 4 << 20


def test_memory_is_written_by_the_processes_asked_for():
    c = tiny_job.get_config()
    c.profile.memory = (2, 3)
    assert [memory_of(c.profile, i) for i in range(2)] == [(2, 3), ()]
    c.profile.memory = (-1,)
    with pytest.raises(ConfigError, match=r"profile.memory=\(-1,\): numbers of steps, from 0"):
        check(c)
