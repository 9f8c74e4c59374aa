"""Engines, as rows: what the rest of jaxrl has to know of each of them, so that nothing else asks for an engine's name.

    row = engine_of(config)          of rollout.engine: a row of ENGINES, or OWN for an engine of the user's
    engine = make_engine(context)    a protocol.Engine

What an engine that was made says of itself is in its `info` (protocol.EngineInfo); what is decided before one is made
is read from the row. An engine that jaxrl does not know is taken for one of which nothing is certain. Imports neither
jax nor vLLM.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config.load import editable
from jaxrl.config.registry import recipe_of
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError, type_of
from jaxrl.rollout.protocol import Engine, EngineInfo
from jaxrl.rollout.shapes import DEFAULT_SLOTS

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # rollout.dtype -> its name in numpy


@dataclasses.dataclass(frozen=True)
class EngineContext:
    """What an engine is made from.

    config: the whole config; an engine of the user's gets a copy of its own, which it may change.
    model: a jaxrl.models.Model; its compute dtype is used where rollout.dtype is auto.
    tokenizer: anything with HF's `decode`, read for stop strings only; may be None without them.
    mesh: dp x fsdp x tp of the policy, or of mesh.roles.sampler; None = the first device.
    eos_ids: end-of-text token ids.
    hf_config: the model's HF config, as in config.json; None where an engine with no use for it is made.
    """

    config: Any
    model: Any
    tokenizer: Any = None
    mesh: Any = None
    eos_ids: tuple[int, ...] = ()
    hf_config: dict | None = None

    @property
    def dtype(self) -> str:
        """Name in numpy of the dtype in which weights are sampled from."""
        return DTYPES.get(self.config.rollout.dtype) or np.dtype(self.model.compute_dtype).name

    @classmethod
    def of(cls, *given) -> EngineContext:
        """A context, or its fields one by one: what factories were given before there was one."""
        return given[0] if isinstance(given[0], cls) else cls(*given)


class EngineRow(NamedTuple):
    """One engine, as far as it is known before it is made."""

    factory: str = ""  # import path of its factory(EngineContext)
    title: str = "an engine of your own"
    info: EngineInfo = EngineInfo()
    on_mesh: bool = False         # samples on the job's devices: mesh.roles.sampler places it, plans count it
    servers: bool = True          # may answer through rollout.servers
    starts_servers: bool = False  # starts servers, on the trainer's GPUs where they have none of their own
    beyond_context: bool = True   # serves sequences longer than the model is made for
    ignores: Mapping[str, str] = {}  # options below `rollout` that it does not read -> what to do instead
    # (options below `rollout`, completions of a step) -> how many are sampled at once
    slots: Callable[[Mapping, int], int] = lambda rollout, batch: rollout["slots"] or min(DEFAULT_SLOTS, batch)


def _server_slots(rollout, batch: int) -> int:
    return rollout["vllm"]["max_running"] * (len(rollout["servers"]) or rollout["vllm"]["replicas"])


OWN = EngineRow()
ENGINES = {
    "jax": EngineRow("jaxrl.rollout.embedded:make_engine", "the embedded sampler",
                     EngineInfo(holds=True, sleeps=True, support=True, routes=True, exact=True),
                     on_mesh=True, servers=False),
    "vllm": EngineRow("jaxrl.rollout.vllm.engine:make_engine", "vLLM",
                      EngineInfo(concurrent=True, holds=True, sleeps=True, routes=True),
                      starts_servers=True, beyond_context=False, slots=_server_slots,
                      ignores={"slots": "set rollout.vllm.max_running", "decode_steps": "leave it out",
                               "cache_lengths": "set rollout.vllm.max_model_len", "prompt_lengths": "leave it out",
                               "compaction": "leave it out"}),
}


def chosen_engine(config, here: bool = True) -> str:
    """The name or import path that rollout.engine means. auto: vllm where servers are named, or where it is installed
    and there is a GPU, but for several adapters; here: whether this machine has a say in that."""
    name = config.rollout.engine
    if name != "auto":
        return name
    if config.rollout.servers:
        return "vllm"
    return "vllm" if here and not config.lora.adapters and _has_gpu() and _has_vllm() else "jax"


def _has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def engine_of(config, here: bool = True) -> EngineRow:
    """The row of a config's rollout.engine; see chosen_engine."""
    return ENGINES.get(chosen_engine(config, here), OWN)


def check_served(config, hf_config: dict, family) -> None:
    """ConfigError where servers would compute another model than the trainer's: vLLM reads over some fields of some
    families (models.FAMILIES says which)."""
    if chosen_engine(config) != "vllm" or not recipe_of(config).samples:
        return
    said = {**family.defaults, **hf_config}
    for name, fixed in family.vllm_assumes.items():
        if isinstance(fixed, tuple):
            fixed = [fixed[i % len(fixed)] for i in range(said["num_hidden_layers"])]
        if said.get(name, fixed) not in (None, fixed):
            raise ConfigError(f"rollout.engine={config.rollout.engine} with {name}={said[name]!r}: vLLM computes "
                              f"models of model_type={hf_config['model_type']} with {fixed!r}; set rollout.engine=jax")


def shared_gpus(config) -> str:
    """How servers share the trainer's GPUs: "turns" (rollout.placement=colocated: asleep while it updates), "halves"
    (servers of ours without devices of their own: each side keeps its part), "" (not at all)."""
    if not engine_of(config).starts_servers:
        return ""
    if config.rollout.placement == "colocated":
        return "turns"
    return "" if config.rollout.servers or config.rollout.vllm.devices else "halves"


def make_engine(context: EngineContext) -> Engine:
    """The engine of `context.config.rollout.engine`, with no weights in it yet.

    An import path names a function of an EngineContext that returns a protocol.Engine; one that takes the six fields of
    a context, as such functions did before, is given these.

    Raises ConfigError for an engine that cannot be had or cannot serve the config.
    """
    name = chosen_engine(context.config)
    if name in ENGINES:
        return imported(ENGINES[name].factory)(context)
    factory = find_factory(name)
    context = dataclasses.replace(context, config=editable(context.config))
    fields = [getattr(context, field.name) for field in dataclasses.fields(context)]
    given = next((given for given in (fields, [context]) if _takes(factory, given)), None)
    if given is None:
        raise ConfigError(f"rollout.engine={name!r}: make it a function of one argument, a jaxrl.rollout.EngineContext "
                          "(docs/guides/extend.md)")
    made = factory(*given)
    if not isinstance(getattr(made, "info", None), EngineInfo):
        raise ConfigError(f"rollout.engine={name!r} made {type_of(made)} that says nothing of itself: derive "
                          "it from jaxrl.rollout.Engine (docs/guides/extend.md)")
    return made


def _takes(function, arguments) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):  # nothing to call, or without a signature
        return False
    return True


def find_factory(path: str):
    """The function of an import path, package.module:function or ./file.py:function. Raises ConfigError."""
    try:
        return imported(path)
    except (ImportError, AttributeError, OSError, ValueError) as e:
        raise ConfigError(f"rollout.engine={path!r}: neither auto, {', '.join(ENGINES)} nor an import path that works: "
                          f"{type(e).__name__}: {e}") from None
