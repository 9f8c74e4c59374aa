"""What of the sandbox needs no bubblewrap: the filter of system calls, limits alone and what they do not stop, services, and
unit tests of programs, which no program passes but one that computes what is asked."""

import base64
import fcntl
import json
import logging
import os
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import env_cases
from helpers.sandbox_cases import ESCAPES, NOT_STOPPED, surroundings
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl import sandbox
from jaxrl.config.load import default_config
from jaxrl.config.schema import SCHEMA
from jaxrl.envs import builtin
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check
from jaxrl.rewards import RewardItem, RewardPool
from jaxrl.rewards.builtin import code_block
from jaxrl.sandbox import Limits, RunResult, SandboxError, api, bwrap, grading, seccomp, serve, watch
from jaxrl.sandbox import types as sandbox_types
from jaxrl.sandbox.codec import Opaque, decode, encode
from jaxrl.sandbox.grading import grade, parse, same
from jaxrl.sandbox.probe import check as check_sandbox


@pytest.fixture
def limits_alone(monkeypatch):
    """configure(**options) of a sandbox of limits, whose probe is taken for done."""
    monkeypatch.setattr(api, "check", lambda *args: None)

    def configure(**options):
        sandbox.configure({"backend": "rlimits", "seconds": 300.0, "cpu_seconds": 20.0} | options)

    configure()
    yield configure
    sandbox.configure({})


def python(program, **limits):
    return sandbox.run(["python", "-I", "-S", "-c", program], **limits)


# -- the filter of system calls ------------------------------------------------------------------------------------------

def verdict(program, arch, number, *arguments):
    """What a BPF program says of a call, by the rules of the machine that runs it."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *[a % 2**64 for a in arguments], *[0] * (6 - len(arguments)))
    steps, at, held = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            held, = struct.unpack_from("=I", data, value)
        else:
            at += yes if {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code] else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_lists_and_nothing_that_programs_need(machine):
    column, arch = seccomp.ARCHITECTURES[machine]
    program = seccomp.program(machine)
    assert len(program) % 8 == 0 and len(program) // 8 < 4096
    refused = {pair[column] for pair in seccomp.REFUSED.values()} - {None}
    special = {pair[column] for pair in (seccomp.CLONE, seccomp.CLONE3, seccomp.SOCKET)}
    for number in range(470):
        want = seccomp.ERRNO | 1 if number in refused else seccomp.ALLOW
        assert number in special or verdict(program, arch, number) == want, number
    clone, ioctl, opens = seccomp.CLONE[column], seccomp.IOCTL[column], seccomp.SOCKET[column]
    assert verdict(program, arch, seccomp.CLONE3[column]) == seccomp.ERRNO | 38
    assert verdict(program, arch, clone, 0x3D0F00) == verdict(program, arch, clone, 17) == seccomp.ALLOW  # a thread, a fork
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, arch, clone, flag | 17) == seccomp.ERRNO | 1
    assert verdict(program, arch, ioctl, 0, 0x5401) == seccomp.ALLOW
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):  # the kernel looks at the lower half alone
        assert verdict(program, arch, ioctl, 0, request) == seccomp.ERRNO | 1
    assert [verdict(program, arch, opens, f) == seccomp.ALLOW for f in (1, 2, 10, 16, 17, 38, 40)] == [True] * 3 + [False] * 4
    assert verdict(program, 0x40000003, 0) == seccomp.KILL  # i386
    assert machine != "x86_64" or verdict(program, arch, seccomp.X32 | 101) == seccomp.ERRNO | 38
    assert seccomp.program("riscv64") is None


# -- limits alone --------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_limits_alone_do_not_keep_a_program_in(limits_alone, tmp_path):
    """The list of test_sandbox.py: these get what they want, whoever runs them."""
    with surroundings(tmp_path) as around:
        stopped = []
        for name in NOT_STOPPED:
            ran = sandbox.run(["python", "program.py"], files={"program.py": around.program(ESCAPES[name], "rlimits")})
            if not ("ESCAPED" in ran.stdout or name == "leaves a process" and around.left()):
                stopped.append((name, ran))
        assert stopped == []


def test_limits_alone_say_so(caplog, limits_alone, monkeypatch):
    monkeypatch.setattr(api, "check", check_sandbox)
    with caplog.at_level(logging.WARNING, "jaxrl.sandbox"):
        assert python("print(1)") == RunResult(0, "1\n", "")
        python("print(1)")
    assert len(caplog.records) == 1 and "is not a sandbox" in caplog.text


def test_processor_time_is_rounded_up_to_whole_seconds(limits_alone):
    """0.4 s is neither no limit nor 0, and no limit is shorter than what was asked for."""
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0])"
    for asked, whole in ((0.4, 1), (1.0, 1), (1.4, 2)):
        assert python(program, cpu_seconds=asked).stdout == f"{whole}\n" and Limits(cpu_seconds=asked).whole_cpu_seconds == whole


@pytest.mark.full
def test_each_limit_is_told(limits_alone):
    limits_alone(seconds=1.0)
    assert python("import time; time.sleep(100)").limit == "seconds"
    limits_alone(cpu_seconds=1.0)
    assert python("while True: pass").limit == "cpu_seconds"
    limits_alone(output_bytes=1000)
    ran = python("while True: print('x' * 100)")
    assert ran.limit == "output_bytes" and len(ran.stdout) == 1000
    assert python("print('x' * 998)").limit == "" and python("print('x' * 1100)").limit == "output_bytes"
    limits_alone(memory_mb=200)
    assert "MemoryError" in python("bytearray(220 << 20)").stderr and python("bytearray(100 << 20)").exit == 0
    forks = "import os, time\nfor _ in range({}):\n    if not os.fork():\n        {}time.sleep(100)\ntime.sleep(100)"
    assert python(forks.format(4, "x = b'x' * (80 << 20); ")).limit == "memory_mb"
    limits_alone(processes=10)
    assert python(forks.format(20, "")).limit == "processes"
    limits_alone(disk_mb=1)
    write = "open('f', 'wb').write(bytes({} << 10))"
    assert "File too large" in python(write.format(1100)).stderr and python(write.format(1000)).exit == 0


def test_streams_and_ends(limits_alone):
    big = "x" * 300_000
    ran = sandbox.run(["python", "a/main.py"], big, {"a/main.py": "import sys; t = sys.stdin.read(); print(t, end=''); sys.exit(len(t) % 7)"})
    assert (ran.exit, ran.stdout, ran.limit) == (300_000 % 7, big, "")
    assert sandbox.run(["true"], big).exit == 0  # which reads nothing
    assert python("import os; os.kill(os.getpid(), 11)").exit == 128 + 11
    assert python("import sys; sys.stdout.buffer.write(bytes([255]))").stdout == "�"
    assert sandbox.run(["no_such_program"]).exit not in (0, None)
    assert python("import os; print(sorted(os.environ))").stdout.count("JAX") == 0
    for name in ("/etc/x", "../x", "a/../x", "", "a//b", "./x"):
        with pytest.raises(ValueError, match="relative path"):
            sandbox.run(["true"], files={name: ""})
    for argv in ([], ["a\0b"], [1], "true", {"true": 1}):
        with pytest.raises(TypeError, match="argv"):
            sandbox.run(argv)


# -- a sandbox that fails is nobody's score ---------------------------------------------------------------------------------

def test_what_was_written_before_a_limit_is_kept():
    """All of it, also where nobody looked at the pipe in the meantime."""
    text = "import os, time; os.write(1, b'x' * 200_000); os.write(2, b'.'); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
    select.select([process.stderr], [], [])  # all is in the pipes
    out, err, limit = watch.watch(process, b"", Limits(output_bytes=1 << 20), time.monotonic(), process.kill)
    assert (out, err, limit) == (b"x" * 200_000, b".", "seconds")


def test_a_reward_whose_sandbox_is_missing_stops_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(bwrap, "_program", bwrap._program.__wrapped__)
    with pytest.raises(ConfigError, match="(?s)reward 'code' .* cannot be used: .*not installed"):
        config = default_config()
        config.reward.functions, config.reward.workers = ("code",), 1
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        with RewardPool(config) as pool:
            pool.wait()


@pytest.fixture
def fake_bwrap(monkeypatch, tmp_path):
    """fake_bwrap(words): a bubblewrap that writes these to standard error and ends; None = there is no program at all."""
    sandbox.configure({})
    monkeypatch.setattr(bwrap, "_program", bwrap._program.__wrapped__)
    monkeypatch.setattr(bwrap, "_help", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(words, programs=("bwrap", "setpriv", "prlimit")):
        for name in programs:
            (tmp_path / name).write_text(f"#!/bin/sh\necho 'bwrap: {words}' >&2\nexit 1\n")
            (tmp_path / name).chmod(0o755)

    yield make
    sandbox.configure({})


@pytest.mark.parametrize("words, remedy", [
    ("No permissions to create new namespace, likely because the kernel does not allow", "AppArmor"),
    ("setting up uid map: Permission denied", "seccomp=unconfined"),
    ("Can\\047t mount proc on /newroot/proc: Operation not permitted", "systempaths"),
    ("Creating new namespace failed: No space left on device", "user.max_user_namespaces"),
    ("Can\\047t write data to file /tmp/work/a: No space left on device", "sandbox.disk_mb"),
    ("Exceeded maximum number of arguments 9000", "one archive"), ("Can\\047t fork: Resource temporarily unavailable", "ulimit -u"),
    ("Unknown option --perms", "version 0.5"), ("something new", "sandbox.backend=remote")])
def test_every_refusal_of_bubblewrap_has_its_own_remedy(fake_bwrap, words, remedy):
    fake_bwrap(words)
    with pytest.raises(SandboxError) as e:
        sandbox.run(["true"])
    assert "ran nothing: bwrap: " in str(e.value) and remedy in str(e.value) and "apt-get install" not in str(e.value)


def test_what_is_not_installed_is_named_with_its_package(fake_bwrap):
    for there, name, package in ((), "bwrap", "bubblewrap"), (("bwrap",), "(setpriv|prlimit)", "util-linux"):
        fake_bwrap("x", there)
        with pytest.raises(SandboxError, match=f"{name} is not installed: install it .apt-get install {package}"):
            sandbox.run(["true"])


@pytest.mark.parametrize("backend", ["rlimits", pytest.param("bwrap", marks=pytest.mark.sandbox)])
def test_what_does_not_fit_a_program_is_named(backend, monkeypatch):
    """Texts and lists that are too long, files that are too many: of the kernel's own making."""
    sandbox.configure({"backend": backend})
    try:
        sandbox.probe()
        with pytest.raises(SandboxError, match="Argument list too long.*as files or on standard input"):
            sandbox.run(["python", "-c", "x" * 200_000])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            with pytest.raises(SandboxError, match="Too many open files.*ulimit -n"):
                held = []
                while True:
                    sandbox.run(["true"], files={f"f{k}": "" for k in range(100)})
                    held.append(os.pipe())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for pair in held:
                for fd in pair:
                    os.close(fd)
        if backend == "bwrap":
            with pytest.raises(SandboxError, match="sandbox.disk_mb"):
                sandbox.run(["true"], files={"big": bytes(3 << 20)}, disk_mb=1)
            with pytest.raises(SandboxError, match="maximum number of arguments.*one archive|Argument list too long.*one archive"):
                sandbox.run(["true"], files={f"f{k}": "" for k in range(3000)})
    finally:
        sandbox.configure({})


@pytest.mark.parametrize("files, limits, words", [
    ({"a": "", "a/b": ""}, {}, "'a' is a file and the folder of 'a/b'"), ({"x" * 256: ""}, {}, "at most 255 bytes"),
    ({"ä" * 128: ""}, {}, "at most 255 bytes"), ({"x/" * 2000 + "x": ""}, {}, "its path 3800"),
    ({}, {"memory_mb": 0}, "memory_mb=0"), ({}, {"processes": 2.5}, "processes=2.5: expected a whole number"),
    ({}, {"seconds": float("nan")}, "seconds=nan"), ({}, {"seconds": float("inf")}, "seconds=inf"), ({}, {"disk_mb": "1"}, "disk_mb='1'"),
    ({}, {"cpu_seconds": -1}, "cpu_seconds=-1"), ({}, {"seconds": True}, "seconds=True")])
def test_arguments_that_no_sandbox_takes(limits_alone, files, limits, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        sandbox.run(["true"], files=files, **limits)


@pytest.mark.parametrize("arguments, words", [
    ({"stdin": 5}, "stdin is text or bytes, got int"), ({"files": {"a": 5}}, "the file 'a' is text or bytes, got int"),
    ({"files": {Path("a"): ""}}, "the name of a file is a text, got PosixPath('a')"), ({"files": ["a"]}, "got list")])
def test_arguments_of_other_types_are_named(limits_alone, arguments, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        sandbox.run(["true"], **arguments)


def test_a_place_for_the_trial_is_asked_for_by_name(request, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    request.addfinalizer(lambda: sandbox.configure({}))
    sandbox.configure({"backend": "rlimits"})
    with pytest.raises(SandboxError, match="cannot be probed: .*a port of 127.0.0.1"):
        sandbox.probe()


@pytest.mark.parametrize("users, groups, spare", [
    ((0, 0, 4294967295), (0, 0, 4294967295), True), ((0, 0, 1), (0, 0, 1), False), ((0, 1000, 1), (0, 1000, 1), False),
    ((1, 100000, 65536), (1, 100000, 65536), True), ((1, 100000, 65536), (0, 1000, 1), False), ((0, 0, 5), (0, 0, 5), False),
    ((0, 0, 0), (0, 0, 0), False), ((0, 100000, 4100), (0, 100000, 65536), True)])
def test_users_that_nobody_is(users, groups, spare):
    """Only numbers that both maps have, none of them the last ones."""
    found = bwrap._spare([users, groups])
    assert (found is not None) == spare
    if spare:
        assert len(found) >= 1000
        for first, _, count in (users, groups):
            assert first + count // 2 <= found[0] or first + 1000 <= found[0]
            assert found[-1] < first + count - 2 and found[-1] < 2**31


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def service():
    """service(*answers) -> (its address, what it was asked); the last answer is given again and again."""
    opened = []

    def start(*answers):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.answers, server.asked = list(answers), []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        opened.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}", server.asked

    yield start
    for server in opened:
        server.shutdown()
        server.server_close()
    sandbox.configure({})


def remote(url, argv=("python", "-c", "x"), stdin="", files=None, **options):
    """One call, without the probe."""
    from jaxrl.sandbox import remote as module
    limits = Limits(**{k: options.pop(k) for k in list(options) if k in ("seconds", "output_bytes", "memory_mb")})
    set_ = sandbox_types.Settings(backend="remote", url=url, **options)
    return module.run(list(argv), stdin.encode(), {k: v.encode() for k, v in (files or {}).items()}, limits, set_)


def test_our_own_service_runs_programs_for_others(limits_alone, monkeypatch, request):
    server = serve.server("127.0.0.1", 0, 2, key="open").start("sandbox")
    request.addfinalizer(server.close)
    url = f"http://127.0.0.1:{server.port}"
    monkeypatch.setenv("SANDBOX_TEST_KEY", "open")
    ask = dict(key_env="SANDBOX_TEST_KEY", retries=0)
    ran = remote(url, ("python", "main.py"), "3 4", {"main.py": "print(sum(map(int, input().split())))"}, **ask)
    assert ran == RunResult(0, "7\n", "")
    assert remote(url, ("python", "-c", "while True: pass"), seconds=0.5, **ask).limit == "seconds"
    for wrong, options, words in ((("python", "a\0"), {}, "HTTP 400: .*argv"), (("true",), {"key_env": ""}, "HTTP 401"),
                                  (("true",), {"key_env": "NO_SUCH_KEY"}, "this environment variable is not set")):
        with pytest.raises(SandboxError, match=words):
            remote(url, wrong, **ask | options)


def test_faults_of_a_service_are_tried_again_and_then_nobodys_score(service, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda s: None)
    fine = {"exit": 3, "stdout": "out", "stderr": "", "limit": ""}
    for first in ((500, "x"), (429, "x"), (200, b'{"exit": 3, "std')):
        url, asked = service(first, (200, fine))
        assert remote(url, retries=1) == RunResult(3, "out", "") and len(asked) == 2
        with pytest.raises(SandboxError, match="after 1 tries"):
            remote(service(first)[0], retries=0)
    for answer, words in (((400, "no"), "HTTP 400"), ((200, {}), "the reply does not fit"), ((200, []), "the reply does not fit"),
                          ((200, fine | {"exit": None}), "exit None"), ((200, fine | {"exit": "0"}), "exit '0'"),
                          ((200, fine | {"stdout": 3}), "text expected"), ((200, {"error": "no room"}), "no room")):
        url, asked = service(answer)
        with pytest.raises(SandboxError, match=words):
            remote(url, retries=3)
        assert len(asked) == 1
    with pytest.raises(SandboxError, match="refused: check that the service runs"):
        remote("http://127.0.0.1:9", retries=1)
    assert remote(service((200, fine))[0], output_bytes=2).limit == "output_bytes"


def test_sandboxfusion_is_spoken_to_in_its_words(service, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda s: None)

    def fusion(verdict_, **result):
        return 200, {"status": verdict_, "message": "m", "run_result": result or None, "compile_result": None, "files": {}}

    finished = dict(status="Finished", execution_time=0.1, stdout="o", stderr="e")
    url, asked = service(fusion("Failed", **finished, return_code=2))
    ran = remote(url, ("python", "-c", "print('a b')"), "in", {"f.py": "data"}, api="fusion", seconds=7.0, memory_mb=99)
    (path, _, body), = asked
    assert ran == RunResult(2, "o", "e") and path == "/run_code"
    assert body | {"compile_timeout": 0} == {
        "language": "bash", "code": "python3 -c 'print('\"'\"'a b'\"'\"')'", "stdin": "in", "fetch_files": [], "compile_timeout": 0,
        "files": {"f.py": base64.b64encode(b"data").decode()}, "run_timeout": 7.0, "memory_limit_MB": 99}
    late = fusion("Failed", **finished | {"status": "TimeLimitExceeded"}, return_code=None)
    assert remote(service(late)[0], api="fusion") == RunResult(None, "o", "e", "seconds")
    url, asked = service(fusion("SandboxError"), fusion("Success", **finished, return_code=0))
    assert remote(url, api="fusion", retries=1).exit == 0 and len(asked) == 2
    with pytest.raises(SandboxError, match="SandboxFusion reports SandboxError: m"):
        remote(service(fusion("SandboxError"))[0], api="fusion", retries=0)


# -- unit tests of programs ----------------------------------------------------------------------------------------------

PLAIN = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
                     lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers()),
                     max_leaves=8)


@pytest.mark.full
@settings(deadline=None, max_examples=30)
@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


def test_what_is_no_plain_data_is_not_carried():
    class AllEqual(int):
        def __eq__(self, other):
            return True

    assert decode(encode(AllEqual(3))) != 4 and type(decode(encode(AllEqual(3)))) is int
    deep = []
    for _ in range(100):
        deep = [deep]
    for value in (object(), lambda: 0, iter([]), AllEqual, deep):
        with pytest.raises(Opaque):
            encode(value)


ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(add(1, 1), 1) == 3"]
CALLS = {"inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"], "fn_name": "add"}
LINES = {"inputs": ["1 2", "3\n4\n"], "outputs": ["3\n", "7"]}
SUM = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
CHEATS = {
    "says that all passed": "print('all tests passed')\nprint('OK')",
    "leaves early": "import os, sys\nprint('3')\nsys.stdout.flush()\nos._exit(0)",
    "leaves with success": "import sys\nprint('passed')\nsys.exit(0)",
    "is equal to everything": "class E:\n    def __eq__(s, o): return True\n    __hash__ = None\ndef add(a, b): return E()",
    "patches what compares": "import builtins, json, ast\nbuiltins.AssertionError = SystemExit\nbuiltins.all = lambda x: True\n"
                             "json.dumps = lambda *a, **k: '[0, \"value\", true]'\nbuiltins.isinstance = lambda *a: True\ndef add(a, b): return True",
    "says what the judge says": "import sys, os\nnonce = sys._getframe(1).f_locals['told']['nonce']\n"
                                "said = nonce + ' {\"verdicts\": [true, true, true], \"asked\": []}\\n'\n"
                                "for fd in range(1, 9):\n    try: os.write(fd, said.encode())\n"
                                "    except OSError: pass\nos._exit(0)",
    "looks for what is expected": "import sys, gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'told' in o]\n"
                                  "def add(a, b):\n    told = sys._getframe(2).f_locals['told']\n"
                                  "    return told.get('outputs', told.get('tests', told.get('wanted')))",
    "raises what ends tests": "def add(a, b): raise SystemExit(0)",
    "raises what counts as passed": "import unittest\ndef add(a, b): raise unittest.SkipTest('skipped')",
    "writes the reports of test tools": "open('report.xml', 'w').write('<testsuite failures=\"0\"/>')\n"
                                          "import atexit, os\natexit.register(os._exit, 0)",
}


@pytest.mark.full
def test_a_program_that_does_what_is_asked_passes(limits_alone):
    assert grade(ADD, ASSERTS).passed == [True] * 3
    assert grade(ADD, json.dumps(CALLS)).passed == grade(SUM, LINES).passed == [True] * 2
    assert grade(f"class Solution:\n    @staticmethod\n    {ADD.replace(chr(10), chr(10) + '    ')}", CALLS).passed == [True] * 2
    check_ = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-9\n"
    assert grade(ADD, check_, "add").passed == [True] and grade(ADD.replace("+", "-"), check_, "add").passed == [False]
    raises = "try:\n    add(1, 'x')\n    found = False\nexcept TypeError:\n    found = True\nassert found"
    assert grade(ADD, raises).passed == [True] and grade("def add(a, b): return 3", raises).passed == [False]


@pytest.mark.full
@pytest.mark.parametrize("tests", [ASSERTS, CALLS, LINES], ids=["asserts", "calls", "lines"])
def test_no_cheat_scores(limits_alone, tests):
    for name, program in CHEATS.items():
        found = grade(program, tests).passed
        assert found[1:] == [False] * (len(found) - 1), name
        assert found[0] is False or name == "leaves early", name  # it printed one right answer, by luck


@pytest.mark.slow
def test_a_part_of_the_tests(limits_alone):
    half = "def add(a, b):\n    if isinstance(a, str): raise ValueError\n    return a + b"
    assert grade(half, ASSERTS).passed == [True, False, True] and grade(half, CALLS).passed == [True, False]
    assert grade("def add(a, b): return iter([a, b])", CALLS).opaque == 2
    slow = "def add(a, b):\n    while isinstance(a, str): pass\n    return a + b"
    limits_alone(cpu_seconds=1.0)
    found = grade(slow, CALLS)
    assert found.passed == [True, False] and found.limit == "cpu_seconds"
    limits_alone(seconds=0.5)
    loops = grade("while True: pass", LINES)  # all runs of a program together have these seconds
    assert loops.passed == [False, False] and loops.limit == "seconds"
    assert grade("syntax error", CALLS).passed == [False, False] and grade("", ASSERTS).passed == [False] * 3


@pytest.mark.parametrize("tests, words", [
    ([], "has no tests"), ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"), ("x = (", "not valid Python"), (3, "type int"),
    ([{"input": 1}], "neither asserts nor"), ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "arguments of f must be a list"),
    ("def check(candidate): pass", "entry_point"), ("x = 1", "has no tests"), ('{"a": 1}', "neither asserts nor"),
    ({"inputs": ["1"]}, "outputs=None: write a list"), ('{"inputs": null, "outputs": []}', "inputs=None: write a list"),
    ({"inputs": "12", "outputs": "34"}, "inputs=12: write a list"), ({"inputs": ["1"], "outputs": [None]}, "a null among"),
    ([{"input": None, "output": "1"}], "a null among"), ({"inputs": [[1]], "outputs": [1], "fn_name": 5}, "fn_name=5: write")])
def test_tests_that_cannot_be_read_are_no_score(tests, words):
    with pytest.raises(ValueError, match=words):
        parse(tests)


@pytest.mark.full
@pytest.mark.parametrize("tests, words", [
    ("assert add(len.__class__ and (lambda: 0), 1) == 3", "called with a value of type function"),
    ("import os\nassert os._exit(7)", "status 7"),
    ("import no_such_module\nassert add(1, 2) == 3", "no_such_module"),
    (["assert add(1, 2) == 3", "assert 1 == 2"], "AssertionError in assert 1 == 2"),
    ("while True: pass\nassert add(1, 2) == 3", "limit cpu_seconds before they used a value"),
    ("assert all(1 for _ in range(10**12)) and add(1, 2) == 3", "limit cpu_seconds before they used a value")])
def test_tests_that_fail_by_themselves_are_no_score(limits_alone, tests, words):
    limits_alone(seconds=300.0, cpu_seconds=1.0, memory_mb=300)
    with pytest.raises((SandboxError, ValueError), match=words):
        grade(ADD, tests)


USES = {  # asserts that do with a value of the program what takes for ever, ends the judge, or cannot be passed on
    "range": "assert sum(1 for _ in range(add(1, 2))) == 3",
    "power": "assert 7 ** add(1, 2) == 343",
    "memory": "assert len('x' * add(1, 2) * 10**9) == 3",
    "end": "import os\nassert os._exit(add(1, 2)) or True",
    "argument": "assert add([[add(1, 2)]], 1) == 3",
    "rounds": "def loop(n):\n    while n != 3: n = add(1, n)\n    return n\nassert loop(0)",
    "output": "def many(n):\n    for n in range(n):\n        try: add(str(n) * 100, 0)\n        except BaseException: pass\nassert many(add(1, 2))",
}
VALUES = {"huge": "def add(a, b): return 10**11", "long": "def add(a, b): return 10**5000",
          "counts": "def add(a, b): return b - 1 if b != 'b' else b",
          "deep": "def add(a, b):\n    x = 1\n    for _ in range(58): x = [x]\n    return x"}


@pytest.mark.full
@pytest.mark.parametrize("use, value", [("range", "huge"), ("power", "long"), ("memory", "huge"), ("end", "huge"), ("argument", "deep"),
                                        ("output", "huge"), pytest.param("rounds", "counts", marks=pytest.mark.slow)])
def test_what_a_value_of_the_program_causes_is_the_programs_fault(limits_alone, use, value):
    """The test that uses it fails, and the row stays: the tests before it are passed."""
    limits_alone(seconds=300.0, cpu_seconds=1.0, memory_mb=300, output_bytes=200_000)
    assert grade(VALUES[value], ["assert add('a', 'b') is not None", USES[use]]).passed == [True, False]


@pytest.mark.slow
def test_a_program_that_writes_its_answers_itself_does_not_stop_the_grading(limits_alone):
    """It shares its process with what calls it, so an answer can have any form; numbers can be beyond floats and text."""
    for forged in ("[" * 985 + "]" * 985, '{"complex": [1]}', '{"dict": [1]}'):
        program = ("import os, sys\ndef add(a, b):\n    of = sys._getframe(2).f_locals\n"
                   f"    os.write(of['out'], (of['told']['nonce'] + ' [0, \"value\", {forged}]\\n').encode())\n    os._exit(0)")
        assert grade(program, ASSERTS[:1]).passed == [False] and grade(program, CALLS).passed == [False] * 2
    long = {"inputs": [[1, 2]], "outputs": [0.5], "fn_name": "add"}
    for value, wanted in (("10**400", 0.5), ("{10**9000: 1}", {"a": 1}), ("float('nan')", 0.5), ("{1, 2}", [1, 2])):
        assert grade(f"def add(a, b): return {value}", long | {"outputs": [wanted]}).passed == [False]
    assert grade("def add(a, b): return 10**9000", "assert add(1, 2) == 10**9000").passed == [True]


def test_a_round_asks_for_the_calls_of_many_asserts(limits_alone):
    """A hundred asserts of one check, random arguments among them, are two rounds."""
    checks = ("import random\ndef check(candidate):\n    for _ in range(100):\n        n = random.randint(0, 10**9)\n"
              "        assert candidate(n, 1) == n + 1\n")
    assert grade(ADD, checks, "add").passed == [True] and grade(ADD.replace("b", "1", 1), checks, "add").passed == [False]


def test_a_test_that_passed_stays_passed_when_another_hangs_later(limits_alone):
    limits_alone(cpu_seconds=1.0)
    hangs = "assert [0 for _ in range(add(add(1, 2), 1)) if [0 for _ in range(10**12)]]"
    found = grade(ADD, [hangs, "assert add(1, 2) == 3"])
    assert found.passed == [False, True] and found.limit == "cpu_seconds"


def test_exceptions_of_a_program_are_those_that_its_tests_expect(limits_alone):
    """Of every built-in class, also of those that are not made without arguments."""
    program = ("def f(kind):\n    if kind == 'group': raise ExceptionGroup('x', [ValueError()])\n"
               "    b'\\xff'.decode() if kind == 'decode' else '\\ud800'.encode() if kind == 'encode' else next(iter([]))\n")
    helper = ("def raises(f, kind, error):\n    try:\n        f(kind)\n    except error as e:\n        return type(e).__name__\n")
    tests = [f"assert raises(f, {kind!r}, {error}) == {name!r}" for kind, error, name in (
        ("decode", "ValueError", "UnicodeDecodeError"), ("encode", "UnicodeEncodeError", "UnicodeEncodeError"),
        ("group", "Exception", "ExceptionGroup"), ("next", "StopIteration", "StopIteration"))]
    assert grade(program, "\n".join([helper, *tests])).passed == [True] * 4


@pytest.mark.parametrize("source, free", [
    ("def refuses(f):\n    return not f()\nassert refuses(f)", {"f"}), ("assert [f for f in range(3)] and f(1)", {"f"}),
    ("from math import sqrt as f\ndef g(x: T = y):\n    return f(x) + h(x)\nassert g(1)", {"T", "y", "h"}),
    ("class A:\n    f = 1\n    def m(self): return f(self)\nassert A().m()", {"f"}), ("f = 2\nassert (lambda f, *g: f)(f, g)", {"g"}),
    ("def g():\n    global h\n    h = 1\nassert g() or h", set()), ("assert (n := f(1)) and n == 2\nassert n(3)", {"f", "n"}),
    ("assert all((k := n) for n in f(1)) and k", {"f"}), ("try: pass\nexcept OSError as e: e\nassert f(e)", {"f"})])
def test_what_tests_use_of_the_program_is_found_by_scopes(source, free):
    assert grading._free_names(parse(source)) == free


def test_values_are_compared_as_data():
    assert same((1, [2.0000000001, "x"]), [1, [2.0, "x"]]) and same({1: 2}, {"1": 2}) and same(2.0, 2)
    for found, wanted in ((True, 1), (1, True), ([1], [1, 2]), ("1", 1), (None, 0), (10**20 + 1, 10**20), (Opaque, None), ({}, [])):
        assert not same(found, wanted)


@pytest.mark.parametrize("text, code", [
    ("no fence", "no fence"), ("a\n```python\nx = 1\n```\nb", "x = 1\n"), ("```\na\n```\n```py\nb\n```", "b\n"),
    ("```python\nx = '```'\n```", "x = '```'\n"), ("```python\nnever closed", "never closed"), ("  ```python\n  x\n  ```", "  x\n")])
def test_the_program_is_the_last_block(text, code):
    assert code_block(text) == code


@pytest.mark.full
@pytest.mark.parametrize("code_score, scores", [
    ("all", [1.0, 0.0, 0.0]), pytest.param("fraction", [1.0, 2 / 3, 0.0], marks=pytest.mark.slow)])
def test_code_rewards(code_score, scores):
    config = default_config()
    config.reward.functions, config.reward.workers, config.reward.code_score = ("code",), 1, code_score
    config.sandbox.backend, config.sandbox.seconds, config.reward.timeout_seconds = "rlimits", 150.0, 600.0
    half = "```python\ndef add(a, b):\n    return a + b if a != 'a' else ''\n```"
    items = [RewardItem("q", f"```python\n{ADD}```", {"tests": ASSERTS}), RewardItem("q", half, {"answer": json.dumps(ASSERTS)}),
             RewardItem("q", "print('all tests passed')", {"tests": ASSERTS}), RewardItem("q", ADD, {"tests": None})]
    with RewardPool(config) as pool:
        result = pool.score(items)
        broken = pool.score([RewardItem("q", ADD, {"tests": "assert ("})], part=True)
    assert result.parts["code"][:3].tolist() == pytest.approx(scores) and [o["code"] for o in result.outcomes] == ["ok"] * 3 + ["none"]
    assert "not valid Python" in broken.outcomes[0]["code"]  # the row's fault: absent, not 0


def test_rewards_and_environments_have_the_configs_sandbox(tmp_path, monkeypatch):
    (tmp_path / "uses.py").write_text(
        "import os\nfrom jaxrl import sandbox\n"
        "async def plays(task, chat):\n    await chat.send('go')\n    ran = await sandbox.run_async(['echo', 'x' * 50])\n"
        "    return {'env': float(ran.limit == 'output_bytes'), 'key': float('KEY_OF_TEST' in os.environ)}\n")
    monkeypatch.setenv("KEY_OF_TEST", "x")
    options = default_config().sandbox
    options.backend, options.output_bytes, options.key_env = "rlimits", 20, "KEY_OF_TEST"
    with env_cases.pool(f"{tmp_path}/uses.py:plays", workers=1, sandbox=options) as pool:
        ends, _ = env_cases.play(pool, {"a": {}})
    assert ends["a"].kind == "done" and ends["a"].data["value"] == ends["a"].data["rewards"]["key"] == 1.0


def test_a_repair_is_scored_by_its_tests(tmp_path):
    """Also what was never in the demonstrations: the sandbox runs it."""
    options = default_config().sandbox
    options.backend, options.seconds = "rlimits", 150.0
    row = {"source": "def add(x,y):\n return x*y", "tests": {"inputs": [[2, 2], [3, 4]], "outputs": [4, 7], "fn_name": "add"}}
    said = {"right": ["x+y"], "second": ["x*y", "sum((x, y))"], "wrong": ["x-y", "x*y"], "sly": ["__import__('os')._exit(0)", "x +"]}
    with env_cases.pool("repair", workers=1, max_turns=2, sandbox=options) as pool:
        ends, sent = env_cases.play(pool, dict.fromkeys(said, row), lambda id, k, _: env_cases.turn(said[id][k]))
    assert {id: event.data["reward"] for id, event in ends.items()} == {"right": 1.0, "second": 1.0, "wrong": 0.0, "sly": 0.0}
    assert env_cases.texts(sent["second"]) == [row["source"], "add(3,4) is 7"] and env_cases.texts(sent["wrong"])[1] == "add(2,2) is 4"


def test_a_repair_shows_tests_of_any_form_that_calls_a_function(monkeypatch):
    repair = builtin.Repair()
    for tests in (["assert add(1, 2) == 3"], {"inputs": ["1"], "outputs": ["1"]}, {"inputs": [[1]]}):
        with pytest.raises(ValueError, match="write (inputs|a list)"):
            repair.reset({"source": "", "tests": tests}, 0)
    tests = [{"input": [1, 2], "output": 3, "fn_name": "add"}]
    monkeypatch.setattr(builtin, "first_failing_test", lambda *_: 0)
    for form in (tests, json.dumps(tests)):
        repair.reset({"source": "", "tests": form}, 0)
        assert repair.step("x").observation.text == "add(1,2) is 3"


# -- the options ---------------------------------------------------------------------------------------------------------

def test_the_defaults_of_the_package_are_the_configs():
    known = {**vars(Limits()), **vars(sandbox_types.Settings())}
    assert known == {name: option.default for name, option in SCHEMA["sandbox"].items()}


@pytest.mark.parametrize("changes, words", [
    ({"sandbox.backend": "remote"}, "needs the service's address"), ({"sandbox.backend": "remote", "sandbox.url": "host:1"}, "http://"),
    ({"sandbox.url": "http://h"}, "no effect with sandbox.backend=bwrap"),
    ({"sandbox.backend": "rlimits", "sandbox.paths": ("/usr",)}, "no effect with sandbox.backend=rlimits"),
    ({"sandbox.backend": "remote", "sandbox.url": "http://h", "sandbox.api": "fusion", "sandbox.processes": 9}, "sandbox.api=fusion"),
    ({"sandbox.paths": ("/no/such",)}, "no absolute path"),
    ({"sandbox.backend": "remote", "sandbox.url": "http://h", "sandbox.key_env": "sk-123"}, "name only"),
    ({"sandbox.backend": "docker"}, "choose one of bwrap"), ({"sandbox.memory_mb": 0}, "must be above 0"),
    ({"reward.functions": ("code",), "sandbox.seconds": 6.0}, "may take twice sandbox.seconds=6")])
def test_options_that_cannot_be_are_told(changes, words):
    config = default_config()
    config.model.path, config.data.path = "x", ("x",)
    for name, value in changes.items():
        group, _, option = name.partition(".")
        config[group][option] = value
    with pytest.raises(ConfigError) as e:
        check(config)
    assert words in str(e.value) and "sk-123" not in str(e.value)


def test_an_answer_over_http_is_of_the_server_asked_in_time_and_of_a_size():
    """A redirect is an error and its target is never asked; a body that drips or does not end is given up."""
    import http.server
    import threading
    import urllib.error
    import urllib.request

    from jaxrl.processes import http_client

    asked, stop = [], threading.Event()

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            if self.path == "/head":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while self.path == "/head" and not stop.wait(0.01):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
            self.send_response(302 if self.path == "/elsewhere" else 200)
            if self.path == "/elsewhere":
                self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/taken")
            if self.path == "/short":
                self.send_header("Content-Length", "20")
            self.end_headers()
            while self.path in ("/drips", "/long") and not stop.wait(0.01 if self.path == "/drips" else 0):
                try:
                    self.wfile.write(b" " if self.path == "/drips" else b" " * 65536)
                    self.wfile.flush()
                except OSError:
                    return
            if self.path in ("/taken", "/short"):
                self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = lambda path: urllib.request.Request(f"http://127.0.0.1:{server.server_port}/{path}", headers={"Authorization": "key"})  # noqa: E731
    try:
        with pytest.raises(urllib.error.HTTPError, match="302"):
            http_client.fetch(url("elsewhere"), 60.0)
        assert asked == [("/elsewhere", "key")] and http_client.fetch(url("taken"), 60.0) == b"{}"
        for path in ("drips", "head"):
            with pytest.raises(TimeoutError, match="no complete reply within 0.5 s"):
                http_client.fetch(url(path), 0.5)
        with pytest.raises(ValueError, match="a reply of more than 100000 bytes"):
            http_client.fetch(url("long"), 60.0, 100_000)
        with pytest.raises(http.client.IncompleteRead, match="2 bytes read, 18 more expected"):
            http_client.fetch(url("short"), 60.0)
        near, far = socket.socketpair()
        with near, far:  # a read waits for what is left of the time
            reader = http_client._TimedReader(near.makefile("rb", 0), near, time.monotonic() + 1.0)
            far.send(b"x")
            assert reader.readinto(bytearray(9)) == 1 and near.gettimeout() < 1.0
            with pytest.raises(TimeoutError):
                reader.readinto(bytearray(9))
    finally:
        stop.set()
        server.shutdown()
