"""verl's training engines: which one trains, over how many devices, and where it rests. See systems/verl.py."""

from __future__ import annotations

import re

from jaxrl.migrate import common, devices
from jaxrl.migrate.table import Migration

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
MODEL, TRAINER = "actor_rollout_ref.model.", "trainer."
MEGATRON, FSDP, SETTING = ACTOR + "megatron.", "fsdp_config.", ACTOR + "strategy"

# Engine -> (its table below the actor and the reference, axis of the mesh -> name of its size there).
LAYOUTS = {
    "megatron": ("megatron.", devices.MEGATRON),
    "mindspeed": ("mindspeed.", devices.MEGATRON),
    "veomni": ("veomni.", {"cp": "ulysses_parallel_size", "ep": "expert_parallel_size"}),
    "torchtitan": (
        "torchtitan.",
        {
            "tp": "tensor_parallel_size",
            "pp": "pipeline_parallel_size",
            "cp": "context_parallel_size",
            "ep": "expert_parallel_size",
        },
    ),
}
SIZES = tuple(ACTOR + table + name for table, axes in LAYOUTS.values() for name in axes.values())


def since(m: Migration, version: str) -> bool:
    """Returns whether the source is of this version of verl or later. Raises ValueError if the table lacks it."""
    return m.table.versions.index(m.version) >= m.table.versions.index(version)


def backend(m: Migration) -> str:
    """Returns the training engine: `engine` of the supervised trainers; else actor.strategy if set, from 0.8 on
    model_engine if it is not dp, the engine that --config-name has in its name, or fsdp."""
    if m.table.job:  # of the supervised trainer
        return m.text("engine")
    if m.given(SETTING):
        return m.text(SETTING)
    if since(m, "0.8") and m.text("model_engine") != "dp":
        return m.text("model_engine")
    named = re.search(r"--config[-_]name[= ]'?\"?(?:\S*_)?(megatron|veomni|torchtitan)_trainer", m.command)
    return named[1] if named else "fsdp"


def layout(m: Migration):
    """Sets mesh.*, rollout.engine with its servers, and mesh.roles: where policy and reference are between uses.

    GPUs are nnodes x n_gpus_per_node if the source sets one of them, else --gpus, else their defaults; sizes are those
    of the training engine (`backend`). Servers share the GPUs with training. The sizes of an unknown engine, and a
    server over several hosts, are not carried over.
    """
    nodes, per, kind = m.integer(TRAINER + "nnodes"), m.integer(TRAINER + "n_gpus_per_node"), backend(m)
    named = any(m.given(TRAINER + n) for n in ("nnodes", "n_gpus_per_node"))
    devices.count_gpus(m, nodes * per if named else 0, nodes * per)
    place, axes = LAYOUTS.get(kind, (FSDP, {}))
    ulysses, fsdp = ACTOR + "ulysses_sequence_parallel_size", ACTOR + place + "fsdp_size"
    if kind not in LAYOUTS and kind not in ("fsdp", "fsdp2"):
        key = SETTING if m.given(SETTING) else "model_engine"
        m.lacks(key, f"the sizes of the engine {kind!r} are not read: set the mesh by hand")
    sizes = {axis: m.integer(ACTOR + place + name) or 1 for axis, name in axes.items()}
    if not axes:
        sizes["cp"] = m.integer(ulysses)
    own = kind in ("fsdp", "fsdp2", "veomni")
    devices.mesh(
        m,
        (SETTING, "model_engine"),
        (
            TRAINER + "nnodes",
            TRAINER + "n_gpus_per_node",
            *((fsdp,) if own else ()),
            *(ACTOR + place + name for name in axes.values()),
            *(() if axes else (ulysses,)),
        ),
        **sizes,
        fsdp=(m.integer(fsdp) or 0) if own else 0,
        gpus=m.gpus,
    )
    tp = _of_a_server(m, per)
    engines = max(m.gpus // tp, 1)
    devices.engine(
        m,
        m.text(ROLLOUT + "name"),
        ROLLOUT + "name",
        tp=tp,
        engines=engines,
        nodes=max(m.gpus // max(per, 1), 1),
        gpus=m.gpus,
        colocated=True,
        keys=(*(ROLLOUT + n for n in OF_A_SERVER), TRAINER + "nnodes", TRAINER + "n_gpus_per_node"),
    )
    _rest(m, place)


OF_A_SERVER = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def _of_a_server(m: Migration, host: int) -> int:
    """Returns the GPUs of a server, which it splits by tensors here, whatever of tensors, rows and layers there."""
    tp, *more = (m.integer(ROLLOUT + name) or 1 for name in OF_A_SERVER)
    experts, of = ROLLOUT + "expert_parallel_size", ROLLOUT + "data_parallel_size"
    if (m.integer(experts) or 1) > 1:
        m.set("rollout.vllm.engine_kwargs.enable_expert_parallel", True, experts)
    whole = tp * more[0] * more[1]
    if whole == tp:
        return tp
    if whole > host:
        m.lacks(
            of if more[0] > 1 else ROLLOUT + "pipeline_model_parallel_size",
            f"a server of {whole} GPUs lies on several hosts of {host}; servers here lie on one: name servers that you "
            "start in rollout.servers",
        )
        return tp
    m.differs(f"a server splits its {whole} GPUs by tensors, there {tp} x {more[0]} (data) x {more[1]} (pipeline)")
    return whole


def _rest(m: Migration, place: str):
    """Where parameters and optimizer state are between and during uses."""
    where = ACTOR + place
    params, state = m.flag(where + "param_offload"), m.flag(where + "optimizer_offload")
    if m.flag(ACTOR + FSDP + "offload_policy"):
        devices.rest(m, "streamed", ACTOR + FSDP + "offload_policy")
    elif params or state:
        devices.rest(m, "host", where + "param_offload", where + "optimizer_offload")
    ref = REF + place + "param_offload"
    adapted = m.integer(rank(m)) or m.text(MODEL + "lora_adapter_path")  # their base is the reference
    if m.flag(ref) and m.options.get("algorithm.kl.coef", (0,))[0] and not adapted:
        m.set("mesh.roles.reference", {"rest": "host"}, ref)


COMPUTE = (*(table + "dtype" for table, _ in LAYOUTS.values()), FSDP + "dtype", FSDP + "mixed_precision.param_dtype")


def _computes(m: Migration, role: str) -> tuple[str, str]:
    """Returns the key that says in which dtype a role's engine computes, "" where none is read, and the dtype."""
    kind = backend(m)
    key = role + LAYOUTS.get(kind, (FSDP,))[0] + "dtype"
    if kind in ("fsdp", "fsdp2") and m[role + FSDP + "mixed_precision.param_dtype"] is not None:
        key = role + FSDP + "mixed_precision.param_dtype"
    elif kind in ("veomni", "torchtitan") or kind in ("fsdp", "fsdp2") and since(m, "0.8"):
        m.mark(key, "inert", "the engine computes in bfloat16, whatever it says")
        return "", "bfloat16"
    return key, m.text(key) or "bfloat16"


def dtypes(m: Migration):
    """Sets train.compute_dtype and, where the job has such a model, reference.dtype and reward.model.dtype.

    A dtype that the training engine ignores counts as bfloat16. A critic in another dtype than the policy's is not
    carried over.
    """
    key, kind = _computes(m, ACTOR)
    m.set("train.compute_dtype", common.DTYPES.get(kind, kind), key or ACTOR + FSDP + "mixed_precision.param_dtype")
    key, kind = _computes(m, REF)
    held, mine = REF + FSDP + "model_dtype", backend(m) in ("fsdp", "fsdp2")
    more = {"held": m.text(held) or "bf16"} if mine else {}
    common.frozen_dtype(m, "reference.dtype", kind, *((held,) if mine else ()), *((key,) if key else ()), **more)
    common.critics_dtype(m, CRITICS_DTYPE, "train.param_dtype")
    if backend(m) in ("megatron", "mindspeed"):
        common.critics_dtype(m, "critic.megatron.dtype", "train.compute_dtype")
    common.frozen_dtype(m, "reward.model.dtype", m.text(REWARDS_DTYPE) or "bf16", REWARDS_DTYPE)


CRITICS_DTYPE, REWARDS_DTYPE = "critic.model.fsdp_config.model_dtype", "reward_model.rollout.dtype"


def rank(m: Migration) -> str:
    """Returns the key of the adapters' rank: model.lora.rank for Megatron's engines from 0.7 on, else model.lora_rank.
    """
    own = since(m, "0.7") and backend(m) in ("megatron", "mindspeed")
    return MODEL + ("lora.rank" if own else "lora_rank")


def routes(m: Migration):
    """Sets algorithm.routes, whose experts the update uses: R2 those of the pass that scores old log-probs (with
    old_logprobs=recompute), R3 those of the sampler. `disabled` sets nothing; R2 where old_logprobs=rollout, and other
    modes, are not carried over."""
    key = ACTOR + "router_replay.mode"
    kind = m.choice(key, {"disabled": "own", "R2": "scored", "R3": "sampled", "": "own"})
    if not kind or kind == "own":
        return
    if kind == "sampled":
        common.sampled_experts(m, key)
    elif m.options.get("algorithm.old_logprobs", ("recompute",))[0] == "rollout":
        m.lacks(key, "R2 with bypass_mode: no pass scores old log-probs, whose experts would be replayed")
    else:
        m.set("algorithm.routes", kind, key)
        m.set("algorithm.old_logprobs", "recompute", key)
