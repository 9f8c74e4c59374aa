"""Packs ragged token columns into rows of static shape and back; computes the loss weights of an optimizer step.

Runs on the host in numpy. training.layout decides where sequences go; called by training.score and roles.

Legend: R rows, L row length, S = L scored slots per row, T tokens of the ragged batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.algorithms.aggregation import aggregation_weights
from jaxrl.training import ranks
from jaxrl.training.layout import Microbatch
from jaxrl.types import PackedBatch, Trajectories


def pack(
    traj: Trajectories,
    micro: Microbatch,
    columns: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    dtype: DTypeLike = np.float32,
) -> PackedBatch:
    """Packs the sequences of one microbatch into its rows.

    Args:
      traj: the ragged batch.
      micro: where its sequences go.
      columns: name -> [T] or [T, K] per token; integers stay integers, bfloat16 stays bfloat16. The column `routes`
        [T, n * K] goes by tokens of the rows, not by scored ones: into PackedBatch.routes, -1 where there is none.
      weights: loss term -> [T]; 0 where a token does not count.
      dtype: of columns and weights.

    Returns:
      PackedBatch in host memory. Scored slots are front-packed in each row, or in each of its parts where it is cut
      (micro.ranks); unused slots have weight 0, source 0 and target 0. Segment ids count from 1 in each row: prompt,
      then its completions. Tokens of a cut row are in the order of training.ranks.
    """
    (row, at, token, *held), (scored_row, slot, scored_token, *scored) = _places(traj, micro)

    def filled(rows, places, values, kind: DTypeLike = np.int32, blank=0):
        out = np.full((len(micro.rows), micro.row_length, *values.shape[1:]), blank, kind)
        out[rows, places] = values
        return out

    routes, columns = columns.get("routes"), {name: c for name, c in columns.items() if name != "routes"}

    held = dict(zip(("positions", "segments", "prefixes"), held, strict=True), tokens=traj.tokens[token])
    if "adapter" in traj.columns:
        held["adapters"] = traj.columns["adapter"][token]
    scored = dict(zip(("sources", "sequences"), scored, strict=True), targets=traj.tokens[scored_token])
    return PackedBatch(
        **{name: filled(row, at, values) for name, values in held.items()},
        **{name: filled(scored_row, slot, values) for name, values in scored.items()},
        columns={name: filled(scored_row, slot, c[scored_token], _kind(c, dtype)) for name, c in columns.items()},
        weights={name: filled(scored_row, slot, w[scored_token], dtype) for name, w in weights.items()},
        routes=None if routes is None else filled(row, at, routes[token], np.int16, -1),
    )


def _kind(column, dtype):
    if column.dtype.kind == "i":
        return np.int32
    return column.dtype if column.dtype.name == "bfloat16" else dtype


def unpack(traj: Trajectories, micro: Microbatch, values_RxS: np.ndarray, out_T: np.ndarray) -> None:
    """Writes the values [R, S] of scored slots to their tokens in `out_T`: the inverse of packing a column."""
    _, (row, slot, token, *_) = _places(traj, micro)
    out_T[token] = values_RxS[row, slot]


def unpack_tokens(traj: Trajectories, micro: Microbatch, values_RxL: np.ndarray, out_T: np.ndarray) -> None:
    """Writes the values [R, L] of packed tokens to `out_T`; those of a shared prompt to each of its sequences."""
    (row, at, token, *_), _ = _places(traj, micro)
    out_T[token] = values_RxL[row, at]
    for block in (block for blocks in micro.rows for block in blocks):
        first, *others = traj.offsets[list(block.sequences)]
        prompt = int(traj.prompt_lengths[block.sequences[0]])
        for other in others:
            out_T[other:other + prompt] = out_T[first:first + prompt]


def _places(traj: Trajectories, micro: Microbatch):
    """Computes where the tokens of a microbatch go, as int arrays in the order of the rows.

    Returns:
      of every packed token its (row, index in the row, token of the batch, position, segment, prefix), and
      of every scored one its (row, slot, token of the batch, index in the row of what predicts it, sequence in the
      row). Loss on prompt tokens (SFT) is counted once per prompt copy; the first token of a sequence has nothing that
      predicts it.
    """
    pieces = []  # of the first token row, index, token, position; length, segment, prefix, sequence; what predicts it
    for r, blocks in enumerate(micro.rows):
        cursor = segment = 0
        for block in blocks:
            first, begin = block.sequences[0], cursor
            prompt = int(traj.prompt_lengths[first])
            segment += prompt > 0
            shared = segment if prompt else 0
            pieces.append((r, cursor, traj.offsets[first], 0, prompt, shared, 0, first, 0))
            cursor += prompt
            for i in block.sequences:
                segment += 1
                size = int(traj.offsets[i + 1] - traj.offsets[i]) - prompt
                start, before = traj.offsets[i] + prompt, begin + prompt - 1
                pieces.append((r, cursor, start, prompt, size, segment, shared, i, before))
                cursor += size
    pieces = np.array(pieces, np.int64).reshape(-1, 9)
    sizes = pieces[:, 4]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    row, at, token, position, _, segment, prefix, sequence, before = np.repeat(pieces, sizes, axis=0).T
    at, token, position = at + within, token + within, position + within
    scored = traj.loss_mask[token] & (position > 0)
    source = np.where(within == 0, before, at - 1)[scored]
    scored_row, sequence = row[scored], sequence[scored]
    counts = np.bincount(scored_row, minlength=len(micro.rows))
    first = (np.cumsum(counts) - counts)[scored_row]  # scored token of each one's row
    number, slot = np.cumsum(np.diff(sequence, prepend=-1) != 0), np.arange(len(first)) - first
    if micro.ranks > 1:
        work = np.zeros((len(micro.rows), micro.row_length), np.int64)
        work[row, at] = ranks.count_keys(position, True, micro.windows)
        places = ranks.assign_tokens(work, micro.ranks)
        at, source = places[row, at], places[scored_row, source]
        slot = ranks.slots(slot, counts[scored_row], micro.row_length, micro.ranks)
    return ((row, at, token, position, segment, prefix),
            (scored_row, slot, token[scored], source, number - number[first] + 1))


def loss_weights(traj, sequences, aggregation: str, *, max_tokens=None, together=0, dropped=None, keep=None,
                 positive=None) -> dict[str, np.ndarray]:
    """Computes token weights [T] of one optimizer step for each loss term; 0 on all other tokens.

    Denominators count trajectories; in an adapter set each adapter has its own denominators.

    Args:
      traj: the ragged batch.
      sequences: indices of all sequences of the optimizer step.
      aggregation, max_tokens, together: as in algorithms.aggregation_weights.
      dropped: [N] bool, trajectories without policy loss; they still count in the denominators.
      keep: [T] bool, tokens with policy loss; the others still count in the denominators.
      positive: [N] bool, trajectories of the positive-example loss; None = there is none.

    Returns:
      {"policy": by the aggregation, "token": the plain token mean, "positive": token mean over positive trajectories}.
    """
    options = dict(max_tokens=max_tokens, together=together, dropped=dropped, keep=keep, positive=positive)
    if "adapter" not in traj.columns:
        return _weights(traj, sequences, aggregation, **options)
    number = traj.columns["adapter"][traj.offsets[:-1]][sequences]
    each = [_weights(traj, sequences[number == k], aggregation, **options) for k in np.unique(number)]
    return {name: np.sum([weights[name] for weights in each], axis=0) for name in each[0]}


def _weights(traj, sequences, aggregation, *, max_tokens, together, dropped, keep, positive):
    """Computes `loss_weights` of trajectories that share their denominators."""
    counts, whose = np.zeros(traj.num_trajectories), traj.trajectory[sequences]
    counts[whose] = traj.total()[whose]
    spread = lambda w: np.where(traj.loss_mask, traj.spread(w), 0.0)  # noqa: E731
    policy = aggregation_weights(counts, aggregation, groups_N=traj.group, max_tokens=max_tokens,
                                 together=together)
    policy = spread(policy if dropped is None else np.where(dropped, 0.0, policy))
    out = {"policy": policy if keep is None else np.where(keep, policy, 0.0),
           "token": spread(aggregation_weights(counts, "token_mean"))}
    if positive is not None:
        out["positive"] = spread(aggregation_weights(np.where(positive, counts, 0), "token_mean"))
    return out
