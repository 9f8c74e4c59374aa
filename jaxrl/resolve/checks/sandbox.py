"""Checks of the options below `sandbox`, among each other and with the rest of the config."""

from __future__ import annotations

import os
import re


def sandbox(cfg) -> list[str]:
    """Returns the problems of everything below `sandbox`, and of a reward.timeout_seconds too short for `code`."""
    s, out = cfg.sandbox, []
    if s.backend == "remote" and not re.match(r"https?://[^/]", s.url):
        out.append(f"sandbox.url={s.url!r}: sandbox.backend=remote needs the service's address, http://... or "
                   "https://...")
    if s.key_env and not re.fullmatch(r"[A-Za-z_]\w*", s.key_env):
        # what was given may be the key itself
        out.append("sandbox.key_env: give the variable's name only, its value comes from this process")
    if wrong := [path for path in s.paths if not os.path.isabs(path) or not os.path.exists(path)]:
        out.append(f"sandbox.paths={s.paths}: {wrong[0]!r} is no absolute path of something that exists")
    if "code" in (*cfg.reward.functions, *cfg.eval.rewards) and cfg.reward.timeout_seconds < 2.0 * s.seconds:
        out.append(f"reward.timeout_seconds={cfg.reward.timeout_seconds:g}: reward `code` may take twice "
                   f"sandbox.seconds={s.seconds:g}, and a worker that is killed gives no score; raise it, or lower "
                   "sandbox.seconds")
    return out
