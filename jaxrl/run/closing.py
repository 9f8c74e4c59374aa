"""How a run ends: everything that was opened is closed, whatever one of them does; and what is said last."""

from __future__ import annotations

import logging

from jaxrl.telemetry.console import duration

log = logging.getLogger("jaxrl")


class Closers:
    """What a run has to close, newest first."""

    def __init__(self):
        self._closers = []

    def own(self, thing):
        self._closers.append(thing.close)
        return thing

    def enter(self, context):
        context.__enter__()
        self._closers.append(lambda: context.__exit__(None, None, None))

    def close(self, error: BaseException | None = None) -> None:
        """Closes all. The first failure is raised, unless `error` is on its way already; all others are logged."""
        first = None
        while self._closers:
            try:
                self._closers.pop()()
            except Exception as e:
                if error is not None or first is not None:
                    log.error("while the run was closed: %s: %s", type(e).__name__, e)
                first = first or e
        if first is not None and error is None:
            raise first


def closing(out: dict) -> str:
    """The last line of a run: what became of it and where it lies."""
    held_out = [f"{100 * out[f'eval_{when}']['accuracy']:.1f}% {when}"
                for when in ("before", "after") if "accuracy" in out.get(f"eval_{when}", {})]
    how = f"ended by {out['ended_by']}, " if "ended_by" in out else "done "
    parts = [f"{how}at step {out['steps']} after {duration(out['wall_seconds'])}"]
    parts += ["held-out accuracy " + ", ".join(held_out)] if held_out else []
    if best := out.get("best"):
        parts.append(f"the best {best['metric']} is {best['value']:.4g} of step {best['step']}")
    parts += [f"model in {out['export']}"] if "export" in out else []
    return "; ".join(parts + [f"summary in {out['run_dir']}/summary.json"])
