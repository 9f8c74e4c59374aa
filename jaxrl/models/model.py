"""The Model: initialisation, forward pass, prefill and decoding of a decoder as pure functions of its parameters.

Built with `build`; called by training, the embedded engine and the planner. Weights are read and written in models.io.

Legend: B rows, L tokens per row, P prompt length, D hidden size, V vocabulary, S cache slots, C cache length, G
key-value heads, K head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models import adapters, decoder, parameters, recurrent, unstacked
from jaxrl.models.adapters import adapter_set
from jaxrl.models.adapters.head import added_to, low_rank
from jaxrl.models.config import ModelConfig, model_config
from jaxrl.models.placement import gathered, put_slots, stored, take_slots, whole
from jaxrl.models.vision import tower
from jaxrl.models.vision.rows import multiplied_by_patch
from jaxrl.sharding import memory


def build(hf_config: dict, *, compute_dtype, scan_layers: bool, remat: str = "none", remat_every: int = 1,
          attention: str = "auto", matmul: str = "default", experts: str = "auto", recurrence: str = "auto",
          ring: bool = False) -> Model:
    """Builds the Model that an HF config describes.

    Args:
      hf_config: a config.json as a dict (see hf.load_config).
      compute_dtype: dtype of activations; parameters are cast to it where they are used.
      scan_layers: scan over the model's repeating block (compile time flat in depth) instead of unrolling.
      remat: what the backward pass recomputes: none, full (each layer), dots (all but matrix products), offload (each
        layer, its input resting in host memory). On the CPU it saves memory only with scan_layers: unrolled, XLA's
        scheduler there recomputes too early.
      remat_every: layers that are recomputed together: fewer inputs are kept, and more exists at once.
      attention: implementation, see kernels.attention.
      matmul: scheme of the layers' products, see kernels.low_precision. Head, embedding, norms, routers and adapters
        have none.
      experts: implementation of layers of experts, see kernels.experts.
      recurrence: implementation of recurrent layers, see kernels.recurrence.
      ring: over mesh.cp keys and values go from device to device instead of being gathered.

    Raises ConfigError for configs no family here serves, an unknown remat, and a remat_every that does not cut the
    scanned layers into equal groups of whole blocks. The implementations and `matmul` are not checked here.
    """
    if remat not in ("none", *decoder.REMAT_POLICIES):
        raise ConfigError(f"model.remat={remat!r}: choose none, {', '.join(decoder.REMAT_POLICIES)}")
    config = model_config(hf_config)
    _, blocks, _ = decoder.spans(config, scan_layers)
    if remat_every > 1 and blocks and (remat_every % config.period or blocks % (remat_every // config.period)):
        fit = [n * config.period for n in range(1, blocks + 1) if blocks % n == 0]
        raise ConfigError(f"model.remat_every={remat_every}: {blocks * config.period} layers are scanned, which are "
                          f"cut into equal groups of {' or '.join(map(str, fit))}")
    return Model(config, jnp.dtype(compute_dtype), bool(scan_layers), remat, attention, remat_every, matmul=matmul,
                 experts=experts, recurrence=recurrence, ring=ring)


AT_ONCE = 1 << 24  # parameters up to which init draws one flat vector


def _matrices(entries) -> dict[str, tuple]:
    """Returns HF name -> (shape, logical axes) of all random arrays, in an order that scan does not change."""
    out = {name: e.kind for e in entries if e.row.init == "normal" for name in e.hf_names}
    return dict(sorted(out.items()))


def _draw_at_once(key, entries) -> dict[str, jax.Array]:
    """Returns HF name -> standard normal array. One generator compiles in a tenth of the time that one
    per array takes.
    """
    matrices = _matrices(entries)
    sizes = [math.prod(shape) for shape, _ in matrices.values()]
    flat = jax.lax.optimization_barrier(whole(jax.random.normal(key, (sum(sizes),), jnp.float32)))
    parts = jnp.split(flat, np.cumsum(sizes)[:-1])
    return {name: whole(part.reshape(shape)) for (name, (shape, _)), part in zip(matrices.items(), parts, strict=True)}


def _draw_by_kind(key, entries) -> dict[str, jax.Array]:
    """Returns the same for large models: one generator per shape, and no array is ever whole on one
    device of a mesh.
    """
    kinds: dict[tuple, list[str]] = {}
    for name, kind in _matrices(entries).items():
        kinds.setdefault(kind, []).append(name)
    drawn = {}
    for (shape, axes), names in kinds.items():
        hashes = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
        values = jax.lax.map(
            lambda h, shape=shape: jax.random.normal(jax.random.fold_in(key, h), shape, jnp.float32), hashes)
        drawn.update(zip(names, stored(values, axes), strict=True))
    return drawn


def _of_rows(numbers_B, like_BxL):
    """Returns [B, L]: the number of each row at all of its tokens."""
    return None if numbers_B is None else jnp.broadcast_to(numbers_B[:, None], like_BxL.shape)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder as pure functions of its parameters: plain nested dicts of arrays, of any float dtype. Made by `build`.

    Frozen and hashable, so it can be closed over or passed as a static argument of jit.

    compute_dtype, scan_layers, remat, remat_every, attention, matmul, experts, recurrence, ring: the arguments of
    `build`, which explains them. adapter: a single adapter or a set (models.adapters); None = none. joined: products of
    one input are one array (models.unstacked).
    """

    config: ModelConfig
    compute_dtype: np.dtype
    scan_layers: bool
    remat: str
    attention: str
    remat_every: int = 1
    adapter: adapters.Adapter | None = None  # see models.adapters
    matmul: str = "default"
    experts: str = "auto"
    recurrence: str = "auto"
    ring: bool = False
    joined: bool = False  # products of one input are one array, see models.unstacked

    @functools.cached_property
    def entries(self) -> tuple[parameters.Entry, ...]:
        """The parameter table: path, shape, logical axes and HF names (an adapter, codes of a quantized base and joined
        products have none) of every array."""
        base = decoder.entries(self.config, self.scan_layers)
        base = unstacked.joined(base) if self.joined else base
        return base if self.adapter is None else adapters.entries(self.adapter, base)

    @functools.cached_property
    def base(self) -> Model:
        """Returns the model without its adapter."""
        return self if self.adapter is None else dataclasses.replace(self, adapter=None)

    def tree(self, function):
        """Returns the parameter tree (nested dicts, one leaf per parameters.Entry) with `function(entry)` at every
        leaf.
        """
        return parameters.tree(self.entries, function)

    def init(self, key):
        """Draws fp32 parameters from a jax PRNG key: normal(0, config.init_std) matrices, convolutions and sinks, in a
        tower normal(0, config.vision.init_std), zero biases, norms that scale by one, a recurrence's rates and steps
        (recurrent.initial_rates, initial_steps; its other parameters of heads are 1); adapters start as
        adapters.initial and adapters.magnitudes define. The kernels of a quantized base are codes and scales
        (adapters.quantized).

        Pure. Values do not depend on mesh, scan or compute dtype; those of the base do not depend on the adapter.
        """
        if self.adapter is not None:
            base = adapters.base_in_few_bits(self, self.base.init(key))
            each = [adapter_set.select_model(self, k) for k in range(len(adapter_set.adapter_names(self)))] or [self]
            start = [adapters.initial(one, key) | adapters.magnitudes(one, base) for one in each]
            return adapters.joined(base, adapter_set.join_leaves(self, start) if self.adapter.parts else start[0])
        drawn = (_draw_at_once if self.num_parameters <= AT_ONCE else _draw_by_kind)(key, self.entries)

        constants = {"one": 1.0 - self.config.norm_offset, "zero": 0.0, "unit": 1.0}

        def values(entry):
            if entry.row.init in recurrent.INITIAL:
                return recurrent.INITIAL[entry.row.init](key, entry)
            if entry.row.init in constants:
                return jnp.full(entry.shape, constants[entry.row.init], jnp.float32)
            std, tower = self.config.init_std, self.config.vision
            if entry.path[0] == "vision" and tower is not None and tower.init_std is not None:
                std = tower.init_std
            arrays = [drawn[name] * std for name in entry.hf_names]
            return jnp.stack(arrays).reshape(entry.shape) if entry.stacked else arrays[0]

        return self.tree(values)

    def logical_axes(self):
        """Returns the parameter tree whose leaves are tuples of logical axis names (see sharding.rules), one per
        dimension.
        """
        return self.tree(lambda entry: entry.axes)

    def forward(self, params, tokens_BxL, positions_BxL, segments_BxL, prefixes_BxL, whose_BxL=None, images=None):
        """Computes the hidden states of packed rows.

        A token sees its own segment and the segment its prefix names (0 = none), at positions not above its own (of an
        image whose tokens see each other: not above that of its last token); windows compare positions. Padding
        (segment 0) returns finite values without meaning.

        Args:
          tokens_BxL, positions_BxL, segments_BxL, prefixes_BxL: int32, as in jaxrl.types.PackedBatch: token ids;
            position within the sequence; segment, 0 = padding; segment of the shared prompt, 0 = none.
          whose_BxL: int32 adapter number of each token, in an adapter set (models.adapters.adapter_set); 0 = none. In a
            bank (models.adapters.bank) numbers count from 0: all tokens of a row have one, padding 0. None: neither.
          images: jaxrl.types.Images of the rows, of a model with a tower; None: no row has an image.

        Returns:
          (hidden states after the final norm, [B, L, D] in the compute dtype; auxiliary: the layers' outputs for the
          loss, by name, summed over the layers or stacked (see models.feed_forward); {} for dense models).
        """
        rows = tokens_BxL, positions_BxL, segments_BxL, prefixes_BxL
        seen = None if images is None else tower.see(self, params, images)
        return decoder.forward(self, params, *rows, whose_BxL=whose_BxL, seen=seen)[:2]

    def hidden(self, *args, **kwargs):
        """Returns the hidden states [B, L, D] of `forward`, whose arguments it takes, without the auxiliary outputs."""
        return self.forward(*args, **kwargs)[0]

    def head(self, params):
        """Returns the output matrix [D, V] in the compute dtype, or the embedding [V, D] if `config.tied`. On a mesh it
        is whole but for V, which is split over tp. An adapter on it is not in it (models.adapters.head).
        """
        outer, inner = ("embed", "embedding") if self.config.tied else ("head", "kernel")
        axes = next(entry.axes for entry in self.entries if entry.path == (outer, inner))
        return gathered(memory.fetched(params[outer][inner]), axes, self.compute_dtype)

    def logits(self, params, hidden):
        """Computes logits [..., V] of hidden states [..., D] in fp32 or better, soft-capped if the model is:
        cap * tanh(logits / cap) with config.final_softcap. An adapter on the output matrix is included; a bank of
        adapters (models.adapters.bank) is not served.
        """
        acc = jnp.promote_types(self.compute_dtype, jnp.float32)
        contract = (((hidden.ndim - 1,), (1 if self.config.tied else 0,)), ((), ()))
        logits = jax.lax.dot_general(hidden, self.head(params), contract, preferred_element_type=acc)
        if (own := low_rank(params, hidden, self.compute_dtype)) is not None:
            logits = added_to(logits, own)
        cap = self.config.final_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def init_cache(self, slots: int, length: int, dtype):
        """Returns a zeroed cache: per layer k and v [slots, length, G * K], or latents (models.latent), where it has
        attention, and the states of a recurrence where it has one (recurrent.leaf_shapes), with the repetitions in
        front if scanned.

        A layer that is a feed-forward alone has nothing. dtype: of all arrays but a recurrence's states, which are fp32
        or better. Raises ConfigError for a model without attention, and as check_length does.
        """
        self.check_length(length)
        cfg = self.config
        if not cfg.windows:
            raise ConfigError("model config: no layer has attention; the sampler needs one: lower "
                              "full_attention_interval, or change the list of layers")
        before, repeats, behind = decoder.spans(cfg, self.scan_layers)

        def layer(number, *lead):
            own, out = cfg.layers[number], {}
            if own.recurs:
                shapes = recurrent.leaf_shapes(cfg, dtype)
                out |= {name: jnp.zeros((*lead, slots, *shape), kind) for name, (shape, kind) in shapes.items()}
            if own.attends:
                widths = cfg.cache_widths
                out |= {name: jnp.zeros((*lead, slots, length, width), dtype) for name, width in widths.items()}
            return out

        cache: dict[str, dict] = {f"layer_{i}": layer(i) for i in (*before, *behind)}
        if repeats:
            cache["layers"] = {f"sub_{j}": layer(cfg.prefix + j, repeats) for j in range(cfg.period)}
        return cache

    def prefill(self, params, tokens_BxP, lengths_B, with_auxiliary: bool = False, whose_B=None, images=None):
        """Runs right-padded prompts at positions 0...

        Args:
          tokens_BxP: int32 token ids; those behind a row's length are padding.
          lengths_B: int32 number of tokens of each prompt, at least 1.
          with_auxiliary: also return the auxiliary of `forward`.
          whose_B: int32 adapter number of each row, with an adapter set, or None.
          images: jaxrl.types.Images of the prompts, of a model with a tower; None: no prompt has an image.

        Returns:
          hidden [B, D] of each row's last real token in the compute dtype, and kv: the tree of `init_cache` for B slots
            of length P ([B, P, G * K] per layer, in the compute dtype; states of recurrent layers in fp32 or better);
            with_auxiliary, also the auxiliary of `forward`. The states are those before the last token, which decoding
            runs again.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens_BxP.shape[1], dtype=jnp.int32), tokens_BxP.shape)
        segments = (positions < lengths_B[:, None]).astype(jnp.int32)
        seen = None if images is None else tower.see(self, params, images)
        hidden, auxiliary, kv = decoder.forward(self, params, tokens_BxP, positions, segments, keep_kv=True,
                                                whose_BxL=_of_rows(whose_B, positions), seen=seen)
        last = jnp.take_along_axis(hidden, (lengths_B - 1)[:, None, None], axis=1)
        return (last[:, 0], kv, auxiliary) if with_auxiliary else (last[:, 0], kv)

    def insert(self, cache, kv, rows_K, slots_K):
        """Copies prefilled rows into slots, at positions 0..P-1, and their states whole; slots beyond the cache's last
        one are dropped (negative ones are not: they count from its end).

        Args:
          cache: as `init_cache` returns it.
          kv: of `prefill`; cast to the cache's dtypes.
          rows_K, slots_K: int32, row rows_K[i] of kv goes into slot slots_K[i].

        Returns the cache. Raises ValueError where the prompts are longer than the cache.
        """
        def copy(path, into, values):
            stacked = path[0].key == "layers"
            if recurrent.is_by_slot(path):
                at = (slice(None),) * stacked
                return into.at[(*at, slots_K)].set(values[(*at, rows_K)].astype(into.dtype), mode="drop")
            prompt, room = values.shape[-2], into.shape[-2]
            if prompt > room:
                raise ValueError(f"prompts of {prompt} tokens do not fit a cache of length {room}")
            if stacked:
                return into.at[:, slots_K, :prompt].set(values[:, rows_K].astype(into.dtype), mode="drop")
            return into.at[slots_K, :prompt].set(values[rows_K].astype(into.dtype), mode="drop")

        return jax.tree_util.tree_map_with_path(copy, cache, kv)

    def take(self, cache, slots_K):
        """Returns a cache of the slots slots_K [K] int32, in their order, to continue decoding with fewer of them."""
        def rows(path, values):
            return values[:, slots_K] if path[0].key == "layers" else values[slots_K]

        return jax.tree_util.tree_map_with_path(rows, cache)

    def decode(self, params, tokens_S, positions_S, cache, shared=None, with_auxiliary: bool = False, whose_S=None,
               shift_S=None):
        """Runs one token per slot: writes its key and value at its position, attends to cache positions up to it.

        Positions at or beyond the cache length write nothing (idle slots), and their hidden states have no meaning.
        Inside a jitted loop the cache is updated in place.

        Args:
          tokens_S, positions_S: int32 id and position of each slot's token.
          cache: as `init_cache` returns it.
          shared: kernels.attention.Shared, which slots hold one prompt, or None.
          with_auxiliary: also return the auxiliary of `forward`.
          whose_S: int32 adapter number of each slot, or None.
          shift_S: int32, what a slot's images add to the positions of the text after them, for rotary angles (see
            models.vision.positions.rotary_shift); None = 0.

        Returns:
          (hidden [S, D] in the compute dtype, cache), with_auxiliary (hidden, cache, auxiliary).
        """
        rows = tokens_S[:, None], positions_S[:, None]
        hidden, auxiliary, cache = decoder.forward(self, params, *rows, cache=cache, prompts=shared,
                                                   whose_BxL=_of_rows(whose_S, rows[1]), shift_B=shift_S)
        return (hidden[:, 0], cache, auxiliary) if with_auxiliary else (hidden[:, 0], cache)

    def extend(self, params, tokens_KxL, positions_KxL, cache, slots_K, with_auxiliary: bool = False, whose_K=None,
               shift_K=None, seen=None):
        """Runs up to L tokens, 2 <= L <= C, in each of K slots: writes their keys and values at their positions; each
        token attends to cache positions up to its own, including those written by this call.

        A slot's positions are consecutive; positions at or beyond the cache length, after them, are padding. Slots
        outside the cache are dropped; no other slot occurs twice. On a mesh the K slots are split over the data axes as
        the cache's slots are, and each device's entries name its own slots.

        tokens_KxL, positions_KxL, slots_K: int32. whose_K: int32 adapter number of each slot, or None. shift_K: as
        shift_S in `decode`. seen: decoder.Seen of tokens of which some are an image's, whose rotary holds instead of
        shift_K; None: all are text.

        Returns the cache, with_auxiliary (cache, auxiliary of `forward`).
        """
        length, groups = tokens_KxL.shape[1], self.config.cache_heads
        lead = lambda path, x: x.shape[:1 + (path[0].key == "layers")]  # noqa: E731
        flat = lambda path, x: x.reshape(*lead(path, x), 1, -1)  # noqa: E731

        def take(path, x):
            if not recurrent.is_by_slot(path):
                return take_slots(x, slots_K, groups)
            found = take_slots(flat(path, x), slots_K, 1)
            return found.reshape(*found.shape[:-2], *x.shape[len(lead(path, x)):])

        def put(path, x, y):
            if not recurrent.is_by_slot(path):
                return put_slots(x, y, slots_K, positions_KxL[:, 0], length, groups)
            return put_slots(flat(path, x), flat(path, y), slots_K, jnp.zeros_like(slots_K), 1, 1).reshape(x.shape)

        part = jax.tree_util.tree_map_with_path(take, cache)
        _, auxiliary, part = decoder.forward(self, params, tokens_KxL, positions_KxL, cache=part,
                                             whose_BxL=_of_rows(whose_K, positions_KxL), seen=seen, shift_B=shift_K)
        cache = jax.tree_util.tree_map_with_path(put, cache, part)
        return (cache, auxiliary) if with_auxiliary else cache

    def check_length(self, tokens: int) -> None:
        """Raises ConfigError if a sequence of `tokens` tokens is beyond what the rotary scaling serves: above the
        original window of rope_type=dynamic, or of longrope whose long factors differ from its short ones.
        """
        for rope in self.config.ropes:
            if rope.kind == "dynamic" and tokens > rope.original_max:
                raise ConfigError(
                    f"rope_type=dynamic serves sequences up to its original window of {rope.original_max} "
                    f"tokens, not {tokens}; set rope_type=yarn with a factor in its config (the policy's: "
                    "model.config), or shorten the sequences")
            if rope.window and tokens > rope.window:
                raise ConfigError(
                    f"rope_type=longrope: sequences of {tokens} tokens, and beyond {rope.window} tokens other factors "
                    "hold; shorten the sequences, or give short_factor the numbers of long_factor in its config (the "
                    "policy's: model.config)")

    @property
    def num_parameters(self) -> int:
        """Number of elements of all arrays, adapters included. Of a base in few bits its codes and scales are counted:
        nf4 has one code for two numbers.
        """
        return sum(math.prod(entry.shape) for entry in self.entries)

    @property
    def num_active(self) -> int:
        """Returns the number of parameters that take part in computing one token; of experts, only the chosen ones
        count. The embedding is counted whole, and nf4 codes as the two numbers that each holds.
        """
        return sum(entry.active for entry in self.entries)

    def flops_per_token(self, context: int) -> int:
        """Returns the FLOPs of the forward pass for one token of text that sees `context` tokens (itself included).

        Matrix products and recurrences, the head included, the embedding lookup and an adapter on the head not; a
        multiply and an add count as two. The backward pass costs twice as much.
        """
        cfg = self.config
        matrices = sum(e.multiplied for e in self.entries if e.path[0] not in ("head", "vision"))
        head = cfg.hidden_size * cfg.vocab_size
        seen = sum(min(window or context, context) for window in cfg.windows)
        return 2 * (matrices + head) + cfg.pair_flops * seen + recurrent.rule_flops(cfg)

    @property
    def flops_per_patch(self) -> float:
        """Returns the FLOPs of the matrix products of the tower's forward pass for one patch; 0 without a tower. Those
        of attention are VisionConfig.pair_flops. Counted as in `flops_per_token`.
        """
        tower = self.config.vision
        return 0.0 if tower is None else 2 * sum(multiplied_by_patch(tower, e) for e in self.entries)
