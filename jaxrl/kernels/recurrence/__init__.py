"""Gated delta rule over packed rows, with gradients, and one token at a time."""

from jaxrl.kernels.recurrence.api import recurrence
from jaxrl.kernels.recurrence.chunks import Chunks, chunks_of, room, tokens_per_chunk, tokens_per_room
from jaxrl.kernels.recurrence.convolution import convolution
from jaxrl.kernels.recurrence.reference import step

__all__ = ["Chunks", "chunks_of", "convolution", "recurrence", "room", "step", "tokens_per_chunk", "tokens_per_room"]
