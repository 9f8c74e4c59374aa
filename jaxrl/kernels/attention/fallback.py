"""What happens where an implementation of attention cannot serve a call."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("jaxrl")


_distrusted: set[str] = set()  # implementations that "auto" does not take in this process


def distrust(names) -> None:
    """From here on "auto" passes over these implementations: kernels.check found that they do not agree with the
    reference. Before anything is compiled: programs keep what they were made with."""
    _distrusted.clear()
    _distrusted.update(names)


def trusted(order: tuple[str, ...]) -> tuple[str, ...]:
    """An order of "auto" without what is not trusted; its last, XLA's, always stays."""
    return tuple(name for name in order[:-1] if name not in _distrusted) + order[-1:]


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
