"""Feed-forward blocks, one function per kind: a dense MLP, or experts with a router.

Every function takes (weights, x [B, L, D]), weights being models.decoder.Weights, and returns (y, auxiliary). Experts
say beside y, for the loss (training.router) and for those who replay routes:

    "routes"          [1, B, L, K] int32: the experts of each token, in the order of their probabilities, or as they
                      were given; stacked over the layers that have experts, in their order
    "router_entropy"  [B, L]: of the router's distribution, in nats
    "router_z"        [B, L]: the square of the log of the sum of the exponentials of its logits
    "router_balance"  [B, L], where the layer is given `mlp/router/load` [E], which does not learn: E * sum over experts
                      of load * probability
    "router_replayed" [B, L], where the layer is given `mlp/router/routes` [B, L, K], experts of each token that are to
                      be replayed (-1: it chooses by itself): 1 where they were
    "router_mismatch" [B, L], there: share of the replayed experts that the router would not have chosen

All but the routes are summed over layers. Sources: Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961,
eq. 4 (balance); Zoph et al., arXiv 2202.08906, eq. 5 (z).

Legend: B rows, L tokens per row, D hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models import parameters
from jaxrl.models.placement import gathered, of_each_token, routed
from jaxrl.models.product import times

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": lambda x: jnp.square(jnp.maximum(x, 0)),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
ROUTES = "expert_ids"  # never computed again in the backward pass: a tie that falls otherwise is another function
LOAD = "mlp/router/load"
REPLAYED = "mlp/router/routes"
STACKED = ("routes",)  # of what layers say, that which is stacked instead of summed


class Part(NamedTuple):
    """The parameter rows and the function of a mixer or of a feed-forward.

    Attributes:
      rows: parameters.Row of all its arrays.
      apply: of a mixer (weights, layer, implementation, x [B, L, D], shared, cache, index) -> (y [B, L, D], keys and
        values), see models.decoder.attention; of a feed-forward (weights, x) -> (y, auxiliary). auxiliary is a dict of
        arrays for the loss, which are summed over the layers (those of STACKED are concatenated along their first
        axis).
    """

    rows: tuple[parameters.Row, ...]
    apply: Callable


NOTHING = Part((), lambda *_: ({}, {}))


def _gated(activation):
    return lambda gate, up: activation(gate) * up


GATED = {name: _gated(activation) for name, activation in ACTIVATIONS.items()}


@functools.cache  # experts compare it by identity
def clamped(alpha: float, limit: float) -> Callable:
    """Returns gpt-oss's gate as a function (gate, up) -> g * sigmoid(alpha * g) * (up + 1), elementwise.

    g is at most the limit, up within it on both sides."""
    def gated(gate, up):
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)

    return gated


def mlp(own, x):
    """Computes a dense feed-forward: returns (down(activation(gate) * up), {}), or (down(activation(up)), {}) without a
    gate. gate and up are linear maps of x. Where there is a gate, config.mlp_factors multiply it before its activation,
    and the result.

    own: decoder.Weights of the layer. x: [..., D], as is the result, in the same dtype.
    """
    return _dense(own, "mlp", x), {}


def activation_of(cfg) -> Callable:
    """Returns the activation of a model's experts: (gate, up) -> hidden (`clamped` if config.gate_limit is set), or up
    -> hidden where they have no gate.
    """
    if not cfg.expert_gate:
        return ACTIVATIONS[cfg.activation]
    return clamped(cfg.gate_alpha, cfg.gate_limit) if cfg.gate_limit else GATED[cfg.activation]


def _dense(own, module, x):
    if f"{module}/gate/kernel" not in own.rows:
        activation = jax.checkpoint(ACTIVATIONS[own.config.activation])  # the backward pass keeps up only
        return own.linear(f"{module}/down", activation(own.linear(f"{module}/up", x)))
    gated, (of_gate, of_down) = jax.checkpoint(GATED[own.config.activation]), own.config.mlp_factors
    gate, up = own.linears(module, x, "gate", "up")  # the backward pass keeps these only
    return times(own.linear(f"{module}/down", gated(times(gate, of_gate), up)), of_down)


class Routing(NamedTuple):
    """The experts that a router gives to tokens, and their weights.

    ids [B, L, K] int: their experts. gates [B, L, K]: these experts' weights, fp32 or better. chosen [B, L, K] int: the
    experts that the router would choose by itself (ids, unless routes are replayed). logits [B, L, E]: fp32 or better,
    with the router's bias, before softmax or sigmoid.
    """

    ids: jax.Array
    gates: jax.Array
    chosen: jax.Array
    logits: jax.Array


def route(own, x) -> Routing:
    """Returns the Routing of tokens: K experts of each, and their weights in fp32 or better.

    own: decoder.Weights of the layer. x: [B, L, D].

    softmax: the K most probable of a softmax over all experts; of equal ones the first. Their weights are their
    probabilities, divided by their sum if config.norm_topk, which is a softmax over the K logits.
    sigmoid (DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16): each expert's score is the sigmoid of its logit. Chosen are
    the K best by score plus correction, among the experts of the best groups; the weights are the scores, without the
    correction, divided by their sum (+ 1e-20) if config.norm_topk, times config.routed_scale.
    A token whose K replayed experts (mlp/router/routes) are all 0 or more takes these. For replayed experts, too, the
    weights are the router's own, so that it learns. The choice has no gradient.
    """
    cfg, acc = own.config, jnp.promote_types(x.dtype, jnp.float32)
    kernel = gathered(own.values[parameters.ROUTER], own.rows[parameters.ROUTER].axes, acc)
    logits = jax.lax.dot_general(x.astype(acc), kernel, (((x.ndim - 1,), (0,)), ((), ())),
                                 precision=jax.lax.Precision.HIGHEST)
    if cfg.router_bias:
        logits += jax.lax.broadcast_to_rank(own.values[parameters.ROUTER_BIAS].astype(acc), logits.ndim)
    scores = jax.nn.softmax(logits) if cfg.router == "softmax" else jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(scores)
    if cfg.corrected:
        correction = jax.lax.stop_gradient(own.values[parameters.CORRECTION]).astype(acc)
        choice += jax.lax.broadcast_to_rank(correction, choice.ndim)
    best = lambda choice: jax.lax.top_k(_best_groups(choice, cfg), cfg.experts_per_token)[1]  # noqa: E731
    ids = chosen = checkpoint_name(of_each_token(best, choice), ROUTES)
    if REPLAYED in own.values:
        replayed = own.values[REPLAYED].astype(chosen.dtype)
        ids = jnp.where(jnp.all(replayed >= 0, axis=-1, keepdims=True), replayed, chosen)
    gates = jnp.take_along_axis(scores, ids, axis=-1)
    if cfg.norm_topk:
        total = jnp.sum(gates, axis=-1, keepdims=True)
        gates /= total + 1e-20 if cfg.router == "sigmoid" else total
    return Routing(ids, gates * cfg.routed_scale if cfg.routed_scale != 1 else gates, chosen, logits)


def _best_groups(choice_BxLxE, cfg):
    """Sets the scores to -inf for experts outside the groups whose best two have the largest sums."""
    if cfg.router_groups_taken == cfg.router_groups:
        return choice_BxLxE
    grouped = choice_BxLxE.reshape(*choice_BxLxE.shape[:-1], cfg.router_groups, -1)
    sums = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    best = jax.lax.top_k(sums, cfg.router_groups_taken)[1]
    taken = jnp.any(best[..., None] == jnp.arange(cfg.router_groups)[None, None, None], axis=-2)
    return jnp.where(taken[..., None], grouped, -jnp.inf).reshape(choice_BxLxE.shape)


def _log_probabilities(cfg, logits):
    """Returns the log of a router's distribution over all experts: the softmax, or the sigmoids
    divided by their sum.
    """
    if cfg.router == "softmax":
        return jax.nn.log_softmax(logits)
    scores = jax.nn.log_sigmoid(logits)
    return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def experts(own, x):
    """Computes the sum over a token's experts of weight * down(activation(gate) * up), plus the shared expert's output,
    times its own sigmoid gate if it has one. Each of an expert's three maps adds a bias, if config.expert_bias. Padding
    reaches no expert but the shared one. Experts may have no gate (see mlp), and may work on fewer numbers than a token
    has, between two linear maps.

    own: decoder.Weights of the layer. x: [B, L, D]. Returns (y [B, L, D] in x's dtype, auxiliary as the module lists
    it, padding not masked out).
    """
    cfg, (ids, gates, chosen, logits) = own.config, route(own, x)
    of_all = lambda leaf: tuple(  # noqa: E731
        gathered(own.values[path], own.rows[path].axes, x.dtype)
        for path in (f"mlp/experts/{name}/{leaf}" for name in ("gate", "up", "down")) if path in own.rows)
    computed = ids if own.real is None else jnp.where(own.real[..., None], ids, cfg.num_experts)
    kernels = of_all("kernel") if cfg.expert_gate else (None, *of_all("kernel"))
    inside = own.linear("mlp/latent_down", x) if cfg.expert_latent else x
    y = routed(inside, computed, gates, *kernels, activation=activation_of(cfg), matmul=own.matmul,
               biases=of_all("bias"), implementation=own.experts)
    y = own.linear("mlp/latent_up", y) if cfg.expert_latent else y
    if cfg.shared_expert_size:
        beside = _dense(own, "mlp/shared", x)
        y += jax.nn.sigmoid(own.linear("mlp/shared_gate", x)) * beside if cfg.shared_gate else beside
    log_probs, total = _log_probabilities(cfg, logits), jax.nn.logsumexp(logits, axis=-1)
    probs = jnp.exp(log_probs)
    auxiliary = {"routes": ids[None], "router_entropy": -jnp.sum(probs * log_probs, axis=-1),
                 "router_z": jnp.square(total)}
    if LOAD in own.values:
        load = jax.lax.broadcast_to_rank(own.values[LOAD].astype(probs.dtype), probs.ndim)
        auxiliary["router_balance"] = cfg.num_experts * jnp.sum(load * probs, axis=-1)
    if REPLAYED in own.values:
        same = jnp.any(ids[..., None] == chosen[..., None, :], axis=-1)
        auxiliary["router_replayed"] = jnp.all(own.values[REPLAYED] >= 0, axis=-1).astype(probs.dtype)
        auxiliary["router_mismatch"] = 1 - jnp.mean(same, axis=-1, dtype=probs.dtype)
    return y, auxiliary


def by_token(auxiliary):
    """Returns the experts of each token as a token column, [B, L, n * K] int16, layer after layer. (-1, which such
    columns have for an unknown expert, does not occur here.)

    auxiliary: of Model.forward of a model with experts; its "routes" are [n, B, L, K] int32, n layers with experts, K
    experts per token.
    """
    routes = jnp.moveaxis(auxiliary["routes"], 0, 2)
    return routes.reshape(*routes.shape[:2], -1).astype(jnp.int16)


FEED_FORWARDS = {
    "mlp": Part(parameters.MLP, mlp),
    "experts": Part(parameters.EXPERTS, experts),
    "deepseek_experts": Part(parameters.DEEPSEEK_EXPERTS, experts),
    "mixtral_experts": Part(parameters.MIXTRAL_EXPERTS, experts),
    "minimax_experts": Part(parameters.MINIMAX_EXPERTS, experts),
    "gpt_oss_experts": Part(parameters.GPT_OSS_EXPERTS, experts),
    "falcon_mlp": Part(parameters.FALCON_MLP, mlp),
    "granite_mlp": Part(parameters.GRANITE_MLP, mlp),
    "granite_experts": Part(parameters.GRANITE_EXPERTS, experts),
    "nemotron_mlp": Part(parameters.NEMOTRON_MLP, mlp),
    "nemotron_experts": Part(parameters.NEMOTRON_EXPERTS, experts),
}
