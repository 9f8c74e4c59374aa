"""The few values that cross rooms.

Legend: T tokens of a host batch, N sequences, R packed rows, L row length, S scored tokens per row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import numpy as np

FINISH = ("stop", "length", "abort")  # values of Trajectories.finish are indices into this


@dataclasses.dataclass
class Trajectories:
    """A ragged batch of prompts and answers in host memory. Sequence i owns tokens[offsets[i]:offsets[i+1]].

    Sequences are ordered by (prompt, sample). Nothing here is padded; only `training.pack` pads.
    """

    tokens: np.ndarray  # [T] int32: prompt, then answer (end-of-text kept)
    offsets: np.ndarray  # [N+1] int64
    loss_mask: np.ndarray  # [T] bool: True on sampled tokens; False on prompt, observations, tool output
    logprobs: np.ndarray  # [T] float32: the sampler's log-prob at its temperature, full support; 0 where not sampled
    versions: np.ndarray  # [T] int32: weight version that sampled the token; -1 where not sampled
    prompt_lengths: np.ndarray  # [N] int32: leading tokens that are the prompt
    group: np.ndarray  # [N] int64: global prompt index (position in the epoch stream)
    sample: np.ndarray  # [N] int32: index within the group
    seed: np.ndarray  # [N] uint32
    finish: np.ndarray  # [N] int8, index into FINISH
    turns: np.ndarray  # [N] int32: model turns
    rewards: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [N] float64, NaN = absent
    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [T] further token columns

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def answer_lengths(self) -> np.ndarray:
        return self.lengths - self.prompt_lengths


@flax.struct.dataclass
class PackedBatch:
    """One microbatch of static shape. Padding rows and slots have weight 0 and segment 0.

    A query attends to the keys of its own segment and of the segment `prefixes` names (the shared prompt), at
    positions not above its own. Scored token j of row r is `targets[r, j]`, predicted by row position `sources[r, j]`.
    """

    tokens: Any  # [R, L] int32
    positions: Any  # [R, L] int32, restart at each prompt; answers continue their prompt's
    segments: Any  # [R, L] int32, 0 = padding
    prefixes: Any  # [R, L] int32, segment of the shared prompt, 0 = none
    sources: Any  # [R, S] int32
    targets: Any  # [R, S] int32
    sequences: Any  # [R, S] int32, the slot's sequence: 1, 2, ... within the row, 0 = unused slot
    columns: dict[str, Any]  # name -> [R, S] float32 (old, reference, behaviour log-probs, advantage ...)
    weights: dict[str, Any]  # loss term -> [R, S] float32, 1/denominator where the token counts, else 0


@flax.struct.dataclass
class TrainState:
    """Everything an update changes. `trainable` and `frozen` together are the parameters (disjoint flat dicts)."""

    trainable: Any
    frozen: Any
    opt_state: Any
    step: Any  # [] int32: optimizer updates applied
    version: Any  # [] int32: published weight version
    rng: Any  # key data of the root key
    stats: Any  # dict of scalars: skipped updates, non-finite streak, whether this step was stopped early, entropy coefficients
