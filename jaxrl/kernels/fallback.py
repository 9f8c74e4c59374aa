"""What happens where an implementation of an op cannot serve a call. Ops: "attention", "experts", "recurrence"."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("jaxrl")


_distrusted: dict[str, set[str]] = {}  # op -> implementations that "auto" does not take in this process


def distrust(op: str, names) -> None:
    """Excludes these implementations of an op from "auto" in this process: kernels.check found that they are wrong.

    Replaces what an earlier call excluded for the op. Call it before anything is compiled: compiled programs keep their
    implementation."""
    _distrusted[op] = set(names)


def trusted(op: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `order` without the names that `distrust` excluded; its last, XLA's, always stays."""
    return tuple(name for name in order[:-1] if name not in _distrusted.get(op, ())) + order[-1:]


def first_that_serves(op: str, names, ask, silent=()):
    """Returns ask(name) of the first name that does not raise NotImplementedError(reason).

    The reason is logged as a warning, once, but for names in `silent`, which step aside where another one is faster.
    The last name serves every call; what it raises, and any other error, is not caught.

    op: name of the op, for the log. names: implementations in order. ask: name -> result.
    """
    for name in names[:-1]:
        try:
            return ask(name)
        except NotImplementedError as e:
            if name not in silent:
                say_once(op, name, str(e))
    return ask(names[-1])


@functools.cache
def say_once(op: str, name: str, reason: str) -> None:
    """Logs a warning that implementation `name` does not serve this model, and why; once per distinct text."""
    log.warning("%s: %s does not serve this model (%s); the next implementation runs", op, name, reason)
