"""Processes that tests of the checkpointer kill, starve of disk, or give another number of devices.

    python checkpoint_worker.py train RUN_DIR [FAULT ...]     saves steps 1, 2, ... resuming from the newest
    python checkpoint_worker.py meshes RUN_DIR                saves on 8 devices, restores on fewer
    python checkpoint_worker.py full RUN_DIR limit|tmpfs      saves where the disk refuses
    python checkpoint_worker.py hangs RUN_DIR FAULT           saves where the disk hangs, and then ends like a script
"""

import logging
import os
import resource
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.load import default_config
from jaxrl.errors import RunStopped
from jaxrl.processes.faults import Faults

LAST = 400


def state(step: int) -> dict:
    """Arrays that say which step they belong to, in every element."""
    rng = np.random.default_rng(step)
    return {"params": {f"layer_{i}": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32) for i in range(4)},
            "moments": (jnp.full((1000,), step, jnp.float32), ()), "step": jnp.int32(step)}


def host(step: int) -> dict:
    return {"cursor": 8 * step, "accuracy": 0.1 * step}


def train(run_dir: str, *faults: str) -> None:
    config = default_config()
    config.checkpoint.keep = 2
    checkpointer = Checkpointer(run_dir, config, Faults(faults))
    restored = checkpointer.restore(state(0))
    begin = 0 if restored is None else restored.step
    print("resumed", begin, flush=True)
    for step in range(begin + 1, LAST):
        checkpointer.save(step, state(step), host(step))
        print("after", step - 1, flush=True)  # save() has waited for the one before


def meshes(run_dir: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    whole = np.arange(64 * 24, dtype=np.float32).reshape(64, 24) / 7
    layouts = {8: PartitionSpec("a"), 4: PartitionSpec(None, "a"), 1: PartitionSpec()}

    def tree(devices, make):
        mesh = jax.make_mesh((devices,), ("a",), devices=jax.devices()[:devices])
        return {"w": make(whole, NamedSharding(mesh, layouts[devices])),
                "half": make(whole.astype(jnp.bfloat16), NamedSharding(mesh, PartitionSpec()))}

    checkpointer = Checkpointer(run_dir, default_config())
    checkpointer.save(1, tree(8, jax.device_put), {})
    checkpointer.close()
    for devices in layouts:
        abstract = tree(devices, lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s))
        arrays = checkpointer.restore(abstract).arrays
        assert np.array_equal(np.asarray(arrays["w"]), whole)
        assert np.array_equal(np.asarray(arrays["half"]), whole.astype(jnp.bfloat16))
        assert arrays["w"].sharding == abstract["w"].sharding
        print("restored on", devices, len(arrays["w"].sharding.device_set), flush=True)


def full(run_dir: str, how: str) -> None:
    """Saves step 1, then makes the disk refuse three saves; then there is room again."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout, force=True)
    noise = {"x": np.random.default_rng(0).integers(0, 2**32, 250_000, np.uint32)}  # 1 MB that does not compress
    filler = Path(run_dir) / "filler"

    class Unlucky(Checkpointer):
        """Another process fills the disk between the check and the write."""

        refuse = False

        def require_space(self, arrays):
            super().require_space(arrays)
            if self.refuse and how == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            elif self.refuse:
                fill(filler, leave=300_000)

    def relieve():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        filler.unlink(missing_ok=True)

    checkpointer = Unlucky(run_dir, default_config())
    checkpointer.save(1, noise, {"cursor": 1})
    checkpointer.wait()
    checkpointer.refuse = True
    for step in (2, 3, 4):
        try:
            checkpointer.save(step, noise, {})
            checkpointer.wait()
        except RunStopped as e:
            print("ended:", e)
        relieve()
        print(step, checkpointer.steps(), sorted(os.listdir(checkpointer.directory)), flush=True)
    checkpointer.refuse = False
    checkpointer.save(5, noise, {"cursor": 5})
    checkpointer.close()
    restored = checkpointer.restore(noise)
    print("restored", restored.step, restored.host, np.array_equal(restored.arrays["x"], noise["x"]))


def hangs(run_dir: str, fault: str) -> None:
    config = default_config()
    config.checkpoint.timeout_seconds = 0.0
    checkpointer = Checkpointer(run_dir, config, Faults([fault]))
    checkpointer.save(1, state(1), host(1))
    checkpointer.wait()
    config.checkpoint.timeout_seconds = 1.0
    try:
        checkpointer.save(2, state(2), host(2))
        checkpointer.wait()
    except RunStopped as e:
        print("raised:", e)
    checkpointer.close()
    print("closed")


def fill(path: Path, leave: int) -> None:
    stat = os.statvfs(path.parent)
    path.write_bytes(b"x" * max(0, stat.f_bavail * stat.f_frsize - leave))


if __name__ == "__main__":
    {"train": train, "meshes": meshes, "full": full, "hangs": hangs}[sys.argv[1]](*sys.argv[2:])
