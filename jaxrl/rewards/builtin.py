"""Registry of reward functions, and the built-in ones: math, exact, boxed, choice, format, code; published.py has more.

Each built-in gives 1.0 or 0.0 (code also shares), or None without a reference answer. Standard library only, except
`math`, which loads math-verify (and sympy) in the workers that use it.

A malformed completion scores 0.0, it is never a missing score: it is read in time proportional to its length, and
what cannot be computed, or takes more than LIMIT seconds of processor time (sympy, a catastrophic pattern), scores
0.0. Errors caused by the reference answer are raised.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import signal
import threading
from collections.abc import Callable
from fractions import Fraction

from jaxrl import sandbox
from jaxrl.sandbox.grading import grade

LIMIT = 2.0  # seconds of processor time for one completion, in the worker's main thread; at most SHARE of
SHARE = 0.2  # reward.timeout_seconds, which is wall time: on a busy machine a wrong completion must not time out
MAX_CHARS_READ = 8000  # characters that `math` reads: from the last \\boxed on, or the end of a completion without one
BUILT_IN = ("jaxrl.rewards.builtin", "jaxrl.rewards.published")
SERVICES = ("remote", "judge")  # rewards that are called over HTTP (rewards.services), which are no functions
_FUNCTIONS: dict[str, Callable] = {}


def register_reward(name: str):
    """Returns a decorator that registers a reward function as `name` for `reward.functions`.

    The function takes (prompt, completion, **columns) for one completion, or (prompts, completions, **columns) for a
    batch, sync or async. It may name further arguments: token_ids, context_ids, finish, group, sample, images and
    image_sizes, and of the run user (config.user), format_pattern and code_score. It returns a float, None (no score
    for this row), or (float, {metric: number}); for a batch a list of these. It runs in worker processes, so it must
    be importable there. Attributes of the function that workers read, if it has them: `prepare`, called before the
    worker is ready; `size`, completions in one call of a batched function (else all at once); `seconds`, the limit of
    one call (else reward.timeout_seconds).

    Raises:
      ValueError: another function, a built-in one too, or a service (remote, judge) has this name.
    """
    def add(fn):
        if name in SERVICES:
            raise ValueError(f"reward {name!r} is the service of reward.{name}; choose another name")
        known = (_FUNCTIONS if fn.__module__ in BUILT_IN else registered_rewards()).get(name)
        if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"reward {name!r} is registered already, by {known.__module__}:{known.__qualname__}")
        _FUNCTIONS[name] = fn
        return fn
    return add


def registered_rewards() -> dict[str, Callable]:
    """Returns name -> function of the built-in rewards (published.py, too) and those registered in this process."""
    importlib.import_module("jaxrl.rewards.published")
    return dict(_FUNCTIONS)


@register_reward("math")
def math_reward(prompt, completion, answer):
    """Scores 1.0 if the completion's final expression (a box, else the last expression) equals `answer` mathematically,
    else 0.0; None without an answer.

    An answer of two or more letters alone is a word (or words) and compared as text, ignoring case, not as a product
    of variables; up to three small consonants (`xy`) are a product, and `pi` and the like are names. Two numbers
    must also agree within a relative 1e-5: math-verify (0.9.0) compares six decimals, which makes small numbers
    equal. An answer in which math-verify finds no mathematics is compared as `boxed` does. A completion that takes more
    than LIMIT seconds of processor time scores 0.0; math-verify reads at most MAX_CHARS_READ characters of it. Raises
    what math-verify raises for the answer."""
    if answer is None:
        return None
    answer = str(answer)
    if word := _answer_words(answer):
        return float(_answer_words(_final_text(completion)) == word)
    math_verify = load_math_verify()
    gold = _parsed_answer(answer)
    if not gold:  # not mathematics: compare as text
        return boxed_reward(prompt, completion, answer)
    with time_limited() as limit:
        claimed = math_verify.parse(_readable(_last_part(completion)), parsing_timeout=None)
        if not all(map(_computable, claimed)) or not math_verify.verify(gold, claimed, timeout_seconds=None):
            return 0.0
        return float(_nearly_equal(gold[0], claimed[0]))
    return limit.score


class _Expired(BaseException):
    """A completion used LIMIT seconds. Not an Exception, so that libraries do not catch it."""


class _Limit:
    score = 0.0


@contextlib.contextmanager
def time_limited():
    """Ends the block on any Exception, and in the main thread after LIMIT seconds of user-mode processor time of the
    process, all threads counted.

    The code after the block then returns the score of a wrong completion, `limit.score` (0.0). In other threads, and
    where SIGVTALRM does not exist, time is not limited. No Exception leaves the block; KeyboardInterrupt and SystemExit
    do.
    """
    timed = hasattr(signal, "SIGVTALRM") and threading.current_thread() is threading.main_thread()

    running = [True]

    def expire(*_):
        if running:
            raise _Expired

    before = signal.signal(signal.SIGVTALRM, expire) if timed else None
    if timed:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT, 0.1)  # repeats, for code that catches everything
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
_NAMES = {"pi", "infty", "infinity", "inf", "oo"}  # names of mathematics, not words


def _answer_words(text: str) -> str:
    """Returns an answer that consists of words, in one spelling; "" for anything else."""
    text = _TEXT.sub(r"\1", text[:200].strip().strip("$").strip()) if len(text) <= 200 else ""
    plain = " ".join(text.split()).rstrip(".")
    named = plain.casefold() in _NAMES or re.fullmatch("[b-df-hj-np-tv-z]{1,3}", plain)
    return plain.casefold() if _WORDS.fullmatch(plain) and not named else ""


def _final_text(completion: str) -> str:
    """Returns a completion's final answer as text: its last box, what follows the last "answer is", or its last line.
    """
    content = last_boxed(completion)
    if content is not None:
        return content
    line = completion.rstrip()[-400:].rpartition("\n")[2]
    tail = re.split(r"(?i)answer(?:\s+is)?\s*:?\s*", line)[-1]
    return tail.strip("*_ \t.\"'()")


def _last_part(completion: str) -> str:
    """Returns the part of a completion that is parsed, starting at its last box."""
    box = _last_box(completion)
    start = len(completion) - MAX_CHARS_READ if box is None else min(box[0] - len("\\boxed{"),
                                                                     len(completion) - MAX_CHARS_READ // 2)
    return completion[max(0, start):][:MAX_CHARS_READ]


def _readable(text: str) -> str:
    r"""Returns the text without `\$` (money), and with 1e-5 as 1 \times 10^{-5}, which math-verify (0.9.0) reads as a
    product with Euler's number.
    """
    text = text.replace("\\$", "")
    return re.sub(r"(?<![\w.\\])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}", text)


def _computable(expression) -> bool:
    """Returns whether no power or factorial has more than some ten thousand digits, which sympy would compute
    in one uninterruptible call.
    """
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


def _nearly_equal(a, b) -> bool:
    """Returns whether two expressions that math-verify considers equal agree within a relative 1e-5,
    if both are numbers.
    """
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return True
    a, b = a.evalf(20), b.evalf(20)
    return bool(abs(a - b) <= 1e-5 * max(abs(a), abs(b)))


def load_math_verify():
    """Imports math-verify and returns the module, with its warnings off. Workers that serve `math` call it before
    they report ready."""
    import logging

    import math_verify
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that their time limit is off
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify


math_reward.prepare = load_math_verify


@functools.lru_cache(maxsize=4096)
def _parsed_answer(answer: str):
    parse, answer = load_math_verify().parse, _readable(answer)
    answer = answer.replace("$", "") if answer.count("$") % 2 else answer  # money
    answer = r"\pi" if answer.strip().casefold() == "pi" else answer
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return parse(marked, parsing_timeout=None) or parse(answer, parsing_timeout=None)


@register_reward("exact")
def exact_reward(prompt, completion, answer):
    """Scores 1.0 if the whole completion equals `answer`, ignoring surrounding white space, else 0.0; None without
    an answer."""
    return None if answer is None else float(completion.strip() == str(answer).strip())


@register_reward("boxed")
def boxed_reward(prompt, completion, answer):
    r"""Scores 1.0 if the last \boxed{...} equals `answer`, as text (without white space, also LaTeX's `\,` and the
    like, $ and the commas of 1,000) or as a number (18 = 18.0 = 36/2; at most 60 digits), else 0.0, also without a box.

    None, which counts as absent, for a row without an answer."""
    if answer is None:
        return None
    content = last_boxed(completion)
    if content is None:
        return 0.0
    boxed, expected = _normalize(content), _normalize(str(answer))
    if boxed == expected:
        return 1.0
    a, b = _number(boxed), _number(expected)
    return float(a is not None and a == b)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} with balanced braces, or None."""
    span = _last_box(text)
    return None if span is None else text[slice(*span)]


def _last_box(text: str) -> tuple[int, int] | None:
    r"""Returns (begin, end) of the content of the last \boxed{...} with balanced braces, or None. One pass."""
    opened: list[int] = []  # per open brace: where a box's content begins, or -1
    last = None
    for match in re.finditer(r"(\\boxed)?\{|\}", text):
        if match.group() != "}":
            opened.append(match.end() if match[1] else -1)
        elif opened and (start := opened.pop()) >= 0 and (last is None or start > last[0]):
            last = start, match.start()
    return last


def _normalize(text: str) -> str:
    text = re.sub(r"\s|\\[,!; ]|\$", "", text)
    return text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text) else text


def _number(text: str) -> Fraction | None:
    if not re.fullmatch(r"[+-]?(\d{1,60}(\.\d{0,60})?|\.\d{1,60}|\d{1,60}/0*[1-9]\d{0,59})", text):
        return None
    return Fraction(text)


CHOSEN = re.compile(r"(?i:answer|option|choice)(?i:\s++is)?+\s*+[:=]?+[\s(\[*]*+([A-Z])(?![\w'])")
# The article or the pronoun, not the letter: a word follows that can stand behind one.
WORD = re.compile(
    r"(?:I|A(?![ \t]+(?:is|was|has|can|will|must|would|should|with|at|to|from|in|on|of|the|this|we|it|you|they|here)"
    r"\b))[ \t]+(?!(?:because|since|as|and|or|but|for|due|not|is|which|rather|given|while|whereas|instead|though"
    r"|although|so|then|if|when|that|by|based)\b)[a-z]")
STANDS_ALONE = re.compile(r"(?<![\w'])(?<!not )(?<!not [(\[*])([A-Z])(?=\s?[)\].:,;!*]|\s*\Z)")


@register_reward("choice")
def choice_reward(prompt, completion, answer):
    r"""Scores 1.0 if the chosen letter equals `answer` (a letter, also as '(B)'), else 0.0; None without an answer.

    The letter is that of the last \boxed{B} (0.0 if the box holds something else); in a completion without a box the
    last 'answer is B', 'Answer: (B)', 'option B' or 'choice B', else a completion's begin with the letter alone ('B',
    '(B)', 'B. because'). Outside a box only capital letters count. An A or I that is a word of a sentence ('Answer: I
    think it must be (B)') gives way to the next letter in brackets, before punctuation or at the end. Raises ValueError
    for an answer that is no letter.
    """
    if answer is None:
        return None
    wanted = _letter(str(answer))
    if wanted is None:
        raise ValueError(f"reward 'choice' needs a letter as reference answer, the row has {answer!r}")
    return float(_chosen_letter(completion) == wanted)


def _letter(text: str) -> str | None:
    match = re.fullmatch(r"(?:\\text(?:bf)?\{)?[(\[*\s]*+([A-Za-z])[)\].:*\s]*+\}?", text.strip())
    return match.group(1).upper() if match else None


def _chosen_letter(completion: str) -> str | None:
    content = last_boxed(completion)
    if content is not None:
        return _letter(content)
    found = list(CHOSEN.finditer(completion))
    if found:
        word = WORD.match(completion, found[-1].start(1))
        after = STANDS_ALONE.search(completion, found[-1].end()) if word else None
        return (after or found[-1])[1]
    alone = re.match(r"[\s(\[*]*([A-Z])(?=[)\].:,*]|\s*$)", completion)
    return alone.group(1) if alone else None


@register_reward("format")
def format_reward(prompt, completion, format_pattern):
    """Scores 1.0 if the whole completion matches `reward.format_pattern`, else 0.0 ('.' also matches line ends).

    A match that takes longer than LIMIT seconds of processor time scores as wrong. Raises re.error for an invalid
    pattern."""
    pattern = re.compile(format_pattern, re.DOTALL)
    with time_limited() as limit:
        return float(pattern.fullmatch(completion) is not None)
    return limit.score


@register_reward("code")
def code_reward(prompt, completion, code_score, tests=None, answer=None, entry_point=None):
    """Scores the program in a completion by the row's unit tests, in the sandbox (formats: docs/guides/rewards.md).

    The program is the last block between ``` fences, else the whole completion. The tests are in the column `tests`,
    else in `answer`; None without tests. A resource limit fails the program's tests; a sandbox failure gives no score.

    Args:
      code_score: "all" = 1.0 if every test passes, else 0.0; "fraction" = share of passed tests.
      entry_point: the function that tests of the form check(candidate) call.

    Returns (score, metrics): passed, the share of passed tests (with "all", tests that are not run after a failed one
    count as failed); opaque, 1.0 if a result was not plain data; limited, 1.0 if a limit was hit. Raises SandboxError
    if the sandbox failed, ValueError for tests that cannot be parsed or that fail for any program."""
    tests = answer if tests is None else tests
    if tests is None:
        return None
    result = grade(code_block(completion), tests, str(entry_point or ""), stop=code_score == "all")
    share = sum(result.passed) / len(result.passed)
    metrics = {"passed": share, "opaque": float(bool(result.opaque)), "limited": float(bool(result.limit))}
    return (float(share == 1.0) if code_score == "all" else share), metrics


code_reward.prepare = sandbox.prepare


def code_block(text: str) -> str:
    """Returns the last block between ``` lines, including an unclosed one; the whole text if there is none."""
    blocks = re.findall(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else text
