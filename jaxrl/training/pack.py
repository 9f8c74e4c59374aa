"""Packs ragged token columns into rows of static shape and back; computes the loss weights of an optimizer step.

Runs on the host in numpy. training.layout decides where sequences go; called by training.score and roles.

Legend: R rows, L row length, S = L loss slots per row, T tokens of the ragged batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.algorithms.aggregation import aggregation_weights
from jaxrl.models.vision.positions import Placed, feature_rows, image_rows, token_positions
from jaxrl.training import ranks
from jaxrl.training.layout import Microbatch
from jaxrl.types import Images, PackedBatch, Pictures, Trajectories


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
      columns: name -> [T] or [T, K] per token; signed integers become int32, bfloat16 stays bfloat16, all others (bool
        and unsigned, too) become `dtype`. The column `routes` [T, n * K] goes by packed tokens, not by loss tokens:
        into PackedBatch.routes, int16, -1 where there is none.
      weights: loss term -> [T]; 0 where a token does not count.
      dtype: of weights and of those columns.

    Returns:
      PackedBatch in host memory. Loss slots are front-packed in each row, or in each of its parts where it is cut
      (micro.ranks); unused slots have weight 0, source 0 and target 0. Segment ids count from 1 in each row: prompt,
      then its completions. Tokens of a cut row are in the order of training.ranks. `adapters` are those of
      traj.columns["adapter"]; `images` is None where these rows have none. A first token of a sequence has no slot,
      and loss on a prompt's tokens counts once per copy of the prompt.
    """
    (row, at, token, *packed), (loss_row, slot, loss_token, *loss) = _positions(traj, micro)

    def filled(rows, indices, values, kind: DTypeLike = np.int32, blank=0):
        out = np.full((len(micro.rows), micro.row_length, *values.shape[1:]), blank, kind)
        out[rows, indices] = values
        return out

    routes, columns = columns.get("routes"), {name: c for name, c in columns.items() if name != "routes"}
    kinds = {name: np.int32 if c.dtype.kind == "i" else c.dtype if c.dtype.name == "bfloat16" else dtype
             for name, c in columns.items()}
    packed = dict(zip(("positions", "segments", "prefixes"), packed, strict=True), tokens=traj.tokens[token])
    if "adapter" in traj.columns:
        packed["adapters"] = traj.columns["adapter"][token]
    loss = dict(zip(("sources", "sequences"), loss, strict=True), targets=traj.tokens[loss_token])
    return PackedBatch(
        **{name: filled(row, at, values) for name, values in packed.items()},
        **{name: filled(loss_row, slot, values) for name, values in loss.items()},
        columns={name: filled(loss_row, slot, c[loss_token], kinds[name]) for name, c in columns.items()},
        weights={name: filled(loss_row, slot, w[loss_token], dtype) for name, w in weights.items()},
        routes=None if routes is None else filled(row, at, routes[token], np.int16, -1),
        images=traj.pictures and _images(traj, traj.pictures, micro, row, at, token, packed["positions"]),
    )


def _images(traj: Trajectories, pictures: Pictures, micro: Microbatch, row, at, token, position) -> Images | None:
    """Returns the images of a microbatch's rows, each prompt's once for each copy; None if these rows have none.

    Args:
      row, at, token, position: of every packed token, see `_positions`.
    """
    packed = np.full(len(traj.tokens), -1)  # where each token of the batch lies among the packed ones
    packed[token] = np.arange(len(token))
    first = packed[traj.offsets[pictures.sequences] + pictures.firsts]
    shown = np.flatnonzero(first >= 0)
    if not len(shown):
        return None
    of_tokens = position.copy() if pictures.two_way else np.repeat(position[:, None], 3, axis=1)
    for sequence in {i for blocks in micro.rows for block in blocks for i in block.sequences}:
        own = pictures.sequences == sequence
        if own.any():
            span = packed[traj.offsets[sequence]:traj.offsets[sequence + 1]]
            values = token_positions(pictures.two_way, len(span), pictures.firsts[own], pictures.grids[own],
                                     pictures.merge, None if pictures.delays is None else pictures.delays[own])
            of_tokens[span[span >= 0]] = values[span >= 0]
    out = np.zeros((len(micro.rows), micro.row_length, *of_tokens.shape[1:]), np.int32)
    out[row, at] = of_tokens
    content, counts = pictures.features or pictures.patches, pictures.counts // pictures.merge**2
    places = [Placed(row[first[i]], at[first[i] + np.arange(counts[i])], pictures.grids[i], own)
              for i, own in zip(shown, content(pictures.numbers[shown]), strict=True)]
    if pictures.features is not None:
        return feature_rows(places, out, micro.patches // pictures.merge**2)
    return image_rows(places, out, micro.patches, pictures.merge, pictures.width, pictures.window)


def unpack(traj: Trajectories, micro: Microbatch, values_RxS: np.ndarray, out_T: np.ndarray) -> None:
    """Writes the values of loss slots to their tokens in `out_T`, in place: inverts the packing of a column.

    Args:
      traj, micro: the ragged batch and the microbatch of it, as `pack` took them.
      values_RxS: [R, S] or [R, S, ...].
      out_T: [T] or [T, ...]; tokens that are not in the loss or not in this microbatch keep their values. Loss tokens
        of a shared prompt are those of the first sequence of each copy; the others' keep theirs.
    """
    _, (row, slot, token, *_) = _positions(traj, micro)
    out_T[token] = values_RxS[row, slot]


def unpack_tokens(traj: Trajectories, micro: Microbatch, values_RxL: np.ndarray, out_T: np.ndarray) -> None:
    """Writes the values of packed tokens to `out_T`, in place; those of a shared prompt to each of its sequences.

    Args:
      traj, micro: the ragged batch and the microbatch of it, as `pack` took them.
      values_RxL: [R, L] or [R, L, ...].
      out_T: [T] or [T, ...]; tokens that are not in this microbatch keep their values.
    """
    (row, at, token, *_), _ = _positions(traj, micro)
    out_T[token] = values_RxL[row, at]
    for block in (block for blocks in micro.rows for block in blocks):
        first, *others = traj.offsets[list(block.sequences)]
        prompt = int(traj.prompt_lengths[block.sequences[0]])
        for other in others:
            out_T[other:other + prompt] = out_T[first:first + prompt]


def _positions(traj: Trajectories, micro: Microbatch):
    """Computes the positions of a microbatch's tokens in its rows, as int arrays in the order of the rows.

    Loss on prompt tokens (SFT) is counted once per prompt copy; the first token of a sequence has no source.

    Returns:
      for packed tokens (row, index in the row, token of the batch, position, segment, prefix), and for loss tokens
      (row, slot, token of the batch, source, sequence in the row). source: index in the row of the token whose hidden
      state predicts it.
    """
    pieces = []  # row, index, token and position of the first token; length, segment, prefix, sequence; first source
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
    in_loss = traj.loss_mask[token] & (position > 0)
    source = np.where(within == 0, before, at - 1)[in_loss]
    loss_row, sequence = row[in_loss], sequence[in_loss]
    counts = np.bincount(loss_row, minlength=len(micro.rows))
    first = (np.cumsum(counts) - counts)[loss_row]  # number of the first loss token of the same row
    number, slot = np.cumsum(np.diff(sequence, prepend=-1) != 0), np.arange(len(first)) - first
    if micro.ranks > 1:
        at, source, slot = _cut(micro, row, at, position, loss_row, source, slot, counts[loss_row])
    return ((row, at, token, position, segment, prefix),
            (loss_row, slot, token[in_loss], source, number - number[first] + 1))


def _cut(micro: Microbatch, row, at, position, loss_row, source, slot, count):
    """Returns (at, source, slot) of `_positions` in rows that are cut into parts. count: loss tokens of each one's row.
    """
    work = np.zeros((len(micro.rows), micro.row_length), np.int64)
    work[row, at] = ranks.count_keys(position, True, micro.windows)
    index = ranks.assign_tokens(work, micro.ranks)
    return index[row, at], index[loss_row, source], ranks.slots(slot, count, micro.row_length, micro.ranks)


def loss_weights(traj, sequences, aggregation: str, *, max_tokens=None, chunk=0, dropped=None, keep=None,
                 positive=None) -> dict[str, np.ndarray]:
    """Computes token weights [T] float64 of one optimizer step for each loss term; 0 on all other tokens.

    Denominators count trajectories; in an adapter set each adapter has its own denominators.

    Args:
      traj: the ragged batch.
      sequences: [M] int array, indices of all sequences of the optimizer step.
      aggregation: name of the policy's denominator (algorithms.aggregation_weights: token_mean, sequence_mean ...).
      max_tokens: tokens, of the divisor of "constant". chunk: trajectories in one mean of token_mean, 0 = all.
      dropped: [N] bool, trajectories without policy loss; they still count in the denominators.
      keep: [T] bool, tokens with policy loss; the others still count in the denominators.
      positive: [N] bool, trajectories of the positive-example loss; None = there is none.

    Returns:
      {"policy": by the aggregation, "token": the plain token mean, "positive": token mean over positive trajectories,
      unless `positive` is None}.

    Raises ValueError for another aggregation, and for "constant" without max_tokens.
    """
    options = dict(max_tokens=max_tokens, chunk=chunk, dropped=dropped, keep=keep, positive=positive)
    if "adapter" not in traj.columns:
        return _weights(traj, sequences, aggregation, **options)
    number = traj.columns["adapter"][traj.offsets[:-1]][sequences]
    each = [_weights(traj, sequences[number == k], aggregation, **options) for k in np.unique(number)]
    return {name: np.sum([weights[name] for weights in each], axis=0) for name in each[0]}


def _weights(traj, sequences, aggregation, *, max_tokens, chunk, dropped, keep, positive):
    """Computes `loss_weights` of trajectories that share their denominators."""
    counts, trajectories = np.zeros(traj.num_trajectories), traj.trajectory[sequences]
    counts[trajectories] = traj.total()[trajectories]
    spread = lambda w: np.where(traj.loss_mask, traj.spread(w), 0.0)  # noqa: E731
    policy = aggregation_weights(counts, aggregation, groups_N=traj.group, max_tokens=max_tokens,
                                 chunk=chunk)
    policy = spread(policy if dropped is None else np.where(dropped, 0.0, policy))
    out = {"policy": policy if keep is None else np.where(keep, policy, 0.0),
           "token": spread(aggregation_weights(counts, "token_mean"))}
    if positive is not None:
        out["positive"] = spread(aggregation_weights(np.where(positive, counts, 0), "token_mean"))
    return out
