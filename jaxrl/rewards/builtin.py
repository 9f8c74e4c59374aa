"""Names of reward functions, and the built-in ones: math, exact, boxed, choice, format, code. Each of these gives 1.0
or 0.0 (code also shares), or None without a reference answer.

Standard library only, but for `math`, which loads math-verify (and sympy) in the workers that need it.

What a completion causes is a wrong answer, never a missing score: reading it takes time in proportion to its length,
what cannot be computed is 0.0, and what takes longer than LIMIT seconds of processor time (sympy, a catastrophic
pattern) is, too. What the reference answer causes is raised.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import threading
from collections.abc import Callable
from fractions import Fraction

from jaxrl import sandbox
from jaxrl.sandbox.grading import grade

LIMIT = 2.0  # seconds of processor time for one completion, in the worker's main thread; at most SHARE of the run's
SHARE = 0.2  # reward.timeout_seconds, which are of the wall: a busy machine must not make a wrong answer a late one
READ = 8000  # characters that `math` reads: from the last box on, or at the end of a completion without one
_FUNCTIONS: dict[str, Callable] = {}


def register_reward(name: str):
    """Decorator: makes a reward function known as `name` in `reward.functions`.

    The function takes (prompt, completion, **columns) for one completion, or (prompts, completions, **columns) for a
    whole batch, sync or async, and may name further arguments: token_ids, finish, group, sample, user (config.user).
    It returns a float, None (this function has nothing to say about this row), or (float, {metric: number}); in a
    batch a list of these. It runs in worker processes, so it must be importable there.
    """
    def add(fn):
        known = _FUNCTIONS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"reward {name!r} is registered already, by {known.__module__}:{known.__qualname__}")
        _FUNCTIONS[name] = fn
        return fn
    return add


def registered() -> dict[str, Callable]:
    """name -> function: the built-in ones and what this process registered."""
    return dict(_FUNCTIONS)


@register_reward("math")
def math_reward(prompt, completion, answer):
    """Mathematical equality of the completion's final expression (a box, else the last expression) and `answer`.

    An answer of letters alone, two or more, is a word (or words) and compared as text, whatever its case, not as a
    product of variables; up to three small consonants (`xy`) are a product, and `pi` and its like are names. Of two
    numbers neither may be farther from the other than 1e-5 of it: math-verify (0.9.0) compares six decimals, which
    makes small numbers equal.
    """
    if answer is None:
        return None
    answer = str(answer)
    if word := _word(answer):
        return float(_word(_final(completion)) == word)
    math_verify = load_math_verify()
    gold = _gold(answer)
    if not gold:  # not mathematics: compare as text
        return boxed_reward(prompt, completion, answer)
    with limited() as limit:
        said = math_verify.parse(_readable(_tail(completion)), parsing_timeout=None)
        if not all(map(_computable, said)) or not math_verify.verify(gold, said, timeout_seconds=None):
            return 0.0
        return float(_close(gold[0], said[0]))
    return limit.score


class _Expired(BaseException):
    """A completion took LIMIT seconds. No library catches it by `except Exception`."""


class _Limit:
    score = 0.0


@contextlib.contextmanager
def limited():
    """Within it what a completion causes ends the block: an error, and LIMIT seconds of processor time in the main
    thread. What follows the block then gives the score of a wrong answer, `limit.score`."""
    timed = hasattr(signal, "SIGVTALRM") and threading.current_thread() is threading.main_thread()

    running = [True]

    def expire(*_):
        if running:
            raise _Expired

    before = signal.signal(signal.SIGVTALRM, expire) if timed else None
    if timed:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT, 0.1)  # again, for whoever catches everything
    try:
        try:
            yield _Limit
        finally:
            running.clear()
    except (Exception, _Expired):  # RecursionError, OverflowError, ValueError of long numbers, what libraries raise
        pass
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textrm|mbox)\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’.-]+[^\W\d_]+)*\.?")
_NAMES = {"pi", "infty", "infinity", "inf", "oo"}  # of mathematics


def _word(text: str) -> str:
    """The words that a text is, in one spelling; "" where it is anything else."""
    text = _TEXT.sub(r"\1", text[:200].strip().strip("$").strip()) if len(text) <= 200 else ""
    plain = " ".join(text.split()).rstrip(".")
    named = plain.casefold() in _NAMES or re.fullmatch("[b-df-hj-np-tv-z]{1,3}", plain)
    return plain.casefold() if _WORDS.fullmatch(plain) and not named else ""


def _final(completion: str) -> str:
    """What a completion answers, as text: its last box, what follows the last "answer is", or its last line."""
    content = last_boxed(completion)
    if content is not None:
        return content
    line = completion.rstrip()[-400:].rpartition("\n")[2]
    said = re.split(r"(?i)answer(?:\s+is)?\s*:?\s*", line)[-1]
    return said.strip("*_ \t.\"'()")


def _tail(completion: str) -> str:
    """The part of a completion that is read, its last box at the begin."""
    box = _last_box(completion)
    start = len(completion) - READ if box is None else min(box[0] - len("\\boxed{"), len(completion) - READ // 2)
    return completion[max(0, start):][:READ]


def _readable(text: str) -> str:
    r"""The text without `\$`, which is money, and with 1e-5 as 1 \times 10^{-5}, which math-verify (0.9.0) reads as a
    product with Euler's number."""
    text = text.replace("\\$", "")
    return re.sub(r"(?<![\w.\\])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}", text)


def _computable(expression) -> bool:
    """Whether no power and no factorial in it is a number of more than some ten thousand digits, which sympy would
    compute in one go, whatever the time."""
    from sympy import Basic, Integer, Number, Pow, factorial, preorder_traversal

    if not isinstance(expression, Basic):
        return True
    for node in preorder_traversal(expression):
        if isinstance(node, Integer) and node.p.bit_length() > 4000:
            return False
        if isinstance(node, Pow) and node.base.is_number and node.exp.is_number:
            exponent = node.exp
            if isinstance(exponent, Pow) and all(isinstance(x, Integer) and abs(x) <= 16 for x in exponent.args):
                exponent = Number(float(exponent.base) ** float(exponent.exp))
            if not isinstance(exponent, Number) or abs(exponent) > 10_000:
                return not exponent.has(Pow) and not isinstance(exponent, Number)  # sqrt(2) and pi are fine
        if isinstance(node, factorial) and node.args[0].is_number and not (
                isinstance(node.args[0], Integer) and abs(node.args[0]) <= 1000):
            return False
    return True


def _close(a, b) -> bool:
    """Whether two expressions that math-verify takes for equal are, where both are numbers."""
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return True
    a, b = a.evalf(20), b.evalf(20)
    return bool(abs(a - b) <= 1e-5 * max(abs(a), abs(b)))


def load_math_verify():
    """Imports math-verify; workers that serve `math` do it before they report ready."""
    import logging

    import math_verify
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that their own time limit is off
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify


math_reward.prepare = load_math_verify


@functools.lru_cache(maxsize=4096)
def _gold(answer: str):
    parse, answer = load_math_verify().parse, _readable(answer)
    answer = answer.replace("$", "") if answer.count("$") % 2 else answer  # money
    answer = r"\pi" if answer.strip().casefold() == "pi" else answer
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return parse(marked, parsing_timeout=None) or parse(answer, parsing_timeout=None)


@register_reward("exact")
def exact_reward(prompt, completion, answer):
    """The whole completion equals `answer`, up to surrounding white space."""
    return None if answer is None else float(completion.strip() == str(answer).strip())


@register_reward("boxed")
def boxed_reward(prompt, completion, answer):
    r"""The last \boxed{...} holds `answer`, as text (spaces ignored) or as a number (18 = 18.0 = 36/2)."""
    if answer is None:
        return None
    content = last_boxed(completion)
    if content is None:
        return 0.0
    found, wanted = _normal(content), _normal(str(answer))
    if found == wanted:
        return 1.0
    a, b = _number(found), _number(wanted)
    return float(a is not None and a == b)


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} with balanced braces, or None."""
    found = _last_box(text)
    return None if found is None else text[slice(*found)]


def _last_box(text: str) -> tuple[int, int] | None:
    r"""(begin, end) of the content of the last \boxed{...} with balanced braces, or None. One pass."""
    opened: list[int] = []  # of each brace that is open, where a box's content begins, or -1
    last = None
    for match in re.finditer(r"(\\boxed)?\{|\}", text):
        if match.group() != "}":
            opened.append(match.end() if match[1] else -1)
        elif opened and (start := opened.pop()) >= 0 and (last is None or start > last[0]):
            last = start, match.start()
    return last


def _normal(text: str) -> str:
    text = re.sub(r"\s|\\[,!; ]|\$", "", text)
    return text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text) else text


def _number(text: str) -> Fraction | None:
    if not re.fullmatch(r"[+-]?(\d{1,60}(\.\d{0,60})?|\.\d{1,60}|\d{1,60}/0*[1-9]\d{0,59})", text):
        return None
    return Fraction(text)


@register_reward("choice")
def choice_reward(prompt, completion, answer):
    r"""The chosen letter equals `answer` (a letter, also as '(B)').

    The letter is, first found: the last \boxed{B}; the last 'answer is B', 'Answer: (B)', 'option B'; a completion that
    begins with the letter alone ('B', '(B)', 'B. because').
    """
    if answer is None:
        return None
    wanted = _letter(str(answer))
    if wanted is None:
        raise ValueError(f"reward 'choice' needs a letter as reference answer, the row has {answer!r}")
    return float(_chosen(completion) == wanted)


def _letter(text: str) -> str | None:
    match = re.fullmatch(r"(?:\\text(?:bf)?\{)?[(\[*\s]*+([A-Za-z])[)\].:*\s]*+\}?", text.strip())
    return match.group(1).upper() if match else None


def _chosen(completion: str) -> str | None:
    content = last_boxed(completion)
    if content is not None:
        return _letter(content)
    said = re.findall(r"(?i:answer|option|choice)(?i:\s++is)?+\s*+[:=]?+[\s(\[*]*+([A-Z])(?![\w'])", completion)
    if said:
        return said[-1]
    alone = re.match(r"[\s(\[*]*([A-Z])(?=[)\].:,*]|\s*$)", completion)
    return alone.group(1) if alone else None


@register_reward("format")
def format_reward(prompt, completion, format_pattern):
    """The whole completion matches `reward.format_pattern` ('.' matches line ends too)."""
    pattern = re.compile(format_pattern, re.DOTALL)
    with limited() as limit:
        return float(pattern.fullmatch(completion) is not None)
    return limit.score


@register_reward("code")
def code_reward(prompt, completion, code_score, tests=None, answer=None, entry_point=None):
    """Scores the program in a completion by the row's unit tests, in the sandbox (forms: docs/guides/rewards.md).

    The program is the last block between ``` fences, else the whole completion. The tests stand in the column `tests`,
    else in `answer`. code_score: "all" = 1.0 for all of them, else 0.0; "fraction" = the share that is passed. A limit
    that the program runs into fails its tests; where the sandbox fails, there is no score.
    """
    tests = answer if tests is None else tests
    if tests is None:
        return None
    found = grade(code_block(completion), tests, str(entry_point or ""), stop=code_score == "all")
    share = sum(found.passed) / len(found.passed)
    metrics = {"passed": share, "opaque": float(bool(found.opaque)), "limited": float(bool(found.limit))}
    return (float(share == 1.0) if code_score == "all" else share), metrics


code_reward.prepare = sandbox.prepare


def code_block(text: str) -> str:
    """The last block between lines of ```, one that is not closed included; the whole text where there is none."""
    blocks = re.findall(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else text
