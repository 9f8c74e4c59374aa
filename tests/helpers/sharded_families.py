# ruff: noqa: E402, I001
"""Run by test_sharded_families in a process with four simulated devices: models of helpers.tiny_models on fsdp 2 x tp 2 beside one device,
in float64.

Prints one JSON line for each name. Usage: sharded_families.py NAME ...
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import ml_collections
import numpy as np
from helpers.model_cases import QUICK, batch
from helpers.tiny_models import ARCHITECTURES, EXPERTS, HYBRIDS, SIZES

from jaxrl import sharding
from jaxrl.models import build

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
EVEN = {"qwen3_5": DELTA, "qwen3_5_moe": DELTA, "qwen3_next": DELTA, "nemotron_h": {"n_groups": 2}}  # that tp divides


def made(name):
    """The model, with no parameter at a value that hides a mistake."""
    kind, entries = (ARCHITECTURES | EXPERTS | HYBRIDS)[name]
    entries = {k: v for k, v in {**SIZES, **entries, **EVEN.get(name, {}), "model_type": kind}.items() if v is not None}
    model = build(entries, compute_dtype=jnp.float64, scan_layers=True, remat="full")
    params = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0))
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params)


def case(name, mesh):
    model, plain = made(name)
    arrays = batch()[0]

    def loss(params, tokens, positions, segments, prefixes):
        out = jax.nn.log_softmax(model.logits(params, model.hidden(params, tokens, positions, segments, prefixes)))
        out = jnp.where((segments > 0)[..., None], out, 0.0)
        return jnp.sin(out).sum(), out

    run = jax.grad(loss, has_aux=True)
    want = jax.device_get(jax.jit(run, compiler_options=QUICK)(plain, *arrays))
    with jax.set_mesh(mesh):
        layout = sharding.param_shardings(mesh, model.logical_axes(), jax.eval_shape(model.init, jax.random.key(0)))
        params = jax.device_put(plain, layout)
        got = jax.jit(run, out_shardings=(layout, None), compiler_options=QUICK)(
            params, *jax.device_put(arrays, sharding.batch_sharding(mesh)))
    matrices = [x for x in jax.tree.leaves(params) if x.ndim > 2 or x.ndim == 2 and min(x.shape) > 8]
    held = sum(x.addressable_shards[0].data.size for x in matrices) / sum(x.size for x in matrices)
    gaps = jax.tree.map(lambda a, b: float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)) if np.any(b) else float(np.abs(a).max()),
                        got[0], want[0])
    return {"name": name, "log_probs": float(np.abs(np.asarray(got[1]) - want[1]).max()), "gradient": max(jax.tree.leaves(gaps)), "held": held}


four = sharding.make_mesh(ml_collections.ConfigDict({"dp": 1, "fsdp": 2, "tp": 2}))
for each in sys.argv[1:]:
    print(json.dumps(case(each, four)), flush=True)
