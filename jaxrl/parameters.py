"""A run's parameters: what they are, where they lie and where they come from. (A critic of its own has a
model of its own, recipes/critic.py.)

The policy is a language model, with a value head where the critic shares its trunk (`policy_tree`); its rows are in
models.parameters. An update sees two flat dicts, (trainable, frozen), which together are all of it; adapters would be
further entries of the first. What they are bound to: the model's forward pass and the checkpoint take all of them
(`training.merge`), engine and export the language model alone (`policy_params`), both as one tree.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl import data as data_room
from jaxrl import sharding, training
from jaxrl.models import decoder, hf
from jaxrl.models.value import ValueModel
from jaxrl.sharding import memory
from jaxrl.types import TrainState

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


def policy_tree(model, shares_trunk: bool):
    """What knows the policy's parameters: the model, with a value head where the critic shares its trunk."""
    return ValueModel(model, keep_head=True) if shares_trunk else model


def flat_axes(tree) -> dict[str, tuple]:
    """Parameter name -> logical axis names."""
    return {"/".join(entry.path): entry.axes for entry in tree.entries}


def flat_layers(model, tree) -> dict[str, tuple[int, ...]]:
    """Parameter name -> numbers of the layers it is of (decoder.layers_of). tree: the model, or one around it."""
    return {"/".join(entry.path): decoder.layers_of(model.config, entry.path) for entry in tree.entries}


def source_of(path: str) -> str:
    """Where a model really is. Without a network the hub is given up at once."""
    found = data_room.resolve(path) if path else ""
    if found and not Path(found).is_dir():
        data_room.offline_if_unreachable()
    return found


def param_shardings(job, rules=sharding.TRAIN_RULES, tree=None, role="policy"):
    """Tree of shardings of the policy's parameters, or of those of another `tree` (a Model or ValueModel) and role."""
    tree = tree or job.tree
    return sharding.param_shardings(job.mesh_of(role), tree.logical_axes(), _shapes(tree, jnp.float32), rules)


def _shapes(tree, dtype):
    return tree.tree(lambda entry: jax.ShapeDtypeStruct(entry.shape, dtype))


def policy_params(trainable, frozen):
    """The language model's parameters (nested tree), without a value head."""
    return {name: node for name, node in training.merge(trainable, frozen).items() if name != "value"}


def initial_params(job, path: str = "", dtype=None, role="policy", revision=None):
    """The language model the run starts from (nested tree, sharded): from `path` (at its hub `revision`) or
    model.path, or random from run.seed."""
    c = job.config.model
    dtype = dtype or DTYPES[job.config.train.param_dtype]
    shardings = param_shardings(job, tree=job.model, role=role)
    source = path or (c.path if c.init == "pretrained" else "")
    if source:
        return hf.load_params(job.model, source_of(source), revision if path else c.revision, shardings, dtype)
    init = lambda key: jax.tree.map(lambda x: x.astype(dtype), job.model.init(key))  # noqa: E731
    return jax.jit(init, out_shardings=shardings)(jax.random.key(job.config.run.seed))


def start_params(job):
    """What the policy's TrainState starts from: initial_params, with a value head at zero where there is one."""
    params = initial_params(job)
    if job.tree is job.model:
        return params
    return jax.jit(job.tree.with_head, out_shardings=param_shardings(job), donate_argnums=0)(params)


def _parts(job, params, everything: bool):
    patterns = ((".*",), ()) if everything else (job.config.model.trainable, job.config.model.frozen)
    return training.partition(params, *patterns)


def abstract_state(job, optimizer, tree=None, everything=False, role="policy") -> TrainState:
    """Shapes, dtypes and shardings of the TrainState, for restoring and for sharded creation.

    tree: whose parameters they are (None = the policy's). everything: all of them train, whatever model.frozen says.
    """
    c, tree = job.config, tree or job.tree
    where, params = param_shardings(job, tree=tree, role=role), _shapes(tree, DTYPES[c.train.param_dtype])
    params = jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), params, where)
    trainable, frozen = _parts(job, params, everything)
    state = jax.eval_shape(_start(job, optimizer), trainable, frozen)
    known = {**trainable, **frozen}
    everywhere = sharding.replicated(job.mesh_of(role))

    def place(path, leaf):
        # Moments carry their parameter's name as the last key of their path.
        param = known.get(getattr(path[-1], "key", None)) if path else None
        same = param is not None and param.shape == leaf.shape
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding if same else everywhere)

    def rest(leaf):
        where = memory.resting(leaf.sharding) if leaf.ndim else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    state = jax.tree_util.tree_map_with_path(place, state)
    return state.replace(opt_state=jax.tree.map(rest, state.opt_state)) if c.optimizer.offload else state


def new_state(job, optimizer, abstract: TrainState, params, everything=False) -> TrainState:
    """TrainState at step 0 around `params` (whose buffers are taken over)."""
    trainable, frozen = _parts(job, params, everything)
    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(_start(job, optimizer), out_shardings=shardings, donate_argnums=(0, 1))(trainable, frozen)


def _start(job, optimizer):
    """(trainable, frozen) -> TrainState."""
    return functools.partial(training.init_state, optimizer=optimizer, fp16=job.compute_dtype == jnp.float16)
