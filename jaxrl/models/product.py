"""The matrix product of a linear layer, with the gradient of its weights arranged for the platform.

Legend: x [..., *I], kernel [*I, *O], y [..., *O].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrl.kernels.low_precision import DEFAULT, GRADIENT, INPUT, SCHEMES, WEIGHT, contracted
from jaxrl.kernels.platform import platform
from jaxrl.types import custom_vjp


def product(x, kernel, inputs: int, scheme: str = DEFAULT):
    """Contracts the last `inputs` axes of x with the first of `kernel`, in their dtype; of numbers rounded as a scheme
    of kernels.low_precision says (DEFAULT: not rounded). Returns y [..., *O] of x [..., *I] and kernel [*I, *O].

    Gradients go straight through the rounding: that of x is the product of rounded g and kernel, each with scales of
    its own; that of the kernel is one of g and x as they are, but where the scheme says otherwise.

    XLA for CPUs transposes the left operand of the product that gives the kernel's gradient, on one core and fused into
    whatever made it. There the narrower one is put on the left, and the small result transposed instead (an MLP of 256
    x 704 on 1,728 tokens, forward and backward on 2 cores: 58 -> 44 ms).
    """
    if scheme != DEFAULT:
        return _low(x, kernel, inputs, scheme)
    return _narrow(x, kernel, inputs) if platform() == "cpu" else _plain(x, kernel, inputs)


def _plain(x, kernel, inputs):
    return jax.lax.dot_general(x, kernel, ((tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))), ((), ())))


_narrow = jax.custom_vjp(_plain, nondiff_argnums=(2,))


def _forward(x, kernel, inputs):
    return _plain(x, kernel, inputs), (x, kernel)


def _over_outputs(g, kernel, inputs):
    return tuple(range(g.ndim - kernel.ndim + inputs, g.ndim)), tuple(range(inputs, kernel.ndim))


def _backward(inputs, saved, g):
    x, kernel = saved
    grad_x = jax.lax.dot_general(g, kernel, (_over_outputs(g, kernel, inputs), ((), ())))
    return grad_x, _of_kernel(x, kernel, inputs, g)


def _of_kernel(x, kernel, inputs, g):
    lead, outputs = x.ndim - inputs, kernel.ndim - inputs
    over_tokens = (tuple(range(lead)), tuple(range(lead))), ((), ())
    if platform() != "cpu" or math.prod(kernel.shape[:inputs]) <= math.prod(kernel.shape[inputs:]):
        return jax.lax.dot_general(x, g, over_tokens)
    return jnp.moveaxis(jax.lax.dot_general(g, x, over_tokens), range(outputs), range(-outputs, 0))


_narrow.defvjp(_forward, _backward)


@custom_vjp(2, 3)
def _low(x, kernel, inputs, scheme):
    over = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return contracted(scheme, x, kernel, *over, (INPUT, WEIGHT)).astype(x.dtype)


def _low_forward(x, kernel, inputs, scheme):
    return _low(x, kernel, inputs, scheme), (x, kernel)


def _low_backward(inputs, scheme, saved, g):
    x, kernel = saved
    grad_x = contracted(scheme, g, kernel, *_over_outputs(g, kernel, inputs), (GRADIENT, WEIGHT)).astype(x.dtype)
    if SCHEMES[scheme].weights:
        tokens = tuple(range(x.ndim - inputs))
        return grad_x, contracted(scheme, x, g, tokens, tokens, (INPUT, GRADIENT)).astype(kernel.dtype)
    return grad_x, _of_kernel(x, kernel, inputs, g)


_low.defvjp(_low_forward, _low_backward)


def times(x, factor: float):
    """Returns x times a number of a config, which is rounded to x's dtype first; x itself where it is 1, as for most
    models.
    """
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
