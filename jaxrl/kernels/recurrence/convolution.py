"""Causal convolution over the tokens of each sequence of a packed row, channel by channel.

Legend: B rows, L tokens per row, N chunks per row, T taps; channels are the axes behind the tokens'.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence.chunks import PROMPT, Chunks


def convolution(x_BxLx, weight_xT, chunks: Chunks, window_BxTx=None, bias_x=None):
    """Computes a causal depthwise convolution of each sequence: out[t] = sum over j of weight[..., T - 1 - j] * x[j
    tokens before t], 0 before the sequence begins.

    A completion's tokens go on from those of its shared prompt; tokens of other sequences and padding are not read. But
    with `window_BxTx` a row is one sequence: segments and prompts are not looked at.

    Args:
      x_BxLx: [B, L, *channels].
      weight_xT: [*channels, T], in x's dtype.
      chunks: of chunks_of, for these rows.
      window_BxTx: [B, T - 1, *channels], the tokens before the first one of rows that continue; None = rows begin.
      bias_x: [*channels], added to every token, or None.

    Returns [B, L, *channels] in x's dtype; sums are fp32 or better. At padding: finite where x is."""
    taps, acc = weight_xT.shape[-1], jnp.promote_types(x_BxLx.dtype, jnp.float32)
    length, lead = x_BxLx.shape[1], taps - 1
    over = lambda mask: mask.reshape(*mask.shape, *(1,) * (x_BxLx.ndim - mask.ndim))  # noqa: E731
    x = jnp.where(over(chunks.real), x_BxLx, 0)
    weight = weight_xT.astype(acc)[None, None]
    if window_BxTx is not None:
        wide = jnp.concatenate([window_BxTx.astype(x.dtype), x], axis=1)
        reach = lambda j: jnp.ones(chunks.back.shape, bool)  # noqa: E731
    else:
        wide = jnp.pad(x, [(0, 0), (lead, 0)] + [(0, 0)] * (x.ndim - 2))
        reach = lambda j: chunks.back >= j  # noqa: E731
    out = jnp.zeros(x.shape, acc)
    for j in range(taps):
        before = jax.lax.slice_in_dim(wide, lead - j, lead - j + length, axis=1)
        out += weight[..., taps - 1 - j] * jnp.where(over(reach(j)), before, 0).astype(acc)
    if window_BxTx is None and lead:
        out = _with_prompts(out, x, weight, chunks)
    out = out if bias_x is None else out + bias_x.astype(acc)[None, None]
    return out.astype(x_BxLx.dtype)


def _with_prompts(out, x, weight, chunks: Chunks):
    """Adds to `out` [B, L, *channels], at the first tokens of completions, what they read of the ends of their prompts.

    Each prompt's last T - 1 tokens are taken once, by the chunk that ends it, and handed to its completions by a
    product with ones and zeros: exact, and its gradient sums over the completions in the order of the row.

    x [B, L, *channels], 0 at padding; weight [1, 1, *channels, T]."""
    taps, acc = weight.shape[-1], out.dtype
    lead, length = taps - 1, x.shape[1]
    rows = jnp.arange(x.shape[0])[:, None]
    is_completion = chunks.start == PROMPT
    behind = chunks.first + chunks.count
    ends = chunks.saves & (chunks.count > 0)
    index = behind[..., None] - lead + jnp.arange(lead)[None, None]  # [B, N, T - 1]
    inside = ends[..., None] & (index >= 0)
    tails = x[rows[..., None], jnp.where(inside, index, length - 1)].astype(acc)
    mask = lambda m, like: m.reshape(*m.shape, *(1,) * (like.ndim - m.ndim))  # noqa: E731
    tails = jnp.where(mask(inside, tails), tails, 0)
    mine = is_completion[:, :, None] & ends[:, None, :] & (chunks.prompt_end[:, :, None] == behind[:, None, :])
    flat = tails.reshape(*tails.shape[:2], -1)
    got = jnp.einsum("bnm,bmx->bnx", mine.astype(acc), flat, precision=jax.lax.Precision.HIGHEST)
    got = got.reshape(tails.shape)
    there = jnp.arange(lead)[None, None] >= lead - chunks.prompt_size[..., None]  # a short prompt has zeros before it
    got = jnp.where(mask(there & is_completion[..., None], got), got, 0)
    for token in range(lead):
        reads = range(token + 1, taps)  # token + 1 .. T - 1 tokens back lies in the prompt
        more = sum(weight[..., taps - 1 - j] * got[:, :, lead - (j - token)] for j in reads)
        at = jnp.where(is_completion & (chunks.count > token), chunks.first + token, length)
        out = out.at[rows, at].add(more, mode="drop")
    return out
