"""What Mosaic's kernels for GPUs are told of an activation: its derivative as single operations that it lowers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

# Of an activation and its derivative: what was lowered for Hopper.
KNOWN = {
    "add", "add_any", "sub", "mul", "div", "neg", "max", "min", "clamp", "exp", "logistic", "tanh",
    "integer_pow", "square", "one_minus_square", "select_n", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not",
    "convert_element_type", "broadcast_in_dim", "copy", "stop_gradient",
}


@functools.cache
def unknown_of(activation, inputs: int = 2) -> list[str]:
    """Returns the sorted names of primitives outside KNOWN that an activation of `inputs` arrays and its derivative
    use."""
    def both(d, *inner):
        out, back = jax.vjp(activation, *inner)
        return out, back(d)

    def names(jaxpr):
        for eqn in jaxpr.eqns:
            inner = list(jaxprs_in_params(eqn.params))
            yield from [name for j in inner for name in names(j)] if inner else [eqn.primitive.name]

    tile = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return sorted(set(names(jax.make_jaxpr(both)(*(tile,) * (inputs + 1)).jaxpr)) - KNOWN)


def laid_open(function, *arguments):
    """Returns function(*arguments) with calls within it inlined and gradients added by `+` (Mosaic does not lower
    add_any)."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)

    def run(jaxpr, consts, values):
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else known[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            inner, given = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr"), [read(v) for v in eqn.invars]
            if inner is not None:
                out = run(inner.jaxpr, inner.consts, given)
            elif eqn.primitive.name == "add_any":
                out = given[0] + given[1]
            else:
                out = eqn.primitive.bind(*given, **eqn.params)
            known |= zip(eqn.outvars, out if isinstance(out, (list, tuple)) else [out], strict=True)
        return [read(v) for v in jaxpr.outvars]

    return jax.tree.unflatten(jax.tree.structure(shape), run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments)))
