# ruff: noqa: E402, I001
"""Run by test_models_hf in a process with eight simulated devices: load, run, differentiate, decode and export sharded.

Prints one JSON line. Usage: sharded_models.py SOURCE OUT
"""

import json
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl import sharding
from jaxrl.models import build
from jaxrl.models.io import hf
from jaxrl.rollout.programs import cache_shardings

QUICK = {"xla_backend_optimization_level": 0}
source, out = sys.argv[1:]
config = hf.load_config(source)
model = build(config, compute_dtype=jnp.float32, scan_layers=True, remat="full")
mesh = sharding.make_mesh(ml_collections.ConfigDict({"dp": 2, "fsdp": 2, "tp": 2}))
rng = np.random.default_rng(0)
tokens = rng.integers(0, 96, (8, 16)).astype(np.int32)
positions = np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16))
segments, prefixes = np.ones_like(tokens), np.zeros_like(tokens)
batch = tokens, positions, segments, prefixes


def loss(params, tokens, *rest):
    logits = model.logits(params, model.hidden(params, tokens, *rest))
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    return -picked.mean(), logits


plain = hf.load_params(model, source)
run = jax.grad(loss, has_aux=True)
want_grads, want_logits = jax.device_get(jax.jit(run, compiler_options=QUICK)(plain, *batch))

with jax.set_mesh(mesh):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    layout = sharding.param_shardings(mesh, model.logical_axes(), shapes)
    params = hf.load_params(model, source, shardings=layout)
    for a, b, s in zip(*map(jax.tree.leaves, (params, plain, layout)), strict=True):
        assert a.sharding == s
        np.testing.assert_array_equal(a, b)
    grads, logits = jax.jit(run, out_shardings=(layout, None), compiler_options=QUICK)(
        params, *jax.device_put(batch, sharding.batch_sharding(mesh)))
    kernels = [e for e in model.entries if e.inputs]
    shares = []
    for entry in kernels:
        array = params
        for name in entry.path:
            array = array[name]
        shares.append(array.addressable_shards[0].data.size / array.size)

    rollout = jax.device_put(params, sharding.param_shardings(mesh, model.logical_axes(), shapes, sharding.ROLLOUT_RULES))
    slots = NamedSharding(mesh, P(sharding.mesh.DATA_AXES))
    spaces = cache_shardings(model, mesh, jax.eval_shape(lambda: model.init_cache(8, 16, jnp.float32)))
    cache = jax.jit(lambda: model.init_cache(8, 16, jnp.float32), out_shardings=spaces)()
    first = jax.device_put((tokens[:, 0], positions[:, 0]), slots)
    step = jax.jit(model.decode, donate_argnums=3, out_shardings=(None, spaces)).lower(rollout, *first, cache).compile()
    gathers = len(re.findall(r"(all-gather|all-to-all|collective-permute)(-start)?\(", step.as_text()))
    worst = 0.0
    for i in range(16):
        hidden, cache = step(rollout, *jax.device_put((tokens[:, i], positions[:, i]), slots), cache)
        worst = max(worst, float(np.abs(np.asarray(model.logits(rollout, hidden)) - want_logits[:, i]).max()))
    hf.export(model, params, out, config)


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))


print(json.dumps({
    "devices": mesh.size, "sharded": sum(not s.is_fully_replicated for s in jax.tree.leaves(layout)),
    "largest_share": max(shares), "logits": float(np.abs(np.asarray(logits) - want_logits).max()),
    "gradient": max(jax.tree.leaves(jax.tree.map(relative, grads, want_grads))), "decode": worst,
    "decode_gathers": gathers,
}))
