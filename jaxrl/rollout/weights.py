"""The policy's weights as Hugging Face tensors, a few layers at a time: for every engine that keeps its own model.

    def publish(self, params, version):
        for chunk in weights.chunks(self.model, params, "bfloat16", most_bytes=256_000_000):
            self.load(chunk)                        # [(HF name, array)]

They are cast and transposed on the device by one jitted function, so that at most a chunk is held besides the model.
A run of several processes may spread `params` over all of them: processes.exchange.local_copies makes of these a copy
that one process can use by itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models.io import parts
from jaxrl.sharding import memory


def names(model, tower: bool = True) -> list[str]:
    """Returns the names of all HF tensors of a model in the order of `chunks`. A tied head is not included.

    model: jaxrl.models.Model. tower: whether a vision tower's are included."""
    rename = _renaming(model)
    return [rename(parts.whole_of(name)) for group in _layers(model, tower) for entry, i in group
            for name in [entry.hf_names[i]] if not entry.row.part or not entry.row.part[1]]


def chunks(model, params, dtype, most_bytes: int, host: bool = True,
           tower: bool = True) -> Iterator[list[tuple[str, np.ndarray | jax.Array]]]:
    """Yields all HF tensors once, as lists of (name, array): the content of a publish.

    Args:
      model: a jaxrl.models.Model.
      params: its parameter tree, of arrays all of whose shards this process reaches.
      dtype: of the tensors (anything numpy takes, or the name of one of jax's), except for those that are always
        fp32, such as routers' corrections.
      most_bytes: of a chunk, exceeded by a layer that is larger. It holds whole layers, at least one: embedding first,
        then layer by layer, norm and head, last the tower.
      host: numpy arrays in host memory, read-only, which later chunks leave as they are; else on the device, whole on
        each one of the parameters' mesh.
      tower: the tensors of a tower for images, too.
    """
    chunk, size, packed, rename = [], 0, parts.tensors(model), _renaming(model)
    for group in _layers(model, tower):
        tensors = _converted(params, group, dtype, packed)
        for _, t in tensors if host else ():
            t.copy_to_host_async()
        more = sum(t.nbytes for _, t in tensors)
        if chunk and size + more > most_bytes:
            yield chunk
            chunk, size = [], 0
        chunk += [(rename(name), np.asarray(t) if host else t) for name, t in tensors]
        size += more
    yield chunk


def _renaming(model):
    """Returns the function from a tensor's name to that in a folder of the model: with a tower, its text model's
    begin with model.language_model."""
    if model.config.vision is None:
        return lambda name: name
    inside = re.compile(r"model\.(?!visual\.|vision_tower\.|multi_modal_projector\.)")
    return lambda name: "model.language_model." + name[6:] if inside.match(name) else name


def _layers(model, tower: bool) -> list[list[tuple]]:
    """Groups [(entry, index of one of its HF tensors)] by layer, in the order embedding, layers, final norm and head,
    tower: its layers, then the rest of it.
    """
    groups: dict[tuple, list] = {}
    for entry in model.entries:
        seen = entry.path[0] == "vision"
        for i, name in enumerate(entry.hf_names if tower or not seen else ()):
            layer = re.match(r"model\.(layers|visual\.blocks)\.(\d+)\.", name)
            where = (1, int(layer[2])) if layer else (0 if entry.path[0] == "embed" else 2, 0)
            groups.setdefault((seen, *where), []).append((entry, i))
    return [groups[where] for where in sorted(groups)]


def _converted(params, group, dtype, packed) -> list[tuple[str, jax.Array]]:
    """Returns [(HF name, device array in `dtype`)] of one group of `_layers`; packed: models.io.parts.tensors."""
    entries = list({entry.path: entry for entry, _ in group}.values())
    arrays = [entry.of(params) for entry in entries]
    rows = tuple((entry.hf_shape, entry.inputs, entry.stacked, entry.row.stacked, entry.dtype(dtype))
                 for entry in entries)
    one = arrays[0].sharding
    whole = NamedSharding(one.mesh, P()) if isinstance(one, NamedSharding) else None
    at = [next(entry.indices[i][:1] for own, i in group if own is entry) for entry in entries]
    tensors = _convert(arrays, at, rows, whole)
    found = {entry.path: iter(own) for entry, own in zip(entries, tensors, strict=True)}
    by_name = {entry.hf_names[i]: next(found[entry.path]) for entry, i in group}
    out = []
    for name, tensor in by_name.items():
        whole = parts.whole_of(name)
        if whole == name:
            out.append((name, tensor))
        elif name == packed[whole].names[0]:
            own = packed[whole]
            out.append((whole, _join([by_name[part] for part in own.names], own.groups, own.rest)))
    return out


@functools.partial(jax.jit, static_argnames=("groups", "rest"))
def _join(arrays, groups, rest):
    """Joins the parts of one HF tensor."""
    return parts.pack([x.reshape(-1, *rest) for x in arrays], groups)


@functools.partial(jax.jit, static_argnames=("rows", "sharding"))
def _convert(arrays, indices, rows, sharding):
    """Converts one layer's arrays to lists of HF tensors, packed ones in parts.

    A layer's experts are gathered together: cut out one by one, each would be gathered with all layers of its kind.

    rows: per array (HF shape, contracted axes, stacked axes, stacked axes within a layer, dtype).
    indices: per array its layer's index along the other stacked axes.
    """
    out = []
    for part, index, (shape, inputs, stacked, within, dtype) in zip(arrays, indices, rows, strict=True):
        if stacked > within:
            part = jax.lax.dynamic_index_in_dim(part, index[0], keepdims=False)
        part = memory.fetched(part).astype(dtype)
        part = part if sharding is None else jax.lax.with_sharding_constraint(part, sharding)
        each = part.reshape(-1, *part.shape[within:])
        axes = range(each.ndim - 1)  # inputs first, of HF's outputs first
        out.append([one.transpose(*axes[inputs:], *axes[:inputs]).reshape(shape) for one in each])
    return out
