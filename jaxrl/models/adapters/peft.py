"""Reads and writes PEFT's LoRA folders: adapter_config.json with adapter_model.safetensors.

A folder that was read is written back byte for byte while its numbers are the same: fields that jaxrl does not know,
dtypes and the layout of the file are those of the folder. Source: PEFT 0.21, peft_model.py (save_pretrained).

Legend: W of a module is [outputs, inputs] there; A [r, inputs] and B [outputs, r]; ours are a [*inputs, r] and
b [r, *outputs].
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models.adapters import HEAD, NODE, Adapter, module_of
from jaxrl.models.adapters.initialization import is_shifted
from jaxrl.models.adapters.selection import (
    ALL_LINEAR,
    Selection,
    adapted,
    around,
    hf_shape,
    outer_name,
    resolved,
    selection_of,
    tensors,
    unread_modules,
    without_adapters,
)
from jaxrl.models.io import hf, parts, tensorfile
from jaxrl.models.io.tensorfile import shortened

log = logging.getLogger("jaxrl")
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
MAGNITUDE = "lora_magnitude_vector"  # DoRA's m, behind a module's name
PLAIN = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")  # inits that leave the base as it is
# Fields of adapter_config.json that change what an adapter computes, and are not served here.
NOT_SERVED = ("lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora",
              "target_parameters", "trainable_token_indices", "velora_config", "kasa_config", "arrow_config",
              "monteclora_config")
VERSION = "0.21.2"  # of PEFT, whose fields FIELDS are
FIELDS: dict[str, Any] = {  # of a LoraConfig, as it is saved where nothing is set
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": None, "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.0,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": VERSION, "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "target_modules": None, "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
    "velora_config": None,
}


def resolve(options, model) -> Adapter:
    """Returns the adapter that config.lora describes on a model: that of `options.path`, or by PEFT's rules.

    Entries of `targets` and `exclude` are HF names of modules or their ends behind a "."; a single entry with signs
    that no name has is a pattern for whole names; "all-linear" is every linear map that can have an adapter (so no
    expert or router), except those that only their name selects (Row.by_name) and the output matrix. `exclude` and
    `modules_to_save` take modules out, `layers` keeps those of some layers. Of `rank_pattern` and `alpha_pattern` the
    first key that fits the end of the name decides. scale = alpha / rank, with rslora alpha / sqrt(rank) (arXiv
    2312.03732); alpha None = `options.rank`, not the rank that a pattern gives. `dropout` and `quantized` of the result
    are not set here.

    Raises ConfigError for an entry that fits nothing (option, value, examples) or is malformed, for embeddings, output
    matrices, experts and routers as targets, if no target is left, and for what `read` refuses.
    """
    if options.path:
        return read(options.path, model)[0]
    found = resolved(selection_of(options), model, strict=True)
    return dataclasses.replace(found, shifted=is_shifted(options.init), decomposed=options.dora)


# ---- reading ---------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Source:
    """A folder that was read: what is needed to write it back as it was.

    Attributes:
      path: as it was given. text: bytes of its adapter_config.json. config: the same, parsed.
      head: the bytes of the safetensors file before its data.
      stored: its tensors, by PEFT's names.
    """

    path: str
    text: bytes
    config: dict
    head: bytes
    stored: dict[str, tensorfile.Stored]


def source(path: str) -> Source:
    """Reads the adapter folder at `path` (or the hub's), anew at every call.

    Raises ConfigError if it cannot be found or fetched, is no LoRA folder of PEFT's with safetensors, or its
    safetensors file cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = hf.folder_of(path, patterns=(CONFIG, WEIGHTS))
        except ConfigError as e:
            raise hf.error_of("lora.path", path, e) from None
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"lora.path={path!r}: no {name}; give a folder that PEFT's save_pretrained wrote"
                              + (" (its adapter_model.bin is a pickle: load it with PEFT and save it again)"
                                 if name == WEIGHTS and (folder / "adapter_model.bin").is_file() else ""))
    text = (folder / CONFIG).read_bytes()
    try:
        config = json.loads(text)
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"lora.path={path!r}: {CONFIG} is not a JSON object ({e})") from None
    if kind != "LORA":
        raise ConfigError(f"lora.path={path!r}: peft_type={kind!r}; only LORA is served")
    stored = tensorfile.read_header(folder / WEIGHTS)
    with open(folder / WEIGHTS, "rb") as f:
        size = f.read(8)
        head = size + f.read(int.from_bytes(size, "little"))
    return Source(path, text, config, head, stored)


def _from_config(config: dict, path: str) -> Selection:
    """Reads the modules of an adapter_config.json. Raises ConfigError for adapters that compute something else."""
    where = f"lora.path={path!r}: {CONFIG} has"
    for name in NOT_SERVED:
        if config.get(name):
            raise ConfigError(f"{where} {name}={config[name]!r}, which is not served here; train it with PEFT")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{where} bias={config['bias']!r}: biases of the base are not trained; only 'none' is served")
    init = config.get("init_lora_weights", True)
    if init not in PLAIN:
        raise ConfigError(f"{where} init_lora_weights={init!r}, which changes the base when PEFT loads it: convert it "
                          "with save_pretrained(path_initial_model_for_weight_conversion=...)")
    if config.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
        raise ConfigError(f"{where} layers_pattern={config['layers_pattern']!r}; layers are called 'layers' here")
    for name, value in config.items():
        if name not in FIELDS and value:
            log.warning("%s %s=%r, which jaxrl does not know; it is kept and has no effect here", where, name, value)
    layers = config.get("layers_to_transform")
    layers = () if layers is None else (layers,) if isinstance(layers, int) else tuple(layers)
    try:
        return Selection(int(config["r"]), config["lora_alpha"], bool(config.get("use_rslora")),
                         _field(config["target_modules"]), _field(config.get("exclude_modules")), layers,
                         config.get("rank_pattern") or {}, config.get("alpha_pattern") or {},
                         tuple(config.get("modules_to_save") or ()))
    except KeyError as e:
        raise ConfigError(f"{where} no {e}; give a folder that PEFT's save_pretrained wrote") from None


def _field(names) -> str | tuple[str, ...]:
    return names if isinstance(names, str) else tuple(names or ())


def _adapter(src: Source, model, head: bool = False) -> Adapter:
    found = resolved(_from_config(src.config, src.path), model, strict=False, head=head)
    return dataclasses.replace(found, decomposed=bool(src.config.get("use_dora")))


def _same(one: Adapter, other: Adapter) -> bool:
    """Whether both compute the same of the same tensors."""
    return (one.targets, one.saved, one.decomposed) == (other.targets, other.saved, other.decomposed)


def read(folder, model, head: bool = False) -> tuple[Adapter, dict[str, np.ndarray]]:
    """Reads the adapter in a PEFT folder (or hub id) and its values, laid out as in the model's parameter tree.

    Returns (Adapter, {path joined by "/": array}): of every adapted kernel a, b and scale and, of DoRA, m, in fp32 (all
    in float64 if the file has a float64 tensor) and padded with zeros where ranks differ; and the arrays of modules
    that were trained whole. A field of its config that is set and that jaxrl does not know is logged as a warning and
    has no effect. head: whether the output matrix may have an adapter.

    Raises ConfigError for files that do not fit each other or the model, for adapters that compute something that is
    not served (biases, PiSSA that was not converted ...), and as `source` does. Of the messages those about modules
    (targets, ranks, modules_to_save) do not name the folder.
    """
    src = source(str(folder))
    adapter = _adapter(src, model, head)
    modules, wanted = adapted(model), {}
    for t in adapter.targets:
        (outputs, inputs), name = hf_shape(modules[t.name]), PREFIX + outer_name(model, t.name)
        wanted[f"{name}.lora_A.weight"] = (t.rank, inputs)
        wanted[f"{name}.lora_B.weight"] = (outputs, t.rank)
        if adapter.decomposed:
            wanted[f"{name}.{MAGNITUDE}"] = (outputs,)
    packed = parts.tensors(model.base)
    for name, place in tensors(model).items():
        if module_of(name) in adapter.saved:
            whole = parts.whole_of(name)
            wanted[PREFIX + outer_name(model, whole)] = packed[whole].shape if whole in packed else place.entry.hf_shape
    missing, extra = sorted(set(wanted) - set(src.stored)), sorted(set(src.stored) - set(wanted))
    wrong = [f"{n} {src.stored[n].shape} instead of {s}" for n, s in wanted.items()
             if n in src.stored and src.stored[n].shape != s]
    for names, what in ((missing, "lacks what its config names"), (extra, "has what its config does not name, or what "
                        "has no place in this model"), (wrong, "has other shapes than config and model say")):
        if names:
            raise ConfigError(f"lora.path={src.path!r}: {WEIGHTS} {what}: {shortened(names)}; is it an adapter of this "
                              "model?")
    return adapter, _values(adapter, model, src.stored)


def _values(adapter: Adapter, model, stored) -> dict[str, np.ndarray]:
    wide = np.result_type(np.float32, *(tensorfile.DTYPES[t.dtype] for t in stored.values() if t.dtype == "F64"))
    modules, out = adapted(model), {}
    ranks: dict[tuple, int] = {}
    for t in adapter.targets:
        path = modules[t.name][0].entry.path
        ranks[path] = max(ranks.get(path, 0), t.rank)

    def array(name):
        return stored[PREFIX + outer_name(model, name)].read().astype(wide)

    for t in adapter.targets:
        places = modules[t.name]
        first, index = places[0]
        a, _, scale = leaf_paths(first)
        lead, rank = first.shape[:first.stacked], ranks[first.path]
        out.setdefault(scale, np.zeros(lead, wide))[index] = t.scale
        whole = out.setdefault(a, np.zeros(lead + lora_shapes(first, rank)[0], wide))
        whole[(*index, ..., slice(t.rank))] = array(f"{t.name}.lora_A.weight").T.reshape(lora_shapes(first, t.rank)[0])
        for (entry, index), own in zip(places, of_parts(model, places, array(f"{t.name}.lora_B.weight")), strict=True):
            whole = out.setdefault(leaf_paths(entry)[1], np.zeros(lead + lora_shapes(entry, rank)[1], wide))
            whole[(*index, slice(t.rank))] = own.T.reshape(lora_shapes(entry, t.rank)[1])
        if adapter.decomposed:
            lengths = of_parts(model, places, array(f"{t.name}.{MAGNITUDE}"))
            for (entry, index), own in zip(places, lengths, strict=True):
                outputs = lora_shapes(entry, rank)[1][1:]
                whole = out.setdefault(f"{leaf_paths(entry)[0][:-1]}m", np.zeros(lead + outputs, wide))
                whole[index] = own.reshape(outputs)
    saved = [parts.whole_of(name) for name in tensors(model) if module_of(name) in adapter.saved]
    split = parts.split(model.base, {name: stored[PREFIX + outer_name(model, name)] for name in saved})
    for name, (entry, index) in tensors(model).items():
        if module_of(name) in adapter.saved:
            whole = out.setdefault("/".join(entry.path), np.zeros(entry.shape, wide))
            whole[index] = entry.from_hf(split[name].read().astype(wide))
    if model.config.tied and HEAD in adapter.saved and not np.array_equal(array(hf.HEAD), array(hf.EMBEDDING)):
        raise ConfigError(f"{hf.HEAD} and {hf.EMBEDDING} of the adapter differ, but are one matrix in this model; "
                          "untie the checkpoint (tie_word_embeddings)")
    return out


def of_parts(model, places, array) -> list[np.ndarray]:
    """Splits an array [outputs, ...] of a module into those of its kernels, [outputs of one, ...], in the order of
    `places`, the module's Places (selection.linears).
    """
    groups = parts.groups_of(places[0].entry.row, model.config)
    return parts.unpack(array, groups, [place.entry.hf_shape[0] for place in places])


def leaf_paths(entry) -> tuple[str, ...]:
    """Returns the paths of a kernel's adapter leaves `a`, `b` and `scale`, joined by "/". A part that shares A and
    scale with an earlier part (`first_parts`) has no array at its paths of `a` and `scale`.
    """
    return tuple("/".join((*entry.path[:-1], NODE, leaf)) for leaf in ("a", "b", "scale"))


def lora_shapes(entry, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of `a`, (*inputs, rank), and `b`, (rank, *outputs), for one tensor of a kernel's row, without
    stacked axes.
    """
    shape = entry.kind[0]
    return (*shape[:entry.inputs], rank), (rank, *shape[entry.inputs:])


# ---- writing ---------------------------------------------------------------------------------------------------------

def write(folder, model, params, options, base_name: str, dtype: str = "auto") -> None:
    """Writes a PEFT folder atomically, replacing an existing one.

    Every process of a run calls this, process 0 writes.

    Args:
      folder: the directory.
      model: with the adapter. params: its parameter tree (base, adapters, modules that are trained whole).
      options: config.lora. Where `path` names a folder and the adapter is still that one, its config, dtypes and file
        layout are kept; where it is another one, a warning is logged, and the config names the modules, ranks and
        scales of the model's adapter.
      base_name: the base model, for base_model_name_or_path; empty = none.
      dtype: of tensors that no folder decides: "auto" = float32, or a name as hf.export takes it.

    An adapter that began as a part of the base (pissa, olora: `adapter.shifted`) is written as the plain LoRA of twice
    the rank that it is together with what was taken from the base: A [a; a0], B [b, -b0], rank and alpha doubled (with
    rslora alpha times sqrt(2)), which is PEFT's own conversion. ConfigError where PEFT refuses it, as `source` does for
    `path`, and where the config there no longer fits the model (`read`); nothing is written then. An adapter on a
    quantized base is logged as one that computes something else on another base.
    """
    adapter, folder = model.adapter, Path(folder)
    if adapter.quantized:
        log.warning("%s: this adapter was trained on its base in %s (lora.base); on another base it computes something"
                    " else, lora.export=merged writes the model that was trained", folder, adapter.quantized)
    src = source(options.path) if options.path else None
    if src is not None and not _same(_adapter(src, model), adapter):
        log.warning("lora.path=%r: its %s is no longer the one that was read; the adapter is written with its own rank "
                    "and scale", src.path, CONFIG)
        src = None
    arrays = hf_tensors(model, params, np.dtype("float32" if dtype == "auto" else hf.DTYPE_NAMES.get(dtype, dtype)),
                          {} if src is None else {n: tensorfile.DTYPES[t.dtype] for n, t in src.stored.items()})
    if src is not None:
        text = src.text
    elif options.path:  # the other options are none of the adapter's
        text = _exact_text(model, {
            "base_model_name_or_path": base_name or None, "lora_dropout": float(options.dropout),
            "target_modules": [outer_name(model, t.name) for t in adapter.targets],
            "modules_to_save": _listing([outer_name(model, name) for name in adapter.saved]),
            "use_dora": adapter.decomposed})
    else:
        text = config_text(adapter, options, base_name, [*without_adapters(model), *unread_modules(model)],
                           functools.partial(outer_name, model))
    if jax.process_index() == 0:
        _put(folder, text, arrays, src.head if src is not None else b"")


def write_plain(folder, model, params, dtype) -> None:
    """Writes a folder for engines that serve adapters, replacing an existing one: plain LoRA whose config names every
    rank and scale, tensors in `dtype`. Each process writes its own; params: arrays that it reaches. A `shifted` adapter
    is written with twice the rank, as in `write`.

    Raises ValueError for a decomposed adapter and for modules that train whole.
    """
    adapter = model.adapter
    if adapter.decomposed:
        raise ValueError("an adapter with lengths of its own (lora.dora) is no plain one")
    if adapter.saved:
        raise ValueError(f"modules that are trained whole ({shortened(adapter.saved)}) are no part of a plain adapter")
    text = _exact_text(model, {"target_modules": sorted({t.name.rpartition(".")[2] for t in adapter.targets})})
    _put(Path(folder), text, hf_tensors(model, params, np.dtype(dtype), {}), b"")


def _exact_text(model, fields: dict) -> bytes:
    """Returns an adapter_config.json that names the rank and the scale of every target of the model's adapter, twice
    the rank of a `shifted` one. fields: the other entries that are not PEFT's defaults.
    """
    adapter = model.adapter
    ranks = [(2 if adapter.shifted else 1) * t.rank for t in adapter.targets]
    rank, keys = max(ranks), [f"^{re.escape(outer_name(model, t.name))}" for t in adapter.targets]
    config = FIELDS | fields | {
        "r": rank, "lora_alpha": rank,
        "rank_pattern": {key: r for key, r in zip(keys, ranks, strict=True) if r != rank},
        "alpha_pattern": {key: t.scale * r for key, t, r in zip(keys, adapter.targets, ranks, strict=True)
                          if t.scale * r != rank}}
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _put(folder: Path, text: bytes, arrays: dict, head: bytes) -> None:
    """Writes a folder that appears at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        (temporary / CONFIG).write_bytes(text)
        save_tensors(temporary / WEIGHTS, arrays, head)
        hf.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_written(options) -> None:
    """Raises ConfigError if PEFT's format cannot hold an adapter of these options: pissa and olora with rslora and
    patterns, for which PEFT's conversion has no alpha.
    """
    if options.rslora and (options.rank_pattern or options.alpha_pattern) and is_shifted(options.init):
        raise ConfigError(f"lora.init={options.init} with lora.rslora and lora.rank_pattern or lora.alpha_pattern: "
                          "PEFT has no plain LoRA for it; leave one of them out")


def config_text(adapter: Adapter, options, base_name: str, without: list[str], outer=lambda name: name) -> bytes:
    """Returns the adapter_config.json of an adapter that was created by jaxrl, as PEFT writes it.

    Args:
      adapter, options: the Adapter and the config.lora that it was made of.
      base_name: for base_model_name_or_path; empty = none.
      without: linear maps that have no adapter, which the names of all-linear must not match.
      outer: returns transformers' name of a module.

    Raises ConfigError as check_written does.
    """
    check_written(options)
    chosen = selection_of(options)
    names = chosen.target_modules
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        names = sorted({_shortest(outer(t.name), without) for t in adapter.targets})
    alpha, twice = chosen.lora_alpha, 2 if adapter.shifted else 1
    plain = adapter.shifted or options.init in ("default", "eva")  # eva wants its own table of options
    config = FIELDS | {
        "base_model_name_or_path": base_name or None, "r": twice * chosen.r, "use_rslora": chosen.use_rslora,
        "lora_alpha": _number(alpha * (math.sqrt(twice) if chosen.use_rslora else twice)),
        "lora_dropout": float(options.dropout), "target_modules": names if isinstance(names, str) else list(names),
        "exclude_modules": _listing(chosen.exclude_modules), "modules_to_save": _listing((*chosen.modules_to_save, *(
            key.rpartition(".")[2] for key in adapter.saved
            if not any(module.endswith(name) for name in chosen.modules_to_save for module in around(outer(key)))))),
        "layers_to_transform": _listing(chosen.layers_to_transform),
        "rank_pattern": {k: twice * v for k, v in chosen.rank_pattern.items()},
        "alpha_pattern": {k: _number(twice * v) for k, v in chosen.alpha_pattern.items()},
        "init_lora_weights": True if plain else options.init, "use_dora": adapter.decomposed,
    }
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _shortest(name: str, others: list[str]) -> str:
    """Returns the shortest end of a module's name that no other name has."""
    ends = [name.split(".", n)[-1] for n in range(name.count("."), -1, -1)]
    return next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), name)


def _number(value):
    return int(value) if float(value).is_integer() else float(value)


def _listing(value):
    return value if isinstance(value, str) else list(value) or None


def hf_tensors(model, params, dtype, own: dict) -> dict[str, np.ndarray]:
    """Returns PEFT's name -> array in its dtype: of every target A [r, inputs], B [outputs, r] and DoRA's m [outputs],
    and the tensors of modules that train whole. Collective if arrays are spread over processes.

    Args:
      model, params: with the adapter, and its parameter tree.
      dtype: of tensors that `own` does not name; `fixed` and `wide` rows are at least fp32.
      own: {PEFT's name: dtype} of tensors that keep a source's.

    A `shifted` adapter becomes A [a; a0], B [b, -b0], of twice the rank.
    """
    adapter, modules, leaves, out = model.adapter, adapted(model), {}, {}

    def leaf(node, path):
        if path not in leaves:
            leaves[path] = _on_host(node)
        return leaves[path]

    def part(entry, index, rank, name):
        node = params
        for key in entry.path[:-1]:
            node = node[key]
        array = leaf(node[NODE][name], (*entry.path[:-1], name))[index]
        if name == "m":
            return array.reshape(-1)
        if name.startswith("a"):
            return array.reshape(-1, array.shape[-1])[:, :rank].T
        return array.reshape(array.shape[0], -1)[:rank].T

    def whole(places, rank, name):
        groups = parts.groups_of(places[0].entry.row, model.config)
        return parts.pack([part(entry, index, rank, name) for entry, index in places], groups)

    for t in adapter.targets:
        places = modules[t.name]
        a, b = part(*places[0], t.rank, "a"), whole(places, t.rank, "b")
        if adapter.shifted:
            a = np.concatenate([a, part(*places[0], t.rank, "a0")], axis=0)
            b = np.concatenate([b, -whole(places, t.rank, "b0")], axis=1)
        name = PREFIX + outer_name(model, t.name)
        out[f"{name}.lora_A.weight"], out[f"{name}.lora_B.weight"] = a, b
        if adapter.decomposed:
            out[f"{name}.{MAGNITUDE}"] = whole(places, t.rank, "m")
    saved = {name: place for name, place in tensors(model).items() if module_of(name) in adapter.saved}
    saved = {name: entry.to_hf(leaf(entry.of(params), entry.path)[index]).astype(entry.dtype(dtype))
             for name, (entry, index) in saved.items()}
    out = {name: array.astype(dtype) for name, array in out.items()}
    out |= {PREFIX + outer_name(model, name): array for name, array in parts.join_arrays(model.base, saved).items()}
    return {name: np.asarray(array.astype(own.get(name, array.dtype)), order="C") for name, array in out.items()}


def _on_host(array) -> np.ndarray:
    if not getattr(array, "is_fully_addressable", True):
        from jax.experimental import multihost_utils
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


RANKS = {"F64": 0, "F32": 1, "BF16": 2, "F16": 3}  # the order in which the safetensors library lays dtypes out


def save_tensors(file: Path, arrays: dict[str, np.ndarray], head: bytes = b"") -> None:
    """Writes a safetensors file as the safetensors library does, or with the exact `head` (the bytes before the data)
    of another file that has these names, dtypes and shapes; a head that does not fit is ignored.
    """
    codes = {name: tensorfile.CODES[array.dtype] for name, array in arrays.items()}
    if head:
        rows = json.loads(head[8:])
        rows.pop("__metadata__", None)
        fits = {n: (r["dtype"], tuple(r["shape"])) for n, r in rows.items()} == {
            n: (codes[n], a.shape) for n, a in arrays.items()}
        order = sorted(rows, key=lambda n: rows[n]["data_offsets"][0])
    if not head or not fits:
        order, rows, end = sorted(arrays, key=lambda n: (RANKS[codes[n]], n)), {}, 0
        for name in order:
            size = arrays[name].nbytes
            rows[name] = {"dtype": codes[name], "shape": list(arrays[name].shape), "data_offsets": [end, end + size]}
            end += size
        table = {"__metadata__": {"format": "pt"}, **rows}
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
    with open(file, "wb") as f:
        f.write(head)
        for name in order:
            f.write(arrays[name].reshape(-1).view(np.uint8).data)
