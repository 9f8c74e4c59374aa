"""A job on a target: the fully resolved config, the model, the meshes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from jaxrl import models, sharding
from jaxrl.config.load import default_config, load_config
from jaxrl.errors import ConfigError
from jaxrl.kernels.attention.packed import tpu
from jaxrl.kernels.recurrence import chunks, gpu_call
from jaxrl.kernels.recurrence import tpu as tpu_rule
from jaxrl.models.io import hf
from jaxrl.planning import memory, workload
from jaxrl.planning.workload import SIZES, data_shards
from jaxrl.resolve.spec import Platform, lora_on, resolve
from jaxrl.roles.parameters import DTYPES, source_of
from jaxrl.rollout.engines import check_served, engine_name, engine_row, shared_gpus
from jaxrl.rollout.shapes import from_config
from jaxrl.rollout.vllm.options import BOTH_MEMORY, memory_fraction
from jaxrl.sharding import targets
from jaxrl.sharding.mesh import AXES, rollout_shape

HOPPER = ("h100", "h200")  # whose attention is a kernel of ours
GPU_SHARE = 0.75  # of a GPU's memory: what jax takes by itself
# bytes of a GPU, assumed: jax's context; what a sleeping vLLM server keeps (context, CUDA graphs)
CONTEXT, ASLEEP = 1 << 30, 2 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """A job to plan.

    Attributes:
      config: the Spec resolved against the target. target: the devices. hf_config: the model's description.
      model: the Model, without adapters, with the target's kernels (`with_kernels`). mesh: axis sizes.
      rollout: (mesh of one process's sampler, its Shapes, bytes of its dtype), or None if the
        completions come from elsewhere.
      memory, usable: bytes of one device: all of them, and those that the job may use.
      lent: bytes of it that vLLM's server takes in turns (rollout.placement=colocated; 0 = none).
      left_out: why completions are not planned.
      adapters: the job has adapters; the full training is planned instead.
      tower: parameters of the model's tower, which only rows with images need, where it is not planned.
    """

    config: Any
    target: targets.Target
    hf_config: dict
    model: models.Model
    mesh: dict
    rollout: tuple | None
    memory: float
    usable: float
    lent: float = 0.0
    left_out: str = ""
    adapters: bool = False
    tower: int = 0

    @property
    def resting(self) -> set[str]:
        """Roles that leave the device between their uses: of rest=host or none, and the sampler if it is colocated."""
        c = self.config
        found = {role for role, given in c.mesh.roles.items() if given.get("rest") in ("host", "none")}
        return found | ({"sampler"} if c.rollout.placement == "colocated" else set())

    @property
    def programs(self) -> list[str]:
        """Names of the programs that the job runs on the target (memory.program_names)."""
        return memory.program_names(self.config, self.rollout)

    @property
    def samplers(self) -> int:
        """Number of engines that share a step's completions: the embedded sampler of each process, or vLLM's servers.
        """
        c = self.config
        if self.rollout is not None:
            return self.target.hosts
        return len(c.rollout.servers) or c.rollout.vllm.replicas * self.target.hosts

    @functools.cached_property
    def sampler(self) -> tuple[dict, Any, int]:
        """(mesh, shapes, bytes of a weight) of one engine. vLLM's servers count as devices of the target's kind.

        Of a server the mesh has tp alone, and the shapes only what `workload.rollout_work` reads.
        """
        c = self.config
        if self.rollout is not None:
            return self.rollout
        prompt, answer = workload.lengths(c)
        slots = min(c.rollout.vllm.max_running, -(-c.data.prompts_per_step * c.rollout.group_size // self.samplers))
        shapes = SimpleNamespace(slots=slots, cache_lengths=(prompt + answer,), prompt_lengths=(prompt,),
                                 decode_steps=1, prefill_rows=max(1, slots // c.rollout.group_size))
        mesh = dict.fromkeys(self.mesh, 1) | {"tp": c.rollout.vllm.tensor_parallel}
        return mesh, shapes, SIZES[c.rollout.dtype]

    @property
    def rollout_mesh(self) -> dict | None:
        """Axis sizes of the embedded sampler's mesh; None without one."""
        return None if self.rollout is None else self.rollout[0]


def open_case(config) -> Case:
    """Builds the case of a config.

    With run.warm_start the model is that run's; adapters (lora.rank, lora.path) are left out, and the full training is
    planned. The config is not changed. Raises ConfigError for an impossible target, model or mesh, for a model that the
    engine does not serve, and for plan.image_tokens that the model or a prompt cannot have.
    """
    targets.parse(config.plan.target)
    config, adapters = _with_warm_start(config), lora_on(config)
    if adapters:
        config.lora = default_config().lora
    m = config.model
    try:
        seen = config.plan.image_tokens > 0
        hf_config = hf.load_config(source_of(m.path), m.revision, m.config.to_dict(), weights=False, images=seen)
        if seen:
            _check_images(config, hf_config)
            _check_squares(config, hf_config)
        if not alone(config):
            check_served(config, hf_config, models.FAMILIES[hf_config["model_type"]])
        return dataclasses.replace(case_of(config, hf_config), adapters=adapters, tower=_tower(config, hf_config))
    except ConfigError as e:
        raise e if m.path in str(e) or not m.path else ConfigError(f"model.path={m.path!r}: {e}") from None


def _tower(config, hf_config: dict) -> int:
    """Returns the parameters of the tower that rows with images need; 0 for a model or a config without images."""
    m = config.model
    outer = hf_config[hf.SOURCE].get("outer") or m.config.to_dict()
    has_tower = models.FAMILIES[hf_config["model_type"]].vision and outer.get("vision_config")
    if not has_tower or not config.data.image_column or config.plan.image_tokens:
        return 0
    found = hf.load_config(source_of(m.path), m.revision, m.config.to_dict(), weights=False, images=True)
    entries = models.build(found, compute_dtype=jnp.float32, scan_layers=False).entries
    return sum(math.prod(entry.shape) for entry in entries if entry.path[0] == "vision")


def _check_images(config, hf_config: dict) -> None:
    """Raises ConfigError for image tokens of a model that has no tower, or more than a prompt's."""
    given, longest = config.plan.image_tokens, config.data.max_prompt_tokens
    if not models.FAMILIES[hf_config["model_type"]].vision:
        raise ConfigError(f"plan.image_tokens={given}: a {hf_config['model_type']} model has no tower for images; "
                          "leave it out")
    if given >= longest:
        raise ConfigError(f"plan.image_tokens={given}: a prompt has data.max_prompt_tokens={longest} tokens, its "
                          "images' among them, and ends with text; raise that one")


def _check_squares(config, hf_config: dict) -> None:
    """Raises ConfigError for image tokens that are no whole images, of a tower whose images have one size."""
    tower = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=False).config.vision
    each = 0 if tower is None or not tower.image_side else (tower.side // tower.merge)**2
    if each and config.plan.image_tokens % each:
        raise ConfigError(f"plan.image_tokens={config.plan.image_tokens}: every image has {each} tokens; give a "
                          "multiple of them")


def case_of(config, hf_config: dict, model=None) -> Case:
    """Returns the case of a config whose model description is read. The config is not changed.

    A policy with devices or processes of its own, and no mesh of its own, gets all of the target.

    Args:
      hf_config: the model's description; not read for what `model` brings.
      model: the model, if a run has built it; None = built here.

    Raises ConfigError for roles with their own devices: a plan has every role on the policy's, and only policy and
    sampler may rest, or roles be streamed (mesh.roles); for an impossible target, and a mesh that the target or the
    model cannot have.
    """
    target = targets.parse(config.plan.target)
    if set(config.mesh.roles.get("policy", ())) - {"rest"} in ({"devices"}, {"processes"}, {"devices", "processes"}):
        config = config.copy_and_resolve_references()  # the target's chips are the policy's
        own = {key: value for key, value in config.mesh.roles.policy.items() if key == "rest"}
        roles = {role: dict(given) for role, given in config.mesh.roles.items() if role != "policy"}
        config.mesh.roles = roles | ({"policy": own} if own else {})
    if any(set(given) != {"rest"} or role not in ("policy", "sampler") and given["rest"] != "streamed"
           for role, given in config.mesh.roles.items()):
        raise ConfigError(f"mesh.roles={dict(config.mesh.roles)}: a plan has every role on the policy's devices, and "
                          "only policy and sampler may rest, or roles be streamed; leave the others out to plan")
    spec = resolve(config, Platform(target.kind, target.chip.dtype), hf_config if model is None else None,
                   engine=engine_name(getattr(config, "asked", config), here=False))
    model = with_kernels(model or _model(spec, hf_config), target)
    mesh = dict(zip(AXES, sharding.mesh_shape(spec.mesh, target.count), strict=True))
    sharding.check_experts(mesh["ep"], model.config.num_experts)
    sharding.check_recurrent(mesh, model.config.recurrent_heads)
    whole, usable = device_memory(spec, target)
    turns = target.kind == "gpu" and not alone(spec) and shared_gpus(spec) == "turns"
    lent = memory_fraction(spec) * whole if turns else 0.0
    rollout = None if alone(spec) else _rollout(spec, model, target, mesh)
    left_out = _left_out(spec, hf_config) if spec.recipe.samples and rollout is None else ""
    return Case(spec, target, hf_config, model, mesh, rollout, whole, usable, lent, left_out)


def alone(config) -> bool:
    """Returns whether the trainer is planned without its engine (plan.part=training)."""
    return config.plan.part == "training"


def _left_out(config, hf_config: dict) -> str:
    """Returns the reason why a job's completions are not planned; "" if they are."""
    if not alone(config):
        return ""
    try:
        check_served(config, hf_config, models.FAMILIES[hf_config["model_type"]])
    except ConfigError as e:
        return f"plan.part=training. A run of this config is refused: {e}"
    return "plan.part=training"


def _with_warm_start(config):
    config = config.copy_and_resolve_references()
    if config.run.warm_start:  # its export becomes the model
        first = load_config(config.run.warm_start)
        for name in ("path", "init", "config"):
            config.model[name] = first.model[name]
    return config


def with_kernels(model, target):
    """Returns the model for counting: `attention` and `recurrence` of `auto` become the target's kernel if it serves
    the model; else, and on CPUs, they stay. (Programs use the config's.)"""
    if target.kind == "cpu":
        return model
    found = {"attention": _attention_runs, "recurrence": _recurrence_runs}
    own = {op: target.kind for op, runs in found.items() if getattr(model, op) == "auto" and runs(model, target)}
    return dataclasses.replace(model, **own)


def _attention_runs(model, target) -> bool:
    """Whether the target's own kernel of attention serves the model."""
    size = model.config.row_head_size
    if target.kind == "gpu":
        return target.name in HOPPER and model.compute_dtype.itemsize <= 2 and 64 <= size <= 256
    queries, keys = ((1, 2, heads, size) for heads in (model.config.num_heads, model.config.num_kv_heads))
    return _serves(tpu.check, queries, keys, model.compute_dtype)


def _recurrence_runs(model, target) -> bool:
    """The same of recurrent layers."""
    cfg, size = model.config, chunks.tokens_per_chunk(chunks.LONG)
    sizes = size, cfg.linear_key_size, cfg.linear_value_size
    if not cfg.num_recurrent:
        return False
    if target.kind == "gpu":
        low = target.name in HOPPER and model.compute_dtype.itemsize <= 2
        return low and _serves(gpu_call.stages_of, not cfg.is_mamba, *sizes)
    heads = tpu_rule.heads_of_step(cfg.linear_key_heads, cfg.linear_value_heads // cfg.linear_key_heads)
    return tpu_rule.vmem(tpu_rule.Call(*heads, not cfg.is_mamba, False), *sizes) <= tpu_rule.VMEM


def _serves(check, *arguments) -> bool:
    try:
        check(*arguments)
    except NotImplementedError:
        return False
    return True


def _model(spec, hf_config: dict):
    c = spec.model
    return _build(json.dumps(hf_config, sort_keys=True, default=str), spec.train.compute_dtype, c.scan_layers == "true",
                  c.remat, c.attention, c.recurrence, c.remat_every, spec.train.matmul, c.ring_attention)


@functools.lru_cache(maxsize=32)
def _build(description: str, dtype: str, scan: bool, remat: str, attention: str, recurrence: str, every: int,
           matmul: str, ring: bool):
    return models.build(json.loads(description), compute_dtype=jnp.dtype(DTYPES[dtype]), scan_layers=scan, remat=remat,
                        attention=attention, recurrence=recurrence, remat_every=every, matmul=matmul, ring=ring)


def _rollout(config, model, target, mesh: dict):
    """Returns the embedded sampler of one process. rollout.engine=auto counts as it: vLLM is planned if it is named."""
    if not config.recipe.samples or not engine_row(config).on_mesh:
        return None
    if target.hosts == 1:
        inner = rollout_shape(mesh)
    elif target.per_host % (mesh["ep"] * mesh["tp"]):
        sizes = {f"mesh.{a}": mesh[a] for a in ("ep", "tp") if mesh[a] > 1}
        raise ConfigError(f"{', '.join(f'{a}={n}' for a, n in sizes.items())}: the embedded sampler stays within one "
                          f"process, which has {target.per_host} devices on {target}; lower {' or '.join(sizes)}, or "
                          "set rollout.engine=vllm")
    else:
        inner = {**mesh, "dp": 1, "cp": 1, "fsdp": target.per_host // (mesh["ep"] * mesh["tp"])}
    width = SIZES[config.rollout.dtype]
    reads_all = target.kind == "cpu" or model.attention in ("blockwise", "reference")
    patches = workload.prompt_patches(config, model)
    return inner, from_config(config, data_shards(inner), 1, target.hosts, reads_all, patches=patches), width


def device_memory(config, target) -> tuple[float, float]:
    """Returns (bytes of a device, bytes that the job may use).

    CPU devices share this host's memory evenly, TPUs are used whole. Of a GPU it is XLA_CLIENT_MEM_FRACTION (or
    XLA_PYTHON_CLIENT_MEM_FRACTION) if set, else jax's share, or what a vLLM server beside it leaves; all but the
    context where server and trainer take turns, whatever that fraction is.
    """
    if target.kind == "cpu":
        share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / target.count
        return share, share
    whole = target.chip.memory
    if target.kind == "tpu":
        return whole, whole
    given = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    how = "" if alone(config) else shared_gpus(config)
    if how == "turns":
        return whole, whole - CONTEXT
    return whole, whole * (float(given) if given else BOTH_MEMORY - memory_fraction(config) if how else GPU_SHARE)
