"""The examinations of jaxrl doctor; doctor.__main__ runs each in its own process.

An examination is a function () -> [Line]. It imports what it needs inside the function, so a missing or broken package
stops that examination only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jaxrl

RUNS_IN_GB = 20  # less free disk than this gets a note
VARIABLES = re.compile("(JAX|XLA|LIBTPU|TPU|CUDA|NVIDIA|NCCL|HF_HUB_OFFLINE|OMP|TF_CPP|VLLM|SLURM_[NP])")


class Line(NamedTuple):
    """One finding.

    state: "ok", "note" (works, could be better), "wrong" (must be fixed), "-" (absent, or not applicable).
    """

    state: str
    text: str


def versions() -> list[Line]:
    """Compares the versions of Python and packages with those jaxrl requires, without importing the packages."""
    from packaging.requirements import Requirement

    python = f"Python {platform.python_version()}, {platform.platform()}"
    out = [Line("ok" if sys.version_info >= (3, 11) else "wrong", python), Line("ok", f"jaxrl {jaxrl.__version__}")]
    for text in _requirements():
        asked = Requirement(text)
        found = _version(asked.name)
        if not found:
            out.append(Line("wrong", f"{asked.name} is missing: pip install '{text}'"))
        elif not asked.specifier.contains(found, prereleases=True):
            out.append(Line("wrong", f"{asked.name} {found}: jaxrl needs {asked.specifier}; pip install '{text}'"))
        else:
            out.append(Line("ok", f"{asked.name} {found}"))
    jax, jaxlib = _version("jax"), _version("jaxlib")
    if jax and jaxlib and jax.split(".")[:2] != jaxlib.split(".")[:2]:
        out.append(Line("wrong", f"jax {jax} with jaxlib {jaxlib}: install both together, pip install -U jax"))
    for name in ("jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "vllm", "wandb", "ray", "peft"):
        out += [Line("ok", f"{name} {found}")] if (found := _version(name)) else []
    return out


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _requirements() -> list[str]:
    """Returns jaxrl's requirements without extras: those of the checkout, else of the installed package."""
    project = Path(jaxrl.__file__).parents[1] / "pyproject.toml"
    if project.exists():
        import tomllib

        return tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
    return [text for text in importlib.metadata.requires("jaxrl") or [] if "extra ==" not in text]


def machine() -> list[Line]:
    """Reports processor, memory, disk, and the environment variables that libraries read."""
    cpu = _lines("/proc/cpuinfo")
    name = next((line.partition(":")[2].strip() for line in cpu if line.startswith("model name")), "")
    limits = [line.split() for line in _lines("/proc/meminfo")]
    memory = {words[0].rstrip(":"): int(words[1]) / 2**20 for words in limits if len(words) > 1 and words[1].isdigit()}
    out = [Line("ok", f"{name or platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable, "
                      f"load {os.getloadavg()[0]:.1f}")]
    if memory:
        free, whole = memory.get("MemAvailable", 0.0), memory.get("MemTotal", 0.0)
        out.append(Line("ok" if free > 2 else "note", f"{free:.1f} of {whole:.1f} GiB memory free"))
    shared = Path("/dev/shm")
    places = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir()), "home": Path.home()}
    for what, place in (places | ({"shared memory": shared} if shared.is_dir() else {})).items():
        free = shutil.disk_usage(place).free / 1e9
        few = free < (1 if what == "shared memory" else RUNS_IN_GB)
        why = " (a run keeps 3 checkpoints, each three times its model in fp32)" * (few and what != "shared memory")
        out.append(Line("note" if few else "ok", f"{what}: {free:.1f} GB free{why}"))
    out += [Line("ok", f"{key}={_shown(key, value)}") for key, value in sorted(os.environ.items())
            if VARIABLES.match(key)]
    return out


def _shown(name: str, value: str) -> str:
    """Returns the value of an environment variable, <redacted> as a whole if its name is that of a secret."""
    try:
        from jaxrl.config.load import redacted_tree
    except ImportError:  # a package that jaxrl.config.load needs is missing; doctor.redact leaves out the line
        return "<redacted>"
    return redacted_tree({name: value})[name]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def devices() -> list[Line]:
    """Lists the devices jax finds, and checks that a program runs on each of them."""
    import jax
    import jax.numpy as jnp

    from jaxrl.resolve.spec import here

    out, began = [], time.perf_counter()
    for device in jax.local_devices():
        value = float(jnp.sum(jax.device_put(jnp.arange(1000.0), device)))
        stats = device.memory_stats() or {}
        held = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if stats.get("bytes_limit") else ""
        state = "ok" if value == 499500 else "wrong"
        out.append(Line(state, f"{device.id}: {device.device_kind} ({device.platform}){held}"))
    seconds = time.perf_counter() - began
    out.append(Line("ok", f"computes in {here().dtype} by default; first programs after {seconds:.1f} s"))
    if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
        out.append(Line("wrong", "there is an NVIDIA driver, and jax runs on the CPU: pip install 'jaxrl[cuda12]' (or"
                                 " cuda13), and unset JAX_PLATFORMS"))
    return out


def kernels() -> list[Line]:
    """Compares results and gradients of every kernel this platform may use with the reference's, in the platform's
    dtype.
    """
    from jaxrl.kernels import check
    from jaxrl.resolve.spec import here
    from jaxrl.roles.parameters import DTYPES

    words, out = {"right": "ok", "refused": "-"}, []
    for v in check.everything(DTYPES[here().dtype]):
        more = f", largest difference {v.error:.1e} of the largest value" if v.state == "right" else f": {v.text}"
        out.append(Line(words.get(v.state, "wrong"), f"{v.op}, {v.name}: {v.state}{more}"))
    return out


def collectives() -> list[Line]:
    """Compares sums, gathers, scatters and exchanges over all devices of this process with numpy's results."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    count = jax.local_device_count()
    if count == 1:
        return [Line("-", "one device: nothing to exchange")]
    mesh = jax.make_mesh((count,), ("d",), devices=jax.local_devices(), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(count * count * 64, dtype=np.float32).reshape(count * count, 64)
    parts = x.reshape(count, count, 64)
    every = lambda a: np.concatenate([a] * count)  # noqa: E731
    cases = {
        "psum": (lambda a: jax.lax.psum(a, "d"), every(parts.sum(0))),
        "all_gather": (lambda a: jax.lax.all_gather(a, "d", tiled=True), every(x)),
        "reduce_scatter": (lambda a: jax.lax.psum_scatter(a, "d", tiled=True), parts.sum(0)),
        "all_to_all": (lambda a: jax.lax.all_to_all(a, "d", 0, 0, tiled=True), parts.swapaxes(0, 1).reshape(x.shape)),
        "ppermute": (lambda a: jax.lax.ppermute(a, "d", [(i, (i + 1) % count) for i in range(count)]),
                     np.roll(parts, 1, 0).reshape(x.shape)),
    }
    out = []
    for name, (op, expected) in cases.items():
        began = time.perf_counter()
        found = np.asarray(jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))(x))
        same = found.shape == expected.shape and np.array_equal(found, expected)
        out.append(Line("ok" if same else "wrong", f"{name} over {count} devices: {'right' if same else 'WRONG'}, "
                        f"{time.perf_counter() - began:.2f} s with its compilation"))
    return out


def cache() -> list[Line]:
    """Checks that the default cache of compiled programs, ~/.cache/jaxrl/xla, can be written, and reports its size."""
    folder = Path.home() / ".cache" / "jaxrl" / "xla"
    held = [p.stat().st_size for p in folder.glob("*-cache")] if folder.is_dir() else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as e:
        return [Line("note", f"{folder} cannot be written ({e.strerror}): every start compiles anew; set"
                             " run.compile_cache")]
    return [Line("ok", f"{folder}: {len(held)} programs, {sum(held) / 1e9:.2f} GB (at most run.compile_cache_gb=10)")]


def vllm() -> list[Line]:
    """Starts a vLLM server of a tiny model, publishes weights, samples, and compares log-probs with the trainer's."""
    if importlib.util.find_spec("vllm") is None:
        return [Line("-", "vLLM is not installed here: rollouts come from the embedded sampler (rollout.engine=jax)")]
    from jaxrl.config.load import default_config
    from jaxrl.telemetry.run_dir import read_json

    with tempfile.TemporaryDirectory(prefix="jaxrl_doctor_") as folder:
        c, began = default_config(), time.perf_counter()
        c.run.dir, c.run.mode, c.rollout.engine = f"{folder}/run", "parity", "vllm"
        c.model.init, c.model.tokenizer = "random", "jaxrl://arith/tokenizer"
        c.model.config = dict(model_type="qwen3", vocab_size=128, hidden_size=64, num_hidden_layers=2, head_dim=32,
                              num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
                              max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.08)
        c.data.path, c.data.max_rows, c.reward.functions = ("jaxrl://arith/train.jsonl",), 16, ("exact",)
        c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.rollout.group_size = 40, 24, 4
        c.data.prompts_per_step, c.log.console, c.log.tensorboard = 4, "off", False
        jaxrl.train(c)
        found = read_json(Path(folder) / "run" / "summary.json")
    gap = found["gap"]["as training samples"]
    fine = gap["mean"] <= found["bound"]
    out = [Line("ok" if fine else "wrong", f"gap to the trainer {gap['mean']:.1e} nats per token on average, at most "
                f"{gap['max']:.1e}, over {gap['tokens']} tokens ({found['bound']:g} allowed)")]
    if "probe" in found:
        out.append(Line("ok", f"published weights arrived: the probe's log-probs differ by {found['probe']:.1e}"))
    out += [Line("note", text) for text in found["verdict"] if not fine]
    return [*out, Line("ok", f"started, published and asked within {time.perf_counter() - began:.0f} s")]


EXAMINATIONS = {  # name -> (function, seconds that it may take)
    "versions": (versions, 30), "machine": (machine, 30), "devices": (devices, 120), "kernels": (kernels, 300),
    "collectives": (collectives, 120), "cache": (cache, 30), "vllm": (vllm, 900),
}
