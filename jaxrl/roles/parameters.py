"""A run's parameters: their table, placement, initial values, checkpointed fields and form in the engine.

roles.role, roles.critic and roles.reference call it. The rows of the table are in models.parameters, a separate
critic's model in roles.critic.

The policy is a language model, with a value head if the critic shares its trunk (`policy_tree`). An update sees two
flat dicts, (trainable, frozen), which together are all parameters. The model's forward pass takes all of them as one
tree (`training.merge`); engine and export take the language model alone (`role.policy_params`, `engine_params`).

With adapters (config.lora, models.adapters) the adapters and the modules of lora.modules_to_save train and the base is
frozen: it is never written, is stored in lora.base_dtype (its linear maps per lora.base), and a checkpoint holds its
digest instead (`checkpoint_fields`, `fields_from_checkpoint`).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl import data as jaxrl_data
from jaxrl import sharding, training
from jaxrl.config import adapter_table
from jaxrl.errors import ConfigError
from jaxrl.models import adapters, decoder
from jaxrl.models.adapters import adapter_set, initialization, peft, quantized
from jaxrl.models.io import hf
from jaxrl.models.parameters import flattened
from jaxrl.models.value import ValueModel
from jaxrl.processes.exchange import put
from jaxrl.resolve.spec import lora_on
from jaxrl.sharding import memory
from jaxrl.training.optimizer import adapters_optimizer
from jaxrl.types import TrainState

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


def attach_adapter(config, model):
    """Returns the model with the adapters of config.lora: one, a set for lora.adapters, or none if lora is off.

    Raises ConfigError (peft.resolve) for options that do not fit the model."""
    if not lora_on(config):
        return model
    bits = config.lora.base if config.lora.base != "none" else ""

    def one(options):
        return dataclasses.replace(peft.resolve(options, model), dropout=options.dropout, quantized=bits)

    parts = {name: one(adapter_table.lora_of(config, name)) for name in adapter_table.names(config)}
    return dataclasses.replace(model, adapter=adapter_set.combine_adapters(parts) if parts else one(config.lora))


def policy_tree(model, shares_trunk: bool):
    """Returns the parameter table of the policy: its Model, or a ValueModel around it if the critic shares its
    trunk."""
    return ValueModel(model, keep_head=True) if shares_trunk else model


def flat_axes(tree) -> dict[str, tuple]:
    """Returns flat parameter name -> logical axis names, a tuple with one for each axis. tree: Model or ValueModel."""
    return {"/".join(entry.path): entry.axes for entry in tree.entries}


def flat_layers(model, tree) -> dict[str, tuple[int, ...]]:
    """Returns flat parameter name -> numbers of its layers (decoder.layers_of), a tuple of ints.

    model: the language model whose config names the layers. tree: its table of parameters, or that of a ValueModel
    around it."""
    return {"/".join(entry.path): decoder.layers_of(model.config, entry.path) for entry in tree.entries}


def policy_optimizer(job, updates: int):
    """Returns (optax transformation of the policy's parameters, schedule); (training.adapter_set.Optimizers,
    None) for several adapters.

    updates: optimizer steps of the whole run; an adapter's schedule counts the steps that have rows of it.
    """
    c, about = job.config, (flat_axes(job.tree), flat_layers(job.model, job.tree))
    rules = []
    for name in adapter_set.adapter_names(job.model):
        own = adapters_optimizer(c, name)
        rules.append(training.adapter_set.Rule(name, *training.make_optimizer(own, updates, *about), own.max_grad_norm))
    if rules:
        return training.adapter_set.Optimizers(job.model, tuple(rules)), None
    return training.make_optimizer(c.optimizer, updates, *about)


def in_parts(job) -> str:
    """Returns the argument `in_parts` of training.make_update for the policy: "none" for several adapters, whose
    optimizer state is small, else training.in_parts of optimizer.name."""
    return "none" if adapter_set.adapter_names(job.model) else training.in_parts(job.config.optimizer.name)


def source_of(path: str) -> str:
    """Returns where a model's path or hub id is read from: a folder or a hub id; "" for an empty path.

    Side effect: for a hub id without a network, the hub is not tried."""
    found = jaxrl_data.resolve(path) if path else ""
    if found and not Path(found).is_dir():
        jaxrl_data.offline_if_unreachable()
    return found


def param_shardings(job, rules=sharding.TRAIN_RULES, tree=None, role="policy"):
    """Returns the nested tree of shardings of a role's parameters, on that role's mesh.

    Args:
      rules: logical axis name -> mesh axes, e.g. sharding.TRAIN_RULES.
      tree: Model or ValueModel whose table names the parameters; None = the policy's.
      role: name of the role, "policy", "critic" ...
    """
    tree = tree or job.tree
    return sharding.param_shardings(job.mesh_of(role), tree.logical_axes(), _shapes(tree, jnp.float32), rules)


def _shapes(tree, dtype):
    return tree.tree(lambda entry: jax.ShapeDtypeStruct(entry.shape, dtype))


def dtype_of(job, everything=False):
    """Returns a function entry of the parameter table -> dtype, for the parameters of the TrainState.

    It is train.param_dtype for what trains and lora.base_dtype for the frozen base of adapters; a row of the table may
    ask for a wider one. Adapters are fp32, because their steps are small relative to their values. So are kernels that
    become codes (lora.base), before they are quantized, and the codes' scales.

    everything: all parameters train, as for a critic; train.param_dtype for every entry."""
    master = DTYPES[job.config.train.param_dtype]
    if job.model.adapter is None or everything:
        return lambda entry: entry.dtype(master)
    own, base, adapter = trained_names(job), DTYPES[job.config.lora.base_dtype], job.model.adapter
    exact = {entry.path for entry in adapters.in_few_bits(adapter, job.model.base.entries)}

    def of(entry):
        name = "/".join(entry.path)
        if entry.row.init == quantized.INIT:
            return quantized.dtype_of(entry, adapter.quantized)
        if entry.path in exact:
            return jnp.float32
        return jnp.float32 if adapters.is_adapter(name) else entry.dtype(master if name in own else base)

    return of


def trained_names(job) -> frozenset[str]:
    """Returns the flat names of parameters that train with adapters: adapters, modules_to_save, the value head."""
    head = {"/".join(e.path) for e in job.tree.entries if e.path[0] == "value"}
    return (adapters.trains(job.model) | head) - untrained_names(job.tree)


def untrained_names(tree) -> frozenset[str]:
    """Returns the flat names of parameters without a gradient: they select experts and weigh nothing (Row.fixed)."""
    return frozenset("/".join(e.path) for e in tree.entries if e.row.fixed)


def cast(tree, params, dtype):
    """Casts parameters (nested tree) of a Model or ValueModel, `tree`, and returns the new tree.

    dtype: one for all, where Row.fixed entries stay fp32 or better; or a nested tree with the dtype of each."""
    kinds = dtype if isinstance(dtype, dict) else tree.tree(lambda entry: entry.dtype(dtype))
    return jax.tree.map(lambda x, kind: x.astype(kind), params, kinds)


def initial_params(job, path: str = "", dtype=None, role="policy", revision=None, as_codes=False):
    """Loads or initialises the language model the run starts from, without adapters.

    Args:
      path: folder or hub id; "" = model.path, or random values from run.seed for model.init=random.
      dtype: one, or a nested tree of them; None = train.param_dtype.
      role: name of the role on whose devices the arrays are placed.
      revision: hub revision of `path`; without a path it is model.revision.
      as_codes: quantize kernels as lora.base says.

    Returns:
      Nested tree of sharded arrays; the large ones of a streamed role are in host memory if they were loaded.
    """
    c, model = job.config.model, job.model.base
    dtype = DTYPES[job.config.train.param_dtype] if dtype is None else dtype
    shardings = param_shardings(job, tree=model, role=role)
    source = path or (c.path if c.init == "pretrained" else "")
    if source:
        codes = _to_codes(job) if as_codes else lambda entry, array: array
        then = (lambda entry, array: move_to_host(codes(entry, array))) if job.streams(role) else codes
        return hf.load_params(model, source_of(source), revision if path else c.revision, shardings, dtype, then)

    def init(key):
        params = model.init(key)
        params = cast(model, params, dtype)
        return adapters.base_in_few_bits(job.model, params) if as_codes else params

    if as_codes:
        shardings = adapters.without(param_shardings(job, tree=job.model, role=role))
    return jax.jit(init, out_shardings=shardings)(jax.random.key(job.config.run.seed))


def move_to_host(tree):
    """Moves the large arrays (memory.worth_it) of a streamed role to host memory, one by one; returns the tree.

    Trap: the device buffers of what it moves are deleted, so the given tree cannot be used afterwards."""
    def one(x):
        if memory.rests(x) or not memory.worth_it(x):
            return x
        moved = jax.block_until_ready(memory.to_host(x))
        x.delete()
        return moved

    return jax.tree.map(one, tree)


def _to_codes(job):
    """Returns a function (entry of the base, array) -> codes and scale if lora.base quantizes it, else the array."""
    few = {entry.path for entry in adapters.in_few_bits(job.model.adapter, job.model.base.entries)}
    places = param_shardings(job, tree=job.model)

    def then(entry, array):
        if entry.path not in few:
            return array
        work = functools.partial(quantized.quantized, kind=job.model.adapter.quantized, inputs=entry.inputs,
                                 stacked=entry.stacked)
        return jax.block_until_ready(jax.jit(work, out_shardings=entry.of(places))(array))

    return then


def base_params(job):
    """Loads the base of a policy with adapters, in the dtypes of its TrainState (`dtype_of`), as a nested tree.

    Kernels that lora.base quantizes become codes one array at a time, as they are read."""
    dtypes = job.model.base.tree(dtype_of(job))
    return initial_params(job, dtype=dtypes, as_codes=bool(job.model.adapter.quantized))


def initial_policy(job):
    """Returns the nested tree of the language model as the policy starts: initial_params, with adapters if any."""
    return initial_params(job) if job.model.adapter is None else add_initial_adapters(job, base_params(job))


def add_initial_adapters(job, params):
    """Adds initial adapters to the base's parameters (nested tree); returns the nested tree of both.

    Adapters are drawn from run.seed as lora.init says; those of the folder lora.path, if set, replace them.
    lora.init=eva reads the training rows; without rows (evaluation alone) it is "default"."""
    where = {"/".join(e.path): e for e in job.model.entries if e.row.init == "adapter"}
    places = flattened(param_shardings(job, tree=job.model))
    key = jax.random.fold_in(jax.random.key(job.config.run.seed), zlib.crc32(b"lora"))
    init = job.config.lora.init
    if init == "eva" and job.stream is None:  # evaluation alone: for any A, adapters add nothing at their start
        init = "default"
    directions = _directions(job, memory.to_devices(params)) if init == "eva" else None
    work = functools.partial(initialization.initial, job.model, name=init, directions=directions)
    start = jax.jit(lambda key, params: work(key, memory.fetched(params)),
                    out_shardings={name: places[name] for name in where})(key, params)
    if job.config.lora.path:
        kinds = {"/".join(e.path): dtype_of(job)(e) for e in job.model.entries}
        start |= {name: put(value.astype(kinds[name]), places[name])
                  for name, value in peft.read(job.config.lora.path, job.model.base)[1].items()}
    return adapters.joined(params, start)


def _directions(job, params):
    """Returns the principal directions of modules' inputs over the first rows, for lora.init=eva."""
    rows = [job.stream.dataset[i] for i in range(min(job.config.data.prompts_per_step, len(job.stream.dataset)))]
    texts = [r.prompt_ids if r.target_ids is None else np.concatenate([r.prompt_ids, r.target_ids]) for r in rows]
    length = max(map(len, texts))
    tokens = np.stack([np.pad(text, (0, length - len(text))) for text in texts]).astype(np.int32)
    segments = np.stack([np.arange(length) < len(text) for text in texts]).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return initialization.principal_inputs(job.model, params, tokens, positions, segments)


def start_params(job):
    """Returns the parameters (nested tree) of a new policy's TrainState: initial_policy, with a value head of zeros if
    the critic shares the trunk. The head has train.param_dtype."""
    params = initial_policy(job)
    if job.tree is job.model:
        return params
    head = functools.partial(job.tree.with_head, dtype=DTYPES[job.config.train.param_dtype])
    if job.streams("policy"):  # around what stays in host memory
        places = param_shardings(job)["value"]
        return head(params) | {"value": jax.tree.map(lambda x, where: put(np.asarray(x), where),
                                                     head(params)["value"], places)}
    return jax.jit(head, out_shardings=param_shardings(job), donate_argnums=0)(params)


# ---- what engine and export take of adapters


def engine_model(job):
    """Returns the model that the engine computes with, whose parameters are `engine_params`."""
    return job.model if job.config.lora.publish == "adapter" else job.model.base


def engine_params(job, params):
    """Returns the parameters (nested tree) that the engine gets, from the policy's `params` with adapters.

    With lora.publish=adapter they are returned as they are, else adapters are merged into the base (`merge_adapters`).
    """
    return params if engine_model(job) is job.model else merge_adapters(job, params)


def merge_adapters(job, params):
    """Merges adapters into the base: returns the nested tree of a model without adapters that computes the same.

    Merged kernels are new arrays W + scale * A B (adapters.merged); kernels stored as codes become plain ones. All
    other arrays are shared with `params`. Where some arrays are in host memory, kernels are merged one after the other.
    Without adapters `params` itself is returned."""
    if job.model.adapter is None:
        return params
    flat = flattened(params)
    kernels = {f"{name.rpartition(f'/{adapters.NODE}/')[0]}/kernel" for name in flat if adapters.is_adapter(name)}
    codes = {"/".join(e.path) for e in adapters.in_few_bits(job.model.adapter, job.model.base.entries)}
    kernels, parts = kernels | codes, {f"{name}/{leaf}" for name in codes for leaf in quantized.LEAVES}
    read = {name: x for name, x in flat.items() if name in kernels | parts or adapters.is_adapter(name)}
    places = flattened(param_shardings(job, tree=job.model.base))
    where = tuple((name, flat[name].sharding if name in flat else places[name]) for name in sorted(kernels))
    rest = {name: x for name, x in flat.items() if name not in read}
    if not any(map(memory.rests, read.values())):
        return unflatten_dict({**rest, **_merge(job.model, where)(read)}, sep="/")
    first = adapters.first_parts(job.model.base.entries)
    for name, place in where:  # one after the other: the whole need not fit the devices
        module = name.rpartition("/")[0]
        own = {key: x for key, x in read.items() if key.startswith((f"{module}/", f"{first[module]}/{adapters.NODE}/"))}
        place = memory.resting(place) if any(map(memory.rests, own.values())) else place
        rest |= _merge(job.model, ((name, place),))(own)
    return unflatten_dict(rest, sep="/")


@functools.lru_cache(maxsize=8)
def _merge(model, where):
    def work(flat):
        found = flattened(adapters.merged(model, unflatten_dict(memory.fetched(flat), sep="/")))
        return {name: found[name] for name, _ in where}

    return jax.jit(work, out_shardings=dict(where))


# ---- what a checkpoint holds of adapters


def checkpoint_fields(job, state: dict) -> dict:
    """Returns the fields of a TrainState that a checkpoint stores: all but the frozen base of adapters.

    state: field name -> value, `frozen` by flat parameter name; without adapters it is returned as it is."""
    if job.model.adapter is None or "frozen" not in state:
        return state
    return {**state, "frozen": {name: x for name, x in state["frozen"].items() if adapters.is_adapter(name)}}


def fields_from_checkpoint(job, abstract: TrainState, fields: dict) -> dict:
    """Completes the fields of a TrainState from those that a checkpoint stores (`checkpoint_fields`).

    With adapters, `frozen` gets the base, loaded again from the model's path, and keeps what only the checkpoint has;
    `check_base` then tells whether it is the same base. Without adapters the fields are returned as they are.

    Args:
      abstract: TrainState whose `frozen` has the wanted flat names.
      fields: field name -> value, `frozen` by flat name.

    Returns:
      Field name -> value, as `fields`.
    """
    if job.model.adapter is None:
        return fields
    base = flattened(base_params(job))
    return {**fields, "frozen": {name: base[name] if name in base else fields["frozen"][name]
                                 for name in abstract.frozen}}


def base_digest(frozen) -> np.ndarray:
    """Returns [32] uint8: the digest (adapters.digest) of the base of a policy with adapters.

    frozen: flat name -> frozen array; adapters among them are left out.
    """
    return adapters.digest({name: x for name, x in frozen.items() if not adapters.is_adapter(name)})


def check_base(found: np.ndarray, wanted: np.ndarray) -> None:
    """Raises ConfigError if two digests (`base_digest`) differ: the base is not the one that the adapters were trained
    on."""
    if not np.array_equal(found, wanted):
        raise ConfigError(
            "model.path, lora.base_dtype, lora.base: the base model is not, bit for bit, the one that the checkpoint's "
            f"adapters were trained on (digest {bytes(found).hex()[:16]}, then {bytes(wanted).hex()[:16]}); restore "
            "its files and set the dtype that it had (another kind of device may choose another one)")


# ---- the state of an update


def _parts(job, params, everything: bool):
    if job.model.adapter is not None and not everything:
        return training.split(params, trained_names(job))
    trainable, frozen = ((".*",), ()) if everything else (job.config.model.trainable, job.config.model.frozen)
    own = untrained_names(job.tree) & flatten_dict(params, sep="/", is_leaf=lambda _, x: not isinstance(x, dict)).keys()
    return training.partition(params, trainable, (*frozen, *(f"^{name}$" for name in sorted(own))))


def abstract_state(job, optimizer, tree=None, everything=False, role="policy") -> TrainState:
    """Returns the TrainState with a jax.ShapeDtypeStruct (shape, dtype, sharding) for every array; makes no array.

    It is what checkpoints are restored into and what `new_state` creates. Moments have their parameter's sharding, all
    other arrays are replicated. Large arrays of a streamed role, and with optimizer.offload the optimizer's state, are
    placed in host memory.

    Args:
      optimizer: optax transformation, or training.adapter_set.Optimizers.
      tree: table of the parameters (None = the policy's).
      everything: all parameters train, even those in model.frozen.
      role: name of the role on whose mesh the arrays are.
    """
    c, tree = job.config, tree or job.tree
    where, kind = param_shardings(job, tree=tree, role=role), dtype_of(job, everything)
    params = tree.tree(lambda entry: jax.ShapeDtypeStruct(entry.shape, kind(entry)))
    params = jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), params, where)
    trainable, frozen = _parts(job, params, everything)
    state = jax.eval_shape(_start(job, optimizer), trainable, frozen)
    known: dict[Any, Any] = {**trainable, **frozen}
    everywhere = sharding.replicated(job.mesh_of(role))

    def place(path, leaf):
        # Moments carry their parameter's name as the last key of their path.
        param = known.get(getattr(path[-1], "key", None)) if path else None
        if param is not None and (param.shape == leaf.shape or _part_of(param, leaf.shape)):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    state = jax.tree_util.tree_map_with_path(place, state)
    if job.streams(role):
        trainable = state.trainable if adapter_set.adapter_names(job.model) else memory.kept(state.trainable)
        state = state.replace(trainable=trainable, frozen=memory.kept(state.frozen))
    if job.streams(role) or c.optimizer.offload:
        state = state.replace(opt_state=memory.kept(state.opt_state))
    return state


def _part_of(param, shape) -> bool:
    """Whether a shape is that of one adapter in a parameter that holds several side by side: they differ along one
    axis, which is not sharded."""
    if len(shape) != len(param.shape):
        return False
    along = [i for i, (a, b) in enumerate(zip(shape, param.shape, strict=True)) if a != b]
    return len(along) == 1 and (*param.sharding.spec, *(None,) * len(shape))[along[0]] is None


def new_state(job, optimizer, abstract: TrainState, params, everything=False) -> TrainState:
    """Makes a TrainState at step 0 around `params` (nested tree), with the shardings of `abstract` (`abstract_state`).

    optimizer: that of `abstract`. everything: all parameters train. Trap: the buffers of `params` are donated, so they
    cannot be used afterwards."""
    trainable, frozen = _parts(job, params, everything)
    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    if any(map(memory.rests, jax.tree.leaves(abstract))):
        trainable, frozen = ({k: move_to_host(x) if memory.rests(place[k]) else x for k, x in tree.items()}
                             for tree, place in ((trainable, abstract.trainable), (frozen, abstract.frozen)))
        if isinstance(optimizer, training.adapter_set.Optimizers):  # all but the base is small
            start = jax.jit(_start(job, optimizer), out_shardings=shardings.replace(frozen={}), donate_argnums=0)
            return start(trainable, {}).replace(frozen=frozen)
        moments = training.streaming.init_in_parts(optimizer, trainable, abstract.opt_state)
        around = shardings.replace(trainable={}, frozen={}, opt_state=())
        state = jax.jit(_start(job, _nothing()), out_shardings=around)({}, {})
        return state.replace(trainable=trainable, frozen=frozen, opt_state=moments)
    return jax.jit(_start(job, optimizer), out_shardings=shardings, donate_argnums=(0, 1))(trainable, frozen)


def _nothing():
    """Returns an optimizer without a state."""
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state))


def _start(job, optimizer):
    """Returns a function (trainable, frozen) -> TrainState."""
    of_several = isinstance(optimizer, training.adapter_set.Optimizers)
    start = training.adapter_set.init_state if of_several else training.init_state
    return functools.partial(start, optimizer=optimizer, fp16=job.compute_dtype == jnp.float16,
                             router_load=training.router.even_load(job.model.config),
                             loss_scale=job.config.train.loss_scale.initial)
