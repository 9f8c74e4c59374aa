"""What an update holds beside the sums of its gradients, by XLA's own account."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import models, training
from jaxrl.training import update
from jaxrl.training.layout import RowShapes


@pytest.mark.full
def test_gradients_of_scanned_layers_are_added_where_they_are_computed():
    """The layers' gradients are the largest thing of this update: its temporaries are a part of them, unless jax is too old."""
    model = models.build({**HF, "num_hidden_layers": 16, "intermediate_size": 512}, compute_dtype=jnp.float32,
                         scan_layers=True, remat="full")
    optimizer, (traj, columns) = optax.sgd(1.0), batch_of_groups(groups=1, size=2)
    layout = training.make_layout(traj.sizes, RowShapes((48,), ((1,),)), share_prompts=True)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    batch = jax.tree.map(jnp.asarray, training.pack(traj, layout.minibatches[0].microbatches[0], columns, weights))
    state = training.init_state(*training.partition(params_of(model), (".*",), ()), optimizer)
    empty, accumulate, _ = training.make_update(model, optimizer, lambda i: 1.0, policy_objective(chunk=32)).compiled(state)
    carry = empty(state.trainable, state.frozen, batch)
    program = accumulate.lower(state.trainable, state.frozen, state.stats, *carry, (batch,), None).compile()
    of_layers = sum(x.nbytes for name, x in carry[0].items() if name.startswith("layers"))
    assert (program.memory_analysis().temp_size_in_bytes < of_layers / 2) == update.IN_PLACE
