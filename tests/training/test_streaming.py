"""Parameters, gradients and optimizer states that are in host memory while an update runs, beside those on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases
from helpers.training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import models, training
from jaxrl.config.load import default_config
from jaxrl.roles.parameters import flat_axes, flat_layers, move_to_host
from jaxrl.sharding import memory
from jaxrl.training import streaming
from jaxrl.training.layout import RowShapes
from jaxrl.training.optimizer import BY_NUMBER

LOSS = policy_objective(kl_coef=0.1, entropy_coef=0.01, old="column", chunk=32, max_grad_norm=0.01)


@pytest.fixture(autouse=True)
def small_things_pay(monkeypatch):
    """Matrices of tiny models go to host memory, vectors do not; and they come in several parts."""
    monkeypatch.setattr(memory, "WORTH_IT", 4096)
    monkeypatch.setattr(streaming, "PART_BYTES", 16384)
    monkeypatch.setattr(streaming, "TILE", 1)


@pytest.fixture(scope="module", autouse=True)
def compiled_in_haste():
    """Without LLVM's dear passes: nothing here is about speed, and compiling is what it takes time for."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def kinds(tree):
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)


def two_steps(model, place: str, name="adamw", poison=False):
    """(state, metrics, names of parameters and gradients in host memory) behind two steps of two microbatches, in float64.
    place: what is in host memory: nothing, "optimizer" or "all"."""
    traj, columns = batch_of_groups()
    if poison:
        columns["advantage"] = np.full(len(traj.tokens), np.nan)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    c = default_config().optimizer
    c.lr, c.name, c.warmup_steps, c.layer_decay, c.weight_decay = 1e-2, name, 0, 0.9, 0.1
    c.groups = {"down": {"lr": 0.5, "weight_decay": 0.0}} if name == "adamw" else {}
    optimizer, schedule = training.make_optimizer(c, 10, flat_axes(model), flat_layers(model, model))
    state = training.init_state(*training.partition(params_of(model, np.float64), (".*",), ("gate",)), optimizer)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    if place == "all":
        state = state.replace(trainable=move_to_host(state.trainable), frozen=move_to_host(state.frozen))
    if place:
        state = state.replace(opt_state=streaming.init_in_parts(optimizer, state.trainable, memory.kept(like.opt_state)))
    update = training.make_update(model, optimizer, schedule, LOSS, training.in_parts(name))
    micros = training.make_layout(traj.sizes, RowShapes((48,), ((4,),)), share_prompts=True).minibatches[0].microbatches
    assert len(micros) > 1
    batches = [jax.tree.map(jnp.asarray, training.pack(traj, m, columns, weights, np.float64)) for m in micros]
    before = kinds(state)
    grads, _ = update.gradients(state, batches)
    for _ in range(2):
        state, metrics = update(state, batches)
    assert kinds(state) == before
    return state, metrics, [{k for k, x in tree.items() if memory.rests(x)} for tree in (state.trainable, grads)]


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@first_cases(1, "scan, name, places", [
    pytest.param(True, "adamw", ("optimizer", "all"), marks=pytest.mark.slow),
    pytest.param(True, "adafactor", ("optimizer", "all"), marks=pytest.mark.nightly),
    pytest.param(False, "lion", ("all",), marks=pytest.mark.nightly)])
def test_an_update_in_host_memory_is_the_update(scan, name, places):
    """Clipped, decayed by layer, in groups, with frozen and small parameters, a tied head and gradients over microbatches."""
    with jax.enable_x64(True):
        model = models.build(HF | {"num_hidden_layers": 4}, compute_dtype=jnp.float64, scan_layers=scan, remat="full")
        plain, told, _ = two_steps(model, "", name)
        assert told["optim/grad_norm"] > 10 * LOSS.max_grad_norm
        for place in places:
            state, metrics, (far, grads) = two_steps(model, place, name)
            close((plain, told), (state, metrics))
            matrices = {k for k, x in state.trainable.items() if x.nbytes >= 4096}
            assert far == grads == (matrices if place == "all" else set()) and 0 < len(matrices) < len(state.trainable)
            moments = {x.shape for x in jax.tree.leaves(state.opt_state) if memory.rests(x)}
            assert moments and memory.HOST in set(kinds(state.frozen).values()) - {None} or place == "optimizer"


@pytest.mark.slow
def test_a_non_finite_update_in_host_memory_changes_nothing():
    model = models.build(HF | {"num_hidden_layers": 4}, compute_dtype=jnp.float64, scan_layers=True, remat="full")
    with jax.enable_x64(True):
        start = training.partition(params_of(model, np.float64), (".*",), ("gate",))[0]
        state, metrics, _ = two_steps(model, "all", poison=True)
        for name, x in start.items():
            np.testing.assert_array_equal(x, state.trainable[name])
        assert all(not np.any(x) for x in jax.tree.leaves(state.opt_state)) and state.stats["skipped"] == 2


def test_a_second_use_of_a_streamed_parameter_is_no_second_sum():
    """The tied table is embedding and head: its gradient sum counts what was there once (the test above would see it,
    too). And the rule that such a leaf is fetched once holds by its own."""
    value, total = (memory.to_host(jax.device_put(np.full((4, 4), x))) for x in (2.0, 3.0))
    grad = jax.jit(jax.grad(lambda s: jnp.sum(jnp.square(memory.fetched(memory.Streamed(value, s))))))(total)
    assert memory.rests(grad)
    np.testing.assert_array_equal(grad, np.full((4, 4), 3.0 + 2 * 2.0))


@pytest.mark.slow
def test_an_optimizer_by_rows_is_one_by_rows():
    """A step in rows of one that looks at all of a parameter would be another step."""
    params = {"w": jax.random.normal(jax.random.key(0), (4, 8, 8))}
    for name in BY_NUMBER:
        c = default_config().optimizer
        c.lr, c.name, c.warmup_steps = 1e-2, name, 0
        optimizer, _ = training.make_optimizer(c, 10, {"w": ("layers", "embed", "mlp")})
        step = lambda p: optimizer.update(p, optimizer.init(p), p)[0]["w"]  # noqa: B023, E731
        np.testing.assert_allclose(step(params)[:1], step({"w": params["w"][:1]}), rtol=1e-5)
    assert [training.in_parts(name) for name in ("adamw", "adafactor", "optax.contrib.muon")] == ["rows", "parameter", "none"]


@pytest.mark.full
@pytest.mark.parametrize("shape, whole, rows", [
    ((28, 64, 64), False, 4), ((28, 640, 640), False, 1), ((28, 64, 64), True, 28), ((4096, 64), False, 256), ((97, 640), False, 97),
    ((6,), False, 6)])
def test_rows_at_once(monkeypatch, shape, whole, rows):
    """They divide the first axis, fit AT_ONCE, and are whole tiles of a matrix."""
    monkeypatch.setattr(streaming, "PART_BYTES", 4 * 64 * 64 * 4)
    monkeypatch.setattr(streaming, "TILE", 16)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert streaming.rows_at_once(jax.ShapeDtypeStruct(shape, np.float32, sharding=where), whole) == rows

