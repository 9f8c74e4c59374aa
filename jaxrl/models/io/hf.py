"""Hugging Face checkpoints: config and weights in, an exact folder out.

`load_config` adds one key of its own, SOURCE, to the HF config: what export needs to write the folder back as it was
(dtypes, whether a tied head was stored) and the generation config. It never reaches a config.json.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxrl.errors import ConfigError
from jaxrl.models.families import FAMILIES, IMAGES, NEXT_TOKENS, classifier_of, family_of, text_part
from jaxrl.models.io import fused, nested, parts, scaled, tensorfile
from jaxrl.models.io.tensorfile import shortened
from jaxrl.models.value import ValueModel
from jaxrl.processes.exchange import put
from jaxrl.sharding import memory

SOURCE = "jaxrl_source"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # rows of models.parameters
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed, in old Llama checkpoints
# transformers takes no integer there
FLOATS = ("rms_norm_eps", "layer_norm_epsilon", "initializer_range", "attn_logit_softcapping",
          "final_logit_softcapping")
TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def folder_of(path: str, revision: str | None = None, patterns=(*TEXT_FILES, "*.safetensors")) -> Path:
    """Returns the local folder of a model: `path` itself, or the hub's snapshot of it (fetched if necessary). An empty
    path is the working directory.

    revision: of the hub, None = main. patterns: of the file names that are fetched.

    Raises ConfigError if `path` is no folder and no hub id, or the hub's snapshot is neither here nor can be fetched.
    It names model.path (`error_of`: another option).
    """
    if Path(path).is_dir():
        return Path(path)
    if path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ConfigError(f"model.path={path!r}: no such folder")
    import huggingface_hub
    try:
        return Path(huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=list(patterns)))
    except Exception as e:  # the client's errors have no common class: HTTP, cache, offline, validation
        reason = (str(e).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(f"model.path={path!r} (revision {revision or 'main'}) is no folder and cannot be fetched from"
                          f" the hub: {type(e).__name__}: {reason}; give a folder, check the name, or log in") from None


def error_of(field: str, path: str, error: ConfigError) -> ConfigError:
    """Returns the error of a folder or hub id that an option other than model.path names: a message that begins with
    this option, in place of model.path or of nothing.

    field: the option. path: its value.
    """
    text = str(error)
    if text.startswith("model.path="):
        return ConfigError(field + text.removeprefix("model.path"))
    return error if text.startswith(f"{field}=") else ConfigError(f"{field}={path!r}: {text}")


def load_config(path: str, revision: str | None = None, overrides: dict | None = None, weights: bool = True,
                images: bool = False) -> dict:
    """Loads the HF config of a folder or hub id as a dict, with `overrides` applied, plus SOURCE (see the module). Of a
    model of several parts (families.NESTED) that of the text model.

    Args:
      path: folder or hub id; empty = `overrides` alone is the config.
      revision: hub revision, None = main.
      overrides: config entries that win; None = none.
      weights: also read the weights' headers, so that an export is exact; of a hub id the weights are fetched for it.
      images: of a model with a tower (Family.vision) the tower, too; its vision_config is then the entry IMAGES.

    Raises ConfigError for a missing config.json, files that are no JSON objects, weights' headers that cannot be read
    (tensorfile.list_folder), and architectures that are not supported.
    """
    config, source = {}, {}
    if path:
        folder = folder_of(path, revision, TEXT_FILES + ["*.safetensors"] * weights)
        config = _read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            source["generation_config"] = _read_json(folder / "generation_config.json")
        source["outer"] = nested.outer(config)
        source |= {"processors": nested.processors(folder)} if source["outer"] else {}
        source |= {"flat_config": True} if nested.is_flat_config(config) else {}
        config = text_part(config)
        stored = tensorfile.list_folder(folder) if weights else {}
        if stored:
            kind = _kind(config, overrides)
            source |= {"within": nested.within(stored, kind)} if source["outer"] or FAMILIES[kind].spelled else {}
            source |= nested.tower_layout(stored, kind)
            stored, others = nested.split(stored, kind, images)
            source |= {"folder": str(folder.absolute())} if others else {}
            counts = collections.Counter(t.dtype for t in scaled.of_values(stored) if t.dtype in tensorfile.DTYPES)
            source["dtype"] = max(counts, key=counts.__getitem__) if counts else "F32"
            source["other_dtypes"] = {t.name: t.dtype for t in stored.values()
                                      if t.dtype != source["dtype"] and t.dtype in tensorfile.DTYPES}
            source["head"] = HEAD in stored
            layout = fused.layout(stored, {**config, **(overrides or {})})
            source |= {"fused": layout} if layout else {}
    elif images and nested.outer(overrides or {}):
        source["outer"] = nested.outer(overrides or {})
    config = text_part(_override(config, overrides or {}))
    if family_of(config).vision and images:
        config[IMAGES] = nested.tower_config(source.get("outer", {}), config["model_type"])
    return {**config, SOURCE: source}


def _kind(config, overrides) -> str:
    kind = {**config, **(overrides or {})}.get("model_type")
    return kind if kind in FAMILIES else next(iter(FAMILIES))  # another one is refused behind


def _read_json(file: Path) -> dict:
    if not file.is_file():
        raise ConfigError(f"{file.parent}: no {file.name}; give a folder with an HF checkpoint")
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as e:
        raise ConfigError(f"{file}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: a JSON object is expected, not {type(value).__name__}")
    return value


def _override(config: dict, overrides: dict) -> dict:
    """Overrides win, and nothing of the config hides one: a rotary entry goes into the table that is read."""
    config, overrides = dict(config), dict(overrides)
    scaling = overrides.get("rope_scaling")
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        config.pop("rope_scaling", None)
    tables = [overrides.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if any("original_max_position_embeddings" in table for table in tables):
        config.pop("original_max_position_embeddings", None)
    ropes = config.get("rope_parameters")
    if ropes and "rope_parameters" not in overrides and ("rope_scaling" in overrides or "rope_theta" in overrides):
        layered = "full_attention" in ropes or "sliding_attention" in ropes
        table = dict((ropes.get("full_attention") if layered else ropes) or {})
        if "rope_scaling" in overrides:
            overrides.pop("rope_scaling")
            config.pop("rope_scaling", None)
            new = dict(scaling or {})
            if "type" in new:
                new.setdefault("rope_type", new.pop("type"))
            # null takes a scaling away
            base = table if scaling else {k: v for k, v in table.items() if k == "rope_theta"}
            table = {**base, **new}
        if "rope_theta" in overrides:
            table["rope_theta"] = overrides.pop("rope_theta")
        overrides["rope_parameters"] = {**ropes, "full_attention": table} if layered else table
    elif ("rope_theta" in overrides and "rope_scaling" not in overrides
          and "rope_theta" in (config.get("rope_scaling") or {})):
        overrides["rope_scaling"] = {**config["rope_scaling"], "rope_theta": overrides["rope_theta"]}
    return {**config, **overrides}


def eos_token_ids(hf_config: dict, tokenizer=None) -> tuple[int, ...]:
    """Returns the ids that end a completion: of generation config, config and tokenizer, in this order, each once."""
    generation = hf_config.get(SOURCE, {}).get("generation_config", {})
    found = [generation.get("eos_token_id"), hf_config.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)]
    ids = [i for value in found if value is not None for i in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(int(i) for i in ids))


def load_params(model, path: str, revision: str | None = None, shardings=None, dtype=jnp.float32,
                then=None):
    """Loads the weights of a folder or hub id as a parameter tree.

    Tensors are mapped, not read whole: each device's slice is copied out, converted and sent, one tensor at a time
    (one that holds several parameters is read whole for each of them, one in fp8 is dequantized whole). Stacked arrays
    are filled by donated writes. Each step is waited for, so that host copies do not pile up.

    Args:
      model: the Model the weights are for.
      path, revision: folder or hub id; hub revision, None = main.
      shardings: tree of shardings (None: the default device).
      dtype: of the result (rows that are `fixed` or `wide`: fp32 or better), or a tree of dtypes as the model's.
      then: (Entry, array) -> what is kept of an array, before the next one is read; None = the array.

    Raises ConfigError if there is no such folder or no safetensors in it, for missing, extra and misshapen tensors and
    those of other dtypes than plain floats, of which it names the first ones, and for an output matrix that differs
    from the embedding it is tied to. fp8 in blocks and mxfp4 are dequantized (io.scaled). Tensors of parts that the
    model does not compute (a tower that is not read, layers for further tokens) are no extra ones.
    """
    folder = folder_of(path, revision)
    stored = _listed(folder, model, report=True)
    _match(model, stored, folder)
    load = _loader(stored, shardings or _one_device(model), dtype)
    return model.tree(load if then is None else lambda entry: then(entry, load(entry)))


def _listed(folder, model, report=False) -> dict[str, tensorfile.Stored]:
    """Returns a folder's tensors of the model, named as in its parameter table. report: log the tensors
    that are left out.
    """
    stored, others = nested.split(scaled.plain(tensorfile.list_folder(folder), folder), model.config.family,
                                  model.config.vision is not None)
    if report:
        nested.report(folder, others)
    return parts.split(model, fused.split(model, stored))


def load_critic(tree: ValueModel, path: str, revision: str | None = None, shardings=None, dtype=jnp.float32,
                then=None):
    """Loads the trunk of a causal model, or of a sequence classifier with one label, with a value head.

    Args:
      tree: the ValueModel, without `keep_head`. The head is the classifier's `<tree.name>.weight` [1, D]; zero if the
        folder has none. A bias is zero.
      path, revision: folder or hub id; hub revision, None = main.
      shardings: as the tree's; None = the default device.
      dtype: of the arrays (rows that are `fixed` or `wide`: fp32 or better).
      then: array -> replacement, called before the next array is read (to move it to host memory, for example); not for
        a zero head or bias. None = the array.

    Returns:
      The parameter tree. Raises as load_params does, except that the output matrix may be missing, and for a head of
        another shape.
    """
    stored = check_critic(tree, path, revision)
    shardings = shardings or _one_device(tree)
    load = _loader(stored, shardings, dtype)

    def array(entry):
        if entry.path[0] != "value" or stored.keys() & set(entry.hf_names):
            return load(entry) if then is None else then(load(entry))
        return put(np.zeros(entry.shape, dtype), entry.of(shardings))

    return tree.tree(array)


def check_critic(tree: ValueModel, path: str, revision: str | None = None, scores: bool = False) -> dict:
    """Checks the tensors of a folder that `load_critic` reads; raises what it would raise. scores: whether the head
    must exist (else ConfigError).

    Returns {name in the parameter table: tensorfile.Stored} of the folder's tensors, without those of parts that the
    model does not have (a tower, mtp heads).
    """
    folder, name, width = folder_of(path, revision), f"{tree.name}.weight", tree.config.hidden_size
    stored = _listed(folder, tree.model)
    head = stored.get(name)
    if head is None and scores and stored:
        raise ConfigError(f"{folder}: there is no {name}, the head that scores; name it if it is called otherwise, or "
                          "train a reward model first (run.recipe=reward_model)")
    _match(tree.model, {key: t for key, t in stored.items() if key not in (name, HEAD)}, folder, head=False)
    if head is not None and head.shape != (1, width):
        raise ConfigError(f"{folder}: {name} has shape {head.shape}, one label is needed: (1, {width})")
    return stored


def _one_device(tree):
    device = SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])
    return tree.tree(lambda entry: device)


def _loader(stored, shardings, dtype):
    """Returns load(entry) -> the array of one row of the parameter table."""

    def load(entry):
        sharding, kind = entry.of(shardings), entry.of(dtype) if isinstance(dtype, dict) else entry.dtype(dtype)
        within = entry.row.stacked
        if entry.stacked == within:
            return _place(entry, [stored[name] for name in entry.hf_names], sharding, kind).block_until_ready()
        array, part = jnp.zeros(entry.shape, kind, device=sharding), sharding
        if isinstance(sharding, NamedSharding):
            part = NamedSharding(sharding.mesh, P(*sharding.spec[entry.stacked - within:]))
        each = len(entry.hf_names) // entry.shape[0]
        for layer in range(entry.shape[0]):
            own = [stored[name] for name in entry.hf_names[layer * each:(layer + 1) * each]]
            array = _filler(sharding)(array, _place(entry, own, part, kind), layer).block_until_ready()
        return array

    return load


def check_weights(model, path: str, revision: str | None = None) -> None:
    """Raises what `load_params` would raise about a folder's tensors, from the files' headers; only a tied output
    matrix and its embedding are read, to compare them. The weights of a hub id are fetched for it.
    """
    folder = folder_of(path, revision)
    _match(model, _listed(folder, model), folder)


def _place(entry, tensors, sharding, dtype):
    """Builds one of our arrays from an HF tensor, or from those of a layer's experts, device slice by device slice."""
    within = entry.row.stacked
    views = [entry.from_hf(tensor.read()) for tensor in tensors]
    if not within:
        return jax.make_array_from_callback(
            views[0].shape, sharding, lambda index: np.array(views[0][index], dtype, order="C"))
    shape = entry.shape[entry.stacked - within:]
    numbers = np.arange(len(views)).reshape(shape[:within])

    def part(index):
        own = numbers[index[:within]]
        out = np.empty((own.size, *views[0][index[within:]].shape), dtype)
        for i, number in enumerate(own.reshape(-1)):
            out[i] = views[number][index[within:]]
        return out.reshape(own.shape + out.shape[1:])

    return jax.make_array_from_callback(shape, sharding, part)


@functools.cache
def _filler(sharding):
    """Puts a part into a stacked array, in place."""
    return jax.jit(lambda array, part, index: array.at[index].set(part), donate_argnums=0, out_shardings=sharding)


def _match(model, stored, folder, head=True):
    """Raises ConfigError unless a folder holds every tensor of the model, in its shape, and no other.

    head=False: the output matrix may be missing.
    """
    if not stored:
        raise ConfigError(f"{folder}: no {tensorfile.SINGLE} and no {tensorfile.INDEX}; convert the checkpoint to "
                          "safetensors, or set model.init=random")
    read = [entry for entry in model.entries if head or entry.path[0] != "head"]
    shapes = {name: entry.hf_shape for entry in read for name in entry.hf_names}
    unread = range(model.config.num_layers, model.config.num_layers + model.config.next_tokens)
    names = {name for name in stored if not IGNORED.fullmatch(name) and order(name)[:2] not in {(1, i) for i in unread}}
    if head and model.config.tied and HEAD in names:
        names.remove(HEAD)
        if stored[HEAD].shape != shapes[EMBEDDING] or not np.array_equal(stored[HEAD].read(), stored[EMBEDDING].read()):
            raise ConfigError(f"{folder}: {HEAD} differs from {EMBEDDING} although tie_word_embeddings=True; set "
                              "tie_word_embeddings=False in model.config if the checkpoint has a head of its own")
    missing, extra = sorted(set(shapes) - names), sorted(names - set(shapes))
    hint = "; is config.json the one of these weights?"
    if missing:
        more = f", and has extra ones: {shortened(extra)}" if extra else ""
        raise ConfigError(f"{folder}: the checkpoint lacks {len(missing)} tensors: {shortened(missing)}{more}{hint}")
    if extra:
        raise ConfigError(f"{folder}: {len(extra)} tensors have no place in a {model.config.family} model: "
                          f"{shortened(extra)}{hint}")
    wrong = [f"{n} has shape {stored[n].shape}, the config needs {shape}" for n, shape in shapes.items()
             if stored[n].shape != shape]
    if wrong:
        raise ConfigError(f"{folder}: {shortened(wrong, 3)}{hint}")
    for name in shapes:
        if stored[name].dtype not in tensorfile.DTYPES:
            stored[name].read()


def export(model, params, directory, hf_config: dict, dtype="auto", tokenizer=None, shard_gb: float = 5.0,
           eos_ids=()) -> None:
    """Writes a folder that transformers opens: weights, config, generation config and tokenizer. A model with a value
    head is written as a sequence classifier with one label, without a generation config.

    The folder appears at once: it is written beside its place and renamed; what stood there is replaced. Every process
    of a run calls this, process 0 writes.

    Args:
      model, params: what is exported, one tensor in host memory at a time; adapters merged (models.adapters.merged).
      directory: the folder.
      hf_config: as load_config returned it (its SOURCE decides whether a tied head is written).
      dtype: "auto" (each tensor as the source stored it; fp32 without a source) or fp64, fp32, fp16, bf16 or long:
        float64. `fixed` and `wide` rows: fp32 or better, unless the source's narrower dtype has their values exactly.
      tokenizer: HF tokenizer to save beside, or None.
      shard_gb: most tensor data of a file in GB (1e9 bytes); a larger tensor is alone in one.
      eos_ids: token ids that end a completion; those the source did not name are written too.

    Raises ConfigError for another dtype (TypeError for a name of none), and ValueError for arrays without an HF tensor:
    adapters, codes of a quantized base, a value head's bias.
    """
    directory = Path(directory)
    planned, name = _plan(model, params, hf_config, dtype)
    sees, scores = model.config.vision is not None, isinstance(model, ValueModel)
    planned, within = nested.place(planned, hf_config.get(SOURCE, {}), model.config.family, scores and not sees, sees)
    if jax.process_index() != 0:
        tensorfile.write_folder(None, planned, shard_gb * 1e9)
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        tensorfile.write_folder(temporary, planned, shard_gb * 1e9)
        config = {"architectures": [FAMILIES[model.config.family].architecture], **hf_config}
        for key in (SOURCE, IMAGES, "quantization_config"):  # what is written is in plain numbers
            config.pop(key, None)
        if config["architectures"] == [FAMILIES[model.config.family].classifier]:  # that of a trunk from there
            config["architectures"] = [FAMILIES[model.config.family].architecture]
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
        if FAMILIES[model.config.family].next_tokens:  # layers that are not read are not written
            config |= {NEXT_TOKENS[0]: 0} | {k: 0 for k in NEXT_TOKENS if k in config}
        config |= {k: float(config[k]) for k in FLOATS if type(config.get(k)) is int}
        if config.get("eos_token_id") is None:  # left out, it and its like mean tokens of the family's own vocabulary
            config |= {k: v for k, v in _special_ids(eos_ids, tokenizer).items() if config.get(k) is None}
        head = _classifier(model, config, tokenizer, eos_ids) if scores else {}
        if not scores:
            _write_json(temporary / "generation_config.json", _generation_config(hf_config, config, eos_ids))
        whole = _within(hf_config[SOURCE], config) if within else config
        if within and scores:
            head["architectures"] = [classifier_of(whole["model_type"])]
        _write_json(temporary / "config.json", whole | head)
        for file, content in hf_config[SOURCE].get("processors", {}).items() if within else ():
            _write_json(temporary / file, content)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _within(source, config) -> dict:
    """Returns the whole config of a model of several parts, with this one as its text model."""
    outer = source["outer"]
    if source.get("flat_config"):
        return {**outer, **{k: v for k, v in config.items() if k not in ("architectures", "model_type")}}
    kinds = {k: config[k] for k in ("dtype", "torch_dtype") if k in config}
    text = {k: v for k, v in config.items() if k != "architectures"}
    if stored := FAMILIES[config["model_type"]].stored_type:
        text["model_type"] = stored
    return {**outer, **{k: v for k, v in kinds.items() if k in outer}, "text_config": text}


def _plan(model, params, hf_config, dtype) -> tuple[list[tensorfile.Planned], str]:
    """Returns the tensors to write, in the order of the layers, and the dtype name for config.json."""
    source, own = hf_config.get(SOURCE, {}), {}
    as_stored = isinstance(dtype, str) and dtype == "auto"
    if as_stored:
        main = tensorfile.DTYPES[source.get("dtype", "F32")]
        own = {name: tensorfile.DTYPES[code] for name, code in source.get("other_dtypes", {}).items()}
        own = parts.spread(model, fused.spread(model, own))
    else:
        main = jnp.dtype(DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    if main not in tensorfile.CODES:
        raise ConfigError(f"checkpoint.export_dtype={dtype!r}: choose auto, {', '.join(DTYPE_NAMES)}")
    planned, of_layer = [], functools.lru_cache(maxsize=FEW)(_of_layer)
    for entry in model.entries:
        array, lead = _Once(entry.of(params)), entry.stacked - entry.row.stacked
        for index, name in zip(entry.indices, entry.hf_names, strict=True):
            get = functools.partial(_host, entry, of_layer, array, index[:lead], index[lead:])
            kind = own.get(name, main)
            if kind != (least := entry.dtype(kind)) and not (as_stored and _holds(kind, get(least))):
                kind = least
            planned.append(tensorfile.Planned(name, kind, entry.hf_shape, functools.partial(get, kind)))
    if model.config.tied and source.get("head") and not isinstance(model, ValueModel):
        embedding = next(t for t in planned if t.name == EMBEDDING)
        kind = own.get(HEAD, main)
        planned.append(tensorfile.Planned(HEAD, kind, embedding.shape, lambda: embedding.get().astype(kind)))
    layout = fused.written_layout(model, source.get("fused", False))
    planned = fused.fuse(model, planned, layout) if layout else planned
    return sorted(parts.join(model, planned), key=lambda t: order(t.name)), main.name


def order(name):
    """Returns the sort key of an HF name, (part, layer, is head): embedding, layers by number, final norm, head."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (0 if name == EMBEDDING else 1 if layer else 2, int(layer[1]) if layer else 0, name == HEAD)


FEW = 3  # arrays of a layer's experts that are in host memory at once: gate, up, down


class _Once(NamedTuple):
    """An array that is its own key in a cache."""

    array: Any

    def __hash__(self):
        return id(self.array)

    def __eq__(self, other):
        return self.array is other.array


def _of_layer(array: _Once, layer: tuple):
    """Returns one layer's part of an array as numpy; collective if the array is spread over processes."""
    part = memory.one_of(array.array, layer)
    if not getattr(part, "is_fully_addressable", True):
        from jax.experimental import multihost_utils
        part = multihost_utils.process_allgather(part, tiled=True)
    return np.asarray(part)


def _host(entry, of_layer, array, layer, index, dtype):
    """Returns one HF tensor as numpy. A layer's experts are fetched together: each alone would be gathered
    with all of them.
    """
    return entry.to_hf(of_layer(array, layer)[index].astype(dtype))


def _holds(dtype, values) -> bool:
    """Returns whether a dtype has all of these numbers exactly; equal NaNs count as equal."""
    return np.array_equal(values.astype(dtype).astype(values.dtype), values, equal_nan=True)


def _special_ids(eos_ids, tokenizer) -> dict:
    """Returns the special tokens as config.json spells them; {} without a known end token. A tokenizer without padding
    pads with the end token.
    """
    if not eos_ids:
        return {}
    pad, bos = (getattr(tokenizer, name, None) for name in ("pad_token_id", "bos_token_id"))
    ends = [int(i) for i in eos_ids]
    return {"eos_token_id": ends if ends[1:] else ends[0], "bos_token_id": bos,
            "pad_token_id": ends[0] if pad is None else pad}


def _classifier(model, config, tokenizer, eos_ids) -> dict:
    """Returns config.json's fields for a sequence classifier with one label.

    transformers reads the score at the last token that is not padding. If padding is the end token too, that would be
    the token before the end: no padding is named then, so that it scores single sequences and refuses batches.
    """
    ends, pad = set(map(int, eos_ids)), config.get("pad_token_id")
    own = getattr(tokenizer, "pad_token_id", None)
    pad = next((i for i in (pad, own) if i is not None and i not in ends), None)
    name = FAMILIES[model.config.family].classifier
    return {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": pad}


def _generation_config(hf_config, config, eos_ids):
    """Returns the source's generation config, if it has one, with the end tokens added that it lacks."""
    source = hf_config.get(SOURCE, {}).get("generation_config")
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    values = source or {"_from_model_config": True, **{k: config[k] for k in keys if config.get(k) is not None}}
    known = values.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    more = [int(i) for i in eos_ids if i not in known]
    if not more:
        return values
    return {**{k: v for k, v in values.items() if k != "_from_model_config"}, "eos_token_id": known + more}


def _write_json(file, value):
    file.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def replace(temporary: Path, directory: Path) -> None:
    """Puts a finished folder in its place; an existing folder is moved aside first and deleted afterwards. Between the
    two renames there is no folder at that place.
    """
    if not directory.exists():
        os.rename(temporary, directory)
        return
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(directory, old)
    os.rename(temporary, directory)
    shutil.rmtree(old, ignore_errors=True)
