"""The pool of episodes: what comes out of it for what goes in, order of nothing but each episode's own turns."""

import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import env_cases
from helpers.env_cases import follow, play, texts, turn

from jaxrl.envs import Observation, Step, ToolError
from jaxrl.errors import ConfigError

EPISODES = textwrap.dedent('''
    import asyncio, os, random, sys, threading, time
    from jaxrl.envs import Observation, Step, ToolError

    async def echo(task, chat):
        """All that a chat can do."""
        first = await chat.send(task.prompt, stop="END", max_tokens=7)
        chat.reward(0.5)
        chat.note(length=len(first.text))
        chat.state({"b": 1, "a": [2]})
        second = await chat.send([{"role": "user", "content": first.text.upper()}, {"role": "user", "content": "?"}])
        chat.rewrite([{"role": "user", "content": "anew"}])
        third = await chat.send("more")
        chat.reward(0.25)
        chat.reward(1)
        return {"env": 2, "width": 3.5, "thoughts": len(second.thinking)}

    async def scored(task, chat):
        await chat.send("x")
        if "reward" in task.row:
            chat.reward(task.row["reward"])
        return task.row["value"]

    async def about(task, chat):
        heavy = [m for m in ("jax", "numpy", "transformers", "ml_collections", "pytest") if m in sys.modules]
        await chat.send(f"{task.row['x']} {task.prompt} {task.seed} {task.user} {heavy} {os.getpid()}")

    async def counts(task, chat):
        for k in range(task.row["turns"]):
            turn = await chat.send(str(k))
            assert turn.text == f"{task.row['name']}-{k}", turn
        return task.row["turns"]

    def plainly(task, chat, extra=0):
        """The same, blocking, with random numbers of the process."""
        drawn = []
        for k in range(task.row["turns"]):
            drawn.append(random.random())
            turn = chat.send(str(drawn))
            assert turn.text == f"{task.row['name']}-{k}", turn
        return random.random() + extra

    class Draws:
        """Draws from the process's own random numbers, and takes arguments."""
        made = 0

        def __init__(self, top=10, floor=0):
            Draws.made += 1
            self.top, self.floor, self.closed = top, floor, False

        def reset(self, row, seed):
            self.log = [random.randint(self.floor, self.top)]
            return Observation(f"{self.log} {seed}", state=str(self.log))

        def step(self, action):
            self.log.append(random.randint(self.floor, self.top))
            return Step(f"{action} {action.turn.thinking} {self.log}", len(self.log), len(self.log) > 3, {"made": self.made})

        def close(self):
            print("closed", self.log)

    class Slow(Draws):
        async def reset(self, row, seed):
            await asyncio.sleep(0.01)
            self.log = []
            return "begin"

        async def step(self, action):
            await asyncio.sleep(0.01)
            return Step([{"role": "user", "content": "go on"}], 0.5)

    def made(kind):
        return {"slow": Slow, "draws": Draws}[kind]()

    inside, meeting = [], threading.Barrier(4)

    class Sleeps:
        """Of four, all beside each other or one at a time; 100 s pass on the worker's clock."""
        def reset(self, row, seed):
            inside.append(1)
            if row["beside"]:
                meeting.wait(300)
            else:
                now = time.monotonic
                time.monotonic = lambda: now() + 100
            most = len(inside)
            inside.pop()
            return str(most)

        def step(self, action):
            return Step("", 1.0, True)

    class InNumpy:
        def reset(self, row, seed):
            import numpy
            return f"{numpy.random.random()}"

        def step(self, action):
            import numpy
            return Step(f"{numpy.random.random()}", 0.0)
''')


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("episodes") / "my_episodes.py"
    path.write_text(EPISODES)
    return path


@pytest.fixture(scope="module")
def pool(source):
    """pool('name', option=value): over what the file defines; one pool for equal arguments, closed at the end."""
    made = {}

    def make(name, **changes):
        key = json.dumps([name, changes], sort_keys=True)
        if key not in made:
            made[key] = env_cases.pool(f"{source}:{name}", **changes)
        return made[key]

    yield make
    for p in made.values():
        p.close()


def test_what_a_chat_says_is_what_the_engine_hears(pool):
    replies = [turn("abc"), turn("d", thinking="hm!"), turn("")]
    ends, said = play(pool("echo"), {"e": {"prompt": [{"role": "system", "content": "s"}]}}, lambda id, k, data: replies[k])
    first, second, third = said["e"]
    for data in said["e"]:
        assert 0 <= data.pop("seconds") < 1
    blank = {"rewrite": False, "tools": None, "stop": [], "max_tokens": 0, "reward": 0.0, "anchor": "",
             "train": True, "notes": {}, "counts": {"calls": 0, "malformed": 0}}
    user = lambda text: {"role": "user", "content": text}  # noqa: E731
    assert first == blank | {"messages": [{"role": "system", "content": "s"}], "stop": ["END"], "max_tokens": 7}
    assert second == blank | {"messages": [user("ABC"), user("?")], "reward": 0.5, "anchor": '{"a": [2], "b": 1}',
                              "notes": {"length": 3.0}}
    assert third == blank | {"notes": {"length": 3.0}, "messages": [user("anew"), user("more")], "rewrite": True}
    done = ends["e"].data
    assert 0 <= done.pop("seconds") < 1 and ends["e"].kind == "done"
    assert done == {"value": 2.0, "rewards": {"width": 3.5, "thoughts": 3.0}, "reward": 1.25, "rewarded": True,
                    "notes": {"length": 3.0}, "counts": {"calls": 0, "malformed": 0}}


def test_values(pool):
    rows = {"none": {"value": None}, "bool": {"value": True}, "int": {"value": 3}, "names": {"value": {"a": 1}},
            "paid": {"value": None, "reward": 0}}
    ends, _ = play(pool("scored"), rows)
    seen = {id: (e.data["value"], e.data["rewards"], e.data["rewarded"]) for id, e in ends.items()}
    assert seen == {"none": (None, {}, False), "bool": (1.0, {}, False), "int": (3.0, {}, False),
                    "names": (None, {"a": 1.0}, False), "paid": (None, {}, True)}


def test_workers_are_spawned_and_hold_nothing_heavy(source):
    with env_cases.pool(f"{source}:about", user={"bonus": 2}, workers=3) as p:
        p.ready()
        _, said = play(p, {f"e{k}": {"x": k, "prompt": "p"} for k in range(12)}, seed=lambda id: int(id[1:]))
        seen = [texts(said[f"e{k}"])[0].rsplit(" ", 1) for k in range(12)]
    assert [text for text, _ in seen] == [f"{k} p {k} {{'bonus': 2}} []" for k in range(12)]
    assert len({pid for _, pid in seen} - {str(os.getpid())}) == 3


def test_many_at_once_each_gets_its_own_turns(pool):
    """More than have a place: 300 episodes of up to 9 turns in places for 128, answered in another order."""
    rng, p = random.Random(1), pool("counts")
    rows = {f"e{k}": {"turns": rng.randint(0, 9), "name": f"e{k}"} for k in range(300)}
    held, ends, ids = [], {}, set(rows)
    for id, row in rows.items():
        p.start(id, {"row": row, "prompt": "", "seed": 0})
    deadline = time.monotonic() + 300
    while set(ends) != ids:
        assert time.monotonic() < deadline
        for event in p.events(0.05):
            if event.kind == "send":
                held.append((event.id, int(event.data["messages"][0]["content"])))
            else:
                ends[event.id] = event
        assert len({e.worker for e in p._ids.values()} - {None}) <= 2
        assert all(len(w.episodes) <= 64 for w in p._workers)
        rng.shuffle(held)
        for id, k in held:
            p.reply(id, turn(f"{id}-{k}"))
        held.clear()
    assert {id: e.data["value"] for id, e in ends.items()} == {id: row["turns"] for id, row in rows.items()}
    assert not p._ids and all(sorted(w.free) == list(range(64)) and not w.episodes for w in p._workers)


@pytest.mark.parametrize("threads", [False, True])
def test_plain_functions_block(pool, threads):
    rows = {f"e{k}": {"turns": 5, "name": f"e{k}"} for k in range(70)}
    ends, said = play(pool("plainly", threads=threads, options={"extra": 1}), rows, lambda id, k, data: turn(f"{id}-{k}"),
                      seed=lambda id: int(id[1:]))
    assert all(e.kind == "done" and len(said[id]) == 5 for id, e in ends.items())
    alone = {}
    for k in range(70):
        rng = random.Random(k)
        drawn = [rng.random() for _ in range(6)]
        alone[f"e{k}"] = drawn[5] + 1, str(drawn[:5])
    seen = {id: (e.data["value"], texts(said[id])[-1]) for id, e in ends.items()}
    assert (seen == alone) is not threads  # threads share the process's random numbers


def test_classes_step_with_random_numbers_of_their_own(pool):
    """64 at once see what each would alone, with a new object each and what env.options say."""
    p = pool("Draws", workers=1, options={"top": 10**9, "floor": 5})
    rows = {f"e{k}": {} for k in range(64)}
    ends, said = play(p, rows, lambda id, k, data: turn(f"a{k}", thinking="t"), seed=lambda id: int(id[1:]) // 2)
    for k in range(64):
        rng = random.Random(k // 2)
        log = [rng.randint(5, 10**9) for _ in range(4)]
        assert texts(said[f"e{k}"]) == [f"{log[:1]} {k // 2}", f"a0 t {log[:2]}", f"a1 t {log[:3]}"]
        assert [d["reward"] for d in said[f"e{k}"]] == [0, 2, 3] and said[f"e{k}"][0]["anchor"] == str(log[:1])
        done = ends[f"e{k}"].data
        assert (done["value"], done["reward"], done["rewarded"], done["notes"]) == (None, 4.0, True, {"made": 64.0})


def test_numpys_numbers_are_an_episodes_own_too(pool):
    _, said = play(pool("InNumpy", workers=1, max_turns=4), {f"e{k}": {} for k in range(8)}, seed=lambda id: int(id[1:]))
    _, said = play(pool("InNumpy", workers=1, max_turns=4), {f"e{k}": {} for k in range(8)}, seed=lambda id: int(id[1:]))
    for k in range(8):  # (the first that imports numpy is too late for its own first number)
        assert texts(said[f"e{k}"]) == [str(x) for x in np.random.RandomState(k).random(4)]


@pytest.mark.parametrize("changes", [{}, {"threads": True}, {"options": {"kind": "slow"}}])
def test_max_turns_and_lengths_end_a_class(pool, changes):
    """By the number of turns; by a turn that was cut, which is stepped; by one that there was no room for, which is
    not."""
    name = "made" if changes.get("options") else "Slow"
    replies = {"turns": lambda k: turn("a"), "cut": lambda k: turn("a", finish="length" if k == 1 else "stop"),
               "none": lambda k: turn("", finish="length") if k == 1 else turn("a")}
    ends, said = play(pool(name, max_turns=3, **changes), {id: {} for id in replies}, lambda id, k, data: replies[id](k))
    assert {id: len(s) for id, s in said.items()} == {"turns": 3, "cut": 2, "none": 2}
    assert {id: e.data["reward"] for id, e in ends.items()} == {"turns": 0.5, "cut": 0.5, "none": 0.0}


@pytest.mark.parametrize("threads", [True, False])
def test_threads_run_beside_each_other(pool, threads):
    ends, said = play(pool("Sleeps", workers=1, threads=threads, step_seconds=600.0), {f"e{k}": {"beside": threads} for k in range(4)})
    most = [texts(s)[0] for s in said.values()]
    assert max(most) == "4" if threads else most == ["1"] * 4
    if not threads:
        assert all(50 < e.data["seconds"] < 150 for e in ends.values()), "waiting for others is not the environment's time"


def test_a_cancelled_episode_is_heard_no_more_and_gives_its_place_back(pool):
    p = pool("counts", workers=1)
    row = {"turns": 1, "name": "x"}
    for k in range(100):
        p.start(f"e{k}", {"row": row, "prompt": "", "seed": 0})
    seen = []
    while len(seen) < 64:
        seen += p.events(1.0)
    p.cancel([f"e{k}" for k in range(99)])
    ends, said = follow(p, {"e99"}, lambda id, k, data: turn("x-0"))
    assert ends["e99"].kind == "done"
    ends, _ = play(p, {f"e{k}": row for k in range(100)}, lambda id, k, data: turn("x-0"))  # the same names again
    assert {e.kind for e in ends.values()} == {"done"}
    p.reply("e5", turn("nobody waits"))
    assert p.events(0.0) == []
    p.start("e5", {"row": row, "prompt": "", "seed": 0})
    with pytest.raises(ValueError, match="'e5' is already running"):
        p.start("e5", {"row": row, "prompt": "", "seed": 0})
    p.cancel(["e5", "never"])


def test_rows_go_over_as_json(pool):
    rows = {"e": {"value": np.float32(0.5), "reward": np.arange(3)[2], "more": np.arange(4).reshape(2, 2)}}
    ends, _ = play(pool("scored"), rows)
    assert (ends["e"].data["value"], ends["e"].data["reward"]) == (0.5, 2.0)
    with pytest.raises(ConfigError, match="cannot be passed to environments: object .*; its columns: value, odd"):
        play(pool("scored"), {"e": {"value": 1, "odd": object()}})


@pytest.mark.full
def test_a_key_says_which_code_and_options_play(source, tmp_path):
    def key(path=source, **changes):
        with env_cases.pool(f"{path}:{changes.pop('name', 'Draws')}", workers=1, **changes) as p:
            return p.key()

    first = key()
    (tmp_path / "my_episodes.py").write_text(EPISODES)
    assert key(tmp_path / "my_episodes.py") == first
    (tmp_path / "my_episodes.py").write_text(EPISODES.replace("self.top)", "self.top + 1)"))
    others = [key(tmp_path / "my_episodes.py"), key(name="Slow"), key(options={"top": 3}), key(threads=True),
              key(max_turns=9), key(step_seconds=9.0), key(user={"a": 1})]
    assert len({first, *others}) == 8 and key(memory_gb=1.0) == first


@pytest.mark.full
def test_an_interpreter_of_its_own(source, tmp_path):
    """It finds jaxrl, and nothing that is installed beside it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "mine.py").write_text(
        "import sys\nasync def where(task, chat):\n    try:\n        import jax\n    except ImportError as e:\n"
        "        await chat.send(sys.prefix + ' ' + str(e))\n")
    with env_cases.pool(f"{tmp_path}/mine.py:where", python=str(tmp_path / "venv/bin/python"), workers=1) as p:
        _, said = play(p, {"e": {}})
    assert texts(said["e"]) == [f"{tmp_path}/venv No module named 'jax'"]


@pytest.mark.full
def test_variables_go_through_by_name(source, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\nasync def sees(task, chat):\n    await chat.send(str([os.environ.get(n) "
                                      "for n in ('MY_A', 'MY_B')]))\n")
    monkeypatch.setenv("MY_A", "1")
    monkeypatch.setenv("MY_B", "2")
    with env_cases.pool(f"{tmp_path}/mine.py:sees", variables=("MY_B",), workers=1) as p:
        _, said = play(p, {"e": {}})
    assert texts(said["e"]) == ["[None, '2']"]


TOOL_CELL = """
from typing import Literal
from jaxrl.envs import ToolError
RATES = {"a": 2, "b": 3}
def convert(amount: float, unit: Literal["a", "b"]) -> float:
    '''Converts.

    Args:
        amount: how much
        unit: of what
    '''
    if amount < 0:
        raise ToolError("nothing below 0")
    return amount * RATES[unit]
"""
POOL_CELL = """
import sys
from helpers.env_cases import play, pool, texts, turn
calls = [("convert", {"amount": 2, "unit": "b"}), ("convert", {"amount": -1, "unit": "a"})]
with pool(tools=(convert,), run_dir=sys.argv[1], workers=1, max_parallel_calls=2) as p:
    print("seen", texts(play(p, {"e": {}}, lambda id, k, data: turn("", *calls[:2 - 2 * k]))[1]["e"]))
"""


@pytest.mark.full
def test_tools_of_a_notebook_cell(tmp_path):
    """The real thing: typed into IPython's shell, with what the function uses, in its annotations too."""
    code = (f"from IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
            f"shell.run_cell({TOOL_CELL!r})\nshell.run_cell({POOL_CELL!r})\n")
    path = os.pathsep.join((str(Path(__file__).parents[2]), str(Path(__file__).parents[1])))
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env={**os.environ, "PYTHONPATH": path},
                         capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "seen ['go', '6.0', 'nothing below 0']" in out.stdout, out.stdout + out.stderr
    assert [p.name.startswith("convert_") for p in (tmp_path / "run" / "env_functions").glob("*.py")] == [True]


@pytest.mark.full
def test_the_interface_imports_the_standard_library_only():
    code = ("import sys; import jaxrl.envs.pool, jaxrl.envs.worker, jaxrl.envs.adapters, jaxrl.envs.libraries; "
            "print([m for m in ('jax', 'numpy', 'transformers', 'ml_collections', 'gymnasium') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
    assert issubclass(ToolError, Exception) and Observation("x").state == "" and Step().done is False
