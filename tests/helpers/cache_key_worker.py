"""What jax's compilation cache would look for: a hash of the decode program and one of the update's, lowered for a chip that
is not here, in a process that has lowered them in this order and maybe another program with kernels before.

    python cache_key_worker.py gpu|tpu [prefill] [update] decode ...        (prints one JSON object)
"""

import hashlib
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import cache_key
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from helpers.training_helpers import HF, batch_of_groups, policy_objective
from jaxrl import models, training
from jaxrl.rollout.embedded import _empty_table
from jaxrl.rollout.programs import decode_chunk
from jaxrl.rollout.shapes import Shapes
from jaxrl.sharding.mesh import AXES
from jaxrl.training.layout import RowShapes
from jaxrl.training.update import make_accumulate, make_scaled

KINDS = {"gpu": ("cuda", "gpu", "NVIDIA H200"), "tpu": ("tpu", "tpu", "TPU v5 lite")}
SHAPES = Shapes((8,), (256,), (512,), 2, 2, 4, 1, 512)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def programs(kind: str):
    """Name -> (function, shapes of its arguments)."""
    model = models.build({**HF, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
                         compute_dtype=jnp.bfloat16, scan_layers=True, remat="full", attention=kind)
    params = jax.eval_shape(model.init, jax.random.key(0))
    cache = jax.eval_shape(lambda: model.init_cache(8, 512, jnp.bfloat16))
    progress, controls = shapes(_empty_table(SHAPES))
    decode = lambda *args: decode_chunk(model, 4, 0, *args)  # noqa: E731
    optimizer, (traj, columns) = optax.sgd(1.0), batch_of_groups()
    layout = training.make_layout(traj.sizes, RowShapes((256,), ((2,),)), share_prompts=True)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    batch = shapes(training.pack(traj, layout.minibatches[0].microbatches[0], columns, weights))
    state = jax.eval_shape(lambda p: training.init_state(*training.partition(p, (".*",), ()), optimizer), params)
    scaled = make_scaled(model, policy_objective(chunk=32))
    metrics = jax.eval_shape(scaled, state.trainable, state.frozen, batch, state.stats)[1]
    return {
        "prefill": (lambda *args: model.prefill(*args), (params, jax.ShapeDtypeStruct((2, 256), jnp.int32),
                                                         jax.ShapeDtypeStruct((2,), jnp.int32))),
        "decode": (decode, (params, cache, progress, controls, jax.ShapeDtypeStruct((8, 512), jnp.int32),
                            jax.ShapeDtypeStruct((), jnp.int32))),
        "update": (make_accumulate(scaled), (state.trainable, state.frozen, state.stats, state.trainable, metrics, (batch,), None)),
    }


def main():
    kind, *names = sys.argv[1:]
    platform, device, name = KINDS[kind]
    found = {}
    mesh = AbstractMesh((1,) * 5, AXES, (AxisType.Auto,) * 5, abstract_device=AbstractDevice(name, None, device))
    with jax.sharding.use_abstract_mesh(mesh):
        made = programs(kind)
        for name in names:
            function, args = made[name]
            lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
            key = hashlib.sha256()
            cache_key._hash_computation(key, lowered.compiler_ir(), False)
            found[name] = [key.hexdigest(), lowered.as_text().count("custom_call @" + ("mosaic_gpu" if kind == "gpu" else "tpu"))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
