"""Attention in a ring: keys and values of rows that lie over several devices go from one to the next. As one device, in float64's
eyes, whatever tokens each device has. (Meshes of several devices, kernels among them: tests/sharding/test_sharding.py)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import attention_cases
from helpers.attention_cases import Case, in_a_ring
from helpers.tiers import first_cases

from jaxrl.kernels.attention import ring_attention
from jaxrl.kernels.attention.packed import ring

CASES = [Case("whole", length=128), Case("documents", softcap=2.0), Case("ones"), Case("prompts", window=33, sinks=True),
         Case("padding", length=512, sinks=True), Case("all_padding", length=140), Case("prompts", length=800, heads=6, groups=2, dtype="bfloat16"),
         Case("documents", length=700, heads=2, groups=1, window=200, dtype="float64")]


@first_cases(1, "name, count", [("reference", 2), ("blockwise", 4)])
@first_cases(1, "case", [pytest.param(case, marks=[] if case in CASES[3:5] else pytest.mark.slow, id=str(case)) for case in CASES])
def test_a_ring_is_attention_over_whole_rows(case, name, count):
    """Queries without a key in some parts, or in all; sinks, which count once; prompts whose answers lie elsewhere."""
    with jax.enable_x64(case.dtype == "float64"):
        attention_cases.check(name, case, in_a_ring(name, case, count))


def test_what_a_device_keeps_is_its_own():
    """Of 8 devices with 64 tokens each: nothing that the backward pass is given has the keys of a second one."""
    def kept(q, k, v, at):
        work = ring.work_of(q.shape, k.shape, q.dtype, at, jax.lax.all_gather(at, "cp", axis=1, tiled=True), count=8, implementation="blockwise")
        run = functools.partial(ring_attention, axis="cp", work=work, implementation="blockwise")
        return jax.tree.leaves(jax.vjp(lambda q, k, v: run(q, k, v, at, at), q, k, v)[1])

    shapes = [jax.ShapeDtypeStruct((8, 2, 64, heads, 32), jnp.float32) for heads in (4, 2, 2)]
    sizes = [x.size // 8 for x in jax.eval_shape(jax.vmap(kept, axis_name="cp"), *shapes, jax.ShapeDtypeStruct((8, 2, 64), jnp.int32))]
    assert max(sizes) == 2 * 64 * 4 * 32 and sizes.count(2 * 64 * 2 * 32) == 2


@pytest.mark.full
def test_implementations_without_sums_stand_aside(caplog, monkeypatch):
    """cuDNN's tells no logarithm of its sums: XLA's runs in its place, of rows that are not short the one in blocks."""
    lists = []

    def one(q):
        at = jnp.arange(q.shape[1])[None]
        work = ring.work_of(q.shape, q.shape, q.dtype, at, at, count=1, implementation="cudnn")
        lists.append(set(work.parts))
        return ring_attention(q, q, q, at, at, axis="cp", work=work, implementation="cudnn")

    short, long = (np.random.default_rng(0).normal(size=(1, 1, n, 2, 8)).astype(np.float32) for n in (4, 256))
    assert np.isfinite(jax.vmap(one, axis_name="cp")(short)).all() and "cudnn" not in ring.PARTS
    assert "cudnn does not serve" in caplog.text
    monkeypatch.delattr(ring.reference, "forward_part")
    assert np.isfinite(jax.vmap(one, axis_name="cp")(long)).all() and lists == [set(), {"blockwise"}]
