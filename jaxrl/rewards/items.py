"""What goes into a reward pool and comes out of it, and how it is counted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from jaxrl.errors import ConfigError


@dataclasses.dataclass
class RewardItem:
    """One answer to be scored. All values must have a JSON form (numpy scalars and arrays are converted).

    prompt: text or messages as the data has them. completion: text. columns: the row's columns, `answer` among them.
    finish: 'stop', 'length' or 'abort'. token_ids: of the answer.
    """

    prompt: Any
    completion: str
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish: str = "stop"
    group: int = 0
    sample: int = 0
    token_ids: Any = ()


@dataclasses.dataclass
class RewardResult:
    """Scores of N answers, in the order of the items.

    total: [N] float64, weighted sum of the present parts, NaN = absent (unshaped: see `shape`). parts: name -> [N]
    float64. outcomes: per answer {name: outcome}, only functions that apply to the row. item_metrics: per answer
    {name: {metric: value}}. metrics: means and shares over the step, no times. by: the pool's `key()`.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    outcomes: list[dict[str, str]]
    item_metrics: list[dict[str, dict[str, float]]]
    metrics: dict[str, float]
    by: str = ""

    def records(self) -> list[dict]:
        """Per answer a JSON-able {parts, outcomes, metrics, by}: what `RewardPool.score(recorded=...)` takes."""
        return [{"parts": {n: float(self.parts[n][i]) if o == "ok" else None for n, o in outcomes.items()},
                 "outcomes": outcomes, "metrics": self.item_metrics[i], "by": self.by}
                for i, outcomes in enumerate(self.outcomes)]


def failed_items(results: dict) -> set[int]:
    return {i for (i, _), r in results.items() if is_failure(r["outcome"])}


def is_result(reply) -> bool:
    if not isinstance(reply, dict) or not isinstance(reply.get("metrics"), dict):
        return False
    outcome = reply.get("outcome")
    return isinstance(reply.get("value"), float) if outcome == "ok" else isinstance(outcome, str)


def is_failure(outcome: str) -> bool:
    return outcome not in ("ok", "none")


def as_json(item: RewardItem, i: int) -> str:
    try:
        return json.dumps(vars(item), default=_to_json)
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"item {i}: a value has no JSON form and cannot be handed to reward functions: {e}; columns: "
                          f"{', '.join(item.columns)}") from None


def _to_json(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r}")


def metrics_of(total, outcomes, item_metrics) -> dict[str, float]:
    """Shares over (answer, function) pairs; `failed_fraction` over answers; functions' own metrics as means."""
    flat = [o for per_item in outcomes for o in per_item.values()]
    pairs, n = max(1, len(flat)), max(1, len(outcomes))
    failed = sum(any(map(is_failure, per_item.values())) for per_item in outcomes)
    out = {
        "reward/failed_fraction": failed / n,
        "reward/absent_fraction": float(np.isnan(total).sum()) / n,
        "reward/none_fraction": flat.count("none") / pairs,
        "reward/nan_fraction": flat.count("nan") / pairs,
        "reward/timeout_fraction": flat.count("timeout") / pairs,
        "reward/error_fraction": sum(o.startswith("error") for o in flat) / pairs,
    }
    sums: dict[str, list[float]] = {}
    for per_item in item_metrics:
        for name, metrics in per_item.items():
            for key, value in metrics.items():
                sums.setdefault(f"reward/{name}/{key}", []).append(value)
    return out | {k: float(np.mean(v)) for k, v in sums.items()}
