"""rollout.engine=./evidence/noisy_router.py:make_engine: the embedded sampler with noise in the matrices of its routers.

`user.noise` is the noise's standard deviation over the matrix's own; it is drawn anew at every publication. So sampler and
trainer choose other experts, as engines with other kernels and dtypes do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.rollout.embedded import EmbeddedEngine
from jaxrl.rollout.embedded import make_engine as make_embedded


def make_engine(context) -> EmbeddedEngine:
    engine, noise = make_embedded(context), float(context.config.user.noise)
    publish = engine.publish

    def noisy(params, version: int) -> None:
        publish(_noisy(params, jax.random.key(version), noise) if noise else params, version)

    engine.publish = noisy
    return engine


@jax.jit
def _noisy(params, key, noise):
    def change(path, x):
        if not any(getattr(part, "key", "") == "router" for part in path):
            return x
        return x + noise * jnp.std(x) * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(change, params)
