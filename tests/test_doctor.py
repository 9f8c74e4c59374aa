"""python -m jaxrl.doctor: what it says of what it finds. The parts of the examinations of devices and kernels are tested where they
live."""

import sys
from pathlib import Path

import pytest

from jaxrl.doctor import __main__ as doctor
from jaxrl.doctor import examinations
from jaxrl.doctor.examinations import Line


@pytest.fixture
def alone(monkeypatch):
    """alone(name, code): the examination `name` is a process that runs this code."""
    def make(name, code, seconds=300):
        monkeypatch.setitem(doctor.EXAMINATIONS, name, (None, seconds))
        real = doctor.subprocess.Popen
        monkeypatch.setattr(doctor.subprocess, "Popen", lambda command, **how: real([sys.executable, "-c", code], **how))
    return make


def test_a_finding_is_told_written_and_holds_no_secret(tmp_path, monkeypatch, capsys):
    found = {"versions": [Line("ok", "Python 9")], "machine": [Line("ok", "JAX_TOKEN=hf_abcdefghijklmnopqrstu"), Line(
        "note", f"XLA_DIR={Path.home()}/x, https://me:secret@host/y")], "kernels": [Line("wrong", "attention, gpu: wrong: off by 2")]}
    monkeypatch.setattr(doctor, "run_examination", lambda name: (0.5, found.get(name, [Line("-", "nothing")])))
    assert doctor.main([f"--out={tmp_path}/d.txt", "--skip=vllm,cache"]) == 1
    written = (tmp_path / "d.txt").read_text()
    assert written.strip().endswith("1 things are wrong") and "WRONG attention, gpu: wrong: off by 2" in written
    assert "hf_abc" not in written and "secret" not in written and str(Path.home()) + "/x" not in written
    assert "vllm" not in written and "devices (0.5 s)" in written and written.split("\n")[0] in capsys.readouterr().out
    monkeypatch.setattr(doctor, "run_examination", lambda name: (0.5, [Line("ok", "fine")]))
    assert doctor.main([f"--out={tmp_path}/d.txt"]) == 0 and "nothing is wrong" in (tmp_path / "d.txt").read_text()


@pytest.mark.parametrize("code, said", [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    ("import sys; sys.exit('no such device')", "no such device"),
    ("print('no findings')", "failed with status 0"),
])
def test_one_that_crashes_is_a_finding(alone, code, said):
    alone("devices", code)
    _, [(state, text)] = doctor.run_examination("devices")
    assert state == "wrong" and said in text


@pytest.mark.full
def test_one_that_hangs_is_ended_with_what_it_started(alone):
    """Else this would wait for the grandchild, which holds the same pipe."""
    alone("vllm", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])", seconds=2)
    _, [(state, text)] = doctor.run_examination("vllm")
    assert state == "wrong" and "did not end within 2 s" in text


def test_versions_are_held_to_what_jaxrl_asks_for(monkeypatch):
    there = {"jax": "0.7.2", "jaxlib": "0.10.2", "numpy": "2.1.0"}
    monkeypatch.setattr(examinations, "_version", lambda name: there.get(name, ""))
    monkeypatch.setattr(examinations, "_requirements", lambda: ["jax>=0.10,<0.13", "numpy>=2.0", "flax>=0.12"])
    said = {line.text: line.state for line in examinations.versions()}
    assert said["jax 0.7.2: jaxrl needs <0.13,>=0.10; pip install 'jax>=0.10,<0.13'"] == "wrong"
    assert said["flax is missing: pip install 'flax>=0.12'"] == "wrong" and said["numpy 2.1.0"] == "ok"
    assert said["jax 0.7.2 with jaxlib 0.10.2: install both together, pip install -U jax"] == "wrong"


def test_keys_of_the_service_in_the_environment_are_in_no_finding(monkeypatch):
    """However they are separated, and beside what is no secret."""
    monkeypatch.setenv("JAXRL_SERVICE_KEYS", "alice:tml-canary1, ben:tml-canary2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    said = doctor.redact("\n".join(line.text for line in examinations.machine()))
    assert "canary" not in said and "JAXRL_SERVICE_KEYS=<redacted>" in said and "XLA_FLAGS=--xla_dump_to=/x" in said


def test_the_real_requirements_are_read_and_one_process_tells_its_findings():
    names = examinations._requirements()
    assert any(text.startswith("jax>=") for text in names) and not any("extra" in text for text in names)
    seconds, lines = doctor.run_examination("machine")
    assert seconds > 0 and {state for state, _ in lines} <= {"ok", "note"}
    assert any(text.startswith("working directory") for _, text in lines)
