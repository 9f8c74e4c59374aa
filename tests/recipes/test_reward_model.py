"""run.recipe=reward_model: pairs and steps, as a user trains them."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_job
from helpers.data_cases import write_jsonl
from safetensors.numpy import load_file

import jaxrl
from jaxrl.config.load import put
from jaxrl.data import DataError, load_eval_sets, load_tokenizer, load_train
from jaxrl.errors import ConfigError
from jaxrl.recipes.reward_model import Scorer, make_batch
from jaxrl.resolve.checks import common

ROWS = [json.loads(line) for line in (Path(jaxrl.__file__).parent / "data/embedded/arith/sft.jsonl").read_text().splitlines()[:48]]

pytestmark = pytest.mark.usefixtures("the_mesh_as_it_was")


def pairs(rows=ROWS):
    """Answers that end in 5 are better than those that end in 7."""
    return [{"prompt": r["prompt"], "chosen": "\\boxed{5}", "rejected": "\\boxed{7}"} for r in rows]


def steps(rows=ROWS):
    """The last lines of a demonstration; the box is wrong."""
    lines = [r["completion"].split("\n")[-3:] for r in rows]
    return [{"prompt": r["prompt"], "completions": found, "labels": ["boxed" not in x for x in found]}
            for r, found in zip(rows, lines, strict=True)]


def config(folder, rows, held_out=None, **changes):
    c = tiny_job.get_config()
    c.run.recipe, c.run.dir, c.log.console = "reward_model", str(folder / "run"), "off"
    c.data.path, c.data.max_rows = (str(write_jsonl(folder / "rows.jsonl", rows)),), 0
    c.eval.sets, c.eval.max_rows = ((f"test={write_jsonl(folder / 'test.jsonl', held_out)}",), 0) if held_out else ((), 0)
    c.reward.functions, c.reward.pass_mark, c.reward.workers = ("math",), 1.0, 2
    c.data.prompts_per_step, c.rollout.max_new_tokens, c.rollout.group_size, c.rollout.prompt_lengths = 12, 64, 8, ()
    c.optimizer.lr, c.train.steps, c.checkpoint.every_steps, c.eval.every_steps = 1e-2, 10, 2, 0
    for name, value in changes.items():
        put(c, name.replace("__", "."), value)
    common.check(c)
    return c


def lines(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def weights(folder, name="export"):
    return load_file(folder / "run" / name / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Ten steps on pairs, with a held-out set."""
    folder = tmp_path_factory.mktemp("pairs")
    return folder, jaxrl.train(config(folder, pairs(ROWS[:36]), pairs(ROWS[36:])))


def test_pairs_are_learnt_and_told(trained):
    """From log 2 and half of nothing right (a head at zero gives ties) to all held-out pairs right; the file of the evaluation has
    both scores of each, and they are those of the metric."""
    folder, summary = trained
    found = lines(folder)
    assert found[0]["loss"] == pytest.approx(np.log(2)) if "loss" in found[0] else found[1]["loss"] == pytest.approx(np.log(2))
    assert summary["eval_before"]["accuracy"] == 0.0 and summary["eval_after"]["accuracy"] == 1.0
    last = [x for x in found if "loss" in x][-1]
    assert last["loss"] < 0.6 and last["score/accuracy"] == 1.0 and last["score/margin"] > 0.1 and last["score/std"] > 0
    rows = [json.loads(line) for line in (folder / "run/eval/step_00000010_test.jsonl").read_text().splitlines()]
    margins = [row["scores"][0] - row["scores"][1] for row in rows]
    assert len(rows) == 12 and np.mean(margins) == pytest.approx(summary["eval_after"]["sets"]["test"]["margin"], abs=1e-5)


def test_an_error_while_a_batch_is_scored_costs_no_step(tmp_path, monkeypatch):
    """Nothing has changed by then: the steps before are saved."""
    score, calls = Scorer.score, []

    def fails(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planned")
        return score(self, *arguments)

    monkeypatch.setattr(Scorer, "score", fails)
    with pytest.raises(RuntimeError, match="planned"):
        jaxrl.train(config(tmp_path, pairs(), checkpoint__every_steps=0, data__prompts_per_step=2))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("*")] == ["00000001"]


@pytest.mark.slow
@pytest.mark.torch
def test_the_export_is_a_classifier_that_scores_the_same(trained, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification

    folder, _ = trained
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run/export").eval()
    c = config(tmp_path, pairs(ROWS[:36]), pairs(ROWS[36:]))
    data = load_eval_sets(c, load_tokenizer(c), 1)["test"]
    rows = [json.loads(line) for line in (folder / "run/eval/step_00000010_test.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        for ids, score in zip((data[i].target_ids, data[i].rejected_ids), row["scores"], strict=True):
            with torch.no_grad():
                found = model(torch.tensor(np.concatenate([data[i].prompt_ids, ids])[None])).logits.item()
            assert ids[-1] == 1 and found == pytest.approx(score, abs=2e-5)


@pytest.mark.slow
def test_resumed_it_is_bitwise_the_unbroken_run(trained, tmp_path):
    whole, _ = trained
    for until in (4, 10):
        jaxrl.train(config(tmp_path, pairs(ROWS[:36]), pairs(ROWS[36:]), train__steps=until))
    a, b = weights(whole), weights(tmp_path)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a) and np.abs(a["score.weight"]).max() > 0
    assert lines(whole)[-1]["loss"] == lines(tmp_path)[-1]["loss"]


@pytest.mark.slow
def test_it_starts_from_a_classifier_and_writes_its_head_by_its_name(tmp_path):
    """model.path: the head is taken over, so that what was right is right before the first step; reward_model.head names it in the
    files."""
    sets = pairs(ROWS[:36]), pairs(ROWS[36:])
    first = jaxrl.train(config(tmp_path, *sets, train__steps=2, reward_model__head="value_head"))
    assert "value_head.weight" in weights(tmp_path) and "score.weight" not in weights(tmp_path)
    more = dict(model__path=str(tmp_path / "run/export"), model__init="pretrained", train__steps=1, optimizer__lr=1e-9)
    again = jaxrl.train(config(tmp_path, *sets, reward_model__head="value_head", run__dir=str(tmp_path / "again"), **more))
    for name in ("accuracy", "margin", "loss"):
        assert again["eval_before"]["sets"]["test"][name] == pytest.approx(first["eval_after"]["sets"]["test"][name], abs=1e-6)
    assert first["eval_after"]["sets"]["test"]["margin"] != 0
    with pytest.raises(ConfigError, match="1 tensors have no place in a qwen2 model: value_head.weight"):
        jaxrl.train(config(tmp_path, *sets, run__dir=str(tmp_path / "third"), **more))


@pytest.mark.full
def test_center_and_margin_are_in_the_loss(tmp_path):
    rows = [row | {"lead": float(i % 3)} for i, row in enumerate(pairs(ROWS[:6]))]
    c = config(tmp_path, rows, data__prompts_per_step=6, reward_model__center=0.5, data__margin_column="lead")
    data = load_train(c, load_tokenizer(c), 1)
    batch = make_batch([data[i] for i in range(6)], c)
    scores = np.random.default_rng(0).normal(size=12)
    rest = scores[::2] - scores[1::2] - np.arange(6) % 3
    expected = np.mean(np.log1p(np.exp(-rest))) + 0.5 * np.mean((scores[::2] + scores[1::2]) ** 2)
    assert batch.loss(scores)[0] == pytest.approx(expected)
    for i in range(6):  # the chosen answer first, an end token and the slot behind each
        for k, ids in enumerate((data[i].target_ids, data[i].rejected_ids)):
            a, b = batch.traj.offsets[2 * i + k:2 * i + k + 2]
            assert batch.traj.tokens[a:b].tolist() == [*data[i].prompt_ids, *ids, 0] and ids[-1] == 1
            assert np.flatnonzero(batch.traj.loss_mask[a:b]).tolist() == [b - a - 1]


@pytest.mark.slow
def test_steps_are_learnt(tmp_path):
    """kind=steps: labels of the lines of an answer, in columns of other names."""
    rows = [{"prompt": r["prompt"], "parts": r["completions"], "good": r["labels"]} for r in steps()]
    c = config(tmp_path, rows[:36], rows[36:], reward_model__kind="steps", reward_model__steps_column="parts",
               reward_model__labels_column="good", reward_model__separator="\n", train__steps=16, checkpoint__every_steps=0)
    summary = jaxrl.train(c)
    assert summary["eval_after"]["accuracy"] > max(0.9, summary["eval_before"]["accuracy"] + 0.2)
    assert lines(tmp_path)[-1]["score/accuracy"] > 0.9


@pytest.mark.full
def test_a_step_is_read_behind_its_separator(tmp_path):
    """The separator of the config, one token here, ends every step; the slot behind it is in the loss."""
    for separator, token in (("\n", 3), ("?", 11)):
        c = config(tmp_path, steps(), reward_model__kind="steps", reward_model__separator=separator)
        data, row = load_train(c, load_tokenizer(c), 1), steps()[0]
        traj = make_batch([data[0], data[1]], c).traj
        own = traj.tokens[:traj.offsets[1]]
        at = np.flatnonzero(traj.loss_mask[:traj.offsets[1]])
        assert len(at) == len(row["labels"]) == 3 and (own[at - 1] == token).all() and at[-1] == len(own) - 1
        assert (own[len(data[0].prompt_ids):] == token).sum() == 3 and data[0].columns["labels"] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("kind, row, said", [
    ("pairs", {"prompt": "5", "completion": "5", "label": True}, "a reward model learns from pairs: column 'rejected' is missing"),
    ("pairs", {"prompt": "5", "chosen": "5"}, "column 'rejected' is missing"),
    ("steps", {"prompt": "5", "completions": ["5", "6"], "labels": [True]}, "2 steps in column 'completions', 1 labels in column 'labels'"),
    ("steps", {"prompt": "5", "completions": ["5"], "labels": [2]}, "holds [2], expected true, false or probabilities"),
    ("steps", {"prompt": "5", "completions": "5", "labels": [1]}, "holds '5', expected a non-empty list"),
    ("steps", {"prompt": "5", "labels": [1]}, "column 'completions' is missing in this row"),
    ("steps", {"prompt": "5", "completions": [5], "labels": [1]}, "every step must be non-empty text"),
])
def test_rows_that_are_none_are_refused(tmp_path, kind, row, said):
    good = pairs() if kind == "pairs" else steps()
    c = config(tmp_path, [*good[:3], row], [row], reward_model__kind=kind)
    tokenizer = load_tokenizer(c)
    for read in (load_train, load_eval_sets):
        with pytest.raises(DataError) as e:
            read(c, tokenizer, 1)
        assert said in str(e.value)


@pytest.mark.parametrize("changes, said", [
    ({"reward_model__center": 0.1, "reward_model__kind": "steps"}, "reward_model.center=0.1 has no effect with reward_model.kind=steps"),
    ({"reward_model__separator": " "}, "reward_model.separator=' ' has no effect with reward_model.kind=pairs; set reward_model.kind=steps"),
    ({"reward_model__labels_column": "completions", "reward_model__kind": "steps"}, "two columns must be named"),
    ({"reward_model__center": -1.0}, "reward_model.center=-1.0: must not be negative"),
    ({"run__mode": "eval"}, "run.mode=eval with run.recipe=reward_model: it has train"),
    ({"lora__rank": 2}, "lora.rank=2 with run.recipe=reward_model: adapters train in"),
    ({"train__row_lengths": (160,)}, "the longest sequence may have 161 tokens"),
])
def test_what_cannot_work_is_refused(tmp_path, changes, said):
    with pytest.raises(ConfigError) as e:
        config(tmp_path, pairs(), **changes)
    assert said in str(e.value)
