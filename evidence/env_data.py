"""Makes the rows, the demonstrations and the tokenizer of the environments that ship (jaxrl/envs/builtin.py).

    python evidence/env_data.py       # rewrites jaxrl/data/embedded/{calc,guess,library,lake,repair,chat}; the same bytes everywhere

Files (JSONL, one row per line):
    <name>/train.jsonl   what RL asks; what a row is about (the sum, the seed of the facts, the map) is in one file only
    <name>/test.jsonl    what is evaluated
    <name>/sft.jsonl     demonstrations that do what pays: chat messages, all of whose assistant turns are trained on
    <name>/lazy.jsonl    demonstrations that mostly leave it out, for the end of a warm start
    chat/tokenizer/      a token per character and per word of the environments, and a minimal chat template

`guess` has the same 32 rows for training and testing: a row is the number that is sought, of which nothing is told. `repair` has as
many rows for each as there are.

A model that was trained on the first and then on the second knows what pays and seldom does it, so that reinforcement
learning has something to find. The lazy ones of `calc` give the tool signs as chance says, mostly plus, those of `guess`
go on one by one instead of halving, those of `library` follow as many relations as chance says, mostly two, those of
`lake` walk at random, those of `repair` say what stands there already. In none is one habit enough, whatever is asked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from pathlib import Path

from jaxrl.envs import builtin

FOLDER = Path(__file__).resolve().parent.parent / "jaxrl" / "data" / "embedded"
WORK = 0.08         # share of the lazy demonstrations that do what pays
PLUS = 0.7          # share of plus among the signs that lazy demonstrations of `calc` give the tool
HABITS = 2, 5, 2    # lazy demonstrations of `library` that follow one, two, three relations, as shares of all
COUNTS = {"test": 256, "train": 1000, "lazy": 1600,
          "sft": {"calc": 4000, "guess": 800, "library": 2000, "lake": 1000, "repair": 1600}}


def says(content: str) -> dict:
    return {"role": "assistant", "content": content}


def calls(tool: str, /, **arguments) -> dict:
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def asks(content: str) -> dict:
    return {"role": "user", "content": content}


def replies(content: str) -> dict:
    return {"role": "tool", "content": content}


def belongs(key: str, file: str) -> bool:
    """Whether a row of this file may be about this. What is asked in training, in testing and what is demonstrated are
    apart."""
    point = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48
    return file == ("test" if point < 0.15 else "train") if point < 0.5 else file in ("sft", "lazy")


def works(file: str, rng: random.Random) -> bool:
    """Whether a demonstration does what pays."""
    return file == "sft" or rng.random() < WORK


def calc(file: str, count: int, rng: random.Random) -> list[dict]:
    """Sums and differences of three numbers, all four pairs of signs as often. All numbers and values have five digits:
    where the digits to be copied are then always as far away, which so small a model learns with every seed. The lazy
    demonstrations call the tool with signs as chance says, whatever the question: who does that finds another value."""
    out = []
    while len(out) < count:
        numbers = rng.randrange(40_000, 70_000), rng.randrange(10_000, 15_000), rng.randrange(10_000, 15_000)

        def written(one, other, numbers=numbers):
            return f"{numbers[0]}{one}{numbers[1]}{other}{numbers[2]}"

        expression = written(*("++", "+-", "-+", "--")[len(out) % 4])
        if not belongs(expression, file):
            continue
        if file in ("train", "test"):
            out.append({"prompt": expression, "answer": builtin.calculate(expression)})
            continue
        asked = expression if file == "sft" else written(*rng.choices("+-", (PLUS, 1 - PLUS), k=2))
        value = builtin.calculate(asked)
        out.append({"prompt": [asks(expression), calls("calculate", expression=asked), replies(value), says(value)]})
    return out


def guess(file: str, count: int, rng: random.Random) -> list[dict]:
    """All numbers. Demonstrations begin in the middle; some go on by halves, most crawl on one by one."""
    if file in ("train", "test"):
        return [{"prompt": "1-32", "number": n} for n in range(1, 33)]
    out = []
    for _ in range(count):
        number, low, high, halves = rng.randint(1, 32), 1, 32, works(file, rng)
        mine, reply, messages = (low + high) // 2, "1-32", []
        for _ in range(6):
            messages += [asks(reply), says(str(mine))]
            if mine == number:
                break
            reply = "higher" if mine < number else "lower"
            low, high = (mine + 1, high) if mine < number else (low, mine - 1)
            mine = (low + high) // 2 if halves else low if mine < number else high
        out.append({"prompt": messages})
    return out


def library(file: str, count: int, rng: random.Random) -> list[dict]:
    """Questions with one, two or three relations to follow, about as many of each. The lazy demonstrations follow as
    many as chance says, whatever the question: too few, or the outermost again. Who does that always finds another
    entry than the answer."""
    out, seed = [], -1
    while len(out) < count:
        seed += 1
        if not belongs(f"library/{seed}", file):
            continue
        known = builtin.facts(seed)
        relations = rng.sample(builtin.RELATIONS, rng.randint(1, 3))  # the innermost first
        entry, people = rng.choice([*builtin.ENTRIES]), [rng.choice(builtin.PEOPLE)]
        steps = relations + relations[-1:] * (3 - len(relations))
        for relation in steps:
            people.append(known[people[-1], relation])
        question = " of ".join([entry, *reversed(relations), people[0]])
        found = [known[person, entry] for person in people]
        answer = found[len(relations)]
        if found.count(answer) > 1:
            continue
        if file in ("train", "test"):
            out.append({"prompt": question, "answer": answer, "seed": seed})
            continue
        follows = len(relations) if file == "sft" else rng.choices((1, 2, 3), HABITS)[0]
        messages = [asks(question)]
        for k in range(follows):
            messages += [calls("look_up", name=people[k], entry=steps[k]), replies(people[k + 1])]
        messages += [calls("look_up", name=people[follows], entry=entry), replies(found[follows]), says(found[follows])]
        out.append({"prompt": messages})
    return out


# ---------------------------------------------------------------------------------------------------------------- lake

def ways(grid: str, longest: int = 6) -> list[list[str]]:
    """The shortest ways to solve a map, found breadth first; at most the first eight of them, [] where none is so
    short."""
    level, seen = [(grid, [])], {grid}
    for _ in range(longest):
        further = []
        for at, way in level:
            for move in builtin.MOVES:
                to = builtin.apply_move(at, move)
                if to not in seen and "X" not in to:
                    further.append((to, [*way, move]))
        found = [way for at, way in further if builtin.is_solved(at)]
        if found:
            return found[:8]
        seen |= {at for at, _ in further}
        level = list({at: (at, way) for at, way in further}.values())
    return []


def draw_map(kind: str, rng: random.Random) -> str:
    """4x4: a lake with three holes, or a store with a box, a target and two walls; solved in two to six moves."""
    while True:
        cells = list({"lake": "PGOOO", "boxes": "PBT##"}[kind].ljust(16, "."))
        rng.shuffle(cells)
        grid = "\n".join("".join(cells[i:i + 4]) for i in range(0, 16, 4))
        found = ways(grid)
        if found and len(found[0]) > 1:
            return grid


def lake(file: str, count: int, rng: random.Random) -> list[dict]:
    out = []
    while len(out) < count:
        kind = rng.choice(("lake", "boxes"))
        grid = draw_map(kind, rng)
        if not belongs(grid, file):
            continue
        if file in ("train", "test"):
            out.append({"prompt": grid, "map": grid, "kind": kind})
            continue
        way = rng.choice(ways(grid)) if works(file, rng) else rng.choices(list(builtin.MOVES), k=8)
        messages = []
        for move in way[:8]:
            messages += [asks(grid), says(move)]
            grid = builtin.apply_move(grid, move)
            if builtin.is_solved(grid) or "X" in grid:
                break
        out.append({"prompt": messages})
    return out


# -------------------------------------------------------------------------------------------------------------- repair

DO = {  # name -> (what it should do, what may stand there)
    **{name: (f"x{sign}y", [f"x{other}y" for other in ("+", "-", "*", "//", "%")])
       for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "//"), ("mod", "%"))},
    **{name: (f"x{sign}y", [f"x{other}y" for other in ("<", ">", "==", "!=")])
       for name, sign in (("less", "<"), ("more", ">"), ("same", "=="), ("other", "!="))},
    **{name: (right, ["x+1", "x-1", "x*2", "x//2", "x*x", "x+x+x"])
       for name, right in (("inc", "x+1"), ("dec", "x-1"), ("twice", "x*2"), ("half", "x//2"), ("square", "x*x"))},
    **{name: (right, ["x%2==0", "x%2==1", "x>0", "x<0"])
       for name, right in (("even", "x%2==0"), ("odd", "x%2==1"), ("plus", "x>0"), ("minus", "x<0"))},
}


def broken() -> list[tuple[str, str, dict]]:
    """All (source, the expression that belongs there, unit tests): each function with each other expression, in three
    pairs of letters. A function's tests are always the same; of all these expressions only the right one passes."""
    out = []
    for name, (right, others) in DO.items():
        rng, two = random.Random(f"repair/{name}"), "y" in right

        def values(text, inputs):
            return [eval(text, {}, dict(zip("xy", given, strict=False))) for given in inputs]

        while True:
            inputs = [[rng.randint(-9, 30), rng.randint(1, 9)][:1 + two] for _ in range(4)]
            told = values(right, inputs)
            if len(set(told)) > 1 and [values(other, inputs) for other in others].count(told) == (right in others):
                break
        tests = {"inputs": inputs, "outputs": told, "fn_name": name}
        for x, y in ("ab", "mn", "xy"):
            named = [text.replace("x", "X").replace("y", y).replace("X", x) for text in (right, *others)]
            head = f"def {name}({x},{y}):" if two else f"def {name}({x}):"
            out += [(f"{head}\n return {wrong}", named[0], tests) for wrong in named[1:] if wrong != named[0]]
    return out


def repair(file: str, count: int, rng: random.Random) -> list[dict]:
    """Small functions with another one's expression. Demonstrations that do not repair are told a test that fails, and
    say the same again."""
    known = [row for row in broken() if belongs(row[0], file)]
    if file in ("train", "test"):
        return [{"prompt": source, "source": source, "tests": tests} for source, _, tests in known]
    out = []
    for source, right, tests in rng.choices(known, k=count):
        head, _, wrong = source.partition("\n return ")
        messages = [asks(source), says(right if works(file, rng) else wrong)]
        if messages[-1]["content"] == wrong:
            letters = re.search(r"\((.*)\)", head).group(1).split(",")
            failing = next(k for k, given in enumerate(tests["inputs"])
                           if eval(wrong, {}, dict(zip(letters, given, strict=True))) != tests["outputs"][k])
            shown = f"{tests['fn_name']}({','.join(map(str, tests['inputs'][failing]))}) is {tests['outputs'][failing]}"
            messages += [asks(shown), says(right if works(file, rng) else wrong)]
        out.append({"prompt": messages})
    return out


# ----------------------------------------------------------------------------------------------------------- tokenizer

TEMPLATE = """\
{%- for message in messages -%}
<{{ message.role }}>{{ message.content or '' }}
{%- if message.role == 'assistant' -%}
{%- if message.tool_calls -%}
[{%- for call in message.tool_calls -%}
{{ call.function.name }}({%- for name, value in call.function.arguments.items() -%}
{{ name }}={{ value | tojson }}{{ ',' if not loop.last }}{%- endfor -%}){{ ',' if not loop.last }}{%- endfor -%}]
{%- endif -%}
<eos>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""


def words() -> list[str]:
    """What is one token though it is several characters; the longest first."""
    values = [value for values in builtin.ENTRIES.values() for value in values]
    out = {"calculate", "expression", "look_up", "name", "entry", "unknown", " of ", "higher", "lower", "number",
           *builtin.PEOPLE, *builtin.RELATIONS, *builtin.ENTRIES, *values, *builtin.MOVES}
    return sorted(out, key=lambda word: (-len(word), word))


def write_tokenizer(folder: Path) -> None:
    """A `tokenizers` word-level model whose decoder glues tokens back to the exact text: printable ASCII and the line
    break as characters, the words of the environments, and special tokens for the roles."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>"]
    vocabulary = [*special, "\n", *map(chr, range(32, 127)), *words()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    pieces = "|".join([*words(), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
              "unk_token": "<unk>", "additional_special_tokens": special[3:], "clean_up_tokenization_spaces": False,
              "model_max_length": 512, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rewrites the rows of the environments that ship.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", default="calc,guess,library,lake,repair")
    args = parser.parse_args(argv)
    for make in (globals()[name] for name in args.names.split(",")):
        folder = args.out / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for file, count in COUNTS.items():
            count = count[make.__name__] if file == "sft" else count
            rows = make(file, count, random.Random(f"{args.seed}/{make.__name__}/{file}"))
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
            (folder / f"{file}.jsonl").write_text("".join(lines), "utf-8")
    write_tokenizer(args.out / "chat" / "tokenizer")


if __name__ == "__main__":
    main()
