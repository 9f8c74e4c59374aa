"""Options and config files: every option once (schema), files and flags (load), kinds of job (registry).

Imports nothing of jaxrl but errors. The names below load on first use, so that workers that only need one module here
do not import ml_collections.
"""

import importlib

_LAZY = ("config_of", "default_config", "load_config", "put")
__all__ = list(_LAZY)


def __getattr__(name):
    if name in _LAZY:
        return getattr(importlib.import_module("jaxrl.config.load"), name)
    raise AttributeError(f"module 'jaxrl.config' has no attribute {name!r}")
