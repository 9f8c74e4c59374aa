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
    """stages: chunks in the ring. interpret: of plgpu.kernel, None = compiled."""

    delta: bool
    stages: int
    interpret: Any


def call_of(delta: bool, dtype, size: int, key: int, value: int, interpret=None) -> Call:
    """Returns the Call for chunks of `size` tokens. Raises NotImplementedError for what the kernels do not serve.

    interpret: False, True, or what the interpreter is told; None = where this is no GPU.
    """
    check_chip(dtype, interpret)
    return Call(delta, stages_of(delta, size, key, value), interpreted(interpret))


def stages_of(delta: bool, size: int, key: int, value: int) -> int:
    """Returns the chunks in the ring, or raises as `call_of` does."""
    if key % 16 or key > WIDEST or value % ROWS:
        raise NotImplementedError(f"keys of {key} and values of {value} numbers; the Mosaic GPU kernels take keys of "
                                  f"multiples of 16 up to {WIDEST} and values of multiples of {ROWS}")
    stages = (MEMORY - kept(size, key)) // (each := staged(delta, size, key))
    if stages < 1:
        raise NotImplementedError(f"keys of {key} numbers; the Mosaic GPU kernels would take "
                                  f"{kept(size, key) + each >> 10} of {MEMORY >> 10} KiB of shared memory")
    return min(stages, MOST)


def staged(delta: bool, size: int, key: int) -> int:
    """Returns bytes of shared memory of one chunk in the ring, in the wider pass."""
    return (2 + delta) * 2 * size * key + 2 * size * size + 4 * ROWS * size + 4 * 2 * size


def kept(size: int, key: int) -> int:
    """Returns bytes of shared memory beside the ring: the prompt's state, and tiles of what is written."""
    return 4 * ROWS * key + 2 * ROWS * key + (4 + 2) * ROWS * size + (1 << 10)
