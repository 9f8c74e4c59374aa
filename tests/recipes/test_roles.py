"""mesh.roles: devices and shape of each role, and what rests in host memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl import sharding
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check
from jaxrl.rollout import embedded
from jaxrl.sharding.mesh import indices


def config(roles, **options):
    c = default_config()
    c.model.init, c.model.tokenizer, c.data.path = "random", "jaxrl://arith/tokenizer", ("some.jsonl",)
    c.model.config.update({"model_type": "qwen2"})
    c.reward.functions = ("boxed",)
    for name, value in options.items():
        put(c, name.replace("__", "."), value)
    put(c, "mesh.roles", roles)
    return c


@pytest.mark.slow
def test_roles_on_devices_of_their_own_change_nothing(tmp_path):
    """PPO with critic and reference on eight devices (roles_worker.py): policy on one half, critic and reference on the other in
    different shapes, the sampler on two devices; and all of them at rest in host memory between their uses. Three steps, with a
    reset of the reference: tokens, losses and all parameters equal those of the shared mesh, bitwise."""
    worker = Path(__file__).parents[1] / "helpers" / "roles_worker.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, worker.parents[1:3]))}
    done = subprocess.run([sys.executable, worker, tmp_path], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    shared, halves, rests = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    for other in (halves, rests):
        assert other["tokens"] == [True] * 3 and set(other["worst"].values()) == {0.0}
        assert (other["loss"], other["value"]) == (shared["loss"], shared["value"]) and min(shared["value"]) > 1e-3
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert halves["places"] == {"policy": first, "critic": second, "reference": second, "sampler": [6, 7], "kinds": ["device"]}
    assert halves["roles"]["critic"]["devices"] == "4-7"
    assert rests["places"]["kinds"] == ["pinned_host"] and shared["places"]["critic"] == first


def test_devices_are_all_or_ranges():
    assert indices("all", 3) == [0, 1, 2] and indices("0-2,5", 6) == [0, 1, 2, 5] and indices("1", 2) == [1]
    for text, why in (("4-7", "names device 7, but a process has 4, from 0 to 3"), ("a", "is neither"), ("-1", "is neither"),
                      ("1,1", "names a device twice"), ("0,3-1", 'ends before it begins, "3-1"; write "1-3"'), ("1-", "is neither"),
                      ("", "is neither"), ("0-99999999999999", "names device 99999999999999")):
        with pytest.raises(ValueError, match=why):
            indices(text, 4)


def meshes(processes, per_process, roles, **sizes):
    device = lambda p, i: SimpleNamespace(id=p * 10 + i, process_index=p, platform="gpu", device_kind="x", slice_index=0)  # noqa: E731
    devices = [device(p, i) for p in range(processes) for i in range(per_process)]
    c = config(roles)
    for name, size in sizes.items():
        c.mesh[name] = size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "make_mesh", lambda shape, axes, axis_types, devices: SimpleNamespace(
            shape=dict(zip(axes, shape, strict=True)), ids=[d.id for d in devices]))
        return sharding.role_meshes(c.mesh, devices)


def test_a_role_has_the_same_slice_of_every_process():
    found = meshes(2, 4, {"policy": {"devices": "0-1"}, "critic": {"devices": "2,3", "tp": 2}})
    assert found["policy"].ids == [0, 1, 10, 11] and found["critic"].ids == [2, 3, 12, 13]
    assert found["policy"].shape == {"dp": 1, "fsdp": 4, "cp": 1, "ep": 1, "tp": 1}
    assert found["critic"].shape == {"dp": 1, "fsdp": 2, "cp": 1, "ep": 1, "tp": 2}
    assert found["reference"] is found["policy"] is found["sampler"]


def test_a_role_may_have_whole_processes():
    found = meshes(4, 2, {"reference": {"processes": "2-3", "tp": 2}})
    assert found["reference"].ids == [20, 21, 30, 31] and found["reference"].shape == {"dp": 1, "fsdp": 2, "cp": 1, "ep": 1, "tp": 2}
    with pytest.raises(ConfigError, match="mesh.roles.reference.processes='4' names process 4, but the job has 4, from 0 to 3"):
        meshes(4, 2, {"reference": {"processes": "4"}})


def test_a_role_may_have_a_shape_of_its_own_on_all_devices():
    found = meshes(1, 4, {"sampler": {"dp": -1, "tp": 2}}, fsdp=4)
    assert found["sampler"].shape == {"dp": 2, "fsdp": 1, "cp": 1, "ep": 1, "tp": 2} and found["sampler"].ids == found["policy"].ids
    with pytest.raises(ConfigError, match="mesh.roles.critic on 2 of 4 devices: mesh.dp=1, mesh.fsdp=4, mesh.cp=1, mesh.ep=1, mesh.tp=1: "
                                          "mesh asks for 4 devices, 2 are available"):
        meshes(1, 4, {"critic": {"devices": "0-1", "fsdp": 4}})
    with pytest.raises(ConfigError, match="mesh.roles.critic.devices='4-7' names device 7, but a process has 4"):
        meshes(1, 4, {"critic": {"devices": "4-7"}})


@pytest.mark.parametrize("roles, options, message", [
    ({"judge": {}}, {}, "mesh.roles.judge: there is no such role; choose from policy, reference, critic, teacher, sampler"),
    ({"policy": {"device": "0"}}, {}, "mesh.roles.policy.device: unknown; choose from devices, processes, dp, fsdp, cp, ep, tp, rest"),
    ({"policy": {"fsdp": 0}}, {}, "mesh.roles.policy.fsdp=0: sizes are positive"),
    ({"policy": {"devices": 3}}, {}, "mesh.roles.policy.devices=3: must be text"),
    ({"policy": {"rest": "none"}}, {}, "mesh.roles.policy.rest='none': choose device or host"),
    ({"sampler": {"rest": "host"}}, {}, "mesh.roles.sampler.rest='host': choose device or none"),
    ({"critic": {"processes": "0"}}, {"algorithm__preset": "ppo"}, "mesh.roles.critic.processes='0': what learns, and the sampler"),
    ({"reference": {"processes": "0"}}, {"algorithm__kl__coef": 0.1, "reference__reset_steps": 2}, "are not sent to other hosts"),
    ({"critic": {"devices": "0"}}, {}, "mesh.roles.critic: there is no critic of its own"),
    ({"critic": {"devices": "0"}}, {"algorithm__preset": "ppo", "critic__shared": True}, "there is no critic of its own"),
    ({"reference": {"devices": "0"}}, {}, "mesh.roles.reference: there is no reference without a KL term"),
    ({"sampler": {"devices": "0"}}, {"rollout__engine": "vllm"}, "mesh.roles.sampler: rollout.engine=vllm has devices of its own"),
    ({"critic": {"devices": "0"}}, {"run__recipe": "sft"}, "mesh.roles.critic: run.recipe=sft has no critic"),
])
def test_roles_that_cannot_be(roles, options, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check(config(roles, **options))


def test_roles_of_a_job_with_all_of_them_pass():
    check(config({"policy": {"devices": "0-3", "rest": "host"}, "critic": {"devices": "4-7"}, "reference": {"fsdp": 2, "dp": -1},
                  "sampler": {"rest": "none"}}, algorithm__preset="ppo", algorithm__kl__coef=0.1))


@pytest.mark.slow
def test_colocated_is_a_sampler_that_rests(tmp_path, monkeypatch):
    """The embedded engine under rollout.placement=colocated leaves the devices for every update, and the run is the same one."""
    from helpers.run_tools import ROOT, fingerprint

    from jaxrl.api import train
    from jaxrl.config.load import load_config

    rests, real = [], embedded.EmbeddedEngine.sleep
    monkeypatch.setattr(embedded.EmbeddedEngine, "sleep", lambda self: (rests.append(self._version), real(self))[1])
    for placement in ("auto", "colocated"):
        train(load_config(str(ROOT / "tests/helpers/tiny_job.py"), {
            "run.dir": str(tmp_path / placement), "rollout.placement": placement, "train.steps": 2, "eval.max_rows": 2}))
    assert rests == [-1, 0, 1]
    assert fingerprint(tmp_path / "auto") == fingerprint(tmp_path / "colocated")


@pytest.mark.full
def test_a_resting_sampler_holds_nothing_and_comes_back(tmp_path):
    """The same answer before and after; no rest while a request is on its way."""
    from helpers.rollout_helpers import HF, random_params, requests

    from jaxrl import models

    c = config({}, rollout__prompt_lengths=(32,), data__max_prompt_tokens=32, rollout__max_new_tokens=8, rollout__slots=2)
    model = models.build(HF, compute_dtype=np.float32, scan_layers=False)
    engine = embedded.make_engine(c, model, None, None, (1,))
    params, answers = random_params(model, 0, 0.1), []
    for _ in range(2):
        engine.publish(params, 0)
        engine.submit(requests(1, max_new_tokens=4))
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            engine.sleep()
        while not (found := engine.poll(5.0)):
            pass
        answers.append(found[0].tokens.tolist())
        engine.sleep()
        assert engine._params is None and engine._cache is None and not engine.health().ok
    assert answers[0] == answers[1] and len(answers[0]) > 0
    engine.close()
