"""Callbacks of a run: functions called after each line of metrics, and objects with hooks (docs/guides/callbacks.md).

jaxrl.api checks them, a Session says what is due, and `Callbacks` calls them on process 0, between two steps.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.errors import ConfigError, RunStopped, type_of

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

HOOKS = ("on_step", "on_evaluation", "on_save", "on_end")
FUNCTION = ""  # the hook of a plain function


class Step:
    """The run as a callback sees it, between two steps. Read-only, except for `stop`.

    Attributes:
      number: completed steps; 0 for the evaluation before the first step.
      total: steps the run aims at.
      metrics: name -> float, the last line of metrics.jsonl; {} before the first. In on_end it lacks the metrics of an
        evaluation after the last step, which on_evaluation gets.
      samples: records of the step's training completions, as in rollouts/ (prompt, completion, answer, score, reward,
        advantage, tokens ...); [] for jobs that sample none, for step 0, in on_end, and for the line of an evaluation
        that follows the last step.
      run_dir: the run's directory.
      config: every option as the run uses it, frozen (`step.config.optimizer.lr`).
    """

    def __init__(self, session, metrics: dict[str, float], samples: list[dict]):
        self._session = session
        self.number: int = session.step
        self.total: int = session.total_steps
        self.metrics, self.samples, self.run_dir = metrics, samples, str(session.run_dir)
        self.config: FrozenConfigDict = session.spec.options
        self.stopped = ""

    def stop(self, reason: str = "a callback") -> None:
        """Ends the run after this step as if it were the last one: evaluation, checkpoint and export follow.

        reason: `ended_by` of summary.json; of several calls the first counts. Without effect in on_end."""
        self.stopped = self.stopped or str(reason) or "a callback"

    def parameters(self, copy: bool = False) -> Mapping[str, Any]:
        """Returns the policy's parameters (of run.recipe=reward_model those of the reward model) by name.

        Names are flat, "layer_0/attn/q/kernel"; layers that are scanned share one array with a leading axis. Adapters
        are next to the parameters of their base.

        Args:
          copy: False = the run's own jax arrays, without a copy; the next update reuses their memory, so do not keep
            them. True = numpy arrays in host memory, which you may keep and change.

        Raises:
          ValueError: copy=True and other processes hold parts of the arrays.
        """
        state = self._session.policy.state
        arrays = {**state.frozen, **state.trainable}
        if not copy:
            return MappingProxyType(arrays)
        if apart := next((name for name, x in arrays.items() if not x.is_fully_addressable), None):
            raise ValueError(f"parameters(copy=True): other processes hold parts of {apart!r}; read the weights from "
                             "an export instead (checkpoint.export_every_steps and on_save)")
        return {name: np.array(x) for name, x in arrays.items()}


def check_callbacks(callbacks) -> tuple:
    """Returns the argument `callbacks` of jaxrl.train as a tuple. Raises ConfigError for what is no callback."""
    if callable(callbacks) or not isinstance(callbacks, Iterable):
        callbacks = (callbacks,)
    callbacks = tuple(callbacks)
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigError(f"callbacks holds the class {callback.__name__}: pass an object, {callback.__name__}()")
        unknown = [name for name in dir(callback) if name.startswith("on_") and name not in HOOKS
                   and callable(getattr(callback, name))]
        if unknown:
            near = difflib.get_close_matches(unknown[0], HOOKS, 1, 0.5)
            raise ConfigError(f"callbacks holds {type_of(callback)} with {', '.join(unknown)}: hooks are "
                              f"{', '.join(HOOKS)}" + f"; did you mean {''.join(near)}?" * bool(near))
        if not hooks_of(callback):
            raise ConfigError(f"callbacks holds {type_of(callback)}: expected a function that takes one step, or an "
                              f"object with any of {', '.join(HOOKS)}")
    return callbacks


def hooks_of(callback) -> dict[str, tuple[str, Callable]]:
    """Returns name of a hook -> (name for messages, function) of a callback: an object with hooks, or a function.

    An object with hooks counts as such even if it is callable."""
    kind = type(callback).__name__
    found = {hook: (f"{kind}.{hook}", getattr(callback, hook)) for hook in HOOKS if hasattr(callback, hook)}
    if found or not callable(callback):
        return found
    return {FUNCTION: (getattr(callback, "__name__", kind), callback)}


class Callbacks:
    """Calls a session's callbacks on process 0: those of all hooks that are due, in one collective call a step.

    Attributes:
      used: whether any process may have callbacks; if not, `call` does nothing.
    """

    def __init__(self, session):
        self.session = session
        self._hooks = [hooks_of(callback) for callback in session.inputs.callbacks]
        self.used = bool(self._hooks) or session.peers.count > 1  # other processes may have callbacks
        self._due: list[tuple] = []
        self._metrics: dict[str, float] = {}

    def due(self, hook: str, *arguments) -> None:
        """Adds a hook to the next `call`. arguments: those after the Step."""
        if self._hooks:
            self._due.append((hook, *[dict(x) if isinstance(x, dict) else x for x in arguments]))

    def after_line(self, metrics: dict[str, float], records=()) -> None:
        """Calls functions, and the hooks that are due, after a line of metrics. records: of its completions. Raises
        RunStopped as `call` does."""
        self._metrics = metrics
        self.due(FUNCTION)
        self.call(records)

    def call(self, records=()) -> None:
        """Calls the hooks that are due, on process 0. Collective.

        records: of the last line's completions, for Step. Sets `ended_by` of the session, on every process, if a
        callback ends the run. Raises RunStopped on every process if a callback fails."""
        s = self.session
        if not self.used:
            return
        step = Step(s, dict(self._metrics), list(records))
        due, self._due = self._due, []
        s.together("callbacks", lambda: self._call(due, step) if s.peers.first else True)
        asked = s.decide("end?", lambda: step.stopped)
        s.ended_by = s.ended_by or asked  # the first reason counts

    def _call(self, due, step: Step) -> bool:
        for hook, *arguments in self._saved() + due:
            for name, function in (hooks[hook] for hooks in self._hooks if hook in hooks):
                call_one(name, function, step, *arguments)
        return True

    def _saved(self) -> list[tuple]:
        """Returns on_save for each checkpoint that was completed since the last call and is still there."""
        checkpointer = self.session.checkpointer
        steps = [checkpointer.completed.pop(0) for _ in range(len(checkpointer.completed))]
        existing = checkpointer.steps() if steps else ()
        return [("on_save", str(checkpointer.path_of(step))) for step in steps if step in existing]


def call_one(name: str, function, step: Step, *arguments) -> None:
    """Calls function(step, *arguments), a callback.

    Raises RunStopped, with its name, file and line, if it raises."""
    try:
        function(step, *arguments)
    except Exception as e:  # it is the user's code
        frame = traceback.extract_tb(e.__traceback__)[-1]
        raise RunStopped(f"the callback {name!r} failed after step {step.number}: {type(e).__name__}: {e} (line "
                         f"{frame.lineno} of {frame.filename}). Fix it and repeat the call to resume from the "
                         "latest checkpoint") from e
