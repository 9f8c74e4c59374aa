"""Attention: every implementation against a loop in numpy, its gradients, memory, and who is asked."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention import api, attention, blockwise

B, L, H, G, K = 2, 13, 6, 2, 4
OPTIONS = [dict(window=w, softcap=c) for w, c in itertools.product((0, 3), (0.0, 2.0))]


def inputs(length=L, dtype=np.float64, seed=0):
    """Packed rows: a prompt with two answers, an unrelated sequence, padding; keys are shuffled against queries."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, length, heads, K)).astype(dtype) for heads in (H, G, G))
    positions, segments, prefixes = (np.zeros((B, length), np.int32) for _ in range(3))
    fifth = length // 5
    for row in range(B):
        for i, (segment, prefix) in enumerate(((1, 0), (2, 1), (3, 1), (4, 0))):
            part = slice(i * fifth + row, (i + 1) * fifth + row)
            segments[row, part], prefixes[row, part] = segment, prefix
            positions[row, part] = np.arange(fifth) + (fifth if prefix else 0)
    return q, k, v, positions, segments, prefixes


def run(q, k, v, positions, segments, prefixes, order=None, **options):
    order = np.arange(q.shape[1]) if order is None else order
    return attention(q, k[:, order], v[:, order], positions, positions[:, order], segments, segments[:, order],
                     prefixes, **options)


def oracle(q, k, v, positions, segments, prefixes, window, softcap, scale):
    """The docstring of api.attention, one query, head and key at a time."""
    out = np.zeros_like(q)
    for b, i, h in itertools.product(*map(range, q.shape[:3])):
        scores, values = [], []
        for j in range(q.shape[1]):
            own = segments[b, j] == segments[b, i]
            shared = prefixes[b, i] != 0 and segments[b, j] == prefixes[b, i]
            ahead = positions[b, i] - positions[b, j]
            if (own or shared) and ahead >= 0 and (not window or ahead < window):
                s = scale * q[b, i, h] @ k[b, j, h // (H // G)]
                scores.append(softcap * np.tanh(s / softcap) if softcap else s)
                values.append(v[b, j, h // (H // G)])
        p = np.exp(np.array(scores) - max(scores))
        out[b, i, h] = p / p.sum() @ np.array(values)
    return out


@pytest.mark.parametrize("options", OPTIONS)
def test_implementations_equal_the_definition(options, monkeypatch):
    """Both, at 1e-12 in float64, with keys in another order than queries; blocks that do not divide the length."""
    monkeypatch.setattr(blockwise, "BLOCK", 5)
    with jax.enable_x64(True):
        arguments = inputs()
        want = oracle(*arguments, **options, scale=0.7)
        order = np.random.default_rng(1).permutation(L)
        for name in ("reference", "blockwise"):
            for keys in (None, order):
                got = run(*arguments, order=keys, implementation=name, scale=0.7, **options)
                assert got.dtype == np.float64
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS)
def test_one_query_per_row(options):
    """decode, the reference and the last row of the full computation agree; keys beyond the position do not matter."""
    with jax.enable_x64(True):
        q, k, v, _, _, _ = inputs()
        positions = np.array([[7], [11]])
        got = {}
        for name in ("decode", "reference", "auto"):
            one = q[:, 3:4], k, v, positions, np.arange(L)[None]
            got[name] = attention(*one, implementation=name, **options)
        for name, value in got.items():
            np.testing.assert_allclose(value, got["reference"], rtol=0, atol=1e-13, err_msg=name)
        for row, position in enumerate(positions[:, 0]):
            alone = attention(q[row:row + 1, 3:4], k[row:row + 1, :position + 1], v[row:row + 1, :position + 1],
                              positions[row:row + 1], np.arange(position + 1)[None], **options)
            np.testing.assert_allclose(got["decode"][row], alone[0], rtol=0, atol=1e-13)
        other = attention(q[:, 3:4], np.where(np.arange(L)[:, None, None] > 11, 9.0, k), v, positions,
                          np.arange(L)[None], **options)
        np.testing.assert_array_equal(other, got["decode"])


def test_gradients_agree(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 5)
    with jax.enable_x64(True):
        q, k, v, *rest = inputs()
        weights = np.random.default_rng(2).normal(size=q.shape)

        @functools.partial(jax.jit, static_argnums=1)
        def loss(qkv, name):
            return (run(*qkv, *rest, implementation=name, window=4, softcap=3.0) * weights).sum()

        grad = jax.jit(jax.grad(loss), static_argnums=1)
        want = grad((q, k, v), "reference")
        for a, b in zip(want, grad((q, k, v), "blockwise"), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        step = 1e-6
        for i, array in enumerate((q, k, v)):
            index = (1, 4, 1, 2)
            moved = [x.copy() for x in (q, k, v)]
            moved[i][index] += step
            slope = float(loss(moved, "reference") - loss((q, k, v), "reference")) / step
            assert float(want[i][index]) == pytest.approx(slope, rel=1e-4, abs=1e-6), array.shape


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_padding_is_finite_and_invisible(name):
    """Rows of nothing but padding, and queries without any key, give finite values and gradients; real tokens do not
    depend on padding."""
    q, k, v, positions, segments, prefixes = inputs(dtype=np.float32)
    segments[1] = 0
    prefixes[1] = 0
    value, grads = jax.jit(jax.value_and_grad(
        lambda qkv: run(*qkv, positions, segments, prefixes, implementation=name).sum()))((q, k, v))
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
    nothing = attention(q, k, v, positions, positions + 100, segments, segments, prefixes, implementation=name)
    assert np.isfinite(nothing).all()
    padding = (segments == 0)[..., None, None]
    other = run(q, np.where(padding, 7, k), np.where(padding, -7, v), positions, segments, prefixes, implementation=name)
    real = run(q, k, v, positions, segments, prefixes, implementation=name)
    np.testing.assert_array_equal(np.where(padding, 0, other), np.where(padding, 0, real))


def test_low_precision_inputs():
    """bf16 in, bf16 out, scores and softmax in fp32: the error is that of rounding in- and outputs."""
    q, k, v, *rest = inputs(dtype=np.float32)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    want = run(*(np.asarray(x, np.float32) for x in low), *rest)
    for name in ("reference", "blockwise"):
        got = run(*low, *rest, implementation=name)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=0.03)


def compiled_memory(name, length):
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, positions):
        return attention(q, k, v, positions, positions, positions, positions, implementation=name).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, row).compile().memory_analysis().temp_size_in_bytes


def test_blockwise_memory_is_linear_in_length():
    small, large = compiled_memory("blockwise", 2048), compiled_memory("blockwise", 8192)
    assert large < 5 * small
    assert compiled_memory("reference", 8192) > 12 * compiled_memory("reference", 2048)
    assert large < compiled_memory("reference", 8192) / 10


def test_who_is_asked(monkeypatch):
    """auto: decode for one query, blockwise for many, else the reference; a named one falls back where it cannot."""
    asked = []
    for name, function in list(api.IMPLEMENTATIONS.items()):
        def spy(*args, name=name, function=function, **kwargs):
            out = function(*args, **kwargs)
            asked.append(name)
            return out
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, spy)
    monkeypatch.setattr(blockwise, "WORTH_IT", 10)
    q, k, v, positions, *_ = inputs(dtype=np.float32)
    for length, implementation, want in ((13, "auto", "blockwise"), (9, "auto", "reference"), (1, "auto", "decode"),
                                         (9, "blockwise", "blockwise"), (9, "decode", "reference"),
                                         (13, "reference", "reference")):
        attention(q[:, :length], k, v, positions[:, :length], positions, implementation=implementation)
        assert asked.pop() == want and not asked


def test_wrong_calls():
    q, k, v, positions, *_ = inputs()
    with pytest.raises(ValueError, match="'flash': choose auto, decode, blockwise, reference"):
        attention(q, k, v, positions, positions, implementation="flash")
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 key-value heads"):
        attention(q[:, :, :5], k, v, positions, positions)
