"""Sizes of the Hopper kernels by head size. Chosen from shared memory (227 KiB) and registers; not timed on a GPU yet."""

from __future__ import annotations

from typing import NamedTuple


class Forward(NamedTuple):
    """Keys per block, tiles in the ring, and registers per thread of consumers and producer."""

    keys: int
    stages: int
    registers: int = 240
    producer_registers: int = 24


class Queries(NamedTuple):
    """dq: warpgroups of 64 queries per tile, keys per block, tiles in the ring, registers."""

    consumers: int
    keys: int
    stages: int
    registers: int = 240
    producer_registers: int = 24


class Keys(NamedTuple):
    """dk and dv: warpgroups of 64 keys per tile, parts that the head is split into (a warpgroup each), queries per
    block, tiles in the ring, registers."""

    consumers: int
    parts: int
    queries: int
    stages: int
    registers: int = 240
    producer_registers: int = 24


class Decode(NamedTuple):
    """Keys per block, tiles in the ring, and registers."""

    keys: int
    stages: int
    registers: int = 224
    producer_registers: int = 32


MULTIPROCESSORS = 132  # of an H100 or H200
FORWARD = {64: Forward(128, 4), 128: Forward(128, 2), 192: Forward(64, 2), 256: Forward(64, 2)}
QUERIES = {64: Queries(2, 128, 3), 128: Queries(2, 128, 2), 192: Queries(2, 64, 2), 256: Queries(1, 64, 2)}
KEYS = {64: Keys(2, 1, 64, 4), 128: Keys(2, 1, 64, 2), 192: Keys(1, 2, 64, 2), 256: Keys(1, 2, 64, 2)}

PART = 16  # blocks of keys of a part of what slots share, at least
DECODE = {64: Decode(128, 4), 128: Decode(64, 4), 256: Decode(64, 2)}


def sizes(table, head_size: int):
    """The entry of the smallest listed head size that is not below `head_size`."""
    return table[min(size for size in table if size >= head_size)]
