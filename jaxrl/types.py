"""The values that several packages share: Trajectories, PackedBatch, TrainState.

Legend: T tokens of a host batch, Q sequences, N trajectories, R packed rows, L row length, S loss tokens per row.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.struct
import jax
import numpy as np
from flax.traverse_util import unflatten_dict

R = TypeVar("R")


def custom_vjp(*nondiff_argnums: int) -> Callable[[Callable[..., R]], jax.custom_vjp[R]]:
    """Returns `jax.custom_vjp` as a decorator; the arguments at the positions nondiff_argnums have no gradient."""
    def decorate(function: Callable[..., R]) -> jax.custom_vjp[R]:
        decorated: Any = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)
        return decorated

    return decorate


FINISH = ("stop", "length", "abort")  # values of Trajectories.finish are indices into this


class Sizes(NamedTuple):
    """Lengths, groups and image patches of Q sequences, which decide the layout. Integer arrays: int64, lengths also
    int32."""

    prompts: np.ndarray      # [Q] tokens of the prompt, which a copy may hold for several sequences
    completions: np.ndarray  # [Q] tokens after it
    groups: np.ndarray       # [Q] never split over optimizer steps
    prefixes: np.ndarray | None  # [Q] sequences of one value have the same prompt; None = no prompt is shared
    patches: np.ndarray | None = None  # [Q, 2] of the images in the prompt and after it; None = there is no image


class Places(NamedTuple):
    """The places of the images in one sequence, in order of their first tokens."""

    firsts: np.ndarray   # [I] int64: index of the first image token in the sequence
    grids: np.ndarray    # [I, 2] int64: rows and columns of patches
    numbers: np.ndarray  # [I] int64: of the picture; two places of one number show the same picture
    kept: tuple = ()     # what holds the pixels of pictures that are in no data, which are read as long as it is there
    delays: np.ndarray | None = None  # [I] int64, as Pictures.delays


class Pictures(NamedTuple):
    """The images of a ragged batch: I entries, one for each place where an image stands, ordered by (sequence, first
    token). Of a video each group of frames that one patch holds is an entry.

    Pixels are elsewhere: `patches` reads those of the pictures with given numbers, for the rows of one microbatch at a
    time. An image of rows x columns patches has rows * columns / merge^2 tokens. The fields `delays` and `features`
    may be None.
    """

    sequences: np.ndarray  # [I] int64
    firsts: np.ndarray  # [I] int64: index of the first image token in its sequence
    grids: np.ndarray  # [I, 2] int64: rows and columns of patches
    numbers: np.ndarray  # [I] int64: of the picture, of which there may be several places
    merge: int  # patches per side of an image token
    width: int  # numbers of a patch
    patches: Callable[[np.ndarray], list[np.ndarray]]  # numbers [K] -> of each picture [N, width] uint8
    window: int = 0  # image tokens per side of the tower's windows, 0 = it has none
    kept: tuple = ()  # as Places.kept
    two_way: bool = False  # the tokens of an image see each other, and have one position (VisionConfig.two_way)
    frames: int = 1  # that a patch holds: those of a video's entry; an image's are equal
    # [I] int64: of an entry that goes on a video whose entries follow each other without text, its position in time
    # behind the video's first; -1 elsewhere; None = -1 everywhere
    delays: np.ndarray | None = None
    # numbers [K] -> of each picture the tower's features, [tokens, (1 + taps) * size] in the compute dtype, where a
    # role keeps them (train.image_features); None = the tower computes them from `patches`
    features: Callable[[np.ndarray], list[np.ndarray]] | None = None

    @property
    def counts(self) -> np.ndarray:
        """Patches of each image, int64 [I]."""
        return self.grids.prod(axis=1)

    def tokens(self, offsets) -> np.ndarray:
        """Returns the indices into [T] of all image tokens, int64, image by image.

        offsets: [Q+1]; sequence q owns tokens offsets[q]:offsets[q+1].
        """
        begins, counts = offsets[self.sequences] + self.firsts, self.counts // self.merge**2
        return np.concatenate([np.arange(a, a + n) for a, n in zip(begins, counts, strict=True)])

    def select(self, sequences: Sequence[int]) -> Pictures | None:
        """Returns the images of the sequences with these numbers, numbered anew from 0 in this order; None if there
        is none.
        """
        own = [np.flatnonzero(self.sequences == q) for q in sequences]
        at = np.concatenate([np.zeros(0, np.int64), *own])
        if not len(at):
            return None
        return self._replace(sequences=np.repeat(np.arange(len(own)), [len(one) for one in own]),
                             firsts=self.firsts[at], grids=self.grids[at], numbers=self.numbers[at],
                             delays=None if self.delays is None else self.delays[at])

    @classmethod
    def joined(cls, batches: Sequence[Trajectories]) -> Pictures | None:
        """Returns the images of several batches as one, sequences numbered through in the order of the batches; None if
        there is none. The readers of pixels (`patches`, `features`) are those of the first batch with images.
        """
        starts = np.cumsum([0, *(one.num_sequences for one in batches)])
        own = [(start, one.pictures) for start, one in zip(starts, batches, strict=False) if one.pictures is not None]
        if not own:
            return None
        both = lambda name: np.concatenate([getattr(one, name) for _, one in own])  # noqa: E731
        return own[0][1]._replace(sequences=np.concatenate([start + one.sequences for start, one in own]),
                                  firsts=both("firsts"), grids=both("grids"), numbers=both("numbers"),
                                  delays=_delays([one for _, one in own]),
                                  kept=tuple(held for _, one in own for held in one.kept))

    def digests(self, count: int) -> list[bytes]:
        """Returns 16 bytes of the images of each of `count` sequences: where they begin, their grids, delays and
        pixels; of one without images b"".
        """
        wanted = np.unique(self.numbers)
        shown = dict(zip(wanted.tolist(), self.patches(wanted), strict=True))
        pixels = {number: hashlib.blake2b(own.tobytes(), digest_size=16).digest() for number, own in shown.items()}
        out = {}
        delays = [()] * len(self.firsts) if self.delays is None else [(d,) * (d >= 0) for d in self.delays.tolist()]
        for sequence, first, grid, delay, number in zip(self.sequences, self.firsts, self.grids, delays, self.numbers,
                                                        strict=True):
            digest = out.setdefault(int(sequence), hashlib.blake2b(digest_size=16))
            digest.update(repr((int(first), *map(int, grid), *delay)).encode() + pixels[int(number)])
        return [out[i].digest() if i in out else b"" for i in range(count)]

    @classmethod
    def of(cls, places: Sequence[Places | Pictures | None], source) -> Pictures | None:
        """Returns the images of sequences, in their order; None if there is none.

        places: those of each sequence, of a Pictures with one sequence alone. source: has merge, width, patches,
        window, two_way and frames: a data.images.source.ImageSource or a Pictures. The result has no `features`.
        """
        own = [(i, one) for i, one in enumerate(places) if one is not None and len(one.firsts)]
        if not own:
            return None
        firsts, grids, numbers = (np.concatenate([getattr(one, name) for _, one in own])
                                  for name in ("firsts", "grids", "numbers"))
        sequences = np.repeat([i for i, _ in own], [len(one.firsts) for _, one in own])
        kept = tuple(held for _, one in own for held in one.kept)
        return cls(sequences, firsts, grids, numbers, source.merge, source.width, source.patches, source.window, kept,
                   source.two_way, source.frames, _delays([one for _, one in own]))


def _delays(parts: Sequence[Places | Pictures]) -> np.ndarray | None:
    """Returns the delays of the entries of all parts; None where all are -1."""
    if all(one.delays is None for one in parts):
        return None
    return np.concatenate([np.full(len(one.firsts), -1) if one.delays is None else one.delays for one in parts])


@dataclasses.dataclass
class Trajectories:
    """A ragged batch in host memory. Sequence q is tokens[offsets[q]:offsets[q+1]], a prompt and its continuation.

    A trajectory is one sequence or several consecutive ones (a history that is rewritten between turns opens a new
    one); each sampled token is in the loss of exactly one of them. Weights, statistics, mini-batches and penalties
    count trajectories; only layout, packing and attention know sequences. Trajectories are ordered by (prompt, sample).
    Nothing here is padded; only `training.pack` pads. Log-probs are in nats.

    Columns that rl.trajectories.collect makes:

        kept       [T] float32      always                Result.log_kept_mass; 0 where not sampled
        support    [T, K] int32     if results have it    -1 = unused
        routes     [T, W] int16     if results have it    -1 = not known
        adapter    [T] int32        with an adapter set   number of the adapter of a sequence
        turn       [T] int32        episodes              number of the turn; -1 where not sampled
        reward     [T] float64      episodes              reward of a turn, at its last sampled token
        anchor     [T] int64        episodes              state that the turn was decided in; 0 = none

    Each trajectory has at least one token. Raises ValueError, when made, unless `trajectory` has Q entries that count 0
    to N - 1 in ascending order (None: unless Q = N), and for a `trajectory` without `prefix`. Derived arrays are int64;
    `trajectory` and `prefix` are never None afterwards.
    """

    tokens: np.ndarray  # [T] int32: prompt, then completion (end-of-text kept)
    offsets: np.ndarray  # [Q+1] int64
    loss_mask: np.ndarray  # [T] bool: True on sampled tokens; False on prompt, observations, tool output
    logprobs: np.ndarray  # [T] float32: the sampler's log-prob at its temperature, full support; 0 where not sampled
    versions: np.ndarray  # [T] int32: weight version that sampled the token; -1 where not sampled
    prompt_lengths: np.ndarray  # [Q] int32: leading tokens that are the prompt
    group: np.ndarray  # [N] int64: global prompt index (position in the epoch stream)
    sample: np.ndarray  # [N] int32: index within the group
    seed: np.ndarray  # [N] uint32, of the first turn
    finish: np.ndarray  # [N] int8, index into FINISH
    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # by name, see above
    trajectory: np.ndarray | None = None  # [Q] int64, ascending: whose sequence it is; None = one each
    prefix: np.ndarray | None = None  # [Q] int64, as Sizes.prefixes; None = the group: one sequence each
    pictures: Pictures | None = None
    # derived:
    num_sequences: int = dataclasses.field(init=False)
    num_trajectories: int = dataclasses.field(init=False)
    lengths: np.ndarray = dataclasses.field(init=False)  # [Q] tokens of each sequence
    completion_lengths: np.ndarray = dataclasses.field(init=False)  # [Q] those after its prompt
    first: np.ndarray = dataclasses.field(init=False)  # [N] each trajectory's first sequence
    spans: np.ndarray = dataclasses.field(init=False)  # [N+1] where the tokens of each trajectory begin, and the end

    def __post_init__(self):
        whole, count, self.lengths = self.trajectory is None, len(self.group), np.diff(self.offsets)
        self.num_sequences, self.num_trajectories = len(self.lengths), count
        self.trajectory = np.arange(count) if whole else np.asarray(self.trajectory)
        at, present = self.trajectory, np.unique(self.trajectory)
        if len(at) != len(self.lengths) or (np.diff(at) < 0).any() or not np.array_equal(present, np.arange(count)):
            raise ValueError(f"trajectory={at}: expected the sequences of {count} trajectories, in order")
        if self.prefix is None and not whole:
            raise ValueError("trajectories of several sequences need `prefix`: a group may have different prompts")
        self.prefix = self.group if self.prefix is None else self.prefix
        self.completion_lengths = self.lengths - self.prompt_lengths
        self.first = np.searchsorted(at, np.arange(count))
        self.spans = self.offsets[[*self.first, len(at)]]

    @property
    def sizes(self) -> Sizes:
        """Lengths, groups, prompt ids and image patches of the Q sequences, from which a layout is made."""
        groups, patches = self.group[self.trajectory], None if self.pictures is None else self.patches
        return Sizes(self.prompt_lengths, self.completion_lengths, groups, self.prefix, patches)

    @property
    def patches(self) -> np.ndarray | None:
        """Patches of the images in each sequence's prompt and after it, int64 [Q, 2]; None without images."""
        if self.pictures is None or not len(self.pictures.sequences):
            return None
        images, out = self.pictures, np.zeros((self.num_sequences, 2), np.int64)
        behind = images.firsts >= self.prompt_lengths[images.sequences]
        np.add.at(out, (images.sequences, behind.astype(int)), images.counts)
        return out

    @property
    def behind_image(self) -> np.ndarray:
        """Whether an image begins before the token in its sequence, bool [T]."""
        first = np.full(self.num_sequences, np.iinfo(np.int64).max)
        if self.pictures is not None:
            np.minimum.at(first, self.pictures.sequences, self.pictures.firsts)
        places = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        return places > np.repeat(first, self.lengths)

    def total(self, values_T=1) -> np.ndarray:
        """Returns the sum of values over each trajectory's tokens in the loss, [N]; without values the count of these
        tokens, int64.

        Nothing is divided. values_T: [T], not read outside the loss; sums of floats have their dtype.
        """
        return np.add.reduceat(np.where(self.loss_mask, values_T, 0), self.spans[:-1])

    def spread(self, numbers_N) -> np.ndarray:
        """Returns [T]: each trajectory's number at all of its tokens, prompts too. numbers_N: [N], of any dtype, which
        the result has."""
        return np.repeat(numbers_N, np.diff(self.spans))

    def sampled(self) -> list[np.ndarray]:
        """Returns N int64 arrays: the indices into [T] of each trajectory's tokens in the loss."""
        return np.split(np.flatnonzero(self.loss_mask), np.cumsum(self.total())[:-1])


class Images(flax.struct.PyTreeNode):
    """The images of packed rows: a row of patches beside each row of tokens (P patches per row), or of features that
    a tower made of them before; then patches, places, segments and windows are None."""

    patches: Any  # [R, P, width] uint8, see Pictures.patches; 0 where there is none
    places: Any  # [R, P, 4] int32: row, column, rows and columns of the patch's image
    segments: Any  # [R, P] int32: number of the patch's image in its row, 0 = none
    inserts: Any  # [R, L] int32: feature of its row that stands in the place of the token's embedding, -1 = none
    rotary: Any = None  # [R, L, 3] int32: position of the token by time, row and column; None: it has one position
    reach: Any = None  # [R, L] int32: last position that the token sees: its own, of an image that of the last token of
    # it; None: the tokens of an image see those before them
    windows: Any = None  # [R, P] int32: number of the patch's window in its row; None: the tower has none
    features: Any = None  # [R, F, (1 + taps) * size] in the compute dtype: of the merger, then of each tap


class PackedBatch(flax.struct.PyTreeNode):
    """One microbatch of static shape. Padding rows and slots have weight 0 and segment 0.

    A query attends to the keys of its own segment and of the segment `prefixes` names (the shared prompt), at
    positions not above its own. Loss token j of row r is `targets[r, j]`, predicted by row position `sources[r, j]`.
    """

    tokens: Any  # [R, L] int32
    positions: Any  # [R, L] int32, restart at each prompt; completions continue their prompt's
    segments: Any  # [R, L] int32, 0 = padding
    prefixes: Any  # [R, L] int32, segment of the shared prompt, 0 = none
    sources: Any  # [R, S] int32
    targets: Any  # [R, S] int32
    sequences: Any  # [R, S] int32, the slot's sequence: 1, 2, ... within the row, 0 = unused slot
    # name -> [R, S] float32 (old, reference, behaviour log-probs, advantage ...) or [R, S, K]; of integers int32 (pack)
    columns: dict[str, Any]
    weights: dict[str, Any]  # loss term -> [R, S] float32, 1/denominator where the token counts, else 0
    routes: Any = None  # [R, L, n * K] int16: experts of each token that are replayed (training.router), -1 = its own
    images: Images | None = None  # None where no row has one
    adapters: Any = None  # [R, L] int32, number of the token's adapter where there are several, 0 = padding


class TrainState(flax.struct.PyTreeNode):
    """The state of training: parameters, optimizer state and counters. `trainable` and `frozen` together are the
    parameters: disjoint flat dicts, "path/of/leaf" -> array. An update changes all fields, but of `frozen` only the
    routers' biases, with a router_bias_rate; a skipped update changes `stats` alone. With an adapter set opt_state,
    step and stats are tables by adapter."""

    trainable: Any
    frozen: Any
    opt_state: Any
    step: Any  # [] int32: optimizer updates applied
    stats: Any  # dict: skipped updates, non-finite streak, early stop of this step, entropy coefficients, routers' load


def merge(trainable, frozen):
    """Returns the nested parameter tree that a model takes, from the flat dicts of a TrainState."""
    return unflatten_dict({**trainable, **frozen}, sep="/")
