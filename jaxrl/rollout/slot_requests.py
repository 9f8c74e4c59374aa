"""What a slot of the embedded sampler holds: a request being worked on, or a conversation that waits for its next one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrl.rollout.protocol import Request


@dataclasses.dataclass(eq=False)
class Sample:
    """A request in the embedded sampler: waiting (slot -1) or running, with what it has sampled."""

    request: Request
    key: tuple    # identity of its prompt, of the images there, and of the adapter that reads it
    bucket: int   # index of its prompt length class
    limit: int    # completion tokens it may have
    parts: list   # (tokens, logprobs, kept, support, routes, versions) of each chunk; the first of none
    slot: int = -1
    weights: int = -1  # number of weight syncs before its prompt was put into the slot
    continued: bool = False  # its prompt is a conversation already in the slot, not a copy of a prefilled one
    produced: int = 0  # tokens sampled so far
    # [P - 1, W] int16, experts of its prompt's tokens but the last
    known: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int16))


def nothing_sampled(support: int, routes: int) -> tuple[np.ndarray, ...]:
    """Returns a part of `Sample.parts` without tokens. support, routes: ids of each token in its arrays."""
    return (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32),
            np.zeros((0, support), np.int32), np.zeros((0, routes), np.int16), np.zeros(0, np.int32))


class Parked(NamedTuple):
    """A conversation kept in its slot, with the keys and values of all tokens but the last."""

    slot: int
    tokens: np.ndarray  # [n] int32: prompt and completion
    images: tuple       # identity of the images in it
