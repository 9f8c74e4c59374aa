"""What every reader gives: the keys of a config with their values and places; scalars, overrides and interpolation."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

MOST = 20_000  # settings of a config
UNDECIDED = "is not decided by the text: give "  # in a note, before NAME=VALUE
DEEPEST = 40  # levels of nesting, of includes and of interpolation


class Unreadable(ValueError):
    """A config that cannot be read. The message names the place (file:line), the key where there is one, and why."""

    def __init__(self, where: str, key: str, why: str):
        super().__init__(f"{where}: {key + ': ' if key else ''}{why}")
        self.where, self.key, self.why = where, key, why


class Literal(str):
    """Text whose `${...}` was escaped in the source: it stands as it is in the config, and no variable of the
    environment is filled in."""

    def __str__(self) -> str:
        return self


class Setting(NamedTuple):
    """One key of the source: dotted name, value as the source would read it, and place ('run.sh:27')."""

    key: str
    value: Any
    where: str


class Source(NamedTuple):
    """The settings of a config file, and what was noted while it was read. settings: by key, in the order of the
    source, the last of several wins. notes: what was not followed (branches of a script, commands in its values,
    included files that are not at hand). command: the words of a script's command that are no settings, or the command
    that a program in Python stands for; "" of other files. asked: questions to the user about the file as a whole.
    referred: keys and tables that another value refers to by ${...}. computed: keys whose values a program computes,
    with their expressions, and the question to the user about each."""

    settings: dict[str, Setting]
    notes: list[str]
    command: str = ""
    asked: tuple[str, ...] = ()
    referred: frozenset[str] = frozenset()
    computed: tuple[tuple[Setting, str], ...] = ()


_NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?")
_WORDS = {
    "null": None,
    "~": None,
    "none": None,
    "true": True,
    "false": False,
    ".inf": float("inf"),
    "inf": float("inf"),
}


def scalar(text: str) -> Any:
    """Returns the value of an unquoted word: null (null, ~, None), a bool (true, false), inf (.inf too), a number (1e-6
    and 1_000 too), else the text, as of "", -inf and nan. The case of words does not count, but "none" in small letters
    is text, and so is a whole number of more than 4000 digits."""
    if text.lower() in _WORDS and text != "none":
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        plain = text.replace("_", "")
        if re.search(r"[.eE]", plain):
            return float(plain)
        return int(plain) if len(plain) <= 4000 else text  # Python reads 4300
    return text


def switch(value: Any) -> Any:
    """Returns text that spells true or false, in whatever case, as a bool, and any other value as it is."""
    return _WORDS[value.lower()] if isinstance(value, str) and value.lower() in ("true", "false") else value


def override_value(text: str, depth: int = 0) -> Any:
    """Returns the value of a hydra or OmegaConf override: quoted text, [lists], {tables}, null, bools, numbers, text.

    A quote that is not closed is text, but an error within a list or table; text that begins with {{ is text. depth:
    how many lists and tables the text lies in. Raises ValueError for brackets that are not closed, an entry of a table
    without a colon, and more than DEEPEST lists and tables."""
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    text = text.strip()
    if text[:1] in "'\"" and len(text) > 1 and text[-1] == text[0]:
        return text[1:-1]
    if text[:1] == "[":
        if text[-1] != "]":
            raise ValueError(f"{text!r} begins a list that does not end")
        return [override_value(part, depth + 1) for part in split_top(text[1:-1], ",")]
    if text[:1] == "{" and not text.startswith("{{"):
        if text[-1] != "}":
            raise ValueError(f"{text!r} begins a table that does not end")
        out = {}
        for part in split_top(text[1:-1], ","):
            name, colon, value = part.partition(":")
            if not colon:
                raise ValueError(f"{part!r} in a table has no colon")
            out[str(override_value(name, depth + 1))] = override_value(value, depth + 1)
        return out
    return scalar(text)


def split_top(text: str, mark: str) -> list[str]:
    """Returns the parts of a text between marks (one character) that are outside of quotes and brackets, blanks kept;
    [] for blank text. Raises ValueError for a quote or bracket that is not closed."""
    out, depth, quote, start = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == mark and not depth:
            out.append(text[start:i])
            start = i + 1
    if quote or depth:
        raise ValueError(f"{text!r}: a quote or bracket is not closed")
    return [*out, text[start:]] if text.strip() else []


_OVERRIDE = re.compile(r"(\+\+|\+|~|--)?([A-Za-z_][\w./@-]*)=(.*)", re.S)


def override(word: str, where: str) -> list[Setting]:
    """Returns the settings of an override such as '+a.b=1' or '--a/b=1': one, or one per entry of a table. [] where the
    word is no override. `~a.b` and `~a.b=1`, which delete the key in hydra, give null. Raises Unreadable for a value
    that `override_value` does not read. where: the place of the settings."""
    if found := re.fullmatch(r"~([A-Za-z_][\w./@-]*)", word):
        return [Setting(found[1].replace("/", "."), None, where)]
    found = _OVERRIDE.fullmatch(word)
    if not found:
        return []
    mark, key, text = found[1] or "", found[2].replace("/", "."), found[3]
    if mark == "~":
        return [Setting(key, None, where)]
    try:
        value = override_value(text)
    except ValueError as e:
        raise Unreadable(where, key, str(e)) from None
    return list(leaves(key, value, where))


def leaves(key: str, value: Any, where: str, depth: int = 0):
    """Yields a value as settings below `key` ("": at the top): tables are followed, everything else (lists, empty
    tables) is one setting. Raises Unreadable for more than DEEPEST tables within each other."""
    if depth > DEEPEST:
        raise Unreadable(where, key[:80], "nested too deeply")
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(f"{key}.{name}" if key else str(name), part, where, depth + 1)
    else:
        yield Setting(key, value, where)


def merge(into: dict[str, Setting], new: list[Setting], groups: tuple[str, ...] = ()) -> None:
    """Adds settings to `into` in place, each at the end. A later setting removes an earlier one of its key, all those
    below its key (it replaces the table) and one of a key above it (a leaf that becomes a table). groups: hydra's
    groups of configs, whose name (`engine=megatron`) stays beside the keys below it. Raises Unreadable if `into` then
    has more than MOST."""
    for setting in new:
        key = setting.key
        for other in [k for k in into if k.startswith(key + ".") and key not in groups]:
            del into[other]
        for stop in (i for i, c in enumerate(key) if c == "." and key[:i] not in groups):
            into.pop(key[:stop], None)
        into.pop(key, None)
        into[key] = setting
    if len(into) > MOST:
        raise Unreadable(new[-1].where, new[-1].key, f"more than {MOST} settings")


# -- interpolation -----------------------------------------------------------------------------------------------------


def interpolate(
    settings: dict[str, Setting],
    resolvers: dict[str, Callable] | None = None,
    environment: dict[str, str] | None = None,
    referred: set[str] | None = None,
) -> dict[str, Setting]:
    """Returns settings with ${a.b}, ${.b}, ${oc.env:NAME,default}, ${oc.select:a.b,default} and a system's own
    resolvers replaced, and texts with the escaped `\\${...}` as Literal. ${now:...} becomes "now". In a table that
    stands in a list ${.b} is another entry of it.

    A variable that `environment` does not have, and that has no default, stays as $NAME. A key that is not set stays as
    the text ${a.b}, so that the rule that reads it decides (the source may have a default for it); ${oc.select:a.b} is
    then null. referred: this set gets the keys and tables that some ${...} names. Raises Unreadable for ${ that is not
    closed, a value that refers to itself, a resolver that is not known or that fails; ValueError for a quote or bracket
    in a resolver's arguments that is not closed."""
    state = _Interpolation(settings, resolvers or {}, environment or {}, set() if referred is None else referred)
    return {key: s._replace(value=state.value(s.value, s, 0)) for key, s in settings.items()}


class _Interpolation:
    def __init__(self, settings, resolvers, environment, referred):
        self.settings, self.resolvers, self.environment, self.referred = settings, resolvers, environment, referred

    def value(self, value, at: Setting, depth: int, table: dict | None = None):
        """Returns a value of the setting `at` with what it refers to. table: that it stands in, within a list."""
        if isinstance(value, list):
            return [self.value(v, at, depth, table) for v in value]
        if isinstance(value, dict):
            return {k: self.value(v, at, depth, value) for k, v in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > DEEPEST:
            raise Unreadable(at.where, at.key, f"{value!r} refers to itself")
        start, out, escaped = 0, [], False
        while (i := value.find("${", start)) >= 0:
            before = value[start:i]
            slashes = len(before) - len(before.rstrip("\\"))
            before = before[: len(before) - (slashes + 1) // 2]  # OmegaConf's escape, `\\${` and `\\\\${`
            if slashes % 2:
                out, start, escaped = [*out, before, "${"], i + 2, True
                continue
            end = self._end(value, i, at)
            inner = self.inner(value[i + 2 : end], at, depth + 1, table)
            if i == 0 and end == len(value) - 1:
                return inner
            out += [before, "" if inner is None else str(inner)]
            start = end + 1
        return (Literal if escaped else str)("".join([*out, value[start:]]))

    @staticmethod
    def _end(text, i, at):
        depth = 0
        for j in range(i, len(text)):
            depth += (text[j] == "{") - (text[j] == "}")
            if text[j] == "}" and depth == 0:
                return j
        raise Unreadable(at.where, at.key, f"{text!r}: ${{ is not closed")

    def inner(self, text, at: Setting, depth: int, table: dict | None = None):
        name, colon, arguments = text.partition(":")
        if not colon:
            return self.key(text.strip(), at, depth, table=table)
        parts = [self.value(p.strip(), at, depth, table) for p in split_top(arguments, ",")]
        name = name.strip()
        if not parts and name in ("oc.env", "env", "oc.select"):
            raise Unreadable(at.where, at.key, f"${{{text}}} names nothing")
        if name in ("oc.env", "env"):
            known = self.environment.get(str(parts[0]))
            if known is not None:
                return scalar(known)
            return (
                scalar(str(parts[1]).strip("'\""))
                if len(parts) > 1
                else f"${{{parts[0]}}}".replace("{", "").replace("}", "")
            )
        if name == "now":  # hydra's time of the start
            return "now"
        if name == "oc.select":
            found = self.key(str(parts[0]), at, depth, missing=None, table=table)
            return scalar(str(parts[1])) if found is None and len(parts) > 1 else found
        if name in self.resolvers:
            try:
                return self.resolvers[name](*(scalar(p) if isinstance(p, str) else p for p in parts))
            except Exception as e:
                raise Unreadable(at.where, at.key, f"${{{text}}}: {e}") from None
        raise Unreadable(at.where, at.key, f"${{{text}}}: the resolver {name!r} is not known")

    def key(self, name: str, at: Setting, depth: int, missing: Any = ..., table: dict | None = None):
        if name.startswith(".") and table is not None:
            if name[1:] in table:
                return self.value(table[name[1:]], at, depth, table)
            raise Unreadable(at.where, at.key, f"${{{name}}}: the table within the list has no entry {name[1:]!r}")
        if name.startswith("."):
            up = len(name) - len(name.lstrip("."))
            parents = at.key.split(".")[:-up]
            name = ".".join([*parents, name.lstrip(".")])
        self.referred.add(name)
        if name in self.settings:
            s = self.settings[name]
            return self.value(s.value, s, depth)
        below = {k: s for k, s in self.settings.items() if k.startswith(name + ".")}
        if below:
            return {k[len(name) + 1 :]: self.value(s.value, s, depth) for k, s in below.items()}
        return f"${{{name}}}" if missing is ... else missing


def _quotient(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)  # towards 0


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _quotient,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def arithmetic(text: str) -> int:
    """Returns the value of an integer expression of + - * / // % and brackets as a shell computes it: quotients are
    rounded towards 0, remainders have the dividend's sign. Raises ValueError for anything else and for more than 200
    characters."""
    if len(text) > 200:
        raise ValueError(f"{text[:40]!r}... is too long to compute")

    def walk(node):
        if isinstance(node, ast.Expression):
            return walk(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(f"{text!r} cannot be computed")

    try:
        return walk(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as e:
        raise ValueError(f"{text!r} cannot be computed: {e}") from None
