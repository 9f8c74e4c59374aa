"""The simulation of runs ahead: exact where time can be computed by hand, and what it reads from a recorded run."""

import json

import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.planning import case as cases
from jaxrl.planning import plan
from jaxrl.planning.asynchrony import Engine, Speeds, nonnegative_lstsq, of_case, recorded, simulate, table
from jaxrl.resolve.checks.common import check
from jaxrl.rollout.protocol import Engine as Protocol
from jaxrl.rollout.protocol import Request

BATCH = dict(per_step=4, group_size=2, steps=12)


@pytest.mark.parametrize("k", [0, 1, 2, 8])
@pytest.mark.parametrize("generate,train", [(3.0, 2.0), (2.0, 3.0), (2.0, 2.0)])
def test_equal_lengths_take_the_sum_or_the_longer(k, generate, train):
    """10 tokens each, all in slots at once: k = 0 generates, scores, trains and publishes in turn; from k = 1 on the longer decides."""
    speeds = Speeds(slots=8, fixed=generate / 10, train=train, publish=0.25, reward=0.5)
    found = simulate(speeds, [10], max_staleness=k, **BATCH)
    want = 0.25 + (generate + train + 0.5 if k == 0 else max(generate, train))
    assert found["step_seconds"] == pytest.approx(want, rel=1e-9)
    assert found["trainer"] == pytest.approx(train / want) and found["engine"] == pytest.approx(generate / want, abs=0.1 if k else 1e-9)
    assert found["staleness"] <= k


def test_an_engine_on_the_trainers_devices_cannot_work_beside_it():
    speeds = Speeds(slots=8, fixed=0.3, train=2.0)
    for k in (0, 2):
        assert simulate(speeds, [10], max_staleness=k, beside=False, **BATCH)["step_seconds"] == pytest.approx(5.0)


def test_a_plan_and_a_run_say_that_one_device_overlaps_nothing():
    from types import SimpleNamespace

    from jaxrl.rollout.protocol import EngineInfo
    from jaxrl.run.setup import staleness_lines

    rows = [{"max_staleness": 2, "step_seconds": 5.0, "trainer": 0.4, "engine": 0.6}]
    said = lambda beside: "\n".join(table({"basis": "plan.lengths", "beside": beside, "rows": rows, "balance": {}}))  # noqa: E731
    assert "take turns" in said(False) and "take turns" not in said(True)

    def lines(stale, concurrent):
        rollout, info = SimpleNamespace(max_staleness=stale), EngineInfo(concurrent=concurrent)
        return " ".join(staleness_lines(SimpleNamespace(config=SimpleNamespace(rollout=rollout), engine=SimpleNamespace(info=info))))

    assert "max_staleness=2" in lines(2, False) and "take turns" in lines(2, False) and "mesh.roles.sampler.devices" in lines(2, False)
    assert lines(0, False) == lines(2, True) == ""


def test_on_the_same_devices_the_next_answers_fill_the_slots_of_the_tail():
    """Lengths 1 and 9 in two slots: alone the short one's slot idles for 8 steps; ahead, other answers decode there."""
    speeds = Speeds(slots=2, fixed=1.0)
    of = lambda k: simulate(speeds, [1, 9], per_step=1, group_size=2, steps=40, max_staleness=k, partial=True, beside=False)  # noqa: E731
    assert of(0)["step_seconds"] == pytest.approx(9.0)
    assert of(4)["step_seconds"] == pytest.approx(5.0, rel=0.05)  # 10 tokens a step in 2 slots


def test_without_partial_a_publish_waits_for_what_has_begun():
    """One long answer per step (20 tokens of 1 s) beside 1 s of training: with partial it spans publishes, without it holds them up."""
    speeds = Speeds(slots=100, fixed=1.0, train=1.0)
    of = lambda partial: simulate(speeds, [2, 20], per_step=2, group_size=1, steps=60, max_staleness=8, partial=partial)  # noqa: E731
    with_partial, without = of(True), of(False)
    assert with_partial["step_seconds"] < 0.5 * without["step_seconds"] and with_partial["staleness"] == without["staleness"] == 8


def test_the_engines_time_is_counted_by_hand():
    """Two slots, lengths 2, 4, 3: steps of 1 + 0.5 n seconds, half a second per prompt."""
    engine = Engine(Speeds(slots=2, fixed=1.0, each=0.5, prompt=0.5), lambda r: int(r.id), beside=True)
    assert isinstance(engine, Protocol) or hasattr(engine, "poll")
    engine.submit([Request(i, np.ones(1, np.int32)) for i in ("2", "4", "3")])
    seen = []
    while len(seen) < 3:
        seen += [(r.id, engine.now) for r in engine.poll(100.0)]
    # prompts 1.0; 2 tokens of both: 4.0 -> 5.0; a prompt: 0.5; 2 of both: 4.0 -> 9.5; 1 alone: 1.5 -> 11.0
    assert seen == [("2", 5.0), ("4", 9.5), ("3", 11.0)] and engine.busy == 11.0
    engine.elapse(3.0)
    assert engine.now == 14.0 and engine.busy == 11.0


def run_folder(folder, speeds, steps=24, **rollout):
    """A run's files with the times that these speeds give."""
    random = np.random.default_rng(0)
    (folder / "rollouts").mkdir(parents=True)
    roll = {"engine": "jax", "servers": [], "slots": speeds.slots, "group_size": 2, "vllm": {}, **rollout}
    (folder / "config.json").write_text(json.dumps({"config": {"rollout": roll, "data": {"prompts_per_step": 4}}}))
    lines = []
    for step in range(1, steps + 1):
        lengths = random.integers(1, 40, 8)
        engine = Engine(speeds, lambda r, n=lengths: int(n[int(r.id)]), beside=True)
        engine.submit([Request(str(i), np.ones(1, np.int32)) for i in range(8)])
        done = 0
        while done < 8:
            done += len(engine.poll(1e9))
        train = speeds.train + speeds.train_token * lengths.sum()
        (folder / "rollouts" / f"step_{step:08d}.jsonl").write_text("".join(json.dumps({"tokens": [1] * int(n)}) + "\n" for n in lengths))
        time = {"rollout": engine.now, "reward": speeds.reward, "update": train, "publish": speeds.publish, "eval": 7.0}
        lines.append({"step": step, "rollout/tokens": float(lengths.sum()), "time": {**time, "step": sum(time.values())}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_speeds_of_a_recorded_run_are_found_again(tmp_path):
    speeds = Speeds(slots=3, fixed=0.02, each=0.004, prompt=0.01, reward=0.3, train=1.5, train_token=0.01, publish=0.2)
    run_folder(tmp_path / "run", speeds)
    found = recorded(tmp_path / "run")
    for name, value in vars(speeds).items():
        assert getattr(found.speeds, name) == pytest.approx(value, rel=1e-6)
    again = simulate(found.speeds, np.concatenate(found.lengths), per_step=4, group_size=2, steps=len(found.lengths))
    np.testing.assert_allclose(again["seconds"][:len(found.seconds)], found.seconds, rtol=1e-6)


def test_nonnegative_least_squares_is_scipys():
    from scipy.optimize import nnls

    rng, bounded = np.random.default_rng(0), 0
    for columns in (1, 2, 3, 3, 3) * 40:
        matrix, target = rng.normal(size=(12, columns)), rng.normal(size=12)
        found, (want, _) = nonnegative_lstsq(matrix, target), nnls(matrix, target)
        np.testing.assert_allclose(found, want, atol=1e-9)
        bounded += 0 in want
    assert 50 < bounded < 200


def test_a_run_that_tells_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no config.json and metrics.jsonl of a run"):
        recorded(tmp_path)
    run_folder(tmp_path / "ahead", Speeds(3, 1.0), max_staleness=2)
    with pytest.raises(ConfigError, match="its phases overlap"):
        recorded(tmp_path / "ahead")
    run_folder(tmp_path / "short", Speeds(3, 1.0), steps=4)
    with pytest.raises(ConfigError, match="1 steps with rollouts after the first 3"):
        recorded(tmp_path / "short")


def planned(**options):
    from test_plan import QWEN_1B, tiny

    c = tiny(plan__target="h100:2", rollout__engine="vllm", **options)
    c.rollout.servers = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    c.data.prompts_per_step, c.data.max_prompt_tokens, c.rollout.max_new_tokens = 32, 512, 1024
    case = cases.case_of(c, QWEN_1B)
    return case, of_case(case, plan.times(case, {})["phases"])


@pytest.mark.slow
def test_a_plan_compares_stalenesses(tmp_path):
    """By roofline at the longest answers, with plan.lengths and with plan.run: from 1 on the busier side works all the time."""
    case, found = planned()
    rows = {r["max_staleness"]: r for r in found["rows"]}
    assert list(rows) == [0, 1, 2, 4, 8] and found["beside"] and found["balance"]["has"] == {"trainer": 2, "engine": 2}
    alone, ahead = rows[0], rows[1]
    assert alone["trainer"] + alone["engine"] == pytest.approx(1.0, abs=0.02)
    assert max(ahead["trainer"], ahead["engine"]) == pytest.approx(1.0, abs=0.02)
    assert ahead["step_seconds"] == pytest.approx(max(alone["trainer"], alone["engine"]) * alone["step_seconds"], rel=0.02)
    b = found["balance"]
    assert b["trainer"] + b["engine"] == pytest.approx(4) and b["engine"] == pytest.approx(4 * alone["engine"], rel=0.03)
    _, short = planned(plan__lengths=(16, 64))
    assert short["rows"][0]["step_seconds"] < 0.5 * alone["step_seconds"] and short["basis"] == "plan.lengths"
    run_folder(tmp_path / "run", Speeds(slots=3, fixed=1.0, train=5.0))
    _, measured = planned(plan__run=str(tmp_path / "run"))
    assert measured["rows"][0]["step_seconds"] > 10 and str(tmp_path) in table(measured)[1]
    assert "balanced at" in table(found)[-1] and len(table(found)) == 9


def test_lengths_that_cannot_be_are_refused():
    from test_plan import tiny

    for lengths in ((0,), (5000,)):
        with pytest.raises(ConfigError, match="plan.lengths=.*: completions have 1 to rollout.max_new_tokens"):
            check(tiny(plan__lengths=lengths))
    with pytest.raises(ConfigError, match="the run has lengths of its own"):
        check(tiny(plan__lengths=(4,), plan__run="runs/x"))
