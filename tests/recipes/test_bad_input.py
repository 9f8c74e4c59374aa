"""Wrong inputs through the command line: exit status 2, what is wrong by name, no device asked for, nothing left behind."""

import fcntl
import json
import re

import jax
import numpy as np
import pytest
from helpers import tiny_job
from safetensors.numpy import save_file

import jaxrl.recipes.rl  # noqa: F401  (imported now: under a patched jax it would not be whole)
import jaxrl.recipes.sft  # noqa: F401
from jaxrl.errors import ConfigError
from jaxrl.main import main

TINY = f"--config={tiny_job.__file__}"


def files_of(folder):
    """Without what Python keeps of a file that it imported."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused("option=value", ...) runs the tiny job in a folder and returns what the user is told."""

    def call(*overrides, config=TINY):
        monkeypatch.chdir(tmp_path)
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, device_work)
        before = files_of(tmp_path)
        flags = ["--config.run.dir=run", "--config.run.compile_cache=", "--config.log.console=off"]
        assert main([config, *flags, *[f"--config.{o}" for o in overrides]]) == 2
        assert files_of(tmp_path) == before
        said = capsys.readouterr().err
        assert said.startswith("jaxrl: ") and "Traceback" not in said
        return said

    return call


def device_work(*_, **__):
    raise AssertionError("a device was asked for before the inputs were checked")


def reward(folder, body):
    path = folder / "reward.py"
    path.write_text(f"def score(prompt, completion, answer, **columns):\n    {body}\n")
    return f"reward.functions={path}:score"


@pytest.mark.parametrize(
    "text, says",
    [
        ("def get_config(arg):\n    c = = 3\n", "SyntaxError: invalid syntax (line 2)"),
        ("import no_such_module\n", "No module named 'no_such_module' (line 1)"),
        ("def get_config(arg):\n    return 1 // 0\n", "ZeroDivisionError: integer division or modulo by zero (line 2)"),
        ("def get_config(arg):\n    return None\n", "must return jaxrl.default_config() with changes, not NoneType"),
        (
            "import jaxrl.config.load as j\ndef get_config(arg):\n    c = j.default_config()\n    c.train.steps = 'many'\n",
            "train.steps=many: expected int, got str (line 4)",
        ),
        (
            "import jaxrl.config.load as j\ndef get_config(arg):\n    c = j.default_config()\n    c.data.path = 'a.jsonl'\n",
            "data.path=a.jsonl: expected tuple, got str; write ('a.jsonl',) (line 4)",
        ),
        (
            "import jaxrl.config.load as j\ndef get_config(arg):\n    return j.default_config().optimizer.rl\n",
            "config has no option 'rl'; did you mean critic.lr or optimizer.lr or sandbox.url? (line 3)",
        ),
    ],
)
def test_a_config_file_that_fails_is_named_with_its_line(refused, tmp_path, text, says):
    (tmp_path / "mine.py").write_text(text)
    said = refused(config=f"--config={tmp_path / 'mine.py'}")
    assert "mine.py" in said and says in said


def test_values_that_are_no_numbers_and_lists_of_the_wrong_kind(refused):
    said = refused("optimizer.lr=nan", "reward.weights=inf")
    assert "optimizer.lr=nan: must be a finite number" in said and "reward.weights=(inf,): must be finite" in said
    said = refused("optimizer.groups={'head': 3}", "optimizer.name=adamm")
    assert "optimizer.groups['head']=3" in said and "optimizer.name='adamm': not one of adamw" in said
    assert "train.row_lengths=long: expected a list of int" in refused("train.row_lengths=long")


def test_all_files_that_are_not_there_are_told_at_once(refused):
    said = refused("data.path=a.jsonl,jaxrl://arith/train.jsonl", "eval.sets=test=b.csv")
    assert "data.path=a.jsonl: no such file" in said and "eval.sets test=b.csv: no such file" in said


def test_a_run_dir_that_is_a_file_or_taken(refused, tmp_path):
    (tmp_path / "run").write_text("x")
    assert "run.dir='run' is not a folder; choose another" in refused()
    (tmp_path / "taken").mkdir()
    with open(tmp_path / "taken/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is writing there; stop it or choose another run.dir" in refused("run.dir=taken")


def test_weights_that_do_not_fit_are_refused_from_their_headers(refused, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(tiny_job.MODEL))
    save_file({"model.norm.weight": np.ones(31, np.float32)}, tmp_path / "model/model.safetensors")
    said = refused(f"model.path={tmp_path / 'model'}", "model.init=pretrained", "model.config={}")
    assert f"{tmp_path / 'model'}: the checkpoint lacks 25 tensors: model.embed_tokens.weight" in said


@pytest.mark.parametrize("option, more", [("reference.path", "algorithm.kl.coef=0.1"), ("critic.path", "algorithm.preset=ppo"),
                                          ("reward.model.path", "reward.trial=false"), ("lora.path", "reward.trial=false")])
def test_a_hub_id_that_cannot_be_fetched_is_named_by_its_option(refused, option, more):
    said = refused(f"{option}=nobody/nothing", more)
    assert f"{option}='nobody/nothing' (revision main) is no folder and cannot be fetched from the hub" in said
    assert not re.search(r"(?<!reward\.)model\.path=", said)


def test_a_reward_that_fails_on_the_first_rows_is_told_before_the_model_is_loaded(refused, tmp_path):
    said = refused(reward(tmp_path, "return columns['nope']"))
    assert "score: error: KeyError: 'nope' (reward.py:2 in score)" in said and "reward.trial=false" in said
    assert "returned str 'good'" in refused(reward(tmp_path, "return 'good'"))
    with pytest.raises(
        AssertionError, match="a device was asked for"
    ):  # untried, or right on reference answers: it goes on
        refused(reward(tmp_path, "return 'good'"), "reward.trial=false")
    with pytest.raises(AssertionError, match="a device was asked for"):
        refused(reward(tmp_path, "return {answer: 1.0}[completion]"))


def test_what_comes_after_a_warm_start_is_checked_before_it(refused, tmp_path):
    said = refused(f"run.warm_start={tiny_job.__file__}:sft", "model.init=pretrained", reward(tmp_path, "return 1 / 0"))
    assert "ZeroDivisionError" in said
    assert "run.warm_start='nowhere.py'" in refused("run.warm_start=nowhere.py")


def test_a_mesh_that_the_devices_do_not_fit_is_refused_before_a_warm_start(monkeypatch):
    from jaxrl.api import _check_before
    from jaxrl.run import setup

    monkeypatch.setattr(setup, "check_inputs", lambda *_: None)
    config = tiny_job.get_config("sft")
    _check_before(config, config, None)
    config.mesh.fsdp = 64
    with pytest.raises(ConfigError, match="64"):
        _check_before(config, config, None)
