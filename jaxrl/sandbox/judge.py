"""Inside of a sandbox of its own: runs a row's tests, written in Python, without the program under test.

A call of one of the program's functions is looked up in a table of what the program answered; one that is not there
yet is asked for. In: {setup, tests: [source], names, table: [[name, args, kwargs, kind, value]], nonce} as JSON.
Out: a line of the nonce and {"verdicts": [true, false or null = it waits for calls], "asked": [[name, args, kwargs]]}.
"""

import builtins
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from codec import Opaque, decode, encode  # noqa: E402


class Unknown(BaseException):
    """A call whose answer is not known yet."""


class NotCarried(BaseException):
    """A call with arguments that are no plain data."""


def key(name, args, kwargs):
    return json.dumps([name, args, kwargs])


def proxy(name, table, asked):
    def call(*args, **kwargs):
        try:
            given = encode(args), encode(kwargs)
        except Opaque as e:
            raise NotCarried(f"{name} is called with a value of type {e}") from None
        known = table.get(key(name, *given))
        if known is None:
            asked.append([name, *given])
            raise Unknown
        kind, value = known
        if kind == "raised":
            error = getattr(builtins, value, Exception)
            raise error if issubclass(error, Exception) else Exception
        if kind != "value":
            raise Exception(f"{name} returned {value}")
        return decode(value)

    call.__name__ = name
    return call


def verdict(told, test, table, asked):
    before = len(asked)
    namespace = {"__name__": "tests"}
    namespace |= {name: proxy(name, table, asked) for name in told["names"]}
    try:
        exec(compile(told["setup"], "setup.py", "exec"), namespace)
        exec(compile(test, "test.py", "exec"), namespace)
        passed = True
    except Unknown:
        return None
    except (Exception, SystemExit):
        passed = False
    return passed if len(asked) == before else None  # a test that catches everything caught Unknown, too


def main():
    told = json.load(sys.stdin)
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    table = {key(name, args, kwargs): (kind, value) for name, args, kwargs, kind, value in told["table"]}
    asked = []
    try:
        found = {"verdicts": [verdict(told, test, table, asked) for test in told["tests"]], "asked": asked}
    except NotCarried as e:
        found = {"error": str(e)}
    line = f"{told['nonce']} {json.dumps(found)}\n".encode()
    while line:
        line = line[os.write(out, line):]


main()
