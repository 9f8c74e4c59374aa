"""Low-rank adapters on the linear maps of a model (LoRA, Hu et al., arXiv 2106.09685):

    y = x W + scale * (x A) B        A [*inputs, r], B [r, *outputs], scale = alpha / r (rslora: alpha / sqrt(r))

W is never changed, nor is W + scale * A B formed in training: that would need the whole gradient of W. The leaves stand
beside the kernel they adapt, `<module>/lora/{a, b, scale}`, and are rows of the model's parameter table like any other.
A takes the kernel's input axes, B its output axes, and r stays whole. The same parameters without `lora` nodes are the
base, which `Model.base` computes with.

Kernels that are parts of one HF tensor (models.io.parts) are one module of PEFT's: they share A and scale, which stand
beside the first of them, and each has the columns of B (and of m) that are its outputs.

Adapters of a scanned stack lie along its repetitions. Where their ranks differ (0: no target there) the shorter are
padded with zeros in A and in B: both gradients are zero there, so they stay zero under any optimizer that leaves what
has no gradient and is zero alone.

`shifted` adapters (PiSSA, OLoRA: A and B start at a part of W) do not change the base either: frozen copies A0, B0 of
their start are subtracted, y = x W + scale * ((x A) B - (x A0) B0).

`decomposed` adapters (DoRA, Liu et al., arXiv 2402.09353) train the length m of every output's column beside its
direction: y = x W' * m / |W'|, W' = W + scale * A B, with |W'| [*outputs] a constant in the gradient, as PEFT has it.

An adapter set (`Adapter.parts`), several adapters over one base, is stored as one A [*inputs, R] and one B
[R, *outputs], R the sum of the ranks; each token uses the columns of its adapter: see models.adapters.adapter_set.

The kernels of a `quantized` base are kept in few bits (models.adapters.quantized): those of the layers' linear maps
that do not train whole, with an adapter or without. W above is then what their codes stand for, everywhere.

Legend: r rank, N repetitions of the repeating block.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxrl.errors import ConfigError
from jaxrl.models import parameters
from jaxrl.models.adapters import quantized
from jaxrl.models.placement import stored
from jaxrl.processes.exchange import to_host
from jaxrl.sharding import memory

NODE = "lora"  # name of a module's adapter in the tree
HEAD = "lm_head"  # HF's module of the output matrix


@dataclasses.dataclass(frozen=True)
class Target:
    """A linear map with an adapter.

    Attributes:
      name: HF's module name, such as model.layers.3.self_attn.q_proj.
      rank: columns of A.
      scale: factor on the product of A and B.
    """

    name: str
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of a model, or an adapter set.

    Attributes:
      targets: linear maps with A and B. In a set each has the sum of the members' ranks, and scale 1.
      saved: HF names of modules that train whole.
      shifted: whether frozen copies A0, B0 of the initial A and B are subtracted (PiSSA, OLoRA).
      decomposed: whether the length m of every output's column is trained as well (DoRA).
      dropout: probability with which an input of A is dropped, in parameters that `noisy` prepared; elsewhere it has no
        effect.
      quantized: how the base is stored, one of quantized.KINDS; "" = as it is.
      parts: (name, Adapter) of each member of an adapter set (models.adapters.adapter_set), numbered from 1; () = a
        single adapter.
    """

    targets: tuple[Target, ...]
    saved: tuple[str, ...] = ()
    shifted: bool = False
    dropout: float = 0.0
    decomposed: bool = False
    quantized: str = ""
    parts: tuple[tuple[str, Adapter], ...] = ()  # an adapter set: see models.adapters.adapter_set


def module_of(hf_name: str) -> str:
    """Returns HF's name of the module that a tensor belongs to: the tensor's name up to its last dot."""
    return hf_name.rpartition(".")[0]


def adaptable(entry) -> bool:
    """Whether an entry of the parameter table can have an adapter: it is the kernel of a linear map in a layer or in a
    tower.

    Embedding, routers, experts, and the first product and Gemma 3's projector of a tower cannot, since the code that
    uses them reads their weights directly; they can be trained whole. The head is apart from these (`head_entry`).
    """
    return (bool(entry.inputs) and entry.row.adapts and entry.path[-1] == "kernel"
            and (entry.path[0] == "vision" or any("layers." in name for name in entry.hf_names)))


def head_entry(base) -> parameters.Entry:
    """Returns the entry of the output matrix in a base's parameter table; where the output matrix is the embedding, one
    that no array has, for the shapes and the place of its adapter (models.adapters.head). base: the base's entries.
    """
    if found := [e for e in base if e.path == ("head", "kernel")]:
        return found[0]
    table = next(e for e in base if e.path == ("embed", "embedding"))
    row = dataclasses.replace(next(row for row in parameters.MODEL if row.path == "head/kernel"), when="")
    return parameters.Entry(row, ("head", "kernel"), table.shape[::-1], row.axes, (f"{HEAD}.weight",), 0)


def adapts_head(adapter: Adapter) -> bool:
    """Whether an adapter is on the output matrix, too."""
    return any(target.name == HEAD for target in adapter.targets)


def first_parts(base) -> dict[str, str]:
    """Returns {module: module whose adapter has its A and scale} of the adaptable kernels, by flat name without
    `kernel`: the first part of the same HF tensor, else the module itself."""
    name = lambda entry: "/".join(entry.path[:-1])  # noqa: E731
    own = [entry for entry in base if adaptable(entry)]
    first = {module_of(entry.hf_names[0]): name(entry) for entry in own if not entry.row.part or not entry.row.part[1]}
    return {name(entry): first[module_of(entry.hf_names[0])] for entry in own}


def entries(adapter: Adapter, base) -> tuple[parameters.Entry, ...]:
    """Returns the parameter table of base and adapter, sorted by path, from the entries of the base; kernels of
    `in_few_bits` are replaced by their codes and scale.

    Raises ConfigError as `check` does.
    """
    ranks = {target.name: target for target in adapter.targets}
    _check(adapter, base)
    few, out = {e.path for e in in_few_bits(adapter, base)}, []
    for entry in base:
        out += quantized.entries_of(entry, adapter.quantized) if entry.path in few else [entry]
        if adaptable(entry) and any(module_of(name) in ranks for name in entry.hf_names):
            out += _entries_of(entry, sum(widths(adapter, entry)), adapter)
    if adapts_head(adapter):
        out += _entries_of(head_entry(base), ranks[HEAD].rank, adapter)
    return tuple(sorted(out, key=lambda entry: entry.path))


def widths(adapter: Adapter, entry) -> tuple[int, ...]:
    """Returns the columns of each adapter of the set (or of the only one) in A of a kernel: its largest rank there,
    over the layers that the entry is stacked over; 0 = no target there.
    """
    modules = {module_of(name) for name in entry.hf_names}
    own = [part for _, part in adapter.parts] or [adapter]
    return tuple(max((t.rank for t in one.targets if t.name in modules), default=0) for one in own)


def in_few_bits(adapter: Adapter, base) -> list[parameters.Entry]:
    """Returns the entries of the base whose kernels are stored as codes: those of linear maps in layers that do not
    train whole and are not marked exact; [] without `adapter.quantized`.
    """
    if not adapter.quantized:
        return []
    own = saved_paths(adapter, base)
    return [entry for entry in base if adaptable(entry) and not entry.row.exact and "/".join(entry.path) not in own]


def _entries_of(entry, rank: int, adapter: Adapter) -> list[parameters.Entry]:
    lead, inputs = entry.stacked, entry.inputs
    front, (shape, axes) = (entry.shape[:lead], entry.axes[:lead]), entry.kind
    name = "/".join((*entry.row.path.split("/")[:-1], NODE))

    def one(leaf, sizes, names, inputs):
        row = parameters.Row(f"{name}/{leaf}", names, "", inputs, init="adapter")
        return parameters.Entry(row, (*entry.path[:-1], NODE, leaf), front[0] + sizes, front[1] + names, (), lead)

    out, shares = [], bool(entry.row.part and entry.row.part[1])
    for more in ("", "0") if adapter.shifted else ("",):
        out += [] if shares else [one("a" + more, shape[:inputs] + (rank,), axes[:inputs] + (None,), inputs)]
        out.append(one("b" + more, (rank,) + shape[inputs:], (None,) + axes[inputs:], 1))
    if adapter.decomposed:
        out.append(one("m", shape[inputs:], axes[inputs:], 0))
    of_parts = (len(adapter.parts) + 1, rank) if adapter.parts else ()
    return out if shares else [*out, one("scale", of_parts, (None,) * len(of_parts), 0)]


def check(model) -> None:
    """Raises ConfigError if a model's adapter does not fit the model; a model without an adapter passes.

    Refused are targets that are no linear map of a layer or tower (`adaptable`) nor the output matrix, that occur
    twice, have a rank below 1, or are saved, too; saved modules that `saved_paths` refuses; the output matrix as a
    target of a set or of a shifted, decomposed or dropout adapter, or beside a saved embedding that it is tied to; a
    quantized base with experts, and nf4 where 64 does not divide the inputs of a kernel.
    """
    if model.adapter is not None:
        _check(model.adapter, model.base.entries)


def _check(adapter: Adapter, base) -> None:
    linear = {module_of(name) for entry in base if adaptable(entry) for name in entry.hf_names} | {HEAD}
    known = {module_of(name): entry for entry in base for name in entry.hf_names}
    names = [target.name for target in adapter.targets]
    if unknown := [name for name in names if name not in linear]:
        why = "is no linear map of a layer" if unknown[0] in known else "is not in this model"
        raise ConfigError(f"lora.targets: {unknown[0]} {why}; adapters go onto {', '.join(sorted(linear)[:3])} ..."
                          + "; lora.modules_to_save trains a module whole" * (unknown[0] in known))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"lora.targets: {twice[0]} is a target twice")
    if wrong := [t for t in adapter.targets if t.rank < 1]:
        raise ConfigError(f"lora.rank={wrong[0].rank} of {wrong[0].name}: at least 1; leave a module without adapter "
                          "out")
    for name in adapter.saved:
        if name in names:
            raise ConfigError(f"lora.modules_to_save: {name} is a target, too; leave it out of one of the two")
    saved = saved_paths(adapter, base)
    if HEAD in names:
        if adapter.parts or adapter.shifted or adapter.decomposed or adapter.dropout:
            raise ConfigError(f"lora.targets: {HEAD} with lora.adapters, lora.dora, lora.dropout, or an init that "
                              "starts as a part of the base: adapters on the output matrix are plain ones")
        if "embed/embedding" in saved and not any(e.path == ("head", "kernel") for e in base):
            raise ConfigError(f"lora.modules_to_save: the embedding is the output matrix of this model, and {HEAD} is "
                              "a target; leave it out of one of the two")
    _check_bits(adapter, base)


def _check_bits(adapter: Adapter, base) -> None:
    kind = adapter.quantized
    if kind and any(entry.row.stacked for entry in base):
        raise ConfigError(f"lora.base={kind}: the experts of this model, most of its numbers, cannot be quantised; set "
                          "lora.base=none")
    for entry in in_few_bits(adapter, base) if kind == "nf4" else ():
        if (inputs := entry.hf_shape[1]) % quantized.BLOCK:
            raise ConfigError(f"lora.base=nf4: {module_of(entry.hf_names[0])} has {inputs} inputs, which blocks of "
                              f"{quantized.BLOCK} do not divide; set lora.base=int8")


def saved_paths(adapter: Adapter, base) -> frozenset[str]:
    """Returns the flat names ('embed/embedding') of arrays that train whole; of a tied head, that of the embedding.

    Raises ConfigError for a module that the model does not have, and if an array of a scanned stack would train in only
    some of its repetitions.
    """
    tied = not any(entry.path[0] == "head" for entry in base)
    saved = {"model.embed_tokens" if tied and name == "lm_head" else name for name in adapter.saved}
    out, found = set(), set()
    for entry in base:
        of = [module_of(name) for name in entry.hf_names]
        inside = [name for name in of if name in saved]
        if inside and len(inside) < len(of):
            raise ConfigError(f"lora.modules_to_save: {inside[0]} without {next(n for n in of if n not in saved)}: the "
                              "layers are scanned as one array; name the module in all of them, or set "
                              "model.scan_layers=false")
        found |= set(inside)
        out |= {"/".join(entry.path)} if inside else set()
    if missing := sorted(saved - found):
        raise ConfigError(f"lora.modules_to_save: {missing[0]} is not in this model")
    return frozenset(out)


# ---- parameter trees


def is_adapter(name: str) -> bool:
    """Whether a flat name ('layer_0/mlp/up/lora/a') belongs to an adapter."""
    return name.split("/")[-2:-1] == [NODE]


def trains(model) -> frozenset[str]:
    """Returns the flat names of the trainable arrays: A, B, m and modules that train whole. model: with an adapter."""
    own = {"/".join(entry.path) for entry in model.entries}
    return frozenset(name for name in own if is_adapter(name) and name.endswith(("/a", "/b", "/m"))) | saved_paths(
        model.adapter, model.base.entries)


def without(params):
    """Returns the base's parameters: the tree without `lora` nodes. Codes stay codes (adapters.quantized), modules that
    train whole stay as they are trained, and no array is copied.
    """
    nodes = {name: without(node) if isinstance(node, dict) else node for name, node in params.items() if name != NODE}
    return {name: node for name, node in nodes.items() if not isinstance(node, dict) or node}


def joined(params, flat: dict):
    """Returns a parameter tree with the leaves `flat`, by flat name, added or replaced."""
    return unflatten_dict({**parameters.flattened(params), **flat}, sep="/")


def base_in_few_bits(model, params):
    """Quantises parameters of `model.base` as the adapter stores them: returns the tree in which the kernels of
    `in_few_bits` are {codes, scale} (adapters.quantized). Other arrays are unchanged, all of them if the adapter has no
    `quantized`.

    params: all kernels of the base, not quantised yet. KeyError for a kernel that is missing.
    """
    flat = parameters.flattened(params)
    for entry in in_few_bits(model.adapter, model.base.entries):
        name = "/".join(entry.path)
        node = quantized.quantized(flat.pop(name), model.adapter.quantized, entry.inputs, entry.stacked)
        flat |= {f"{name}/{leaf}": value for leaf, value in node.items()}
    return unflatten_dict(flat, sep="/")


def merged(model, params):
    """Merges the adapter: returns parameters of `model.base` that compute the same as `model`.

    Kernels become W + scale * A B, less scale * A0 B0 if the adapter is shifted, with columns scaled to the length m if
    it is decomposed. They are computed in fp32 or better and cast back to W's dtype (fp32 or better if W is stored as
    codes). Kernels missing in `params` are skipped. Pure and jittable; `params` is not changed.

    model: with a single adapter; of a set take one member (adapter_set.select_model, take_leaves). Raises ConfigError
    for an adapter on an output matrix that is the embedding.
    """
    flat = parameters.flattened(params)
    if adapts_head(model.adapter) and model.config.tied:
        raise ConfigError("the adapter on the output matrix cannot be merged: it is the embedding of this model, too; "
                          "use the adapter beside the base")
    out = {name: value for name, value in flat.items() if not is_adapter(name)}
    for entry in in_few_bits(model.adapter, model.base.entries):
        name = "/".join(entry.path)
        if f"{name}/codes" in out:
            node = {leaf: out.pop(f"{name}/{leaf}") for leaf in quantized.LEAVES}
            out[name] = quantized.whole(node, entry)
            if (b := flat.get(f"{name.rpartition('/')[0]}/{NODE}/b")) is not None:
                out[name] = out[name].astype(jnp.promote_types(b.dtype, jnp.float32))
    lead, first = {"/".join(entry.path): entry.stacked for entry in model.base.entries}, first_parts(model.base.entries)
    inner = {"/".join(e.path): tuple(range(e.stacked, e.stacked + e.inputs)) for e in model.base.entries}
    for name in out:
        own_module = name.rpartition("/")[0]
        leaves = f"{own_module}/{NODE}/"
        if name.endswith("/kernel") and f"{leaves}b" in flat:
            acc = jnp.promote_types(out[name].dtype, jnp.float32)
            shared = f"{first.get(own_module, own_module)}/{NODE}/"
            where = {leaf: (shared if leaf in ("a", "a0", "scale") else leaves) + leaf
                     for leaf in ("a", "b", "scale", "a0", "b0", "m")}
            own = {leaf: flat[path].astype(acc) for leaf, path in where.items() if path in flat}
            delta = _product(own["a"], own["b"], lead[name])
            if "a0" in own:
                delta -= _product(own["a0"], own["b0"], lead[name])
            scale = own["scale"].reshape(own["scale"].shape + (1,) * (delta.ndim - own["scale"].ndim))
            whole = out[name].astype(acc) + scale * delta
            if "m" in own:
                length = jnp.sqrt(jnp.sum(jnp.square(whole), inner[name]))
                whole *= _stretch(own["m"], length, own["scale"], inner[name])
            out[name] = whole.astype(out[name].dtype)
    return unflatten_dict(out, sep="/")


def lengths(kernel, a, b, scale, inputs: int):
    """Returns |W + scale * A B| [*outputs] of one module in fp32 or better, without forming the sum: for each output
    the Euclidean length over the inputs.

    With w, c a column of W and of B: |w|^2 + 2 scale (A^T w) c + scale^2 c (A^T A) c.

    kernel: W [*inputs, *outputs]. a: [*inputs, r]. b: [r, *outputs]. scale: []. inputs: number of the input axes.
    """
    acc = jnp.promote_types(kernel.dtype, jnp.float32)
    kernel, a, b, scale = (x.astype(acc) for x in (kernel, a, b, scale))
    over = tuple(range(inputs))
    dot = functools.partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST)
    cross = dot(a, kernel, ((over, over), ((), ())))
    own = dot(dot(a, a, ((over, over), ((), ()))), b, (((1,), (0,)), ((), ())))
    squares = jnp.sum(jnp.square(kernel), over) + jnp.sum(b * (2 * scale * cross + scale * scale * own), 0)
    return jnp.sqrt(jnp.maximum(squares, 0))


def _stretch(m, lengths, scale, inputs: tuple[int, ...] = ()):
    """Returns m / lengths, a decomposed adapter's factor on outputs; 1 for repetitions without adapter (scale 0)."""
    scale = scale.reshape(scale.shape + (1,) * (m.ndim - scale.ndim))
    return jnp.expand_dims(jnp.where(scale == 0, 1, m / jnp.where(scale == 0, 1, lengths)), inputs)


def stretch(kernel, leaves, inputs: int):
    """Returns m / |W + scale * A B| [*outputs] of one module, in fp32 or better; 1 where scale is 0. The length has no
    gradient.

    kernel: W [*inputs, *outputs]. leaves: {a [*inputs, r], b [r, *outputs], scale [], m [*outputs]}. inputs: number of
    W's input axes.
    """
    length = jax.lax.stop_gradient(lengths(kernel, leaves["a"], leaves["b"], leaves["scale"], inputs))
    return _stretch(leaves["m"].astype(length.dtype), length, leaves["scale"].astype(length.dtype))


def _product(a, b, lead: int):
    """Multiplies A [*lead, *inputs, r] with B [*lead, r, *outputs] to [*lead, *inputs, *outputs]."""
    along = tuple(range(lead))
    return jax.lax.dot_general(a, b, (((a.ndim - 1,), (lead,)), (along, along)), precision=jax.lax.Precision.HIGHEST)


def noisy(model, params, seed):
    """Returns parameters with which the adapters apply dropout to the inputs of A: with leaves `key` (uint32, data of a
    PRNG key) and `keep` (fp32, 1 - dropout) added beside every `scale`, for one forward pass.

    Each input is 0 with the probability `dropout`, else divided by 1 - dropout. Every A draws its own mask, from the
    seed and its name; parts that share an A share the mask. seed: [] integer. Pure.
    """
    key, rate, flat = jax.random.key(seed), model.adapter.dropout, {}
    for entry in model.entries:
        if entry.row.init == "adapter" and entry.path[-1] == "scale":
            name, count = "/".join(entry.path[:-1]), math.prod(entry.shape)
            keys = jax.random.split(jax.random.fold_in(key, zlib.crc32(name.encode())), count)
            flat[f"{name}/key"] = jax.random.key_data(keys).reshape(*entry.shape, -1)
            flat[f"{name}/keep"] = jnp.full(entry.shape, 1 - rate, jnp.float32)
    return joined(params, flat)


def dropped(x, key, keep):
    """Applies dropout: x / keep with probability `keep`, else 0, for each number of x, in x's dtype.

    key: data of a PRNG key (jax.random.key_data). keep: [] fp32.
    """
    falls = jax.random.bernoulli(jax.random.wrap_key_data(key), keep, x.shape)
    return jnp.where(falls, x / keep.astype(x.dtype), jnp.zeros_like(x))


# ---- the start


def initial(model, key, name: str = "default") -> dict[str, jax.Array]:
    """Returns {flat name: fp32 initial value} of every adapter leaf but m (see `magnitudes`). Pure.

    B is zero, and so are A0 and B0, so the adapter changes nothing at first; `scale` is the target's, 0 where a
    repetition has no adapter.

    default: A uniform in +-1/sqrt(inputs), as PEFT's and nn.Linear's (not he_uniform, which is sqrt(6) times wider).
    gaussian: A normal with standard deviation 1/r.
    Beside the key, the values of a module depend on its HF name and shape alone, not on mesh, scan or dtype.

    model: with a single adapter, no set. key: a jax PRNG key. Raises ConfigError for another name.
    """
    if name not in DRAWS:
        raise ConfigError(f"lora.init={name!r}: choose {', '.join(DRAWS)}")
    targets = {target.name: target for target in model.adapter.targets}
    drawn = _drawn(model, key, targets, DRAWS[name])
    rows, out = {e.path: e for e in (*model.base.entries, head_entry(model.base.entries))}, {}
    for entry in model.entries:
        if entry.row.init != "adapter" or entry.path[-1] == "m":
            continue
        base = rows[(*entry.path[:-2], "kernel")]
        modules, leaf = [module_of(name) for name in base.hf_names], entry.path[-1]
        shape = entry.shape[entry.stacked:]
        if leaf == "scale":
            values = [jnp.float32(targets[m].scale if m in targets else 0.0) for m in modules]
        elif leaf == "a":
            values = [_padded(drawn[m], shape) if m in drawn else jnp.zeros(shape, jnp.float32) for m in modules]
        else:
            values = [jnp.zeros(shape, jnp.float32)] * len(modules)
        out["/".join(entry.path)] = jnp.stack(values).reshape(entry.shape) if entry.stacked else values[0]
    return out


def magnitudes(model, base_params) -> dict[str, jax.Array]:
    """Returns {flat name: initial value} of m of decomposed adapters, fp32 or better: the Euclidean lengths of the
    base's columns over the inputs, [*stacked, *outputs]; {} for other adapters. base_params: of `model.base`, or its
    quantized tree.
    """
    out, rows = {}, {e.path: e for e in model.base.entries}
    for entry in model.entries:
        if entry.row.init == "adapter" and entry.path[-1] == "m":
            base = rows[(*entry.path[:-2], "kernel")]
            kernel = quantized.whole(base.of(base_params), base)
            kernel = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
            axes = tuple(range(base.stacked, base.stacked + base.inputs))
            out["/".join(entry.path)] = jnp.sqrt(jnp.sum(jnp.square(kernel), axes))
    return out


DRAWS = {
    "default": lambda key, shape: jax.random.uniform(
        key, shape, jnp.float32, -1 / math.sqrt(math.prod(shape[:-1])), 1 / math.sqrt(math.prod(shape[:-1]))),
    "gaussian": lambda key, shape: jax.random.normal(key, shape, jnp.float32) / shape[-1],
}


def _drawn(model, key, targets, draw) -> dict[str, jax.Array]:
    """Returns {module: A [*inputs, its rank]}, drawn with one generator per shape."""
    kinds: dict[tuple, list[str]] = {}
    firsts = set(first_parts(model.base.entries).values())
    for entry in model.base.entries:
        begins = adaptable(entry) and "/".join(entry.path[:-1]) in firsts  # a bias has its kernel's path
        for name in map(module_of, entry.hf_names) if begins else ():
            if name in targets:
                shape, axes = (part[:entry.inputs] for part in entry.kind)
                kinds.setdefault((shape + (targets[name].rank,), axes + (None,)), []).append(name)
    if HEAD in targets:
        (inputs, _), (axis, _) = head_entry(model.base.entries).kind
        kinds.setdefault(((inputs, targets[HEAD].rank), (axis, None)), []).append(HEAD)
    out = {}
    for (shape, axes), names in kinds.items():
        hashes = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
        values = jax.lax.map(lambda h, shape=shape: draw(jax.random.fold_in(key, h), shape), hashes)
        out.update(zip(names, stored(values, axes), strict=True))
    return out


def _padded(a, shape):
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, shape[-1] - a.shape[-1])])


# ---- is the base what it was?


def digest(params) -> np.ndarray:
    """Returns [32] uint8 in host memory: SHA-256 over names, dtypes, shapes and two 32-bit hashes of the contents of a
    tree's arrays.

    The hashes are sums of integers over all elements, so mesh and layout do not change them, and computed where the
    arrays lie: nothing is gathered. Every process that holds parts of the arrays must call it.
    """
    flat = parameters.flattened(params)
    near = {name: x for name, x in flat.items() if not memory.rests(x)}
    sums = {name: to_host(x).tolist() for name, x in _hashes(near).items()}
    for name in flat.keys() - near.keys():  # one at a time on the devices
        sums[name] = to_host(_hashes({"": flat[name]})[""]).tolist()
    contents = {name: [str(x.dtype), list(x.shape), sums[name]] for name, x in flat.items()}
    return np.frombuffer(hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).digest(), np.uint8).copy()


@jax.jit
def _hashes(flat):
    return {name: hashes(x) for name, x in memory.fetched(flat).items()}


def hashes(x):
    """Returns two hashes, [2] uint32, of an array's contents (bits and their places), for any mesh and layout. For use
    inside programs. x: of a dtype of 1, 2, 4 or 8 bytes.
    """
    return jnp.stack([_hash(x, seed) for seed in (0x9E3779B1, 0x7FEB352D)])


def _hash(x, seed: int):
    """Returns the sum over the elements of a mixed hash of bits and position, modulo 2**32
    (the finaliser of MurmurHash3).
    """
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    bits = jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)
    at, stride = jnp.uint32(seed), 1
    for axis in reversed(range(bits.ndim)):
        at = at + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    h = bits ^ (at * jnp.uint32(seed | 1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)
