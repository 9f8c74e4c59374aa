"""jaxrl: reinforcement-learning post-training of language models in JAX.

Nothing heavy is imported here: processes that only need one file of jaxrl (reward workers, inference engines)
must not pull in jax. The public names below load on first use.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "train": "jaxrl.recipes",
    "load_config": "jaxrl.config",
    "default_config": "jaxrl.config",
    "register_reward": "jaxrl.rewards",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")
