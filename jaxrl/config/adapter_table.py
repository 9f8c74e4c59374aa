"""lora.adapters: which adapters a run trains, whose rows are whose, and what each of them has of its own.

    c.data.sources = {"math": {"path": "math.jsonl"}, "code": {"path": "code.jsonl"}}
    c.lora.rank = 16
    c.lora.adapters = {"math": {"sources": ("math",), "eval": ("math_test",)},
                       "code": {"sources": ("code",), "rank": 8, "lr": 2e-4, "max_grad_norm": 0.5}}

Adapters have numbers, 1, 2 ... in the order of their names; 0 is none.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.config.load import editable, put

LORA_OWN = ("rank", "alpha")  # options of `lora` that an adapter may have of its own
ROWS = ("sources", "eval")    # names in data.sources and in eval.sets of the rows that are its own


def names(config) -> tuple[str, ...]:
    """Returns the names of lora.adapters in the order of their numbers; () without lora.adapters."""
    return tuple(sorted(config.lora.adapters))


def listed(value) -> tuple[str, ...]:
    """Returns one name or several names as a tuple of names."""
    return (value,) if isinstance(value, str) else tuple(value)


def numbers(config, kind: str) -> Mapping[str, int]:
    """Returns name of a source ("sources") or of a held-out set ("eval") -> number of its
    adapter; {} without lora.adapters.
    """
    return {name: k for k, adapter in enumerate(names(config), 1)
            for name in listed(config.lora.adapters[adapter].get(kind, ()))}


def number_of(config, kind: str, name: str) -> int:
    """Returns the number of the adapter of a source or held-out set; 0 without lora.adapters. Raises KeyError for rows
    without an adapter, which the checks refuse.
    """
    return numbers(config, kind)[name] if config.lora.adapters else 0


def lora_of(config, adapter: str):
    """Returns config.lora for one adapter alone, with its own rank and alpha if it has any, and without lora.adapters.

    The config is not changed. Raises KeyError for an unknown adapter.
    """
    c = editable(config)
    for name in LORA_OWN:
        if name in config.lora.adapters[adapter]:
            put(c, f"lora.{name}", config.lora.adapters[adapter][name])
    c.lora.adapters = {}
    return c.lora
