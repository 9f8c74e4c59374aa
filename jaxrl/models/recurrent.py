"""Recurrences as mixers: a short convolution over queries, keys and values, kernels.recurrence, and a gated norm of its
output. Two kinds of them:

    gated delta   Gated DeltaNet (arXiv 2412.06464, figure 1)
    Mamba-2       a state space (arXiv 2405.21060, figure 6), whose C, B and x are queries, keys and values here, and
                  whose step Delta decides both what is forgotten and what is written

Legend: B rows, L tokens per row, D hidden size, H key heads, G value heads, K key size, V value size.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.kernels.recurrence import convolution, flops, recurrence, step
from jaxrl.models.placement import by_rows_and_heads, gathered
from jaxrl.models.product import times

NAMES = ("query", "key", "value")
LEAVES = ("state", "window_query", "window_key", "window_value")  # of a cache, by slot
EPS = 1e-6           # of the length of queries and keys
RATES = (1e-2, 16.0)  # between which decay rates begin
STEPS = (1e-3, 1e-1)  # and Mamba-2's steps
NO_LIMITS = (0.0, math.inf)


def initial_rates(key, entry):
    """Returns the log of rates drawn evenly between RATES, [*entry.shape] fp32; the same for scanned and unrolled
    layers.

    key: jax PRNG key. entry: parameters.Entry of the rates, whose HF name is folded into the key.
    """
    return jnp.log(_drawn(key, entry, *RATES))


def initial_steps(key, entry):
    """Returns numbers [*entry.shape] fp32 whose softplus is drawn evenly on a log scale between STEPS; the same for
    scanned and unrolled layers.

    key, entry: as in `initial_rates`, a jax PRNG key and the parameter's Entry.
    """
    step = jnp.exp(_drawn(key, entry, *map(math.log, STEPS)))
    return step + jnp.log(-jnp.expm1(-step))


INITIAL = {"rates": initial_rates, "steps": initial_steps}  # by parameters.Row.init


def _drawn(key, entry, least: float, most: float):
    draw = lambda name: jax.random.uniform(  # noqa: E731
        jax.random.fold_in(key, zlib.crc32(name.encode())), entry.kind[0], jnp.float32, least, most)
    return jnp.stack([draw(name) for name in entry.hf_names]).reshape(entry.shape)


class Kind(NamedTuple):
    """The parts in which one kind of recurrence (gated delta, Mamba-2) differs from another.

    Attributes:
      gates: names of the maps of the hidden states to numbers [B, L, G], one for each value head.
      of_heads: names of the parameters [G], one for each value head. A `skip` among them: v times it is added to the
        output.
      inputs: (config, q, k, gates, of_heads) -> (q, k, log of the decay, factor on what is written) of
        kernels.recurrence, from what the convolution returns.
      delta: whether what the state returns for a token's key is taken off before its value is written.
    """

    gates: tuple[str, ...]
    of_heads: tuple[str, ...]
    inputs: Callable
    delta: bool


def gated_delta(own, layer, implementation: str, x_BxLxD, shared, cache, index):
    """Computes a gated delta rule; a mixer, see models.feed_forward.Part. Padding is not read.

    Its cache, by slot: `state` [B, G, K, V] in fp32 or better and, of the convolution, the last inputs of queries, keys
    and values, `window_*` [B, T - 1, heads, size] with T = config.linear_taps.

    Args:
      own: decoder.Weights of the layer. layer, implementation: not read (own.recurrence names the implementation).
      x_BxLxD: normed hidden states.
      shared: decoder.Shared, of which `chunks` is read.
      cache: the layer's part of Model.init_cache, with the repetitions in front if `index` is one; None = packed rows.
      index: int scalar or None.

    Returns (y [B, L, D] in x's dtype, the cache's arrays after the tokens that enter them (Chunks.enters: of prompts
    all but the last one); of packed rows those of B new slots).
    """
    del layer, implementation
    return _mixed(DELTA, _norm_then_gate, own, x_BxLxD, shared, cache, index)


def mamba2(own, layer, implementation: str, x_BxLxD, shared, cache, index):
    """Computes a Mamba-2 state space, with steps clipped to config.step_limits and a gated output that is normed by
    config.recurrent_norm and norm_then_gate; arguments, results and cache are those of `gated_delta`.
    """
    del layer, implementation
    return _mixed(MAMBA2, _mamba2_norm, own, x_BxLxD, shared, cache, index)


def _mixed(kind: Kind, gated_norm: Callable, own, x_BxLxD, shared, cache, index):
    dtype, cfg = x_BxLxD.dtype, own.config
    into, of_gate, *of_tokens, of_out = cfg.recurrent_factors or (1.0,) * (len(NAMES) + len(kind.gates) + 3)
    x_BxLxD = times(x_BxLxD, into)
    tokens = tuple(own.linears("recurrent", x_BxLxD, *NAMES))
    tokens += tuple(own.linear(f"recurrent/{name}", x_BxLxD) for name in kind.gates)
    tokens = tuple(map(times, tokens, of_tokens))
    of_heads = tuple(_parameter(own, f"{name}_taps/weight", dtype) for name in NAMES)
    of_heads += tuple(_parameter(own, name, _wide(dtype)) for name in kind.of_heads)
    of_heads += tuple(_parameter(own, f"{name}_taps/bias", dtype) for name in NAMES * cfg.convolution_bias)
    old = {name: None for name in LEAVES} if cache is None else {
        name: cache[name] if index is None else cache[name][index] for name in LEAVES}
    at_once = cache is None or x_BxLxD.shape[1] > 1
    rule = functools.partial(_rule, own.recurrence) if at_once else _step
    windows = () if cache is None else tuple(old[name] for name in LEAVES[1:])
    rule = functools.partial(rule, kind, cfg)
    out, state, windows = by_rows_and_heads(
        rule, cfg.recurrent_heads, shared.chunks, tokens, old["state"], windows, of_heads)
    new = dict(zip(LEAVES, (state, *windows), strict=True))
    if cache is not None:
        new = {name: x.astype(cache[name].dtype) for name, x in new.items()}
    if cache is not None and index is not None:
        new = {name: cache[name].at[index].set(x) for name, x in new.items()}
    gate = times(own.linear("recurrent/gate", x_BxLxD), of_gate)
    return times(own.linear("recurrent/out", gated_norm(own, out, gate)), of_out), new


def rule_flops(config) -> int:
    """Returns the FLOPs of all recurrences for one token: the convolution and the rule, without linear maps; a multiply
    and an add are two. 0 without recurrent layers.
    """
    if not config.num_recurrent:
        return 0
    keys, values = (heads * size for heads, size in (
        (config.linear_key_heads, config.linear_key_size), (config.linear_value_heads, config.linear_value_size)))
    rule = flops(config.linear_value_heads, config.linear_key_size, config.linear_value_size, delta=not config.is_mamba)
    return config.num_recurrent * (rule + 2 * config.linear_taps * (2 * keys + values))


def leaf_shapes(config, dtype) -> dict[str, tuple]:
    """Returns name -> (shape, dtype) of a recurrent layer's cache per slot: `state` [G, K, V] in fp32 or better, and
    `window_query`, `window_key`, `window_value` [taps - 1, heads, size] in `dtype`.
    """
    keys = config.linear_key_heads, config.linear_key_size
    values = config.linear_value_heads, config.linear_value_size
    sizes = dict(zip(LEAVES[1:], (keys, keys, values), strict=True))
    windows = {name: ((config.linear_taps - 1, *size), dtype) for name, size in sizes.items()}
    return {"state": ((values[0], keys[1], values[1]), _wide(dtype)), **windows}


def is_by_slot(path) -> bool:
    """Whether the leaf of a cache at this path (of jax.tree_util) is a recurrence's, one value per slot; others have
    one per slot and position.
    """
    return path[-1].key in LEAVES


def positional(cache):
    """Returns the first leaf of a cache that is indexed by position, [..., slots, C, width]. Raises StopIteration for a
    cache of recurrences alone.
    """
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return next(leaf for path, leaf in leaves if not is_by_slot(path))


def cache_length(cache) -> int:
    """Returns C, the number of positions of a cache. Raises StopIteration for a cache of recurrences alone."""
    return positional(cache).shape[-2]


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _parameter(own, name: str, dtype):
    path = f"recurrent/{name}"
    return gathered(own.values[path], own.rows[path].axes, dtype)


def _rule(implementation: str, kind: Kind, cfg, chunks, tokens, state, windows, of_heads):
    """Returns (out [B, L, G, V], state, windows) of rows.

    The inputs are queries, keys and values before the convolution, and what gates are made of. state, windows: before
    the rows, or None and (); the results are those after the tokens that enter them.
    """
    raw, gates, taps, of_heads, bias = _sorted_out(kind, tokens, of_heads)
    joined, weight = _joined(raw), jnp.concatenate([w.reshape(-1, w.shape[-1]) for w in taps])
    before = _joined(windows) if windows else None
    q, k, v = _split(jax.nn.silu(convolution(joined, weight, chunks, before, bias)), raw)
    q, k, g, written = kind.inputs(cfg, q, k, gates, of_heads)
    out, state = recurrence(q, k, v, g, written, chunks, state, implementation, delta=kind.delta)
    out = _with_skip(kind, out, v, of_heads)
    return out, state, tuple(_split(_last(joined, before, chunks.enters, weight.shape[-1] - 1), raw))


def _step(kind: Kind, cfg, chunks, tokens, state, windows, of_heads):
    """Runs `_rule` for one token of each slot. A slot whose token is padding keeps its state."""
    raw, gates, taps, of_heads, bias = _sorted_out(kind, tokens, of_heads)
    wide = jnp.concatenate([_joined(windows), _joined(raw).astype(windows[0].dtype)], axis=1)
    acc, dtype = of_heads[0].dtype, raw[0].dtype
    weight = jnp.concatenate([w.reshape(-1, w.shape[-1]) for w in taps]).astype(acc)
    mixed = jnp.sum(wide.astype(dtype).astype(acc) * weight.T[None], axis=1, keepdims=True)
    mixed = mixed if bias is None else mixed + bias.astype(acc)[None, None]
    q, k, v = _split(jax.nn.silu(mixed.astype(dtype)), raw)
    q, k, g, written = kind.inputs(cfg, q, k, gates, of_heads)
    out, after = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], written[:, 0], state, kind.delta)
    real = chunks.real[:, 0]
    state = jnp.where(real.reshape(-1, 1, 1, 1), after, state)
    window = jnp.where(real.reshape(-1, 1, 1), wide[:, 1:], wide[:, :-1])
    return _with_skip(kind, out[:, None], v, of_heads), state, tuple(_split(window, raw))


def _sorted_out(kind: Kind, tokens, of_heads):
    """Returns (queries, keys and values; gates; their taps; parameters of heads; the convolution's bias or None)."""
    count, last = len(NAMES), len(NAMES) + len(kind.of_heads)
    bias = jnp.concatenate([b.reshape(-1) for b in of_heads[last:]]) if of_heads[last:] else None
    return tokens[:count], tokens[count:], of_heads[:count], of_heads[count:last], bias


def _with_skip(kind: Kind, out, v, of_heads):
    if "skip" not in kind.of_heads:
        return out
    skip = of_heads[kind.of_heads.index("skip")]
    return (out.astype(skip.dtype) + skip[None, None, :, None] * v.astype(skip.dtype)).astype(out.dtype)


def _joined(arrays):
    """Joins arrays [B, L, heads, size] to [B, L, channels]."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in arrays], axis=2)


def _split(joined, like):
    """Inverts `_joined`, for arrays of the heads and sizes of `like`."""
    ends = list(itertools.accumulate(math.prod(x.shape[2:]) for x in like))
    parts = jnp.split(joined, ends[:-1], axis=2)
    return [part.reshape(*joined.shape[:2], *x.shape[2:]) for part, x in zip(parts, like, strict=True)]


def _last(x_BxLxC, before, enters_BxL, count: int):
    """Returns [B, count, C]: the last of the tokens that enter, preceded by those before the row, or zeros."""
    blank = jnp.zeros((x_BxLxC.shape[0], count, x_BxLxC.shape[2]), x_BxLxC.dtype)
    wide = jnp.concatenate([blank if before is None else before.astype(x_BxLxC.dtype), x_BxLxC], axis=1)
    index = jnp.sum(enters_BxL, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(wide, index[..., None], axis=1)


def gates(decay_BxLxG, beta_BxLxG, rate_G, shift_G):
    """Returns (log of the decay, at most 0; share that is written, from 0 to 1), each [B, L, G] in the dtype of the
    rates, which is fp32 or better (Gated DeltaNet): -exp(rate) * softplus(decay + shift), and sigmoid(beta).

    decay_BxLxG, beta_BxLxG: linear maps of the hidden states. rate_G, shift_G: parameters of each value head.
    """
    acc, wide = rate_G.dtype, lambda x: jax.lax.broadcast_to_rank(x, decay_BxLxG.ndim)
    decay = jax.nn.softplus(decay_BxLxG.astype(acc) + wide(shift_G))
    return -jnp.exp(wide(rate_G)) * decay, jax.nn.sigmoid(beta_BxLxG.astype(acc))


def _delta_inputs(cfg, q, k, gates_of_tokens, of_heads):
    del cfg
    g, beta = gates(*gates_of_tokens, *of_heads)
    return unit(q) * q.shape[-1] ** -0.5, unit(k), g, beta


def _mamba2_inputs(cfg, q, k, gates_of_tokens, of_heads):
    (step,), (rate, shift, _) = gates_of_tokens, of_heads
    wide = lambda x: jax.lax.broadcast_to_rank(x, step.ndim)  # noqa: E731
    step = jax.nn.softplus(step.astype(rate.dtype) + wide(shift))
    if cfg.step_limits != NO_LIMITS:
        step = jnp.clip(step, *cfg.step_limits)
    return q, k, -jnp.exp(wide(rate)) * step, step


DELTA = Kind(("decay", "beta"), ("rate", "shift"), _delta_inputs, True)
MAMBA2 = Kind(("step",), ("rate", "shift", "skip"), _mamba2_inputs, False)


def unit(x):
    """Returns x / sqrt(sum(x^2) + EPS) over the last axis, in fp32 or better."""
    x = x.astype(_wide(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def _norm_then_gate(own, x, gate):
    """Returns the RMS norm of each value head, times its scale (without the model's norm_offset) and silu(gate)."""
    acc = _wide(x.dtype)
    scale = jax.lax.broadcast_to_rank(own.values["recurrent/norm/scale"].astype(acc), x.ndim)
    y = x.astype(acc)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + own.config.norm_eps)
    return (y * scale * jax.nn.silu(gate.astype(acc))).astype(x.dtype)


def _mamba2_norm(own, x, gate):
    """Returns x * silu(gate), normed over each of config.linear_key_heads groups of heads and scaled; or x normed, then
    times silu(gate), by config.norm_then_gate; or not normed, by config.recurrent_norm."""
    cfg, acc = own.config, _wide(x.dtype)
    y, gate = x.astype(acc), jax.nn.silu(gate.astype(acc))
    y = y if cfg.norm_then_gate else y * gate
    if cfg.recurrent_norm:
        scale = own.values["recurrent/norm/scale"].astype(acc).reshape(1, 1, *x.shape[2:])
        grouped = y.reshape(*y.shape[:2], cfg.linear_key_heads, -1)
        grouped = grouped * jax.lax.rsqrt(jnp.mean(jnp.square(grouped), axis=-1, keepdims=True) + cfg.norm_eps)
        y = grouped.reshape(y.shape) * scale
    return (y * gate if cfg.norm_then_gate else y).astype(x.dtype)
