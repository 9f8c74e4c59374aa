"""Telemetry: what is written, shown and said, and that none of it can end a run."""

import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.report.runs import _series
from jaxrl.telemetry import METRICS, Telemetry, describe, write_atomic, write_config
from jaxrl.telemetry import telemetry as telemetry_module
from jaxrl.telemetry.names import CLOCKED
from jaxrl.telemetry.run_dir import dumps
from jaxrl.telemetry.sinks import JsonLines

CANARY = "canary-9f3ac1"


def config(**log):
    c = default_config()
    c.log.console = "off"
    for name, value in log.items():
        c.log[name] = value
    return c


def lines(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(run_dir) / name).read_text().splitlines()]


def metrics(step):
    return {"reward/mean": np.float32(0.1) * step, "optim/grad_norm": 1.0 / 3 + step, "rollout/tokens": 100.0}


# ---- metrics.jsonl

def test_one_line_per_step_with_the_clock_apart(tmp_path):
    t = Telemetry(tmp_path, config(tensorboard=False), 10)
    t.step(1, metrics(1), {"rollout": 3.0, "eval": 1.0, "other": 1.0, "step": 5.0})
    t.step(2, {"policy/kl": float("nan"), "optim/grad_norm": float("inf"), "reward/mean": 1e-30})
    t.close()
    first, second = lines(tmp_path)
    clock = first.pop("time")
    assert first == {"step": 1, "reward/mean": float(np.float32(0.1)), "optim/grad_norm": 1 / 3 + 1,
                     "rollout/tokens": 100.0}
    assert clock.pop("wall") > 1.6e9
    assert clock == {"rollout": 3.0, "eval": 1.0, "other": 1.0, "step": 5.0, "tokens_per_second": 25.0}
    second.pop("time")
    assert second == {"step": 2, "policy/kl": "nan", "optim/grad_norm": "inf", "reward/mean": 1e-30}
    assert np.isnan(float(second["policy/kl"]))


def test_a_second_call_for_the_newest_step_merges_and_an_older_one_is_refused(tmp_path):
    t = Telemetry(tmp_path, config(tensorboard=False), 10)
    t.step(1, metrics(1), {"update": 1.0, "step": 1.0})
    t.step(2, metrics(2), {"update": 1.0, "step": 1.0})
    t.step(2, {"eval/accuracy": 0.5}, {"eval": 2.0, "step": 2.0})
    with pytest.raises(ValueError, match="step 1 after those of step 2"):
        t.step(1, metrics(1))
    t.close()
    rows = lines(tmp_path)
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[1]["eval/accuracy"] == 0.5 and rows[1]["reward/mean"] == float(np.float32(0.1) * 2)
    assert {k: rows[1]["time"][k] for k in ("update", "eval", "step")} == {"update": 1.0, "eval": 2.0, "step": 3.0}
    t = Telemetry(tmp_path, config(tensorboard=False), 10, resume_step=2)
    t.step(2, {"eval/more": 1.0})  # also after a restart
    t.close()
    assert [(r["step"], r.get("eval/more")) for r in lines(tmp_path)] == [(1, None), (2, 1.0)]


TRAIN = """
import sys, time
import numpy as np
from jaxrl.config.load import default_config
from jaxrl.telemetry import Phases, Telemetry
c = default_config(); c.log.console = "off"; c.log.tensorboard = False
begin = int(sys.argv[2])
t = Telemetry(sys.argv[1], c, 60, resume_step=begin if begin else None)
phases = Phases()
for step in range(begin + 1, 61):
    with phases("update"):
        time.sleep(0.002)
    t.step(step, {"reward/mean": np.sin(step), "loss": np.float32(1) / step}, phases.take())
    print(step, flush=True)
t.close()
"""


@pytest.mark.full
def test_a_killed_and_resumed_file_equals_an_unbroken_one(tmp_path):
    """kill -9 while lines are written; resumed from an older checkpoint; equal to an unbroken run apart from "time"."""
    def whole(name, begin):
        subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / name), str(begin)], check=True, capture_output=True,
                       timeout=600)

    whole("unbroken", 0)
    begin = 0
    for kill_after in (7, 23):
        process = subprocess.Popen([sys.executable, "-c", TRAIN, str(tmp_path / "broken"), str(begin)],
                                   stdout=subprocess.PIPE, text=True)
        while int(process.stdout.readline()) < kill_after:
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        written = lines(tmp_path / "broken")[-1]["step"]
        assert written >= kill_after  # each line is on disk when step() returns
        begin = written // 5 * 5
    with open(tmp_path / "broken" / "metrics.jsonl", "a") as f:
        f.write('{"step": 99, "rew')  # what a full disk leaves
    whole("broken", begin)
    runs = [lines(tmp_path / name) for name in ("unbroken", "broken")]
    for rows in runs:
        for row in rows:
            assert set(row.pop("time")) == {"update", "other", "step", "wall"}
    assert runs[0] == runs[1] and len(runs[0]) == 60


def test_a_new_run_moves_an_earlier_run_away(tmp_path):
    c = config(tensorboard=False)
    t = Telemetry(tmp_path, c, 10)
    t.step(1, metrics(1))
    t.rollouts(1, [{"group": 0}])
    t.summary({"steps": 1})
    t.close()
    t = Telemetry(tmp_path, c, 10)  # killed before its first checkpoint: starts over, and no reward of that try is taken
    assert lines(tmp_path) == [] and t.read_rollouts(1) == []
    t.close()
    Telemetry(tmp_path, c, 10).close()
    assert not (tmp_path / "previous-2").exists()  # there was nothing to move
    c.run.resume = "never"
    for n in (2, 3):
        t = Telemetry(tmp_path, c, 10)
        t.step(1, metrics(n))
        t.close()
    assert len(lines(tmp_path / "previous-1")) == len(lines(tmp_path / "previous-3")) == 1
    assert lines(tmp_path / "previous-1", "rollouts/step_00000001.jsonl") == [{"group": 0}]
    assert json.loads((tmp_path / "previous-1" / "summary.json").read_text()) == {"steps": 1}
    assert not (tmp_path / "rollouts").exists()


def test_lines_that_a_full_disk_refuses_are_written_later_or_the_run_hears_of_it(tmp_path):
    code = """
import resource, sys
from jaxrl.config.load import default_config
from jaxrl.telemetry import Telemetry
c = default_config(); c.log.console = "off"; c.log.tensorboard = False
t = Telemetry(sys.argv[1], c, 10)
limit = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY))
t.step(1, {"reward/mean": 0.5})
size = (t.run_dir / "metrics.jsonl").stat().st_size
limit(size + 20)
t.step(2, {"reward/mean": 0.25})
t.step(3, {"reward/mean": 0.5})
assert (t.run_dir / "metrics.jsonl").stat().st_size == size
try:
    t.flush()
    print("counted")
except OSError as e:
    print(e.strerror)
limit(resource.RLIM_INFINITY)
t.step(4, {"reward/mean": 0.5})
t.flush()
limit((t.run_dir / "metrics.jsonl").stat().st_size)
t.step(5, {"reward/mean": 0.5})
t.close()
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert out.stdout == "No space left on device\n"  # no checkpoint counts while a line is not on disk
    assert [(r["step"], r["reward/mean"]) for r in lines(tmp_path)] == [(1, 0.5), (2, 0.25), (3, 0.5), (4, 0.5)]  # none is lost
    assert out.stderr.count("metrics.jsonl is not written: No space left on device") == 1
    assert out.returncode == 1 and "OSError" in out.stderr  # nor does the run end as if all were well


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    first = Telemetry(tmp_path, config(tensorboard=False), 10)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} .*another run.dir"):
        Telemetry(tmp_path, config(tensorboard=False), 10)
    reader = Telemetry(tmp_path, config(tensorboard=False), 10, read_only=True)
    reader.step(1, metrics(1))
    reader.summary({"eval": 1})
    reader.close()
    first.close()
    first.close()
    assert lines(tmp_path) == []  # the reader wrote no metrics
    Telemetry(tmp_path, config(tensorboard=False), 10).close()


# ---- other sinks

def events(run_dir):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def text_of(accumulator, tag):
    return accumulator.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.full
def test_tensorboard_has_scalars_samples_and_config_and_hides_what_a_resume_repeats(tmp_path):
    t = Telemetry(tmp_path, config(), 10)
    for step in (1, 2, 3):
        t.step(step, metrics(step))
    t.samples(2, {"test": [{"prompt": "2 + 2?", "completion": "It is 4.", "score": 1.0, "accurate": True}]})
    record = {"prompt": "3 + 3?", "completion": "Six.", "score": 0.5, "reward": {"parts": {"math": 1.0, "tone": 0.0}}, "advantage": -0.25}
    t.rollouts(1, [record])
    t.rollouts(2, [record])
    t.close()
    time.sleep(1.1)  # event files are named by the second
    t = Telemetry(tmp_path, config(), 10, resume_step=2)
    t.step(3, {"reward/mean": 7.0})
    t.close()
    accumulator = events(tmp_path)
    assert [(e.step, round(e.value, 4)) for e in accumulator.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2), (3, 7.0)]
    assert '"group_size": 8' in text_of(accumulator, "config")
    assert all(part in text_of(accumulator, "sample/train/0") for part in ("3 + 3?", "Six.", '"math": 1.0', '"advantage": -0.25'))
    assert [e.step for e in accumulator.Tensors("sample/train/0/text_summary")] == [1]  # then every tenth
    assert "2 + 2?" in text_of(accumulator, "sample/test/0") and "It is 4." in text_of(accumulator, "sample/test/0")


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    c = config(wandb=True, wandb_mode="offline", wandb_project="p", wandb_group="g", wandb_name="n", tensorboard=False)
    t = Telemetry(tmp_path, c, 10)
    run = t._sinks["wandb"]._run
    assert (run.project, run.group, run.name, run.offline) == ("p", "g", "n", True)
    identity = run.id
    t.step(1, metrics(1))
    t.close()
    assert wandb.run is None
    record, = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 300  # another process of W&B writes the file
    while b"reward/mean" not in record.read_bytes() and time.monotonic() < end:
        time.sleep(0.2)
    content = record.read_bytes()
    assert b"reward/mean" in content and b"max_new_tokens" in content
    t = Telemetry(tmp_path, c, 10, resume_step=1)
    assert t._sinks["wandb"]._run.id == identity  # a resumed run goes on in the same W&B run
    t.close()
    assert not t._failed


def test_without_wandb_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'jaxrl[wandb]'")):
        Telemetry(tmp_path, config(wandb=True), 10)


SINK = """
import json
class Mine:
    def __init__(self, run_dir, config):
        self.path, self.size = run_dir / "mine.txt", config["rollout"]["group_size"]
    def write(self, step, scalars):
        if step == 2 or step == 3: raise RuntimeError("service down")
        with open(self.path, "a") as f: f.write(f"{step} {self.size} {scalars['reward/mean']:.2f}\\n")
    def close(self):
        with open(self.path, "a") as f: f.write("closed\\n")
class Broken:
    def __init__(self, run_dir, config): pass
"""


def test_sinks_of_the_users_and_their_failures(tmp_path, monkeypatch, caplog):
    (tmp_path / "my_sinks.py").write_text(SINK)
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = tmp_path / "run"
    t = Telemetry(run_dir, config(sinks=("my_sinks:Mine",), tensorboard=False), 10)
    for step in (1, 2, 3, 4):
        t.step(step, metrics(step))
    t.flush()
    assert (run_dir / "mine.txt").read_text().splitlines() == ["1 8 0.10", "4 8 0.40"]
    t.close()
    assert (run_dir / "mine.txt").read_text().endswith("closed\n")
    assert [r["step"] for r in lines(run_dir)] == [1, 2, 3, 4]
    assert caplog.text.count("my_sinks:Mine failed (service down); training goes on") == 1 and "service down" in caplog.text
    Telemetry(tmp_path / "b", config(sinks=(f"{tmp_path}/my_sinks.py:Mine",), tensorboard=False), 10).close()
    assert (tmp_path / "b" / "mine.txt").read_text() == "closed\n"
    for spec, message in (("my_sinks", "is not 'package.module:Class'"), ("my_sinks:Other", "cannot be imported"),
                          ("nowhere:Mine", "cannot be imported"), ("my_sinks:Broken", "lacks write")):
        with pytest.raises(ConfigError, match=message) as kept:  # noqa: F841  (a notebook keeps the traceback alive)
            Telemetry(tmp_path / "c", config(sinks=(spec,), tensorboard=False), 10)
    Telemetry(tmp_path / "c", config(tensorboard=False), 10).close()  # the failed tries hold no lock


@pytest.mark.full
def test_a_sink_that_hangs_costs_one_wait_and_no_other_sink(tmp_path, monkeypatch, caplog):
    """Two hang, each in its own thread: TensorBoard has everything, rollouts are on disk, and only the first flush waits."""
    (tmp_path / "slow_sink.py").write_text(textwrap.dedent("""
        import threading
        class Slow:
            def __init__(self, run_dir, config): pass
            def write(self, step, scalars): threading.Event().wait()
            def close(self): pass
        class Slower(Slow): pass
    """))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(telemetry_module, "FLUSH_SECONDS", 1.0)
    t = Telemetry(tmp_path / "run", config(sinks=("slow_sink:Slow", "slow_sink:Slower")), 10)
    t.step(1, metrics(1))
    t.rollouts(1, [{"group": 1}])
    assert t.read_rollouts(1) == [{"group": 1}] and "has not finished" not in caplog.text  # a step never waits for a sink
    t.flush()
    monkeypatch.setattr(telemetry_module, "FLUSH_SECONDS", 1000.0)
    for step in (2, 3):
        t.step(step, metrics(step))
        t.rollouts(step, [{"group": step}])
        t.flush()
        assert t.read_rollouts(step) == [{"group": step}]
    t.close()
    assert [r["step"] for r in lines(tmp_path / "run")] == [1, 2, 3]
    assert [e.step for e in events(tmp_path / "run").Scalars("reward/mean")] == [1, 2, 3]
    assert caplog.text.count("has not finished") == 2 and caplog.text.count("slow_sink:Slower has not finished") == 1
    t.flush()  # a checkpoint that commits after close must not wait


def test_rollouts_that_the_disk_does_not_take_are_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(telemetry_module, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(telemetry_module, "write_atomic", lambda path, text: hangs.wait())
    t = Telemetry(tmp_path, config(tensorboard=False), 10)
    t.step(1, metrics(1))
    t.rollouts(1, [{"group": 1}])
    assert t.read_rollouts(2) == []  # those of an earlier process: nothing to wait for
    with pytest.raises(OSError, match="has not taken the rollouts") as caught:
        t.flush()
    assert caught.value.errno == errno.EIO  # what the checkpointer takes for trouble of the disk
    hangs.set()
    t.flush()
    t.close()


def test_rollouts_that_the_disk_refuses_are_kept_and_no_checkpoint_counts_before_they_are_there(tmp_path, caplog):
    """A file stands where their folder should be. They are written with later ones, or at the end; many of them end the run."""
    t = Telemetry(tmp_path, config(tensorboard=False), 10)
    (tmp_path / "rollouts").touch()
    for step in (1, 2):
        t.rollouts(step, [{"group": step}])
        with pytest.raises(FileExistsError, match="rollouts/step_00000001.jsonl"):
            t.flush()
    assert caplog.text.count("is not written: File exists") == 1
    (tmp_path / "rollouts").unlink()
    t.rollouts(3, [{"group": 3}])
    t.flush()
    assert [t.read_rollouts(step) for step in (1, 2, 3)] == [[{"group": step}] for step in (1, 2, 3)]
    shutil.rmtree(tmp_path / "rollouts")
    (tmp_path / "rollouts").touch()
    with pytest.raises(FileExistsError, match="step_00000004"):
        for step in range(4, 4 + telemetry_module.WAITING_STEPS + 1):
            t.rollouts(step, [{"group": step}])
            t._wait("rollouts")
    assert step == 4 + telemetry_module.WAITING_STEPS
    (tmp_path / "rollouts").unlink()
    t.close()
    assert len(os.listdir(tmp_path / "rollouts")) == telemetry_module.WAITING_STEPS


# ---- files

def test_rollouts_are_written_whole_and_read_back(tmp_path, caplog):
    t = Telemetry(tmp_path, config(tensorboard=False), 10)
    records = [{"group": 1, "completion": "naïve \n \u2028 \x85 \x1b \ud800 text", "score": None, "tokens": [1, 2],
                "reward": np.float64(0.5)}]
    t.rollouts(3, records)
    assert t.read_rollouts(3) == [records[0] | {"reward": 0.5}]
    assert t.read_rollouts(4) == []
    assert os.listdir(tmp_path / "rollouts") == ["step_00000003.jsonl"]
    assert len((tmp_path / "rollouts" / "step_00000003.jsonl").read_text("utf-8").splitlines()) == 1
    assert "naïve" in (tmp_path / "rollouts" / "step_00000003.jsonl").read_text("utf-8")
    for damage in (bytes(400), b'{"group": 1}\n[1]\n', b'{"group": 1, "comp', b"\xff\n"):  # after a loss of power
        (tmp_path / "rollouts" / "step_00000003.jsonl").write_bytes(damage)
        assert t.read_rollouts(3) == []
    assert "step_00000003.jsonl is damaged" in caplog.text
    t.close()
    off = Telemetry(tmp_path / "off", config(tensorboard=False, rollouts=False), 10)
    off.rollouts(3, records)
    off.close()
    assert not (tmp_path / "off" / "rollouts").exists()


def test_a_write_is_all_or_nothing(tmp_path):
    """A process that rewrites a file as fast as it can is killed; the file is one of the versions, whole."""
    path = tmp_path / "summary.json"
    code = f"""
import sys
from pathlib import Path
from jaxrl.telemetry import write_atomic
for i in range(10**9):
    write_atomic(Path({str(path)!r}), str(i % 10) * 200_000)
    if i == 3: print("ready", flush=True)
"""
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(np.random.default_rng().uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        text = path.read_text()
        assert len(text) == 200_000 and len(set(text)) == 1


def test_summary_merges_table_by_table(tmp_path):
    t = Telemetry(tmp_path, config(tensorboard=False), 10)
    t.summary({"steps": 1, "eval_before": {"accuracy": 0.25, "sets": {"test": 0.25}}})
    whole = t.summary({"steps": 2, "eval_before": {"sets": {"hard": 0.5}}})
    t.close()
    expected = {"steps": 2, "eval_before": {"accuracy": 0.25, "sets": {"test": 0.25, "hard": 0.5}}}
    assert whole == expected == json.loads((tmp_path / "summary.json").read_text())


def test_config_file_holds_the_resolved_config(tmp_path):
    c = config()
    c.optimizer.lr = 1e-5
    path = write_config(tmp_path / "run", c, {"sequences per step": 512})
    content = json.loads(path.read_text())
    assert path == tmp_path / "run" / "config.json"
    assert content["config"]["optimizer"]["lr"] == 1e-5 and content["config"]["rollout"]["group_size"] == 8
    assert content["derived"] == {"sequences per step": 512} and set(content["versions"]) == {"jaxrl", "jax"}


@pytest.mark.full
def test_no_secret_reaches_the_run_directory(tmp_path, monkeypatch):
    """A canary in every place where secrets are given: no file below the run directory holds it."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("WANDB_API_KEY", CANARY * 4)
    c = config(wandb=True, wandb_mode="offline")
    c.user.api_key = CANARY
    c.user.judge = {"password": CANARY, "access_token": CANARY, "nested": {"client_secret": CANARY}}
    write_config(tmp_path, c)
    t = Telemetry(tmp_path, c, 10)
    t.step(1, metrics(1))
    t.rollouts(1, [{"prompt": "p"}])
    t.summary({"steps": 1})
    t.close()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {"config.json", "metrics.jsonl", "summary.json"} <= {p.name for p in files}
    assert any("tfevents" in p.name for p in files) and any(p.suffix == ".wandb" for p in files)
    assert [str(p) for p in files if CANARY.encode() in p.read_bytes()] == []
    assert "<redacted>" in (tmp_path / "config.json").read_text()


def test_strict_json():
    mixed = {"a": np.arange(2), "b": (1, np.float32(0.5)), 3: float("-inf"), "d": Path("x"), "e": None}
    assert json.loads(dumps(mixed)) == {"a": [0, 1], "b": [1, 0.5], "3": "-inf", "d": "x", "e": None}


# ---- names, logging

def test_every_metric_has_a_meaning_and_only_known_names_do():
    assert len({m.name for m in METRICS}) == len(METRICS)
    for name in ("reward/mean", "reward/math", "gap/outside_clip", "time/rollout", "eval/test/pass@8", "loss"):
        assert describe(name)
    assert describe("reward/mean") != describe("reward/math")
    assert "missing" in describe("reward/timeout_fraction") and "missing" not in describe("reward/math")
    assert describe("rewards/mean") is None and describe("nonsense") is None


def test_what_a_clock_measures_lives_under_time_alone(tmp_path):
    """Every metric of seconds or a rate: two equal runs differ in it. What counts work is beside it."""
    clocks = re.compile(r"second|TFLOP/s|Unix time|share of the chip's peak")
    for m in METRICS:
        assert m.name.startswith(CLOCKED) or not clocks.search(m.name + m.meaning), m.name
    file = JsonLines(tmp_path / "metrics.jsonl", -1)
    file.write(1, {"time/step": 1.0, "perf/mfu": 0.5, "publish/seconds": 2.0, "publish/probe": 0.0, "flops/update": 7.0, "loss": 3.0})
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1, "publish/probe": 0.0, "flops/update": 7.0, "loss": 3.0, "time": {"step": 1.0, "perf/mfu": 0.5, "publish/seconds": 2.0}}
    assert _series(tmp_path / "metrics.jsonl")[0]["publish/seconds"][1] == [2.0]  # as the report reads it


def test_the_log_goes_to_stderr_at_its_level():
    code = """
import logging
from jaxrl.telemetry import setup_logging
log = logging.getLogger("jaxrl")
setup_logging("info"); setup_logging("warning")
log.info("quiet"); log.warning("careful"); log.error("broken")
setup_logging("debug"); log.debug("detail"); log.info("plain")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert out.stderr.splitlines() == ["jaxrl warning: careful", "jaxrl error: broken", "jaxrl debug: detail",
                                       "jaxrl plain"]
    assert out.stdout == ""


def test_an_application_that_set_up_logging_keeps_it(caplog):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        from jaxrl.telemetry import setup_logging
        setup_logging("info")
        logging.getLogger("jaxrl").info("once")
        assert stream.getvalue() == "once\n" and not logging.getLogger("jaxrl").handlers
    finally:
        logging.getLogger().removeHandler(handler)


def test_write_atomic_cleans_up_after_a_failure(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "x", "\ud800")
    assert os.listdir(tmp_path) == []


FULL = """
import sys
from tensorboardX import event_file_writer
from jaxrl.telemetry.sinks import TensorBoard

sink = TensorBoard(sys.argv[1], 0)
def full(*_):
    raise OSError(28, "No space left on device")
event_file_writer.EventsWriter.write_event = full
said = []
for step in range(1000):
    try:
        sink.write(step, {name: 1.0 for name in "abcdefgh"})
    except OSError as e:
        said.append(str(e))
        break
    sink._writer.file_writer.event_writer._worker.join(0.01)
try:
    sink.close()
except OSError as e:
    said.append(str(e))
assert len(said) == 2 and "has stopped" in said[0], said
sys.exit(7)
"""


@pytest.mark.full
def test_a_disk_that_fills_under_tensorboard_keeps_no_process(tmp_path):
    """The sink says so, and the process ends with its own status; without that it would wait for the queue for ever."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr


def test_a_process_that_a_library_keeps_ends_with_its_status(tmp_path):
    import subprocess
    import sys

    code = ("import atexit, time\nfrom jaxrl import main\nmain.main, main.EXIT_SECONDS = (lambda *_: 3), 0.5\n"
            "atexit.register(time.sleep, 1000)\nmain.command()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3 and "a library kept the process alive" in done.stderr
