"""Runs inside a separate sandbox: a row's tests, written in Python, without the program under test.

Calls of the program's functions are looked up in a table of its results; missing ones are requested. In: {setup,
tests: [source], names, table: [[name, args, kwargs, kind, value]], nonce} as JSON. Out, per test as soon as it has
run, a line of the nonce and [n, true, false or null (waits for calls), [[name, args, kwargs]] (requested calls), why
it failed without the program or ""]; last the nonce and "end".
"""

import ast
import builtins
import json
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from codec import Opaque, decode, encode  # noqa: E402


class Unknown(BaseException):
    """A call whose result is not known yet."""


class NotCarried(BaseException):
    """A call with arguments that are not plain data; no test catches it."""


def key(name, args, kwargs):
    """Returns the table key of a call, as JSON text. args, kwargs: as codec.encode encodes them."""
    return json.dumps([name, args, kwargs])


ARGUMENTS = {  # of exceptions that cannot be made without
    "UnicodeDecodeError": ("utf-8", b"?", 0, 1, "not given"), "UnicodeEncodeError": ("utf-8", "?", 0, 1, "not given"),
    "UnicodeTranslateError": ("?", 0, 1, "not given"), "ExceptionGroup": ("not given", [Exception()])}


def built_in(name):
    """Returns an exception of the built-in class of this name, an Exception for any other name."""
    error = getattr(builtins, name, Exception) if isinstance(name, str) else Exception
    if not isinstance(error, type) or not issubclass(error, Exception):
        return Exception()
    return error(*ARGUMENTS.get(name, ()))


def proxy(name, table, unknown):
    """Returns a function in place of one of the program's: it looks its calls up in the table.

    A call that is not there is appended to `unknown` as [name, args, kwargs] and raises Unknown; one with arguments
    that are not plain data raises NotCarried. A call that raised in the program raises the built-in exception of that
    name (Exception for another name and for SystemExit and its like, which are no Exception), one whose value was not
    plain data an Exception.

    name: of the function. table: `key` -> (kind, value)."""
    def call(*args, **kwargs):
        try:
            arguments = encode(args), encode(kwargs)
        except Opaque as e:
            raise NotCarried(f"{name} is called with a value of type {e}") from None
        known = table.get(key(name, *arguments))
        if known is None:
            unknown.append([name, *arguments])
            raise Unknown
        kind, value = known
        if kind == "raised":
            raise built_in(value)
        if kind != "value":
            raise Exception(f"{name} returned {value}")
        return decode(value)

    call.__name__ = name
    return call


class Deferred(ast.NodeTransformer):
    """Lets the statements after an assert run while the assert waits for a result, so that one round requests the
    calls of many asserts.
    """

    def visit_Assert(self, node):
        """Returns the assert in a `try` that passes over Unknown."""
        handler = ast.ExceptHandler(ast.Name("__Unknown__", ast.Load()), None, [ast.Pass()])
        return ast.Try([node], [handler], [], [])


def run(source, name, namespace):
    """Executes the source of a test or of the setup in `namespace`. Its asserts that wait for a result are passed over
    (Deferred). name: of the source, in tracebacks."""
    tree = ast.fix_missing_locations(Deferred().visit(ast.parse(source, name)))
    exec(compile(tree, name, "exec"), namespace)


def verdict(task, test, table):
    """Returns (whether a test passed, None if it waits for calls; the calls that it requests; why it failed without a
    value of the program, "" otherwise).

    task: has setup and names. test: source. table: `key` -> (kind, value) of the calls that are known."""
    unknown, why = [], ""
    namespace = {"__name__": "tests", "__Unknown__": Unknown}
    namespace |= {name: proxy(name, table, unknown) for name in task["names"]}
    random.seed(0)  # each round calls the program with the same arguments
    try:
        run(task["setup"], "setup.py", namespace)
        run(test, "test.py", namespace)
        passed = True
    except Unknown:
        passed = None
    except (Exception, SystemExit, NotCarried) as error:
        passed = False
        if not table and (not unknown or isinstance(error, NotCarried)):
            why = f"{type(error).__name__}: {error}"[:300] if str(error) else f"{type(error).__name__} in {test[:200]}"
    return (passed, unknown, why) if not unknown or why else (None, unknown, why)  # it may have caught Unknown


def main():
    """Runs the tests of the task on standard input and prints each verdict as a line of the nonce and JSON, and "end"
    last."""
    task = json.load(sys.stdin)
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    table = {key(name, args, kwargs): (kind, value) for name, args, kwargs, kind, value in task["table"]}

    def say(message):
        line = f"{task['nonce']} {json.dumps(message)}\n".encode()
        while line:
            line = line[os.write(out, line):]

    for n, test in enumerate(task["tests"]):
        say([n, *verdict(task, test, table)])
    say("end")


main()
