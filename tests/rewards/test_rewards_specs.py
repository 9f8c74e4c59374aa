"""What a user may name as a reward, and how it reaches the workers."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.config.load import default_config, put
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.services import services
from jaxrl.rewards import RewardItem, RewardPool, register_reward, registered_rewards
from jaxrl.rewards.builtin import exact_reward
from jaxrl.rewards.specs import FunctionFolder, check_specs, to_spec
from jaxrl.rl.trajectories import recorded_outcomes
from jaxrl.types import Trajectories


def shortness(prompt, completion):
    return -float(len(completion))


@register_reward("longness")
def a_registered_reward(prompt, completion):
    return float(len(completion))


def score(functions, *completions, answer="7", **reward):
    config = default_config()
    for key, value in reward.items():
        config.reward[key] = value
    with RewardPool(config, functions=functions) as pool:
        return pool, pool.score([RewardItem("q", c, {"answer": answer}) for c in completions])


@pytest.mark.full
def test_functions_of_modules_go_by_reference():
    pool, result = score([shortness, "longness", exact_reward], "7", "abc")
    assert pool.names == ["shortness", "longness", "exact_reward"]
    assert pool.specs[0] == f"{__name__}:shortness" and pool.specs[2] == "jaxrl.rewards.builtin:exact_reward"
    np.testing.assert_array_equal(result.parts["shortness"], [-1, -3])
    np.testing.assert_array_equal(result.parts["longness"], [1, 3])
    np.testing.assert_array_equal(result.total, [1, 0])


def test_files_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text("import neighbour\ndef f(prompt, completion):\n    return neighbour.VALUE\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "other.py").write_text("class R:\n    @staticmethod\n    def f(prompt, completion):\n"
                                                   "        return 2.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool, result = score(["./mine.py:f", "package.other:R.f"], "c")
    assert result.total[0] == 6.0 and set(pool.names) == {"f", "R.f"}


def test_functions_of_one_name_keep_apart(tmp_path):
    for k in (1, 2):
        (tmp_path / f"m{k}.py").write_text(f"def f(prompt, completion):\n    return {k}.0\n")
    specs = [f"{tmp_path}/m1.py:f", f"{tmp_path}/m2.py:f"]
    _, result = score(specs, "c")
    assert {k: v[0] for k, v in result.parts.items()} == {specs[0]: 1.0, specs[1]: 2.0}


SCRIPT = textwrap.dedent('''
    import json, math, re, sys
    from collections import Counter
    from math import sqrt as root
    from jaxrl.config.load import default_config
    from jaxrl.rewards import RewardItem, RewardPool

    LIMITS = {"low": 1, "names": ["a", "b"]}
    WORD = re.compile(r"[A-Z]+", re.IGNORECASE)
    open(sys.argv[2], "a").write("main ran\\n")  # would show if a worker imported this file

    def helper(text, floor=LIMITS["low"]):
        return max(floor, len(WORD.findall(text)))

    async def from_main(prompt, completion, **columns):
        counts = Counter(completion)
        return helper(completion) + root(16) + math.floor(0.5) + sum(counts[n] for n in LIMITS["names"])

    if __name__ == "__main__":
        config = default_config()
        config.run.dir = sys.argv[1]
        with RewardPool(config, functions=[from_main]) as pool:
            print(json.dumps([pool.specs, pool.score([RewardItem("q", "ab cd"), RewardItem("q", "1")]).total.tolist()]))
''')


def test_functions_of_main_are_written_from_their_source(tmp_path):
    script, run_dir, trace = tmp_path / "script.py", tmp_path / "run", tmp_path / "trace"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(run_dir), str(trace)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    (spec,), total = json.loads(out.stdout)
    assert total == [2 + 4 + 0 + 2, 1 + 4 + 0 + 0]
    assert spec.startswith(str(run_dir / "reward_functions" / "from_main_"))
    assert trace.read_text() == "main ran\n"


def test_functions_of_a_notebook_cell(tmp_path):
    """The real thing: a function typed into IPython's shell."""
    code = textwrap.dedent('''
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_cell("BONUS = 0.5\\ndef brevity(prompt, completion, answer):\\n    return BONUS - len(completion)")
        shell.run_cell(
            "from jaxrl.config.load import default_config\\nfrom jaxrl.rewards import RewardItem, RewardPool\\n"
            "with RewardPool(default_config(), functions=[brevity]) as pool:\\n"
            "    print('total', pool.score([RewardItem('q', 'abc', {'answer': 1})]).total[0])")
    ''')
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "total -2.5" in out.stdout


class Judge:
    def __call__(self, prompt, completion):
        return 1.0


def closure():
    bound = 3

    def inner(prompt, completion):
        return float(bound)
    return inner


def nested_reads_global():
    def inner(prompt, completion):
        return float(JUDGE is not None)
    return inner


JUDGE = Judge()
without_source = {}
exec("def made(prompt, completion):\n    return 1.0", without_source)


@pytest.mark.parametrize("function, text", [
    (closure(), r"uses variables of the function around it \(bound\).*Put it into a file"),
    (nested_reads_global(), "uses the global 'JUDGE', a Judge"),
    (lambda prompt, completion: 1.0, "lambda"),
    (without_source["made"], "source of 'made' is not available"),
    (JUDGE, "a Judge cannot be passed to worker processes"),
])
def test_what_cannot_reach_a_worker_is_refused(function, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        to_spec(function, FunctionFolder(str(tmp_path)))


@pytest.mark.parametrize("options, text", [
    ({"functions": ("mth",)}, "no reward 'mth'; did you mean 'math'"),
    ({"functions": ("./missing.py:f",)}, "missing.py does not exist"),
    ({"functions": ("./missing.py",)}, "a file without a function; write ./missing.py:function"),
    ({"functions": ("my module:f",)}, "neither a name, nor package.module:function"),
    ({"functions": ("exact", "exact")}, "listed twice"),
    ({"functions": ("exact",), "weights": (1.0, 2.0)}, r"2 entries for 1 functions \(exact\)"),
    ({"functions": ("exact",), "weights": (float("nan"),)}, "finite"),
    ({"functions": ("format",)}, "needs reward.format_pattern"),
    ({"functions": ("format",), "format_pattern": "("}, "is not a valid regex"),
    ({"workers": 0}, "reward.workers=0"),
    ({"timeout_seconds": 0.0}, "reward.timeout_seconds=0"),
    ({"max_failed_fraction": 1.5}, "reward.max_failed_fraction=1.5"),
])
def test_wrong_configs_fail_before_any_process(options, text):
    config = default_config()
    for key, value in options.items():
        config.reward[key] = value
    with pytest.raises(ConfigError, match=text):
        RewardPool(config)


@pytest.mark.parametrize("name", ["exact", "think_format", "judge", "remote"])
def test_a_function_cannot_take_the_name_of_a_built_in_reward_or_a_service(name):
    with pytest.raises(ValueError, match=f"reward '{name}' is .*"):
        register_reward(name)(shortness)
    assert registered_rewards().get(name) is not shortness


def test_a_service_cannot_take_the_name_of_a_registered_function():
    """It would score in its place."""
    c = default_config()
    c.reward.functions, c.reward.judges = ("longness",), {"longness": {"servers": ("http://localhost:1",)}}
    assert any("reward.judges.longness: 'longness' cannot be its name" in problem for problem in services(c))


def test_a_function_cannot_take_the_name_of_a_score_that_no_function_gives():
    for name, option, value in (("env", "env.function", "guess"), ("env", "env.malformed_penalty", 0.5),
                                ("reward_model", "reward.model.path", "a/model")):
        c = default_config()
        check_specs(c, [f"mine:{name}"], [name], True)
        put(c, option, value)
        with pytest.raises(ConfigError, match=f"reward function '{name}': .* rename the function"):
            check_specs(c, [f"mine:{name}"], [name], True)


def test_accuracy_must_come_from_a_function_that_runs():
    config = default_config()
    config.eval.accuracy_from = "boxed"
    with pytest.raises(ConfigError, match="eval.accuracy_from='boxed' is not one of the reward functions: math"):
        RewardPool(config)


def test_eval_rewards_keep_the_weights_of_training():
    config = default_config()
    config.reward.functions, config.reward.weights = ("exact", "boxed"), (3.0, 2.0)
    config.eval.rewards = ("boxed", "choice")
    with RewardPool(config, names=config.eval.rewards) as pool:
        assert pool.weights == {"boxed": 2.0, "choice": 1.0}


@pytest.mark.full
@pytest.mark.parametrize("source, name, text", [
    ("def f(:\n", "f", "SyntaxError"),
    ("import not_a_module_at_all\n", "f", "No module named 'not_a_module_at_all'"),
    ("def g(prompt, completion): pass\n", "f", "has no function 'f'; it has: g"),
    ("f = 3\n", "f", "has type int; expected a function"),
    ("raise SystemExit(2)\n", "f", "SystemExit"),
    ("import os\nos._exit(5)\n", "f", "it exited with status 5 while importing"),
])
def test_functions_that_do_not_load_are_named(tmp_path, source, name, text):
    (tmp_path / "r.py").write_text(source)
    config = default_config()
    config.reward.functions = (f"{tmp_path}/r.py:{name}",)
    with RewardPool(config) as pool:
        with pytest.raises(ConfigError, match=text):
            pool.wait()
        with pytest.raises(ConfigError, match=text):
            pool.score([RewardItem("q", "c")])


def test_columns_without_json_form_are_named():
    config = default_config()
    config.reward.functions = ("exact",)
    with RewardPool(config) as pool, pytest.raises(ConfigError, match="item 0: .*object.*columns: answer, thing"):
        pool.score([RewardItem("q", "c", {"answer": "a", "thing": object()})])


@pytest.mark.full
def test_a_key_says_which_code_and_options_scored(tmp_path):
    """Of two places of the same files it is the same; of other code, a neighbour's code and other options not."""

    def key(folder, functions=("mine.py:f",), **options):
        config = default_config()
        config.reward.functions = tuple(f"{folder}/{f}" if ".py" in f else f for f in functions)
        for name, value in options.items():
            config[name.split("__")[0]][name.split("__")[1]] = value
        with RewardPool(config) as pool:
            return pool.key()

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("def f(prompt, completion):\n    import helper\n    return helper.VALUE\n")
        (tmp_path / name / "helper.py").write_text("VALUE = 1.0\n")
    first = key(tmp_path / "a")
    assert key(tmp_path / "b") == first != key(tmp_path / "a", reward__timeout_seconds=3.0)
    assert first != key(tmp_path / "a", user__bonus=1)
    (tmp_path / "a" / "helper.py").write_text("VALUE = 2.0\n")  # imported when the function is called
    (tmp_path / "b" / "mine.py").write_text("def f(prompt, completion):\n    return 3.0\n")
    assert len({first, key(tmp_path / "a"), key(tmp_path / "b"), key("", ("exact",)), key("", ("boxed",))}) == 5


def test_only_outcomes_of_the_same_answer_and_code_are_taken_again():
    """What an earlier try at a step recorded, row by row: the second differs in code, the third in its tokens, then its text and
    its reference answer; the last is of a version without `by`."""
    n = 7
    zeros, tokens = np.zeros(n, int), np.arange(3 * n)
    traj = Trajectories(tokens, 3 * np.arange(n + 1), tokens % 3 > 0, tokens, tokens, zeros + 1, np.arange(n), zeros, zeros, zeros)
    examples, texts = [SimpleNamespace(prompt_text="q", answer=7)] * n, ["a"] * n
    rows = [{"group": i, "sample": 0, "prompt": "q", "completion": "a", "answer": 7, "tokens": [3 * i + 1, 3 * i + 2],
             "reward": {"outcomes": {"f": "ok"}, "parts": {"f": 1.0}, "by": "code"}} for i in range(n)]
    rows[1]["reward"]["by"] = "other code"
    rows[2]["tokens"], rows[3]["completion"], rows[4]["answer"] = [0, 0], "b", 8
    del rows[5]["reward"]["by"]
    taken = recorded_outcomes([*rows[:6], {"something": "else"}], traj, examples, texts, "code")
    assert [t is not None for t in taken] == [True] + [False] * 6 and taken[0] == rows[0]["reward"]


def test_the_guides_reward_reads_the_last_number():
    """It took "12" for "2"."""
    text = (Path(__file__).parents[2] / "docs/guides/grpo.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def score(" in block)
    names = {}
    exec(code, names)
    found = [names["score"]("q", c, answer="2") for c in ("12", "it is 2", "2.", "", "2 or 3", "-2", "x = 2")]
    assert found == [0, 1, 1, 0, 0, 0, 1]
