"""Sizes of the kernels for packed rows. Chosen from what fits and from arithmetic, not by timing.

On TPUs training works on tiles of TILE x TILE scores, the unit that is skipped: 16 documents in a row of 16k cost 1.1
to 1.3 times their own causal areas at 128, 1.25 to 1.6 times at 256. Around it, a step of the kernel's grid costs a few
hundred nanoseconds whatever it does, so a step reads STREAM tiles of the side that passes by and serves several heads.

Hopper's sizes are bound by shared memory (227 KiB) and registers.
"""

from __future__ import annotations

from jaxrl.kernels.attention import gpu_chip
from jaxrl.kernels.attention.gpu_chip import Sizes
from jaxrl.kernels.attention.tpu_parts import VMEM

TILE = 128              # queries and keys of one tile: a vector register's lanes, the systolic array of v5e and v5p
STREAM = 4              # tiles that one step reads, twice as many of rows longer than LONG
LONG = 1 << 16
HEADS = 16              # query heads of one step, at most: each is unrolled in the kernel's code

GPU = {  # by kernel and head size
    "forward": {64: Sizes(128, 4), 128: Sizes(128, 2), 192: Sizes(64, 2), 256: Sizes(64, 2)},
    "queries": {64: Sizes(128, 3), 128: Sizes(128, 2), 192: Sizes(64, 2), 256: Sizes(64, 2, consumers=1)},
    "keys": {64: Sizes(64, 4), 128: Sizes(64, 2), 256: Sizes(64, 2, consumers=1, parts=2)},
}


BLOCKS = 3 * gpu_chip.MULTIPROCESSORS  # of threads, for which `dk` and `dv` share query heads out where there are fewer


def key_shares(blocks: int, per_group: int, sizes: Sizes) -> int:
    """Returns into how many equal shares the query heads of a key-value head are dealt by the kernel of dk and dv.

    Each share is a block of threads of its own. The number is the smallest that makes at least BLOCKS of them, else one
    head a share; 1 where a head is in parts (sizes.parts), which leave no room for a sum in fp32. Causal rows need it
    most, since the first keys' tile costs twice the mean.

    blocks: blocks of threads that one share would make. per_group: query heads per key-value head. sizes: the kernel's.
    """
    if sizes.parts > 1:
        return 1
    fits = [n for n in range(1, per_group + 1) if per_group % n == 0 and blocks * n >= BLOCKS]
    return fits[0] if fits else per_group


def tiles_of(length: int) -> int:
    """Returns the tiles that pass per step on a side of `length` tokens."""
    return min(STREAM if length <= LONG else 2 * STREAM, -(-length // TILE))


def groups_per_step(kernel: str, groups: int, per_group: int, size: int, itemsize: int, tiles: int, cores: int) -> int:
    """Returns the number of key-value heads of one step: the largest divisor of `groups` with which every core has a
    step, a step has at most HEADS query heads, and its buffers take at most half of VMEM; else 1.

    Args:
      kernel: forward, queries or keys (the gradients of one side).
      groups: key-value heads of the model on one device.
      per_group: query heads per key-value head. size: of a head. itemsize: bytes of an input's number.
      tiles: of the side that passes by, per step. cores: over which the blocks of heads are spread.
    """
    fits = [n for n in range(1, groups // cores + 1) if groups % n == 0 and n * per_group <= HEADS
            and _bytes(kernel, n, per_group, size, itemsize, tiles) <= VMEM // 2]
    return fits[-1] if fits else 1


def _bytes(kernel, groups, per_group, size, itemsize, tiles) -> int:
    """Returns two buffers of every block, and the accumulators."""
    kv = groups * -(-size // 128) * 128 * TILE  # lanes come in 128s
    q = kv * per_group
    if kernel == "forward":
        return 2 * itemsize * (2 * q + 2 * kv * tiles) + 4 * q
    if kernel == "queries":
        return 2 * itemsize * (3 * q + 2 * kv * tiles) + 4 * q
    return 2 * itemsize * (2 * q * tiles + 4 * kv) + 8 * kv
