"""The recurrence and its convolution: chunked against token by token, packed against alone, gradients, extremes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.kernels.recurrence import chunks as chunks_module
from jaxrl.kernels.recurrence import chunks_of, convolution, recurrence, step
from jaxrl.kernels.recurrence.xla import inverse

NAMES = ("q", "k", "v", "g", "beta")
# Pieces of a row: (tokens, segment, prefix). Lengths around a chunk's 16, prompts shorter than a convolution.
ROWS = (
    [(17, 1, 0), (16, 2, 1), (3, 3, 1), (33, 4, 1), (2, 5, 0), (1, 6, 5), (20, 7, 5)],
    [(1, 1, 0), (40, 2, 1), (5, 3, 0), (7, 4, 0), (48, 5, 0), (1, 6, 5)],
)
LENGTH = 120


def ids(rows=ROWS, length=LENGTH):
    segments, prefixes = np.zeros((2, len(rows), length), np.int32)
    for r, pieces in enumerate(rows):
        at = 0
        for tokens, segment, prefix in pieces:
            segments[r, at:at + tokens], prefixes[r, at:at + tokens] = segment, prefix
            at += tokens
    return segments, prefixes


def inputs(batch=2, length=LENGTH, heads=3, repeats=3, key=5, value=7, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=(batch, length, *shape))  # noqa: E731
    q, k = normal(heads, key), normal(heads, key)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -np.exp(rng.uniform(-7, 2, (batch, length, heads * repeats)))
    g[:, ::7] = 0
    beta = 1 / (1 + np.exp(-normal(heads * repeats)))
    return dict(zip(NAMES, (jnp.asarray(x, dtype) for x in (q, k, normal(heads * repeats, value), g, beta)), strict=True))


def sequences(rows=ROWS):
    """(row, tokens of the prompt and of itself in it) of every piece."""
    for r, pieces in enumerate(rows):
        at, begun = 0, {}
        for tokens, segment, prefix in pieces:
            own = np.arange(at, at + tokens)
            begun[segment] = own
            at += tokens
            yield r, np.concatenate([begun[prefix], own]) if prefix else own, tokens


def oracle(arrays, at, delta=True):
    """[len(at), G, V] by the docstring of api.recurrence, of the tokens `at` of one row."""
    q, k, v, g, beta = (np.asarray(arrays[n], np.float64)[at] for n in NAMES)
    repeats = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, repeats, axis=1) for x in (q, k))
    state, out = np.zeros((v.shape[1], k.shape[2], v.shape[2])), []
    for t in range(len(at)):
        state = np.exp(g[t])[:, None, None] * state
        state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - delta * np.einsum("gk,gkv->gv", k[t], state)))[:, None]
        out.append(np.einsum("gk,gkv->gv", q[t], state))
    return np.array(out)


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(arrays, segments, prefixes, implementation="xla", delta=True):
    return recurrence(*(arrays[n] for n in NAMES), chunks_of(segments, prefixes), implementation=implementation, delta=delta)[0]


DELTA = pytest.mark.parametrize("delta", [True, False])
CHUNKED = pytest.mark.parametrize("name", ["xla", pytest.param("tpu", marks=pytest.mark.full)])


@DELTA
def test_every_sequence_is_its_own_and_its_prompts(delta):
    """XLA's form and the reference against the definition, float64, relative to outputs of 1."""
    with jax.enable_x64(True):
        arrays, (segments, prefixes) = inputs(), ids()
        for name in ("xla", "reference"):
            out = np.asarray(run(arrays, segments, prefixes, name, delta))
            for r, at, own in sequences():
                want = oracle({n: a[r] for n, a in arrays.items()}, at, delta)[-own:]
                np.testing.assert_allclose(out[r, at[-own:]], want, rtol=0, atol=1e-13 * np.abs(want).max())
            assert not out[segments == 0].any()


# name, delta, key heads, value heads of each, key size, value size, tokens, whether rows continue. Of 6 value heads to a key head a step of the TPU
# kernel has 3, of 1 it has several key heads; rows of 1,100 tokens have chunks of 64 and several stretches.
GRADIENTS = [("xla", True, 3, 3, 5, 7, LENGTH, False), ("xla", False, 3, 3, 5, 7, LENGTH, True),
             ("tpu", True, 3, 1, 5, 7, LENGTH, True), ("tpu", False, 1, 3, 8, 4, LENGTH, False),
             pytest.param("tpu", True, 1, 6, 4, 9, LENGTH, False, marks=pytest.mark.nightly),
             pytest.param("tpu", True, 1, 2, 5, 7, 1100, False, marks=pytest.mark.nightly)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "delta", "heads", "repeats", "key", "value", "length", "continues"), GRADIENTS)
def test_gradients(name, delta, heads, repeats, key, value, length, continues):
    """Output, last state and gradients of every input, of the chunked forms against automatic differentiation of the
    token-by-token one, float64."""
    with jax.enable_x64(True):
        arrays, (segments, prefixes), draw = inputs(2, length, heads, repeats, key, value), ids(), np.random.default_rng(1)
        end = [(200, 60, 0), (400, 61, 60), (100, 62, 60), (90, 63, 0)]
        if length > LENGTH:
            segments, prefixes = ids([[*ROWS[0], *end], [*end, *ROWS[1]]], length)
        if continues:
            segments, prefixes = np.where(np.arange(length) < [[length - 5], [length - 20]], 1, 0), None
        enters = np.arange(length) < np.array([[length - 6], [length - 20]]) if continues else None
        chunks = chunks_of(segments, prefixes, enters_BxL=enters, continues=continues)
        arrays["state"] = jnp.asarray(draw.normal(size=(2, heads * repeats, key, value)))
        weights = [jnp.asarray(draw.normal(size=x.shape)) for x in (arrays["v"], arrays["state"])]

        def loss(arrays, name):
            found = recurrence(*(arrays[n] for n in NAMES), chunks, arrays["state"], name, delta=delta)
            return sum(jnp.sum(x * w) for x, w in zip(found, weights, strict=True)), found

        got, want = (jax.jit(jax.value_and_grad(functools.partial(loss, name=n), has_aux=True))(arrays)
                     for n in (name, "reference"))
        (_, got_values), got = got
        (_, want_values), want = want
        for n, (a, b) in enumerate(zip(got_values, want_values, strict=True)):
            assert np.linalg.norm(a - b) < 1e-12 * np.linalg.norm(b), n
        for n in arrays:
            assert np.linalg.norm(got[n] - want[n]) <= 1e-12 * np.linalg.norm(want[n]), n


@pytest.mark.full
@first_cases(1, "name, delta", [("xla", False), ("xla", True), ("tpu", True), ("tpu", False)], full=2)
def test_neighbours_change_no_bit(name, delta):
    """fp32, one program: outputs and gradients of each sequence are the same bits whatever lies beside it, and those of
    a completion the same with a prompt that it shares and with its own copy."""
    arrays = inputs(dtype=np.float32)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, LENGTH, 9, 7)), np.float32)

    @jax.jit
    def both(arrays, segments, prefixes, weight):
        out, pull = jax.vjp(lambda a: run(a, segments, prefixes, name, delta), arrays)
        return out, pull(weight)[0]

    def placed(at, own, row):
        """Sequence `at` of `row` alone, from token 3 of the other row on, noise around it."""
        place = np.arange(3, 3 + len(at))
        noise = inputs(dtype=np.float32, seed=9)
        moved = {n: noise[n].at[1 - row, place].set(a[row, at]) for n, a in arrays.items()}
        segments, prefixes = np.zeros((2, 2, LENGTH), np.int32)
        segments[:, :3], segments[1 - row, place] = 8, 1
        segments[1 - row, place[len(at) - own:]] = 2
        prefixes[1 - row, place[len(at) - own:]] = int(own < len(at))
        segments[1 - row, 3 + len(at):] = 5
        w = jnp.zeros_like(weight).at[1 - row, place[len(at) - own:]].set(weight[row, at[-own:]])
        return (moved, segments, prefixes, w), place[len(at) - own:]

    out, _ = both(arrays, *ids(), weight)
    for r, at, own in sequences():
        case, place = placed(at, own, r)
        alone, grads = both(*case)
        np.testing.assert_array_equal(np.asarray(alone)[1 - r, place], np.asarray(out)[r, at[-own:]])
        only = jnp.zeros_like(weight).at[r, at[-own:]].set(weight[r, at[-own:]])
        _, packed = both(arrays, *ids(), only)
        for n in NAMES:  # the prompt's too: no other completion asks anything
            np.testing.assert_array_equal(np.asarray(grads[n])[1 - r, 3:3 + len(at)], np.asarray(packed[n])[r, at], n)


@pytest.mark.full
@CHUNKED
def test_padding_is_not_read(name):
    arrays, (segments, prefixes) = inputs(dtype=np.float32), ids()
    poisoned = {n: jnp.where((segments == 0).reshape(2, LENGTH, *(1,) * (a.ndim - 2)), jnp.nan, a) for n, a in arrays.items()}
    np.testing.assert_array_equal(run(poisoned, segments, prefixes, name), run(arrays, segments, prefixes, name))
    grads = jax.jit(jax.grad(lambda a: jnp.sum(run(a, segments, prefixes, name) ** 2)))(poisoned)
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.full
@CHUNKED
@pytest.mark.parametrize("decay", [-1e-6, -50.0])
def test_extremes(name, decay):
    """Equal keys that are written whole, without decay and with more than fp32 can hold the inverse of."""
    arrays = inputs(1, 2000, 1, 2, dtype=np.float32)
    arrays |= {"k": jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape), "g": jnp.full_like(arrays["g"], decay),
               "beta": jnp.full_like(arrays["beta"], 0.9999)}
    segments = np.ones((1, 2000), np.int32)
    out = run(arrays, segments, None, name)
    want = oracle({n: a[0] for n, a in arrays.items()}, np.arange(2000))
    np.testing.assert_allclose(out[0], want, rtol=0, atol=1e-5 * np.abs(want).max())
    grads = jax.jit(jax.grad(lambda a: jnp.sum(run(a, segments, None, name) ** 2)))(arrays)
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.full
@pytest.mark.parametrize("size", [16, 64])
def test_inverse(size):
    with jax.enable_x64(True):
        a = jnp.tril(jnp.asarray(np.random.default_rng(0).normal(size=(2, size, size))), -1) / 4
        np.testing.assert_allclose(inverse(a), np.linalg.inv(np.eye(size) + np.asarray(a)), rtol=1e-9, atol=1e-9)
        loss = lambda f: jax.grad(lambda a: jnp.sum(jnp.sin(f(jnp.tril(a, -1)))))(a)  # noqa: E731
        np.testing.assert_allclose(loss(inverse), loss(lambda a: jnp.linalg.inv(jnp.eye(size)[None] + a)), rtol=1e-7, atol=1e-7)


@pytest.mark.full
def test_rows_that_do_not_fit_are_nan():
    """A row of more chunks than it has room for, and one whose completion does not follow its prompt: never silent."""
    arrays = inputs(1, 64, dtype=np.float32)
    single = np.arange(1, 65, dtype=np.int32)[None]
    assert chunks_module.room(64) < 64 and np.isnan(run(arrays, single, None)).all()
    segments = np.repeat(np.array([[1, 2, 3, 4]], np.int32), 16, axis=1)
    prefixes = np.where(segments == 4, 1, 0)
    assert np.isnan(run(arrays, segments, prefixes)).all()
    assert np.isfinite(run(arrays, segments, np.where(segments == 4, 3, 0))).all()


@pytest.mark.full
@DELTA
def test_a_state_goes_on(delta):
    """Rows in two pieces, the second from the first's state; tokens that do not enter it are read again; then step by
    step. float64 against the whole."""
    with jax.enable_x64(True):
        arrays, length = inputs(), 50
        whole = np.asarray(run(arrays, np.ones((2, LENGTH), np.int32), None, "xla", delta))
        part = lambda a, b: [arrays[n][:, a:b] for n in NAMES]  # noqa: E731
        ones = np.ones((2, length), np.int32)
        ends = np.array([[length - 1], [length - 4]])
        first = chunks_of(np.where(np.arange(length) <= ends, ones, 0), enters_BxL=np.arange(length) < ends)
        rule, one = (jax.jit(functools.partial(f, delta=delta)) for f in (recurrence, step))
        out, state = rule(*part(0, length), first)
        for r in range(2):
            np.testing.assert_allclose(out[r, :ends[r, 0] + 1], whole[r, :ends[r, 0] + 1], atol=1e-12)
        assert state.dtype == np.float64
        begin = min(ends)[0]
        rows = np.arange(2)[:, None], ends - begin + begin + np.arange(30)
        second = [arrays[n][rows] for n in NAMES]
        out, state = rule(*second, chunks_of(np.ones((2, 30), np.int32), continues=True), state)
        np.testing.assert_allclose(out, whole[rows], atol=1e-12)
        for t in range(5):
            at = np.arange(2), ends[:, 0] + 30 + t
            out, state = one(*(arrays[n][at] for n in NAMES), state)
            np.testing.assert_allclose(out, whole[at], atol=1e-12)


@pytest.mark.full
def test_convolution(taps=4):
    """Each sequence with its prompt against the definition, and the gradients of x and weights, float64."""
    with jax.enable_x64(True):
        rng, (segments, prefixes) = np.random.default_rng(2), ids()
        x, weight = jnp.asarray(rng.normal(size=(2, LENGTH, 3, 2))), jnp.asarray(rng.normal(size=(3, 2, taps)))
        ask = jnp.asarray(rng.normal(size=x.shape)) * (segments > 0)[:, :, None, None]
        table = chunks_of(segments, prefixes)

        def want(x, weight):
            out = jnp.zeros_like(x)
            for r, at, own in sequences():
                wide = jnp.concatenate([jnp.zeros((taps - 1, 3, 2)), x[r, at]])
                whole = sum(weight[None, ..., taps - 1 - j] * wide[taps - 1 - j:len(wide) - j] for j in range(taps))
                out = out.at[r, at[-own:]].set(whole[-own:])
            return out

        poisoned = jnp.where((segments == 0)[:, :, None, None], jnp.nan, x)
        bias = jnp.asarray(rng.normal(size=(3, 2)))
        got, real = jax.jit(convolution)(poisoned, weight, table), (segments > 0)[:, :, None, None]
        np.testing.assert_allclose(jax.jit(convolution)(x, weight, table, None, bias) * real, (got + bias[None, None]) * real, atol=1e-14)
        np.testing.assert_allclose(got * real, jax.jit(want)(x, weight) * real, atol=1e-14)
        grads = [jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(ask * f(x, w)), (0, 1)))(x, weight)
                 for f in (lambda x, w: convolution(x, w, table), want)]
        for a, b in zip(*grads, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-13)
        row = chunks_of(np.ones((2, 20), np.int32), continues=True)
        got = jax.jit(convolution)(x[:, 30:50], weight, row, x[:, 31 - taps:30])
        alone = jax.jit(convolution)(x, weight, chunks_of(np.ones((2, LENGTH), np.int32)))
        np.testing.assert_allclose(got, alone[:, 30:50], atol=1e-14)
