"""What is in host memory, between its uses or throughout: the same run, and where its arrays lie."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import tiny_job
from helpers.algorithm_runs import job, same, watched

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.recipes import rl
from jaxrl.resolve.checks.common import check
from jaxrl.resolve.spec import Platform, resolve
from jaxrl.rl.rollouts import Rollouts
from jaxrl.run import setup
from jaxrl.sharding import memory
from jaxrl.training import streaming


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps with and without optimizer.offload and a policy that rests, and the second step again from the first's
    checkpoint."""
    out = {}
    for name, offload in (("device", False), ("host", True)):
        folder = tmp_path_factory.mktemp(name) / "run"
        kinds, while_sampling, now = [], [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "WORTH_IT", 4096)  # bytes: matrices of the tiny model
            patch.setattr(streaming, "PART_BYTES", 8192)
            one_step, following = rl.one_step, Rollouts.next

            def look_while_sampling(*args, following=following, while_sampling=while_sampling, now=now):
                while_sampling.append({x.sharding.memory_kind for x in jax.tree.leaves(now[0].roles.policy.state.trainable)})
                return following(*args)

            def look(parts, one_step=one_step, kinds=kinds, now=now):
                now[:] = [parts]
                done = one_step(parts)
                kinds.append({x.sharding.memory_kind for x in jax.tree.leaves(parts.roles.policy.state.opt_state)
                              if memory.worth_it(x)})
                return done

            patch.setattr(rl, "one_step", look)
            patch.setattr(Rollouts, "next", look_while_sampling)
            roles = {"policy": {"rest": "host"}} if offload else {}
            _, steps, _ = watched(job(folder, {"optimizer.offload": offload, "algorithm.preset": "grpo",
                                               "mesh.roles": roles}))
        out[name] = SimpleNamespace(folder=folder, steps=steps, kinds=kinds, while_sampling=while_sampling)
    return out


def near(a, b):
    """Every array within 1e-6 of its largest number: an optimizer step in parts is another program, which rounds apart."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return all(np.max(np.abs(x.astype(np.float64) - y)) <= 1e-6 * np.max(np.abs(y)) for x, y in pairs)


@pytest.mark.slow
def test_the_offloaded_optimizer_learns_the_same(runs):
    device, host = runs["device"].steps[0], runs["host"].steps[0]
    assert near(host.after.policy, device.after.policy) and near(host.after.optimizer, device.after.optimizer)
    assert not same(device.before.policy, device.after.policy)
    assert runs["host"].kinds == [{memory.HOST}] * 2 and memory.HOST not in set.union(*runs["device"].kinds)


@pytest.mark.full
def test_a_policy_at_rest_is_in_host_memory_while_answers_are_sampled(runs):
    """mesh.roles.policy.rest=host; its updates are those of the other run (above)."""
    assert runs["host"].while_sampling == [{memory.HOST}] * 2
    assert memory.HOST not in set.union(*runs["device"].while_sampling)


@pytest.mark.slow
def test_offload_may_change_on_the_way(runs):
    """From the checkpoint of the run without it, with it, and the other way: the last step again."""
    for name, offload in (("device", True), ("host", False)):
        folder = runs[name].folder.parent / "again"
        shutil.copytree(runs[name].folder, folder)
        shutil.rmtree(folder / "checkpoints" / "00000002")
        _, (again,), _ = watched(job(folder, {"optimizer.offload": offload, "algorithm.preset": "grpo"}))
        last = runs[name].steps[-1]
        assert near(again.after.policy, last.after.policy) and near(again.after.optimizer, last.after.optimizer)


@pytest.mark.full
@pytest.mark.parametrize("devices, options, roles", [
    pytest.param(1, {"algorithm.preset": "ppo", "critic.shared": False, "algorithm.kl.coef": 0.01, "optimizer.layer_decay": 0.9},
                 ("policy", "critic", "reference"), marks=pytest.mark.slow),
    pytest.param(4, {"mesh.tp": 2}, ("policy",), marks=pytest.mark.slow),
    pytest.param(1, {"lora.rank": 4, "lora.base": "int8", "algorithm.kl.coef": 0.01}, ("policy",), marks=pytest.mark.nightly),
    pytest.param(1, {"algorithm.preset": "ppo", "critic.shared": True, "optimizer.name": "adafactor"}, ("policy",),
                 marks=pytest.mark.nightly),
    pytest.param(2, {"lora.rank": 4, "lora.export": "adapter", "mesh.dp": 2, "mesh.fsdp": 1}, ("policy",), marks=pytest.mark.nightly)],
    ids=["roles", "fsdp 2 tp 2", "int8 base", "shared trunk", "adapter"])
def test_streamed_roles_learn_the_same(tmp_path, devices, options, roles):
    """mesh.roles.<role>.rest=streamed: a step is the step without it, in fp32 to 1e-6 of each array's largest number, from a
    checkpoint of either, sampled from weights that were published; large arrays are in host memory and small ones are not."""
    tests = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, str(tests / "helpers" / "streamed_worker.py"), str(devices), str(tmp_path), json.dumps(options),
                           *roles], capture_output=True, text=True, cwd=tests,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["first"], found["from plain"], found["from streamed"]) <= 1e-6, found
    assert found["exports"] <= 1e-4  # behind two steps
    for name, kinds in found["kinds"].items():
        if kinds and name in (*roles, *("optimizer",) * ("policy" in roles)):
            assert kinds.get("True", memory.HOST) == memory.HOST != kinds.get("False"), (name, kinds)
    assert found["kinds"]["policy"]["True"] == memory.HOST


@pytest.mark.parametrize("changes, message", [
    ({"mesh.roles": {"sampler": {"rest": "streamed"}}}, "mesh.roles.sampler.rest='streamed': choose device or none"),
    ({"mesh.roles": {"policy": {"rest": "streamed"}}, "model.scan_layers": "false"},
     "mesh.roles.policy.rest=streamed with model.scan_layers=false: .* set model.scan_layers=auto or true"),
    ({"mesh.roles": {"policy": {"rest": "streamed"}}, "model.remat": "none"},
     "mesh.roles.policy.rest=streamed with model.remat=none: .* set model.remat=auto, full or offload"),
    ({"mesh.roles": {"policy": {"rest": "streamed"}}, "optimizer.name": "optax.contrib.muon"},
     "rest=streamed with optimizer.name=optax.contrib.muon: .* choose one of adamw, adam, sgd, lion, adafactor, or mesh"),
    ({"mesh.roles": {"critic": {"rest": "streamed"}}, "algorithm.preset": "ppo", "critic.shared": False,
      "critic.optimizer": {"name": "optax.contrib.muon"}}, "rest=streamed with critic.optimizer.name=optax.contrib.muon"),
])
def test_what_cannot_be_streamed_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(job(tmp_path, changes))


def test_streamed_layers_are_recomputed_where_memory_is_scarce():
    """model.remat=auto of a small model on a TPU."""
    spec = lambda **roles: resolve(job("runs/x", {"mesh.roles": roles}), Platform("tpu", "bf16"), tiny_job.MODEL)  # noqa: E731
    assert spec().model.remat == "none" and spec(policy={"rest": "streamed"}).model.remat == "full"


def test_offload_is_refused_where_there_is_no_host_memory(monkeypatch):
    monkeypatch.setattr(memory, "can_rest", lambda device: False)
    c = default_config()
    c.optimizer.offload = True
    inputs = setup.ModelInputs(None, {}, (0,), None)
    with pytest.raises(ConfigError, match="optimizer.offload: a cpu cannot keep"):
        setup.open_job(c, inputs)


def test_what_rests_is_moved_and_the_rest_is_not():
    x = jax.device_put(np.arange(4.0), jax.devices()[0])
    there = memory.to_host({"a": x})["a"]
    back = memory.to_devices({"a": there, "b": x})
    assert memory.rests(there) and not memory.rests(back["a"]) and back["b"] is x
    np.testing.assert_array_equal(back["a"], x)
    assert memory.to_devices(()) == () == memory.to_host(())  # the state of an optimizer that has none
