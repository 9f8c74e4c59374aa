"""Terms of the routers: token sums with a load of the whole update, so that no layout of a batch changes their gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import model_cases
from helpers.tiers import first_cases
from helpers.training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import training
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.models import build
from jaxrl.run.model_checks import check_layers
from jaxrl.training import router
from jaxrl.training.layout import RowShapes
from jaxrl.training.update import loss_and_metrics, make_apply

MOE = {**HF, "model_type": "qwen2_moe", "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0],
       "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
GLM = {**HF, "model_type": "glm4_moe", "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "head_dim": 8,
       "tie_word_embeddings": False}
LAYOUTS = {"padded": (24, 20, False), "packed": (48, 16, False), "shared": (48, 16, True), "8 microbatches": (48, 1, True)}
LOSS = policy_objective(max_grad_norm=0.0, router_balance=0.3, router_z=0.02)


def batches_of(traj, columns, name, dtype):
    length, rows, share = LAYOUTS[name]
    layout = training.make_layout(traj.sizes, RowShapes((length,), ((rows,),)), share_prompts=share)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    return [jax.tree.map(jnp.asarray, training.pack(traj, m, columns, weights, dtype)) for m in layout.minibatches[0].microbatches]


def state_of(model, params, load=None):
    trainable, frozen = training.partition(params, (".*",), ())
    return training.init_state(trainable, frozen, optax.sgd(1.0), router_load=router.even_load(model.config) if load is None else load)


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


@first_cases(1, "scan", (False, True))
def test_the_bias_of_routers_follows_the_load(scan):
    """Up where an expert had less than the mean, down where it had more, by the rate, less their mean; in the layers that
    have experts, of updates that count."""
    model = build(MOE, compute_dtype=jnp.float32, scan_layers=scan)
    names = ["layers/sub_0/mlp/router/correction"] if scan else [f"layer_{i}/mlp/router/correction" for i in (1, 2)]
    shape = (2, 5) if scan else (5,)
    frozen = {"layer_0/x": jnp.ones(3)} | {name: jnp.full(shape, 0.5) for name in names}
    state = training.init_state({"w": jnp.ones(2)}, frozen, optax.sgd(1.0), router_load=router.even_load(model.config))
    load = np.array([[0.6, 0.2, 0.1, 0.1, 0.0], [0.2] * 5])
    apply = make_apply(optax.sgd(1.0), lambda i: 1.0, dataclasses.replace(LOSS, router_bias_rate=0.1), model)
    metrics = {"loss": jnp.float32(0), "router/load": jnp.asarray(load, jnp.float32)}
    moved = apply(state, {"w": jnp.zeros(2)}, metrics)[0].frozen
    found = np.asarray(moved[names[0]]) if scan else np.stack([moved[name] for name in names])
    sign = np.array([-1, 0, 1, 1, 1])
    np.testing.assert_allclose(found, 0.5 + 0.1 * np.stack([sign - sign.mean(), np.zeros(5)]), atol=1e-6)
    assert (moved["layer_0/x"] == 1).all()
    still = apply(state, {"w": jnp.full(2, jnp.nan)}, metrics)[0].frozen  # an update that is skipped
    own = make_apply(optax.sgd(1.0), lambda i: 1.0, LOSS, model)(state, {"w": jnp.zeros(2)}, metrics)[0].frozen
    for name in frozen:
        assert (still[name] == frozen[name]).all() and (own[name] == frozen[name]).all()


@pytest.mark.slow
def test_an_update_moves_the_bias_of_a_family_that_has_one():
    """GLM-4.5's: after an update it has moved by the load that was met, and nothing else that does not train."""
    model = build(GLM, compute_dtype=jnp.float32, scan_layers=True)
    assert router.has_correction(model)
    params, (traj, columns) = params_of(model), batch_of_groups(groups=2, size=2)
    name = "layers/sub_0/mlp/router/correction"
    trainable, frozen = training.partition(params, (".*",), (name,))
    state = training.init_state(trainable, frozen, optax.sgd(0.1), router_load=router.even_load(model.config))
    objective = dataclasses.replace(LOSS, router_balance=0.0, router_z=0.0, router_bias_rate=0.01)
    state, told = training.make_update(model, optax.sgd(0.1), lambda i: 0.1, objective)(state, batches_of(traj, columns, "shared", np.float32))
    load, moved = np.asarray(state.stats["router_load"]), np.asarray(state.frozen[name])
    step = 0.01 * np.sign(0.2 - load)
    np.testing.assert_allclose(moved, step - step.mean(1, keepdims=True), atol=1e-6)
    assert set(state.frozen) == {name} and np.abs(moved).max() > 0


@pytest.mark.full
def test_the_bias_evens_a_load():
    """Tokens whose logits favour two experts of eight: the bias spreads them over all, and what is added to all experts alike
    is never moved."""
    model = build({**MOE, "num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 8}, compute_dtype=jnp.float32, scan_layers=False)
    rng, name = np.random.default_rng(0), "layer_0/mlp/router/correction"
    logits, bias, worst = rng.normal(size=(4096, 8)) + [2, 2, 0, 0, 0, 0, 0, -1], {name: jnp.zeros(8)}, []
    for _ in range(400):
        chosen = np.argsort(-(logits + np.asarray(bias[name])), axis=1)[:, :2]
        load = np.bincount(chosen.ravel(), minlength=8)[None] / chosen.size
        worst.append(load.max() * 8)
        bias = router.correct_bias(model, bias, jnp.asarray(load), 0.02)
    assert worst[0] > 3 and max(worst[-20:]) < 1.1 and abs(float(bias[name].sum())) < 1e-4


def test_a_router_without_a_bias_is_told():
    model = build(MOE, compute_dtype=jnp.float32, scan_layers=False)
    for options, text in (({"train.router_bias_rate": 0.1}, "without a bias"), ({"algorithm.routes": "sampled"}, "without experts")):
        c = default_config()
        for key, value in options.items():
            put(c, key, value)
        with pytest.raises(ConfigError, match=text):
            check_layers(c, model if "bias" in text else build(HF, compute_dtype=jnp.float32, scan_layers=False))


@pytest.mark.parametrize("option, value", [("lora.rank", 4), ("lora.path", "an/adapter")])
def test_the_bias_of_a_frozen_base_cannot_be_trained(option, value):
    model = build(GLM, compute_dtype=jnp.float32, scan_layers=False)
    c = default_config()
    put(c, "train.router_bias_rate", 0.1)
    put(c, option, value)
    with pytest.raises(ConfigError, match=f"with {option}={value!r}: the base of adapters"):
        check_layers(c, model)


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
    (_, even), _ = run(trainable, 0.5, 0.25, router.even_load(model.config))
    np.testing.assert_allclose(even["router/balance"], 1, rtol=1e-5)
    assert 0 < told["router/entropy"] <= np.log(5)
    shown = router.summarize_load({"router/load": jnp.asarray([[0.5, 0.5, 0, 0, 0], [0.2] * 5])})
    assert float(shown["router/load_max_over_mean"]) == 2.5 and np.isclose(shown["router/idle"], 0.3)


@pytest.mark.slow
def test_an_even_load_has_no_gradient():
    model, trainable, run = case()
    (_, at_plain), (_, at_even) = (run(trainable, coef, 0.0, router.even_load(model.config)) for coef in (0.0, 0.5))
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
