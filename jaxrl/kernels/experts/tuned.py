"""Sizes of `experts`: rows of a block, tokens of a chunk, tiles of the kernels. The kernels' are chosen from what fits
and from arithmetic, not by timing."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxrl.kernels.attention.tpu_parts import VMEM

BLOCK = 64          # rows of a block in XLA
KERNEL_BLOCK = 128  # of the kernels: the systolic array of v5e and v5p; two warpgroups of Hopper
PER_EXPERT = 320    # slots per expert of a chunk, where there are as many
LEAST = 2048        # tokens of a chunk, where there are as many

GPU_PER_EXPERT, GPU_LEAST = 1024, 16384  # the same of Hopper's kernels, within GPU_ROOM
GPU_ROOM = 4 << 30

TPU_WIDEST = 1024       # columns of a step, at most
TPU_NUMBERS = 3 << 19   # of a weight in one step, at most: the kernel's code is unrolled over them
TPU_SUMS = (1024, 512)  # rows and columns of a weight's gradient that one step adds to

GPU_REGISTERS, GPU_PRODUCER_REGISTERS = 240, 24  # of a thread
GPU = {  # by kernel: columns of a tile, at most, and tiles in the ring
    "hidden": (128, 4), "out": (256, 3), "inner": (128, 2), "dx": (256, 3), "sums": (256, 3),
}
GPU_PARTS = ((128, 2), (64, 3), (128, 1), (64, 1))  # (columns of a product, parts of a tile), the widest first


class GpuSizes(NamedTuple):
    """Sizes of a tile of a result: columns in all, tiles in the ring, columns of each part, parts."""

    width: int
    stages: int
    columns: int
    parts: int


def gpu_sizes(kernel: str, out: int) -> GpuSizes:
    """Returns the GpuSizes of a kernel whose results have `out` columns, a multiple of 64: the widest parts that divide
    it.

    kernel: a key of GPU."""
    widest, stages = GPU[kernel]
    columns, parts = next(p for p in GPU_PARTS if math.prod(p) <= widest and out % math.prod(p) == 0)
    return GpuSizes(columns * parts, stages, columns, parts)


def block_of(platform: str, implementation: str = "auto") -> int:
    """Returns the rows of a block: BLOCK on "cpu" and for the implementations blocks and reference, else KERNEL_BLOCK.

    implementation: "auto" (the platform's first) or a name."""
    return BLOCK if platform == "cpu" or implementation in ("blocks", "reference") else KERNEL_BLOCK


def chunk(slots: int, experts: int, room: int = 0, own: int = 1, size: int = 0, width: int = 0,
          itemsize: int = 2) -> int:
    """Returns the tokens of a chunk, at most: enough for PER_EXPERT rows of an expert, whose weights are read once per
    chunk, and at least LEAST.

    With room more: as many as it holds, up to GPU_PER_EXPERT rows of an expert or, if that is more, GPU_LEAST tokens.
    Never so many that (experts + 1) * tokens * slots exceeds an int32.

    Args:
      slots: of a token. experts: of all devices.
      room: bytes, of `room_of`; 0 = the smaller chunks.
      own: experts here, of hidden size x width with itemsize bytes per number; these four are read with room only."""
    tokens = max(LEAST, -(-PER_EXPERT * experts // slots))
    if room:
        of_a_row = itemsize * (2 * size + 3 * width) + 4 * size  # x, dy, what is inside, dx
        held = (room // of_a_row - own * (KERNEL_BLOCK - 1)) // min(slots, own)
        tokens = max(tokens, min(held, max(GPU_LEAST, -(-GPU_PER_EXPERT * experts // slots))))
    return max(1, min(tokens, (2**31 - 1) // ((experts + 1) * slots)))  # what layout.py sorts stays an int32


def room_of(platform: str, implementation: str = "auto") -> int:
    """Returns the bytes that a chunk's rows may take in the backward pass, where that makes chunks larger; else 0.

    Large chunks avoid half-filled last blocks, weights read again, and sums of gradients read and written in fp32."""
    return GPU_ROOM if platform == "gpu" and implementation in ("auto", "gpu") else 0


def tpu_tasks(size: int, width: int):
    """Returns (columns in, columns out, lefts, weights, sums, outputs) of each of the four kernels on rows, as
    `tpu_columns` takes them, for experts of size x width."""
    return ((size, width, 1, 2, 2, 1), (width, size, 1, 1, 1, 1), (size, width, 2, 3, 3, 4), (width, size, 2, 2, 1, 1))


def tpu_columns(into: int, out: int, lefts: int, weights: int, sums: int, outputs: int, itemsize: int,
                cores: int) -> int:
    """Returns the columns of a step on TPUs, a multiple of 128; `out` if it is below 128; 0 where none fit the memory.

    They are the most, up to TPU_WIDEST and (but for 128) TPU_NUMBERS numbers of a weight, that fit into VMEM, give
    every core a step (if `out` has 128 columns for each) and, where any of these does, divide `out`.

    Args:
      into, out: columns of the operands and of the results. lefts, weights, sums, outputs: how many arrays of each.
      itemsize: bytes of a number. cores: over which the steps are spread."""
    if out < 128:
        return out
    def taken(tile):
        moved = itemsize * (KERNEL_BLOCK * into * lefts + into * tile * weights) + 4 * KERNEL_BLOCK * tile * outputs
        return 2 * moved + 3 * 4 * KERNEL_BLOCK * tile * sums

    most = min(TPU_WIDEST, max(128, out // cores))
    fits = [tile for tile in range(128, most + 1, 128)
            if taken(tile) <= VMEM and into * tile <= max(TPU_NUMBERS, into * 128)]
    whole = [tile for tile in fits if out % tile == 0]
    return (whole or fits or [0])[-1]
