"""What environments and their workers do wrong, for real: each has its cause and whose fault it is, and the others go on."""

import http.server
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import env_cases
from helpers.env_cases import follow, play, texts, turn
from helpers.tiers import first_cases

from jaxrl.envs import pool as pool_module
from jaxrl.envs.worker import RemoteSeats, Seats
from jaxrl.errors import RunStopped

EPISODES = textwrap.dedent('''
    import asyncio, collections, ctypes, itertools, json, os, signal, subprocess, sys, threading, time, urllib.request
    from jaxrl.envs import Step

    def later(seconds):
        """Lets time pass for this process: no test waits for it, and none is late because the machine is slow."""
        now = time.monotonic
        time.monotonic = lambda: now() + seconds

    async def wait():
        """Waits for longer than any limit, in which time passes."""
        asyncio.get_running_loop().call_soon(later, 1000)
        await asyncio.sleep(10**6)

    def act(kind):
        """Every kind of end, in the middle of an episode."""
        if kind == "raise": raise ConnectionError("refused by 10.0.0.7")
        if kind == "exit": sys.exit(3)
        if kind == "die": os._exit(7)
        if kind == "crash": ctypes.string_at(0)
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sleep": time.sleep(60)
        if kind == "spin": collections.deque(itertools.count(), maxlen=0)  # C loop, never lets go of the interpreter
        if kind == "brief": later(700)
        if kind == "grow": held = b"x" * (400 << 20); time.sleep(60)
        if kind == "child": subprocess.run([sys.executable, "-c", "import time; x = b'x' * (400 << 20); time.sleep(60)"])
        if kind == "print": print("words from an environment", flush=True); os.write(2, b"x" * 100)
        if kind == "flood":
            for _ in range(50): sys.stdout.write("flood " * 2000 + "\\n")
        if kind == "fork": os.fork()
        if kind == "input": assert sys.stdin.read() == ""
        if kind == "nan": return float("nan")
        if kind == "list": return [1.0]
        if kind == "text": return "1.0"
        if kind == "inf": return {"env": 1.0, "depth": float("inf")}
        if kind == "stop": next(iter(()))
        if kind == "write":
            for fd in range(3, 16):
                try: os.write(fd, b"[1,\\"done\\"]\\n")
                except OSError: pass
        if kind == "close": os.closerange(3, 40)
        if kind.startswith("http"):
            with urllib.request.urlopen(kind, timeout=300) as reply:
                json.load(reply)
        return 1.0

    async def episode(task, chat):
        await chat.send("first")
        value = act(task.row["kind"])
        await chat.send("second")
        return value

    def plainly(task, chat):
        chat.send("first")
        value = act(task.row["kind"])
        chat.send("second")
        return value

    class Game:
        def reset(self, row, seed):
            self.kind = row["kind"]
            if self.kind == "reset": raise TimeoutError("no")
            return "first"

        def step(self, action):
            value = act(self.kind)
            return Step("second", value) if action == "ok" else Step(None, value, True)

        def close(self):
            if self.kind == "closing": raise OSError("no")

    async def waits(task, chat):
        kind = task.row["kind"]
        await chat.send("first")
        if kind == "wait": await wait()
        if kind == "own": await asyncio.wait_for(asyncio.sleep(10**6), 0.1)
        if kind == "often":
            for _ in range(4):
                await chat.send("more")
                asyncio.get_running_loop().call_soon(later, 400)
                for _ in range(3): await asyncio.sleep(0)
            await wait()
        if kind == "stubborn":
            while True:
                try: await wait()
                except asyncio.CancelledError: pass
        if kind == "cleanup":
            try: await wait()
            finally: print("cleaned up", flush=True)
        if kind == "task": await asyncio.gather(asyncio.sleep(0), block(task.row["mark"]))
        return 1.0

    async def block(mark):
        open(mark, "w").close()
        time.sleep(600)

    async def earns(task, chat):
        kind = task.row["kind"]
        for part in (4.0, 0.5):
            await chat.send("first")
            chat.reward(part)
        chat.reward(0.25)
        if kind == "block": await block(task.row["mark"])
        while kind == "stubborn":
            try: await wait()
            except asyncio.CancelledError: pass

    class Lagging:
        def reset(self, row, seed):
            return "first"

        def step(self, action):
            later(100)
            return Step("more", 1.0)

    async def sees(task, chat):
        if task.row.get("kind") == "model": asyncio.get_running_loop().call_soon(later, 1000)
        await chat.send(f"{os.getpid()} {os.getppid()}")
        await asyncio.sleep(0 if task.row.get("kind") != "long" else 60)
        return 1.0

    async def wrong(task, chat):
        kind = task.row["kind"]
        if kind == "reward": chat.reward(1)
        if kind == "role": await chat.send([{"content": "x"}])
        if kind == "number": await chat.send(5)
        if kind == "nothing": await chat.send([])
        if kind == "json": await chat.send([{"role": "user", "content": object()}])
        if kind == "deep":
            deep = []
            for _ in range(100_000): deep = [deep]
            await chat.send([{"role": "user", "content": deep}])
        if kind == "half": await chat.send("\\ud800")
        if kind == "two": await asyncio.gather(chat.send("a"), chat.send("b"))
        if kind == "stop": await chat.send("a", stop=[3])
        if kind == "max": await chat.send("a", max_tokens=-1)
        if kind == "tools": await chat.send("a", tools=["f"])
        if kind == "note": chat.note(depth="deep")
        if kind == "column": task.row["target"]
        if kind == "state": chat.state({1, 2})
        if kind == "huge": return 10**400
        if kind.startswith("huge "): await chat.send("a")
        if kind == "huge reward": chat.reward(-(10**400))
        if kind == "huge note": chat.note(depth=10**400)
        if kind == "large": return {"env": 1e300}
        return None

    class Types:
        def __init__(self, kind): self.kind = kind
        def reset(self, row, seed): return 3 if self.kind == "reset" else "first"
        def step(self, action):
            return {"tuple": ("a", 1.0, True), "none": Step(), "reward": Step("a", "b"), "nan": Step("a", float("nan")),
                    "huge": Step("a", 10**400),
                    "note": Step("a", 1.0, False, {"x": "y"})}[self.kind]
''')


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "my_faults.py"
    path.write_text(EPISODES)
    return path


@pytest.fixture
def pool(source):
    made = []

    def make(name, **changes):
        made.append(env_cases.pool(f"{source}:{name}", **{"step_seconds": 20.0, "workers": 1} | changes))
        made[-1].ready()
        return made[-1]

    yield make
    for p in made:
        p.close()


@pytest.fixture
def clock(monkeypatch):
    """The pool's: `clock.ahead` seconds are added to it."""
    ours = SimpleNamespace(ahead=0.0)
    ours.monotonic = lambda: time.monotonic() + ours.ahead
    monkeypatch.setattr(pool_module, "time", ours)
    return ours


def until(condition, seconds=600.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.01)


def outcomes(ends):
    """{id: "done" or (fault, cause)}."""
    return {id: e.kind if e.kind == "done" else (e.data["fault"], e.data["cause"]) for id, e in ends.items()}


def kinds(*names):
    return {name: {"kind": name} for name in names}


@pytest.mark.parametrize("name, where", [("episode", "episode"), ("plainly", "plainly"), ("Game", "step")])
@first_cases(1, "threads", [False, True])
def test_exceptions_and_values(pool, name, where, threads):
    names = ["raise", "exit", "nan", "list", "text", "inf", "stop", "fine", "print", "input", "fork"]
    ends, said = play(pool(name, threads=threads), kinds(*names), lambda id, k, data: turn("ok" if k == 0 else "end"))
    seen = outcomes(ends)
    assert {id for id, o in seen.items() if o == "done"} == {"fine", "print", "input", "fork"}
    assert seen["raise"] == ("env", f"ConnectionError in {where}") and "10.0.0.7" in ends["raise"].data["detail"]
    assert seen["exit"] == ("env", f"SystemExit in {where}")
    assert seen["stop"][1] in (f"StopIteration in {where}", f"RuntimeError in {where}")
    if name == "Game":
        assert seen["nan"][1] == "chat.reward is nan, expected a number (in making it)"
        assert seen["list"][1] == "the reward of a step is of type list, expected a number (in making it)"
    else:
        value = "the value it returned is"
        assert seen["nan"] == ("env", f"{value} nan, expected a number, a dict of numbers or None (in {where})")
        assert seen["list"] == ("env", f"{value} of type list, expected a number, a dict of numbers or None (in {where})")
        assert "of type str" in seen["text"][1]
        assert seen["inf"] == ("env", f"a value of the dict it returned is inf, expected a number (in {where})")
    assert ends["fork"].kind == "done" and len(said["fork"]) == 2  # the child has no part in it


@first_cases(2, "name, kind, cause", [
    ("episode", "die", "its worker ended: it exited with status 7"),
    ("plainly", "die", "its worker ended: it exited with status 7"),
    ("Game", "crash", "its worker ended: it was killed by SIGSEGV"),
    ("plainly", "crash", "its worker ended: it was killed by SIGSEGV"),
    ("episode", "kill", "its worker ended: it was killed by SIGKILL"),
    ("plainly", "grow", "its worker ended: it used more memory than env.memory_gb=0.3 allows"),
    ("Game", "child", "its worker ended: it used more memory than env.memory_gb=0.3 allows")])
def test_a_lost_worker_is_the_fault_of_whose_code_ran(pool, name, kind, cause):
    p = pool(name, memory_gb=0.3)
    ends, _ = lost(p, kind)
    seen = outcomes(ends)
    assert seen.pop("bad") == ("env", cause)
    assert set(seen.values()) == {("neighbour", "the worker was killed because of another episode")}
    ends, _ = play(p, {id: {"kind": "fine"} for id in ends}, lambda id, k, data: turn("ok" if k == 0 else "end"))
    assert set(outcomes(ends).values()) == {"done"}


@first_cases(1, "name", ["episode", "plainly"])
@pytest.mark.parametrize("kind, cause", [
    ("write", "instead of a reply"), ("close", "its worker ended: its streams to the trainer were closed")])
def test_streams_that_are_spoiled_are_the_fault_of_who_is_always_there(pool, name, kind, cause):
    """It shows only when the code has gone on, and others run."""
    p = pool(name)
    for _ in range(pool_module.STRIKES):
        ends, _ = lost(p, kind)
        fault, why = outcomes(ends)["bad"]
        if fault == "env":
            break
    assert fault == "env" and cause in why


def runs(p, id):
    """Whether its code is what runs in the one worker."""
    (worker,) = p._workers
    return [e.id for e in worker.running()] == [id]


def lost(p, kind, clock=None):
    """Five episodes that wait for their second turn, and then one that ends the worker. clock: an hour passes then."""
    rows = {f"n{k}": {"kind": "fine"} for k in range(5)} | {"bad": {"kind": kind}}
    for id, row in rows.items():
        p.start(id, {"row": row, "prompt": "", "seed": 0})
    first = set()
    while first != set(rows):
        first |= {e.id for e in p.events(5.0)}
    for id in rows:
        if id != "bad":
            p.reply(id, turn("ok"))
    second = set()
    while len(second) < 5:
        second |= {e.id for e in p.events(5.0)}
    p.reply("bad", turn("ok"))
    if clock:
        until(lambda: runs(p, "bad"))
        clock.ahead = 3600.0
    return follow(p, set(rows), lambda id, k, data: None)


@first_cases(2, "name, kind, threads", [
    ("episode", "sleep", False), ("episode", "spin", False), ("plainly", "sleep", False), ("plainly", "spin", True),
    ("Game", "spin", False), ("Game", "sleep", True)])
def test_what_blocks_costs_its_worker(pool, clock, name, kind, threads):
    ends, _ = lost(pool(name, threads=threads, step_seconds=600.0), kind, clock)
    seen = outcomes(ends)
    assert seen.pop("bad") == ("late", "it blocked its worker for longer than env.step_seconds=600")
    assert set(seen.values()) == {("neighbour", "the worker was killed because of another episode")}


LATE = "late", "a turn took longer than env.step_seconds=600"


@pytest.mark.parametrize("name", ["episode", "plainly", "Game"])
@first_cases(1, "threads", [False, True])
def test_what_comes_back_late_is_late(pool, name, threads):
    p = pool(name, threads=threads, step_seconds=600.0)
    for kind, outcome in (("brief", LATE), ("fine", "done")):
        ends, _ = play(p, kinds(kind), lambda id, k, data: turn("ok" if k == 0 else "end"))
        assert outcomes(ends) == {kind: outcome}


def test_what_waits_is_cancelled(pool, caplog):
    p = pool("waits", step_seconds=600.0, episode_seconds=1000.0)
    with caplog.at_level("INFO", logger="jaxrl.envs"):
        for kind, outcome in (("wait", LATE), ("cleanup", LATE), ("own", ("env", "TimeoutError in waits")), ("fine", "done"),
                              ("often", ("late", "it took longer than env.episode_seconds=1000"))):
            ends, said = play(p, kinds(kind))
            assert outcomes(ends) == {kind: outcome}
        p.close()
    assert "cleaned up" in caplog.text and len(said["often"]) == 4  # 400 s each: the third is one too many


def test_a_late_episode_keeps_the_reward_of_its_last_turn(pool, clock, tmp_path):
    """Also one whose code never ends, as env.late=truncated scores it. Where another one's code hangs there is none."""
    p, mark = pool("earns", step_seconds=600.0), tmp_path / "mark"
    ends, _ = play(p, kinds("stubborn", "fine"), lambda id, k, data: turn("ok") if id == "stubborn" or k == 0 else None)
    assert {id: event.data["reward"] for id, event in ends.items()} == {"stubborn": 0.75, "fine": 0.0}
    p.start("a", {"row": {"kind": "block", "mark": str(mark)}, "prompt": "", "seed": 0})
    while not mark.exists():
        for event in p.events(0.1):
            p.reply(event.id, turn("ok"))
    clock.ahead = 3600.0
    ends, _ = follow(p, {"a"})
    assert outcomes(ends)["a"] == ("late", "it blocked its worker for longer than env.step_seconds=600")
    assert ends["a"].data["reward"] == 0.75


def test_what_another_host_reports_of_its_seats():
    with tempfile.TemporaryFile() as file:
        file.truncate(Seats.BYTES)
        seats, here = Seats(file.fileno()), RemoteSeats()
        seats.since[3], seats.rewards[3] = time.monotonic() - 900, 0.75
        here.store(pickle.loads(pickle.dumps(seats.state())))
    assert here.rewards[3] == 0.75 and 900 < time.monotonic() - here.since[3] < 1800
    assert not any(here.rewards[:3] + here.rewards[4:] + here.since[:3] + here.since[4:])


def test_what_will_not_be_cancelled_costs_its_worker(pool):
    ends, _ = play(pool("waits", step_seconds=600.0), kinds("stubborn", "fine"),
                   lambda id, k, data: turn("ok") if id == "stubborn" else None)
    assert outcomes(ends) == {"stubborn": LATE, "fine": ("neighbour", "the worker was killed because of another episode")}


def test_a_cancelled_one_that_blocks_costs_its_worker_in_silence(pool, clock):
    p = pool("plainly", step_seconds=600.0)
    p.start("bad", {"row": {"kind": "sleep"}, "prompt": "", "seed": 0})
    while not p.events(5.0):
        pass
    p.reply("bad", turn("ok"))
    until(lambda: runs(p, "bad"))
    p.cancel(["bad"])
    p.start("next", {"row": {"kind": "fine"}, "prompt": "", "seed": 0})
    clock.ahead = 3600.0
    ends, _ = follow(p, {"next"})
    assert outcomes(ends) == {"next": ("neighbour", "the worker was killed because of another episode")}
    assert p.events(0.3) == []


def test_blocked_by_nobody_known_is_tried_again_and_then_theirs(pool, clock, tmp_path):
    """A task of its own that an episode started: the table does not know whose it is. After three tries it does."""
    p = pool("waits", step_seconds=600.0)
    for k in range(pool_module.STRIKES):
        mark = tmp_path / str(k)
        p.start("task", {"row": {"kind": "task", "mark": str(mark)}, "prompt": "", "seed": 0})
        while not p.events(5.0):
            pass
        p.reply("task", turn("ok"))
        until(lambda mark=mark: mark.exists() and not runs(p, "task"))
        clock.ahead = 3600.0
        ends, _ = follow(p, {"task"})
        clock.ahead = 0.0
        known = k == pool_module.STRIKES - 1
        assert outcomes(ends) == {"task": ("env", "its worker's event loop was blocked") if known else
                                  ("neighbour", "the worker was killed because of another episode")}


def test_waiting_for_the_model_or_for_others_is_not_the_environments_time(pool):
    """Steps of 100 s of 16 episodes, one at a time, under a limit of 500 s; and a model that takes 1000 s."""
    ends, said = play(pool("Lagging", step_seconds=500.0, max_turns=2), {f"e{k}": {} for k in range(16)})
    assert set(outcomes(ends).values()) == {"done"}
    assert all(150 < e.data["seconds"] < 350 for e in ends.values())
    ends, _ = play(pool("sees", step_seconds=600.0, episode_seconds=900.0), {"e": {"kind": "model"}})
    assert outcomes(ends) == {"e": "done"} and ends["e"].data["seconds"] < 600


def test_workers_killed_from_outside_are_started_again(pool):
    p = pool("sees", workers=2)
    pids = set()

    def model(id, k, data):
        pids.add(texts([data])[0])
        return turn("ok") if len(pids) > 2 else None

    for k in range(2):
        p.start(f"e{k}", {"row": {}, "prompt": "", "seed": 0})
    while len(pids) < 2:
        for event in p.events(5.0):
            pids.add(texts([event.data])[0])
    for pair in pids:
        os.kill(int(pair.split()[0]), signal.SIGKILL)
    ends, _ = follow(p, {"e0", "e1"}, lambda id, k, data: None)
    assert set(outcomes(ends).values()) == {("neighbour", "the worker was killed because of another episode")}
    ends, said = play(p, {f"e{k}": {} for k in range(4)})
    assert set(outcomes(ends).values()) == {"done"} and not pids & {texts(s)[0] for s in said.values()}


def test_workers_that_end_before_anything_is_said_stop_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("import asyncio, os\nasyncio.SelectorEventLoop.run_forever = lambda loop: os._exit(5)\n"
                                      "async def episode(task, chat):\n    await chat.send('x')\n")
    with env_cases.pool(f"{tmp_path}/mine.py:episode", workers=1) as p, \
            pytest.raises(RunStopped, match="die repeatedly before .*: its worker ended: it exited with status 5"):
        while True:
            p.events(1.0)


@pytest.mark.full
def test_prints_are_said_and_bounded(pool, caplog, monkeypatch):
    monkeypatch.setattr(pool_module, "PRINT_SECONDS", 0.2)
    p, sizes = pool("episode"), []
    with caplog.at_level("INFO", logger="jaxrl.envs"):
        play(p, kinds("print"))
        p.events(1.0)
        play(p, {f"e{k}": {"kind": "flood"} for k in range(64)},
             lambda id, k, data: sizes.append(os.fstat(p.printed.file.fileno()).st_size) or turn("ok"))
        p.close()
    assert caplog.text.count("printed by an environment: words from an environment") == 1
    assert re.search("more lines|MiB of printed text were dropped", caplog.text)
    assert len(caplog.text) < 200_000 and max(sizes) <= 1 << 26


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = int(self.path[1:4])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"cut": [1, 2')

    def log_message(self, *_):
        pass


def test_services_that_fail(pool):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        ends, _ = play(pool("Game", threads=True), {c: {"kind": f"{place}/{c}"} for c in ("429", "500", "200")})
        closed = f"http://127.0.0.1:{free_port()}/"
        more, _ = play(pool("Game", threads=True), {"refused": {"kind": closed}, "reset": {"kind": "reset"}, "closing": {"kind": "closing"}})
    finally:
        server.shutdown()
        server.server_close()
    assert outcomes(ends | more) == {
        "429": ("env", "HTTPError 429 in step"), "500": ("env", "HTTPError 500 in step"),
        "200": ("env", "JSONDecodeError in step"), "refused": ("env", "URLError in step"),
        "reset": ("env", "TimeoutError in reset"), "closing": ("env", "OSError in close")}


def free_port() -> int:
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


PARENT = textwrap.dedent('''
    import sys, time
    sys.path[:0] = sys.argv[2:]
    from helpers import env_cases
    pool = env_cases.pool(sys.argv[1] + ":sees", workers=1)
    pool.start("e", {"row": {"kind": "long"}, "prompt": "", "seed": 0})
    (event,) = pool.events(30.0)
    print(event.data["messages"][0]["content"], flush=True)
    pool.reply("e", env_cases.turn())
    time.sleep(600)
''')


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_workers_end_with_the_pool_and_with_a_parent_that_is_killed(pool, source):
    p = pool("sees")
    _, said = play(p, {"e": {}})
    p.close()
    assert all(gone(int(pid)) for pid in texts(said["e"])[0].split())
    with pytest.raises(RuntimeError, match="the episode pool is closed"):
        p.events(1.0)
    here = Path(__file__)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(source), str(here.parents[1]), str(here.parents[2])],
                              stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(gone, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: all(map(gone, pids)))


WRONG = {
    "reward": "chat.reward was called before the model's first turn (in wrong)",
    "role": "a message is not a dict with role and content (in wrong)",
    "number": "messages are of type int, expected text, a dict or a list of dicts (in wrong)",
    "nothing": "chat.send has no message (in wrong)",
    "json": "TypeError in wrong",
    "deep": "RecursionError in wrong",
    "two": "chat.send was called while another one is pending; a conversation has one turn at a time (in wrong)",
    "stop": "chat.send: stop must be texts (in wrong)",
    "max": "chat.send: max_tokens must be a whole number from 0 (in wrong)",
    "tools": "TypeError in wrong",
    "note": "chat.note is of type str, expected a number (in wrong)",
    "column": "the row has no column 'target'; it has: kind (in wrong)",
    "state": "TypeError in wrong",
    "huge": "the value it returned is an integer beyond the range of floats, expected a number, a dict of numbers or None (in wrong)",
    "huge reward": "chat.reward is an integer beyond the range of floats, expected a number (in wrong)",
    "huge note": "chat.note is an integer beyond the range of floats, expected a number (in wrong)",
    "large": "a value of the dict it returned is beyond 1e+15, whose square fp32 can hold: scale it (in wrong)",
}


def test_episodes_that_do_not_keep_to_the_interface(pool):
    ends, said = play(pool("wrong"), kinds(*WRONG, "half"))
    assert outcomes(ends) == {id: ("env", cause) for id, cause in WRONG.items()} | {"half": "done"}
    assert texts(said["half"]) == ["?"]


@pytest.mark.parametrize("kind, cause", [
    ("reset", "reset gave an observation of type int, expected text, messages or jaxrl.envs.Observation"),
    ("tuple", "step returned tuple, expected jaxrl.envs.Step(observation, reward, done)"),
    ("none", "step gave an observation of type NoneType, expected text, messages or jaxrl.envs.Observation"),
    ("reward", "the reward of a step is of type str, expected a number"), ("nan", "chat.reward is nan, expected a number"),
    ("huge", "chat.reward is an integer beyond the range of floats, expected a number"),
    ("note", "chat.note is of type str, expected a number")])
def test_classes_that_return_other_types(pool, kind, cause):
    ends, _ = play(pool("Types", options={"kind": kind}), {"e": {}})
    assert outcomes(ends) == {"e": ("env", f"{cause} (in making it)")}
