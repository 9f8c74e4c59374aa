"""Terms of the routers: token sums with a load of the whole update, so that no layout of a batch changes their gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import optax
import pytest
from training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import training
from jaxrl.models import build
from jaxrl.training import router
from jaxrl.training.layout import RowShapes
from jaxrl.training.update import loss_and_metrics

MOE = {**HF, "model_type": "qwen2_moe", "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0],
       "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
LAYOUTS = {"padded": (24, 20, False), "packed": (48, 16, False), "shared": (48, 16, True), "8 microbatches": (48, 1, True)}
LOSS = policy_objective(max_grad_norm=0.0, router_balance=0.3, router_z=0.02)


def batches_of(traj, columns, name, dtype):
    length, rows, share = LAYOUTS[name]
    layout = training.make_layout(traj.sizes, RowShapes((length,), ((rows,),)), share_prompts=share)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    return [jax.tree.map(jnp.asarray, training.pack(traj, m, columns, weights, dtype)) for m in layout.minibatches[0].microbatches]


def state_of(model, params, load=None):
    trainable, frozen = training.partition(params, (".*",), ())
    return training.init_state(trainable, frozen, optax.sgd(1.0), router_load=router.even(model.config) if load is None else load)


@pytest.mark.slow
def test_no_layout_changes_the_gradient():
    """Padded or packed, prompts shared or not, 1 microbatch or 8: 1e-12 in float64, and the same load of experts."""
    with jax.enable_x64(True):
        model = build(MOE, compute_dtype=jnp.float64, scan_layers=True)
        params, (traj, columns) = params_of(model, jnp.float64), batch_of_groups(groups=5, size=4)
        update = training.make_update(model, optax.sgd(1.0), lambda i: 1.0, LOSS)
        uneven = np.random.default_rng(0).dirichlet(np.ones(5), 2)
        found = {}
        for name in LAYOUTS:
            batches = batches_of(traj, columns, name, np.float64)
            found[name] = update.gradients(state_of(model, params, uneven), batches)
        assert len(batches) > 4
        truth, metrics = found.pop("padded")
        for name, (grads, own) in found.items():
            for key, want in truth.items():
                assert np.linalg.norm(grads[key] - want) < 1e-12 * np.linalg.norm(want), (name, key)
            np.testing.assert_allclose(own["router/load"], metrics["router/load"], atol=1e-12)
        np.testing.assert_allclose(metrics["router/load"].sum(1), 1, atol=1e-12)


def case():
    model = build({**MOE, "num_hidden_layers": 2, "mlp_only_layers": []}, compute_dtype=jnp.float32, scan_layers=False)
    params, (traj, columns) = params_of(model), batch_of_groups(groups=2, size=2)
    batch = batches_of(traj, columns, "shared", np.float32)[0]
    trainable, frozen = training.partition(params, (".*",), ())

    def loss(t, balance, z, load):
        objective = dataclasses.replace(LOSS, router_balance=balance, router_z=z)
        return loss_and_metrics(t, frozen, batch, model, objective, None, load)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 2), compiler_options=model_cases.QUICK)
    return model, trainable, run


@pytest.mark.slow
def test_terms_are_what_their_formulas_say():
    """Coefficients weigh what the metrics tell, over both layers; a load that is even makes the balance 1."""
    model, trainable, run = case()
    load = np.random.default_rng(1).dirichlet(np.ones(5), 2).astype(np.float32)
    (plain, none), at_plain = run(trainable, 0.0, 0.0, load)
    (both, told), at_both = run(trainable, 0.5, 0.25, load)
    assert {"router/balance", "router/z"} <= set(told) and not {"router/balance", "router/z"} & set(none)
    np.testing.assert_allclose(both - plain, 2 * (0.5 * told["router/balance"] + 0.25 * told["router/z"]), rtol=1e-4)
    assert any(np.abs(at_both[k] - at_plain[k]).max() > 1e-4 for k in trainable if "router" in k)
    (_, even), _ = run(trainable, 0.5, 0.25, router.even(model.config))
    np.testing.assert_allclose(even["router/balance"], 1, rtol=1e-5)
    assert 0 < told["router/entropy"] <= np.log(5)
    shown = router.told({"router/load": jnp.asarray([[0.5, 0.5, 0, 0, 0], [0.2] * 5])})
    assert float(shown["router/load_max_over_mean"]) == 2.5 and np.isclose(shown["router/idle"], 0.3)


@pytest.mark.slow
def test_an_even_load_has_no_gradient():
    model, trainable, run = case()
    (_, at_plain), (_, at_even) = (run(trainable, coef, 0.0, router.even(model.config)) for coef in (0.0, 0.5))
    for key in trainable:
        np.testing.assert_allclose(at_even[key], at_plain[key], rtol=1e-3, atol=2e-6)


@pytest.mark.slow
def test_an_update_keeps_its_load_for_the_next():
    model = build(MOE, compute_dtype=jnp.float32, scan_layers=True)
    params, (traj, columns) = params_of(model), batch_of_groups(groups=2, size=2)
    update = training.make_update(model, optax.sgd(0.0), lambda i: 0.0, LOSS)
    batches = batches_of(traj, columns, "shared", np.float32)
    state = state_of(model, params)
    load = np.asarray(update.gradients(state, batches)[1]["router/load"])
    state, first = update(state, batches)
    np.testing.assert_allclose(state.stats["router_load"], load, rtol=1e-6)
    _, second = update(state, batches)
    assert np.isclose(first["router/balance"], 1) and second["router/balance"] > 1 and "router/load" not in second
    assert first["router/load_max_over_mean"] == pytest.approx(load.max() * 5)
