"""What a person sees, the warnings of the first steps, phases and triggers."""

import io
import logging
import re
import sys

import pytest

from jaxrl.config.load import default_config
from jaxrl.resolve.spec import resolve
from jaxrl.telemetry import Every, Phases, Telemetry, make_console, per_step
from jaxrl.telemetry.console import (
    PlainConsole,
    Progress,
    SilentConsole,
    duration,
    evaluation_line,
    printable,
    shortened,
    show,
)
from jaxrl.telemetry.health import FIRST_STEPS, RULES, Health
from jaxrl.telemetry.names import COLUMNS
from jaxrl.telemetry.table import TableConsole, sparkline

STEP = {"reward/mean": 0.5123, "accuracy/train": 0.45, "length/mean": 31.2, "policy/kl": 0.00012,
        "policy/entropy": 0.81, "policy/clip_fraction": 0.002, "optim/grad_norm": 0.53, "gap/mean": 1.2e-7,
        "rollout/truncated_fraction": 0.01, "rollout/zero_signal_fraction": 0.125, "optim/lr": 1e-6,
        "time/rollout": 1.1, "time/update": 0.75,
        "time/other": 0.001, "time/step": 1.851, "time/tokens_per_second": 5312.4, "time/wall": 0.0}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


# ---- console

def test_a_plain_line_holds_everything_a_person_asks_for():
    stream = io.StringIO()
    console = make_console("plain", 100, "run", stream)
    console.step(12, STEP)
    assert stream.getvalue() == (
        "step 12/100  reward 0.512  accuracy 45.0%  length 31.2  kl 1e-4  entropy 0.810  clip 0.2%  grad 0.530  "
        "gap 1e-7  truncated 1.0%  zero-signal 12.5%  1.85s (rollout 1.10 update 0.75)  5,312 tok/s\n")
    console.step(13, {"eval/accuracy": 0.531, "eval/test/accuracy": 0.5, "eval/hard/accuracy": 0.61,
                      "eval/pass@4": 0.7})
    assert "eval accuracy 53.1% (test 50.0%, hard 61.0%)  pass@4 70.0%" in stream.getvalue()
    with_control = {"eval/accuracy": 0.5, "eval/test/blank/accuracy": 0.2, "eval/test/blank/mean@2": 0.3}
    assert evaluation_line(with_control) == "accuracy 50.0%  test/blank 20.0%"
    assert evaluation_line({"eval/accuracy": 0.5, "eval/test/accuracy": 0.5, "eval/test/reward/accuracy": 0.9}) == "accuracy 50.0%"


def test_the_critic_is_on_the_line_and_in_the_table(monkeypatch):
    critic = STEP | {"value/loss": 0.0312, "value/explained_variance": -0.25}
    stream = io.StringIO()
    make_console("plain", 100, "run", stream).step(12, critic)
    assert "  value-loss 0.031  explained -0.250  " in stream.getvalue()
    header, row = [line.split() for line in table(160, [(12, critic)], monkeypatch) if re.match(r" +(step|12) ", line)][:2]
    shown = dict(zip(header, row, strict=True))
    assert (shown["vloss"], shown["expl"]) == ("0.031", "-0.250")


def test_a_silent_log_says_what_goes_on():
    """After FIRST seconds without a line, then each time after twice as long; a step may last twice as long as the fastest one."""
    clock = Clock()
    console = PlainConsole(100, "run", io.StringIO(), clock)

    def wait(seconds):
        out = []
        for _ in range(seconds):
            clock.now += 1
            if text := console.sign_of_life():
                out.append(text)
        return out

    console._phase, console._since = "rollout", clock.now
    assert wait(9) == [] and wait(80) == [
        f"still in rollout after {after}: generating completions" for after in ("10s", "20s", "40s", "1m20s")]
    console.step(1, {})  # the first one compiled
    assert wait(9) == [] and len(wait(2)) == 1
    clock.now += 39
    console.step(2, {})
    console._phase, console._since = "update", clock.now
    assert wait(99) == [] and wait(2) == ["still in update after 1m40s: optimizing"]
    console.print("any message counts")
    assert wait(99) == []
    console._phase, console._since = "data", clock.now  # steps go on without lines: the last phase has just begun
    assert wait(2) == ["still running 1m40s after the last line, now in data: reading rows"]


def test_auto_is_a_table_on_a_terminal_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert type(make_console("auto", 1, "", io.StringIO())) is PlainConsole
    assert type(make_console("auto", 1, "", Terminal())) is TableConsole
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_console("auto", 1, "", Terminal())) is PlainConsole
    assert type(make_console("off", 1, "", Terminal())) is SilentConsole


@pytest.mark.parametrize("mode", ["auto", "plain", "table"])
def test_a_terminal_without_utf8_shows_what_it_can(mode, monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal(io.BytesIO(), "iso-8859-9")
    console = make_console(mode, 10, "t", stream)
    assert type(console) is (TableConsole if mode == "table" else PlainConsole)
    console.step(1, STEP)
    console.print("a prompt: \u4f60 \u2192 \xfc")
    console.close()
    stream.flush()
    assert b"a prompt: ? ? \xfc" in stream.buffer.getvalue() and b"0.512" in stream.buffer.getvalue()


def test_a_kill_cannot_leave_the_cursor_hidden():
    stream = io.StringIO()
    console = make_console("table", 100, "t", stream)
    console.step(1, STEP)
    before_the_end = stream.getvalue()
    console.close()
    assert before_the_end.rfind("\x1b[?25h") > before_the_end.rfind("\x1b[?25l") >= 0


def table(width, steps, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    console = make_console("table", 100, "jaxrl rl runs/grpo", stream)
    console.phase("rollout")
    for step, scalars in steps:
        console.step(step, scalars)
    console.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()


def test_the_table_shows_rows_progress_phases_and_the_reward(monkeypatch):
    shown = table(140, [(s, STEP | {"reward/mean": s / 30}) for s in range(1, 31)], monkeypatch)
    header = next(line for line in shown if line.lstrip().startswith("step"))
    assert header.split() == ["step"] + " ".join(m.header for m in COLUMNS if m.name in STEP).split()
    rows = [line for line in shown if re.match(r" +\d+  +[\d.]+  +45.0%", line)]
    assert [int(r.split()[0]) for r in rows] == list(range(1, 31))
    assert rows[29].split()[1:6] == ["1.000", "45.0%", "31.2", "1e-4", "0.810"]
    assert all(len(line) <= 140 for line in shown)
    panel = "\n".join(shown[-6:])
    for text in ("jaxrl rl runs/grpo", "30/100  30%", "left", "rollout 1.10s", "update 0.75s", "5,312 tokens/s", "▁",
                 "█", "0.033 → 1.000", "now finished"):
        assert text in panel


def test_a_narrow_terminal_loses_the_least_important_columns(monkeypatch):
    shown = table(72, [(1, STEP)], monkeypatch)
    assert all(len(line) <= 72 for line in shown)
    header = next(line for line in shown if line.lstrip().startswith("step"))
    assert header.split()[:4] == ["step", "reward", "acc", "length"]
    assert "entropy" not in header and "gap" not in header and "grad" in header


def test_the_table_tells_evaluations_and_samples(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setenv("COLUMNS", "100")
    console = make_console("table", 100, "t", stream)
    console.step(10, {"eval/accuracy": 0.25})
    console.sample(10, "test", {"prompt": "[bold]2 + 2?", "completion": "\x1b[2J4", "accurate": False, "score": 0.0})
    console.print("[red]as it is[/red]")
    console.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "10  eval  accuracy 25.0%" in text
    assert "test, step 10, score 0, wrong" in text and "[bold]2 + 2?" in text and "[red]as it is[/red]" in text
    assert "\x1b[2J" not in stream.getvalue()  # an answer cannot clear the screen


def test_off_shows_nothing(capsys, tmp_path):
    config = default_config()
    config.log.console, config.log.tensorboard = "off", False
    t = Telemetry(tmp_path, config, 10)
    t.step(1, STEP)
    t.samples(1, {"test": [{"prompt": "p", "completion": "c"}]})
    t.print("hello")
    t.close()
    assert capsys.readouterr() == ("", "")


def test_as_many_samples_as_asked_for_of_different_prompts_others_each_time(capsys, tmp_path):
    config = default_config()
    config.log.console, config.log.tensorboard, config.log.print_samples = "plain", False, 2
    t = Telemetry(tmp_path, config, 10)
    rows = [{"prompt": f"p{i // 8}", "completion": "x" * 5000, "score": 1.0, "accurate": True, "finish": "length"}
            for i in range(40)]  # eight answers to each prompt
    shown = set()
    for step in range(3, 9):
        t.samples(step, {"a": rows, "b": rows[:8]})
        out = capsys.readouterr().out
        assert re.findall(rf"sample of (\w) at step {step}", out) == ["a", "a", "b"]
        first, second, third = re.findall(r"    (p\d)\n", out)
        assert first != second and third == "p0"
        shown |= {first, second}
    t.close()
    assert len(shown) > 2
    assert "score 1, right, cut by the length limit" in out and "[... 4300 characters ...]" in out


def test_the_live_table_is_told_the_phase(tmp_path):
    config = default_config()
    config.log.console, config.log.tensorboard = "off", False
    t = Telemetry(tmp_path, config, 10)
    seen = []
    t.console.phase = seen.append
    phases = Phases(watch=t.console.phase)
    with phases("rollout"), phases("reward"):
        pass
    t.close()
    assert seen == ["rollout", "reward", "rollout", ""]


def test_a_console_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("nobody reads")

    config = default_config()
    config.log.console, config.log.tensorboard = "plain", False
    monkeypatch.setattr(sys, "stdout", Closed())
    t = Telemetry(tmp_path, config, 10)
    t.step(1, STEP)
    t.step(2, STEP)
    t.close()
    assert caplog.text.count("console failed (nobody reads)") == 1 and "Traceback" not in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_progress_leaves_out_the_compiling_step():
    clock = Clock()
    p = Progress(10, clock)
    clock.now += 60  # compiles
    p.advance(1)
    assert p.left is None
    clock.now += 4
    p.advance(3)
    assert p.left == pytest.approx(2.0 * 7) and p.elapsed == 64
    p.advance(10)
    assert p.left == 0


def test_progress_of_a_resumed_run_counts_its_own_steps():
    clock = Clock()
    p = Progress(100, clock)
    p.advance(51)
    clock.now += 3
    p.advance(52)
    assert p.left == pytest.approx(3.0 * 48)


def test_numbers_as_people_read_them():
    by_name = {m.name: m for m in COLUMNS}
    assert [show(by_name["optim/grad_norm"], x) for x in (0.0, 0.5312, 1.2e-7, 12345.0, float("nan"))] == [
        "0", "0.531", "1e-7", "1e+4", "nan"]
    assert [show(by_name["time/step"], x) for x in (1.234, 12.34, 123.4)] == ["1.23", "12.3", "123"]
    assert [show(by_name["length/mean"], x) for x in (31.25, 1234.5)] == ["31.2", "1,234"]
    assert [duration(s) for s in (0, 12.4, 190, 7500)] == ["0s", "12s", "3m10s", "2h05m"]
    assert evaluation_line({"reward/mean": 1.0}) == ""
    assert sparkline([0, 1, 2, 3], 10) == "▁▃▆█" and sparkline([1.0] * 9, 3) == "▁▁▁" and sparkline([], 3) == ""
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert printable("a\tb\n\x1b\x07é") == "a\tb\n��é"
    assert shortened("x" * 10, 20) == "x" * 10 and len(shortened("x" * 1000, 100)) < 150


# ---- warnings of the first steps

HEALTHY = {"reward/mean": 0.4, "reward/std": 0.4, "rollout/zero_signal_fraction": 0.3,
           "rollout/truncated_fraction": 0.1, "optim/grad_norm": 0.5, "optim/lr": 1e-6, "optim/skipped": 0.0,
           "data/filtered_fraction": 0.01,
           "rollout/absent_fraction": 0.0, "gap/mean": 1e-6, "policy/entropy": 0.8, "policy/clip_fraction": 0.01}
SICK = {
    "equal_rewards": ({"reward/mean": 0.0, "reward/std": 0.0, "rollout/zero_signal_fraction": 1.0},
                      ["rollout.group_size (now 8)", "run.warm_start", "RUN/rollouts", "reward.functions=('math',)"]),
    "truncated": ({"rollout/truncated_fraction": 0.8},
                  ["80%", "raise rollout.max_new_tokens (now 1024)", "eos_tokens"]),
    "zero_gradient": ({"optim/grad_norm": 0.0}, ["gradient is exactly zero", "model.frozen"]),
    "zero_learning_rate": ({"optim/lr": 0.0}, ["optimizer.warmup_steps (now 10)"]),
    "nonfinite": ({"optim/skipped": 1.0}, ["lower optimizer.lr (now 1e-06)"]),
    "filtered_prompts": ({"data/filtered_fraction": 0.06}, ["6%", "data.max_prompt_tokens (now 512)", "truncate_left"]),
    "absent_rewards": ({"rollout/absent_fraction": 0.25}, ["25%", "RUN/rollouts", "returned None", "reward.timeout_seconds is 10.0"]),
    "gap": ({"gap/mean": 0.2}, ["0.2 per token", "rollout.dtype=fp32", "token_tis"]),
    "low_entropy": ({"policy/entropy": 0.001}, ["rollout.temperature (now 1.0)"]),
    "clipped": ({"policy/clip_fraction": 0.6}, ["60%", "algorithm.ppo_epochs"]),
}


def test_a_healthy_run_hears_nothing():
    health = Health(default_config(), "RUN")
    assert [health.check(s, HEALTHY) for s in (1, 2, 3, 4)] == [[]] * 4


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_speaks_once_and_names_the_remedy(rule):
    wrong, said = SICK[rule.name]
    health = Health(resolve(default_config()), "RUN")
    texts = [t for step in (1, 2, 3, 4) for t in health.check(step, HEALTHY | wrong)]
    mine = [t for t in texts if all(s in t for s in said)]
    assert len(mine) == 1 and re.match(r"step [123]: ", mine[0]) and "nan" not in mine[0] and "{" not in mine[0]
    assert len(texts) == 1


def test_only_the_first_steps_of_a_process_are_looked_at():
    health = Health(default_config(), "RUN")
    assert health.check(0, {"eval/accuracy": 0.0}) == []  # an evaluation is no step
    for step in range(FIRST_STEPS):
        health.check(step, HEALTHY)
    assert health.check(9, HEALTHY | {"rollout/truncated_fraction": 1.0}) == []


def test_missing_metrics_keep_rules_silent():
    assert Health(default_config(), "RUN").check(1, {"optim/grad_norm": 1.0, "loss": 2.0}) == []


def test_equal_rewards_without_the_group_metric():
    texts = Health(default_config(), "RUN").check(1, {"optim/grad_norm": 1.0, "reward/std": 0.0})
    assert len(texts) == 1 and "all rewards" in texts[0]


def test_warnings_reach_the_log(tmp_path, caplog):
    config = default_config()
    config.log.console, config.log.tensorboard = "off", False
    t = Telemetry(tmp_path, config, 10)
    with caplog.at_level(logging.WARNING, "jaxrl"):
        t.step(1, HEALTHY | {"rollout/truncated_fraction": 0.9})
    t.close()
    assert "raise rollout.max_new_tokens (now 1024)" in caplog.text


# ---- phases

def test_phases_add_up_to_the_step_and_nest():
    clock = Clock()
    phases = Phases(clock)
    clock.now += 1
    with phases("rollout"):
        clock.now += 2
        with phases("reward"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    with phases("reward"):
        clock.now += 32
    spent = phases.take()
    assert spent == {"other": 17, "rollout": 10, "reward": 36, "step": 63}
    clock.now += 5
    assert phases.take() == {"other": 5, "step": 5}
    with phases("rollout"):
        clock.now += 1
        assert phases.totals() == {"other": 22, "rollout": 11, "reward": 36}
    assert phases.current == ""


def test_a_line_about_several_steps_says_what_one_took():
    spent = per_step({"update": 8.0, "data": 1.0, "eval": 5.0, "checkpoint": 2.0, "other": 1.0, "step": 17.0}, 10)
    assert spent == pytest.approx({"update": 0.8, "data": 0.1, "eval": 5.0, "checkpoint": 2.0, "other": 0.1, "step": 8.0})


def test_an_exception_ends_its_phase():
    clock = Clock()
    phases = Phases(clock)
    with pytest.raises(KeyError), phases("update"):
        with phases("inner"):
            clock.now += 1
            raise KeyError
    clock.now += 2
    assert phases.take() == {"inner": 1, "update": 0, "other": 2, "step": 3}


def test_a_step_taken_inside_a_phase_counts_both_halves():
    clock = Clock()
    phases = Phases(clock)
    with phases("eval"):
        clock.now += 3
        assert phases.take() == {"eval": 3, "other": 0, "step": 3}
        clock.now += 4
    assert phases.take() == {"eval": 4, "other": 0, "step": 4}


# ---- triggers

def due(every, steps, epochs=None):
    return [s for i, s in enumerate(steps) if every(s, epochs[i] if epochs else 0.0)]


def test_by_steps():
    assert due(Every(steps=3), range(1, 11)) == [3, 6, 9]
    assert due(Every(steps=0), range(1, 11)) == []
    assert due(Every(steps=3), [0]) == []


def test_skipped_steps_are_made_up_for():
    assert due(Every(steps=7), [5, 10, 15, 20, 30]) == [10, 15, 30]


def test_by_epochs():
    thirds = [i / 3 for i in range(1, 10)]
    assert due(Every(epochs=1.0), range(1, 10), thirds) == [3, 6, 9]
    assert due(Every(epochs=0.5), range(1, 10), thirds) == [2, 3, 5, 6, 8, 9]
    assert due(Every(epochs=0.1), range(1, 5), [0.1 * i for i in range(1, 5)]) == [1, 2, 3, 4]


def test_by_seconds_since_it_was_last_due_for_any_reason():
    clock = Clock()
    every, hits = Every(steps=5, seconds=10.0, clock=clock), []
    for step in range(1, 12):
        clock.now += 4
        hits += [step] if every(step) else []
    # step 3 (12 s), step 5 (by steps), step 8 (12 s later), step 10 (by steps)
    assert hits == [3, 5, 8, 10]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_resumed_trigger_goes_on_where_it_was(cut):
    options = {"steps": 7, "epochs": 0.75, "seconds": 9.0}
    steps = [2 * i for i in range(1, 13)]
    whole_clock, clock = Clock(), Clock()
    whole, every = Every(**options, clock=whole_clock), Every(**options, clock=clock)
    answers = []
    for i, step in enumerate(steps):
        whole_clock.now += 2
        clock.now += 2
        answers.append((whole(step, step / 10), every(step, step / 10)))
        if i == cut:  # another process, another clock
            state, clock = every.state(), Clock()
            clock.now = 5.0
            every = Every(**options, clock=clock, state=state)
    assert [a for a, _ in answers] == [b for _, b in answers] and any(a for a, _ in answers)
