"""A run that leaves a recorded one at a step: what it takes from the record, what it computes, and what it ends at."""

import dataclasses
import importlib
import json
import shutil
import sys

import numpy as np
import pytest
from helpers import algorithm_runs
from helpers.tiers import nightly

import jaxrl
from jaxrl.errors import ConfigError
from jaxrl.records import files
from jaxrl.resolve.checks.common import check
from jaxrl.rewards import RewardItem, item_hash
from jaxrl.workers import loading, reached

REWARDS = """
import helper

BASE = 10

def scale(x):
    return x / BASE

def digits(prompt, completion, **columns):
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)

def short(prompt, completion, **columns):
    return helper.sign() * scale(len(completion))
"""
EDITED = REWARDS.replace("c.isdigit()", "c in '02468'")
STEPS = 4


def job(folder, rewards, **options):
    return algorithm_runs.job(folder, {
        "record.every": 1, "train.steps": STEPS, "checkpoint.every_steps": 2, "checkpoint.keep": -1,
        "checkpoint.export_at_end": False, "reward.functions": (f"{rewards}:digits", f"{rewards}:short"), **options})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(run directory, file of its rewards)."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "helper.py").write_text("def sign():\n    return -1\n")
    jaxrl.train(job(folder / "run", folder / "rewards.py"))
    return folder / "run", folder / "rewards.py"


def forked(recorded, folder, step: int, text: str = REWARDS, **options):
    """(entries of summary.json by step, metrics by step) of a fork whose rewards are `text`."""
    run, rewards = recorded
    own = folder / "other_place" / rewards.name
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(text)
    shutil.copy(rewards.parent / "helper.py", own.parent)
    options = {name.replace("__", "."): value for name, value in options.items()}
    out = jaxrl.train(job(folder / "fork", own, **{"fork.run": str(run), "fork.step": step, **options}))
    lines = [json.loads(line) for line in (folder / "fork" / "metrics.jsonl").read_text().splitlines()]
    return out["fork"]["steps"], {line["step"]: line for line in lines}


def state(folder) -> dict:
    return files.read(files.steps(folder / files.FOLDER)[STEPS]).arrays


TAKEN = {"taken": 16, "computed": 0}
COMPUTED = {"taken": 0, "computed": 16}


@pytest.mark.full
@pytest.mark.parametrize("step", [2, nightly(3)])
def test_an_unedited_fork_is_the_run_it_left(recorded, tmp_path, step):
    """From a checkpoint, and with a step computed again before it; from another place, nothing is sampled or scored, and all that the
    last step reads and leaves is bitwise the same."""
    told, metrics = forked(recorded, tmp_path, step)
    assert list(told) == [str(n) for n in range(step, STEPS + 1)] and list(metrics) == list(range(step, STEPS + 1))
    for own in told.values():
        assert own == {"completions_taken": 16, "completions_sampled": 0, "rewards": {"digits": TAKEN, "short": TAKEN}}
    mine, theirs = state(tmp_path / "fork"), state(recorded[0])
    assert mine.keys() == theirs.keys() and all(np.array_equal(mine[n], theirs[n], equal_nan=True) for n in mine)


@pytest.mark.full
def test_an_edited_reward_is_all_that_is_computed_at_its_step(recorded, tmp_path):
    """The other function of the same file is taken, unless what it imports was edited; behind the step all is sampled."""
    told, metrics = forked(recorded, tmp_path, 3, EDITED)
    assert told["3"] == {"completions_taken": 16, "completions_sampled": 0, "rewards": {"digits": COMPUTED, "short": TAKEN}}
    assert metrics[4]["fork/completions_sampled"] == 16 and metrics[4]["fork/completions_taken"] == 0
    then = [json.loads(x) for x in (recorded[0] / "rollouts" / "step_00000003.jsonl").read_text().splitlines()]
    now = [json.loads(x) for x in (tmp_path / "fork" / "rollouts" / "step_00000003.jsonl").read_text().splitlines()]
    for a, b in zip(then, now, strict=True):
        assert a["tokens"] == b["tokens"] and a["logprobs"] == b["logprobs"]
        even = sum(c in "02468" for c in b["completion"]) / max(len(b["completion"]), 1)
        assert b["reward"]["parts"] == {**a["reward"]["parts"], "digits": even}


@pytest.mark.slow
def test_an_edited_loss_or_weight_takes_both_and_another_temperature_no_answer(recorded, tmp_path):
    told, _ = forked(recorded, tmp_path / "loss", 3, algorithm__kl__coef=0.1, reward__weights=(1.0, 0.5))
    assert told["3"] == {"completions_taken": 16, "completions_sampled": 0, "rewards": {"digits": TAKEN, "short": TAKEN}}
    assert not np.array_equal(state(tmp_path / "loss" / "fork")["state/after"], state(recorded[0])["state/after"])
    told, _ = forked(recorded, tmp_path / "sampling", 3, rollout__temperature=0.5)
    assert (told["3"]["completions_taken"], told["3"]["completions_sampled"]) == (0, 16)


@pytest.mark.slow
def test_a_fork_that_was_cut_off_goes_on_as_itself(recorded, tmp_path):
    """By the same command; and it is not taken back to where it left."""
    told, _ = forked(recorded, tmp_path, 3, train__steps=3)
    assert list(told) == ["3"]
    told, metrics = forked(recorded, tmp_path, 3)
    assert told["4"]["completions_taken"] == 16 and list(metrics) == [3, 4]
    mine, theirs = state(tmp_path / "fork"), state(recorded[0])
    assert np.array_equal(mine["state/after"], theirs["state/after"])


HELPER = "def sign():\n    return -1\n"


def code(folder, text=REWARDS, helper=HELPER, neighbour="", name="short") -> str:
    """Of a function in a folder of its own, as a worker that has just loaded it tells it."""
    folder.mkdir()
    for file, content in (("rewards.py", text), ("helper.py", helper), ("neighbour.py", neighbour)):
        (folder / file).write_text(content)
    before, spec = set(sys.modules), f"{folder}/rewards.py:{name}"
    importlib.invalidate_caches()
    try:
        return reached.function_digest(loading.load(spec), spec, before)
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - before:
            del sys.modules[module]


def test_what_a_function_is_made_of(tmp_path):
    """Its def, what that reaches in its file, and imported files, wherever they lie: neither comments nor another function. Where code
    may name others in its text's absence, the whole file; where it may load files, all those beside it."""
    texts = {"base": {}, "comment": {"text": "# a comment\n" + REWARDS}, "other function": {"text": EDITED},
             "neighbour": {"neighbour": "x = 1"},
             "itself": {"text": REWARDS.replace("len(completion))", "len(prompt))")}, "what it calls": {"text": REWARDS.replace("x /", "x *")},
             "a constant": {"text": REWARDS.replace("= 10", "= 11")}, "what it imports": {"helper": HELPER.replace("-1", "1")},
             "a decorator": {"text": REWARDS.replace("def digits", "@abs\ndef digits").replace("@abs", "@(lambda f: f)")}}
    found = {name: code(tmp_path / name.replace(" ", "_"), **given) for name, given in texts.items()}
    assert {name for name, key in found.items() if key == found["base"]} == {"base", "comment", "other function", "neighbour"}
    assert len(set(found.values())) == 6
    by_name, anywhere = REWARDS.replace("helper.sign()", "getattr(helper, 'sign')()"), REWARDS + "\neval('1')\n"
    keys = [code(tmp_path / f"by_name{i}", text) for i, text in enumerate((by_name, by_name.replace("isdigit", "isalpha")))]
    assert keys[0] != keys[1]
    keys = [code(tmp_path / f"anywhere{i}", anywhere, neighbour=text) for i, text in enumerate(("", "x = 1"))]
    assert keys[0] != keys[1]


def test_what_rewards_are_told_has_an_address():
    item = RewardItem("p", "c", {"answer": 4, "x": np.float32(1)}, "stop", 1, 2, np.array([3, 4]), [5], ("a",))
    other = [{"prompt": "q"}, {"completion": "d"}, {"columns": {"answer": 4, "x": 2.0}}, {"finish": "length"}, {"group": 2}, {"sample": 1},
             {"token_ids": [3, 5]}, {"context_ids": [6]}]
    assert len({item_hash(item), *(item_hash(dataclasses.replace(item, **change)) for change in other)}) == 9
    assert item_hash(item) == item_hash(dataclasses.replace(item, functions=None, token_ids=[3, 4], columns={"x": 1.0, "answer": 4}))


BATCHED = """
def ranks(prompts, completions, **columns):
    return [sorted(completions).index(c) for c in completions]
"""


@pytest.mark.slow
def test_scores_that_depend_on_one_another_are_taken_together_or_not(recorded, tmp_path):
    """Of a function that sees all completions: all of them where the batch is the recorded one, none where a group is larger."""
    (tmp_path / "batched.py").write_text(BATCHED)
    rewards = {"reward.functions": (f"{tmp_path}/batched.py:ranks", f"{recorded[1]}:short")}
    jaxrl.train(job(tmp_path / "run", recorded[1], **rewards))
    for size, expected in ((4, {"ranks": TAKEN, "short": TAKEN}),
                           (5, {"ranks": {"taken": 0, "computed": 20}, "short": {"taken": 16, "computed": 4}})):
        out = jaxrl.train(job(tmp_path / f"fork{size}", recorded[1], **{
            **rewards, "fork.run": str(tmp_path / "run"), "fork.step": 3, "train.steps": 3, "rollout.group_size": size}))
        assert out["fork"]["steps"]["3"] == {"completions_taken": 16, "completions_sampled": 4 * size - 16, "rewards": expected}


@pytest.mark.full
def test_impossible_forks_are_refused(recorded, tmp_path):
    run, rewards = recorded
    for options, text in (({"fork.step": 3}, "fork.step=3 has no effect without fork.run"),
                          ({"fork.run": str(run)}, "fork.step=0"),
                          ({"fork.run": str(run), "fork.step": 1, "run.dir": str(run)}, "is run.dir"),
                          ({"fork.run": str(run), "fork.step": 1, "run.resume": str(tmp_path)}, "run.resume="),
                          ({"fork.run": str(run), "fork.step": 1, "run.recipe": "sft"}, "run.recipe=sft")):
        with pytest.raises(ConfigError, match=text):
            check(job(tmp_path / "fork", rewards, **options))
    for options, text in (({"fork.run": str(tmp_path)}, "holds no config.json"),
                          ({"fork.step": 9}, "fork.step=9: step 9 is not recorded"), ({"run.seed": 1}, "would change the past: run.seed")):
        with pytest.raises(ConfigError, match=text):
            jaxrl.train(job(tmp_path / "fork", rewards, **{"fork.run": str(run), "fork.step": 3, **options}))
