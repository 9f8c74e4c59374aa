"""Parts of a name that a source makes anew at each start: commands, random numbers, the time."""

from __future__ import annotations

import re

from jaxrl.migrate.table import Migration

NEW = re.compile(r"\$\{?(?:RANDOM|SRANDOM|SECONDS|EPOCHSECONDS|EPOCHREALTIME|BASHPID|PPID)\b\}?|\$\$|\$\{now:[^}]*\}")
CHANGES = re.compile(r"date|time|RANDOM|random|uuid|mktemp|shuf")  # in a command at the beginning of a path
NAMES = ("run.dir", "log.wandb_name", "log.wandb_project")


def without(text: str) -> tuple[str, list[str]]:
    """Returns a text without the parts that a source makes anew at each start (commands, random numbers, the time) and
    the - _ . before each, and the list of these parts. A command at the text's beginning is such a part only if it
    names a date, a time or a random number."""
    out, parts, i = "", [], 0
    while i < len(text):
        end = _command_end(text, i)
        end = end if i or CHANGES.search(text[i:end]) else 0
        if not end and (found := NEW.match(text, i)):
            end = found.end()
        if end:
            parts.append(text[i:end])
            out = out.rstrip("-_.")
        else:
            out += text[i]
        i = end or i + 1
    return out, parts


def _command_end(text: str, i: int) -> int:
    """Returns where `...` or $(...) at i ends, 0 where there is none."""
    if text[i] == "`":
        return text.find("`", i + 1) + 1
    depth = 0
    for at in range(i + 1, len(text)) if text.startswith("$(", i) else ():
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at + 1
    return 0


def settle(m: Migration) -> Migration:
    """Removes from run.dir, log.wandb_name and log.wandb_project the parts that the source makes anew at each start. Of
    run.dir it leaves a known difference (a second start resumes the first run), and drops the option where nothing is
    left. Returns m."""
    for option in NAMES:
        value, keys = m.options.get(option, ("", ()))
        name, parts = without(value) if type(value) is str else (value, [])
        if not parts:
            continue
        m.options[option] = (name, keys)
        if option == "run.dir":
            if not name.strip("/."):
                del m.options[option]
            m.differs(
                f"run.dir: there each start has a folder of its own, by {' '.join(parts)}; here it is one, and a "
                "second start resumes the first run (run.resume=auto): give --config.run.dir=FOLDER for another one"
            )
    return m
