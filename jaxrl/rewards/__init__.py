"""Rewards: names, verifiers, the pool of worker processes, shaping.

A worker imports this package too, so nothing is imported here until it is asked for (numpy, jax and the config stay
in the parent).
"""

import importlib

_LAZY = {
    "register_reward": "builtin",
    "registered": "builtin",
    "RewardItem": "items",
    "RewardPool": "pool",
    "RewardResult": "items",
    "RewardFailure": "pool",
    "shape": "items",
    "address": "items",
}
__all__ = sorted(_LAZY)


def __getattr__(name):
    if name in _LAZY:
        globals()[name] = found = getattr(importlib.import_module(f"jaxrl.rewards.{_LAZY[name]}"), name)
        return found
    raise AttributeError(f"module 'jaxrl.rewards' has no attribute {name!r}")
