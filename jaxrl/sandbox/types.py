"""What goes into a sandbox and comes out of it."""

from __future__ import annotations

import dataclasses


class SandboxError(Exception):
    """The sandbox itself failed: nobody's score. (A limit that a program runs into is in `Ran.limit`.)"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one run may use.

    seconds: wall clock. cpu_seconds: of each process. memory_mb: MiB, of each process and of all together. disk_mb: MiB
    of its files. output_bytes: of standard output and standard error together. processes: at once.
    """

    seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_mb: int = 1024
    disk_mb: int = 64
    output_bytes: int = 1 << 20
    processes: int = 64


@dataclasses.dataclass(frozen=True)
class Ran:
    """What became of a program.

    exit: its status, 128 + the signal that ended it, None where a limit did. stdout, stderr: as UTF-8, what is none
    replaced. limit: which one it ran into, "seconds", "cpu_seconds", "memory_mb", "output_bytes" or "processes"; "" =
    none that is known (memory that is refused is the program's to deal with).
    """

    exit: int | None
    stdout: str
    stderr: str
    limit: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config's `sandbox` but for the limits; see jaxrl/config/schema.py."""

    backend: str = "bwrap"
    paths: tuple[str, ...] = ()
    url: str = ""
    api: str = "jaxrl"
    key_env: str = ""
    retries: int = 2
