"""Options that do not fit the kind of model that a run trains. Called by run.setup before any device work."""

from __future__ import annotations

from jaxrl.errors import ConfigError
from jaxrl.models.families import FAMILIES
from jaxrl.models.vision.rows import TOWERS
from jaxrl.resolve.spec import adapters_option, lora_on
from jaxrl.training import router


def check_layers(config, model) -> None:
    """Raises ConfigError for options of recurrent layers, experts and routers that do not fit the model."""
    if config.model.recurrence != "auto" and not model.config.num_recurrent:
        raise ConfigError(f"model.recurrence={config.model.recurrence} has no effect on a model without recurrent "
                          "layers; leave it out")
    t, kind = config.train, "a model without experts"
    options = {f"train.{n}": t[n] for n in ("router_balance", "router_z", "router_bias_rate") if t[n]}
    options |= {"model.experts": config.model.experts} if config.model.experts != "auto" else {}
    options |= {"algorithm.routes": config.algorithm.routes} if config.algorithm.routes != "own" else {}
    if options and not model.config.num_expert_layers:
        name, value = next(iter(options.items()))
        raise ConfigError(f"{name}={value} has no effect on {kind}; leave it out")
    if t.router_bias_rate and not router.has_correction(model):
        raise ConfigError(f"train.router_bias_rate={t.router_bias_rate}: the routers of this family choose by their "
                          "probabilities alone, without a bias; set train.router_balance")
    if t.router_bias_rate and lora_on(config):
        raise ConfigError(f"train.router_bias_rate={t.router_bias_rate} with {adapters_option(config)}: the base of "
                          "adapters does not change; leave it out")


def check_classifier(config, model_type: str) -> None:
    """Raises ConfigError for a reward model of a family without a sequence classifier."""
    if config.run.recipe == "reward_model" and not FAMILIES[model_type].classifies:
        images = "; rows with images train one with its tower" * bool(FAMILIES[model_type].vision)
        raise ConfigError(f"run.recipe=reward_model with model_type={model_type}: transformers has no sequence "
                          f"classifier of this family to be written as; choose a model of another family{images}")


def check_tower(model) -> None:
    """Raises ConfigError for several adapters on a model's vision tower, whose patches belong to no adapter."""
    adapter = model.adapter
    if adapter is not None and adapter.parts and any(t.name.startswith(TOWERS) for t in adapter.targets):
        raise ConfigError("lora.adapters with images: several adapters share a tower, which has none of its own; leave "
                          "it out with lora.exclude=('.*visual.*',)")
