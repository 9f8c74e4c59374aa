"""What the Hopper kernels of `recurrence` know without importing Mosaic: the static part of a call, and what they do
not serve."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl.kernels.attention.gpu_chip import ROWS, check_chip, interpreted

MEMORY = 227 << 10  # bytes of shared memory of a block of threads
REGISTERS, PRODUCER_REGISTERS = 240, 24
MOST = 3            # chunks in the ring
WIDEST = 128        # keys: the state is 64 x K fp32 numbers in the registers of 128 threads; 256 spill


class Call(NamedTuple):
    """The static part of a call: whether the rule has a delta, chunks in the ring, interpret of plgpu.kernel (None =
    compiled)."""

    delta: bool
    stages: int
    interpret: Any


def call_of(delta: bool, dtype, size: int, key: int, value: int, interpret=None) -> Call:
    """Returns the Call for chunks of `size` tokens.

    Args:
      dtype: of the values. key, value: sizes of a head.
      interpret: False, True, or what the interpreter is told; None = where this is no GPU.

    Raises NotImplementedError for GPUs but Hopper, jax below 0.11 (interpreted: 0.12), dtypes but bfloat16 and float16,
    and as `stages_of` does."""
    check_chip(dtype, interpret)
    return Call(delta, stages_of(delta, size, key, value), interpreted(interpret))


def stages_of(delta: bool, size: int, key: int, value: int) -> int:
    """Returns the chunks in the ring, at most MOST, for chunks of `size` tokens and heads of key x value numbers.

    Raises NotImplementedError for keys that are no multiple of 16 up to WIDEST, values that are no multiple of ROWS,
    and where not one chunk fits into shared memory."""
    if key % 16 or key > WIDEST or value % ROWS:
        raise NotImplementedError(f"keys of {key} and values of {value} numbers; the Mosaic GPU kernels take keys of "
                                  f"multiples of 16 up to {WIDEST} and values of multiples of {ROWS}")
    stages = (MEMORY - kept(size, key)) // (each := staged(delta, size, key))
    if stages < 1:
        raise NotImplementedError(f"keys of {key} numbers; the Mosaic GPU kernels would take "
                                  f"{kept(size, key) + each >> 10} of {MEMORY >> 10} KiB of shared memory")
    return min(stages, MOST)


def staged(delta: bool, size: int, key: int) -> int:
    """Returns bytes of shared memory of one chunk of `size` tokens in the ring, in the wider pass. key: size of a key.
    """
    return (2 + delta) * 2 * size * key + 2 * size * size + 4 * ROWS * size + 4 * 2 * size


def kept(size: int, key: int) -> int:
    """Returns bytes of shared memory beside the ring: the prompt's state, and tiles of what is written.

    size: tokens of a chunk. key: size of a key."""
    return 4 * ROWS * key + 2 * ROWS * key + (4 + 2) * ROWS * size + (1 << 10)
