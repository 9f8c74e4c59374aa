"""Experts: every implementation against the definition, its gradients, memory, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases
from jax.extend.core import jaxprs_in_params

from jaxrl.kernels.experts import api, experts, tuned
from jaxrl.kernels.experts import layout as layout_module
from jaxrl.kernels.experts.layout import blocks_of, layout
from jaxrl.models.feed_forward import ACTIVATIONS, clamped

NAMES = ("x", "gates", "gate", "up", "down")


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def inputs(tokens=23, slots=3, count=5, size=8, width=12, dtype=np.float64, seed=0):
    """{x, gates, gate, up, down}, cotangent of y."""
    rng = np.random.default_rng(seed)
    shapes = (tokens, size), (tokens, slots), (count, size, width), (count, size, width), (count, width, size)
    arrays = {name: rng.normal(size=shape) for name, shape in zip(NAMES, shapes, strict=True)}
    wide = np.float64 if dtype == np.float64 else np.float32
    cast = {name: jnp.asarray(a, wide if name == "gates" else dtype) for name, a in arrays.items()}
    return cast, jnp.asarray(rng.normal(size=(tokens, size)), dtype)


def routes(kind, tokens=23, slots=3, count=5, seed=1):
    """[T, K] int32 of distinct ids: a routing by name."""
    rng = np.random.default_rng(seed)
    random = np.stack([rng.permutation(count)[:slots] for _ in range(tokens)]).astype(np.int32)
    if kind == "one":  # every token to one expert, the other slots empty
        return np.where(np.arange(slots) == 1, 2, -1)[None].repeat(tokens, 0).astype(np.int32)
    if kind == "empty":  # no token for experts 1 and 3
        return np.where((random == 1) | (random == 3), -1, random)
    if kind == "outside":
        return random + count * rng.choice([-1, 0, 0, 1, 2**20], random.shape).astype(np.int32)
    return random if kind == "random" else np.full((tokens, slots), -7, np.int32)


ROUTES = ("random", "one", "empty", "outside", "nothing")


def gradients(ids, arrays, dy, **options):
    """(y, {name: gradient})"""
    y, back = jax.vjp(lambda a: experts(a["x"], ids, *(a[name] for name in NAMES[1:]), activation=swiglu, **options), arrays)
    return y, back(dy)[0]


def oracle(ids, arrays):
    """The docstring of api.experts, one token and slot at a time."""
    x, gates, gate, up, down = (np.asarray(arrays[name], np.float64) for name in NAMES)
    y = np.zeros_like(x)
    for t, k in np.ndindex(ids.shape):
        if 0 <= (e := ids[t, k]) < len(gate):
            a = x[t] @ gate[e]
            y[t] += gates[t, k] * (a / (1 + np.exp(-a)) * (x[t] @ up[e]) @ down[e])
    return y


def close(got, want, tolerance, what=""):
    """Of the norm of the whole tensor; of a tensor of zeros, zeros."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all() and np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), (
        what, np.linalg.norm(got - want), np.linalg.norm(want))


@pytest.fixture
def small(monkeypatch):
    """Several blocks per expert and chunks per call."""
    monkeypatch.setattr(tuned, "BLOCK", 4)
    monkeypatch.setattr(tuned, "chunk", lambda *_: 9)


RUN = jax.jit(gradients)  # only of tests with `small`, whose sizes it was traced with


SHAPES = [dict(tokens=23, slots=3, count=5)] + [pytest.param(shape, marks=pytest.mark.slow) for shape in (
    dict(tokens=1, slots=1, count=3), dict(tokens=18, slots=2, count=2), dict(tokens=37, slots=4, count=4),
    dict(tokens=31, slots=4, count=3))]  # the last as with experts on several devices: more slots than experts here


@pytest.mark.full
@first_cases(1, "shape", SHAPES, ids=str)
def test_blocks_equal_the_reference_in_float64(shape, small):
    """Forward and every gradient to 1e-12 of the tensor's norm, for every routing through one program."""
    with jax.enable_x64(True):
        arrays, dy = inputs(**shape)
        run = {name: jax.jit(functools.partial(gradients, implementation=name)) for name in ("reference", "blocks")}
        for kind in ROUTES:
            ids = routes(kind, **{**shape, "slots": min(shape["slots"], shape["count"])})
            ids = np.pad(ids, [(0, 0), (0, shape["slots"] - ids.shape[1])], constant_values=shape["count"])
            (y, grads), (want, want_grads) = run["blocks"](ids, arrays, dy), run["reference"](ids, arrays, dy)
            close(want, oracle(ids, arrays), 1e-12, kind)
            close(y, want, 1e-12, kind)
            for name in NAMES:
                assert grads[name].dtype == np.float64
                close(grads[name], want_grads[name], 1e-12, (kind, name))
            if kind == "nothing":
                assert not y.any() and not any(g.any() for g in grads.values())


@pytest.mark.full
def test_biases_and_clamped_gates(small):
    """gpt-oss's experts: every routing against the definition, gradients of blocks against automatic differentiation of the
    reference, in float64 at 1e-12 of each tensor's norm; many gates and ups at their limit."""
    gate_of = clamped(1.3, 0.7)
    with jax.enable_x64(True):
        arrays, dy = inputs()
        rng, width = np.random.default_rng(4), arrays["gate"].shape[2]
        biases = tuple(jnp.asarray(rng.normal(size=(5, n))) for n in (width, width, 8))

        @functools.partial(jax.jit, static_argnums=0)
        def run(name, ids, arrays, biases):
            call = lambda a, b: experts(a["x"], ids, *(a[n] for n in NAMES[1:]), activation=gate_of, biases=b,  # noqa: E731
                                        implementation=name)
            y, back = jax.vjp(call, arrays, biases)
            return y, back(dy)

        for kind in ROUTES:
            ids = routes(kind)
            (y, got), (want, wanted) = run("blocks", ids, arrays, biases), run("reference", ids, arrays, biases)
            close(y, want, 1e-12, kind)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                close(a, b, 1e-12, kind)
        x, gates, gate, up, down = (np.asarray(arrays[name]) for name in NAMES)
        ids, want = routes("random"), np.zeros_like(x)
        y = run("blocks", ids, arrays, biases)[0]
        for t, k in np.ndindex(ids.shape):
            e = ids[t, k]
            a, b = x[t] @ gate[e] + biases[0][e], x[t] @ up[e] + biases[1][e]
            a, b = np.minimum(a, 0.7), np.clip(b, -0.7, 0.7)
            want[t] += gates[t, k] * ((a / (1 + np.exp(-1.3 * a)) * (b + 1)) @ down[e] + biases[2][e])
        close(y, want, 1e-12)
        with pytest.raises(ValueError, match="biases of shapes"):
            experts(*(arrays[n] for n in ("x",)), ids, *(arrays[n] for n in NAMES[1:]), activation=gate_of, biases=biases[:2])


@pytest.mark.parametrize("name", ["blocks", "tpu"])
def test_experts_without_a_gate(monkeypatch, name):
    """down(activation(up)), for every routing: forward and gradients of both implementations against the reference, float64, and that
    against the definition."""
    monkeypatch.setattr(tuned, "BLOCK", 4)
    monkeypatch.setattr(tuned, "KERNEL_BLOCK", 8)
    monkeypatch.setattr(tuned, "chunk", lambda *_: 17)
    relu2 = ACTIVATIONS["relu2"]
    with jax.enable_x64(True):
        arrays, dy = inputs(size=64, width=128)
        del arrays["gate"]

        @functools.partial(jax.jit, static_argnums=0)
        def run(name, ids, arrays):
            y, back = jax.vjp(lambda a: experts(a["x"], ids, a["gates"], None, a["up"], a["down"], activation=relu2, implementation=name), arrays)
            return y, back(dy)[0]

        for kind in ROUTES:
            ids = routes(kind)
            (y, got), (want, wanted) = run(name, ids, arrays), run("reference", ids, arrays)
            close(y, want, 1e-12, kind)
            for key in arrays:
                close(got[key], wanted[key], 1e-12, (kind, key))
        x, gates, up, down = (np.asarray(arrays[key]) for key in ("x", "gates", "up", "down"))
        ids, want = routes("random"), np.zeros_like(x)
        for t, k in np.ndindex(ids.shape):
            want[t] += gates[t, k] * np.maximum(x[t] @ up[ids[t, k]], 0) ** 2 @ down[ids[t, k]]
        close(run("reference", ids, arrays)[0], want, 1e-12)


@pytest.mark.full
def test_the_tpu_kernels_equal_the_reference_in_float64(monkeypatch):
    """Interpreted: forward and every gradient to 1e-12, for every routing through one program, with tiles that reach beyond
    the last column and experts of several blocks; then with biases and clamped gates."""
    monkeypatch.setattr(tuned, "KERNEL_BLOCK", 8)
    monkeypatch.setattr(tuned, "chunk", lambda *_: 17)
    monkeypatch.setattr(tuned, "TPU_WIDEST", 128)
    monkeypatch.setattr(tuned, "TPU_SUMS", (128, 128))
    with jax.enable_x64(True):
        arrays, dy = inputs(size=192, width=320)
        rng = np.random.default_rng(4)
        biases = tuple(jnp.asarray(rng.normal(size=(5, n))) for n in (320, 320, 192))

        @functools.partial(jax.jit, static_argnums=(0, 1))
        def run(name, biased, ids, arrays, biases):
            gate, given = (clamped(1.3, 0.7), biases) if biased else (swiglu, ())
            call = lambda a, b: experts(a["x"], ids, *(a[n] for n in NAMES[1:]), activation=gate, biases=b,  # noqa: E731
                                        implementation=name)
            y, back = jax.vjp(call, arrays, given)
            return y, back(dy)

        for kind, biased in [*((kind, False) for kind in ROUTES), ("empty", True)]:
            got, want = (run(name, biased, routes(kind), arrays, biases) for name in ("tpu", "reference"))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                close(a, b, 1e-12, (kind, biased))


@pytest.mark.full
def test_what_kernels_refuse(caplog):
    """With the reason, and XLA's blocks run: to the bit what they give by name."""
    arrays, _ = inputs(dtype=jnp.float32)
    args = [arrays[name] for name in NAMES]
    call = functools.partial(experts, args[0], routes("random"), *args[1:], activation=swiglu)
    np.testing.assert_array_equal(call(implementation="tpu"), call(implementation="blocks"))
    assert "experts: tpu does not serve this model (experts of 8 x 12" in caplog.text

    def refused(words, name, x, size=128, width=128, **options):
        weights = [np.zeros((2, size, width), x.dtype), np.zeros((2, size, width), x.dtype), np.zeros((2, width, size), x.dtype)]
        with pytest.raises(NotImplementedError, match=words):
            api.IMPLEMENTATIONS[name](x, weights, activation=swiglu, **options)

    x = np.zeros((4, 128), jnp.bfloat16)
    refused("float16 inputs", "tpu", x.astype(np.float16))
    refused("train.matmul=int8", "tpu", x, matmul="int8")
    refused("more than 40 MiB", "tpu", x, size=64 * 1024)
    refused("float64 inputs", "tpu", x.astype(np.float64), interpret=False)


@pytest.mark.full
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 3e-6), pytest.param(jnp.bfloat16, 2e-2, marks=pytest.mark.slow)])
def test_blocks_in_the_types_that_models_compute_with(dtype, tolerance, small):
    arrays, dy = inputs(dtype=dtype)
    ids = routes("random")
    y, grads = RUN(ids, arrays, dy)
    with jax.enable_x64(True):
        exact = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
        want, want_grads = gradients(ids, exact, np.asarray(dy, np.float64), implementation="reference")
    assert y.dtype == dtype
    close(y, want, tolerance)
    for name in NAMES:
        assert grads[name].dtype == arrays[name].dtype
        close(grads[name], want_grads[name], tolerance, name)


@pytest.mark.full
def test_a_token_does_not_depend_on_the_tokens_beside_it(small):
    """Output, and gradients of x and gates, to the bit: other neighbours, another place, another chunk."""
    tokens = 40
    arrays, dy = inputs(tokens, size=48, width=40, dtype=jnp.float32)
    others, other_dy = inputs(tokens, size=48, width=40, dtype=jnp.float32, seed=5)
    ids, other_ids = routes("random", tokens), routes("one", tokens)
    y, grads = RUN(ids, arrays, dy)
    rng = np.random.default_rng(3)
    for _ in range(3):
        place = rng.permutation(tokens)[:tokens // 2]  # where the first tokens are now

        mixed = {**arrays, **{name: put(others[name], place, arrays[name]) for name in ("x", "gates")}}
        y_there, there = RUN(put(other_ids, place, ids), mixed, put(other_dy, place, dy))
        np.testing.assert_array_equal(np.asarray(y_there)[place], y[:len(place)])
        for name in ("x", "gates"):
            np.testing.assert_array_equal(np.asarray(there[name])[place], grads[name][:len(place)], err_msg=name)


def put(into, place, own):
    """`into` with the first rows of `own` at these places."""
    into = np.array(into)
    into[place] = own[:len(place)]
    return into


@pytest.mark.full
def test_memory_is_static_and_nothing_is_dropped(monkeypatch):
    """One program serves a balanced routing and all tokens to the same experts; its memory is that of a chunk."""
    count, slots, size, width, chunk = 16, 2, 32, 64, 512
    monkeypatch.setattr(tuned, "chunk", lambda *_: chunk)

    def compiled(tokens):
        arrays, dy = inputs(tokens, slots, count, size, width, jnp.float32)
        ids = np.zeros((tokens, slots), np.int32)
        return jax.jit(gradients).lower(ids, arrays, dy).compile(), arrays, dy

    program, arrays, dy = compiled(2 * chunk)
    balanced = (np.arange(2 * chunk)[:, None] * slots + np.arange(slots)) % count
    piled = np.broadcast_to(np.array([3, 11]), (2 * chunk, slots))
    want = jax.jit(functools.partial(gradients, implementation="reference"))
    for ids in (balanced.astype(np.int32), piled.astype(np.int32)):
        (y, grads), (want_y, want_grads) = program(ids, arrays, dy), want(ids, arrays, dy)
        close(y, want_y, 3e-6)
        for name in NAMES:
            close(grads[name], want_grads[name], 1e-5, name)
    two, four = (c.memory_analysis().temp_size_in_bytes for c in (program, compiled(4 * chunk)[0]))
    rows = blocks_of(chunk, slots, count, tuned.BLOCK) * tuned.BLOCK
    assert rows < chunk * slots + count * tuned.BLOCK
    assert two < 4 * (2.5 * rows * size + 4 * 3 * count * size * width + 2 * chunk * (2 * size + slots))
    assert four - two <= 1.1 * 4 * 2 * chunk * (2 * size + 3 * slots)  # copies of x, dy and ids, in chunks


@pytest.mark.full
def test_blocks_are_those_that_hold_rows():
    """Every slot has its own row, in a block of its expert; blocks are as few as they can be."""
    for kind in ROUTES:
        ids = routes(kind, 37, 4, 6)
        lay = jax.jit(layout, static_argnums=(1, 2))(ids, 6, 8)
        flat, rows = ids.reshape(-1), np.asarray(lay.rows).reshape(-1)
        held = (flat >= 0) & (flat < 6)
        assert (rows[~held] == lay.slots.size).all() and len(set(rows[held])) == held.sum()
        np.testing.assert_array_equal(np.asarray(lay.slots)[rows[held]], np.flatnonzero(held))
        assert (np.delete(np.asarray(lay.slots), rows[held]) == flat.size).all()
        np.testing.assert_array_equal(np.asarray(lay.experts)[rows[held] // 8], flat[held])
        counts = np.bincount(flat[held], minlength=6)
        assert int(lay.used) == (-(-counts // 8)).sum() <= len(lay.experts)
        assert (rows[held] < 8 * int(lay.used)).all()


@pytest.mark.slow
def test_within_checkpoint_and_scan(small):
    """Two layers scanned over and computed again give the gradients of two layers in a row."""
    arrays, dy = inputs(dtype=jnp.float32)
    ids = np.stack([routes("random", seed=s) for s in (1, 2)])
    layers = {name: jnp.stack([arrays[name], 0.5 * arrays[name]]) for name in NAMES[1:]}

    def layer(x, own):
        ids, layer = own
        return x + experts(x, ids, *(layer[name] for name in NAMES[1:]), activation=swiglu), None

    def scanned(x, layers):
        return (jax.lax.scan(jax.checkpoint(layer), x, (ids, layers))[0] * dy).sum()

    def in_a_row(x, layers):
        for i in range(2):
            x, _ = layer(x, (ids[i], {name: w[i] for name, w in layers.items()}))
        return (x * dy).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1)))(arrays["x"], layers) for f in (scanned, in_a_row))
    jax.tree.map(functools.partial(close, tolerance=1e-6), got, want)


def products(function, *arguments):
    """How many matrix products the program has."""
    def count(jaxpr):
        return sum((eqn.primitive.name == "dot_general") + sum(map(count, jaxprs_in_params(eqn.params)))
                   for eqn in jaxpr.eqns)

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.full
def test_weights_have_no_gradient_where_nobody_asks(small):
    arrays, dy = inputs(dtype=jnp.float32)
    ids = routes("random")

    def loss(some, rest):
        a = {**some, **rest}
        return (experts(a["x"], ids, *(a[name] for name in NAMES[1:]), activation=swiglu) * dy).sum()

    def of(*names):
        return jax.grad(loss), {n: arrays[n] for n in names}, {n: arrays[n] for n in NAMES if n not in names}

    assert products(*of(*NAMES)) == 3 + 8 and products(*of("x", "gates")) == 3 + 5
    every, (grad, *split) = RUN(ids, arrays, dy)[1], of("x", "gates")
    for name, got in jax.jit(grad)(*split).items():
        np.testing.assert_array_equal(got, every[name])


@pytest.mark.full
def test_what_is_not_finite_stays_with_its_token(small):
    """A token of NaN spoils no other token, and without a slot it spoils nothing."""
    arrays, dy = inputs(dtype=jnp.float32)
    ids = routes("random")
    bad = {**arrays, "x": arrays["x"].at[4].set(jnp.nan)}
    y, grads = RUN(ids, bad, dy)
    rest = np.arange(len(ids)) != 4
    assert np.isnan(y[4]).all() and np.isfinite(y[rest]).all() and np.isfinite(grads["x"][rest]).all()
    ids[4] = -1
    y, grads = RUN(ids, {**bad, "gates": arrays["gates"].at[4].set(jnp.nan)}, dy.at[4].set(jnp.nan))
    assert not y[4].any() and all(np.isfinite(g).all() for g in (y, *grads.values()))
    assert not grads["x"][4].any() and not grads["gates"][4].any()


@pytest.mark.slow
def test_repeated_ids():
    """They add up where rows suffice; where they might not, the result is NaN, never wrong."""
    arrays, _ = inputs(tokens=256, slots=3, count=5, dtype=jnp.float32)
    call = functools.partial(experts, activation=swiglu)
    ids = np.full((256, 3), 2, np.int32)
    a = [arrays[name] for name in NAMES]
    close(call(a[0], ids, *a[1:]), call(a[0], ids, *a[1:], implementation="reference"), 1e-6)
    few = [w[:2] for w in a[2:]]
    assert np.isnan(call(a[0], ids % 2, a[1], *few)).all()


def test_what_is_refused():
    arrays, _ = inputs(dtype=jnp.float32)
    ids = routes("random")

    def refused(words, ids=ids, **changed):
        options = {"activation": swiglu, "implementation": changed.pop("implementation", "auto")}
        a = {**arrays, **changed}
        with pytest.raises(ValueError, match=words):
            experts(a["x"], ids, *(a[name] for name in NAMES[1:]), **options)

    refused("implementation='fast'; choose auto, reference, tpu", implementation="fast")
    refused(r"ids is float32\[23, 3\]; give integers", ids=ids.astype(np.float32))
    refused(r"ids is int32\[22, 3\]", ids=ids[:22])
    refused(r"gates is float32\[23, 2\]", gates=arrays["gates"][:, :2])
    refused("gates is bfloat16.*give float32", gates=arrays["gates"].astype(jnp.bfloat16))
    refused(r"up is float32\[5, 8, 11\]; gate and up are \[E, D=8, F\]", up=arrays["up"][..., :11])
    refused(r"gate is float32\[4, 8, 12\]", gate=arrays["gate"][:4])
    refused("down is bfloat16.*cast it to x's float32", down=arrays["down"].astype(jnp.bfloat16))
    refused(r"x is int32\[23, 8\]", x=arrays["x"].astype(jnp.int32))


def test_chunks_on_hopper_hold_a_microbatch_where_their_rows_have_room():
    """16k tokens of Qwen3-30B-A3B and of eight experts are one chunk, those of DeepSeek-V3's own eight of 256 are not more
    than the rows that GPU_ROOM holds; elsewhere, and with less room than today's chunk needs, nothing changes."""
    room = tuned.room_of("gpu")
    assert room and not any(tuned.room_of(*at) for at in (("cpu",), ("tpu",), ("gpu", "blocks")))
    assert tuned.chunk(8, 128, room, 128, 2048, 768) == tuned.chunk(4, 8, room, 8, 2048, 768) == 16384
    assert tuned.chunk(8, 128) == tuned.chunk(8, 128, 1, 128, 2048, 768) == 5120
    large = tuned.chunk(8, 256, room, 8, 7168, 2048)
    of_a_row = 2 * (2 * 7168 + 3 * 2048) + 4 * 7168
    assert large == tuned.chunk(8, 256) or blocks_of(large, 8, 8, 128) * 128 * of_a_row <= room
    assert blocks_of(16384, 8, 128, 128) * 128 * (2 * (2 * 2048 + 3 * 768) + 4 * 2048) <= room


@pytest.mark.full
def test_the_layout_of_a_gpu_has_no_loop(monkeypatch):
    """The same numbers as elsewhere, without the search by halves, whose loop the host launches kernel by kernel."""
    ids = routes("random", 60, 2, 5)
    want = layout(ids, 5, 8)
    assert "while" in str(jax.make_jaxpr(lambda ids: layout(ids, 5, 8))(ids)) or "scan" in str(jax.make_jaxpr(lambda ids: layout(ids, 5, 8))(ids))
    monkeypatch.setattr(layout_module, "platform", lambda: "gpu")
    text = str(jax.make_jaxpr(lambda ids: layout(ids, 5, 8))(ids))
    assert "while" not in text and "scan" not in text
    for a, b in zip(layout(ids, 5, 8), want, strict=True):
        np.testing.assert_array_equal(a, b)
