# ruff: noqa: E402, I001
"""Run by test_lora in a process with eight simulated devices: adapters start, run, differentiate and merge sharded. Prints one JSON line."""

import dataclasses
import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
import ml_collections
import numpy as np
from flax.traverse_util import flatten_dict
from helpers.lora_cases import HF, all_linear, batch, build, loss, started

from jaxrl import sharding
from jaxrl.models import adapters

QUICK = {"xla_backend_optimization_level": 0}
model = build(all_linear(skip=((1, "mlp.up_proj"),)), scan=True)
mesh = sharding.make_mesh(ml_collections.ConfigDict({"dp": 2, "fsdp": 2, "tp": 2}))
plain, rows = started(model), batch()
program = jax.jit(lambda p, *rows: (model.hidden(p, *rows), jax.grad(loss, argnums=1)(model, p, *rows)), compiler_options=QUICK)
want = jax.device_get(program(plain, *rows))
start = jax.device_get(model.init(jax.random.key(0)))
whole = jax.device_get(adapters.merged(model, plain))
told = adapters.digest(plain)
with jax.set_mesh(mesh):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    layout = sharding.param_shardings(mesh, model.logical_axes(), shapes)
    same = jax.jit(model.init, out_shardings=layout)(jax.random.key(0))
    params = jax.device_put(plain, layout)
    hidden, grads = program(params, *jax.device_put(rows, sharding.batch_sharding(mesh)))
    merged = jax.jit(lambda p: adapters.merged(model, p))(params)
    digest = adapters.digest(params)


few, text = {}, batch()  # a base in few bits: split by whole blocks, the same numbers
for kind in ("int8", "nf4"):
    own = build(dataclasses.replace(all_linear(), quantized=kind), {**HF, "hidden_size": 128, "intermediate_size": 256}, scan=True)
    alone = own.init(jax.random.key(0))
    run = jax.jit(lambda p, *rows, own=own: own.hidden(p, *rows), compiler_options=QUICK)
    here = jax.device_get(run(alone, *text))
    with jax.set_mesh(mesh):
        own_layout = sharding.param_shardings(mesh, own.logical_axes(), alone)
        there = run(jax.device_put(alone, own_layout), *jax.device_put(text, sharding.batch_sharding(mesh)))
    specs = flatten_dict(own_layout["layers"]["sub_0"], sep="/")
    few[kind] = [float(np.abs(np.asarray(there) - here).max()),
                 {n: list(specs[f"mlp/{n}"].spec) for n in ("down/kernel/codes", "down/kernel/scale", "up/kernel/codes")}]


def worst(a, b):
    return max(float(np.abs(np.asarray(x) - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


flat = flatten_dict(layout, sep="/")
names = [f"{m}/lora/{leaf}" for m in ("attention/query", "attention/out", "mlp/down") for leaf in "ab"]
specs = {n: list(flat[f"layers/sub_0/{n}"].spec) for n in names}
print(json.dumps({"devices": mesh.size, "start": worst(same, start) == 0, "digest": bool((digest == told).all()), "specs": specs,
                  "few": few,
                  "hidden": worst(hidden, want[0]), "gradient": worst(grads, want[1]), "merged": worst(merged, whole)}))
