"""Where every sequence goes: minibatch, microbatch, row. Computed from lengths alone, the same on every process.

A row holds blocks. A block is one copy of a prompt followed by answers of its group (one answer when prompts are not
shared). A sequence never crosses a row, a row never crosses a microbatch, a microbatch never crosses an optimizer step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Block:
    """Sequences of one group that share a copy of their prompt, in a row."""

    sequences: tuple[int, ...]
    tokens: int  # prompt once + all answers


@dataclasses.dataclass(frozen=True)
class Microbatch:
    row_length: int
    rows: tuple[tuple[Block, ...], ...]  # padded with empty rows to a static count


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """The microbatches of one optimizer step and the sequences in them."""

    sequences: np.ndarray
    microbatches: tuple[Microbatch, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    minibatches: tuple[Minibatch, ...]
    used_tokens: int
    total_tokens: int

    @property
    def efficiency(self) -> float:
        """Share of the packed positions that hold a token."""
        return self.used_tokens / max(self.total_tokens, 1)


@dataclasses.dataclass(frozen=True)
class RowShapes:
    """The static shapes a run may use: row lengths, ascending, and for each the row counts, descending, multiples of `shards`."""

    lengths: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    shards: int = 1


def row_shapes(row_lengths, longest: int, tokens_per_microbatch: int, shards: int, sizes: int = 2) -> RowShapes:
    """Static row shapes from the config.

    Args:
      row_lengths: train.row_lengths; empty = one length, the longest sequence rounded up to a multiple of 8.
      longest: bound on prompt + answer in tokens.
      tokens_per_microbatch: per data shard; raised to one row where it is smaller.
      shards: data shards; row counts are multiples of it.
      sizes: row counts per length: 2 = whole and a quarter, so that a last microbatch wastes little; 1 = whole only.
    """
    lengths = tuple(sorted(row_lengths)) or (-(-longest // 8) * 8,)
    if len(lengths) > 2:
        raise ConfigError(f"train.row_lengths={lengths}: at most 2 lengths (each is compiled)")
    if lengths[-1] < longest:
        raise ConfigError(
            f"train.row_lengths={lengths}: the longest sequence may have {longest} tokens; raise the last"
            " length or lower train.max_sequence_tokens"
        )
    counts = []
    for length in lengths:
        per_shard = max(1, tokens_per_microbatch // length)
        wanted = {per_shard, max(1, per_shard // 4)} if sizes == 2 else {per_shard}
        counts.append(tuple(c * shards for c in sorted(wanted, reverse=True)))
    return RowShapes(lengths, tuple(counts), shards)


def make_layout(
    prompt_lengths, answer_lengths, groups, shapes: RowShapes, *, num_minibatches=1, share_prompts=True, seed=0
) -> Layout:
    """Places sequences.

    Groups are shuffled by `seed` and dealt to minibatches (a group is never split over two), then packed into rows: by first-fit
    decreasing, where answers of the emptiest rows fill up others while that saves whole rows, or row by row, where that takes fewer.
    Rows are cut into microbatches of static row counts, in which every data shard gets about the same work of attention.

    Args:
      prompt_lengths, answer_lengths, groups: [N]; sequences of a group have equal prompts where prompts are shared.
      shapes: static row shapes.
      num_minibatches: optimizer steps per pass.
      share_prompts: one prompt copy per block instead of one per answer.
      seed: decides the minibatches; unused with one.
    """
    ids, first = np.unique(groups, return_index=True)
    order = ids[np.argsort(first)]
    if num_minibatches > len(order):
        raise ConfigError(f"algorithm.num_minibatches={num_minibatches}: the batch has only {len(order)} groups")
    if num_minibatches > 1:
        order = np.random.default_rng(seed).permutation(order)
    members = {g: np.flatnonzero(np.asarray(groups) == g) for g in order}
    sizes = np.asarray(prompt_lengths), np.asarray(answer_lengths), np.asarray(groups) if share_prompts else None
    minibatches, used, total = [], 0, 0
    for part in np.array_split(order, num_minibatches):
        blocks = [
            b
            for g in part
            for b in _blocks(members[g], prompt_lengths, answer_lengths, shapes.lengths[-1], share_prompts)
        ]
        micro = _microbatches(blocks, shapes, sizes)
        minibatches.append(Minibatch(np.concatenate([members[g] for g in part]), micro))
        used += sum(b.tokens for m in micro for row in m.rows for b in row)
        total += sum(m.row_length * len(m.rows) for m in micro)
    return Layout(tuple(minibatches), used, total)


def _blocks(members, prompt_lengths, answer_lengths, row_length, share_prompts):
    """Cuts one group into blocks that fit a row, in order of (sample)."""
    blocks, current, size = [], [], 0
    for i in members:
        prompt, answer = int(prompt_lengths[i]), int(answer_lengths[i])
        if prompt + answer > row_length:
            raise ValueError(f"sequence {i} has {prompt + answer} tokens, rows have {row_length}")
        if current and (not share_prompts or size + answer > row_length):
            blocks.append(Block(tuple(current), size))
            current, size = [], 0
        size += answer if current else prompt + answer
        current.append(int(i))
    blocks.append(Block(tuple(current), size))
    return blocks


def _microbatches(blocks, shapes: RowShapes, sizes):
    """Rows of each block's smallest length, then static microbatches. sizes: as _fewer_rows'."""
    out = []
    lower = 0
    for length, counts in zip(shapes.lengths, shapes.counts, strict=True):
        mine = [b for b in blocks if lower < b.tokens <= length]
        lower = length
        rows = _fewer_rows(_fit_rows(mine, length), length, *sizes)
        if sizes[2] is not None:
            rows = min(rows, _fill_rows(mine, length, *sizes), key=len)
        work = {row: sum(attention_work(b, *sizes[:2]) for b in row) for row in rows} if shapes.shards > 1 else {}
        rows = sorted(rows, key=lambda row: -work[row]) if work else rows  # a microbatch is as slow as its slowest shard
        while rows:
            # Each program costs its launch: up to two small ones beat a large one with empty rows, more do not.
            count = counts[0] if len(rows) >= counts[0] or len(rows) > 2 * counts[-1] else counts[-1]
            taken, rows = rows[:count], rows[count:]
            taken = tuple(taken) + ((),) * (count - len(taken))
            out.append(Microbatch(length, _dealt(taken, shapes.shards, work) if work else taken))
    return tuple(out)


def attention_work(block: Block, prompt_lengths, answer_lengths) -> int:
    """Pairs of a query and a key that it sees: the prompt's among themselves, each answer's with the prompt and its own."""
    prompt, answers = int(prompt_lengths[block.sequences[0]]), answer_lengths[list(block.sequences)].astype(np.int64)
    if len(answers) == 1:
        prompt, answers = 0, answers + prompt
    return prompt * (prompt + 1) // 2 + int((answers * prompt + answers * (answers + 1) // 2).sum())


def _dealt(rows, shards, work):
    """The rows of a microbatch, each next one, by work, to the shard that has least of it; a shard's rows are neighbours."""
    room, load, mine = len(rows) // shards, np.zeros(shards), [[] for _ in range(shards)]
    for row in sorted(rows, key=lambda row: -work.get(row, 0)):
        k = min((k for k in range(shards) if len(mine[k]) < room), key=lambda k: (load[k], k))
        mine[k].append(row)
        load[k] += work.get(row, 0)
    return tuple(row for part in mine for row in part)


def _fit_rows(blocks, length):
    """First-fit decreasing (stable); returns rows as tuples of blocks."""
    order = sorted(range(len(blocks)), key=lambda k: (-blocks[k].tokens, k))
    rows, free = [], np.full(len(blocks), length)
    for k in order:
        slot = int(np.argmax(free >= blocks[k].tokens))  # rows not begun are free
        if slot == len(rows):
            rows.append([])
        rows[slot].append(blocks[k])
        free[slot] -= blocks[k].tokens
    return [tuple(r) for r in rows]


CANDIDATES = 32  # groups that are looked through for the answers that fill a row best


def _fill_rows(blocks, length, prompt_lengths, answer_lengths, groups):
    """One row after another: the largest rest of a group, then whole rests that fit, largest first, then the answers of one
    group that fill what is left best, where they are more than the copy of their prompt."""
    rests = {}
    for block in blocks:
        rests.setdefault(int(groups[block.sequences[0]]), []).extend(block.sequences)
    prompt = {g: int(prompt_lengths[ids[0]]) for g, ids in rests.items()}
    size = {g: prompt[g] + int(answer_lengths[ids].sum()) for g, ids in rests.items()}
    rows = []
    while rests:
        row, free, order = [], length, sorted(rests, key=lambda g: (-size[g], g))
        if size[order[0]] > length:
            order, first = order[1:], order[0]
            ids = _best_sum(rests[first], answer_lengths, free - prompt[first])
            free -= _taken(row, first, ids, rests, size, prompt, answer_lengths)
        for g in [g for g in order if size[g] <= length]:
            if size[g] <= free:
                free -= _taken(row, g, list(rests[g]), rests, size, prompt, answer_lengths)
        here = {int(groups[b.sequences[0]]) for b in row}
        others = [g for g in order if g in rests and g not in here][:CANDIDATES]
        found = [(g, _best_sum(rests[g], answer_lengths, free - prompt[g])) for g in others]
        g, ids = max(found, key=lambda one: int(answer_lengths[one[1]].sum()), default=(None, []))
        if ids and int(answer_lengths[ids].sum()) > prompt[g]:
            _taken(row, g, ids, rests, size, prompt, answer_lengths)
        rows.append(tuple(row))
    return rows


def _taken(row, g, ids, rests, size, prompt, answer_lengths) -> int:
    """Puts answers of group g into the row as a block and takes them out of the rest; returns the block's tokens."""
    tokens = int(answer_lengths[ids].sum())
    row.append(Block(tuple(sorted(ids)), prompt[g] + tokens))
    rests[g] = [i for i in rests[g] if i not in set(ids)]
    size[g] -= tokens
    if not rests[g]:
        del rests[g]
    return prompt[g] + tokens


def _best_sum(ids, answer_lengths, room: int) -> list[int]:
    """The answers whose tokens come nearest to `room` without exceeding it (subset sums as the bits of an integer)."""
    if room <= 0:
        return []
    within, sums = (1 << (room + 1)) - 1, [1]
    for i in ids:
        sums.append((sums[-1] | sums[-1] << int(answer_lengths[i])) & within)
    left, chosen = sums[-1].bit_length() - 1, []
    for i, before in zip(reversed(ids), reversed(sums[:-1]), strict=True):
        if not before >> left & 1:
            chosen.append(int(i))
            left -= int(answer_lengths[i])
    return chosen


def _fewer_rows(rows, length, prompt_lengths, answer_lengths, groups):
    """Empties the emptiest rows, answer by answer, into what is free in others, as long as whole rows come free.

    An answer that comes to a row with a block of its group joins it; elsewhere it brings a copy of its prompt. groups: [N], or
    None where no prompt is shared.
    """
    rows = sorted(rows, key=lambda row: -sum(b.tokens for b in row))
    while len(rows) > 1:
        kept = _spread(rows[-1], rows[:-1], length, prompt_lengths, answer_lengths, groups)
        if kept is None:
            break
        rows = sorted(kept, key=lambda row: -sum(b.tokens for b in row))
    return rows


def _spread(row, others, length, prompt_lengths, answer_lengths, groups):
    """`others` with the answers of `row` in them, each where least stays free; None where one finds no room."""
    free = np.array([length - sum(b.tokens for b in other) for other in others])
    others = [list(other) for other in others]
    for i in sorted((i for b in row for i in b.sequences), key=lambda i: (-answer_lengths[i], i)):
        of = -1 if groups is None else groups[i]
        home = [next((k for k, b in enumerate(other) if groups is not None and groups[b.sequences[0]] == of), None) for other in others]
        cost = np.array([answer_lengths[i] + (0 if k is not None else prompt_lengths[i]) for k in home])
        best = int(np.lexsort((free - cost, cost, free < cost))[0])
        if free[best] < cost[best]:
            return None
        free[best] -= cost[best]
        if home[best] is None:
            others[best].append(Block((i,), int(cost[best])))
        else:
            block = others[best][home[best]]
            others[best][home[best]] = Block(tuple(sorted((*block.sequences, i))), block.tokens + int(cost[best]))
    return [tuple(other) for other in others]
