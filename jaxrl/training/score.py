"""Computes log-probs, values or hidden states of a batch's tokens under given parameters.

Called by roles for the proximal policy, reference, critic, reward model and teachers, and by training.objective for the
update, with the same forward pass. Nothing here samples or updates.

Legend: R rows, L row length, S loss slots per row, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.logprob import logprob_and_entropy
from jaxrl.models.adapters.head import low_rank
from jaxrl.models.feed_forward import by_token
from jaxrl.models.placement import at_sources, split_of
from jaxrl.models.value import values
from jaxrl.processes.exchange import to_host
from jaxrl.sharding import memory
from jaxrl.training import router
from jaxrl.training.pack import pack, unpack, unpack_tokens


def forward_hidden(model, params, batch):
    """Runs the forward pass that log-probs and updates share; routes in the batch are replayed.

    On the same layout both give bitwise equal results on the CPU.

    Args:
      model: jaxrl.models.Model. params: its nested parameter tree.
      batch: PackedBatch on the devices.

    Returns:
      (hidden [R, S, D] in the compute dtype, the state that predicts each loss slot; auxiliary: outputs of the layers
      for the loss by name, {} for a dense model, see Model.forward).
    """
    if batch.routes is not None:
        params = router.with_routes(model, params, batch.routes)
    rows = batch.tokens, batch.positions, batch.segments, batch.prefixes
    hidden_RxLxD, auxiliary = model.forward(params, *rows, batch.adapters, batch.images)
    return at_sources(hidden_RxLxD, batch.sources), auxiliary


@jax.named_scope("head")
def logprobs_of(model, params, hidden_RxSxD, batch, *, temperature, chunk, valid_RxS, ids_RxSxK=None,
                top=0) -> tuple[jax.Array, ...]:
    """Computes (log-prob [R, S], entropy [R, S]) in nats, fp32, of a PackedBatch's targets; 0 where not valid.

    Args:
      model: jaxrl.models.Model. params: its nested parameter tree. hidden_RxSxD: of `forward_hidden`.
      batch: PackedBatch; its column `support`, if present, restricts the distribution.
      temperature: logits are divided by it.
      chunk: loss tokens whose logits exist at once.
      valid_RxS: bool, slots that are computed.
      ids_RxSxK: int token ids, -1 = unused; appends their log-probs [R, S, K] to the tuple, at its end, behind those
        of `top`.
      top: appends (ids [R, S, top] int32, log-probs [R, S, top] fp32) of the most probable tokens, 0 = none.
    """
    head, tied = model.head(params), model.config.tied
    own = low_rank(params, hidden_RxSxD, model.compute_dtype, batch.adapters)
    few, more = own or (None, None)

    def compute(hidden, targets, valid, support, ids, few, more):
        return logprob_and_entropy(
            hidden,
            head,
            targets,
            valid,
            support,
            ids,
            few,
            more,
            temperature=temperature,
            top=top,
            softcap=model.config.final_softcap,
            chunk=chunk,
            split=split_of(valid.shape, head.shape[0 if tied else 1]),
            transposed=tied,
        )

    inputs = hidden_RxSxD, batch.targets, valid_RxS, batch.columns.get("support"), ids_RxSxK, few, more
    if own is None or own.more.ndim == 2:
        return compute(*inputs)

    def one(row):
        *of_row, more = row
        hidden, targets, valid, support, ids, few = jax.tree.map(lambda x: x[None], of_row)
        return compute(hidden, targets, valid, support, ids, few, more)

    return jax.tree.map(lambda x: x[:, 0], jax.lax.map(one, inputs))  # a bank: each row has an adapter of its own


def forward_logprobs(model, params, batch, **options):
    """Computes log-probs of the targets and entropies, both [R, S] fp32 in nats, from tokens; 0 where not valid.

    Args:
      model: jaxrl.models.Model. params: its nested parameter tree. batch: PackedBatch on the devices.
      options: those of `logprobs_of`: temperature, chunk, valid_RxS, and ids_RxSxK or top, which append to the result.
    """
    return logprobs_of(model, params, forward_hidden(model, params, batch)[0], batch, **options)


def make_score(model, *, temperature: float, chunk: int, put, routes: bool = False):
    """Returns score(params, traj, layout, columns=None) -> [T] float32, the log-probs (nats) of all loss tokens, 0 on
    the others.

    `traj` is the host batch, `layout` a Layout of it. `columns` are token columns by name: "support" [T, K] int
    restricts the distribution, "routes" [T, n * K] int replays experts. They replace the default, which None and {}
    mean: traj.columns["support"] if there is one. `score.program` is the jitted (params, batch) of one microbatch.

    Args:
      model: jaxrl.models.Model.
      temperature: of the sampling distribution (1 for greedy sampling).
      chunk: loss tokens whose logits exist at once.
      put: host PackedBatch -> device PackedBatch.
      routes: return {"logprob": [T], "routes": [T, n * K] int16, the experts of every token (training.router)} instead.
    """

    def program(params, batch):
        hidden, auxiliary = forward_hidden(model, params, batch)
        logprob = logprobs_of(model, params, hidden, batch, temperature=temperature, chunk=chunk,
                              valid_RxS=batch.weights["scored"] > 0)[0]
        return {"logprob": logprob, "routes": by_token(auxiliary)} if routes else logprob

    return _over_layout(program, put)


def make_value_score(model, *, put):
    """Returns score(params, traj, layout) -> [T] float32: the value of the state each loss token was sampled in, 0 at
    other tokens.

    `traj` is the host batch, `layout` a Layout of it.

    Args:
      model: jaxrl.models.Model; `params` has a value head (see models.value).
      put: host PackedBatch -> device PackedBatch.
    """
    return _over_layout(lambda params, batch: values(params, forward_hidden(model, params, batch)[0]), put)


def make_reader(model, *, temperature: float, chunk: int, put, top: int = 0, hidden: bool = False):
    """Returns read(params, traj, layout, columns={}) -> {name: [T, ...]}: outputs at all loss tokens, 0 elsewhere.

        "hidden" (alone, if `hidden`)     [T, D] the states that predict the tokens, in the compute dtype
        "logprob"                         [T] float32, nats
        "ids", "logprobs"                 [T, top] int32 and float32: the most probable tokens and their log-probs
                                          (nats), the highest first, if `top`
        "chosen"                          [T, K] float32: log-probs (nats) at the ids of columns["at"], if it is there

    `columns` are token columns: "at" [T, K] int, -1 = unused, with log-prob 0; "support" restricts the distribution.
    They replace the default, traj.columns["support"] if there is one.

    Args:
      model: jaxrl.models.Model.
      temperature: logits are divided by it.
      chunk: loss tokens whose logits exist at once.
      put: host PackedBatch -> device PackedBatch.
      top: number of the most probable tokens, 0 = none.
      hidden: return the states alone.
    """

    def program(params, batch):
        states = forward_hidden(model, params, batch)[0]
        if hidden:
            return {"hidden": states}
        names = ("logprob", "entropy", *["ids", "logprobs"] * bool(top), *["chosen"] * ("at" in batch.columns))
        outputs = logprobs_of(model, params, states, batch, temperature=temperature, chunk=chunk, top=top,
                              ids_RxSxK=batch.columns.get("at"), valid_RxS=batch.weights["scored"] > 0)
        return {name: x for name, x in zip(names, outputs, strict=True) if name != "entropy"}

    return _over_layout(program, put)


def _over_layout(program, put) -> Callable[..., Any]:
    program = jax.jit(program)

    def score(params, traj, layout, columns=None):
        ones = {"scored": np.ones(len(traj.tokens), np.float32)}
        default = {name: traj.columns[name] for name in ("support",) if name in traj.columns}
        micros = [m for mini in layout.minibatches for m in mini.microbatches]
        pending = [program(params, put(pack(traj, m, columns or default, ones))) for m in micros]
        kind = lambda x: np.float32 if x.dtype == np.float64 else x.dtype  # noqa: E731
        named = lambda x: x if isinstance(x, dict) else {"": x}  # noqa: E731
        out = {name: np.zeros((len(traj.tokens), *x.shape[2:]), kind(x)) for name, x in named(pending[0]).items()}
        for micro, scored in zip(micros, pending, strict=True):
            for name, x in named(scored).items():
                (unpack_tokens if name == "routes" else unpack)(traj, micro, to_host(x), out[name])
        return out.get("", out)

    score.program = program
    return score


@functools.partial(jax.jit, static_argnames=("dtype",))
def cast_params(params, dtype):
    """Returns the tree with floating-point leaves in `dtype` and others unchanged, on the devices: a frozen copy, for
    reference or rollout.
    """
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(cast, memory.fetched(params))
