"""Pure array functions: advantages, policy losses, KL, aggregation weights, presets. They know arrays only."""

from jaxrl.algorithms.advantages import group_advantages
from jaxrl.algorithms.aggregation import aggregation_weights
from jaxrl.algorithms.losses import clipped_policy_loss, kl_penalty, masked_exp, mismatch_weight
from jaxrl.algorithms.presets import PRESETS, resolve

__all__ = [
    "PRESETS",
    "aggregation_weights",
    "clipped_policy_loss",
    "group_advantages",
    "kl_penalty",
    "masked_exp",
    "mismatch_weight",
    "resolve",
]
