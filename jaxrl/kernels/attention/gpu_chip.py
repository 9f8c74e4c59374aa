"""What both ops' kernels for Hopper GPUs know without importing Mosaic: whether they can run, and static parts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from jaxrl.kernels.platform import platform

OLDEST = (0, 11)       # jax
OLDEST_INTERPRETER = (0, 12)
MULTIPROCESSORS = 132  # of an H100 or H200
ROWS = 64              # of a matrix product of one warpgroup
HIDDEN = -1e30         # the score of a hidden key: finite, so that a row of hidden keys stays finite


class Sizes(NamedTuple):
    """The tile sizes and registers of a GPU kernel for one head size."""

    block: int               # keys, or queries, of a tile in the ring
    stages: int              # tiles in the ring
    consumers: int = 2       # warpgroups of 64 rows per tile of the side that stays
    parts: int = 1           # into which the head is split, a warpgroup each
    registers: int = 240     # of a consumer's thread
    producer_registers: int = 24


@dataclasses.dataclass(frozen=True)
class Op:
    """The static part of an attention call on GPUs.

    scale: factor on the scores. softcap, window: 0 = none. segments: whether tokens have segment ids. in_registers:
    whether `accumulate` keeps its operand in registers. count: whether executed blocks are counted, for tests. reach:
    whether queries have a reach."""

    scale: float
    softcap: float
    window: int
    segments: bool
    in_registers: bool
    count: bool = False
    reach: bool = False


def sizes_of(table: dict[int, Sizes], head_size: int) -> Sizes:
    """Returns the Sizes for the smallest listed head size that is at least `head_size`. Raises ValueError if there
    is none."""
    return table[min(size for size in table if size >= head_size)]


def check_chip(dtype, interpret=None) -> None:
    """Raises NotImplementedError where Mosaic GPU kernels for Hopper cannot run: jax too old, another GPU, or a dtype
    other than bfloat16 and float16. interpret: as `interpreted` takes it."""
    version = jax.__version_info__[:2]
    if version < OLDEST:
        raise NotImplementedError(f"jax {jax.__version__}; the Mosaic GPU kernels need jax 0.11 or newer")
    if interpreted(interpret) and version < OLDEST_INTERPRETER:
        raise NotImplementedError(
            f"jax {jax.__version__}; off a GPU the Mosaic GPU kernels need jax 0.12's interpreter")
    if dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{dtype} inputs; the Mosaic GPU kernels take bfloat16 and float16")
    if interpreted(interpret):
        return
    kinds = {d.compute_capability for d in jax.devices() if d.platform == "gpu"}
    if kinds and kinds != {"9.0"}:
        raise NotImplementedError(
            f"compute capability {', '.join(sorted(kinds))}; the Mosaic GPU kernels are for Hopper (9.0)")


def interpreted(interpret):
    """Returns the argument `interpret` of plgpu.kernel: None to compile, or the interpreter's parameters.

    interpret: True, False or such parameters; None = interpret where this is no GPU."""
    if interpret is None:
        interpret = platform() != "gpu"
    if interpret is True:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return getattr(plgpu, "InterpretGPUParams", bool)() or True
    return interpret or None
