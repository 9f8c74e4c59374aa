"""`experts` on Hopper GPUs: Pallas kernels on Mosaic GPU over the blocks that hold rows (gpu_kernel.py, which is
imported where it runs). Off a GPU they run interpreted (jax 0.12 or newer)."""

from __future__ import annotations

import functools

from jaxrl.kernels.attention.gpu_chip import check_chip, interpreted
from jaxrl.kernels.experts import grouped, tuned
from jaxrl.kernels.experts.opened import unknown_of
from jaxrl.kernels.experts.walk import Implementation
from jaxrl.kernels.low_precision import DEFAULT

UNIT = 64


def serving(x_TxD, weights, *, matmul=DEFAULT, activation, interpret=None) -> tuple[Implementation, int]:
    """Returns (the implementation for such tokens and weights, rows of its blocks).

    Args:
      x_TxD: tokens. weights: gate (if there is one), up and down [E, I, O], then biases if any. Shapes and x's dtype
        are read.
      matmul: scheme of kernels.low_precision. activation: (gate, up) -> hidden, or up -> hidden without a gate.
      interpret: False, True, or what the interpreter is told; None = where this is no GPU.

    Raises NotImplementedError for GPUs but Hopper, jax below 0.11 (interpreted: 0.12), dtypes but bfloat16 and float16,
    a matmul but the default, sizes that are no multiple of UNIT, and an activation of other operations than
    opened.KNOWN."""
    check_chip(x_TxD.dtype, interpret)
    size, width = weights[0].shape[1:]
    if matmul != DEFAULT:
        raise NotImplementedError(f"train.matmul={matmul}; the Mosaic GPU kernels multiply numbers as they are")
    if size % UNIT or width % UNIT:
        raise NotImplementedError(f"experts of {size} x {width}; the Mosaic GPU kernels take multiples of {UNIT}")
    if unknown := unknown_of(activation, min(len(weights), 3) - 1):
        raise NotImplementedError(f"an activation of {', '.join(unknown)}; the Mosaic GPU kernels take none of these")
    return _made(interpreted(interpret)), tuned.KERNEL_BLOCK


@functools.cache
def _made(interpret) -> Implementation:
    def rows(*arguments):
        from jaxrl.kernels.experts import gpu_kernel

        return gpu_kernel.rows(interpret, *arguments)

    def sums(*arguments):
        from jaxrl.kernels.experts import gpu_kernel

        return gpu_kernel.sums(interpret, *arguments)

    return grouped.implementation(grouped.Kernels(rows, sums, fresh=True))._replace(room=tuned.GPU_ROOM)
