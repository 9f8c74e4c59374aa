"""What env.* may name wrongly: each is refused before a run, with the field, the value and the remedy. (What an environment
does wrong while it runs is in test_env_faults.py.)"""

import sys
import textwrap

import pytest
from helpers import env_cases
from helpers.tiers import first_cases

from jaxrl.envs import pool as pool_module
from jaxrl.errors import ConfigError

THINGS = textwrap.dedent('''
    def untyped(a):
        """Does it.

        Args:
            a: x
        """

    def odd(a: object):
        """Does it.

        Args:
            a: x
        """

    def many(*a: int):
        """Does it."""

    def undescribed(a: int):
        """Does it."""

    def undocumented(a: int): ...

    def strange(a: "Nowhere"):
        """Does it.

        Args:
            a: x
        """

    def fine(a: int) -> int:
        """Does it.

        Args:
            a: x
        """

    class Other:
        def fine(a: int) -> int:
            """Does it, too.

            Args:
                a: x
            """

    number = 3

    class NoStep:
        def reset(self, row, seed): return "x"

    class NoSeed:
        def reset(self, row): return "x"
        def step(self, action): ...

    class Game:
        def __init__(self, size=3): ...
        def reset(self, row, seed): return "x"
        def step(self, action): ...

    def made(size): return Game(size)
    async def episode(task, chat): ...
    async def sized(task, chat, size): ...
    async def lonely(task): ...
''')
IMPORTS = {
    "blocks": "import time\ntime.sleep(60)\n", "exits": "import os\nprint('last words', flush=True)\nos._exit(5)\n",
    "leaves": "raise SystemExit(2)\n", "broken": "def f(:\n", "lacks": "import not_a_module_at_all\n",
    "grows": "x = b'x' * (400 << 20)\nimport time\ntime.sleep(60)\n",
    "trains": "import jaxrl\njaxrl.train({})\n",
}
FINE = {"forks": "import os\nos.fork()\n", "prints": "import os\nprint('{not json}', flush=True)\nos.write(1, b'[1]\\n')\n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "things.py").write_text(THINGS)
    for name, code in (IMPORTS | FINE).items():
        (folder / f"{name}.py").write_text(code + "\n\nasync def f(task, chat):\n    await chat.send('x')\n")
    return folder


CASES = {
    "nothing named": ({}, r"env.function, env.program, env.tools and env.mcp are empty: name one of them"),
    "unknown name": ({"function": "gues"}, r"env.function='gues': there is no environment of this name; did you mean 'guess'\?"),
    "file alone": ({"function": "{}/things.py"}, r"env.function: '.*things.py' names no function; write .*things.py:function"),
    "missing file": ({"function": "./nowhere.py:f"}, r"env.function: .*nowhere.py does not exist \(asked for its function 'f'\)"),
    "odd spec": ({"function": "my module:f"}, "env.function: 'my module:f' is neither a name, nor package.module:function"),
    "no module": ({"function": "not_a_module:f"}, "env.function='not_a_module:f': importing not_a_module failed: .*No module named"),
    "no such name": ({"function": "{}/things.py:epsiode"}, "has no function 'epsiode'; it has: .*episode"),
    "a number": ({"function": "{}/things.py:number"}, "things.py:number has type int; expected a function"),
    "tool and function": ({"function": "guess", "tools": ("m:f",)}, r"env.function='guess' and env.tools=.*give the tools to chat.send"),
    "tool's name alone": ({"tools": ("f",)}, "env.tools: 'f' names no function; write f:function"),
    "tool twice": ({"tools": ("m:f", "m:f")}, "env.tools names m:f twice; leave one away"),
    "two of one name": ({"tools": ("{}/things.py:fine", "{}/things.py:Other.fine")}, "two tools have the name 'fine'; rename one of them"),
    "untyped tool": ({"tools": ("{}/things.py:untyped",)}, "env.tools: tool 'untyped': parameter 'a' has no type; write a: str, int"),
    "odd type": ({"tools": ("{}/things.py:odd",)}, "parameter 'a' is of type object, which no call can hold; use str"),
    "star": ({"tools": ("{}/things.py:many",)}, "parameter 'a' cannot be given by name; write plain parameters"),
    "undescribed": ({"tools": ("{}/things.py:undescribed",)}, "parameter 'a' is not described; add a line 'a: ...' below 'Args:'"),
    "undocumented": ({"tools": ("{}/things.py:undocumented",)}, "tool 'undocumented' has no docstring that says what it does"),
    "unknown type": ({"tools": ("{}/things.py:strange",)}, "a type of its arguments is not defined: name 'Nowhere'"),
    "tool is a class": ({"tools": ("{}/things.py:Game",)}, r"a tool is a plain function \(def ...\) or its schema, got <class"),
    "no step": ({"function": "{}/things.py:NoStep"}, r"has no method step: the class of an environment has step\(action\) -> Step"),
    "reset without seed": ({"function": "{}/things.py:NoSeed"}, r"its method is not reset\(row, seed\) -> Observation: too many positional"),
    "unknown option": ({"function": "{}/things.py:Game", "options": {"sise": 3}}, r"env.options=\{'sise': 3\} do not fit .*'sise'"),
    "missing option": ({"function": "{}/things.py:sized"}, r"env.options=\{\} do not fit .*missing a required argument: 'size'"),
    "one parameter": ({"function": "{}/things.py:lonely"}, r"the function of an episode has parameters \(task, chat\)"),
    "options no JSON holds": ({"function": "{}/things.py:Game", "options": {"size": object()}}, "workers get it as JSON.*give plain values"),
    "no interpreter": ({"function": "{}/things.py:episode", "python": "/no/python"}, "env.python='/no/python': there is no such program; name the"),
    "no Python": ({"function": "{}/things.py:episode", "python": "false"}, "it exited with status 1 while importing"),
    "gym without name": ({"function": "gym:"}, r"env.function='gym:': name an environment, as in gym:FrozenLake-v1"),
    "blocks": ({"function": "{}/blocks.py:f"}, "a worker is not ready after 1 s; what the module does when it is imported takes too long"),
    "exits": ({"function": "{}/exits.py:f"}, r"it exited with status 5 while importing (.|\n)*last words"),
    "leaves": ({"function": "{}/leaves.py:f"}, "importing .*leaves.py failed: SystemExit: 2"),
    "broken": ({"function": "{}/broken.py:f"}, "importing .*broken.py failed: SyntaxError"),
    "lacks": ({"function": "{}/lacks.py:f"}, "No module named 'not_a_module_at_all'"),
    "grows": ({"function": "{}/grows.py:f", "memory_gb": 0.3}, "it held more memory than env.memory_gb=0.3 allows while importing"),
    "trains": ({"function": "{}/trains.py:f"}, "jaxrl.train is called by a file that environment workers import"),
    "lambda": ({"tools": (lambda a: a,)}, "env.tools '<lambda>' cannot be handed to worker processes"),
    "object": ({"tools": (3,)}, r"env.tools=3: pass a plain function \(def ...\) or 'package.module:name'"),
}


@first_cases(12, "name", CASES)
def test_refused_before_a_run(name, folder, monkeypatch):
    options, text = CASES[name]
    monkeypatch.setattr(pool_module, "START_SECONDS", 1.0 if name == "blocks" else 60.0)
    filled = {key: tuple(v.replace("{}", str(folder)) if isinstance(v, str) else v for v in value) if isinstance(value, tuple)
              else value.replace("{}", str(folder)) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=text) as e:
        with env_cases.pool(**{"workers": 1} | filled) as p:
            p.ready()
    assert "env." in str(e.value)


@pytest.mark.parametrize("kind, package", [("gym:FrozenLake-v1", "gymnasium"), ("textarena:GuessTheNumber-v0", "textarena")])
def test_a_package_that_is_not_there_is_named(kind, package, tmp_path, monkeypatch):
    (tmp_path / f"{package}.py").write_text("raise ImportError('no')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match=f"{kind} needs the package {package} .*install it .*env.python"), \
            env_cases.pool(kind, workers=1) as p:
        p.ready()


@pytest.mark.parametrize("name", FINE)
def test_what_does_no_harm_at_import(name, folder):
    with env_cases.pool(f"{folder}/{name}.py:f", workers=1) as p:
        ends, _ = env_cases.play(p, {"e": {}})
    assert ends["e"].kind == "done"


def test_variables_that_are_not_set_are_said(folder, caplog):
    with env_cases.pool(f"{folder}/things.py:episode", workers=1, variables=("NOWHERE_SET",)):
        assert "env.variables names variables that are not set here: NOWHERE_SET" in caplog.text
