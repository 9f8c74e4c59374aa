"""Towers as functions of their parameters: patches of images in, features for the decoder out.

A row of patches lies beside each row of tokens and is computed as one: its layers attend within segments, of which each
is one image (in layers with windows: one window), all positions being equal. Pixels are normalised here, in fp32;
norms, rotary angles and softmax run in fp32 or better. No product is in low precision.

Legend: B rows, P patches per row, m patches per side of a feature, F = P / m^2 features, D width, H heads, K head size,
E hidden size of the decoder.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models import parameters
from jaxrl.models.decoder import LAYER_INPUT, Seen, Weights, like, recomputed
from jaxrl.models.feed_forward import ACTIVATIONS, GATED
from jaxrl.models.placement import attention_work, gathered, residual, rows, sharded_attention
from jaxrl.models.product import product
from jaxrl.models.rope import Rope, rotate, rotations
from jaxrl.models.vision.rows import TABLES
from jaxrl.sharding.memory import fetched


def see(model, params, images) -> Seen:
    """Returns what the decoder reads of a batch's images: features [B, F, E] of the merger and of each tap, in the
    compute dtype.

    Args:
      model: one whose config has a tower. params: its whole tree.
      images: jaxrl.types.Images of the rows. Where they hold features already, no tower is run.

    Attention stays within an image or a window of it. Features of padding (segment 0) have no meaning; no token reads
    them. Raises AssertionError for images with windows if the tower has none, or the reverse.
    """
    cfg = model.config.vision
    if images.features is not None:
        features, *taps = jnp.split(images.features.astype(model.compute_dtype), 1 + len(cfg.taps), axis=-1)
        return Seen(rows(features), tuple(map(rows, taps)), images.inserts, images.rotary, images.reach)
    params = params["vision"]
    assert (images.windows is not None) == bool(cfg.window), "rows of images are those of another tower"
    acc = jnp.promote_types(model.compute_dtype, jnp.float32)
    tables, x = TABLES[cfg.kind], _patches(model, params, images.patches)
    x = residual(x + _positions(model, params, images.places) if cfg.positions else x)
    rotation = _rotation(cfg, images.places, acc) if cfg.theta else None
    same, within = jnp.zeros_like(images.segments), {False: images.segments}
    within |= {True: images.windows} if cfg.window else {}
    work = {windowed: attention_work(cfg.heads, cfg.heads, cfg.head_dim, model.compute_dtype, same, ids, None, window=0,
                                     implementation=model.attention) for windowed, ids in within.items()}
    taps, seen = [], {windowed: (within[windowed], work[windowed]) for windowed in within}
    for i, group in enumerate(cfg.groups):
        x = _layers(model, params, i, group, x, rotation, seen)
        if group[-1] in cfg.taps:
            table = tables.of_tap(len(taps))
            taps.append(_merged(model, table, params[f"tap_{len(taps)}"], x, together=True))
    features = _features(model, tables.merger, params["merger"], x)
    return Seen(features, tuple(taps), images.inserts, images.rotary, images.reach)


def _features(model, table, params, x_BxPxD):
    if model.config.vision.kind == "siglip":
        return _pooled(model, table, params, x_BxPxD)
    return _merged(model, table, params, x_BxPxD, together=False)


def _rotation(cfg, places_BxPx4, dtype):
    """Angles by row and column of each patch, of half of a head each."""
    quarter = cfg.head_dim // 4
    rope = Rope("axial", theta=cfg.theta, axes=(0,) * quarter + (1,) * quarter)
    return rotations(rope, cfg.head_dim, places_BxPx4[..., :2], dtype)


def _weights(model, table, params) -> Weights:
    return Weights(model.config.vision, {row.path: row for row in table}, parameters.flattened(fetched(params)))


def _patches(model, params, patches_BxPxn):
    """The first product, [B, P, D]: of still images all frames are equal, so their weights are added up."""
    cfg, acc = model.config.vision, jnp.promote_types(model.compute_dtype, jnp.float32)
    own = _weights(model, TABLES[cfg.kind].input, {"patch": params["patch"]})
    x = patches_BxPxn.reshape(*patches_BxPxn.shape[:2], cfg.channels, -1).astype(acc) * (1 / 255)
    mean, std = (jnp.asarray(values, acc)[None, None, :, None] for values in (cfg.mean, cfg.std))
    x = ((x - mean) / std).reshape(patches_BxPxn.shape).astype(model.compute_dtype)
    kernel = gathered(own.values["patch/kernel"], own.rows["patch/kernel"].axes, acc)
    kernel = kernel.sum(axis=1) if kernel.ndim == 5 and not cfg.video else kernel
    y, bias = product(x, kernel.reshape(-1, cfg.width).astype(x.dtype), 1), own.values.get("patch/bias")
    return y if bias is None else y + like(bias.astype(x.dtype), y)


def _positions(model, params, places_BxPx4):
    """The learned positions, read bilinearly at each patch, [B, P, D]: the first and the last of a side lie on the
    first and the last row (column) of patches, whatever their number. Of images of one size each patch has its own."""
    cfg, dtype = model.config.vision, model.compute_dtype
    acc = jnp.promote_types(dtype, jnp.float32)
    table = gathered(fetched(params["positions"]["embedding"]), (None, "embed"), acc)
    if cfg.image_side:
        return jnp.take(table, places_BxPx4[..., 0] * cfg.side + places_BxPx4[..., 1], axis=0).astype(dtype)

    def ends(at, size):
        """(the two learned positions around a patch, their weights), along one side, in fp32 or better."""
        where = at.astype(acc) * (cfg.side - 1) / jnp.maximum(size - 1, 1).astype(acc)
        low = jnp.floor(where)
        first = low.astype(jnp.int32)
        share = where - low
        return (first, jnp.minimum(first + 1, cfg.side - 1)), (1 - share, share)

    row, column, height, width = (places_BxPx4[..., i] for i in range(4))
    (rows_, row_shares), (columns, column_shares) = ends(row, height), ends(column, width)
    found = [jnp.take(table, r * cfg.side + c, axis=0) * (a * b).astype(acc)[..., None]
             for r, a in zip(rows_, row_shares, strict=True) for c, b in zip(columns, column_shares, strict=True)]
    return sum(found[1:], found[0]).astype(dtype)


def _norm(own: Weights, name: str, x):
    """Returns the layer norm over the last axis; the RMS norm if there is no bias."""
    config: Any = own.config  # the tower's
    if f"{name}/bias" not in own.values:
        return own.norm(name, x, config.eps)
    acc = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(acc)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.eps)
    scale, bias = (like(own.values[f"{name}/{leaf}"].astype(acc), y) for leaf in ("scale", "bias"))
    return (y * scale + bias).astype(x.dtype)


def _layers(model, params, number: int, group: range, x, rotation, seen):
    """Returns x [B, P, D] behind the layers of a group: one after the other, or a scan over their stacked parameters.

    A scan has one body, also where some layers have windows: bodies are what a compiler takes its time for.

    Args:
      seen: {windows or not: (segments [B, P], attention work)}, of the same shapes.
    """
    windowed = [model.config.vision.is_windowed(i) for i in group]
    layer = recomputed(model, functools.partial(_layer, model), scanned=model.scan_layers)
    if not model.scan_layers:
        for i, within in zip(group, windowed, strict=True):
            x = layer(params[f"layer_{i}"], x, rotation, seen[within], None)
        return x
    own, mixed = params[f"group_{number}"], len(set(windowed)) > 1
    seen = seen if mixed else seen[windowed[0]]
    step = lambda x, xs: (layer(xs[0], x, rotation, seen, xs[1]), None)  # noqa: E731
    return jax.lax.scan(step, x, (own, jnp.array(windowed) if mixed else None))[0]


def _layer(model, params, x, rotation, seen, within):
    """Returns x [B, P, D] behind a layer. within: whether it has windows, a bool array that chooses from `seen` of both
    kinds; None: `seen` is the layer's."""
    if within is not None:
        seen = jax.tree.map(functools.partial(jnp.where, within), seen[True], seen[False])
    segments, work = seen
    own, same = _weights(model, TABLES[model.config.vision.kind].layer, params), jnp.zeros_like(segments)
    x = checkpoint_name(x, LAYER_INPUT)
    with jax.named_scope("attention"):
        q, k, v = own.linears("attention", rows(_norm(own, "attention_norm", x)), "query", "key", "value")
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = sharded_attention(q, k, v, same, same, segments, segments, None, window=0, implementation=model.attention,
                              work=work)
        x = residual(x + residual(rows(own.linear("attention/out", y))))
    with jax.named_scope("mlp"):
        y, activation = rows(_norm(own, "mlp_norm", x)), own.config.activation
        if "mlp/gate/kernel" in own.rows:
            y = jax.checkpoint(GATED[activation])(*own.linears("mlp", y, "gate", "up"))
        else:
            y = ACTIVATIONS[activation](own.linear("mlp/up", y))
        return residual(x + residual(rows(own.linear("mlp/down", y))))


def _merged(model, table, params, x_BxPxD, together: bool):
    """Features [B, F, E] of m x m patches, which lie behind each other. together: they are normed as one vector."""
    own, count = _weights(model, table, params), model.config.vision.merge**2
    batch, length, width = x_BxPxD.shape
    assert length % count == 0, f"{length} patches a row, {count} a feature"
    x = rows(x_BxPxD)
    x = (x if together else _norm(own, "norm", x)).reshape(batch, length // count, count * width)
    x = _norm(own, "norm", x) if together else x
    return rows(own.linear("down", ACTIVATIONS["gelu"](own.linear("up", x))))


def _pooled(model, table, params, x_BxPxD):
    """Features [B, F, E] of the means of m x m patches, which lie behind each other (Gemma 3's projector)."""
    own, cfg = _weights(model, table, params), model.config.vision
    batch, length, width = x_BxPxD.shape
    count = cfg.merge**2
    assert length % count == 0, f"{length} patches a row, {count} a feature"
    acc = jnp.promote_types(x_BxPxD.dtype, jnp.float32)
    y = _norm(own, "norm", rows(x_BxPxD)).astype(acc).reshape(batch, length // count, count, width).mean(axis=2)
    y = y.astype(x_BxPxD.dtype).astype(acc)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + cfg.eps)
    y = y * like(1 + own.values["soft_norm/scale"].astype(acc), y)
    return rows(own.linear("project", y.astype(x_BxPxD.dtype)))
