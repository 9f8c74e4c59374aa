"""The registry of engines; no other code compares engine names.

    row = engine_row(config)         of rollout.engine: an entry of ENGINES, or CUSTOM_ENGINE for a user's engine
    engine = make_engine(context)    a protocol.Engine

An engine describes itself in `info` (protocol.EngineInfo); what is decided before it exists is read from its entry.
Nothing is assumed of an engine that jaxrl does not know. Imports neither jax nor vLLM.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config.load import editable
from jaxrl.config.registry import recipe_of
from jaxrl.config.user_code import imported
from jaxrl.errors import ConfigError, type_of
from jaxrl.rollout.protocol import Engine, EngineInfo
from jaxrl.rollout.shapes import DEFAULT_SLOTS

VLLM_TOWER_THETA = 10000.0  # base of towers' rotary embedding, which vLLM does not read
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # rollout.dtype -> its name in numpy


@dataclasses.dataclass(frozen=True)
class EngineContext:
    """What an engine is built from.

    Attributes:
      config: the whole config; a user's engine gets its own copy, which it may change.
      model: a jaxrl.models.Model; its compute dtype is used if rollout.dtype is auto.
      tokenizer: anything with HF's `decode`, used for stop strings only; may be None without them.
      mesh: dp x fsdp x tp of the policy, or of mesh.roles.sampler; None for the first device.
      eos_ids: end-of-text token ids.
      hf_config: the model's HF config, as in config.json; {} for an engine that does not use it.
      patches: most patches that the images of a prompt have; 0 = every prompt is text.
    """

    config: Any
    model: Any
    tokenizer: Any = None
    mesh: Any = None
    eos_ids: tuple[int, ...] = ()
    hf_config: dict = dataclasses.field(default_factory=dict)
    patches: int = 0

    @property
    def dtype(self) -> str:
        """Numpy name of the sampling weights' dtype: rollout.dtype, or the model's compute dtype."""
        return DTYPES.get(self.config.rollout.dtype) or np.dtype(self.model.compute_dtype).name

    @classmethod
    def of(cls, *fields) -> EngineContext:
        """Returns a context, or builds one from its fields (the signature of engine factories before
        there was a context).
        """
        return fields[0] if isinstance(fields[0], cls) else cls(*fields)


class EngineRow(NamedTuple):
    """The registry entry of an engine: what is known before it is built.

    title: name for people. info: its abilities, as far as they are known before it is built."""

    factory: str = ""  # import path of its factory(EngineContext)
    title: str = "an engine of your own"
    info: EngineInfo = EngineInfo()
    on_mesh: bool = False         # samples on the job's devices: mesh.roles.sampler places it, plans include it
    servers: bool = True          # can use rollout.servers
    starts_servers: bool = False  # starts servers, on the trainer's GPUs unless they have their own
    beyond_context: bool = True   # serves sequences longer than the model's context
    ignores: Mapping[str, str] = {}  # options below `rollout` that it does not read -> what to do instead
    # (options below `rollout`, completions of a step) -> how many are sampled at once
    slots: Callable[[Mapping, int], int] = lambda rollout, batch: rollout["slots"] or min(DEFAULT_SLOTS, batch)


def _server_slots(rollout, batch: int) -> int:
    return rollout["vllm"]["max_running"] * (len(rollout["servers"]) or rollout["vllm"]["replicas"])


CUSTOM_ENGINE = EngineRow()
ENGINES = {
    "jax": EngineRow("jaxrl.rollout.embedded:make_engine", "the embedded sampler",
                     EngineInfo(holds=True, sleeps=True, support=True, routes=True, exact=True, images=True),
                     on_mesh=True, servers=False),
    "vllm": EngineRow("jaxrl.rollout.vllm.engine:make_engine", "vLLM",
                      EngineInfo(concurrent=True, holds=True, sleeps=True, routes=True, images=True),
                      starts_servers=True, beyond_context=False, slots=_server_slots,
                      ignores={"slots": "set rollout.vllm.max_running", "decode_steps": "leave it out",
                               "cache_lengths": "set rollout.vllm.max_model_len", "prompt_lengths": "leave it out",
                               "compaction": "leave it out"}),
}


def engine_name(config, here: bool = True) -> str:
    """Returns the name or import path that rollout.engine means.

    auto is vllm if rollout.servers names servers, or if vLLM is installed, there is an NVIDIA GPU and lora.adapters is
    empty; else jax.

    Args:
      config: the whole config.
      here: whether this host's packages and GPUs count; False: auto without servers is jax."""
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


def engine_row(config, here: bool = True) -> EngineRow:
    """Returns the registry entry of a config's rollout.engine; see engine_name."""
    return ENGINES.get(engine_name(config, here), CUSTOM_ENGINE)


def check_served(config, hf_config: dict, family) -> None:
    """Raises ConfigError if vLLM servers would compute another model than the trainer's, cannot report its experts, or
    hold its weights in a way that the check of published weights does not know.

    vLLM ignores some fields of some families, and reads beyond its table of positions. Other engines, and recipes that
    sample nothing, are not checked.

    config: the whole config. hf_config: of the model, as in config.json. family: the row of models.FAMILIES."""
    if engine_name(config) != "vllm" or not recipe_of(config).samples:
        return
    if family.recurrent and config.algorithm.routes == "sampled" and not (
            config.rollout.vllm.engine_kwargs.get("enable_prefix_caching")):
        raise ConfigError(f"algorithm.routes=sampled with model_type={hf_config['model_type']}: vLLM keeps the experts "
                          "of its tokens with the prefix cache, which is off for models with recurrent layers; set "
                          "scored, or rollout.engine=jax")
    fields = {**family.defaults, **hf_config}
    for name, fixed in family.vllm_assumes.items():
        if isinstance(fixed, tuple):
            fixed = [fixed[i % len(fixed)] for i in range(fields["num_hidden_layers"])]
        if fields.get(name, fixed) not in (None, fixed):
            raise ConfigError(f"rollout.engine={config.rollout.engine} with {name}={fields[name]!r}: vLLM computes "
                              f"models of model_type={hf_config['model_type']} with {fixed!r}; set rollout.engine=jax")
    from jaxrl.models.config import model_config  # which imports jax
    from jaxrl.rollout.vllm.options import max_model_len
    model = model_config(hf_config)
    if family.is_mamba and model.linear_key_heads == 1 and config.rollout.vllm.tensor_parallel > 1:
        raise ConfigError(f"rollout.vllm.tensor_parallel={config.rollout.vllm.tensor_parallel} with one group of B "
                          "and C: vLLM copies the group to every worker, which the check of published weights does "
                          "not know; set 1")
    for rope in model.ropes:
        if rope.kind == "yarn" and (most := math.ceil(rope.factor * rope.original_max)) < max_model_len(config):
            raise ConfigError(f"rollout.engine={config.rollout.engine} with sequences up to {max_model_len(config)} "
                              f"tokens: vLLM has the positions of rope_type=yarn up to {most} (factor={rope.factor:g} "
                              f"of {rope.original_max}) and reads beyond them without an error; lower the lengths, "
                              "raise factor, or set rollout.engine=jax")


def check_tower_served(config, hf_config: dict, tower) -> None:
    """Raises ConfigError where vLLM would compute another model than the trainer's, of a family with a tower, or cannot
    take its images or videos.

    Other engines, and recipes that sample nothing, are not checked.

    config: the whole config. hf_config: of the model, as in config.json. tower: the model's VisionConfig; None: the
    data has no image, and the tower is not read, which raises unless vLLM has the family's text model by itself."""
    if engine_name(config) != "vllm" or not recipe_of(config).samples:
        return
    name = f"rollout.engine={config.rollout.engine} with model_type={hf_config['model_type']}"
    from jaxrl.models.families import family_of  # which imports jax
    if tower is None and family_of(hf_config).stored_type:
        return  # it has the text model by itself, too
    if tower is None:
        raise ConfigError(f"{name} and data without images: vLLM has this family with its tower alone, which is not "
                          "read here; set rollout.engine=jax")
    if tower.two_way:
        raise ConfigError(f"{name} and images, whose tokens see each other: vLLM's attention for CPUs reads them "
                          "causally, and jaxrl does not write its items for GPUs yet; set rollout.engine=jax")
    if tower.video:
        raise ConfigError(f"{name} and rows with videos: jaxrl does not write items of videos for vLLM yet; set "
                          "rollout.engine=jax")
    if tower.theta != VLLM_TOWER_THETA:
        raise ConfigError(f"{name} and vision_config.rope_parameters.rope_theta={tower.theta:g}: vLLM computes towers "
                          f"with {VLLM_TOWER_THETA:g}; set rollout.engine=jax")


def shared_gpus(config) -> str:
    """Returns how servers share the trainer's GPUs: "turns" (rollout.placement=colocated: asleep during updates),
    "halves" (our servers without their own devices: each side keeps its part), "" (not at all).
    """
    if not engine_row(config).starts_servers:
        return ""
    if config.rollout.placement == "colocated":
        return "turns"
    return "" if config.rollout.servers or config.rollout.vllm.devices else "halves"


def make_engine(context: EngineContext) -> Engine:
    """Builds the engine of `context.config.rollout.engine`, without weights.

    An import path names a function of an EngineContext that returns a protocol.Engine; a function that takes the six
    fields of a context instead gets these.

    Raises:
      ConfigError: the engine cannot be built or cannot serve the config or prompts with images (it is closed then).
        What a user's module or factory raises is passed on.
    """
    name = engine_name(context.config)
    made = imported(ENGINES[name].factory)(context) if name in ENGINES else _make_custom(name, context)
    if context.patches and not made.info.images:
        made.close()
        raise ConfigError(f"rollout.engine={name!r} serves prompts of text, and the data (or an "
                          "environment, env.image_tokens) has images: set rollout.engine=jax, or leave the images out")
    return made


def _make_custom(name: str, context: EngineContext) -> Engine:
    factory = find_factory(name)
    context = dataclasses.replace(context, config=editable(context.config))
    fields = [getattr(context, field.name) for field in dataclasses.fields(context)][:6]
    arguments = next((some for some in (fields, [context]) if _accepts(factory, some)), None)
    if arguments is None:
        raise ConfigError(f"rollout.engine={name!r}: make it a function of one argument, a jaxrl.rollout.EngineContext "
                          "(docs/guides/extend.md)")
    made = factory(*arguments)
    if not isinstance(getattr(made, "info", None), EngineInfo):
        raise ConfigError(f"rollout.engine={name!r} returned {type_of(made)} without `info`: derive "
                          "it from jaxrl.rollout.Engine (docs/guides/extend.md)")
    return made


def _accepts(function, arguments) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):  # nothing to call, or without a signature
        return False
    return True


def find_factory(path: str):
    """Returns the engine factory of an import path, package.module:function or ./file.py:function.

    Raises ConfigError for a path, module, file or name that does not exist, and if importing raises ImportError,
    AttributeError, OSError or ValueError; any other exception of the user's module (SyntaxError, say) is passed on."""
    try:
        return imported(path)
    except (ImportError, AttributeError, OSError, ValueError) as e:
        raise ConfigError(f"rollout.engine={path!r}: neither auto, {', '.join(ENGINES)} nor an import path that works: "
                          f"{type(e).__name__}: {e}") from None
