"""Public entry of the op.

Legend: T tokens, K slots per token, E experts, D hidden size, F an expert's width.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.kernels.experts import blocks, gpu, reference, tpu, tuned, walk
from jaxrl.kernels.experts.exchange import Exchange
from jaxrl.kernels.fallback import first_that_serves, trusted
from jaxrl.kernels.low_precision import DEFAULT
from jaxrl.kernels.platform import platform

# Of a call, what computes on sorted rows, and in blocks of how many; NotImplementedError(reason) where it cannot serve.
IMPLEMENTATIONS = {"tpu": tpu.serving, "gpu": gpu.serving, "blocks": blocks.serving}
ORDERS = {"cpu": ("blocks",), "gpu": ("gpu", "blocks"), "tpu": ("tpu", "blocks")}


def experts(x_TxD, ids_TxK, gates_TxK, gate_ExDxF, up_ExDxF, down_ExFxD, *, activation, implementation="auto",
            axis=None, matmul=DEFAULT, biases=()):
    """Returns the output of a layer of experts: y[t] = sum over k of gates[t, k] * activation(x[t] @ gate[e], x[t] @
    up[e]) @ down[e] with e = ids[t, k]; each of the three products plus a bias of the expert where there are some.
    Without gate weights the activation is of x[t] @ up[e] alone.

    Products are summed in fp32 (float64 where x is), the activation is computed in it and rounded to x's dtype, and
    what experts return is weighted and added in it in the order of slots. No token is dropped, whatever the routing,
    and memory does not depend on the routing. A token's output does not depend on the other tokens (on CPUs: to
    the bit, within one program), unless `matmul` is a scheme that is not by_row. Gradients flow to x, gates and weights
    (to weights only where they are asked for); gate and up are computed again in the backward pass, and nothing but the
    arguments is kept for it. On a mesh, call it within a shard_map: its loops follow the routing of the tokens that it
    is given.

    With `axis` the experts lie over that mesh axis of the shard_map, E on each device, and ids count them all: the
    tokens of all its devices are gathered, chunk by chunk, and what comes of them is summed, in x's dtype, where they
    came from (exchange.py).

    Args:
      x_TxD: fp32, bf16, fp16 or float64.
      ids_TxK: integers, different within a token, in the order of slots. One outside 0 <= id < E is an empty slot (an
        expert of another device, padding), which adds 0, is never computed, and whose gate gets gradient 0.
      gates_TxK: fp32 or float64; the weight of each slot.
      gate_ExDxF (or None), up_ExDxF, down_ExFxD: in x's dtype; as are their gradients, summed in fp32 or better.
      activation: (gate, up) -> hidden, or up -> hidden without a gate, elementwise; a function of a module, since it is
        compared by identity.
      matmul: the scheme that rounds what is multiplied (kernels.low_precision), but for the weights' gradients. Scales
        of whole arrays are of an expert's weights and of a block of tokens here.
      implementation: auto (the first of the platform's ORDERS that serves the call), reference (every expert on every
        token, all kept for the backward pass; no gradient where `matmul` is a scheme), or a name in IMPLEMENTATIONS:
        blocks (sorted, in XLA), tpu or gpu (kernels; blocks runs if they cannot serve the call). A refusal is logged
        once.
      axis: name of the mesh axis of the experts; None: all of them are here.
      biases: () or, with a gate, those of gate [E, F], up [E, F] and down [E, D], in x's dtype; never rounded.

    Returns:
      y_TxD in x's dtype; 0 for a token without a slot. NaN for a whole chunk of tokens where ids repeat within them so
      that they need more rows than distinct ones could (only where K > E; elsewhere repeated ids just add up).

    Raises:
      ValueError: unknown implementation; shapes or dtypes that do not fit."""
    weights = {"gate": gate_ExDxF, "up": up_ExDxF, "down": down_ExFxD}
    weights = {name: w for name, w in weights.items() if w is not None}
    check(x_TxD, ids_TxK, gates_TxK, weights, biases)
    names = order(implementation)
    if not ids_TxK.size or not x_TxD.size:
        return jnp.zeros_like(x_TxD)
    arrays, exchange = (x_TxD, ids_TxK.astype(jnp.int32), gates_TxK), Exchange(axis)
    weights = (*weights.values(), *biases)
    if names == ("reference",):
        return reference.experts(*arrays, weights, activation, exchange, matmul)
    run, block = first_that_serves("experts", names, lambda name: IMPLEMENTATIONS[name](
        x_TxD, weights, matmul=matmul, activation=activation))
    own, size, width = up_ExDxF.shape
    chunk = tuned.chunk(ids_TxK.shape[1], own * exchange.size, run.room, own, size, width, x_TxD.dtype.itemsize)
    return walk.experts(walk.Call(run, activation, block, chunk, exchange, matmul), *arrays, *weights)


def order(implementation: str) -> tuple[str, ...]:
    """Returns the names of implementations to try, in order; the last one serves every call.

    "auto" gives the platform's ORDERS without kernels that are distrusted, tpu and gpu give themselves and blocks.
    Raises ValueError for an unknown name."""
    if implementation == "auto":
        return trusted("experts", ORDERS[platform()])
    if implementation not in ("reference", *IMPLEMENTATIONS):
        raise ValueError(f"experts: implementation={implementation!r}; choose auto, reference, "
                         f"{', '.join(IMPLEMENTATIONS)}")
    return (implementation, "blocks") if implementation in ("tpu", "gpu") else (implementation,)


def check(x, ids, gates, weights, biases=()) -> None:
    """Raises ValueError where shapes or dtypes of api.experts' arguments do not fit; names the argument.

    x [T, D] float; ids [T, K] int; gates [T, K] float32 or float64. weights: {"gate", "up", "down"}, or without "gate",
    of one number of experts and in x's dtype. biases: () or, with a gate only, those of the three in x's dtype."""
    def refuse(name, value, remedy):
        raise ValueError(f"experts: {name} is {value.dtype}{list(value.shape)}; {remedy}")

    if x.ndim != 2 or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        refuse("x", x, "give floating-point tokens [T, D]")
    if ids.ndim != 2 or len(ids) != len(x) or not jnp.issubdtype(ids.dtype, jnp.integer):
        refuse("ids", ids, f"give integers [T={len(x)}, K]")
    if gates.shape != ids.shape or gates.dtype not in (jnp.float32, jnp.float64):
        refuse("gates", gates, f"give float32 or float64 {list(ids.shape)}, one for each id")
    count, width, size = weights["down"].shape if weights["down"].ndim == 3 else (0, 0, 0)
    for name, w in weights.items():
        want = (count, width, x.shape[1]) if name == "down" else (count, x.shape[1], width)
        if w.ndim != 3 or w.shape != want or not count:
            refuse(name, w, f"gate and up are [E, D={x.shape[1]}, F], down is [E, F, D={x.shape[1]}]")
        if w.dtype != x.dtype:
            refuse(name, w, f"cast it to x's {x.dtype}")
    wanted = [(count, width), (count, width), (count, x.shape[1])]
    if biases and ([b.shape for b in biases] != wanted or "gate" not in weights):
        raise ValueError(f"experts: biases of shapes {[b.shape for b in biases]}; give those of gate, up and down, "
                         f"{wanted}")
    for name, b in zip(weights, biases, strict=False):
        if b.dtype != x.dtype:
            refuse(f"{name}'s bias", b, f"cast it to x's {x.dtype}")
