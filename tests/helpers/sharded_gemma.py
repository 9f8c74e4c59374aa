# ruff: noqa: E402, I001
"""Run by test_vision_gemma in a process with eight simulated devices: Gemma 3 with images on meshes against one device.

Prints the largest differences of logits and of gradients as one JSON line. Usage: sharded_gemma.py FOLDER
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
import jax.numpy as jnp
import ml_collections
import numpy as np

from helpers import vision_cases as cases
from jaxrl import sharding
from jaxrl.models import build
from jaxrl.models.io import hf

QUICK = {"xla_backend_optimization_level": 0}
MESHES = [({"dp": 2, "fsdp": 2, "tp": 2}, {}), ({"fsdp": 2, "cp": 2, "tp": 2}, {}), ({"dp": 2, "cp": 4}, {"ring": True}),
          ({"cp": 2, "fsdp": 4}, {"attention": "blockwise"})]


def main(folder):
    described = hf.load_config(folder, images=True)
    pieces = [[5, cases.GEMMA_GRID, 3], [9], [2, cases.GEMMA_GRID, 1, cases.GEMMA_GRID, 2], [7]]  # images on some devices alone
    own = []
    for i, each in enumerate(pieces * 2):
        ids, firsts, grids = cases.sequence(i, each, 4)
        own.append((ids, firsts, grids, [cases.pixels(10 * i + k, grid) for k, grid in enumerate(grids)]))
    arrays, images, _ = cases.rows(own, length=32, room=128, merge=4, two_way=True)
    real = jnp.asarray(arrays[2] > 0)[..., None]
    out = []
    for mesh, options in [({}, {}), *MESHES]:
        model = build(described, compute_dtype=jnp.float32, scan_layers=True, remat="full", **options)

        def loss(params, arrays, images, model=model):
            logits = model.logits(params, model.hidden(params, *arrays, images=images))
            return jnp.sum(jnp.where(real, jnp.sin(jax.nn.log_softmax(logits)), 0)), logits

        run = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)
        if not mesh:
            want = jax.device_get(run(hf.load_params(model, folder), arrays, images))
            continue
        mesh = sharding.make_mesh(ml_collections.ConfigDict(mesh))
        with jax.set_mesh(mesh):
            layout = sharding.param_shardings(mesh, model.logical_axes(), jax.eval_shape(model.init, jax.random.key(0)))
            params = hf.load_params(model, folder, shardings=layout)
            got = jax.device_get(run(params, *jax.device_put((arrays, images), sharding.batch_sharding(mesh))))
        real_logits = np.asarray(real)
        gradients = [np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in zip(*map(jax.tree.leaves, (got[0], want[0])), strict=True)]
        out.append([float(np.abs(np.where(real_logits, got[1] - want[1], 0)).max()), float(max(gradients))])
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
