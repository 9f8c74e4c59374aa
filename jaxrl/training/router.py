"""Terms of a loss that a model's routers add, and what is told of them. Models without experts have none.

With w the weight "token" of a scored token, 1 / (scored tokens of the optimizer step), and p the router's
probabilities at the token whose hidden state predicts it,

    balance = sum over layers of E * sum_t w_t sum_e load_e p_te        (Fedus et al., arXiv 2101.03961, eq. 4)
    z       = sum over layers of sum_t w_t (log sum_e exp logit_te)^2   (Zoph et al., arXiv 2202.08906, eq. 5)

Both are sums over tokens, so packing, microbatches, shared prompts and the mesh cannot change them: load, the share of
the tokens' places that experts have, is a constant in the gradient in any case, and is that of the whole optimizer step
before. At the first step all experts count alike, which has no gradient.

Legend: R rows, L row length, S scored slots per row, n layers with experts, E experts, K experts of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.models import decoder
from jaxrl.models.feed_forward import LOAD, REPLAYED
from jaxrl.models.parameters import CORRECTION
from jaxrl.models.placement import at_sources


def even_load(config):
    """[n, E]: the load of routers that spread tokens evenly. None for a model without experts."""
    layers = config.num_expert_layers
    return np.full((layers, config.num_experts), 1 / config.num_experts, np.float32) if layers else None


def with_load(model, params, load_nxE):
    """The parameters, and beside each router the load that its balance term is taken with."""
    return _add_arrays(model, params, LOAD, load_nxE)


def with_routes(model, params, routes_RxLxnK):
    """The parameters, and beside each router the experts that tokens are to have; see feed_forward.by_token."""
    rows, length, _ = routes_RxLxnK.shape
    routes = routes_RxLxnK.reshape(rows, length, model.config.num_expert_layers, -1)
    return _add_arrays(model, params, REPLAYED, jnp.moveaxis(routes, 2, 0))


def correct_bias(model, frozen, load_nxE, rate: float):
    """The parameters that do not train, with the bias by which routers choose (not weigh) moved towards an even load:
    by `rate` up where an expert had less than the mean, down where it had more, less the mean of these steps, which no
    choice depends on (Wang et al., arXiv 2408.15664, algorithm 1)."""
    step = rate * jnp.sign(jnp.mean(load_nxE, axis=-1, keepdims=True) - load_nxE)
    steps = _arrays_by_path(model, CORRECTION, step - jnp.mean(step, axis=-1, keepdims=True))
    return {name: x + steps[name].astype(x.dtype) if name in steps else x for name, x in frozen.items()}


def has_correction(model) -> bool:
    """Whether its routers have such a bias."""
    return any("/".join(entry.path).endswith(CORRECTION) for entry in model.entries)


def _add_arrays(model, params, name, values_nx):
    """The parameters with one more array in every layer that has experts."""
    return unflatten_dict(flatten_dict(params, sep="/") | _arrays_by_path(model, name, values_nx), sep="/")


def _arrays_by_path(model, name, values_nx) -> dict:
    """Path of `name` in every layer that has experts -> its array, stacked where layers are."""
    config, flat = model.config, {}
    number = {layer: i for i, layer in enumerate(
        i for i, layer in enumerate(config.layers) if layer.feed_forward != "mlp")}
    before, repeats, behind = decoder.spans(config, model.scan_layers)
    flat |= {f"layer_{i}/{name}": values_nx[number[i]] for i in (*before, *behind) if i in number}
    for j in range(config.period if repeats else 0):
        layers = [config.prefix + config.period * n + j for n in range(repeats)]
        if layers[0] in number:
            flat[f"layers/sub_{j}/{name}"] = values_nx[np.array([number[i] for i in layers])]
    return flat


def loss_terms(outputs, batch, objective):
    """(sum of the terms, metrics) of a microbatch; 0 and {} where no layer has a router.

    Metrics: router/entropy, mean over tokens and layers; router/load [n, E], of which `told` makes what is shown;
    router/balance and router/z, mean over layers, where they are in the loss; router/replayed and router/mismatch,
    mean over tokens and layers, where routes are replayed.
    """
    said, token = outputs.auxiliary, batch.weights["token"]
    if "routes" not in said:
        return 0.0, {}
    layers, experts = len(said["routes"]), outputs.model.config.num_experts
    at = lambda x: jnp.sum(token * at_sources(x, batch.sources))  # noqa: E731

    def load(routes_RxLxK):
        routes = at_sources(routes_RxLxK, batch.sources)
        chosen = routes[..., None] == jnp.arange(experts)[None, None, None]
        return jnp.sum(jnp.where(chosen, token[..., None, None], 0), axis=(0, 1, 2)) / routes.shape[-1]

    loss = jnp.zeros((), token.dtype)
    metrics = {"router/entropy": jax.lax.stop_gradient(at(said["router_entropy"])) / layers,
               "router/load": jax.lax.map(load, said["routes"])}
    for name, coef in (("balance", objective.router_balance), ("z", objective.router_z)):
        if coef:
            term = at(said[f"router_{name}"])
            loss += coef * term
            metrics[f"router/{name}"] = jax.lax.stop_gradient(term) / layers
    for name in ("replayed", "mismatch"):
        if f"router_{name}" in said:
            metrics[f"router/{name}"] = at(said[f"router_{name}"]) / layers
    return loss, metrics


def summarize_load(metrics: dict) -> dict:
    """Metrics of a whole optimizer step: the load of the fullest expert over the mean, of the layer where it is
    largest, and the share of experts without a token; the mismatch over the tokens that were replayed."""
    if "router/load" not in metrics:
        return metrics
    load = metrics["router/load"]
    rest = {name: x for name, x in metrics.items() if name != "router/load"}
    if "router/mismatch" in rest:
        rest["router/mismatch"] /= jnp.maximum(rest["router/replayed"], 1e-12)
    return rest | {"router/load_max_over_mean": jnp.max(load) * load.shape[1], "router/idle": jnp.mean(load == 0)}
