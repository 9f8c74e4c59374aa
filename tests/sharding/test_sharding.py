"""Meshes: what is equal on all of them, what a device holds, and rules that are refused. Eight simulated devices are a
process of their own (sharded_layouts.py)."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.sharding import check_recurrent, make_mesh, spec_for
from jaxrl.sharding.mesh import AXES

# evidence/sharding.py
MESHES = ("8,1,1", "4,2,1", "2,4,1", "1,8,1", "4,1,2", "2,2,2", "1,4,2", "2,1,4", "1,2,4", "1,1,8")
SOME = ("8,1,1", "2,4,1", "4,1,2", "2,2,2", "1,1,8")


def on_eight(what, folder, *meshes):
    """(what sharded_layouts.py prints, by mesh, its stderr)."""
    worker = Path(__file__).parents[1] / "helpers" / "sharded_layouts.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, worker.parents[1:3]))}
    done = subprocess.run([sys.executable, worker, what, folder, *meshes], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {",".join(map(str, row["mesh"])): row for row in rows}, done.stderr


@dataclasses.dataclass(frozen=True)
class Device:
    """What making a mesh asks of a device of several slices."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "some chip"


@pytest.mark.parametrize("sizes, slices, inside", [
    ((2, 2, 1, 1, 2), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),  # replicated over slices, split inside
    ((1, 4, 1, 1, 2), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ((2, 1, 1, 2, 2), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ((1, 2, 2, 1, 2), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ((2, 4, 1, 1, 1), 4, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
])
def test_cp_ep_and_tp_stay_inside_a_slice_and_dp_runs_over_slices_first(sizes, slices, inside):
    config = default_config().mesh
    config.dp, config.fsdp, config.cp, config.ep, config.tp = sizes
    devices = [Device(i, i * slices // 8) for i in range(8)]
    mesh = make_mesh(config, devices[::-1])
    of = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert mesh.devices.shape == sizes and (of == of[:, :, :1, :1, :1]).all()
    if sizes[0] == slices:
        assert (of == of[:, :1, :1]).all()
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert [set(ids[of == i].tolist()) for i in range(slices)] == inside


def test_a_shape_that_jax_cannot_fit_to_the_torus_splits_an_axis_of_it(monkeypatch):
    def refuses(*args, **kwargs):
        raise NotImplementedError("Failed to find assignment for logical_axis_index")

    monkeypatch.setattr(jax, "make_mesh", refuses)
    config = default_config().mesh
    config.dp, config.fsdp, config.tp = 1, 4, 2
    mesh = make_mesh(config, [Device(i, 0) for i in range(8)])
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 4, "cp": 1, "ep": 1, "tp": 2} and {d.id for d in mesh.devices.flat} == set(range(8))


@pytest.mark.parametrize("size, over", [(7168, ("fsdp", "ep")), (512, "fsdp"), (40, "ep"), (7, None)])
def test_a_dimension_is_split_as_far_as_it_can_be(size, over):
    """Over 128 x 8 devices: not whole on all of them because one axis does not divide it."""
    mesh = SimpleNamespace(shape={"dp": 1, "fsdp": 128, "cp": 1, "ep": 8, "tp": 1})
    assert spec_for("a matrix", ("embed", None), (size, 3), mesh) == jax.sharding.PartitionSpec(over, None)


def test_tp_across_slices_is_refused():
    config = default_config().mesh
    config.dp, config.fsdp, config.tp = 1, 1, 8
    with pytest.raises(ConfigError,
                       match="mesh.dp=1, mesh.fsdp=1, mesh.cp=1, mesh.ep=1, mesh.tp=8: the devices are 2 slices, which cp, ep "
                                          "and tp cannot cross; make mesh.dp a multiple of 2"):
        make_mesh(config, [Device(i, i // 4) for i in range(8)])


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.slow
def test_numbers_and_shares_on_meshes(tmp_path):
    """Meshes with the same dp x fsdp and tp: log-probs and gradients bitwise equal. All: within 1e-5 of the first. A
    device holds 1 / (fsdp x tp) of all matrices and of their moments (at tp 8 the four key-value heads are whole)."""
    found, stderr = on_eight("numbers", tmp_path, *SOME)
    assert "rematerialization" not in stderr
    arrays = {mesh: dict(np.load(tmp_path / f"{mesh}.npz")) for mesh in SOME}
    first_of = {}
    for mesh in SOME:
        dp, fsdp, tp = map(int, mesh.split(","))
        assert found[mesh]["microbatches"] == 2
        assert found[mesh]["share"] == found[mesh]["moments"] and (tp == 8 or found[mesh]["share"] == 1 / (fsdp * tp))
        like = arrays[first_of.setdefault((dp * fsdp, tp), mesh)]
        for name, value in arrays[mesh].items():
            np.testing.assert_array_equal(value, like[name], err_msg=f"{mesh} {name}")
            assert relative(value, arrays[SOME[0]][name]) < 1e-5, (mesh, name)
    assert sorted(first_of.values()) == ["1,1,8", "4,1,2", "8,1,1"]
    assert found["1,1,8"]["share"] < 0.27


# Unsharded, then without ep, with ep on one and on several of each other axis, and with all devices in it.
EXPERTS = ("1,1,1,1", "8,1,1,1", "2,2,2,1", "1,4,2,1", "4,1,2,1", "1,1,8,1", "1,2,2,2", "1,1,2,4")


@first_cases(1, "meshes", [pytest.param(("1,1,1,1", "2,2,2,1", "1,4,2,1"), marks=pytest.mark.slow),
                                    pytest.param(EXPERTS, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_experts_on_meshes(meshes, tmp_path):
    """As one device: log-probs, loss and gradients within 1e-5 in fp32, gradients within 1e-12 of each tensor in float64.
    Bitwise equal where ep, tp and the data shards are the same. A device holds its share of matrices and moments."""
    found, stderr = on_eight("experts", tmp_path, *meshes)
    assert "rematerialization" not in stderr
    first_of = {}
    for mesh in meshes:
        dp, fsdp, ep, tp = map(int, mesh.split(","))
        assert found[mesh]["share"] == found[mesh]["moments"] < 1.03 / (fsdp * ep * tp)
        for kind, bound in (("", 1e-5), (".float64", 1e-12)):
            arrays, whole, like = (dict(np.load(tmp_path / f"{m}{kind}.npz"))
                                   for m in (mesh, meshes[0], first_of.setdefault((dp * fsdp, ep, tp), mesh)))
            for name, value in arrays.items():
                assert kind == "" or value.dtype == np.float64
                assert relative(value, whole[name]) < bound, (mesh, name)
                np.testing.assert_array_equal(value, like[name], err_msg=f"{mesh} {name}")
    assert len(first_of) < len(meshes)


@pytest.mark.slow
def test_biases_and_sinks_on_meshes(tmp_path):
    """gpt-oss, as one device: what devices of ep and tp sum up holds an expert's bias once, and each has the sinks of its
    heads, where heads are split and where tp divides their groups too."""
    meshes = ("1,1,1,1", "1,2,2,2", "1,1,1,8")
    on_eight("gpt_oss", tmp_path, *meshes)
    for kind, bound in (("", 1e-5), (".float64", 1e-12)):
        whole, *others = (dict(np.load(tmp_path / f"{m}{kind}.npz")) for m in meshes)
        assert sum("bias" in name or "sinks" in name for name in whole) == 2 * 9
        for name in whole:
            assert np.linalg.norm(whole[name]) and all(relative(other[name], whole[name]) < bound for other in others), name


@pytest.mark.slow
@first_cases(1, "case, arrays", [("hybrid", 13), ("mamba", 16)])
def test_recurrent_layers_on_meshes(tmp_path, case, arrays):
    """As one device: rows with shared prompts, heads over tp, experts over ep."""
    meshes = ("1,1,1,1", "1,2,2,2", "2,1,1,4")
    _, stderr = on_eight(case, tmp_path, *meshes)
    assert "rematerialization" not in stderr
    for kind, bound in (("", 1e-5), (".float64", 1e-12)):
        whole, *others = (dict(np.load(tmp_path / f"{m}{kind}.npz")) for m in meshes)
        assert sum("recurrent" in name for name in whole) == arrays
        for name in whole.keys() - {"layer_1/mlp/router/correction"}:  # which is fixed
            far = {mesh: relative(other[name], whole[name]) for mesh, other in zip(meshes[1:], others, strict=True)}
            cancels = 10 if name.endswith(("recurrent/rate", "recurrent/shift")) and not kind else 1  # sums of terms 100 times as large
            assert np.linalg.norm(whole[name]) and max(far.values()) < bound * cancels, (name, far)


@first_cases(1, "case, meshes", [
    pytest.param("cut_recurrent", ("1,1,1,1,1", "1,1,4,1,1"), marks=pytest.mark.slow),
    pytest.param("cut_mamba", ("1,1,1,1,1", "1,1,2,1,2"), marks=pytest.mark.slow),
    pytest.param("cut_recurrent", ("1,1,1,1,1", "1,1,2,1,2", "2,1,2,1,1"), marks=pytest.mark.nightly)])
def test_recurrent_layers_cut_over_cp(case, meshes, tmp_path):
    """As one device, in float64: dealt tiles of prompts and completions, whose devices exchange tokens for heads; where one key head
    serves all value heads, it is whole on every device."""
    _, stderr = on_eight(case, tmp_path, *meshes)
    assert "rematerialization" not in stderr
    whole, *others = (dict(np.load(tmp_path / f"{m}.npz")) for m in meshes)
    for name in whole:
        far = {mesh: relative(other[name], whole[name]) for mesh, other in zip(meshes[1:], others, strict=True)}
        assert np.linalg.norm(whole[name]) and max(far.values()) < 1e-12, (name, far)


def test_meshes_that_do_not_split_a_recurrence():
    sizes = dict(zip(AXES, (1, 1, 1, 1, 3), strict=True))
    with pytest.raises(ConfigError, match="mesh.tp=3 does not divide the model's 16 heads of recurrent layers; make it one of 1, 2, 4, 8, 16"):
        check_recurrent(sizes, 16)
    with pytest.raises(ConfigError, match="mesh.roles.reference.cp=4 times mesh.roles.reference.tp=8 does not divide.*make their product one of"):
        check_recurrent(sizes | {"cp": 4, "tp": 8}, 16, "mesh.roles.reference")
    check_recurrent(sizes | {"cp": 2}, 0)
    check_recurrent(sizes | {"cp": 2, "tp": 8}, 16)


# One device; cp alone; beside each other axis.
CUT = ("1,1,1,1,1", "1,1,2,1,1", "1,1,4,1,1", "1,2,2,2,1", "1,1,4,1,2")


@pytest.mark.full
@pytest.mark.parametrize("model, meshes", [pytest.param("cut", CUT[::4], marks=pytest.mark.slow),
                                           pytest.param("cut", CUT, marks=pytest.mark.nightly),
                                           pytest.param("cut_ring", CUT[::4], marks=pytest.mark.slow),
                                           pytest.param("cut_ring", CUT, marks=pytest.mark.nightly),
                                           pytest.param("cut_latent", CUT[::4], marks=pytest.mark.nightly),
                                           pytest.param("cut_hybrid", CUT[:3], marks=pytest.mark.nightly)])
def test_rows_cut_over_cp(model, meshes, tmp_path):
    """`mesh.cp`. As one device, token by token: shared prompts, windows, sinks, experts whose routes are replayed, sums over sequences
    that lie over several devices, log-probs, values, loss, metrics, gradients. In fp32 within 1e-5, in float64 1e-12. Gathered keys, and
    keys in a ring."""
    _, stderr = on_eight(model, tmp_path, *meshes)
    assert "rematerialization" not in stderr
    for kind, bound in (("", 1e-5), (".float64", 1e-12)):
        whole, *others = (dict(np.load(tmp_path / f"{m}{kind}.npz")) for m in meshes)
        for name, value in whole.items():
            for mesh, other in zip(meshes[1:], others, strict=True):
                if name == "routes":
                    np.testing.assert_array_equal(other[name], value)
                else:
                    assert np.linalg.norm(other[name] - value) <= bound * np.linalg.norm(value), (mesh, name)


@pytest.mark.slow
def test_attention_in_a_ring_over_devices(tmp_path):
    """The reference, XLA's blocks and the TPU kernels (interpreted) over four devices."""
    on_eight("rings", tmp_path, "1,1,4,1,1")


@pytest.mark.slow
def test_all_tokens_to_the_same_experts(tmp_path):
    """Whose device of ep computes alone: the same program as of an even routing, nothing dropped, and temporaries that are
    no larger than those of all experts on one device, and grow with the tokens a device has, not with what comes to it."""
    found, _ = on_eight("piled", tmp_path, "1,1,1,1", "2,2,2,1", "1,1,8,1")
    for mesh, row in found.items():
        two, four = row["temporaries"]
        assert row["piled"] < 5e-6, (mesh, row)
        assert two < 1.1 * found["1,1,1,1"]["temporaries"][0] and four - two < 3 * row["tokens"], (mesh, row)


@pytest.mark.nightly
def test_layers_are_gathered_one_by_one(tmp_path):
    """Temporaries stay below the activations, two gathered layers (of twelve), and a copy of the device's own weights,
    which the CPU lays out anew before it gathers them; compiled for a TPU one layer remains (evidence/sharding.py).
    Activations: the temporaries where weights and gradients are whole anyway, as arguments and results."""
    found, stderr = on_eight("memory", tmp_path, "8,1,1", "2,4,1", "1,8,1", "4,1,2", "2,2,2", "1,4,2")
    assert "rematerialization" not in stderr
    for whole, meshes in (("8,1,1", ("2,4,1", "1,8,1")), ("4,1,2", ("2,2,2", "1,4,2"))):
        base, tp = found[whole], int(whole[-1])
        for mesh in meshes:
            own = base["layers"] * base["layer"] / tp / int(mesh.split(",")[1])
            assert found[mesh]["temporaries"] < base["temporaries"] + 2 * base["layer"] / tp + own, (mesh, found)


@pytest.mark.slow
def test_the_log_prob_kernel_on_split_vocabularies(tmp_path):
    """With and without a sampling support, soft-cap and temperature, an empty row: as the reference, to fp32's
    precision."""
    found, _ = on_eight("logprob", tmp_path, "8,1,1", "2,2,2", "1,1,8")
    bounds = {"divergence": 5e-6}  # of differences of log-probs: they cancel
    assert all(worst < bounds.get(name, 2e-6) for row in found.values() for name, worst in row["worst"].items()), found


@pytest.mark.nightly
def test_a_whole_step(tmp_path):
    """Rollout, rewards, reference, update, publish. The sampler's log-probs are the trainer's. (All meshes:
    evidence/sharding.py)"""
    found, stderr = on_eight("steps", tmp_path, "2,2,2")
    assert "rematerialization" not in stderr
    assert all(row["steps"] == 1 and np.isfinite(row["loss"]) and row["gap"] < 2e-5 for row in found.values()), found
