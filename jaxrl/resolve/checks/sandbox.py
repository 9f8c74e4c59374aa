"""Checks of the options below `sandbox`, among each other and with the rest of the config."""

from __future__ import annotations

import os
import re

from jaxrl.config.load import get
from jaxrl.config.option import no_effect
from jaxrl.config.schema import SCHEMA


def sandbox(cfg) -> list[str]:
    s, out = cfg.sandbox, []
    remote = s.backend == "remote"
    if remote and not re.match(r"https?://[^/]", s.url):
        out.append(f"sandbox.url={s.url!r}: sandbox.backend=remote needs the service's address, http://... or "
                   "https://...")
    unused = () if remote else ("url", "api", "key_env", "retries")
    unused += ("paths",) if s.backend != "bwrap" else ()
    unused += ("cpu_seconds", "disk_mb", "processes") if remote and s.api == "fusion" else ()
    for name in unused:
        if get(s, name) != SCHEMA["sandbox"][name].default:
            with_ = f"with sandbox.backend={s.backend}" + f" and sandbox.api={s.api}" * remote
            out.append(no_effect(f"sandbox.{name}", get(s, name), with_, "leave it out"))
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
