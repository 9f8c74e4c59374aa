"""Which engine a config means, and making it."""

from __future__ import annotations

import glob
import importlib.util
import logging
from pathlib import Path

from jaxrl.config import editable
from jaxrl.errors import ConfigError
from jaxrl.imports import imported
from jaxrl.rollout.protocol import EngineInfo

log = logging.getLogger("jaxrl")
OWN = ("auto", "jax", "vllm")
OWN_MEMORY, SHARED_MEMORY = 0.85, 0.45  # of a GPU, for a server with devices of its own and for one beside the trainer


def server_folder(servers) -> Path | None:
    """The folder whose files name the servers, where rollout.servers is one (a path from / or .)."""
    return Path(servers[0]) if len(servers) == 1 and servers[0][:1] in ("/", ".") else None


def listed(folder: Path) -> list[str]:
    """The URLs in the files of a folder, in the files' order; files that begin with a dot are not ready yet."""
    files = sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
    return [url.rstrip("/") for file in files for url in file.read_text("utf-8").split()]


def chosen_engine(config) -> str:
    """`jax`, `vllm` or an import path. auto: vllm where servers are named, or where it is installed and there is a GPU."""
    name = config.rollout.engine
    if name != "auto":
        return name
    if config.rollout.servers:
        return "vllm"
    gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
    return "vllm" if gpu and _has_vllm() else "jax"


def shared_gpus(config, engine: str) -> str:
    """How vLLM's servers share the trainer's GPUs: "turns" (rollout.placement=colocated: asleep while it updates), "halves" (servers
    of ours without devices of their own: each side keeps its part), "" (not at all). engine: jax, vllm or an import path."""
    if engine != "vllm":
        return ""
    if config.rollout.placement == "colocated":
        return "turns"
    return "" if config.rollout.servers or config.rollout.vllm.devices else "halves"


def memory_fraction(config) -> float:
    """Share of a GPU's memory that a server of ours takes."""
    own = config.rollout.vllm.devices and config.rollout.placement != "colocated"
    return config.rollout.vllm.memory_fraction or (OWN_MEMORY if own else SHARED_MEMORY)


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def make_engine(config, model, tokenizer, mesh, eos_ids, hf_config=None):
    """The engine of `config.rollout.engine`.

    Args:
      config: the whole config.
      model: a jaxrl.models.Model; its compute dtype is used where rollout.dtype is auto.
      tokenizer: anything with HF's `decode`, read for stop strings only; may be None without them.
      mesh: dp x fsdp x tp of the policy; None = the first device.
      eos_ids: end-of-text token ids.
      hf_config: the model's HF config; vLLM needs it.

    An import path names a function with these six arguments (the config is a copy, which it may change) that returns a
    protocol.Engine.

    Raises ConfigError for an engine that cannot be had or cannot serve the config.
    """
    name = chosen_engine(config)
    if config.rollout.engine == "auto" and name == "vllm":
        log.info("rollout.engine=auto: vLLM (%s)", "rollout.servers" if config.rollout.servers else "installed, with a GPU")
    if name == "jax":
        from jaxrl.rollout.embedded import make_engine as make
        return make(config, model, tokenizer, mesh, eos_ids)
    if name == "vllm":
        from jaxrl.rollout.vllm.engine import make_engine as make
    else:
        made = find_factory(name)(editable(config), model, tokenizer, mesh, eos_ids, hf_config)
        if not isinstance(getattr(made, "info", None), EngineInfo):
            raise ConfigError(f"rollout.engine={name!r} made a {type(made).__name__} that says nothing of itself: derive it from "
                              "jaxrl.rollout.Engine (docs/extend.md)")
        return made
    return make(config, model, tokenizer, mesh, eos_ids, hf_config)


def find_factory(path: str):
    """The function of an import path, package.module:function or ./file.py:function. Raises ConfigError."""
    try:
        return imported(path)
    except (ImportError, AttributeError, OSError, ValueError) as e:
        raise ConfigError(f"rollout.engine={path!r}: neither {', '.join(OWN)} nor an import path that works: "
                          f"{type(e).__name__}: {e}") from None
