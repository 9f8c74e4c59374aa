"""Explains why a sandbox failed: the message of bubblewrap or the kernel, with the remedy for that cause."""

from __future__ import annotations

import re

from jaxrl.sandbox.types import SandboxError

ELSEWHERE = ("use a sandbox elsewhere (sandbox.backend=remote), or, against accidents only, sandbox.backend=rlimits "
             "(docs/guides/sandbox.md)")
PACKAGES = {"bwrap": "bubblewrap", "setpriv": "util-linux", "prlimit": "util-linux"}
NAMESPACES = ("let user namespaces through: in Docker run the container with --security-opt seccomp=unconfined "
              "--security-opt systempaths=unconfined, on Ubuntu 24.04 give /usr/bin/bwrap an AppArmor profile with "
              f"userns, on Debian set the sysctl kernel.unprivileged_userns_clone=1; or {ELSEWHERE}")
REMEDIES = (  # the first matching pattern counts
    (r"Argument list too long|maximum number of arguments",
     "pass long texts as files or on standard input instead of in argv, and many files as one archive"),
    (r"Too many open files",
     "each file is open while the program starts: pass many files as one archive, or raise the limit (ulimit -n)"),
    (r"namespace failed: No space left",
     f"this host has used up its namespaces: raise the sysctl user.max_user_namespaces; or {ELSEWHERE}"),
    (r"No space left on device",
     "the program's files do not fit: raise sandbox.disk_mb (bwrap), free the temporary folder (rlimits), or pass "
     "fewer"),
    (r"Resource temporarily unavailable|Cannot allocate memory",
     "this host cannot start another process: use fewer workers, free memory, or raise ulimit -u"),
    (r"Unknown option", "this bubblewrap is too old: install version 0.5 or newer"),
    (r"(?i)namespace|not permitted|permission|uid map|read-only file system|seccomp", NAMESPACES),
)


def refusal(what: str, cause) -> SandboxError:
    """Returns the SandboxError of a program that could not be run.

    Args:
      what: the failed action.
      cause: an exception, or bubblewrap's output, of which the last 300 characters are shown. The first of REMEDIES
        that matches them gives the remedy.
    """
    text = str(cause).strip()[-300:]
    remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, text)), ELSEWHERE)
    return SandboxError(f"{what}: {text or 'no reason given'}; {remedy}")


def not_installed(program: str) -> SandboxError:
    """Returns the SandboxError of a program that the sandbox needs and this host lacks."""
    return SandboxError(f"{program} is not installed: install it (apt-get install {PACKAGES[program]}); or {ELSEWHERE}")
