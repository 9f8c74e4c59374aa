"""Compiling a job's programs for devices that are not here: in a subprocess, since jax fixes its devices once.

    python -m jaxrl.planning.compiling JOB.json RESULT.json

The parent writes the job and reads the result; see `compile_for`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from jaxrl.config.load import config_of, editable
from jaxrl.config.registry import RECIPES, Recipe, recipe_of
from jaxrl.errors import ConfigError

# Only shapes, memory and collectives are asked for: machine code is made as cheaply as it can be.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
REMATERIALISED = "Involuntary full rematerialization"


def start(config, hf_config: dict, platform: str, target, mesh: dict, rollout_mesh: dict | None, wanted=None,
          fast=True):
    """Starts compiling in a subprocess; returns what `finish` takes: (process, its temporary folder, time of the
    start).

    Args:
      config: the job's Spec or config. hf_config: the model's description.
      platform: cpu (as many devices of this machine as the target has), tpu (a topology; needs libtpu) or gpu (needs
        jax's CUDA plugin, see gpu_devices).
      target: targets.Target; for `tpu` it has a topology.
      mesh, rollout_mesh: axis sizes; None = no embedded sampler.
      wanted: names of programs; None = all.
      fast: compile at the least effort; on TPUs a quarter of the time, and temporaries up to 12 % off. Not for gpu.

    Raises ConfigError for `tpu` if libtpu is missing.
    """
    if platform == "tpu" and not has_libtpu():
        raise ConfigError(f"plan.target={target}: compiling for a TPU needs its compiler; pip install libtpu (extra "
                          "`plan`)")
    folder = tempfile.TemporaryDirectory(prefix="jaxrl-plan-")
    recipe = None if ":" in config.run.recipe else recipe_of(config)._asdict()
    config = editable(config)
    config.train.matmul_emulated = config.train.matmul != "default"  # the target's products are none of this compiler's
    job = {"config": json.loads(config.to_json_best_effort()), "recipe": recipe, "cwd": os.getcwd(),
           "hf_config": hf_config, "platform": platform, "name": target.name,
           "topology": target.topology, "count": target.count, "per_host": target.per_host, "mesh": mesh,
           "rollout_mesh": rollout_mesh, "wanted": None if wanted is None else sorted(wanted)}
    (Path(folder.name) / "job.json").write_text(json.dumps(job, default=str), "utf-8")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
           "TF_CPP_MIN_LOG_LEVEL": "1", "XLA_FLAGS": "" if platform == "gpu" else FAST}
    if fast and platform != "gpu":
        env["JAX_EXEC_TIME_OPTIMIZATION_EFFORT"] = "-1"
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    log = open(Path(folder.name) / "log", "w", encoding="utf-8")  # noqa: SIM115 (read by finish)
    process = subprocess.Popen([sys.executable, "-m", "jaxrl.planning.compiling", "job.json", "result.json"],
                               cwd=folder.name, env=env, stdout=log, stderr=subprocess.STDOUT)
    return process, folder, time.monotonic()


def finish(started, what: str, limit: float) -> dict:
    """Waits for a compilation and returns its result:

    {"platform", "programs": {name: {"arguments", "outputs", "alias", "temporaries", "host_temporaries" (bytes per
    device), "flops", "seconds", and for CPU devices "collectives"}, or {"too_large": the compiler's message} for a
    program that does not fit}, "live": {name: bytes per device}, "host": {name: a device's bytes in host memory; on
    CPUs they are also arguments}, "rematerialised": number of the partitioner's warnings, "seconds"}.

    The subprocess is killed, and its folder removed, in any case.

    Args:
      started: of `start`. what: devices compiled for, for messages. limit: seconds since the start.

    Raises:
      ConfigError: after `limit` seconds, with the compiler's last message if it fails, or the subprocess's own.
    """
    process, folder, since = started
    with folder:
        place = Path(folder.name)
        try:
            process.wait(max(0.0, limit - (time.monotonic() - since)))
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"plan: compiling for {what} took longer than plan.timeout_seconds={limit:g}; raise it") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said = (place / "log").read_text("utf-8", errors="replace")
        if process.returncode or not (place / "result.json").is_file():
            raise ConfigError(f"plan: compiling for {what} failed: {_last_words(said)}")
        result = json.loads((place / "result.json").read_text("utf-8"))
    if "problem" in result:
        raise ConfigError(result["problem"])
    return {**result, "rematerialised": said.count(REMATERIALISED)}


def _last_words(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "error" in line]
    return (told or lines or ["it said nothing"])[-1].strip()[-600:]


def has_libtpu() -> bool:
    """Returns whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


# -- in the subprocess -------------------------------------------------------------------------------------------------


def main(job_file: str, result_file: str) -> None:
    """Compiles the job in a JSON file and writes the result to another, or {"problem": text} for a ConfigError; other
    errors propagate. Changes the working directory to that of the caller of `start`."""
    job, out = json.loads(Path(job_file).read_text("utf-8")), Path(result_file).absolute()
    os.chdir(job["cwd"])  # where ./file.py of the config is
    since = time.monotonic()
    try:
        result = _compile(job)
    except ConfigError as e:
        result = {"problem": str(e)}
    out.write_text(json.dumps({**result, "seconds": round(time.monotonic() - since, 1)}), "utf-8")


def _compile(job: dict) -> dict:
    import jax

    from jaxrl.planning import collectives, programs

    if job["recipe"] is not None:  # one that the asking process has added, too
        RECIPES.setdefault(job["config"]["run"]["recipe"], Recipe(**job["recipe"]))
    meshes = _meshes(job)
    low = programs.lower(config_of(job["config"]), job["hf_config"], *meshes,
                         wanted=None if job["wanted"] is None else set(job["wanted"]))
    per_host = job["per_host"]

    def compiled(item):
        name, lowered = item
        since = time.monotonic()
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            return name, {"too_large": str(e)[:2000]}
        memory = program.memory_analysis()
        cost = program.cost_analysis() or {}
        out = {"host_temporaries": memory.host_temp_size_in_bytes,
               "arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
               "alias": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
               "flops": cost.get("flops", 0.0), "seconds": round(time.monotonic() - since, 1)}
        if job["platform"] == "cpu":
            out["collectives"] = [{**vars(c), "sent": c.sent} for c in collectives.read(program.as_text(), per_host)]
        return name, out

    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(compiled, sorted(low.programs.items(),
                                               key=lambda item: item[0] not in ("update", "critic"))))
    return {"platform": job["platform"], "programs": found,
            "live": {name: programs.device_bytes(tree) for name, tree in low.live.items()},
            "host": {name: programs.device_bytes(tree, in_host=True) for name, tree in low.live.items()}}


def _meshes(job: dict):
    """Returns (mesh of training, mesh of one process's sampler or None), of CPU devices, or of a topology
    of TPUs or GPUs.
    """
    import jax

    from jaxrl.sharding.mesh import AXES as names

    axes = lambda shape: (jax.sharding.AxisType.Auto,) * len(shape)  # noqa: E731

    if job["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", job["count"])
        devices = jax.devices()
        make = lambda shape, part: jax.sharding.Mesh(  # noqa: E731
            np.array(part).reshape([shape[a] for a in names]), names, axis_types=axes(names))
        mesh = make(job["mesh"], devices)
        inner = job["rollout_mesh"]
        return mesh, inner and (mesh if inner == job["mesh"] else make(inner, devices[:_size(inner)]))
    inner = job["rollout_mesh"]
    if job["platform"] == "gpu":
        return _gpu_meshes(job)
    mesh = _tpu_mesh(job["name"], job["topology"], job["mesh"])
    if inner is None or inner == job["mesh"]:
        return mesh, inner and mesh
    return mesh, _tpu_mesh(job["name"], _host_topology(job["topology"], _size(inner)), inner)


def _size(mesh: dict) -> int:
    return math.prod(mesh.values())


def _host_topology(topology, devices: int):
    """Returns the shape of one host of a slice: 2x2(x1) chips, or as many as there are."""
    shape = {4: (2, 2), 8: (2, 4), 2: (1, 2), 1: (1, 1)}[devices]
    return shape + (1,) * (len(topology) - 2)


def _gpu_meshes(job: dict):
    from jaxrl import sharding
    from jaxrl.planning import gpu_devices

    inner, hosts = job["rollout_mesh"], job["count"] // job["per_host"]
    try:
        found = gpu_devices.devices(job["name"], hosts, job["per_host"])
    except Exception as e:  # the plugin's own errors have no common class
        raise ConfigError(f"plan.target={job['name']}: jax's CUDA plugin makes no such devices "
                          f"({str(e).splitlines()[0][:200]})") from None
    mesh = sharding.make_mesh(SimpleNamespace(**job["mesh"]), found)
    if inner is None or inner == job["mesh"]:
        return mesh, inner and mesh
    return mesh, sharding.make_mesh(SimpleNamespace(**inner), found[:_size(inner)])


def _tpu_mesh(name: str, topology, mesh: dict):
    from jax.experimental import topologies

    from jaxrl import sharding

    shape = "x".join(map(str, topology))
    small = any(side % 2 for side in topology[:2])
    extra = {"chips_per_host_bounds": [*topology[:2], 1]} if small else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **extra)
    except Exception as e:  # libtpu's own errors have no common class
        raise ConfigError(
            f"plan.target={name}:{shape}: libtpu knows no such slice ({str(e).splitlines()[0][:200]})") from None
    return sharding.make_mesh(SimpleNamespace(**mesh), found.devices)


if __name__ == "__main__":
    main(*sys.argv[1:])
