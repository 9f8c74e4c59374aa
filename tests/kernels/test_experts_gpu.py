"""Experts on Hopper GPUs, without one: the kernels interpreted (races found, uninitialised memory NaN, reads beyond an end
refused) and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from test_attention_gpu import MOSAIC, lowered, strict
from test_experts import NAMES, close, inputs, routes, swiglu

from jaxrl.kernels.attention import gpu_chip
from jaxrl.kernels.experts import api, experts, gpu, tuned
from jaxrl.models.feed_forward import clamped

LIMIT = clamped(1.3, 0.7)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(name, activation, ids, arrays, biases, dy):
    """(y, gradients), all of it from one program."""
    def call(a, b):
        return experts(a["x"], ids, *(a[n] for n in NAMES[1:]), activation=activation, biases=b, implementation=name)

    y, back = jax.vjp(call, arrays, biases)
    return y, back(dy)


@pytest.mark.mosaic
@pytest.mark.parametrize("kind, activation, chunk, chips", [("empty", swiglu, 100, 3), ("random", LIMIT, 180, 5)])
def test_kernels_equal_the_reference(kind, activation, chunk, chips, monkeypatch):
    """Two chunks, whose gradients are added, and one; fewer multiprocessors than tiles; experts of several blocks, of less
    than one and of none; an odd number of 64 columns, tiles of one part and of several and, at the limit, biases. Within
    the rounding of bf16 of float64, and of what XLA's blocks round. Then, through the same program, all tokens to one
    expert."""
    monkeypatch.setattr(tuned, "chunk", lambda *_: chunk)
    monkeypatch.setattr(gpu_chip, "MULTIPROCESSORS", chips)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", functools.partial(gpu.serving, interpret=strict()))
    tokens, slots, count, size, width = 180, 2, 4, 256, 192
    arrays, dy = inputs(tokens, slots, count, size, width, jnp.bfloat16)
    arrays |= {name: (arrays[name] / 12).astype(jnp.bfloat16) for name in NAMES[2:]}
    rng = np.random.default_rng(4)
    biases = tuple(jnp.asarray(rng.normal(size=(count, n)), jnp.bfloat16) for n in (width, width, size))
    biases = biases if activation is LIMIT else ()
    for ids in (routes(kind, tokens, slots, count), routes("one", tokens, slots, count)):
        got, beside = (run(name, activation, ids, arrays, biases, dy) for name in ("gpu", "blocks"))
        with jax.enable_x64(True):
            exact = jax.tree.map(lambda a: np.asarray(a, np.float64), (arrays, biases, dy))
            want = run("reference", activation, ids, *exact)
        for a, b, c in zip(*map(jax.tree.leaves, (got, want, beside)), strict=True):
            close(a, b, 5e-3, kind)
            close(a, c, 4e-3, kind)


@pytest.mark.mosaic
@pytest.mark.parametrize("size, width, biased", [(2048, 768, False), (2880, 2880, True), (7168, 2048, False)])
def test_kernels_lower_for_cuda(size, width, biased):
    """Two forward and five backward, and one more for each bias; shared memory fits."""
    low = jnp.bfloat16
    shapes = [((512, 4), jnp.float32), ((512, size), low), ((8, size, width), low), ((8, size, width), low), ((8, width, size), low)]
    shapes += [((8, n), low) for n in (width, width, size) if biased]

    def both(ids, gates, x, *weights):
        y, back = jax.vjp(lambda gates, x, *w: experts(x, ids, gates, *w[:3], biases=w[3:], implementation="gpu",
                                                       activation=LIMIT if biased else swiglu), gates, x, *weights)
        return y, back(y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(api.IMPLEMENTATIONS, "gpu", functools.partial(gpu.serving, interpret=False))
        module = lowered(both, jax.ShapeDtypeStruct((512, 4), jnp.int32), *(jax.ShapeDtypeStruct(*s) for s in shapes))
    assert module.count("@mosaic_gpu_v2") == (10 if biased else 7)


@pytest.mark.mosaic
def test_what_is_traced_for_gpus_takes_the_kernels():
    arrays, dy = inputs(256, 2, 4, 128, 64, jnp.bfloat16)
    ids = routes("random", 256, 2, 4)

    def primitives(kind):
        mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, None, "gpu"))
        with jax.sharding.use_abstract_mesh(mesh):
            text = str(jax.make_jaxpr(lambda a: jax.vjp(lambda a: experts(
                a["x"], ids, *(a[n] for n in NAMES[1:]), activation=swiglu), a)[1](dy))(arrays))
        return text.count("mpmd_map")

    assert primitives("NVIDIA H100") >= 7


def test_what_is_refused():
    weights = [np.zeros((2, 128, 64), jnp.bfloat16), np.zeros((2, 128, 64), jnp.bfloat16), np.zeros((2, 64, 128), jnp.bfloat16)]
    x = np.zeros((8, 128), jnp.bfloat16)

    def refused(reason, x=x, weights=weights, activation=swiglu, **options):
        with pytest.raises(NotImplementedError, match=reason):
            gpu.serving(x, weights, activation=activation, **options)

    if not MOSAIC:
        return refused("jax 0.1")
    refused("float32 inputs", x.astype(np.float32))
    refused("train.matmul=fp8", matmul="fp8")
    refused("experts of 128 x 40", weights=[np.zeros((2, 128, 40)), np.zeros((2, 128, 40)), np.zeros((2, 40, 128))])
    refused("an activation of .*erfc", activation=lambda a, b: jax.nn.gelu(a, approximate=False) * b)
