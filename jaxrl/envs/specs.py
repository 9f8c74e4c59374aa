"""Parent side: what a config names as an episode, in the form workers load, checked as far as
possible without importing it.
"""

from __future__ import annotations

import difflib
import inspect
import os
import shlex
import shutil
from urllib.parse import urlsplit

from jaxrl.errors import ConfigError
from jaxrl.workers.handing import FunctionFolder, check_place, file_spec, function_spec

BUILTIN = ("calc", "guess", "library", "lake", "repair", "lake_pixels", "spot")  # of jaxrl.envs.builtin


SERVICES = "openenv"  # kinds served by env.servers


def as_dict(options) -> dict:
    """Returns a ConfigDict or mapping as a dict."""
    return options.to_dict() if hasattr(options, "to_dict") else dict(options)


def check_interpreter(python: str) -> str:
    """Returns env.python; "" (this interpreter) as it is. Raises ConfigError if there is no such program."""
    if python and shutil.which(python) is None and not os.path.isfile(python):
        raise ConfigError(f"env.python={python!r}: no such program; name the interpreter of the virtual environment"
                          " that has the environments' packages, /path/venv/bin/python")
    return python


def specs(env, folder: FunctionFolder) -> dict:
    """Returns the episode part of a worker's setup: `function`, `tools`, `program` (words), `mcp`, `servers`,
    `score`, `train_calls`, with absolute paths of files.

    env: the options below `env`. folder: keeps functions that are passed from Python. Raises ConfigError if none or
    several kinds of episode are named, and for a name, address or function that cannot be one."""
    kinds = {"env.function": env.function, "env.program": env.program, "env.tools": len(env.tools) + len(env.mcp)}
    named = [name for name, value in kinds.items() if value]
    if len(named) > 1:
        shown = {"env.function": _shown(env.function), "env.program": repr(env.program),
                 "env.tools": f"{tuple(map(_shown, env.tools))}"}
        raise ConfigError(f"{' and '.join(f'{name}={shown[name]}' for name in named)}: an"
                          " episode is only one of them; pass the tools to chat.send(tools=[...]) in your function, or"
                          " leave env.function empty")
    if not named:
        raise ConfigError("env.function, env.program, env.tools and env.mcp are empty: name one of them")
    tools = [_spec("env.tools", tool, folder) for tool in env.tools]
    for tool in tools:
        if tools.count(tool) > 1:
            raise ConfigError(f"env.tools names {tool} twice; remove one")
    return {"function": _function(env.function, folder) if env.function else "", "tools": tools,
            "program": command_words("env.program", env.program), "mcp": [_server(one) for one in env.mcp],
            "servers": list(map(_address, env.servers)), "score": env.score and _spec("env.score", env.score, folder),
            "train_calls": env.train_calls and _spec("env.train_calls", env.train_calls, folder)}


def without_folders(what: dict) -> dict:
    """Returns what `specs` returned with every text cut to the part behind its last "/", so that it is equal on all
    hosts: files lose their folders, URLs all but their last part."""
    def short(value):
        return [short(v) for v in value] if isinstance(value, list) else value.rpartition("/")[2]
    return {key: short(value) for key, value in what.items()}


def _server(server: str) -> str:
    return server if server.startswith(("http://", "https://")) else shlex.join(command_words("env.mcp", server))


def _address(address: str) -> str:
    url = urlsplit(address)
    if url.scheme not in ("http", "https", "ws", "wss") or not url.hostname:
        raise ConfigError(f"env.servers: {address!r} is not an address; write http://host:8000")
    return address


def command_words(field: str, program: str) -> list[str]:
    """Splits a command line into words, without a shell.

    Existing files become absolute paths, since a program runs in its own folder. Raises ConfigError for unbalanced
    quotes, naming `field`."""
    try:
        found = shlex.split(program)
    except ValueError as e:
        raise ConfigError(f"{field}={program!r}: {e}") from None
    return [os.path.abspath(word) if os.path.isfile(word) else word for word in found]


def _function(function, folder: FunctionFolder) -> str:
    if isinstance(function, str):
        if function == SERVICES:
            return function
        if function in BUILTIN:
            return f"jaxrl.envs.builtin:{function}"
        kind, _, name = function.partition(":")
        if kind in ("gym", "textarena"):
            if not name:
                raise ConfigError(f"env.function={function!r}: name an environment, as in gym:FrozenLake-v1 or "
                                  "textarena:GuessTheNumber-v0")
            return function
        if ":" not in function and not function.endswith(".py"):
            near = difflib.get_close_matches(function, (*BUILTIN, SERVICES), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"env.function={function!r}: there is no environment of this name; {hint}known: "
                              f"{', '.join(BUILTIN)}, {SERVICES}; name your own as package.module:name or "
                              "./file.py:name")
    return _spec("env.function", function, folder)


def _spec(field: str, f, folder: FunctionFolder) -> str:
    if isinstance(f, str):
        if ":" not in f:
            raise ConfigError(f"{field}: {f!r} names no function; write {f}:function")
        spec = file_spec(f)
        check_place(field, spec)
        return spec
    if inspect.isclass(f) and f.__module__ != "__main__":
        return f"{f.__module__}:{f.__qualname__}"
    if not inspect.isfunction(f):
        raise ConfigError(f"{field}={_shown(f)}: pass a plain function (def ...) or 'package.module:name'; move a"
                          " class that is defined in a notebook to a file")
    return function_spec(f, folder, field, annotations=True)


def _shown(function) -> str:
    return repr(function) if isinstance(function, str) else getattr(function, "__name__", repr(function)[:80])
