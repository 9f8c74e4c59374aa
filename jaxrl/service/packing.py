"""Packs the data of several requests into rows of shared microbatches, each row with the data of one request.

Nothing of a row depends on what other rows hold (models.adapters.bank), but which program computes it and where it lies
may change its last bits. A placement says that much of a request, as JSON: for each of its microbatches in order [row
length, loss tokens of each row, rows that are its own]. `place_again` computes a request as it was, without the others.

Knows values only. Called by service.trainer.

Legend: T tokens of a ragged batch, N positions of a datum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl.training.layout import Block, Microbatch, RowShapes, make_layout, row_count
from jaxrl.types import Pictures, Sizes, Trajectories


class Batch(NamedTuple):
    """Data of one forward_backward.

    Attributes:
      tokens, targets: [N] int32 of each datum, of equal lengths.
      columns: {name of trainer.COLUMNS: [N] floats of each datum, bool for "marked"}.
      pictures: the images of the data; None = there is none. A batch with images is computed by itself.
    """

    tokens: list[np.ndarray]
    targets: list[np.ndarray]
    columns: dict[str, list[np.ndarray]]
    pictures: Pictures | None = None


class Packed(NamedTuple):
    """Requests in microbatches.

    Attributes:
      traj: the ragged batch of all data (T tokens); its column "adapter" [T] int32 is the number of each token's
        request.
      columns: [T] floats by name, int32 for "target"; 0 at the first token of each sequence.
      microbatches: in the order in which they are computed.
      placements: of each request, see the module.
      ends: the data of request k are the sequences from ends[k] to ends[k + 1].
    """

    traj: Trajectories
    columns: dict[str, np.ndarray]
    microbatches: list[Microbatch]
    placements: list[list]
    ends: list[int]


def tokens_of(batch: Batch) -> int:
    """Returns the tokens of a request's data in rows: those of each datum and one for its last target."""
    return sum(len(own) + 1 for own in batch.tokens)


def pack_together(batches: list[Batch], shapes: RowShapes, dtype) -> Packed:
    """Packs requests into rows of their own, and the rows into as few microbatches as hold them.

    batches: one of each request, without images. shapes: RowShapes, lengths and counts of rows. dtype: of float
    columns."""
    ends, whole = _joined(batches)
    by_length: dict[int, list] = {length: [] for length in shapes.lengths}  # (request, row)
    for k, batch in enumerate(batches):
        for length, row in _own_rows(batch, ends[k], shapes):
            by_length[length].append((k, row))
    microbatches, placements = [], [[] for _ in batches]
    for length, counts in zip(shapes.lengths, shapes.counts, strict=True):
        rows = by_length[length]
        while rows:
            count = row_count(len(rows), counts)
            taken, rows = rows[:count], rows[count:]
            microbatches.append(_microbatch(length, [row for _, row in taken], count, shapes))
            loss = [_loss_tokens(row) for _, row in taken] + [0] * (count - len(taken))
            for k in dict.fromkeys(k for k, _ in taken):
                placements[k].append([length, loss, [r for r, (other, _) in enumerate(taken) if other == k]])
    return Packed(*_ragged(whole, _numbers(batches), dtype), microbatches, placements, ends)


def place_again(batch: Batch, placement: list, shapes: RowShapes, dtype) -> Packed | None:
    """Packs one request as `placement` says, other rows with as many loss tokens as they had; None if it does not fit.

    The request has the number 0, and the rows in place of the others the number 1; their gradient is zero.

    placement: see the module. shapes: RowShapes, lengths and counts of rows. dtype: of float columns."""
    own: dict[int, list] = {length: [] for length in shapes.lengths}
    for length, row in _own_rows(batch, 0, shapes):
        own[length].append(row)
    ghosts, count, microbatches = [], len(batch.tokens), []
    known = dict(zip(shapes.lengths, shapes.counts, strict=True))
    for length, loss, mine in placement:
        rows = []
        for r, tokens in enumerate(loss):
            if r in mine:
                if not own.get(length) or _loss_tokens(own[length][0]) != tokens:
                    return None
                rows.append(own[length].pop(0))
            else:
                rows.append((Block((count + len(ghosts),), tokens + 1),) if tokens else ())
                ghosts += [tokens] if tokens else []
        if len(loss) not in known.get(length, ()):
            return None
        microbatches.append(_microbatch(length, rows, len(loss), shapes))
    if any(own.values()):
        return None
    blank = [np.zeros(tokens, np.int32) for tokens in ghosts]
    others = Batch(blank, blank, {name: [np.zeros(len(x)) for x in blank] for name in batch.columns})
    ends, whole = _joined([batch, others])
    return Packed(*_ragged(whole, _numbers([batch, others]), dtype), microbatches, [placement], ends[:2])


def _joined(batches: list[Batch]) -> tuple[list[int], Batch]:
    ends = np.cumsum([0, *(len(batch.tokens) for batch in batches)]).tolist()
    columns = {name: [x for batch in batches for x in batch.columns[name]] for name in batches[0].columns}
    return ends, Batch([x for b in batches for x in b.tokens], [x for b in batches for x in b.targets], columns)


def _numbers(batches: list[Batch]) -> np.ndarray:
    return np.repeat(np.arange(len(batches)), [tokens_of(batch) for batch in batches]).astype(np.int32)


def _ragged(whole: Batch, numbers: np.ndarray, dtype):
    traj, columns = ragged(whole, dtype)
    traj.columns["adapter"] = numbers
    return traj, columns


def _own_rows(batch: Batch, first: int, shapes: RowShapes):
    """Yields (row length, blocks) of each row of a request's data; sequences count from `first`."""
    sizes = np.array([len(own) + 1 for own in batch.tokens])
    zeros = np.zeros(len(sizes), np.int32)
    layout = make_layout(Sizes(zeros, sizes, np.arange(len(sizes)), None), shapes, share_prompts=False)
    for micro in layout.minibatches[0].microbatches:
        for row in micro.rows:
            if row:
                yield micro.row_length, tuple(Block(tuple(first + i for i in b.sequences), b.tokens) for b in row)


def _loss_tokens(row) -> int:
    return sum(block.tokens - len(block.sequences) for block in row)


def _microbatch(length: int, rows: list, count: int, shapes: RowShapes) -> Microbatch:
    return Microbatch(length, (*rows, *((),) * (count - len(rows))), shapes.ranks, shapes.windows)


def ragged(batch: Batch, dtype) -> tuple[Trajectories, dict[str, np.ndarray]]:
    """Returns the data of a batch as (Trajectories whose sequences are the data, {name: token column [T]}).

    A sequence is a datum's tokens and one more, which no real token sees: loss slot i + 1 is read at token i, with the
    target of column "target" (int32). All tokens but the first of each sequence are in the loss; columns are 0 there.

    dtype: of the columns of the batch."""
    sizes = np.array([len(own) + 1 for own in batch.tokens])
    offsets, zeros = np.cumsum([0, *sizes]), np.zeros(int(sizes.sum()), np.float32)
    count = len(sizes)
    mask = np.ones(len(zeros), bool)
    mask[offsets[:-1]] = False

    def column(parts, kind):
        out = np.zeros(len(zeros), kind)
        out[mask] = np.concatenate(parts)
        return out

    tokens = np.concatenate([np.append(own, target[-1]) for own, target in zip(batch.tokens, batch.targets,
                                                                              strict=True)]).astype(np.int32)
    traj = Trajectories(
        tokens=tokens, offsets=offsets, loss_mask=mask, logprobs=zeros, versions=zeros.astype(np.int32) - 1,
        prompt_lengths=np.zeros(count, np.int32), group=np.arange(count), sample=np.zeros(count, np.int32),
        seed=np.zeros(count, np.uint32), finish=np.zeros(count, np.int8), pictures=batch.pictures)
    columns = {name: column(parts, dtype) for name, parts in batch.columns.items()}
    return traj, columns | {"target": column(batch.targets, np.int32)}
