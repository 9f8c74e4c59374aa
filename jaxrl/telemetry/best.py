"""The best evaluation of a run so far: what eval.patience and checkpoint.keep_best go by."""

from __future__ import annotations

from typing import Any

from jaxrl.errors import ConfigError

METRICS = ("eval/accuracy", "eval/preference_accuracy")  # eval.metric="": the first that an evaluation gives


class Best:
    """Compares evaluations by eval.metric: higher is better, but of a metric whose name ends in "loss" lower.

    The evaluation before the first step does not count: there is no checkpoint of it. Equal to the best is not better.

    Args:
      config: the whole config.
      state: what `state` gave in an earlier run that goes on; with another metric it counts for nothing.
    Attributes:
      step, value: of the best evaluation; None before the first. since: evaluations in a row behind it.
    """

    def __init__(self, config, state: dict[str, Any] | None = None):
        self._asked, self._patience = config.eval.metric, config.eval.patience
        self.wanted = bool(self._patience or config.checkpoint.keep_best)
        self.metric, self.step, self.value, self.since = self._asked, None, None, 0
        if self.wanted and state and state["metric"] == (self._asked or state["metric"]):
            self.metric, self.step = state["metric"], state["step"]
            self.value, self.since = state["value"], state["since"]

    def state(self) -> dict[str, Any] | None:
        """JSON-able; None before the first evaluation."""
        if self.step is None and not self.since:
            return None
        return {"metric": self.metric, "step": self.step, "value": self.value, "since": self.since}

    def check(self, metrics: dict[str, float]) -> None:
        """Raises ConfigError where an evaluation lacks eval.metric."""
        self.metric = self.metric or next((name for name in METRICS if name in metrics), "")
        if self.metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith("eval/"))) or "none"
            raise ConfigError(f"eval.metric={self._asked!r}: evaluations give no such metric; choose one of {known}")

    def add(self, step: int, metrics: dict[str, float]) -> bool:
        """Takes the evaluation of a step; whether it is the best so far (a value that is not a number never is)."""
        self.check(metrics)
        value, lower = float(metrics[self.metric]), self.metric.endswith("loss")
        if value == value and (self.value is None or (value < self.value if lower else value > self.value)):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    @property
    def over(self) -> str:
        """Why the run ends, by eval.patience; "" while it goes on."""
        if not self._patience or self.since < self._patience:
            return ""
        best = "it is not a number" if self.step is None else f"the best, {self.value:.4g}, is of step {self.step}"
        return (f"eval.patience={self._patience}: {self.since} evaluations in a row without a better {self.metric}"
                f" ({best})")
