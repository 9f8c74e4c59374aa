"""Tiny models with adapters that do something, shared by the tests of adapters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl import models
from jaxrl.models import adapters
from jaxrl.models.adapters import Adapter, Target

HF = dict(model_type="qwen2", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
          num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True)
GEMMA = {**HF, "model_type": "gemma3_text", "num_hidden_layers": 5, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5,
         "sliding_window_pattern": 2}
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def all_linear(layers=3, rank=3, scale=2.0, skip=()):
    """Adapters of rising rank on every linear map of the layers but `skip`."""
    return Adapter(tuple(Target(f"model.layers.{i}.{name}", rank + i % 2, scale / (1 + i)) for i in range(layers) for name in LINEAR
                         if (i, name) not in skip))



def build(adapter=None, hf=None, scan=False, dtype=jnp.float32, **options):
    model = models.build(hf or HF, compute_dtype=dtype, scan_layers=scan, **options)
    return dataclasses.replace(model, adapter=adapter)


def started(model, seed=0, dtype=jnp.float32):
    """Parameters, in `dtype` (None: as they are), whose B (and A0, B0) are not zero; equal for every layout of the layers."""
    params = init(model, jax.random.key(seed))
    flat, targets = {}, {t.name: t for t in model.adapter.targets}
    rows = {e.path: e for e in model.base.entries}
    for entry in model.entries:
        if entry.row.init == "adapter" and entry.path[-1] != "scale" and entry.path[-1] != "a":
            names = [adapters.module_of(n) for n in rows[(*entry.path[:-2], "kernel")].hf_names]
            if entry.path[-1] == "m":
                start = flatten_dict(params, sep="/")["/".join(entry.path)]
                noise = np.random.default_rng(sum(map(ord, names[0]))).normal(size=entry.shape[entry.stacked:])
                flat["/".join(entry.path)] = jnp.asarray(np.asarray(start) * (1 + 0.2 * noise))
                continue
            shape, axis = entry.shape[entry.stacked:], 0 if entry.path[-1][0] == "b" else -1
            values = [_random(f"{n}.{entry.path[-1]}", shape, targets[n].rank if n in targets else 0, axis) for n in names]
            flat["/".join(entry.path)] = jnp.asarray(np.stack(values).reshape(entry.shape) if entry.stacked else values[0])
    params = adapters.joined(params, flat)
    return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)


def _random(name, shape, rank, axis):
    rng = np.random.default_rng(list(name.encode()))
    own = list(shape)
    own[axis] = rank
    pad = [(0, 0)] * len(shape)
    pad[axis] = (0, shape[axis] - rank)
    return np.pad(0.3 * rng.normal(size=own), pad).astype(np.float32)


def batch(vocab=61, rows=4, length=16, seed=0):
    tokens = np.random.default_rng(seed).integers(1, vocab, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return tokens, positions, np.ones_like(tokens), np.zeros_like(tokens)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def hidden(model, params, *rows):
    return model.hidden(params, *rows)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def gradient(model, params, *rows):
    return jax.grad(loss, argnums=1)(model, params, *rows)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def merged(model, params):
    return adapters.merged(model, params)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def init(model, key):
    return model.init(key)


def loss(model, params, tokens, *rest):
    """Mean negative log-probability of the tokens' own ids: any smooth function of all logits."""
    logits = jax.nn.log_softmax(model.logits(params, model.hidden(params, tokens, *rest)))
    return -jnp.take_along_axis(logits, tokens[..., None], axis=-1).mean()
