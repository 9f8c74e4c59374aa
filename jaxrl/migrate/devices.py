"""Devices, for the joint rules of the tables: meshes, engines, and the places of roles."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.migrate.table import Key, Migration

MEGATRON = {  # axis of the mesh -> Megatron's name of its size
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
}


def megatron_keys(prefix: str, beside: Mapping = {}, tried: str = "tp ep") -> tuple[Key, ...]:
    """Returns the rows of Megatron's parallel sizes (MEGATRON) below `prefix`, each 1 by default. beside: as of Key.
    tried: axes of which the tests try 2."""
    return tuple(
        Key(prefix + name, "equivalent", default=1, other=2 if axis in tried.split() else None, beside=beside)
        for axis, name in MEGATRON.items()
    )


def megatron_sizes(m: Migration, prefix: str, used: bool = True) -> dict[str, int]:
    """Returns {"tp", "pp", "ep", "cp": size} by Megatron's keys below `prefix`; null and 0 are 1. used: False makes all
    1."""
    return {axis: (m.integer(prefix + name) or 1) if used else 1 for axis, name in MEGATRON.items()}


def count_gpus(m: Migration, source: int, default: int = 0, *alike: int) -> int:
    """Returns the GPUs of a job, which become m.gpus: the source's, else --gpus, else the system's default; 0: unknown.

    A --gpus that is neither the source's number nor one of `alike` is noted as a difference. source: 0 where it names
    none. alike: other counts of the same job, as with or without the GPUs that sample.
    """
    if source and m.gpus not in (0, source, *alike):
        m.differs(f"--gpus={m.gpus} has no effect: the source has a number of its own, {source}")
    m.gpus = source or m.gpus or default
    return m.gpus


def mesh(
    m: Migration, backend: tuple[str, ...], keys: tuple[str, ...], *, tp=1, pp=1, cp=1, ep=1, fsdp=0, gpus=0
) -> None:
    """Sets the mesh from a layout of torch systems: mesh.fsdp=-1, and mesh.tp, mesh.ep and mesh.cp above 1.

    Args:
      backend, keys: the keys that say how parameters are sharded, and those of the sizes.
      pp: pipeline stages, which have no counterpart: their devices shard parameters (fsdp) instead, with the same batch
        and a known difference.
      ep: if it divides the devices, but not beside tp and cp, it is reduced to what does, with a known difference.
      fsdp: size of a shard group; mesh.dp is the number of these, if there are several whole ones. 0 or less = all
        devices.
      gpus: the policy's devices, which become m.trained_on and a fact of the report; 0 = those of the job (m.gpus)."""
    m.set("mesh.fsdp", -1, *backend)
    m.trained_on = gpus or m.gpus
    m.facts["GPUs"] = gpus or m.gpus or "unknown"
    if tp > 1:
        m.set("mesh.tp", tp, *keys)
    count = gpus or m.gpus
    if ep > 1 and count and count % ep == 0 and count % (tp * cp * ep):  # there they lie over the GPUs of tensors, too
        there, ep = ep, max(n for n in range(1, ep) if not ep % n and (n == 1 or not count % (tp * cp * n)))
        m.differs(
            f"experts are split over mesh.ep={ep} x mesh.tp={tp} GPUs; there in {there} parts, over GPUs that tensors "
            f"or contexts are split over too: {count} are not {tp * cp * there} times as many"
        )
    if ep > 1:
        m.set("mesh.ep", ep, *keys)
    if cp > 1:
        m.set("mesh.cp", cp, *keys)
    if pp > 1:
        m.differs(
            f"{pp} pipeline stages become shards of parameters (mesh.fsdp): the same batch and gradient, other "
            "messages; run.mode=plan says what fits"
        )
    rest = count // (tp * cp * ep)
    if fsdp > 0 and rest > fsdp and rest % fsdp == 0:
        m.set("mesh.dp", rest // fsdp, *keys)


USUAL = 8  # GPUs of a host
ENGINES = {  # name -> what it is where it is not vLLM
    "vllm": "",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "trt-llm": "TensorRT-LLM",
    "hf": "generate() of transformers",
}


def engine(
    m: Migration,
    backend: str,
    key: str,
    *,
    tp: int,
    engines: int,
    nodes: int,
    gpus: int,
    colocated: bool,
    keys: tuple[str, ...],
    host: int = 0,
) -> None:
    """Sets the rollout engine: vLLM whatever the source asks for (`backend`, by `key`), with a known difference where
    that is another; an unknown one is recorded as not carried over and nothing is set.

    `engines` servers of `tp` devices each over `nodes` hosts set rollout.vllm.tensor_parallel and rollout.vllm.replicas
    (of a host), beside training on `gpus` GPUs. colocated: both share the GPUs in turns (rollout.placement=colocated,
    and rollout.vllm.devices of several servers that fit). Else servers get the GPUs of a host behind training's
    (rollout.placement=disaggregated, mesh.roles.policy, rollout.vllm.devices); if a host has fewer, the user is asked
    to start servers elsewhere, m.elsewhere becomes True, and no placement is set. gpus=0: not known, and nothing of the
    placement is set unless colocated. host: GPUs of a node; 0 = the source does not say, and the layout is a fact or a
    question."""
    if backend not in ENGINES:
        m.lacks(key, f"the engine is vLLM here; {backend!r} is not known")
        return
    m.set("rollout.engine", "vllm", key)
    if ENGINES[backend]:
        m.differs(
            f"completions are sampled by vLLM, not by {ENGINES[backend]}: the same distribution, other random numbers"
        )
    here = max(engines // max(nodes, 1), 1)
    m.set("rollout.vllm.tensor_parallel", tp, *keys)
    if here > 1:
        m.set("rollout.vllm.replicas", here, *keys)
    per_node = gpus // max(nodes, 1)
    if colocated:
        m.set("rollout.placement", "colocated", *keys)
        if here * tp <= max(per_node, 1) and here > 1:
            m.set(
                "rollout.vllm.devices", tuple(",".join(str(i * tp + j) for j in range(tp)) for i in range(here)), *keys
            )
    elif host and per_node + here * tp > host:
        m.elsewhere = True
        m.needs(
            f"vLLM has GPUs of its own, on other hosts: {engines} servers of {tp} GPU{'s' * (tp > 1)}. Start them by "
            "`vllm serve`, name them in rollout.servers and set rollout.placement=disaggregated (docs/guides/vllm.md)"
        )
    elif per_node:
        m.set("rollout.placement", "disaggregated", *keys)
        m.set("mesh.roles.policy", {"devices": f"0-{per_node - 1}" if per_node > 1 else "0"}, *keys)
        m.set(
            "rollout.vllm.devices",
            tuple(",".join(str(per_node + i * tp + j) for j in range(tp)) for i in range(here)),
            *keys,
        )
        if not host:
            _of_hosts(m, per_node, here * tp)


def _of_hosts(m: Migration, trains: int, samples: int) -> None:
    """Says which GPUs of a host train and which sample, where the source does not say how many it has. Hosts of USUAL
    need nothing."""
    mine, next_ = f"GPUs 0 to {trains - 1}" if trains > 1 else "GPU 0", samples if samples > 1 else "one"
    text = f"training has {mine} of every host and vLLM the next {next_}"
    if trains + samples <= USUAL:
        m.facts["GPUs of a host"] = f"{trains + samples}: {text}"
        return
    m.needs(f"{text}; where hosts have fewer, change mesh.roles.policy and rollout.vllm.devices, or name servers")


def apart(
    m: Migration, train: list[int], infer: list[int], tp: int, nodes: int, *keys: str, policy: str, all_keys=()
) -> None:
    """Gives training and sampling devices of their own, by number (`train`, `infer`): policy and servers (of tp
    devices) of one host get them, by rollout.placement, mesh.roles.policy, rollout.vllm.replicas and
    rollout.vllm.devices. Of infer what is no whole server stays unused; fewer than tp make one server. With more hosts
    no option is set, m.elsewhere becomes True, and the user is asked to start the servers by hand.

    keys: those that make servers; policy: that of training's devices; all_keys: those that part the two, where it is
    not that one alone."""
    engines = max(len(infer) // max(tp, 1), 1)
    if nodes > 1:
        m.elsewhere = True
        m.needs(
            f"training has {len(train)} GPUs and sampling {len(infer)} others on {nodes} hosts: start {engines} "
            f"servers of {tp} GPU{'s' * (tp > 1)} on those (docs/guides/vllm.md), name them in rollout.servers, set "
            "rollout.placement=disaggregated"
        )
        return
    m.set("rollout.placement", "disaggregated", *(all_keys or (policy,)))
    m.set("mesh.roles.policy", {"devices": ranges(sorted(train))}, policy)
    if engines > 1:
        m.set("rollout.vllm.replicas", engines, *keys)
    rows = (sorted(infer)[i * tp : (i + 1) * tp] for i in range(engines))
    m.set("rollout.vllm.devices", tuple(",".join(map(str, row)) for row in rows), *keys)


def shared(m: Migration, train: list[int], infer: list[int], nodes: int) -> None:
    """Leaves a known difference where the source lets training and sampling share only some of their devices (`train`
    and `infer`, by number): it says how many of each host's GPUs either has in jaxrl. Does nothing where the two are
    equal or one is empty. The engine has been set by now."""
    if not train or not infer or set(train) == set(infer):
        return
    host = m.gpus // max(nodes, 1)
    tp, servers = (m.options.get(f"rollout.vllm.{n}", (1,))[0] for n in ("tensor_parallel", "replicas"))
    trains = "" if set(infer) <= set(train) else "; training has all"
    if servers * tp < host:
        m.differs(
            f"training and sampling share only some GPUs there; here servers have {servers * tp} of the {host} of each "
            f"host, in turns with training{trains}"
        )
    else:
        m.differs("training and sampling share only some GPUs there; here both have all of them, in turns")


def rest(m: Migration, where: str, *keys: str) -> None:
    """Sets where the policy's parameters and optimizer state are when it does not train (host), or always (streamed):
    `rest` of mesh.roles.policy, beside what that has."""
    value, before = m.options.pop("mesh.roles.policy", ({}, ()))
    m.set("mesh.roles.policy", {**value, "rest": where}, *keys, *before)


def ranges(numbers: list[int]) -> str:
    """Returns sorted numbers as text, '0-3,6' of 0, 1, 2, 3, 6; "" of none."""
    parts, start = [], 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            first, last = numbers[start], numbers[i - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i
    return ",".join(parts)
