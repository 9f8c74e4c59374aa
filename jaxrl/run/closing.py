"""Closes everything a session opened, even if closing one of them fails, and formats the last line of a run."""

from __future__ import annotations

import logging

from jaxrl.telemetry.console import duration

log = logging.getLogger("jaxrl")


class Closers:
    """The objects that a run closes at its end, newest first."""

    def __init__(self):
        self._closers = []

    def add(self, thing):
        """Registers an object with a `close` method, which is called when the run ends; returns the object."""
        self._closers.append(thing.close)
        return thing

    def enter(self, context):
        """Enters a context manager now, and exits it when the run ends."""
        context.__enter__()
        self._closers.append(lambda: context.__exit__(None, None, None))

    def close(self, error: BaseException | None = None) -> None:
        """Closes everything, the newest first. Raises the first failure unless the run already ends by `error`; logs
        all others."""
        first = None
        while self._closers:
            try:
                self._closers.pop()()
            except Exception as e:
                if error is not None or first is not None:
                    log.error("closing the run failed: %s: %s", type(e).__name__, e)
                first = first or e
        if first is not None and error is None:
            raise first


def closing_line(out: dict) -> str:
    """Returns the last console line of a run from its summary: result, accuracy, best checkpoint, folders."""
    held_out = [f"{100 * out[f'eval_{when}']['accuracy']:.1f}% {when}"
                for when in ("before", "after") if "accuracy" in out.get(f"eval_{when}", {})]
    how = f"ended by {out['ended_by']}, " if "ended_by" in out else "done "
    parts = [f"{how}at step {out['steps']} after {duration(out['wall_seconds'])}"]
    parts += ["held-out accuracy " + ", ".join(held_out)] if held_out else []
    if best := out.get("best"):
        parts.append(f"the best {best['metric']} is {best['value']:.4g} of step {best['step']}")
    parts += [f"model in {out['export']}"] if "export" in out else []
    return "; ".join(parts + [f"summary in {out['run_dir']}/summary.json"])
