"""Rotary embeddings as HF configs describe them, read as transformers reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.models.families import number
from jaxrl.models.rope import Rope

MROPE = {"turns": (24, 20, 20), "runs": (16, 24, 24)}  # by Family.mrope, where a config does not say it


def ropes(hf, family) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of full and of windowed layers, from `rope_parameters` or from `rope_theta` and
    `rope_scaling`; the same one twice where the family has no other for windowed layers.

    hf: HF config with the family's defaults. family: families.Family. Raises ConfigError, naming the entry, for an
    unsupported rope_type, and for tables that lack something, contradict each other, or that transformers would ignore.
    """
    scaling, tables = hf.get("rope_scaling"), hf.get("rope_parameters")
    tables = family.defaults.get("rope_parameters") if tables is None else tables
    for key, value in (("rope_scaling", scaling), ("rope_parameters", tables)):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"model config: {key}={value!r}; give a table")
    if not family.local_theta:
        table = {"rope_theta": hf["rope_theta"], **(scaling or tables or {})}
        if "original_max_position_embeddings" in hf:  # beside the table, it wins
            table["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
        rope = _rope(hf, family, table, table.get("truncate", True))
        rope = dataclasses.replace(rope, axes=_axes(hf, table, family.mrope)) if family.mrope else rope
        return rope, rope
    tables = tables or {}
    flat = sorted(set(tables) - {"full_attention", "sliding_attention", "truncate"})
    if flat:
        raise ConfigError(f"model config: rope_parameters has {', '.join(flat)} outside the tables full_attention and "
                          f"sliding_attention, where transformers does not look for a {hf['model_type']} model; put "
                          "them there")
    full = tables.get("full_attention") or {"rope_type": "default"}
    full = {"rope_theta": hf["rope_theta"], **full, **(scaling or {})}
    truncate = tables.get("truncate", True)  # transformers looks for it beside the tables, not in them
    rope, local = _rope(hf, family, full, truncate), tables.get("sliding_attention") or {}
    base = family.local_theta
    if "rope_theta" not in local:
        if not isinstance(base, str) and full["rope_theta"] == hf["rope_theta"] != base:
            raise ConfigError(f"model config: rope_theta={hf['rope_theta']!r}: transformers gives it to layers without "
                              f"window alone, and {base} to the others; name both in rope_parameters, full_attention "
                              "and sliding_attention")
        local = {"rope_theta": number(hf, base, above=0) if isinstance(base, str) else base, **local}
    return rope, _rope(hf, family, local, truncate)


def _axes(hf, table, order: str) -> tuple[int, ...]:
    """Which of a token's three positions (time, row, column) each frequency reads.

    order: "turns" (Qwen3-VL): frequencies 3k + 1 and 3k + 2 below three times a section read the row and the column,
    all others time. "runs" (Qwen2.5-VL): the first section reads time, the second the row, the third the column.
    """
    section = table.get("mrope_section", MROPE[order])
    count = (hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]) // 2
    whole = isinstance(section, list | tuple) and len(section) == 3 and all(type(n) is int and n >= 0 for n in section)
    if not whole or (sum(section) != count and ("mrope_section" in table or order == "runs")):
        raise ConfigError(f"model config: mrope_section={section!r}; give three counts of frequencies (time, row, "
                          f"column) that add up to {count}, half of head_dim")
    if table.get("mrope_interleaved") not in (None, order == "turns"):
        raise ConfigError(f"model config: mrope_interleaved={table['mrope_interleaved']!r}, but {hf['model_type']} "
                          f"models read their axes in {order} whatever it says; leave it out")
    if order == "runs":
        return tuple(axis for axis, size in enumerate(section) for _ in range(size))
    return tuple(axis if (axis := i % 3) and i < 3 * section[axis] else 0 for i in range(count))


def rotary_size(hf, family, head_dim: int) -> int:
    """Returns the number of a head's dimensions that rotate: head_dim times `partial_rotary_factor`, rounded down. The
    rotary table's factor has precedence over the config's; where the config has none, the family's `rotary_dim` stands
    for it, else it is 1.

    hf: HF config with the family's defaults. Raises ConfigError for a factor that is not above 0 and at most 1, and if
    the result is no even number from 2 on.
    """
    beside, told = hf["partial_rotary_factor"], "partial_rotary_factor={!r}"
    if beside is None and hf.get("rotary_dim") and "rotary_dim" in family.defaults:
        beside, told = number(hf, "rotary_dim", least=1, kind=int) / head_dim, f"rotary_dim={hf['rotary_dim']}"
    table = {"partial_rotary_factor": 1.0 if beside is None else beside,
             **(hf.get("rope_scaling") or hf.get("rope_parameters") or {})}
    share = number(table, "partial_rotary_factor", above=0)
    size = int(head_dim * share)
    if share > 1 or size < 2 or size % 2:
        raise ConfigError(f"model config: {told.format(share)} of head_dim={head_dim} are {size} dimensions "
                          "to turn; they are an even number within the head")
    return size


def _rope(hf, family, table, truncate) -> Rope:
    """Returns the rotary embedding of one flat table."""
    nested = [key for key, value in table.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"model config: the rotary table has tables in it ({', '.join(nested)}), which a "
                          f"{hf['model_type']} model does not read; write one flat table")
    kinds = [table[key] for key in ("rope_type", "type") if table.get(key) is not None] or ["default"]
    if len({family.rope_kinds.get(kind, kind) for kind in kinds}) > 1:
        raise ConfigError(f"model config: rope_type={kinds[0]!r} beside type={kinds[1]!r} in the rotary table, and "
                          "transformers reads the first; leave type out")
    kind, known = kinds[0], family.rope_kinds
    if kind not in known:
        raise ConfigError(f"model config: rope_type={kind!r} is not supported; choose {', '.join(known)}")
    kind = known[kind]
    if family.latent and kind not in ("default", "yarn") and table.get("mscale_all_dim"):
        raise ConfigError(f"model config: mscale_all_dim={table['mscale_all_dim']!r} beside rope_type={kind}, whose "
                          "scores would have a factor of it; it is supported with yarn alone")
    partial = {table.get("partial_rotary_factor"), hf.get("partial_rotary_factor")} - {None, 1.0}
    if partial and not family.partial_rotary:
        raise ConfigError("model config: partial_rotary_factor is not supported for this family; leave it at 1.0")
    beside, table = table, {"original_max_position_embeddings": hf["max_position_embeddings"], **table}
    theta = float(number(table, "rope_theta", above=0))
    grows = (lambda: _growth(table, beside)) if family.query_growth else dict
    if kind == "default":
        return Rope(theta=theta, **grows())
    if kind == "dynamic" and family.rope_alpha and table.get("alpha"):  # a larger base, at every length
        dim = number(hf, "head_dim", least=4, kind=int)
        return Rope(theta=theta * number(table, "alpha", above=0) ** (dim / (dim - 2)))
    if kind == "dynamic":  # its window is always the model's
        table["original_max_position_embeddings"] = hf["max_position_embeddings"]
    window = number(table, "original_max_position_embeddings", least=1, kind=int)
    if kind == "longrope":
        return Rope("longrope", theta, original_max=window, **_longrope_fields(hf, family, table, window))
    if kind == "yarn" and table.get("factor", 0) is None:
        table["factor"] = hf["max_position_embeddings"] / window
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [name for name in needed if table.get(name) is None]
    if missing:
        raise ConfigError(f"model config: rope_type={kind} needs {', '.join(missing)} beside it")
    fields: dict[str, Any] = {name: float(number(table, name, above=0)) for name in needed}
    if kind == "yarn":
        fields |= _yarn_fields({**table, "rope_theta": theta}, truncate)
    return Rope(kind=kind, theta=theta, **{"original_max": window, **fields, **grows()})


def _longrope_fields(hf, family, table, window: int) -> dict:
    """Factor, attention_factor and the two lists, a number for each pair of dimensions that turn."""
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    pairs = rotary_size(hf, family, head_dim) // 2
    fields: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        given = table.get(name)
        if not isinstance(given, list | tuple) or len(given) != pairs:
            raise ConfigError(f"model config: {name}={given!r}; rope_type=longrope needs a list of {pairs} numbers, "
                              "one for each pair of dimensions that turn")
        fields[name] = tuple(float(number(dict.fromkeys((name,), x), name, above=0)) for x in given)
    if table.get("attention_factor") is not None:
        fields["attention_factor"] = float(number(table, "attention_factor"))
    factor = hf["max_position_embeddings"] / window if table.get("factor") is None else number(table, "factor", above=0)
    return {**fields, "factor": float(factor)}


def _growth(table, given) -> dict:
    """Returns the fields of models.rope.growth. Raises for entries that the table lacks, since
    transformers has no defaults.
    """
    key, window = "llama_4_scaling_beta", "original_max_position_embeddings"
    if missing := [name for name in (key, window) if given.get(name) is None]:
        raise ConfigError(f"model config: {', '.join(missing)} missing in the rotary table; queries grow by it")
    return {"query_beta": float(number(table, key, least=0)), "original_max": number(table, window, least=1, kind=int)}


def _yarn_fields(table, truncate) -> dict:
    if table["rope_theta"] == 1:
        raise ConfigError("model config: rope_theta=1 has no wavelengths for rope_type=yarn; give a larger one")
    found = {name: table[name] for name in ("beta_fast", "beta_slow") if table.get(name)}  # 0, too, is the default
    fields = {name: float(number(found, name, above=0)) for name in found}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if table.get(name) is not None:
            fields[name] = float(number(table, name))
    return {**fields, "truncate": bool(truncate)}
