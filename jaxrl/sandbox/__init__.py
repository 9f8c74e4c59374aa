"""Runs programs that a model wrote, with limits and out of reach of everything else (docs/guides/sandbox.md).

    from jaxrl import sandbox
    ran = sandbox.run(["python", "main.py"], stdin="3 4", files={"main.py": code})

Standard library only: reward and environment workers import this package, some with another interpreter.
"""

from jaxrl.sandbox.api import configure, prepare, probe, run, run_async
from jaxrl.sandbox.types import Limits, Ran, SandboxError

__all__ = ["Limits", "Ran", "SandboxError", "configure", "prepare", "probe", "run", "run_async"]
