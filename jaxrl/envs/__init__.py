"""Environments: what an episode is written with (docs/guides/environments.md), and the processes that run episodes.

Standard library only: workers import this package, some of them with another interpreter that has no jax.
"""

from jaxrl.envs.api import Call, Chat, Observation, Step, Task, ToolError, Turn

__all__ = ["Call", "Chat", "Observation", "Step", "Task", "ToolError", "Turn"]
