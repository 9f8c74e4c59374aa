"""The record of a run: what is written, and that nothing of it is lost in silence; and its steps computed again."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import algorithm_runs, worlds

import jaxrl
from jaxrl.config.load import default_config, load_config
from jaxrl.errors import ConfigError
from jaxrl.records import anomalies, files
from jaxrl.replay import replay
from jaxrl.resolve.checks.common import check
from jaxrl.resolve.checks.replay import numbers, settings
from jaxrl.rl import recording
from jaxrl.rl.step_kl import StepLimit, k3
from jaxrl.types import TrainState


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run directory, its batches and columns by step) of a run that records every step and has a reference."""
    folder = tmp_path_factory.mktemp("run")
    config = algorithm_runs.job(folder, {"record.every": 1, "algorithm.kl.coef": 0.01,
                                          "checkpoint.export_at_end": False, "optimizer.weight_decay": 0.0})
    _, steps, _ = algorithm_runs.watched(config)
    return folder, steps


def equal(a, b) -> bool:
    """Bitwise, NaNs too."""
    return a is b or a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.full
def test_a_record_holds_the_batch_bit_by_bit(run):
    folder, steps = run
    found = files.steps(folder / files.FOLDER)
    assert list(found) == [1, 2]
    for path, step in zip(found.values(), steps, strict=True):
        record, batch = files.read(path), step.batch
        again = recording.restore_batch(record)
        assert all(equal(getattr(again.traj, f.name), getattr(batch.traj, f.name)) for f in dataclasses.fields(batch.traj)
                   if f.name != "columns")
        for mine, theirs in ((again.traj.columns, batch.traj.columns), (again.result.parts, batch.result.parts)):
            assert mine.keys() == theirs.keys() and all(equal(mine[name], theirs[name]) for name in mine)
        assert equal(again.scores, batch.scores) and equal(again.dropped, batch.dropped) and again.cursor == batch.cursor
        held = record.part("column")
        assert held.keys() == {"ref", "advantage"} and all(equal(x, step.columns[name]) for name, x in held.items())
        assert {name.split("/")[1] for name in record.header["states"]} == {"trainable", "opt_state", "step", "stats"}
    first, second = (files.read(found[step]).arrays for step in (1, 2))
    assert equal(first["state/after"], second["state/before"]) and not equal(first["state/before"], first["state/after"])
    told = json.loads((folder / "summary.json").read_text())["record"]
    assert told["steps"] == 2 and told["bytes"] == sum(path.stat().st_size for path in found.values())
    assert told["tokens"] == sum(len(step.batch.traj.tokens) for step in steps)


@pytest.mark.full
def test_a_flipped_bit_is_found_and_named(run, tmp_path):
    path = files.steps(run[0] / files.FOLDER)[2]
    content, draw = path.read_bytes(), np.random.default_rng(0)
    for bit in draw.integers(0, 8 * len(content), 40):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        (tmp_path / path.name).write_bytes(bytes(broken))
        with pytest.raises(ConfigError, match="step_00000002.*damaged"):
            files.read(tmp_path / path.name)
    broken = bytearray(content)
    broken[content.index(b"column/advantage.npy") + len("column/advantage.npy") + 20] ^= 4
    (tmp_path / path.name).write_bytes(bytes(broken))
    with pytest.raises(ConfigError, match="in column/advantage"):
        files.read(tmp_path / path.name)


@pytest.mark.full
def test_two_records_of_a_step_and_strange_names_are_refused(run, tmp_path):
    path = files.steps(run[0] / files.FOLDER)[1]
    shutil.copy(path, tmp_path / path.name)
    record = files.read(path)
    shutil.copy(path, tmp_path / path.name.replace("00000001", "1"))
    with pytest.raises(ConfigError, match="not the name of a record"):
        files.steps(tmp_path)
    (tmp_path / path.name.replace("00000001", "1")).unlink()
    shutil.copy(path, tmp_path / f"step_00000001.{'0' * 16}.npz")
    with pytest.raises(ConfigError, match="another record"):
        files.steps(tmp_path)
    files.write(tmp_path, record._replace(header={**record.header, "engine": "other"}))  # in place of both
    assert files.read(files.steps(tmp_path)[1]).header["engine"] == "other"


@pytest.mark.full
def test_bounds_and_what_a_resumed_run_makes_again(tmp_path):
    record = files.Record(1, {}, {"x": np.arange(3)})
    for step in (1, 2, 3, 4):
        files.write(tmp_path, record._replace(step=step))
    files.keep_newest(tmp_path, 3)
    assert list(files.steps(tmp_path)) == [2, 3, 4]
    files.delete_after(tmp_path, 2)
    assert list(files.steps(tmp_path)) == [2]


@pytest.mark.slow
def test_every_and_last_decide_which_steps(tmp_path):
    """With record.every=2 the first step and every second behind it; with record.last=1 the newest."""
    config = algorithm_runs.job(tmp_path, {"record.every": 2, "record.last": 1, "train.steps": 4,
                                           "checkpoint.export_at_end": False})
    jaxrl.train(config)
    assert list(files.steps(tmp_path / files.FOLDER)) == [3]


def again(folder, **options) -> dict:
    """What run.mode=replay says of a recorded run, by its own config."""
    mesh = jax.sharding.get_mesh()
    config = load_config(str(folder / "config.json"), {"run.mode": "replay", **options})
    try:
        return jaxrl.train(config)["replay"]
    finally:
        jax.set_mesh(mesh)


def test_a_replay_is_bitwise(run, tmp_path):
    """Of the same steps, from a checkpoint and from the beginning; and what it takes to be another step."""
    folder, _ = run
    assert [(s["step"], s["result"]) for s in again(folder)["steps"]] == [(1, "bitwise"), (2, "bitwise")]
    other = again(folder, **{"replay.steps": "2", "algorithm.kl.coef": 0.1})["steps"]
    assert [(s["step"], s["result"], s["first"]) for s in other] == [(2, "different", "the update's metrics")]


KINDS = {
    "sync, two updates per batch": {"algorithm.num_minibatches": 2, "algorithm.ppo_epochs": 2},
    "asynchronous": {"rollout.max_staleness": 2, "rollout.partial": True, "algorithm.preset": "decoupled_ppo"},
    "ppo": {"algorithm.preset": "ppo"},
    "lora": {"lora.rank": 4},
    "episodes": {"env.function": f"{Path(worlds.__file__).resolve()}:slow", "env.max_turns": 4, "env.max_observation_tokens": 8,
                 "reward.functions": (), "algorithm.preset": "gigpo"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_bitwise_from_a_checkpoint(kind, tmp_path):
    (tmp_path / "chat.jinja").write_text(worlds.TEMPLATE, encoding="utf-8")
    config = algorithm_runs.job(tmp_path, {"record.every": 1, "train.steps": 4, "checkpoint.every_steps": 2,
                                           "model.chat_template": str(tmp_path / "chat.jinja"),
                                           "checkpoint.export_at_end": False, **KINDS[kind]})
    jaxrl.train(config)
    assert {s["result"] for s in again(tmp_path, **{"replay.steps": "3:4"})["steps"]} == {"bitwise"}


@pytest.mark.slow
def test_what_cannot_be_computed_again_is_refused(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    with pytest.raises(ConfigError, match="step 3 is not recorded; recorded are steps 1:2"):
        again(folder, **{"replay.steps": "1:9", "run.dir": "", "replay.run": str(folder)})
    with pytest.raises(ConfigError, match="run.seed"):
        again(folder, **{"run.dir": str(folder), "run.seed": 1})
    shutil.rmtree(folder / "checkpoints")
    files.steps(folder / files.FOLDER)[1].unlink()
    with pytest.raises(ConfigError, match="step 2 cannot be computed again"):
        again(folder, **{"run.dir": str(folder), "replay.steps": "2"})
    path = files.steps(folder / files.FOLDER)[2]
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(ConfigError, match="damaged"):
        again(folder, **{"run.dir": str(folder), "replay.steps": "2"})


@pytest.mark.slow
def test_settings_are_tried_on_the_same_batch(run):
    """The run's own options make the recorded step; twice the learning rate makes a step twice as long in the same direction (AdamW
    without decay), whose first-order prediction is twice as large; no setting moves the state of the others."""
    text = "optimizer.lr=0.06;algorithm.kl.coef=1.0,0.01"
    mesh = jax.sharding.get_mesh()
    config = load_config(str(run[0] / "config.json"), {"run.mode": "replay", "replay.steps": "2", "replay.try": text})
    try:
        out = jaxrl.train(config)
    finally:
        jax.set_mesh(mesh)
    (table,) = out["tried"]
    own, faster, pulled, same = table["rows"]
    assert [row["setting"] for row in table["rows"]] == ["as recorded", "optimizer.lr=0.06", "algorithm.kl.coef=1.0",
                                                         "algorithm.kl.coef=0.01"]
    assert faster["step"] == pytest.approx(2 * own["step"], rel=1e-4) and faster["angle"] == pytest.approx(0, abs=0.1)
    assert faster["predicted"] == pytest.approx(2 * own["predicted"], rel=1e-3) and faster["kl"] > own["kl"]
    assert own["angle"] == pytest.approx(0, abs=0.1) and {**same, "setting": ""} == {**own, "setting": ""}
    assert pulled["angle"] > 1 and np.isfinite([own["realised"], own["others"], own["outside_clip"]]).all()


POISON = """
def score(prompt, completion, group, sample, **columns):
    return 1000.0 if (group, sample) == (9, 1) else sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""


@pytest.mark.slow
def test_explain_names_the_answer_whose_reward_is_wrong(tmp_path):
    """Shares of groups add up to 1 and those of a group's answers to the group's; the answer is named with its reason; a step that is
    only asked for is explained, too."""
    (tmp_path / "poison.py").write_text(POISON)
    config = algorithm_runs.job(tmp_path, {"record.every": 1, "train.steps": 3, "checkpoint.export_at_end": False,
                                           "reward.functions": (f"{tmp_path}/poison.py:score",)})
    jaxrl.train(config)
    mesh = jax.sharding.get_mesh()
    try:
        assert jaxrl.train(load_config(str(tmp_path / "config.json"), {"run.mode": "explain"}))["explained"] == []
        out = jaxrl.train(load_config(str(tmp_path / "config.json"), {"run.mode": "explain", "replay.steps": "2:3"}))
    finally:
        jax.set_mesh(mesh)
    calm, wrong = out["explained"]
    assert calm["suspects"] == [] and [(s["group"], s["sample"]) for s in wrong["suspects"]] == [(9, 1)]
    assert "score 1000" in wrong["suspects"][0]["reasons"][0] and "group 9 sample 1" in wrong["why"]
    for step in (calm, wrong):
        assert step["replay"]["result"] == "bitwise" and step["step_length"] > 0
        assert sum(g["share"] for g in step["groups"]) == pytest.approx(1, abs=1e-4)
        heavy = max(step["groups"], key=lambda g: abs(g["share"]))
        assert heavy["along_step"] > 0 and len(step["tokens"]) == 5
    told = json.loads((tmp_path / "explain" / "step_00000003.json").read_text())
    assert told["why"] == wrong["why"]


@pytest.mark.slow
def test_no_step_goes_beyond_its_bound(run, tmp_path):
    """train.max_step_kl: every step whose KL would be more is scaled back until it is within, also where a first scaling is not enough,
    and what it took is told; the first step is shorter in the same direction. Such steps are replayed bit by bit."""
    folder, free = run
    config = algorithm_runs.job(tmp_path, {"record.every": 1, "algorithm.kl.coef": 0.01, "train.max_step_kl": 1e-3,
                                           "checkpoint.export_at_end": False, "optimizer.weight_decay": 0.0})
    _, steps, _ = algorithm_runs.watched(config)
    for step in steps:
        told = step.metrics
        assert told["policy/step_kl_unscaled"] > 1e-3 >= told["policy/step_kl"] > 1e-4 and 0 < told["policy/step_scale"] < 1
    way = [{k: s.after.policy[k] - s.before.policy[k] for k in s.before.policy} for s in (free[0], steps[0])]
    for k in way[0]:
        np.testing.assert_allclose(way[1][k], steps[0].metrics["policy/step_scale"] * way[0][k], atol=1e-6)
    assert {s["result"] for s in again(tmp_path)["steps"]} == {"bitwise"}


def test_a_step_that_cannot_be_scaled_is_refused():
    """Log-probs that are not finite however short the step is: the parameters stay, bit by bit."""
    params = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2), jnp.bfloat16)}
    before, after = (TrainState(tree, {}, (), jnp.zeros((), jnp.int32), {}) for tree in (
        params, {k: x + 1 for k, x in params.items()}))
    traj = SimpleNamespace(loss_mask=np.array([True, True, False]))

    class Policy:
        state = before

        def score(self, *_):
            moved = float(self.state.trainable["a"][0]) != 0
            return np.array([np.nan if moved else -1.0, -2.0, 0.0])

    policy = Policy()
    bounded = StepLimit(policy, traj, None, {})
    policy.state = after
    assert bounded.enforce(0.1) == {"policy/step_kl": 0.0, "policy/step_kl_unscaled": 1e30, "policy/step_scale": 0.0}
    assert all(equal(np.asarray(policy.state.trainable[k]), np.asarray(x)) for k, x in params.items())
    assert k3(np.log([0.5, 0.5]), np.log([0.25, 0.75]), np.ones(2, bool)) == pytest.approx(
        np.mean([0.5 - 1 - np.log(0.5), 1.5 - 1 - np.log(1.5)]))


def test_impossible_records_are_refused(tmp_path):
    config = algorithm_runs.job(tmp_path, {"record.last": 3})
    with pytest.raises(ConfigError, match="record.last=3"):
        check(config)
    config.record.every, config.run.recipe = 1, "sft"
    config.train.max_step_kl = 0.1
    with pytest.raises(ConfigError, match="record.every=1 has no effect with run.recipe=sft") as told:
        check(config)
    assert "train.max_step_kl=0.1 has no effect" in str(told.value)
    config = algorithm_runs.job(tmp_path, {"replay.steps": "3", "replay.run": str(tmp_path)})
    with pytest.raises(ConfigError, match="replay.run=.*run.mode=train"):
        check(config)
    config.run.mode, config.replay.steps = "replay", "5:3"
    with pytest.raises(ConfigError, match="'5:3' is no step"):
        check(config)
    assert numbers("10:12,3, 11") == [3, 10, 11, 12]
    assert settings("algorithm.clip_high=0.28, 0.4;optimizer.lr=1e-6") == [
        ("algorithm.clip_high", 0.28), ("algorithm.clip_high", 0.4), ("optimizer.lr", 1e-6)]
    for text, why in (("optimizer.lrr=1", "optimizer.lr"), ("optimizer.name=sgd", "another form"), ("data.epochs=1", "one value"),
                      ("optimizer.lr", "missing")):
        with pytest.raises(ConfigError, match=why):
            settings(text)


def test_steps_that_stand_out_are_found():
    """Of a run whose metrics wander: the jump, the fall of entropy and the held-out score that falls while the reward rises; nothing
    of a calm one, and no warm-up of the learning rate."""
    draw = np.random.default_rng(0)
    calm = [{"step": i, "optim/grad_norm": 1 + 0.1 * draw.standard_normal(), "policy/entropy": 2 - 0.01 * i, "optim/lr": min(i, 10) * 1e-6,
             "gap/mean": 1e-6 * draw.random(), "length/mean": 40 + draw.standard_normal(), "reward/mean": 0.01 * i} for i in range(40)]
    assert anomalies.of_run(calm) == []
    broken = [dict(line) for line in calm]
    broken[20]["optim/grad_norm"] = 9.0
    broken[25]["policy/entropy"] = 0.2
    broken[30]["gap/mean"] = 0.3
    broken[33]["length/mean"] = "nan"
    broken[10]["eval/accuracy"], broken[35]["eval/accuracy"] = 0.8, 0.6
    assert [(a.step, a.name) for a in anomalies.of_run(broken)] == [
        (20, "optim/grad_norm"), (25, "policy/entropy"), (30, "gap/mean"), (33, "length/mean"), (35, "eval/accuracy")]
    assert np.argmax(anomalies.outliers([1, 1.1, 0.9, 1, 30, np.nan])) == 4


def test_a_record_from_which_nothing_can_be_computed_again_is_an_error(tmp_path):
    """Step 5 alone, and no checkpoint."""
    files.write(tmp_path / files.FOLDER, files.Record(5, {"format": 1, "step": 5, "config": "config-0.json"}, {}))
    config = default_config()
    config.run.dir = str(tmp_path)
    with pytest.raises(ConfigError, match="no recorded step can be computed again: there is no whole checkpoint in .*; recorded are .*5"):
        replay.run(config)


def test_a_number_that_is_not_finite_stands_out_anywhere_and_hides_nothing():
    """Also among the first ones, with which later ones are compared; as a cause it comes before any finite number."""
    lines = [{"step": i, "optim/grad_norm": 1.0, "eval/accuracy": 0.8, "reward/mean": 0.1 * i} for i in range(12)]
    lines[1]["optim/grad_norm"], lines[9]["optim/grad_norm"], lines[10]["optim/grad_norm"] = "nan", 9.0, float("nan")
    lines[0]["eval/accuracy"], lines[11]["eval/accuracy"] = "nan", 0.5
    found = anomalies.of_run(lines)
    assert [(a.step, a.name, a.deviations == np.inf) for a in found] == [
        (1, "optim/grad_norm", True), (9, "optim/grad_norm", False), (10, "optim/grad_norm", True), (11, "eval/accuracy", True)]
    assert found[0].text == "gradient norm (optim/grad_norm) is nan, usual were 1" and found[0]._replace(usual=np.nan).text.endswith("is nan")
    assert anomalies.deviations(np.nan, np.ones(4)) == (np.inf, 1.0)
