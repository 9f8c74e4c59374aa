"""Devices and layouts of ROLL's roles: the joint rules of its table that concern them. See systems/roll.py."""

from __future__ import annotations

import ast
import math

from jaxrl.migrate import common
from jaxrl.migrate.devices import apart, count_gpus, engine, mesh, rest, shared
from jaxrl.migrate.table import Migration

TRAIN, INFER, CRITIC, REF, VALID = "actor_train.", "actor_infer.", "critic.", "reference.", "validation."
ARGS, CONFIG, SAMPLE, DATA = "training_args.", "strategy_args.strategy_config.", "generating_args.", "data_args."
MEGATRON = tuple(
    TRAIN + CONFIG + n
    for n in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
)
ULYSSES, STRATEGY, WORKER = (
    TRAIN + "model_args.ulysses_size",
    TRAIN + "strategy_args.strategy_name",
    TRAIN + "worker_cls",
)
MOST_DEVICES = 100_000
EPISODE = "tokens of an episode"  # a fact of the agentic pipeline


PER_DEVICE, ACCUMULATION = TRAIN + ARGS + "per_device_train_batch_size", TRAIN + ARGS + "gradient_accumulation_steps"
PACKS, PACKING = TRAIN + "use_sequence_packing", TRAIN + "sequence_packing_args."
LENGTHS = ("prompt_length", "response_length", "sequence_length")


def numbers(text) -> list[int]:
    """Returns the device numbers of a list as ROLL writes it: [0, 1], '[0,1]', 'list(range(0,8)) + [9]'; nothing is
    executed. Raises ValueError for anything else, more than 2000 characters, and a range of more than MOST_DEVICES."""

    def integers(nodes: list[ast.expr]) -> list[int]:
        return [n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is int]

    def walk(node, depth=0):
        if depth > 20:
            raise ValueError("too many parts")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return walk(node.left, depth + 1) + walk(node.right, depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            values = integers(node.elts)
            if len(values) == len(node.elts):
                return values
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            if node.func.id == "list" and len(node.args) == 1:
                return walk(node.args[0], depth + 1)
            bounds = integers(node.args)
            if node.func.id == "range" and 1 <= len(bounds) <= 3 and len(bounds) == len(node.args):
                found = range(*bounds)
                if len(found) > MOST_DEVICES:
                    raise ValueError("too many devices")
                return list(found)
        raise ValueError("no list of device numbers")

    if isinstance(text, list):
        if all(type(n) is int for n in text):
            return text
        raise ValueError("no list of device numbers")
    if len(str(text)) > 2000:
        raise ValueError("too long")
    try:
        return walk(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no list of device numbers") from None


def devices(m: Migration, role: str) -> list[int]:
    """Returns the devices of a role (with its dot); [] where the source sets none. Raises Unreadable as
    `devices_of`."""
    return devices_of(m, role + "device_mapping")


def devices_of(m: Migration, key: str) -> list[int]:
    """Returns the devices that a key names; [] where it is not set. Raises Unreadable for another value than device
    numbers, and for a device that is named twice."""
    value = m[key]
    if value is None:
        return []
    try:
        found = numbers(value)
    except ValueError:
        raise m.wrong(key, "device numbers such as list(range(0,8))") from None
    if len(set(found)) != len(found):
        raise m.wrong(key, "each device once")
    return found


def sizes(m: Migration) -> tuple[int, int, int, int]:
    """Returns (tp, pp, cp, ep) of training. Without Megatron cp is ulysses_size, and the others are 1."""
    tp, pp, cp, ep = (m.integer(name) or 1 for name in MEGATRON)
    if "megatron" not in m.text(STRATEGY):
        tp = pp = ep = 1
        cp = m.integer(ULYSSES) or 1
    return tp, pp, cp, ep


def layout(m: Migration):
    """Sets the mesh, the engine and the devices of both from the device_mapping of actor_train and actor_infer, else
    --gpus.

    Training and sampling take turns where either has no devices set or they share some, which is noted if they do not
    share all. Otherwise each has its own, and jaxrl asks for servers if they need more hosts than one.
    """
    train, infer = devices(m, TRAIN), devices(m, INFER)
    per, tp_sizes = m.integer("num_gpus_per_node"), sizes(m)
    used = set(train) | set(infer)
    gpus = count_gpus(m, len(used))
    tp, pp, cp, ep = tp_sizes
    keys = (TRAIN + "device_mapping", *MEGATRON, ULYSSES)
    colocated = not train or not infer or bool(set(train) & set(infer))
    mesh(m, (STRATEGY,), keys, tp=tp, pp=pp, cp=cp, ep=ep, gpus=gpus if colocated else len(train))
    m.facts["GPUs"] = gpus or "unknown"
    width = INFER + CONFIG + "tensor_parallel_size"
    at = width if m[width] else INFER + "num_gpus_per_worker"
    served = m.integer(width) or m.integer(INFER + "num_gpus_per_worker") or 1
    if m[width] and m.given(INFER + "num_gpus_per_worker"):
        m.mark(INFER + "num_gpus_per_worker", "inert", "tensor_parallel_size is set, and wins")
    nodes = max(-(-(max(used) + 1) // max(per, 1)), 1) if used else 1
    backend, key = m.text(INFER + "strategy_args.strategy_name"), INFER + "strategy_args.strategy_name"
    where = (at, INFER + "device_mapping", TRAIN + "device_mapping", "num_gpus_per_node")
    engines = max((len(infer) or gpus or 1) // served, 1)
    backend = "hf" if backend == "hf_infer" else backend
    if colocated:
        engine(m, backend, key, tp=served, engines=engines, nodes=nodes, gpus=gpus, colocated=True, keys=where)
        shared(m, train, infer, nodes)
        return
    engine(m, backend, key, tp=served, engines=engines, nodes=engines, gpus=0, colocated=False, keys=where)
    apart(m, train, infer, served, nodes, *where, policy=TRAIN + "device_mapping", all_keys=where)


def master_weights(m: Migration):
    """Sets train.param_dtype: FSDP2 loads and learns parameters in its param_dtype; unset, or with another strategy, it
    is fp32. A dtype other than fp32 and bf16 is reported as not carried over, and fp32 set."""
    key, kind = TRAIN + CONFIG + "param_dtype", _held(m, TRAIN)
    if kind not in ("fp32", "bf16"):
        m.lacks(key, f"{m[key]}: weights are held in float32 or bfloat16")
        kind = "fp32"
    m.set("train.param_dtype", kind, key, STRATEGY)


def _held(m: Migration, role: str) -> str | None:
    """Returns the dtype in which a role's weights are held and learnt; None for one that there is not."""
    key = role + CONFIG + "param_dtype"
    fsdp = m[key] is not None and "fsdp" in m.text(role + "strategy_args.strategy_name")
    return common.DTYPES.get(m.text(key)) if fsdp else "fp32"


def _computes(m: Migration, role: str) -> tuple[str, str]:
    """Returns the key that says in which dtype a role computes, and the dtype: FSDP2 reads its own key alone."""
    if "fsdp" in m.text(role + "strategy_args.strategy_name"):
        return role + CONFIG + "param_dtype", m.text(role + CONFIG + "param_dtype") or "bf16"
    return role + "model_args.dtype", m.text(role + "model_args.dtype")


def compute_dtypes(m: Migration):
    """Sets train.compute_dtype: with FSDP its param_dtype (unset: bf16), else model_args.dtype. A critic that computes
    or learns in another dtype than the policy is reported as not carried over."""
    key, kind = _computes(m, TRAIN)
    m.set("train.compute_dtype", common.DTYPES.get(kind, kind), key)
    common.critics_dtype(m, _computes(m, CRITIC)[0], "train.compute_dtype")
    key, strategy = CRITIC + CONFIG + "param_dtype", CRITIC + "strategy_args.strategy_name"
    if m.given(key) or m.given(strategy):
        common.critics_weights(m, _held(m, CRITIC), key if m.given(key) else strategy)


def reference_dtype(m: Migration):
    """Sets reference.dtype, or in distillation teacher.dtype, if the job has such a model. One that computes in another
    dtype than train.compute_dtype is a known difference."""
    key, kind = _computes(m, REF)
    role = "teacher" if m.options.get("run.recipe", ("rl",))[0] == "distill" else "reference"
    common.frozen_dtype(m, f"{role}.dtype", kind, key)


def packed_tokens(m: Migration, pass_: str) -> tuple[int, tuple[str, ...]]:
    """Returns the tokens of a micro-batch that Megatron packs by load, and their keys; (0, ()) where it does not, with
    the keys marked inert or automatic. pass_: train or forward. Raises Unreadable if it packs by load and their number
    is not set."""
    most, how = PACKING + f"max_packed_sequence_length_{pass_}", PACKING + "algorithm"
    on = m.flag(PACKS) and "megatron" in m.text(STRATEGY) and m.text(how) == "load_balance"
    if not on:
        m.mark(most, "inert", "read by Megatron with use_sequence_packing and algorithm=load_balance alone")
        m.mark(PACKS, "automatic", "rows are packed")
        return 0, ()
    if not m.integer(most):
        raise m.wrong(most, "a length, as algorithm=load_balance does")
    return m.integer(most), (PACKS, how, most)


def memory(m: Migration):
    """Sets train.tokens_per_microbatch and, if it is another number or packed, score_tokens_per_microbatch: by dynamic
    batching, by Megatron's packing, else per-device rows of the longest kind; never less than the longest sequence.
    Sets mesh.roles.policy (rest streamed) if ROLL offloads parameters or optimizer state during use."""
    both = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    longest = m.facts.get(EPISODE, both)
    dynamic, most = TRAIN + "use_dynamic_batching_in_train", TRAIN + "max_tokens_per_microbatch_in_train"
    packed, of = packed_tokens(m, "train")
    if m.flag(dynamic) and m.integer(most):
        m.set("train.tokens_per_microbatch", max(m.integer(most), longest), dynamic, most)
    elif packed:
        m.set("train.tokens_per_microbatch", max(packed, longest), *of)
    else:
        m.set("train.tokens_per_microbatch", m.integer(PER_DEVICE) * longest, PER_DEVICE, *LENGTHS)
    scored_packed, scored_of = packed_tokens(m, "forward")
    scored, many = TRAIN + "infer_batch_size", TRAIN + "max_tokens_per_microbatch_in_infer"
    if m.flag(TRAIN + "use_dynamic_batching_in_infer") and m.integer(many):
        tokens, keys = max(m.integer(many), longest), (TRAIN + "use_dynamic_batching_in_infer", many)
    elif scored_packed:
        tokens, keys = max(scored_packed, longest), scored_of
    else:
        tokens, keys = m.integer(scored) * longest, (scored, *LENGTHS)
    if tokens != m.options["train.tokens_per_microbatch"][0] or scored_packed:
        m.set("train.score_tokens_per_microbatch", tokens, *keys)
    _rest(m)


def _rest(m: Migration):
    """Where parameters and optimizer state are between and during uses."""
    config = TRAIN + "strategy_args.strategy_config"
    name = next((s.value for s in m.all(config) if isinstance(s.value, str)), "")
    streamed = (
        "cpuoffload" in name
        or bool(
            m.all(config + ".zero_optimization.offload_param.device")
            or m.all(config + ".zero_optimization.offload_optimizer.device")
        )
        or m.flag(config + ".offload_policy")
    )
    keys = (
        config,
        config + ".offload_policy",
        config + ".zero_optimization.**",
        config + ".zero_optimization.offload_optimizer.device",
    )
    if streamed:
        rest(m, "streamed", *keys)


def checkpointing(m: Migration):
    """Sets model.remat: with Megatron by recompute_granularity (selective is dots), else full or, with
    disable_gradient_checkpointing, none. Another granularity is reported, and auto set."""
    off, kind = TRAIN + "model_args.disable_gradient_checkpointing", TRAIN + CONFIG + "recompute_granularity"
    if "megatron" in m.text(STRATEGY):
        m.mark(off, "inert", "megatron looks at recompute_granularity")
        remat = m.choice(kind, {"full": "full", "selective": "dots", "": "none"})
        m.set("model.remat", remat or "auto", kind)
        return
    m.set("model.remat", "none" if m.flag(off) else "full", off)


def context(m: Migration):
    """Sets rollout.vllm.max_model_len from the engine's max_model_len or, if prompt and completion together are longer
    than that, train.max_sequence_tokens."""
    longest = m.integer(INFER + CONFIG + "max_model_len")
    if longest:
        common.context(m, longest, "rollout.vllm.max_model_len", INFER + CONFIG + "max_model_len")


def engine_memory(m: Migration):
    """Sets rollout.vllm.memory_fraction from SGLang's mem_fraction_static, or the gpu_memory_utilization of other
    engines."""
    sglang = m.text(INFER + "strategy_args.strategy_name") == "sglang"
    key = INFER + CONFIG + ("mem_fraction_static" if sglang else "gpu_memory_utilization")
    if m[key] is not None:
        m.set("rollout.vllm.memory_fraction", m.number(key), key)


def engine_options(m: Migration):
    """Sets rollout.vllm.engine_kwargs.* (limit_mm_per_prompt.image: data.max_images) from the options of vLLM that no
    other row has read. Options of another engine, null and other limits are marked inert; speculative decoding is
    reported as not carried over."""
    own = m.text(INFER + "strategy_args.strategy_name") in ("vllm", "")
    for s in (*m.all(INFER + CONFIG + "*"), *m.all(INFER + CONFIG + "limit_mm_per_prompt.*")):
        if own and s.value is not None:
            common.engine_kwarg(m, s.key, s.key.partition(CONFIG)[2], s.value)
        else:
            m.mark(s.key, "inert", "an option of another engine, or empty")


def ahead(m: Migration):
    """Sets rollout.max_staleness to async_generation_ratio, rounded up; a ratio that is not whole is noted as a
    difference. Colocated engines sample nothing ahead: 0 is set, and the ratio reported as not carried over."""
    ratio = m.number("async_generation_ratio")
    steps = math.ceil(ratio)
    if steps and m.options.get("rollout.placement", ("",))[0] == "colocated":
        m.lacks(
            "async_generation_ratio",
            "the engine sleeps while the trainer, whose GPUs it shares, updates: nothing is ahead",
        )
        steps = 0
    m.set("rollout.max_staleness", steps, "async_generation_ratio")
    m.facts["staleness"] = steps
    if steps and ratio != steps:
        m.differs(
            f"async_generation_ratio={ratio}: completions may be {steps} steps old, of as many as there is room for"
        )


def routes(m: Migration):
    """Sets algorithm.routes=sampled for router_replay.mode=R3, which replays the sampler's experts in the update; with
    Megatron alone, as in ROLL. vLLM's prefix cache then stays on, with a note if the source turns it off. Another mode
    is reported as not carried over."""
    key = TRAIN + "router_replay.mode"
    kind = m.choice(key, {"disable": "", "": "", "R3": "sampled"})
    if kind and m.text(STRATEGY) == "megatron_train":
        common.sampled_experts(m, key)
