"""jaxrl.train with objects in memory: rows, tokenizer, rewards, callbacks; what the package shows; the `jaxrl` command."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import tiny_job
from helpers.run_tools import environment

import jaxrl
from jaxrl.config.load import config_of
from jaxrl.errors import ConfigError
from jaxrl.rewards import RewardPool
from jaxrl.run.python_api import apply_python_inputs

ROWS = [{"question": f"What is {a} plus {b}?", "answer": str(a + b), "level": a} for a in range(4) for b in range(6)]


def reward(prompt, completion, answer, level, **columns):
    """Share of digits; the columns of the rows arrive by name."""
    assert int(answer) >= level
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def job(tmp_path, **changes):
    c = tiny_job.get_config()
    c.data.path, c.eval.sets, c.model.tokenizer, c.data.prompt_column = (), (), "", "question"
    c.run.dir, c.log.console, c.log.tensorboard, c.train.steps = str(tmp_path / "run"), "off", False, 3
    c.rollout.group_size = 4
    for name, value in changes.items():
        group, option = name.split("__")
        c[group][option] = value
    return c


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    from jaxrl.data import resolve

    return PreTrainedTokenizerFast.from_pretrained(resolve("jaxrl://arith/tokenizer"))


@pytest.mark.slow
def test_rows_tokenizer_rewards_and_callbacks_are_objects_and_the_run_goes_on(tmp_path):
    datasets = importlib.import_module("datasets")
    seen = []

    def watch(step):
        seen.append((step.number, step.total, len(step.samples), "reward/mean" in step.metrics, "accuracy/held" in str(step.metrics)))
        if step.number == 2:
            assert {"prompt", "completion", "answer", "score", "advantage"} <= set(step.samples[0])
            step.stop("two are enough")

    given = dict(data=ROWS, rewards=[reward], tokenizer=tokenizer(), eval={"held": datasets.Dataset.from_list(ROWS[:5])})
    out = jaxrl.train(job(tmp_path), callbacks=[watch], **given)
    assert [s[:4] for s in seen] == [(0, 3, 0, False), (1, 3, 16, True), (2, 3, 16, True)]
    assert out["steps"] == 2 and not out["finished"] and out["ended_by"] == "two are enough" and Path(out["export"]).is_dir()
    assert set(out["eval_after"]["sets"]) == {"held"}
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "given://data" in str(written) and "given://held" in str(written)

    other = {**given, "data": [row | {"question": row["question"] + "?"} for row in ROWS]}
    with pytest.raises(ConfigError, match="training data: .*accept_changed"):
        jaxrl.train(job(tmp_path), **other)
    again = jaxrl.train(job(tmp_path), **given)
    assert again["steps"] == 3 and [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").open()][-1] == 3


def test_what_is_given_takes_the_place_of_the_config():
    c = config_of({"optimizer": {"lr": 1e-5}, "train.steps": 7, "user": {"cap": 2}, "algorithm": {"kl": {"coef": 0.1}}})
    assert (c.optimizer.lr, c.train.steps, c.user.cap, c.algorithm.kl.coef) == (1e-5, 7, 2, 0.1)
    given = apply_python_inputs(c, "folder", "rows.jsonl", ["exact"], "other", {"a": "a.jsonl", "b": ROWS}, ())
    assert (c.model.path, c.data.path, c.model.tokenizer, c.reward.functions) == ("folder", ("rows.jsonl",), "other", ("exact",))
    assert c.eval.sets == ("a=a.jsonl", "b=given://b") and given.data is None and list(given.eval) == ["b"]


@pytest.mark.parametrize("config, given, complaint", [
    ({"optimizer.learning_rate": 1}, {}, "did you mean optimizer.lr"),
    (3, {}, "config is an int"),
    ("grpo", {"model": "folder"}, "run.warm_start='grpo_sft', which makes the model itself"),
    (None, {"model": object()}, "model is an object: expected a Hugging Face folder"),
    (None, {"tokenizer": 3}, "tokenizer is an int"),
    (None, {"callbacks": [3]}, "callbacks holds an int"),
    ({"model.path": "x", "data.path": "given://data"}, {"rewards": ["exact"]}, "rows that were passed from Python; pass them again"),
])
def test_what_cannot_be_meant_is_refused(config, given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        jaxrl.train(config, **given)


def test_a_script_that_its_own_reward_workers_import_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text("import jaxrl\n\n\ndef score(prompt, completion, **columns):\n    return 1.0\n\n\njaxrl.train('grpo')\n")
    c = job(tmp_path, reward__functions=(f"{tmp_path}/script.py:score",))
    with pytest.raises(ConfigError, match="a file that reward workers import: put the call under if __name__"), \
            RewardPool(c) as pool:
        pool.wait()


def test_the_package_shows_what_there_is():
    assert {"train", "load_config", "default_config", "Step", "ConfigError", "RunStopped"} <= set(dir(jaxrl)) & set(jaxrl.__all__)
    for name in jaxrl.__all__:
        assert name == "__version__" or (getattr(jaxrl, name).__doc__ and name in jaxrl.__doc__)
    with pytest.raises(AttributeError, match="it has train, "):
        jaxrl.fit  # noqa: B018
    code = "import jaxrl, sys; dir(jaxrl); print([m for m in ('jax', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment()).stdout == "[]\n"


@pytest.mark.full
def test_the_command_does_what_the_module_does(tmp_path):
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["jaxrl"].partition(":")
    script = ["-c", f"import sys; sys.argv[0] = 'jaxrl'; from {module} import {function}; {function}()"]
    for flags in (["--help=lora"], ["--config.optimizer.learning_rate=1", "--config=grpo"]):
        ends = {(done.returncode, done.stdout, done.stderr) for done in (
            subprocess.run([sys.executable, *begin, *flags], capture_output=True, text=True, env=environment(), cwd=tmp_path)
            for begin in ([*script, "train"], ["-m", "jaxrl", "train"], ["-m", "jaxrl.main"]))}
        assert len(ends) == 1
        assert next(iter(ends))[0] == (0 if flags == ["--help=lora"] else 2)
