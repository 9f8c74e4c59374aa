"""Gated delta rule, and Mamba-2's recurrence, over packed rows, with gradients, and one token at a time."""

from jaxrl.kernels.recurrence.api import recurrence
from jaxrl.kernels.recurrence.chunks import (
    Chunks,
    Rule,
    chunks_of,
    flops,
    room,
    tokens_per_chunk,
    tokens_per_room,
    workspace,
)
from jaxrl.kernels.recurrence.convolution import convolution
from jaxrl.kernels.recurrence.reference import step

__all__ = ["Chunks", "Rule", "chunks_of", "convolution", "flops", "recurrence", "room", "step", "tokens_per_chunk",
           "tokens_per_room", "workspace"]
