"""Whole runs of episodes: ahead of the trainer, cut off and resumed, on two processes; what a person sees of them."""

import json
from pathlib import Path

import pytest
from helpers.run_tools import ledger, run
from helpers.worlds import TEMPLATE

WORLDS = Path(__file__).resolve().parents[1] / "helpers" / "worlds.py"
JOB = ("train.steps=5", "eval.every_steps=0", "eval.before=False", "eval.after=False", "checkpoint.every_steps=2",
       f"env.function={WORLDS}:slow", "env.max_turns=4", "env.max_observation_tokens=8", "reward.functions=()")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return f"model.chat_template={path}"


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(("rollout.partial=True",), marks=pytest.mark.nightly),
                                 ("env.publish=turn", "env.in_flight=12")])
def test_episodes_run_ahead_within_the_bound_and_go_on_after_a_kill(tmp_path, template, how):
    """Every episode is used once, in order, none older than the bound, whatever a kill cut off."""
    job = (template, *JOB, "rollout.max_staleness=1", *how)
    status, told = run(tmp_path, *job, "faults.plan=update.kill9@step=4")
    assert status == -9, told
    status, told = run(tmp_path, *job)
    assert status == 0, told
    rows = [row for step in ledger(tmp_path, 1) for row in step]
    assert {row["last_version"] - row["version"] for row in rows} >= {0}
    assert max(row["episode"][-1].get("turn", 0) for row in rows) > 1
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["env/turns"] > 1 and line["env/segments"] == 1 and line["env/absent_fraction"] == 0
    assert line["time"]["perf/env_engine_seconds"] > 0 and 0 <= line["reward/env/odd"] <= 1


@pytest.mark.slow
def test_what_a_person_sees(tmp_path, template):
    """Episodes as conversations in the console's samples, in rollouts/ and in eval/."""
    status, told = run(tmp_path, template, *JOB[:1], *JOB[4:], "train.steps=1", "eval.every_steps=1", "log.print_samples=2")
    assert status == 0, told
    assert "[model, turn 1" in told and "[not trained] <eos>\n    Max has" in told and "  turns " in told
    row = json.loads((tmp_path / "rollouts" / "step_00000001.jsonl").read_text().splitlines()[0])
    assert [piece["trained"] for piece in row["episode"][:3]] == [False, True, False] and row["episode"][0]["opens"]
    assert row["reward"]["parts"]["env"] == pytest.approx(0.25 + sum(p.get("reward", 0) for p in row["episode"]))
    shown = [p.read_text() for p in (tmp_path / "eval").glob("*.jsonl")]
    assert shown and all("episode" in text for text in shown)
