"""Folders that hold more than the text model: a tower for images, heads that predict further tokens (`mtp.`). The text
model is read out of them, with the tower where it is asked for, and an export writes the rest back as it was.

Several layouts are read, and the source's is written:

    model.language_model.*, model.visual.*    as transformers 5 writes them
    model.*, visual.*                         as some checkpoints were published
    language_model.model.*, vision_tower.*, multi_modal_projector.*    Gemma 3; with `model.` before the tower's and
        model.language_model.* where transformers keeps its own names, and with vision_tower.vision_model.* as published
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import re
from pathlib import Path

from jaxrl.errors import ConfigError
from jaxrl.models.families import FAMILIES, FLAT, NESTED, OUTER
from jaxrl.models.io import tensorfile

log = logging.getLogger("jaxrl")
SHORT, INNER = "vision_tower.", "vision_tower.vision_model."
KEYS = ("text_config", "quantization_config")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def split(stored: dict[str, tensorfile.Stored], kind: str, images: bool = False):
    """Returns (a folder's tensors of the text model, named as if it were alone, and of the tower, whose names begin
    with `model.`; the others).

    Args:
      kind: the text model's type.
      images: the tower is read, too.
    """
    unread, tower = FAMILIES[kind].unread, FAMILIES[kind].tower
    if not unread and not FAMILIES[kind].spelled:
        return stored, {}
    others = {name: t for name, t in stored.items()
              if re.fullmatch(unread, name) and not (images and re.fullmatch(tower, name))}
    own, (inside, alone) = {}, within(stored, kind)
    for name, t in stored.items():
        if name not in others:
            if re.fullmatch(tower, name):
                name = "model." + name.removeprefix("model.").replace(INNER, SHORT, 1)
            else:
                name = alone + name.removeprefix(inside) if name.startswith(inside) else name
                name = _respelled(name, FAMILIES[kind].spelled)
            own[name] = dataclasses.replace(t, name=name)
    return own, others


def _respelled(name: str, pairs) -> str:
    """Returns a name whose beginning is one of `pairs` with the other beginning of that pair."""
    return next((ours + name.removeprefix(theirs) for theirs, ours in pairs if name.startswith(theirs)), name)


def within(names, kind: str) -> tuple[str, str]:
    """Returns (how the names of the text model's tensors begin in a folder of several parts, how they begin where it is
    alone): the first of the family's pairs that fits a name, else its first one.

    names: of the folder's tensors. kind: the text model's type.
    """
    pairs = FAMILIES[kind].within
    return next((pair for pair in pairs if any(name.startswith(pair[0]) for name in names)), pairs[0])


def tower_layout(stored: dict[str, tensorfile.Stored], kind: str) -> dict:
    """Returns how the tensors of a folder's tower are called: `flat` if their names do not begin with `model.`, `inner`
    if those of SigLIP lie within a vision_model."""
    names = [name for name in stored if re.fullmatch(FAMILIES[kind].tower, name)]
    flat, inner = any(not name.startswith("model.") for name in names), any(INNER in name for name in names)
    return ({"flat": True} if flat else {}) | ({"inner": True} if inner else {})


def report(folder, others) -> None:
    """Logs (info) which parts of a folder are not read, with their numbers of tensors; nothing if all are. others:
    their tensors' names.
    """
    counts = collections.Counter(".".join(name.split(".")[:1 + name.startswith("model.")]) for name in others)
    if counts:
        log.info("%s: the text model is read; left out: %s", folder,
                 ", ".join(f"{name} ({n} tensors)" for name, n in sorted(counts.items())))


def outer(config: dict) -> dict:
    """Returns the fields of a config of several parts outside its text part, without quantization_config; {} for other
    configs.
    """
    if config.get("model_type") not in NESTED:
        return {}
    return {k: v for k, v in config.items() if (k in OUTER if is_flat_config(config) else k not in KEYS)}


def tower_config(around: dict, kind: str) -> dict:
    """Returns the vision_config of a config of several parts, with the fields around it that belong to the tower. kind:
    the text model's type."""
    return {**(around.get("vision_config") or {}), **{k: around[k] for k in FAMILIES[kind].of_tower if k in around}}


def is_flat_config(config: dict) -> bool:
    """Returns whether the fields of the text part stand beside those around it."""
    return config.get("model_type") in FLAT and config.get("text_config") is None


def processors(folder: Path) -> dict[str, dict]:
    """Returns name -> content of a folder's files about images and videos (PROCESSORS), which an export writes, too.
    Raises ConfigError for a file that is not valid JSON.
    """
    out = {}
    for name in PROCESSORS:
        if (folder / name).is_file():
            try:
                out[name] = json.loads((folder / name).read_text("utf-8"))
            except ValueError as e:
                raise ConfigError(f"{folder / name}: not valid JSON ({e})") from None
    return out


def with_images(processors: dict[str, dict], fields: dict) -> dict[str, dict]:
    """Returns the files of `processors` with the fields of an image processor (data.images.resize.as_fields).

    They replace those of processor_config.json's image_processor if it has one, and of preprocessor_config.json if that
    is there or there was no other place; it is made if need be. min_pixels and max_pixels are dropped, a stored
    image_processor_type stays.
    """
    out, first = dict(processors), PROCESSORS[0]
    whole = out.get("processor_config.json", {})
    if "image_processor" in whole:
        out["processor_config.json"] = {**whole, "image_processor": _replaced(whole["image_processor"], fields)}
    if first in out or "image_processor" not in whole:
        out[first] = _replaced(out.get(first, {}), fields)
    return out


def with_videos(processors: dict[str, dict], fields: dict) -> dict[str, dict]:
    """Returns the files of `processors` with the fields of a video processor (data.images.video.as_fields).

    They replace those of processor_config.json's video_processor if it has one, else of video_preprocessor_config.json,
    which is made if need be. min_pixels and max_pixels are dropped, a stored image_processor_type stays.
    """
    out, whole = dict(processors), processors.get("processor_config.json", {})
    if "video_processor" in whole:
        out["processor_config.json"] = {**whole, "video_processor": _replaced(whole["video_processor"], fields)}
    else:
        out[PROCESSORS[2]] = _replaced(out.get(PROCESSORS[2], {}), fields)
    return out


def _replaced(stored: dict, fields: dict) -> dict:
    kept = {k: v for k, v in stored.items() if k not in ("min_pixels", "max_pixels")}
    return {**kept, **fields, **{k: stored[k] for k in ("image_processor_type",) if k in stored}}


def planned_others(source: dict, kind: str, images: bool) -> list[tensorfile.Planned] | None:
    """Returns the tensors of the source folder that do not belong to the model, unread; [] without a source folder,
    None if the folder is gone or cannot be read. Tensors that are no plain floats, and those that an export leaves out
    (Family.unwritten), are not among them.

    source: SOURCE of hf.load_config. kind: the text model's type. images: the tower belongs to the model.
    """
    if not source.get("folder"):
        return []
    try:
        found = tensorfile.list_folder(Path(source["folder"]))
    except (ConfigError, OSError):
        found = {}
    if not found:
        return None
    _, others = split(found, kind, images)
    unwritten = FAMILIES[kind].unwritten
    others = [t for t in others.values() if t.dtype in tensorfile.DTYPES and not re.fullmatch(unwritten, t.name)]
    return [tensorfile.Planned(t.name, tensorfile.DTYPES[t.dtype], t.shape, t.read) for t in others]


def place(planned: list[tensorfile.Planned], source: dict, kind: str, alone: bool, images: bool = False):
    """Returns (tensors to write, whether it is a folder of several parts).

    They are the model's, under the source's names, and the source's other tensors. If the source folder is gone, a
    warning is logged and they are the model's alone. Another warning tells of `mtp.` tensors, which are copied
    untrained.

    Args:
      planned: the model's tensors.
      source: SOURCE of hf.load_config.
      kind: the text model's type.
      alone: the text model only.
      images: the tower is among what is planned.
    """
    others = [] if alone else planned_others(source, kind, images)
    if others is None:
        log.warning("%s, the source of the exported model, cannot be read: the text model is exported alone, without "
                    "the tensors that were left out; restore the folder and export again to have them",
                    source["folder"])
        others, alone = [], True
    if any(t.name.startswith("mtp.") for t in others):
        log.warning("export: the mtp tensors are copied as they were and have not been trained: speculation with them "
                    "accepts fewer tokens of the trained model")
    spelled, is_nested = FAMILIES[kind].spelled, bool(source.get("outer")) and not alone
    if not is_nested and not spelled:
        return planned + others, False
    inside, begin = source.get("within") or FAMILIES[kind].within[0]

    def there(name: str) -> str:
        if re.fullmatch(FAMILIES[kind].tower, name):
            name = name.replace(SHORT, INNER, 1) if source.get("inner") else name
            return name.removeprefix("model.") if source.get("flat") else name
        name = _respelled(name, [pair[::-1] for pair in spelled])
        return inside + name.removeprefix(begin) if name.startswith(begin) else name

    return [dataclasses.replace(t, name=there(t.name)) for t in planned] + others, is_nested
