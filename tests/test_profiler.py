"""profile.steps: the trace holds the steps asked for and no others."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from jaxrl.telemetry.profiler import Profiler


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
    names = {e.get("name", "") for e in json.loads(gzip.open(files[0]).read())["traceEvents"]}
    return sorted(int(n[5:]) for n in names if n.startswith("step_"))


@pytest.mark.parametrize(
    "steps, begin, expected", [((2, 3), 0, [2, 3]), ((1, 1), 0, [1]), ((2, 4), 2, [3, 4]), ((4, 9), 0, [4, 5])]
)
def test_the_steps_asked_for_are_traced(tmp_path, steps, begin, expected):
    run(Profiler(steps, tmp_path / "profile"), 5 - begin, begin)
    assert traced(tmp_path / "profile") == expected


@pytest.mark.parametrize("steps, begin", [((), 0), ((7, 8), 0), ((1, 2), 2)])
def test_nothing_is_written_without_a_step_in_range(tmp_path, steps, begin):
    run(Profiler(steps, tmp_path / "profile"), 3, begin)
    assert not (tmp_path / "profile").exists()
