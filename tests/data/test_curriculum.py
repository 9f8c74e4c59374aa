"""Curricula: rows by difficulty, from easy to hard or in a window that moves, and without what is solved too often."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_job
from helpers.data_cases import make_config, make_tokenizer, write_jsonl
from helpers.run_tools import fingerprint

import jaxrl
from jaxrl.data import Stream, load_tokenizer, load_train
from jaxrl.data.pass_rates import PassRates
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.resolve.checks.common import check
from jaxrl.rl.rollouts import pass_rates

LEVELS = [3, 1, 2, 1, 3, 2, 1, 2.5, 1, 3]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("levels")
    make_tokenizer(folder / "t")
    for name, first in (("a", 0), ("b", 100)):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": f"{i}?", "answer": "", "id": first + i, "level": level}
                                               for i, level in enumerate(LEVELS)])
    return folder


def stream_of(files, both=False, **data):
    paths = () if both else (files / "a.jsonl",)
    data = {"prompts_per_step": 2} | data
    if both:
        data["sources"] = {name: {"path": str(files / f"{name}.jsonl")} for name in "ab"}
    config = make_config(files / "t", *paths, **{f"data__{k}": v for k, v in data.items()})
    return Stream.from_config(config, load_train(config, load_tokenizer(config)))


def drawn(stream, first, last):
    rows, _ = stream.take(first, last - first)
    return [e.columns["id"] for _, e in rows]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_go_from_easy_to_hard(files, both, workers):
    """In every pass, each row once; equal ones in another order next time; from any position on as from the start."""
    stream = stream_of(files, both, difficulty="level", workers=workers)
    ids = drawn(stream, 0, 40 if both else 20)
    own = [i for i in ids if i < 100]
    for epoch in (own[:10], own[10:]):
        assert sorted(epoch) == list(range(10)) and [LEVELS[i] for i in epoch] == sorted(LEVELS)
    assert own[:10] != own[10:]
    again = stream_of(files, both, difficulty="level", workers=workers)
    assert drawn(again, 13, 20) == ids[13:20]
    stream.close()
    again.close()
    plain = stream_of(files, both)
    assert drawn(plain, 0, 20) != ids[:20]
    unshuffled = stream_of(files, difficulty="level", shuffle=False)
    assert drawn(unshuffled, 0, 10) == [1, 3, 6, 8, 2, 5, 7, 0, 4, 9]


@pytest.mark.parametrize("both", [False, True])
def test_windows_move_with_the_step(files, both):
    """Steps 0 and 1, 2 to 9, then: only rows of the window, each once before one comes again."""
    windows = ("0:1..1", "4:2..2.5", "10:1..3")
    stream = stream_of(files, both, difficulty="level", difficulty_window=windows)
    level = {i + base: v for base in (0, 100) for i, v in enumerate(LEVELS)}
    ids = drawn(stream, 0, 60)
    assert {level[i] for i in ids[:8]} == {1} and {level[i] for i in ids[8:20]} == {2, 2.5} and {level[i] for i in ids[20:]} == {1, 2, 2.5, 3}
    for begin, end, size in ((0, 8, 4), (8, 20, 3), (20, 60, 10)):
        own = [i for i in ids[begin:end] if i < 100]
        assert len(set(own[:size])) == min(size, len(own))
    assert drawn(stream_of(files, both, difficulty="level", difficulty_window=windows), 17, 60) == ids[17:]
    with pytest.raises(ConfigError, match="no row of .* lies in 7..9; difficulties there are 1 to 3"):
        stream_of(files, both, difficulty="level", difficulty_window=("0:1..3", "5:7..9"))
    with pytest.raises(ConfigError, match=r"a.jsonl:1: column 'prompt' \(data.difficulty\) holds '0\?', expected a number"):
        stream_of(files, both, difficulty="prompt")


def test_rows_outside_the_thresholds_are_left_out_of_the_next_pass(files):
    """What is measured during a pass decides the next one, which has the others once each; then a checkpoint."""
    stream = stream_of(files, pass_rate_min=0.25, pass_rate_max=0.75)
    first, rates = drawn(stream, 0, 10), {}
    assert sorted(first) == list(range(10))
    for position, i in enumerate(first):
        rates[position] = (0.0, 0.25, 0.5, 0.75, 1.0)[i % 5]
    assert stream.record_pass_rates(rates, 9)["data/left_out_fraction"] == 0
    second = drawn(stream, 10, 16)
    assert sorted(second) == [1, 2, 3, 6, 7, 8]
    mean = (5 - (0.0, 0.25, 0.5, 0.75, 1.0)[second[0] % 5] + 1) / 10
    assert stream.record_pass_rates({10: 1.0}, 10) == {"data/left_out_fraction": 0.4, "data/pass_rate": pytest.approx(mean)}
    host, arrays = json.loads(json.dumps(stream.pass_rates.host())), stream.pass_rates.arrays()
    third = drawn(stream, 16, 21)
    assert sorted(third) == sorted(set(second) - {second[0]})
    again = stream_of(files, pass_rate_min=0.25, pass_rate_max=0.75)
    part = again.pass_rates
    part._resumed = lambda: host
    assert {name: (a.shape, a.dtype) for name, a in part.abstract().items()} == {name: (a.shape, a.dtype) for name, a in arrays.items()}
    part.start(arrays, host)
    assert drawn(again, 12, 21) == second[2:] + third
    low = stream_of(files, pass_rate_min=0.5)
    low.record_pass_rates({p: 0.0 for p, _ in enumerate(drawn(low, 0, 10))}, 10)
    with pytest.raises(RunStopped, match="no row is left"):
        low.take(10)
    assert PassRates([3], 0, 0.5).host() == {"epochs": []}


def test_pass_rates_are_of_the_judged_reward():
    config = tiny_job.get_config()
    config.reward.pass_mark = 0.5
    group = [type("Group", (), {"position": p})() for p in range(3)]
    rows = [(None, None, group[g], "", {"parts": parts}) for g, parts in (
        (0, {"a": 0.5, "b": 0.0}), (0, {"a": 0.4, "b": 1.0}), (1, {"a": None, "b": 1.0}), (1, {"a": 1.0, "b": 0.0}), (2, {"a": None}))]
    assert pass_rates(rows, config) == {0: 0.5, 1: 1.0}
    config.eval.accuracy_from = "b"
    assert pass_rates(rows[:4], config) == {0: 0.5, 1: 0.5}


@pytest.mark.parametrize("options, what", [
    ({"difficulty_window": ("0:1..2",)}, "has no effect without data.difficulty; set data.difficulty"),
    ({"difficulty": "level", "difficulty_window": ("0:1-2",)}, "'0:1-2' is not 'step:low..high'"),
    ({"difficulty": "level", "difficulty_window": ("0:3..2",)}, "3 is above 2"),
    ({"difficulty": "level", "difficulty_window": ("3:1..2",)}, "the first window begins at step 0"),
    ({"difficulty": "level", "difficulty_window": ("0:1..2", "0:2..3")}, "each later than the one before"),
    ({"pass_rate_min": 0.5, "pass_rate_max": 0.4}, "no rate lies between"),
    ({"pass_rate_min": 0.5, "workers": 2}, "would be chosen before the rates are known"),
    ({"pass_rate_max": 1.5}, "must lie in 0..1"),
])
def test_curricula_that_cannot_be(options, what):
    config = tiny_job.get_config()
    config.data.update(options)
    with pytest.raises(ConfigError) as error:
        check(config)
    assert what in str(error.value)
    config = tiny_job.get_config("sft")
    config.data.pass_rate_min = 0.5
    with pytest.raises(ConfigError, match="has no effect with run.recipe=sft; set run.recipe=rl"):
        check(config)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_leaves_out_what_it_solves_and_goes_on_bitwise(tmp_path, staleness):
    """The second pass has no row whose group's rate in the first lay outside, synchronous or ahead; resumed as unbroken."""
    def run(name, *stops):
        for n in stops:
            c = tiny_job.get_config()
            c.data.max_rows, c.data.pass_rate_min, c.rollout.max_staleness = 12, 0.2, staleness
            c.eval.sets, c.train.steps, c.run.dir, c.checkpoint.every_steps = (), 6, str(tmp_path / name), 1
            c.reward.pass_mark = 0.2
            done = jaxrl.train(c, callbacks=lambda step, n=n: step.number == n < 6 and step.stop())
        return done

    done = run("whole", 6)
    assert run("parts", 2, 4, 6)["steps"] == 6
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
    rows = [json.loads(line) for f in sorted((Path(done["run_dir"]) / "rollouts").glob("*.jsonl")) for line in f.read_text().splitlines()]
    by_group = {}
    for row in rows:
        by_group.setdefault(row["group"], (row["prompt"], []))[1].append(row["score"] >= 0.2)
    seldom = {prompt for group, (prompt, hits) in by_group.items() if group < 4 * (3 - staleness) and np.mean(hits) < 0.2}
    started_epochs = 12
    later = [prompt for group, (prompt, _) in by_group.items() if started_epochs <= group < started_epochs + 12 - len(seldom)]
    assert seldom and not seldom & set(later)
