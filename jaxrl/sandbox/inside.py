"""Runs inside the sandbox, in the process of a program under test: calls its functions and prints what they return.

It never receives expected values, so nothing in this process, whatever the program does to it, can report success.
In: {program, calls: [[name, args, kwargs]], nonce} as JSON. Out, per call, a line of the nonce and [n, "value", plain
data] or [n, "raised", name of the built-in exception] or [n, "opaque", type].
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from codec import Opaque, decode, encode  # noqa: E402


def kind(error):
    """Returns the name of an exception's class, or of its nearest base class that is built in."""
    return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")


def function(namespace, name):
    """Returns a function of the program, or the method of its class Solution, of which an object is made without
    arguments. Raises NameError if there is neither. namespace: of the program."""
    if name not in namespace and hasattr(namespace.get("Solution"), name):
        return getattr(namespace["Solution"](), name)
    if name not in namespace:
        raise NameError(name)
    return namespace[name]


def outcome(namespace, name, args, kwargs):
    """Calls a function of the program and returns ["value", plain data], ["raised", name of the built-in exception] or
    ["opaque", type of a value that is not plain data].

    namespace: of the program. args, kwargs: as codec.encode encodes them."""
    try:
        value = function(namespace, name)(*decode(args), **decode(kwargs))
    except BaseException as error:
        return ["raised", kind(error)]
    try:
        return ["value", encode(value)]
    except Opaque:
        return ["opaque", type(value).__name__]


def main():
    """Runs the program of the task on standard input, with standard input and output redirected to /dev/null, and
    prints the result of each call as a line of the nonce and JSON."""
    task = json.load(sys.stdin)
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # what the program prints is no answer
    os.dup2(nothing, 1)
    sys.stdin = open(0)
    namespace = {"__name__": "solution"}
    exec(compile(task["program"], "solution.py", "exec"), namespace)
    for n, (name, args, kwargs) in enumerate(task["calls"]):
        line = f"{task['nonce']} {json.dumps([n, *outcome(namespace, name, args, kwargs)])}\n".encode()
        while line:
            line = line[os.write(out, line):]


main()
