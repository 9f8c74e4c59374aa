"""Ragged token columns <-> static packed rows.

Legend: R rows, L row length, S = L scored slots per row, T tokens of the ragged batch.
"""

from __future__ import annotations

import numpy as np

from jaxrl.algorithms.aggregation import aggregation_weights
from jaxrl.training.layout import Microbatch
from jaxrl.types import PackedBatch, Trajectories


def scored_tokens(traj: Trajectories, i: int) -> np.ndarray:
    """Indices into the ragged arrays of the tokens of sequence i that are predicted and in the loss."""
    start, end = traj.offsets[i], traj.offsets[i + 1]
    inside = np.flatnonzero(traj.loss_mask[start:end])
    return start + inside[inside > 0]  # the very first token has nothing that predicts it


def pack(
    traj: Trajectories,
    micro: Microbatch,
    columns: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    dtype=np.float32,
) -> PackedBatch:
    """Fills the rows of one microbatch.

    Args:
      traj: the ragged batch.
      micro: where its sequences go.
      columns: name -> [T] or [T, K] per token; integers stay integers.
      weights: loss term -> [T]; 0 where a token does not count.
      dtype: of columns and weights.

    Returns:
      PackedBatch in host memory. Scored slots are front-packed in each row; unused slots have weight 0, source 0 and
      target 0. Segment ids count from 1 in each row: prompt, then its answers.
    """
    rows, length = len(micro.rows), micro.row_length
    ints = {
        k: np.zeros((rows, length), np.int32)
        for k in ("tokens", "positions", "segments", "prefixes", "sources", "targets", "sequences")
    }
    cols = {k: np.zeros((rows, length, *c.shape[1:]), np.int32 if c.dtype.kind == "i" else dtype) for k, c in columns.items()}
    wts = {k: np.zeros((rows, length), dtype) for k in weights}
    for r, row in enumerate(micro.rows):
        cursor = scored = segment = sequence = 0
        for block in row:
            cursor, scored, segment, sequence = _place(
                traj, block, r, cursor, scored, segment, sequence, ints, columns, cols, weights, wts)
    return PackedBatch(**ints, columns=cols, weights=wts)


def _place(traj, block, r, cursor, scored, segment, sequence, ints, columns, cols, weights, wts):
    """Writes one block at `cursor`; returns the new cursor and the counts of scored slots, segments and sequences."""
    prompt_start = cursor
    first = block.sequences[0]
    prompt_length = int(traj.prompt_lengths[first])
    prompt_segment = segment + 1 if prompt_length else 0
    segment = prompt_segment or segment
    begin = traj.offsets[first]
    _write(ints, r, cursor, traj.tokens[begin : begin + prompt_length], 0, prompt_segment, 0)
    cursor += prompt_length
    for k, i in enumerate(block.sequences):
        start, end = int(traj.offsets[i]), int(traj.offsets[i + 1])
        answer = traj.tokens[start + prompt_length : end]
        segment += 1
        _write(ints, r, cursor, answer, prompt_length, segment, prompt_segment)
        idx = scored_tokens(traj, i)
        if k:  # loss on prompt tokens (SFT) is counted once per prompt copy
            idx = idx[idx - start >= prompt_length]
        local = idx - start
        slots = slice(scored, scored + len(idx))
        before = local - 1
        ints["sources"][r, slots] = np.where(
            before < prompt_length, prompt_start + before, cursor + before - prompt_length
        )
        ints["targets"][r, slots] = traj.tokens[idx]
        sequence += len(idx) > 0
        ints["sequences"][r, slots] = sequence
        for name, column in columns.items():
            cols[name][r, slots] = column[idx]
        for name, weight in weights.items():
            wts[name][r, slots] = weight[idx]
        scored += len(idx)
        cursor += len(answer)
    return cursor, scored, segment, sequence


def _write(ints, r, cursor, tokens, first_position, segment, prefix):
    where = slice(cursor, cursor + len(tokens))
    ints["tokens"][r, where] = tokens
    ints["positions"][r, where] = np.arange(first_position, first_position + len(tokens))
    ints["segments"][r, where] = segment
    ints["prefixes"][r, where] = prefix


def unpack(traj: Trajectories, micro: Microbatch, values_RxS: np.ndarray, out_T: np.ndarray) -> None:
    """Writes scored values back to their tokens in `out_T`, the inverse of `pack`'s column layout."""
    for r, row in enumerate(micro.rows):
        scored = 0
        for block in row:
            for k, i in enumerate(block.sequences):
                idx = scored_tokens(traj, i)
                if k:
                    idx = idx[idx - traj.offsets[i] >= traj.prompt_lengths[i]]
                out_T[idx] = values_RxS[r, scored : scored + len(idx)]
                scored += len(idx)


def loss_weights(traj, sequences, aggregation: str, *, max_tokens=None, dropped=None, keep=None, positive=None):
    """Token weights [T] of one optimizer step, by loss term; 0 on all other tokens. Denominators count trajectories.

    Args:
      sequences: all of the trajectories of the optimizer step. aggregation, max_tokens: as aggregation_weights'.
      dropped: [N] bool, trajectories without policy loss. keep: [T] bool, tokens with one. What they take away keeps its place
        in the denominators.
      positive: [N] bool, trajectories of the positive-example loss; None = there is none.

    Returns:
      {"policy": by the aggregation, "token": the plain token mean, "positive": token mean over positive trajectories}.
    """
    counts, whose = np.zeros(traj.num_trajectories), traj.trajectory[sequences]
    counts[whose] = traj.total()[whose]
    spread = lambda w: np.where(traj.loss_mask, traj.spread(w), 0.0)  # noqa: E731
    policy = aggregation_weights(counts, aggregation, groups_N=traj.group, max_tokens=max_tokens)
    policy = spread(policy if dropped is None else np.where(dropped, 0.0, policy))
    out = {"policy": policy if keep is None else np.where(keep, policy, 0.0),
           "token": spread(aggregation_weights(counts, "token_mean"))}
    if positive is not None:
        out["positive"] = spread(aggregation_weights(np.where(positive, counts, 0), "token_mean"))
    return out
