"""The device programs of the embedded sampler: publish, prefill, insert, extend, decode, and of images in later turns
encode.

Each is compiled before its first call, once per entry of `Shapes` that is used; a call with any other shape is an
error, so nothing recompiles unnoticed. `prepare` compiles programs that were not called yet in a background thread.

Legend: S slots, B prefill rows, P prompt length, K insert width or extended slots, L new tokens, C cache length, T
decode steps of a chunk, E end-token columns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.attention import least_shared, share, shares_prompts
from jaxrl.models import recurrent, unstacked
from jaxrl.models.adapters import quantized
from jaxrl.models.feed_forward import by_token
from jaxrl.models.vision import tower
from jaxrl.processes.exchange import as_local_arrays
from jaxrl.rollout.sampling import Controls, sample
from jaxrl.rollout.shapes import ALL, Shapes
from jaxrl.sharding import ROLLOUT_RULES, data_shards, memory, param_shardings
from jaxrl.sharding.mesh import DATA_AXES
from jaxrl.telemetry import compilations


class Progress(NamedTuple):
    """State of each of S slots in decoding. The host owns it between chunks."""

    token: Any     # [S] int32, newest token of prompt and completion; its key and value are written next
    position: Any  # [S] int32, its position
    produced: Any  # [S] int32, tokens of the completion so far
    limit: Any     # [S] int32, tokens the completion may have
    active: Any    # [S] bool
    shift: Any = None  # [S] int32, Model.decode's; None where no prompt may have images


class Chunk(NamedTuple):
    """What one decode call sampled in S slots over T steps.

    Where a slot was inactive its tokens are -1, its log-probs 0, and support and routes mean nothing."""

    tokens: Any    # [T, S] int32
    logprobs: Any  # [T, S] float32
    log_kept_mass: Any  # [T, S] float32; see protocol.Result
    support: Any   # [T, S, K] int32, -1 = unused; K is Shapes.support
    routes: Any    # [T, S, W] int16, experts of the token that came before; W is Shapes.routes
    steps: Any     # [] int32, steps run


def decode_chunk(model, steps: int, support: int, params, cache, progress: Progress, controls: Controls, history_SxL,
                 leave_at, shared=None, routes: int = 0, whose_S=None, work: int = ALL):
    """Samples up to `steps` tokens for every active slot; returns early once at most `leave_at` slots are active.

    One iteration runs the newest token through the model (writing its key and value), then samples the next one. So a
    slot needs no state but its token, and tokens after a weight sync come from the new weights alone.

    Args:
      model: jaxrl.models.Model, of which params is the parameter tree. steps: T, iterations at most.
      support: token ids of the support to return per token (K); 0 = none.
      cache: of Model.init_cache with S slots; donated by the caller.
      progress: state of the slots before the call. controls: sampling options, one entry per slot.
      history_SxL: int32 tokens of prompt and completion by position; read in slots with a penalty.
      leave_at: int scalar, see above.
      shared: kernels.attention.Shared, which slots hold one prompt; None = not used.
      routes: expert ids to return per token (W); 0 = none.
      whose_S: int32, number of each slot's adapter; None without an adapter set.
      work: PLAIN, BANS or ALL of `shapes`; see sampling.sample.

    Returns:
      (cache, Chunk)."""
    slots, room = history_SxL.shape
    slot_S = jnp.arange(slots)
    cache_length = recurrent.cache_length(cache)

    def not_done(carry):
        step, now, *_ = carry
        return (step < steps) & (jnp.sum(now.active) > leave_at)

    def one_token(carry):
        step, now, cache, history_SxL, out = carry
        where_S = jnp.where(now.active, now.position, cache_length)  # idle slots write nothing
        hidden_SxD, cache, auxiliary = model.decode(params, now.token, where_S, cache, shared, True, whose_S, now.shift)
        logits_SxV = model.logits(params, hidden_SxD).astype(jnp.float32)
        token_S, logprob_S, kept_S, support_SxK = sample(
            logits_SxV, now.produced, now.position, history_SxL, controls, support, work)
        on = now.active
        out = Chunk(out.tokens.at[step].set(jnp.where(on, token_S, -1)),
                    out.logprobs.at[step].set(jnp.where(on, logprob_S, 0.0)),
                    out.log_kept_mass.at[step].set(jnp.where(on, kept_S, 0.0)), out.support.at[step].set(support_SxK),
                    out.routes.at[step].set(by_token(auxiliary)[:, 0]) if routes else out.routes, step + 1)
        position_S, produced_S = now.position + on, now.produced + on
        ended_S = jnp.any(token_S[:, None] == controls.end_ids, axis=-1) | (produced_S >= now.limit)
        history_SxL = history_SxL.at[slot_S, jnp.where(on, position_S, room)].set(token_S, mode="drop")
        now = now._replace(token=jnp.where(on, token_S, now.token), position=position_S, produced=produced_S,
                           active=on & ~ended_S)
        return step + 1, now, cache, history_SxL, out

    zero = jnp.int32(0)
    blank = Chunk(jnp.full((steps, slots), -1, jnp.int32), jnp.zeros((steps, slots), jnp.float32),
                  jnp.zeros((steps, slots), jnp.float32), jnp.zeros((steps, slots, support), jnp.int32),
                  jnp.zeros((steps, slots, routes), jnp.int16), zero)
    _, _, cache, _, out = jax.lax.while_loop(not_done, one_token, (zero, progress, cache, history_SxL, blank))
    return cache, out


def decode_part(model, shapes: Shapes, length: int, whole: bool, constrain, params, cache, progress, controls,
                history_SxL, leave_at, rows_S, shared=None, whose_S=None):
    """Runs `decode_chunk` on the slots `rows_S` (all, in order, if `whole`) and the first `length` cache positions.

    shapes: of the engine. length: cache positions. whole: whether rows_S are all slots. constrain: tree -> tree with
    the engine's shardings. rows_S: int32 numbers of slots, which progress, controls, history_SxL, shared and whose_S
    (see `decode_chunk`) have in this order. cache: of all slots, at its full length. leave_at: active slots at which
    the chunk ends early. Returns (cache of all slots, Chunk)."""
    part = cache if whole else model.take(cache, rows_S)
    full_length = recurrent.cache_length(cache)
    if length < full_length:
        part = jax.tree_util.tree_map_with_path(
            lambda path, a: a if recurrent.is_by_slot(path) else a[..., :length, :], part)
    part, out = decode_chunk(model, shapes.decode_steps, shapes.support, params, constrain(part), progress, controls,
                             history_SxL, leave_at, shared, shapes.routes, whose_S, shapes.work)
    if not whole:
        cache = model.insert(cache, part, jnp.arange(rows_S.shape[0]), rows_S)
    elif length < full_length:
        cache = jax.tree_util.tree_map_with_path(
            lambda path, a, b: b if recurrent.is_by_slot(path) else a.at[..., :length, :].set(b), cache, part)
    else:
        cache = part
    return cache, out


def compiles_ahead(platform: str, processes: int) -> bool:
    """Returns whether the first rollout's programs are compiled in threads. On CPUs the compiler has no core to spare;
    processes of a job share what a GPU's compiler finds, and so compile in one order (rl.precompile.may_precompile).

    platform: "cpu", "gpu" or "tpu". processes: of the job."""
    return platform != "cpu" and processes == 1


def cache_shardings(model, mesh, cache):
    """Returns a tree of NamedShardings for a tree of Model.init_cache: slots over the data axes, heads over tp. Keys
    and values whose heads tp does not divide, and windows of recurrent layers with one head, are whole over tp.

    model: whose config has the heads. mesh: dp x fsdp x tp. cache: arrays or shapes."""
    tp = "tp" if model.config.cache_heads % mesh.shape["tp"] == 0 else None

    def one(path, a):
        if recurrent.is_by_slot(path):  # [slots, heads, ...] of a state, [slots, tokens, heads, ...] of a window
            stacked = "layers" in [getattr(key, "key", None) for key in path]
            of_slot = a.shape[stacked + 1:]
            heads = ("tp",) if path[-1].key == "state" else (None, "tp" if of_slot[1] > 1 else None)
            return NamedSharding(mesh, P(*(None,) * stacked, DATA_AXES, *heads))
        return NamedSharding(mesh, P(*(None,) * (a.ndim - 3), DATA_AXES, None, tp))

    return jax.tree_util.tree_map_with_path(one, cache)


class Programs:
    """The compiled programs of an engine and the layout of their arrays. Holds no arrays; see `programs`.

    model: jaxrl.models.Model as the trainer has its weights. shapes: the static shapes. mesh: of the devices that
    decode. dtype: of weights and cache. joint: mesh of all processes that receive weights together; mesh if alone.

    Attributes:
      published, model: the model as the trainer has its weights, and as these programs do.
      compiled: key -> program that is ready. compiler: compiles others in the background.
      ahead: whether the first rollout's programs are compiled in threads (`compiles_ahead`; no further process).
      shares: whether decoding reads a prompt of several slots once. data_shards: number of them.
      by_slot, by_step, whole: shardings of arrays whose first axis is slots, whose second is, and of whole ones."""

    def __init__(self, model, shapes: Shapes, mesh, dtype, joint):
        self.published = model  # as the trainer has its weights
        self.model = model = unstacked.for_decoding(model, mesh)
        self.shapes, self.mesh, self.dtype, self.joint = shapes, mesh, dtype, joint
        self.compiled: dict[tuple, Any] = {}
        self._publish_layouts: dict[tuple, tuple] = {}  # of `_layouts_of`
        self.compiler = compilations.BackgroundCompiler()
        self.ahead = mesh is joint and compiles_ahead(mesh.devices.flat[0].platform, jax.process_count())
        self.by_slot = self._named(DATA_AXES)
        self.by_step = self._named(None, DATA_AXES)
        self.whole = self._named()
        self.data_shards = data_shards(mesh)
        self.shares = self._shares_prompts()  # whether decoding has a use for what slots share

    def _named(self, *spec):
        return NamedSharding(self.mesh, P(*spec))

    def _shares_prompts(self) -> bool:
        """Returns whether decoding reads prompts of several slots once: a kernel does, of those that are long enough.
        """
        if not shares_prompts(self.model.attention, self.mesh):
            return False
        shapes = self.shapes
        cache = jax.eval_shape(lambda: self.model.init_cache(shapes.slots, shapes.cache_lengths[-1], self.dtype))
        keys, groups = recurrent.positional(cache), self.model.config.cache_heads
        least = least_shared(keys.shape[-3:], keys.dtype, groups, self.model.attention, self.mesh)
        return shapes.prompt_lengths[-1] - 1 >= least  # each slot writes the last token itself

    @functools.cached_property
    def of_cache(self):
        """Shardings of the arrays of the cache, of a part of it, and of the stash: a tree."""
        return cache_shardings(self.model, self.mesh, jax.eval_shape(lambda: self.model.init_cache(1, 1, self.dtype)))

    def new_caches(self):
        """Returns the zeroed cache (slots, longest length) and stash (prefilled rows, longest prompt),
        created in their layout.
        """
        def make():
            shapes = self.shapes
            return (self.model.init_cache(shapes.slots, shapes.cache_lengths[-1], self.dtype),
                    self.model.init_cache(shapes.stash_rows, shapes.prompt_lengths[-1], self.dtype))

        return self.run(("caches",), make, (), out_shardings=(self.of_cache, self.of_cache))

    def put(self, tree, sharding):
        """Places all arrays of a tree on the devices under one sharding; returns the tree, None where it has None."""
        return jax.device_put(tree, sharding)

    def run(self, key: tuple, function, args, donate=(), out_shardings=None, mesh=None):
        """Calls the program `key` and returns its results; the first call compiles it from these arguments.

        key: ("prefill", length), ("decode", slots, length) and so on, kind first; one key has one set of shapes.
        function: what to compile. args: its arguments. donate: numbers of donated arguments, whose arrays are invalid
        afterwards. out_shardings: tree of shardings of the results. mesh: to compile for; None = the engine's."""
        if key not in self.compiled:
            self.compiled[key] = self.compiler.take(key) or self._compile(function, args, donate, out_shardings, mesh)
        return self.compiled[key](*args)

    def _compile(self, function, args, donate, out_shardings, mesh=None):
        with jax.set_mesh(mesh or self.mesh):
            return jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*args).compile()

    def missing(self, key: tuple) -> bool:
        """Returns whether the program `key` is neither compiled nor being compiled in the background."""
        return key not in self.compiled and key not in self.compiler.coming

    def prepare(self, calls) -> None:
        """Queues the programs of `calls` (from the `*_call` methods), in this order, for background threads that
        compile them. Processes of one mesh may do so at different times: these programs are local to a process.
        """
        for key, function, args, donate, out_shardings in calls:
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), args)
            self.compiler.begin(key, self._compile, function, shapes, donate, out_shardings)

    def publish(self, params):
        """Returns a copy of the parameter tree in the rollout dtype and layout (split over tp, experts over ep, whole
        on every dp and fsdp shard). If `params` are spread over processes all of them take part, and each keeps its
        devices' part.
        """
        key, ((mesh, there), (joint, layout)), _ = self._layouts_of(params)
        copy = self.run(key, self.cast, (params,), out_shardings=there, mesh=mesh)
        copy = copy if mesh is joint else memory.moved(copy, layout)
        return copy if self.mesh is self.joint else as_local_arrays(copy, self.mesh)

    def cast(self, params):
        """Returns weights in the rollout dtype and layout, on the devices that have them. Pure."""
        cast = quantized.cast(memory.fetched(params), self.dtype)
        return unstacked.laid_out(self.published, self.model, cast)

    def _layouts_of(self, params) -> tuple:
        """Returns (key of the publishing program, [(mesh, layout) of the copy, of the engines], shapes)."""
        leaves = jax.tree.leaves(params)
        key = ("publish", *((a.shape, a.dtype, getattr(a, "sharding", None)) for a in leaves))
        if key not in self._publish_layouts:
            theirs = getattr(getattr(leaves[0], "sharding", None), "mesh", self.joint)
            same = set(theirs.devices.flat) == set(self.joint.devices.flat)
            axes, shapes = self.model.logical_axes(), jax.eval_shape(self.cast, params)
            self._publish_layouts[key] = [(mesh, param_shardings(mesh, axes, shapes, ROLLOUT_RULES))
                                          for mesh in (self.joint if same else theirs, self.joint)], shapes
        return key, *self._publish_layouts[key]

    def published_shapes(self, params):
        """Returns what `publish` returns for these weights, as shapes with shardings; compiles and runs nothing."""
        _, (_, (_, layout)), shapes = self._layouts_of(params)
        return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), shapes, layout)

    def prepare_first(self, calls) -> None:
        """Compiles those of `calls` that the first rollout is sure to need, if it fills the slots, in threads, while
        the weights are published: decoding, which takes longest, and the prefill if there is one prompt length.
        """
        wanted: set[tuple] = {("decode", self.shapes.slots, self.shapes.lengths_of[self.shapes.slots][0])}
        if len(self.shapes.prompt_lengths) == 1:
            wanted.add(("prefill", self.shapes.prompt_lengths[0]))
        self.prepare(sorted((call for call in calls if call[0] in wanted), key=lambda call: call[0][0]))

    def prefill(self, *args):
        """Runs `prefill_call`, which names the arguments. Returns the stash (donated) and the tokens' experts
        [B, P, W] int16, None unless shapes.routes.
        """
        result = self.run(*self.prefill_call(*args))
        return result if self.shapes.routes else (result, None)

    def prefill_call(self, params, stash, tokens_BxP, lengths_B, rows_B, whose_B=None, images=None) -> tuple:
        """Returns the arguments of `run` that prefill B prompts into stash rows (the stash holds prefilled prompts'
        keys and values).

        params: of `publish`. stash: of `new_caches`, donated. tokens_BxP: int32, right-padded prompts. lengths_B:
        int32, tokens of each, at least 1. rows_B: int32, numbers of stash rows. whose_B: int32, adapter numbers; None
        without an adapter set. images: jaxrl.types.Images of the prompts; None: they are text, which is another
        program."""
        def prefill(params, stash, tokens_BxP, lengths_B, rows_B, whose_B, images):
            _, kv, auxiliary = self.model.prefill(params, tokens_BxP, lengths_B, True, whose_B, images)
            stash = self.model.insert(stash, kv, jnp.arange(rows_B.shape[0]), rows_B)
            return (stash, by_token(auxiliary)) if self.shapes.routes else stash

        tokens, lengths, adapters, images = self.put((tokens_BxP, lengths_B, whose_B, images), self.by_slot)
        args = tokens, lengths, self.put(rows_B, self.whole), adapters, images
        out = (self.of_cache, self.by_slot) if self.shapes.routes else self.of_cache
        kind = "prefill" if images is None else "prefill_images"
        return (kind, tokens_BxP.shape[1]), prefill, (params, stash, *args), (1,), out

    def insert(self, cache, stash, rows_K, slots_K):
        """Copies the prompts in stash rows [K] into slots [K], both int32. Returns the cache, which is donated.

        A slot number beyond the cache is dropped: it fills a call that has fewer than K prompts."""
        args = self.put((rows_K, slots_K), self.whole)
        return self.run(("insert",), self.model.insert, (cache, stash, *args), donate=(0,),
                        out_shardings=self.of_cache)

    def extend(self, *args):
        """Runs `extend_call`, which names the arguments. Returns the cache (donated) and the tokens' experts [K, L, W]
        int16, None unless shapes.routes.
        """
        result = self.run(*self.extend_call(*args))
        return result if self.shapes.routes else (result, None)

    def extend_call(self, params, cache, tokens_KxL, positions_KxL, slots_K, whose_K=None, shift_K=None,
                    seen=None) -> tuple:
        """Returns the arguments of `run` that append new tokens' keys and values to slots; see Model.extend.

        params: of `publish`. cache: of `new_caches`, donated. tokens_KxL, positions_KxL: int32; positions from the
        cache length on are padding. slots_K: int32, beyond the cache: dropped. whose_K: int32, adapter numbers; None
        without an adapter set. shift_K: int32, what the images of a slot add to the positions of later text; None = 0.
        seen: decoder.Seen of the new tokens, features on the devices; None: they are text, which is another program."""
        new = self.put((tokens_KxL, positions_KxL, slots_K, whose_K, shift_K, seen), self.by_slot)

        def extend(params, cache, *new):
            tokens, positions, slots, adapters, shifts, seen = new
            cache, auxiliary = self.model.extend(params, tokens, positions, cache, slots, True, adapters, shifts, seen)
            return (cache, by_token(auxiliary)) if self.shapes.routes else cache

        out = (self.of_cache, self.by_slot) if self.shapes.routes else self.of_cache
        return ("extend" if seen is None else "extend_images",), extend, (params, cache, *new), (1,), out

    def encode(self, params, images, room: int):
        """Returns (features, features of the taps) of rows of images, each [K, room, D] in the compute dtype, for
        `extend`; of taps one array per layer that has one.

        params: of `publish`. images: jaxrl.types.Images of K rows. room: image tokens of a row, to which features are
        padded with zeros."""
        def encode(params, images):
            seen = tower.see(self.model, params, images)
            return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, room - x.shape[1]), (0, 0))),
                                (seen.features, seen.taps))

        return self.run(("encode", images.patches.shape[1]), encode, (params, self.put(images, self.by_slot)),
                        out_shardings=self.by_slot)

    def shared(self, prompts, lengths):
        """Returns kernels.attention.share of a decode program's rows, or None if it does not use shared prompts.

        prompts: per row what identifies its prompt's keys and values (hashable), None where it is idle. lengths: per
        row the positions that it shares with rows of the same prompt."""
        return share(prompts, lengths, self.data_shards) if self.shares else None

    def decode(self, *args):
        """Runs `decode_call`, which names the arguments. Returns (cache, which is donated; Chunk)."""
        return self.run(*self.decode_call(*args))

    def decode_call(self, params, cache, progress: Progress, controls: Controls, history, leave_at, rows_S, length: int,
                    shared, whose_S=None) -> tuple:
        """Returns the arguments of `run` that decode one chunk in the slots `rows_S`, reading `length` cache positions.

        params: of `publish`. cache: of all slots, donated. progress, controls: rows of these slots, in this order.
        history: int32 [S, C] of these slots, tokens by position, on the devices. leave_at: number of active slots at
        which the chunk ends early. rows_S: int32; as many as there are slots: all of them, in order. shared: the result
        of `shared` for these rows. whose_S: int32, adapter numbers; None without an adapter set."""
        whole = len(rows_S) == self.shapes.slots
        part = functools.partial(decode_part, self.model, self.shapes, length, whole, self._constrain)
        progress, controls, shared, adapters = self.put((progress, controls, shared, whose_S), self.by_slot)
        leave_at, rows_S = self.put((np.int32(leave_at), rows_S), self.whole)
        step = self.by_step
        out = Chunk(step, step, step, step, step, self.whole)
        args = (params, cache, progress, controls, history, leave_at, rows_S, shared, adapters)
        return ("decode", len(rows_S), length), part, args, (1,), (self.of_cache, out)

    def _constrain(self, cache):
        return jax.lax.with_sharding_constraint(cache, self.of_cache)


@functools.lru_cache(maxsize=8)
def programs(model, shapes: Shapes, mesh, dtype, joint=None) -> Programs:
    """Returns the programs of these shapes, cached: a second engine of the same process (evaluation, a
    next job) compiles nothing. The 8 used last are kept.

    Args:
      model: jaxrl.models.Model, as the trainer has its weights. shapes: the static shapes.
      mesh: of the devices that decode.
      dtype: of the weights and the cache.
      joint: the mesh of all processes whose engines receive weights together; None = mesh.
    """
    return Programs(model, shapes, mesh, dtype, joint or mesh)
