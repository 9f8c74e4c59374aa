"""`recurrence` on TPUs: Pallas kernels of the chunked form (xla.py has its equations). Off a TPU they run interpreted.

A step of the grid is one chunk of some heads of one row; the last axis goes through the chunks of a row, as many as are
used at run time, and the states stay on the chip. How a chunk begins and ends is known before its step (scalar
prefetch). What is read and written lies by chunk and head; XLA gathers it from the rows and back.

The forward pass keeps one pair of states per STRETCH chunks. The backward pass goes through the stretches from the last
one to the first, through each twice: forward from its pair, which leaves the states, the inverses and the updates of
its chunks on the chip, then backward. Sums over the completions of a prompt run in the order of the row.

Legend: B rows, N chunks of a row, C tokens per chunk, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention.tpu_parts import VMEM, WORDS
from jaxrl.kernels.platform import platform
from jaxrl.kernels.recurrence.chunks import SAVES, STRETCH, Chunks, back, gather, into, tokens_per_chunk
from jaxrl.kernels.recurrence.tpu_chunk import GATES
from jaxrl.kernels.recurrence.tpu_passes import USED, Call, Laid, backward, forward
from jaxrl.kernels.recurrence.xla import at_most_zero
from jaxrl.types import custom_vjp

MOST = 4     # value heads of a step; their products are independent, so that one fills what another waits for


def recurrence(q, k, v, g, beta, chunks: Chunks, state=None, *, delta: bool = True, interpret=None):
    """Computes api.recurrence by Pallas TPU kernels: returns (out [B, L, G, V] in v's dtype, last state [B, G, K, V]).

    Sums and the state are fp32 or better. Padding has output 0; rows whose chunks do not fit are NaN.

    Args:
      q, k: [B, L, H, K]. v: [B, L, G, V]. Each of float32 or bfloat16; interpreted, also float64.
      g, beta: [B, L, G], log of the decay and factor on what is written.
      chunks: of chunks_of, for these rows. state: [B, G, K, V], where rows that continue begin; None = zeros.
      delta: whether what the state returns for a token's key is taken off before its value is written.
      interpret: whether the kernels run interpreted; None = off a TPU.

    Raises NotImplementedError for what `check` names."""
    interpret = platform() != "tpu" if interpret is None else bool(interpret)
    (batch, _, heads, key), (groups, value) = k.shape, v.shape[2:]
    call = Call(*heads_of_step(heads, groups // heads), delta, interpret)
    check(call, q, k, v, chunks)
    acc = jnp.promote_types(v.dtype, jnp.float32)
    given = jnp.zeros((batch, groups, key, value), acc) if state is None else state.astype(acc)
    out, now = _rule(call, q, k, v, g.astype(acc), beta.astype(acc), given, chunks)
    bad = lambda x: jnp.where(chunks.fits.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)  # noqa: E731
    return bad(out), bad(now)


def heads_of_step(heads: int, repeats: int) -> tuple[int, int]:
    """Returns (key heads, value heads) of a step, at most MOST value heads. repeats: value heads of a key head."""
    largest = lambda of, most: max(n for n in range(1, most + 1) if of % n == 0)  # noqa: E731
    if repeats > MOST:
        return 1, largest(repeats, MOST)
    keys = largest(heads, MOST // repeats)
    return keys, keys * repeats


def check(call: Call, q, k, v, chunks: Chunks) -> None:
    """Raises NotImplementedError for calls that the kernels do not serve.

    They take float32 and bfloat16 (interpreted, float64 too), rows that have room for at most WORDS chunks in all, each
    row in whole stretches, and heads of which a step takes at most VMEM bytes on the chip (`vmem`).

    call: says heads of a step and whether the kernels run interpreted. q, k [B, L, H, K], v [B, L, G, V]: of which
    shapes and dtypes are read. chunks: of these rows; its shape is read."""
    wide = (jnp.float64,) * call.interpret
    for x in (q, k, v):
        if x.dtype not in (jnp.float32, jnp.bfloat16, *wide):
            raise NotImplementedError(f"{x.dtype} inputs; the TPU kernel takes float32 and bfloat16")
    (batch, count), size = chunks.start.shape, tokens_per_chunk(q.shape[1])
    if batch * _whole(count) > WORDS:
        raise NotImplementedError(f"{batch} rows of {count} chunks on one device; the TPU kernel has room for {WORDS}")
    if (need := vmem(call, size, k.shape[3], v.shape[3])) > VMEM:
        raise NotImplementedError(f"keys of {k.shape[3]} and values of {v.shape[3]} numbers; a step of the TPU kernel "
                                  f"would take {need >> 20} of {VMEM >> 20} MiB of on-chip memory")


def vmem(call: Call, size: int, key: int, value: int) -> int:
    """Returns the bytes of on-chip memory of a step of the backward pass: scratch, and operands and results twice.

    size: tokens of a chunk. key, value: sizes of a head."""
    up = lambda n, unit: -(-n // unit) * unit  # noqa: E731
    tile = lambda rows, columns: 4 * up(rows, 8) * up(columns, 128)  # noqa: E731
    state, tokens = tile(key, value), tile(size, value)
    kept = STRETCH * (state + tile(size, size) + tokens)
    blocks = 3 * tokens + 2 * tile(GATES, size) + 4 * state
    return call.values * (4 * state + kept + 2 * blocks) + 2 * call.keys * 4 * tile(size, key)


def _whole(count: int) -> int:
    """Returns chunks of whole stretches."""
    return -(-count // STRETCH) * STRETCH


# ---- from rows to chunks, and the gradient of both


def laid_out(chunks: Chunks, q, k, v, g, beta) -> Laid:
    """Returns the operands Laid out by chunk and head, of rows' tokens.

    Args:
      chunks: of chunks_of, for these rows.
      q, k: [B, L, H, K]. v: [B, L, G, V]. g, beta: [B, L, G] in fp32 or better.

    gates [GATES, C] of each chunk: TOTAL, the sum of g up to a token in its chunk; BETA; LEFT, the log of what
    remains of a token at the end of the chunk (-inf for one that does not enter the state); END, the sum of g over
    the chunk, all that decays the state before it."""
    q, k, v, g, beta = (_by_head(into(x, chunks)) for x in (q, k, v, g, beta))
    enters = _by_head(gather(chunks.enters, chunks)[..., None])
    total = jnp.cumsum(g, axis=3)
    end = jnp.sum(jnp.where(enters, g, 0), axis=3, keepdims=True)
    left = jnp.where(enters, at_most_zero(end - total), -jnp.inf)
    return Laid(q, k, v, jnp.stack([total, beta, left, jnp.broadcast_to(end, total.shape)], axis=3))


def _by_head(x_NxBxCxHx):
    """Returns [B, H, N, C, ...], with chunks up to whole stretches."""
    count = x_NxBxCxHx.shape[0]
    x = jnp.pad(x_NxBxCxHx, [(0, _whole(count) - count)] + [(0, 0)] * (x_NxBxCxHx.ndim - 1))
    return x.transpose(1, 3, 0, 2, *range(4, x.ndim))


def _into_rows(x_BxGxNxCxV, chunks: Chunks):
    return back(x_BxGxNxCxV[:, :, :chunks.start.shape[1]].transpose(2, 0, 3, 1, 4), chunks)


def _words(chunks: Chunks):
    """Returns ([B * N] int32 of chunks' starts and bits, [1] stretches that are used, at least one)."""
    words = chunks.start + SAVES * chunks.saves + USED * (chunks.count > 0)
    count = words.shape[1]
    words = jnp.pad(words.astype(jnp.int32), ((0, 0), (0, _whole(count) - count)))
    used = jnp.max(jnp.sum(chunks.count > 0, axis=1, dtype=jnp.int32))
    return words.reshape(-1), jnp.maximum((used + STRETCH - 1) // STRETCH, 1)[None]


@custom_vjp(0)
def _rule(call: Call, q, k, v, g, beta, given, chunks):
    out, state, _ = forward(call, laid_out(chunks, q, k, v, g, beta), given, *_words(chunks), keep=False)
    return _into_rows(out, chunks), state


def _rule_forward(call, q, k, v, g, beta, given, chunks):
    out, state, pairs = forward(call, laid_out(chunks, q, k, v, g, beta), given, *_words(chunks), keep=True)
    return (_into_rows(out, chunks), state), (q, k, v, g, beta, given, chunks, pairs)


def _rule_backward(call, saved, cotangents):
    *arrays, given, chunks, pairs = saved
    d_out, d_state = cotangents
    laid, pull = jax.vjp(functools.partial(laid_out, chunks), *arrays)
    d_laid = _by_head(gather(d_out, chunks))
    grads, d_given = backward(call, laid, given, pairs, d_laid, d_state, *_words(chunks))
    return (*pull(grads), d_given, None)


_rule.defvjp(_rule_forward, _rule_backward)
