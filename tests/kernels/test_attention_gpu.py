"""Attention on Hopper GPUs, without one: the kernels interpreted (races found, uninitialised memory NaN, reads beyond
an end refused), counted, and lowered for CUDA. The body that keeps operands in registers is only lowered here."""

import functools
import heapq
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import attention_cases
from helpers.attention_cases import Case
from helpers.tiers import nightly
from helpers.tiny_models import ARCHITECTURES, SIZES
from jax import export
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrl.kernels.attention import cached, gpu_chip
from jaxrl.kernels.attention.gpu_chip import sizes_of
from jaxrl.kernels.attention.packed import cudnn, gpu, gpu_plan, reference, tuned
from jaxrl.kernels.attention.packed.reference import Ids
from jaxrl.models import build
from jaxrl.sharding.mesh import AXES

JAX = tuple(int(x) for x in jax.__version__.split(".")[:2])
MOSAIC = JAX >= (0, 12)
# the interpreter's threads wait for each other: each needs one of the runtime's threads
os.environ.setdefault("PJRT_NPROC", "8")


def strict():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.mark.mosaic
@pytest.mark.parametrize("case", attention_cases.HOPPER_CASES, ids=str)
def test_shared_cases(case):
    attention_cases.check(functools.partial(gpu.attention, interpret=strict()), case)


@pytest.mark.mosaic
@pytest.mark.parametrize("case", [attention_cases.HOPPER_CASES[1], nightly(attention_cases.HOPPER_CASES[5])], ids=str)
def test_parts_of_a_ring(case):
    """Sums that a part tells, and gradients by the sums of the whole."""
    forward, gradients = (functools.partial(f, interpret=strict()) for f in (gpu.forward_part, gpu.gradients_of_part))
    attention_cases.check("gpu", case, attention_cases.by_parts(SimpleNamespace(forward_part=forward, gradients_of_part=gradients), case))


@pytest.mark.mosaic
def test_blocks_without_work_are_not_computed():
    """The kernels' own counts: exactly the parts of tiles with a visible pair."""
    lengths, heads, groups = [200, 320, 120, 384], 2, 1
    segments = np.repeat(np.arange(1, 5), lengths).astype(np.int32)[None]
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)[None]
    q, k, v = (jnp.ones((1, sum(lengths), h, 64), jnp.bfloat16) for h in (heads, groups, groups))
    ids = Ids(positions, positions, segments, segments, np.zeros_like(segments))
    counted = attention_cases.computed_blocks(q, k, v, ids, scale=0.1, interpret=strict())
    mask = np.asarray(reference.visible(ids, 0))[0]
    sizes = gpu.sizes_for(64)
    for name, rows, columns, copies in (("forward", 64, sizes.forward.block, heads),
                                        ("queries", 64, sizes.queries.block, heads),
                                        ("keys", sizes.keys.block, 64, heads)):
        active = mask.reshape(-1, rows, mask.shape[1] // columns, columns).any(axis=(1, 3)).sum()
        assert counted[name][0].sum() == active * copies, name
        assert counted[name][1] == rows * columns, name


@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.nightly),
                                  pytest.param(128, marks=pytest.mark.slow),
                                  pytest.param(256, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_work_of_sixteen_documents(size):
    """At the sizes in use: at most 1.3 times the causal areas of 16 documents in 16k, forward and backward, by parts of
    tiles."""
    lengths = np.random.default_rng(0).multinomial(16384, np.full(16, 1 / 16))
    segments = np.repeat(np.arange(1, 17), lengths).astype(np.int32)[None]
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)[None]
    area, sizes = (lengths * (lengths + 1) // 2).sum(), gpu.sizes_for(size)
    for parts, block, transposed in ((2, sizes.forward.block, False),
                                     (sizes.queries.consumers, sizes.queries.block, False),
                                     (sizes.keys.consumers, sizes.keys.block, True)):
        plan = gpu_plan.plan(1, Ids(positions, positions, segments, segments), window=0, parts=parts, block=block,
                             transposed=transposed)
        wanted = np.asarray(plan.lists)[..., None] >> np.arange(parts) & 1
        work = int(wanted.sum()) * 64 * block
        assert area < work < 1.3 * area, (parts, block, work / area)


@pytest.mark.slow
def test_plan():
    """Lists hold exactly the blocks with work, and which parts of the tile have it, first those without a mask, which
    are visible throughout; the dearest first."""
    for layout, length in (("prompts", 500), ("documents", 700), ("whole", 384), ("padding", 300)):
        for window, transposed in ((0, False), (90, False), (0, True)):
            ids = attention_cases.inputs(Case(layout, length=length))[2]
            plan = gpu_plan.plan(len(ids.q_positions), ids, window=window, parts=2, block=64, transposed=transposed)
            mask = np.asarray(reference.visible(ids, window))
            if ids[2] is not None:
                mask &= (ids[2] != 0)[..., None]
            seen = np.pad(mask, [(0, 0), (0, -length % 128), (0, -length % 128)])
            seen = seen.swapaxes(1, 2) if transposed else seen
            blocks = seen.reshape(seen.shape[0], -1, 2, 64, seen.shape[2] // 64, 64)
            some, full = blocks.any(axis=(3, 5)), blocks.all(axis=(2, 3, 5))
            counts, visits = np.asarray(plan.counts), np.asarray(gpu_plan.entry(plan.lists, 2)[0])
            wants = np.stack([gpu_plan.entry(plan.lists, 2, part)[1] for part in (0, 1)], axis=2)
            for b, n in np.ndindex(counts.shape[:2]):
                n_full, count = counts[b, n]
                assert set(visits[b, n, :count]) == set(np.flatnonzero(some[b, n].any(axis=0)))
                assert full[b, n, visits[b, n, :n_full]].all()
                assert (wants[b, n] == some[b, n][:, visits[b, n]]).all()
            costs = counts[..., 1].reshape(-1)[np.asarray(plan.order)]
            assert (np.diff(costs) <= 0).all() and sorted(np.asarray(plan.order)) == list(range(costs.size))
            assert layout != "whole" or window or counts[..., 0].sum() > 0


DECODES = [  # slots, cache length, heads, groups, head size, window, soft-cap, multiprocessors, sinks
    (3, 208, 4, 2, 64, 0, 0.0, 2, False), (2, 144, 14, 2, 128, 50, 0.0, 1, True), (1, 1072, 2, 1, 128, 0, 0.0, 132, True),
    (1, 96, 8, 8, 256, 0, 5.0, 1, False), (2, 1104, 8, 1, 96, 600, 0.0, 132, False),
]


@pytest.mark.mosaic
@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decoding(case, monkeypatch):
    """Slots of unequal length and an idle one; positions split or not; more pieces of work than multiprocessors; what
    lies behind a slot's blocks is not read."""
    slots, length, heads, groups, size, window, softcap, chips, sinks = case
    monkeypatch.setattr(gpu_chip, "MULTIPROCESSORS", chips)
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(slots, 1, heads, size)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.normal(size=(2, slots, length, groups * size)), jnp.bfloat16) for _ in range(2))
    positions = np.append(rng.integers(0, length, slots - 1), length - 1).astype(np.int32)[:, None]
    positions[1:2] = length if slots > 2 else positions[1:2]
    keys = sizes_of(cached.tuned.GPU, size).block
    unread = (np.arange(length) // keys > positions // keys) & (np.arange(length) < length - keys)
    k, v = (jnp.where(unread[..., None], jnp.nan, x) for x in (k, v))
    options = dict(window=window, softcap=softcap, scale=size ** -0.5, sinks=jnp.linspace(-1.0, 4.0, heads) if sinks else None)
    got = np.asarray(cached.gpu.attention(q, k, v, positions, 1, interpret=strict(), **options), np.float32)
    want = cached.reference.attention(*(jnp.nan_to_num(x).astype(jnp.float32) for x in (q, k, v)), positions, 1,
                                      **options)
    busy = (positions < length)[..., None, None]
    assert np.isfinite(got).all() and not np.where(busy, 0, got).any()
    assert np.linalg.norm(np.where(busy, got - want, 0)) < 0.01 * np.linalg.norm(want)


def test_parts_of_decoding():
    assert cached.gpu.splits_of(1024, 4096, 64) == 1
    assert cached.gpu.splits_of(2, 4096, 64) == 16
    assert cached.gpu.splits_of(20, 4096, 64) == 14


def lowered(function, *shapes):
    """The module for CUDA, as far as a machine without a GPU makes it: Mosaic kernels down to their serialised MLIR."""
    names = "mosaic_gpu_v2", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*shapes).mlir_module()


def shapes(length, size, heads=4, groups=2, batch=2):
    wide = [jax.ShapeDtypeStruct((batch, length, h, size), jnp.bfloat16) for h in (heads, groups, groups)]
    return *wide, *[jax.ShapeDtypeStruct((batch, length), jnp.int32)] * 3


@pytest.mark.mosaic
@pytest.mark.parametrize("size,softcap,window",
                         [(64, 0.0, 0), (80, 0.0, 0), (96, 30.0, 0), (128, 0.0, 0), (128, 0.0, 100),
                                                 (192, 0.0, 0), (256, 50.0, 100)])
def test_kernels_lower_for_cuda(size, softcap, window):
    """Forward, dq and dk with dv, in the body that keeps operands in registers; shared memory fits."""
    def loss(q, k, v, positions, segments, prefixes):
        ids = Ids(positions, positions, segments, segments, prefixes)
        out = gpu.attention(q, k, v, ids, window=window, softcap=softcap, scale=0.1, interpret=False)
        return out.astype(jnp.float32).sum()

    assert lowered(jax.grad(loss, (0, 1, 2)), *shapes(1000, size)).count("@mosaic_gpu_v2") == 3
    alone = functools.partial(gpu.attention, window=window, softcap=softcap, scale=0.1, interpret=False)
    q, k, v, positions, *_ = shapes(1024, size)
    assert lowered(lambda q, k, v, p: alone(q, k, v, Ids(p, p)), q, k, v, positions).count("@mosaic_gpu_v2") == 1


@pytest.mark.mosaic
@pytest.mark.parametrize("size,slots", [(64, 64), (96, 2), (128, 1), (192, 2), (256, 256)])
def test_decoding_lowers_for_cuda(size, slots):
    q = jax.ShapeDtypeStruct((slots, 1, 12, size), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((24, slots, 2048, 2 * size), jnp.bfloat16)
    positions, layer = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((slots, 1), ()))
    call = functools.partial(cached.gpu.attention, window=0, softcap=0.0, scale=0.1, interpret=False)
    assert lowered(call, q, cache, cache, positions, layer).count("@mosaic_gpu_v2") == 1


@pytest.mark.mosaic
def test_a_sharded_step_traced_for_gpus_takes_the_kernels():
    """Forward, dq and dk with dv inside the scan over layers, each device on its own rows and heads; the search for
    work once."""
    kind, own = ARCHITECTURES["qwen2"]
    model = build({**SIZES, **own, "model_type": kind, "head_dim": 64, "num_hidden_layers": 4},
                  compute_dtype=jnp.bfloat16, scan_layers=True, remat="full")
    ids = [jax.ShapeDtypeStruct((4, 256), jnp.int32)] * 4

    def loss(params, *ids):
        return model.hidden(params, *ids).astype(jnp.float32).sum()

    mesh = AbstractMesh((2, 1, 1, 1, 2), AXES, (AxisType.Auto,) * 5,
                        abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))
    attention_cases.leave_mesh()
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(model.init, jax.random.key(0)), *ids)
    kernels = [names for names in scans(program.jaxpr) if "mpmd_map" in names]
    assert sorted(names.count("mpmd_map") for names in kernels) == [1, 3]  # forward; again, with dq, and dk and dv
    assert not any("sort" in names for names in kernels)


def scans(jaxpr):
    """For every scan the names of the primitives in it."""
    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in () if eqn.primitive.name == "mpmd_map" else jaxprs_in_params(eqn.params):
                yield from inside(inner)

    for eqn in inside(jaxpr):
        if eqn.primitive.name == "scan":
            yield [e.primitive.name for e in inside(eqn.params["jaxpr"].jaxpr)]


def test_what_is_refused():
    q, k, v = (np.zeros((1, 64, h, 64), jnp.bfloat16) for h in (2, 1, 1))
    at = np.arange(64, dtype=np.int32)[None]
    cache = np.zeros((3, 1, 64, 64), jnp.bfloat16)

    def refused(reason, *qkv, of=gpu.attention, ids=(Ids(at, at),), softcap=0.0, scale=0.1, **rest):
        with pytest.raises(NotImplementedError, match=reason):
            of(*qkv, *ids, window=0, softcap=softcap, scale=scale, **rest)

    refused("softcap 3", q, k, v, of=on_a_gpu, softcap=3.0)
    refused("needs an NVIDIA GPU", q, k, v, of=cudnn.attention)
    refused("float32 inputs", *(x.astype(np.float32) for x in (q, k, v)), of=on_a_gpu)
    refused("1 queries for 64 keys", q[:, :1], k, v, of=on_a_gpu)
    if not MOSAIC:
        refused("jax 0.1", q, k, v)
        refused("jax 0.1", q[:, :1], cache, cache, of=cached.gpu.attention, ids=(at[:, :1], 0))
        return
    refused("float32 inputs", *(x.astype(np.float32) for x in (q, k, v)))
    refused("one type", q, k.astype(np.float16), v)
    refused("head size 40", *(x[..., :40] for x in (q, k, v)))
    refused("one query per row", q[:, :1], k, v, ids=(Ids(at[:, :1], at),))
    refused("scale -1", q, k, v, scale=-1)
    one = dict(of=cached.gpu.attention, ids=(at[:, :1], 0))
    refused("takes one", q[:, :1], cache.astype(np.float16), cache, **one)
    refused("cache length 50", q[:, :1], cache[:, :, :50], cache[:, :, :50], **one)
    refused("head size 32", q[:, :1, :, :32], cache, cache, **one)


def on_a_gpu(*arguments, **options):
    """cudnn.attention as traced for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "platform", lambda: "gpu")
        return cudnn.attention(*arguments, **options)


@pytest.mark.full
def test_rows_that_cudnn_serves():
    """One sequence per row from position 0, then padding: nothing else is causal by row index."""
    def single(layout, length=40, shuffled=False):
        case = Case(layout, length=length, shuffled=shuffled)
        ids = attention_cases.inputs(case)[2]
        return bool(cudnn.one_sequence((len(ids.q_positions), length), ids)[0])

    assert single("whole") and not single("whole", shuffled=True)
    assert not single("documents") and not single("prompts") and not single("ones") and not single("padding")
    positions, segments, prefixes = attention_cases.rows_of([[(30, 3, 0, 0)], [(40, 1, 0, 0)], []], 40)
    answer, lengths = cudnn.one_sequence((3, 40), Ids(positions, positions, segments, segments, prefixes))
    assert answer and lengths.tolist() == [30, 40, 1]
    later, _, _ = attention_cases.rows_of([[(30, 3, 0, 1)], [(40, 1, 0, 0)], []], 40)
    assert not cudnn.one_sequence((3, 40), Ids(later, later, segments, segments, prefixes))[0]


@pytest.mark.parametrize("served,row", [
    (True, [(10, 1, 0, 0), (25, 2, 1, 10)]), (True, [(1, 5, 5, 0), (39, 9, 5, 1)]), (True, [(12, 1, 0, 0)]),
    (False, [(10, 1, 0, 0), (15, 2, 1, 10), (15, 3, 1, 25)]),  # another completion does not see the first one
    (False, [(10, 1, 0, 0), (15, 2, 1, 10), (15, 3, 2, 25)]), (False, [(10, 1, 0, 0), (25, 2, 0, 10)]),
    (False, [(10, 1, 0, 0), (10, 2, 1, 10), (10, 1, 0, 20), (10, 2, 1, 30)]), (False, [(10, 1, 0, 0), (25, 2, 1, 9)]),
    (False, [(10, 1, 3, 0), (25, 2, 1, 10)]), (False, [(10, 1, 0, 0), (5, 0, 0, 0), (25, 2, 1, 10)]),
], ids=str)
def test_a_prompt_and_one_completion_are_one_sequence_for_cudnn(served, row):
    """As rules of visibility have it: every real query sees every real key up to its own index, and no later one."""
    positions, segments, prefixes = attention_cases.rows_of([row, [(40, 1, 0, 0)]], 40)
    ids = Ids(positions, positions, segments, segments, prefixes)
    real = segments != 0
    causal = real[:, :, None] & real[:, None] & np.tril(np.ones((40, 40), bool))
    seen = np.asarray(reference.visible(ids, 0)) & real[:, :, None] & real[:, None]
    assert not served or (seen == causal).all()
    assert bool(cudnn.one_sequence((2, 40), ids)[0]) == served


def test_cudnn_lowers_for_cuda(monkeypatch):
    """Both branches of the choice, forward and backward (the version of the library is asked while tracing): beside
    cuDNN stand the kernels for Hopper where they serve the call, on their work."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(gpu_chip, "platform", lambda: "gpu")

    def loss(q, k, v, positions, segments, prefixes):
        ids = Ids(positions, positions, segments, segments, prefixes)
        work = cudnn.work_of(q.shape, k.shape, q.dtype, ids, window=100)
        out = on_a_gpu(q, k, v, ids, window=100, softcap=0.0, scale=0.1, work=work)
        return out.astype(jnp.float32).sum()

    module = lowered(jax.grad(loss, (0, 1, 2)), *shapes(1024, 64))
    assert "@__cudnn$fmhaSoftmaxBackward" in module and "stablehlo.case" in module
    assert module.count("@mosaic_gpu_v2") == (3 if gpu_chip.OLDEST <= JAX else 0)
    assert cudnn.beside((1, 64, 2, 40), (1, 64, 1, 40), jnp.dtype("bfloat16")).__name__.endswith("blockwise")


def test_blocks_of_threads_share_query_heads_out_where_keys_make_too_few():
    """8k tokens of Qwen2.5-1.5B's heads: 128 tiles of keys, of which the first one's costs twice the mean, for 132
    multiprocessors."""
    of_64, of_256 = (gpu.sizes_for(size).keys for size in (128, 256))
    shares = [tuned.key_shares(*at) for at in (
        (128, 6, of_64), (256, 6, of_64), (400, 6, of_64), (2, 4, of_64), (2, 4, of_256))]
    assert shares == [6, 2, 1, 4, 1]


@pytest.mark.mosaic
def test_whole_groups_of_heads_in_a_block_of_threads(monkeypatch):
    """As many rows have it, where no head has to be shared out."""
    monkeypatch.setattr(tuned, "BLOCKS", 1)
    attention_cases.check(functools.partial(gpu.attention, interpret=strict()), attention_cases.HOPPER_CASES[0])


@pytest.mark.full
@pytest.mark.parametrize("heads,groups,documents", [
    (12, 2, 1), *(pytest.param(*of, marks=pytest.mark.slow) for of in (
        (12, 2, 16), (14, 2, 1), (14, 2, 16), (28, 4, 1), (32, 8, 1), (32, 8, 16)))])
def test_multiprocessors_end_together(heads, groups, documents):
    """Blocks of threads of the real plans, each begun where one has ended, in the order of the grid: the last
    multiprocessor ends at most 4 % after the mean, of those of keys 12 %, counted in steps of the ring and two more for
    each block's begin and end."""
    length, size = (8192, 128) if documents == 1 else (16384, 128)
    lengths = np.random.default_rng(0).multinomial(length, np.full(documents, 1 / documents))
    segments = np.repeat(np.arange(1, documents + 1), lengths).astype(np.int32)[None]
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)[None]
    sizes, per = gpu.sizes_for(size), heads // groups
    for name, transposed, copies, bound in (("forward", False, heads, 1.04), ("keys", True, groups, 1.12)):
        one = getattr(sizes, name)
        plan = gpu_plan.plan(1, Ids(positions, positions, segments, segments), window=0, parts=one.consumers,
                             block=one.block, transposed=transposed)
        steps, each = np.asarray(plan.counts)[..., 1].reshape(-1)[np.asarray(plan.order)], 1
        if transposed:
            shares = tuned.key_shares(len(steps) * groups, per, one)
            copies, each = groups * shares, per // shares
        costs = np.repeat(steps * each + 2, copies)
        free = [0] * gpu_chip.MULTIPROCESSORS
        for cost in costs.tolist():
            heapq.heapreplace(free, free[0] + cost)
        assert max(free) < bound * costs.sum() / gpu_chip.MULTIPROCESSORS, name
