"""Seconds of a step by phase, and schedules of periodic actions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any


class Phases:
    """Divides wall time between named phases, so that the phases of a step and `other` add up to it.

        with phases("rollout"): ...

    Phases nest: time inside an inner phase belongs to the inner one alone. A name may come back; its times add up.
    An exception ends its phase like a return.

    Args:
      clock: seconds, monotonic.
      watch: called with the name of the phase that has just become current ("" between phases).

    Attributes:
      current: name of the phase; "" between phases.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, watch: Callable[[str], Any] = lambda name: None):
        self._clock = clock
        self.watch = watch
        self.current = ""  # the phase; "" between phases
        self._spent: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._mark = self._begin = clock()

    def _book(self) -> None:
        """Adds the time since the last call to the current phase."""
        now, name = self._clock(), self.current or "other"
        self._spent[name] = self._spent.get(name, 0.0) + now - self._mark
        self._mark = now

    @contextmanager
    def __call__(self, name: str):
        self._book()
        outer, self.current = self.current, name
        self.watch(name)
        try:
            yield
        finally:
            self._book()
            self.current = outer
            self.watch(outer)

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase since the last `take` (or the start), with `other` and their sum as `step`;
        starts again from 0.
        """
        self._book()
        spent = {**self._spent, "other": self._spent.get("other", 0.0)}
        for name, seconds in spent.items():
            self._totals[name] = self._totals.get(name, 0.0) + seconds
        spent["step"] = self._mark - self._begin
        self._spent, self._begin = {}, self._mark
        return spent

    def totals(self) -> dict[str, float]:
        """Returns the seconds by phase since the creation of this object, including the running step."""
        self._book()
        names = {**self._totals, **self._spent}
        return {n: self._totals.get(n, 0.0) + self._spent.get(n, 0.0) for n in names}


ONCE = ("eval", "checkpoint", "export")  # phases that belong to one step, however many a line of metrics is about


def training_seconds(phases: dict[str, float]) -> float:
    """Returns the seconds of a step without its evaluation, checkpoint and export. phases: seconds by phase, and
    `step`."""
    return phases.get("step", 0.0) - sum(phases.get(name, 0.0) for name in ONCE)


def per_step(phases: dict[str, float], steps: int) -> dict[str, float]:
    """Converts `Phases.take` of several steps into the seconds by phase of an average step; evaluation, checkpoint
    and export stay whole, for the last step. They still add up to `step`.
    """
    out = {name: seconds / (1 if name in ONCE else steps) for name, seconds in phases.items()}
    return out | {"step": sum(seconds for name, seconds in out.items() if name != "step")}


class Every:
    """Tells when a periodic action is due: every so many steps, epochs or seconds, whichever comes first; 0 switches
    one off.

        due = every(step, epoch)     called with growing numbers; asked again at a step it answers the same

    By steps and epochs it is due if a multiple was reached or passed since the last call.
    By seconds it is due that long after it was last due for any reason. Without a checkpoint's state, the first call
    after step 0 is due if `step` itself is a multiple.

    Args:
      steps, epochs, seconds: the periods; epochs are passes over the data and may be fractions.
      clock: seconds, monotonic; injected in tests.
      state: what `state()` returned in the run that is resumed.

    Attributes:
      missed: whether it was due and could not be done; it is due again then.
    """

    def __init__(self, steps: int = 0, epochs: float = 0.0, seconds: float = 0.0, *,
                 clock: Callable[[], float] = time.monotonic, state: dict | None = None):
        self.steps, self.epochs, self.seconds = steps, epochs, seconds
        self._clock = clock
        state = state or {}
        self._step: int | None = state.get("step")
        self._epoch: float | None = state.get("epoch")
        self._since = clock() - state.get("elapsed", 0.0)
        self.missed = state.get("missed", False)  # it was due, and was not done
        self._not_before = 0.0
        self._answered: tuple[int, bool] | None = None  # (step, whether it was due)

    def __call__(self, step: int, epoch: float = 0.0) -> bool:
        if self._answered is not None and self._answered[0] == step:
            return self._answered[1]
        now = self._clock()
        before = step - 1 if self._step is None else self._step
        due = bool(self.steps) and step > 0 and step // self.steps > max(0, before) // self.steps
        # A relative slack: an epoch sum such as 3 * (1/3) may fall just short of its edge.
        reached = lambda e: math.floor(e / self.epochs * (1 + 1e-9))  # noqa: E731
        due |= bool(self.epochs) and self._epoch is not None and reached(epoch) > reached(self._epoch)
        due |= bool(self.epochs) and self._epoch is None and reached(epoch) > 0 and step <= 1
        due |= bool(self.seconds) and now - self._since >= self.seconds
        due |= self.missed and now >= self._not_before
        self._step, self._epoch, self._answered = step, epoch, (step, due)
        if due:
            self._since, self.missed = now, False
        return due

    def again(self, seconds: float = 0.0) -> None:
        """Makes the action due again, at the earliest after `seconds`, because it could not be done."""
        self.missed, self._not_before = True, self._clock() + seconds

    def state(self) -> dict:
        """Returns a JSON-able state, for the checkpoint if a resumed run must be due at the same steps."""
        state = {"step": self._step, "epoch": self._epoch, "elapsed": self._clock() - self._since}
        return state | {"missed": True} if self.missed else state


def triggers(spec, states: dict) -> dict[str, Every]:
    """Returns when "eval", "save" and "export" are due, by name. states: name -> state, of the resumed checkpoint."""
    e, c = spec.eval, spec.checkpoint
    periods = {"eval": (e.every_steps, e.every_epochs, e.every_seconds),
               "save": (c.every_steps, c.every_epochs, 60 * c.every_minutes),
               "export": (c.export_every_steps, c.export_every_epochs, 60 * c.export_every_minutes)}
    return {name: Every(*period, state=states.get(name)) for name, period in periods.items()}
