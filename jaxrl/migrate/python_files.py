"""Programs in Python as settings: keyword arguments of config classes, read by `ast`; nothing is executed.

Read are literals, names and attributes to which one assignment, one call or a default of argparse or a dataclass, and
nothing else in the file, gives a literal (python_values.py), variables of the environment that have a default or are
given, texts put together of those, and sums and products of numbers. Branches that such values rule out are not read.
Everything else is computed, and asked for; so is a key to which two calls give two values.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.migrate.python_notes import name_of, notes, other_tokenizer, text_of
from jaxrl.migrate.python_values import DEVICES, Computed, Values
from jaxrl.migrate.source import Setting, Unreadable

MOST = 1_000_000  # characters of a program
OF_CLASS = ", of its class"  # behind the place of a setting that a call makes without an argument


class Calls(NamedTuple):
    """What the reader looks for, of a system. A class or function is named by its last part, or its last two, and with
    one of `kinds` before it where it is imported from there (`agentic.GRPOConfig`).

    configs: class -> (command that it stands for, its arguments that are other keys there -> those, settings that it
    makes where no argument does). The key of "" stands before all other arguments, that of 0 is the first positional
    one's; None: an argument that is read elsewhere.
    trainers: class -> (command, argument -> key); a key in capitals, in lower case, gets the argument's source text.
    derived: what is asked of a class of the program's own that is derived from a trainer; "" = those are not read.
    loaded: arguments of `from_pretrained`, of the model that a trainer is given -> their keys, as those of configs.
    loads: function of a data set -> keys of its positional arguments and keywords.
    flags: classes whose presence says that values come from the command line.
    asks: class or function whose presence asks for something.
    tuples: keys whose lists are written as text, as "(2, 4)".
    enums: classes whose members stand for their names.
    more: (nodes, known, name of the file) -> (key, value or Computed, place) of what no call alone says.
    """

    configs: Mapping[str, tuple[str, Mapping[Any, str | None], Mapping[str, Any]]]
    trainers: Mapping[str, tuple[str, Mapping[str, str]]]
    loads: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]]
    flags: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    asks: Mapping[str, str] = {}
    derived: str = ""
    tuples: tuple[str, ...] = ()
    enums: tuple[str, ...] = ()
    loaded: Mapping[Any, str | None] = {}
    more: Callable[[list[ast.AST], Values, str], Iterator[tuple[str, Any, str]]] | None = None

    def name_in(self, table: Mapping, names: tuple[str, ...]) -> str:
        """Returns the first of the names that a table has, or ""."""
        return next((name for name in names if name in table), "")


class Program(NamedTuple):
    """The settings read from a Python program.

    Attributes:
      command: the command of the system that the program replaces.
      settings: keys with literal values, and their places.
      computed: (key with its expression, question to the user) for each value that only running the program gives.
      asked: further questions to the user, about the program as a whole."""

    command: str
    settings: list[Setting]
    computed: list[tuple[Setting, str]]
    asked: list[str]


def read_python(path: Path, calls: Calls, environment: Mapping[str, str] = {}, devices: int = 0) -> Program:
    """Returns a program's or notebook's settings; runs nothing. environment: values for its variables and constants.
    devices: those jax sees, 0 = unknown. Raises OSError, Unreadable (no Python, too long, no trainer, unused name)."""
    text = path.read_text("utf-8", errors="replace")
    if path.suffix == ".ipynb":
        text = _cells(path, text)
    if len(text) > MOST:
        raise Unreadable(path.name, "", f"is longer than {MOST} characters")
    try:
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise Unreadable(
            f"{path.name}:{getattr(e, 'lineno', None) or 1}", "", f"is no program of Python 3: {e}"
        ) from None
    given = (environment, devices, calls.enums)
    first = Values(nodes, path.stem, *given)
    nodes = list(_live(tree, first))
    known = Values(nodes, path.stem, *given)
    command, settings, asked, more = "", [], {}, []
    for node in (n for n in nodes if isinstance(n, ast.Call)):
        of, found = _call(node, known, calls, f"{path.name}:{node.lineno}", settings)
        command = command if of is None else of or command
        for key, value, place in found:
            if isinstance(value, Computed):
                asked.setdefault(key, _asked(key, value, place))
            else:
                settings.append(Setting(key, value, place))
        names = known.callees(node, calls.kinds)
        trains = bool(calls.loaded and calls.name_in(calls.trainers, names))
        more += [calls.asks[n] for n in names if n in calls.asks] + other_tokenizer(node, known, path.name) * trains
        if calls.derived and any(base in calls.trainers for base in known.bases.get(names[-1], ())):
            more.append(f"{names[-1]} ({path.name}:{node.lineno}) is a class of the program's own: {calls.derived}")
    found = calls.more(nodes, known, path.name) if calls.more else ()
    for key, value, place in (*found, *_assigned(nodes, known, calls, path.name)):
        if isinstance(value, Computed):
            settings = [s for s in settings if s.key != key]
            asked[key] = _asked(key, value, place)
        else:
            settings = [s for s in settings if s.key != key or not s.where.endswith(OF_CLASS)]
            settings.append(Setting(key, value, place))
    listed = lambda s: s.key in calls.tuples and isinstance(s.value, list)  # noqa: E731
    settings, twice = _once([s._replace(value=str(tuple(s.value))) if listed(s) else s for s in settings])
    names = {name_of(n).rpartition(".")[2] for n in nodes if isinstance(n, ast.Name | ast.Attribute)}
    if not command and not names & set(calls.flags):
        raise Unreadable(path.name, "", "starts no trainer: no config class or trainer is called")
    if unread := sorted(set(environment) - first.used - known.used):
        what = f"{path.name} reads no variable {unread[0]} and has no constant of this name"
        raise Unreadable("the command line", unread[0], what)
    read = {s.key for s in settings}
    computed = [pair for key, pair in asked.items() if key not in read] + twice
    texts = [*dict.fromkeys(more), *notes(nodes, calls.loads, bool(calls.loaded), path.name)]
    if names & set(calls.flags):
        texts.insert(
            0,
            f"{path.name} takes further values from its command line: give them as --key=value after the file, or "
            "migrate "
            "the script (.sh) that starts it",
        )
    return _by_cells(path, Program(command, settings, computed, texts))


def rows_changed_by(path: Path) -> list[str]:
    """Returns the questions to the user about rows that a program changes, which a script starts; [] where it cannot be
    read or parsed, or has more than MOST characters."""
    try:
        text = path.read_text("utf-8", errors="replace")
        return notes(list(ast.walk(ast.parse(text))), {}, False, path.name) if len(text) <= MOST else []
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _cells(path: Path, text: str) -> str:
    """Returns the code of a notebook, without the lines of its shell and its magic. Raises Unreadable."""
    code = "\n".join(source for _, source in _code_of(path, text))
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in code.split("\n"))


def _code_of(path: Path, text: str) -> list[tuple[int, str]]:
    """Returns (number of the cell among all, from 1; its code) of a notebook. Raises Unreadable."""
    try:
        cells = [(n, cell["source"]) for n, cell in enumerate(json.loads(text)["cells"], 1)
                 if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unreadable(path.name, "", "is no notebook of Jupyter's format 4") from None
    return [(n, "".join(map(str, source)) if isinstance(source, list) else str(source)) for n, source in cells]


def _by_cells(path: Path, program: Program) -> Program:
    """Returns what was read, with a notebook's places by cell and line: its code's lines are of no file."""
    if path.suffix != ".ipynb":
        return program
    lines = [(n, i) for n, source in _code_of(path, path.read_text("utf-8", errors="replace"))
             for i in range(1, source.count("\n") + 2)]

    def by_cell(text: str) -> str:
        place = re.compile(rf"{re.escape(path.name)}:(\d+)")
        return place.sub(lambda m: "{} cell {}, line {}".format(path.name, *lines[int(m[1]) - 1]), text)

    settings = [s._replace(where=by_cell(s.where)) for s in program.settings]
    computed = [(s._replace(where=by_cell(s.where)), by_cell(text)) for s, text in program.computed]
    return Program(program.command, settings, computed, [by_cell(text) for text in program.asked])


def _asked(key: str, value: Computed, place: str) -> tuple[Setting, str]:
    """Returns a key with its expression, and what is asked."""
    what = f"{key}={value} is computed ({place})"
    if key.endswith("**"):
        what += f": give what it holds as {key[:-2]}NAME=VALUE after the file"
    else:
        what += f": give {key}=VALUE after the file" + ", or --gpus=N" * (value.by in DEVICES)
    return Setting(key, str(value), place), what


def _call(node: ast.Call, known: Values, calls: Calls, where: str, settings):
    """Returns (the command that a call stands for, None where it says none; its keys, values and places)."""
    names = known.callees(node, calls.kinds)
    if name := calls.name_in(calls.configs, names):
        of, renamed, made = calls.configs[name]
        found = list(_keywords(node, known, renamed, calls, where))
        given = {key for key, *_ in found}
        whole = not any(key.endswith("**") for key in given)  # else what it does not set is not known
        own = [(k, v, where + OF_CLASS) for k, v in made.items() if k not in given and (whole or v is True)]
        return of, [*own, *found]
    bases = [base for n in names for base in known.bases.get(n, ())] if calls.derived else []
    if name := calls.name_in(calls.trainers, (*names, *bases)):
        of, keys = calls.trainers[name]
        model = next((k.value for k in node.keywords if k.arg == "model"), None)
        loaded = known.loaded(model) if calls.loaded and model is not None else None
        own = _keywords(loaded, known, calls.loaded, calls, where) if loaded else ()
        return of if not settings or of else None, [*_trainer(node, known, keys, where), *own]
    name = calls.name_in(calls.loads, names)
    if name and not any(s.key in calls.loads[name][0] for s in settings):
        return None, list(_load(node, known, *calls.loads[name], where))
    return None, []


def _assigned(nodes: list[ast.AST], known: Values, calls: Calls, file: str) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, value, place) of what is assigned to attributes of configs and of parsed arguments. A value of
    parsed arguments is left out: the command line, which is asked for, has it."""
    configs: dict[str, Mapping[Any, str | None]] = {}
    parsed = set()
    for node in (n for n in nodes if isinstance(n, ast.Assign | ast.AnnAssign)):
        if not isinstance(node.value, ast.Call):
            continue
        name = calls.name_in(calls.configs, known.callees(node.value, calls.kinds))
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and name:
                configs[target.id] = calls.configs[name][1]
            elif name_of(node.value.func).rpartition(".")[2].startswith("parse_args"):
                parsed |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    for of, attribute, value, line in (found for node in nodes for found in _attributes(node)):
        if of not in configs and of not in parsed:
            continue
        renamed = configs.get(of, {})
        key = renamed.get(attribute, (renamed.get("") or "") + attribute)
        found = known.value(value) if isinstance(value, ast.expr) else Computed(text_of(value))
        inner = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        if key is not None and not (isinstance(found, Computed) and inner & parsed):
            yield key, found, f"{file}:{line}"


def _attributes(node: ast.AST) -> Iterator[tuple[str, str, ast.AST, int]]:
    """Yields (name of an object, its attribute, the expression that it is set to, line) of an assignment or setattr.
    What changes a value, and what gives no expression for each of several attributes, stands for the expression
    itself."""
    if isinstance(node, ast.Call) and name_of(node.func) == "setattr" and len(node.args) == 3:
        of, name, value = node.args
        if isinstance(of, ast.Name) and isinstance(name, ast.Constant):
            yield of.id, str(name.value), value, node.lineno
    pairs: list[tuple[ast.AST, ast.AST]] = []
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        pairs = [(t, node.value) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    elif isinstance(node, ast.AugAssign):
        pairs = [(node.target, node)]
    for target, value in pairs:
        if isinstance(target, ast.Tuple | ast.List):
            of = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            same = len(of) == len(target.elts)
            pairs += [(t, of[i] if same else node) for i, t in enumerate(target.elts)]
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            yield target.value.id, target.attr, value, target.lineno


def _once(settings: list[Setting]) -> tuple[list[Setting], list[tuple[Setting, str]]]:
    """Returns the settings without those of which several calls give several values, and what is asked of these."""
    values: dict[str, list[Setting]] = {}
    for s in settings:
        if not any(repr(s.value) == repr(other.value) for other in values.setdefault(s.key, [])):
            values[s.key].append(s)
    asked = []
    for key, found in values.items():
        if len(found) > 1:
            each = ", ".join(f"{s.value!r} ({s.where})" for s in found[:3])
            text = f"{key}=... has several values, {each}: give {key}=VALUE after the file"
            asked.append((Setting(key, " or ".join(repr(s.value) for s in found[:3]), found[0].where), text))
    return [found[0] for found in values.values() if len(found) == 1], asked


def _keywords(node: ast.Call, known: Values, renamed: Mapping[Any, str | None], calls: Calls, where: str):
    """Yields (key, value, place) of a call's arguments, those of a dict after ** among them."""
    before = renamed.get("") or ""
    for at, argument in enumerate(node.args):
        key = renamed.get(at)
        if key and not _read_itself(argument, known, calls):
            yield key, known.value(argument), f"{where.partition(':')[0]}:{argument.lineno}"
    for keyword in node.keywords:
        place = f"{where.partition(':')[0]}:{keyword.value.lineno}"
        if keyword.arg is None:
            entries = known.entries(keyword.value)
            if entries is None:
                yield before + "**", Computed(text_of(keyword.value)), place
            for name, value in entries or ():
                if (key := renamed.get(name, before + name)) is not None:
                    yield key, known.value(value), place
            continue
        key = renamed.get(keyword.arg, before + keyword.arg)
        if key is not None and not _read_itself(keyword.value, known, calls):
            yield key, known.value(keyword.value), place


def _read_itself(node: ast.AST, known: Values, calls: Calls) -> bool:
    """Whether an argument is a call that has keys of its own, or a name of one."""
    named = known.bound(node) if isinstance(node, ast.Name) else []
    node = named[0] if len(named) == 1 else node
    return isinstance(node, ast.Call) and bool(calls.name_in(calls.configs, known.callees(node, calls.kinds)))


def _trainer(node: ast.Call, known: Values, keys: Mapping[str, str], where: str) -> Iterator[tuple[str, Any, str]]:
    for keyword in node.keywords:
        key = keys.get(str(keyword.arg), "")
        if key.isupper():
            yield key.lower(), text_of(keyword.value), where
        elif key:
            functions = key in ("reward_funcs", "reward_functions")
            value = (keyword.arg == "model" and known.loaded(keyword.value)) or keyword.value
            yield key, known.functions(value) if functions else known.value(value), where


def _load(node: ast.Call, known: Values, places, keywords, where: str) -> Iterator[tuple[str, Any, str]]:
    arguments = [part for a in node.args for part in (known.parts(a.value) if isinstance(a, ast.Starred) else (a,))]
    for key, argument in zip(places, arguments, strict=False):
        yield key, known.value(argument), where
    for keyword in node.keywords:
        if keyword.arg in keywords:
            value = known.value(keyword.value)
            key = keywords[keyword.arg]
            yield key, value[0] if isinstance(value, list) and value and "split" in key else value, where


def _live(tree: ast.AST, known: Values) -> Iterator[ast.AST]:
    """Yields the nodes of a program, but for those of branches that values known by now rule out."""
    stack = [tree]
    while stack:
        node = stack.pop(0)
        yield node
        for name, field in ast.iter_fields(node):
            if isinstance(node, ast.If) and name in ("body", "orelse"):
                if known.decided(node.test) not in (None, name == "body"):
                    continue
            stack += [n for n in (field if isinstance(field, list) else [field]) if isinstance(n, ast.AST)]
