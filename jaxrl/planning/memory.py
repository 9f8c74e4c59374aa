"""Bytes on one device: what a run keeps, and what each of its programs needs beside it for a moment.

What is kept follows from shapes and shardings and is exact. Temporaries are the compiler's figure where a program was
compiled for the target itself (CPU, TPU); for GPUs, and to scale a compiled figure to another size, they are counted
here. Kernels count by their operands and what they keep (`workspace`): an implementation of attention that is not in
XLA has no temporaries.

Legend: t tokens per device, D hidden size, V vocabulary, H query heads, G key-value heads, K head size, n layers.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl.kernels import recurrence
from jaxrl.kernels.attention.packed import blockwise
from jaxrl.kernels.experts import tuned
from jaxrl.kernels.experts.layout import blocks_of
from jaxrl.kernels.logprob import chunked
from jaxrl.planning.workload import (
    MOMENTS,
    SIZES,
    Rows,
    chunk_of_experts,
    data_shards,
    room,
    rows,
    state_bytes,
    token_shards,
    weight_bytes,
)
from jaxrl.roles.kept_features import keeps_features
from jaxrl.sharding import ROLLOUT_RULES, TRAIN_RULES, targets
from jaxrl.training import optimizer, streaming, update

# Which standing parts each program has as arguments. `publish` makes rollout_weights new, the old copy is dropped.
ARGUMENTS = {
    "update": ("update_params", "update_gradients", "update_batch"),
    "update_apply": ("update_params", "update_optimizer", "update_gradients"),
    "critic": ("critic_params", "critic_gradients", "critic_batch"),
    "critic_apply": ("critic_params", "critic_optimizer", "critic_gradients"),
    "score": ("update_params", "update_batch"),
    "score_reference": ("reference", "update_batch"),
    "value": ("critic_params", "update_batch"),
    "publish": ("update_params", "rollout_weights"),
    "prefill": ("rollout_weights", "rollout_stash"),
    "prefill_images": ("rollout_weights", "rollout_stash"),
    "insert": ("rollout_cache", "rollout_stash"),
    "extend": ("rollout_weights", "rollout_cache"),
    "decode": ("rollout_weights", "rollout_cache"),
}
# There only while their programs run.
MOMENTARY = ("update_gradients", "update_batch", "critic_gradients", "critic_batch")
POLICY = ("update_params", "update_optimizer")
SAMPLER = ("rollout_weights", "rollout_cache", "rollout_stash")
# Program -> phase of a step, in order. `generate` and `give`: vLLM's server on the same device answers, gets weights.
PHASE_OF = {"prefill": "rollout", "prefill_images": "rollout", "insert": "rollout", "extend": "rollout",
            "decode": "rollout", "generate": "rollout",
            "score": "score", "score_reference": "score", "value": "score", "critic": "update",
            "critic_apply": "update", "update": "update", "update_apply": "update", "publish": "publish",
            "give": "publish"}
PARTS = {"update_params": "parameters", "update_optimizer": "optimizer", "update_gradients": "gradients",
         "update_batch": "batch", "critic_params": "critic", "critic_optimizer": "critic",
         "critic_gradients": "gradients", "critic_batch": "batch", "reference": "reference",
         "rollout_weights": "publish", "rollout_cache": "kv_cache", "rollout_stash": "kv_cache"}


def peaks(live: dict, programs: dict, resting=(), lent: tuple[float, float, float] | None = None) -> dict[str, float]:
    """Returns program -> bytes on one device while it runs.

    A program has its arguments, results less the arguments that they replace, and temporaries, beside the other live
    parts.

    Args:
      live: standing and momentary parts by name, bytes as far as they are on the device.
      programs: name -> {"arguments", "outputs", "alias", "temporaries"} in bytes; arguments of 0 are taken from `live`,
        so that a compiler's own figure (with the padding of its layouts) wins.
      resting: roles that are away between their uses: the sampler while the trainer works, the policy while completions
        are sampled.
      lent: bytes that vLLM's server on the same device has (awake, asleep, of weights on their way to it); it adds the
        programs `generate` and `give`.
    """
    out = {}
    for name, p in programs.items():
        mine = [a for a in ARGUMENTS[name] if a in live]
        if name == "value" and "critic_params" not in live:
            mine.append("update_params")
        others = sum(size for part, size in live.items()
                     if part not in (*mine, *away(PHASE_OF[name], resting)))
        if name == "publish":
            mine.remove("rollout_weights")
        arguments = p["arguments"] or sum(live[a] for a in mine)
        out[name] = others + arguments + p["outputs"] - p["alias"] + p["temporaries"] + (lent[1] if lent else 0)
    if lent:
        for name, more in (("generate", lent[0]), ("give", lent[0] + lent[2])):
            gone = away(PHASE_OF[name], resting)
            out[name] = more + sum(size for part, size in live.items() if part not in gone)
    return out


def away(phase: str, resting) -> tuple[str, ...]:
    """Returns the live parts that are not on the device in a phase, except the arguments of its programs.

    resting: the roles that leave the device between their uses, of `policy` and `sampler`.
    """
    sampler = SAMPLER if "sampler" in resting and phase in ("score", "update") else ()
    policy = POLICY if "policy" in resting and phase == "rollout" else ()
    return MOMENTARY + sampler + policy


def by_phase(peaks: dict[str, float]) -> dict[str, float]:
    """Returns phase -> the most bytes of its programs, in the order of a step. peaks: of `peaks`."""
    out: dict[str, float] = {}
    for name in sorted(peaks, key=list(PHASE_OF).index):
        out[PHASE_OF[name]] = max(out.get(PHASE_OF[name], 0.0), peaks[name])
    return out


def parts(live: dict, program: str, temporaries: float, peak: float, resting=(),
          vllm: float = 0.0) -> dict[str, float]:
    """Returns the bytes by purpose at the peak; the rest, results that replace nothing and padding, is `other`.

    Args:
      live: bytes of the parts by name. program: the one with the highest peak, `peak` bytes, of which `temporaries` are
        its own.
      resting: roles that leave the device between their uses. vllm: bytes of vLLM's server meanwhile.
    """
    out: dict[str, float] = {"vllm": vllm} if vllm else {}
    for name, size in live.items():
        if name not in away(PHASE_OF[program], resting) or name in ARGUMENTS.get(program, ()):
            out[PARTS[name]] = out.get(PARTS[name], 0) + size
    out["activations"] = temporaries
    out["other"] = max(0.0, peak - sum(out.values()))
    return out


# -- counted -----------------------------------------------------------------------------------------------------------


def standing(config, model, mesh: dict, rollout=None) -> dict[str, float]:
    """Returns the bytes of the live parts of a job on one device, by name, from the parameter table alone.

    Frozen parameters count as trained ones; of parts in host memory, those too small for it are ignored. Gradients are
    fp32; moments have train.param_dtype, two of them for an optimizer that is not in MOMENTS.

    Args:
      mesh: axis sizes.
      rollout: (mesh of one process's sampler, Shapes, bytes of its dtype), or None.
    """
    size = SIZES[config.train.param_dtype]
    one = weight_bytes(model, mesh, TRAIN_RULES, 1)
    out = {"update_params": one * size, "update_optimizer": MOMENTS.get(config.optimizer.name, 2) * one * size,
           "update_gradients": one * 4,
           "update_batch": _batch_bytes(rows(config, data_shards(mesh), model=model), model, mesh,
                                        keeps_features(config, model))}
    if config.needs_reference:
        out["reference"] = one * SIZES[config.reference.dtype]
    if config.needs_critic and not config.shares_trunk:
        out |= {name.replace("update", "critic"): size for name, size in out.items() if name.startswith("update")}
    if rollout is not None:
        inner, shapes, width = rollout
        out["rollout_weights"] = weight_bytes(model, inner, ROLLOUT_RULES, width)
        out["rollout_cache"] = cache_bytes(model, inner, shapes.slots, shapes.cache_lengths[-1], width)
        out["rollout_stash"] = cache_bytes(model, inner, shapes.stash_rows, shapes.prompt_lengths[-1], width)
    gone = in_host(config)
    return {name: 0.0 if name in gone else size for name, size in out.items()}


def in_host(config) -> set[str]:
    """Returns the names of the live parts that are always in host memory; none for a CPU target."""
    if targets.parse(config.plan.target).kind == "cpu":
        return set()
    learn = ("params", "gradients", "optimizer")
    parts = {"policy": [f"update_{x}" for x in learn], "critic": [f"critic_{x}" for x in learn],
             "reference": ["reference"]}
    out = {x for role in streamed(config) for x in parts[role]}
    return out | ({"update_optimizer", "critic_optimizer"} if config.optimizer.offload else set())


def streamed(config) -> set[str]:
    """Returns the roles whose parameters stay in host memory and are streamed (mesh.roles.<role>.rest)."""
    return {role for role, given in config.mesh.roles.items() if given.get("rest") == "streamed"}


def cache_bytes(model, mesh: dict, slots: int, length: int, width: int) -> float:
    """Returns the bytes of the sampler's cache on one device: keys and values, and states of recurrent layers.

    Args:
      mesh: sizes of its axes. Keys and values are split over tp if it divides their heads, else whole on each device.
      slots: on all devices of the mesh together.
      length: positions per slot.
      width: bytes of a number.
    """
    cfg = model.config
    kv_share = mesh["tp"] if cfg.cache_heads % mesh["tp"] == 0 else 1
    kv = length * sum(cfg.cache_widths.values()) / kv_share * len(cfg.windows) * width
    return slots / data_shards(mesh) * (kv + state_bytes(cfg, mesh, width))


def _batch_bytes(what: Rows, model, mesh: dict, kept: bool = False) -> float:
    count, length = what.shape
    text = 13 * 4 * count * length  # 7 integer arrays, about 6 columns and weights
    if not what.patches:
        return text / token_shards(mesh)
    tower = model.config.vision
    of_patches = tower.patch_numbers + 4 * (5 + (tower.window > 0))
    if kept:
        of_patches = model.compute_dtype.itemsize * (1 + len(tower.taps)) * tower.out_size / tower.merge**2
    return (text + 16 * count * length + of_patches * count * what.patches) / token_shards(mesh)


def tower_temporaries(model, mesh: dict, rows: float, patches: int, learns: bool) -> float:
    """Returns the bytes that a vision tower needs on one device beside the decoder's.

    Counted: what the backward pass finds, one layer at work, and the features; 0 without a tower or patches.

    Args:
      rows: of the microbatch, over all data shards. patches: that each has room for.
      learns: the pass has a backward pass.
    """
    tower = model.config.vision
    if tower is None or not patches:
        return 0.0
    p, act, tp = rows * patches / token_shards(mesh), model.compute_dtype.itemsize, mesh["tp"]
    layer = p * act * (6 * tower.width + (6 * tower.width + (4 if learns else 3) * tower.mlp) / tp)
    scores = workspace(model, p, patches, tp, learns) * tower.heads / model.config.num_heads
    kept = {"full": tower.width, "offload": 0.0, "dots": 4 * tower.width + (3 * tower.width + 2 * tower.mlp) / tp}
    whole = 8 * tower.width + (9 * tower.width + 4 * tower.mlp) / tp
    saved = learns * tower.depth * p * act * kept.get(model.remat, whole)
    features = p / tower.merge**2 * act * tower.out_size * (1 + len(tower.taps)) * (3 if learns else 1)
    return layer + scores + saved + features


def workspace(model, queries: float, keys: int, tp: int, backward: bool, at_once: int = blockwise.SCORES) -> float:
    """Returns the bytes that attention needs on one device beside its operands.

    The reference holds all scores (fp32: scores and weights; in the backward pass their gradients too), the blockwise
    one its `at_once` of them or those of one block per row, a kernel the log-sum-exp of each query.

    Args:
      queries: query tokens on the device. keys: tokens of the row that each looks at.
      tp: devices that share the heads.
      at_once: scores that the blockwise implementation holds.
    """
    heads = model.config.num_heads / tp
    name = model.attention
    if name == "auto":
        name = "blockwise" if keys >= blockwise.WORTH_IT else "reference"
    if name not in ("reference", "blockwise"):
        return queries * heads * 4
    scores = queries * keys * heads
    if name == "blockwise":
        scores = min(scores, max(at_once, queries * blockwise.BLOCK * heads))
        return (7 if backward else 2) * scores * 4  # both passes at once, as compiled
    return (4 if backward else 2) * scores * 4


def recurrence_workspace(model, rows: float, length: int, parts: int, backward: bool) -> float:
    """Returns the bytes that a recurrence needs beside its operands for `rows` rows of `length` tokens; 0 without
    recurrent layers.

    rows: on the device, over cp counted whole. parts: devices that share the heads (tp, and cp). backward: with a
    backward pass.
    """
    cfg = model.config
    if not cfg.num_recurrent:
        return 0.0
    rule = recurrence.Rule(cfg.linear_key_heads, cfg.linear_value_heads, cfg.linear_key_size, cfg.linear_value_size,
                           not cfg.is_mamba)
    return rows / parts * recurrence.workspace(model.recurrence, rule, length, model.compute_dtype.itemsize, backward)


def temporaries(config, model, mesh: dict, shape, kind: str) -> float:
    """Returns the counted temporaries, in bytes on one device, of an update or a scoring pass on one microbatch.

    Args:
      shape: (rows over all data shards, row length).
      kind: `update` or `critic`, which have a backward pass; else a scoring pass: `score`, `score_reference`, or
        `value`, which like `critic` has no output matrix.
    """
    cfg, tp, act = model.config, mesh["tp"], model.compute_dtype.itemsize
    count, length = shape
    t = count * length / token_shards(mesh)
    wide, narrow = max(map(cfg.width, cfg.layers)) / tp, (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim / tp
    learns = kind in ("update", "critic")
    at_once = model.remat_every if learns and model.remat != "none" else 1
    layer = t * act * (6 * cfg.hidden_size + 2 * narrow + (4 if learns else 3) * wide)
    kind_of_device = targets.parse(config.plan.target).kind
    layer += dispatch(model, t, mesh, learns, kind_of_device) + rows_of_others(model, t, mesh, learns)
    scores = blockwise.SCORES_CPU if kind_of_device == "cpu" else blockwise.SCORES
    per_token = _kept_without_remat(model, mesh, length)
    layer += max(workspace(model, t, length, tp, learns, scores),
                 recurrence_workspace(model, count / data_shards(mesh), length, tp * mesh["cp"], learns))
    layer += (at_once - 1) * t * act * per_token
    gathered = 2 * layer_weights(model, mesh["ep"]) / tp * act
    role = {"critic": "critic", "value": "critic", "score_reference": "reference"}.get(kind, "policy")
    streams = role in streamed(config)
    if streams:  # two layers at a time, with the sums of gradients that go and come; and the table
        one = 4 / math.prod(mesh.values())
        gathered += 2 * layer_weights(model, mesh["ep"]) * one * (3 if learns else 1)
        gathered += cfg.hidden_size * cfg.vocab_size * one * (3 if learns else 1)
    whole = mesh["cp"] if mesh["cp"] > 1 else 0  # of the rows whose loss tokens are looked for
    hidden = (4 + whole) * t * cfg.hidden_size * act
    if kind in ("critic", "value"):
        head = 0.0
    else:
        chunk, kept = min(config.train.logprob_chunk, t) * cfg.vocab_size / tp, 0.0
        if targets.parse(config.plan.target).kind == "cpu":
            chunk = min(chunk, max(chunked.LOGITS_CPU, min(config.train.logprob_chunk, t) * chunked.NARROWEST))
            kept = t * cfg.vocab_size * 4 * (learns and math.prod(mesh.values()) == 1
                                             and t * cfg.vocab_size <= chunked.KEPT_CPU)
        chunk *= 4
        table = cfg.hidden_size * cfg.vocab_size / tp
        of_logits, of_table = (1.5, 4) if kind_of_device == "gpu" else (4, 8)
        head = kept + (of_logits if learns else 2) * chunk + table * act + (of_table * table if learns else 0)
    if not learns:
        return hidden + max(layer + gathered, head)
    saved = _saved(model, t, mesh, act, length)
    added = streams or (update.IN_PLACE and model.scan_layers and at_once == 1 and config.train.param_dtype == "fp32")
    gradients = 0.0 if added else weight_bytes(model, mesh, TRAIN_RULES, 4)
    own = layer_weights(model, mesh["ep"]) / tp * 4
    embedding = cfg.hidden_size * cfg.vocab_size / tp * 4 if head else 0.0
    return saved + hidden + max(layer + gathered + own + gradients + embedding, head)


def rows_of_others(model, t: float, mesh: dict, learns: bool) -> float:
    """Returns the bytes of a layer's keys and values, and of their gradients, that a device of cp has while it computes
    attention: those of whole rows, or in a ring what is here and what comes, gradients in fp32, and the output, or the
    queries' gradients, that are summed in fp32 meanwhile.

    t: tokens of the microbatch per device. learns: with a backward pass. Returns 0 if cp is 1.
    """
    if mesh["cp"] == 1:
        return 0.0
    numbers, size = t * _key_numbers(model, mesh), model.compute_dtype.itemsize
    if model.ring:
        sums = t * model.config.num_heads / mesh["tp"] * model.config.row_head_size * 4
        return 2 * numbers * (size + (4 if learns else 0)) + sums
    return numbers * mesh["cp"] * size * (2 if learns else 1)


def _key_numbers(model, mesh: dict) -> float:
    """Returns the count of numbers of a token's keys and values in a layer, on one device."""
    cfg = model.config
    return 2 * cfg.num_kv_heads / min(mesh["tp"], cfg.num_kv_heads) * cfg.row_head_size


def _saved(model, t: float, mesh: dict, act: int, length: int) -> float:
    """Returns the bytes that the forward pass saves for the backward pass, over all layers. The residual stream is
    split over tp.
    """
    cfg, tp = model.config, mesh["tp"]
    narrow = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim / tp
    if model.remat == "offload":
        return 0.0
    if model.remat == "full":
        per_token = cfg.hidden_size / tp / model.remat_every
    elif model.remat == "dots":
        per_token = 3 * cfg.hidden_size + narrow + 2 * _mean_width(cfg) / tp
    else:
        per_token = _kept_without_remat(model, mesh, length)
    return cfg.num_layers * t * per_token * act


def _kept_without_remat(model, mesh: dict, length: int) -> float:
    """Returns the numbers per token that one layer saves if nothing is recomputed."""
    cfg, tp = model.config, mesh["tp"]
    narrow = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim / tp
    scores = model.attention in ("auto", "reference") and length < blockwise.WORTH_IT
    return (8 * cfg.hidden_size + 3 * narrow + 4 * _mean_width(cfg) / tp
            + (0 if model.ring or mesh["cp"] == 1 else mesh["cp"] * _key_numbers(model, mesh))
            + (2 * cfg.num_heads / tp * length * 4 / model.compute_dtype.itemsize if scores else 0))


def _mean_width(cfg) -> float:
    """Returns the mean width of the layers' feed-forwards. Experts save nothing but their input; a shared
    expert beside them counts.
    """
    kept = [cfg.shared_expert_size if layer.has_experts else cfg.width(layer) for layer in cfg.layers]
    return sum(kept) / len(kept)


def dispatch(model, t: float, mesh: dict, learns: bool, device: str = "cpu") -> float:
    """Returns the bytes on one device that the experts of a layer need beside their weights; 0 for a model without
    experts.

    They are a chunk of tokens of all devices of ep, the rows that it is sorted into for this one's experts, the
    router's probabilities, and the experts' gradients in fp32. On CPUs rows are computed in fp32, block by block;
    kernels keep those of a chunk in the compute dtype, with what they multiply, and sum up in fp32, on Hopper in
    registers where all tokens are one chunk.

    t: tokens per device. learns: with a backward pass. device: its kind: cpu, gpu or tpu.
    """
    cfg, ep, act = model.config, mesh["ep"], model.compute_dtype.itemsize
    if not cfg.num_experts:
        return 0.0
    whole = t * ep
    chunk = min(whole, chunk_of_experts(model, mesh, device))
    block = tuned.block_of(device, model.experts)
    rows = blocks_of(int(chunk), cfg.experts_per_token, cfg.num_experts // ep, block) * block
    of_a_row = 4 * cfg.expert_inputs * (2 if learns else 1)
    if device != "cpu" and model.experts not in ("blocks", "reference"):
        inside = cfg.expert_size / mesh["tp"] * (3 if learns else 1)
        of_a_row = act * (cfg.expert_inputs * (2 if learns else 1) + inside) + 4 * cfg.expert_inputs
    sent = chunk * (4 + act) * cfg.expert_inputs if ep > 1 else 0  # the tokens, and what goes back to them
    sums = 3 * cfg.num_experts * cfg.expert_inputs * cfg.expert_size / (ep * mesh["tp"]) * learns
    sums *= act if tuned.room_of(device, model.experts) and chunk == whole else 4
    return rows * of_a_row + sent * (2 if learns else 1) + 4 * t * cfg.num_experts * 4 + sums


def layer_weights(model, ep: int = 1) -> float:
    """Returns the number of parameters of one layer, the mean over layers. ep: devices that its experts are split over.
    """
    return sum(math.prod(e.shape) / (ep if e.row.stacked else 1)
               for e in model.entries if e.path[0].startswith("layer")) / model.config.num_layers


def counted_programs(config, model, mesh: dict, rollout, names) -> dict[str, dict]:
    """Returns counted bytes of the named programs on one device: {"arguments": 0, "outputs", "alias", "temporaries"} of
    each.

    Arguments of 0 mean that `peaks` takes them from the live parts.

    Args:
      rollout: (mesh of one process's sampler, Shapes, bytes of its dtype), or None.
      names: of `program_names`.
    """
    shape = rows(config, data_shards(mesh)).shape
    scored = rows(config, data_shards(mesh), config.train.score_tokens_per_microbatch).shape
    places = {length: (*room(config, model, (length,)), 0)[0] for _, length in (shape, scored)}
    inner: Any  # names of the sampler are among them only where there is one
    shapes: Any
    inner, shapes, width = rollout or (None, None, 0)
    out = {}
    for name in names:
        extra = temp = 0.0
        if name in ("update", "critic", "score", "score_reference", "value"):
            learns = name in ("update", "critic")
            count, length = shape if learns else scored
            temp = temporaries(config, model, mesh, (count, length), name)
            reads = name in ("update", "score") or name == "score_reference" and not config.reference.path
            if not (reads and keeps_features(config, model)):
                temp += tower_temporaries(model, mesh, count, places[length], learns)
        elif name in ("update_apply", "critic_apply"):
            temp = _apply(config, model, mesh, name)
        elif name == "publish":
            extra = weight_bytes(model, inner, ROLLOUT_RULES, width)
            temp = 2 * layer_weights(model) * 4
        elif name in ("prefill", "prefill_images"):
            temp = temporaries(config, model, inner, (shapes.prefill_rows, shapes.prompt_lengths[-1]), "value")
            temp += cache_bytes(model, inner, shapes.prefill_rows, shapes.prompt_lengths[-1], width)
            seen = shapes.patches if name == "prefill_images" else 0
            temp += tower_temporaries(model, inner, shapes.prefill_rows, seen, False)
        elif name == "insert":
            temp = 2 * cache_bytes(model, inner, shapes.insert_width, shapes.prompt_lengths[-1], width)
        elif name == "extend":
            slots, new = shapes.extend
            temp = temporaries(config, model, inner, (slots, new), "value")
            if model.attention in ("auto", "reference"):  # queries are too few for the blockwise one
                scores = slots * new / data_shards(inner) * model.config.num_heads / inner["tp"]
                temp += 2 * scores * shapes.cache_lengths[-1] * 4
            temp += 3 * cache_bytes(model, inner, slots, shapes.cache_lengths[-1], width)
        elif name == "decode":
            slots, cfg = shapes.slots / data_shards(inner), model.config
            logits = slots * cfg.vocab_size / inner["tp"] * 4
            seen = slots * cfg.num_heads / inner["tp"] * shapes.cache_lengths[-1] * 4
            cache = cache_bytes(model, inner, shapes.slots, shapes.cache_lengths[-1], width)
            temp = 6 * logits + 3 * seen + 2 * cache / cfg.num_layers
        out[name] = {"arguments": 0, "outputs": extra, "alias": 0, "temporaries": temp}
    return out


def _apply(config, model, mesh: dict, name: str) -> float:
    """Returns the counted temporaries of an optimizer step: the part of the state in host memory that is on the device
    at a time.
    """
    if name.replace("apply", "optimizer") not in in_host(config):
        return 0.0
    state = MOMENTS.get(config.optimizer.name, 2) * weight_bytes(model, mesh, TRAIN_RULES, 1)
    state *= SIZES[config.train.param_dtype]
    parts = optimizer.in_parts(config.optimizer.name)
    if parts == "none":
        return state
    largest = max(math.prod(e.shape) for e in model.entries) * 4 / math.prod(mesh.values())
    return min(2 * state, 8 * (largest if parts == "parameter" else min(largest, streaming.PART_BYTES)))


def program_names(config, rollout) -> list[str]:
    """Returns the names of the programs of a job that the plan considers, the update first.

    rollout: the embedded sampler of one process, or None; without it no program of the sampler is considered.
    """
    names = ["update", "update_apply"]
    if config.recipe.samples and config.algorithm.old_logprobs == "recompute":
        names.append("score")
    if config.needs_reference:
        names.append("score_reference")
    if config.needs_critic:
        names += ["value"] + ([] if config.shares_trunk else ["critic", "critic_apply"])
    if rollout is None:
        return names
    prefills = ["prefill", "prefill_images"] if config.plan.image_tokens else ["prefill"]
    return names + ["publish", *prefills, "insert", *(["extend"] if config.episodes else []), "decode"]
