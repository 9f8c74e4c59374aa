"""Tracks the best evaluation of a run, for eval.patience and checkpoint.keep_best."""

from __future__ import annotations

from typing import Any

from jaxrl.errors import ConfigError

METRICS = ("eval/accuracy", "eval/preference_accuracy")  # eval.metric="": the first that an evaluation gives


class Best:
    """Compares evaluations by eval.metric: higher is better, or lower for a metric whose name ends in "loss".

    The evaluation before the first step does not count, since it has no checkpoint. A tie is not better.

    Args:
      config: the whole config.
      state: result of `state` in the resumed run; ignored if it is of another metric.

    Attributes:
      step, value: of the best evaluation; None before the first.
      since: consecutive evaluations after it that were not better.
      metric: its name; "" until `check` chooses one. wanted: whether an option needs the best evaluation.
    """

    def __init__(self, config, state: dict[str, Any] | None = None):
        self._asked, self._patience = config.eval.metric, config.eval.patience
        self.wanted = bool(self._patience or config.checkpoint.keep_best)
        self.metric, self.step, self.value, self.since = self._asked, None, None, 0
        if self.wanted and state and state["metric"] == (self._asked or state["metric"]):
            self.metric, self.step = state["metric"], state["step"]
            self.value, self.since = state["value"], state["since"]

    def state(self) -> dict[str, Any] | None:
        """Returns a JSON-able state; None before the first evaluation."""
        if self.step is None and not self.since:
            return None
        return {"metric": self.metric, "step": self.step, "value": self.value, "since": self.since}

    def check(self, metrics: dict[str, float]) -> None:
        """Raises ConfigError if an evaluation lacks eval.metric; with eval.metric="" the first of METRICS in it is
        chosen."""
        self.metric = self.metric or next((name for name in METRICS if name in metrics), "")
        if self.metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith("eval/"))) or "none"
            raise ConfigError(f"eval.metric={self._asked!r}: evaluations give no such metric; choose one of {known}")

    def add(self, step: int, metrics: dict[str, float]) -> bool:
        """Adds the evaluation of a step; returns whether it is the best so far (never for a value that
        is not a number). metrics: metric -> value. Raises ConfigError if eval.metric is not among them."""
        self.check(metrics)
        value, lower = float(metrics[self.metric]), self.metric.endswith("loss")
        if value == value and (self.value is None or (value < self.value if lower else value > self.value)):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    @property
    def over(self) -> str:
        """Returns why eval.patience ends the run; "" while it continues."""
        if not self._patience or self.since < self._patience:
            return ""
        best = "it is not a number" if self.step is None else f"the best, {self.value:.4g}, is of step {self.step}"
        return (f"eval.patience={self._patience}: {self.since} evaluations in a row without a better {self.metric}"
                f" ({best})")
