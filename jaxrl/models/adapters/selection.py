"""Selects the modules that get an adapter, with rank and scale, by PEFT's rules on Hugging Face's names.

Sources: PEFT 0.21, tuners/tuners_utils.py (check_target_module_exists), utils/other.py (get_pattern_key,
_set_trainable).
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from jaxrl.errors import ConfigError
from jaxrl.models.adapters import HEAD, Adapter, Target, adaptable, head_entry, module_of
from jaxrl.models.families import FAMILIES
from jaxrl.models.io import hf
from jaxrl.models.io.tensorfile import shortened
from jaxrl.models.vision.rows import TOWERS, module_names

ALL_LINEAR, EMBEDDING = "all-linear", module_of(hf.EMBEDDING)


# ---- the modules of a model ------------------------------------------------------------------------------------------

class Place(NamedTuple):
    """The location of a module's tensor: its Entry of the parameter table, and the index along its stacked axes."""

    entry: Any
    index: tuple[int, ...]


def tensors(model) -> dict[str, Place]:
    """Returns {HF name: Place} of the tensors of the base, in the order of the layers; a tied output matrix has the
    place of the embedding."""
    found = {name: Place(entry, index) for entry in model.base.entries
             for index, name in zip(entry.indices, entry.hf_names, strict=True)}
    if model.config.tied:
        found[hf.HEAD] = found[hf.EMBEDDING]
    return {name: found[name] for name in sorted(found, key=hf.order)}


def linears(model) -> dict[str, tuple[Place, ...]]:
    """Returns {HF name: Places} of the modules that can have an adapter, in the order of the layers.

    A module has the Place of its kernel, or those of all parts of a packed kernel, in their order (models.io.parts).
    """
    found: dict[str, list[Place]] = {}
    for name, place in tensors(model).items():
        if adaptable(place.entry):
            found.setdefault(module_of(name), []).append(place)
    return {name: tuple(sorted(places, key=lambda place: place.entry.row.part)) for name, places in found.items()}


def adapted(model) -> dict[str, tuple[Place, ...]]:
    """Returns {HF name: Places} of the modules that can have an adapter (`linears`), and of the output matrix.

    The output matrix has a Place of its own for its adapter, even where its kernel is the embedding.
    """
    return linears(model) | {HEAD: (Place(head_entry(model.base.entries), ()),)}


def hf_shape(places: tuple[Place, ...]) -> tuple[int, int]:
    """Returns (outputs, inputs) of the kernel in the HF folder, from the Places of a module (`linears`)."""
    return sum(place.entry.hf_shape[0] for place in places), places[0].entry.hf_shape[1]


def without_adapters(model) -> list[str]:
    """Returns transformers' names of the linear maps that cannot have an adapter: experts and their routers, and of a
    tower the first product and Gemma 3's projector.
    """
    return [outer_name(model, module_of(name)) for name, place in tensors(model).items()
            if place.entry.inputs and not place.entry.row.adapts]


def unread_modules(model) -> list[str]:
    """Returns transformers' names of the linear maps of a tower that stands beside a text model and is not read; []
    where it is read, and without a tower.
    """
    kind = FAMILIES[model.config.family].vision
    return module_names(kind) if kind and model.config.vision is None else []


def outer_name(model, name: str) -> str:
    """Returns transformers' name of a tensor or module: a text model with a tower lies within another model there, so
    that "model." becomes "model.language_model."; other names are unchanged.
    """
    family = FAMILIES[model.config.family]
    if family.vision and name.startswith("model.") and not re.fullmatch(family.tower, f"{name}."):
        return "model.language_model." + name.removeprefix("model.")
    return name


def modules_of(model) -> list[str]:
    """Returns transformers' names of all modules that hold tensors and of the modules that contain them: the names that
    modules_to_save may contain.
    """
    owners = [outer_name(model, module_of(tensor)) for tensor in tensors(model)]
    return list(dict.fromkeys(name for owner in owners for name in around(owner)))


def around(module: str) -> list[str]:
    """Returns a module's name and those of the modules that contain it, the outermost first."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


# ---- which of them ---------------------------------------------------------------------------------------------------

class Selection(NamedTuple):
    """The fields of PEFT's LoraConfig that select modules, under PEFT's names.

    A text in target_modules or exclude_modules is a pattern for whole names ("all-linear" in target_modules: every
    linear map); a tuple holds names or their ends. () excludes nothing, saves nothing, and keeps all layers. The
    patterns' tables map a pattern for the end of a name to a number.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    rank_pattern: dict = {}
    alpha_pattern: dict = {}
    modules_to_save: tuple[str, ...] = ()


OPTIONS = {"target_modules": "lora.targets", "exclude_modules": "lora.exclude", "layers_to_transform": "lora.layers",
           "rank_pattern": "lora.rank_pattern", "alpha_pattern": "lora.alpha_pattern",
           "modules_to_save": "lora.modules_to_save"}


def selection_of(options) -> Selection:
    """Converts config.lora to the Selection with the same options of PEFT (target_modules, rank_pattern, ...). alpha
    None = the rank.

    Raises ConfigError for malformed entries of rank_pattern or alpha_pattern.
    """
    alpha = options.rank if options.alpha is None else options.alpha
    return Selection(options.rank, alpha, options.rslora, _option(options.targets), _option(options.exclude),
                     tuple(options.layers), table("rank_pattern", options.rank_pattern, int),
                     table("alpha_pattern", options.alpha_pattern, float), tuple(options.modules_to_save))


def table(name: str, entries, kind) -> dict:
    """Returns pattern -> number of "pattern=number" entries (or of a table), in their order; of equal patterns the last
    number, at the first one's place. name: of the option in config.lora. kind: int or float.

    Raises ConfigError for other entries, patterns that are no regular expression, and numbers not above 0.
    """
    out = {}
    for entry in [f"{k}={v}" for k, v in entries.items()] if hasattr(entries, "items") else entries:
        pattern, _, number = entry.rpartition("=")
        try:
            out[pattern] = kind(number)
            re.compile(pattern)
        except (ValueError, re.error):
            out = {}
        if not out or not pattern or not out[pattern] > 0:
            example = "q_proj=8" if kind is int else "q_proj=16"
            raise ConfigError(f"lora.{name} entry {entry!r}: write 'pattern=number' with a regular expression for the "
                              f"end of modules' names and a number above 0, for example {example!r}")
    return out


def _option(names) -> str | tuple[str, ...]:
    """Returns the names, or the one entry that is a keyword of PEFT's or a pattern (no module
    name has its characters).
    """
    names = tuple(names)
    one = names[0] if len(names) == 1 else ""
    return one if one.lower() == ALL_LINEAR or re.search(r"[^\w.]", one) else names


def _listed(names, key: str) -> bool:
    """Applies PEFT's rule for target_modules and exclude_modules."""
    if isinstance(names, str):
        return re.fullmatch(names, key) is not None
    return any(key == name or key.endswith(f".{name}") for name in names)


def _first(patterns: dict, key: str):
    """Returns the value of the first key that matches the end of a name, or None."""
    return next((value for p, value in patterns.items() if re.match(rf"(.*\.)?({p})$", key)), None)


def _layer(key: str) -> int | None:
    found = re.match(r".*?\.[^.]*\.(\d+)\.", key)
    return int(found[1]) if found else None


def resolved(chosen: Selection, model, strict: bool, head: bool = False) -> Adapter:
    """Returns the Adapter that a Selection gives for a model: its targets, with rank and scale, and saved modules.

    Args:
      chosen: the Selection. model: the Model, of whose base the modules are.
      strict: every entry must match something, as for jaxrl's options; PEFT's own folders may name more.
      head: whether the output matrix may have one.

    Of a tied matrix both modules are saved if one is named; without `strict` that is refused.

    Raises ConfigError, naming the option, for entries that match nothing and layers beside a pattern (strict), for
    experts, routers, a tower's first product, embeddings and (without `head`) output matrices among the targets, for
    ranks that are no whole numbers from 1, and if no target is left. Without `strict` a malformed pattern is re.error.
    """
    modules = linears(model)
    every = [EMBEDDING, *modules, HEAD]  # what PEFT has adapters for
    outer = {key: outer_name(model, key) for key in every}
    _refuse_experts(chosen, without_adapters(model))
    if strict:
        known = [*outer.values(), *without_adapters(model), *unread_modules(model)]
        _check_entries(chosen, known, modules_of(model))
    names, save = chosen.target_modules, chosen.modules_to_save
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        every = [name for name, places in modules.items() if not places[0].entry.row.by_name]
        names = tuple(dict.fromkeys(name.rpartition(".")[2] for name in every))
    targets = [key for key, name in outer.items() if _listed(names, name)
            and not _listed(chosen.exclude_modules, name)
            and not any(re.match(rf"(^|.*\.){m}($|\..*)", name) for m in save)
            and (not chosen.layers_to_transform or _layer(name) in chosen.layers_to_transform)]
    if refused := [outer[key] for key in targets if key == EMBEDDING or key == HEAD and not head]:
        raise ConfigError(f"lora.targets={shown(chosen.target_modules)} takes {' and '.join(refused)} in: adapters on "
                          "embeddings are not served, and those on output matrices by jaxrl serve tinker alone; leave "
                          "them out (lora.exclude), or train them whole with lora.modules_to_save")
    if not targets:
        raise ConfigError(f"lora.targets={shown(chosen.target_modules)}: nothing is left after lora.exclude="
                          f"{shown(chosen.exclude_modules)}, lora.layers={chosen.layers_to_transform} and "
                          f"lora.modules_to_save={save}; modules are {shortened([outer[key] for key in modules])}")
    return Adapter(tuple(_target(chosen, key, outer[key]) for key in targets), _saved(save, model, strict))


def _refuse_experts(chosen: Selection, experts: list[str]) -> None:
    """Raises ConfigError for names of experts; all-linear leaves them out, as PEFT does on transformers' models, where
    they are no linear modules.
    """
    names = chosen.target_modules
    if isinstance(names, str) and names.lower() == ALL_LINEAR:
        return
    taken = [key for key in experts if _listed(names, key) and not _listed(chosen.exclude_modules, key)
             and (not chosen.layers_to_transform or _layer(key) in chosen.layers_to_transform)]
    if taken:
        if all(key.startswith(TOWERS) for key in taken):
            raise ConfigError(f"lora.targets={shown(names)} takes {shortened(taken, 2)} in: adapters on the first "
                              f"product of a tower are not supported; leave it out (lora.exclude={taken[0]!r})")
        raise ConfigError(f"lora.targets={shown(names)} takes {shortened(taken, 2)} in: adapters on experts and their "
                          "routers are not supported; leave them out (lora.exclude="
                          "'.*\\.experts\\..*'), adapt attention alone (lora.targets="
                          "q_proj,k_proj,v_proj,o_proj, or all-linear), or train them whole (lora.modules_to_save)")


def _target(chosen: Selection, key: str, name: str) -> Target:
    rank, alpha = _first(chosen.rank_pattern, name), _first(chosen.alpha_pattern, name)
    rank, alpha = chosen.r if rank is None else rank, chosen.lora_alpha if alpha is None else alpha
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"lora.rank_pattern gives {name} the rank {rank!r}: ranks are whole numbers from 1")
    return Target(key, rank, alpha / (math.sqrt(rank) if chosen.use_rslora else rank))


def _saved(save, model, strict: bool) -> tuple[str, ...]:
    """Returns the modules whose tensors are trained whole. A tied matrix is both of its modules: PEFT would train a
    copy for one use, and two copies only stay equal here.
    """
    wanted = [key for key in modules_of(model) if any(key.endswith(name) for name in save)]
    owners = dict.fromkeys(module_of(name) for name in tensors(model))
    found = [key for key in owners if any(f"{outer_name(model, key)}.".startswith(f"{a}.") for a in wanted)]
    one = {EMBEDDING, HEAD} & set(found)
    if model.config.tied and len(one) == 1:
        if not strict:
            raise ConfigError(f"modules_to_save={tuple(save)} holds {one.pop()} alone, but {EMBEDDING} and {HEAD} are "
                              "one matrix in this model: the adapter was trained on a model that this is not")
        found = [key for key in owners if key in (*found, EMBEDDING, HEAD)]
    return tuple(found)


def shown(names) -> str:
    """Returns names as text for messages."""
    return repr(names) if isinstance(names, str) else f"({', '.join(map(repr, names))})"


def _check_entries(chosen: Selection, modules: list[str], outer: list[str]) -> None:
    """Raises ConfigError for the first entry that fits no module."""
    def refuse(field, value, what=None):
        raise ConfigError(f"{OPTIONS[field]}: {value!r} matches no module; names are {shortened(what or modules)}")

    for field in ("target_modules", "exclude_modules"):
        names = getattr(chosen, field)
        for name in [names] if isinstance(names, str) else names:
            if name.lower() == ALL_LINEAR and field == "target_modules":
                continue
            try:
                fits = any(_listed(name if isinstance(names, str) else [name], key) for key in modules)
            except re.error as e:
                raise ConfigError(f"{OPTIONS[field]}: {name!r} is not a regular expression ({e})") from None
            if not fits:
                refuse(field, name)
    if chosen.layers_to_transform and isinstance(chosen.target_modules, str) \
            and chosen.target_modules.lower() != ALL_LINEAR:
        raise ConfigError(f"lora.layers={chosen.layers_to_transform} with the pattern lora.targets="
                          f"{chosen.target_modules!r}: PEFT has no such adapter; write the layers into the pattern, or "
                          "name the modules in a list")
    layers = sorted({layer for layer in map(_layer, modules) if layer is not None})
    for layer in chosen.layers_to_transform:
        if layer not in layers:
            raise ConfigError(f"lora.layers: there is no layer {layer}; they are {layers[0]} to {layers[-1]}")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(chosen, field):
            if not any(_first({pattern: True}, key) for key in modules):
                refuse(field, pattern)
    for name in chosen.modules_to_save:
        if not any(key.endswith(name) for key in [*outer, *modules]):
            refuse("modules_to_save", name, outer)
