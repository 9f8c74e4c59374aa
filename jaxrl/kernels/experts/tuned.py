"""Sizes of `experts`: rows of a block, tokens of a chunk."""

from __future__ import annotations

BLOCK = 64         # rows of a block in XLA
PER_EXPERT = 320   # slots per expert of a chunk, where there are as many
LEAST = 1024       # tokens of a chunk, where there are as many


def chunk(slots: int, experts: int) -> int:
    """Tokens of a chunk, at most: enough for PER_EXPERT rows of an expert, whose weights are read once per chunk."""
    tokens = max(LEAST, -(-PER_EXPERT * experts // slots))
    return max(1, min(tokens, (2**31 - 1) // ((experts + 1) * slots)))  # what layout.py sorts stays an int32
