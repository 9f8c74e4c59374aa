"""Planned faults and polite stops, with real signals in real processes."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl.errors import ConfigError
from jaxrl.processes.faults import ACTIONS, POINTS, FaultError, Faults, GracefulStop, InterruptedAtStart, parse_plan


def test_an_entry_is_read_with_its_defaults():
    fault, = parse_plan(["checkpoint.kill9@step=6"])
    assert (fault.component, fault.action, fault.step, fault.phase) == ("checkpoint", "kill9", 6, "before")
    fault, = parse_plan(["update.sleep@step=2,seconds=0.25"])
    assert (fault.step, fault.phase, fault.seconds) == (2, "", 0.25)


def test_commas_split_by_the_command_line_are_put_together():
    joined = parse_plan(["checkpoint.kill9@step=6,phase=commit", "rollout.term@step=1"])
    split = parse_plan(["checkpoint.kill9@step=6", "phase=commit", "rollout.term@step=1"])
    assert split == joined and len(joined) == 2


@pytest.mark.parametrize("entry, named", [
    ("engine.kill9@step=1", list(POINTS)),
    ("rollout.explode@step=1", list(ACTIONS)),
    ("checkpoint.kill9@step=1,phase=middle", list(POINTS["checkpoint"])),
    ("rollout.kill9@step=1,phase=before", ["step="]),
    ("rollout.kill9@phase=1", ["step="]),
    ("checkpoint.kill9@phase=commit", ["step=N"]),
    ("rollout.kill9@step=soon", ["soon"]),
    ("rollout.kill9", ["component.action@step=N"]),
])
def test_a_wrong_entry_is_refused_with_the_known_names(entry, named):
    with pytest.raises(ConfigError) as e:
        Faults([entry])
    assert entry.split(",")[0] in str(e.value)
    assert all(name in str(e.value) for name in named)


def test_a_fault_acts_once_at_its_own_point():
    faults = Faults(["reward.raise@step=3", "checkpoint.enospc@step=3,phase=tensors",
                     "update.sleep@step=1,seconds=0.2"])
    faults.fire("reward", 2)
    faults.fire("checkpoint", 3, "commit")
    with pytest.raises(FaultError, match="reward.raise@step=3"):
        faults.fire("reward", 3)
    faults.fire("reward", 3)
    with pytest.raises(OSError) as e:
        faults.fire("checkpoint", 3, "tensors")
    assert e.value.errno == errno.ENOSPC
    begin = time.monotonic()
    faults.fire("update", 1)
    assert time.monotonic() - begin >= 0.2


def test_code_may_fire_only_listed_points():
    with pytest.raises(KeyError):
        Faults().fire("rollout2", 1)
    with pytest.raises(KeyError):
        Faults().fire("checkpoint", 1, "middle")


def run(code: str):
    """The code as a process that ignores no signal, whatever these tests were started with (nohup)."""
    heard = f"import signal\nfor s in {[*map(int, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))]}: signal.signal(s, signal.SIG_DFL)\n"
    heard += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen([sys.executable, "-c", heard + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def busy(process) -> int:
    """Ticks of the clock (a hundredth of a second each) for which a process has worked."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def test_kill9_leaves_no_chance_and_term_is_polite():
    code = """
import atexit
atexit.register(lambda: print("cleaned up", flush=True))
from jaxrl.processes.faults import Faults, GracefulStop
with GracefulStop() as stop:
    faults = Faults(["rollout.term@step=1", "rollout.kill9@step=2"])
    faults.fire("rollout", 1)
    print(stop.requested, stop.reason, flush=True)
    faults.fire("rollout", 2)
    print("alive", flush=True)
"""
    process = run(code)
    out, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert out.split("\n")[:-1] == ["True SIGTERM"]
    assert "saving, then exiting" in err


WAITER = """
import sys, time
from jaxrl.processes.faults import GracefulStop
with GracefulStop() as stop:
    print("ready", flush=True)
    stop.wait(60)
    print(stop.reason, flush=True)
    {after}
print("left", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_sets_the_flag_and_the_run_leaves_by_itself(name):
    process = run(WAITER.format(after="pass"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=300)
    assert (out, process.returncode) == (f"{name}\nleft\n", 0)
    assert ("Ctrl-C again" in err) == (name == "SIGINT")


def test_a_second_ctrl_c_ends_the_process_even_inside_compiled_code():
    # This hash takes hours and never returns to the interpreter, like a compiled step.
    hashing = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1)"
    process = run(WAITER.format(after=hashing))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # schedulers repeat theirs: no reason to lose the checkpoint
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Ctrl-C again: exited at once; no checkpoint was written" in err


@pytest.mark.parametrize("code", [
    pytest.param("import time; time.sleep(600)", id="interpreted"),
    pytest.param("import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1)", id="compiled", marks=pytest.mark.full)])
def test_a_signal_while_a_run_starts_ends_it_at_once(code):
    process = run(f"""
import sys
from jaxrl.processes.faults import GracefulStop, InterruptedAtStart
try:
    with GracefulStop(starting=True):
        print("ready", flush=True)
        {code}
except InterruptedAtStart as e:
    print(e, "raised", file=sys.stderr)
    sys.exit(128 + e.number)
""")
    assert process.stdout.readline() == "ready\n"
    begun = busy(process)
    while "sleep" not in code and busy(process) < begun + 20:  # until it is in the compiled code, where it works
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert ("SIGTERM raised" if "sleep" in code else "SIGTERM while the run starts: exited at once") in err


def test_a_signal_that_was_lost_while_a_run_started_counts_when_it_has():
    with GracefulStop(starting=True) as stop:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.wait(60)
        except InterruptedAtStart:
            pass  # as in a callback of the garbage collector
        with pytest.raises(InterruptedAtStart):
            stop.started()


def test_nohup_stays_nohup():
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + WAITER.format(after="pass")
    process = run(code.replace("stop.wait(60)", "os.kill(os.getpid(), signal.SIGHUP); print(stop.wait(0.3))").replace("import sys", "import os, sys"))
    assert process.communicate(timeout=300)[0].split() == ["ready", "False", "left"]


def test_the_old_handlers_come_back_and_other_threads_work_without_them():
    before = [signal.getsignal(s) for s in GracefulStop.SIGNALS]
    with GracefulStop() as stop:
        assert [signal.getsignal(s) for s in GracefulStop.SIGNALS] != before
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.wait(60) and stop.reason == "SIGUSR1"
        stop.request("later")
        assert stop.reason == "SIGUSR1"
    assert [signal.getsignal(s) for s in GracefulStop.SIGNALS] == before

    reasons = []

    def elsewhere():
        with GracefulStop() as stop:
            stop.request("time limit")
            reasons.append(stop.reason)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert reasons == ["time limit"]


@pytest.mark.parametrize("reader", ["gone", "asleep", "there"])
def test_a_time_limit_ends_a_process_whatever_reads_its_errors(reader):
    """A reader that has gone made the last line an error, before the exit; one that sleeps would block it."""
    code = ("import os, time\nfrom jaxrl.processes import deadline\nos.set_blocking(2, False)\n"
            "try:\n    while SLEEPS:\n        os.write(2, b'x' * 65536)\nexcept BlockingIOError:\n    os.set_blocking(2, True)\n"
            "deadline.PRINT_SECONDS = 0.2\nwith deadline.time_limit(0.2, 'the disk hangs'):\n    time.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-c", code.replace("SLEEPS", str(reader == "asleep"))], stderr=subprocess.PIPE)
    if reader == "gone":
        process.stderr.close()
    try:
        assert process.wait(timeout=30) == 1
        assert reader != "there" or process.stderr.read() == b"\njaxrl: the disk hangs\n"
    finally:
        process.kill()
