# ruff: noqa: E402, I001
"""Run by test_vision_meshes in a process with eight simulated devices: log-probs and gradients of a model with a tower, of packed rows with
images on some shards only, on meshes and on one device.

Prints one JSON line a mesh. Usage: sharded_vision.py KIND DP,FSDP,CP,TP ... KIND with _video behind it: with videos among the images.
"""

import dataclasses
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

from helpers import video_cases
from helpers import vision_cases as cases
from jaxrl import sharding, training
from jaxrl.models import build
from jaxrl.models.families import IMAGES
from jaxrl.training.layout import RowShapes, make_layout
from jaxrl.training.pack import pack
from training.test_packed_images import batch

name, *shapes = sys.argv[1:]
kind = name.removesuffix("_video")
text, tower = cases.KINDS[kind]
small = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 4, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
tower = {**tower, **{field: value for field, value in small.items() if field in tower}}
if name != kind:
    tower |= {"video": True}
model = build({**text, "num_hidden_layers": 2, "model_type": f"{kind}_text", IMAGES: tower}, compute_dtype=jnp.float32, scan_layers=True,
              remat="full")
params = jax.jit(model.init)(jax.random.key(1))
if name == kind:
    whole = batch()
    traj = dataclasses.replace(whole, pictures=whole.pictures._replace(window=model.config.vision.window))
else:
    traj = video_cases.trajectories(kind, model.config.vision.window)
objective = training.NextToken(chunk=64)
weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")


def found(mesh, cp, shards):
    """(log-probs [T], gradients, whether a shard has rows of text alone beside one with images)."""
    layout = make_layout(traj.sizes, RowShapes((64,), ((8,),), shards=shards, ranks=cp, patches=(128,)))
    put = (lambda x: jax.device_put(x, sharding.batch_sharding(mesh))) if mesh is not None else (lambda x: jax.tree.map(jnp.asarray, x))
    micros = layout.minibatches[0].microbatches
    packed = [pack(traj, m, {}, {"token": weights["token"]}) for m in micros]
    text_alone = False
    for one in packed:
        if one.images is not None:
            seen = [bool(part.any()) for part in np.split(one.images.segments, shards)]
            text_alone |= True in seen and False in seen
    score = training.make_score(model, temperature=1.0, chunk=64, put=put)(params, traj, layout)

    def loss(params, rows):
        one = training.objective.Outputs(model, params, rows, objective)
        return -(one.logprobs()[0] * rows.weights["token"]).sum()

    grads = None
    for one in packed:
        own = jax.jit(jax.grad(loss))(params, put(one))
        grads = own if grads is None else jax.tree.map(jnp.add, grads, own)
    return score, jax.device_get(grads), text_alone


want, gradient, _ = found(None, 1, 1)
assert (want != 0).any()
for shape in shapes:
    dp, fsdp, cp, tp = map(int, shape.split(","))
    mesh = sharding.make_mesh(ml_collections.ConfigDict({"dp": dp, "fsdp": fsdp, "cp": cp, "ep": 1, "tp": tp}))
    with jax.set_mesh(mesh):
        layout = sharding.param_shardings(mesh, model.logical_axes(), jax.eval_shape(model.init, jax.random.key(0)))
        held, params = params, jax.device_put(params, layout)
        got, grads, text_alone = found(mesh, cp, dp * fsdp)
        split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params["vision"]))
        params = held
    worst = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in zip(*map(jax.tree.leaves, (grads, gradient)), strict=True))
    own = [np.abs(x).max() > 0 for x in jax.tree.leaves(grads["vision"])]
    print(json.dumps({"mesh": shape, "logprobs": float(np.abs(got - want).max()), "gradient": worst, "tower_learns": bool(all(own)),
                      "text_alone": text_alone, "split": split}))
