"""Published algorithms as rows of independent choices. An option the user sets wins over its preset's value."""

from __future__ import annotations

from types import MappingProxyType

_GRPO = {
    "advantage_mean": "group",
    "advantage_std": "group",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "token_mean",
    "kl.coef": 0.0,
    "kl.estimator": "k3_unbiased",
    "entropy_coef": 0.0,
    "ppo_epochs": 1,
    "num_minibatches": 1,
}

PRESETS = MappingProxyType(
    {
        # What users of today's libraries get: group mean and std, one token mean over the batch, no reference model.
        "grpo": _GRPO,
        # Shao et al. 2024 (arXiv 2402.03300), eq. 3-4: mean over sequences of token means, k3 to the reference in the loss.
        "grpo_paper": {**_GRPO, "aggregation": "sequence_mean", "kl.coef": 0.04, "kl.estimator": "k3"},
    }
)


def resolve(preset: str, given: dict) -> dict[str, tuple]:
    """Option -> (value, origin) where origin is 'config' or 'preset <name>'.

    Args:
      preset: a key of PRESETS.
      given: option -> value or None (None = not set by the user).
    """
    return {
        name: (value, f"preset {preset}") if given.get(name) is None else (given[name], "config")
        for name, value in PRESETS[preset].items()
    }
