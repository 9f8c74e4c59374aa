"""Builds preference pairs from scored completions: a run's rollouts, or the records of an evaluation.

    python -m jaxrl.data.make_pairs runs/mine/eval/step_00000000_train.jsonl --out pairs.jsonl

The completions of a prompt with the highest scores are paired with those with the lowest. How to
sample such completions: docs/guides/preferences.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def make_pairs(records, per_prompt: int = 1, gap: float = 0.0, reward: str = "") -> tuple[list[dict], dict[str, int]]:
    """Builds rows {prompt, chosen, rejected, margin, answer} from records of rollouts or evaluations, in the order of
    the prompts' first record.

    The k-th pair of a prompt is its k-th best and k-th worst completion, for k up to `per_prompt` and while their
    scores differ by more than `gap`. Ties prefer the earlier completion on either side. Dropped are completions
    without a score, completions whose `finish` is not "stop", which count as cut by the length limit (training would
    add an end token they do not have), and all but the first of completions with equal texts.

    Args:
      records: dicts with prompt (or `asked`, which goes before it), completion, score, finish, answer and
        reward["parts"].
      per_prompt: maximum number of pairs of one prompt.
      gap: minimum difference (exclusive) between the scores of a pair, at least 0.
      reward: name of the reward that is the score; empty for the run's total score.

    Returns:
      (rows, counts): counts of dropped completions by reason, of "prompts" and of "prompts without a pair".

    Raises ValueError for a gap below 0, with which a completion could be its own rejected one, or that is no number.
    """
    if not gap >= 0:
        raise ValueError(f"gap={gap}: must be at least 0")
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
        worst = sorted(scores, key=scores.__getitem__)
        mine = [(c, w) for c, w in zip(best, worst, strict=True) if scores[c] - scores[w] > gap][:per_prompt]
        without += not mine
        rows += [{"prompt": first.get("asked", first["prompt"]), "chosen": c, "rejected": w,
                  "margin": scores[c] - scores[w], "answer": first["answer"]} for c, w in mine]
    return rows, counts | {"prompts": len(groups), "prompts without a pair": without}


def main(argv=None) -> None:
    """Writes preference pairs of the completions in the files named on the command line, as JSON lines. argv: None =
    sys.argv."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="rollouts/*.jsonl of a run, or eval/*.jsonl")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--per-prompt", type=int, default=1, help="most pairs of one prompt")
    parser.add_argument("--gap", type=float, default=0.0, help="scores of a pair differ by more than this")
    parser.add_argument("--reward", default="", help="name of the reward that decides; default: the sum of all")
    args = parser.parse_args(argv)
    if not args.gap >= 0:
        parser.error(f"--gap={args.gap}: must be at least 0")
    records = (json.loads(line) for file in args.files for line in file.read_text("utf-8").split("\n") if line.strip())
    rows, counts = make_pairs(records, args.per_prompt, args.gap, args.reward)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    print(f"{len(rows)} pairs in {args.out}; " + ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    main()
