"""Environments: the API that episodes are written with (docs/guides/environments.md), and the
processes that run them.

Standard library only: workers import this package, some of them in another interpreter without jax.
"""

from jaxrl.envs.api import Call, Chat, Observation, Step, Task, ToolError, Turn

__all__ = ["Call", "Chat", "Observation", "Step", "Task", "ToolError", "Turn"]
