"""Finds the largest sizes that fit, and the nearest config that does: counted memory of other configs, scaled by what
was compiled for this one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

from jaxrl.config.load import editable
from jaxrl.planning.workload import data_shards, lengths, rows
from jaxrl.rollout.engines import engine_row, shared_gpus

LONGEST = 1 << 20


def with_options(config, **values):
    """Returns a copy of a config with dotted options (written group__name, group__part__name) replaced.

    A new rollout__max_new_tokens also resets rollout.cache_lengths, train.row_lengths and train.max_sequence_tokens,
    which then follow from the config.
    """
    c = editable(config)
    with c.unlocked():
        for name, value in values.items():
            *groups, leaf = name.split("__")
            functools.reduce(lambda node, group: node[group], groups, c)[leaf] = value
        if "rollout__max_new_tokens" in values:
            c.rollout.cache_lengths, c.train.row_lengths, c.train.max_sequence_tokens = (), (), 0
    return c


def largest_n(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Returns the largest n <= limit with fits(n), which must be monotonic; 0 if not even 1 fits.

    The result is exact below 128, else at most 1/64 too small. start: where the search begins to double. limit: at
    least 1.
    """
    if not fits(1):
        return 0
    low, high = 1, max(2, start)
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _samples(config) -> bool:
    """Whether the embedded sampler is planned."""
    return config.recipe.samples and config.plan.part == "job" and engine_row(config).on_mesh


def largest(config, peak: Callable, memory: float, mesh: dict, max_positions: int) -> dict:
    """Returns the largest microbatch, group, slot count and completion that fit, all else unchanged.

    They are {"tokens_per_microbatch", "max_new_tokens", "group_size", "slots"}; completions in steps of 64 tokens,
    slots of all devices together. None for an option that does not decide memory, 0 if not even the smallest fits. The
    search ends at 4096 times the row length, 4096 slots per data shard and groups of 256.

    Args:
      peak: config -> bytes on a device.
      memory: bytes of a device that may be used.
      mesh: axis sizes.
      max_positions: of the model, which bounds prompt and completion together; but 64 tokens of a completion are always
        tried, even if the prompt leaves less.
    """
    shards = data_shards(mesh)
    length = rows(config, shards).shape[1]
    fits = lambda **values: peak(with_options(config, **values)) <= memory  # noqa: E731
    row_count = largest_n(lambda n: fits(train__tokens_per_microbatch=n * length), 8, 4096)
    prompt, _ = lengths(config)
    room = max(1, min(LONGEST, max_positions) - prompt)
    answer = largest_n(lambda n: fits(rollout__max_new_tokens=64 * n), 8, max(1, room // 64))
    out = {"tokens_per_microbatch": row_count * length, "max_new_tokens": 64 * answer, "group_size": None,
           "slots": None}
    if _samples(config):
        slots = largest_n(lambda n: fits(rollout__slots=n * shards), 8, 4096)
        out["slots"] = slots * shards
        by_batch = not config.rollout.slots and config.data.prompts_per_step * config.rollout.group_size < 256
        if by_batch:
            out["group_size"] = largest_n(lambda n: fits(rollout__group_size=n), config.rollout.group_size, 256)
    return out


def expert_splits(mesh: dict, per_host: int, experts: int) -> list[int]:
    """Returns larger values of mesh.ep that a host's devices and the number of experts allow, ascending."""
    inside = per_host // mesh["tp"] if experts else 0
    return [ep for ep in range(mesh["ep"] + 1, inside + 1) if inside % ep == 0 and experts % ep == 0]


def alternatives(config, mesh: dict, per_host: int, kind: str, experts: int = 0) -> Iterator[dict]:
    """Yields changes in order of preference: first those that cost time, then those that cost samples.

    A change maps options, as `with_options` takes them, to values. Order: vLLM's share of memory, recomputation,
    experts over more devices, smaller microbatches, the optimizer in host memory, several of these, fsdp for dp, fewer
    slots, tp, cp, shorter completions. After the first two, each comes with recomputation; from the optimizer on with
    the smallest microbatches; from tp on, if the embedded sampler is planned, with 8 slots.

    Args:
      mesh: axis sizes. per_host: devices of a host. kind: cpu, gpu or tpu.
      experts: of a layer of the model, 0 = it has none.
    """
    length = rows(config, data_shards(mesh)).shape[1]
    smaller = [n for n in (config.train.tokens_per_microbatch // 2 ** k for k in range(1, 12))
               if n >= length] or [length]
    remat = {} if config.model.remat in ("full", "offload") else {"model__remat": "full"}
    parts = (0.4, 0.3, 0.2, 0.1, 0.6, 0.8) if config.plan.part == "job" and shared_gpus(config) == "turns" else ()
    for part in parts:
        yield {"rollout__vllm__memory_fraction": part}
    if remat:
        yield remat
    devices = math.prod(mesh.values())
    splits = [{"mesh__ep": ep, "mesh__dp": 1, "mesh__fsdp": devices // inner}
              for ep in expert_splits(mesh, per_host, experts)
              if devices % (inner := ep * mesh["tp"] * mesh["cp"]) == 0]
    for split in splits:
        yield {**remat, **split}
    for tokens in smaller:
        yield {**remat, "train__tokens_per_microbatch": tokens}
    if kind != "cpu" and not config.optimizer.offload:
        yield {**remat, "train__tokens_per_microbatch": smaller[-1], "optimizer__offload": True}
    least = {**remat, "train__tokens_per_microbatch": smaller[-1]}
    for split in splits:
        yield {**least, **split}
        if kind != "cpu":
            yield {**least, **split, "optimizer__offload": True}
    for part in parts:
        yield {**least, "optimizer__offload": True, "rollout__vllm__memory_fraction": part}
    if mesh["dp"] > 1:
        yield {**least, "mesh__dp": 1, "mesh__fsdp": mesh["dp"] * mesh["fsdp"]}
    if _samples(config):
        for slots in (n for n in (128, 64, 32, 16, 8) if n < (config.rollout.slots or 256)):
            for split in ({}, *splits):
                yield {**least, **split, "rollout__slots": slots}
        least["rollout__slots"] = min(8, config.rollout.slots or 8)
    for tp in (2, 4, 8):
        inner = tp * mesh["ep"]
        whole = inner * mesh["cp"]
        if tp > mesh["tp"] and inner <= per_host and devices % whole == 0:
            yield {**least, "mesh__tp": tp, "mesh__dp": 1, "mesh__fsdp": devices // whole}
    for cp in (2, 4, 8):  # rows of one sequence are too long
        inner = cp * mesh["ep"] * mesh["tp"]
        if cp > mesh["cp"] and devices % inner == 0:
            yield {**least, "mesh__cp": cp, "mesh__dp": 1, "mesh__fsdp": devices // inner}
    answer = lengths(config)[1]
    for part in (2, 4, 8):
        yield {**least, "rollout__max_new_tokens": max(1, answer // part)}


def as_flags(change: dict) -> str:
    """Returns a change as command-line flags: {"train__param_dtype": "bf16"} is --config.train.param_dtype=bf16."""
    return " ".join(f"--config.{name.replace('__', '.')}={value}" for name, value in change.items())

