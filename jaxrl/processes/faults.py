"""Planned faults for tests, and the signals that end a run politely.

A plan is a list of entries `component.action@key=value,...`, for example

    faults.plan = ("checkpoint.kill9@step=6,phase=commit", "rollout.term@step=3")

Keys: `step` (needed), `phase` (only where `POINTS` lists some; default the first), `process` (which of several; default
all), `seconds` (only for `sleep`).
Every entry acts once in the process that reaches its point. An empty plan costs one dictionary look-up per point.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxrl.errors import ConfigError
from jaxrl.processes.deadline import leave, print_last

log = logging.getLogger("jaxrl")

# component -> phases, in the order they are reached. Training code fires these names and no others.
POINTS: dict[str, tuple[str, ...]] = {
    "rollout": (),
    "reward": (),
    "update": (),
    "checkpoint": (
        "before",   # save() was called, nothing is on disk
        "tensors",  # every tensor is written, the checkpoint is not yet visible (background thread when asynchronous)
        "commit",   # the last instruction of ours before Orbax renames the directory
        "after",    # the checkpoint is visible, older ones are not yet deleted
    ),
    "resume": (
        "before",   # a checkpoint was chosen, nothing is read
        "arrays",   # its arrays are restored, training has not begun
    ),
}
ACTIONS: dict[str, str] = {
    "kill9": "SIGKILL to this process: nothing is flushed, nothing is cleaned up",
    "term": "SIGTERM to this process, as a scheduler sends it",
    "raise": "FaultError in the thread that reached the point",
    "enospc": "OSError(ENOSPC), as a full disk gives",
    "sleep": "waits `seconds` (default 1) and goes on",
}


class FaultError(RuntimeError):
    """Raised by the planned action `raise`."""


class Fault(NamedTuple):
    """One entry of a fault plan.

    Attributes:
      component, phase: the point, see POINTS. action: what happens there, see ACTIONS. step: when.
      seconds: of the action `sleep`. process: in which process, -1 = all.
      text: the entry as it was written.
    """

    component: str
    action: str
    step: int
    phase: str
    seconds: float
    process: int  # -1 = all
    text: str


def parse_plan(plan: Iterable[str]) -> tuple[Fault, ...]:
    """Parses and checks `faults.plan`. Raises ConfigError naming the entry and the known names.

    A comma inside an entry survives the command line's splitting at commas: a piece without '@'
    continues the last one.
    """
    entries: list[str] = []
    for piece in plan:
        if "@" not in str(piece) and entries:
            entries[-1] += f",{piece}"
        else:
            entries.append(str(piece))
    return tuple(_parse(entry) for entry in entries)


def _parse(entry: str) -> Fault:
    match = re.fullmatch(r"(\w+)\.(\w+)@(.+)", entry.strip())
    if not match:
        raise ConfigError(f"faults.plan: {entry!r} is not 'component.action@step=N', "
                          "for example 'checkpoint.kill9@step=6,phase=commit'")
    component, action, rest = match.groups()
    if component not in POINTS:
        raise ConfigError(f"faults.plan: {entry!r}: unknown component {component!r}; known: {', '.join(POINTS)}")
    if action not in ACTIONS:
        raise ConfigError(f"faults.plan: {entry!r}: unknown action {action!r}; known: {', '.join(ACTIONS)}")
    keys = {}
    for pair in rest.split(","):
        name, eq, value = pair.partition("=")
        allowed = ["step", "process"] + ["phase"] * bool(POINTS[component]) + ["seconds"] * (action == "sleep")
        if not eq or name.strip() not in allowed:
            raise ConfigError(f"faults.plan: {entry!r}: {pair!r} is not one of {', '.join(k + '=' for k in allowed)}")
        keys[name.strip()] = value.strip()
    phases = POINTS[component]
    phase = keys.get("phase", phases[0] if phases else "")
    if phases and phase not in phases:
        raise ConfigError(f"faults.plan: {entry!r}: unknown phase {phase!r}; known: {', '.join(phases)}")
    try:
        return Fault(component, action, int(keys["step"]), phase, float(keys.get("seconds", 1)),
                     int(keys.get("process", -1)), entry)
    except KeyError:
        raise ConfigError(f"faults.plan: {entry!r} has no step; add step=N") from None
    except ValueError as e:
        raise ConfigError(f"faults.plan: {entry!r}: {e}") from None


class Faults:
    """The fault plan of one process. `fire` is called at the named points and does nothing unless an entry matches.

    plan: faults.plan. process: rank of this process; entries for others are left out. Raises ConfigError for a wrong
    entry."""

    def __init__(self, plan: Iterable[str] = (), process: int = 0):
        self._pending: dict[tuple[str, int, str], list[Fault]] = {}
        for fault in parse_plan(plan):
            if fault.process not in (-1, process):
                continue
            self._pending.setdefault((fault.component, fault.step, fault.phase), []).append(fault)

    def fire(self, component: str, step: int, phase: str = "") -> None:
        """Runs the faults planned for a point, each once; one that raises drops those behind it.

        component, phase: the point; phase "" = the first one that POINTS lists. An action may end the process, or raise
        FaultError or OSError. Raises KeyError for a component, or a phase of one with phases, that POINTS lacks (a
        mistake in jaxrl itself).
        """
        phases = POINTS[component]
        phase = phase or (phases[0] if phases else "")
        if phases and phase not in phases:
            raise KeyError(f"{component} has no phase {phase!r}")
        for fault in self._pending.pop((component, int(step), phase), ()):
            log.warning("planned fault: %s", fault.text)
            _act(fault)


def _act(fault: Fault) -> None:
    if fault.action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.action == "raise":
        raise FaultError(f"planned fault {fault.text}")
    elif fault.action == "enospc":
        raise OSError(errno.ENOSPC, f"planned fault {fault.text}: no space left on device")
    else:
        time.sleep(fault.seconds)


class InterruptedAtStart(KeyboardInterrupt):
    """A signal came before there was anything to save. number: of the signal; the text is its name."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class GracefulStop:
    """While active, SIGTERM, SIGINT, SIGUSR1 and SIGHUP only set a flag; the run saves and exits when
    it next checks it.

        with GracefulStop() as stop:
            ... if stop.requested: break

    A second Ctrl-C ends the process at once, even inside compiled code, with status 130 and a last line that
    ends in `newest()`. Other repeated signals change nothing, since schedulers send them more than once. SIGHUP
    stays ignored under nohup.

    While `starting` is True there is nothing to save: a signal raises InterruptedAtStart, and ends the process (128 +
    its number) if the main thread does not return from compiled code within LEAVE_SECONDS.

    Outside the main thread Python forbids handlers; then only `request()` sets the flag. The previous handlers are
    restored at exit.

    Attributes:
      reason: name of the first signal, or text of the first `request`; "" = no stop is requested.
      starting: as above; `started` ends it. newest: () -> text about the newest checkpoint; may be replaced.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    LEAVE_SECONDS = 2.0

    def __init__(self, starting: bool = False, newest: Callable[[], str] = lambda: "no checkpoint was written"):
        self.reason, self.starting, self.newest = "", starting, newest
        self._old: dict[int, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            read, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
            self._old_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            there = [s for s in self.SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
            self._old = {s: signal.signal(s, self._handle) for s in there}
        return self

    def __exit__(self, *exc) -> None:
        if self._old:
            for number, handler in self._old.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(self._old_pipe)
            os.close(self._pipe)
        self._old = {}

    def _handle(self, number, frame) -> None:
        """Runs in the main thread, when that is not inside compiled code."""
        name = signal.Signals(number).name
        first, self.reason = not self.reason, self.reason or name
        if self.starting and first:
            raise InterruptedAtStart(number)
        if first:
            print_last(f"{name}: saving, then exiting" + " (Ctrl-C again exits at once)" * (number == signal.SIGINT))

    def _watch(self, pipe: int) -> None:
        """Reads signals from the pipe in a thread: Python's handlers wait for compiled code to return, the bytes in
        this pipe do not.
        """
        interrupts = 0
        while numbers := os.read(pipe, 64):
            for number in numbers:
                interrupts += number == signal.SIGINT
                if number == signal.SIGINT and interrupts > 1:
                    _leave("Ctrl-C again: exited at once", self.newest(), number)
                if number in self._old and self.starting and not self.reason:
                    timer = threading.Timer(self.LEAVE_SECONDS, self._left, (number,))
                    timer.daemon = True
                    timer.start()
        os.close(pipe)

    def _left(self, number: int) -> None:
        if not self.reason:
            _leave(f"{signal.Signals(number).name} while the run starts: exited at once", self.newest(), number)

    def started(self) -> None:
        """Marks that there is something to save. Raises InterruptedAtStart if a signal came before and its exception
        was lost (Python drops exceptions raised in garbage-collector callbacks).
        """
        self.starting = False
        if self.requested:
            raise InterruptedAtStart(signal.Signals[self.reason])

    def request(self, reason: str) -> None:
        """Sets the flag and raises nothing; the first reason is kept. Only after `started`, which takes the reason for
        the name of a signal."""
        self.reason = self.reason or reason

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return bool(self.reason)

    def wait(self, seconds: float) -> bool:
        """Sleeps up to `seconds`, at most 0.1 s longer than the request of a stop. Returns the flag.

        It polls: a handler that sets a `threading.Event` deadlocks when it interrupts that event's lock.
        """
        end = time.monotonic() + seconds
        while not self.requested and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left))
        return self.requested


def _leave(what: str, newest: str, number: int) -> None:
    leave(f"{what}; {newest}", 128 + number)
