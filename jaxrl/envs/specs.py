"""What a config names as an episode, as workers load it: checked as far as that goes without importing it."""

from __future__ import annotations

import difflib
import inspect
import os
import shlex
import shutil
from urllib.parse import urlsplit

from jaxrl.errors import ConfigError
from jaxrl.workers.handing import FunctionFolder, check_place, file_spec, function_spec

BUILTIN = ("calc", "guess", "library", "lake", "repair")  # of jaxrl.envs.builtin


SERVICES = "openenv"  # of env.servers


def plain(options) -> dict:
    """A ConfigDict as a dict."""
    return options.to_dict() if hasattr(options, "to_dict") else dict(options)


def interpreter(python: str) -> str:
    if python and shutil.which(python) is None and not os.path.isfile(python):
        raise ConfigError(f"env.python={python!r}: there is no such program; name the interpreter of the environment in"
                          " which the environments' packages are, /path/venv/bin/python")
    return python


def specs(env, folder: FunctionFolder) -> dict:
    """What an episode is, as a worker's setup has it: `function`, `tools`, `program` (its words), `mcp`, `servers`,
    `score`, `train_calls`; files in them by absolute paths. Raises ConfigError."""
    given = {"env.function": env.function, "env.program": env.program, "env.tools": len(env.tools) + len(env.mcp)}
    named = [name for name, value in given.items() if value]
    if len(named) > 1:
        shown = {"env.function": _shown(env.function), "env.program": repr(env.program),
                 "env.tools": f"{tuple(map(_shown, env.tools))}"}
        raise ConfigError(f"{' and '.join(f'{name}={shown[name]}' for name in named)}: an"
                          " episode is either; give the tools to chat.send(tools=[...]) of your function, or leave"
                          " env.function empty")
    if not named:
        raise ConfigError("env.function, env.program, env.tools and env.mcp are empty: name one of them")
    tools = [_spec("env.tools", tool, folder) for tool in env.tools]
    for tool in tools:
        if tools.count(tool) > 1:
            raise ConfigError(f"env.tools names {tool} twice; leave one away")
    return {"function": _function(env.function, folder) if env.function else "", "tools": tools,
            "program": words("env.program", env.program), "mcp": [_server(one) for one in env.mcp],
            "servers": list(map(_address, env.servers)), "score": env.score and _spec("env.score", env.score, folder),
            "train_calls": env.train_calls and _spec("env.train_calls", env.train_calls, folder)}


def names(what: dict) -> dict:
    """The same without the folders of files: equal on all machines."""
    def short(value):
        return [short(v) for v in value] if isinstance(value, list) else value.rpartition("/")[2]
    return {key: short(value) for key, value in what.items()}


def _server(given: str) -> str:
    return given if given.startswith(("http://", "https://")) else shlex.join(words("env.mcp", given))


def _address(given: str) -> str:
    url = urlsplit(given)
    if url.scheme not in ("http", "https", "ws", "wss") or not url.hostname:
        raise ConfigError(f"env.servers: {given!r} is no address; write http://host:8000")
    return given


def words(field: str, program: str) -> list[str]:
    """A command line's words, no shell's; those that are files here by absolute paths, because a program runs in a
    folder of its own. Raises ConfigError."""
    try:
        found = shlex.split(program)
    except ValueError as e:
        raise ConfigError(f"{field}={program!r}: {e}") from None
    return [os.path.abspath(word) if os.path.isfile(word) else word for word in found]


def _function(given, folder: FunctionFolder) -> str:
    if isinstance(given, str):
        if given == SERVICES:
            return given
        if given in BUILTIN:
            return f"jaxrl.envs.builtin:{given}"
        kind, _, name = given.partition(":")
        if kind in ("gym", "textarena"):
            if not name:
                raise ConfigError(f"env.function={given!r}: name an environment, as in gym:FrozenLake-v1 or "
                                  "textarena:GuessTheNumber-v0")
            return given
        if ":" not in given and not given.endswith(".py"):
            near = difflib.get_close_matches(given, (*BUILTIN, SERVICES), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"env.function={given!r}: there is no environment of this name; {hint}known: "
                              f"{', '.join(BUILTIN)}, {SERVICES}; own ones as package.module:name or ./file.py:name")
    return _spec("env.function", given, folder)


def _spec(field: str, given, folder: FunctionFolder) -> str:
    if isinstance(given, str):
        if ":" not in given:
            raise ConfigError(f"{field}: {given!r} names no function; write {given}:function")
        spec = file_spec(given)
        check_place(field, spec)
        return spec
    if inspect.isclass(given) and given.__module__ != "__main__":
        return f"{given.__module__}:{given.__qualname__}"
    if not inspect.isfunction(given):
        raise ConfigError(f"{field}={_shown(given)}: pass a plain function (def ...) or 'package.module:name'; a class"
                          " that is defined in a notebook goes into a file")
    return function_spec(given, folder, field, annotations=True)


def _shown(given) -> str:
    return repr(given) if isinstance(given, str) else getattr(given, "__name__", repr(given)[:80])
