"""`recurrence` on Hopper GPUs: what goes from chunk to chunk in two Mosaic GPU kernels, the rest in XLA, for WINDOW
chunks of every head at once (xla.py has the equations). Off a GPU the kernels run interpreted (jax 0.12 or newer).

XLA makes of each chunk, all of them side by side, what depends on no state: the pairs of its queries and keys, the
inverse, and with it W and U0, so that U = U0 - W S. The kernels (gpu_kernels.py) go through the chunks. Backward the
forward kernel runs again and leaves the states; the other one goes back; then XLA makes the gradients of all chunks
side by side. Between windows a pair of states is kept. Sums over the completions of a prompt run in the order of the
row.

Queries, keys and what is multiplied with states are rounded to the values' type; sums, states, inverses, W and U0
before that are fp32.

Legend: N chunks of a window, B rows, C tokens per chunk, h key heads, r value heads of each, G = h r, K key size, V
value size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence import xla
from jaxrl.kernels.recurrence.chunks import SAVES, WINDOW, Chunks, tokens_per_chunk
from jaxrl.kernels.recurrence.gpu_call import Call, call_of
from jaxrl.types import custom_vjp


class Made(NamedTuple):
    """The inputs of the kernels for one window: xla.Prepared by value head, and q and k.

    Attributes:
      q, k: [N, B, C, h, K], in the values' dtype. The rest is fp32.
      reads: [N, B, G, C, K], None without the delta.
      writes: [N, B, G, V, C].
      attended: [N, B, G, C, C].
      gates: [N, B, G, 2, C], `faded` and `left` of xla.Prepared.
      ends: [N, B, G], its `end`.
    """

    q: jax.Array
    k: jax.Array
    reads: jax.Array | None
    writes: jax.Array
    attended: jax.Array
    gates: jax.Array
    ends: jax.Array


def recurrence(q, k, v, g, beta, chunks: Chunks, state=None, *, delta: bool = True, interpret=None):
    """Computes api.recurrence by the Mosaic GPU kernels: returns (out [B, L, G, V] in v's dtype, last state [B, G, K,
    V]).

    q, k and what is multiplied with a state are rounded to v's dtype; sums and the state are fp32. Padding has output
    0; rows whose chunks do not fit are NaN.

    Args:
      q, k: [B, L, H, K]. v: [B, L, G, V], bfloat16 or float16. g, beta: [B, L, G], log of the decay and factor on what
        is written.
      chunks: of chunks_of, for these rows. state: [B, G, K, V], where rows that continue begin; None = zeros.
      delta: whether what the state returns for a token's key is taken off before its value is written.
      interpret: whether the kernels run interpreted; None = where there is no GPU.

    Raises NotImplementedError for GPUs but Hopper, jax below 0.11 (interpreted: 0.12), values of another dtype, keys of
    no multiple of 16 up to 128 numbers, values of no multiple of 64, and chunks too large for shared memory."""
    call = call_of(delta, v.dtype, tokens_per_chunk(v.shape[1]), k.shape[3], v.shape[3], interpret)
    given = xla.by_group(k, v, state)
    out, now = _rule(call, q.astype(v.dtype), k.astype(v.dtype), v, g, beta, given, chunks)
    return xla.in_rows(out, now, chunks)


@custom_vjp(0)
def _rule(call: Call, q, k, v, g, beta, given, chunks):
    """Returns (out [windows, N, B, C, h, r, V], the last states [B, h, r, K, V]).

    given: the states before the rows. What a row continues from is the state before its first window.
    """
    return _forward(call, q, k, v, g, beta, given, chunks)[:2]


def _forward(call, q, k, v, g, beta, given, chunks):
    from jaxrl.kernels.recurrence.gpu_kernels import forward

    stretches, used = xla.in_stretches(WINDOW, q, k, v, g, beta, chunks)

    def window(pair, this):
        (arrays, flags), used = this

        def run(pair):
            made = _made(call, arrays[-1], *arrays[:-1])
            out, after = forward(call, *_operands(made, flags), made.writes, pair, keep=False)
            return after, _by_token(_only(flags, out), arrays[2])

        after, out = jax.lax.cond(used, run, lambda pair: (pair, jnp.zeros_like(arrays[2])), pair)
        return after, (out, pair)

    first = _upright(given)
    (now, _), (out, pairs) = jax.lax.scan(window, jnp.stack([first, jnp.zeros_like(first)]), (stretches, used))
    return out, _upright(now).reshape(given.shape), pairs


def _rule_forward(call, *arguments):
    out, now, pairs = _forward(call, *arguments)
    return (out, now), (arguments, pairs)


def _rule_backward(call, saved, cotangents):
    (q, k, v, g, beta, given, chunks), pairs = saved
    d_out, d_now = cotangents

    def cut(q, k, v, g, beta):
        ((*arrays, enters), flags), used = xla.in_stretches(WINDOW, q, k, v, g, beta, chunks)
        return arrays, (enters, flags, used)

    arrays, pull, (enters, flags, used) = jax.vjp(cut, q, k, v, g, beta, has_aux=True)

    def window(d_pair, this):
        arrays, *rest, used = this
        blank = lambda d_pair, arrays, *_: (d_pair, jax.tree.map(jnp.zeros_like, arrays))  # noqa: E731
        return jax.lax.cond(used, functools.partial(_window_backward, call), blank, d_pair, arrays, *rest)

    last = _upright(d_now)
    d_pair, d_arrays = jax.lax.scan(window, jnp.stack([last, jnp.zeros_like(last)]),
                                    (arrays, enters, flags, pairs, d_out, used), reverse=True)
    return (*pull(d_arrays), _upright(d_pair[0]).reshape(given.shape), None)


_rule.defvjp(_rule_forward, _rule_backward)


def _window_backward(call, d_pair, arrays, enters, flags, pair, d_out):
    """Returns the gradients of the pair before a window and of its arrays, from those of out and of the pair behind."""
    from jaxrl.kernels.recurrence.gpu_kernels import backward, forward

    made, pull = jax.vjp(functools.partial(_made, call, enters), *arrays)
    operands, d_out = _operands(made, flags), _by_head(d_out).swapaxes(3, 4)
    _, _, states, updates = forward(call, *operands, made.writes, pair, keep=True)
    if call.interpret:
        operands, states = jax.lax.optimization_barrier((operands, states))  # the interpreter runs one kernel at a time
    d_updates, d_pair, d_states = backward(call, *operands, d_out, d_pair)
    found = (_only(flags, x) for x in (states, updates, d_updates, d_states))
    return d_pair, list(pull(_gradients(made, d_out, *found)))


# ---- a window


def _by_head(x_NxBxCxhxr):
    """Returns [N, B, G, C, ...]."""
    count, batch, size, heads, repeats, *rest = x_NxBxCxhxr.shape
    x = x_NxBxCxhxr.reshape(count, batch, size, heads * repeats, *rest)
    return jnp.moveaxis(x, 2, 3)


def _by_token(x_NxBxGxVxC, like):
    """Returns [N, B, C, h, r, V], the shape of `like`."""
    return x_NxBxGxVxC.transpose(0, 1, 4, 2, 3).reshape(like.shape)


def _upright(states):
    """Returns [B, G, V, K] of [B, h, r, K, V], or the other way round without h and r apart."""
    x = states if states.ndim == 4 else states.reshape(len(states), -1, *states.shape[3:])
    return x.swapaxes(2, 3)


def _only(flags, x):
    """Returns x [N, B, ...] with zeros for chunks that are not used, of which nothing is written."""
    used = flags[-1] > 0
    return jnp.where(used.reshape(*used.shape, *(1,) * (x.ndim - 2)), x, 0)


def _made(call: Call, enters, *arrays) -> Made:
    """Returns the Made of q, k, v, g and beta of xla.in_stretches."""
    q, k, *_ = arrays
    found = xla.prepared(call.delta, (*arrays, enters), jax.lax.Precision.HIGH)
    flat = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])  # noqa: E731
    reads = flat(found.reads) if call.delta else None
    return Made(q, k, reads, flat(found.writes).swapaxes(3, 4), flat(found.attended),
                jnp.stack([flat(found.faded), flat(found.left)], axis=3), flat(found.end))


def _operands(made: Made, flags):
    """Returns (Laid, Scalars) of gpu_kernels."""
    from jaxrl.kernels.recurrence.gpu_kernels import Laid, Scalars

    (start, saves, sizes), dtype = flags, made.q.dtype
    reads = None if made.reads is None else made.reads.astype(dtype)
    return (Laid(made.q, made.k, reads, made.attended.astype(dtype), made.gates),
            Scalars(made.ends, (start + SAVES * saves).astype(jnp.int32), jnp.sum(sizes > 0, axis=0, dtype=jnp.int32)))


def _gradients(made: Made, d_out, states, updates, d_updates, d_states) -> Made:
    """Returns the gradients of `made` from those of out, the states before chunks, the updates, and the gradients of
    the updates and of the states behind chunks, all of them transposed (gpu_kernels)."""
    acc, dtype = jnp.float32, made.q.dtype
    count, batch, size, heads, key = made.q.shape
    product = lambda how, a, b: jnp.einsum(how, a, b, preferred_element_type=acc)  # noqa: E731

    def scaled(x, found, factor):
        """Returns the gradients of x [N, B, C, h, K] and of the factor [N, B, G, C], from that of their product."""
        grouped = found.reshape(count, batch, heads, -1, size, key)
        d_factor = jnp.sum(xla.by_key(x.astype(acc)) * grouped, axis=-1).reshape(factor.shape)
        d_x = jnp.sum((factor[..., None] * found).reshape(grouped.shape), axis=3)
        return jnp.moveaxis(d_x, 2, 3).astype(dtype), d_factor

    by_token = "nbgvc,nbgvk->nbgck"
    d_q, d_faded = scaled(made.q, product(by_token, d_out, states), made.gates[:, :, :, 0])
    d_k, d_left = scaled(made.k, product(by_token, updates, d_states), made.gates[:, :, :, 1])
    d_reads = None if made.reads is None else -product(by_token, d_updates.astype(dtype), states)
    d_ends = jnp.sum(d_states.astype(acc) * states.astype(acc), axis=(3, 4))
    return Made(d_q, d_k, d_reads, d_updates, product("nbgvi,nbgvj->nbgij", d_out, updates),
                jnp.stack([d_faded, d_left], axis=3), d_ends)
