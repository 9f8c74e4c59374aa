"""The decoder: one linen module for every family, in three modes (packed rows, prefill, one token against a cache).

Parameters keep the dtype they are given and are cast to the compute dtype where they are used. Norms, rotary angles
and softmax run in fp32 (float64 where the compute dtype is).

Legend: B rows, L tokens per row, D hidden size, H query heads, G key-value heads, K head size, S cache slots, C cache
length, N repetitions of the repeating block.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.config import Layer, ModelConfig
from jaxrl.models.parameters import LAYER, Parameter
from jaxrl.models.placement import (
    attention_work,
    cached_attention_work,
    embed,
    gathered,
    residual,
    rows,
    sharded_attention,
    sharded_cached_attention,
    write,
)
from jaxrl.models.product import product
from jaxrl.models.rope import rotate, rotations
from jaxrl.sharding.memory import HOST

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
DECLARED = nn.initializers.zeros  # names and shapes are what counts here; Model.init makes the values
KEPT = "layer_input"
POLICIES = {  # what the backward pass finds; the rest it computes again
    "full": jax.checkpoint_policies.nothing_saveable,  # the layers' inputs
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # and the outputs of matrix products
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(  # the layers' inputs, in host memory
        names_which_can_be_saved=[], names_which_can_be_offloaded=[KEPT], offload_src="device", offload_dst=HOST),
}


def like(parameter, x):
    """The parameter of the last axes with leading axes of 1, one for each further axis of x."""
    return jax.lax.broadcast_to_rank(parameter, x.ndim)


class Norm(nn.Module):
    """RMS norm over the last axis, times offset + scale."""

    eps: float
    offset: float

    @nn.compact
    def __call__(self, x):
        acc = jnp.promote_types(x.dtype, jnp.float32)
        scale = self.param("scale", DECLARED, (x.shape[-1],))
        y = x.astype(acc)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.offset:
            return (y * like(self.offset + scale.astype(acc), y)).astype(x.dtype)
        return y.astype(x.dtype) * like(scale.astype(x.dtype), y)


class Linear(nn.Module):
    """Contracts the last axes of x with the leading axes of `kernel` [*inputs, *outputs]; `row` is its table row."""

    row: Parameter
    outputs: tuple[int, ...]
    bias: bool = False

    @nn.compact
    def __call__(self, x):
        inputs = self.row.inputs
        kernel = self.param("kernel", DECLARED, x.shape[-inputs:] + self.outputs)
        y = product(x, gathered(kernel, self.row.axes, x.dtype), inputs)
        if self.bias:
            y = y + like(self.param("bias", DECLARED, self.outputs).astype(x.dtype), y)
        return y


class Attention(nn.Module):
    """Self-attention over packed rows, or of one new token per slot over the cache. See Block for `shared`."""

    config: ModelConfig
    layer: Layer
    implementation: str

    @nn.compact
    def __call__(self, x_BxLxD, shared, cache, index):
        cfg = self.config

        def project(name, heads):
            row = LAYER[f"attention/{name}/kernel"]
            return Linear(row, (heads, cfg.head_dim), bias=cfg.qkv_bias, name=name)(x_BxLxD)

        q, k, v = project("query", cfg.num_heads), project("key", cfg.num_kv_heads), project("value", cfg.num_kv_heads)
        if cfg.qk_norm:
            q = Norm(cfg.norm_eps, cfg.norm_offset, name="query_norm")(q)
            k = Norm(cfg.norm_eps, cfg.norm_offset, name="key_norm")(k)
        rotation = shared["rotations"][distinct_ropes(cfg).index(self.layer.rope)]
        q, k = rotate(q, rotation), rotate(k, rotation)
        options = dict(window=self.layer.window, softcap=cfg.attention_softcap, scale=cfg.query_scale)
        positions = shared["positions"]
        options |= dict(implementation=self.implementation, work=shared["work"][self.layer.window])
        if cache is None:
            kv = {"k": k.reshape(*k.shape[:2], -1), "v": v.reshape(*v.shape[:2], -1)}
            segments = shared["segments"]
            out = sharded_attention(q, k, v, positions, positions, segments, segments, shared["prefixes"], **options)
        else:
            kv = {"k": write(cache["k"], k, positions, index), "v": write(cache["v"], v, positions, index)}
            out = sharded_cached_attention(q, kv["k"], kv["v"], positions, index, **options)
        out = Linear(LAYER["attention/out/kernel"], (cfg.hidden_size,), bias=cfg.out_bias, name="out")(out)
        return out, kv


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        cfg = self.config

        def linear(name, width):
            return Linear(LAYER[f"mlp/{name}/kernel"], (width,), bias=cfg.mlp_bias, name=name)

        gated = jax.checkpoint(lambda gate, up: ACTIVATIONS[cfg.activation](gate) * up)  # the backward pass keeps gate and up only
        return linear("down", cfg.hidden_size)(gated(linear("gate", cfg.mlp_size)(x), linear("up", cfg.mlp_size)(x)))


class DecoderLayer(nn.Module):
    """Pre-norm residual layer; with `post_norms` each branch is normed again before it is added."""

    config: ModelConfig
    layer: Layer
    implementation: str

    @nn.compact
    def __call__(self, x, shared, cache, index):
        cfg = self.config
        x = checkpoint_name(x, KEPT)

        def norm(name, y):
            return Norm(cfg.norm_eps, cfg.norm_offset, name=name)(y)

        def added(x, name, y):
            y = residual(rows(y))
            return residual(x + (norm(name, y) if cfg.post_norms else y))

        y, kv = Attention(cfg, self.layer, self.implementation, name="attention")(
            rows(norm("attention_norm", x)), shared, cache, index)
        x = added(x, "attention_post_norm", y)
        y = MLP(cfg, name="mlp")(rows(norm("mlp_norm", x)))
        return added(x, "mlp_post_norm", y), kv


class Block(nn.Module):
    """The repeating block, the body of the scan. Carry: (x, whole stacked cache or None); index: repetition.

    `shared` holds what all layers read: positions, segments, prefixes [B, L], rotations per distinct rotary embedding
    and attention's work per distinct window. Returns the carry and, where `keep_kv`, the keys and values of its layers.
    """

    config: ModelConfig
    implementation: str
    remat: str
    keep_kv: bool

    @nn.compact
    def __call__(self, carry, index, shared):
        x, cache = carry
        kept = {}
        for j in range(self.config.period):
            name = f"sub_{j}"
            layer = _layer_class(self.remat, scanned=True)(
                self.config, self.config.layers[j], self.implementation, name=name)
            x, kv = layer(x, shared, None if cache is None else cache[name], index)
            if cache is not None:
                cache = {**cache, name: kv}
            elif self.keep_kv:
                kept[name] = kv
        return (x, cache), kept


def _layer_class(remat, scanned):
    if remat == "none":
        return DecoderLayer
    return nn.remat(DecoderLayer, policy=POLICIES[remat], prevent_cse=not scanned)


def distinct_ropes(config: ModelConfig) -> list:
    return list(dict.fromkeys(layer.rope for layer in config.layers))


def repetitions(config: ModelConfig, scan_layers: bool) -> int:
    """How often the scan repeats the block; 0 = every layer unrolled (also where nothing would repeat)."""
    count = config.num_layers // config.period
    return count if scan_layers and count > 1 else 0


class Decoder(nn.Module):
    """tokens -> hidden states after the final norm, and keys and values (fresh ones, or the updated cache)."""

    config: ModelConfig
    dtype: Any
    scan_layers: bool
    remat: str
    implementation: str
    remat_every: int = 1

    @nn.compact
    def __call__(self, tokens_BxL, positions_BxL, segments_BxL=None, prefixes_BxL=None, cache=None, keep_kv=False, prompts=None):
        cfg = self.config
        acc = jnp.promote_types(self.dtype, jnp.float32)
        x = embed(Embedding(cfg, name="embed")(), tokens_BxL, self.dtype)
        x = residual(x * jnp.asarray(cfg.embed_scale, self.dtype))
        shared = {"positions": positions_BxL, "segments": segments_BxL, "prefixes": prefixes_BxL,
                  "rotations": [rotations(rope, cfg.head_dim, positions_BxL, acc) for rope in distinct_ropes(cfg)],
                  "work": {window: self._work(window, positions_BxL, segments_BxL, prefixes_BxL, cache, prompts)
                           for window in {layer.window for layer in cfg.layers}}}
        out = {}
        repeats = repetitions(cfg, self.scan_layers)
        learns = cache is None and not keep_kv and not self.is_initializing()
        if learns and self.remat != "none" and self.remat_every > 1:
            x = self._in_groups(x, shared, repeats)
            return rows(Norm(cfg.norm_eps, cfg.norm_offset, name="final_norm")(x)), out
        if repeats:
            block = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True},
                            in_axes=(0, nn.broadcast), length=repeats)
            stacked = None if cache is None else cache["layers"]
            (x, stacked), kept = block(cfg, self.implementation, self.remat, keep_kv, name="layers")(
                (x, stacked), jnp.arange(repeats), shared)
            out["layers"] = kept if cache is None else stacked
        for i in range(repeats * cfg.period, cfg.num_layers):
            name = f"layer_{i}"
            x, kv = _layer_class(self.remat, scanned=False)(cfg, cfg.layers[i], self.implementation, name=name)(
                x, shared, None if cache is None else cache[name], None)
            if keep_kv or cache is not None:
                out[name] = kv
        x = rows(Norm(cfg.norm_eps, cfg.norm_offset, name="final_norm")(x))
        if not cfg.tied and self.is_initializing():
            Head(cfg, name="head")()
        return x, out

    def _work(self, window, positions_BxL, segments_BxL, prefixes_BxL, cache, prompts):
        """What attention with this window looks for once, for all layers."""
        cfg, options = self.config, dict(window=window, implementation=self.implementation)
        if cache is not None:
            leaf = jax.tree.leaves(cache)[0]
            return cached_attention_work(positions_BxL, prompts, leaf.shape[-3:], leaf.dtype, cfg.num_heads, cfg.num_kv_heads,
                                         **options)
        return attention_work(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, self.dtype, positions_BxL, segments_BxL,
                              prefixes_BxL, **options)

    def _in_groups(self, x, shared, repeats):
        """The layers' output; `remat_every` layers at a time are recomputed together, and kept are their first one's inputs."""
        cfg, params, every = self.config, self.variables["params"], self.remat_every

        def recomputed(group, scanned):
            named = lambda x, weights: group(checkpoint_name(x, KEPT), weights)  # noqa: E731
            return jax.checkpoint(named, policy=POLICIES[self.remat], prevent_cse=not scanned)

        if repeats:
            block = Block(cfg, self.implementation, "none", False, parent=None)

            def one(x, weights):
                return block.apply({"params": weights}, (x, None), 0, shared)[0][0], None

            def group(x, weights):
                return jax.lax.scan(one, x, weights)

            stacked = jax.tree.map(lambda a: a.reshape(-1, every // cfg.period, *a.shape[1:]), params["layers"])
            x, _ = jax.lax.scan(recomputed(group, True), x, stacked)
        rest = range(repeats * cfg.period, cfg.num_layers)
        for numbers in (rest[i:i + every] for i in range(0, len(rest), every)):

            def layers(x, weights, numbers=numbers):
                for i, own in zip(numbers, weights, strict=True):
                    x, _ = DecoderLayer(cfg, cfg.layers[i], self.implementation, parent=None).apply(
                        {"params": own}, x, shared, None, None)
                return x

            x = recomputed(layers, False)(x, [params[f"layer_{i}"] for i in numbers])
        return x


class Embedding(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self):
        return self.param("embedding", DECLARED, (self.config.vocab_size, self.config.hidden_size))


class Head(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self):
        return self.param("kernel", DECLARED, (self.config.hidden_size, self.config.vocab_size))
