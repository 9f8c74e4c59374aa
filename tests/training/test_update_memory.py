"""Gradients that are added to their sums in the backward pass: the memory of an update, by XLA's own account, and the sums themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import models, training
from jaxrl.certify import update as tiny_update
from jaxrl.config.load import default_config
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


EXPERTS = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "head_dim": 8, "tie_word_embeddings": False}


@pytest.mark.full
@pytest.mark.parametrize("name, model, options", [
    ("scanned", {}, {}), ("unrolled", {}, {"model.scan_layers": "false"}), ("experts after dense layers", EXPERTS, {}),
    ("adapter", {}, {"lora.rank": 4, "lora.alpha": 8.0})])
def test_sums_in_place_are_the_sums_bit_for_bit(name, model, options, monkeypatch, tmp_path):
    """On jax 0.10 both ways are the same one."""
    small, hf = tiny_update.small, tiny_update.MODEL | model
    monkeypatch.setattr(tiny_update, "MODEL", hf)

    def changed(config, folder):
        c = small(config, folder)
        for option, value in {"model.scan_layers": "true", **options}.items():
            group, leaf = option.split(".")
            c[group][leaf] = value
        return c

    monkeypatch.setattr(tiny_update, "small", changed)
    mesh, out = jax.sharding.get_mesh(), []
    for in_place in {False, update.IN_PLACE}:
        monkeypatch.setattr(update, "IN_PLACE", in_place)
        tiny = tiny_update.Tiny(default_config(), tmp_path / str(in_place)).start()
        out.append(tiny.gradients(tiny.case(), tokens=tiny_update.ROW))  # several microbatches
    jax.set_mesh(mesh)
    for step, other in zip(out[0], out[-1], strict=True):
        assert any(x.any() for x in step.values()) and all(np.array_equal(step[key], other[key]) for key in step)
