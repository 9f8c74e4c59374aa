"""rollout.engine=./evidence/stale_engine.py:make_engine samples training answers from weights of some publishes ago.

`user.staleness` in the config says how many; until there have been as many, the first weights serve. Evaluations see the
newest weights, so what they report is the policy and not its shadow.
"""

from __future__ import annotations

from collections import deque

import jax
import jax.numpy as jnp

from jaxrl.rollout.embedded import EmbeddedEngine
from jaxrl.rollout.embedded import make_engine as make_embedded


def make_engine(context):
    return StaleEngine(make_embedded(context), int(context.config.user.staleness))


class StaleEngine:
    """The embedded engine behind a queue of weights. All but publish and submit is the embedded engine's."""

    def __init__(self, engine: EmbeddedEngine, staleness: int):
        self._engine = engine
        self._kept = deque(maxlen=staleness + 1)  # (weights, version), oldest first
        self._serving = None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def publish(self, params, version: int) -> None:
        self._kept.append((jax.tree.map(jnp.copy, params), version))  # the update donates its own
        self._serve(self._kept[0])

    def submit(self, requests) -> None:
        self._serve(self._kept[-1 if requests[0].id.startswith("eval/") else 0])
        self._engine.submit(requests)

    def _serve(self, weights) -> None:
        if self._serving != weights[1]:
            self._engine.publish(*weights)
            self._serving = weights[1]
