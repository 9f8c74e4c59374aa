"""Checks of lora.adapters: several adapters over one base, each on rows of its own."""

from __future__ import annotations

import difflib
import re

from jaxrl.config.adapter_table import LORA_OWN, ROWS, listed
from jaxrl.config.load import editable, get
from jaxrl.config.registry import recipe_of
from jaxrl.config.schema import SCHEMA
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.algorithm import resolved_algorithm
from jaxrl.resolve.checks.data import entry
from jaxrl.resolve.checks.unread import unread, unread_decay
from jaxrl.rollout.engines import engine_name
from jaxrl.training.optimizer import ADAPTERS_OWN, adapters_optimizer, check_name

SERVED = ("sft", "rl")
OWN = (*ROWS, *LORA_OWN, *ADAPTERS_OWN)


def several_adapters(cfg) -> list[str]:
    """Returns the problems of lora.adapters: those of single adapters alone, if there are any; else those of sources
    and held-out sets, which belong to one adapter each, and of options that do not work with several."""
    out = [p for name, options in cfg.lora.adapters.items() for p in _adapter(name, options)]
    out = out or [p for name in cfg.lora.adapters for p in _optimizer(cfg, name)]
    return out or [*_rows(cfg, "sources", list(cfg.data.sources), "data.sources", "a source"),
                   *_rows(cfg, "eval", _held_out(cfg), "eval.sets", "a held-out set"), *_beside(cfg)]


def _adapter(name, options) -> list[str]:
    where = f"lora.adapters.{name}"
    if not re.fullmatch(r"[\w-]+", name):
        return [f"lora.adapters: the name {name!r} is not made of letters, digits, '_' and '-'"]
    if not hasattr(options, "keys"):
        return [f"{where}={options!r}: must be a table such as {{'sources': ('math',), 'lr': 1e-4}}"]
    out = []
    for key, value in options.items():
        if key not in OWN:
            near = difflib.get_close_matches(key, OWN, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            out.append(f"{where}.{key}: unknown; {hint}an adapter has {', '.join(OWN)}")
        elif key in ROWS:
            names = listed(value) if isinstance(value, str | list | tuple) else ()
            if not names or not all(isinstance(n, str) for n in names):
                out.append(f"{where}.{key}={value!r}: must be a name, or several")
        else:
            out += _own(where, key, value)
    if "sources" not in options:
        out.append(f"{where} has no sources: name those of data.sources whose rows it learns from")
    return out


def _own(where, key, value) -> list[str]:
    """Returns the problems of an entry that is an option of `lora` or of `optimizer`."""
    if key == "rank" and isinstance(value, int) and value < 1:
        return [f"{where}.rank={value}: at least 1"]
    return entry(f"{where}.{key}", SCHEMA["lora" if key in LORA_OWN else "optimizer"][key], value)


def _optimizer(cfg, adapter: str) -> list[str]:
    """Returns the problems of an adapter's own entries of `optimizer`: a name that is none, and what its optimizer or
    schedule does not read."""
    whole, options = editable(cfg), cfg.lora.adapters[adapter]
    whole.optimizer = adapters_optimizer(cfg, adapter)
    mine = tuple(f"optimizer.{name}=" for name in options if name in ADAPTERS_OWN)
    found = [p for p in (*unread(whole, ("optimizer.",)), *unread_decay(whole.optimizer)) if p.startswith(mine)]
    try:
        check_name(whole.optimizer.name)
    except ConfigError as e:
        found += [str(e)] * ("name" in options)
    return [f"lora.adapters.{adapter}.{p.removeprefix('optimizer.')}" for p in found]


def _held_out(cfg) -> list[str]:
    return [entry.partition("=")[0] for entry in cfg.eval.sets] + ["heldout"] * bool(cfg.data.eval_fraction)


def _rows(cfg, kind: str, known: list[str], option: str, what: str) -> list[str]:
    """Returns the problems of sources and held-out sets, each of which must belong to one adapter."""
    named = [(adapter, name) for adapter, options in cfg.lora.adapters.items()
             for name in listed(options.get(kind, ()))]
    out = [f"lora.adapters.{adapter}.{kind}: {name} is not in {option} ({', '.join(known) or 'empty'})"
           for adapter, name in named if name not in known]
    for name in known:
        owners = [adapter for adapter, one in named if one == name]
        if len(owners) > 1:
            out.append(f"lora.adapters.{owners[1]}.{kind}: {name} is {owners[0]}'s already; {what} is of one adapter")
        elif not owners:
            out.append(f"lora.adapters: {option} has {name}, which no adapter names in its `{kind}`; {what} is of one "
                       "adapter")
    return out


def _beside(cfg) -> list[str]:
    """Returns the problems of other options that only one adapter can have, or that would couple several."""
    o, out = cfg.lora, []

    def refuse(option, value, why, remedy):
        out.append(f"{option}={value!r} with lora.adapters: {why}; {remedy}")

    for name in ("path", "modules_to_save", "dora", "dropout"):
        if get(o, name) != SCHEMA["lora"][name].default:
            refuse(f"lora.{name}", get(o, name), "several adapters are plain ones over one base", "leave it out, or "
                   "train one adapter at a time")
    if o.init not in ("default", "gaussian", "orthogonal"):
        refuse("lora.init", o.init, "each would begin as the same part of the base, or from rows of all of them",
               "choose default, gaussian or orthogonal")
    if o.publish == "merged":
        refuse("lora.publish", o.publish, "one set of weights cannot hold several", "leave it out")
    if cfg.run.recipe not in SERVED and ":" not in cfg.run.recipe:
        refuse("run.recipe", cfg.run.recipe, f"several adapters train in {' and '.join(SERVED)}", "train one at a time")
    if cfg.run.mode not in ("train", "eval"):
        refuse("run.mode", cfg.run.mode, "it knows of one set of weights", "leave lora.adapters out")
    if cfg.optimizer.offload:
        refuse("optimizer.offload", True, "a step in parts knows of one optimizer", "leave it out")
    if cfg.mesh.roles.get("policy", {}).get("rest") == "streamed":
        refuse("mesh.roles.policy.rest", "streamed", "a step in parts knows of one optimizer", "leave it out")
    for name in ("router_balance", "router_z"):
        if cfg.train[name]:
            refuse(f"train.{name}", cfg.train[name], "it is one term over the tokens of all", "set 0")
    return out + (_sampling(cfg, refuse) or [] if recipe_of(cfg).samples or _held_out(cfg) else [])


def _sampling(cfg, refuse) -> None:
    engine = engine_name(cfg)
    if engine != "jax":
        refuse("rollout.engine", engine, "the embedded sampler alone serves several side by side",
               "set rollout.engine=jax and leave rollout.servers out")
    if not recipe_of(cfg).samples:
        return
    v = resolved_algorithm(cfg)
    for name, values, why in (("advantage", ("gae", "dpo"), "a critic, or the pairs of a step, would be those of all"),
                              ("advantage_mean", ("batch",), "the mean would be over the answers of all"),
                              ("advantage_std", ("batch",), "the scale would be over the answers of all"),
                              ("whiten", (True,), "the mean would be over the tokens of all")):
        if v[name] in values:
            refuse(f"algorithm.{name}", v[name], why, "choose another, which counts by group")
    for name in ("norm_mean", "norm_std"):
        if cfg.reward[name] == "batch":
            refuse(f"reward.{name}", "batch", "the batch is that of all", "set group")
