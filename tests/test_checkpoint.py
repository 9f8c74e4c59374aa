"""Checkpoints: what goes in comes out bit by bit, whatever happens on the way."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.checkpoint_worker import host, state
from helpers.tiers import nightly

from jaxrl.checkpoint import checkpointer as checkpoint
from jaxrl.checkpoint.checkpointer import FORMAT, Checkpointer, CheckpointError, flatten
from jaxrl.checkpoint.files import DamagedCheckpoint, crc_of, verify
from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.processes.faults import FaultError, Faults
from jaxrl.resolve.checks import common

WORKER = str(Path(__file__).with_name("helpers") / "checkpoint_worker.py")


def make(run_dir, faults=(), **options):
    config = default_config()
    for name, value in options.items():
        config.checkpoint[name] = value
    return Checkpointer(run_dir, config, Faults(faults))


def same(a, b) -> bool:
    """Equal structure, types, dtypes and bits (NaN payloads and signed zeros included)."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(isinstance(x, np.ndarray) == isinstance(y, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape
               and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def tree():
    params = {"layer_0": {"w": jnp.arange(12.0).reshape(3, 4) / 7}, "nothing": {},
              "pair": ((), jnp.ones(3, jnp.bfloat16))}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.masked(optax.scale(1.0), False))
    odd = np.array([0x7fc00001, 0x80000000, 0x7f800000, 0x00000001], np.uint32).view(np.float32)  # NaN payload, -0, inf
    return {"params": params, "opt": tx.init(params), "odd": jnp.asarray(odd), "flag": jnp.array(True),
            "key": jax.random.key_data(jax.random.key(3)),
            "rows": np.arange(5, dtype=np.int64), "no rows": np.zeros((0, 2), np.int32)}


# ---- round trip

@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_kind_of_leaf_comes_back_bit_by_bit(tmp_path, asynchronous):
    arrays = tree()
    told = {"cursor": 2**62, "lr": 0.1, "accuracy": 1 / 3, "names": ["a", None, True], "nested": {"empty": {}}}
    checkpointer = make(tmp_path, asynchronous=asynchronous)
    assert checkpointer.save(7, arrays, told)
    assert asynchronous or checkpointer.steps() == [7]
    checkpointer.close()
    restored = make(tmp_path).restore(arrays)
    assert (restored.step, restored.host) == (7, told)
    assert same(restored.arrays, arrays)
    assert type(restored.arrays["opt"][1][0]) is type(arrays["opt"][1][0])  # NamedTuples of optax


def test_abstract_leaves_are_enough_to_restore(tmp_path):
    arrays = tree()
    make(tmp_path, asynchronous=False).save(1, arrays, {})
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for sharding in (where, None):
        abstract = jax.tree.map(lambda x, s=sharding: x if isinstance(x, np.ndarray) else
                                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays)
        assert same(make(tmp_path).restore(abstract).arrays, arrays)


def test_an_asynchronous_save_survives_donation_and_overwriting(tmp_path):
    """The caller donates device buffers and reuses numpy buffers as soon as save() returns."""
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpointer = make(tmp_path, keep=10)
    for step in range(1, 5):
        device, rows = jnp.arange(1_000_000, dtype=jnp.float32) + step, np.full(100_000, step)
        checkpointer.save(step, {"device": device, "rows": rows}, {})
        overwrite(device).block_until_ready()
        rows[:] = -1
    checkpointer.close()
    for step in range(1, 5):
        got = make(tmp_path).restore({"device": jnp.zeros(1_000_000), "rows": np.zeros(100_000, int)},
                                     str(tmp_path / "checkpoints" / f"{step:08d}")).arrays
        assert np.array_equal(got["device"], np.arange(1_000_000, dtype=np.float32) + step)
        assert np.array_equal(got["rows"], np.full(100_000, step))


def test_restored_on_any_number_of_devices(tmp_path):
    """Written by a process with 8 devices; read on 8, 4 (another axis) and 1 there, and by this process."""
    out = subprocess.run([sys.executable, WORKER, "meshes", str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == ["restored on 8 8", "restored on 4 4", "restored on 1 1"]
    whole = np.arange(64 * 24, dtype=np.float32).reshape(64, 24) / 7
    here = make(tmp_path).restore({"w": jax.ShapeDtypeStruct((64, 24), jnp.float32),
                                   "half": jax.ShapeDtypeStruct((64, 24), jnp.bfloat16)}).arrays
    assert np.array_equal(here["w"], whole)


def test_a_part_can_be_restored_alone(tmp_path):
    make(tmp_path, asynchronous=False).save(1, tree(), {})
    params = {"params": tree()["params"]}
    assert same(make(tmp_path).restore(params, partial=True).arrays, params)
    with pytest.raises(CheckpointError, match="is not part of this run"):
        make(tmp_path).restore(params)


# ---- which checkpoint

def saved(run_dir, steps, **options):
    checkpointer = make(run_dir, **options)
    checkpointer.restore(state(0))
    for step in steps:
        checkpointer.save(step, state(step), host(step))
    checkpointer.close()
    return checkpointer


def test_the_newest_are_kept_and_a_step_is_saved_once(tmp_path):
    checkpointer = saved(tmp_path, range(1, 6), keep=2)
    assert checkpointer.steps() == [4, 5]
    assert not checkpointer.save(5, state(6), {})
    assert same(make(tmp_path).restore(state(0)).arrays, state(5))


def test_minus_one_keeps_all_checkpoints(tmp_path):
    assert saved(tmp_path, range(1, 6), keep=-1).steps() == [1, 2, 3, 4, 5]
    config = default_config()
    for keep in (0, -2):
        config.checkpoint.keep = keep
        with pytest.raises(ConfigError, match=f"checkpoint.keep={keep}: must be above 0, or -1 for all"):
            common.check(config)


def test_resume_policies(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    assert make(run).restore(state(0), "auto") is None
    assert not run.exists()  # looking leaves nothing behind
    with pytest.raises(CheckpointError, match="run.resume=must"):
        make(run).restore(state(0), "must")
    saved(run, [1, 2])
    assert make(run).restore(state(0), "never") is None
    assert make(run).restore(state(0), "must").step == 2
    assert make(other).restore(state(0), str(run)).step == 2
    assert make(other).restore(state(0), str(run / "checkpoints")).step == 2
    assert make(other).restore(state(0), str(run / "checkpoints" / "00000001")).step == 1
    with pytest.raises(CheckpointError, match="neither auto, must or never nor an existing directory"):
        make(run).restore(state(0), "atuo")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run directory"):
        make(run).restore(state(0), str(tmp_path))


def test_going_back_sets_the_later_checkpoints_aside(tmp_path, caplog):
    saved(tmp_path, [1, 2, 3])
    back = make(tmp_path)
    assert back.restore(state(0), str(tmp_path / "checkpoints" / "00000001")).step == 1
    assert back.steps() == [1, 2, 3]  # restoring alone changes nothing
    back.save(2, state(20), host(20))
    back.close()
    assert back.steps() == [1, 2]
    assert same(make(tmp_path).restore(state(0)).arrays, state(20))
    assert sorted(p.name for p in back.directory.glob("*aside*")) == ["00000002.set-aside", "00000003.set-aside"]
    afresh = make(tmp_path)
    assert afresh.restore(state(0), "never") is None
    afresh.save(1, state(30), host(30))
    afresh.close()
    assert afresh.steps() == [1]
    assert "00000002.set-aside-1" in [p.name for p in back.directory.iterdir()]


# ---- damage

def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    os.truncate(largest(folder), largest(folder).stat().st_size // 2)


def flip_a_bit(folder):
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 1
    largest(folder).write_bytes(data)


def delete_one(folder):
    largest(folder).unlink()


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


def lose_the_host_item(folder):
    (folder / "host" / "metadata").write_text("")


DAMAGE = {truncate: "bytes instead of", flip_a_bit: "other content", delete_one: "is missing",
          lose_the_manifest: "manifest.json cannot be read", lose_the_host_item: "0 bytes instead of"}


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_newest_falls_back_loudly(tmp_path, damage, caplog):
    checkpointer = saved(tmp_path, [1, 2, 3])
    newest = checkpointer.directory / "00000003"
    damage(newest)
    with pytest.raises(DamagedCheckpoint, match=DAMAGE[damage]):
        verify(newest)
    fallen = make(tmp_path)
    with caplog.at_level(logging.ERROR, "jaxrl"):
        restored = fallen.restore(state(0))
    assert restored.step == 2 and restored.host == host(2) and same(restored.arrays, state(2))
    assert "CHECKPOINT DAMAGED" in caplog.text and str(newest) in caplog.text and DAMAGE[damage] in caplog.text
    fallen.save(3, state(3), host(3))  # the same step again
    fallen.close()
    assert same(make(tmp_path).restore(state(0)).arrays, state(3))


def test_a_newest_that_cannot_be_read_falls_back_loudly(tmp_path, monkeypatch, caplog):
    """A disk's read error (EIO), which no file on a healthy disk has."""
    checkpointer = saved(tmp_path, [1, 2])
    broken = largest(checkpointer.directory / "00000002")

    def crc(path):
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return crc_of(path)

    monkeypatch.setattr("jaxrl.checkpoint.files.crc_of", crc)
    with caplog.at_level(logging.ERROR, "jaxrl"):
        assert make(tmp_path).choose("auto").step == 1
    assert f"CHECKPOINT DAMAGED: {checkpointer.directory / '00000002'}" in caplog.text and "Input/output error" in caplog.text
    with pytest.raises(CheckpointError, match=f"{broken.name} cannot be read"):
        make(tmp_path).choose(str(checkpointer.directory / "00000002"))


def test_a_named_checkpoint_is_never_replaced_by_another(tmp_path):
    checkpointer = saved(tmp_path, [1, 2])
    newest = checkpointer.directory / "00000002"
    truncate(newest)
    with pytest.raises(CheckpointError, match="is damaged"):
        make(tmp_path).restore(state(0), str(newest))
    truncate(checkpointer.directory / "00000001")
    with pytest.raises(CheckpointError, match="all 2 checkpoints .* are damaged; run.resume=never"):
        make(tmp_path).restore(state(0))


def test_another_structure_is_named_and_no_reason_to_fall_back(tmp_path):
    saved(tmp_path, [1, 2])
    wanted = state(0)
    wanted["params"]["extra"] = wanted["params"].pop("layer_0")
    wanted["params"]["layer_1"] = jnp.zeros((64, 32))
    wanted["moments"] = (wanted["moments"][0].astype(jnp.bfloat16), ())
    with pytest.raises(CheckpointError) as e:
        make(tmp_path).restore(wanted)
    for text in ("params/extra is not in it", "params/layer_0 is not part of this run", "00000002", "config.json",
                 "params/layer_1 was saved as float32[64, 64], this run needs float32[64, 32]",
                 "moments/0 was saved as float32[1000], this run needs bfloat16[1000]"):
        assert text in str(e.value)


def test_format_1_had_leaves_that_nothing_read(tmp_path, monkeypatch):
    """Checkpoints of that time come back without them; another leaf that is not asked for is refused as ever."""
    state = {"step": jnp.ones((), jnp.int32), "critic": {"step": jnp.zeros((), jnp.int32)}}
    extra = {"version": jnp.zeros((), jnp.int32), "rng": jax.random.key_data(jax.random.key(3))}
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    make(tmp_path, asynchronous=False).save(4, {**state, **extra, "critic": {**state["critic"], **extra}}, {})
    monkeypatch.undo()
    assert same(make(tmp_path).restore(state).arrays, state)
    with pytest.raises(CheckpointError, match="critic/step is not part of this run"):
        make(tmp_path).restore({"step": state["step"]})
    make(tmp_path, asynchronous=False).save(5, state | extra, {})
    with pytest.raises(CheckpointError, match="rng is not part of this run; version is not part of this run"):
        make(tmp_path).restore(state)


def test_a_newer_format_is_refused_with_the_versions(tmp_path):
    folder = saved(tmp_path, [1]).directory / "00000001"
    item = folder / "host" / "metadata"
    envelope = json.loads(item.read_text())
    assert envelope["format"] == FORMAT and envelope["jaxrl"]
    item.write_text(json.dumps(envelope | {"format": FORMAT + 1, "jaxrl": "9.9"}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["host/metadata"] = [item.stat().st_size, crc_of(item)]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1} of jaxrl 9.9.*upgrade"):
        make(tmp_path).restore(state(0))


@pytest.mark.parametrize("arrays, told, message", [
    ({"a": 3}, {}, "a is int, not an array"),
    ({"a": {"key": jax.random.key(0)}}, {}, "a/key is a typed PRNG key"),
    ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, {}, "two leaves have the path 'a/b'"),
    ({}, {"a": [{"b": np.float32(1)}]}, "host.a[0].b is float32"),
    ({}, {"a": {1: 2}}, "host.a has the key 1"),
])
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, arrays, told, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make(tmp_path).save(1, arrays, told)
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_may_hold_no_arrays_at_all(tmp_path):
    make(tmp_path, asynchronous=False).save(1, {"empty": {}, "pair": ()}, {"cursor": 3})
    restored = make(tmp_path).restore({"empty": {}, "pair": ()})
    assert (restored.arrays, restored.host) == ({"empty": {}, "pair": ()}, {"cursor": 3})


def test_leaf_names_follow_the_tree():
    names = list(flatten({"opt": optax.adam(1.0).init({"layer_0": {"w": jnp.ones(2)}})}))
    assert names == ["opt/0/count", "opt/0/mu/layer_0/w", "opt/0/nu/layer_0/w"]


# ---- kills

def check_all(run_dir) -> list[int]:
    """Every visible checkpoint is whole and holds what was saved at its step."""
    checkpointer = make(run_dir)
    for step in checkpointer.steps():
        folder = checkpointer.directory / f"{step:08d}"
        verify(folder)
        restored = checkpointer.restore(state(0), str(folder))
        assert restored.step == step and restored.host == host(step) and same(restored.arrays, state(step))
    return checkpointer.steps()


def train(run_dir, *faults):
    return subprocess.Popen([sys.executable, WORKER, "train", str(run_dir), *faults], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_at_random_moments_of_saving(tmp_path):
    """kill -9 while one save follows the other, five times in the same directory, each going on from the last."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    newest = 0
    for _ in range(5):
        process = train(tmp_path)
        assert process.stdout.readline() == f"resumed {newest}\n"
        for _ in range(3):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=600)
        steps = check_all(tmp_path)
        finished = [int(line.split()[1]) for line in rest.split("\n")[:-1] if re.fullmatch(r"after \d+", line)]
        assert steps[-1] >= max(finished, default=newest + 2), "a finished save was lost"
        assert steps[-1] > newest
        newest = steps[-1]


@pytest.mark.parametrize("phase, newest, names", [
    nightly("before", 2, ["00000001", "00000002"]),
    nightly("tensors", 2, ["00000001", "00000002", "00000003.orbax-checkpoint-tmp"]),
    ("commit", 2, ["00000001", "00000002", "00000003.orbax-checkpoint-tmp"]),
    ("after", 3, ["00000001", "00000002", "00000003"]),
])
@pytest.mark.slow
def test_killed_at_each_phase_of_a_save(tmp_path, phase, newest, names):
    process = train(tmp_path, f"checkpoint.kill9@step=3,phase={phase}")
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == names
    if names[-1].endswith("tmp"):  # every tensor was on disk already, and yet there is nothing to see
        assert (folder / names[-1] / "arrays" / "manifest.ocdbt").exists()
        assert (folder / names[-1] / "manifest.json").exists() == (phase == "commit")
    assert check_all(tmp_path)[-1] == newest
    resumed = make(tmp_path)
    restored = resumed.restore(state(0))
    assert restored.step == newest
    resumed.save(newest + 1, state(newest + 1), host(newest + 1))
    resumed.close()
    assert check_all(tmp_path)[-1] == newest + 1
    assert not [p for p in os.listdir(folder) if "tmp" in p]  # what the kill left is gone


@pytest.mark.parametrize("phase", ["arrays", nightly("before")])
@pytest.mark.slow
def test_killed_while_resuming(tmp_path, phase):
    saved(tmp_path, [1, 2])
    process = train(tmp_path, f"resume.kill9@step=2,phase={phase}")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL and out == ""
    assert check_all(tmp_path) == [1, 2]


def test_a_killed_deletion_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    """Old checkpoints lose their name before their files."""
    deleted = []
    with monkeypatch.context() as m:
        m.setattr("shutil.rmtree", lambda path, **kwargs: deleted.append(Path(path).name))
        saved(tmp_path / "run", [1, 2], keep=1)
    assert deleted == ["00000001.deleting"]
    checkpointer = saved(tmp_path, [1, 2])
    os.rename(checkpointer.directory / "00000001", checkpointer.directory / "00000001.deleting")
    delete_one(checkpointer.directory / "00000001.deleting")
    assert check_all(tmp_path) == [2]
    saved(tmp_path, [3])
    assert sorted(os.listdir(checkpointer.directory)) == ["00000002", "00000003"]
    saved(tmp_path / "run", [3])
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["00000002", "00000003"]


def test_a_failure_that_is_not_the_disks_is_raised_by_the_next_call(tmp_path):
    for phase in ("before", "tensors", "commit"):
        checkpointer = make(tmp_path, [f"checkpoint.raise@step=1,phase={phase}"])
        with pytest.raises(FaultError, match=phase):
            checkpointer.save(1, state(1), host(1))
            checkpointer.wait()
        assert checkpointer.steps() == [] and list(checkpointer.directory.glob("*")) == []
        checkpointer.close()


def test_before_commit_runs_when_tensors_are_written_and_nothing_is_visible(tmp_path):
    seen = []

    def look():
        here = tmp_path / "checkpoints"
        seen.append((sorted(p.name for p in here.iterdir()), any(here.rglob("manifest.ocdbt"))))

    checkpointer = Checkpointer(tmp_path, default_config(), before_commit=look)
    checkpointer.save(1, state(1), host(1))
    checkpointer.close()
    assert seen == [(["00000001.orbax-checkpoint-tmp"], True)]


# ---- disks that hang

@pytest.mark.parametrize("phase", ["tensors", pytest.param("before", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_disk_that_hangs_ends_the_process_with_a_message(tmp_path, phase):
    """In the background the caller is told and can close; in the caller's own thread nothing but the end of the process is left."""
    fault = f"checkpoint.sleep@step=2,phase={phase},seconds=600"
    done = subprocess.run([sys.executable, WORKER, "hangs", str(tmp_path), fault], capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "checkpoint of step 2 not written within checkpoint.timeout_seconds=" in said
    assert "latest checkpoint: step 1" in said and ("closed" in said) == (phase == "tensors")
    assert check_all(tmp_path) == [1]


# ---- full disks

def can_mount(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("how", ["limit", "tmpfs"])
def test_a_full_disk_costs_a_checkpoint_not_the_run(tmp_path, how):
    """`limit`: the kernel refuses large files (RLIMIT_FSIZE). `tmpfs`: a file system of 6 MB really fills up; where
    mounting is not allowed the limit is tried there too."""
    disk = tmp_path / "disk"
    mounted = how == "tmpfs" and can_mount(disk)
    disk.mkdir(exist_ok=True)
    try:
        out = subprocess.run([sys.executable, WORKER, "full", str(disk), how if mounted else "limit"],
                             capture_output=True, text=True, timeout=600)
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
    lines = out.stdout.splitlines()
    assert out.returncode == 0, out.stderr
    refused = [line for line in lines if "not written" in line]
    assert len(refused) == 3 and all("latest checkpoint: step 1" in line for line in refused)
    assert "failure 1 of 3" in refused[0] and "failure 2 of 3" in refused[1] and refused[2].startswith("ended:")
    assert "3 saves in a row failed" in refused[2] and str(disk / "checkpoints") in refused[2]
    reason = "No space left on device" if mounted else "File too large"
    assert all(reason in line for line in refused)
    for step in (2, 3, 4):
        assert f"{step} [1] ['00000001']" in lines  # the old checkpoint stays, nothing half-written does
    assert lines[-1] == "restored 5 {'cursor': 5} True"
    assert "Traceback" not in out.stdout + out.stderr


def test_free_space_is_checked_first_and_the_message_names_the_directory(tmp_path, caplog):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    huge = {"x": jax.ShapeDtypeStruct((int(free * 0.7),), jnp.int8)}  # fits once, not twice
    checkpointer = make(tmp_path / "run")
    with pytest.raises(OSError) as e:
        checkpointer.require_space(huge)
    assert e.value.errno == errno.ENOSPC
    assert str(tmp_path / "run" / "checkpoints") in str(e.value) and "twice" in str(e.value)
    checkpointer.require_space({"x": jax.ShapeDtypeStruct((int(free * 0.3),), jnp.int8)})
    assert not (tmp_path / "run").exists()


def test_a_refused_save_counts_and_a_good_one_resets(tmp_path, caplog):
    faults = [f"checkpoint.enospc@step={s},phase=tensors" for s in (2, 3, 5, 6)]
    checkpointer = make(tmp_path, faults, keep=10)
    for step in range(1, 8):
        checkpointer.save(step, state(step), host(step))
        checkpointer.wait()
    checkpointer.close()
    assert checkpointer.steps() == [1, 4, 7]
    assert caplog.text.count("failure 1 of 3") == 2 and caplog.text.count("failure 2 of 3") == 2
