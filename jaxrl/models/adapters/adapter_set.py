"""Adapter sets: several LoRA adapters trained together over one frozen base, each on its own tokens.

The A matrices of a kernel are concatenated to A [*inputs, R], the B matrices to B [R, *outputs], where R is the sum of
the adapters' ranks. `scale` [K+1, R] holds in row k the scale of adapter k at that adapter's columns, 0 elsewhere. With
k(t) the number of a token's adapter (0: none, which is the base)

    y_t = x_t W + ((x_t A) * scale[k(t)]) B

so one product serves all adapters, and the gradient at the columns of other tokens' adapters is exactly zero. Scanned
stacks, ranks that differ along a stack, sharding and a quantised base work as for a single adapter.

A member of the set is an adapter as in models.adapters: `select_model` returns its model, `take_leaves` its leaves, and
`join_leaves` concatenates the leaves of all members. Names of leaves are flat: layer_0/mlp/up/lora/a.

Called by models.model (initialisation), models.decoder (forward), training.adapter_set, roles and the embedded engine.
Optimizers and objectives of the members are in training.adapter_set.

Legend: K adapters, R columns of all of them.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxrl.models import adapters
from jaxrl.models.adapters import NODE, Adapter, Target


def combine_adapters(parts: dict[str, Adapter]) -> Adapter:
    """Combines {name: adapter} into one Adapter that holds the set, numbered from 1 in the order of `parts`. Its
    targets have the sums of the members' ranks, and scale 1.

    Raises ValueError for a member with options that only a single adapter may have (saved modules, a shifted base,
    DoRA, dropout, members of its own), for members whose bases are quantised differently, and for no member.
    """
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


def adapter_names(model) -> tuple[str, ...]:
    """Returns the names of an adapter set in the order of their numbers 1, 2 ...; () without an adapter set."""
    return tuple(name for name, _ in model.adapter.parts) if model.adapter is not None else ()


def select_model(model, k: int):
    """Returns the model with adapter k (from 0) of its set as its only adapter."""
    return dataclasses.replace(model, adapter=model.adapter.parts[k][1])


def _columns(model):
    """Yields per adapted kernel (path of its adapter leaves, number of stacked axes, [(first, end) column of each])."""
    for entry in model.base.entries:
        own = adapters.widths(model.adapter, entry) if adapters.adaptable(entry) else ()
        if any(own):
            ends = [sum(own[:k + 1]) for k in range(len(own))]
            yield "/".join((*entry.path[:-1], NODE)), entry.stacked, list(zip([0, *ends], ends, strict=False))


def take_leaves(model, k: int, flat: dict) -> dict:
    """Returns the leaves of adapter k (from 0), shaped as in `select_model`, and all leaves that belong to no adapter,
    by flat name. Pure.

    Args:
      model: with an adapter set.
      k: number of the adapter, from 0.
      flat: all leaves of the model by flat name, or some of them.
    """
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


def join_leaves(model, each: list[dict]) -> dict:
    """Concatenates the leaves of all members into those of the set: the inverse of `take_leaves`. Pure.

    Args:
      model: with an adapter set.
      each: flat leaves of each member, in the order of their numbers, shaped as in `select_model`. A leaf that belongs
        to no adapter is returned from the last member that has it.
    """
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
    """Returns the scales [*stacked, K+1, R] from each adapter's [*stacked], None where it has no columns."""
    one = next(scale for scale in scales if scale is not None)
    width = columns[-1][1]
    rows = [jnp.zeros((*one.shape, width), one.dtype)]
    for scale, (first, end) in zip(scales, columns, strict=True):
        own = jnp.zeros_like(one) if scale is None else scale
        rows.append(jnp.zeros((*one.shape, width), one.dtype).at[..., first:end].set(own[..., None]))
    return jnp.stack(rows, -2)


def scale_columns(few, scale_KxR, numbers):
    """Scales the activations between A and B at the columns of each token's adapter, and sets all others to 0.

    Args:
      few: [..., R] activations x A, fp32 or better. Non-finite values at other adapters' columns become 0, too.
      scale_KxR: [K+1, R] in the same dtype, row 0 is zero.
      numbers: [...] int32 number of each token's adapter, 0 = none.

    Returns [..., R]. Raises ValueError if `numbers` is None.
    """
    if numbers is None:
        raise ValueError("adapter set: the forward pass needs each token's adapter number (PackedBatch.adapters)")
    own = scale_KxR[numbers]
    return jnp.where(own != 0, few * own, 0)
