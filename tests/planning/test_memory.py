"""Optimizer state that rests in host memory: the same run, and where its arrays lie."""

import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from algorithm_runs import job, same, watched

from jaxrl.config import default_config
from jaxrl.errors import ConfigError
from jaxrl.recipes import rl, setup
from jaxrl.recipes.rollouts import Rollouts
from jaxrl.sharding import memory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps with and without optimizer.offload and a policy that rests, and the second step again from the first's
    checkpoint."""
    out = {}
    for name, offload in (("device", False), ("host", True)):
        folder = tmp_path_factory.mktemp(name) / "run"
        kinds, while_sampling, now = [], [], []
        with pytest.MonkeyPatch.context() as patch:
            one_step, following = rl.one_step, Rollouts.next

            def look_while_sampling(*args, following=following, while_sampling=while_sampling, now=now):
                while_sampling.append({x.sharding.memory_kind for x in jax.tree.leaves(now[0].policy.state.trainable)})
                return following(*args)

            def look(parts, one_step=one_step, kinds=kinds, now=now):
                now[:] = [parts]
                done = one_step(parts)
                kinds.append({x.sharding.memory_kind for x in jax.tree.leaves(parts.policy.state.opt_state) if x.ndim})
                return done

            patch.setattr(rl, "one_step", look)
            patch.setattr(Rollouts, "next", look_while_sampling)
            roles = {"policy": {"rest": "host"}} if offload else {}
            _, steps, _ = watched(job(folder, {"optimizer.offload": offload, "algorithm.preset": "grpo",
                                               "mesh.roles": roles}))
        out[name] = SimpleNamespace(folder=folder, steps=steps, kinds=kinds, while_sampling=while_sampling)
    return out


@pytest.mark.slow
def test_the_offloaded_optimizer_learns_the_same(runs):
    device, host = runs["device"].steps, runs["host"].steps
    assert [same(a.after.policy, b.after.policy) and same(a.after.optimizer, b.after.optimizer)
            for a, b in zip(device, host, strict=True)] == [True, True]
    assert runs["host"].kinds == [{memory.HOST}] * 2 and memory.HOST not in set.union(*runs["device"].kinds)


def test_a_policy_at_rest_is_in_host_memory_while_answers_are_sampled(runs):
    """mesh.roles.policy.rest=host; its updates are those of the other run, bitwise (above)."""
    assert runs["host"].while_sampling == [{memory.HOST}] * 2
    assert memory.HOST not in set.union(*runs["device"].while_sampling)


@pytest.mark.slow
def test_offload_may_change_on_the_way(runs):
    """From the checkpoint of the run without it, with it, and the other way: the last step again, bitwise."""
    for name, offload in (("device", True), ("host", False)):
        folder = runs[name].folder.parent / "again"
        shutil.copytree(runs[name].folder, folder)
        shutil.rmtree(folder / "checkpoints" / "00000002")
        _, (again,), _ = watched(job(folder, {"optimizer.offload": offload, "algorithm.preset": "grpo"}))
        last = runs[name].steps[-1]
        assert same(again.after.policy, last.after.policy) and same(again.after.optimizer, last.after.optimizer)


def test_offload_is_refused_where_there_is_no_host_memory(monkeypatch):
    monkeypatch.setattr(memory, "can_rest", lambda device: False)
    c = default_config()
    c.optimizer.offload = True
    inputs = setup.Inputs(None, {}, (0,), None)
    with pytest.raises(ConfigError, match="optimizer.offload: a cpu cannot keep"):
        setup.open_job(c, inputs)


def test_what_rests_is_moved_and_the_rest_is_not():
    x = jax.device_put(np.arange(4.0), jax.devices()[0])
    there = memory.to_host({"a": x})["a"]
    back = memory.to_devices({"a": there, "b": x})
    assert memory.rests(there) and not memory.rests(back["a"]) and back["b"] is x
    np.testing.assert_array_equal(back["a"], x)
    assert memory.to_devices(()) == () == memory.to_host(())  # the state of an optimizer that has none
