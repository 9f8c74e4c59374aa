"""The embedded task: what ships is what the generator makes, right, disjoint and inside the configs' limits."""

import collections
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.tiers import first_cases
from transformers import AutoTokenizer

from jaxrl.config.load import load_config
from jaxrl.data.mixing import Mix
from jaxrl.resolve.checks.common import check
from jaxrl.rewards.builtin import boxed_reward

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
import arith_compared as compared  # noqa: E402
import arith_data as make  # noqa: E402
import shapes_data as shapes  # noqa: E402

FOLDER = make.FOLDER
FILES = ("train", "test", "sft")


def read(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows():
    return {name: read(name) for name in FILES}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER / "tokenizer")


SIGNS = {verb: sign for sign, verbs in (("+", make.GAIN), ("-", make.LOSE), (" ", make.IDLE)) for verb in verbs}
FACTORS = {verb: factor for factor, verb in make.TIMES.items()}


def understood(prompt):
    """Reads a prompt anew, knowing only the words: (kind, given number, operations) with names and things left out."""
    first, _, rest = prompt.partition(": ")
    text, _, question = rest.rpartition("How many ")
    given = re.search(r"has (\d+)", first)
    turns = []
    for clause in text.strip(" .").split(", "):
        if clause.startswith("now has "):
            given = re.search(r"(\d+)", clause)
            continue
        letter, verb, what = clause.split()
        assert letter == f"{make.LETTERS[len(turns)]})"
        turns.append(("*", FACTORS[verb]) if what == "them" else (SIGNS[verb], int(what)))
    kind = "reverse" if question == "at first?" else "skip" if any(sign == " " for sign, _ in turns) else "chain"
    assert kind == "reverse" or question == "now?"
    return kind, int(given.group(1)), tuple(turns)


def solved(kind, given, turns):
    """The answer by arithmetic on the text's numbers; a reverse problem by trying every start."""
    def run(value):
        for sign, amount in turns:
            value = {"+": value + amount, "-": value - amount, "*": value * amount, " ": value}[sign]
        return value

    if kind != "reverse":
        return run(given)
    starts = [start for start in range(1000) if run(start) == given]
    assert len(starts) == 1
    return starts[0]


@pytest.mark.full
def test_the_shipped_files_are_what_the_generator_makes(tmp_path):
    make.main(["--out", str(tmp_path)])
    made = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    compared.main(tmp_path)
    made |= {Path(f"{name}.jsonl") for name in compared.FILES}
    there = {p.relative_to(FOLDER) for p in FOLDER.rglob("*") if p.is_file() and not p.name.startswith("pairs")}  # which models sampled
    assert made == there and len(made) == 7
    for path in made:
        assert (tmp_path / path).read_bytes() == (FOLDER / path).read_bytes(), path


def test_compared_answers_are_right_and_visibly_wrong(rows):
    """An ideal judge puts all pairs in order: the chosen answer is right in every line, of the rejected one the box is wrong, which its
    lines show (no line, another box than the last value, or a wrong equation). Held-out problems are in no file that is trained on."""
    keys, slips = {}, 0
    for name in compared.FILES:
        pairs, keys[name] = read(name), set()
        for row in pairs:
            asked = understood(row["prompt"])
            keys[name].add(asked)
            right = str(solved(*asked))
            assert boxed_reward(row["prompt"], row["chosen"], right) == 1 and boxed_reward(row["prompt"], row["rejected"], right) == 0
            told = [(*lines(row[side]), row[side].rpartition("{")[2][:-1]) for side in ("chosen", "rejected")]
            (fine, last, box), (rest, ends, wrong) = told
            assert fine and last == box == right
            assert {"jump": ends is None, "box": rest and ends == right != wrong, "slip": not rest and ends == wrong}[row["kind"]]
            slips += row["kind"] == "slip"
    assert not keys["compared_test"] & (keys["compared"] | {understood(r["prompt"]) for name in ("sft", "train") for r in rows[name]})
    assert slips > 4000


def lines(answer):
    """(whether every equation holds, the last value or None) of an answer."""
    found = re.findall(r": (\d+)(?:([+*-])(\d+)=(\d+))?\n", answer)
    holds = all(not sign or {"+": int(a) + int(b or 0), "-": int(a) - int(b or 0), "*": int(a) * int(b or 0)}[sign] == int(c)
                for a, sign, b, c in found)
    return holds, (found[-1][3] or found[-1][0]) if found else None


def test_another_seed_makes_other_problems(tmp_path):
    make.main(["--out", str(tmp_path), "--seed", "1", "--train", "50", "--test", "20", "--sft", "50"])
    assert (tmp_path / "train.jsonl").read_text().splitlines() != (FOLDER / "train.jsonl").read_text().splitlines()[:50]


def test_no_problem_is_in_two_files_under_other_names(rows):
    keys = {name: {understood(r["prompt"]) for r in rows[name]} for name in FILES}
    for a, b in (("train", "test"), ("train", "sft"), ("test", "sft")):
        assert not keys[a] & keys[b], (a, b)
    assert len(keys["test"]) == len(rows["test"])  # and each is asked once


def test_every_answer_is_right_and_every_line_of_working_true(rows):
    for name in ("train", "test"):
        for r in rows[name]:
            kind, given, turns = understood(r["prompt"])
            assert r["kind"] == kind and r["steps"] == sum(sign != " " for sign, _ in turns)
            assert int(r["answer"]) == solved(kind, given, turns), r
    for r in rows["sft"]:
        *lines, box = r["completion"].split("\n")
        kind, given, turns = understood(r["prompt"])
        assert boxed_reward(r["prompt"], r["completion"], str(solved(kind, given, turns))) == 1.0, r
        assert len(lines) in (0, len(turns)) and box.startswith("\\boxed{")
        for line in lines:
            clause, equation = line.split(": ")
            assert clause in r["prompt"]
            a, sign, b, c = re.fullmatch(r"(\d+)(?:([-+*/])(\d+)=(\d+))?", equation).groups()
            if sign:
                a, b, c = int(a), int(b), int(c)
                assert c == {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign], r


def test_the_last_demonstrations_jump_and_almost_none_are_reverse(rows):
    jumps = np.array([":" not in r["completion"] for r in rows["sft"]])
    shares = [part.mean() for part in np.array_split(jumps, 6)]  # ends of six parts: 0.2, 0.3 ... 0.8
    np.testing.assert_allclose(shares, np.linspace(0.25, 0.75, 6), atol=0.04)
    share = {name: collections.Counter(r["kind"] for r in rows[name])["reverse"] / len(rows[name]) for name in FILES}
    assert 0 < share["sft"] < 0.01 and 0.05 < share["train"] < 0.12 and 0.05 < share["test"] < 0.12


def test_worked_answers_are_long_and_spread(rows, tokenizer):
    worked = [r["completion"] for r in rows["sft"] if ":" in r["completion"] and r["kind"] != "reverse"]
    lengths = [len(ids) + 1 for ids in tokenizer(worked)["input_ids"]]
    assert sum(lengths) / len(lengths) >= 24 and max(lengths) >= 4 * min(lengths)


@pytest.mark.full
def test_text_survives_the_tokenizer(rows, tokenizer):
    for name in FILES:
        for r in rows[name]:
            for text in (r["prompt"], r.get("completion", "")):
                ids = tokenizer(text)["input_ids"]
                assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids


def test_the_tokenizer_names_its_special_tokens(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
    assert tokenizer("<eos>")["input_ids"] == [tokenizer.eos_token_id]
    assert tokenizer("Nobody")["input_ids"] == [tokenizer.unk_token_id]  # a word from elsewhere is seen, not guessed
    assert tokenizer.chat_template is None


def test_numbers_are_the_same_token_in_question_and_working(tokenizer):
    eleven = tokenizer("11")["input_ids"]
    assert len(eleven) == 1
    for text in ("Max has 11 apples", "a) sells 11, ", "b) finds 11: 11-5=6\n", "\\boxed{11}"):
        assert eleven[0] in tokenizer(text)["input_ids"], text


@pytest.mark.full
@pytest.mark.parametrize("arg", ["", ":tiny"])
def test_everything_fits_the_configs(rows, tokenizer, arg):
    sft, rl = load_config("grpo_sft" + arg), load_config("grpo" + arg)
    longest = max(len(tokenizer(r["prompt"])["input_ids"]) for name in FILES for r in rows[name])
    assert longest <= min(sft.data.max_prompt_tokens, rl.data.max_prompt_tokens)
    answer = max(len(tokenizer(r["completion"])["input_ids"]) + 1 for r in rows["sft"])
    assert answer <= min(sft.rollout.max_new_tokens, rl.rollout.max_new_tokens)
    assert len(tokenizer) <= sft.model.config.vocab_size
    assert sft.train.steps * sft.data.prompts_per_step <= 1.05 * len(rows["sft"])  # demonstrations are seen about once
    assert rl.train.steps * rl.data.prompts_per_step <= len(rows["train"])          # and prompts at most once


# -- shapes: questions about pictures


def shapes_rows(name):
    import pyarrow.parquet as pq
    return pq.read_table(shapes.FOLDER / f"{name}.parquet").to_pylist()


def colours_of(pixels):
    """{cell: colour} of a picture, from the centre of each cell alone."""
    out, side = {}, shapes.SIDE
    for row in range(shapes.CELLS):
        for column in range(shapes.CELLS):
            centre = pixels[row * side + 4, column * side + 4].astype(int)
            if np.ptp(centre) > 40:
                out[shapes.name((row, column))] = min(shapes.COLOURS, key=lambda c: np.abs(centre - shapes.COLOURS[c]).sum())
    return out


@pytest.mark.full
@first_cases(1, "name", shapes.PICTURES)
def test_pictures_are_those_of_the_generator_and_questions_fit_them(name):
    from PIL import Image
    shipped, made, seen = shapes_rows(name), shapes.rows(name), []
    assert len(shipped) == len(made)
    for got, want in zip(shipped, made, strict=True):
        assert {k: v for k, v in got.items() if k != "image"} == {k: v for k, v in want.items() if k != "image"}
        pixels = np.asarray(Image.open(io.BytesIO(got["image"]["bytes"])))
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(want["image"]["bytes"]))))
        seen.append(pixels.tobytes())
        cells, colour = colours_of(pixels), got["prompt"].split()[2]
        work, _, box = got.get("completion", got.get("chosen", "\\boxed{" + got.get("answer", "") + "}")).rpartition("\n")
        count = int(re.fullmatch(r"\\boxed\{(\d)\}", box)[1])
        assert count <= list(cells.values()).count(colour) and count <= shapes.MOST
        if "rejected" in got:
            assert got["rejected"].rpartition("\n")[2] != box
        if work:
            named = [] if work == "none" else work.split()
            assert len(named) == count and all(cells[cell] == colour for cell in named)
    others = {row["image"]["bytes"] for other in shapes.PICTURES if other != name for row in shapes_rows(other)}
    assert not others & {row["image"]["bytes"] for row in shipped}
    boxed = [row.get("completion", row.get("chosen", "")).rpartition("{")[2][:-1] for row in made]
    counts = collections.Counter(int(row["prompt"] != "" and (row.get("answer") or box)) for row, box in zip(made, boxed, strict=True))
    assert max(counts.values()) < 0.35 * len(made)  # what a policy that does not look can reach


def test_the_warm_start_of_vision_ends_with_wrong_completions():
    """Every row of its last 36 steps, once each, and none before; jobs that are measured from another warm start keep it."""
    c, steps = load_config(load_config("vision").run.warm_start), {}
    check(c)
    names, per_step = list(c.data.sources), c.data.prompts_per_step
    order = Mix([c.data.sources[name]["weight"] for name in names], per_step, [1] * len(names))
    for step in range(c.train.steps):
        steps[step] = {names[order.place(step * per_step + i)[0]] for i in range(per_step)}
    assert all(seen == ({"right"} if step < c.train.steps - 36 else {"wrong"}) for step, seen in steps.items())
    assert c.data.sources["wrong"]["completion_column"] == "rejected" and 36 * per_step <= len(shapes_rows("pairs"))
    for job in ("vision_vllm", "vision_jobs:dpo", "vision_jobs:reward_model", "vision_jobs:rl", "vision_jobs:distill"):
        assert load_config(job).run.warm_start == "vision_sft:short"


@pytest.mark.parametrize("folder", shapes.tokenizers())
def test_the_tokenizer_of_shapes_knows_every_word(folder):
    tokenizer = AutoTokenizer.from_pretrained(shapes.FOLDER / folder)
    for name in shapes.PICTURES:
        texts = {row[column] for row in shapes_rows(name) for column in ("prompt", "completion") if column in row}
        ids = tokenizer(sorted(texts), add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in {i for own in ids for i in own}
        assert tokenizer.batch_decode(ids) == sorted(texts)
    for file, text in shapes.tokenizers()[folder].items():
        assert (shapes.FOLDER / folder / file).read_text("utf-8") == text
