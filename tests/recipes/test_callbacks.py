"""Callbacks of jaxrl.train: functions and objects with hooks, in every job; what they see, end, and break."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from helpers import distill_job, tiny_job
from helpers.data_cases import write_jsonl

import jaxrl
from jaxrl.errors import ConfigError
from jaxrl.run.callbacks import Callbacks, Step, check_callbacks
from jaxrl.run.python_api import PythonInputs

ROWS = [{"prompt": f"{i % 12 + 1}+2=", "answer": str(i % 12 + 3)} for i in range(12)]
DEMONSTRATIONS = [row | {"completion": f"\\boxed{{{row['answer']}}}"} for row in ROWS]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}-1"} for row in ROWS]

pytestmark = pytest.mark.usefixtures("the_mesh_as_it_was")


def job(kind, folder):
    """Three steps of a kind of job, evaluated before and after the second, saved and exported at the second."""
    if kind == "distill":
        c = distill_job.job(distill_job.make_models(folder), folder / "run")
    else:
        c = tiny_job.get_config("sft" if kind == "sft" else None)
        c.run.recipe = kind
    rows = {"rl": ROWS, "preference": PAIRS, "reward_model": PAIRS}.get(kind, DEMONSTRATIONS)
    c.data.path = (str(write_jsonl(folder / "rows.jsonl", rows)),)
    c.eval.sets = (f"held={write_jsonl(folder / 'held.jsonl', rows[:4])}",)
    c.run.dir, c.log.console, c.log.every_steps, c.log.report = str(folder / "run"), "off", 1, False
    c.train.steps, c.eval.every_steps = 3, 2
    c.eval.after, c.checkpoint.every_steps, c.checkpoint.export_every_steps, c.checkpoint.at_end = False, 2, 2, True
    c.checkpoint.export_at_end = False
    return c


class Watch:
    """Keeps what each hook is called with."""

    def __init__(self):
        self.calls, self.weights = [], {}

    def on_step(self, step, metrics):
        assert step.metrics == metrics and "time/step" in metrics
        self.calls.append(("step", step.number))
        name, array = next((n, x) for n, x in step.parameters().items() if "kernel" in n)
        assert step.parameters()[name] is array  # no copy
        with pytest.raises(TypeError):
            step.parameters()[name] = array
        self.weights[step.number] = step.parameters(copy=True)[name]
        self.weights[step.number][...] += 0.0  # a copy may be changed
        with pytest.raises(AttributeError, match="locked|immutable|[Ff]rozen"):
            step.config.optimizer.lr = 1.0

    def on_evaluation(self, step, metrics, completions):
        assert metrics and all(name.startswith("eval/") for name in metrics)
        self.calls.append(("evaluation", step.number, {name: len(rows) for name, rows in completions.items()}))

    def on_save(self, step, path):
        assert Path(path).is_dir()
        self.calls.append(("save", Path(path).name))

    def on_end(self, step, summary):
        assert summary == json.loads(Path(step.run_dir, "summary.json").read_text()) | summary
        self.calls.append(("end", step.number, summary["finished"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft", "preference", "reward_model", "distill"])
def test_every_job_calls_every_hook_and_resumes_with_none_twice(kind, tmp_path):
    """In order, once each; a checkpoint is told once it is whole, the last one before the end. A call that finds nothing left to do
    calls on_end alone."""
    watch, lines = Watch(), []
    jaxrl.train(job(kind, tmp_path), callbacks=[watch, lambda step: lines.append(step.number)])
    rows = {"held": 4} if kind in ("rl", "sft", "distill") else {}
    evaluations = [("evaluation", number, rows) for number in (0, 2)]
    rest = [call for call in watch.calls if call[0] != "evaluation"]
    assert [call for call in watch.calls if call[0] == "evaluation"] == evaluations and lines == [0, 1, 2, 3]
    saves = [name for call, name, *_ in rest if call == "save"]
    assert sorted(saves) == ["00000002", "00000003", "export_00000002"] and saves[-1] == "00000003"
    assert [call for call in rest if call[0] != "save"] == [("step", 1), ("step", 2), ("step", 3), ("end", 3, True)]
    assert rest[-2:] == [("save", "00000003"), ("end", 3, True)]
    assert len({x.tobytes() for x in watch.weights.values()}) == 3  # every step moved them
    again = Watch()
    jaxrl.train(job(kind, tmp_path), callbacks=again)
    assert again.calls == [("end", 3, True)]


def test_the_evaluation_after_a_callbacks_stop_is_a_line_like_any_other(tmp_path):
    """Functions see it, on_end has it as the last line, and a second stop there does not replace the reason."""
    c, seen, at_end = job("reward_model", tmp_path), [], []
    c.eval.before, c.eval.after, c.checkpoint.every_steps, c.checkpoint.at_end = False, True, 0, False

    def watch(step):
        seen.append((step.number, "loss" in step.metrics, "eval/accuracy" in step.metrics))
        step.stop(f"line {len(seen)}")

    summary = jaxrl.train(c, callbacks=[watch, SimpleNamespace(on_end=lambda step, summary: at_end.append(step.metrics))])
    assert seen == [(1, True, False), (1, False, True)] and summary["ended_by"] == "line 1"
    assert at_end[0]["eval/accuracy"] == summary["eval_after"]["accuracy"]


@pytest.mark.slow
def test_a_failing_hook_ends_the_run_with_the_step_saved(tmp_path):
    class Careless:
        def on_step(self, step, metrics):
            return metrics["loss/of_mine"]

    failed = r"'Careless.on_step' failed after step 1: KeyError: 'loss/of_mine' \(line \d+ of .*resume from the latest checkpoint"
    with pytest.raises(jaxrl.RunStopped, match=failed):
        jaxrl.train(job("sft", tmp_path), callbacks=Careless())
    assert (tmp_path / "run" / "checkpoints" / "00000001").is_dir()


def session(*callbacks, first=True, count=1):
    """What Callbacks needs of a session, and the names of its meetings."""
    met = []
    s = SimpleNamespace(
        step=2, total_steps=9, run_dir="runs/x", ended_by="", spec=SimpleNamespace(options={}), met=met,
        peers=SimpleNamespace(first=first, count=count), inputs=PythonInputs(callbacks=check_callbacks(callbacks)),
        checkpointer=SimpleNamespace(completed=[], steps=lambda: [6, 8, 10], path_of=lambda step: Path(f"{step:08d}")),
        together=lambda what, work: met.append(what) or work(),
        decide=lambda what, choose: met.append(what) or (choose() if first else "enough"))
    s.callbacks = Callbacks(s)
    return s


def test_the_first_reason_to_stop_is_kept_and_all_callbacks_are_called():
    calls = []

    def stops(step):
        step.stop("first")
        step.stop("second")

    s = session(stops, calls.append)
    s.callbacks.after_line({"loss": 1.0})
    assert s.ended_by == "first" and [step.metrics for step in calls] == [{"loss": 1.0}]


def test_only_the_first_process_calls_and_all_take_its_word():
    called = []
    for first in (True, False):
        s = session(lambda step: called.append(step.samples) or step.stop("enough"), first=first, count=2)
        s.callbacks.after_line({}, [{"prompt": "x"}])
        assert s.ended_by == "enough" and s.met == ["callbacks", "end?"]
    assert called == [[{"prompt": "x"}]]


def test_a_run_without_callbacks_meets_nobody_and_keeps_nothing():
    s = session()
    s.callbacks.due("on_evaluation", {}, ["rows"])
    s.callbacks.after_line({})
    assert s.met == [] and s.callbacks._due == []


def test_a_checkpoint_is_told_once_and_not_if_it_is_deleted_by_then():
    saved = []
    s = session(SimpleNamespace(on_save=lambda step, path: saved.append(path)))
    for s.checkpointer.completed in ([], [4, 6, 8], [10]):
        s.callbacks.call()
        s.callbacks.call()
    assert saved == ["00000006", "00000008", "00000010"]


def test_a_copy_of_parts_that_other_processes_hold_is_refused():
    s = session()
    away = SimpleNamespace(is_fully_addressable=False)
    s.policy = SimpleNamespace(state=SimpleNamespace(frozen={"embed": jax.numpy.zeros(2)}, trainable={"head": away}))
    assert Step(s, {}, []).parameters()["head"] is away
    with pytest.raises(ValueError, match="other processes hold parts of 'head'; read the weights from an export"):
        Step(s, {}, []).parameters(copy=True)


class Foreign:
    def on_step_end(self, step):
        pass

    on_train_begin = on_evaluate = on_step_end


@pytest.mark.parametrize("callbacks, complaint", [
    ([3], "callbacks holds an int: expected a function that takes one step, or an object with any of on_step, on_eval"),
    (object(), "callbacks holds an object: expected"),
    ([Watch], "callbacks holds the class Watch: pass an object, Watch()"),
    (Foreign(), "a Foreign with on_evaluate, on_step_end, on_train_begin: hooks are on_step, .*; did you mean on_evaluation?"),
])
def test_what_is_no_callback_is_refused(callbacks, complaint):
    with pytest.raises(ConfigError, match=complaint.replace("()", r"\(\)").replace("?", r"\?")):
        jaxrl.train(None, callbacks=callbacks)
