"""run.recipe=preference: its gradient is that of the whole loss, its reference is scored once, runs learn, resume and say what is wrong."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.data_cases import write_jsonl
from helpers.preference_options import options
from helpers.run_tools import fingerprint, run
from helpers.training_helpers import LAYOUTS, batch_of_groups, gradient, layout_of, params_of, tiny_model

import jaxrl
from jaxrl import training
from jaxrl.algorithms.preference import Table, preference_loss
from jaxrl.config.load import load_config
from jaxrl.errors import ConfigError
from jaxrl.recipes import preference
from jaxrl.resolve.checks import common
from jaxrl.roles import sums
from jaxrl.training.score import make_score

ROWS = [{"prompt": f"{i % 12 + 1}{'+-'[i // 12]}2=", "chosen": str(i % 9 + 1), "rejected": f"{i % 9 + 1}-{i % 5 + 1}"} for i in range(24)]


def config(folder, *, arg="sft", **changes):
    """Two-layer model, 24 pairs (the last 8 held out), four a step, four steps."""
    c = tiny_job.get_config(arg)
    c.run.recipe, c.run.dir, c.log.console, c.log.every_steps = "preference", str(folder / "run"), "off", 1
    c.data.path = (str(write_jsonl(folder / "train.jsonl", ROWS[:16])),)
    c.eval.sets = (f"held={write_jsonl(folder / 'held.jsonl', ROWS[16:])}",)
    c.reference.dtype, c.train.steps, c.checkpoint.every_steps, c.eval.every_steps = "fp32", 4, 2, 0
    c.optimizer.lr = 1e-3
    for name, value in changes.items():
        group, _, leaf = name.partition("__")
        c[group][leaf] = value
    return c


def lines(folder):
    return [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


# -- the gradient ------------------------------------------------------------------------------------------------------


def whole_loss(name, s, r, lengths, table, beta, z0):
    """The loss in jnp, to be differentiated through the model."""
    x, (c, w) = s - r, (table.chosen, table.rejected)
    if name == "dpo":
        return jnp.mean(jnp.logaddexp(0.0, -beta * (x[c] - x[w])))
    if name == "aot":
        return jnp.mean(jnp.logaddexp(0.0, -beta * (jnp.sort(s[c] - s[w]) - jnp.sort(r[c] - r[w]))))
    if name == "orpo":
        m = s / lengths
        odds = m - jnp.log(-jnp.expm1(m))
        return -jnp.sum(s[c]) / jnp.sum(lengths[c]) + beta * jnp.mean(jnp.logaddexp(0.0, odds[w] - odds[c]))
    return jnp.mean(jnp.where(table.good, 1 - jax.nn.sigmoid(beta * (x - z0)), 1 - jax.nn.sigmoid(beta * (z0 - x))))


@pytest.mark.parametrize("name, layout", [("dpo", "padded"), ("dpo", "packed"), ("dpo", "packed_shared_8_microbatches"),
                                          *(pytest.param(*case, marks=pytest.mark.slow) for case in (
                                              ("aot", "packed_shared_8_microbatches"), ("orpo", "packed"), ("kto", "packed")))])
@pytest.mark.slow
def test_the_update_is_that_of_the_whole_loss(name, layout):
    """Score, derivative on [N] numbers, and NextToken's update give the gradient of the whole loss, however it is packed."""
    assert layout in LAYOUTS
    with jax.enable_x64(True):
        model = tiny_model(jnp.float64)
        params = params_of(model, jnp.float64)
        traj, _ = batch_of_groups(groups=4, size=2)
        table = Table(np.arange(0, 8, 2), np.arange(1, 8, 2), np.arange(8) % 2 == 0)
        reference, z0 = -np.linspace(20, 40, 8), 0.7
        score = make_score(model, temperature=1.0, chunk=64, put=lambda batch: batch)
        found = layout_of(traj, layout)
        policy = traj.total(score(params, traj, found).astype(np.float64))
        loss, derivative, _ = preference_loss(policy, reference, traj.total(), table, options(name, beta=0.3), z0)
        got, _ = gradient(model, params, traj, {}, training.sequence_weights(traj, derivative), found, np.float64,
                          training.NextToken(chunk=64, max_grad_norm=0.0))

        def whole(params):
            ones = {"token": traj.loss_mask.astype(float), "policy": traj.loss_mask.astype(float)}
            per_answer = {}
            for micro in layout_of(traj, "padded").minibatches[0].microbatches:
                batch = jax.tree.map(jnp.asarray, training.pack(traj, micro, {}, ones, np.float64))
                logp = training.objective.Outputs(model, params, batch, training.NextToken(chunk=64)).logprobs()[0]
                for r, row in enumerate(micro.rows):
                    for k, i in enumerate(i for block in row for i in block.sequences):
                        per_answer[i] = jnp.sum(jnp.where(batch.sequences[r] == k + 1, logp[r], 0))
            s = jnp.stack([per_answer[i] for i in range(8)])
            return whole_loss(name, s, jnp.asarray(reference), traj.total(), table, 0.3, z0)

        assert float(whole(params)) == pytest.approx(loss, rel=1e-6)
        want = training.partition(jax.grad(whole)(params), (".*",), ())[0]
        for path, grad in want.items():
            np.testing.assert_allclose(np.asarray(got[path]), np.asarray(grad), rtol=1e-6, atol=1e-9, err_msg=path)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, summary) of eight steps: two passes over the data."""
    folder = tmp_path_factory.mktemp("trained")
    loads, start = [], sums.Reference.start
    sums.Reference.start = lambda self, *a: (loads.append(1), start(self, *a))
    try:
        summary = jaxrl.train(config(folder, train__steps=8, optimizer__lr=5e-3))
    finally:
        sums.Reference.start = start
    return folder, summary, len(loads)


def test_a_run_begins_at_its_reference_and_learns_the_order(trained):
    folder, summary, _ = trained
    steps = [x for x in lines(folder) if "loss" in x]
    first, last = steps[0], steps[-1]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-12)
    assert first["reward/chosen"] == first["reward/rejected"] == first["reward/margin"] == 0 and first["reward/accuracy"] == 0.5
    assert last["loss"] < first["loss"] and last["reward/margin"] > 0 and last["flops/score"] > 0
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["preference_accuracy"] == 0.5 and before["sets"]["held"]["loss"] == pytest.approx(np.log(2))
    assert after["preference_accuracy"] > 0.9 and after["sets"]["held"]["reward/margin"] > 0


def test_the_reference_is_scored_once(trained):
    """A record per answer, held-out ones too; the model was loaded once, and the second pass needed none."""
    folder, _, loads = trained
    (file,) = (folder / "run" / "reference").iterdir()
    assert file.stat().st_size == 2 * (16 + 6) * sums.RECORD.itemsize and loads == 1  # eval.max_rows=6


def test_a_sum_that_is_not_what_was_written_is_computed_anew(trained, tmp_path, caplog):
    """A bit of each part of a record: key, sum, digest."""
    folder, _, _ = trained
    (file,) = (folder / "run" / "reference").iterdir()
    whole, copy = file.read_bytes(), tmp_path / "sums.bin"
    opened = SimpleNamespace(path=copy, s=SimpleNamespace(peers=SimpleNamespace(first=True, count=1)))
    for at in (0, sums.KEY, sums.KEY + 8):
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        caplog.clear()
        found = sums.ReferenceSums._read(opened)
        assert len(found) == len(whole) // sums.RECORD.itemsize - 1 and "1 of 44 sums are damaged" in caplog.text


@pytest.mark.slow
def test_a_file_cut_off_and_another_reference(trained, tmp_path):
    """The torn record is dropped, and scored anew; a reference of other weights has a file of its own."""
    folder, _, _ = trained
    (file,) = (folder / "run" / "reference").iterdir()
    whole = file.read_bytes()
    opened = SimpleNamespace(path=file, s=SimpleNamespace(peers=SimpleNamespace(first=True, count=1)))
    known = sums.ReferenceSums._read(opened)
    file.write_bytes(whole[:-5])
    assert known.items() > sums.ReferenceSums._read(opened).items() and file.stat().st_size == len(whole) - sums.RECORD.itemsize
    file.write_bytes(whole)
    other = config(tmp_path, train__steps=1, reference__path=str(folder / "run" / "export"))
    summary = jaxrl.train(other)
    (file2,) = (tmp_path / "run" / "reference").iterdir()
    assert file2.name != file.name and summary["eval_before"]["preference_accuracy"] < 0.1  # its order is the other's, turned round


@pytest.mark.slow
def test_adapters_learn_beside_their_own_base(tmp_path, monkeypatch):
    """The run begins at its reference exactly, the frozen base without a second copy; resumed half-way its weights are bitwise the same."""
    monkeypatch.setattr(sums.Reference, "start", lambda *a: 1 / 0)
    changes = dict(lora__rank=4, reference__dtype="bf16", optimizer__lr=3e-2)
    whole = jaxrl.train(config(tmp_path, **changes))
    first, *_, last = (x for x in lines(tmp_path) if "loss" in x)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-12) and first["reward/margin"] == 0
    assert last["reward/margin"] > 0 and whole["eval_after"]["preference_accuracy"] > 0.6
    (tmp_path / "b").mkdir()
    for steps in (2, 4):
        jaxrl.train(config(tmp_path / "b", **changes, train__steps=steps))
    ours, theirs = (fingerprint(folder) for folder in (tmp_path / "b" / "run", tmp_path / "run"))
    weights = [name for name in theirs if name.startswith("export/")]
    assert weights and all(ours[name] == theirs[name] for name in weights)


def test_keys_are_of_prompt_and_answer():
    rows = (([1, 2], [3]), ([1], [2, 3]), ([1, 2], [4]), ([1, 2], [3]))
    batch = [preference.Completion(np.array(p, np.int32), np.array(a, np.int32), None) for p, a in rows]
    keys = sums.completion_keys(preference.demonstrations(batch, [0, 1, 2, 3], False))
    assert keys[0] == keys[3] and len(set(keys)) == 3


@pytest.mark.parametrize("loss, rows", [("simpo", ROWS), ("orpo", ROWS), ("nll", ROWS)])
@pytest.mark.slow
def test_losses_that_need_no_reference_load_none(loss, rows, tmp_path, monkeypatch):
    def none(*a):
        raise AssertionError("a reference")

    monkeypatch.setattr(preference, "ReferenceSums", none)
    jaxrl.train(config(tmp_path, preference__loss=(loss,), train__steps=1, eval__sets=()))
    assert not (tmp_path / "run" / "reference").exists() and lines(tmp_path)[0]["loss"] > 0


@pytest.mark.full
def test_kto_learns_from_labels(tmp_path):
    """z0 is of answers behind the prompts of other rows, over the whole step; 0 where the policy is the reference."""
    rows = [{"prompt": r["prompt"], "completion": r[side], "label": side == "chosen"} for r in ROWS for side in ("chosen", "rejected")]
    c = config(tmp_path, preference__loss=("kto",), data__prompts_per_step=8, train__steps=6, optimizer__lr=5e-3)
    write_jsonl(tmp_path / "train.jsonl", rows[:32])
    write_jsonl(tmp_path / "held.jsonl", rows[32:])
    jaxrl.train(c)
    first, last = (x for x in lines(tmp_path) if x.get("step") in (1, 6) and "loss" in x)
    assert first["preference/z0"] == 0 and first["loss"] == pytest.approx(0.5)
    assert last["reward/chosen"] > last["reward/rejected"] and last["reward/margin"] > 0 and "reward/accuracy" not in last


def test_prompts_are_rolled_over_the_rows_of_a_step():
    shapes = training.row_shapes((16,), 16, 64, 1)
    job = SimpleNamespace(config=load_config("grpo_sft", {"data.label_column": "label"}), row_shapes=shapes, images=None)
    job.config = SimpleNamespace(data=job.config.data, train=job.config.train, longest=6)
    ids = lambda *x: np.array(x, np.int32)  # noqa: E731
    pair = SimpleNamespace(prompt_ids=ids(1, 2), target_ids=ids(3, 4), rejected_ids=ids(5), columns={}, images=None)
    single = SimpleNamespace(prompt_ids=ids(6, 7, 8), target_ids=ids(9), rejected_ids=None, columns={"label": False}, images=None)
    step = preference.PreferenceStep(job, [pair, single])
    assert step.table.chosen.tolist() == [0] and step.table.rejected.tolist() == [1] and step.table.good.tolist() == [True, False, False]
    traj, _ = step.mismatched_prompts()
    rows = [traj.tokens[a:b].tolist() for a, b in zip(traj.offsets[:-1], traj.offsets[1:], strict=True)]
    assert rows == [[6, 7, 8, 3, 4], [6, 7, 8, 5], [1, 2, 9]]


@pytest.mark.slow
def test_held_out_prompts_are_answered_and_pairs_compared(tmp_path):
    """And the checkpoint is evaluated alone."""
    c = config(tmp_path, train__steps=1)
    c.eval.sets = (*c.eval.sets, "test=jaxrl://arith/test.jsonl")
    after = jaxrl.train(c)["eval_after"]
    assert set(after["sets"]) == {"held", "test"} and "accuracy" in after and "accuracy" not in after["sets"]["held"]
    c.run.mode = "eval"
    assert jaxrl.train(c)["eval"] == {name: value for name, value in after.items() if name != "step"}


@pytest.mark.full
def test_a_held_out_set_is_of_one_kind(tmp_path):
    c = config(tmp_path)
    write_jsonl(tmp_path / "held.jsonl", [ROWS[0], {"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(ConfigError, match="eval set held: 1 of its 2 rows hold pairs or labels"):
        jaxrl.train(c)


@pytest.mark.full
@pytest.mark.parametrize("changes, why", [
    ({"preference.loss": ("sigmoid",)}, "preference.loss='sigmoid': choose one of dpo, .*; sigmoid is dpo"),
    ({"preference.loss": ("dop",)}, "choose one of dpo, robust"),
    ({"preference.loss": ()}, "preference.loss is empty"), ({"preference.loss": ("dpo", "dpo")}, "a loss is named twice"),
    ({"preference.loss_weights": (1.0, 2.0)}, "2 weights for 1 losses"), ({"preference.beta": 0.0}, "preference.beta=0.0: must be above 0"),
    ({"preference.loss": ("exo",)}, "set preference.label_smoothing"),
    ({"preference.loss": ("robust",), "preference.label_smoothing": 0.5}, "below 0.5"),
    ({"preference.loss": ("hinge",), "preference.label_smoothing": 0.1}, "has no effect with preference.loss=hinge"),
    ({"preference.simpo_gamma": 1.0}, "preference.simpo_gamma=1.0 has no effect"), ({"preference.ipo_mean": False}, "ipo_mean=False has no effect"),
    ({"preference.loss": ("dpo", "nll"), "preference.rpo_alpha": 0.1}, "a weight of nll"),
    ({"preference.loss": ("orpo",), "reference.path": "x"}, "reference.path='x' has no effect"), ({"reference.reset_steps": 3}, "computed once"),
    ({"preference.loss": ("orpo",), "mesh.roles": {"reference": {"rest": "host"}}}, "mesh.roles.reference: there is none"),
    ({"preference.loss": ("kto",), "data.prompts_per_step": 1}, "kto compares with answers to other prompts"),
    ({"train.loss_on_prompt": True}, "train.loss_on_prompt=True has no effect"), ({"data.train_turns": "all"}, "data.train_turns=all"),
    ({"lora.path": "x"}, "lora.path='x' with run.recipe=preference: the reference would be the base"),
    ({"lora.rank": 2, "lora.modules_to_save": ("lm_head",)}, "name one with reference.path"),
    ({"run.recipe": "sft", "preference.beta": 0.2}, "preference.beta=0.2 has no effect with run.recipe=sft; set run.recipe=preference"),
])
def test_what_cannot_work_is_refused(changes, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        c = config(tmp_path)
        for name, value in changes.items():
            jaxrl.config.load.put(c, name, value)
        common.check(c)


JOB = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {recipes!r}]
def get_config(arg=None):
    import test_preference
    return test_preference.config(Path({folder!r}), preference__loss=("dpo", "kto"), log__every_steps=1)
"""


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_an_unbroken_run(tmp_path):
    tests = Path(__file__).resolve().parents[1]
    (tmp_path / "job.py").write_text(JOB.format(tests=str(tests), recipes=str(tests / "recipes"), folder=str(tmp_path)))
    for name, *faults in (("whole",), ("killed", "faults.plan='checkpoint.kill9@step=4,phase=tensors',")):  # step 2's has ended by then
        status, text = run(tmp_path / name, *faults, config=tmp_path / "job.py")
        assert status == (-signal.SIGKILL if faults else 0), text
    status, text = run(tmp_path / "killed", config=tmp_path / "job.py")
    assert status == 0 and "resumed   step 2" in text, text
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")
