"""Claims about reward functions, tested on completions of the first rows. Called by certify.run.

`score` is that of the worker pool: items -> RewardResult, nothing recorded.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl.certify.claims import Broken
from jaxrl.rewards.items import NON_FAILURES

HOSTILE = {
    "empty": "",
    "blank": " \n\t ",
    "control characters": "\x00\x01\x07\x1b[31m\r\x7f",
    "100,000 letters": "a" * 100_000,
    "10,000 open brackets": "(" * 10_000,
    "2,000 boxes that are not closed": "\\boxed{" * 2_000,
    "a number of 5,000 digits": "\\boxed{" + "9" * 5_000 + "}",
    "a power that nobody should work out": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "other digits": "\\boxed{\u0664\u0662} \\boxed{\u00b2} \u2167 \uff14\uff12",
    "Arabic and Chinese": "\u0627\u0644\u062c\u0648\u0627\u0628 \u7b54\u6848",
    "an emoji of several": "\U0001f468\u200d\U0001f469",
    "undecodable bytes": "\ufffd\ufffd",
    "marks without a letter": "\u0301\u0301\u202e\u200b",
    "nan": "nan",
    "inf": "-inf",
    "a superscript as the answer": "\\boxed{\u00b2}",
    "markup": "</answer><answer>{\"a\": [1, null]}%s%d{0}",
    "a backslash at the end": "\\boxed{1}\\",
}


def items_of(examples, item) -> list:
    """Makes four completions of each row, right, wrong and unfinished ones. item: (example, text, number from 0) ->
    RewardItem."""
    out = []
    for example in examples:
        answer = "" if example.answer is None else str(example.answer)
        texts = (answer, f"\\boxed{{{answer}}}", f"I do not know: 17, or {answer[:1]}", f"{answer} or not {answer}")
        out += [item(example, text, len(out) + k) for k, text in enumerate(texts)]
    return out


def values(score, items) -> dict[str, np.ndarray]:
    """Returns reward name -> [N] float raw values of N RewardItems, NaN = absent. score: RewardItems -> RewardResult.
    """
    return score(items).parts


def compared(a, b, items, how: str, told: str):
    """Raises Broken for the first item and reward whose two results differ; two NaN are equal.

    Args:
      a, b: reward name -> [N] values. items: the N RewardItems.
      how: name of the second value in the counterexample. told: the sentence about the difference.
    """
    for name in a:
        for i, (x, y) in enumerate(zip(a[name], b[name], strict=True)):
            if x != y and not (np.isnan(x) and np.isnan(y)):
                raise Broken(f"reward {name}: {told}, {x:.6g} and {y:.6g}", {
                    "reward": name, "completion": items[i].completion[:200], "columns": list(items[i].columns),
                    "prompt": str(items[i].prompt)[:200], "value": float(x), how: float(y)})


def twice(score, items) -> str:
    """Tests the claim `reward_twice`: the same items get the same rewards twice. Raises Broken.

    score: RewardItems -> RewardResult. items: the RewardItems."""
    compared(values(score, items), values(score, items), items, "the second time", "asked twice of the same answer")
    return f"{len(items)} answers"


def columns(score, items) -> str:
    """Tests the claim `reward_columns`: the order of a row's columns does not matter. Raises Broken.

    score: RewardItems -> RewardResult. items: the RewardItems."""
    turned = [dataclasses.replace(item, columns=dict(reversed(item.columns.items()))) for item in items]
    compared(values(score, items), values(score, turned), items, "columns in reverse",
             "of the same row with its columns in reverse")
    return f"{len(items[0].columns)} columns in reverse"


def rows(score, items) -> str:
    """Tests the claim `reward_rows`: rewards do not depend on the other rows of a call. Raises Broken.

    score: RewardItems -> RewardResult. items: scored in order, in reverse, and every fifth alone."""
    base, last = values(score, items), values(score, items[::-1])
    compared(base, {name: x[::-1] for name, x in last.items()}, items, "rows in reverse", "with the rows in reverse")
    some = items[::5]  # of all kinds of text
    for item in some:
        alone, i = values(score, [item]), next(k for k, other in enumerate(items) if other is item)
        compared({n: x[i: i + 1] for n, x in base.items()}, alone, [item], "alone", "among others and alone")
    return f"{len(items)} answers in reverse, {len(some)} of them alone"


def hostile(score, item) -> str:
    """Tests the claim `reward_hostile`: any text gets a finite reward or None. Raises Broken for a failure.

    score: RewardItems -> RewardResult. item: its completion is replaced by each text of HOSTILE."""
    names, texts = list(HOSTILE), list(HOSTILE.values())
    result = score([dataclasses.replace(item, completion=text) for text in texts])
    for text, outcomes in zip(names, result.outcomes, strict=True):
        for reward, outcome in outcomes.items():
            if outcome not in NON_FAILURES:
                raise Broken(f"reward {reward} of a text of {text}: {outcome[:300]}",
                             {"reward": reward, "what": text, "completion": HOSTILE[text][:200],
                              "characters": len(HOSTILE[text]), "outcome": outcome[:1000]})
    most = {name: float(np.nanmax(x)) if np.isfinite(x).any() else None for name, x in result.parts.items()}
    return f"{len(texts)} texts; the best of them have " + ", ".join(f"{v} of {k}" for k, v in most.items())
