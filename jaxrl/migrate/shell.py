"""Bash scripts that start a training job, as settings. A script is parsed, never executed: no process is started, no
file but scripts that it names is read.

What is followed: variables with their defaults (`${X:-8}`), arrays, arithmetic, quoting, `if`, `case`, `&&`, `||` where
their conditions can be decided from the text, scripts that are sourced or called, the first turn of a `for`. What is
not (a command in a value, a condition on files) is said in the notes.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import NamedTuple

from jaxrl.migrate.awk import computed
from jaxrl.migrate.shell_words import Word, closing, tokens, unit_end
from jaxrl.migrate.source import DEEPEST, MOST, UNDECIDED, Unreadable, arithmetic
from jaxrl.migrate.yaml_files import text_of

NPU = re.compile(r"\$\((python3? -c ['\"]import torch_npu['\"])[^&|]*&&\s*echo\s+\w+\s*\|\|\s*echo\s+(\w+)\s*\)")


class Command(NamedTuple):
    """A command that the script would start. words: (text, line) of each word, expanded. file: name of the script."""

    words: list[tuple[str, int]]
    file: str


CLASSES = {"space": r"\s", "digit": "0-9", "alpha": "A-Za-z", "alnum": "0-9A-Za-z", "upper": "A-Z", "lower": "a-z",
           "punct": r"!-/:-@\[-`{-~"}  # [[:NAME:]] of a glob
OUTSIDE = ("HOME", "USER", "PWD", "HOSTNAME", "TMPDIR")  # kept as $NAME, for the machine where the config runs


class Script:
    """Walks through a script and collects the commands that it would start.

    environment: variables given by the user, which win over the script's defaults (`${X:-8}`) as the shell's would; X=8
    in the script wins over them. notes: this list gets what is not followed, each text once.

    Attributes:
      commands: list of Command, in order; `run` fills it.
      variables: name -> text, of an array the list of its texts, as they are now."""

    def __init__(self, environment: dict[str, str], notes: list[str]):
        self.variables: dict[str, str | list[str]] = dict(environment)
        self.notes, self.commands, self.steps = notes, [], 0
        self.positional: list[str] = []

    def run(self, path: Path, depth: int = 0) -> None:
        """Reads a script, and those that it sources or calls, adding to `commands`. Raises Unreadable for a file that
        cannot be read or parsed, texts that grow without end and scripts more than 8 deep. depth: how many scripts call
        this one."""
        if depth > 8:
            raise Unreadable(path.name, "", "scripts that call each other")
        _Walk(self, path, tokens(text_of(path), path.name), depth).all()

    def note(self, text: str) -> None:
        """Adds a text to `notes`, if it is not there yet."""
        if text not in self.notes:
            self.notes.append(text)


class _Walk:
    def __init__(self, script: Script, path: Path, words: list[Word], depth: int):
        self.script, self.path, self.words, self.depth = script, path, words, depth
        self.name, self.i = path.name, 0
        self.active = [True]  # one entry per open block
        self.blocks: list[dict] = []
        self.groups: list[tuple[dict, list[str]] | None] = []  # what a subshell restores; None of another bracket

    def all(self):
        self.script.steps += len(self.words)
        if self.script.steps > 20 * MOST:
            raise Unreadable(self.name, "", "too long")
        skip = ""
        while self.i < len(self.words):
            word = self.words[self.i]
            if word.op:
                self.i += 1
                if word.text in ("\n", ";", "&", "|"):
                    skip = ""
                elif word.text in ("&&", "||"):
                    skip = word.text
                elif word.text == ";;":
                    self.end_of_case_branch()
                elif word.text in "()":
                    self.bracket(word.text)
                continue
            start = self.i
            while self.i < len(self.words) and not self.words[self.i].op:
                self.i += 1
            result = self.simple(self.words[start : self.i], skip)
            skip = "" if result is None else skip
            self.last = result if result is not None else True

    last: bool = True

    def bracket(self, text: str):
        """Begins or ends a subshell, whose variables are its own; the brackets of `(( ))` and of a pattern of `case`
        are none."""
        if text == ")":
            if self.groups and (before := self.groups.pop()):
                self.script.variables, self.script.positional = before
            return
        if self.blocks and self.blocks[-1].get("patterns") is not None:
            return
        arithmetic = self.op() == "(" or self.i > 1 and self.words[self.i - 2].text == "("
        self.groups.append(None if arithmetic else (dict(self.script.variables), list(self.script.positional)))

    @property
    def on(self) -> bool:
        return all(self.active)

    def simple(self, words: list[Word], after: str):
        """Runs one command, or a keyword with what follows it. after: && or || before it, else "". Returns whether a
        test holds (not decided: False), behind && or || of a command that is passed over the last result; else None."""
        while words and words[0].text in ("then", "do", "else", "{", "!", "time"):
            if words[0].text == "else":
                self.branch(None)
            words = words[1:]
        if not words:
            return None
        first = words[0].text
        if first in ("if", "elif", "while", "until"):
            return self.condition(first, words)
        if first in ("fi", "done", "esac", "}"):
            if first == "esac" and self.blocks and self.blocks[-1].get("choices"):
                block = self.blocks[-1]
                choices = block["choices"] if len(block["choices"]) > 1 else [*block["choices"], "another value"]
                self.script.note(f"{self.name}:{block['line']}: `case` {UNDECIDED}{' or '.join(choices)}")
            if self.blocks and first != "}" or self.blocks and self.blocks[-1]["kind"] == "function":
                self.blocks.pop()
                self.active.pop()
            return None
        if first in ("case", "for", "function"):
            return getattr(self, "_" + first)(words)
        if self.blocks and self.blocks[-1].get("patterns") is not None:
            return self.pattern(words)
        if self.op() == "(" and len(words) == 1 and self.peek(1) == ")":
            return self._function(words)
        if not self.on or after == "&&" and self.last is False or after == "||" and self.last is not False:
            return self.last if after else None
        if first in ("[", "[[", "test"):
            decided = self.test([w.text for w in words])
            if decided is None:
                self.script.note(
                    f"{self.name}:{words[0].line}: a condition that the text does not decide is taken not to hold"
                )
            return bool(decided)
        self.command(words)
        return None

    def op(self):
        return self.words[self.i].text if self.i < len(self.words) and self.words[self.i].op else ""

    def peek(self, ahead: int):
        return self.words[self.i + ahead].text if self.i + ahead < len(self.words) else ""

    # -- blocks --------------------------------------------------------------------------------------------------------

    def condition(self, first, words):
        decided: bool | None = None
        if first in ("while", "until"):
            self.script.note(f"{self.name}:{words[0].line}: what the loop does is not followed")
            decided = False
        elif self.on or first == "elif":
            rest = [w.text for w in words[1:]]
            if rest[:1] and rest[0] in ("[", "[[", "test"):
                decided = self.test(rest)
            while self.op() in ("&&", "||"):  # several conditions
                joint, start = self.op(), self.i + 1
                self.i = start
                while not self.words[self.i].op:
                    self.i += 1
                rest = [w.text for w in self.words[start : self.i]]
                whole = rest[:1] and rest[0] in ("[", "[[", "test")
                other = self.test(rest if whole else ["[[", *rest])  # [[ a && b ]]
                both = None in (decided, other)
                decided = None if both else (decided and other) if joint == "&&" else (decided or other)
            if decided is None:
                self.script.note(
                    f"{self.name}:{words[0].line}: the condition of `if` is not decided by the text; its "
                    "`else` is taken"
                )
        if first == "elif":
            self.branch(decided)
            return None
        self.blocks.append({"kind": "if", "done": bool(decided)})
        self.active.append(bool(decided))
        return None

    def branch(self, decided):
        """Takes else (None) or elif."""
        if self.blocks and self.blocks[-1]["kind"] == "if":
            block = self.blocks[-1]
            self.active[-1] = not block["done"] and (decided is None or bool(decided))
            block["done"] = block["done"] or self.active[-1]

    def _case(self, words):
        value = self.expand(words[1].text, words[1].line)[:1] if len(words) > 1 else [""]
        block = {"kind": "case", "value": value[0] if value else "", "done": False, "name": "", "line": words[0].line,
                 "patterns": []}  # those before the bracket; None behind it
        name = re.fullmatch(r"[\"']?\$\{?(\w+)\}?[\"']?", words[1].text) if len(words) > 1 else None
        if self.on and name and "$" in block["value"]:
            block |= {"name": name[1], "choices": []}
        self.blocks.append(block)
        self.active.append(False)
        return self.pattern(words[3:])

    def pattern(self, words):
        block = self.blocks[-1]
        block["patterns"] += [w.text.strip("'\"") for w in words]
        if self.op() != ")":
            return None
        alternatives, block["patterns"] = block["patterns"], None
        fits = any(fnmatch.fnmatchcase(block["value"], a) for a in alternatives) and not block["done"]
        if block["name"]:
            block["choices"] += [f"{block['name']}={a}" for a in alternatives if re.fullmatch(r"[\w.-]+", a)]
        self.active[-1], block["done"] = fits, block["done"] or fits
        self.i += 1  # past the bracket
        return None

    def end_of_case_branch(self):
        if self.blocks and self.blocks[-1]["kind"] == "case":
            self.active[-1], self.blocks[-1]["patterns"] = False, []

    def _for(self, words):
        on = self.on
        self.blocks.append({"kind": "for"})
        self.active.append(True)
        if on and len(words) > 3 and words[2].text == "in":
            values = [v for w in words[3:] for v in self.expand(w.text, w.line)]
            self.active[-1] = bool(values)
            if values:
                self.script.variables[words[1].text] = values[0]
                if len(values) > 1:
                    self.script.note(
                        f"{self.name}:{words[0].line}: of the `for` only {words[1].text}={values[0]} is read"
                    )
        else:
            self.active[-1] = False
        return None

    def _function(self, words):
        self.blocks.append({"kind": "function"})
        self.active.append(False)
        while self.op() in ("(", ")"):
            self.i += 1
        self.script.note(f"{self.name}:{words[0].line}: the function {words[-1].text if words else ''} is not followed")
        return None

    def test(self, words: list[str]) -> bool | None:
        """Evaluates [ ... ] where it compares texts or numbers; None where the text does not decide."""
        body = [w for w in words[1:] if w not in ("]", "]]")]
        negate = body[:1] == ["!"]
        body = body[1:] if negate else body
        values = [" ".join(self.expand(w, 0)) if w[:1] != "-" else w for w in body]
        decided: bool | None = None
        if any("$" in v and not re.fullmatch(r"\$\w+", v) for v in values):
            decided = None
        elif len(values) == 2 and values[0] in ("-z", "-n"):
            empty = values[1] == "" or values[1] == body[1].strip('"') and "$" in body[1]
            decided = empty == (values[0] == "-z")
        elif len(values) == 1 and values[0]:
            decided = "$" not in values[0]
        elif len(values) == 3 and values[1] in ("=", "=="):
            decided = fnmatch.fnmatchcase(values[0], values[2])
        elif len(values) == 3 and values[1] == "!=":
            decided = not fnmatch.fnmatchcase(values[0], values[2])
        elif len(values) == 3 and values[1] in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le"):
            try:
                a, b = int(values[0]), int(values[2])
                decided = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[
                    values[1]
                ]
            except ValueError:
                decided = None
        return decided if decided is None else decided != negate

    # -- commands ------------------------------------------------------------------------------------------------------

    def command(self, words: list[Word]):
        """Runs a command. Variables that stand before it are of its environment alone: a script that it calls has
        them, its own words do not."""
        own = []
        while words and (found := re.match(r"([A-Za-z_]\w*)(\+?)=(.*)", words[0].text, re.S)):
            own.append((found[1], found[2] == "+", found[3], words[0].line))
            words = words[1:]
        if not words:
            for variable in own:
                self.assign(*variable)
            return
        first = words[0].text
        if first in ("export", "declare", "local", "readonly", "typeset"):
            for w in words[1:]:
                if found := re.match(r"([A-Za-z_]\w*)(\+?)=(.*)", w.text, re.S):
                    self.assign(found[1], found[2] == "+", found[3], w.line)
            return
        expanded = [(text, w.line) for w in words for text in self.expand(w.text, w.line)]
        variables = self.script.variables
        before = {name: variables[name] for name, *_ in own if name in variables}
        for variable in own:
            self.assign(*variable)
        if first in ("source", ".") and len(expanded) > 1:
            self.include(expanded[1][0], expanded[2:], words[0].line, False)
        elif first in ("bash", "sh") and len(expanded) > 1 and expanded[1][0].endswith(".sh"):
            self.include(expanded[1][0], expanded[2:], words[0].line, True)
        elif first == "set" and len(words) > 1 and words[1].text == "--":
            self.script.positional = [text for text, _ in expanded[2:]]
        elif expanded:
            self.script.commands.append(Command(expanded, self.name))
        for name, *_ in own:
            self.script.variables.pop(name, None)
        self.script.variables |= before

    def include(self, file: str, arguments, line: int, own: bool):
        """Reads a script that is sourced, or called (its variables then are its own)."""
        path = Path(file)
        places = [folder / path for folder in (self.path.parent, *self.path.absolute().parents[:8])]
        found = next((p for p in (*places, self.path.parent / path.name) if p.is_file()), None)
        if "$" in file or found is None:
            self.script.note(f"{self.name}:{line}: the script {file} is not at hand")
            return
        variables, positional = dict(self.script.variables), self.script.positional
        self.script.positional = [text for text, _ in arguments]
        self.script.run(found, self.depth + 1)
        self.script.positional = positional
        if own:
            self.script.variables = variables

    def assign(self, name: str, more: bool, raw: str, line: int):
        variables = self.script.variables
        if raw.startswith("("):
            inner = tokens(raw[1 : raw.rindex(")")], self.name)
            new = [t for w in inner if not w.op for t in self.expand(w.text, line)]
            old = variables.get(name, [])
            variables[name] = [*(old if isinstance(old, list) else [old]), *new] if more else new

        else:
            value = " ".join(self.expand(raw, line, split=False))
            old = variables.get(name, "")
            variables[name] = f"{old}{value}" if more and isinstance(old, str) else value

    # -- expansion -----------------------------------------------------------------------------------------------------

    def expand(self, raw: str, line: int, split: bool = True, depth: int = 0) -> list[str]:
        """Returns a word with variables and quotes taken away; several where it is an array or splits at blanks."""
        if depth > DEEPEST:
            raise Unreadable(f"{self.name}:{line}", "", f"{raw[:40]!r} is nested too deeply")
        out, any_quote, i = [""], False, 0
        while i < len(raw):
            end = unit_end(raw, i, line, self.name)
            unit, c = raw[i:end], raw[i]
            if c == "\\":
                out[-1] += "" if unit == "\\\n" else unit[1:]
            elif c == "'":
                out[-1] += unit[1:-1]
                any_quote = True
            elif c == '"':
                any_quote = True
                parts = self.quoted(unit[1:-1], line, depth)
                out[-1] += parts[0] if parts else ""
                out += parts[1:]
            elif c in "$`":
                end, parts = self.dollar(raw, i, line, depth)
                unread = parts and ("$(" in parts[0] or "`" in parts[0])
                whole = unread or not (len(parts) == 1 and split and " " in parts[0].strip())
                parts = parts if whole else parts[0].split()
                out[-1] += parts[0] if parts else ""
                out += parts[1:]
            else:
                out[-1] += unit
            i = end
            if sum(map(len, out)) > 1_000_000 or len(out) > MOST:
                raise Unreadable(f"{self.name}:{line}", "", "a word that grows without end")
        return [] if out == [""] and not any_quote else out

    def quoted(self, inner: str, line: int, depth: int) -> list[str]:
        out, i = [""], 0
        while i < len(inner):
            if inner[i] == "\\" and inner[i + 1 : i + 2] in ('"', "\\", "$", "`", "\n"):
                out[-1] += "" if inner[i + 1] == "\n" else inner[i + 1]
                i += 2
            elif inner[i] in "$`":
                i, parts = self.dollar(inner, i, line, depth)
                out[-1] += parts[0] if parts else ""
                out += parts[1:]
            else:
                out[-1] += inner[i]
                i += 1
        return out

    def dollar(self, text: str, i: int, line: int, depth: int) -> tuple[int, list[str]]:
        """Returns (where $NAME, ${...}, $((...)), $(...) or `...` at i ends, the words that it stands for)."""
        if text.startswith("$((", i):
            end = closing(text, i + 1, "(", ")", line, self.name)
            body = text[i + 3 : end - 2]
            body = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: f"({self.plain(m[1])})", body)
            try:
                return end, [str(arithmetic(body))]
            except ValueError:
                return end, [text[i:end]]
        if text.startswith("$(", i) or text[i] == "`":
            end = unit_end(text, i, line, self.name)
            if text[i:end].strip("$()` ") == "pwd":
                return end, ["."]
            if re.fullmatch(r"`\s*#[^\n]*`|\$\(\s*#[^\n]*\n?\s*\)", text[i:end]):  # a comment, which puts nothing there
                return end, []
            named = r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))"
            body = re.sub(named, lambda m: self.plain(m[1] or m[2]), text[i + 2 : end - 1])
            if (number := computed(body)) is not None:
                return end, [number]
            if probe := NPU.fullmatch(text[i:end]):
                self.script.note(f"{self.name}:{line}: {probe[1]}: taken for a machine without NPUs; for one with them "
                                 "give the variable after the file")
                return end, [probe[2]]
            self.script.note(f"{self.name}:{line}: {text[i:end][:60]} is a command, which is not run")
            return end, [text[i:end]]
        if text.startswith("${", i):
            end = closing(text, i + 1, "{", "}", line, self.name)
            return end, self.braces(text[i + 2 : end - 1], line, depth)
        if found := re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?!$-])").match(text, i):
            return found.end(), self.variable(found[1])
        return i + 1, [text[i]]

    def plain(self, name: str) -> str:
        value = self.script.variables.get(name, "")
        return value if isinstance(value, str) else " ".join(value)

    def variable(self, name: str) -> list[str]:
        if name in ("@", "*"):
            return list(self.script.positional)
        if name.isdigit():
            index = int(name) - 1
            return [self.script.positional[index] if 0 <= index < len(self.script.positional) else ""]
        if name in "#?!$-":
            return [str(len(self.script.positional)) if name == "#" else ""]
        value = self.script.variables.get(name)
        if value is None:
            return [f"${name}"]
        return [value[0] if value else ""] if isinstance(value, list) else [value]

    def braces(self, inner: str, line: int, depth: int) -> list[str]:
        """Expands ${NAME}, with a default, an index, a part that is taken, cut off or replaced. Another expansion
        stays as it is, which is noted."""
        found = re.match(r"(#?|!)([A-Za-z_]\w*|\d+|[@*])(\[[^\]]*\])?(.*)", inner, re.S)
        if not found:
            return self.unread(inner, line)
        mark, name, index, rest = found.groups()
        known = self.script.variables.get(name)
        if name in "@*":
            known, index = self.variable(name), "[@]"
        elif name.isdigit():
            known = self.variable(name)[0] or None
        if mark == "!":  # the variable that it names
            if index or not isinstance(known, str) or not re.fullmatch(r"[A-Za-z_]\w*", known):
                return self.unread(inner, line)
            return self.braces(known + rest, line, depth + 1)
        if index in ("[@]", "[*]"):
            values = known if isinstance(known, list) else [] if known is None else [known]
            if mark:
                return [str(len(values))]
            if values or not re.match(":?[-=+?]", rest):
                return self.parts(values, name, rest, line, depth)
            known = None
        if index and isinstance(known, list):
            at = index[1:-1]
            known = known[int(at)] if at.isdigit() and int(at) < len(known) else None
        if isinstance(known, list):
            known = known[0] if known else ""
        if mark:
            return [str(len(known)) if known else "0"]
        if rest[:1] == ":" and rest[1:2] in ("-", "=", "+", "?") or rest[:1] in ("-", "=", "+", "?"):
            return self.default(known, name, rest, line, depth)
        if known is None:
            return [f"${name}"] if not rest or rest[0] in "%#/" and name in OUTSIDE else self.unset(name, rest, line)
        return [self.cut(known, rest, line, depth)]

    def default(self, known: str | None, name: str, rest: str, line: int, depth: int) -> list[str]:
        """Expands ${NAME:-word} and its kin. known: the variable's value."""
        mark, word = (rest[1], rest[2:]) if rest[0] == ":" else (rest[0], rest[1:])
        unset = known is None or rest[0] == ":" and known == ""
        if mark == "+":
            return [] if unset else self.expand(word, line, False, depth + 1) or [""]
        if known is not None and not unset:
            return [known]
        if mark == "?":
            return [f"${name}"]
        value = " ".join(self.expand(word, line, False, depth + 1))
        if mark == "=":
            self.script.variables[name] = value
        return [value]

    def parts(self, values: list[str], name: str, rest: str, line: int, depth: int) -> list[str]:
        """Expands ${NAME[@]}, ${@:2} and other parts of all its values."""
        if rest[:1] == ":" and rest[1:2] not in ("-", "=", "+", "?"):
            counted = ["bash", *values] if name in ("@", "*") else values  # $0 is the script
            span = self.span(rest, len(counted), line, depth)
            return self.unread(f"{name}[@]{rest}", line) if span is None else counted[span]
        if rest[:1] == "+" or rest[:2] == ":+":
            return self.default(" ".join(values), name, rest, line, depth)
        return values if not rest or rest[0] in ":-=?" else [self.cut(v, rest, line, depth) for v in values]

    def unread(self, inner: str, line: int) -> list[str]:
        self.script.note(f"{self.name}:{line}: ${{{inner[:60]}}} is not expanded")
        return ["${" + inner + "}"]

    def unset(self, name: str, rest: str, line: int) -> list[str]:
        """Returns $NAME for a part of a variable that is not set, which is noted."""
        self.script.note(f"{self.name}:{line}: {name} is not set here, and ${{{name}{rest[:40]}}} is its part: give "
                         f"{name}=VALUE")
        return [f"${name}"]

    def span(self, rest: str, size: int, line: int, depth: int) -> slice | None:
        """Returns the slice of `:offset:length`, numbers below 0 from the end, of what has a size; None where they are
        no numbers."""
        try:
            texts = [" ".join(self.expand(n.strip(), line, False, depth + 1)) or "0" for n in rest[1:].split(":")]
            numbers = [arithmetic(re.sub(r"[A-Za-z_]\w*", lambda m: self.plain(m[0]) or "0", text)) for text in texts]
        except ValueError:
            return None
        if len(numbers) > 2:
            return None
        start = numbers[0] + size * (numbers[0] < 0)
        length = numbers[1] if len(numbers) > 1 else size
        return slice(start, start + length if length >= 0 else size + length) if start >= 0 else slice(0, 0)

    def cut(self, text: str, rest: str, line: int, depth: int) -> str:
        """Returns ${X%suffix}, ${X##prefix}, ${X/a/b}, ${X//a/b}, ${X:2:3}, ${X,,}, ${X^} of a value `text`, where
        patterns are globs. For another `rest` returns `text` as it is, which is noted."""
        if not rest:
            return text
        if found := re.match(r"(%%|%|##|#)(.*)", rest, re.S):
            pattern = self.glob(found[2], line, depth)
            front = found[1][0] == "#"
            sizes = range(len(text) + 1) if len(found[1]) == 1 else range(len(text), -1, -1)
            for size in sizes:
                part = text[:size] if front else text[len(text) - size :]
                if re.fullmatch(pattern, part, re.S):
                    return text[size:] if front else text[: len(text) - size]
            return text
        if rest[0] == "/":
            every = rest[1:2] == "/"
            old = rest[1 + every :]
            i = 0
            while i < len(old) and old[i] != "/":
                i = unit_end(old, i, line, self.name)
            old, new = old[:i], " ".join(self.expand(old[i + 1 :], line, False, depth + 1))
            at = old[:1] if old[:1] in ("#", "%") and not every else ""
            pattern = self.glob(old[len(at) :], line, depth)
            pattern = {"#": rf"\A(?:{pattern})", "%": rf"(?:{pattern})\Z"}.get(at, pattern)
            return re.sub(pattern, lambda m: new, text, count=0 if every else 1, flags=re.S) if old else text
        if rest[0] == ":" and (span := self.span(rest, len(text), line, depth)) is not None:
            return text[span]
        if change := {",,": str.lower, "^^": str.upper}.get(rest):
            return change(text)
        if change := {",": str.lower, "^": str.upper}.get(rest):
            return change(text[:1]) + text[1:]
        self.script.note(f"{self.name}:{line}: ${{NAME{rest[:40]}}} is not read: the value stays {text[:60]}")
        return text

    def glob(self, raw: str, line: int, depth: int) -> str:
        """Returns the regular expression of a pattern as it stands in the script: `*`, `?` and `[...]` outside of
        quotes, all else by itself."""
        out, i = "", 0
        while i < len(raw):
            end, c = unit_end(raw, i, line, self.name), raw[i]
            if found := re.compile(r"\[([!^]?)\[:(\w+):\]\]").match(raw, i):
                out, end = out + f"[{'^' if found[1] else ''}{CLASSES.get(found[2], '')}]", found.end()
            elif c == "*":
                out += "" if out.endswith(".*") else ".*"
            elif c == "?":
                out += "."
            elif c == "[" and (found := re.compile(r"\[([!^]?)(\]?[^\]]*)\]").match(raw, i)):
                inner, end = re.sub(r"([\\\[\]^&~|])", r"\\\1", found[2]), found.end()
                out += f"[{'^' if found[1] else ''}{inner}]"
            elif c in "$`":
                end, parts = self.dollar(raw, i, line, depth + 1)
                out += re.escape(" ".join(parts))
            else:
                out += re.escape(" ".join(self.expand(raw[i:end], line, False, depth + 1)))
            i = end
        return out


def commands(path: Path, environment: dict[str, str], notes: list[str]) -> list[Command]:
    """Returns the commands that a script would start, in order. environment, notes: as of Script, whose errors it
    raises."""
    script = Script(environment, notes)
    script.run(path)
    return script.commands
