"""Sizes of the decoding kernels. Chosen from what fits, not by timing."""

from __future__ import annotations

from jaxrl.kernels.attention.gpu_chip import Sizes

CACHE_BYTES = 1 << 18   # TPU: keys of one step
PART = 16               # GPU: blocks of keys of a part of what slots share, at least
GPU = {size: Sizes(*sizes, registers=224, producer_registers=32)
       for size, sizes in {64: (128, 4), 128: (64, 4), 256: (64, 2)}.items()}


def cache_block(length: int, width: int, itemsize: int) -> int:
    """Returns the number of cache positions that a TPU's step reads: CACHE_BYTES of keys, in 128s, within 128..512.

    Args:
      length: positions of the cache; returned if it is not longer than the block.
      width: numbers of one position's keys.
      itemsize: bytes of each.
    """
    wanted = CACHE_BYTES // (width * itemsize) // 128 * 128
    block = min(512, max(128, wanted))
    return length if length <= block else block
