"""Counts what one step of a job needs on a device, from the config: rows, operations, bytes.
No compilation, no device.

Every prompt and completion is taken at its maximum length, as memory must be.

Legend: D hidden size, V vocabulary, H query heads, K head size, P longest prompt, A longest completion.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl.kernels.experts import tuned
from jaxrl.roles.kept_features import keeps_features
from jaxrl.rollout.engines import engine_row
from jaxrl.sharding import ROLLOUT_RULES, TRAIN_RULES, spec_for, targets
from jaxrl.sharding.mesh import DATA_AXES, row_parts
from jaxrl.training.layout import make_layout, row_patches, row_shapes
from jaxrl.types import Sizes

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
# arrays of the parameters' size in the optimizer
MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1, "adafactor": 0}
XLA = ("auto", "blockwise", "reference")  # implementations of attention that compute and read what is masked, too
TILES = 1.2     # computed over visible pairs, in the kernels' tiles: 1.1 to 1.3 for 16 documents in 16k
# Kernels of a decoding step: outside of layers, of a layer with attention and one MLP, and how many more if it has
# experts, or a recurrence in place of attention.
LAUNCHES = {"step": 33, "layer": 13, "experts": 22, "recurrence": 11}
LAID_OUT = 32  # groups whose layout is computed; more are in proportion


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows of one optimizer step, and their content."""

    shape: tuple[int, int]   # rows and row length of a whole microbatch, over all data shards
    microbatches: int
    scored: int              # loss tokens per microbatch, over all data shards
    patches: int = 0         # that a row has room for


@dataclasses.dataclass(frozen=True)
class Work:
    """One pass of a phase on one device: floating-point operations, bytes of its memory, times per step, launches of
    kernels where they count (a decoding step on a GPU)."""

    flops: float
    bytes: float
    times: float = 1
    launches: float = 0


def state_bytes(cfg, mesh: dict, width: int) -> float:
    """Returns the bytes that a device keeps of one sequence in all recurrent layers; 0 for a model without them.

    mesh: sizes of its axes. width: bytes of a cached number.
    """
    return cfg.num_recurrent * cfg.state_bytes(width) / mesh["tp"]


def data_shards(mesh: dict) -> int:
    """Returns the number of parts that a mesh splits rows into. mesh: sizes of its axes."""
    return math.prod(mesh[a] for a in DATA_AXES)


def token_shards(mesh: dict) -> int:
    """Returns the number of parts that the tokens of a microbatch are split into: its rows, and each of them over cp.

    mesh: sizes of its axes.
    """
    return data_shards(mesh) * mesh["cp"]


def weight_bytes(model, mesh: dict, rules: dict, itemsize: int, experts: bool = False, tower: bool = True) -> int:
    """Returns the bytes of the model's weights on one device, or of its experts alone, or without its tower.

    Args:
      mesh: sizes of AXES.
      rules: logical axis -> mesh axes, such as TRAIN_RULES or ROLLOUT_RULES.
      itemsize: bytes of a number.
      experts: count the experts alone. tower: False = without the vision tower.
    """
    shape: Any = SimpleNamespace(shape=mesh)
    total = 0
    for entry in model.entries:
        if (experts and not entry.row.stacked) or (not tower and entry.path[0] == "vision"):
            continue
        spec = spec_for("/".join(entry.path), entry.axes, entry.shape, shape, rules)
        parts = [math.prod(mesh[a] for a in (axis if isinstance(axis, tuple) else (axis,))) if axis else 1
                 for axis in spec]
        total += math.prod(n // p for n, p in zip(entry.shape, parts, strict=True)) * itemsize
    return total


def lengths(config) -> tuple[int, int]:
    """Returns (longest prompt, longest completion) in tokens that fit one sequence together. The completion has at most
    rollout.max_new_tokens, in an episode of several turns, too."""
    total = config.longest
    prompt = min(config.data.max_prompt_tokens, total - 1)
    return prompt, min(config.rollout.max_new_tokens, total - prompt)


def prompt_patches(config, model) -> int:
    """Returns the patches of a prompt's images; 0 for a job of text."""
    tower = model.config.vision
    return 0 if tower is None else config.plan.image_tokens * tower.merge**2


def room(config, model, row_lengths) -> tuple[int, ...]:
    """Returns the patches that rows of each length have room for, as a run computes them; () for a job of text."""
    patches, (prompt, answer) = prompt_patches(config, model), lengths(config)
    if not patches:
        return ()
    beside = config.rollout.group_size * answer // 2 if config.recipe.samples else answer
    unit = 8 * model.config.vision.merge**2 * row_parts(config.mesh)
    return row_patches(row_lengths, np.array([[patches, 0]]), np.array([prompt + beside]), unit)


def tower_flops(config, model) -> float:
    """Returns the operations of the vision tower's forward pass for the images of one prompt; 0 for a job of text.

    Images are taken as one square, or as squares of the tower's size where that has one.
    """
    patches, tower = prompt_patches(config, model), model.config.vision
    if not patches:
        return 0.0
    side = max(1, round(math.sqrt(config.plan.image_tokens))) * tower.merge
    side = tower.side if tower.image_side else side
    return patches * (model.flops_per_patch + tower.pair_flops((side, side)) / side**2)


def rows(config, shards: int, tokens: int = 0, model=None) -> Rows:
    """Lays out one optimizer step of longest sequences, as the run does.

    At most LAID_OUT prompt groups are laid out; the microbatches of more are in proportion.

    Args:
      shards: data shards; every microbatch has a multiple of this number of rows.
      tokens: replaces train.tokens_per_microbatch; 0 = the config's.
      model: whose rows have room for patches; None = text.
    """
    prompt, answer = lengths(config)
    shapes = row_shapes(config.train.row_lengths, prompt + answer, tokens or config.train.tokens_per_microbatch, shards,
                        config.train.row_counts, row_parts(config.mesh))
    group = config.completions
    groups = max(1, config.data.prompts_per_step // config.updates[1])
    some = min(groups, LAID_OUT)
    n = some * group
    one_size = dataclasses.replace(shapes, counts=tuple((c[0],) for c in shapes.counts))
    prompts = np.repeat(np.arange(some), group)
    layout = make_layout(Sizes(np.full(n, prompt), np.full(n, answer), prompts, prompts), one_size,
                         share_prompts=config.train.share_prompts and config.recipe.samples)
    micro = layout.minibatches[0].microbatches
    largest = max(micro, key=lambda m: m.row_length * len(m.rows))
    used = sum(bool(row) for m in micro for row in m.rows)
    count = max(1, math.ceil(used * groups / some / len(largest.rows)))
    scored_per_row = n * (prompt + answer if config.train.loss_on_prompt and not config.recipe.samples
                          else answer) / used
    patches = () if model is None else room(config, model, (largest.row_length,))
    return Rows((len(largest.rows), largest.row_length), count, round(scored_per_row * len(largest.rows)),
                patches[0] if patches else 0)


def passes(model) -> int:
    """Returns the forward passes that one microbatch costs, the backward pass counting as two: 4 where layers are
    computed again (model.remat of full and offload), else 3."""
    return 4 if model.remat in ("full", "offload") else 3


def split_flops(model, context: float) -> tuple[float, float]:
    """Returns (all layers', the head's) operations of the forward pass of one token that sees `context` tokens.

    A multiply and an add count as two.
    """
    head = 2 * model.config.hidden_size * model.config.vocab_size
    return model.flops_per_token(max(1, round(context))) - head, head


def useful_flops(config, model) -> float:
    """Returns the operations of the forward and backward passes of one step on all devices, without recomputation,
    padding or masked pairs.

    The backward pass counts twice. With several passes over a batch (algorithm.ppo_epochs) each counts. Prompts count
    once for each group if they are shared; the head counts for the loss tokens alone. Images count as their prompts do,
    or, where the tower's features are kept, once per prompt of the step and only forward.
    """
    prompt, answer = lengths(config)
    rl, sequences = config.recipe.samples, config.data.prompts_per_step * config.completions
    prompts = config.data.prompts_per_step if rl and config.train.share_prompts else sequences
    of_prompt, head = split_flops(model, (prompt + 1) / 2)
    of_answer, _ = split_flops(model, prompt + (answer + 1) / 2)
    scored = answer + (prompt if config.train.loss_on_prompt and not rl else 0)
    text = prompts * prompt * of_prompt + sequences * (answer * of_answer + scored * head)
    if keeps_features(config, model):  # each picture once
        return 3 * config.updates[0] * text + config.data.prompts_per_step * tower_flops(config, model)
    return 3 * config.updates[0] * (text + prompts * tower_flops(config, model))


def seen(config, model, length: int) -> float:
    """Returns the keys that attention computes per query of a packed row of `length` tokens, on average.

    In XLA it is the whole row; in a kernel it is the visible keys of longest sequences times TILES, at most the row.
    """
    if model.attention in XLA:
        return length
    prompt, answer = lengths(config)
    group = config.completions if config.train.share_prompts else 1
    pairs = prompt * (prompt + 1) / 2 + group * answer * (prompt + (answer + 1) / 2)
    return min(length, TILES * pairs / (prompt + group * answer))


def train_work(config, model, mesh: dict, what: Rows, forward_only=False) -> Work:
    """Returns the work of one microbatch on one device.

    Bytes: each matrix product reads its operands and writes its result once, the gathered weights are written and read,
    gradients are read and written.

    Args:
      mesh: sizes of its axes.
      what: rows of the microbatch, over all data shards.
      forward_only: a scoring pass; else forward and backward pass with the recomputation of model.remat.
    """
    count, length = what.shape
    tokens = count * length / token_shards(mesh)
    act = model.compute_dtype.itemsize
    body, head = split_flops(model, seen(config, model, length))
    scored = what.scored / token_shards(mesh)
    factor, head_factor = (1, 1) if forward_only else (passes(model), 4)
    images = count * what.patches / max(1, prompt_patches(config, model)) / token_shards(mesh)
    images *= not keeps_features(config, model)
    flops = (factor * (tokens * body + images * tower_flops(config, model)) + head_factor * scored * head) / mesh["tp"]
    widths = sum((math.prod(e.shape[e.stacked:][:e.inputs]) + math.prod(e.shape[e.stacked:][e.inputs:]))
                 * len(e.hf_names) * e.row.share
                 for e in model.entries if e.inputs and e.path[0] not in ("head", "vision"))
    norms = 8 * model.config.hidden_size * model.config.num_layers
    moved = factor * tokens * (widths / mesh["tp"] + norms) * act
    weights = weight_bytes(model, mesh, ROLLOUT_RULES, act)
    moved += (factor + 1) * weights
    more = expert_chunks(config, model, mesh, tokens) - 1  # each reads the experts anew, and adds to their gradients
    moved += more * weight_bytes(model, mesh, ROLLOUT_RULES, factor * act + (0 if forward_only else 8), experts=True)
    if not forward_only:
        moved += 4 * weight_bytes(model, mesh, TRAIN_RULES, 4)
    moved += head_factor * scored * model.config.vocab_size / mesh["tp"] * 4
    return Work(flops, moved)


def chunk_of_experts(model, mesh: dict, device: str) -> int:
    """Returns the most tokens that the experts of a layer take at once, of all devices of ep together.

    device: its kind: cpu, gpu or tpu.
    """
    cfg, ep = model.config, mesh["ep"]
    return tuned.chunk(cfg.experts_per_token, cfg.num_experts, tuned.room_of(device, model.experts),
                       cfg.num_experts // ep, cfg.expert_inputs, cfg.expert_size // mesh["tp"],
                       model.compute_dtype.itemsize)


def expert_chunks(config, model, mesh: dict, tokens: float) -> int:
    """Returns the chunks in which a layer's experts take `tokens` tokens per device, which come to them over ep.

    It is 1 for a model without experts.
    """
    if not model.config.num_experts:
        return 1
    return math.ceil(tokens * mesh["ep"] / chunk_of_experts(model, mesh, targets.parse(config.plan.target).kind))


def apply_work(config, model, mesh: dict) -> Work:
    """Returns the work of the optimizer step on one device: parameters and moments read and written, fp32 gradients
    read.
    """
    size = SIZES[config.train.param_dtype]
    moments = MOMENTS.get(config.optimizer.name, 2)
    weights = weight_bytes(model, mesh, TRAIN_RULES, 1)
    return Work(12 * weights, weights * (2 * size + 2 * moments * size + 4))


def publish_work(config, model, mesh: dict, size: int) -> Work:
    """Returns the work of a weight sync on one device: trained weights read, sampling weights written and read.

    size: bytes of a sampling weight.
    """
    return Work(0, weight_bytes(model, mesh, TRAIN_RULES, SIZES[config.train.param_dtype])
                + 2 * weight_bytes(model, mesh, ROLLOUT_RULES, size))


def decode_launches(cfg) -> int:
    """Returns the number of kernels of a decoding step of the embedded sampler on a GPU, of a ModelConfig without
    adapters.

    Counted in programs compiled for an H200 (`python evidence/gpu_programs.py --budget`, jax 0.11.2).
    """
    return (LAUNCHES["step"] + LAUNCHES["layer"] * cfg.num_layers + LAUNCHES["experts"] * cfg.num_expert_layers
            + LAUNCHES["recurrence"] * cfg.num_recurrent)


def rollout_work(config, model, mesh: dict, shapes, hosts: int, size: int) -> tuple[Work, Work]:
    """Returns (one decode step, one prefill call) of the embedded sampler on one device of one process.

    `times` of both is per step of the job. Every prompt and completion is at its longest. A decode step reads the
    weights (of an untied embedding only a few rows, which do not count) and the cache of each slot, and reads and
    writes the recurrent states.

    Args:
      mesh: of one process's devices.
      shapes: its rollout.shapes.Shapes.
      hosts: processes that share the step's completions.
      size: bytes of a weight or cache entry.
    """
    prompt, answer = lengths(config)
    cfg, shards = model.config, data_shards(mesh)
    weights = weight_bytes(model, mesh, ROLLOUT_RULES, size, tower=False)
    kv_share = mesh["tp"] if cfg.cache_heads % mesh["tp"] == 0 else 1
    kv = sum(cfg.cache_widths.values()) * len(cfg.windows) * size / kv_share
    if model.attention in XLA:
        looked_at = np.mean([next(c for c in shapes.cache_lengths if c >= min(n, shapes.cache_lengths[-1]))
                             for n in range(prompt + 1, prompt + answer + 1)])
    else:
        looked_at = prompt + (answer + 1) / 2
    local = config.data.prompts_per_step * config.rollout.group_size / hosts
    waves = math.ceil(local / shapes.slots)
    slots = shapes.slots / shards
    # the embedding's rows are looked up
    table = cfg.vocab_size * cfg.hidden_size * size / mesh["tp"] if not cfg.tied else 0
    decode = Work(slots * model.flops_per_token(round(looked_at)) / mesh["tp"],
                  weights - table + slots * (looked_at * kv + 2 * state_bytes(cfg, mesh, size)),
                  waves * answer, decode_launches(cfg) if engine_row(config).on_mesh else 0)
    rows_here = shapes.prefill_rows / shards
    body, _ = split_flops(model, shapes.prompt_lengths[-1])
    whole = weight_bytes(model, mesh, ROLLOUT_RULES, size)
    prefill = Work(rows_here * (shapes.prompt_lengths[-1] * body + tower_flops(config, model)) / mesh["tp"],
                   whole + rows_here * (shapes.prompt_lengths[-1] * kv + state_bytes(cfg, mesh, size)),
                   math.ceil(config.data.prompts_per_step / hosts / shapes.prefill_rows))
    return decode, prefill
