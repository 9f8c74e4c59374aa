"""run.mode=plan: what a job needs on devices that are not here, before anyone pays for them.

The job's own programs are compiled from shapes alone. Memory: what is kept follows from shapes and shardings;
temporaries are the compiler's for CPU and TPU targets, counted for GPUs (planning/memory.py). Collectives are read from
the partitioned program. Time is a roofline. docs/guides/plan.md says how far each of these was found to be off.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
import time
from pathlib import Path

import jax

from jaxrl.config.lengths import made_of
from jaxrl.config.load import editable
from jaxrl.config.run_length import ends
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.recurrent import rule_flops
from jaxrl.planning import asynchrony, compiling, fit, gpu_devices, memory, roofline, workload
from jaxrl.planning.case import ASLEEP, Case, alone, case_of, open_case
from jaxrl.planning.report import gib, table
from jaxrl.resolve.spec import resolve
from jaxrl.roles.kept_features import keeps_features
from jaxrl.rollout import engine_row
from jaxrl.sharding import ROLLOUT_RULES, targets

log = logging.getLogger("jaxrl")
# not of a message too long for the network
EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED.*(memory|allocat|hbm)|CUDA_ERROR_OUT_OF_MEMORY", re.I | re.S)
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# How far a GPU's figures may be off (docs/guides/plan.md, "Bounds"): counted temporaries beside the TPU compiler's for
# the same programs, and seconds of published runs beside the prediction.
GPU_TEMPORARIES, GPU_SECONDS = 0.35, (0.7, 3.0)
GPU_COMPILED = 0.15  # the same of what jax's CUDA plugin compiles, beside two jobs on an H200 (-0.1 % and -12 %)


def run(config) -> dict:
    """Prints the plan, writes it as JSON to the file that plan.json names (if any), and returns it, see `make`.

    Raises ConfigError, naming the nearest config that fits, if it does not fit (the plan is printed and written
    before), and as `make` does.
    """
    plan = make(config)
    print(table(plan) + "\n".join(asynchrony.table(plan["asynchrony"]) if "asynchrony" in plan else ()), flush=True)
    if config.plan.json:
        path = Path(config.plan.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan, indent=1) + "\n", "utf-8")
    if not plan["fits"]:
        raise ConfigError(f"plan.target={config.plan.target}: {plan['reason']}. {' '.join(plan['advice'])}")
    return plan


def make(config, search: bool = True) -> dict:
    """Returns the plan of a config as a JSON-able dict, after compiling its programs in subprocesses.

    Besides the entries of `times` it has "target", "mesh", "rollout_mesh", "parameters" (a number), "basis" (how each
    figure was found, as text), "fits" and "reason", "per_device" (bytes: the peak, its parts, peaks by program and
    phase), "collectives" by program, "rematerialised" (arrays gathered whole), "run" (steps and hours),
    "compile_seconds" and "seconds" (of the plan); where they apply "active_parameters", "recurrences", "not_planned"
    and "asynchrony"; on GPUs "error" (bounds of peak and step) and "cross_check".

    search: adds "largest", the largest sizes that fit, and "advice". Raises ConfigError for an impossible target, model
    or mesh, for a folder of plan.run that asynchrony.read_recorded_run refuses, and if compiling for CPU or TPU devices
    fails or takes longer than plan.timeout_seconds. A plan that does not fit is returned, too.
    """
    started = time.monotonic()
    case = open_case(config)
    cpu, exact, like = _compile(case)
    live, programs, host = _memory(case, cpu, exact)
    lent = lent_memory(case)
    peaks = memory.peaks(live, programs, case.resting, lent)
    top = max(peaks, key=peaks.__getitem__)
    temporaries = programs[top]["temporaries"] if top in programs else 0.0
    own = memory.parts(live, top, temporaries, peaks[top], case.resting, lent[top in programs] if lent else 0.0)
    plan = {
        "target": str(case.target), "fits": peaks[top] <= case.usable,
        "basis": BASIS["compiled" if case.target.kind == "gpu" and exact else case.target.kind]
        + (FULL if case.adapters else ""),
        "mesh": case.mesh,
        "rollout_mesh": case.rollout_mesh, "parameters": case.model.num_parameters,
        **({"active_parameters": case.model.num_active} if case.model.num_active < case.model.num_parameters else {}),
        "per_device": {"memory_bytes": case.memory, "usable_bytes": case.usable, "peak_bytes": peaks[top],
                       "peak_in": top, **own,
                       **({"in_host": host} if host else {}),
                       "by_program": peaks, "by_phase": memory.by_phase(peaks),
                       "temporaries": {name: p["temporaries"] for name, p in programs.items()}},
        "collectives": {name: p.get("collectives", []) for name, p in cpu["programs"].items()},
        "rematerialised": cpu["rematerialised"],
    }
    plan |= times(case, plan["collectives"])
    if case.model.config.num_recurrent:
        plan["recurrences"] = _recurrences(case)
    left_out = {"rollout": case.left_out, "images": TOWER.format(case.tower / 1e9) if case.tower else ""}
    if any(left_out.values()):
        plan["not_planned"] = {name: why for name, why in left_out.items() if why}
    if case.config.recipe.samples and not alone(case.config):
        plan["asynchrony"] = asynchrony.plan_asynchrony(case, plan["phases"])
    plan["run"] = _run(case.config, plan)
    if case.target.kind == "gpu":
        plan["error"] = _bounds(plan, (GPU_COMPILED if exact else GPU_TEMPORARIES) * temporaries)
        plan["cross_check"] = _cross_check(programs, like)
    plan["reason"] = too_small(case) or ("" if plan["fits"] else _reason(case, plan))
    plan["fits"] = not plan["reason"]
    if search:
        plan |= _search(case, programs, plan)
    plan["compile_seconds"] = {"cpu": cpu["seconds"], **{found["platform"]: found["seconds"]
                                                         for found in (exact, like) if found and "platform" in found}}
    plan["seconds"] = round(time.monotonic() - started, 1)
    return plan


def _recurrences(case: Case) -> dict:
    """{"layers", "rule_flops_per_token", "rule_share" of the forward pass at the mean context, "workspace_bytes" of the
    update on a device}; with a sampler on the devices also {"state_bytes" of a slot on all devices, "equals_tokens" of
    keys and values, "slots_bytes", "stash_bytes"}."""
    cfg, (prompt, answer) = case.model.config, workload.lengths(case.config)
    shape = workload.rows(case.config, workload.data_shards(case.mesh)).shape
    rule = rule_flops(cfg)
    parts = case.mesh["tp"] * case.mesh["cp"]
    out = {"layers": cfg.num_recurrent, "rule_flops_per_token": rule,
           "rule_share": rule / case.model.flops_per_token((prompt + answer) // 2),
           "workspace_bytes": memory.recurrence_workspace(
               case.model, shape[0] / workload.data_shards(case.mesh), shape[1], parts, True)}
    if case.rollout is not None:
        _, shapes, width = case.rollout
        state = cfg.num_recurrent * cfg.state_bytes(width)
        out |= {"state_bytes": state, "slots_bytes": state * shapes.slots, "stash_bytes": state * shapes.stash_rows,
                "equals_tokens": round(state / (sum(cfg.cache_widths.values()) * len(cfg.windows) * width))}
    return out


BASIS = {
    "tpu": "memory: the TPU compiler's own; collectives: the same programs partitioned for as many CPU devices; time: "
    "roofline",
    "cpu": "memory and collectives: the CPU compiler's own; time: roofline",
    "gpu": "memory: exact for what is kept, counted for temporaries; collectives: the programs partitioned for as many "
    "CPU devices; time: roofline",
    "compiled": "memory: XLA's own for this GPU (its products not tuned); collectives: the programs partitioned for as "
    "many CPU devices; time: roofline",
}
TOWER = ("rows with images also need a tower of {:.3g} B parameters, its gradients and moments, and its work; set "
         "plan.image_tokens to plan it")
FULL = "; adapters are not counted: this is the full training, which needs more of all"


# -- compiling ---------------------------------------------------------------------------------------------------------


A_TPU = "a TPU, to check what is counted"


def _compile(case: Case) -> tuple[dict, dict | None, dict | None]:
    """Returns (result for CPU devices; result for the target or None; result for a TPU that checks the counted figures
    of a GPU, or None).

    They run at once. For a GPU the second needs jax's CUDA plugin, else the third needs libtpu and plan.effort=full: it
    takes longer than all the rest, and nothing but its own line depends on it.
    """
    c, limit, kind = case.config, case.config.plan.timeout_seconds, case.target.kind
    fast = c.plan.effort == "fast"
    names = set(case.programs)
    for_text = names if kind == "cpu" else set() if case.target.count == 1 else names - {"insert", "update_apply"}
    begun = [compiling.start(c, case.hf_config, "cpu", case.target, case.mesh, case.rollout_mesh, for_text)]
    other = own = None
    try:
        if kind == "tpu" or kind == "gpu" and gpu_devices.compiles(case.target.name):
            begun.append(compiling.start(c, case.hf_config, kind, case.target, case.mesh, case.rollout_mesh, names,
                                         fast))
        elif kind == "gpu" and not fast and compiling.has_libtpu():
            like = targets.Target("v5p", case.target.count, targets.slice_shape(case.target.count, 3))
            begun.append(compiling.start(c, case.hf_config, "tpu", like, case.mesh, None, {"update"}, fast))
        cpu = compiling.finish(begun[0], f"{case.target} (CPU devices)", limit)
        if len(begun) > 1 and kind == "tpu":
            own = compiling.finish(begun[1], str(case.target), limit)
        elif len(begun) > 1:
            here = gpu_devices.compiles(case.target.name)
            other = _checked(begun[1], f"{case.target} (jax's CUDA plugin)" if here else A_TPU, limit)
            own, other = (other, None) if other.get("platform") == "gpu" else (None, other)
    finally:
        for process, _, _ in begun:
            if process.poll() is None:
                process.kill()
    return cpu, own, other


def _checked(begun, what: str, limit: float) -> dict:
    """Returns the programs compiled for a GPU, or those for a TPU that check the counted ones; the reason
    if there are none.
    """
    try:
        return compiling.finish(begun, what, limit)
    except ConfigError as e:
        return {"programs": {}, "seconds": None, "missing": str(e)}


def _memory(case: Case, cpu: dict, own: dict | None) -> tuple[dict, dict, dict]:
    """Returns (bytes of the live parts on a device, programs with their temporaries, bytes of a device's parts that
    stay in host memory), from the source that the target's kind has.

    A CPU's host memory is its devices' own.
    """
    if case.target.kind == "cpu":
        return {name: size + cpu["host"][name] for name, size in cpu["live"].items()}, cpu["programs"], {}
    host = {name: size for name, size in (own or cpu)["host"].items() if size}
    if keeps_features(case.config, case.model):
        host["features of images"] = case.config.train.image_cache_gb * 1e9 / case.target.per_host
    if not own:
        return cpu["live"], memory.counted_programs(case.config, case.model, case.mesh, case.rollout,
                                                    case.programs), host
    programs = {name: p if "temporaries" in p else _too_large(p) for name, p in own["programs"].items()}
    if beside := max(p.get("host_temporaries", 0) for p in programs.values()):
        host["temporaries"] = beside
    return own["live"], programs, host


def _too_large(program: dict) -> dict:
    """Returns the TPU compiler's message about a program that does not fit: 'Used 120.5G of 95.7G hbm'."""
    used = re.search(r"Used ([\d.]+)([GM]) of", program["too_large"])
    size = float(used[1]) * (2**30 if used[2] == "G" else 2**20) if used else float("inf")
    return {"arguments": size, "outputs": 0, "alias": 0, "temporaries": 0.0}


def _cross_check(programs: dict, like: dict | None) -> dict:
    """Compares the update's counted temporaries with the TPU compiler's for the same program; says why if it cannot.
    Empty without libtpu, and with plan.effort=fast.
    """
    found = (like or {"programs": {}})["programs"].get("update", {})
    if "temporaries" not in found:
        return {"missing": like["missing"]} if like and "missing" in like else {}
    return {"update": {"counted": programs["update"]["temporaries"], "tpu": found["temporaries"]}}


def _bounds(plan: dict, off: float) -> dict:
    """Returns the bounds of the figures. off: bytes that the peak may be off by."""
    peak, seconds = plan["per_device"]["peak_bytes"], plan["step_seconds"]
    return {"peak_bytes": [peak - off, peak + off],
            "step_seconds": [GPU_SECONDS[0] * seconds, GPU_SECONDS[1] * seconds]}


# -- time --------------------------------------------------------------------------------------------------------------


def times(case: Case, collectives: dict) -> dict:
    """Returns the predicted seconds of one step and what follows from them.

    Args:
      collectives: program -> list of its collectives as dicts with `sent`; {} means no communication.

    Returns:
      {"phases": name -> the dict of roofline.phase; "step_seconds": sum of the phases' seconds, "ideal_step_seconds"
      and "serial_step_seconds" of theirs; "tokens_per_second_per_chip": tokens of prompts and completions over the
      step, "update_tokens_per_second_per_chip" over the update; "mfu": operations of workload.useful_flops over the
      update's seconds, per chip, as a share of its peak; "communication_share": of the serial step}.
    """
    c, chip, topology = case.config, case.target.chip, case.target.topology

    def network(program, often):
        return often * sum(roofline.collective_seconds(chip, topology, found) for found in collectives.get(program, []))

    shards = workload.data_shards(case.mesh)
    rows, (epochs, minibatches) = workload.rows(c, shards, model=case.model), c.updates
    micro, out = rows.microbatches * minibatches, {}
    train = workload.train_work(c, case.model, case.mesh, rows)
    forward = workload.train_work(c, case.model, case.mesh, rows, forward_only=True)
    apply = workload.apply_work(c, case.model, case.mesh)
    if c.recipe.samples and not alone(c):
        inner, shapes, width = case.sampler
        decode, prefill = workload.rollout_work(c, case.model, inner, shapes, case.samplers, width)
        moved = network("decode", decode.times / shapes.decode_steps) + network("prefill", prefill.times)
        out["rollout"] = roofline.phase(chip, [(decode, decode.times), (prefill, prefill.times)], moved)
    scored = [name for name in case.programs if name in ("score", "score_reference", "value")]
    if scored:
        out["score"] = roofline.phase(chip, [(forward, micro * len(scored))],
                                      sum(network(name, micro) for name in scored))
    for name in ("critic", "update"):
        if name in case.programs:
            moved = network(name, micro * epochs) + network(f"{name}_apply", minibatches * epochs)
            out[name] = roofline.phase(chip, [(train, micro * epochs), (apply, minibatches * epochs)], moved)
    if case.rollout is not None:
        copied = workload.publish_work(c, case.model, case.mesh, case.rollout[2])
        out["publish"] = roofline.phase(chip, [(copied, 1)], network("publish", 1))
    return {"phases": out, **_totals(case, out)}


def _run(config, plan: dict) -> dict:
    """Returns {"steps", "hours"} of the whole run as the config sets it; with data.epochs alone 100 steps.

    Excludes evaluations, checkpoints and compilation. A job that runs ahead has its simulated step.
    """
    known = ends(config)
    steps = min(known.values()) if known else 100
    ahead = [row["step_seconds"] for row in plan.get("asynchrony", {}).get("rows", ())
             if row["max_staleness"] == config.rollout.max_staleness > 0]
    return {"steps": steps, "hours": steps * (ahead[0] if ahead else plan["step_seconds"]) / 3600}


def _totals(case: Case, phases: dict) -> dict:
    c, count = case.config, case.target.count
    prompt, answer = workload.lengths(c)
    step = sum(p["seconds"] for p in phases.values())
    sequences = c.data.prompts_per_step * c.completions
    tokens = sequences * (prompt + answer) / count
    network = sum(p["network"] for p in phases.values())
    return {
        "step_seconds": step, "ideal_step_seconds": sum(p["ideal"] for p in phases.values()),
        "serial_step_seconds": sum(p["serial"] for p in phases.values()),
        "tokens_per_second_per_chip": tokens / step,
        "update_tokens_per_second_per_chip": tokens / phases["update"]["seconds"],
        "mfu": workload.useful_flops(c, case.model) / count / phases["update"]["seconds"] / case.target.chip.flops,
        "communication_share": network / sum(p["serial"] for p in phases.values()),
    }


# -- what fits ---------------------------------------------------------------------------------------------------------


def lent_memory(case: Case) -> tuple[float, float, float] | None:
    """Returns the bytes that vLLM's server takes of one of the trainer's devices in turns: (awake, asleep, weights in
    transit); None if it has devices of its own, or there is none."""
    if not case.lent:
        return None
    chunk = max(case.config.rollout.vllm.chunk_mb * 1e6, memory.layer_weights(case.model) * 4)
    return case.lent, min(case.lent, ASLEEP), 2 * chunk


def too_small(case: Case) -> str:
    """Returns why vLLM's part of a shared device is too small for what it must hold, or ""."""
    if not case.lent:
        return ""
    c, tp = case.config, dict.fromkeys(case.mesh, 1) | {"tp": case.config.rollout.vllm.tensor_parallel}
    size = workload.SIZES[c.rollout.dtype]
    weights = workload.weight_bytes(case.model, tp, ROLLOUT_RULES, size)
    answer = memory.cache_bytes(case.model, tp, 1, sum(workload.lengths(c)), size)
    if weights + answer + ASLEEP <= case.lent:
        return ""
    return (f"vLLM's part of a device ({gib(case.lent)}) does not hold its weights ({gib(weights)}), one completion "
            f"({gib(answer)}) and its own {gib(ASLEEP)}: raise rollout.vllm.memory_fraction or tensor_parallel, or "
            "plan the trainer alone (plan.part=training)")


def counted_peak(case: Case, scale: dict) -> float:
    """Returns the counted bytes on a device at the peak; inf if vLLM's part of the device is too small.

    scale: program -> compiled temporaries over counted ones; the counted ones are multiplied by it (1 where absent).
    """
    if too_small(case):
        return math.inf
    live = memory.standing(case.config, case.model, case.mesh, case.rollout)
    programs = memory.counted_programs(case.config, case.model, case.mesh, case.rollout, case.programs)
    for name, program in programs.items():
        program["temporaries"] *= scale.get(name, 1.0)
    return max(memory.peaks(live, programs, case.resting, lent_memory(case)).values())


def _search(case: Case, programs: dict, plan: dict) -> dict:
    """Returns {"largest", "advice"}: the largest settings that fit; if this one does not, the nearest that does."""
    counted = memory.counted_programs(case.config, case.model, case.mesh, case.rollout, list(programs))
    scale = {name: p["temporaries"] / counted[name]["temporaries"] for name, p in programs.items()
             if counted[name]["temporaries"] and p["temporaries"]}
    whole = counted_peak(case, scale)
    # padding, results that replace nothing
    rest = plan["per_device"]["peak_bytes"] / whole if math.isfinite(whole) else 1.0

    def peak(config, scale=scale):
        return counted_peak(case_of(config, case.hf_config), scale) * (rest if math.isfinite(rest) else 1.0)

    advice = _hints(case, plan)
    if not plan["fits"]:  # programs may come out larger than this one did, in proportion: advice is to hold
        careful = {name: max(1.0, s) for name, s in scale.items()}
        advice = [_nearest(case, functools.partial(peak, scale=careful)), *advice]
    return {"largest": fit.largest(case.config, peak, case.usable, case.mesh, case.model.config.max_positions),
            "advice": advice}


def _nearest(case: Case, peak) -> str:
    experts = case.model.config.num_experts
    for change in fit.alternatives(case.config, case.mesh, case.target.per_host, case.target.kind, experts):
        try:
            size = peak(fit.with_options(case.config, **change))
        except ConfigError:
            continue  # a mesh that the target cannot have
        if size <= case.usable:
            return f"The nearest that fits ({gib(size)} counted): {fit.as_flags(change)}"
    for factor in (2, 4, 8, 16, 32, 64):
        text = f"{case.target.name}:{case.target.count * factor}"
        for ep in (case.mesh["ep"], *fit.expert_splits(case.mesh, targets.parse(text).per_host, experts)):
            try:
                other = case_of(fit.with_options(case.config, plan__target=text, mesh__fsdp=-1, mesh__ep=ep),
                                case.hf_config)
                size = counted_peak(other, {})
            except ConfigError:
                continue
            if size <= other.usable:
                how = f" with --config.mesh.ep={ep}" if ep > 1 else ""
                return (f"No change of this config fits {case.target}; on {other.target}{how} it does ({gib(size)} a "
                        "device, counted)")
    return (f"Nothing was found that fits {case.target}; take a smaller model, or train fewer of its parameters "
            "(model.frozen)")


def _reason(case: Case, plan: dict) -> str:
    d = plan["per_device"]
    parts = {name: d[name] for name in set(memory.PARTS.values()) | {"activations"} if d.get(name)}
    big = ", ".join(f"{name} {gib(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1])[:4])
    peak = f"{gib(d['peak_bytes'])} a device in `{d['peak_in']}`"
    return f"it does not fit: {peak}, {gib(case.usable)} are there ({big})"


def _hints(case: Case, plan: dict) -> list[str]:
    """Remarks that do not depend on whether it fits."""
    beyond = case.model.config.beyond(case.config.longest, made_of(case.config))
    out = [beyond] if beyond else []
    if case.target.kind == "gpu" and case.usable < 0.8 * case.memory and case.rollout is not None and not case.lent:
        out.append(f"jax takes {case.usable / case.memory:.0%} of a GPU by itself: XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "
                   "gives it more")
    slowest = max(plan["phases"], key=lambda name: plan["phases"][name]["seconds"])
    p = plan["phases"][slowest]
    if p["bound"] == "network":
        out.append(f"`{slowest}` waits for the network: larger microbatches, or dp across hosts with fsdp inside them, "
                   "send less")
    if slowest == "rollout" and p["bound"] == "memory":
        out.append("rollouts are bound by reading weights and cache: more rollout.slots per device share the weights' "
                   "reads")
    if plan["rematerialised"]:
        out.append(f"the partitioner gathered {plan['rematerialised']} arrays whole that it should not have: a "
                   "sharding rule is missing")
    return out


# -- beside a run ------------------------------------------------------------------------------------------------------


def out_of_memory(error: BaseException | None, config) -> RunStopped | None:
    """Returns the message and remedy if a device ran out of memory in a run; None for other errors. Logs its text.

    The cause is looked for along `error` and its __cause__.
    """
    while error is not None and not (isinstance(error, jax.errors.JaxRuntimeError) and EXHAUSTED.search(str(error))):
        error = error.__cause__
    if error is None:
        return None
    log.error("%s", error)
    r, tokens = config.rollout, config.train.tokens_per_microbatch
    less = [f"train.tokens_per_microbatch={max(1, tokens // 2)} (now {tokens})"]
    spec = resolve(config)
    if spec.recipe.samples and engine_row(spec).on_mesh:
        less.append(f"rollout.slots={max(1, r.slots // 2)} (now {r.slots})" if r.slots
                    else "rollout.slots=32 (now 0: as many as completions)")
    elif spec.recipe.samples and r.placement == "colocated":
        less.append(f"rollout.vllm.memory_fraction (now {r.vllm.memory_fraction})")
    if config.model.remat not in ("full", "offload"):
        less.append(f"model.remat=full (now {config.model.remat})")
    return RunStopped(f"a device is out of memory: {str(error).splitlines()[0][:300].rstrip('.')}. Change one of "
                      f"these: {', '.join(less)}. "
                      f"{_remedy(config)}run.mode=plan says what fits before a run. The same command with the change "
                      "goes on from the newest checkpoint")


def _remedy(config) -> str:
    """Returns the plan's advice for these devices, counted, without a compilation; "" if too little is known."""
    name = targets.name_of(jax.devices()[0])
    if name is None or len(config.mesh.roles):
        return ""
    try:
        case = open_case(fit.with_options(config, plan__target=f"{name}:{jax.device_count()}"))
        failed = counted_peak(case, {})
        found = _nearest(dataclasses.replace(case, usable=min(case.usable, 0.8 * failed)), lambda c: counted_peak(
            case_of(c, case.hf_config), {}))
    except Exception as e:  # the reason why the run stops is another one
        log.debug("no advice of the plan's: %s", e)
        return ""
    return f"{found} (this one: {gib(failed)} counted). "


def predict(config, mesh, model) -> dict[str, float]:
    """Predicts {"peak_bytes", "step_seconds", "mfu", "<phase>_seconds"} for a run's mesh and model, by counting alone.

    Bytes are those of one device; everything is at maximum lengths, without communication. Nothing is compiled. {} on
    devices missing in the table of chips, with any entry in mesh.roles, and with adapters.

    config: the run's Spec. mesh: jax Mesh of present devices. model: jaxrl.models.Model. Raises ConfigError for a job
    that cannot be planned.
    """
    device = mesh.devices.flat[0]
    name = targets.name_of(device)
    if name is None or len(config.mesh.roles) or model.adapter is not None:
        return {}
    c = editable(config)
    sizes = dict(mesh.shape)
    for axis, n in sizes.items():
        c.mesh[axis] = n
    c.plan.target, c.train.compute_dtype = f"{name}:{mesh.size}", DTYPE_NAMES[model.compute_dtype.name]
    c.plan.part = "job"
    case = case_of(c, {}, model)
    live = memory.standing(case.config, case.model, sizes, case.rollout)
    programs = memory.counted_programs(case.config, case.model, sizes, case.rollout, case.programs)
    found = times(case, {})
    out = {f"{phase}_seconds": p["seconds"] for phase, p in found["phases"].items()}
    peaks = memory.peaks(live, programs, case.resting, lent_memory(case))
    return {"peak_bytes": max(peaks.values()), "step_seconds": found["step_seconds"],
            "mfu": found["mfu"], **out}
