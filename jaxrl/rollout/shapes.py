"""Derives every static shape of the embedded sampler from the config."""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxrl.config.lengths import episodes, longest_prompt, longest_sequence
from jaxrl.errors import ConfigError

DEFAULT_SLOTS = 256  # default number of slots
LONG_COMPLETION = 256  # tokens from which a second cache length pays for its compilation
PREFILL_TOKENS = 32768  # most prompt tokens of one prefill call when its rows are chosen here
EXTEND = (8, 64)  # most slots of a device, and new tokens of each, that one call extends
PROGRAMS = 12  # most programs that a run compiles; of prompts with images one more per prompt length, of images in
# later turns up to three more (two of the tower, one that extends)


# What requests need of a program: PLAIN draws at a temperature or takes the best token, BANS also bars end tokens, ALL
# also applies penalties and cuts the support.
PLAIN, BANS, ALL = range(3)


def work_of(params, min_new_tokens: int) -> int:
    """Returns how much the decode programs must do to sample like this: PLAIN, BANS or ALL.

    PLAIN: temperature only. BANS: end tokens are barred too. ALL: also penalties or a cut support.

    params: SamplingParams, or a config group with the same names, but for min_new_tokens, which is passed by itself."""
    if (params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or params.repetition_penalty != 1
            or params.frequency_penalty != 0):
        return ALL
    return BANS if min_new_tokens > 0 else PLAIN


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Slots, lengths and widths of the sampler. Slot counts, prefill_rows and the slots of `extend` are multiples of
    the data shards.

    Attributes:
      slot_counts: ascending; the last one is all slots, smaller ones are for the tail of a batch.
      prompt_lengths, cache_lengths: ascending. The cache is allocated at the last length; a decode program reads a
        shorter one while every active sequence fits.
      prefill_rows: prompts per prefill call. The stash holds that many per prompt length.
      support: token ids of the sampler's support returned per sampled token (Result.support); 0 = none.
      routes: expert ids returned per token, over all layers (Result.routes); 0 = none.
      work: the most that requests ask of sampling (`work_of`).
      insert_width: prompts copied into slots per call, and the free slots that end a decode chunk
        early while requests wait.
      extend: slots of a call that extends conversations in their slots, equally many of every data shard, and most
        new tokens of each.
      patches: most patches of a prompt's images; 0 = prompts are text. See `patch_room`.

    decode_steps: tokens per chunk, at most. end_columns: end tokens of a request, at most. max_total: tokens of a
    sequence, at most."""

    slot_counts: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    cache_lengths: tuple[int, ...]
    prefill_rows: int
    insert_width: int
    decode_steps: int
    end_columns: int
    max_total: int
    support: int = 0
    extend: tuple[int, int] = EXTEND
    routes: int = 0
    work: int = ALL
    patches: int = 0

    @functools.cached_property
    def slots(self) -> int:
        """Number of slots: of sequences that are decoded at once."""
        return self.slot_counts[-1]

    @functools.cached_property
    def lengths_of(self) -> dict[int, tuple[int, ...]]:
        """Slot count -> cache lengths that a decode program of that many slots may read."""
        return {count: decode_lengths(count, self.slots, self.cache_lengths) for count in self.slot_counts}

    @property
    def stash_rows(self) -> int:
        """Rows of the stash, which holds prefilled prompts before they are copied into slots, over all prompt
        lengths."""
        return self.prefill_rows * len(self.prompt_lengths)

    def patch_room(self, length: int, merge: int) -> int:
        """Returns the number of patches that a row of a prefill call has room for: `patches`, or less if `length` image
        tokens hold fewer; rounded up to whole image tokens of merge^2 patches.

        length: prompt tokens of the row. merge: patches per side of an image token.
        """
        return -(-min(self.patches, length * merge**2) // merge**2) * merge**2

    def turn_rooms(self, merge: int) -> tuple[int, int]:
        """Returns two numbers of patches for the row that the images of a turn are encoded in: about a quarter of those
        that the longest prompt has room for, and all; both in whole image tokens.

        merge: patches per side of an image token."""
        whole = self.patch_room(self.prompt_lengths[-1], merge)
        return -(-whole // (4 * merge**2)) * merge**2, whole


def from_config(config, data_shards: int, num_eos: int, processes: int = 1, reads_all: bool = False,
                routes: int = 0, patches: int = 0) -> Shapes:
    """Returns the Shapes of a config for one process.

    The default of rollout.slots is the process's share of the batch, at most DEFAULT_SLOTS: a decode step mostly reads
    weights, however many sequences there are. Both are rounded up to a multiple of data_shards.

    Args:
      config: the whole config.
      data_shards: number of data shards of this process, of which its slots and rows are multiples.
      num_eos: number of end-of-text tokens.
      processes: number of processes that share the slots of the config equally.
      reads_all: whether decoding always reads the cache to its end (XLA's does, the kernels do not).
      routes: the model's expert ids per token in all layers; used with algorithm.routes=sampled.
      patches: most patches of a prompt's images; 0 = prompts are text.

    Raises:
      ConfigError: rollout.prompt_lengths or rollout.cache_lengths below what the config needs, more than three of
        them, or one below 1."""
    roll, data = config.rollout, config.data
    total = longest_sequence(config, max(roll.max_new_tokens, config.eval.max_new_tokens))
    slots = -(-(roll.slots or data.prompts_per_step * roll.group_size) // processes)
    slots = slots if roll.slots else min(slots, DEFAULT_SLOTS)
    slots = -(-slots // data_shards) * data_shards
    prompts = _prompt_lengths(roll.prompt_lengths, data.max_prompt_tokens, longest_prompt(config))
    read_whole = total - data.max_prompt_tokens if reads_all and roll.compaction else 0
    caches = _cache_lengths(roll.cache_lengths, total, read_whole)
    rows = min(max(1, slots // max(1, roll.group_size)), max(1, PREFILL_TOKENS // prompts[-1]))
    counts = _slot_counts(slots, data_shards) if roll.compaction else (slots,)
    return Shapes(
        slot_counts=_limit_programs(counts, prompts, caches) if episodes(config) else counts,
        prompt_lengths=prompts, cache_lengths=caches,
        prefill_rows=-(-rows // data_shards) * data_shards,
        insert_width=max(1, slots // 16), decode_steps=max(1, roll.decode_steps),
        end_columns=num_eos + max(4, len(roll.stop_token_ids)), max_total=min(total, caches[-1]),
        support=roll.top_k if config.algorithm.sampled_support else 0,
        routes=routes if config.algorithm.routes == "sampled" else 0,
        work=max(work_of(roll, roll.min_new_tokens), work_of(config.eval, 0)), patches=patches,
        extend=(data_shards * max(1, min(EXTEND[0], slots // data_shards // 8)), min(EXTEND[1], caches[-1])))


def decode_lengths(count: int, slots: int, cache_lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the cache lengths that a decode program of `count` slots may read: the longest alone for less than half
    of all `slots` (the end of a batch), to keep programs few.
    """
    return cache_lengths[-1:] if 2 * count < slots else cache_lengths


def _limit_programs(counts, prompts, caches) -> tuple[int, ...]:
    """Drops the smallest slot counts until the run needs at most PROGRAMS programs, including caches, publish, insert,
    extend and a prefill of text per prompt length.
    """
    def programs(counts):
        return 4 + len(prompts) + sum(len(decode_lengths(n, counts[-1], caches)) for n in counts)

    while len(counts) > 1 and programs(counts) > PROGRAMS:
        counts = counts[1:]
    return counts


def _slot_counts(slots: int, shards: int) -> tuple[int, ...]:
    """Returns all slots, a half, an eighth and a 32nd, as far as they are at least 4 and divide over the shards."""
    return tuple(sorted({slots} | {slots // d for d in (2, 8, 32) if slots // d >= 4 and (slots // d) % shards == 0}))


def _prompt_lengths(option, first: int, longest: int) -> tuple[int, ...]:
    """Returns the given lengths, or a quarter, a half (in whole 16s) and all of the longest prompt.

    Where later turns have longer prompts than the `first`: the given lengths and the longest. Without given ones: the
    first's, the geometric mean (in whole 16s) where that is far from both, and the longest.
    """
    if not option and longest == first:
        parts = (-(-longest // (16 * d)) * 16 for d in (4, 2))
        return tuple(sorted({longest} | {p for p in parts if p < longest}))
    if not option:
        middle = -(-math.isqrt(first * longest) // 16) * 16
        return (first, *([middle] if 3 * first < 2 * middle and 3 * middle < 2 * longest else []), longest)
    lengths = _ascending("rollout.prompt_lengths", option)
    if lengths[-1] < first:
        raise ConfigError(f"rollout.prompt_lengths={tuple(option)}: the longest is below "
                          f"data.max_prompt_tokens={first}; add that length or lower data.max_prompt_tokens")
    if lengths[-1] < longest and len(lengths) == 3:
        raise ConfigError(f"rollout.prompt_lengths={tuple(option)}: a later turn of an episode has up to {longest} "
                          "tokens before it; name two lengths, to which that one is added, or make the third so long")
    return lengths if lengths[-1] >= longest else (*lengths, longest)


def _cache_lengths(option, total: int, completion: int) -> tuple[int, ...]:
    """Returns the given lengths, or the length of prompt and completion in whole 16s (whole tiles of a TPU's memory).

    Where every step reads a long completion's cache to its end, a second length covers the first three eighths of the
    completion, which is as far as most completions of most batches come.
    """
    if not option:
        early = (total - 5 * completion // 8,) if completion >= LONG_COMPLETION else ()
        return tuple(-(-n // 16) * 16 for n in (*early, total))
    lengths = _ascending("rollout.cache_lengths", option)
    if lengths[-1] < total:
        raise ConfigError(f"rollout.cache_lengths={tuple(option)}: the longest is below the {total} tokens of prompt "
                          "and completion; add that length, or lower rollout.max_new_tokens or "
                          "train.max_sequence_tokens")
    return lengths


def _ascending(name: str, option) -> tuple[int, ...]:
    lengths = tuple(sorted({int(n) for n in option}))
    if not 1 <= len(lengths) <= 3 or min(lengths) < 1:
        raise ConfigError(f"{name}={tuple(option)}: at most 3 positive lengths (each is a compiled program)")
    return lengths
