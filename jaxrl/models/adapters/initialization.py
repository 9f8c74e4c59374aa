"""Initial values of adapters: PEFT's inits, and those that start as a part of the base.

Per module, W [outputs, inputs] as Hugging Face has it, s the scale of the adapter's product:

- default, gaussian: models.adapters (B = 0).
- orthogonal: Q [r, r] orthogonal; A from its odd rows, B from its even ones, mixed by normal matrices and divided by
  10: B A = 0 although neither is zero.
- pissa (Meng et al., arXiv 2404.02948): W = U S V', A = sqrt(S_r / s) V_r', B = U_r sqrt(S_r / s); pissa_niter_<n>
  takes the r leading ones by subspace iteration from random directions (Halko et al., arXiv 0909.4061), n rounds.
- olora (Buyukakyuz, arXiv 2406.01775): W = Q R, B = Q[:, :r], A = R[:r].
- eva (Paischer et al., arXiv 2410.07170): A = the r leading principal directions of the module's inputs, B = 0.

PEFT subtracts s B A of pissa and olora from W. Here W stays as it is, and a frozen copy (A0, B0) is subtracted in the
product instead (`Adapter.shifted`): the base is the reference, and nothing is rounded into it. Of a quantised base
W is what its codes stand for.

Legend: I inputs, O outputs (each flat), m modules of one kernel and rank.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import ConfigError
from jaxrl.models import adapters, decoder
from jaxrl.models.adapters import NODE, adaptable, adapter_set, module_of, quantized
from jaxrl.models.adapters.selection import hf_shape, linears

NITER = re.compile(r"pissa_niter_([1-9][0-9]*)")
NAMES = (*adapters.DRAWS, "orthogonal", "pissa", "pissa_niter_<n>", "olora", "eva")


def is_init(name: str) -> bool:
    """Returns whether a text is a value of lora.init, such as "pissa_niter_16"."""
    return name in NAMES and "<" not in name or NITER.fullmatch(name) is not None


def is_shifted(name: str) -> bool:
    """Whether an init starts as a part of the base (pissa, olora), which is then subtracted in the product."""
    return name in ("pissa", "olora") or NITER.fullmatch(name) is not None


def initial(model, key, base_params, name: str, directions: dict | None = None) -> dict[str, jax.Array]:
    """Returns {flat name: initial value} of every leaf of the model's adapter. Pure; jit with `model`, `name` static.

    Args:
      model: with its adapter (`shifted` as is_shifted(name) says). Each member of an adapter set starts by itself, from
        the same key.
      key: jax PRNG key of the random ones.
      base_params: parameters of `model.base`. Decompositions are taken and returned in fp32 (float64 where the kernels
        are); of a scanned or sharded model one matrix is whole at a time.
      name: see the module.
      directions: eva's, HF module name -> [I, r] (see `principal_inputs`); None for other names. Members of a set do
        not get them, so a set cannot start with eva (TypeError).

    With orthogonal, an adapter on the output matrix starts as with default.

    Raises ConfigError for an unknown name, an odd rank with orthogonal, and, with pissa, olora and eva, a rank above
    what W has; ValueError for an adapter whose `shifted` does not fit the name; KeyError for eva on a target that
    `directions` does not have, and on the output matrix.
    """
    if not is_init(name):
        raise ConfigError(f"lora.init={name!r}: choose {', '.join(NAMES)}")
    if model.adapter.parts:
        each = [adapter_set.select_model(model, k) for k in range(len(model.adapter.parts))]
        return adapter_set.join_leaves(model, [initial(one, key, base_params, name) for one in each])
    if model.adapter.shifted != is_shifted(name):
        raise ValueError(f"lora.init={name} on an adapter with shifted={model.adapter.shifted}")
    if name in adapters.DRAWS:
        return adapters.initial(model, key, name) | adapters.magnitudes(model, base_params)
    _check_ranks(model, name)
    out, targets = adapters.initial(model, key), {t.name: t for t in model.adapter.targets}
    out |= adapters.magnitudes(model, base_params)
    modules: dict[str, list] = {}
    for entry in model.base.entries:
        if adaptable(entry) and any(module_of(n) in targets for n in entry.hf_names):
            modules.setdefault(module_of(entry.hf_names[0]), []).append(entry)
    for parts in modules.values():
        parts.sort(key=lambda entry: entry.row.part)
        names = [module_of(n) for n in parts[0].hf_names]
        kernels = [quantized.whole(entry.of(base_params), entry) for entry in parts]
        a, b = _of_module(parts, kernels, names, targets, key, name, directions)
        ends, leaves = np.cumsum([entry.hf_shape[0] for entry in parts])[:-1], {}
        for entry, own in zip(parts, jnp.split(b, ends, axis=-1), strict=True):
            leaves["/".join((*entry.path[:-1], NODE, "b"))] = own
        leaves["/".join((*parts[0].path[:-1], NODE, "a"))] = a
        leaves = {leaf: x.reshape(out[leaf].shape) for leaf, x in leaves.items()}
        out |= leaves | ({f"{leaf}0": x for leaf, x in leaves.items()} if model.adapter.shifted else {})
    return out


def _check_ranks(model, name) -> None:
    shapes = {module: hf_shape(places) for module, places in linears(model).items()}
    for t in model.adapter.targets:
        if name == "orthogonal" and t.rank % 2:
            raise ConfigError(f"lora.init=orthogonal: the rank {t.rank} of {t.name} is odd; set an even lora.rank")
        if (is_shifted(name) or name == "eva") and t.rank > min(shapes[t.name]):
            raise ConfigError(f"lora.init={name}: the rank {t.rank} of {t.name} is above what its matrix "
                              f"{shapes[t.name]} has; lower lora.rank")


def _of_module(parts, kernels, names, targets, key, name, directions):
    """Returns (a [n, I, R], b [n, R, O]) of the n modules of one table row, or of rows that are parts of one HF
    tensor (O: the outputs of part after part); zeros beyond a rank below the largest, R.
    """
    inputs, outputs = parts[0].hf_shape[1], sum(entry.hf_shape[0] for entry in parts)
    acc = jnp.promote_types(kernels[0].dtype, jnp.float32)
    ranks = [targets[n].rank if n in targets else 0 for n in names]
    a, b = jnp.zeros((len(names), inputs, max(ranks)), acc), jnp.zeros((len(names), max(ranks), outputs), acc)
    kernel = jnp.concatenate([x.reshape(len(names), inputs, -1) for x in kernels], axis=-1)
    for rank in sorted(set(ranks) - {0}):
        members = np.flatnonzero(np.array(ranks) == rank)
        if name == "eva":
            own_a = jnp.stack([directions[names[i]] for i in members]).astype(acc)
            own_b = jnp.zeros((len(members), rank, outputs), acc)
        else:
            hashes = np.array([zlib.crc32(names[i].encode()) for i in members], np.uint32)
            scales = np.array([targets[names[i]].scale for i in members], acc)

            def one(module, rank=rank):
                index, number, scale = module
                return _start(name, kernel[index].astype(acc), rank, scale, jax.random.fold_in(key, number))

            own_a, own_b = jax.lax.map(one, (members, hashes, scales))
        a, b = a.at[members, :, :rank].set(own_a), b.at[members, :rank].set(own_b)
    return a, b


def _start(name, w_IxO, rank, scale, key):
    """Returns (a [I, rank], b [rank, O]) of one module; the transposes of PEFT's A and B."""
    if name == "orthogonal":
        return _orthogonal(key, w_IxO.shape, rank, w_IxO.dtype)
    if name == "olora":
        q, r = jnp.linalg.qr(w_IxO.T)
        return r[:rank].T, q[:, :rank].T
    if name == "pissa":
        v, s, u = jnp.linalg.svd(w_IxO, full_matrices=False)
    else:
        v, s, u = _subspace_iteration(key, w_IxO, rank, int(name.rpartition("_")[2]))  # pissa_niter_<n>
    root = jnp.sqrt(s[:rank] / scale)
    return v[:, :rank] * root[None], root[:, None] * u[:rank]


def principal_inputs(model, base_params, tokens_BxL, positions_BxL, segments_BxL) -> dict[str, jax.Array]:
    """Returns {HF module name: [I, r]}, the r leading principal directions of the inputs of each adapter target in the
    decoder's layers. Targets in a tower and the output matrix are not among them.

    They are taken over the tokens that are not padding (segment > 0), about the mean, in fp32 (float64 if the model
    computes in it), in the order of their variance. They have length 1, and their signs are arbitrary.

    Args:
      model: with an adapter; r is the rank of each target, at most I. The base computes the inputs.
      base_params: parameters of `model.base`.
      tokens_BxL, positions_BxL, segments_BxL: int32, packed rows as in Model.forward, without prefixes, of text alone:
        jobs with images do not start with eva (jaxrl.run.data).

    Raises ConfigError if there are not more tokens than the rank.
    """
    targets = {t.name: t for t in model.adapter.targets}
    tokens = int((np.asarray(segments_BxL) > 0).sum())
    if most := [t for t in targets.values() if t.rank >= tokens]:
        raise ConfigError(f"lora.init=eva: {tokens} tokens do not tell the {most[0].rank} directions of "
                          f"{most[0].name}; raise data.prompts_per_step, or lower lora.rank")
    return _directions(model, base_params, tokens_BxL, positions_BxL, segments_BxL)


@functools.partial(jax.jit, static_argnums=0)
def _directions(model, base_params, tokens, positions, segments):
    plain = dataclasses.replace(model.base, scan_layers=False, remat="none")
    ranks, real = {t.name: t.rank for t in model.adapter.targets}, (segments > 0).reshape(-1, 1)
    modules: dict[str, list[str]] = {}
    for e in sorted(filter(adaptable, plain.entries), key=lambda e: decoder.layers_of(plain.config, e.path)):
        modules.setdefault("/".join(e.path[1:-1]), []).append(module_of(e.hf_names[0]))
    left, out, known = {name: iter(found) for name, found in modules.items()}, {}, {}

    def watch(name, x):
        module = next(left[name])
        if module in ranks:
            if id(x) not in known:  # several modules read the same
                known[id(x)] = x, _principal(x.reshape(real.shape[0], -1), real)
            out[module] = known[id(x)][1][:ranks[module]].T

    with decoder.watched(watch):
        plain.hidden(_unrolled(model.base, plain, base_params), tokens, positions, segments, jnp.zeros_like(segments))
    return out


def _unrolled(model, plain, params):
    """Parameters of `model` as `plain`, which has a layer of its own for each of its repetitions, takes them."""
    where = {name: (entry, index) for entry in model.entries
             for name, index in zip(entry.hf_names, entry.indices, strict=True)}

    def leaf(entry):
        source, index = where[entry.hf_names[0]]
        return jax.tree.map(lambda x: x[index], source.of(params))

    return plain.tree(leaf)


def _principal(x_TxI, real_Tx1):
    """Returns [min(T, I), I]: principal directions of the real rows, the one with the largest variance first."""
    x = jnp.where(real_Tx1, x_TxI.astype(jnp.promote_types(x_TxI.dtype, jnp.float32)), 0)
    mean = x.sum(0, keepdims=True) / real_Tx1.sum()
    return jnp.linalg.svd(jnp.where(real_Tx1, x - mean, 0), full_matrices=False)[2]


def _orthogonal(key, shape, rank, dtype):
    keys = jax.random.split(key, 3)
    q, _ = jnp.linalg.qr(jax.random.normal(keys[0], (rank, rank), dtype))
    left = jax.random.normal(keys[1], (shape[0], rank // 2), dtype)
    right = jax.random.normal(keys[2], (rank // 2, shape[1]), dtype)
    return left @ q[0::2] / 10, q[1::2].T @ right / 10


def _subspace_iteration(key, w_IxO, rank, rounds):
    """Computes the `rank` leading singular triplets approximately."""
    q, _ = jnp.linalg.qr(w_IxO @ jax.random.normal(key, (w_IxO.shape[1], rank), w_IxO.dtype))
    for _ in range(rounds):
        p, _ = jnp.linalg.qr(w_IxO.T @ q)
        q, _ = jnp.linalg.qr(w_IxO @ p)
    v, s, u = jnp.linalg.svd(q.T @ w_IxO, full_matrices=False)
    return q @ v, s, u
