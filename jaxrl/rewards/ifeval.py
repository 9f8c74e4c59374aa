"""Checks of instructions that a program can verify (IFEval, arXiv 2311.07911), as the rows of RLVR-IFeval name them.

A check takes the text and its arguments by name; `follows` chooses it by func_name. Arguments that a check does not
have are left out, as the rows bring all of them. A completion that breaks a check scores False; a row whose check is
not known raises ValueError.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

CHECKS: dict[str, Callable[..., bool]] = {}


def check(name: str):
    """Returns a decorator that registers a check in CHECKS under the func_name that rows of IFEval use.

    A check is f(text, arguments of the row) -> bool."""

    def add(fn):
        CHECKS[name] = fn
        return fn

    return add


def follows(text: str, constraint: Any) -> bool:
    """Returns whether a text obeys a constraint: a dict, or JSON of one, with func_name and the check's arguments.

    Raises ValueError if it names no check, or lacks an argument of it."""
    table = json.loads(constraint) if isinstance(constraint, str) else dict(constraint)
    name = table.get("func_name")
    if name not in CHECKS:
        raise ValueError(f"func_name={name!r} is none of {', '.join(CHECKS)}")
    fn = CHECKS[name]
    wanted = list(inspect.signature(fn).parameters)[1:]
    if missing := [n for n in wanted if table.get(n) is None]:
        raise ValueError(f"{name}: the constraint has no {', '.join(missing)}")
    return bool(fn(text, **{n: table[n] for n in wanted}))


def _compared(count: int, wanted: int, quantifier: str, around: int) -> bool:
    """Compares a count: at least, at most, or around so much."""
    return {"at least": count >= wanted, "at most": count <= wanted, "around": abs(count - wanted) <= around}.get(
        quantifier, False)


@check("verify_keywords")
def keywords(text, keyword_list):
    """Returns whether every keyword is in the text, case aside, also as part of another word."""
    return all(str(word).lower() in text.lower() for word in keyword_list)


@check("verify_keyword_frequency")
def keyword_frequency(text, word, N):
    """Returns whether a word occurs exactly N times: whole words, case aside, as open-instruct's RLVR-IFEval counts
    (IFEval counts parts of words too). A word that begins or
    ends with a sign, such as `c++`, is counted only where a letter, digit or _ touches the sign.

    (ROLL's counts all words of the text, whatever `word` is.)"""
    return len(re.findall(rf"\b{re.escape(str(word).lower())}\b", text.lower())) == N


@check("validate_forbidden_words")
def forbidden_words(text, forbidden_words):
    """Returns whether none of the words is in the text, case aside, also as part of another word."""
    return not any(str(word).lower() in text.lower() for word in forbidden_words)


@check("verify_letter_frequency")
def letter_frequency(text, letter, N):
    """Returns whether the one character `letter` occurs exactly N times; case counts."""
    return len(letter) == 1 and text.count(letter) == N


@check("validate_response_language")
def response_language(text, language):
    """Returns whether langdetect takes the text for `language`, an ISO 639-1 code.

    Its guess of a short text is random; here it is drawn with seed 0. Needs the package langdetect."""
    from langdetect import DetectorFactory, LangDetectException, detect  # pyright: ignore[reportMissingImports]

    DetectorFactory.seed = 0
    try:
        return detect(text) == language
    except LangDetectException:
        return False


@check("verify_paragraph_count")
def paragraph_count(text, N):
    """Returns whether the text has exactly N paragraphs, none empty, divided by "* * *"."""
    parts = "\n".join(line.strip() for line in text.splitlines()).strip().split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


@check("validate_word_constraint")
def word_count(text, N, quantifier):
    """Returns whether the number of words, divided by white space, compares to N as `quantifier` says ("at least", "at
    most"); "around" allows a difference of a tenth of N, at least 1. Another quantifier is never obeyed."""
    return _compared(len(text.split()), N, quantifier, max(round(N * 0.1), 1))


@check("verify_sentence_constraint")
def sentence_count(text, N, quantifier):
    """Returns whether the number of sentences compares to N as `quantifier` says ("at least", "at most"); "around"
    allows a difference of 1. Another quantifier is never obeyed. A sentence ends with "." or "?" before white space,
    not with "!", nor with the point of `Mr.` (a capital and a small letter) or `e.g.`; white space after the last one
    counts as a further sentence."""
    sentences = re.split(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?])\s", text)
    return _compared(len(sentences), N, quantifier, 1)


@check("validate_paragraphs")
def paragraphs(text, N, first_word, i):
    """Returns whether the text has exactly N paragraphs, divided by two line breaks, and the i-th (from 1) begins with
    first_word, white space aside."""
    parts = text.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


@check("verify_postscript")
def postscript(text, postscript_marker):
    """Returns whether something other than white space follows the first postscript_marker in the text."""
    _, found, rest = text.partition(postscript_marker)
    return bool(found and rest.strip())


@check("validate_placeholders")
def placeholders(text, N):
    """Returns whether the text has at least N placeholders in square brackets, on one line each, also empty ones."""
    return len(re.findall(r"\[[^\]\n]*\]", text)) >= N


@check("verify_bullet_points")
def bullet_points(text, N):
    """Returns whether exactly N lines begin with * or -, white space before it aside."""
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


@check("validate_title")
def title(text):
    """Returns whether a title stands between << and >> on one line, also an empty one."""
    return re.search(r"<<[^\n]*?>>", text) is not None


@check("validate_choice")
def choice(text, options):
    """Returns whether the whole text occurs in one of the options, as the rows' own check has it; an empty text, which
    occurs in all, does not count."""
    return bool(text.strip()) and any(text in str(option) for option in options)


@check("validate_highlighted_sections")
def highlighted_sections(text, N):
    """Returns whether at least N parts of lines stand between asterisks, empty ones included: **this** counts twice."""
    return len(re.findall(r"\*[^*\n]*\*", text)) >= N


@check("validate_sections")
def sections(text, N, section_splitter):
    """Returns whether section_splitter divides the text into exactly N sections; what precedes the first one counts as
    one, too, unless it is empty."""
    parts = text.split(section_splitter)
    return len(parts) - (parts[0] == "") == N


@check("validate_json_format")
def json_format(text):
    """Returns whether the whole text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@check("validate_repeat_prompt")
def repeat_prompt(text, original_prompt):
    """Returns whether the text begins with original_prompt."""
    return text.startswith(original_prompt)


@check("validate_two_responses")
def two_responses(text):
    """Returns whether "******" divides the text into exactly two different responses."""
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


@check("validate_uppercase")
def uppercase(text):
    """Returns whether the text has no small letters."""
    return text == text.upper()


@check("validate_lowercase")
def lowercase(text):
    """Returns whether the text has no capital letters."""
    return text == text.lower()


@check("validate_frequency_capital_words")
def capital_words(text, N, quantifier):
    """Returns whether the number of words in capital letters A to Z, also of one letter, compares to N as `quantifier`
    says ("at least", "at most", "around", which allows no difference here). Another quantifier is never obeyed."""
    return _compared(len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier, 0)


@check("validate_end")
def end(text, end_phrase):
    """Returns whether the text ends with end_phrase."""
    return text.endswith(end_phrase)


@check("validate_quotation")
def quotation(text):
    """Returns whether the text begins and ends with a double quotation mark, which may be one and the same."""
    return text.startswith('"') and text.endswith('"')


@check("validate_no_commas")
def no_commas(text):
    """Returns whether the text has no comma."""
    return "," not in text
