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
    slot: int = -1
    weights: int = -1  # number of weight syncs before its prompt was put into the slot
    continued: bool = False  # its prompt is a conversation already in the slot, not a copy of a prefilled one
    produced: int = 0  # tokens sampled so far
    parts: list = dataclasses.field(default_factory=list)  # (tokens, logprobs, kept, support, routes, versions) each
    # [P - 1, W] int16, experts of its prompt's tokens but the last
    known: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int16))

    def column(self, i: int, dtype) -> np.ndarray:
        """Returns entry i of all parts as one array of this dtype; empty if nothing was sampled."""
        return np.concatenate([p[i] for p in self.parts]).astype(dtype) if self.parts else np.zeros(0, dtype)


class Parked(NamedTuple):
    """A conversation kept in its slot, with the keys and values of all tokens but the last."""

    slot: int
    tokens: np.ndarray  # [n] int32: prompt and completion
    images: tuple       # identity of the images in it
