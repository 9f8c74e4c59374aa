"""An episode of one turn is what a completion with a reward function is: bitwise, also after a resume."""

import json
import sys
from pathlib import Path

import pytest
from helpers.run_tools import fingerprint, run
from helpers.worlds import TEMPLATE

WORLDS = Path(__file__).resolve().parents[1] / "helpers" / "worlds.py"
SAME = ("rollout.compaction=False", "train.steps=4", "eval.every_steps=2", "checkpoint.every_steps=2", "run.stop_seconds=1")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return f"model.chat_template={path}"


def lines(run_dir, name):
    """metrics.jsonl without times, the reward's name and what only episodes tell."""
    out = []
    for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        row.pop("time")
        out.append({k.replace(f"/{name}", "/score"): v for k, v in row.items() if not k.startswith("env/")})
    return out


def weights(run_dir):
    return {k: v for k, v in fingerprint(run_dir).items() if k.startswith("export/")}


@pytest.mark.slow
def test_one_turn_is_a_completion_with_a_reward(tmp_path, template):
    episode = (f"env.function={WORLDS}:single", "env.max_turns=1", "env.workers=1", "reward.functions=()")
    plain, told = run(tmp_path / "plain", template, *SAME)
    assert plain == 0, told
    whole, told = run(tmp_path / "episode", template, *SAME, *episode)
    assert whole == 0, told
    assert lines(tmp_path / "plain", "digits") == lines(tmp_path / "episode", "env")
    assert weights(tmp_path / "plain") == weights(tmp_path / "episode")
    cut, told = run(tmp_path / "resumed", template, *SAME, *episode, "faults.plan=rollout.kill9@step=3")
    assert cut != 0, told
    done, told = run(tmp_path / "resumed", template, *SAME, *episode)
    assert done == 0, told
    assert fingerprint(tmp_path / "resumed") == fingerprint(tmp_path / "episode")


@pytest.mark.slow
def test_a_program_is_an_episode_function(tmp_path, template):
    """A program that asks once, through the proxy, is the function that sends once: bitwise, over steps that learn."""
    same = ("env.max_turns=1", "env.workers=1", "reward.functions=()", "rollout.compaction=False", "train.steps=3",
            "eval.every_steps=0", "eval.before=False", "eval.after=False", "run.stop_seconds=1")
    programs = WORLDS.with_name("programs.py")
    by = {"function": (f"env.function={WORLDS}:single",),
          "program": (f"env.program={sys.executable} -S -E {programs}", f"env.score={programs}:digits")}
    for name, how in by.items():
        status, told = run(tmp_path / name, template, *same, *how)
        assert status == 0, told
    function, program = (lines(tmp_path / name, "env") for name in by)
    assert function == program and any(line.get("grad/norm", 1) for line in function)
    assert weights(tmp_path / "function") == weights(tmp_path / "program")
