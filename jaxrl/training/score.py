"""Log-probs of given tokens under given parameters: old, reference, and what tests compare with.

Legend: R rows, L row length, S scored slots per row, D hidden size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.logprob import logprob_and_entropy
from jaxrl.training.pack import pack, unpack


def forward_logprobs(model, params, batch, *, temperature, chunk, valid_RxS):
    """(logprob_RxS, entropy_RxS) of a PackedBatch's targets at the given temperature; 0 where not valid.

    The one forward pass of scoring and update: on the same layout both give bitwise equal results on the CPU.
    """
    hidden_RxLxD = model.hidden(params, batch.tokens, batch.positions, batch.segments, batch.prefixes)
    hidden_RxSxD = jnp.take_along_axis(hidden_RxLxD, batch.sources[..., None], axis=1)
    return logprob_and_entropy(
        hidden_RxSxD,
        model.head(params),
        batch.targets,
        valid_RxS,
        temperature=temperature,
        softcap=model.config.final_softcap,
        chunk=chunk,
    )


def make_score(model, *, temperature: float, chunk: int, put):
    """A function `score(params, traj, layout) -> [T] float32` of the log-probs of all scored tokens.

    Args:
      model: jaxrl.models.Model.
      temperature: of the sampling distribution (1 for greedy sampling).
      chunk: scored tokens whose logits exist at once.
      put: host PackedBatch -> device PackedBatch.
    """

    @jax.jit
    def program(params, batch):
        return forward_logprobs(
            model, params, batch, temperature=temperature, chunk=chunk, valid_RxS=batch.weights["scored"] > 0
        )[0]

    def score(params, traj, layout):
        out = np.zeros(len(traj.tokens), np.float32)
        ones = {"scored": np.ones(len(traj.tokens), np.float32)}
        micros = [m for mini in layout.minibatches for m in mini.microbatches]
        pending = [program(params, put(pack(traj, m, {}, ones))) for m in micros]
        for micro, values in zip(micros, pending, strict=True):
            unpack(traj, micro, np.asarray(values), out)
        return out

    score.program = program
    return score


@functools.partial(jax.jit, static_argnames=("dtype",))
def cast_params(params, dtype):
    """Floating-point leaves cast to `dtype` (a frozen copy: reference, rollout)."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
