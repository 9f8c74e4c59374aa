"""Folders that hold more than the text model: an image tower, heads that predict further tokens (`mtp.`). The text
model is read out of them, and an export writes the rest back as it was."""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from pathlib import Path

from jaxrl.errors import ConfigError
from jaxrl.models.families import FAMILIES, NESTED
from jaxrl.models.io import tensorfile

log = logging.getLogger("jaxrl")
KEYS = ("text_config", "quantization_config")


def split(stored: dict[str, tensorfile.Stored], kind: str):
    """Returns (a folder's tensors of the text model, named as if it were alone; the others). kind:
    the text model's type.
    """
    unread = FAMILIES[kind].unread
    if not unread:
        return stored, {}
    others = {name: t for name, t in stored.items() if re.fullmatch(unread, name)}
    own, (inside, alone) = {}, within(stored, kind)
    for name, t in stored.items():
        if name not in others:
            name = alone + name.removeprefix(inside) if name.startswith(inside) else name
            own[name] = dataclasses.replace(t, name=name)
    return own, others


def within(names, kind: str) -> tuple[str, str]:
    """Returns how the names of the text model's tensors begin in a folder of several parts, and where it is alone."""
    pairs = FAMILIES[kind].within
    return next((pair for pair in pairs if any(name.startswith(pair[0]) for name in names)), pairs[0])


def report(folder, others) -> None:
    """Logs what of a folder is not read."""
    counts = collections.Counter(".".join(name.split(".")[:1 + name.startswith("model.")]) for name in others)
    if counts:
        log.info("%s: the text model is read; left out: %s", folder,
                 ", ".join(f"{name} ({n} tensors)" for name, n in sorted(counts.items())))


def outer(config: dict) -> dict:
    """Returns the fields of a config of several parts outside its text part; {} for other configs."""
    return {k: v for k, v in config.items() if k not in KEYS} if config.get("model_type") in NESTED else {}


def planned_others(source: dict, kind: str) -> list[tensorfile.Planned] | None:
    """Returns the tensors of the source folder that do not belong to the text model, unread; None if
    the folder is gone.
    """
    if not source.get("folder"):
        return []
    try:
        found = tensorfile.list_folder(Path(source["folder"]))
    except (ConfigError, OSError):
        found = {}
    if not found:
        return None
    _, others = split(found, kind)
    unwritten = FAMILIES[kind].unwritten
    others = [t for t in others.values() if t.dtype in tensorfile.DTYPES and not re.fullmatch(unwritten, t.name)]
    return [tensorfile.Planned(t.name, tensorfile.DTYPES[t.dtype], t.shape, t.read) for t in others]


def place(planned: list[tensorfile.Planned], source: dict, kind: str, alone: bool):
    """Returns (tensors to write, whether it is a folder of several parts).

    They are the text model's, under its names there, and the source's other tensors. alone: the text model only.
    """
    others = [] if alone else planned_others(source, kind)
    if others is None:
        log.warning("%s, the source of the exported model, cannot be read: the text model is exported alone, without "
                    "the tensors that were left out; restore the folder and export again to have them",
                    source["folder"])
        return planned, False
    if any(t.name.startswith("mtp.") for t in others):
        log.warning("export: the mtp tensors are copied as they were and have not been trained: speculation with them "
                    "accepts fewer tokens of the trained model")
    if alone or not source.get("outer"):
        return planned + others, False
    inside, begin = source.get("within") or FAMILIES[kind].within[0]
    names = {t.name: inside + t.name.removeprefix(begin) if t.name.startswith(begin) else t.name for t in planned}
    return [dataclasses.replace(t, name=names[t.name]) for t in planned] + others, True
