"""Programs in Python as settings: keyword arguments of config classes, read by `ast`; nothing is executed.

Read are literals, names and attributes that one assignment, argparse's or a dataclass's default in the file gives a
literal, variables of the environment that have a default or are given, texts put together of those, and sums and
products of numbers. Branches that such values rule out are not read. Everything else is computed, and asked for; so is
a key to which two calls give two values.
"""

from __future__ import annotations

import ast
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.migrate.python_notes import name_of, notes, other_tokenizer, text_of
from jaxrl.migrate.source import Setting, Unreadable, scalar

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
    more: Callable[[list[ast.AST], _Known, str], Iterator[tuple[str, Any, str]]] | None = None

    def name_in(self, table: Mapping, names: tuple[str, ...]) -> str:
        """Returns the first of the names that a table has, or ""."""
        return next((name for name in names if name in table), "")


class Computed(Exception):
    """An expression whose value cannot be read without running it: raised by what reads it, and yielded in place of the
    value. Its text is the expression's, at most 60 characters. by: source text of the part at fault, "" = not known."""

    by = ""


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
    first = _Known(nodes, path.stem, *given)
    nodes = list(_live(tree, first))
    known = _Known(nodes, path.stem, *given)
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


def _call(node: ast.Call, known: _Known, calls: Calls, where: str, settings):
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


def _assigned(nodes: list[ast.AST], known: _Known, calls: Calls, file: str) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, value, place) of what is assigned to attributes of configs and of parsed arguments. A value of
    parsed arguments is left out: the command line, which is asked for, has it."""
    configs: dict[str, Mapping[Any, str | None]] = {}
    parsed = set()
    assigned = [(n.targets[0], n.value) for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
    for target, value in assigned:
        if not isinstance(value, ast.Call):
            continue
        name = calls.name_in(calls.configs, known.callees(value, calls.kinds))
        if isinstance(target, ast.Name) and name:
            configs[target.id] = calls.configs[name][1]
        elif name_of(value.func).rpartition(".")[2].startswith("parse_args"):
            parsed |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    for target, value in assigned:
        of = target.value.id if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) else ""
        if of not in configs and of not in parsed or not isinstance(target, ast.Attribute):
            continue
        renamed = configs.get(of, {})
        key, found = renamed.get(target.attr, (renamed.get("") or "") + target.attr), known.value(value)
        inner = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        if key is not None and not (isinstance(found, Computed) and inner & parsed):
            yield key, found, f"{file}:{target.lineno}"


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


def _keywords(node: ast.Call, known: _Known, renamed: Mapping[Any, str | None], calls: Calls, where: str):
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


def _read_itself(node: ast.AST, known: _Known, calls: Calls) -> bool:
    """Whether an argument is a call that has keys of its own, or a name of one."""
    named = known.names.get(node.id, []) if isinstance(node, ast.Name) else []
    node = named[0] if len(named) == 1 else node
    return isinstance(node, ast.Call) and bool(calls.name_in(calls.configs, known.callees(node, calls.kinds)))


def _trainer(node: ast.Call, known: _Known, keys: Mapping[str, str], where: str) -> Iterator[tuple[str, Any, str]]:
    for keyword in node.keywords:
        key = keys.get(str(keyword.arg), "")
        if key.isupper():
            yield key.lower(), text_of(keyword.value), where
        elif key:
            functions = key in ("reward_funcs", "reward_functions")
            value = (keyword.arg == "model" and known.loaded(keyword.value)) or keyword.value
            yield key, known.functions(value) if functions else known.value(value), where


def _load(node: ast.Call, known: _Known, places, keywords, where: str) -> Iterator[tuple[str, Any, str]]:
    arguments = [part for a in node.args for part in (known.parts(a.value) if isinstance(a, ast.Starred) else (a,))]
    for key, argument in zip(places, arguments, strict=False):
        yield key, known.value(argument), where
    for keyword in node.keywords:
        if keyword.arg in keywords:
            value = known.value(keyword.value)
            key = keywords[keyword.arg]
            yield key, value[0] if isinstance(value, list) and value and "split" in key else value, where


def _live(tree: ast.AST, known: _Known) -> Iterator[ast.AST]:
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


class _Known:
    """Literals that names and attributes of a program stand for: those that are given once."""

    def __init__(self, nodes: list[ast.AST], module: str, environment: Mapping[str, str] = {}, devices: int = 0,
                 enums: tuple[str, ...] = ()):
        self.module, self.names, self.fields, self.local = module, {}, {}, set()
        self.environment, self.devices, self.enums = environment, devices, enums
        self.used: set[str] = set()  # of the environment
        self.imported: dict[str, str] = {}
        self.bases: dict[str, list[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.names.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                self._unpacked(node.targets[0], node.value)
            elif isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
                self.names.setdefault(node.target.id, []).extend((node, node))  # not one value
            elif isinstance(node, ast.ClassDef):
                self._dataclass(node)
                self.bases[node.name] = [name_of(base).rpartition(".")[2] for base in node.bases]
            elif _changed(node):
                self.names.setdefault(_changed(node), []).extend((node, node))
            elif isinstance(node, ast.Call) and name_of(node.func).endswith("add_argument"):
                self._argument(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.local.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        for name in environment.keys() & self.names.keys():  # a constant that is given another value
            self.names[name] = [ast.Constant(scalar(environment[name]))]
            self.used.add(name)

    def _unpacked(self, names: ast.Tuple, value: ast.AST):
        """Takes a, b = 1, 2; of another value the names have none."""
        of = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        for i, name in enumerate(names.elts):
            if isinstance(name, ast.Name):
                one = [of[i]] if len(of) == len(names.elts) else [name, name]
                self.names.setdefault(name.id, []).extend(one)

    def _dataclass(self, node: ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                value = field.value
                if isinstance(value, ast.Call):  # field(default=...)
                    value = next((k.value for k in value.keywords if k.arg == "default"), value)
                self.fields.setdefault(field.target.id, []).append(value)

    def _argument(self, node: ast.Call):
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        keywords = {k.arg: k.value for k in node.keywords}
        dest = keywords.get("dest")
        name = dest.value if isinstance(dest, ast.Constant) else next((n for n in names if n.startswith("--")), "")
        action = keywords.get("action")
        off = isinstance(action, ast.Constant) and action.value == "store_true"
        default = keywords.get("default", ast.Constant(False) if off else None)
        if name and default is not None:
            self.fields.setdefault(str(name).lstrip("-").replace("-", "_"), []).append(default)

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """Returns the literal of an expression, or Computed."""
        try:
            return self._value(node, depth)
        except (Computed, RecursionError) as e:
            computed = Computed(text_of(node))
            computed.by = str(e)
            return computed

    def _value(self, node: ast.AST, depth: int) -> Any:
        if depth > 20:
            raise Computed
        if isinstance(node, ast.Constant) and not isinstance(node.value, bytes | complex):
            return None if node.value is ... else node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(n, depth + 1) for n in node.elts]
        if isinstance(node, ast.Dict) and all(k is not None for k in node.keys):
            keys = [self._value(k, depth + 1) for k in node.keys if k is not None]
            return dict(zip(map(str, keys), (self._value(v, depth + 1) for v in node.values), strict=True))
        if isinstance(node, ast.Call):
            return self._called(node, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand, depth + 1)
            if isinstance(number, int | float):
                return -number
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            a, b = self._value(node.left, depth + 1), self._value(node.right, depth + 1)
            if all(type(x) in (int, float) and abs(x) < MOST**2 for x in (a, b)):
                return _arithmetic(type(node.op), a, b)
        if isinstance(node, ast.IfExp) and self.decided(node.test) is not None:
            return self._value(node.body if self.decided(node.test) else node.orelse, depth + 1)
        if isinstance(node, ast.Subscript) and name_of(node.value) == "os.environ":
            return self._variable(self._value(node.slice, depth + 1))
        if isinstance(node, ast.Subscript):
            at, parts = self._value(node.slice, depth + 1), self.parts(node.value)
            if parts != [node.value] and type(at) is int and -len(parts) <= at < len(parts):
                return self._value(parts[at], depth + 1)  # whatever its neighbours are
            whole = self._value(node.value, depth + 1)
            if isinstance(whole, list) and type(at) is int and -len(whole) <= at < len(whole):
                return whole[at]
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.FormattedValue) else p for p in node.values)
            return "".join(str(self._value(p, depth + 1)) for p in parts)
        if isinstance(node, ast.Attribute) and name_of(node.value).rpartition(".")[2] in self.enums:
            return node.attr
        if isinstance(node, ast.Name | ast.Attribute):
            named = isinstance(node, ast.Name)
            found = self.names.get(node.id, []) if named else self.fields.get(node.attr, [])
            if len(found) == 1:
                return self._value(found[0], depth + 1)
            if not named and name_of(node).startswith(("torch.", "jnp.", "jax.numpy.")):  # a dtype
                return node.attr
        raise Computed(text_of(node))

    def _called(self, node: ast.Call, depth: int) -> Any:
        """Returns what a call makes of literals: dict(), int(), a variable of the environment, a product, a path."""
        name, args = name_of(node.func), node.args
        if name == "dict" and not args and all(k.arg for k in node.keywords):
            return {str(k.arg): self._value(k.value, depth + 1) for k in node.keywords}
        if text_of(node) in DEVICES and self.devices:
            return self.devices
        if name in ("os.getenv", "getenv", "os.environ.get", "environ.get") and args:
            default = next((k.value for k in node.keywords if k.arg == "default"), args[1] if len(args) > 1 else None)
            return self._variable(self._value(args[0], depth + 1), default, depth)
        if name.endswith("from_pretrained") and args:
            return self._value(args[0], depth + 1)
        values = [self._value(a, depth + 1) for a in args] if name in LITERAL else []
        if name in ("int", "float") and len(values) == 1:
            number = scalar(values[0]) if isinstance(values[0], str) else values[0]
            if type(number) in (int, float):
                return int(number) if name == "int" else float(number)
        if name == "math.prod" and len(values) == 1 and all(type(n) is int for n in values[0]):
            return math.prod(values[0])
        if name == "os.path.join" and values and all(isinstance(v, str) for v in values):
            return posixpath.join(*values)
        raise Computed(text_of(node))

    def _variable(self, name, default: ast.AST | None = None, depth: int = 0) -> Any:
        """Returns a variable of the environment as it is given, or its default."""
        if name in self.environment:
            self.used.add(name)
            return self.environment[name]
        if default is None:
            raise Computed(f"os.environ[{name!r}]")
        return self._value(default, depth + 1)

    def decided(self, test: ast.AST) -> bool | None:
        """Returns what a condition of literals is; None where it hangs on anything else."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts, ends = [self.decided(part) for part in test.values], isinstance(test.op, ast.Or)
            return ends if ends in parts else None if None in parts else not ends
        try:
            if isinstance(test, ast.Compare) and len(test.ops) == 1:
                a, b = self._value(test.left, 0), self._value(test.comparators[0], 0)
                same = a is b if b is None else a == b
                kind = type(test.ops[0])
                if kind in (ast.In, ast.NotIn) and isinstance(b, str | list | dict):
                    return (a in b) == (kind is ast.In)
                return same if kind in (ast.Is, ast.Eq) else not same if kind in (ast.IsNot, ast.NotEq) else None
            return bool(self._value(test, 0))
        except (Computed, RecursionError):
            return None

    def entries(self, node: ast.AST) -> list[tuple[str, ast.AST]] | None:
        """Returns (name, expression) of a dict that is written once and not changed; None of anything else."""
        if isinstance(node, ast.Name) and len(self.names.get(node.id, [])) == 1:
            node = self.names[node.id][0]
        if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return [(str(k.value), v) for k, v in pairs if isinstance(k, ast.Constant)]
        return None

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """Returns the expressions of a list or tuple, itself or by its name; itself where it is none."""
        if isinstance(node, ast.Name) and len(self.names.get(node.id, [])) == 1:
            node = self.names[node.id][0]
        return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]

    def loaded(self, node: ast.AST) -> ast.Call | None:
        """Returns the call of `from_pretrained` that a trainer's model is, of a name the last one before it; adapters
        are put around it."""
        line = getattr(node, "lineno", 0)
        for _ in range(9):
            if isinstance(node, ast.Name):
                before = [n for n in self.names.get(node.id, []) if getattr(n, "lineno", line) < line]
                node = max(before, key=lambda n: n.lineno, default=node)
            if not isinstance(node, ast.Call) or not node.args:
                return None
            if name_of(node.func).endswith("from_pretrained"):
                return node
            if name_of(node.func).rpartition(".")[2] not in ("get_peft_model", "prepare_model_for_kbit_training"):
                return None
            node, line = node.args[0], node.lineno
        return None

    def callees(self, node: ast.Call, kinds: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Returns the names of what is called: of a kind, its last two parts, its last one. Of f(g)(x) they are g's."""
        func = node.func
        if isinstance(func, ast.Call) and func.args:
            func = func.args[0]
        full = name_of(func)
        root, _, rest = full.partition(".")
        place = self.imported.get(root, root) + ("." + rest if rest else "")
        last = full.rpartition(".")[2]
        return (*(f"{kind}.{last}" for kind in kinds if kind in place), ".".join(full.split(".")[-2:]), last)

    def functions(self, node: ast.AST) -> Any:
        """Returns names of reward functions: of the library as they are, of the file and of other modules with their
        module."""
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        out = []
        for n in nodes:
            if isinstance(n, ast.Name) and len(self.names.get(n.id, [])) == 1:
                inner = self.functions(self.names[n.id][0])
                out += inner if isinstance(inner, list) else [inner]
            elif isinstance(n, ast.Name) and n.id in self.local:
                out.append(f"{self.module}.{n.id}")
            elif isinstance(n, ast.Name) and n.id in self.imported:
                place = self.imported[n.id]
                out.append(place.rpartition(".")[2] if place.startswith("trl.") else place)
            elif isinstance(n, ast.Constant) and isinstance(n.value, str):
                out.append(n.value)
            elif isinstance(n, ast.Attribute) and name_of(n).partition(".")[0] in self.imported:
                root, _, rest = name_of(n).partition(".")
                out.append(f"{self.imported[root]}.{rest}")
            else:
                return Computed(text_of(node))
        return next((o for o in out if isinstance(o, Computed)), out)


DEVICES = ("jax.device_count()", "len(jax.devices())", "jax.local_device_count()", "len(jax.local_devices())")
LITERAL = ("int", "float", "math.prod", "os.path.join")  # functions that are worked out
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def _arithmetic(kind: type, a, b):
    """Returns what an operation makes of two numbers. Raises Computed where it makes none."""
    if kind in (ast.Div, ast.FloorDiv, ast.Mod) and not b:
        raise Computed
    made = {ast.Add: lambda: a + b, ast.Sub: lambda: a - b, ast.Mult: lambda: a * b, ast.Div: lambda: a / b,
            ast.FloorDiv: lambda: a // b, ast.Mod: lambda: a % b}
    return made[kind]()


def _changed(node: ast.AST) -> str:
    """Returns the name whose entries a statement sets (x["a"] = 1, x.update(...)), or ""."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return name_of(node.targets[0].value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("update", "pop"):
        return name_of(node.func.value)
    return ""
