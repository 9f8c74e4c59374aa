"""Makes rows of preferences of completions that were scored: a run's rollouts, or what an evaluation wrote.

    python -m jaxrl.data.make_pairs runs/mine/eval/step_00000000_train.jsonl --out pairs.jsonl

Of the completions to one prompt those with the highest scores are chosen, against those with the lowest. How such
completions come about: docs/guides/preferences.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def pairs_of(records, per_prompt: int = 1, gap: float = 0.0, reward: str = "") -> tuple[list[dict], dict[str, int]]:
    """Rows {prompt, chosen, rejected, margin, answer} of records as rollouts and evaluations write them, in the order
    in which the prompts first come.

    The k-th pair of a prompt is its k-th best completion and its k-th worst, for k up to `per_prompt` and while their
    scores differ by more than `gap`; of equal scores the earlier completion counts as the better choice for either
    side. Left out are completions without a score, those that the length limit cut (an end token would be
    taught where there was none), and all but the first of those with equal texts.

    Args:
      reward: the name of the reward that is the score; empty = the run's own, all of them together.

    Returns:
      (rows, {what was left out: how many completions; "prompts", "prompts without a pair": how many prompts}).
    """
    groups: dict[str, tuple[dict, dict[str, float]]] = {}
    counts = {"without a score": 0, "cut by the length limit": 0, "equal texts": 0}
    for record in records:
        prompt = record.get("asked", record["prompt"])
        first, scores = groups.setdefault(json.dumps(prompt, sort_keys=True), (record, {}))
        score = record["reward"]["parts"].get(reward) if reward else record["score"]
        if record["finish"] != "stop":
            counts["cut by the length limit"] += 1
        elif score is None:
            counts["without a score"] += 1
        elif record["completion"] in scores:
            counts["equal texts"] += 1
        else:
            scores[record["completion"]] = score
    rows, without = [], 0
    for first, scores in groups.values():
        best = sorted(scores, key=lambda text: -scores[text])
        worst = sorted(scores, key=scores.get)
        mine = [(c, w) for c, w in zip(best, worst, strict=True) if scores[c] - scores[w] > gap][:per_prompt]
        without += not mine
        rows += [{"prompt": first.get("asked", first["prompt"]), "chosen": c, "rejected": w,
                  "margin": scores[c] - scores[w], "answer": first["answer"]} for c, w in mine]
    return rows, counts | {"prompts": len(groups), "prompts without a pair": without}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="rollouts/*.jsonl of a run, or eval/*.jsonl")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--per-prompt", type=int, default=1, help="most pairs of one prompt")
    parser.add_argument("--gap", type=float, default=0.0, help="scores of a pair differ by more than this")
    parser.add_argument("--reward", default="", help="name of the reward that decides; default: the sum of all")
    args = parser.parse_args(argv)
    records = (json.loads(line) for file in args.files for line in file.read_text("utf-8").splitlines())
    rows, counts = pairs_of(records, args.per_prompt, args.gap, args.reward)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    print(f"{len(rows)} pairs in {args.out}; " + ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    main()
