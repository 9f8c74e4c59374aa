"""Input and output types of the sandbox."""

from __future__ import annotations

import dataclasses
import math


class SandboxError(Exception):
    """The sandbox itself failed; the completion has no score. (A limit that a program hits is in `RunResult.limit`.)"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resource limits of one run.

    Attributes:
      seconds: wall clock.
      cpu_seconds: of each process, in processor time.
      memory_mb: MiB, of each process and of all together.
      disk_mb: MiB of its files.
      output_bytes: of standard output and standard error together.
      processes: at the same time.
    """

    seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_mb: int = 1024
    disk_mb: int = 64
    output_bytes: int = 1 << 20
    processes: int = 64

    @property
    def whole_cpu_seconds(self) -> int:
        """cpu_seconds as the kernel takes it: whole seconds, rounded up, so that no limit becomes 0 or shorter."""
        return max(1, math.ceil(self.cpu_seconds))


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a program.

    Attributes:
      exit: its status, or 128 + the signal that ended it (the kernel's SIGXCPU at limit cpu_seconds: 152); None if it
        was killed at another limit, and in bwrap if it ended by itself with more output than output_bytes.
      stdout, stderr: decoded as UTF-8 with replacement.
      limit: the limit it hit, "seconds", "cpu_seconds", "memory_mb", "output_bytes" or "processes"; "" if none is
        known (a program may handle refused memory itself).
    """

    exit: int | None
    stdout: str
    stderr: str
    limit: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config's `sandbox` without the limits.

    Attributes:
      backend: "bwrap", "rlimits" or "remote".
      paths: further paths that programs may read (bwrap).
      url, api, key_env: of the service (remote): its address, its protocol ("jaxrl" or "fusion"), the environment
        variable with its key, "" = none.
      retries: of a request without a valid reply (remote).
    """

    backend: str = "bwrap"
    paths: tuple[str, ...] = ()
    url: str = ""
    api: str = "jaxrl"
    key_env: str = ""
    retries: int = 2
