"""train.matmul: what products of rounded numbers are, how far from the true ones, and which promises they keep."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.tiers import first_cases
from helpers.training_helpers import HF, batch_of_groups, params_of, policy_objective

from jaxrl import training
from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.kernels import experts, low_precision
from jaxrl.kernels.low_precision import GRADIENT, INPUT, SCHEMES, WEIGHT
from jaxrl.models import build
from jaxrl.models.feed_forward import GATED
from jaxrl.models.product import product
from jaxrl.resolve.checks.common import check
from jaxrl.resolve.spec import Platform, resolve
from jaxrl.roles import parameters
from jaxrl.roles.reference import precision
from jaxrl.run.setup import build_model
from jaxrl.training.layout import RowShapes
from jaxrl.training.update import loss_and_metrics

NAMES = [name if name in ("int8", "fp8_tensor") else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
ROWS = tuple(name for name, scheme in SCHEMES.items() if scheme.by_row)
# the most that a number moves: a share of itself (half a unit in the last place), and of the scale's largest
LOOSE = {"int8": (0, 0.5 / 127), "fp8": (2**-4, 2**-10 / 448), "fp8_tensor": (2**-4, 2**-10 / 448),
         "fp8_block": (2**-4, 2**-10 / 448), "mxfp8": (2**-3, 2**-10 / 256), "nvfp4": (0.25, 0.25)}


def operands(rows=40, inputs=(6, 40), outputs=(96,), seed=0, dtype=np.float32):
    """Rows of very different size, as activations and gradients have."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, *inputs)) * np.exp(rng.normal(size=(rows, *[1] * len(inputs))))
    return jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=(*inputs, *outputs)) * 0.1, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_bounded_by_the_rounding(name):
    """Against float64: no entry is farther from the true product than the rounding of both operands allows. For scales of
    blocks the bound of the whole row is looser than theirs. A scheme that rounds nothing would not differ."""
    x, w = operands()
    y = np.asarray(product(x, w, 2, name), np.float64)
    x, w = np.asarray(x, np.float64).reshape(40, -1), np.asarray(w, np.float64).reshape(-1, 96)
    share, least = LOOSE[name]
    whole = not SCHEMES[name].by_row
    off = lambda a, axis: share * np.abs(a) + least * np.abs(a).max(axis=None if whole else axis, keepdims=True)  # noqa: E731
    dx, dw = off(x, 1), off(w, 0)
    bound = dx @ np.abs(w) + np.abs(x) @ dw + dx @ dw
    assert (np.abs(y - x @ w) <= bound * 1.01).all()
    error = np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w)
    assert 1e-3 < error < {"int8": 0.02, "nvfp4": 0.25}.get(name, 0.06)


def test_integers_are_exact():
    """int8: numbers that are codes already come out as in integer arithmetic."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-127, 128, (9, 64)), rng.integers(-127, 128, (64, 5))
    x[:, 0], w[0] = 127, 127
    np.testing.assert_array_equal(np.asarray(product(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), 1, "int8")), x @ w)


@first_cases(1, "name", NAMES)
def test_gradients_go_straight_through(name):
    """That of x is the product of rounded g and w with scales along the outputs; that of w, of g and x as they are or, in
    fp8_tensor, rounded; both of several contracted axes, as in attention's output."""
    x, w = operands(outputs=(4, 24))
    g = jnp.asarray(np.random.default_rng(1).normal(size=(40, 4, 24)), jnp.float32)
    y, back = jax.vjp(lambda x, w: product(x, w, 2, name), x, w)
    dx, dw = back(g)
    code = SCHEMES[name].coded
    whole = lambda found, like: np.asarray(found[0], np.float64) * np.broadcast_to(  # noqa: E731
        1.0 if found[1] is None else np.asarray(found[1], np.float64), like.shape)
    flat = lambda a, rows: np.reshape(a, (rows, -1))  # noqa: E731
    gq, wq = flat(whole(code(g, (1, 2), GRADIENT), g), 40), flat(whole(code(w, (2, 3), WEIGHT), w), 240)
    want = gq @ wq.T
    assert np.linalg.norm(flat(dx, 40) - want) < 1e-5 * np.linalg.norm(want)
    if SCHEMES[name].weights:
        x, g = whole(code(x, (0,), INPUT), x), whole(code(g, (0,), GRADIENT), g)
    want = flat(np.asarray(x, np.float64), 40).T @ flat(np.asarray(g, np.float64), 40)
    assert np.linalg.norm(flat(dw, 240) - want) < 1e-5 * np.linalg.norm(want)
    assert y.dtype == dx.dtype == dw.dtype == jnp.float32


@first_cases(1, "name", NAMES)
def test_a_row_does_not_know_its_neighbours(name):
    """Where the scheme says so, bitwise; where it does not, a large neighbour changes a row."""
    x, w = operands(inputs=(160,))
    run = jax.jit(lambda x: product(x, w, 1, name))
    same = (np.asarray(run(x))[:7] == np.asarray(run(x.at[7:].mul(100.0)))[:7]).all()
    assert same == SCHEMES[name].by_row
    assert low_precision.sampled(name) == (name if SCHEMES[name].by_row else "default")


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_infinities(name):
    x, w = operands(inputs=(64,))
    y = product(x.at[0].set(0.0).at[1, 3].set(jnp.inf).at[2, 5].set(jnp.nan), w, 1, name)
    assert not np.isfinite(np.asarray(y[1])).any() and not np.isfinite(np.asarray(y[2])).any()
    if SCHEMES[name].by_row:
        assert (np.asarray(y[0]) == 0).all() and np.isfinite(np.asarray(y[3:])).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("int8", "mxfp8"))
def test_experts_round_as_linear_maps_do(name):
    """The blocks' output is the reference's; gradients are those of `product` for each expert."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(20, 32)), jnp.float32)
    gates = jnp.asarray(2.0 ** -rng.integers(0, 4, (20, 2)), jnp.float32)  # which scale a row and no rounding
    ids = jnp.asarray([rng.permutation(3)[:2] for _ in range(20)])
    weights = [jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32) for shape in ((3, 32, 48), (3, 32, 48), (3, 48, 32))]
    run = functools.partial(experts.experts, activation=GATED["silu"], matmul=name)
    blocks = run(x, ids, gates, *weights, implementation="blocks")
    np.testing.assert_allclose(blocks, run(x, ids, gates, *weights, implementation="reference"), atol=1e-5)
    plain = experts.experts(x, ids, gates, *weights, activation=GATED["silu"])
    assert np.abs(blocks - plain).max() > 1e-4

    def each(x, gates, gate, up, down):
        y = 0.0
        for e in range(3):
            hidden = GATED["silu"](product(x, gate[e], 1, name), product(x, up[e], 1, name))
            y += jnp.sum(jnp.where(ids == e, gates, 0), axis=1)[:, None] * product(hidden, down[e], 1, name)
        return jnp.sum(jnp.sin(y))

    of_blocks = lambda x, gates, *w: jnp.sum(jnp.sin(run(x, ids, gates, *w)))  # noqa: E731
    found, want = (jax.grad(f, (0, 2, 3, 4))(x, gates, *weights) for f in (of_blocks, each))
    for a, b in zip(found, want, strict=True):  # sums round apart, and a few codes with them
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_no_layout_changes_the_gradient(name):
    """Padded or packed, and with shared prompts in one microbatch or in several: 1e-9 in float64 (a number that lies within
    1e-16 of the middle of two codes could fall otherwise; none does). A prompt that is shared has one gradient to round, its
    copies have one each."""
    layouts = {"padded": (24, 20, False), "packed": (48, 16, False), "shared": (48, 16, True), "8": (48, 1, True)}
    with jax.enable_x64(True):
        model = build(HF, compute_dtype=jnp.float64, scan_layers=False, matmul=name)
        params, (traj, columns) = params_of(model, jnp.float64), batch_of_groups(groups=5, size=4)
        trainable, _ = training.partition(params, (".*",), ())
        objective = policy_objective(max_grad_norm=0.0)
        step = lambda m: jax.jit(jax.grad(lambda t, b: loss_and_metrics(t, {}, b, m, objective)[0]))  # noqa: E731
        run, found = step(model), {}
        weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
        for layout, (length, rows, share) in layouts.items():
            made = training.make_layout(traj.sizes, RowShapes((length,), ((rows,),)), share_prompts=share)
            packed = [training.pack(traj, m, columns, weights, np.float64) for m in made.minibatches[0].microbatches]
            found[layout] = jax.tree.map(lambda *x: sum(x), *(run(trainable, b) for b in packed))
        for layout, other in (("packed", "padded"), ("8", "shared")):
            for key, x in found[other].items():
                assert np.linalg.norm(found[layout][key] - x) < 1e-9 * np.linalg.norm(x), (layout, key)
        whole = lambda tree: np.sqrt(sum(np.square(x).sum() for x in tree.values()))  # noqa: E731
        moved = {key: x - found["padded"][key] for key, x in found["shared"].items()}
        assert 1e-6 < whole(moved) / whole(found["padded"]) < 3e-2
        plain = step(build(HF, compute_dtype=jnp.float64, scan_layers=False))(trainable, packed[0])
        rounded = run(trainable, packed[0])
        assert any(np.linalg.norm(plain[k] - rounded[k]) > 1e-3 * np.linalg.norm(plain[k]) for k in plain)


def test_what_cannot_be_had_is_refused():
    def spec(kind="cpu", **options):
        c = default_config()
        c.model.init, c.model.config, c.model.tokenizer = "random", HF, "jaxrl://arith/tokenizer"
        c.data.path = ("jaxrl://arith/train.jsonl",)
        for name, value in options.items():
            put(c, name.replace("__", "."), value)
        check(c)
        return resolve(c, Platform(kind, "fp32"), HF, engine="jax")

    for name in ("fp8", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"):
        with pytest.raises(ConfigError, match="int8, or train.matmul_emulated=True"):
            build_model(spec(train__matmul=name), HF)
        assert build_model(spec(train__matmul=name, train__matmul_emulated=True), HF).matmul == name
    assert build_model(spec(train__matmul="int8"), HF).matmul == "int8"
    assert build_model(spec("gpu", train__matmul="fp8"), HF).matmul == "fp8"
    assert spec(train__matmul="int8").algorithm.mismatch.correction == "token_tis"
    assert spec().algorithm.mismatch.correction == "none"
    for text, options in (
            ("no effect with train.matmul=default", {"train__matmul_emulated": True}),
            ("train.loss_scale.window=10 has no effect", {"train__loss_scale__window": 10}),
            ("must be between", {"train__compute_dtype": "fp16", "train__loss_scale__initial": 2.0**30}),
            ("max_nonfinite=5", {"train__compute_dtype": "fp16", "train__loss_scale__patience": 6})):
        with pytest.raises(ConfigError, match=text):
            spec(**options)


def test_the_loss_scale_moves_as_its_options_say():
    from jaxrl.training.update import _next_loss_scale

    how = training.LossScale(initial=8.0, min=2.0, max=16.0, window=2, patience=2)
    stats = {"loss_scale": jnp.float32(8), "finite_streak": jnp.int32(0), "nonfinite_streak": jnp.int32(0)}
    seen = []
    for finite in (True, True, True, True, False, False, False, False, False):
        stats |= _next_loss_scale(stats, jnp.asarray(finite), how)
        stats["nonfinite_streak"] = jnp.where(finite, 0, stats["nonfinite_streak"] + 1)
        seen.append(float(stats["loss_scale"]))
    assert seen == [8, 16, 16, 16, 16, 8, 4, 2, 2]
    c, model = default_config(), build(HF, compute_dtype=jnp.float16, scan_layers=False)
    put(c, "train.compute_dtype", "fp16")
    put(c, "train.loss_scale.initial", 4.0)
    job = types.SimpleNamespace(config=c, model=model, compute_dtype=jnp.float16)
    assert precision(job)["loss_scale"].initial == 4
    assert parameters._start(job, optax.sgd(1.0))({"w": jnp.ones(2)}, {}).stats["loss_scale"] == 4


@pytest.mark.full
@pytest.mark.parametrize("run", (lambda f: f, jax.jit), ids=("by itself", "compiled"))
def test_the_scale_of_mxfp8_is_the_power_of_two_below_whatever_the_exponent(run):
    """Of every exponent of float32, at the power itself, above it and just below the next one."""
    largest = np.array([2.0**k * m for k in range(-126, 128) for m in (1.0, 1.5, 2 - 2.0**-23)], np.float64).astype(np.float32)
    want = 2.0 ** np.clip(np.floor(np.log2(largest.astype(np.float64))) - 8, -126, 127)
    np.testing.assert_array_equal(np.asarray(run(low_precision._power_of_two)(jnp.asarray(largest), None)), want)
