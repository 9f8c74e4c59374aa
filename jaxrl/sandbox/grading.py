"""Grades programs by unit tests: the program runs in the sandbox and sees only the inputs;
outputs are compared outside.

Tests written in Python (asserts) run in a separate sandbox without the program: its functions are replaced by a table
of the values it returned. So a program cannot pass by exiting early, by printing what a passing one prints, by
patching built-ins, or by reading the expected values: none of them is in its process.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import math
import secrets
import time
from pathlib import Path
from typing import Any

from jaxrl.sandbox import api
from jaxrl.sandbox.codec import Opaque, decode, encode
from jaxrl.sandbox.scopes import module_names
from jaxrl.sandbox.types import RunResult, SandboxError

MAX_ROUNDS = 64         # most rounds of calls that depend on earlier results within a row's tests
JUDGE_SHARE = 0.8   # share of the program's seconds, for the tests written in Python
MAX_JUDGE_BYTES = 1 << 24   # most bytes sent to the judge, including the program's values
HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Case:
    """One test of a program.

    Attributes:
      given: standard input of the whole program, a text; or the list of arguments of a function.
      wanted: standard output, a text; or the function's value.
      name: of the function; "" for a run of the whole program.
    """

    given: Any
    wanted: Any
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Tests:
    """Tests of a program.

    Attributes:
      cases: inputs with outputs.
      asserts: sources of asserts or calls, each one test. setup: source that runs before each of them.
    """

    cases: list[Case]
    asserts: list[str]
    setup: str = ""

    def __len__(self):
        return len(self.cases) + len(self.asserts)


@dataclasses.dataclass
class Grade:
    """Result of grading.

    Attributes:
      passed: one bool per test: runs of the whole program first, then calls of functions, then asserts.
      opaque: number of results that are not plain data; such a test fails.
      limit: the limit that was hit by the program or by a test using its values, a sandbox limit or "rounds" (see
        MAX_ROUNDS); "" for none.
    """

    passed: list[bool]
    opaque: int = 0
    limit: str = ""


def grade(program: str, tests, entry_point: str = "", stop: bool = False) -> Grade:
    """Runs the tests of a Python program. All runs of the program together take at most sandbox.seconds; asserts, which
    run apart from it, JUDGE_SHARE of that in addition, and at least 0.1 s a round.

    Outputs are compared line by line, without white space around lines and at the end of the text (empty lines before
    it count), and word by word where numbers with a point may differ by a relative 1e-6 or an absolute 1e-9; values as
    `same` compares them.

    Args:
      program: its source.
      tests: see `parse`.
      entry_point: the function that `check(candidate)` tests.
      stop: stop at the first failed test; later ones count as failed. Calls of functions run together, and so do
        asserts.

    Raises:
      SandboxError: the sandbox failed, or the tests alone exceed a limit.
      ValueError: the tests cannot be parsed, need values that are not plain data, or fail for any program.
    """
    tests = parse(tests, entry_point)
    out, program_ = Grade([]), _Program(program)
    whole_runs = [case for case in tests.cases if not case.name]
    calls = [case for case in tests.cases if case.name]
    for case in whole_runs:
        passed = not (stop and False in out.passed) and _same_output(program_.run_whole(case.given), case.wanted)
        out.passed.append(passed)
    if calls and not (stop and False in out.passed):
        answers = program_.answers([[case.name, encode(tuple(case.given)), encode({})] for case in calls])
        out.passed += [kind == "value" and same(_plain(value), case.wanted)
                       for case, (kind, value) in zip(calls, answers, strict=True)]
    if tests.asserts and not (stop and False in out.passed):
        out.passed += _run_asserts(program_, tests)
    out.passed += [False] * (len(tests) - len(out.passed))
    out.opaque, out.limit = program_.opaque, program_.limit
    return out


class _Program:
    """A program under test, with the seconds that it has left."""

    def __init__(self, source: str):
        self._source, self._left = source, api.limits().seconds
        self.opaque, self.limit = 0, ""

    def _run(self, argv, stdin: str, files) -> RunResult | None:
        """Runs the program; returns None if its time is used up."""
        if self._left <= 0:
            self.limit = self.limit or "seconds"
            return None
        began = time.monotonic()
        ran = api.run(argv, stdin, files, seconds=self._left)
        self._left -= time.monotonic() - began
        self.limit = self.limit or ran.limit
        return ran

    def run_whole(self, stdin: str) -> str | None:
        """Returns the printed text of the program; None if it failed."""
        ran = self._run(["python", "-I", "solution.py"], stdin, {"solution.py": self._source})
        return ran.stdout if ran is not None and ran.exit == 0 else None

    def answers(self, calls: list) -> list[tuple[str, object]]:
        """Returns (kind, value) of each call, in one process; ("none", None) for a call without a result."""
        nonce, found = secrets.token_hex(16), {}
        task = json.dumps({"program": self._source, "calls": calls, "nonce": nonce})
        ran = self._run(["python", "-I", "inside.py"], task, _files("inside.py"))
        for line in _lines(ran, nonce):
            match line:
                case [int(n), ("value" | "raised" | "opaque") as kind, value]:
                    found.setdefault(n, (kind, value))
        out = [found.get(n, ("none", None)) for n in range(len(calls))]
        self.opaque += sum(kind == "opaque" for kind, _ in out)
        return out


def _run_asserts(program: _Program, tests: Tests) -> list[bool]:
    """Runs the asserts in rounds: each looks calls up in a table and asks for those that are missing. A test that has
    passed or failed in a round is not run in later ones.

    In the first round the table is empty, so what fails there fails without the program: it raises, and may take half
    of the judge's seconds. From the second round on the asserts use the program's values: a limit, a dead judge, a
    call that is not carried or too many rounds fail the tests that are not passed by then.
    """
    task = {"setup": tests.setup, "names": sorted(_free_names(tests)), "table": []}
    left, verdicts = JUDGE_SHARE * api.limits().seconds, {}
    for round_ in range(MAX_ROUNDS):
        nonce, began = secrets.token_hex(16), time.monotonic()
        waiting = [n for n in range(len(tests.asserts)) if verdicts.get(n) is None]
        task["tests"] = [tests.asserts[n] for n in waiting]
        try:
            stdin = json.dumps(task | {"nonce": nonce})
        except RecursionError:  # a program can write the line of its answer itself, in any form
            break
        if len(stdin) > MAX_JUDGE_BYTES:
            program.limit = program.limit or "output_bytes"
            break
        ran = api.run(["python", "-I", "judge.py"], stdin, _files("judge.py"),
                      seconds=max(left if round_ else left / 2, 0.1))
        left -= time.monotonic() - began
        calls_by_text, ended, why = {}, False, ""
        for line in _lines(ran, nonce):
            match line:
                case [int(n), True | False | None as passed, list(calls), str(text)]:
                    verdicts[waiting[n]], why = passed, why or text
                    calls_by_text |= {json.dumps(call): call for call in calls}
                case "end":
                    ended = True
        if not round_:
            _check_alone(ran, ended, why)
        if not (ended and calls_by_text):
            program.limit = program.limit or ran.limit
            break
        calls = list(calls_by_text.values())
        task["table"] += [[*call, *answer] for call, answer in zip(calls, program.answers(calls), strict=True)]
    else:
        program.limit = program.limit or "rounds"
    return [verdicts.get(n) is True for n in range(len(tests.asserts))]


def _check_alone(ran: RunResult, ended: bool, why: str) -> None:
    """Raises for tests that fail before a value of the program is there, which is the row's fault or the host's."""
    if not ended and ran.limit:
        raise SandboxError(f"the row's tests exceeded the limit {ran.limit} before they used a value of the program; "
                           f"raise sandbox.{ran.limit}, or leave the row out")
    if not ended or why:
        why = why or ran.stderr[-300:].strip() or f"their process exited with status {ran.exit}"
        raise ValueError(f"the row's tests fail for any program: {why}")


def _lines(ran: RunResult | None, nonce: str) -> list:
    """Returns the lines under a nonce that are JSON."""
    out = []
    for line in ran.stdout.splitlines() if ran is not None else ():
        if line.startswith(nonce):
            try:
                out.append(json.loads(line.removeprefix(nonce)))
            except (ValueError, RecursionError):  # cut off, or not ours
                pass
    return out


def _files(*names: str) -> dict[str, str]:
    return {name: (HERE / name).read_text("utf-8") for name in ("codec.py", *names)}


# -- comparing ---------------------------------------------------------------------------------------------------------

def same(found, wanted) -> bool:
    """Returns whether two values are equal as JSON data: tuples equal lists, dict keys are text, integers agree
    exactly, a float with a number within a relative 1e-6 or an absolute 1e-9, and bools equal bools alone.
    """
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, (int, float)) and isinstance(found, (int, float)):
        exact = isinstance(wanted, int) and isinstance(found, int)
        return found == wanted if exact else _near(found, wanted)
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict) and isinstance(found, dict):
        found, wanted = ({_key(k): v for k, v in d.items()} for d in (found, wanted))
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    return type(found) is type(wanted) and found == wanted


def _plain(value):
    """Decodes an answer for `same`. Returns Opaque, which equals nothing, for a set and for what `codec` does not make.

    Nothing but text is hashed here: a program can choose numbers whose hashes are all equal.
    """
    try:
        return _decoded(value)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return Opaque


def _decoded(value):
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](map(_decoded, content))
    if kind == "dict":
        return {_key(_decoded(k)): _decoded(v) for k, v in content}
    return Opaque if kind in ("set", "frozenset") else decode(value)


def _near(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    except OverflowError:  # an integer beyond every float, and a float
        return False


def _key(key) -> str:
    try:
        return str(key)
    except ValueError:  # an integer of more digits than Python writes
        return hex(key) if isinstance(key, int) else type(key).__name__


def _same_output(found: str | None, wanted) -> bool:
    """Compares outputs line by line, ignoring spaces at ends and empty lines at the end; else word by word, numbers
    with a point to 1e-6.
    """
    if found is None:
        return False
    a, b = ([line.strip() for line in str(text).rstrip().splitlines()] for text in (found, wanted))
    return len(a) == len(b) and all(x == y or _same_words(x.split(), y.split()) for x, y in zip(a, b, strict=True))


def _same_words(a: list[str], b: list[str]) -> bool:
    return len(a) == len(b) and all(x == y or _close(x, y) for x, y in zip(a, b, strict=True))


def _close(a: str, b: str) -> bool:
    if "." not in a + b:
        return False
    try:
        return _near(float(a), float(b))
    except ValueError:
        return False


# -- reading -----------------------------------------------------------------------------------------------------------

def parse(tests, entry_point: str = "") -> Tests:
    """Parses tests in the formats of data sets, also as JSON text:

      {"inputs": [...], "outputs": [...]}                    standard input and output of each run
      {"inputs": [[args], ...], "outputs": [...], "fn_name": "f"}     arguments and values of a function
      [{"input": ..., "output": ...}, ...]                   the same as a list; with "fn_name" for a function
      ["assert f(1) == 2", ...], or a text of such lines     Python: each assert is a test, other code runs before each
      a text with def check(candidate)                       called with `entry_point`

    Raises ValueError for anything else, also for no tests, for inputs or outputs that are no list, for unequal numbers
    of them, and for a null where a whole program reads or prints a text.
    """
    if isinstance(tests, str):
        try:
            return parse(json.loads(tests), entry_point)
        except json.JSONDecodeError:
            return _python(tests, entry_point)
    if isinstance(tests, dict) and "inputs" in tests:
        for column in ("inputs", "outputs"):
            if not isinstance(tests.get(column), (list, tuple)):
                raise ValueError(f"the row's tests have {column}={str(tests.get(column))[:40]}: write a list, with one "
                                 "entry for each test")
        inputs, wanted = tests["inputs"], tests["outputs"]
        if len(inputs) != len(wanted):
            raise ValueError(f"the row's tests have {len(inputs)} inputs and {len(wanted)} outputs: write one output "
                             "for each input")
        return _not_empty(Tests([_case(g, w, tests.get("fn_name")) for g, w in zip(inputs, wanted, strict=True)], []))
    if isinstance(tests, dict):
        tests = [tests]
    if not isinstance(tests, list):
        raise ValueError(f"the row's tests are of type {type(tests).__name__}; see docs/guides/rewards.md")
    if all(isinstance(one, str) for one in tests):
        return _python("\n".join(map(str, tests)), entry_point)
    if not all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in tests):
        raise ValueError("the row's tests are neither asserts nor input-output tables; see docs/guides/rewards.md")
    return _not_empty(Tests([_case(one["input"], one["output"], one.get("fn_name")) for one in tests], []))


def _case(arguments, wanted, name: str | None) -> Case:
    if not isinstance(name, str | None):
        raise ValueError(f"the row's tests have fn_name={str(name)[:40]}: write the name of one function as text")
    if not name and (arguments is None or wanted is None):
        raise ValueError("the row's tests have a null among inputs or outputs of the whole program: write what it reads"
                         " and prints as text, '' for nothing")
    if name and not isinstance(arguments, (list, tuple)):
        raise ValueError(f"the arguments of {name} must be a list, the row's tests have {type(arguments).__name__}")
    if not name:
        arguments, wanted = ("\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in (arguments, wanted))
    return Case(arguments, wanted, name or "")


def _not_empty(tests: Tests) -> Tests:
    if not len(tests):
        raise ValueError("the row has no tests")
    return tests


def _python(text: str, entry_point: str) -> Tests:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as e:
        raise ValueError(f"the row's tests are not valid Python: {e}") from None
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    around = [node for node in body if not isinstance(node, ast.Assert)]
    checks = [node for node in around if isinstance(node, ast.FunctionDef) and node.name == "check"]
    found = [ast.unparse(node) for node in asserts]
    if checks and not asserts:
        calls = [n for n in around if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
        if not calls and not entry_point:
            raise ValueError("the row's tests define check(candidate); add a column entry_point that names the "
                             "function")
        around = [node for node in around if node not in calls]
        found = [ast.unparse(node) for node in calls] or [f"check({entry_point})"]
    return _not_empty(Tests([], found, "\n".join(map(ast.unparse, around))))


def _free_names(tests: Tests) -> set[str]:
    """Returns the names that the tests use without defining them: the program's."""
    free, bound = module_names(tests.setup)
    for source in tests.asserts:
        free |= module_names(source)[0] - bound
    return free - set(dir(builtins))
