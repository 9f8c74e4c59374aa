"""Names of reward functions, and the built-in ones: math, exact, boxed, choice, format, code. Each of these gives 1.0
or 0.0 (code also shares), or None without a reference answer.

Standard library only, but for `math`, which loads math-verify (and sympy) in the workers that need it. Endless
computations (sympy, a catastrophic pattern) are ended by the pool, which kills the worker.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from jaxrl import sandbox
from jaxrl.sandbox.grading import grade

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
    """Mathematical equality of the completion's final expression (a box, else the last expression) and `answer`."""
    if answer is None:
        return None
    math_verify = load_math_verify()
    gold = _gold(str(answer))
    if not gold:  # not mathematics: compare as text
        return boxed_reward(prompt, completion, answer)
    return float(math_verify.verify(gold, math_verify.parse(completion, parsing_timeout=None), timeout_seconds=None))


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
    parse = load_math_verify().parse
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
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, at = 1, start + len("\\boxed{")
        for end in range(at, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[at:end]
        start = text.rfind("\\boxed{", 0, start)
    return None


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
    match = re.fullmatch(r"\s*(?:\\text(?:bf)?\{)?[(\[*\s]*([A-Za-z])[)\].:*\s]*\}?\s*", text)
    return match.group(1).upper() if match else None


def _chosen(completion: str) -> str | None:
    content = last_boxed(completion)
    if content is not None:
        return _letter(content)
    said = re.findall(r"(?i:answer|option|choice)(?i:\s+is)?\s*[:=]?[\s(\[*]*([A-Z])(?![\w'])", completion)
    if said:
        return said[-1]
    alone = re.match(r"[\s(\[*]*([A-Z])(?=[)\].:,*]|\s*$)", completion)
    return alone.group(1) if alone else None


@register_reward("format")
def format_reward(prompt, completion, format_pattern):
    """The whole completion matches `reward.format_pattern` ('.' matches line ends too)."""
    return float(re.fullmatch(format_pattern, completion, re.DOTALL) is not None)


@register_reward("code")
def code_reward(prompt, completion, code_score, tests=None, answer=None, entry_point=None):
    """The program in the completion passes the row's unit tests, in the sandbox (docs/rewards.md has their forms).

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
