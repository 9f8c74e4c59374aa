"""Computes the loss terms and metrics of a model's routers, and corrects their bias. Models without experts have none.

With w the weight "token" of a loss token, 1 / (loss tokens of the optimizer step), and p the router's
probabilities at the token whose hidden state predicts it,

    balance = sum over layers of E * sum_t w_t sum_e load_e p_te        (Fedus et al., arXiv 2101.03961, eq. 4)
    z       = sum over layers of sum_t w_t (log sum_e exp logit_te)^2   (Zoph et al., arXiv 2202.08906, eq. 5)

Both are sums over tokens, so packing, microbatches, shared prompts and the mesh cannot change them. `load`, each
expert's share of the tokens' places, is a constant in the gradient; it is that of the whole previous optimizer step. At
the first step all experts have an equal load, which has no gradient.

Called by training.update (terms, bias) and training.score (replayed routes). Routing itself is in models.feed_forward.

Legend: R rows, L row length, S loss slots per row, n layers with experts, E experts, K experts of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxrl.models import decoder
from jaxrl.models.feed_forward import LOAD, REPLAYED
from jaxrl.models.parameters import CORRECTION, flattened
from jaxrl.models.placement import at_sources


def even_load(config):
    """Returns the load of routers that spread tokens evenly, 1/E each: float32 [n, E]; None for a model without
    experts.

    config: the model's ModelConfig.
    """
    layers = config.num_expert_layers
    return np.full((layers, config.num_experts), 1 / config.num_experts, np.float32) if layers else None


def with_load(model, params, load_nxE):
    """Returns the nested parameter tree with each router's load, which its balance term reads, added to its layer.

    model: jaxrl.models.Model. params: its nested tree. load_nxE: [n, E] share of the tokens' places that each expert
    has; rows add up to 1.
    """
    return _add_arrays(model, params, LOAD, load_nxE)


def with_routes(model, params, routes_RxLxnK):
    """Returns the nested parameter tree with the experts to use for every token added to each layer that has a router.

    model: jaxrl.models.Model. params: its nested tree. routes_RxLxnK: [R, L, n * K] integers, see
    feed_forward.by_token; -1 = not replayed.
    """
    rows, length, _ = routes_RxLxnK.shape
    routes = routes_RxLxnK.reshape(rows, length, model.config.num_expert_layers, -1)
    return _add_arrays(model, params, REPLAYED, jnp.moveaxis(routes, 2, 0))


def correct_bias(model, frozen, load_nxE, rate: float):
    """Moves the bias by which routers choose (not weigh) experts towards an even load; returns the new `frozen`.

    The bias of an expert with less than the mean load rises by `rate`, of one with more it falls by `rate` (Wang et
    al., arXiv 2408.15664, algorithm 1). The mean of these steps is subtracted, since no choice depends on it.

    Args:
      model: jaxrl.models.Model.
      frozen: flat dict of the parameters that do not train.
      load_nxE: [n, E] load of the optimizer step.
      rate: step size of the bias.
    """
    step = rate * jnp.sign(jnp.mean(load_nxE, axis=-1, keepdims=True) - load_nxE)
    steps = _arrays_by_path(model, CORRECTION, step - jnp.mean(step, axis=-1, keepdims=True))
    return {name: x + steps[name].astype(x.dtype) if name in steps else x for name, x in frozen.items()}


def has_correction(model) -> bool:
    """Returns whether the routers of a model have a correction bias, the one that router_bias_rate moves."""
    return any("/".join(entry.path).endswith(CORRECTION) for entry in model.entries)


def _add_arrays(model, params, name, values_nx):
    """Returns the parameter tree with one more array in every layer that has experts."""
    return unflatten_dict(flattened(params) | _arrays_by_path(model, name, values_nx), sep="/")


def _arrays_by_path(model, name, values_nx) -> dict:
    """Returns {flat path of `name` in each layer with experts: its array, stacked if the layers are}."""
    config, flat = model.config, {}
    number = {layer: i for i, layer in enumerate(
        i for i, layer in enumerate(config.layers) if layer.has_experts)}
    before, repeats, behind = decoder.spans(config, model.scan_layers)
    flat |= {f"layer_{i}/{name}": values_nx[number[i]] for i in (*before, *behind) if i in number}
    for j in range(config.period if repeats else 0):
        layers = [config.prefix + config.period * n + j for n in range(repeats)]
        if layers[0] in number:
            flat[f"layers/sub_{j}/{name}"] = values_nx[np.array([number[i] for i in layers])]
    return flat


def loss_terms(outputs, batch, objective):
    """Computes the routers' part of a microbatch: (sum of the loss terms, [], each times its coefficient; metrics); (0,
    {}) without routers. The formulas are at the head of the module.

    Metrics: router/entropy (nats), mean over tokens and layers; router/load [n, E], which `summarize_load` replaces;
    router/balance and router/z, mean over layers, if they are in the loss; router/replayed and router/mismatch, mean
    over tokens and layers, if routes are replayed.

    Args:
      outputs: objective.Outputs of the microbatch.
      batch: PackedBatch; weight "token" is 1 / (loss tokens of the optimizer step).
      objective: router_balance and router_z are its coefficients.
    """
    auxiliary, token = outputs.auxiliary, batch.weights["token"]
    if "routes" not in auxiliary:
        return 0.0, {}
    layers, experts = len(auxiliary["routes"]), outputs.model.config.num_experts
    at = lambda x: jnp.sum(token * at_sources(x, batch.sources))  # noqa: E731

    def load(routes_RxLxK):
        routes = at_sources(routes_RxLxK, batch.sources)
        chosen = routes[..., None] == jnp.arange(experts)[None, None, None]
        return jnp.sum(jnp.where(chosen, token[..., None, None], 0), axis=(0, 1, 2)) / routes.shape[-1]

    loss = jnp.zeros((), token.dtype)
    metrics = {"router/entropy": jax.lax.stop_gradient(at(auxiliary["router_entropy"])) / layers,
               "router/load": jax.lax.map(load, auxiliary["routes"])}
    for name, coef in (("balance", objective.router_balance), ("z", objective.router_z)):
        if coef:
            term = at(auxiliary[f"router_{name}"])
            loss += coef * term
            metrics[f"router/{name}"] = jax.lax.stop_gradient(term) / layers
    for name in ("replayed", "mismatch"):
        if f"router_{name}" in auxiliary:
            metrics[f"router/{name}"] = at(auxiliary[f"router_{name}"]) / layers
    return loss, metrics


def summarize_load(metrics: dict) -> dict:
    """Replaces router/load [n, E] by the metrics that are logged for a whole optimizer step; without it the metrics are
    returned unchanged.

    router/load_max_over_mean: load of the fullest expert over the mean, of the layer where it is largest. router/idle:
    share of experts without a token. router/mismatch is divided by the share of replayed tokens.

    metrics: of the whole step, summed over its microbatches, on the devices.
    """
    if "router/load" not in metrics:
        return metrics
    load = metrics["router/load"]
    rest = {name: x for name, x in metrics.items() if name != "router/load"}
    if "router/mismatch" in rest:
        rest["router/mismatch"] /= jnp.maximum(rest["router/replayed"], 1e-12)
    return rest | {"router/load_max_over_mean": jnp.max(load) * load.shape[1], "router/idle": jnp.mean(load == 0)}
