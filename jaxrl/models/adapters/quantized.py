"""Kernels of frozen linear maps in few bits (QLoRA, Dettmers et al., arXiv 2305.14314, section 3). In the place of the
kernel [*I, *O] of a module stand two leaves, `kernel/{codes, scale}`:

    int8    codes [*I, *O] int8, -127 to 127;  scale [*O] = max |W| over the inputs / 127;     W = codes * scale
    nf4     codes [I/64, 32, *O] uint8, two inputs a byte, the first in its upper four bits;
            scale [I/64, *O] = max |W| of 64 inputs of one output;                             W = NF4[code] * scale

with the inputs flat in I. Scales are fp32 and are not quantised again, so that nf4 takes 4.5 bits a number. A byte and
its block lie along the inputs as bitsandbytes has them where 64 divides I. Codes and scales have a block's axis in
common, which a mesh splits by whole blocks or leaves whole: no block is cut.

W is computed in fp32 where it is used, cast to the compute dtype, and not kept for the backward pass. (Unrolled
layers on CPUs save nothing by that: XLA's scheduler there computes every W before it is needed. Scanned ones do.)

Legend: I, O numbers of inputs and of outputs; *I, *O the axes of them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import parameters
from jaxrl.models.placement import gathered
from jaxrl.types import custom_vjp

KINDS = ("int8", "nf4")
BLOCK = 64
INIT = "quantized"  # of the rows of codes and scales
LEAVES = ("codes", "scale")
NF4 = np.array([  # quantiles of a normal distribution over the largest; arXiv 2305.14314, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)
_BETWEEN = (NF4[1:] + NF4[:-1]) / 2


def _axes(kind: str, axes, inputs: int) -> tuple[tuple, tuple]:
    """Returns the logical axes of codes and of scale for those of a kernel."""
    if kind == "int8":
        return tuple(axes), tuple(axes[inputs:])
    return (axes[0], None, *axes[inputs:]), (axes[0], *axes[inputs:])


def entries_of(entry: parameters.Entry, kind: str) -> tuple[parameters.Entry, ...]:
    """Returns the parameter table's entries of codes and scale, in this order, that replace a kernel's entry.

    kind: int8 or nf4; for nf4 the inputs must be a multiple of BLOCK.
    """
    shape, axes = entry.kind
    lead, outputs, blocks = entry.stacked, shape[entry.inputs:], math.prod(shape[:entry.inputs]) // BLOCK
    shapes = (shape, outputs) if kind == "int8" else ((blocks, BLOCK // 2, *outputs), (blocks, *outputs))
    out = []
    for leaf, own, names in zip(LEAVES, shapes, _axes(kind, axes, entry.inputs), strict=True):
        codes = leaf == "codes"
        row = parameters.Row(f"{entry.row.path}/{leaf}", names, "", entry.inputs if codes else 0, init=INIT,
                             share=2 if codes and kind == "nf4" else 1, adapts=False)
        out.append(parameters.Entry(row, (*entry.path, leaf), entry.shape[:lead] + own, entry.axes[:lead] + names, (),
                                    lead))
    return tuple(out)


def dtype_of(entry: parameters.Entry, kind: str):
    """Returns the dtype of an entry of `entries_of`: fp32 of scales, int8 of int8 codes, uint8 of nf4 codes."""
    return jnp.float32 if entry.path[-1] == "scale" else jnp.int8 if kind == "int8" else jnp.uint8


def quantized(kernel, kind: str, inputs: int, stacked: int = 0) -> dict[str, jax.Array]:
    """Quantises a kernel [*stacked, *I, *O] to {codes, scale}: nearest codes, computed in fp32; int8 rounds halves to
    even codes.

    int8: codes [*stacked, *I, *O] int8, scale [*stacked, *O] fp32. nf4: codes [*stacked, I/64, 32, *O] uint8, scale
    [*stacked, I/64, *O] fp32.

    Pure, jittable. kind: int8 or nf4; for nf4 BLOCK must divide the inputs. inputs: number of the axes *I. stacked:
    number of leading axes, each of whose kernels is quantised by itself.
    """
    work = functools.partial(_int8 if kind == "int8" else _nf4, inputs=inputs)
    for _ in range(stacked):
        work = jax.vmap(work)
    return work(kernel)


def _over(x, scale):
    return x / jnp.where(scale == 0, 1, scale)


def _int8(kernel, inputs):
    w = kernel.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w), axis=tuple(range(inputs)), keepdims=True) / 127
    codes = jnp.clip(jnp.round(_over(w, scale)), -127, 127).astype(jnp.int8)
    return {"codes": codes, "scale": scale.reshape(kernel.shape[inputs:])}


def _nf4(kernel, inputs):
    outputs = kernel.shape[inputs:]
    w = kernel.astype(jnp.float32).reshape(-1, BLOCK, *outputs)
    scale = jnp.max(jnp.abs(w), axis=1)
    w = _over(w, scale[:, None])
    codes = jnp.zeros_like(w, jnp.uint8)
    for x in _BETWEEN:
        codes += (w > x).astype(jnp.uint8)
    codes = codes.reshape(-1, BLOCK // 2, 2, *outputs)
    return {"codes": codes[:, :, 0] << 4 | codes[:, :, 1], "scale": scale}


def dequantized(node, sizes: tuple[int, ...], stacked: int = 0) -> jax.Array:
    """Returns the fp32 kernel [*stacked, *I, *O] that {codes, scale} represent; the dtype of the codes tells int8
    (int8) from nf4 (uint8). sizes: of the axes *I. stacked: number of leading axes.
    """
    def one(codes, scale):
        if codes.dtype == jnp.int8:
            return codes.astype(jnp.float32) * jax.lax.broadcast_to_rank(scale, codes.ndim)
        both = jnp.stack([codes >> 4, codes & 15], axis=2)
        w = jnp.asarray(NF4)[both.reshape(codes.shape[0], BLOCK, *codes.shape[2:])] * scale[:, None]
        return w.reshape(*sizes, *codes.shape[2:])

    for _ in range(stacked):
        one = jax.vmap(one)
    return one(*(node[leaf] for leaf in LEAVES))


def whole(value, entry) -> jax.Array:
    """Returns the kernel of an entry of the base: as it is, or dequantised to fp32 if `value` is {codes, scale}."""
    sizes = entry.kind[0][:entry.inputs]
    return dequantized(value, sizes, entry.stacked) if isinstance(value, dict) else value


_FIXED = parameters.CORRECTION.split("/")[-2:]


def cast(params, dtype):
    """Casts floating-point leaves to `dtype`, except scales of codes (W would change) and `fixed` rows (a router would
    choose other experts). Every leaf of the returned tree is a copy.
    """
    def one(path, a):
        own = [getattr(key, "key", None) for key in path[-2:]] in (["kernel", "scale"], _FIXED)
        return jnp.copy(a).astype(a.dtype if own or not jnp.issubdtype(a.dtype, jnp.floating) else dtype)

    return jax.tree_util.tree_map_with_path(one, params)


@custom_vjp(2, 3)
def product(x, node, axes, inputs: int):
    """Computes x @ W in x's dtype, [..., *O] of x [..., *I], with W [*I, *O] dequantised from `node` {codes, scale}.

    Only x has a gradient. W is not kept for the backward pass, which dequantises it again.

    Args:
      axes: logical axis names of W.
      inputs: number of the axes *I.
    """
    w = placed(node, axes, x.shape[x.ndim - inputs:], x.dtype)
    return jax.lax.dot_general(x, w, ((tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))), ((), ())))


def placed(node, axes, sizes, dtype):
    """Returns the dequantised kernel [*I, *O] in `dtype`, sharded as every rank uses it (placement.gathered).

    The mesh exchanges codes and scales, not the kernel's numbers.

    Args:
      node: {codes, scale}.
      axes: logical axis names of the kernel.
      sizes: of the axes *I.
    """
    kind = "int8" if node["codes"].dtype == jnp.int8 else "nf4"
    named = zip(LEAVES, _axes(kind, axes, len(sizes)), strict=True)
    node = {leaf: gathered(node[leaf], own, node[leaf].dtype) for leaf, own in named}
    return gathered(dequantized(node, sizes).astype(dtype), axes, dtype)


def _forward(x, node, axes, inputs):
    return product(x, node, axes, inputs), (node, x.shape[x.ndim - inputs:])


def _backward(axes, inputs, saved, g):
    node, sizes = saved
    node, g = jax.lax.optimization_barrier((node, g))  # else the forward pass' kernel would be kept for this
    w = placed(node, axes, sizes, g.dtype)
    outputs = w.ndim - inputs
    over = tuple(range(g.ndim - outputs, g.ndim)), tuple(range(inputs, w.ndim))
    return jax.lax.dot_general(g, w, (over, ((), ()))), None


product.defvjp(_forward, _backward)
