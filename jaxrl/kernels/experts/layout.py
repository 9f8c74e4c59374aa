"""Where the chosen slots of a chunk of tokens lie: sorted by expert, each expert's rows filled up to whole blocks, so
that a block has exactly one expert. Every implementation but the reference computes on this.

Legend: T tokens of the chunk, K slots per token, E experts, N blocks, R = N * block rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.platform import platform


class Layout(NamedTuple):
    """The assignment of T tokens' slots (K experts each) to rows sorted by expert, in N blocks of rows; see
    `api.experts`.
    """

    rows: jax.Array     # [T, K] int32: the row of each slot, R where the slot is empty
    slots: jax.Array    # [R] int32: the slot of each row as token * K + k, T * K where the row only fills up
    experts: jax.Array  # [N] int32: the expert of each block; what follows the used ones means nothing
    ends: jax.Array     # [E] int32: the block behind each expert's last one
    used: jax.Array     # [] int32: how many blocks hold rows; above N where a token's ids repeat (see api.experts)


def blocks_of(tokens: int, slots: int, experts: int, block: int) -> int:
    """Returns N, the blocks of rows that no routing of distinct ids exceeds. A token has at most one slot per expert.

    Args:
      tokens: T. slots: K of a token. experts: E. block: rows of a block."""
    rows = tokens * min(slots, experts)
    return (rows + min(experts, rows) * (block - 1)) // block


def layout(ids_TxK, experts: int, block: int) -> Layout:
    """Returns the Layout of ids [T, K], int32: rows sorted by expert, within an expert by token, then slot.

    Args:
      experts: E; an id outside 0 <= id < E is an empty slot. block: rows of a block. (E + 1) * T * K must stay below
        2^31."""
    (tokens, slots), count = ids_TxK.shape, ids_TxK.size
    blocks = blocks_of(tokens, slots, experts, block)
    expert = jnp.where((ids_TxK >= 0) & (ids_TxK < experts), ids_TxK, experts).reshape(-1)
    # one key, expert before slot, so that sorting needs no second array (several times as fast on CPUs)
    keys = jnp.sort(expert * count + jnp.arange(count, dtype=jnp.int32))
    order, sorted_expert = keys % count, keys // count
    # a search by halves is a loop, which a GPU's host launches kernel by kernel: 104 of this function's 142 launches
    search = functools.partial(jnp.searchsorted, method="compare_all" if platform() == "gpu" else "scan")
    starts = search(keys, jnp.arange(experts + 1, dtype=jnp.int32) * count).astype(jnp.int32)
    ends = jnp.cumsum((jnp.diff(starts) + block - 1) // block, dtype=jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])  # each expert's first block
    of_sorted = first[sorted_expert] * block + jnp.arange(count, dtype=jnp.int32) - starts[sorted_expert]
    of_sorted = jnp.where(sorted_expert < experts, of_sorted, blocks * block)
    rows = jnp.zeros(count, jnp.int32).at[order].set(of_sorted, unique_indices=True).reshape(tokens, slots)

    of_block = search(ends, jnp.arange(blocks, dtype=jnp.int32), side="right").astype(jnp.int32)
    of_block = jnp.minimum(of_block, experts - 1)
    row = jnp.arange(blocks * block, dtype=jnp.int32)
    mine = jnp.repeat(of_block, block)
    place = starts[mine] + row - first[mine] * block  # in the sorted order
    held = (place < starts[mine + 1]) & (row < ends[-1] * block)
    of_row = jnp.where(held, order[jnp.minimum(place, count - 1)], count)
    return Layout(rows, of_row, of_block, ends, ends[-1])
