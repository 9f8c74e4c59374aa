"""The decoder of every family, in three modes (packed rows, prefill, new tokens against a cache), as functions of
nested dicts of parameters. A layer is a mixer and a feed-forward, which config.layers names.

Parameters keep the dtype they are given and are cast to the compute dtype where they are used. Norms, rotary angles
and softmax run in fp32 (float64 where the compute dtype is).

Legend: B rows, L tokens per row, D hidden size, H query heads, G key-value heads, K head size, S cache slots, C cache
length, N repetitions of the repeating block.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.kernels.low_precision import DEFAULT
from jaxrl.models import latent, parameters, recurrent
from jaxrl.models.adapters import bank, dropped, quantized, stretch
from jaxrl.models.adapters.adapter_set import scale_columns
from jaxrl.models.config import ModelConfig
from jaxrl.models.feed_forward import FEED_FORWARDS, NOTHING, ROUTES, STACKED, Part
from jaxrl.models.layer_config import Layer
from jaxrl.models.placement import (
    RowChunks,
    at_sources,
    attention_work,
    cached_attention_work,
    embed,
    extended_attention,
    gathered,
    residual,
    row_chunks,
    rows,
    sharded_attention,
    sharded_cached_attention,
    write,
)
from jaxrl.models.product import product, times
from jaxrl.models.rope import growth, rotate, rotations
from jaxrl.models.vision.rows import entries as vision_entries
from jaxrl.sharding.memory import HOST, fetched

LAYER_INPUT = "layer_input"
_ROUTES = jax.checkpoint_policies.save_only_these_names(ROUTES)
REMAT_POLICIES = {  # what the backward pass finds, the tokens' experts always; the rest it computes again
    "full": _ROUTES,  # the layers' inputs
    "dots": jax.checkpoint_policies.save_from_both_policies(  # and the outputs of matrix products
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ROUTES),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(  # the layers' inputs, in host memory
        names_which_can_be_saved=[ROUTES], names_which_can_be_offloaded=[LAYER_INPUT], offload_src="device",
        offload_dst=HOST),
}


def like(parameter, x):
    """Reshapes a parameter, whose axes are the last ones of x, to x's rank, with leading axes of size 1."""
    return jax.lax.broadcast_to_rank(parameter, x.ndim)


class Weights(NamedTuple):
    """The parameters of a layer, with which its mixer and its feed-forward compute.

    Attributes:
      config: ModelConfig; of a tower's layers its VisionConfig.
      rows, values: rows and arrays of the parameters by path in the layer, such as `mlp/up/kernel`.
      real: [B, L] bool, which tokens are no padding; None = all.
      whose: [B, L] int, number of each token's adapter, in a set or a bank; None with at most one adapter.
      matmul: scheme of the products (kernels.low_precision).
      experts, recurrence: implementations (kernels.experts, kernels.recurrence).
    """

    config: ModelConfig
    rows: dict[str, parameters.Row]
    values: parameters.Flat
    real: jax.Array | None = None
    whose: jax.Array | None = None
    matmul: str = DEFAULT
    experts: str = "auto"
    recurrence: str = "auto"

    def linear(self, name: str, x):
        """Computes x @ `<name>/kernel` over the kernel's input axes, [..., *O] of x [..., *I] in x's dtype, plus the
        adapter (a decomposed one multiplies the sum by `stretch`), then plus `<name>/bias`, if there are any.

        `watched` sees the call.
        """
        if (see := WATCH.get()) is not None:
            see(name, x)
        row, bias = self.rows[f"{name}/kernel"], self.values.get(f"{name}/bias")
        if isinstance(kernel := self.kernel(name), dict):
            y = quantized.product(x, kernel, row.axes, row.inputs)
        else:
            scheme = DEFAULT if row.exact else self.matmul
            y = product(x, gathered(kernel, row.axes, x.dtype), row.inputs, scheme)
        if f"{name}/lora/b" in self.values:
            more = self.low_rank(name, x, "")
            if f"{name}/lora/b0" in self.values:  # at the start this is zero to the bit
                more = more - self.low_rank(name, x, "0")
            y = y + more
            if f"{name}/lora/m" in self.values:
                y = y * like(self.stretch(name).astype(x.dtype), y)
        return y if bias is None else y + like(bias.astype(x.dtype), y)

    def linears(self, module: str, x, *names: str) -> list:
        """Applies several linear maps of one module to the same x [..., D]: one product if their weights are joined
        (models.unstacked; then it is not watched). Returns their outputs [..., *O], as of `linear`, in the order of the
        names.
        """
        name = f"{module}/{parameters.JOINED.get(names)}"
        if f"{name}/kernel" not in self.values:
            return [self.linear(f"{module}/{part}", x) for part in names]
        y = product(x, self.values[f"{name}/kernel"].astype(x.dtype), 1)
        if (bias := self.values.get(f"{name}/bias")) is not None:
            y = y + like(bias.astype(x.dtype), y)
        shapes = [self.rows[f"{module}/{part}/kernel"].shape(self.config)[1:] for part in names]
        ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
        parts = zip(jnp.split(y, ends[:-1], -1), shapes, strict=True)
        return [part.reshape(*y.shape[:-1], *shape) for part, shape in parts]

    def kernel(self, name: str):
        """Returns the kernel's array, or {codes, scale} of a quantized one (models.adapters.quantized)."""
        if (array := self.values.get(f"{name}/kernel")) is not None:
            return array
        return {leaf: self.values[f"{name}/kernel/{leaf}"] for leaf in quantized.LEAVES}

    def low_rank(self, name: str, x, which: str):
        """Returns scale * (x A) B [..., *O] of an adapter (models.adapters), in x's dtype; x A is scaled in fp32 or
        better. In an adapter set each token has its own adapter, in a bank each row (by `whose`).

        which: "" for A and B, "0" for the frozen copies A0 and B0 of their start. Dropout falls on x with "" alone, if
        `adapters.noisy` added its key. Raises ValueError for an adapter set without `whose`.
        """
        row, first = self.rows[f"{name}/kernel"], self.first_part(name)
        a, scale, b = (self.values[f"{module}/lora/{leaf}"] for module, leaf in (
            (first, "a" + which), (first, "scale"), (name, "b" + which)))
        if not which and f"{first}/lora/key" in self.values:
            x = dropped(x, self.values[f"{first}/lora/key"], self.values[f"{first}/lora/keep"])
        if scale.ndim == 1:
            return self._of_bank(row, x, a, b, scale)
        few = product(x, gathered(a, (*row.axes[:row.inputs], None), x.dtype), row.inputs)
        acc = jnp.promote_types(few.dtype, jnp.float32)
        few, scale = few.astype(acc), scale.astype(acc)
        few = (scale_columns(few, scale, self.whose) if scale.ndim else few * scale).astype(x.dtype)
        return product(few, gathered(b, (None, *row.axes[row.inputs:]), x.dtype), 1)

    def _of_bank(self, row, x, a, b, scale):
        """Returns `low_rank` of each row's adapter in a bank (models.adapters.bank)."""
        numbers, acc = bank.numbers_of_rows(self.whose), jnp.promote_types(x.dtype, jnp.float32)
        few = bank.product(x, gathered(a, (None, *row.axes[:row.inputs], None), x.dtype), numbers, row.inputs)
        few = bank.scaled(few.astype(acc), scale.astype(acc), numbers).astype(x.dtype)
        return bank.product(few, gathered(b, (None, None, *row.axes[row.inputs:]), x.dtype), numbers, 1)

    def first_part(self, name: str) -> str:
        """Returns the map whose adapter has the A of this one: the first part of the same HF tensor, else its own."""
        row = self.rows[f"{name}/kernel"]
        if not row.part:
            return name
        first = next(r for r in self.rows.values() if r.hf == row.hf and r.part and not r.part[1])
        return first.path.removesuffix("/kernel")

    def stretch(self, name: str):
        """Returns the factor m / |W + scale * A B| [*O] of a decomposed adapter (DoRA), in fp32 or better; 1 where
        scale is 0, a repetition without adapter.
        """
        first = self.first_part(name)
        leaves = {leaf: self.values[f"{first if leaf in ('a', 'scale') else name}/lora/{leaf}"]
                  for leaf in ("a", "b", "scale", "m")}
        kernel, inputs = self.kernel(name), self.rows[f"{name}/kernel"].inputs
        if isinstance(kernel, dict):
            acc = jnp.promote_types(leaves["a"].dtype, jnp.float32)
            kernel = quantized.dequantized(kernel, leaves["a"].shape[:inputs]).astype(acc)
        return stretch(kernel, leaves, inputs)

    def norm(self, name: str, x, eps: float | None = None):
        """Returns the RMS norm of x over its last axis, x / sqrt(mean(x^2) + eps), times offset + scale, in x's dtype.

        The norm is computed in fp32 or better, and so is the product with offset + scale unless the offset is 0: then
        it is one of numbers rounded to x's dtype. offset is config.norm_offset. eps: None = the config's.
        """
        scale, offset = self.values[f"{name}/scale"], self.config.norm_offset
        acc = jnp.promote_types(x.dtype, jnp.float32)
        y, eps = x.astype(acc), self.config.norm_eps if eps is None else eps
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
        if offset:
            return (y * like(offset + scale.astype(acc), y)).astype(x.dtype)
        return y.astype(x.dtype) * like(scale.astype(x.dtype), y)


WATCH: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("watch", default=None)


@contextlib.contextmanager
def watched(see: Callable):
    """Calls `see(path, x)` with the input of each linear map (`Weights.linear`; no expert, router or output matrix)
    while a model is traced in this context.

    The model's layers must be neither scanned nor recomputed, and keys and values not kept, as in prefill and decoding:
    there layers of one kind are traced once.

    path: the module's path in its layer; calls come in the order of the layers. x is a traced value: it may leave the
    trace only as one of its outputs.
    """
    token = WATCH.set(see)
    try:
        yield
    finally:
        WATCH.reset(token)


class Seen(NamedTuple):
    """What a decoder reads of a batch's images.

    Attributes:
      features: [B, F, D] in the compute dtype, which replace the embeddings of image tokens.
      taps: features of the same shape and dtype that are added after the first layers, one array per layer.
      inserts: [B, L] int32, index in `features` of each token's feature; -1 = text.
      rotary: [B, L, 3] int32, position of each token by time, row and column; None: it has one position.
      reach: [B, L] int32, last position that each token sees; None: its own.
    """

    features: jax.Array
    taps: tuple[jax.Array, ...]
    inserts: Any
    rotary: Any
    reach: Any = None

    def of_tokens(self, features, other=None):
        """Returns [B, L, D]: each image token's row of `features` [B, F, D], and `other` (None = 0) at all other
        tokens."""
        found = at_sources(features, jnp.maximum(self.inserts, 0))
        return jnp.where((self.inserts >= 0)[..., None], found, jnp.zeros_like(found) if other is None else other)


class Shared(NamedTuple):
    """What all layers read beside the hidden states of tokens [B, L].

    Attributes:
      positions: [B, L] int32, as in Model.forward.
      prefixes, segments: [B, L] int32, as there. prefixes None = no shared prompt; segments None = one segment, no
        padding.
      rotations: of each distinct rotary embedding, in the order of config.ropes: (cos, sin) of rope.rotations.
      work: {window: attention work of the layers with this window, or None: each makes its own}.
      whose: [B, L] int32, number of the token's adapter; None without an adapter set or bank.
      chunks: of placement.row_chunks; None without recurrent layers.
      taps: [B, L, D] in the compute dtype, added after each of the first layers; () = none.
      reach: [B, L] int32, last position that the token sees (jaxrl.types.Images); None = its own.
    """

    positions: jax.Array
    prefixes: jax.Array | None
    rotations: list
    segments: jax.Array | None
    work: dict
    whose: jax.Array | None = None  # number of the token's adapter
    chunks: RowChunks | None = None  # where layers have a recurrence
    taps: tuple[jax.Array, ...] = ()  # [B, L, D] added behind each of the first layers
    reach: jax.Array | None = None  # [B, L] last position that the token sees, see jaxrl.types.Images


def attention(own: Weights, layer: Layer, implementation: str, x_BxLxD, shared: Shared, cache, index):
    """Computes self-attention over packed rows, or of one or more new tokens per slot over the cache.

    Scores are scaled and soft-capped as kernels.attention has it, by config.query_scale and attention_softcap; padding
    and other sequences are masked there.

    Args:
      own, layer: the layer's weights and its fields. implementation: of kernels.attention.
      x_BxLxD: normed hidden states.
      shared: see Shared.
      cache: the layer's {k, v}, each [S, C, G * K], or [N, S, C, G * K] with `index` of the repetition; None = packed
        rows. index: int scalar or None.

    Returns (y [B, L, D] in x's dtype; {k, v}: the rows' [B, L, G * K], or the cache with the new tokens written).
    """
    cfg = own.config
    into, of_keys, of_out = cfg.attention_factors
    x_BxLxD = times(x_BxLxD, into)
    q, k, v = own.linears("attention", x_BxLxD, "query", "key", "value")
    k = times(k, of_keys)
    if cfg.qk_norm:
        q, k = own.norm("attention/query_norm", q), own.norm("attention/key_norm", k)
    elif cfg.qk_norm_whole:
        q, k = (own.norm(f"attention/{name}_norm", x.reshape(*x.shape[:2], -1)).reshape(x.shape)
                for name, x in (("query", q), ("key", k)))
    if layer.rope:
        rotation = shared.rotations[cfg.ropes.index(layer.rope)]
        q, k = (rotate(x, rotation, cfg.rope_interleaved) for x in (q, k))
        if cfg.qk_norm_late:
            q, k = own.norm("attention/query_norm", q), own.norm("attention/key_norm", k)
        if layer.rope.query_beta:
            q = q * growth(layer.rope, shared.positions).astype(q.dtype)
    options: dict[str, Any] = dict(window=layer.window, softcap=cfg.attention_softcap, scale=cfg.query_scale,
                                   implementation=implementation, work=shared.work[layer.window])
    if cfg.sinks:
        options["sinks"] = gathered(own.values["attention/sinks"], ("heads",), jnp.promote_types(q.dtype, jnp.float32))
    positions, segments = shared.positions, shared.segments
    if cache is None:
        kv = {"k": k.reshape(*k.shape[:2], -1), "v": v.reshape(*v.shape[:2], -1)}
        out = sharded_attention(q, k, v, positions, positions, segments, segments, shared.prefixes, shared.reach,
                                **options)
    else:
        kv = {"k": write(cache["k"], k, positions, index), "v": write(cache["v"], v, positions, index)}
        attend = sharded_cached_attention if positions.shape[1] == 1 else extended_attention
        out = attend(q, kv["k"], kv["v"], positions, index, **options)
    if "attention/gate/kernel" in own.rows:
        gate = jax.nn.sigmoid(own.linear("attention/gate", x_BxLxD).astype(jnp.promote_types(out.dtype, jnp.float32)))
        out = (out * gate).astype(out.dtype)
    return times(own.linear("attention/out", out), of_out), kv


def attention_and_mamba2(own: Weights, layer: Layer, implementation: str, x_BxLxD, shared: Shared, cache, index):
    """Computes the sum of an attention and a Mamba-2 layer of the same hidden states [B, L, D] (Falcon-H1).

    Arguments and results are those of `attention`; the cache has the entries of both.
    """
    arguments = own, layer, implementation, x_BxLxD, shared, cache, index
    both: Any = recurrent.mamba2(*arguments), attention(*arguments)
    (y, states), (z, kv) = both
    return y + z, {**states, **kv}


MIXERS = {"attention": Part(parameters.ATTENTION, attention),
          "latent_attention": Part(parameters.LATENT_ATTENTION, latent.attention),
          "gated_attention": Part(parameters.GATED_ATTENTION, attention),
          "gated_delta": Part(parameters.GATED_DELTA, recurrent.gated_delta),
          "gated_delta_by_head": Part(parameters.GATED_DELTA_BY_HEAD, recurrent.gated_delta),
          "falcon_h1": Part(parameters.FALCON_H1, attention_and_mamba2),
          "mamba2": Part(parameters.MAMBA2, recurrent.mamba2),
          "nemotron_attention": Part(parameters.NEMOTRON_ATTENTION, attention),
          "nemotron_mamba2": Part(parameters.NEMOTRON_MAMBA2, recurrent.mamba2)}


def layer_rows(layer: Layer) -> tuple[parameters.Row, ...]:
    """Returns the parameter rows of a layer. A mixer or feed-forward "none" has none."""
    mixer, feed_forward = MIXERS.get(layer.mixer, NOTHING), FEED_FORWARDS.get(layer.feed_forward, NOTHING)
    return parameters.NORMS[layer.norms] + mixer.rows + feed_forward.rows


def spans(config: ModelConfig, scan_layers: bool) -> tuple[range, int, range]:
    """Returns (layers before the repeating block, number of its repetitions, layers after it).

    Layers before and after are unrolled, all of them if nothing repeats or without scan_layers (repetitions 0); sub_<j>
    of the block is layer prefix + repetition * period + j.
    """
    repeats = (config.num_layers - config.prefix) // config.period
    repeats = repeats if scan_layers and repeats > 1 else 0
    return range(config.prefix), repeats, range(config.prefix + repeats * config.period, config.num_layers)


def entries(config: ModelConfig, scan_layers: bool) -> tuple[parameters.Entry, ...]:
    """Returns the parameter table of a language model and of its tower, if it reads one, sorted by path. scan_layers:
    arrays of repeating layers are stacked.
    """
    before, repeats, behind = spans(config, scan_layers)
    out = parameters.entries(config, parameters.MODEL)
    out += vision_entries(config.vision, scan_layers) if config.vision else []
    for i in (*before, *behind):
        out += parameters.entries(config, layer_rows(config.layers[i]), (f"layer_{i}",), [i])
    for j in range(config.period if repeats else 0):
        numbers = [config.prefix + config.period * n + j for n in range(repeats)]
        table = layer_rows(config.layers[numbers[0]])
        out += parameters.entries(config, table, ("layers", f"sub_{j}"), numbers, repeats)
    return tuple(sorted(out, key=lambda entry: entry.path))


def layers_of(config: ModelConfig, path: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the numbers, from 1, of the layers that a parameter belongs to: one, or all that it is stacked over.

    The embedding and a tower belong to layer 0; final norm and head belong to the last layer.
    """
    group, (_, repeats, _) = path[0], spans(config, True)
    if group == "layers":
        first = config.prefix + int(path[1].removeprefix("sub_")) + 1
        return tuple(first + config.period * n for n in range(repeats))
    if group.startswith("layer_"):
        return (int(group.removeprefix("layer_")) + 1,)
    return (0,) if group in ("embed", "vision") else (config.num_layers,)


def sum_auxiliary(first: dict, *more: dict) -> dict:
    """Sums auxiliary outputs {name: array} by name; those of feed_forward.STACKED are concatenated along their first
    axis. A name may be missing in some of them.
    """
    join = lambda name, a, b: jnp.concatenate([a, b]) if name in STACKED else a + b  # noqa: E731
    out = dict(first)
    for each in more:
        out |= {name: join(name, out[name], x) if name in out else x for name, x in each.items()}
    return out


def _over_repetitions(outputs: dict, axes: tuple[int, ...] = (0,)) -> dict:
    """Merges a scan's auxiliary outputs: the repetitions of STACKED ones extend their first axis, others are summed."""
    return {name: x.reshape(-1, *x.shape[len(axes) + 1:]) if name in STACKED else x.sum(axes)
            for name, x in outputs.items()}


def forward(model, params, tokens_BxL, positions_BxL, segments_BxL=None, prefixes_BxL=None, *, cache=None,
            keep_kv=False, prompts=None, whose_BxL=None, seen: Seen | None = None, shift_B=None):
    """Runs the decoder. Returns (hidden states after the final norm [B, L, D] in the compute dtype, auxiliary outputs
    of models.feed_forward, keys and values).

    Keys and values are the updated cache, or with `keep_kv` fresh ones in the tree of Model.init_cache, else {}.

    Args:
      model, params: a models.model.Model and its tree.
      tokens_BxL, positions_BxL, segments_BxL, prefixes_BxL: int32, as in Model.forward; segments None = no padding and
        one segment, as against a cache.
      cache: as Model.init_cache returns it, of B slots, for new tokens; None = packed rows.
      prompts: kernels.attention.Shared, which slots have one prompt, while decoding.
      whose_BxL: int32 adapter number of each token, with an adapter set or a bank (see Model.forward).
      seen: the rows' images; None: no row has one.
      shift_B: int32, added to a row's positions for rotary angles, where images precede these tokens; None = 0.
    """
    cfg, dtype = model.config, model.compute_dtype
    x = embed(fetched(params["embed"]["embedding"]), tokens_BxL, dtype)
    x = residual(x * jnp.asarray(cfg.embed_scale, dtype))
    x = x if seen is None else residual(seen.of_tokens(seen.features, x))
    acc = jnp.promote_types(dtype, jnp.float32)
    reach = None if seen is None else seen.reach
    work = {window: _work(model, window, positions_BxL, segments_BxL, prefixes_BxL, reach, cache, prompts)
            for window in {layer.window for layer in cfg.layers}}
    at = positions_BxL if shift_B is None else positions_BxL + shift_B[:, None]
    at = at if seen is None or seen.rotary is None else seen.rotary
    turned = [rotations(rope, cfg.rotary_size or cfg.head_dim, at, acc) for rope in cfg.ropes]
    taps = () if seen is None else tuple(map(seen.of_tokens, seen.taps))
    keep = keep_kv or cache is not None
    chunks = _chunks(positions_BxL, segments_BxL, prefixes_BxL, cache, keep) if cfg.num_recurrent else None
    shared = Shared(positions_BxL, prefixes_BxL, turned, segments_BxL, work, whose_BxL, chunks, taps, reach)
    before, repeats, behind = spans(cfg, model.scan_layers)
    x, kv, auxiliary = _unrolled(model, before, params, x, shared, cache, keep)
    if repeats:
        repeated = None if cache is None else cache["layers"]
        x, kv["layers"], more = _scanned(model, repeats, params["layers"], x, shared, repeated, keep)
        auxiliary = sum_auxiliary(auxiliary, more)
    x, last, more = _unrolled(model, behind, params, x, shared, cache, keep)
    hidden = rows(Weights(cfg, {}, {"final_norm/scale": fetched(params["final_norm"]["scale"])}).norm("final_norm", x))
    if cfg.logits_divisor != 1:
        hidden = (hidden.astype(acc) / cfg.logits_divisor).astype(dtype)
    return hidden, sum_auxiliary(auxiliary, more), kv | last if keep else {}


def _chunks(positions_BxL, segments_BxL, prefixes_BxL, cache, keep):
    """Computes the rows' chunks once for all recurrent layers.

    Of prompts whose states are kept, the last token is in no chunk, since decoding runs it again; against a cache,
    padding lies beyond it.
    """
    if cache is not None:
        real = (positions_BxL < recurrent.cache_length(cache)).astype(jnp.int32)
        return row_chunks(positions_BxL, real, continues=True)
    segments = jnp.ones_like(positions_BxL) if segments_BxL is None else segments_BxL
    enters = jnp.pad(segments[:, 1:], ((0, 0), (0, 1))) > 0 if keep else None
    return row_chunks(positions_BxL, segments, prefixes_BxL, enters)


def _work(model, window, positions_BxL, segments_BxL, prefixes_BxL, reach_BxL, cache, prompts):
    """Computes the attention work of this window once for all its layers."""
    cfg, options = model.config, dict(window=window, implementation=model.attention)
    if cache is not None and positions_BxL.shape[1] > 1:
        return None  # new tokens of all slots are few: each layer looks for itself
    if cache is not None:
        leaf = recurrent.positional(cache)
        return cached_attention_work(positions_BxL, prompts, leaf.shape[-3:], leaf.dtype, cfg.num_heads,
                                     cfg.cache_heads, **options)
    return attention_work(cfg.num_heads, cfg.num_kv_heads, cfg.row_head_size, model.compute_dtype, positions_BxL,
                          segments_BxL, prefixes_BxL, reach_BxL, ring=model.ring, **options)


def _layer(model, layer: Layer, params, x, shared, cache, index):
    """Computes a residual layer, with the norms before and after each branch that its rows have. index: repetition, if
    the cache holds all repetitions.
    """
    cfg = model.config
    table = {row.path: row for row in layer_rows(layer) if row.of(cfg)}
    real = None if shared.segments is None else shared.segments > 0
    params = fetched(params)  # which the backward pass does again
    own = Weights(cfg, table, parameters.flattened(params), real, shared.whose, model.matmul, model.experts,
                  model.recurrence)
    x = checkpoint_name(x, LAYER_INPUT)

    def normed(name, x):
        return own.norm(name, x) if f"{name}/scale" in table else x

    def added(x, name, y):
        y = normed(name, residual(rows(y)))
        if cfg.residual_scale != 1:
            y = (y.astype(jnp.promote_types(y.dtype, jnp.float32)) * cfg.residual_scale).astype(y.dtype)
        return residual(x + y)

    kv, auxiliary = {}, {}
    if layer.mixer != "none":
        with jax.named_scope(layer.mixer):
            y, kv = MIXERS[layer.mixer].apply(
                own, layer, model.attention, rows(normed("attention_norm", x)), shared, cache, index)
            x = added(x, "attention_post_norm", y)
    if layer.feed_forward != "none":
        with jax.named_scope(layer.feed_forward):
            y, auxiliary = FEED_FORWARDS[layer.feed_forward].apply(own, rows(normed("mlp_norm", x)))
            x = added(x, "mlp_post_norm", y)
    return x, kv, auxiliary


_layer_of_kind = jax.jit(_layer, static_argnums=(0, 1))  # layers of one kind are traced once, and so are their kernels


def _run(model, numbers, names, keep, params, x, shared, cache, index):
    """Runs layers one after the other. Returns (x, their keys and values by name, auxiliary)."""
    kv, auxiliary = {}, {}
    apply = _layer_of_kind if keep and index is None else _layer
    for number, name in zip(numbers, names, strict=True):
        layer, old = model.config.layers[number], None if cache is None else cache[name]
        read = shared._replace(work={layer.window: shared.work[layer.window]}, taps=())
        with jax.named_scope(name):
            x, own, more = apply(model, layer, params[name], x, read, old, index)
        if number < len(shared.taps):
            x = residual(x + shared.taps[number])
        kv, auxiliary = kv | ({name: own} if keep else {}), sum_auxiliary(auxiliary, more)
    return x, kv, auxiliary


def recomputed(model, function, scanned: bool):
    """Wraps a function so that the backward pass recomputes it as model.remat (a key of REMAT_POLICIES, or none) says.

    scanned: the function is the body of a scan, which needs no barrier against common subexpression elimination.
    """
    if model.remat == "none":
        return function
    return jax.checkpoint(function, policy=REMAT_POLICIES[model.remat], prevent_cse=not scanned)


def _every(model, keep) -> int:
    """Returns the number of layers that are recomputed together."""
    return 1 if keep or model.remat == "none" else model.remat_every


def _unrolled(model, numbers, params, x, shared, cache, keep):
    kv, auxiliary, every = {}, {}, _every(model, keep)
    for some in (numbers[i:i + every] for i in range(0, len(numbers), every)):
        names = [f"layer_{i}" for i in some]
        own, old = ({name: tree[name] for name in names} if tree else None for tree in (params, cache))
        group = recomputed(model, functools.partial(_run, model, some, names, keep), scanned=False)
        x, more, new = group(own, x, shared, old, None)
        kv, auxiliary = kv | more, sum_auxiliary(auxiliary, new)
    return x, kv, auxiliary


def _scanned(model, repeats, params, x, shared, cache, keep):
    """Runs the repeating block. The cache is carried whole and written at its repetition."""
    cfg, every = model.config, _every(model, keep)
    numbers, names = range(cfg.prefix, cfg.prefix + cfg.period), [f"sub_{j}" for j in range(cfg.period)]

    def block(carry, block_input):
        (x, cache), (params, index), kv_of_block, auxiliary = carry, block_input, {}, {}
        for number, name in zip(numbers, names, strict=True):
            layer: Callable = functools.partial(_run, model, [number], [name], keep)
            layer = recomputed(model, layer, scanned=True) if every == 1 else layer
            own, old = {name: params[name]}, {name: cache[name]} if cache else None
            x, kv, new = layer(own, x, shared, old, index)
            auxiliary = sum_auxiliary(auxiliary, new)
            if cache is not None:
                cache = {**cache, **kv}
            else:
                kv_of_block |= kv
        return (x, cache), (kv_of_block, auxiliary)

    def group(x, params):
        (x, _), (_, outputs) = jax.lax.scan(block, (x, None), (params, None))
        return x, outputs

    if every > 1:
        groups = jax.tree.map(lambda a: a.reshape(-1, every // cfg.period, *a.shape[1:]), params)
        x, outputs = jax.lax.scan(recomputed(model, group, scanned=True), x, groups)
        return x, {}, _over_repetitions(outputs, (0, 1))
    (x, cache), (kv_of_block, outputs) = jax.lax.scan(block, (x, cache), (params, jnp.arange(repeats)))
    return x, kv_of_block if cache is None else cache, _over_repetitions(outputs)
