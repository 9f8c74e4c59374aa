"""Assigns every sequence to a minibatch, a microbatch and a row, from lengths alone, equally on every process.

Called by roles and the planner. Rows are filled with tokens in training.pack.

A row holds blocks. A block is one copy of a prompt followed by completions of it (one when prompts are not shared). A
sequence never crosses a row, a row never crosses a microbatch, a microbatch never crosses an optimizer step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.kernels.recurrence import tokens_per_chunk, tokens_per_room
from jaxrl.training.ranks import TILE
from jaxrl.types import Sizes


@dataclasses.dataclass(frozen=True)
class Block:
    """Sequences of a row that share one copy of their prompt; `sequences` are indices into the batch. `tokens` and
    `patches` (of images) count the prompt once and all completions; of a model with recurrent layers `tokens` are the
    longer lengths for which make_layout leaves room."""

    sequences: tuple[int, ...]
    tokens: int  # prompt once + all completions, as `make_layout` counts them
    patches: int = 0  # of the images in them


class Room(NamedTuple):
    """The tokens and patches of images that a row holds at most, or has left."""

    tokens: int
    patches: int = 0

    def holds(self, tokens: int, patches: int) -> bool:
        """Returns whether so many tokens and patches fit."""
        return tokens <= self.tokens and patches <= self.patches

    def fill(self, tokens: int, patches: int) -> int:
        """Returns the larger of two shares of this room, of its tokens and of its patches, times its tokens x patches
        (tokens alone without room for patches): an int that orders blocks for one room."""
        return max(tokens * max(self.patches, 1), patches * self.tokens)

    def less(self, tokens: int, patches: int) -> Room:
        """Returns the room that so many tokens and patches leave; negative where they do not fit."""
        return Room(self.tokens - tokens, self.patches - patches)


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Rows that are computed together; a microbatch has one of the shapes of RowShapes.

    Attributes:
      row_length: tokens of a row.
      rows: the blocks of each row, padded with empty rows to a static count.
      ranks: parts that each row is cut into (training.ranks).
      windows: attention window of each layer, 0 = none, by which the work of tokens is known.
      patches: of images, for which each row has room.
    """

    row_length: int
    rows: tuple[tuple[Block, ...], ...]  # padded with empty rows to a static count
    ranks: int = 1  # parts that each row is cut into (training.ranks)
    windows: tuple[int, ...] = (0,)  # of the layers, by which their work is known
    patches: int = 0  # of images, for which each row has room


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """The microbatches of one optimizer step and the indices, [M] int64, of the sequences in them."""

    sequences: np.ndarray
    microbatches: tuple[Microbatch, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The minibatches of one pass over a batch.

    used_tokens: packed positions that hold a token. total_tokens: all packed positions. chunk_tokens: tokens for which
    the chunks of recurrent layers have room (kernels.recurrence); 0: the model has none. used_patches, total_patches:
    of the images in rows, and those for which the rows of microbatches with images have room.
    """

    minibatches: tuple[Minibatch, ...]
    used_tokens: int
    total_tokens: int
    chunk_tokens: int = 0
    used_patches: int = 0
    total_patches: int = 0

    def metrics(self) -> dict[str, float]:
        """Returns packing/efficiency, the share of packed positions that hold a token; packing/chunk_fill, tokens over
        the places in chunks, for a model with recurrent layers; packing/patch_fill, the share of the room for patches
        that holds one, for data with images."""
        shares = {"efficiency": (self.used_tokens, max(self.total_tokens, 1)),
                  "chunk_fill": (self.used_tokens, self.chunk_tokens),
                  "patch_fill": (self.used_patches, self.total_patches)}
        return {f"packing/{name}": used / room for name, (used, room) in shares.items() if room}


@dataclasses.dataclass(frozen=True)
class RowShapes:
    """Static shapes of packed rows.

    Attributes:
      lengths: row lengths, ascending, multiples of `ranks`.
      counts: row counts of each length, descending, multiples of `shards`.
      shards: data shards, among which the rows of a microbatch are divided.
      ranks: parts that each row is cut into (mesh.cp).
      windows: attention window of each layer, 0 = none.
      recurrent: whether rows have room for so many chunks only (kernels.recurrence).
      patches: of images, for which a row of each length has room; () = no images.
    """

    lengths: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    shards: int = 1
    ranks: int = 1
    windows: tuple[int, ...] = (0,)
    recurrent: bool = False  # rows have room for so many chunks only (kernels.recurrence)
    patches: tuple[int, ...] = ()  # of images, for which a row of each length has room; () = no images

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The room of a row of each length, in tokens and patches."""
        return tuple(map(Room, self.lengths, self.patches or (0,) * len(self.lengths)))


def row_unit(ranks: int) -> int:
    """Returns the number of tokens that automatic row lengths are multiples of, if rows are cut into `ranks` parts."""
    return 8 if ranks == 1 else ranks * TILE


def row_shapes(row_lengths, longest: int, tokens_per_microbatch: int, shards: int, sizes: int = 2, ranks: int = 1,
               windows=(0,), recurrent: bool = False) -> RowShapes:
    """Computes the static row shapes from the config.

    Args:
      row_lengths: train.row_lengths; empty = one length, the longest sequence rounded up to a multiple of `row_unit`.
      longest: bound on prompt + completion in tokens.
      tokens_per_microbatch: per data shard; raised to one row where it is smaller.
      shards: data shards; row counts are multiples of it.
      sizes: row counts per length: 2 = whole and a quarter, so that a last microbatch wastes little; 1 = whole only.
      ranks: equal parts that a row is cut into (mesh.cp).
      windows: of the model's layers, 0 = none.
      recurrent: whether the model has recurrent layers.

    Returns RowShapes without room for patches.

    Raises ConfigError for row lengths that are no multiples of 8 * ranks (with ranks > 1), for more than two of them,
    and if the greatest is shorter than `longest`.
    """
    unit = row_unit(ranks)
    lengths: tuple[int, ...] = tuple(sorted(row_lengths)) or (-(-longest // unit) * unit,)
    if any(length % (8 * ranks) for length in lengths) and ranks > 1:
        raise ConfigError(f"train.row_lengths={lengths}: mesh.cp={ranks} cuts rows into equal parts of whole tiles; "
                          f"choose multiples of {8 * ranks}, best of {unit}")
    if len(lengths) > 2:
        raise ConfigError(f"train.row_lengths={lengths}: at most 2 lengths (each is compiled)")
    if max(lengths) < longest:
        raise ConfigError(
            f"train.row_lengths={lengths}: the longest sequence may have {longest} tokens; raise the last"
            " length or lower train.max_sequence_tokens"
        )
    counts = []
    for length in lengths:
        per_shard = max(1, tokens_per_microbatch // length)
        wanted = {per_shard, max(1, per_shard // 4)} if sizes == 2 else {per_shard}
        counts.append(tuple(c * shards for c in sorted(wanted, reverse=True)))
    return RowShapes(lengths, tuple(counts), shards, ranks, tuple(windows), recurrent)


def make_layout(
    sizes: Sizes, shapes: RowShapes, *, num_minibatches=1, share_prompts=True, keep_groups=False, seed=0
) -> Layout:
    """Assigns sequences to minibatches, microbatches and rows.

    Groups are shuffled by `seed` and dealt to minibatches; a group is never split over two. Blocks are packed into rows
    by first-fit decreasing, and the emptiest rows are then moved into others while that saves rows. With shared prompts
    a second packing fills one row after another by subset sums; the packing with fewer rows is kept. With keep_groups
    whole groups are packed by first-fit decreasing alone. A row is full when its tokens or the patches of its images
    are; blocks are ordered by the larger of the two shares. Rows are cut into microbatches of static row counts, in
    which every data shard gets about the same attention work.

    Args:
      sizes: of the sequences.
      shapes: static row shapes.
      num_minibatches: optimizer steps per pass.
      share_prompts: one prompt copy per block instead of one per completion.
      keep_groups: put all of a group into one microbatch, for losses that compare its members.
      seed: decides the minibatches; unused with one.

    Raises ConfigError for more minibatches than groups and, with keep_groups, for a group larger than a microbatch;
    ValueError for a sequence longer than the longest row, or with more patches than it has room for.
    """
    prompts, completions, groups = map(np.asarray, sizes[:3])
    patches = np.zeros((len(prompts), 2), int) if sizes.patches is None else sizes.patches
    sizes = Sizes(prompts, completions, groups, np.asarray(sizes.prefixes) if share_prompts else None, patches)
    real, whole = sizes, sizes.prompts + sizes.completions
    if len(whole) and whole.max() > shapes.lengths[-1]:
        raise ValueError(f"sequence {whole.argmax()} has {whole.max()} tokens, rows have {shapes.lengths[-1]}")
    of_images, room = patches.sum(axis=1), shapes.rooms[-1].patches
    if of_images.max(initial=0) > room:
        raise ValueError(f"sequence {of_images.argmax()} has images of {of_images.max()} patches, rows have room for "
                         f"{room}")
    sizes = _with_chunks(sizes, shapes) if shapes.recurrent else sizes
    ids, first = np.unique(sizes.groups, return_index=True)
    order = ids[np.argsort(first)]
    if num_minibatches > len(order):
        raise ConfigError(f"algorithm.num_minibatches={num_minibatches}: the batch has only {len(order)} groups")
    if num_minibatches > 1:
        order = np.random.default_rng(seed).permutation(order)
    members = {g: np.flatnonzero(sizes.groups == g) for g in order}
    minibatches, used, total, chunks = [], 0, 0, 0
    for part in np.array_split(order, num_minibatches):
        groups = [_blocks(members[g], sizes, shapes.rooms[-1]) for g in part]
        micro = tuple(_microbatches(groups, sizes, shapes, keep_groups))
        minibatches.append(Minibatch(np.concatenate([members[g] for g in part]), micro))
        used += sum(int(real.prompts[b.sequences[0]] + real.completions[list(b.sequences)].sum())
                    for m in micro for row in m.rows for b in row)
        total += sum(m.row_length * len(m.rows) for m in micro)
        chunks += sum(_chunk_tokens(m, real) for m in micro) if shapes.recurrent else 0
    return Layout(tuple(minibatches), used, total, chunks, *(_patch_room(minibatches) if shapes.patches else ()))


def _patch_room(minibatches) -> tuple[int, int]:
    """Returns (patches in rows, those for which the rows of microbatches with images have room)."""
    used = total = 0
    for micro in (m for mini in minibatches for m in mini.microbatches):
        own = sum(block.patches for row in micro.rows for block in row)
        used, total = used + own, total + micro.patches * len(micro.rows) * bool(own)
    return used, max(total, 1)  # a step without images has a share, too


def _chunk_tokens(micro: Microbatch, sizes) -> int:
    """Returns the places in the chunks of a microbatch's segments."""
    size = tokens_per_chunk(micro.row_length)
    blocks = [block.sequences for row in micro.rows for block in row]
    segments = [n for own in blocks for n in (sizes.prompts[own[0]], *sizes.completions[list(own)])]
    return size * sum(int(-(-n // size)) for n in segments)


def _with_chunks(sizes, shapes: RowShapes) -> Sizes:
    """Returns sizes that count each segment as at least the tokens that its chunks span, so rows full by these sizes
    have room for their chunks. A single sequence counts at most the longest row.
    """
    def counted(tokens):
        by_length = [-(-tokens // tokens_per_chunk(n)) * tokens_per_room(n) for n in shapes.lengths]
        return np.max([tokens, *by_length], axis=0)

    prompts = counted(sizes.prompts)
    completions = np.minimum(counted(sizes.completions), shapes.lengths[-1] - prompts)
    return sizes._replace(prompts=prompts, completions=completions)


def row_patches(lengths, patches_Qx2: np.ndarray, tokens_Q: np.ndarray, unit: int) -> tuple[int, ...]:
    """Computes the patches that rows have room for: those of as many mean sequences as a row of a quarter more tokens
    holds whole, and at least those of the sequence that has most. Room for a part of a sequence would stay empty.

    Args:
      lengths: row lengths in tokens.
      patches_Qx2: [Q, 2] int patches in the prompt and after it, of each sequence of the data.
      tokens_Q: [Q] int tokens of these sequences, or of prompts with all their completions.
      unit: what results are multiples of.

    Returns a count for each length; () for data without images.
    """
    patches_Q = patches_Qx2.sum(axis=1)
    if not (most := int(patches_Q.max(initial=0))):
        return ()
    whole = [int(1.25 * length / tokens_Q.mean()) for length in lengths]
    return tuple(-(-max(most, int(n * patches_Q.mean())) // unit) * unit for n in whole)


def _block(ids, sizes) -> Block:
    """Returns the block of these sequences, which share a prompt."""
    ids = sorted(int(i) for i in ids)
    prompt, before = int(sizes.prompts[ids[0]]), int(sizes.patches[ids[0], 0])
    return Block(tuple(ids), prompt + int(sizes.completions[ids].sum()), before + int(sizes.patches[ids, 1].sum()))


def _blocks(members, sizes, room: Room) -> list[Block]:
    """Cuts one group into blocks that fit a row, each of one prompt, in order of sample."""
    if sizes.prefixes is None:
        return [_block([i], sizes) for i in members]
    blocks = []
    for prefix in dict.fromkeys(sizes.prefixes[members].tolist()):
        current, free = [], room
        for i in members[sizes.prefixes[members] == prefix].tolist():
            own = int(sizes.completions[i]), int(sizes.patches[i, 1])
            if current and not free.holds(*own):
                blocks.append(_block(current, sizes))
                current = []
            free = (free if current else room.less(int(sizes.prompts[i]), int(sizes.patches[i, 0]))).less(*own)
            current.append(i)
        blocks.append(_block(current, sizes))
    return blocks


def _microbatches(groups, sizes, shapes: RowShapes, keep_groups):
    """Yields microbatches of static shape; a block goes into the shortest row length that holds it.

    With keep_groups the largest block of a group chooses the row length of the whole group.
    """
    units = groups if keep_groups else [[b] for blocks in groups for b in blocks]
    for room, counts in zip(shapes.rooms, shapes.counts, strict=True):
        fits = [all(room.holds(b.tokens, b.patches) for b in unit) for unit in units]
        mine = [unit for unit, fit in zip(units, fits, strict=True) if fit]
        units = [unit for unit, fit in zip(units, fits, strict=True) if not fit]
        alone = [b for unit in mine for b in unit]
        if keep_groups:
            parts = _whole_groups(mine, room, counts[0])
        else:
            rows = _fewer_rows(_fit_rows(alone, room), room, sizes)
            parts = [rows if sizes.prefixes is None else min(rows, _fill_rows(alone, room, sizes), key=len)]
        for rows in parts:
            work = {}
            if shapes.shards > 1:
                work = {row: sum(attention_work(b, *sizes[:2]) for b in row) for row in rows}
            if work:  # a microbatch is as slow as its slowest shard
                rows = sorted(rows, key=lambda row, work=work: -work[row])
            rows = sorted(rows, key=lambda row: not any(b.patches for b in row))  # one of text alone runs no tower
            while rows:
                count = row_count(len(rows), counts, keep_groups)
                taken, rows = rows[:count], rows[count:]
                taken = tuple(taken) + ((),) * (count - len(taken))
                taken = _assign_rows_to_shards(taken, shapes.shards, work) if work else taken
                yield Microbatch(room.tokens, taken, shapes.ranks, shapes.windows, room.patches)


def row_count(left: int, counts, keep_groups: bool = False) -> int:
    """Returns the row count, one of `counts`, of the next microbatch when `left` rows are still to be placed.

    Each program costs its launch: up to two small microbatches beat a large one with empty rows, more do not.

    Args:
      counts: descending row counts of RowShapes. keep_groups: take the small count only if it holds all that is
        left."""
    small = left <= (counts[-1] if keep_groups else min(2 * counts[-1], counts[0] - 1))
    return counts[-1] if small else counts[0]


def _whole_groups(groups, room, most):
    """Yields the rows of each microbatch: as many of the next groups as fit into `most` rows."""
    while groups:
        rows, n = _fit_rows(groups[0], room), 1
        if len(rows) > most:
            raise ConfigError(f"train.tokens_per_microbatch: a group needs {len(rows)} rows of {room.tokens} tokens at "
                              f"once, a microbatch has {most}; raise it to {len(rows) * room.tokens}")
        while n < len(groups) and len(more := _fit_rows([b for g in groups[: n + 1] for b in g], room)) <= most:
            rows, n = more, n + 1
        groups = groups[n:]
        yield rows


def attention_work(block: Block, prompts, completions) -> int:
    """Returns the number of (query, visible key) pairs: within the prompt, and each completion's with the prompt and
    itself.

    Windows are not counted, and a block of one sequence counts it as a whole.

    Args:
      prompts, completions: [Q] int tokens of each sequence's prompt and completion.
    """
    prompt, own = int(prompts[block.sequences[0]]), completions[list(block.sequences)].astype(np.int64)
    if len(own) == 1:
        prompt, own = 0, own + prompt
    return prompt * (prompt + 1) // 2 + int((own * prompt + own * (own + 1) // 2).sum())


def _assign_rows_to_shards(rows, shards, work):
    """Returns the rows of a microbatch, sorted by shard: each row, most work first, goes to the least loaded shard."""
    room, load, mine = len(rows) // shards, np.zeros(shards), [[] for _ in range(shards)]
    for row in sorted(rows, key=lambda row: -work.get(row, 0)):
        k = min((k for k in range(shards) if len(mine[k]) < room), key=lambda k: (load[k], k))
        mine[k].append(row)
        load[k] += work.get(row, 0)
    return tuple(row for part in mine for row in part)


def _fit_rows(blocks, room):
    """Packs blocks by first-fit decreasing (stable); returns rows as tuples of blocks."""
    rows, free = [], np.tile(room, (len(blocks), 1))
    for block in sorted(blocks, key=lambda b: -room.fill(b.tokens, b.patches)):
        need = block.tokens, block.patches
        slot = int(np.argmax((free >= need).all(axis=1)))  # rows not begun are free
        if slot == len(rows):
            rows.append([])
        rows[slot].append(block)
        free[slot] -= need
    return [tuple(r) for r in rows]


CANDIDATES = 32  # prompts searched for the completions that fill a row best


def _fill_rows(blocks, room, sizes):
    """Packs one row after another and returns the rows.

    A row takes the prompt with the largest remaining share of a row (part of its sequences if not all fit), then other
    prompts whose remaining sequences all fit, largest first. The remaining space takes the completions of one further
    prompt that fill it best, if they have more tokens than the prompt copy they need.
    """
    waiting = {}
    for block in blocks:
        waiting.setdefault(int(sizes.prefixes[block.sequences[0]]), []).extend(block.sequences)
    whole = {p: _block(ids, sizes) for p, ids in waiting.items()}
    fill = {p: room.fill(block.tokens, block.patches) for p, block in whole.items()}
    prompt = {p: (int(sizes.prompts[own[0]]), int(sizes.patches[own[0], 0])) for p, own in waiting.items()}
    rows = []

    def take(p, ids, free) -> Room:
        """Moves sequences of one prompt from `waiting` into the newest row, as a block; returns the room left."""
        block, left = _block(ids, sizes), [i for i in waiting[p] if i not in set(ids)]
        rows[-1] += (block,)
        if left:
            waiting[p], whole[p] = left, _block(left, sizes)
            fill[p] = room.fill(whole[p].tokens, whole[p].patches)
        else:
            del waiting[p]
        return free.less(block.tokens, block.patches)

    while waiting:
        rows.append(())
        free, order = room, sorted(waiting, key=lambda p: (-fill[p], p))
        if not room.holds(whole[order[0]].tokens, whole[order[0]].patches):
            largest = order.pop(0)
            free = take(largest, _best_sum(waiting[largest], sizes, free.less(*prompt[largest])), free)
        for p in order:
            if free.holds(whole[p].tokens, whole[p].patches):
                free = take(p, waiting[p], free)
        here = {int(sizes.prefixes[b.sequences[0]]) for b in rows[-1]}
        others = [p for p in order if p in waiting and p not in here][:CANDIDATES]
        fitting = [(p, _best_sum(waiting[p], sizes, free.less(*prompt[p]))) for p in others]
        p, ids = max(fitting, key=lambda one: int(sizes.completions[one[1]].sum()), default=(None, []))
        if ids and int(sizes.completions[ids].sum()) > prompt[p][0]:
            take(p, ids, free)
    return rows


def _best_sum(ids, sizes, room: Room) -> list[int]:
    """Returns the completions with the largest token sum that fits (subset sums as bits of an integer), of those whose
    patches fit together, in order."""
    if room.tokens <= 0 or room.patches < 0:
        return []
    fitting, patches = [], 0
    for i in ids:
        if patches + (own := int(sizes.patches[i, 1])) <= room.patches:
            fitting, patches = [*fitting, i], patches + own
    within, sums = (1 << (room.tokens + 1)) - 1, [1]
    for i in fitting:
        sums.append((sums[-1] | sums[-1] << int(sizes.completions[i])) & within)
    left, chosen = sums[-1].bit_length() - 1, []
    for i, before in zip(reversed(fitting), reversed(sums[:-1]), strict=True):
        if not before >> left & 1:
            chosen.append(int(i))
            left -= int(sizes.completions[i])
    return chosen


def _fewer_rows(rows, room, sizes):
    """Moves the sequences of the emptiest row into other rows (best fit), as long as that frees a row.

    A sequence joins a block of its prompt if the row has one; otherwise the row needs a copy of its prompt.
    """
    prefixes = sizes.prefixes
    while True:
        rows = sorted(rows, key=lambda row: -room.fill(sum(b.tokens for b in row), sum(b.patches for b in row)))
        used = [(sum(b.tokens for b in row), sum(b.patches for b in row)) for row in rows[:-1]]
        free = np.array(room) - np.array(used, int).reshape(-1, 2)
        filled = [list(row) for row in rows[:-1]]
        moving = [i for b in (rows[-1] if filled else ()) for i in b.sequences]
        for i in sorted(moving, key=lambda i: (-sizes.completions[i], i)):
            home = [None] * len(filled)
            if prefixes is not None:
                same = [[prefixes[b.sequences[0]] == prefixes[i] for b in row] for row in filled]
                home = [row.index(True) if any(row) else None for row in same]
            own, alone = (sizes.completions[i], sizes.patches[i, 1]), (sizes.prompts[i], sizes.patches[i, 0])
            cost = np.array([own if k is not None else np.add(own, alone) for k in home])
            full = np.any(free < cost, axis=1)
            best = int(np.lexsort((free[:, 0] - cost[:, 0], cost[:, 0], full))[0])
            if full[best]:
                return rows
            free[best] -= cost[best]
            if (at := home[best]) is None:
                filled[best].append(_block([i], sizes))
            else:
                filled[best][at] = _block([*filled[best][at].sequences, i], sizes)
        if not moving:
            return rows
        rows = [tuple(row) for row in filled]
