"""The bwrap sandbox: programs that want out or want everything, the probe, and what it is used for. Needs bubblewrap."""

import dataclasses
import os
import platform
import subprocess
import sys
import tempfile

import pytest
from helpers.sandbox_cases import ESCAPES, EXHAUSTIONS, surroundings

import jaxrl
from jaxrl import sandbox
from jaxrl.config.load import load_config, put
from jaxrl.sandbox import bwrap, seccomp
from jaxrl.sandbox.grading import grade
from jaxrl.sandbox.probe import check

pytestmark = pytest.mark.sandbox
SMALL = dict(memory_mb=256, disk_mb=16, output_bytes=100_000, processes=20)


@pytest.fixture(scope="module", autouse=True)
def configured():
    sandbox.configure({"backend": "bwrap", "seconds": 30.0, "cpu_seconds": 30.0})
    sandbox.probe()
    yield
    sandbox.configure({})


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    with surroundings(tmp_path_factory.mktemp("outside")) as found:
        yield found


@pytest.mark.parametrize("name", ESCAPES)
def test_no_program_gets_out(around, name):
    ran = sandbox.run(["python", "program.py"], files={"program.py": around.program(ESCAPES[name])}, **SMALL)
    assert "ESCAPED" not in ran.stdout and "SyntaxError" not in ran.stderr and "NameError" not in ran.stderr, ran
    assert around.victim.poll() is None and not around.left()


@pytest.mark.parametrize("name", EXHAUSTIONS)
def test_no_program_uses_more_than_its_share(around, name):
    program, named = EXHAUSTIONS[name]
    ran = sandbox.run(["python", around.name], files={around.name: around.program(program)}, **SMALL | {"seconds": 1.5})
    assert "ESCAPED" not in ran.stdout and "SyntaxError" not in ran.stderr
    assert ran.exit != 0 and bool(ran.limit) >= named, ran
    assert len(ran.stdout) + len(ran.stderr) <= 2 * SMALL["output_bytes"]
    assert not around.left()


def test_every_refused_call_is_refused():
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = {name: pair[column] for name, pair in seccomp.REFUSED.items() if pair[column] is not None}
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
        print(name, ctypes.get_errno())
print(libc.syscall({seccomp.CLONE3[column]}, 0, 0), ctypes.get_errno())
"""
    assert sandbox.run(["python", "-c", program]).stdout == "-1 38\n"


def test_calls_of_another_architecture_end_the_program():
    program = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # getpid as 32-bit programs call it
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""
    if platform.machine() == "x86_64":
        assert sandbox.run(["python", "-c", program]).exit == 128 + 31  # SIGSYS


def test_what_programs_need_works():
    program = """
import asyncio, json, multiprocessing, os, socket, subprocess, sys, tempfile, threading
assert open("in/data.txt").read() == "data" and sys.stdin.read() == "hello" and os.getcwd() == os.environ["HOME"]
open("in/data.txt", "w").write("new"); open("in/more", "w").write("x"); open("/tmp/x", "w")
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert subprocess.run(["sh", "-c", "echo $((1+1))"], capture_output=True).stdout == b"2\\n"
server = socket.create_server(("127.0.0.1", 0))
assert socket.create_connection(server.getsockname())
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
async def child():
    return await (await asyncio.create_subprocess_exec("true")).wait()
assert asyncio.run(child()) == 0
import numpy
print(numpy.arange(3).sum())
sys.exit(7)
"""
    ran = sandbox.run(["python", "program.py"], "hello", {"program.py": program, "in/data.txt": "data"}, memory_mb=2048)
    assert (ran.exit, ran.stdout, ran.stderr, ran.limit) == (7, "thread\n3\n", "", "")
    assert sandbox.run(["no_such_program"]).exit == 127
    assert sandbox.run(["sh", "-c", "kill -9 $$"]) == sandbox.Ran(137, "", "", "")


def test_paths_are_shown_read_only(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/words").write_text("shown")
    argv = ["sh", "-c", f"cat {tmp_path}/library/words; echo >> {tmp_path}/library/words"]
    assert sandbox.run(argv).stdout == ""
    sandbox.configure({"paths": (str(tmp_path / "library"),)})
    ran = sandbox.run(argv)
    sandbox.configure({})
    assert ran.stdout == "shown" and "cannot create" in ran.stderr


def test_the_probe_finds_a_sandbox_that_leaks(monkeypatch):
    """One that shows the home folder; one without limits of memory and processes; one with the network."""
    settings, limits = sandbox.types.Settings(), dataclasses.replace(sandbox.Limits(), memory_mb=128, processes=20)
    place = bwrap._place.__wrapped__
    home = tempfile.mkdtemp(dir="/tmp")  # no folder between that bubblewrap would make, for itself
    os.chmod(home, 0o777)
    monkeypatch.setenv("HOME", home)
    for words, change in {
            "reads a file": lambda *a: place(*a) + ("--ro-bind", home, home),
            "writes beside": lambda *a: place(*a) + ("--bind", home, home),
            "reaches a port": lambda *a: tuple(x for x in place(*a) if x != "--unshare-net")}.items():
        monkeypatch.setattr(bwrap, "_place", change)
        with pytest.raises(sandbox.SandboxError, match=words):
            check(settings, limits, bwrap.run)
    monkeypatch.setattr(bwrap, "_place", place)
    monkeypatch.setattr(bwrap, "_limited", lambda limits: [])
    with pytest.raises(sandbox.SandboxError, match="more memory"):
        check(settings, dataclasses.replace(limits, processes=10**6), lambda *a: bwrap.run(*a[:3], dataclasses.replace(
            a[3], memory_mb=4096, processes=400), a[4]))
    os.rmdir(home)


def test_an_ordinary_user_gets_the_same(tmp_path):
    """By a namespace of users, without privileges, with the system's Python."""
    program = """
import sys
sys.path[:0] = [PLACE]
from jaxrl import sandbox
sandbox.configure({"processes": 20})
sandbox.probe()
print(sandbox.run(["id", "-u"]).stdout, sandbox.run(["python", "-c", "import os\\nwhile True: os.fork()"], seconds=3.0).exit)
"""
    python = next((p for p in ("/usr/bin/python3.11", "/usr/bin/python3.12", "/usr/bin/python3.13", "/usr/bin/python3") if _is_new(p)), None)
    if python is None or os.geteuid():
        return  # nothing that others may run; nobody to become: the tests above were it
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", os.path.dirname(os.path.dirname(sandbox.__file__)), copy / "jaxrl"], check=False) if copy.mkdir() is None else None
    for folder in (tmp_path, *tmp_path.parents):
        if folder != folder.parent and str(folder).startswith("/tmp/"):
            os.chmod(folder, 0o755)
    done = subprocess.run([python, "-c", f"PLACE = {str(copy)!r}\n{program}"], capture_output=True, text=True, user=65534, group=65534,
                          extra_groups=(), env={"HOME": "/nonexistent", "PATH": os.environ["PATH"]}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "65534"


@pytest.mark.parametrize("flags", [["--map-root-user"], ["--map-current-user"]])
def test_a_namespace_with_one_user_has_a_sandbox(flags):
    """That of a rootless container: there is no other user to become, so each program has a namespace of its own."""
    program = """
from jaxrl import sandbox
sandbox.configure({})
sandbox.probe()
print(sandbox.run(["id", "-u"]).stdout)
"""
    done = subprocess.run(["unshare", "--user", *flags, sys.executable, "-c", program], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(jaxrl.__file__))})
    if "unshare failed" in done.stderr:
        return  # root that may not make namespaces
    assert done.stdout.split() == ["65534"], done.stderr


@pytest.mark.parametrize("program, passed", [("def add(a, b): return a + b", [True, True]), ("print('all passed')", [False, False])])
def test_unit_tests_in_two_sandboxes(program, passed):
    assert grade(program, ["assert add(1, 2) == 3", "assert add(add(1, 1), 1) == 3"]).passed == passed


@pytest.mark.nightly
def test_repair_trains(tmp_path):
    few = {"data.prompts_per_step": 2, "rollout.group_size": 2, "rollout.slots": 4, "train.steps": 2, "env.workers": 1,
           "eval.max_rows": 2, "log.tensorboard": False, "log.console": "off", "run.dir": str(tmp_path / "run"), "run.warm_start": "",
           "model.init": "random", "model.tokenizer": "jaxrl://chat/tokenizer"}
    config = load_config("env:repair", few)
    put(config, "model.config", {**load_config("env_sft:repair").model.config, "num_hidden_layers": 1})
    summary = jaxrl.train(config)
    assert summary["finished"] and summary["steps"] == 2


def _is_new(python: str) -> bool:
    return os.path.exists(python) and subprocess.run(
        [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], capture_output=True).returncode == 0


assert sys.platform == "linux"
