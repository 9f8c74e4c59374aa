"""The command `jaxrl`: its programs, its help, and what it answers to a slip of the keys."""

import errno
import itertools
import runpy
import subprocess
import sys
import threading

import pytest

from jaxrl import __main__ as cli
from jaxrl import __version__, launch
from jaxrl.config import help
from jaxrl.config.schema import SCHEMA, options
from jaxrl.config.sections import GROUPS, headings
from jaxrl.main import command, main
from jaxrl.telemetry import METRICS


def called(monkeypatch, capsys, *argv):
    """(exit status, standard output, standard error) of the command."""
    monkeypatch.setattr(sys, "argv", ["jaxrl", *argv])
    with pytest.raises(SystemExit) as end:
        cli.command()
    return end.value.code or 0, *capsys.readouterr()


def process(*argv, **given):
    return subprocess.Popen([sys.executable, "-m", "jaxrl", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given)


def test_usage_and_version(monkeypatch, capsys):
    for argv in ((), ("--help",), ("-h",)):
        status, out, _ = called(monkeypatch, capsys, *argv)
        assert status == 0 and all(f"  {name} " in out for name in cli.PROGRAMS)
        assert max(map(len, out.splitlines())) <= 80
    assert called(monkeypatch, capsys, "--version")[:2] == (0, f"jaxrl {__version__}\n")


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_every_program_says_how_it_is_called(name, monkeypatch, capsys):
    monkeypatch.setattr("jaxrl.main.EXIT_SECONDS", 1e8)  # of the process that runs the tests
    status, out, _ = called(monkeypatch, capsys, name, "--help")
    assert status == 0 and f"jaxrl {name} " in out


@pytest.mark.parametrize("name", ["report", "diff", "doctor", "launch", "serve", "migrate"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_program_is_also_run_as_a_module(name, monkeypatch, capsys):
    out = called(monkeypatch, capsys, name, "--help")[1]
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"jaxrl.{name}", run_name="__main__")
    assert not end.value.code and capsys.readouterr().out == out


HELP = [("--help",), ("--version",), ("trian",), ("train", "--help"), ("train", "--help=all"), ("plan", "--help=rollout"),
        ("train", "--confg=x"), ("train", "--config.rollout.n=8"), ("diff", "--help"), ("report", "--help"), ("doctor", "--help"),
        ("launch", "--help"), ("serve", "--help"), ("serve", "--config=grpo"), ("migrate", "--help")]


def test_help_and_slips_import_no_jax():
    text = f"""
import sys
from jaxrl.__main__ import command
for argv in {HELP}:
    sys.argv = ["jaxrl", *argv]
    try:
        command()
    except SystemExit:
        print(argv, sorted({{"jax", "torch", "transformers", "datasets"}} & set(sys.modules)), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if line.startswith("(")] == [f"{argv} []" for argv in HELP]


@pytest.mark.parametrize("name, said", [
    ("trian", "did you mean jaxrl train?"), ("lanch", "did you mean jaxrl launch?"), ("evaluate", "did you mean jaxrl eval?"),
    ("configs/grpo.py:tiny", "jaxrl train --config=configs/grpo.py:tiny"), ("xyzzy", "there are train, eval, plan")])
def test_another_program_is_answered_with_the_nearest(name, said, monkeypatch, capsys):
    status, _, err = called(monkeypatch, capsys, name)
    assert status == 2 and said in err


@pytest.mark.parametrize("argv, mode", [
    (["train", "--config=grpo"], None), (["--config=grpo"], None), (["eval", "--config=grpo"], "eval"), (["plan", "--config=grpo"], "plan"),
    (["eval", "--config=grpo", "--config.run.mode=eval"], "eval")])
def test_eval_and_plan_are_train_with_their_mode(argv, mode, monkeypatch):
    seen = []
    monkeypatch.setattr("jaxrl.main.main", lambda argv, program="train": seen.append((argv, program)) or 0)
    monkeypatch.setattr("jaxrl.main.EXIT_SECONDS", 1e8)  # of the process that runs the tests
    monkeypatch.setattr(sys, "argv", ["jaxrl", *argv])
    with pytest.raises(SystemExit):
        cli.command()
    monkeypatch.undo()
    monkeypatch.setattr("jaxrl.main.load_config", lambda spec, overrides: seen.append(overrides) or stop())
    assert main(*seen[0]) == 130
    assert seen[1].get("run.mode") == mode


def stop():
    raise KeyboardInterrupt


@pytest.mark.parametrize("code, status", [(None, 0), (0, 0), (3, 3), ("no data", 1)])
def test_a_system_exit_leaves_the_group_and_sets_the_exit_limit(code, status, monkeypatch, capsys):
    """As of a warm start that was stopped: the other processes would learn nothing, and threads could stay."""
    class Group:
        first, index, left = True, 0, []
        leave = left.append

    limits = threading.Event()
    monkeypatch.setattr("jaxrl.main.load_config", lambda *_: sys.exit(code))
    monkeypatch.setattr("jaxrl.main.peers", lambda: Group)
    monkeypatch.setattr("jaxrl.main.leave_after", lambda seconds, with_status: limits.set())
    with pytest.raises(SystemExit) as e:
        command(["--config=grpo"])
    assert (e.value.code, Group.left) == (status, [status]) and limits.wait(10)
    assert capsys.readouterr().err == ("jaxrl: no data\n" if status == 1 else "")


def test_a_disk_error_without_a_name_before_there_is_a_config_is_told(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jaxrl.main.load_config", full)
    assert main(["--config=grpo"]) == 1
    assert "stopped: grpo: No space left on device; fix this" in capsys.readouterr().err


def test_a_mode_that_contradicts_the_program_is_refused(capsys):
    assert main(["--config=grpo", "--config.run.mode=plan"], "eval") == 2
    assert "jaxrl eval sets run.mode=eval" in capsys.readouterr().err


def test_the_overview_is_a_page_and_names_every_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert set(GROUPS) == set(SCHEMA)
    assert all(f"\n  {name} " in text for name in SCHEMA) and "Lists are written a,b" in text and "grpo" in text
    assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 80


def test_every_group_has_a_page_and_together_they_are_all(capsys):
    text = "".join(help.page(group, "train", "") for group in SCHEMA)
    everything = help.page("all", "train", "METRICS")
    assert all(f"--config.{name}=" in text and f"--config.{name}=" in everything for name in options())
    assert text.count("--config.") >= len(options()) and "METRICS" in everything
    assert main(["--help=metrics"]) == 0
    out = capsys.readouterr().out
    assert all(f"    {m.name}  " in out for m in METRICS)


def test_large_groups_have_headings(capsys):
    """A heading stands before the option it names; no reader meets more than 16 options in one stretch, a group of 15 needs none."""
    titles, names = headings(), list(options())
    assert set(titles) <= set(names)
    for group in SCHEMA:
        own = [name for name in names if name.startswith(f"{group}.")]
        starts = [i for i, name in enumerate(own) if name in titles]
        assert not starts or starts[0] == 0
        assert max([b - a for a, b in itertools.pairwise([*(starts or [0]), len(own)])]) <= 16, group
    assert main(["--help=algorithm"]) == 0
    assert "\n\nalgorithm: KL to the reference\n  --config.algorithm.kl.coef=" in capsys.readouterr().out


@pytest.mark.parametrize("argv, shown, absent", [
    (["--help=rollout"], "--config.rollout.group_size=8", "--config.eval."), (["--help", "rollout.vllm"], "--config.rollout.vllm.port=",
                                                                              "--config.rollout.group_size"),
    (["--help=optimizer.lr"], "by recipe: rl 1e-06", "--config.critic.lr"), (["--help=lr"], "--config.critic.lr=", "--config.optimizer.b1"),
    (["--help=config.critic"], "--config.critic.lr=", "--config.optimizer.lr"),
    (["--help=num_generations"], "num_generations in TRL: --config.rollout.group_size=8", "--config.rollout.top_p"),
    (["--help=max_tokens"], "--config.rollout.max_new_tokens=", "--config.rollout.top_p"),
    (["--help=kl"], "options have the word:", "--config.rollout.top_p"),
    (["--help=truncat"], "--config.algorithm.mask_truncated=", "--config.rollout.top_p"),
    (["--help=clip_low"], "None = by preset: 0.2; 0.0003 with gspo; 0.4 with gmpo. Needs run.recipe=rl or", "rl|distill"),
    (["--help=critic_lam"], "None = lam. By preset: 1.0 with vapo. Needs", "None = by preset")])
def test_help_of_one_thing_shows_it_alone(argv, shown, absent, capsys):
    assert main(argv) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert shown in out and absent not in out


@pytest.mark.parametrize("topic, said", [("rolout", "--help=rollout?"), ("rollout.vlm", "--help=rollout.vllm?"), ("xyzzy", "lists the groups")])
def test_help_of_another_name_is_answered_with_the_nearest(topic, said, capsys):
    assert main([f"--help={topic}"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("train", "--help=all"), ("migrate", "--help"), ("diff", "--help"), ("--help",)])
def test_a_reader_that_has_gone_leaves_no_traceback(argv):
    program = process(*argv)
    program.stdout.close()  # before anything is written
    assert program.wait() == (0 if argv[0] == "diff" else 141)  # argparse says nothing of it
    assert program.stderr.read() == ""


def test_a_broken_pipe_of_something_else_is_an_error(capfd):
    def other(_):
        raise BrokenPipeError("of a socket")

    with pytest.raises(BrokenPipeError):
        cli.run(other)


def test_the_launcher_asks_for_two_dashes(capsys):
    with pytest.raises(SystemExit):
        launch.parse(["--processes=2", "--config=grpo", "--config.train.steps=3"])
    assert "come after --: jaxrl launch --processes=2 -- --config=grpo --config.train.steps=3" in capsys.readouterr().err
