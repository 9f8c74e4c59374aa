"""A chunk of one head in the TPU kernels of `recurrence`: its arithmetic, and its gradients (xla.py has the equations).

Legend: C tokens per chunk, K key size, V value size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence.xla import BASE

EXACT = jax.lax.Precision.HIGHEST
TOTAL, BETA, LEFT, END, GATES = 0, 1, 2, 3, 4  # rows of the numbers of a chunk's tokens, see tpu.laid_out


def dot(a, b, over_a, over_b):
    """Returns the product of two matrices in a's dtype (fp32 or better), not rounded, summed over axis over_a of a
    and over_b of b."""
    return jax.lax.dot_general(a, b, (((over_a,), (over_b,)), ((), ())), precision=EXACT,
                               preferred_element_type=a.dtype)


class Marks(NamedTuple):
    """Masks [C, C] bool of pairs of tokens (row, column): lower, the row's not before the column's; strictly, behind
    it; same."""

    lower: jax.Array     # [C, C] bool
    strictly: jax.Array
    same: jax.Array


class Gates(NamedTuple):
    """The decays of one chunk and value head. Columns [C, 1]: beta, faded (decay from the chunk's begin), left (to its
    end).

    end [1, 1]: decay of the state over the chunk. decay [C, C]: from a token (column) to a later one (row)."""

    beta: jax.Array
    faded: jax.Array
    left: jax.Array
    end: jax.Array
    decay: jax.Array


def marks_of(size: int) -> Marks:
    """Returns the Marks of a chunk of `size` tokens."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return Marks(row >= column, row > column, row == column)


def _column(row, marks):
    """Returns [C, 1] of [1, C]."""
    return jnp.sum(jnp.where(marks.same, row, 0), axis=1, keepdims=True)


def _row(column, marks):
    """Returns [1, C] of [C, 1]."""
    return jnp.sum(jnp.where(marks.same, column, 0), axis=0, keepdims=True)


def gates_of(rows, marks) -> Gates:
    """Returns the Gates of a chunk from its numbers [GATES, C], which tpu.laid_out describes."""
    total = rows[TOTAL:TOTAL + 1]
    upright = _column(total, marks)
    gap = jnp.where(marks.lower, upright - total, 0)
    return Gates(_column(rows[BETA:BETA + 1], marks), jnp.exp(upright), _column(jnp.exp(rows[LEFT:LEFT + 1]), marks),
                  jnp.exp(rows[END:END + 1, :1]), jnp.where(marks.lower, jnp.exp(gap), 0))


def solved_of(delta: bool, one: Gates, similar, marks: Marks, spread):
    """Returns (I + A)^-1 [C, C], A = beta decay similar below the diagonal; None without the delta.

    similar [C, C]: products of keys. spread: of `spread_of`."""
    if not delta:
        return None
    return inverse(jnp.where(marks.strictly, similar * one.decay * one.beta, 0), spread[...])


def update_of(delta: bool, one: Gates, values, recalled, solved):
    """Returns what is written for each key, [C, V]: beta v, with the delta (I + A)^-1 (beta (v - faded recalled)).

    one: Gates of the chunk. values: v, [C, V].
    recalled [C, V]: what the state before the chunk holds for the keys. solved: of `solved_of`."""
    if not delta:
        return one.beta * values
    return dot(solved, one.beta * (values - one.faded * recalled), 1, 0)


def asked_for(delta: bool, asked, keys):
    """Returns the operand that the state is multiplied with: queries [C, K], with the delta the keys below them, [2
    C, K]."""
    return jnp.concatenate([asked, keys], axis=0) if delta else asked


def halves(delta: bool, both) -> tuple[Any, Any]:
    """Splits the rows of a product with `asked_for`, [2 C, V], into (those of queries [C, V], those of keys [C, V]);
    without the delta returns ([C, V] as it is, None)."""
    return (both[:len(both) // 2], both[len(both) // 2:]) if delta else (both, None)


def spread_of(size: int, dtype):
    """Returns ones and zeros [C, BASE * C]: a product with them repeats, for each j < BASE, column j of each block
    of BASE columns over that block."""
    base = min(BASE, size)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, base * size), axis) for axis in (0, 1))
    j, at = column // size, column % size
    return (row == at // base * base + j).astype(dtype)


def inverse(lower, spread):
    """Returns (I + A)^-1 of a strictly lower triangular A [C, C], C = 16 or 64, as xla.inverse: substitution within
    diagonal blocks of BASE rows, all side by side in [BASE, C], then merges. spread: of `spread_of`."""
    size = lower.shape[0]
    base = min(BASE, size)
    count = size // base
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (base, size), axis) for axis in (0, 1))
    block = column // base
    diagonal = sum(jnp.where(block == b, lower[b * base:(b + 1) * base], 0) for b in range(count))
    repeated = dot(diagonal, spread, 1, 0)
    found = (row == column - block * base).astype(lower.dtype)
    for j in range(base - 1):  # row j is done: it is taken off the rows below, whose factors left of it are 0
        found -= repeated[:, j * size:(j + 1) * size] * found[j:j + 1]
    found = jnp.concatenate([jnp.where(block == b, found, 0) for b in range(count)], axis=0)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    width = base
    while width < size:
        rows = [found[at:at + width] for at in range(0, size, width)]
        below = (row // (2 * width) == column // (2 * width)) & (row // width > column // width)
        under = jnp.concatenate(rows[1::2], axis=0)
        under -= dot(dot(under, jnp.where(below, lower, 0), 1, 0), found, 1, 0)
        rows[1::2] = [under[at:at + width] for at in range(0, size // 2, width)]
        found, width = jnp.concatenate(rows, axis=0), 2 * width
    return found


class Gradients(NamedTuple):
    """Gradients of one chunk of one head.

    asked: of `asked_for`, by what they ask the state; products: of their products with the keys; keys: by what is
    written; v, gates, state: of the operands of these names."""

    asked: jax.Array
    products: jax.Array
    keys: jax.Array
    v: jax.Array
    gates: jax.Array
    state: jax.Array


def gradients_of(delta: bool, one: Gates, marks: Marks, asked, keys, values, products, before, solved, update, d_out,
                 d_after) -> Gradients:
    """Returns the Gradients of a chunk from those of its output, d_out [C, V], and of the state after it, d_after [K,
    V].

    before [K, V]: the state before the chunk. keys [C, K], values [C, V]: the chunk's. asked: of `asked_for`;
    products: of these with the keys. solved, update: of `solved_of` and `update_of`. All are fp32 or better."""
    sum_of = lambda x: jnp.sum(x, axis=1, keepdims=True)  # noqa: E731
    read, recalled = halves(delta, dot(asked, before, 1, 0))
    attended, similar = halves(delta, products)
    attended = attended * one.decay
    d_update = dot(attended, d_out, 0, 0) + dot(one.left * keys, d_after, 1, 0)
    d_weights = jnp.where(marks.lower, dot(d_out, update, 1, 1), 0)
    d_written = dot(update, d_after, 1, 1)
    d_asked, d_products = one.faded * d_out, d_weights * one.decay
    d_faded, d_left = sum_of(d_out * read), sum_of(d_written * keys)
    d_gap = d_weights * attended
    if delta:
        d_solved = dot(solved, d_update, 0, 0)
        d_v = one.beta * d_solved
        d_system = -jnp.where(marks.strictly, dot(d_solved, update, 1, 1), 0) * one.decay
        d_beta = sum_of(d_solved * (values - one.faded * recalled)) + sum_of(d_system * similar)
        d_similar = d_system * one.beta
        d_gap += d_similar * similar
        d_faded -= sum_of(d_v * recalled)
        d_asked = jnp.concatenate([d_asked, -one.faded * d_v], axis=0)
        d_products = jnp.concatenate([d_products, d_similar], axis=0)
    else:
        d_v, d_beta = one.beta * d_update, sum_of(d_update * values)
    d_state = one.end * d_after + dot(asked, d_asked, 0, 0)
    d_total = _row(sum_of(d_gap) + d_faded * one.faded, marks) - jnp.sum(d_gap, axis=0, keepdims=True)
    first = jax.lax.broadcasted_iota(jnp.int32, d_total.shape, 1) == 0
    d_end = jnp.where(first, jnp.broadcast_to(one.end * jnp.sum(d_after * before), d_total.shape), 0)
    gates = jnp.concatenate([d_total, _row(d_beta, marks), _row(d_left * one.left, marks), d_end], axis=0)
    return Gradients(dot(d_asked, before, 1, 1), d_products, one.left * d_written, d_v, gates, d_state)
