"""Log-probs of given tokens under given parameters: old, reference, and what tests compare with.

Legend: R rows, L row length, S scored slots per row, D hidden size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.logprob import logprob_and_entropy
from jaxrl.models.placement import split_of
from jaxrl.models.value import values
from jaxrl.processes.exchange import to_host
from jaxrl.training.pack import pack, unpack


def forward_hidden(model, params, batch):
    """([R, S, D], the hidden state that predicts each scored slot; auxiliary, see Model.forward). The one forward pass
    of scoring and update: on the same layout both give bitwise equal results on the CPU."""
    hidden_RxLxD, auxiliary = model.forward(params, batch.tokens, batch.positions, batch.segments, batch.prefixes)
    return jnp.take_along_axis(hidden_RxLxD, batch.sources[..., None], axis=1), auxiliary


@jax.named_scope("head")
def logprobs_of(model, params, hidden_RxSxD, batch, *, temperature, chunk, valid_RxS):
    """(logprob_RxS, entropy_RxS) of a PackedBatch's targets at the given temperature, within the column `support` where
    there is one; 0 where not valid."""
    head, tied = model.head(params), model.config.tied
    return logprob_and_entropy(
        hidden_RxSxD,
        head,
        batch.targets,
        valid_RxS,
        batch.columns.get("support"),
        temperature=temperature,
        softcap=model.config.final_softcap,
        chunk=chunk,
        split=split_of(valid_RxS.shape[0], head.shape[0 if tied else 1]),
        transposed=tied,
    )


def forward_logprobs(model, params, batch, **options):
    """`logprobs_of` of `forward_hidden`."""
    return logprobs_of(model, params, forward_hidden(model, params, batch)[0], batch, **options)


def make_score(model, *, temperature: float, chunk: int, put):
    """A function `score(params, traj, layout) -> [T] float32` of the log-probs of all scored tokens.

    Args:
      model: jaxrl.models.Model.
      temperature: of the sampling distribution (1 for greedy sampling).
      chunk: scored tokens whose logits exist at once.
      put: host PackedBatch -> device PackedBatch.
    """

    def program(params, batch):
        return forward_logprobs(
            model, params, batch, temperature=temperature, chunk=chunk, valid_RxS=batch.weights["scored"] > 0
        )[0]

    return _over_layout(program, put)


def make_value_score(model, *, put):
    """The same for values: `score(params, traj, layout) -> [T] float32`, the value of the state each scored token was
    drawn in.

    Args:
      model: jaxrl.models.Model; `params` has a value head (see models.value).
      put: host PackedBatch -> device PackedBatch.
    """
    return _over_layout(lambda params, batch: values(params, forward_hidden(model, params, batch)[0]), put)


def _over_layout(program, put):
    program = jax.jit(program)

    def score(params, traj, layout):
        out = np.zeros(len(traj.tokens), np.float32)
        ones = {"scored": np.ones(len(traj.tokens), np.float32)}
        columns = {name: traj.columns[name] for name in ("support",) if name in traj.columns}
        micros = [m for mini in layout.minibatches for m in mini.microbatches]
        pending = [program(params, put(pack(traj, m, columns, ones))) for m in micros]
        for micro, scored in zip(micros, pending, strict=True):
            unpack(traj, micro, to_host(scored), out)
        return out

    score.program = program
    return score


@functools.partial(jax.jit, static_argnames=("dtype",))
def cast_params(params, dtype):
    """Floating-point leaves cast to `dtype` (a frozen copy: reference, rollout)."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
