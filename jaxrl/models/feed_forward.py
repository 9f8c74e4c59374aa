"""The second half of a layer, one function per kind: a dense MLP, or experts of which a router gives every token a few.

Every function takes (weights, x [B, L, D]), weights being models.decoder.Weights, and returns (y, auxiliary). Experts
say beside y, for the loss (training.router) and for those who replay routes:

    "routes"          [1, B, L, K] int32: the experts of each token, in the order of their probabilities; stacked over
                      the layers that have experts, in their order
    "router_entropy"  [B, L]: of the router's distribution, in nats
    "router_z"        [B, L]: the square of the log of the sum of the exponentials of its logits
    "router_balance"  [B, L], where the layer is given `mlp/router/load` [E], which does not learn: E * sum over experts
                      of load * probability

The last three are summed over layers. Sources: Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961, eq. 4
(balance); Zoph et al., arXiv 2202.08906, eq. 5 (z).

Legend: B rows, L tokens per row, D hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models import parameters
from jaxrl.models.placement import gathered, routed

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
ROUTES = "expert_ids"  # never computed again in the backward pass: a tie that falls otherwise is another function
LOAD = "mlp/router/load"
STACKED = ("routes",)  # of what layers say, that which is stacked instead of summed


class Part(NamedTuple):
    """A mixer, `apply(weights, layer, implementation, x, shared, cache, index) -> (y, keys and values)`, or a
    feed-forward, `apply(weights, x) -> (y, auxiliary)`: auxiliary is a dict of arrays for the loss, which are summed
    over the layers (those of STACKED are put one behind the other along their first axis)."""

    rows: tuple[parameters.Row, ...]
    apply: Callable


def _gated(activation):
    return lambda gate, up: activation(gate) * up


GATED = {name: _gated(activation) for name, activation in ACTIVATIONS.items()}


def mlp(own, x):
    """down(activation(gate) * up); (output, nothing beside)."""
    return _dense(own, "mlp", x), {}


def _dense(own, module, x):
    gated = jax.checkpoint(GATED[own.config.activation])  # the backward pass keeps gate and up only
    return own.linear(f"{module}/down", gated(own.linear(f"{module}/gate", x), own.linear(f"{module}/up", x)))


class Routing(NamedTuple):
    """What a router says of tokens: their experts and these experts' weights, [B, L, K], and log-probabilities [B, L,
    E]."""

    ids: jax.Array
    gates: jax.Array
    logits: jax.Array


def route(own, x) -> Routing:
    """The K most probable of a softmax over all experts, in fp32 or better; of equal ones the first. Their weights are
    their probabilities, divided by their sum where config.norm_topk."""
    cfg, acc = own.config, jnp.promote_types(x.dtype, jnp.float32)
    kernel = gathered(own.values[parameters.ROUTER], own.rows[parameters.ROUTER].axes, acc)
    logits = jax.lax.dot_general(x.astype(acc), kernel, (((x.ndim - 1,), (0,)), ((), ())),
                                 precision=jax.lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits)
    ids = checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(probs), cfg.experts_per_token)[1], ROUTES)
    gates = jnp.take_along_axis(probs, ids, axis=-1)
    if cfg.norm_topk:
        gates /= jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(ids, gates, logits)


def experts(own, x):
    """sum over a token's experts of weight * down(activation(gate) * up), plus the shared expert's output times a
    sigmoid of its own, where there is one. Padding reaches no expert."""
    cfg, (ids, gates, logits) = own.config, route(own, x)
    weights = (gathered(own.values[f"mlp/experts/{name}/kernel"], own.rows[f"mlp/experts/{name}/kernel"].axes, x.dtype)
               for name in ("gate", "up", "down"))
    computed = ids if own.real is None else jnp.where(own.real[..., None], ids, cfg.num_experts)
    y = routed(x, computed, gates, *weights, activation=GATED[cfg.activation])
    if cfg.shared_expert_size:
        y += jax.nn.sigmoid(own.linear("mlp/shared_gate", x)) * _dense(own, "mlp/shared", x)
    log_probs, total = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, axis=-1)
    probs = jnp.exp(log_probs)
    said = {"routes": ids[None], "router_entropy": -jnp.sum(probs * log_probs, axis=-1), "router_z": jnp.square(total)}
    if LOAD in own.values:
        load = jax.lax.broadcast_to_rank(own.values[LOAD].astype(probs.dtype), probs.ndim)
        said["router_balance"] = cfg.num_experts * jnp.sum(load * probs, axis=-1)
    return y, said


FEED_FORWARDS = {
    "mlp": Part(parameters.MLP, mlp),
    "experts": Part(parameters.EXPERTS, experts),
    "mixtral_experts": Part(parameters.MIXTRAL_EXPERTS, experts),
}
