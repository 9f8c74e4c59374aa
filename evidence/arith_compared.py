"""Makes the pairs of the embedded task: a right answer, worked out, and a wrong one to the same problem.

    python evidence/arith_compared.py     # rewrites jaxrl/data/embedded/arith/compared*.jsonl; the same bytes on every machine

The wrong answer is of one of three kinds: `jump`, a wrong box and nothing before it; `slip`, worked out with one equation that is off by
1 to 3 and a box that follows from it; `box`, worked out right with a wrong box. Problems of compared.jsonl have keys of the
demonstrations, those of compared_test.jsonl keys of test.jsonl (see arith_data.py): no problem is in both.
"""

from __future__ import annotations

import json
import random

from arith_data import FOLDER, LARGEST, MIX, answer, apply, clauses, draw_problem, file_of, question, working

# (keys, pairs, their kinds by turns). To see slips takes most pairs: they are found one equation at a time.
FILES = {"compared": ("sft", 6000, ("jump", "slip", "box", "slip", "slip", "slip")),
         "compared_test": ("test", 400, ("jump", "slip", "box"))}


def off(value: int, rng: random.Random) -> int:
    """Another number, near."""
    return rng.choice([x for d in (1, 2, 3) for x in (value - d, value + d) if 1 <= x <= LARGEST])


def slipped(problem, texts, rng) -> str | None:
    """The working with one wrong equation and its consequences; None where values leave the vocabulary."""
    at = rng.choice([i for i, (sign, _) in enumerate(problem.turns) if sign != " "])
    lines, value = [], problem.start
    for i, (text, (sign, amount)) in enumerate(zip(texts, problem.turns, strict=True)):
        after = apply(value, sign, amount)
        after = off(after, rng) if i == at else after
        if not 1 <= after <= LARGEST:
            return None
        lines.append(f"{text}: {value}{sign}{amount}={after}\n" if sign != " " else f"{text}: {value}\n")
        value = after
    return "".join(lines) + f"\\boxed{{{value}}}"


def row(problem, kind: str, rng: random.Random) -> dict | None:
    texts = clauses(problem, rng)
    right, work = answer(problem), working(problem, texts)
    wrong = f"\\boxed{{{off(right, rng)}}}"
    rejected = {"jump": wrong, "box": work + wrong}.get(kind) or slipped(problem, texts, rng)
    if rejected is None or rejected.endswith(f"\\boxed{{{right}}}"):
        return None
    return {"prompt": question(problem, texts, rng), "chosen": f"{work}\\boxed{{{right}}}", "rejected": rejected, "kind": kind}


def main(folder=FOLDER):
    shares = {key: share for key, share in MIX.items() if key[0] != "reverse"}
    for name, (source, count, kinds) in FILES.items():
        rng, out = random.Random(f"0/{name}"), []
        while len(out) < count:
            (kind, steps), = rng.choices(list(shares), list(shares.values()))
            problem = draw_problem(kind, steps, rng)
            if file_of(problem) == source and (made := row(problem, kinds[len(out) % len(kinds)], rng)):
                out.append(made)
        rng.shuffle(out)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in out))
        print(f"{name}.jsonl: {len(out)} pairs")


if __name__ == "__main__":
    main()
