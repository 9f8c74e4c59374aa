"""Makes the embedded task `arith`: word problems about one changing quantity, worked out line by line.

    python evidence/arith_data.py            # rewrites jaxrl/data/embedded/arith; the same bytes on every machine

Files (JSONL, one problem per line):
    train.jsonl   RL prompts: prompt, answer, kind, steps
    test.jsonl    held-out prompts of the same mix, every problem once
    sft.jsonl     demonstrations: prompt, completion, kind, steps
    tokenizer/    word-level tokenizer in HF format, one token per integer or word

A problem's *key* is what it asks with names and things left out: kind, numbers, operations. Each key belongs to
one file only (by its hash), so the same problem never appears in two of them under other names.

Three kinds: `chain` (1 to 6 steps), `skip` (the same with clauses that change nothing) and `reverse` (the end is
given, the start is asked). What reinforcement learning finds here, by design:

- Strategy. Of the first demonstrations a fifth jumps to the box, of the last ones four fifths do, whatever the problem.
  A model trained on them in order knows how to work, mostly jumps, and is mostly wrong. The reward reads the box
  alone; that working pays is for the policy to discover.
- A class that stays hard. `reverse` is a tenth of the problems and almost none of the demonstrations: its groups
  give next to no signal, and it stays the failing class at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "jaxrl" / "data" / "embedded" / "arith"
NAMES = ("Max", "Ann", "Tom", "Eva", "Ben", "Mia", "Leo", "Zoe", "Sam", "Ida", "Kai", "Liv")
THINGS = ("apples", "books", "coins", "cards", "stamps", "shells", "pens", "eggs")
GAIN = ("finds", "buys", "wins")
LOSE = ("sells", "loses", "drops")
IDLE = ("sees", "counts", "wants")
LETTERS = "abcdef"
TIMES = {2: "doubles", 3: "triples"}
LARGEST = 12        # largest number anywhere in a problem or its working
OPERATIONS = [(sign, n) for sign in "+- " for n in range(2, 6)] + [("*", n) for n in TIMES]
JUMP = (0.2, 0.8)   # share of demonstrations without working: at the start of the file, at its end

# Problems of each kind and number of steps, per thousand. Demonstrations leave `reverse` almost out.
MIX = {("chain", n): share for n, share in zip(range(1, 7), (80, 100, 130, 150, 170, 150), strict=True)}
MIX |= {("skip", n): 35 for n in range(1, 5)}
MIX |= {("reverse", n): share for n, share in zip(range(1, 4), (25, 30, 25), strict=True)}
DEMO_WEIGHT = {"chain": 1, "skip": 2, "reverse": 0.06}
FILES = {"test": 0.15, "train": 0.35, "sft": 0.50}  # share of the keys


class Problem(NamedTuple):
    """`turns` are the clauses in order, each (sign, amount); the sign ' ' changes nothing."""

    kind: str
    start: int
    turns: tuple[tuple[str, int], ...]

    @property
    def steps(self) -> list[tuple[int, str, int, int]]:
        """(value, sign, amount, result) of each clause that changes the value."""
        out, value = [], self.start
        for sign, amount in self.turns:
            if sign != " ":
                out.append((value, sign, amount, apply(value, sign, amount)))
                value = out[-1][-1]
        return out


def apply(value: int, sign: str, amount: int) -> int:
    return {"+": value + amount, "-": value - amount, "*": value * amount, " ": value}[sign]


def draw_problem(kind: str, steps: int, rng: random.Random) -> Problem:
    """A random problem whose values stay in 1..LARGEST."""
    order = [True] * steps + [False] * (rng.randint(1, 2) if kind == "skip" else 0)
    rng.shuffle(order)
    start = value = rng.randint(1, LARGEST)
    turns = []
    for acts in order:
        turns.append(rng.choice([op for op in OPERATIONS if (op[0] != " ") == acts and 1 <= apply(value, *op) <= LARGEST]))
        value = apply(value, *turns[-1])
    return Problem(kind, start, tuple(turns))


def file_of(problem: Problem) -> str:
    """The one file this problem may be in, by the hash of its key."""
    point = int.from_bytes(hashlib.sha256(repr(tuple(problem)).encode()).digest()[:6]) / 2**48
    for name, share in FILES.items():
        point -= share
        if point < 0:
            return name
    return "sft"


# ------------------------------------------------------------------------------------------------------------ wording

def clauses(problem: Problem, rng: random.Random) -> list[str]:
    """One text per clause, e.g. 'b) sells 5'. Question and working use the same words."""
    verbs = {"+": GAIN, "-": LOSE, " ": IDLE}
    return [f"{letter}) " + (f"{TIMES[amount]} them" if sign == "*" else f"{rng.choice(verbs[sign])} {amount}")
            for letter, (sign, amount) in zip(LETTERS, problem.turns, strict=False)]


def question(problem: Problem, texts: list[str], rng: random.Random) -> str:
    """The problem in words, e.g. 'Max has 11 apples: a) sells 5, b) triples them. How many now?'."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if problem.kind == "reverse":
        return f"{name} has {thing}: {', '.join(texts)}, now has {problem.steps[-1][-1]}. How many at first?"
    return f"{name} has {problem.start} {thing}: {', '.join(texts)}. How many now?"


def working(problem: Problem, texts: list[str]) -> str:
    """One line per clause: its words and its equation, or the value alone where nothing changes.

    A reverse problem is undone from its end.
    """
    undo = {"+": "-", "-": "+", "*": "/"}
    lines, value = [], problem.start
    for text, (sign, amount) in zip(texts, problem.turns, strict=True):
        after = apply(value, sign, amount)
        equation = f"{value}{sign}{amount}={after}" if sign != " " else f"{value}"
        if problem.kind == "reverse":
            equation = f"{after}{undo[sign]}{amount}={value}"
        lines.append(f"{text}: {equation}\n")
        value = after
    return "".join(reversed(lines) if problem.kind == "reverse" else lines)


def answer(problem: Problem) -> int:
    return problem.start if problem.kind == "reverse" else problem.steps[-1][-1]


# -------------------------------------------------------------------------------------------------------------- files

def rows(name: str, count: int, seed: int) -> list[dict]:
    """`count` rows of one file. Test problems are unique; the few short problems repeat in the other two.

    A kind that has run out of new test problems (one-step problems are few) is left short rather than repeated.
    """
    rng = random.Random(f"{seed}/{name}")
    mix = {k: share * DEMO_WEIGHT[k[0]] for k, share in MIX.items()} if name == "sft" else MIX
    out, seen, total = [], set(), sum(mix.values())
    for (kind, steps), share in mix.items():
        wanted, tries = round(count * share / total), 0
        while wanted and tries < 200 * count:
            tries += 1
            problem = draw_problem(kind, steps, rng)
            if file_of(problem) != name or (name == "test" and problem in seen):
                continue
            seen.add(problem)
            texts = clauses(problem, rng)
            row = {"prompt": question(problem, texts, rng)}
            box = f"\\boxed{{{answer(problem)}}}"
            if name == "sft":
                row["completion"] = working(problem, texts) + box
            else:
                row["answer"] = str(answer(problem))
            out.append(row | {"kind": kind, "steps": steps})
            wanted -= 1
    rng.shuffle(out)
    return shorten(out, rng) if name == "sft" else out


def shorten(demonstrations: list[dict], rng: random.Random) -> list[dict]:
    """Leaves the working out of ever more of them, as JUMP says; read in order, they end in a habit of jumping."""
    for i, row in enumerate(demonstrations):
        if rng.random() < JUMP[0] + (JUMP[1] - JUMP[0]) * i / len(demonstrations):
            row["completion"] = row["completion"].splitlines()[-1]
    return demonstrations


# How text is cut into words. Spaces belong to the words around a number, so that a number is the same token in a
# question and in its working.
PIECE = r"\\boxed\{|[a-z]\) | ?[A-Za-z]+ ?|[0-9]+|[,.?:] ?|[^A-Za-z0-9]"


def vocabulary() -> list[str]:
    """Every word of the task, by construction and not by counting, so new rows never leave it."""
    words = ["<pad>", "<eos>", "<unk>", "\n", "\\boxed{", "}", "+", "-", "*", "/", "=", "?", ": "]
    words += [f"{letter}) " for letter in LETTERS]
    words += [f"{n}" for n in range(2 * LARGEST + 1)]
    texts = [f"{name} has 0 {thing}, {act} 0. {name} has {thing}, {act} them, now has 0. How many at first?"
             for name in NAMES for thing in THINGS for act in (*GAIN, *LOSE, *IDLE, *TIMES.values())]
    texts += [f"them. How many now? {act} them: {act} 0: 0" for act in (*GAIN, *LOSE, *IDLE, *TIMES.values())]
    for text in texts:
        words += re.findall(PIECE, text)
    return list(dict.fromkeys(words))


def write_tokenizer(folder: Path) -> None:
    """A `tokenizers` word-level model whose decoder glues words back to the exact text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
              "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "model_max_length": 256}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rewrites the embedded task.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=400)
    parser.add_argument("--sft", type=int, default=9000)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        made = rows(name, getattr(args, name), args.seed)
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    write_tokenizer(args.out / "tokenizer")


if __name__ == "__main__":
    main()
