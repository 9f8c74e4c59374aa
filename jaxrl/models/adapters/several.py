"""Several adapters that train side by side over one frozen base, each on the tokens that are its own.

Their A lie beside each other and their B one over the other, A [*inputs, R], B [R, *outputs], R the sum of their ranks;
`scale` [K+1, R] has in row k the scale of adapter k at its own columns, and 0 elsewhere. With the number k(t) of a
token's adapter (0: none, which is the base)

    y_t = x_t W + ((x_t A) * scale[k(t)]) B

so that one product serves all of them, and the gradient of what is not a token's own is exactly zero. What a scanned
stack, ranks that differ along it, sharding and a quantised base mean for an adapter they mean for several.

Each of them alone is an adapter as models.adapters has it: `alone` gives its model, `taken` its leaves, `joined` puts
leaves of all of them side by side. Names are ours, flat: layer_0/mlp/up/lora/a.

Legend: K adapters, R columns of all of them.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxrl.models import adapters
from jaxrl.models.adapters import NODE, Adapter, Target


def together(parts: dict[str, Adapter]) -> Adapter:
    """One adapter of several, in the order of `parts`. Raises ValueError for what only one can be."""
    ranks: dict[str, int] = {}
    for name, part in parts.items():
        if part.saved or part.shifted or part.decomposed or part.dropout or part.parts:
            raise ValueError(f"adapter {name!r}: several adapters are plain ones, of one base")
        for t in part.targets:
            ranks[t.name] = ranks.get(t.name, 0) + t.rank
    bits = {part.quantized for part in parts.values()}
    if len(bits) != 1:
        raise ValueError("several adapters need a base that they share")
    targets = tuple(Target(name, rank, 1.0) for name, rank in ranks.items())
    return Adapter(targets, quantized=bits.pop(), parts=tuple(parts.items()))


def names(model) -> tuple[str, ...]:
    """Of the adapters, in the order of their numbers 1, 2 ...; () where there is one or none."""
    return tuple(name for name, _ in model.adapter.parts) if model.adapter is not None else ()


def alone(model, k: int):
    """The model with adapter k (from 0) and no other one."""
    return dataclasses.replace(model, adapter=model.adapter.parts[k][1])


def _columns(model):
    """(path of a module's leaves, its kernel's stacked axes, first and last column of each adapter) per kernel."""
    for entry in model.base.entries:
        own = adapters.widths(model.adapter, entry) if adapters.adaptable(entry) else ()
        if any(own):
            ends = [sum(own[:k + 1]) for k in range(len(own))]
            yield "/".join((*entry.path[:-1], NODE)), entry.stacked, list(zip([0, *ends], ends, strict=False))


def taken(model, k: int, flat: dict) -> dict:
    """What of flat leaves (or of some of them) is of adapter k (from 0): its own columns, as `alone` has them, and all
    that is no adapter's. Pure."""
    out = {name: x for name, x in flat.items() if not adapters.is_adapter(name)}
    for module, lead, columns in _columns(model):
        first, end = columns[k]
        if first == end:
            continue
        own = slice(first, end)
        cut = {"a": (..., own), "b": (*(slice(None),) * lead, own), "scale": (..., k + 1, first)}
        leaves = {f"{module}/{leaf}": where for leaf, where in cut.items()}
        out |= {name: flat[name][where] for name, where in leaves.items() if name in flat}
    return out


def joined(model, each: list[dict]) -> dict:
    """Leaves of all adapters, each's as `alone` has them, side by side: the inverse of `taken`. Pure."""
    out = {name: x for flat in each for name, x in flat.items() if not adapters.is_adapter(name)}
    for module, lead, columns in _columns(model):
        for leaf, axis in (("a", -1), ("b", lead)):
            own = [flat[f"{module}/{leaf}"] for flat in each if f"{module}/{leaf}" in flat]
            out |= {f"{module}/{leaf}": jnp.concatenate(own, axis)} if own else {}
        scales = [flat.get(f"{module}/scale") for flat in each]
        if any(scale is not None for scale in scales):
            out[f"{module}/scale"] = _scales(scales, columns)
    return out


def _scales(scales, columns):
    """[*stacked, K+1, R] of each adapter's scale [*stacked], None where it has no columns."""
    one = next(scale for scale in scales if scale is not None)
    width = columns[-1][1]
    rows = [jnp.zeros((*one.shape, width), one.dtype)]
    for scale, (first, end) in zip(scales, columns, strict=True):
        own = jnp.zeros_like(one) if scale is None else scale
        rows.append(jnp.zeros((*one.shape, width), one.dtype).at[..., first:end].set(own[..., None]))
    return jnp.stack(rows, -2)


def own_columns(few, scale_KxR, numbers):
    """[..., R] numbers between A and B, scaled where they are of the adapter of their token, else 0 whatever they are.

    Args:
      numbers: [...] int32, 0 = none. None raises ValueError: whose tokens they are must be said.
    """
    if numbers is None:
        raise ValueError("several adapters: this forward pass was not told whose adapter each token has")
    own = scale_KxR[numbers]
    return jnp.where(own != 0, few * own, 0)
