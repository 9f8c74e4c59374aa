"""Items and results of a reward pool, their metrics, and the shaped score per completion. N is
the number of completions.
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
from jaxrl.workers.loading import MAX_REWARD


@dataclasses.dataclass
class RewardItem:
    """One completion to score. All values must have a JSON form (numpy scalars and arrays are converted).

    Attributes:
      prompt: text or messages, as in the data.
      completion: text.
      columns: the row's columns, including `answer`.
      finish: why the completion ended: 'stop', 'length' or 'abort'.
      group, sample: number of the prompt group, and of the completion within it.
      token_ids: ids of the completion, a sequence or integer array; context_ids: ids of everything before it.
      functions: names of the reward functions that score it; None for all, or those of reward.column.
      images: the row's images: `numbers` names them, `sizes()` and `files()` read them (data.images.source.RowFiles);
        None in a job of text.
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
    images: Any = None


@dataclasses.dataclass
class RewardResult:
    """Scores of N completions, in the order of the items.

    Attributes:
      total: [N] float64, weighted sum of the present parts before shaping (see `shape`); NaN = absent.
      parts: name -> [N] float64, NaN = absent.
      outcomes: per completion {name: outcome}, only functions that apply to the row; "ok", "none" (no score for the
        row), "nan", "timeout" or "error: ...".
      item_metrics: per completion {name: {metric: value}}.
      metrics: means and shares over the step (`reward_metrics`), without times.
      by: RewardPool.key(), a digest of the code and options that decided the scores; "" if no function applied.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    outcomes: list[dict[str, str]]
    item_metrics: list[dict[str, dict[str, float]]]
    metrics: dict[str, float]
    by: str = ""

    def records(self) -> list[dict]:
        """Returns one JSON-able {parts, outcomes, metrics, by} per completion, as `RewardPool.score(recorded=...)`
        takes it.
        """
        return [{"parts": {n: float(self.parts[n][i]) if o == "ok" else None for n, o in outcomes.items()},
                 "outcomes": outcomes, "metrics": self.item_metrics[i], "by": self.by}
                for i, outcomes in enumerate(self.outcomes)]


NON_FAILURES = ("ok", "none")  # outcomes that are not failures
# cause of a service's failure; failures of functions begin with an exception's name
CAUSE = re.compile(r"error: ([a-z]\w*): ")


def failed_items(results: dict) -> set[int]:
    """Returns the indices of items with a failed part, of results {(item, function): {value, outcome, metrics}}. An
    outcome other than "ok" and "none" is a failure."""
    return {i for (i, _), r in results.items() if r["outcome"] not in NON_FAILURES}


def is_result(reply) -> bool:
    """Returns whether a worker's reply has the form {value, outcome, metrics} of `calling.outcome`: metrics a dict,
    outcome a text, and value a float if the outcome is "ok"."""
    if not isinstance(reply, dict) or not isinstance(reply.get("metrics"), dict):
        return False
    outcome = reply.get("outcome")
    return isinstance(reply.get("value"), float) if outcome == "ok" else isinstance(outcome, str)


def item_json(item: RewardItem, i: int, without: tuple[str, ...] = ()) -> str:
    """Returns the JSON of the i-th item for workers.

    Args:
      item: its images become `image_sizes` and `images` (files as base64 text), which are read now.
      i: its number, for messages.
      without: attributes that none of their functions needs.

    Raises:
      ConfigError: a value has no JSON form, or an image cannot be used.
    """
    try:
        fields = {name: value for name, value in vars(item).items() if name not in ("functions", "images", *without)}
        if item.images is not None:
            fields |= {} if "image_sizes" in without else {"image_sizes": item.images.sizes()}
            fields |= {} if "images" in without else {"images": item.images.files()}
        return json.dumps(fields, default=_to_json)
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"item {i}: a value has no JSON form and cannot be passed to reward functions: {e}; columns: "
                          f"{', '.join(item.columns)}") from None


def item_hash(item: RewardItem) -> int:
    """Returns a 64-bit hash (int) of everything functions may see of a completion: text, tokens, prompt,
    columns, finish, group, sample and the numbers of images (not their files). Raises TypeError for a value without a
    JSON form.
    """
    fields = {name: value for name, value in vars(item).items() if name not in ("functions", "images")}
    if item.images is not None and len(item.images.numbers):
        fields["images"] = item.images.numbers
    for name in ("token_ids", "context_ids"):
        fields[name] = np.asarray(fields[name], np.int64).tolist()
    text = json.dumps(fields, default=_to_json, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _to_json(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r}")


def reward_metrics(total, outcomes, item_metrics) -> dict[str, float]:
    """Returns metrics of a step's rewards, reward/*.

    failed_fraction and absent_fraction are over completions; the shares of outcomes (none, nan, timeout ...) are over
    (completion, function) pairs; reward/<name>/failed_<cause>, of services, over the completions that the function
    applies to; the functions' own metrics are means over the completions that have them.

    Args:
      total: [N] float64, NaN = absent. outcomes: {function: outcome} per completion. item_metrics: {function: {name:
        value}} per completion."""
    flat = [o for per_item in outcomes for o in per_item.values()]
    pairs, n = max(1, len(flat)), max(1, len(outcomes))
    failed = sum(any(o not in NON_FAILURES for o in per_item.values()) for per_item in outcomes)
    out = {
        "reward/failed_fraction": failed / n,
        "reward/absent_fraction": float(np.isnan(total).sum()) / n,
        "reward/none_fraction": flat.count("none") / pairs,
        "reward/nan_fraction": flat.count("nan") / pairs,
        "reward/timeout_fraction": flat.count("timeout") / pairs,
        "reward/error_fraction": sum(o.startswith("error") for o in flat) / pairs,
    }
    scored: Counter = Counter(name for per_item in outcomes for name in per_item)
    causes: Counter = Counter((name, cause[1]) for per_item in outcomes for name, o in per_item.items()
                              if (cause := CAUSE.match(o)))
    out |= {f"reward/{name}/failed_{cause}": k / scored[name] for (name, cause), k in causes.items()}
    sums: dict[str, list[float]] = {}
    for per_item in item_metrics:
        for name, metrics in per_item.items():
            for key, value in metrics.items():
                sums.setdefault(f"reward/{name}/{key}", []).append(value)
    return out | {k: float(np.mean(v)) for k, v in sums.items()}


# -- one score per completion: pure functions on numpy arrays ----------------------------------------------------------


def weighted_sum(parts: dict[str, np.ndarray], weights: dict[str, float], count: int) -> np.ndarray:
    """Returns [N] float64: the sum of weight x part over the present parts (not NaN); NaN if none is present. The sum
    is not divided by the weights.

    parts: name -> [N] float64. weights: name -> weight. count: N."""
    total, present = np.zeros(count), np.zeros(count, bool)
    for name, values in parts.items():
        here = ~np.isnan(values)
        total[here] += weights[name] * values[here]
        present |= here
    return np.where(present, total, np.nan)


def overlong_penalty(lengths: np.ndarray, max_tokens: int, buffer: int, penalty: float) -> np.ndarray:
    """Returns [N] float64 penalties to subtract: 0 up to max_tokens - buffer, then linear, `penalty` from max_tokens on
    (DAPO, arXiv 2503.14476, eq. 13).

    Args:
      lengths: [N] tokens of the completions.
      max_tokens: tokens from which the penalty is whole.
      buffer: tokens over which it grows; 0 disables the penalty.
      penalty: in points of the score.
    """
    if buffer <= 0:
        return np.zeros(len(lengths))
    return penalty * np.clip((np.asarray(lengths, np.float64) - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def shape(result, lengths, truncated, reward, max_new_tokens: int, buffer: int | None = None) -> np.ndarray:
    """Returns the shaped scores [N] float64 of a RewardResult. Absent scores (NaN) stay absent.

    In this order, from 2 on each if its option is set: 1. the weighted sum, `result.total`; 2. zero_without_end: 0
    where `truncated`; 3. times scale; 4. plus bias; 5. clipped to [-clip, clip]; 6. minus the DAPO overlong penalty.
    reward.norm_mean and norm_std follow, over the whole batch (rl/rollouts).

    Args:
      result: RewardResult.
      lengths: [N] tokens of the completions.
      truncated: [N] bool, cut by the length limit.
      reward: config.reward.
      max_new_tokens: the limit the completions were sampled with.
      buffer: of the overlong penalty, in tokens; None for reward.overlong_buffer.

    Raises:
      RunStopped: a score after step 5 is beyond MAX_REWARD, whose square fp32 can hold."""
    score = np.array(result.total, np.float64)
    if reward.zero_without_end:
        score = np.where(truncated & ~np.isnan(score), 0.0, score)
    score = score * reward.scale + reward.bias
    if reward.clip is not None:
        score = np.clip(score, -reward.clip, reward.clip)
    if (beyond := np.flatnonzero(np.abs(score) > MAX_REWARD)).size:
        raise _too_large(result, score, beyond[0], reward)
    buffer = reward.overlong_buffer if buffer is None else buffer
    if buffer <= 0:
        return score
    return score - overlong_penalty(lengths, max_new_tokens, buffer, reward.overlong_penalty)


def _too_large(result, score, i: int, reward) -> RunStopped:
    parts = ", ".join(f"{name} {values[i]:g}" for name, values in result.parts.items() if not np.isnan(values[i]))
    return RunStopped(f"the score of completion {i} of the batch is {score[i]:g} ({parts}; reward.scale="
                      f"{reward.scale:g}, reward.bias={reward.bias:g}): beyond {MAX_REWARD:g}, whose square fp32 "
                      "can hold; lower reward.weights or reward.scale, or set reward.clip")


def trial_items(dataset, tokenizer, prefix: str = "", images=None) -> list[RewardItem]:
    """Returns the first two rows (of every source) with their reference answers as completions, to try out reward
    functions.

    Args:
      dataset: a Dataset or Mixture. tokenizer: makes the completions' token ids.
      prefix: text before each answer. images: the job's ImageSource; None in a job of text."""
    items = []
    for i in dataset.first_rows:
        example = dataset[i]
        columns = {"answer": example.answer, **example.columns}
        text = prefix + ("" if example.answer is None else str(example.answer))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        items.append(RewardItem(prompt=example.prompt, completion=text, columns=columns, group=i, token_ids=ids,
                                context_ids=np.asarray(example.prompt_ids).tolist(), functions=example.rewards,
                                images=images and images.row_files(example.images)))
    return items
