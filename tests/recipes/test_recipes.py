"""The jobs as a user runs them: what a run leaves behind, how it stops, resumes, ends and is evaluated again."""

import json
import re
import shutil
import signal
import subprocess

import jax
import numpy as np
import pytest
from helpers import tiny_job
from helpers.run_tools import command, environment, fingerprint, run

import jaxrl
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.main import main
from jaxrl.recipes import rl
from jaxrl.resolve.spec import resolve
from jaxrl.rl.evaluation import pass_at_k, write_records
from jaxrl.run import setup
from jaxrl.run.session import Session
from jaxrl.telemetry import console


def config(tmp_path, arg=None, **changes):
    c = tiny_job.get_config(arg)
    c.run.dir, c.log.console, c.log.tensorboard = str(tmp_path / "run"), "off", False
    for name, value in changes.items():
        group, option = name.split("__")
        c[group][option] = value
    return c


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run, with everything written."""
    path = tmp_path_factory.mktemp("finished")
    summary = jaxrl.train(config(path, log__tensorboard=True))
    shutil.copytree(path / "run", path / "unbroken")
    return path / "run", summary


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_behind(finished):
    folder, summary = finished
    assert {p.name for p in folder.iterdir()} >= {
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "export",
        "rollouts",
        "tensorboard",
        "eval",
    }
    written = json.loads((folder / "summary.json").read_text())
    assert written["steps"] == 8 and written["finished"] and written["samples"] == 8 * 32
    assert 0 <= written["eval_before"]["accuracy"] <= 1 and "test" in written["eval_after"]["sets"]
    assert written["eval_after"]["step"] == 8 and set(written["seconds"]) >= {"rollout", "reward", "update", "publish"}
    assert summary["export"] == written["export"]
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == [
        "00000002",
        "00000004",
        "00000006",
        "00000008",
    ]
    assert len(list((folder / "rollouts").iterdir())) == 8
    assert json.loads((folder / "config.json").read_text())


def test_a_run_says_what_was_planned_beside_what_it_took(finished):
    _, summary = finished
    planned, measured = summary["planned"], summary["measured"]
    assert set(measured) - {"peak_bytes"} == {f"{name}_seconds" for name in ("rollout", "score", "update", "publish", "step")}
    assert set(planned) == {"peak_bytes"}  # of a CPU no seconds
    assert all(x > 0 for x in (*planned.values(), *measured.values()))
    assert planned["peak_bytes"] > 12 * 1000  # fp32 parameters and two moments of a model of more than a thousand


@pytest.mark.slow
def test_a_plain_step_calls_no_capability_that_it_does_not_use(tmp_path, monkeypatch):
    loops, one_step = [], rl.one_step
    monkeypatch.setattr(rl, "one_step", lambda loop: loops.append(loop) or one_step(loop))
    few = {"train__steps": 1, "eval__sets": (), "checkpoint__export_at_end": False, "checkpoint__at_end": False}
    jaxrl.train(config(tmp_path / "plain", **few))
    c = config(tmp_path / "all", **few, record__every=1, rollout__max_staleness=1, data__pass_rate_max=0.9)
    c.algorithm.kl.coef = 0.01
    jaxrl.train(c)
    plain, everything = loops
    assert plain.next_batch == plain.rollouts.next and plain.after_update == []
    assert len(everything.after_update) == 4 and len(everything.before_update) >= 1


def test_it_learns_and_says_so(finished):
    folder, _ = finished
    rewards = [line["reward/mean"] for line in lines(folder) if "reward/mean" in line]
    assert len(rewards) == 8 and np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    assert all(line["gap/max"] < 1e-4 for line in lines(folder) if "gap/max" in line)


def test_phases_add_up_to_the_step(finished):
    folder, _ = finished
    for line in lines(folder):
        counts = ("step", "wall", "tokens_per_second", "compiled_programs", "compilations", "compilations_background")
        phases = {k: v for k, v in line["time"].items() if k not in counts and not k.startswith("perf/")}
        assert sum(phases.values()) == pytest.approx(line["time"]["step"], abs=1e-3)


def test_no_program_is_compiled_after_the_first_steps(finished):
    folder, _ = finished
    compiled = [line["time"]["compiled_programs"] for line in lines(folder) if "compiled_programs" in line["time"]]
    assert compiled[-1] == compiled[1] and compiled[-1] <= 12
    every = {line["step"]: line["time"]["compilations"] for line in lines(folder) if "compilations" in line["time"]}
    assert every[1] > 5 and [every[step] for step in (4, 5, 6, 7)] == [0, 0, 0, 0]  # of any kind; 8 is where the run ends


def test_speed_follows_from_what_was_needed(finished):
    """The update's operations at the speed of its phase; three passes over all tokens, heads and embeddings of the tiny model."""
    for line in lines(finished[0]):
        if "flops/update" in line:
            clock, tokens = line["time"], line["rollout/tokens"]
            assert clock["perf/update_tflops"] == pytest.approx(line["flops/update"] / clock["update"] / 1e12)
            assert 3 * tokens * 2 * 32 * 192 < line["flops/update"] < 3 * (tokens + line["rollout/prompt_tokens"]) * 2 * 40_000
            assert line["flops/rollout"] < line["flops/update"] and "perf/mfu" not in clock


def test_rollouts_are_ordered_and_hold_one_group_per_prompt(finished):
    folder, _ = finished
    seen = []
    for path in sorted((folder / "rollouts").iterdir()):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        keys = [(r["group"], r["sample"]) for r in records]
        assert keys == sorted(keys) and len(keys) == 32
        for group in {g for g, _ in keys}:
            mine = [r for r in records if r["group"] == group]
            assert len({r["prompt"] for r in mine}) == 1 and len({r["seed"] for r in mine}) == 8
            assert sum(r["advantage"] for r in mine) == pytest.approx(0, abs=1e-5)
        seen += sorted({g for g, _ in keys})
    assert seen == list(range(8 * 4))  # every position of the stream once, in order


def test_the_end_token_is_part_of_what_is_trained_on(finished):
    """An answer that stopped ends in the end-of-text token, with a log-prob: it is scored and in the loss."""
    folder, _ = finished
    eos = json.loads((folder / "export" / "config.json").read_text()).get("eos_token_id")
    records = [json.loads(line) for p in (folder / "rollouts").iterdir() for line in p.read_text().splitlines()]
    from transformers import AutoTokenizer

    eos = AutoTokenizer.from_pretrained(str(folder / "export")).eos_token_id if eos is None else eos
    stopped = [r for r in records if r["finish"] == "stop"]
    assert stopped and all(r["tokens"][-1] == eos and len(r["logprobs"]) == len(r["tokens"]) for r in stopped)


@pytest.mark.slow
def test_a_finished_run_says_so_and_can_be_extended(finished, capfd, tmp_path):
    folder, _ = finished
    status = main(command(folder, "log.tensorboard=false")[3:])
    text = capfd.readouterr().out
    assert status == 0 and "has finished its 8 steps;" in text and "train.steps=16" in text
    assert re.search(r"done at step 8 after .*; held-out accuracy .*% before, .*% after; model in .*export; summary in", text)
    status = main(command(folder, "log.tensorboard=false", "train.steps=3")[3:])
    text = capfd.readouterr().out
    assert status == 0 and "has finished its 8 steps (of 3 requested);" in text and "train.steps=16" in text
    again = tiny_job.get_config()
    again.run.dir, again.log.console, again.optimizer.lr = str(folder), "off", 1e-3
    again.train.steps = 9
    assert jaxrl.train(again)["steps"] == 9


def test_what_would_change_the_past_is_refused_on_resume(finished):
    folder, _ = finished
    again = tiny_job.get_config()
    again.run.dir, again.run.seed, again.log.console = str(folder), 5, "off"
    with pytest.raises(ConfigError, match="run.seed: 0 -> 5"):
        jaxrl.train(again)


def test_an_evaluation_alone_keeps_the_files_that_are_there(tmp_path):
    names = ["step_00000003_a.jsonl", "step_00000003_a_2.jsonl", "step_00000003_a_3.jsonl"]
    for value, name in ((1, names[0]), (2, names[1]), (1, names[0]), (3, names[2]), (2, names[1])):
        assert write_records(tmp_path, 3, {"a": [{"x": value}]}, keep=True) == [tmp_path / "eval" / name]
    write_records(tmp_path, 3, {"a": [{"x": 4}]})  # of a run, which may come to a step again
    assert [json.loads((tmp_path / "eval" / name).read_text())["x"] for name in names] == [4, 2, 3]


@pytest.mark.full
def test_evaluation_alone_reads_the_checkpoint(finished):
    folder, _ = finished
    c = tiny_job.get_config()
    c.run.dir, c.run.mode, c.log.console = str(folder), "eval", "off"
    c.eval.samples, c.eval.temperature = 4, 1.0
    before, files = (folder / "metrics.jsonl").read_bytes(), {p: p.read_text() for p in (folder / "eval").iterdir()}
    out = jaxrl.train(c)
    assert files.items() < {p: p.read_text() for p in (folder / "eval").iterdir()}.items()  # beside the run's own
    assert {"accuracy", "mean@4", "pass@2", "pass@4"} <= set(out["eval"])
    assert out["eval"]["pass@4"] >= out["eval"]["pass@2"] >= out["eval"]["accuracy"]
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_evaluation_of_a_run_that_has_no_checkpoint_says_so(finished, capfd, tmp_path):
    folder, _ = finished
    c = tiny_job.get_config()
    c.run.dir, c.run.mode, c.log.console = str(tmp_path / "typo"), "eval", "plain"
    c.model.path, c.model.init, c.model.config, c.model.tokenizer = str(folder / "export"), "pretrained", {}, ""
    jaxrl.train(c)
    assert f"evaluation of {folder / 'export'} ({tmp_path / 'typo' / 'checkpoints'} holds no checkpoint)" in "".join(
        capfd.readouterr())


@pytest.mark.torch
def test_the_export_opens_in_transformers_with_the_trainers_log_probs(finished):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = finished
    export = folder / "export"
    model = AutoModelForCausalLM.from_pretrained(str(export), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(export))
    for ends in (model.config, model.generation_config):  # a random model had none of its own
        assert ends.eos_token_id == tokenizer.eos_token_id is not None and ends.pad_token_id == tokenizer.pad_token_id
    assert sum(p.numel() for p in model.parameters()) > 10_000


@pytest.fixture(scope="module")
def unbroken(finished):
    """The whole run, as it was before other tests went on with it."""
    return finished[0].parent / "unbroken"


@pytest.mark.parametrize("plan", ["update.kill9@step=5", pytest.param("checkpoint.kill9@step=4,phase=tensors", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_an_unbroken_run(plan, tmp_path, unbroken):
    status, _ = run(tmp_path / "killed", f"faults.plan={plan!r},")
    assert status == -signal.SIGKILL
    status, text = run(tmp_path / "killed")
    assert status == 0 and "resumed" in text, text
    assert fingerprint(tmp_path / "killed") == fingerprint(unbroken)


@pytest.mark.slow
def test_an_edited_reward_scores_anew_after_a_crash(tmp_path):
    """Killed before its first checkpoint: the same command samples the same answers, and the reward of now scores them."""
    def attempt(value, *overrides):
        (tmp_path / "mine.py").write_text(f"def score(prompt, completion):\n    return {value}\n")
        status, text = run(tmp_path / "run", f"reward.functions={tmp_path}/mine.py:score", "checkpoint.every_steps=0",
                           "eval.before=false", "eval.after=false", "eval.every_steps=0", *overrides)
        file = tmp_path / "run" / "rollouts" / "step_00000001.jsonl"
        return status, text, [json.loads(line) for line in file.read_text().splitlines()]

    status, _, before = attempt(1.0, "faults.plan='update.kill9@step=2',")
    assert status == -signal.SIGKILL and {row["score"] for row in before} == {1.0}
    status, text, after = attempt(2.0, "train.steps=1")
    assert status == 0 and "no checkpoint to go on from" in text and {row["score"] for row in after} == {2.0}
    assert [row["tokens"] for row in after] == [row["tokens"] for row in before]
    assert (tmp_path / "run" / "previous-1" / "rollouts" / "step_00000001.jsonl").exists()


@pytest.mark.slow
def test_sigterm_does_not_wait_for_rewards(tmp_path):
    """They would take a quarter of an hour from the second step on."""
    (tmp_path / "mine.py").write_text("import time\ncalls = 0\ndef score(prompt, completion):\n    global calls\n    calls += 1\n"
                                      "    time.sleep(29 if calls > 34 else 0)\n    return 1.0\n")
    status, text = run(tmp_path / "run", f"reward.functions={tmp_path}/mine.py:score", "faults.plan='reward.term@step=2',",
                       "reward.timeout_seconds=600", "eval.before=false", "eval.every_steps=0", "checkpoint.every_steps=0", timeout=600)
    assert status == 0 and "stopped at step 1 of 8" in text, text


@pytest.mark.slow
def test_sigterm_saves_and_leaves_cleanly_and_the_same_command_goes_on(tmp_path):
    status, text = run(tmp_path / "run", "faults.plan='rollout.term@step=4',", "checkpoint.every_steps=0")
    assert status == 0 and "stopped at step 3 of 8" in text, text
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000003"]
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
    status, text = run(tmp_path / "run", "train.steps=5")
    assert status == 0 and "resumed   step 3" in text


@pytest.mark.slow
def test_one_config_on_four_devices_is_the_same_run(tmp_path, unbroken):
    done = subprocess.run(
        command(tmp_path / "four", "train.steps=3", "mesh.tp=2"),
        capture_output=True,
        text=True,
        timeout=400,
        env={**environment(), "JAX_NUM_CPU_DEVICES": "4"},
    )
    assert done.returncode == 0 and "fsdp=2 x cp=1 x ep=1 x tp=2" in done.stdout + done.stderr, done.stdout + done.stderr
    one, four = lines(unbroken), lines(tmp_path / "four")
    assert len(four) == 4
    assert all(line["gap/max"] < 1e-4 for line in four if "gap/max" in line)
    for a, b in zip(one, four, strict=False):  # a rare token falls on the other side of a rounding
        for key in set(a) & {"reward/mean", "length/mean", "policy/entropy", "optim/grad_norm"}:
            assert a[key] == pytest.approx(b[key], rel=0.05), key


@pytest.mark.slow
def test_sft_lowers_the_loss_and_trains_on_the_end_token(tmp_path):
    summary = jaxrl.train(config(tmp_path, "sft", train__steps=30, log__every_steps=10))
    got = lines(tmp_path / "run")
    losses = [line["loss"] for line in got]
    assert losses[-1] < losses[0] - 0.5 and summary["steps"] == 30
    for phase in ("update", "data"):  # a line is about ten steps, and says what one of them took
        assert sum(10 * line["time"][phase] for line in got) == pytest.approx(summary["seconds"][phase])
    for line in got:
        clock = line["time"]
        assert clock["tokens_per_second"] == pytest.approx(line["rollout/tokens"] / (clock["step"] - clock.get("checkpoint", 0)))


@pytest.mark.slow
def test_a_python_reward_replaces_the_configs_and_a_redirected_log_shows_life(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console, "FIRST", 0.02)
    monkeypatch.setattr(console, "POLL", 0.01)
    monkeypatch.setattr(console, "LONGEST", 0.02)  # so that a short compilation is not missed
    summary = jaxrl.train(config(tmp_path, train__steps=1, eval__sets=(), log__console="plain", run__compile_cache=""),
                          rewards=[tiny_job.digits])
    assert summary["steps"] == 1
    before, after = capsys.readouterr().out.split("step 1/1", 1)
    assert "still in start" in before and re.search("still in (rollout|update) after .*: a program is being compiled", before)
    assert "still" not in after.splitlines()[-1]


@pytest.mark.full
def test_rewards_that_fail_stop_the_run_and_leave_the_checkpoint(tmp_path):
    reward = tmp_path / "bad.py"
    reward.write_text("def broken(prompt, completion, answer, **columns):\n    return {answer: 1.0}[completion]\n")
    with pytest.raises(RunStopped, match="broken"):
        jaxrl.train(config(tmp_path, reward__functions=(f"{reward}:broken",), eval__sets=()))


@pytest.mark.full
def test_device_out_of_memory_names_the_remedies(tmp_path, monkeypatch, capsys, caplog):
    """jax's own error in a step: status 1, its text in the log, what to change on the console, and what the plan would."""
    def exhausted(self, component, phase=""):
        jax.jit(lambda: jax.numpy.zeros(1 << 52, "uint8") + 1)().block_until_ready()

    monkeypatch.setattr("jaxrl.run.session.Session.fault", exhausted)
    flags = {"run.dir": tmp_path / "run", "log.console": "off", "train.steps": 1, "rollout.slots": 16}
    assert main([f"--config={tiny_job.__file__}", *(f"--config.{name}={value}" for name, value in flags.items())]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and "RESOURCE_EXHAUSTED: Out of memory allocating 4503599627370496 bytes" in caplog.text
    for remedy in ("train.tokens_per_microbatch=256 (now 512)", "rollout.slots=8 (now 16)", "model.remat=full (now auto)",
                   "The nearest that fits", "run.mode=plan says what fits", "goes on from the newest checkpoint"):
        assert remedy in said


@pytest.mark.full
def test_sequences_beyond_the_models_window_are_mentioned(tmp_path, caplog):
    """Before the first step; vLLM, which would refuse to serve them, is not even started."""
    c = config(tmp_path, train__steps=0, eval__sets=(), rollout__max_new_tokens=200)
    wants = ("may be 296 tokens .data.max_prompt_tokens=96 . rollout.max_new_tokens=200., the model is made for 256 .*lower them, set "
             "train.max_sequence_tokens, or extend the model with model.config.rope_scaling")
    with Session(resolve(c)) as s:
        setup.open_run(s)
        assert re.search(wants, caplog.text)
    caplog.clear()
    c.model.config = {**tiny_job.MODEL, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with Session(resolve(c)) as s:
        setup.open_run(s)
        assert not re.search(wants, caplog.text)
    c.model.config, c.rollout.engine = tiny_job.MODEL, "vllm"
    with pytest.raises(ConfigError, match=wants), Session(resolve(c)) as s:
        setup.open_run(s)


@pytest.mark.slow
def test_kl_to_the_reference_and_several_updates_per_batch(tmp_path):
    c = config(tmp_path, train__steps=3, eval__sets=())
    c.algorithm.kl.coef, c.algorithm.ppo_epochs, c.algorithm.num_minibatches, c.reference.dtype = 0.1, 2, 2, "fp32"
    jaxrl.train(c)
    got = lines(tmp_path / "run")
    assert got[0]["policy/kl"] >= 0 and got[-1]["policy/kl"] > got[0]["policy/kl"]
    assert got[-1]["policy/ratio_mean"] != 1.0 and got[-1]["old_gap/max"] > 0


def test_pass_at_k_closed_forms():
    assert pass_at_k(0, 8, 4) == 0 and pass_at_k(8, 8, 1) == 1 and pass_at_k(1, 8, 8) == 1
    assert pass_at_k(2, 8, 1) == pytest.approx(0.25) and pass_at_k(1, 4, 2) == pytest.approx(0.5)


@pytest.mark.full
def test_the_core_needs_neither_torch_nor_vllm():
    code = "import sys, jaxrl.recipes.rl, jaxrl.recipes.sft; assert not {'torch', 'vllm', 'flax.nnx'} & set(sys.modules), 'imported'"
    done = subprocess.run([command("x")[0], "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert jax.devices()[0].platform == "cpu"
