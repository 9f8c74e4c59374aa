"""The environments that ship: their rules, played by hand through real workers; their rows; a run of two steps."""

import collections
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from helpers.tiers import first_cases
from transformers import AutoTokenizer

import jaxrl
from jaxrl.config.load import load_config, put
from jaxrl.data import resolve
from jaxrl.envs import builtin
from jaxrl.envs.parsers import PARSERS
from jaxrl.envs.pool import EpisodePool

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
import env_data as make  # noqa: E402

NAMES = ("calc", "guess", "library", "lake", "repair")
FILES = ("train", "test", "sft", "lazy")


def read(name, file):
    return [json.loads(line) for line in Path(resolve(f"jaxrl://{name}/{file}.jsonl")).read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("jaxrl://chat/tokenizer"))


@pytest.fixture(scope="module")
def play():
    """play(name, row, what the model says ...) -> (what it was shown, its score, the states it was in)."""
    pools, number = {}, itertools.count()

    def play(name, row, *says, **options):
        key = name, *options.items()
        if key not in pools:
            config = load_config(f"env:{name}", {f"env.{k}": v for k, v in options.items()})
            config.env.workers = 1
            pools[key] = EpisodePool(config.env)
            pools[key].ready()
        pool, id = pools[key], str(next(number))
        pool.start(id, {"row": row, "prompt": row.get("prompt", ""), "seed": 5})
        shown, score, states, said = [], 0.0, [], iter(says)
        while True:
            for event in pool.events(10.0):
                assert event.id == id and event.kind != "failed", event
                score += event.data["reward"]
                if event.kind == "done":
                    assert next(said, None) is None, "it ended early"
                    return shown, score + (event.data["value"] or 0.0), states
                shown += [m["content"] for m in event.data["messages"]]
                states.append(event.data["anchor"])
                text, calls = PARSERS["pythonic"].read(next(said))
                calls = [{"id": "", "name": c.name, "arguments": c.arguments, "error": c.error} for c in calls]
                pool.reply(id, {"text": text, "thinking": "", "calls": calls, "finish": "stop"})

    yield play
    for pool in pools.values():
        pool.close()


# -- rules ---------------------------------------------------------------------------------------------------------------

def test_calc_answers_calls_of_its_tool_and_leaves_the_score_to_the_rewards(play):
    row = {"prompt": "700001-48", "answer": "699953"}
    shown, score, _ = play("calc", row, '[calculate(expression="700001-48")]', "699953")
    assert shown == ["700001-48", "699953"] and score == 0
    call, words = '[calculate(expression="700001-48")]', "not a sum of whole numbers"
    assert play("calc", row, '[calculate(expression="9**9")]', "no")[0][1] == words
    for function, answer in ((1.0, "699953"), (0.0, "699952")):
        assert play("calc", row, call, answer, tools=(), function="calc")[1] == function


@pytest.mark.parametrize("expression,value", [("1+2-4", "-1"), ("-7+7", "0"), ("12345678901234567890+1", "12345678901234567891")])
def test_calculate_adds(expression, value):
    assert builtin.calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1+", "1 + 2", "2*3", "1" * 41, "+".join("1" * 11), "__import__('os')", "١+٢", "1+2\n"])
def test_calculate_refuses_all_else(expression):
    with pytest.raises(builtin.ToolError, match="not a sum"):
        builtin.calculate(expression)


def test_library_looks_up_what_the_row_says_and_nothing_else(play):
    seed = 12
    known = builtin.facts(seed)
    boss = known["ann", "boss"]
    city = known[boss, "city"]
    row = {"prompt": "city of boss of ann", "answer": city, "seed": seed}
    calls = '[look_up(name="ann",entry="boss")]', f'[look_up(name="{boss}",entry="city")]'
    assert play("library", row, *calls, city)[:2] == (["city of boss of ann", boss, city], 1.0)
    assert play("library", row, calls[0], "nowhere")[1] == 0.0
    assert play("library", row, '[look_up(name="bob",entry="city")]', city)[:2] == (["city of boss of ann", "unknown"], 1.0)
    assert builtin.facts(seed) == known != builtin.facts(seed + 1)
    assert all(known[p, r] in builtin.PEOPLE and known[p, r] != p for p in builtin.PEOPLE for r in builtin.RELATIONS)


def test_guess_says_higher_and_lower_and_ends_with_a_hit_or_the_sixth_guess(play):
    row = {"prompt": "1-32", "number": 19}
    shown, score, states = play("guess", row, "16", "24", "20", "18", "19")
    assert (shown, score) == (["1-32", "higher", "lower", "lower", "higher"], 1.0)
    assert states == ["1-32", "17-32", "17-23", "17-19", "19-19"]
    shown, score, states = play("guess", row, "1", "2", "33", "x19", "20", "18")
    assert shown == ["1-32", "higher", "higher", "lower", "a number", "lower"] and score == 0.0
    assert states == ["1-32", "2-32", "3-32", "3-32", "3-32", "3-19"]  # what is known already does not change
    assert play("guess", row, "16", "16", "16", "16", "16", "19")[1] == 1.0


def test_halving_finds_every_number_and_going_one_by_one_eleven():
    def hits(next_guess):
        found = 0
        for number in range(1, 33):
            game, low, high, mine = builtin.Guess(), 1, 32, 16
            game.reset({"number": number}, 0)
            for _ in range(6):
                step = game.step(f" {mine} ")
                found += step.reward
                if step.done:
                    break
                low, high = (mine + 1, high) if step.observation.text == "higher" else (low, mine - 1)
                mine = next_guess(low, high, step.observation.text)
        return found

    assert hits(lambda low, high, _: (low + high) // 2) == 32
    assert hits(lambda low, high, said: low if said == "higher" else high) == 11


def test_lake_ends_at_the_goal_and_in_a_hole_and_its_map_is_the_state(play):
    row = {"map": "P.O\n.#.\n..G"}
    down = ["P.O\n.#.\n..G", "..O\nP#.\n..G", "..O\n.#.\nP.G", "..O\n.#.\n.PG"]
    shown, score, states = play("lake", row, "down", "down", "right", "right")
    assert shown == states == down and score == 1.0
    shown, score, _ = play("lake", row, "up", "swim", "right", "right")
    assert shown == [row["map"]] * 3 + [".PO\n.#.\n..G"] and score == 0.0


def test_boxes_are_pushed_where_there_is_room(play):
    apply_move = builtin.apply_move
    assert apply_move("PBT", "right") == ".P*" and apply_move(".P*", "right") == ".P*" and apply_move("PBB.", "right") == "PBB."
    assert apply_move("P*.", "right") == ".+B" and apply_move(".+B", "left") == "PTB" and apply_move("PBO", "right") == "PBO"
    assert builtin.is_solved(".P*") and not builtin.is_solved("PT*B") and not builtin.is_solved("PBT")
    assert play("lake", {"map": "P.BT"}, "right", "left", "right", "right")[1] == 1.0


def test_a_slippery_lake_goes_aside_as_the_seed_says(play):
    def walk(seed):
        lake = builtin.Lake(slip=0.5)
        lake.reset({"map": "....\n.P..\n....\n...."}, seed)
        return [lake.step(move).observation.text for move in ("right", "left", "up", "down", "right")]

    assert walk(1) == walk(1) and len({tuple(walk(seed)) for seed in range(20)}) > 5
    straight, aside = 0, 0
    for seed in range(400):
        lake = builtin.Lake(slip=0.5)
        lake.reset({"map": "...\n.P.\n..."}, seed)
        after = lake.step("right").observation.text
        straight += after == "...\n..P\n..."
        aside += after in (".P.\n...\n...", "...\n...\n.P.")
    assert straight + aside == 400 and 160 < straight < 240


# -- rows ----------------------------------------------------------------------------------------------------------------

@pytest.mark.full
@pytest.mark.parametrize("names", ["calc,guess,library,repair", pytest.param("lake", marks=pytest.mark.nightly)])
def test_what_ships_is_what_the_generator_makes(names, tmp_path):
    make.main(["--out", str(tmp_path), "--names", names])
    made = [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()]
    assert len(made) == 4 * len(names.split(",")) + 2
    for path in made:
        assert (tmp_path / path).read_bytes() == (make.FOLDER / path).read_bytes(), path


def about(name, row):
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
    return row.get("seed") if name == "library" else prompt


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_apart_and_right(name):
    rows = {file: read(name, file) for file in FILES}
    asked = {file: {about(name, r) for r in rows[file]} for file in FILES}
    if name in ("calc", "lake", "repair"):
        assert not asked["train"] & asked["test"] and not (asked["train"] | asked["test"]) & (asked["sft"] | asked["lazy"])
    elif name == "library":
        relations = [row["prompt"].count(" of ") - 1 for row in rows["train"]]
        assert all(0.25 < relations.count(k) / len(relations) < 0.42 for k in (1, 2, 3))
        assert not asked["train"] & asked["test"] and not any(make.belongs(f"library/{s}", "sft") for s in asked["train"] | asked["test"])
    for row in rows["train"] + rows["test"]:
        if name == "calc":
            assert row["answer"] == str(eval(row["prompt"])) and len(row["prompt"]) == 17 and len(row["answer"]) == 5
        elif name == "library":
            entry, *relations, who = row["prompt"].split(" of ")
            known, people = builtin.facts(row["seed"]), [who]
            for relation in [*relations[::-1], relations[0], relations[0]][:3]:
                people.append(known[people[-1], relation])
            found = [known[person, entry] for person in people]  # after so many relations
            assert [k for k in range(4) if found[k] == row["answer"]] == [len(relations)]
        elif name == "repair":
            expression, (arguments, right) = row["prompt"].split(" return ")[1], meant(row["prompt"])
            found = [[eval(text, {}, dict(zip(arguments, given, strict=True))) for given in row["tests"]["inputs"]]
                     for text in (expression, right)]
            assert found[0] != row["tests"]["outputs"] == found[1]
        elif name == "lake":
            assert 2 <= len(make.ways(row["map"])[0]) <= 6 and row["prompt"] == row["map"]
        else:
            assert sorted(r["number"] for r in rows["test"]) == list(range(1, 33))


def meant(source):
    """(parameters, the expression that belongs there) of a function to be repaired."""
    name, arguments = re.match(r"def (\w+)\((.*)\):", source).groups()
    arguments = arguments.split(",")
    renamed = dict(zip("xy", arguments, strict=False))
    return arguments, re.sub("[xy]", lambda found: renamed[found[0]], make.DO[name][0])


def works(name, messages):
    """Whether a demonstration does what pays."""
    said = [m for m in messages if m["role"] == "assistant"]
    if name == "repair":
        return said[0]["content"] == meant(messages[0]["content"])[1]
    if name == "calc":
        return said[0]["tool_calls"][0]["function"]["arguments"]["expression"] == messages[0]["content"]
    if name == "library":
        return len(said) == 1 + messages[0]["content"].count(" of ")
    if name == "guess":
        return len(said) < 3 or said[1]["content"] in ("8", "24")
    last = builtin.apply_move(messages[-2]["content"], said[-1]["content"])
    return builtin.is_solved(last) and len(said) == len(make.ways(messages[0]["content"])[0])


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_do_what_pays_and_the_lazy_ones_seldom(name):
    shares = [sum(works(name, row["prompt"]) for row in rows) / len(rows) for rows in (read(name, "sft"), read(name, "lazy"))]
    low, high = {"guess": (0.05, 0.2), "library": (0.3, 0.37), "calc": (0.22, 0.28)}.get(name, (0.05, 0.15))
    assert shares[0] == 1.0 and low < shares[1] < high, shares


def test_what_chance_says_to_the_calculator_has_nothing_to_do_with_the_question():
    """A model of these demonstrations with one pair of signs throughout is right in a quarter."""
    said = collections.defaultdict(collections.Counter)
    for row in read("calc", "lazy"):
        asked, given = (re.sub("[0-9]", "", text) for text in (
            row["prompt"][0]["content"], row["prompt"][1]["tool_calls"][0]["function"]["arguments"]["expression"]))
        said[asked][given] += 1
    assert sorted(said) == ["++", "+-", "-+", "--"]
    for counts in said.values():
        shares = {signs: make.PLUS ** signs.count("+") * (1 - make.PLUS) ** signs.count("-") for signs in said}
        assert max(abs(counts[signs] / counts.total() - share) for signs, share in shares.items()) < 0.08, said
    asked = collections.Counter(re.sub("[0-9]", "", row["prompt"]) for row in read("calc", "test"))
    assert set(asked.values()) == {64}, asked


def test_what_chance_says_in_the_library_has_nothing_to_do_with_the_question():
    """A model of these demonstrations that follows one number of relations throughout is right in a third."""
    said = collections.defaultdict(collections.Counter)
    for row in read("library", "lazy"):
        calls = sum("tool_calls" in message for message in row["prompt"])
        said[row["prompt"][0]["content"].count(" of ") - 1][calls - 1] += 1
    assert sorted(said) == [1, 2, 3]
    for counts in said.values():
        shares = [counts[k] / counts.total() for k in (1, 2, 3)]
        assert max(abs(a - b / sum(make.HABITS)) for a, b in zip(shares, make.HABITS, strict=True)) < 0.05, said


@pytest.mark.full
@first_cases(1, "name", NAMES)
def test_everything_fits_the_configs(name, tokenizer):
    rl, sft = load_config(f"env:{name}"), load_config(f"env_sft:{name}")
    longest, first = 0, 0
    for file in FILES:
        for row in read(name, file):
            prompt = row["prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
            longest, first = max(longest, len(ids)), max(first, len(tokenizer(messages[0]["content"])["input_ids"]) + 2)
    assert longest <= min(rl.train.max_sequence_tokens, sft.rollout.max_new_tokens)
    assert first <= min(rl.data.max_prompt_tokens, sft.data.max_prompt_tokens)
    assert len(tokenizer) <= sft.model.config.vocab_size
    rows = sum(len(read(name, path.split("/")[-1].removesuffix(".jsonl"))) for path in sft.data.path)
    assert sft.train.steps * sft.data.prompts_per_step == rows  # the lazy ones come last, and all of them


# -- a run ---------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_calc_trains(tmp_path):
    few = {"data.prompts_per_step": 2, "rollout.group_size": 2, "rollout.slots": 4, "train.steps": 2, "reward.workers": 1, "env.workers": 1,
           "eval.max_rows": 2, "log.tensorboard": False, "log.console": "off", "run.dir": str(tmp_path / "run"), "run.warm_start": "",
           "model.init": "random", "model.tokenizer": "jaxrl://chat/tokenizer"}
    config = load_config("env:calc", few)
    put(config, "model.config", {**load_config("env_sft:calc").model.config, "num_hidden_layers": 1})
    summary = jaxrl.train(config)
    assert summary["finished"] and summary["steps"] == 2
