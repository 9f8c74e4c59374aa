"""Converts weights to the decoding layout for GPUs: arrays per layer, joined for products of the same input.

A scan over layers cuts each layer's weights out of arrays that hold all layers. A training step does so for thousands
of tokens; a decoding step does so for one token a slot, and on GPUs XLA copies the weights first, because its products
take whole arrays only (one H200, 1.5B, 256 slots: 1.5 of 7.5 ms a token; benchmarks/results/h200_first_light). So a
sampler there has a copy of its own in this layout, made when weights are published.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp

from jaxrl.kernels.low_precision import DEFAULT
from jaxrl.models import decoder, parameters


def for_decoding(model, mesh):
    """Returns the model as a sampler on a mesh computes it.

    On GPUs its layers are unstacked. Its products of one input are joined there, too, if it has no adapter, mesh.tp is
    1 and `matmul` is no scheme of low precision. Elsewhere the model is unchanged, and so is one whose adapters leave
    out layers, which a scan fills up with zeros.
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return model
    own = dataclasses.replace(model, scan_layers=False)
    if by_layer(model, model.tree(lambda entry: ""), cut=lambda leaf: leaf) != own.tree(lambda entry: ""):
        return model
    plain = model.adapter is None and model.matmul == DEFAULT and mesh.shape["tp"] == 1
    return dataclasses.replace(own, joined=plain)


def joined(entries) -> tuple[parameters.Entry, ...]:
    """Returns the entries of a model whose layers are not stacked, with one entry for those that `parameters.JOINED`
    names together, in the order of their paths. A joined entry has the outputs of its parts flat in one axis, and no HF
    names.
    """
    left = {entry.path: entry for entry in entries}
    for path in list(left):
        for parts, name in parameters.JOINED.items():
            paths = [(*path[:-2], part, path[-1]) for part in parts]
            if path == paths[0] and all(p in left and not left[p].row.stacked for p in paths):  # experts stay apart
                found = [left.pop(p) for p in paths]
                into = (*path[:-2], name, path[-1])
                inputs = found[0].inputs
                width = sum(math.prod(entry.shape[inputs:]) for entry in found)
                row = parameters.Row("/".join(into[1:]), (*found[0].axes[:inputs], None), "", inputs)
                left[into] = parameters.Entry(row, into, (*found[0].shape[:inputs], width), row.axes, (), 0)
    return tuple(sorted(left.values(), key=lambda entry: entry.path))


def laid_out(source, target, params):
    """Converts the parameter tree of the Model `source` to the layout of the Model `target`: the same model, or
    `for_decoding` of it. Pure.
    """
    if not target.scan_layers:
        params = by_layer(source, params)
    return _joined(target, params) if target.joined else params


def by_layer(model, params, cut=None) -> dict:
    """Converts a model's tree to that of the same model without scanned layers: the repetitions of layers/sub_<j>
    become layer_<i>, those of a tower's group_<g> too.

    params: arrays or other leaves. cut: leaf -> what one repetition of it becomes, for leaves that are no arrays; None
    = its slice along the first axis. Pure.
    """
    def repetition(tree, n):
        return jax.tree.map(cut or (lambda a: a[n]), tree)

    before, repeats, _ = decoder.spans(model.config, model.scan_layers)
    out = {name: tree for name, tree in params.items() if name != "layers"}
    for n, j in itertools.product(range(repeats), range(model.config.period)):
        out[f"layer_{len(before) + n * model.config.period + j}"] = repetition(params["layers"][f"sub_{j}"], n)
    if model.config.vision is not None and model.scan_layers:
        tower = {name: tree for name, tree in params["vision"].items() if not name.startswith("group_")}
        for g, group in enumerate(model.config.vision.groups):
            for n, number in enumerate(group):
                tower[f"layer_{number}"] = repetition(params["vision"][f"group_{g}"], n)
        out["vision"] = tower
    return out


def _joined(target, params) -> dict:
    """Returns the arrays of `joined` entries: the outputs of the parts, flat and concatenated."""
    def at(*path):
        return functools.reduce(lambda node, key: node[key], path, params)

    def value(entry):
        *module, name, leaf = entry.path
        if name not in parameters.PARTS:
            return at(*entry.path)
        parts = [at(*module, part, leaf) for part in parameters.PARTS[name]]
        return jnp.concatenate([part.reshape(*entry.shape[:-1], -1) for part in parts], axis=-1)

    return target.tree(value)
