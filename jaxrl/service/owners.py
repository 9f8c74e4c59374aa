"""Whose a request is: users by their keys, and the check that every lookup of a session, run, future or path makes.

A session belongs to the user whose key created it, and its runs, samplers, futures and saved weights with it. Those of
another user are answered like those that do not exist. Called by service.routes, operations, store and recovery.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

from jaxrl.errors import ConfigError

ANYONE = None  # the server itself, and every client of a server without keys: sees all
COMMON = ""  # the user of keys without a name, who has what was made without keys, too
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
user: ContextVar[str | None] = ContextVar("user", default=ANYONE)  # of the request at work


def is_visible(owner: str | None) -> bool:
    """Returns whether the request at work may see what belongs to `owner`; None = it was made without keys."""
    return user.get() in (ANYONE, owner or COMMON)


def parse_keys(text: str) -> dict[str, str]:
    """Returns {key: user} of "NAME:KEY,KEY,..."; a key without a name is COMMON's.

    Raises ConfigError for a user's name that NAME does not match, a key that does not begin with tml-, and a key of two
    users."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, given, key = part.rpartition(":")
        if given and not NAME.fullmatch(name):
            raise ConfigError(f"$JAXRL_SERVICE_KEYS: the user {name!r} of a key: expected 1 to 64 letters, digits, "
                              "'.', '_' and '-' before the colon")
        if not key.startswith("tml-"):
            raise ConfigError(f"$JAXRL_SERVICE_KEYS: a key of {len(key)} characters does not begin with tml-, as the "
                              "SDK needs it")
        if found.setdefault(key, name) != name:
            raise ConfigError(f"$JAXRL_SERVICE_KEYS: {found[key]!r} and {name!r} have the same key; give each its own")
    return found
