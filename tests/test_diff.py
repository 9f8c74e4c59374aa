"""python -m jaxrl.diff: where two runs part, on a real run and copies of it that differ in one place."""

import json
import shutil

import pytest
from helpers import tiny_job

import jaxrl
from jaxrl import diff


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff") / "a"
    c = tiny_job.get_config()
    c.run.dir, c.train.steps, c.eval.every_steps, c.log.console = str(folder), 2, 1, "off"
    jaxrl.train(c)
    return folder


@pytest.fixture
def edit(run, tmp_path):
    """edit(file, line, change): a copy of the run whose line of a JSONL file (or whole JSON) was changed in place."""
    def edited(file, line, change):
        copy = tmp_path / "b"
        shutil.copytree(run, copy)
        text = (copy / file).read_text("utf-8")
        rows = [json.loads(text)] if line is None else [json.loads(row) for row in text.splitlines()]
        change(rows[line or 0])
        (copy / file).write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
        return copy

    return edited


def told(run, copy, *more):
    lines, apart = diff.report(diff.Run(run), diff.Run(copy), diff.ROUNDING)
    return "\n".join(lines), apart


ROLLOUTS = "rollouts/step_00000002.jsonl"
CASES = [  # file, line, change, boundary, what is said of it
    (ROLLOUTS, 9, lambda r: r.update(prompt="Other?"), "prompts", "step 2, completion 10: prompt: "),
    (ROLLOUTS, 0, lambda r: r.update(seed=r["seed"] ^ 1), "seeds", "step 2, completion 1: seed: "),
    (ROLLOUTS, 3, lambda r: r["tokens"].__setitem__(2, 7), "completions", "step 2, completion 4: tokens 2: "),
    (ROLLOUTS, 3, lambda r: r["logprobs"].__setitem__(1, -3.5), "the sampler's log-probs", "step 2, completion 4: logprobs 1: "),
    (ROLLOUTS, 31, lambda r: r["reward"]["parts"].update(digits=0.123), "rewards", "step 2, completion 32: reward digits: "),
    (ROLLOUTS, 5, lambda r: r["reward"].update(by="0"), "code of the rewards", "step 2, completion 6: code: "),
    (ROLLOUTS, 5, lambda r: r.update(advantage=9.0), "advantages", "step 2, completion 6: advantage: "),
    ("metrics.jsonl", 1, lambda r: r.update(loss=r["loss"] + 0.1), "the update's metrics", "step 1: loss: "),
    ("metrics.jsonl", 1, lambda r: r.update({"optim/lr": r["optim/lr"] * 1.001}), "gradient and learning rate", "step 1: optim/lr: "),
    ("metrics.jsonl", 2, lambda r: r.update({"eval/accuracy": 2.0}), "evaluation", "step 2: eval/accuracy: "),
]


@pytest.mark.full
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_first_difference_is_named(run, edit, case):
    file, line, change, boundary, said = CASES[case]
    text, apart = told(run, edit(file, line, change))
    assert apart and f"The runs diverge at {boundary}, {said}" in text and "All before it is equal." in text
    assert text.count(": equal") == len(diff.BOUNDARIES) - 1 + 1  # all others, and the weights
    assert (f"  {boundary}: differ from {said}") in text


def test_nan_in_both_runs_is_no_difference():
    nan = {"loss": float("nan"), "all": [1.0, float("nan")]}
    assert diff.difference(nan, json.loads(json.dumps(nan)), 1e-6) == (0.0, "")
    assert diff.difference(nan, nan | {"loss": 1.0}, 1e-6)[0] == float("inf")


@pytest.mark.full
def test_rounding_is_told_from_a_difference(run, edit, capsys):
    copy = edit(ROLLOUTS, 3, lambda r: r["logprobs"].__setitem__(1, r["logprobs"][1] + 2e-6))
    text, apart = told(run, copy)
    assert not apart and "within rounding (up to " in text and "), from step 2, completion 4: logprobs 1" in text
    assert text.endswith("The runs are equal within rounding.")
    assert diff.main([str(run), str(copy), "--rounding=1e-7"]) == 1 and diff.main([str(run), str(run)]) == 0
    assert "The runs are equal.\n" in capsys.readouterr().out


def test_rounding_behind_the_first_difference_is_not_before_it(tmp_path):
    """A boundary of a later step, or a later one of the same step; and what a clock measures is no difference, wherever it stands."""
    def wrote(name, *lines):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i + 1, **line}) + "\n" for i, line in enumerate(lines)))
        return folder

    calm = {"loss": 1.0, "optim/lr": 1.0, "eval/accuracy": 1.0}
    a = wrote("a", calm, calm, calm, {"publish/seconds": 1.0, "publish/gb_per_second": 2.0})
    for name, changes, said in [
        ("late", ({}, {"optim/lr": 2.0}, {"loss": 1.00001}), "All before it is equal."),
        ("beside", ({}, {"optim/lr": 2.0, "eval/accuracy": 1.00001}, {}), "All before it is equal."),
        ("early", ({"eval/accuracy": 1.00001}, {"optim/lr": 2.0}, {"eval/accuracy": 7.0}), "Before it only rounding differs (evaluation)."),
        ("clock", ({}, {}, {}), "The runs are equal.")]:
        b = wrote(name, *(calm | change for change in changes), {"publish/seconds": 3.0, "publish/gb_per_second": 4.0})
        assert told(a, b)[0].endswith(said), name


def test_options_and_versions_that_differ_are_listed(run, edit):
    def change(held):
        held["config"]["optimizer"]["lr"], held["config"]["run"]["dir"], held["versions"]["jax"] = 0.5, "elsewhere", "0.0"

    text, apart = told(run, edit("config.json", None, change))
    assert not apart and "\n  optimizer.lr: 0.03 and 0.5\n  version of jax: " in text and "elsewhere" not in text


def test_what_is_no_run_is_said(run, edit, tmp_path, capsys):
    assert diff.main([str(run), str(tmp_path)]) == 2 and "no run directory" in capsys.readouterr().err
    copy = edit(ROLLOUTS, 0, lambda r: None)
    (copy / ROLLOUTS).write_text("{}\nnot json\n", "utf-8")
    assert diff.main([str(run), str(copy)]) == 2 and "step_00000002.jsonl:2: not a line of JSON" in capsys.readouterr().err
