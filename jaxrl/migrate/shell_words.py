"""The words of a bash script: where words, quotes and brackets end. shell.py says what they mean."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxrl.migrate.source import MOST, Unreadable

OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")


class Word(NamedTuple):
    """A word as it stands in the script, quotes and all; an operator where `op`."""

    text: str
    line: int
    op: bool = False


def tokens(text: str, name: str) -> list[Word]:
    """Returns a script as words and operators, without comments, redirections and here-documents; a newline is the
    last. name: the script's, for errors. Raises Unreadable where a quote or bracket is not closed, and for a text that
    is too long."""
    out, i, line, n = [], 0, 1, len(text)
    heredocs: list[str] = []
    while i < n:
        c = text[i]
        if c == "\n":
            out.append(Word("\n", line, True))
            i, line = i + 1, line + 1
            for mark in heredocs:
                i, line = _skip_heredoc(text, i, line, mark)
            heredocs = []
        elif c in " \t\r":
            i += 1
        elif text.startswith("\\\n", i) or text.startswith("\\\r\n", i):
            i, line = text.index("\n", i) + 1, line + 1
        elif c == "#":
            i = text.find("\n", i) if "\n" in text[i:] else n
        elif found := re.compile(r"\d*<<-?\s*(['\"]?)([\w-]+)\1").match(text, i):
            heredocs.append(found[2])
            i = found.end()
        elif found := re.compile(r"(\d*>>?&?\d*|\d*<<<|\d*<|&>>?)\s*").match(text, i):
            i = found.end()
            if not found[0].rstrip().endswith(("&1", "&2")):
                i = _word_end(text, i, line, name)
        elif op := next((o for o in OPERATORS if text.startswith(o, i)), None):
            out.append(Word(op, line, True))
            i += len(op)
        else:
            end = _word_end(text, i, line, name)
            out.append(Word(text[i:end], line))
            line += text.count("\n", i, end)
            i = max(end, i + 1)
        if len(out) > 10 * MOST:
            raise Unreadable(f"{name}:{line}", "", "too long")
    return [*out, Word("\n", line, True)]


def _skip_heredoc(text, i, line, mark):
    while i < len(text):
        end = text.find("\n", i)
        end = len(text) if end < 0 else end
        done = text[i:end].strip() == mark
        i, line = end + 1, line + 1
        if done:
            break
    return i, line


def _word_end(text: str, i: int, line: int, name: str) -> int:
    """Returns where the word that begins at i ends; an array `X=(...)` is one word."""
    start, n = i, len(text)
    while i < n:
        c = text[i]
        if c in " \t\r\n;|&)" or c in "<>" and i > start:
            return i
        if c == "(":
            if i > start and text[i - 1] == "=":
                i = closing(text, i, "(", ")", line, name)
                continue
            return i
        i = unit_end(text, i, line, name)
    return i


def unit_end(text: str, i: int, line: int, name: str) -> int:
    """Returns the position past the character, quoted text or substitution at i."""
    c = text[i]
    if c == "\\":
        return min(i + 2, len(text))
    if c == "'":
        end = text.find("'", i + 1)
        if end < 0:
            raise Unreadable(f"{name}:{line}", "", "a quote (') is not closed")
        return end + 1
    if c == '"':
        i += 1
        while i < len(text) and text[i] != '"':
            i = unit_end(text, i, line, name) if text[i] in "\\$`" else i + 1
        if i >= len(text):
            raise Unreadable(f"{name}:{line}", "", 'a quote (") is not closed')
        return i + 1
    if c == "`":
        end = text.find("`", i + 1)
        if end < 0:
            raise Unreadable(f"{name}:{line}", "", "a backtick is not closed")
        return end + 1
    if text.startswith("$(", i):
        return closing(text, i + 1, "(", ")", line, name)
    if text.startswith("${", i):
        return closing(text, i + 1, "{", "}", line, name)
    return i + 1


def closing(text: str, i: int, opening: str, end: str, line: int, name: str) -> int:
    """Returns the position past the bracket `end` that closes the one at i. Raises Unreadable where none does."""
    depth = 0
    while i < len(text):
        c = text[i]
        if c == "#" and opening == "(" and text[i - 1] in " \t\n(":
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
            continue
        if c in "'\"\\`" or c == "$" and text[i + 1 : i + 2] in ("(", "{"):
            i = unit_end(text, i, line, name)
            continue
        depth += (c == opening) - (c == end)
        i += 1
        if depth == 0:
            return i
    raise Unreadable(f"{name}:{line}", "", f"a bracket ({opening}) is not closed")
