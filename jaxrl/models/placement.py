"""Places activations and weights while a model runs under `jax.set_mesh`; does nothing without a mesh.

Rows are split over the data axes, the tokens of each over cp, heads and widths over tp. Weights are gathered over fsdp,
cp and ep before they are used, so the sums inside a layer are the same for every split of the data axes; experts stay
where they are over ep, and the rows go to them. What looks at other tokens of its row gathers them over cp: attention
the keys and values (or has them come by, in a ring), the loss slots the tokens that predict them. It knows tokens by
their positions and segments, so their order in the row does not matter (training.ranks deals them).

Legend: B rows, L tokens per row, V vocabulary, D hidden size, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.attention import (
    Ring,
    attention,
    cached_attention,
    cached_work_of,
    ring_attention,
    ring_work_of,
    work_of,
)
from jaxrl.kernels.experts import experts
from jaxrl.kernels.logprob import Split, held
from jaxrl.kernels.recurrence import Chunks, chunks_of
from jaxrl.sharding import ROLLOUT_RULES, TRAIN_RULES, spec_for
from jaxrl.sharding.mesh import AXES, DATA_AXES
from jaxrl.types import custom_vjp


def _mesh() -> Any:
    """Returns the mesh in force, or None if there is nothing to place."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return None
    return mesh if all(kind == AxisType.Auto for kind in mesh.axis_types) else None


def _data_axes(mesh, rows: int):
    return DATA_AXES if rows % math.prod(mesh.shape[a] for a in DATA_AXES) == 0 else None


def _tokens_axis(mesh, length: int):
    """Returns the axis over which rows of so many tokens are split along tokens, None = whole."""
    return "cp" if mesh.shape["cp"] > 1 and length % mesh.shape["cp"] == 0 else None


def _by_token(mesh, shape_BxL) -> P:
    """Returns the spec of an array [B, L, ...]."""
    data, tokens = _data_axes(mesh, shape_BxL[0]), _tokens_axis(mesh, shape_BxL[1])
    return P(data, tokens) if tokens else P(data)


def _own_lists(mesh, shape_BxL) -> P:
    """Returns the specs of arrays whose leading axis is rows, or a list, of each device."""
    data, tokens = _data_axes(mesh, shape_BxL[0]), _tokens_axis(mesh, shape_BxL[1])
    return P((*(data or ()), tokens)) if tokens else P(data)


def _whole_rows(axis, *arrays) -> Any:
    """Gathers each [B, L / cp, ...] to [B, L, ...], device after device of cp. Within a shard_map."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=1, tiled=True)
    return arrays if axis is None else tuple(x if x is None else gather(x) for x in arrays)


def gathered(weight, axes, dtype):
    """Returns a weight in `dtype` as every rank uses it: whole over fsdp and cp, split over tp, experts over ep, too.

    It is cast before it is gathered, so that the mesh exchanges `dtype`. axes: logical axis names of the weight.
    """
    mesh = _mesh()
    if mesh is None:
        return weight.astype(dtype)
    place = lambda x, rules: jax.lax.with_sharding_constraint(  # noqa: E731
        x, spec_for("/".join(map(str, axes)), axes, x.shape, mesh, rules))
    if weight.dtype != dtype:  # cast where it is stored: what travels is `dtype`, not the masters
        weight = place(weight.astype(dtype), TRAIN_RULES)
    return place(weight, ROLLOUT_RULES)


def whole(x):
    """Replicates x on every device of the mesh; unchanged without one."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, P())


def stored(weights, axes):
    """Constrains stacked weights [N, *weight] to the split of stored parameters, with N whole; does nothing without a
    mesh.

    axes: logical axis names of one weight.
    """
    mesh = _mesh()
    if mesh is None:
        return weights
    spec = spec_for("/".join(map(str, axes)), axes, weights.shape[1:], mesh, TRAIN_RULES)
    return jax.lax.with_sharding_constraint(weights, P(None, *spec))


def rows(x):
    """Constrains [B, L, ...] to a split by rows and, over cp, by tokens, where these divide; other axes are whole."""
    mesh = _mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, _by_token(mesh, x.shape))


def at_sources(x_RxLx, sources_RxS):
    """Returns x[r, sources[r, s]], [R, S, ...], of x [R, L, ...]: the tokens of each row that predict its loss slots
    (see PackedBatch). sources_RxS: int32 indices of tokens.

    Slots are split over cp as tokens are, equally many per device; their tokens may be on another device.
    """
    def take(x, sources):
        x, = _whole_rows(tokens, x)
        return jnp.take_along_axis(x, sources.reshape(*sources.shape, *(1,) * (x.ndim - 2)), axis=1)

    mesh = _mesh()
    tokens = mesh and _tokens_axis(mesh, x_RxLx.shape[1]) and _tokens_axis(mesh, sources_RxS.shape[1])
    if not tokens:
        return take(x_RxLx, sources_RxS)
    spec = _by_token(mesh, x_RxLx.shape)
    return jax.shard_map(take, in_specs=(spec, spec), out_specs=spec, check_vma=False)(x_RxLx, sources_RxS)


def residual(x_BxLxD):
    """Constrains the residual stream between layers: split by rows and, over cp and tp, by tokens, where these divide,
    so that norms and stored activations are not repeated on every device of tp (sequence parallelism).
    """
    mesh = _mesh()
    if mesh is None:
        return x_BxLxD
    batch, length = x_BxLxD.shape[:2]
    axis = _tokens_axis(mesh, length)
    inside = length // mesh.shape[axis] if axis else length
    if inside % mesh.shape["tp"] == 0:
        axis = (axis, "tp") if axis else "tp"
    return jax.lax.with_sharding_constraint(x_BxLxD, P(_data_axes(mesh, batch), axis))


def split_of(shape_RxS, vocab: int) -> Split | None:
    """Returns how kernels.logprob splits so many rows and slots and so large a vocabulary; None without a mesh."""
    mesh = _mesh()
    if mesh is None:
        return None
    data, tp = _data_axes(mesh, shape_RxS[0]), mesh.shape["tp"]
    alone = math.prod(mesh.shape[a] for a in DATA_AXES) == 1
    return Split(None if alone else data, "tp" if tp > 1 and vocab % tp == 0 else None,
                 _tokens_axis(mesh, shape_RxS[1]))


@custom_vjp(2)
def embed(table_VxD, tokens_BxL, dtype):
    """Returns rows of the table in `dtype`, [B, L, D]; each device of tp looks up the tokens it holds.

    The table is gathered as all weights are, so that its gradient is summed in one order on every (dp, fsdp). The uses
    of one token are summed in the table's dtype.
    """
    split = split_of(tokens_BxL.shape, table_VxD.shape[0])

    def local(table, tokens):
        at, here = held(tokens, table.shape[0], split and split.vocab)
        found = jnp.where(here[..., None], jnp.take(table, jnp.where(here, at, 0), axis=0), 0)
        return jax.lax.psum(found, split.vocab) if split and split.vocab else found

    table = gathered(table_VxD, ("vocab", "embed"), dtype)
    if split is None:
        return local(table, tokens_BxL)
    return jax.shard_map(local, in_specs=(P(split.vocab), split.spec), out_specs=split.spec, check_vma=False)(
        table, tokens_BxL)


def _embed(table, tokens, dtype):
    """Looks up a frozen table, which is not saved for the backward pass: it gets no gradient."""
    table, tokens, learns = table.value, tokens.value, table.perturbed
    return embed(table, tokens, dtype), (table if learns else None, tokens)


def _embed_gradient(dtype, saved, g_BxLxD):
    table_VxD, tokens_BxL = saved
    if table_VxD is None or isinstance(g_BxLxD, SymbolicZero):
        return None, None
    split = split_of(tokens_BxL.shape, table_VxD.shape[0])
    vocab = table_VxD.shape[0] // (_mesh().shape[split.vocab] if split and split.vocab else 1)

    def local(g, tokens):
        at, here = held(tokens, vocab, split and split.vocab)
        grad = jnp.zeros((vocab, g.shape[-1]), table_VxD.dtype)
        grad = grad.at[jnp.where(here, at, vocab)].add(g.astype(grad.dtype), mode="drop")
        return jax.lax.psum(grad, split.over) if split and split.over else grad

    if split is None:
        return local(g_BxLxD, tokens_BxL), None
    return jax.shard_map(local, in_specs=(split.spec, split.spec), out_specs=P(split.vocab), check_vma=False)(
        g_BxLxD, tokens_BxL), None


embed.defvjp(_embed, _embed_gradient, symbolic_zeros=True)


def sharded_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions, k_positions, q_segments=None, k_segments=None,
                      q_prefixes=None, q_reach=None, work=None, sinks=None, **options):
    """Runs kernels.attention, each device on its own rows and heads.

    Arguments and result are those of kernels.attention.attention (int ids by token; out [B, L, H, K] in v's dtype);
    options: its window, softcap, scale and implementation. sinks: [H] or None. work: of `attention_work`; None = each
    call makes its own.

    Over cp each device has the queries of its tokens and gathers keys, values and their positions and segments; with
    the `work` of a ring, they go from device to device. The backward pass reduce-scatters their gradients. Keys of a
    cache are whole.

    Heads are split over tp if it divides G. If it is a multiple of G and divides H, keys and values are whole on every
    device of tp, and each takes the one key-value head that its query heads read. Else every device of tp does the same
    work on all heads.
    """
    arguments = (q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, q_positions, k_positions, q_segments, k_segments, q_prefixes, q_reach)
    mesh = _mesh()
    if mesh is None:
        return attention(*arguments[:-1], work=work, sinks_H=sinks, q_reach_BxL=q_reach, **options)
    batch, length, heads, _ = q_BxLxHxK.shape
    groups, tp = k_BxSxGxK.shape[2], mesh.shape["tp"]
    data, (q_axis, kv_axis, shared_kv) = _data_axes(mesh, batch), _heads(mesh, heads, groups)
    tokens = _tokens_axis(mesh, length) if k_BxSxGxK.shape[1] == length else None

    def local(work, sinks, q, k, v, q_positions, k_positions, q_segments, k_segments, q_prefixes, q_reach):
        more: dict[str, Any] = dict(options, work=work, sinks_H=sinks, q_reach_BxL=q_reach)
        if shared_kv:
            mine = jax.lax.axis_index("tp") * groups // tp
            k, v = (jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k, v))
        if isinstance(work, Ring):
            rest = q_positions, k_positions, q_segments, k_segments, q_prefixes
            return ring_attention(q, k, v, *rest, axis=tokens, **more)
        k, v = _whole_rows(tokens, k, v)
        k_positions, k_segments = _whole_rows(tokens, k_positions, k_segments)
        return attention(q, k, v, q_positions, k_positions, q_segments, k_segments, q_prefixes, **more)

    q_spec, kv_spec = P(data, tokens, q_axis, None), P(data, tokens, kv_axis, None)
    lists = _own_lists(mesh, (batch, length)) if tokens else P(data)
    specs = [lists, P(q_axis), q_spec, kv_spec, kv_spec,
             *(None if x is None else P(data if x.shape[0] == batch else None, tokens) for x in arguments[3:])]
    return jax.shard_map(local, in_specs=tuple(specs), out_specs=q_spec, check_vma=False)(work, sinks, *arguments)


class RowChunks(NamedTuple):
    """Chunks of whole rows, whose tokens lie segment by segment.

    order [B, L] int32: where the row has its i-th token, in the order of segments and positions; place [B, L] int32:
    the inverse. Both are None unless rows are split over cp, which deals their tokens.
    """

    chunks: Chunks
    order: jax.Array | None = None
    place: jax.Array | None = None


def row_chunks(positions_BxL, segments_BxL, prefixes_BxL=None, enters_BxL=None, continues: bool = False) -> RowChunks:
    """Runs kernels.recurrence.chunks_of, each device for its own rows; over cp, for whole rows in the order of their
    segments and positions, padding last.

    positions, segments (0 = padding), prefixes (segment of the shared prompt, 0 = none): int32. enters_BxL: bool,
    tokens that become part of the state; None = all. continues: whether rows begin with a state that is given.
    """
    def own(positions, segments, *others):
        if not tokens:
            return RowChunks(chunked(segments, *others))
        positions, segments, *others = _whole_rows(tokens, positions, segments, *others)
        at = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
        keys = jnp.where(segments > 0, segments, jnp.iinfo(segments.dtype).max), positions
        order = jax.lax.sort((*keys, at), dimension=1, num_keys=2, is_stable=True)[2]
        _, place = jax.lax.sort((order, at), dimension=1, num_keys=1)
        sort = functools.partial(jnp.take_along_axis, indices=order, axis=1)
        return RowChunks(chunked(*(x if x is None else sort(x) for x in (segments, *others))), order, place)

    def chunked(segments, prefixes, enters):
        return chunks_of(segments, prefixes, enters_BxL=enters, continues=continues)

    mesh, arguments = _mesh(), (positions_BxL, segments_BxL, prefixes_BxL, enters_BxL)
    tokens = mesh and _tokens_axis(mesh, segments_BxL.shape[1])
    if mesh is None:
        return own(*arguments)
    specs = _by_token(mesh, segments_BxL.shape), P(_data_axes(mesh, segments_BxL.shape[0]))
    return jax.shard_map(own, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*arguments)


@jax.custom_vjp
def _moved(x, order, place):
    """Returns x[b, order[b, i]], [B, L, ...]; its gradient gathers by the inverse, `place`."""
    del place
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


_moved.defvjp(lambda x, order, place: (_moved(x, order, place), (order, place)),
              lambda moves, g: (_moved(g, *moves[::-1]), None, None))


WINDOWS = 3  # queries, keys and values of a recurrence have a convolution, and so last inputs


def by_rows_and_heads(function, heads: int, chunks: RowChunks, tokens: tuple, state, windows: tuple, parameters: tuple):
    """Runs function(chunks, tokens, state, windows, parameters) -> ([B, L, heads, ...], state, windows), each device
    for its own rows and heads, and returns what it returns.

    Rows that are split over cp are whole inside: devices of cp exchange tokens for heads, and back.

    Args:
      heads: the number that tp, and cp where rows are split, must divide to split any of them.
      chunks: of row_chunks; the function gets its field `chunks`, and the heads of its device alone.
      tokens: arrays [B, L, heads, ...]. state: [B, heads, ...] or None. parameters: arrays [heads, ...].
      windows: of the first WINDOWS of `tokens`, [B, taps - 1, heads, ...], or (); always returned.
      An array that has one head where there are several is whole on every device.
    """
    def shared(x, at: int) -> bool:
        return x.shape[at] == 1 < heads

    def exchanged(rows, tokens, state, windows, parameters):
        def whole(x):
            if shared(x, 2):
                return jax.lax.all_gather(x, axis, axis=1, tiled=True)
            return jax.lax.all_to_all(x, axis_name=axis, split_axis=2, concat_axis=1, tiled=True)

        there = (rows.order, rows.place)
        tokens = tuple(_moved(whole(x), *there) for x in tokens)
        out, state, windows = function(rows.chunks, tokens, state, windows, parameters)
        out = jax.lax.all_to_all(_moved(out, *there[::-1]), axis, split_axis=1, concat_axis=2, tiled=True)
        return out, state, windows

    def local(rows, *others):
        return exchanged(rows, *others) if axis else function(rows.chunks, *others)

    mesh, arguments = _mesh(), (chunks, tokens, state, windows, parameters)
    if mesh is None:
        return function(chunks.chunks, *arguments[1:])
    (batch, length), tp = tokens[0].shape[:2], _head_axis(mesh, heads)
    data, axis = _data_axes(mesh, batch), _tokens_axis(mesh, length)
    split = tuple(name for name in (tp, axis) if name) or None
    of_windows = tuple(P(data) if shared(x, 2) else P(data, None, split) for x in tokens[:WINDOWS])
    specs = (P(data), tuple(P(data, axis, None if shared(x, 2) else tp) for x in tokens), P(data, split),
             of_windows[:len(windows)], tuple(P() if shared(x, 0) else P(split) for x in parameters))
    return jax.shard_map(local, in_specs=specs, out_specs=(P(data, axis, tp), P(data, split), of_windows),
                         check_vma=False)(*arguments)


def of_each_token(function, x_BxLxn):
    """Runs a function of single tokens, [B, L, n] -> [B, L, m], each device on its own. The partitioner would bring the
    operand of a top_k whole to every device.
    """
    mesh = _mesh()
    if mesh is None:
        return function(x_BxLxn)
    own = _by_token(mesh, x_BxLxn.shape)
    return jax.shard_map(function, in_specs=own, out_specs=own, check_vma=False)(x_BxLxn)


def routed(x_BxLxD, ids_BxLxK, gates_BxLxK, gate, up, down, *, activation, matmul="default", biases=(),
           implementation="auto"):
    """Runs kernels.experts. If ep divides the number of experts, each device has its share, for the tokens of all
    devices of ep; else all of them, for its own tokens. If tp divides their width, each device has its share of that.

    x [B, L, D]; ids int and gates fp32 or better [B, L, K], an id outside 0..E-1 being an empty slot; gate (None =
    there is none), up [E, D, F] and down [E, F, D] in x's dtype; biases: () or those of the three; activation, matmul,
    implementation: as there. Returns y [B, L, D] in x's dtype.
    """
    def local(x, ids, gates, gate, up, down, *biases):
        if biases and width:  # what the devices of tp sum up holds the bias of the output once
            biases = *biases[:2], biases[2] * (jax.lax.axis_index(width) == 0)
        if expert and not rows:  # all rows are here: nothing is sent, only summed
            ids = ids - jax.lax.axis_index(expert) * len(up)
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, gates))
        axis = expert if rows else None
        y = experts(*flat, gate, up, down, activation=activation, axis=axis, matmul=matmul, biases=biases,
                    implementation=implementation)
        y = y.reshape(x.shape)
        parts = tuple(axis for axis in (None if rows else expert, width) if axis)
        return jax.lax.psum(y, parts) if parts else y

    mesh, arguments = _mesh(), (x_BxLxD, ids_BxLxK, gates_BxLxK, gate, up, down, *biases)
    if mesh is None:
        rows = expert = width = None
        return local(*arguments)
    rows, (ep, tp) = _data_axes(mesh, x_BxLxD.shape[0]), (mesh.shape[a] for a in ("ep", "tp"))
    expert = "ep" if ep > 1 and len(up) % ep == 0 else None
    width = "tp" if tp > 1 and up.shape[2] % tp == 0 else None
    into, of_biases = P(expert, None, width), (P(expert, width), P(expert, width), P(expert))
    own = _by_token(mesh, x_BxLxD.shape)
    specs = own, own, own, None if gate is None else into, into, P(expert, width), *of_biases[:len(biases)]
    return jax.shard_map(local, in_specs=specs, out_specs=own, check_vma=False)(*arguments)


def attention_work(heads, groups, size, dtype, positions_BxL, segments_BxL, prefixes_BxL, reach_BxL=None, ring=False,
                   **options):
    """Computes kernels.attention.work_of self-attention over these rows, for sharded_attention's `work`: each device's
    own, or that of a ring over cp if `ring`.

    heads, groups, size, dtype: numbers of query and key-value heads, head size and dtype of the queries. The ids are
    int, as in `sharded_attention`; options: its window and implementation.
    """
    rows: tuple[Any, ...] = (positions_BxL, segments_BxL, prefixes_BxL, reach_BxL)

    def local(heads, groups, positions, segments, prefixes, reach):
        k_positions, k_segments = _whole_rows(tokens, positions, segments)
        if ring and tokens:
            shape = (*positions.shape, heads, size), (*positions.shape, groups, size)
            return ring_work_of(*shape, dtype, positions, k_positions, segments, k_segments, prefixes, reach,
                                count=mesh.shape[tokens], **options)
        shape = (*positions.shape, heads, size), (*k_positions.shape, groups, size)
        return work_of(*shape, dtype, positions, k_positions, segments, k_segments, prefixes, reach, **options)

    mesh = _mesh()
    if mesh is None:
        tokens = None
        return local(heads, groups, *rows)
    tokens, own = _tokens_axis(mesh, positions_BxL.shape[1]), _by_token(mesh, positions_BxL.shape)
    local = functools.partial(local, *_own_heads(mesh, heads, groups))
    return jax.shard_map(local, in_specs=own, out_specs=_own_lists(mesh, positions_BxL.shape), check_vma=False)(*rows)


def sharded_cached_attention(q_Sx1xHxK, k_cache, v_cache, positions_Sx1, index, work=None, sinks=None, **options):
    """Runs kernels.attention.cached_attention, each device on its own slots and heads, split as in sharded_attention.
    Returns [S, 1, H, K] in q's dtype.

    k_cache, v_cache: [S, C, G * K], or [N, S, C, G * K] with the `index` of one of the N. positions_Sx1: int32; a query
    sees its position and those before it, one at or beyond C is idle. work: of `cached_attention_work`, or None. sinks:
    [H] or None. options: window, softcap, scale, implementation.
    """
    if index is None:
        k_cache, v_cache, index = k_cache[None], v_cache[None], 0
    mesh = _mesh()
    if mesh is None:
        return cached_attention(q_Sx1xHxK, k_cache, v_cache, positions_Sx1, index, work=work, sinks_H=sinks, **options)
    slots, _, heads, size = q_Sx1xHxK.shape
    groups, tp = k_cache.shape[3] // size, mesh.shape["tp"]
    data, (q_axis, kv_axis, shared_kv) = _data_axes(mesh, slots), _heads(mesh, heads, groups)

    def local(work, sinks, q, k, v, positions, index):
        if shared_kv:
            mine = jax.lax.axis_index("tp") * groups // tp
            at, shape = (index, 0, 0, mine * size), (1, *k.shape[1:3], size)
            k, v, index = jax.lax.dynamic_slice(k, at, shape), jax.lax.dynamic_slice(v, at, shape), 0
        return cached_attention(q, k, v, positions, index, work=work, sinks_H=sinks, **options)

    q_spec, kv_spec = P(data, None, q_axis, None), P(None, data, None, kv_axis)
    specs = (P(data), P(q_axis), q_spec, kv_spec, kv_spec, P(data), P())
    return jax.shard_map(local, in_specs=specs, out_specs=q_spec, check_vma=False)(
        work, sinks, q_Sx1xHxK, k_cache, v_cache, positions_Sx1, index)


def extended_attention(q_SxLxHxK, k_cache, v_cache, positions_SxL, index, **options):
    """Computes attention of L queries per slot over a cache, [S, L, H, K] in q's dtype, as sharded_cached_attention
    does for one query: each sees its position and those before it.

    Queries at or beyond the cache's length are padding. k_cache, v_cache and index as there.
    """
    def keys(cache):
        x = cache if index is None else cache[index]
        return x.reshape(*x.shape[:2], -1, q_SxLxHxK.shape[3]).astype(q_SxLxHxK.dtype)

    slots, length = k_cache.shape[-3:-1]
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (slots, length))
    real = (positions_SxL < length).astype(jnp.int32)
    return sharded_attention(q_SxLxHxK, keys(k_cache), keys(v_cache), positions_SxL, at, real, jnp.ones_like(at),
                             **options)


def cached_attention_work(positions_Sx1, prompts, shape, dtype, heads, groups, **options):
    """Computes the argument `work` of sharded_cached_attention (kernels.attention.cached_work_of).

    Args:
      positions_Sx1: int32 positions of the queries.
      prompts: kernels.attention.Shared or None. Each device's rows describe its own slots, counted from its first one.
      shape, dtype: [S, C, G * K] and dtype of the cache of a layer. heads, groups: H and G.
      options: window (0 = all) and implementation, as of the call.
    """
    slots, length, width = shape
    size = width // groups

    def local(heads, groups, positions, prompts):
        own = (1, positions.shape[0], length, groups * size)
        return cached_work_of(positions, own, dtype, heads, size, shared=prompts, **options)

    mesh = _mesh()
    if mesh is None:
        return local(heads, groups, positions_Sx1, prompts)
    data, local = _data_axes(mesh, slots), functools.partial(local, *_own_heads(mesh, heads, groups))
    return jax.shard_map(local, in_specs=P(data), out_specs=P(data), check_vma=False)(positions_Sx1, prompts)


def write(cache, x_SxLxGxK, positions_SxL, index):
    """Puts tokens of every slot into the cache at their positions, each device in its own slots and heads.

    Args:
      cache: [S, C, G * K], or [N, S, C, G * K] with `index` saying which of the N is meant.
      x_SxLxGxK: what is written, cast to the cache's dtype.
      positions_SxL: different within a slot; at or beyond C nothing is written.
      index: int scalar, or None.

    Returns the cache; inside a jitted loop it is updated in place (a scatter whose indices XLA sees to be distinct; the
    partitioner would gather it, hence the shard_map).
    """
    def local(cache, x, positions, *index):
        slots = jnp.arange(x.shape[0])
        slots, positions = (slots, positions[:, 0]) if x.shape[1] == 1 else (slots[:, None], positions)
        x = x.reshape(*positions.shape, -1).astype(cache.dtype)
        return cache.at[(*index, slots, positions)].set(x, mode="drop", unique_indices=True)

    arguments = (cache, x_SxLxGxK, positions_SxL) + (() if index is None else (index,))
    mesh = _mesh()
    if mesh is None:
        return local(*arguments)
    data, tp = _data_axes(mesh, x_SxLxGxK.shape[0]), _head_axis(mesh, x_SxLxGxK.shape[2])
    lead = () if index is None else (None,)
    out = P(*lead, data, None, tp)
    specs = (out, P(data, None, tp, None), P(data), P())[:len(arguments)]
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*arguments)


def take_slots(cache, slots_K, groups: int):
    """Copies slots of the cache: [K, C, G * K] or [N, K, C, G * K], K slots of C positions; `groups` is G.

    Each device copies of its own slots: its share of slots_K, in order, names these, or slots that do not exist, whose
    copies are undefined. (Row by row: a gather would have XLA for TPUs copy the whole cache into another layout, and
    the partitioner would collect it.)
    """
    def local(cache, slots, first):
        at, _ = _own_slots(slots, first, cache.shape[-3])
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(cache, i, 1, cache.ndim - 3) for i in at], cache.ndim - 3)

    return _each_its_slots(local, cache, slots_K, (), groups)


def put_slots(cache, part, slots_K, starts_K, length: int, groups: int):
    """Writes `length` positions into each of K slots of the cache, and returns the cache.

    Args:
      cache: [S, C, G * K], or [N, S, C, G * K].
      part: source, in the cache's dtype, with K in place of S (as `take_slots` returns it); the same positions are
        read.
      slots_K: int, the slots. Each device writes its own; slots that do not exist are skipped.
      starts_K: int, first position of each slot, lowered to C - length if it is larger.
      groups: G.
    """
    def local(cache, slots, first, part, starts):
        lead, (room, width) = cache.shape[:-3], cache.shape[-2:]
        at, there = _own_slots(slots, first, cache.shape[-3])
        for i in range(len(slots)):
            start = jnp.clip(starts[i], 0, room - length)
            of, into = ((*(0,) * len(lead), row, start, 0) for row in (i, at[i]))
            new, old = (jax.lax.dynamic_slice(x, where, (*lead, 1, length, width))
                        for x, where in ((part, of), (cache, into)))
            cache = jax.lax.dynamic_update_slice(cache, jnp.where(there[i], new, old), into)
        return cache

    return _each_its_slots(local, cache, slots_K, (part, starts_K), groups)


def _own_slots(slots_K, first, count: int):
    """Returns (the indices of a device's slots, which are `count` from `first` on; whether it has them)."""
    at = slots_K - first
    return jnp.clip(at, 0, count - 1), (at >= 0) & (at < count)


def _each_its_slots(local, cache, slots_K, more, groups: int):
    """Runs local(cache, slots, first slot, *more) on each device's part of the cache and of arrays by slot."""
    mesh = _mesh()
    if mesh is None:
        return local(cache, slots_K, 0, *more)
    data = _data_axes(mesh, cache.shape[-3])
    spec = P(*(None,) * (cache.ndim - 3), data, None, _head_axis(mesh, groups))

    def one(cache, slots, *more):
        return local(cache, slots, jax.lax.axis_index(data) * cache.shape[-3] if data else 0, *more)

    specs = tuple(spec if x.ndim == cache.ndim else P(data) for x in (cache, slots_K, *more))
    return jax.shard_map(one, in_specs=specs, out_specs=spec, check_vma=False)(cache, slots_K, *more)


def _head_axis(mesh, groups: int):
    return "tp" if groups % mesh.shape["tp"] == 0 else None


def _heads(mesh, heads: int, groups: int):
    """Returns (axis of query heads, axis of key-value heads, whether each device takes one key-value head of all)."""
    kv_axis, tp = _head_axis(mesh, groups), mesh.shape["tp"]
    shared_kv = kv_axis is None and heads % tp == 0 and tp % groups == 0
    return "tp" if shared_kv else kv_axis, kv_axis, shared_kv


def _own_heads(mesh, heads: int, groups: int) -> tuple[int, int]:
    """Returns query heads and key-value heads of one device."""
    tp, (q_axis, kv_axis, shared_kv) = mesh.shape["tp"], _heads(mesh, heads, groups)
    return heads // tp if q_axis else heads, 1 if shared_kv else groups // tp if kv_axis else groups
