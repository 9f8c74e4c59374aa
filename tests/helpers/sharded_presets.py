"""The gradient of a loss with sums over sequences, on four data shards against one: prints JSON. Run by test_presets.py."""

import json

import jax
import numpy as np
import optax

from helpers.preset_losses import LOSSES, weights_of
from helpers.training_helpers import batch_of_groups, gradient, layout_of, params_of, tiny_model, worst
from jaxrl import sharding, training
from jaxrl.config.load import default_config


def main():
    model = tiny_model()
    params, loss = params_of(model), LOSSES["means"]
    traj, columns = batch_of_groups()
    weights, layout = weights_of(traj, "gspo"), layout_of(traj, "packed_shared_2_microbatches")
    truth, _ = gradient(model, params, traj, columns, weights, layout, np.float32, loss)
    truth = jax.device_get(truth)
    config = default_config()
    config.mesh.dp, config.mesh.fsdp = 2, 2
    mesh = sharding.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    optimizer = optax.sgd(1.0)
    update = training.make_update(model, optimizer, lambda i: 1.0, loss)
    state = training.init_state(*training.partition(params, (".*",), ()), optimizer)
    state = jax.device_put(state, sharding.replicated(mesh))
    batches = (jax.device_put(training.pack(traj, m, columns, weights), sharding.batch_sharding(mesh))
               for m in layout.minibatches[0].microbatches)
    got, _ = update.gradients(state, batches)
    print(json.dumps({"devices": jax.device_count(), "worst": worst(jax.device_get(got), truth)}))


if __name__ == "__main__":
    main()
