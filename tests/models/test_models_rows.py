"""A family is rows and functions: experts stacked inside the scan's stack, behind a first dense layer, with something
for the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_models import SIZES
from helpers.training_helpers import batch_of_groups

from jaxrl import training
from jaxrl.models import build, decoder
from jaxrl.models.decoder import Part
from jaxrl.models.io import hf
from jaxrl.models.parameters import Row
from jaxrl.rollout import weights
from jaxrl.training import score, update

EXPERTS, WIDTH, LAYERS = 3, 24, 6
LLAMA = {**SIZES, "model_type": "llama", "num_hidden_layers": LAYERS, "architectures": ["LlamaForCausalLM"]}
ROWS = (
    Row("router/kernel", ("embed", None), "mlp.router.weight", 1, sizes=("hidden_size", EXPERTS)),
    Row("experts/up/kernel", (None, "embed", "mlp"), "mlp.experts.{}.up.weight", 1, sizes=(EXPERTS, "hidden_size", WIDTH), stacked=1,
        share=1 / EXPERTS),
    Row("experts/up/bias", (None, "mlp"), "mlp.experts.{}.up.bias", init="zero", sizes=(EXPERTS, WIDTH), stacked=1),
    Row("experts/down/kernel", (None, "mlp", "embed"), "mlp.experts.{}.down.weight", 1, sizes=(EXPERTS, WIDTH, "hidden_size"),
        stacked=1, share=1 / EXPERTS),
)


def best_expert(own, x):
    """Each token's best expert, times its probability; beside it the squares of the mean probabilities."""
    gates = jax.nn.softmax(own.linear("router", x).astype(jnp.float32))
    up, bias, down = (own.values[f"experts/{name}"].astype(x.dtype) for name in ("up/kernel", "up/bias", "down/kernel"))
    inner = jax.nn.silu(jnp.einsum("bld,edf->blef", x, up) + bias[None, None])
    each = jnp.einsum("blef,efd->bled", inner, down)
    best = jax.nn.one_hot(gates.argmax(-1), EXPERTS) * gates
    balance = EXPERTS * jnp.square(gates.mean((0, 1))).sum()
    return jnp.einsum("bled,ble->bld", each, best.astype(x.dtype)), {"balance": balance}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(decoder.FEED_FORWARDS, "best_expert", Part(ROWS, best_expert))


def model_of(scan_layers, **options):
    """Six layers: a dense one, then five of experts of which every second one has a window."""
    model = build(LLAMA, compute_dtype=jnp.float32, scan_layers=scan_layers, **options)
    dense, *rest = model.config.layers
    layers = [dataclasses.replace(layer, feed_forward="best_expert", window=5 * (i % 2))
              for i, layer in enumerate(rest)]
    return dataclasses.replace(model, config=dataclasses.replace(model.config, layers=(dense, *layers), prefix=1))


def rows_of(seed=0):
    tokens = np.random.default_rng(seed).integers(0, 96, (2, 12)).astype(np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    return tokens, positions, np.ones((2, 12), np.int32), np.zeros((2, 12), np.int32)


def names(model):
    return [name for entry in model.entries for name in entry.hf_names]


@pytest.mark.full
def test_the_table_has_every_tensor_once():
    """A prefix, two stacked axes, a rest behind the scan; the same tensors and counts unrolled."""
    scanned, unrolled = model_of(True), model_of(False)
    shapes = {"/".join(entry.path): entry.shape for entry in scanned.entries}
    assert shapes["layers/sub_1/experts/up/kernel"] == (2, EXPERTS, 32, WIDTH)
    assert shapes["layer_0/mlp/up/kernel"] == (32, 56)
    assert shapes["layer_5/experts/up/bias"] == (EXPERTS, WIDTH) and "layer_0/router/kernel" not in shapes
    up = next(entry for entry in scanned.entries if entry.path == ("layers", "sub_1", "experts", "up", "kernel"))
    assert up.hf_names == tuple(f"model.layers.{i}.mlp.experts.{e}.up.weight" for i in (2, 4) for e in range(EXPERTS))
    assert up.hf_shape == (WIDTH, 32) and up.axes == ("layers", None, "embed", "mlp")
    assert sorted(names(scanned)) == sorted(names(unrolled)) and len(set(names(scanned))) == len(names(scanned))
    params = scanned.init(jax.random.key(0))
    assert scanned.num_parameters == unrolled.num_parameters == sum(x.size for x in jax.tree.leaves(params))
    dense = build(LLAMA, compute_dtype=jnp.float32, scan_layers=True)
    per_layer = 3 * 32 * 56 - (32 * EXPERTS + 2 * 32 * WIDTH)  # a token meets one expert
    assert dense.flops_per_token(1) - scanned.flops_per_token(1) == 2 * (LAYERS - 1) * per_layer


@pytest.mark.slow
def test_forward_decode_and_hf_tensors(tmp_path):
    """A folder of HF's tensors is written and read, stacked or not, bit by bit; the forward pass is that of the loop
    over experts."""
    scanned, unrolled = model_of(True), model_of(False)
    params = scanned.init(jax.random.key(0))
    hf.export(scanned, params, tmp_path / "a", LLAMA)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(scanned, str(tmp_path / "a")), params)
    flat = hf.load_params(unrolled, str(tmp_path / "a"))
    jax.tree.map(np.testing.assert_array_equal, flat, jax.tree.map(np.asarray, unrolled.init(jax.random.key(0))))
    hf.export(unrolled, flat, tmp_path / "b", LLAMA)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    sent = dict(tensor for chunk in weights.chunks(scanned, params, np.float32, 1 << 20) for tensor in chunk)
    assert sorted(sent) == sorted(names(scanned))
    kernel = params["layers"]["sub_1"]["experts"]["down"]["kernel"]
    np.testing.assert_array_equal(sent["model.layers.4.mlp.experts.2.down.weight"], kernel[1, 2].T)

    rows = rows_of()
    hidden = jax.jit(scanned.hidden)(params, *rows)
    np.testing.assert_allclose(jax.jit(unrolled.hidden)(flat, *rows), hidden, rtol=1e-5, atol=1e-5)
    last, kv = scanned.prefill(params, rows[0][:, :8], np.array([8, 8]))
    cache = scanned.insert(scanned.init_cache(2, 12, jnp.float32), kv, np.array([0, 1]), np.array([0, 1]))
    np.testing.assert_allclose(last, hidden[:, 7], rtol=1e-5, atol=1e-5)
    step, _ = scanned.decode(params, rows[0][:, 8], np.array([8, 8]), cache)
    np.testing.assert_allclose(step, hidden[:, 8], rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_an_expert_is_what_a_loop_computes():
    model = model_of(False)
    own = decoder.Weights(model.config, {row.path: row for row in ROWS}, {
        row.path: jax.random.normal(jax.random.key(i), row.shape(model.config)) for i, row in enumerate(ROWS)})
    x = jax.random.normal(jax.random.key(9), (1, 7, 32))
    got, told = best_expert(own, x)
    gates = np.asarray(jax.nn.softmax(x[0] @ own.values["router/kernel"]))
    for token, gate, y in zip(np.asarray(x[0]), gates, np.asarray(got[0]), strict=True):
        e = gate.argmax()
        up = token @ own.values["experts/up/kernel"][e] + own.values["experts/up/bias"][e]
        want = gate[e] * (jax.nn.silu(up) @ own.values["experts/down/kernel"][e])
        np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(told["balance"], EXPERTS * np.square(gates.mean(0)).sum(), rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Balanced(training.NextToken):
    factor: float = 0.1

    def loss(self, outputs, batch, entropy_coef=None):
        loss, metrics = super().loss(outputs, batch)
        balance = outputs.auxiliary["balance"]
        return loss + self.factor * balance, metrics | {"balance": jax.lax.stop_gradient(balance)}


@pytest.mark.slow
def test_what_layers_say_reaches_the_loss():
    """Summed over the five layers that say it, whether scanned, unrolled or recomputed (in groups, too); dense models
    say nothing."""
    rows, sums = rows_of(), {}
    cases = ((False, "none", 1), (True, "none", 1), (True, "full", 1), (True, "full", 2), (False, "full", 2))
    for scan, remat, every in cases:
        model = dataclasses.replace(model_of(scan), remat=remat, remat_every=every)
        loss = jax.value_and_grad(lambda p, model=model: model.forward(p, *rows)[1]["balance"])
        value, grads = jax.jit(loss)(model.init(jax.random.key(0)))
        router = grads["layer_5"]["router"]["kernel"]
        sums[scan, remat, every] = float(value), np.asarray(router)
        assert np.abs(router).max() > 0 and value > LAYERS - 1
    for value, router in sums.values():
        np.testing.assert_allclose(value, sums[False, "none", 1][0], rtol=1e-5)
        np.testing.assert_allclose(router, sums[False, "none", 1][1], rtol=1e-3, atol=1e-6)

    traj, _ = batch_of_groups()
    shapes = training.row_shapes((), int(traj.lengths.max()), 512, 1)
    micro = training.make_layout(traj.sizes, shapes).minibatches[0].microbatches[0]
    ones = np.where(traj.loss_mask, 1 / traj.loss_mask.sum(), 0)
    batch = training.pack(traj, micro, {}, {"policy": ones, "token": ones})
    model = model_of(True)
    trainable, frozen = training.partition(model.init(jax.random.key(0)), (".*",), ())
    plain, _ = update.loss_and_metrics(trainable, frozen, batch, model, training.NextToken())
    loss, metrics = update.loss_and_metrics(trainable, frozen, batch, model, Balanced())
    np.testing.assert_allclose(loss - plain, 0.1 * metrics["balance"], rtol=1e-3)
    dense = build(LLAMA, compute_dtype=jnp.float32, scan_layers=True)
    assert score.forward_hidden(dense, dense.init(jax.random.key(0)), batch)[1] == {}
