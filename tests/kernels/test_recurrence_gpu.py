"""The recurrence on Hopper GPUs, without one: the kernels interpreted (races found, unwritten memory NaN, reads beyond an end
refused) and lowered for CUDA. The body that keeps operands in registers is only lowered here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from test_attention_gpu import MOSAIC, lowered, strict
from test_recurrence import LENGTH, NAMES, ids, inputs

from jaxrl.kernels import check
from jaxrl.kernels.recurrence import api, chunks_of, gpu, recurrence
from jaxrl.kernels.recurrence.gpu_call import call_of


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(gpu, "WINDOW", 7)  # rows of three windows, of which the last one is not used
    if MOSAIC:
        monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", functools.partial(gpu.recurrence, interpret=strict()))


def low(heads, repeats, key, value, seed=0, length=LENGTH):
    arrays = inputs(2, length, heads, repeats, key, value, np.float32, seed)
    return {n: a.astype(jnp.bfloat16) if n in "qkv" else a for n, a in arrays.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def both(name, delta, arrays, chunks, weights):
    """((out, state), gradients of inputs and of the state before the rows)."""
    def call(arrays):
        return recurrence(*(arrays[n] for n in NAMES), chunks, arrays.get("state"), name, delta)

    found, pull = jax.vjp(call, arrays)
    return found, pull(tuple(w.astype(x.dtype) for w, x in zip(weights, found, strict=True)))[0]


CASES = [(True, 2, 2, 32, 64, False), (False, 1, 2, 48, 128, True)]  # delta, key heads, value heads of each, sizes, whether rows continue


@pytest.mark.mosaic
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case):
    """Several windows, prompts that completions share within one and beyond its end, a head's values in several blocks of
    threads, rows that go on from a state and of which some tokens do not enter it: within the rounding of bf16 of float64."""
    delta, heads, repeats, key, value, continues = case
    arrays, (segments, prefixes), draw = low(heads, repeats, key, value), ids(), np.random.default_rng(1)
    arrays["state"], enters = jnp.asarray(draw.normal(size=(2, heads * repeats, key, value)), jnp.float32), None
    if continues:
        segments, prefixes = np.where(np.arange(LENGTH) < [[LENGTH - 5], [LENGTH - 20]], 1, 0), None
        enters = np.arange(LENGTH) < np.array([[LENGTH - 6], [LENGTH - 20]])
    chunks = chunks_of(segments, prefixes, enters_BxL=enters, continues=continues)
    weights = [jnp.asarray(draw.normal(size=x.shape), jnp.bfloat16) for x in (arrays["v"], arrays["state"])]
    got = both("gpu", delta, arrays, chunks, weights)
    with jax.enable_x64(True):
        want = both("reference", delta, *jax.tree.map(
            lambda a: np.asarray(a, np.float64) if np.issubdtype(a.dtype, np.floating) or a.dtype == jnp.bfloat16 else a,
            (arrays, chunks, weights)))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        assert np.linalg.norm(a - b) <= 5e-3 * np.linalg.norm(b), path
    (out, _), grads = got
    assert not np.asarray(out, np.float32)[segments == 0].any() and grads["q"].dtype == jnp.bfloat16


@pytest.mark.mosaic
def test_neighbours_change_no_bit():
    """One program: a prompt and its completion have the same outputs and gradients, bit for bit, behind other sequences, in
    another row, with other completions of the prompt between, and beside NaN in padding."""
    arrays, noise = low(1, 2, 16, 64), low(1, 2, 16, 64, seed=9)
    weights = [np.random.default_rng(1).normal(size=arrays["v"].shape).astype(np.float32), np.zeros((2, 2, 16, 64), np.float32)]

    def run(row, place, between):
        """The prompt's 20 tokens from `place` on, then its completion's 37, with so many tokens of another between."""
        segments, prefixes = np.full((2, LENGTH), 9, np.int32), np.zeros((2, LENGTH), np.int32)
        segments[row], last = 0, place + 20 + between + 37
        segments[row, :place], segments[row, place:place + 20] = 5, 1
        segments[row, place + 20:last], prefixes[row, place + 20:last] = np.where(np.arange(last - place - 20) < between, 2, 3), 1
        at = np.r_[place:place + 20, last - 37:last]
        here, w = {}, np.zeros_like(weights[0])
        for n, a in arrays.items():
            moved = np.array(noise[n], np.float32)
            moved[segments == 0] = np.nan
            moved[row, at] = np.asarray(a, np.float32)[0, :57]
            here[n] = jnp.asarray(moved, a.dtype)
        w[row, at] = weights[0][0, :57]
        (out, _), grads = both("gpu", True, here, chunks_of(segments, prefixes), [jnp.asarray(w), weights[1]])
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads.values())
        return [np.asarray(x, np.float32)[row, at] for x in (out, *(grads[n] for n in NAMES))]

    alone = run(0, 0, 0)
    for moved in (run(1, 19, 33), run(0, 50, 5)):
        for a, b in zip(alone, moved, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.mosaic
def test_the_verdict_on_the_kernels():
    """What a run on a Hopper GPU asks before it trains: rows of 1,024 tokens, in chunks of 64."""
    verdict = check.recurrent_layer("gpu", jnp.bfloat16, check.Recurrence(1, 64, 64))
    assert verdict.state == "right" and verdict.error < 0.02, verdict


@pytest.mark.mosaic
@pytest.mark.parametrize("heads, groups, key, value, delta, length", [(16, 32, 128, 128, True, 8192), (16, 32, 128, 128, True, 512),
                                                                      (8, 64, 128, 64, False, 8192), (2, 4, 80, 64, True, 2048)])
def test_kernels_lower_for_cuda(heads, groups, key, value, delta, length, monkeypatch):
    """Qwen3.5's heads in long rows and short ones, Nemotron 3's, and keys that fill no swizzle; shared memory fits."""
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", functools.partial(gpu.recurrence, interpret=False))
    shapes = [((heads, key), jnp.float32), ((heads, key), jnp.float32), ((groups, value), jnp.bfloat16)]
    arrays = {n: jax.ShapeDtypeStruct((2, length, *s), t) for n, (s, t) in zip(NAMES, [*shapes, *[((groups,), jnp.float32)] * 2], strict=True)}

    def run(arrays, segments, *weights):
        return both("gpu", delta, arrays, chunks_of(segments), weights)

    weights = jax.ShapeDtypeStruct((2, length, groups, value), jnp.bfloat16), jax.ShapeDtypeStruct((2, groups, key, value), jnp.float32)
    module = lowered(run, arrays, jax.ShapeDtypeStruct((2, length), jnp.int32), *weights)
    assert module.count("@mosaic_gpu_v2") == 3


@pytest.mark.mosaic
def test_what_is_traced_for_gpus_takes_the_kernels(monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", gpu.recurrence)
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu"))
    arrays, wide = low(1, 2, 16, 64), inputs(2, LENGTH, 1, 2, 16, 64, np.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = [str(jax.make_jaxpr(lambda a: recurrence(*(a[n] for n in NAMES), chunks_of(ids()[0])))(a)) for a in (arrays, wide)]
    assert ["mpmd_map" in text for text in traced] == [True, False]


def test_what_is_refused():
    def refused(reason, *sizes, dtype="bfloat16", **options):
        with pytest.raises(NotImplementedError, match=reason):
            call_of(True, jnp.dtype(dtype), *sizes, **options)

    if not MOSAIC:
        return refused("jax 0.1", 64, 128, 128)
    refused("float32 inputs", 64, 128, 128, dtype="float32")
    refused("keys of 40 and values of 64", 64, 40, 64)
    refused("keys of 256 and values of 64", 64, 256, 64)
    refused("keys of 128 and values of 32", 64, 128, 32)
    for size, key, value in ((64, 128, 128), (16, 64, 64)):
        assert call_of(True, jnp.dtype("bfloat16"), size, key, value).stages > 1
