"""Runs programs that a model wrote, with limits and isolated from everything else (docs/guides/sandbox.md).

    from jaxrl import sandbox
    ran = sandbox.run(["python", "main.py"], stdin="3 4", files={"main.py": code})

Standard library only: reward and environment workers import this package, some in another interpreter.
"""

from jaxrl.sandbox.api import configure, prepare, probe, run, run_async
from jaxrl.sandbox.types import Limits, RunResult, SandboxError

__all__ = ["Limits", "RunResult", "SandboxError", "configure", "prepare", "probe", "run", "run_async"]
