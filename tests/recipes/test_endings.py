"""How runs end: what is kept, what is said, and with which exit status. Small supervised runs, real faults where they can be had."""

import errno
import json
import logging
import os
import resource
import signal
from pathlib import Path

import pytest
from helpers import tiny_job

import jaxrl
from jaxrl.data import Stream
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io import hf
from jaxrl.resolve.spec import resolve
from jaxrl.rewards import RewardItem, RewardPool
from jaxrl.rewards.pool import RewardFailure
from jaxrl.rl import evaluation
from jaxrl.rollout import EngineLost
from jaxrl.run.session import Session
from jaxrl.telemetry.best import Best
from jaxrl.telemetry.health import Divergence


def config(tmp_path, arg="sft", **changes):
    c = tiny_job.get_config(arg)
    c.run.dir, c.log.console, c.log.tensorboard = str(tmp_path / "run"), "off", False
    c.train.steps, c.checkpoint.export_at_end, c.eval.after, c.eval.before = 4, False, False, False
    for name, value in changes.items():
        group, option = name.split("__")
        c[group][option] = value
    return c


def checkpoints(tmp_path):
    return sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*"))


def told(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


# ---- saved means: on disk


def test_a_save_that_failed_in_the_background_is_made_again_at_the_end(tmp_path):
    c = config(tmp_path, faults__plan=("checkpoint.enospc@step=4,phase=tensors",))
    assert jaxrl.train(c)["finished"] and checkpoints(tmp_path) == ["00000002", "00000004"]


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_last_save_that_fails_is_no_finished_run(tmp_path, stopped):
    """The disk refuses the last step's save twice: in its turn (where it had one), and at the end."""
    plan = ("checkpoint.enospc@step=4,phase=tensors", "checkpoint.enospc@step=4,phase=commit") if not stopped else (
        "update.term@step=3", "checkpoint.enospc@step=3,phase=before")
    c = config(tmp_path, faults__plan=plan, checkpoint__export_at_end=True)
    with pytest.raises(RunStopped, match="checkpoint of step [34] not written .*; latest checkpoint: step 2"):
        jaxrl.train(c)
    assert checkpoints(tmp_path) == ["00000002"]
    summary = told(tmp_path)
    assert summary["finished"] is False and "not written" in summary["error"]
    assert (tmp_path / "run" / "export").exists() is not stopped  # the model is smaller, and may lie elsewhere
    c.faults.plan = ()
    assert jaxrl.train(c)["finished"] and told(tmp_path)["error"] is None  # the same command goes on
    assert checkpoints(tmp_path) == ["00000002", "00000004"]


@pytest.mark.full
def test_a_disk_that_refuses_large_files_ends_the_run_with_status_1(tmp_path, capsys, monkeypatch):
    """Real, and for root too: the kernel writes no file beyond RLIMIT_FSIZE."""
    from jaxrl import main as command

    flags = ["--config=tests/helpers/tiny_job.py:sft", f"--config.run.dir={tmp_path / 'run'}", "--config.train.steps=2",
             "--config.log.console=plain", "--config.checkpoint.export_at_end=False"]
    monkeypatch.chdir(Path(__file__).parents[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        assert command.main(flags) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr()
    assert "stopped: checkpoint of step 2 not written (File too large); no checkpoint yet" in said.err
    assert "all state is saved" not in said.out + said.err and told(tmp_path)["finished"] is False


def test_what_is_due_between_two_lines_is_done_and_a_stop_logs_the_steps_since_the_last_line(tmp_path):
    """log.every_steps is longer than the run: a save every third step, an export every second, and a stop in the fifth."""
    c = config(tmp_path, train__steps=9, log__every_steps=50, checkpoint__every_steps=3, checkpoint__keep=-1,
               checkpoint__export_every_steps=2, faults__plan=("update.term@step=5",))
    jaxrl.train(c)
    assert checkpoints(tmp_path) == ["00000003", "00000005"]
    assert {p.name for p in (tmp_path / "run").glob("export_*")} == {"export_00000002", "export_00000004"}
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [2, 3, 4, 5]
    assert told(tmp_path)["steps"] == 5 and not told(tmp_path)["finished"]


@pytest.mark.full
def test_a_refused_save_is_tried_again_before_its_next_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.run.session.SAVE_AGAIN_SECONDS", 0.0)
    c = config(tmp_path, faults__plan=("checkpoint.enospc@step=2,phase=before",), log__every_steps=1, checkpoint__at_end=False,
               train__steps=3)
    jaxrl.train(c)
    assert checkpoints(tmp_path) == ["00000003"]


# ---- whatever ends a run, a whole state is kept


def fails(monkeypatch, room, name, error):
    def function(*args, **kwargs):
        raise error

    monkeypatch.setattr(room, name, function)


@pytest.mark.parametrize("how", ["timeout", *(pytest.param(x, marks=pytest.mark.slow) for x in ("engine", "reward", "disk", "export"))])
@pytest.mark.slow
def test_the_state_is_saved_whatever_ends_the_run(tmp_path, monkeypatch, how, caplog):
    """The checkpoint of step 2 is written by the error alone; then the run goes on, and makes up the evaluation that it missed."""
    c = config(tmp_path, checkpoint__every_steps=0)
    expected: type[BaseException] = OSError
    if how == "export":
        c.checkpoint.export_every_steps = 2
    else:
        c.eval.sets, c.eval.max_rows, c.eval.every_steps = ("test=jaxrl://arith/test.jsonl",), 2, 2
    with monkeypatch.context() as m:
        if how in ("engine", "timeout"):
            expected = EngineLost if how == "engine" else TimeoutError
            fails(m, evaluation, "generate", expected("planned"))
        elif how == "export":
            fails(m, hf, "export", OSError(errno.ENOSPC, "no space left on device"))
        elif how == "reward":
            expected = RewardFailure
            bad = tmp_path / "bad.py"
            bad.write_text("def broken(prompt, completion, **columns):\n    raise KeyError(completion)\n")
            c.reward.functions, c.reward.trial = (f"{bad}:broken",), False
        elif how == "disk":
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "eval").write_text("in the way")
        with pytest.raises(expected):
            jaxrl.train(c)
    assert checkpoints(tmp_path) == ["00000002"]
    summary = told(tmp_path)
    assert summary["finished"] is False and summary["error"].split(":")[0] in (expected.__name__, "FileExistsError")
    assert "step 2 is saved" in caplog.text
    if how == "disk":
        (tmp_path / "run" / "eval").unlink()
    c.reward.functions = (f"{tiny_job.__file__}:digits",)
    assert jaxrl.train(c)["finished"]
    found = metrics(tmp_path)
    assert [line["step"] for line in found] == [2, 4]
    assert how == "export" or all("eval/accuracy" in line for line in found)


@pytest.mark.full
def test_an_error_inside_an_update_leaves_the_last_checkpoint(tmp_path):
    """A state between two steps is none: it must not be saved under either's number."""
    c = config(tmp_path, faults__plan=("update.raise@step=4",))
    with pytest.raises(RuntimeError, match="planned fault"):
        jaxrl.train(c)
    assert checkpoints(tmp_path) == ["00000002"] and "planned fault" in told(tmp_path)["error"]


# ---- closing


class Thing:
    def __init__(self, closed, error=None):
        self.closed, self.error = closed, error

    def close(self):
        self.closed.append(self)
        if self.error:
            raise self.error


def test_a_closer_that_fails_does_not_skip_the_rest(tmp_path, caplog):
    """The first error is raised and the others are logged; none hides the error of the run."""
    closed = []
    run = Session(resolve(config(tmp_path)))
    things = [run.close_at_end(Thing(closed)), run.close_at_end(Thing(closed, OSError("second"))), run.close_at_end(Thing(closed, OSError("first")))]
    with pytest.raises(OSError, match="first"):
        run.__exit__(None, None, None)
    assert closed == things[::-1] and "second" in caplog.text

    run.close_at_end(Thing(closed, OSError("third")))
    with caplog.at_level(logging.ERROR, "jaxrl"):
        run.__exit__(ValueError, ValueError("of the run"), None)  # raises nothing: the caller's error goes on
    assert "third" in caplog.text


# ---- exit status


def test_a_worker_that_cannot_start_again_is_no_mistake_in_the_config(tmp_path):
    """Status 2 would keep schedulers from trying again."""
    c = config(tmp_path)
    (tmp_path / "once.py").write_text(f"""
import os, pathlib
flag = pathlib.Path({str(tmp_path / 'flag')!r})
if flag.exists():
    raise MemoryError("no memory for it now")
def score(prompt, completion, **columns):
    flag.touch()
    os._exit(7)
""")
    c.reward.functions, c.reward.trial, c.reward.workers = (f"{tmp_path / 'once.py'}:score",), False, 1
    c.reward.max_failed_fraction = 1.0
    pool = RewardPool(c)
    try:
        pool.wait()
        with pytest.raises(RunStopped, match="no memory for it now"):
            pool.score([RewardItem("p", "c", {"answer": ""}, "stop", [1])] * 3)
    finally:
        pool.close()


@pytest.mark.full
def test_divergence_is_named_and_ends_a_run_that_asks_for_it(tmp_path, caplog):
    """Supervised training at a learning rate of 3: said with the rate and the gradient's norm, in the summary, too; asked to, the run ends
    saved and is not finished."""
    options = dict(train__steps=80, optimizer__lr=3.0, optimizer__warmup_steps=20, optimizer__schedule="constant", log__console="plain")
    out = jaxrl.train(config(tmp_path, **options, train__stop_on_divergence=True))
    said = [m for m in caplog.messages if "training diverges" in m]
    assert len(said) == 1 and "optimizer.lr (now 3)" in said[0] and "norm is" in said[0], said
    assert out["steps"] < 80 and not out["finished"] and out["ended_by"].startswith("train.stop_on_divergence: step")
    assert out["diverged"] in out["ended_by"] and checkpoints(tmp_path)[-1] == f"{out['steps']:08d}"


def test_what_counts_as_divergence():
    """A loss that falls, or wavers, is none; one that rises to three times its lowest is; so is an accuracy below half of its best."""
    c = resolve(tiny_job.get_config("sft"))
    found = lambda losses, samples=False, name="loss": [  # noqa: E731
        w for watch in [Divergence(c, samples)] for step, x in enumerate(losses) for w in watch.check(step, {name: x, "optim/grad_norm": 1.0})]
    assert not found([5 - 0.04 * k for k in range(100)]) and not found([1 + 0.5 * (k % 2) for k in range(100)])
    assert not found([0.001] * 30 + [0.002] * 30) and not found([88.0] * 40, samples=True)
    assert len(found([5.0] * 20 + [88.0] * 40)) == 1 and "the loss rose from 5 to" in found([5.0] * 20 + [88.0] * 40)[0]
    assert not found([0.5, 0.3, 0.4], name="eval/accuracy") and not found([0.1, 0.04], name="eval/accuracy")
    assert "eval/accuracy fell from 85.0% to 5.0%" in found([0.2, 0.85, 0.05], True, "eval/accuracy")[0]


# ---- a stop while rows are read


@pytest.mark.full
def test_a_stop_while_rows_are_read_ends_with_the_steps_before_it_saved(tmp_path, monkeypatch):
    take = Stream.take

    def signalled(self, cursor, count=0):
        if cursor:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, cursor, count)

    monkeypatch.setattr(Stream, "take", signalled)
    monkeypatch.setattr("jaxrl.data.stream.ROWS_PER_STOP_CHECK", 1)
    out = jaxrl.train(config(tmp_path, checkpoint__every_steps=0))
    assert out["steps"] == 1 and not out["finished"] and out["error"] is None and checkpoints(tmp_path) == ["00000001"]


# ---- the best evaluation


@pytest.mark.full
def test_the_best_is_kept_and_exported_and_patience_ends_a_run(tmp_path, caplog):
    """A metric that never changes: the first evaluation is the best, two more end the run. Its checkpoint outlives checkpoint.keep=1, its
    weights are the export's. The same command does no further step, and with patience off it goes on."""
    options = dict(arg="rl", eval__every_steps=1, eval__metric="eval/test/reward/nan_fraction", checkpoint__keep_best=True, checkpoint__keep=1,
                   checkpoint__export_at_end=True, checkpoint__export_every_steps=1, log__console="plain", log__report=False)
    out = jaxrl.train(config(tmp_path, **options, eval__patience=2))
    assert out["best"] == {"metric": "eval/test/reward/nan_fraction", "step": 1, "value": 0.0} and not out["finished"]
    assert out["steps"] == 3 and out["ended_by"].startswith("eval.patience=2: 2 evaluations in a row without a better"), out
    assert checkpoints(tmp_path) == ["00000001", "00000003"]
    weights = {name: (tmp_path / "run" / name / "model.safetensors").read_bytes() for name in ("export", "export_00000001", "export_00000003")}
    assert weights["export"] == weights["export_00000001"] != weights["export_00000003"]

    again = jaxrl.train(config(tmp_path, **options, eval__patience=2))
    assert again["steps"] == 3 and again["ended_by"] == out["ended_by"] and len(metrics(tmp_path)) == 3
    assert weights["export"] == (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    on = jaxrl.train(config(tmp_path, **options))
    assert on["steps"] == 4 and on["finished"] and on["best"]["step"] == 1 and checkpoints(tmp_path) == ["00000001", "00000004"]


@pytest.mark.full
def test_the_evaluation_behind_the_last_step_counts_for_the_best(tmp_path):
    """Of a run that a callback ends: the reward is a clock, so the last is the best and is exported, not the one before."""
    options = dict(arg="rl", eval__every_steps=2, eval__metric="eval/test/reward_mean", eval__after=True, checkpoint__keep_best=True,
                   checkpoint__export_at_end=True, checkpoint__export_every_steps=1, checkpoint__at_end=False, log__report=False)

    def rising(prompt, completion, **columns):
        import time

        return time.monotonic()

    c = config(tmp_path, **options)
    c.reward.functions = ()
    out = jaxrl.train(c, rewards=[rising], callbacks=[lambda step: step.stop("three") if step.number == 3 else None])
    assert out["steps"] == 3 and out["ended_by"] == "three" and out["best"]["step"] == 3, out
    assert checkpoints(tmp_path)[-1] == "00000003"
    weights = [(tmp_path / "run" / name / "model.safetensors").read_bytes() for name in ("export", "export_00000003", "export_00000002")]
    assert weights[0] == weights[1] != weights[2]


def test_what_counts_as_the_best():
    """Equal is not better, a number that is none never is, of losses the lower; what a checkpoint holds goes on, of another metric it does not."""
    c = tiny_job.get_config("rl")
    c.eval.patience = 3

    def steps(values, name="eval/accuracy", best=None):
        best = best or Best(c)
        return [best.add(step, {name: value}) for step, value in enumerate(values, 1)], best

    found, best = steps([float("nan"), 0.5, 0.5, 0.4, 0.6, 0.1, float("nan")])
    assert found == [False, True, False, False, True, False, False] and not best.over
    again = Best(c, json.loads(json.dumps(best.state())))
    assert steps([0.6], best=again) == ([False], again) and "the best, 0.6, is of step 5" in again.over
    assert steps([0.1], name="eval/preference_accuracy")[0] == [True]
    c.eval.metric = "eval/test/loss"
    assert steps([2.0, 1.0, 1.5], name="eval/test/loss")[0] == [True, True, False]
    assert Best(c, best.state()).state() is None
    assert Best(c, steps([float("nan")] * 2, name="eval/test/loss")[1].state()).since == 2  # none was a number, and they count
    with pytest.raises(ConfigError, match="eval.metric='eval/test/loss': evaluations give no such metric; choose one of eval/accuracy"):
        Best(c).add(1, {"eval/accuracy": 1.0, "loss": 2.0})


@pytest.mark.parametrize("changes, said", [
    (dict(eval__patience=2), "eval.patience=2 has no effect with data.eval_fraction=0 and without eval.sets; set eval.sets or data.eval_fraction"),
    (dict(checkpoint__keep_best=True, eval__sets=("a=b",), eval__every_steps=0), "checkpoint.keep_best=True has no effect with eval.every_steps=0"),
    (dict(eval__metric="eval/accuracy"), "eval.metric='eval/accuracy' has no effect with eval.patience=0 and checkpoint.keep_best=False"),
])
def test_options_of_the_best_without_evaluations(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        jaxrl.train(config(tmp_path, **changes))
