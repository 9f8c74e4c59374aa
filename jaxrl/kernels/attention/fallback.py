"""What happens where an implementation of attention cannot serve a call."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("jaxrl")


def first_that_serves(names, ask, silent=()):
    """ask(name) of the first name that does not raise NotImplementedError(reason); the last one serves every call.

    The reason is logged once, but for those of `silent`, which step aside where another one is faster.
    """
    for name in names[:-1]:
        try:
            return ask(name)
        except NotImplementedError as e:
            if name not in silent:
                say_once(name, str(e))
    return ask(names[-1])


@functools.cache
def say_once(name: str, reason: str) -> None:
    log.warning("attention: %s does not serve this model (%s); the next implementation runs", name, reason)
