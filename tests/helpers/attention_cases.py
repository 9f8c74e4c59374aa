"""The cases that every implementation of attention for training is held to, and the one test they share.

Legend: B rows, L queries per row, S keys per row, H query heads, G key-value heads, K head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.attention import cached, packed, share
from jaxrl.kernels.attention.gpu_chip import ROWS, sizes_of
from jaxrl.kernels.attention.packed.reference import Ids

# of the norm, and of the largest entry
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 1.5e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of packed.api.attention. `layout` names a function of this module that makes positions, segments,
    prefixes [B, L]."""

    layout: str
    length: int = 300
    heads: int = 4
    groups: int = 2
    size: int = 64
    dtype: str = "float32"
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    shuffled: bool = False  # keys in another order than queries
    queries: int = 0        # only the last so many queries; 0 = all
    sinks: bool = False
    images: bool = False    # every other 37 positions see each other

    @property
    def options(self):
        return dict(window=self.window, softcap=self.softcap,
                    scale=self.size ** -0.5 if self.scale is None else self.scale)

    def __str__(self):
        base = Case(self.layout)
        changed = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)
                   if getattr(self, f.name) != getattr(base, f.name)]
        return "-".join([self.layout, *changed])


CASES = [
    Case("whole"), Case("whole", length=128), Case("whole", length=1, heads=2, groups=1), Case("documents"),
    Case("ones"), Case("prompts"), Case("padding"), Case("all_padding", length=140),
    Case("prompts", shuffled=True), Case("documents", queries=70),
    Case("prompts", window=50), Case("documents", softcap=2.0), Case("prompts", window=33, softcap=5.0, scale=0.3),
    Case("prompts", heads=6, groups=6), Case("prompts", heads=6, groups=1, size=128),
    Case("documents", heads=7, groups=1),
    Case("prompts", size=80), Case("prompts", size=96), Case("prompts", size=256, length=200, heads=2, groups=1),
    Case("documents", length=700, heads=2, groups=1, window=200),
    Case("prompts", dtype="bfloat16"), Case("documents", dtype="bfloat16", size=128, softcap=20.0),
    Case("ones", dtype="bfloat16", size=96), Case("padding", dtype="bfloat16", window=40, heads=8),
    Case("prompts", images=True, window=50), Case("documents", images=True, window=20, shuffled=True, dtype="bfloat16"),
    Case("whole", images=True, window=90), Case("prompts", images=True),
    Case("prompts", sinks=True, window=50), Case("padding", sinks=True, softcap=2.0, dtype="bfloat16"),
]


# What the kernels for Hopper serve, small: off a GPU they are interpreted.
HOPPER_CASES = [
    Case("prompts", length=200, heads=4, groups=2, dtype="bfloat16"),
    Case("prompts", length=150, heads=2, groups=1, window=33, softcap=5.0, scale=0.3, shuffled=True, dtype="bfloat16"),
    Case("documents", length=256, heads=2, groups=1, size=128, dtype="float16"),
    Case("documents", length=150, heads=2, groups=1, size=256, softcap=20.0, dtype="bfloat16"),
    Case("ones", length=130, heads=1, groups=1, size=192, dtype="bfloat16"),
    Case("padding", length=129, heads=1, groups=1, size=80, window=40, dtype="bfloat16"),
    Case("all_padding", length=40, heads=1, groups=1, size=96, dtype="float16"),
    Case("whole", length=300, heads=1, groups=1, dtype="bfloat16"),
    Case("documents", length=260, heads=1, groups=1, queries=70, dtype="bfloat16"),
    Case("prompts", length=150, heads=2, groups=1, window=33, sinks=True, dtype="bfloat16"),
    Case("prompts", length=150, heads=2, groups=1, window=50, images=True, dtype="bfloat16"),
    Case("whole", length=200, heads=1, groups=1, window=90, images=True, dtype="bfloat16"),
]


def rows_of(sequences, length):
    """Positions, segments, prefixes [B, L] of rows given as lists of (start or None = behind the last, tokens, segment,
    prefix, first position)."""
    out = np.zeros((3, len(sequences), length), np.int32)
    for r, row in enumerate(sequences):
        cursor = 0
        for tokens, segment, prefix, first in row:
            part = slice(cursor, cursor + tokens)
            count = len(range(*part.indices(length)))
            out[0, r, part], out[1, r, part], out[2, r, part] = np.arange(first, first + count), segment, prefix
            cursor += tokens
    return tuple(out)


def whole(length):
    return np.broadcast_to(np.arange(length, dtype=np.int32), (2, length)), None, None


def documents(length):
    """Documents of several lengths, without prefixes, then padding."""
    cuts = [[0.1, 0.35, 0.02, 0.3], [0.61, 0.2, 0.19]]
    rows = [[(int(share * length), i + 1, 0, 0) for i, share in enumerate(row)] for row in cuts]
    return rows_of(rows, length)


def ones(length):
    """Segments of one token between longer ones; one row of nothing else."""
    third = length // 3
    mixed = [(1, i + 1, 0, 0) for i in range(third)] + [(third, third + 1, 0, 0), (1, third + 2, 0, 0),
                                                        (1, third + 3, 0, 0)]
    return rows_of([mixed, [(1, i + 1, 0, 0) for i in range(length)]], length)


def prompts(length):
    """Groups: prompts whose answers share them, an answer of one token, a document, padding."""
    n = length // 10
    first = [(2 * n, 1, 0, 0), (3 * n, 2, 1, 2 * n), (1, 3, 1, 2 * n), (n, 4, 1, 2 * n), (n, 5, 0, 0),
             (2 * n - 1, 6, 5, n)]
    return rows_of([first, [(n, 1, 0, 0), (4 * n, 2, 1, n), (3 * n, 3, 0, 0), (2 * n, 4, 1, n)]], length)


def padding(length):
    """A row of nothing but padding, padding between documents, a row that is half empty."""
    half = length // 2
    return rows_of([[], [(half // 2, 1, 0, 0), (half, 0, 0, 0), (half // 2, 2, 0, 0)], [(half, 1, 0, 0)]], length)


def all_padding(length):
    return rows_of([[], []], length)


def inputs(case: Case):
    """(q, k, v) and perhaps sinks, cotangent, Ids, [B, L] which queries mean something: numpy, float32."""
    rng = np.random.default_rng(len(str(case)))
    positions, segments, prefixes = globals()[case.layout](case.length)
    batch, shape = positions.shape[0], (case.length, case.size)

    def normal(heads):
        x = rng.normal(size=(batch, shape[0], heads, shape[1])).astype(np.float32)
        return np.asarray(jnp.asarray(x, case.dtype), np.float32)

    q, cotangent, k, v = (normal(h) for h in (case.heads, case.heads, case.groups, case.groups))
    order = rng.permutation(case.length) if case.shuffled else np.arange(case.length)
    last = slice(-case.queries if case.queries else None, None)
    means = np.ones(positions.shape, bool) if segments is None else segments != 0
    cotangent = np.where(means[..., None, None], cotangent, 0)
    of_keys = [None if x is None else x[:, order] for x in (positions, segments)]
    of_queries = [None if x is None else x[:, last] for x in (positions, segments, prefixes)]
    begin = positions // 37 * 37
    reach = np.where(begin % 2 == 1, begin + 36, positions)[:, last] if case.images else None
    ids = Ids(of_queries[0], of_keys[0], of_queries[1], of_keys[1], of_queries[2], reach)
    more = (2 * rng.normal(size=case.heads).astype(np.float32),) * case.sinks
    return (q[:, last], k[:, order], v[:, order], *more), cotangent[:, last], ids, means[:, last]


def in_a_ring(name: str, case: Case, count: int, mesh=None):
    """Of kernels.attention's ring, what _both is of a call: tokens of whole rows are dealt to so many devices of the mesh, or of one,
    where vmap stands for them."""
    order = np.random.default_rng(3).permutation(case.length)

    def of_device(qkv, cotangent, ids):
        ids = Ids(**ids)
        rows = [None if x is None else jax.lax.all_gather(x, "cp", axis=1, tiled=True) for x in (ids.k_positions, ids.k_segments)]
        q, k = qkv[:2]
        work = packed.ring.work_of(q.shape, k.shape, q.dtype, ids.q_positions, rows[0], ids.q_segments, rows[1], ids.q_prefixes, ids.q_reach,
                                   count=count, window=case.window, implementation=name)

        def run(q, k, v, *sinks):
            return packed.ring.attention(q, k, v, *ids[:5], q_reach_BxL=ids.q_reach, axis="cp", work=work, implementation=name, **case.options,
                                         **dict(zip(("sinks_H",), sinks, strict=False)))

        out, pull = jax.vjp(run, *qkv)
        return (out, *pull(cotangent))

    def both(qkv, cotangent, ids):
        batch = len(qkv[0])

        def cut(x):
            x = jnp.broadcast_to(x, (batch, *x.shape[1:]))[:, order]
            return jnp.moveaxis(x.reshape(batch, count, -1, *x.shape[2:]), 1, 0)

        def joined(x):
            return jnp.moveaxis(x, 0, 1).reshape(batch, case.length, *x.shape[3:])[:, np.argsort(order)]

        sinks = tuple(jnp.broadcast_to(x, (count, *x.shape)) for x in qkv[3:])
        given = (*map(cut, qkv[:3]), *sinks), cut(cotangent), {f: cut(x) for f, x in ids._asdict().items() if x is not None}
        if mesh is None:
            found = jax.vmap(of_device, axis_name="cp")(*given)
        else:
            part, first = jax.sharding.PartitionSpec("cp"), functools.partial(jax.tree.map, lambda x: x[0])
            alone = lambda *own: jax.tree.map(lambda x: x[None], of_device(*map(first, own)))  # noqa: E731
            found = jax.shard_map(alone, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)(*given)
        return *map(joined, found[:4]), *(x.sum(axis=0) for x in found[4:])

    return jax.jit(both)


def by_parts(module, case: Case):
    """What _both is of a call, of an implementation's parts for rings: keys in two, merged here as a ring merges them."""
    def both(qkv, cotangent, ids):
        (q, k, v), parts = qkv, (slice(case.length // 2), slice(case.length // 2, None))
        mine = [(k[:, p], v[:, p], ids._replace(k_positions=ids.k_positions[:, p], k_segments=ids.k_segments[:, p])) for p in parts]
        found = [module.forward_part(q, *of, None, **case.options) for of in mine]
        lse = jnp.logaddexp(*(x for _, x in found))
        shares = [jnp.where(jnp.isneginf(x), 0, jnp.exp(x - jnp.where(jnp.isneginf(lse), 0, lse))) for _, x in found]
        out = sum(x.astype(jnp.float32) * share[..., None] for (x, _), share in zip(found, shares, strict=True)).astype(v.dtype)
        grads = [module.gradients_of_part(q, *of, None, out, lse, cotangent, **case.options) for of in mine]
        (one, *first), (other, *second) = grads
        return out, (one + other).astype(q.dtype), *(jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True))

    return both  # not jitted: Mosaic's interpreter cannot run two kernels at once


@functools.cache
def truth(case: Case):
    """[out, dq, dk, dv, perhaps that of the sinks] in float64, of inputs that are what `case.dtype` holds."""
    qkv, cotangent, ids, _ = inputs(case)
    with jax.enable_x64(True):
        qkv, cotangent = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (qkv, cotangent))
        return [np.asarray(x) for x in _both(packed.reference.attention, case)(qkv, cotangent, ids)]


def _both(attend, case: Case):
    """The jitted function (q, k, v and perhaps sinks, cotangent, ids) -> (out, their gradients)."""
    def both(qkv, cotangent, ids):
        def run(q, k, v, *more):
            return attend(q, k, v, ids, **case.options, **dict(zip(("sinks",), more, strict=False)))

        out, pull = jax.vjp(run, *qkv)
        return (out, *pull(cotangent))

    return jax.jit(both)


def check(implementation, case: Case, run=None):
    """Holds an implementation to float64: forward and all gradients, finite everywhere, bitwise equal when run again.

    implementation: a name in packed.api.IMPLEMENTATIONS (called itself: nothing falls back), or a function with its
    arguments; or `run` is what _both makes of one.
    """
    attend = packed.api.IMPLEMENTATIONS[implementation] if isinstance(implementation, str) else implementation
    qkv, cotangent, ids, means = inputs(case)
    more = tuple(map(jnp.asarray, qkv[3:]))
    qkv, cotangent = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), (qkv[:3], cotangent))
    qkv += more
    run, means = run or _both(attend, case), means[..., None, None]
    first, again = run(qkv, cotangent, ids), run(qkv, cotangent, ids)
    names = ("out", "dq", "dk", "dv", "dsinks")[:len(first)]
    for name, got, same, want in zip(names, first, again, truth(case), strict=True):
        assert str(got.dtype) == ("float32" if name == "dsinks" else case.dtype), name
        got, same = np.asarray(got), np.asarray(same)
        assert got.tobytes() == same.tobytes(), f"{name} of {case} differs when run again"
        got = got.astype(np.float64)
        assert np.isfinite(got).all(), f"{name} of {case} is not finite"
        if name == "out":
            got, want = np.where(means, got, 0), np.where(means, want, 0)
        for size in (np.linalg.norm, lambda x: np.abs(x).max() / 4):
            error = size(got - want) / max(size(want), 0.2 * size(np.asarray(cotangent, np.float64)), 1e-30)
            assert error <= TOLERANCE[case.dtype], f"{name} of {case}: off by {error:.1e}"


@dataclasses.dataclass(frozen=True)
class SharedCase:
    """One call of cached.api.cached_attention with slots that share prompts.

    prompts: (positions shared, slots) per prompt. A slot more is idle and in no tile; of every prompt of several slots
    the last but one has ended.
    """

    prompts: tuple
    length: int = 384
    heads: int = 4
    groups: int = 2
    size: int = 64
    dtype: str = "float32"
    softcap: float = 0.0
    sinks: bool = False

    @property
    def options(self):
        sinks = jnp.linspace(-2.0, 3.0, self.heads) if self.sinks else None
        return dict(window=0, softcap=self.softcap, scale=self.size ** -0.5, sinks=sinks)


SHARED_CASES = [
    SharedCase(((0, 2), (300, 3), (127, 2), (128, 2), (256, 1))),
    SharedCase(((140, 11), (64, 3)), length=272, heads=7, groups=1, size=128, softcap=5.0, dtype="bfloat16", sinks=True),
    SharedCase(((350, 9),), heads=12, groups=1, size=128, dtype="bfloat16"),
    SharedCase(((150, 3), (1, 2)), length=160, heads=20, groups=1, size=128, dtype="bfloat16"),
]


def shared_inputs(case: SharedCase):
    """(q, k, v, positions) in case.dtype, the slots' prompts and shared lengths as `share` takes them; the layer is 1
    of 2."""
    rng = np.random.default_rng(len(str(case)))
    slots = [(name, length) for name, (length, count) in enumerate(case.prompts) for _ in range(count)] + [(None, 0)]
    slots = [slots[i] for i in rng.permutation(len(slots))]
    names, lengths = ([s[i] for s in slots] for i in (0, 1))
    q = rng.normal(size=(len(slots), 1, case.heads, case.size))
    k, v = rng.normal(size=(2, 2, len(slots), case.length, case.groups * case.size))
    positions = np.array([rng.integers(length, case.length) for length in lengths], np.int32)
    for name, (length, _) in enumerate(case.prompts):
        own = [i for i, n in enumerate(names) if n == name]
        for x in (k, v):
            x[:, own, :length] = x[:, own[:1], :length]
        positions[own[0]], positions[own[-1]] = length, case.length - 1
        if len(own) > 1:
            positions[own[-2]] = case.length
    positions[names.index(None)] = case.length
    return tuple(jnp.asarray(x, case.dtype) for x in (q, k, v)), positions[:, None], names, lengths


def read_once(name: str, size: int, length: int) -> int:
    """Of `length` shared positions those that the kernel `name` reads once (on TPUs in blocks of 128, see
    SMALL_BLOCKS)."""
    if name == "tpu":
        return length // cached.tpu.ALIGNED * cached.tpu.ALIGNED if length >= 128 else 0
    keys = sizes_of(cached.tuned.GPU, size).block
    return length // keys * keys


SMALL_BLOCKS = (cached.tuned, "CACHE_BYTES", 1)  # what to set for check_shared on TPUs


def check_shared(name, case: SharedCase, **options):
    """Holds a kernel that reads shared prompts once to float64. Its results are bitwise the same when it runs again,
    when other slots' copies hold something else, and when every slot is alone in its tile; the last but for rounding
    where a product is the CPU's (interpreted GPU kernels), whose rows may be summed in an order that hangs on their
    place.

    name: in cached.api.WORK. options: of that function.
    """
    attend = functools.partial(cached.api.IMPLEMENTATIONS[name], **options)
    (q, k, v), positions, names, lengths = shared_inputs(case)
    tiles = share(names, lengths)
    busy = positions[:, 0] < case.length
    run = jax.jit(lambda k, v, tiles: attend(q, k, v, positions, 1, shared=tiles, **case.options))
    out = np.asarray(run(k, v, tiles))
    assert str(out.dtype) == case.dtype and np.isfinite(out.astype(np.float32)).all()
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)]
        want = np.asarray(cached.reference.attention(*wide, positions, 1, **case.options))
    error = np.linalg.norm((out.astype(np.float64) - want)[busy]) / np.linalg.norm(want[busy])
    assert error < TOLERANCE[case.dtype], f"off by {error:.1e}"
    others = np.zeros(k.shape[1:3] + (1,), bool)  # copies in slots that are not their tile's first
    for row, length in zip(tiles.tiles, tiles.length, strict=True):
        others[row[1:][row[1:] >= 0], :read_once(name, case.size, int(length))] = True
    assert others.any()
    alone = share([None if n is None else i for i, n in enumerate(names)], lengths)
    for what, arguments in (("again", (k, v, tiles)),
                            ("others", (jnp.where(others, 9, k), jnp.where(others, -9, v), tiles)),
                            ("alone", (k, v, alone))):
        got, same = np.asarray(run(*arguments))[busy], out[busy]
        if what == "alone" and name == "gpu" and options.get("interpret"):
            np.testing.assert_allclose(got.astype(np.float32), same.astype(np.float32), rtol=2**-7, atol=2**-10,
                                       err_msg=what)
        else:
            apart = np.argwhere(got != same)
            assert got.tobytes() == same.tobytes(), f"{what}: {len(apart)} of {got.size} differ, first at {apart[:3]}"


def leave_mesh():
    """Takes the mesh out of force that an earlier run in this process has left there."""
    jax.set_mesh(jax.sharding.Mesh(np.empty((), dtype=object), ()))


# -- what the kernels count --------------------------------------------------------------------------------------------


def computed_tiles(q, k, v, ids):
    """The TILE x TILE tiles that each TPU kernel computed, counted by itself: {"forward", "queries", "keys"}, int32
    []."""
    kernels = packed.tpu_kernels
    call, (work, *arrays) = packed.tpu.prepared(q, k, v, ids, 0, 0.0, 1.0, None, None)
    call = dataclasses.replace(call, counted=True)
    work, key_work = (work.words[0], work.count[0]), (work.key_words[0], work.key_count[0])
    out, lse, forward = kernels.forward(call, work, *arrays)
    rest = (*arrays, out, lse, jnp.zeros_like(lse))
    counts = {"forward": forward, "queries": kernels.query_gradient(call, work, *rest)[-1],
              "keys": kernels.key_gradients(call, key_work, *rest)[-1]}
    return {name: count[0] for name, count in counts.items()}  # every block of heads computes the same tiles


def computed_blocks(q, k, v, ids, scale, interpret):
    """The same of each GPU kernel: (blocks int32 [B, heads, parts of the row], pairs of a query and a key in a
    block)."""
    from jaxrl.kernels.attention.packed import gpu_backward, gpu_forward

    call, (work, *qkv) = packed.gpu.prepared(q, k, v, ids, 0, 0.0, scale, None, interpret)
    op, sizes = dataclasses.replace(call.op, count=True), call.sizes
    out, lse, forward = gpu_forward.forward(*qkv, work.forward, op, sizes.forward, call.interpret)
    rest = (*qkv, out, gpu_backward.stats(out, out, lse))
    queries = gpu_backward.dq(*rest, work.queries, op, sizes.queries, call.interpret)[-1]
    keys = gpu_backward.dkv(*rest, work.keys, op, sizes.keys, call.interpret)[-1]
    counts = {"forward": forward, "queries": queries, "keys": keys}
    return {kernel: (count, ROWS * getattr(sizes, kernel).block) for kernel, count in counts.items()}
