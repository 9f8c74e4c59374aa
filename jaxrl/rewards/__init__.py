"""Rewards: reward functions by name, verifiers, the pool of worker processes, reward shaping.

Workers import this package too, so submodules are imported on first use (numpy, jax and the config
stay in the parent).
"""

import importlib

_LAZY = {
    "register_reward": "builtin",
    "registered_rewards": "builtin",
    "RewardItem": "items",
    "RewardPool": "pool",
    "RewardResult": "items",
    "RewardFailure": "pool",
    "shape": "items",
    "item_hash": "items",
}
__all__ = sorted(_LAZY)


def __getattr__(name):
    if name in _LAZY:
        globals()[name] = found = getattr(importlib.import_module(f"jaxrl.rewards.{_LAZY[name]}"), name)
        return found
    raise AttributeError(f"module 'jaxrl.rewards' has no attribute {name!r}")
