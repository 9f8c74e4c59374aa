"""What goes into a reward pool and comes out of it, how it is counted, and how it becomes one score per completion.

Legend: N completions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from typing import Any

import numpy as np

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.workers.loading import LARGEST


@dataclasses.dataclass
class RewardItem:
    """One completion to be scored. All values must have a JSON form (numpy scalars and arrays are converted).

    prompt: text or messages as the data has them. completion: text. columns: the row's columns, `answer` among them.
    finish: 'stop', 'length' or 'abort'. token_ids: of the completion; context_ids: of all before it. functions: names
    of those that judge it; None: all, or those of reward.column.
    """

    prompt: Any
    completion: str
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish: str = "stop"
    group: int = 0
    sample: int = 0
    token_ids: Any = ()
    context_ids: Any = ()
    functions: tuple[str, ...] | None = None


@dataclasses.dataclass
class RewardResult:
    """Scores of N completions, in the order of the items.

    total: [N] float64, weighted sum of the present parts, NaN = absent (unshaped: see `shape`). parts: name -> [N]
    float64. outcomes: per completion {name: outcome}, only functions that apply to the row. item_metrics: per
    completion {name: {metric: value}}. metrics: means and shares over the step, no times. by: the pool's `key()`.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    outcomes: list[dict[str, str]]
    item_metrics: list[dict[str, dict[str, float]]]
    metrics: dict[str, float]
    by: str = ""

    def records(self) -> list[dict]:
        """Per completion a JSON-able {parts, outcomes, metrics, by}: what `RewardPool.score(recorded=...)` takes."""
        return [{"parts": {n: float(self.parts[n][i]) if o == "ok" else None for n, o in outcomes.items()},
                 "outcomes": outcomes, "metrics": self.item_metrics[i], "by": self.by}
                for i, outcomes in enumerate(self.outcomes)]


FINE = ("ok", "none")  # outcomes that are no failures
CAUSE = re.compile(r"error: ([a-z]\w*): ")  # of a service's failure; those of functions begin with an exception's name


def failed_items(results: dict) -> set[int]:
    """Items of {(item, function): result} with a failed part."""
    return {i for (i, _), r in results.items() if r["outcome"] not in FINE}


def is_result(reply) -> bool:
    """Whether a worker's reply is {value, outcome, metrics}, as calling.outcome makes it."""
    if not isinstance(reply, dict) or not isinstance(reply.get("metrics"), dict):
        return False
    outcome = reply.get("outcome")
    return isinstance(reply.get("value"), float) if outcome == "ok" else isinstance(outcome, str)


def as_json(item: RewardItem, i: int, without: tuple[str, ...] = ()) -> str:
    """What workers are told of the i-th item. without: what none of their functions asks for."""
    try:
        told = {name: value for name, value in vars(item).items() if name not in ("functions", *without)}
        return json.dumps(told, default=_to_json)
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"item {i}: a value has no JSON form and cannot be handed to reward functions: {e}; columns: "
                          f"{', '.join(item.columns)}") from None


def address(item: RewardItem) -> int:
    """64 bits of all that functions may be told of a completion: text, tokens, prompt, the row's columns, group and
    sample. Equal items have equal addresses, others the same one by chance in 2^64."""
    told = {name: value for name, value in vars(item).items() if name != "functions"}
    for name in ("token_ids", "context_ids"):
        told[name] = np.asarray(told[name], np.int64).tolist()
    text = json.dumps(told, default=_to_json, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _to_json(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r}")


def metrics_of(total, outcomes, item_metrics) -> dict[str, float]:
    """Shares over (completion, function) pairs; `failed_fraction` over completions; functions' own metrics as means."""
    flat = [o for per_item in outcomes for o in per_item.values()]
    pairs, n = max(1, len(flat)), max(1, len(outcomes))
    failed = sum(any(o not in FINE for o in per_item.values()) for per_item in outcomes)
    out = {
        "reward/failed_fraction": failed / n,
        "reward/absent_fraction": float(np.isnan(total).sum()) / n,
        "reward/none_fraction": flat.count("none") / pairs,
        "reward/nan_fraction": flat.count("nan") / pairs,
        "reward/timeout_fraction": flat.count("timeout") / pairs,
        "reward/error_fraction": sum(o.startswith("error") for o in flat) / pairs,
    }
    asked: Counter = Counter(name for per_item in outcomes for name in per_item)
    causes: Counter = Counter((name, cause[1]) for per_item in outcomes for name, o in per_item.items()
                              if (cause := CAUSE.match(o)))
    out |= {f"reward/{name}/failed_{cause}": k / asked[name] for (name, cause), k in causes.items()}
    sums: dict[str, list[float]] = {}
    for per_item in item_metrics:
        for name, metrics in per_item.items():
            for key, value in metrics.items():
                sums.setdefault(f"reward/{name}/{key}", []).append(value)
    return out | {k: float(np.mean(v)) for k, v in sums.items()}


# -- one score per completion: pure functions on numpy arrays ----------------------------------------------------------


def weighted_sum(parts: dict[str, np.ndarray], weights: dict[str, float], count: int) -> np.ndarray:
    """[N] float64: sum of weight x part over the parts that are present (not NaN); NaN where none is."""
    total, present = np.zeros(count), np.zeros(count, bool)
    for name, values in parts.items():
        here = ~np.isnan(values)
        total[here] += weights[name] * values[here]
        present |= here
    return np.where(present, total, np.nan)


def overlong_penalty(lengths: np.ndarray, max_tokens: int, buffer: int, penalty: float) -> np.ndarray:
    """[N]: 0 up to max_tokens - buffer, then linear, `penalty` at max_tokens and beyond (arXiv 2503.14476, eq. 13).

    Subtracted from the score. buffer 0 = off.
    """
    if buffer <= 0:
        return np.zeros(len(lengths))
    return penalty * np.clip((np.asarray(lengths, np.float64) - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def shape(result, lengths, truncated, reward, max_new_tokens: int, buffer: int | None = None) -> np.ndarray:
    """Shaped scores [N] float64 of a RewardResult; a score that is absent (NaN) stays absent throughout.

    In this order: 1. the weighted sum, `result.total`; 2. zero_without_end: 0 where `truncated`; 3. times scale;
    4. plus bias; 5. clipped to [-clip, clip]; 6. minus the DAPO overlong penalty. (Then reward.norm_mean and norm_std,
    over the whole batch; see rl/rollouts.)

    Raises RunStopped for a score beyond LARGEST, as weights and scale can make it: advantages in fp32 would be 0.

    Args:
      result: RewardResult. lengths: [N] tokens of the completions. truncated: [N] bool, cut by the length limit.
      reward: config.reward. max_new_tokens: the limit the completions were sampled under. buffer: of the overlong
        penalty, in tokens; None = reward.overlong_buffer.
    """
    score = np.array(result.total, np.float64)
    if reward.zero_without_end:
        score = np.where(truncated & ~np.isnan(score), 0.0, score)
    score = score * reward.scale + reward.bias
    if reward.clip is not None:
        score = np.clip(score, -reward.clip, reward.clip)
    if (beyond := np.flatnonzero(np.abs(score) > LARGEST)).size:
        i = beyond[0]
        parts = ", ".join(f"{name} {values[i]:g}" for name, values in result.parts.items() if not np.isnan(values[i]))
        raise RunStopped(f"the score of completion {i} of the batch is {score[i]:g} ({parts}; reward.scale="
                         f"{reward.scale:g}, reward.bias={reward.bias:g}): beyond {LARGEST:g}, whose square fp32 can "
                         "hold; lower reward.weights or reward.scale, or set reward.clip")
    buffer = reward.overlong_buffer if buffer is None else buffer
    if buffer <= 0:
        return score
    return score - overlong_penalty(lengths, max_new_tokens, buffer, reward.overlong_penalty)


def trial_items(dataset, tokenizer, prefix: str = "") -> list[RewardItem]:
    """The first two rows (of every source) as if their reference answers were completions; for trying reward functions.
    """
    items = []
    for i in dataset.firsts:
        example = dataset[i]
        columns = {"answer": example.answer, **example.columns}
        text = prefix + ("" if example.answer is None else str(example.answer))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        items.append(RewardItem(prompt=example.prompt, completion=text, columns=columns, group=i, token_ids=ids,
                                context_ids=np.asarray(example.prompt_ids).tolist(), functions=example.rewards))
    return items
