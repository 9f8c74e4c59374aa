"""Attention: every implementation against a loop in numpy, its gradients, memory, and who is asked."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import CASES, check, computed_tiles, leave_mesh
from helpers.tiers import first_cases
from helpers.tiny_models import ARCHITECTURES, SIZES
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh

from jaxrl.kernels import fallback
from jaxrl.kernels.attention import attention, cached, cached_attention
from jaxrl.kernels.attention.packed import api, blockwise, tpu, tuned
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.kernels.platform import platform
from jaxrl.models import build

B, L, H, G, K = 2, 13, 6, 2, 4
SINKS = np.array([-30.0, -1.0, 0.0, 0.5, 2.0, 30.0])  # of nearly no weight, and of nearly all
OPTIONS = [dict(window=w, softcap=c) for w, c in itertools.product((0, 3), (0.0, 2.0))] + [
    dict(window=3, softcap=2.0, sinks_H=SINKS), dict(window=2, softcap=0.0, q_reach_BxL=1), dict(window=0, softcap=0.0, q_reach_BxL=2)]


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
    if "q_reach_BxL" in options:  # so many positions further, of every other query
        options["q_reach_BxL"] = positions + options["q_reach_BxL"] * (positions % 2)
    return attention(q, k[:, order], v[:, order], positions, positions[:, order], segments, segments[:, order],
                     prefixes, **options)


def oracle(q, k, v, positions, segments, prefixes, window, softcap, scale, sinks_H=None, q_reach_BxL=0):
    """The docstring of api.attention, one query, head and key at a time."""
    out = np.zeros_like(q)
    for b, i, h in itertools.product(*map(range, q.shape[:3])):
        scores, values = [], []
        for j in range(q.shape[1]):
            own = segments[b, j] == segments[b, i]
            shared = prefixes[b, i] != 0 and segments[b, j] == prefixes[b, i]
            ahead = positions[b, i] - positions[b, j]
            further = q_reach_BxL * (positions[b, i] % 2)
            if (own or shared) and ahead >= -further and (not window or ahead < window):
                s = scale * q[b, i, h] @ k[b, j, h // (H // G)]
                scores.append(softcap * np.tanh(s / softcap) if softcap else s)
                values.append(v[b, j, h // (H // G)])
        scores += [] if sinks_H is None else [sinks_H[h]]
        p = np.exp(np.array(scores) - max(scores))
        out[b, i, h] = (p / p.sum())[:len(values)] @ np.array(values)
    return out


@pytest.mark.full
@first_cases(1, "options", OPTIONS)
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
                real = np.asarray(arguments[4] > 0)  # of padding the result means nothing
                np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow
def test_one_row_of_positions_serves_all(packed):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 200, heads, K)).astype(np.float32)) for heads in (H, G, G))
    positions = jnp.arange(200)[None]
    segments = jnp.asarray(rng.integers(1, 4, (3, 200))) if packed else None
    got, want, whole = (attention(q, k, v, p, p, segments, segments, implementation=name) for p, name in (
        (positions, "blockwise"), (positions, "reference"), (jnp.tile(positions, (3, 1)), "blockwise")))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(got, whole)


def test_gradients_agree(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 5)
    with jax.enable_x64(True):
        q, k, v, *rest = inputs()
        weights = np.random.default_rng(2).normal(size=q.shape) * (rest[1] > 0)[..., None, None]

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


@first_cases(1, "name", ["reference", "blockwise"])
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
    other = run(q, np.where(padding, 7, k), np.where(padding, -7, v), positions, segments, prefixes,
                implementation=name)
    real = run(q, k, v, positions, segments, prefixes, implementation=name)
    np.testing.assert_array_equal(np.where(padding, 0, other), np.where(padding, 0, real))


@pytest.mark.full
def test_gradients_of_sinks(monkeypatch):
    """In float64 against automatic differentiation of the reference at 1e-12 per tensor, with windows, shared prompts and
    padding; a sink far below all scores is as good as none, to the bit."""
    monkeypatch.setattr(blockwise, "BLOCK", 5)
    with jax.enable_x64(True):
        q, k, v, *rest = inputs()
        weights = np.random.default_rng(2).normal(size=q.shape) * (rest[1] > 0)[..., None, None]

        @functools.partial(jax.jit, static_argnums=2)
        def loss(qkv, sinks, name):
            return (run(*qkv, *rest, implementation=name, window=4, softcap=3.0, sinks_H=sinks) * weights).sum()

        grad = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        want = jax.tree.leaves(grad((q, k, v), SINKS / 10, "reference"))
        for a, b in zip(want, jax.tree.leaves(grad((q, k, v), SINKS / 10, "blockwise")), strict=True):
            assert np.linalg.norm(a - b) < 1e-12 * np.linalg.norm(a)
        assert np.abs(want[3]).min() > 1e-3
        moved = SINKS / 10 + 1e-6 * np.eye(H)
        slopes = [float(loss((q, k, v), m, "reference") - loss((q, k, v), SINKS / 10, "reference")) / 1e-6 for m in moved]
        np.testing.assert_allclose(want[3], slopes, rtol=1e-4, atol=1e-6)
        assert loss((q, k, v), np.full(H, -1e4), "blockwise") == loss((q, k, v), None, "blockwise")


EVERY_DAY = {"prompts-shuffled=True", "prompts-window=33-softcap=5.0-scale=0.3", "padding",
             "ones-size=96-dtype=bfloat16", "prompts-window=50-sinks=True", "prompts-window=50-images=True"}


PUSHED = {"whole-window=90-images=True", "documents-queries=70", "prompts-heads=6-groups=1-size=128", "all_padding-length=140"}  # by .ci/run


def marks(name, case):
    if name == "tpu" and case in EVERY_DAY:
        return ()
    return pytest.mark.slow if name != "tpu" or case in PUSHED else pytest.mark.nightly


@pytest.mark.parametrize("name, case", [pytest.param(name, case, id=f"{name}-{case}", marks=marks(name, str(case)))
    for name in ("reference", "blockwise", "tpu") for case in CASES if name == "tpu" or str(case) in EVERY_DAY])
@pytest.mark.slow
def test_case(name, case):
    """Forward and all gradients against float64, finite, bitwise equal when run again; TPU kernels interpreted."""
    check(name, case)


@pytest.mark.parametrize("case", [pytest.param(CASES[i], id=str(CASES[i]),
                                               marks=pytest.mark.slow if i in (5, 12) else pytest.mark.nightly)
                                  for i in (1, 5, 8, 12, 20)])
@pytest.mark.slow
def test_tpu_kernels_neither_race_nor_read_what_was_not_written(case):
    """Interpreted with buffers, copies and their races; memory starts as NaN."""
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    check(functools.partial(tpu.attention, interpret=mode), case)
    assert not interpret_pallas_call.races.races_found


def compiled_memory(name, length):
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, positions):
        return attention(q, k, v, positions, positions, positions, positions, implementation=name).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape,
                                                    row).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_blockwise_memory_is_linear_in_length():
    small, large = compiled_memory("blockwise", 2048), compiled_memory("blockwise", 8192)
    assert large < 5 * small
    assert compiled_memory("reference", 8192) > 12 * compiled_memory("reference", 2048)
    assert large < compiled_memory("reference", 8192) / 10


def packed(lengths):
    """(positions, segments) [1, L] of documents of these lengths."""
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    return positions.astype(np.int32), np.repeat(np.arange(len(lengths)) + 1, lengths)[None].astype(np.int32)


def answers(seed, total=16384, count=16):
    """Lengths as answers have them, log-normal with sigma 0.8."""
    shares = np.random.default_rng(seed).lognormal(0, 0.8, count)
    lengths = np.floor(shares / shares.sum() * total).astype(int)
    lengths[0] += total - lengths.sum()
    return lengths


def computed(lengths):
    positions, segments = packed(lengths)
    length = positions.shape[1]
    x = jnp.ones((1, length, 1, 8))
    counts = jax.jit(lambda *a: computed_tiles(*a, Ids(positions, positions, segments, segments)))(x, x, x)
    return {name: int(count) * tuned.TILE**2 for name, count in counts.items()}


@pytest.mark.full
@pytest.mark.parametrize("lengths", [[1024] * 16, answers(0)], ids=["equal", "answers"])
def test_work_is_that_of_the_documents(lengths):
    """16 documents in a row of 16k: each kernel, by its own count, computes at most 1.3 times their causal areas."""
    area = sum(n * (n + 1) // 2 for n in lengths)
    for name, scores in computed(lengths).items():
        assert area <= scores <= 1.3 * area, name


@pytest.mark.slow
def test_empty_rows_are_no_work():
    positions = np.arange(512, dtype=np.int32)[None].repeat(2, 0)
    segments = np.stack([np.zeros(512, np.int32), np.repeat([1, 0], [100, 412]).astype(np.int32)])
    x = jnp.ones((2, 512, 2, 8))
    counts = computed_tiles(x, x, x, Ids(positions, positions, segments, segments))
    assert {name: int(count) for name, count in counts.items()} == {"forward": 1, "queries": 1, "keys": 1}


# -- one query per slot


def cached_inputs(slots=5, length=300, heads=6, groups=2, size=64, dtype=np.float32, seed=0):
    """Queries, a cache of three layers, positions: the first, the last, some between, one idle."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(slots, 1, heads, size)).astype(np.float32)
    k, v = (rng.normal(size=(3, slots, length, groups * size)).astype(np.float32) for _ in range(2))
    positions = np.array([0, length - 1, length // 3, length, length // 2], np.int32)[:slots, None]
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), positions


CACHED_CASES = [dict(), dict(window=70, softcap=2.0, scale=0.3), dict(heads=7, groups=1, size=128),
                dict(length=1100, window=600),
                dict(heads=4, groups=4, size=64, dtype=jnp.bfloat16), dict(length=20, heads=8, groups=8, size=80),
                dict(window=70, softcap=2.0, sinks_H=SINKS.astype(np.float32)), dict(heads=7, groups=1, size=128, sinks_H=np.arange(7.0))]


@pytest.mark.parametrize("case", CACHED_CASES, ids=str)
@pytest.mark.slow
def test_cached_implementations_agree(case, monkeypatch):
    """XLA's and the TPU kernel against the reference in float64, in one layer of three, twice; float64 too where it is
    taken. What lies behind a slot's position does not matter."""
    monkeypatch.setattr(cached.tuned, "CACHE_BYTES", 1)  # 128 positions at a time
    options = {name: case[name] for name in ("window", "softcap", "scale", "sinks_H") if name in case}
    sizes = {name: case[name] for name in case if name not in options}
    q, k, v, positions = cached_inputs(**sizes)
    busy = positions[:, 0] < k.shape[2]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)]
        truth = np.asarray(cached_attention(*wide, positions, 1, implementation="reference", **options))
        got = cached_attention(*wide, positions, 1, implementation="xla", **options)
        np.testing.assert_allclose(got[busy], truth[busy], rtol=0, atol=1e-13)
    behind = np.arange(k.shape[2])[None, None, :, None] > positions[None, :, :, None]
    for name in ("xla", "tpu"):
        run = jax.jit(functools.partial(cached_attention, implementation=name, **options))
        out = np.asarray(run(q, k, v, positions, 1))
        assert out.dtype == q.dtype and np.isfinite(out.astype(np.float32)).all()
        np.testing.assert_allclose(out[busy].astype(np.float64), truth[busy], rtol=0,
                                   atol=3e-6 if q.dtype == np.float32 else 2e-2)
        again = run(q, jnp.where(behind, 9, k), jnp.where(behind, -9, v), positions, 1)
        assert np.asarray(again)[busy].tobytes() == out[busy].tobytes()


@pytest.mark.parametrize("window", [0, 200])
def test_cached_work_is_what_slots_see(window, monkeypatch):
    """The kernel's list names exactly the blocks with a visible position, in order, and one block for an idle slot."""
    monkeypatch.setattr(cached.tuned, "CACHE_BYTES", 1)
    positions = np.array([[0], [127], [128], [700], [1000], [999]], np.int32)
    work = cached.tpu.work_of(jnp.asarray(positions), (1, 6, 1000, 128), jnp.float32, window=window)
    want = []
    for slot, position in enumerate(positions[:, 0]):
        seen = [c for c in range(1000) if c <= position
                and (not window or position - c < window)] if position < 1000 else [0]
        want += [(slot, block) for block in sorted({c // 128 for c in seen})]
    words, call = np.asarray(work.words[0]), cached.tpu.Call(128, 1000, 1)
    assert [(int(call.place(w)), int(call.start(w)) // 128) for w in words[:int(work.count[0])]] == want
    assert (words[len(want):] == -1).all()


# -- who is asked


def spied(monkeypatch, table):
    asked = []
    for name, function in list(table.items()):
        def spy(*args, name=name, function=function, **kwargs):
            out = function(*args, **kwargs)
            asked.append(name)
            return out
        monkeypatch.setitem(table, name, spy)
    return asked


@pytest.mark.full
def test_who_is_asked(monkeypatch):
    """auto on a CPU: blockwise for many queries, else the reference, never a kernel; a named one falls back where it
    cannot."""
    asked = spied(monkeypatch, api.IMPLEMENTATIONS)
    monkeypatch.setattr(blockwise, "WORTH_IT", 10)
    q, k, v, positions, *_ = inputs(dtype=np.float32)
    for length, implementation, want in ((13, "auto", "blockwise"), (9, "auto", "reference"),
                                         (9, "blockwise", "blockwise"),
                                         (13, "reference", "reference"), (9, "tpu", "reference"),
                                         (13, "tpu", "blockwise")):
        attention(q[:, :length], k, v, positions[:, :length], positions, implementation=implementation)
        assert asked.pop() == want and not asked


@pytest.mark.slow
def test_who_is_asked_for_the_cache(monkeypatch):
    asked = spied(monkeypatch, cached.api.IMPLEMENTATIONS)
    q, k, v, positions = cached_inputs(length=20)
    for implementation, want in (("auto", "xla"), ("blockwise", "xla"), ("reference", "reference"), ("tpu", "tpu")):
        cached_attention(q, k, v, positions, 0, implementation=implementation)
        assert asked.pop() == want and not asked
    with jax.enable_x64(True):
        cached_attention(*(jnp.asarray(x, jnp.float64) for x in (q, k, v)), positions, 0, implementation="tpu")
    cached_attention(q[:, :, :3], k[..., :64], v[..., :64], positions, 0, implementation="tpu")
    assert asked == ["xla", "xla"]


def test_a_refusal_is_said_once(caplog):
    q, k, v, positions, *_ = inputs(dtype=np.float32)
    fallback.say_once.cache_clear()
    for _ in range(2):
        attention(q, k, v, positions, positions, implementation="tpu")
    said = [r.getMessage() for r in caplog.records]
    assert said == ["attention: tpu does not serve this model (head size 4; the TPU kernel takes multiples of 8 up to "
                    "256); the next implementation runs"]


def test_the_platform_is_that_of_the_mesh():
    """A step that is traced for a TPU's mesh takes its kernels, on a machine without one too."""
    assert platform() == "cpu" and api.order("auto") == ("blockwise", "reference")
    tpu_mesh = AbstractMesh((4,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    leave_mesh()
    with jax.sharding.use_abstract_mesh(tpu_mesh):
        assert platform() == "tpu" and api.order("auto") == ("tpu", "blockwise", "reference")
        assert cached.api.order("auto") == ("tpu", "xla") and api.order("reference") == ("reference", "blockwise")
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("x",),
                                                     abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))):
        assert platform() == "gpu" and api.order("auto") == ("gpu", "cudnn", "blockwise", "reference")
        assert cached.api.order("auto") == ("gpu", "xla")
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert platform() == "cpu"


def primitives(jaxpr):
    """Names of a jaxpr's own primitives, those of its inner jaxprs and of no kernel."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                yield from primitives(inner)


@pytest.mark.full
def test_work_is_found_outside_the_layers():
    """The scan over layers holds kernels and no search for their work, in both passes."""
    kind, own = ARCHITECTURES["gemma3"]
    model = build({**SIZES, **own, "model_type": kind, "head_dim": 64, "num_hidden_layers": 12,
                   "sliding_window_pattern": 3},
                  compute_dtype=jnp.float32, scan_layers=True, remat="full", attention="tpu")
    params = jax.eval_shape(model.init, jax.random.key(0))
    row = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(1, 128, jnp.float32))
    loss = jax.grad(lambda p, *rows: model.hidden(p, *rows).sum())
    slot = jax.ShapeDtypeStruct((1,), jnp.int32)
    for function, arguments in ((loss, (params, row, row, row, row)), (model.decode, (params, slot, slot, cache))):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        scans = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        inside = {name for scan in scans for name in primitives(scan)}
        assert "pallas_call" in inside
        search = {"reduce_or", "cumsum"}  # over pairs of a row, over slots of a cache
        assert not search & inside and search & set(primitives(jaxpr))


def test_wrong_calls():
    q, k, v, positions, *_ = inputs()
    with pytest.raises(ValueError, match="'flash': choose auto, tpu, gpu, cudnn, blockwise, reference"):
        attention(q, k, v, positions, positions, implementation="flash")
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 key-value heads"):
        attention(q[:, :, :5], k, v, positions, positions)
