"""Programs in Python as settings: keyword arguments of config classes, read by `ast`; nothing is executed.

Read are literals, names and attributes that one assignment, argparse's or a dataclass's default in the file gives a
literal, and texts put together of those. Everything else is computed, and asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.migrate.source import Setting, Unreadable

MOST = 1_000_000  # characters of a program


class Calls(NamedTuple):
    """What the reader looks for, of a system.

    configs: class -> (command that it stands for, its arguments that are other keys there -> those, settings that its
    presence makes).
    trainers: class -> (command, argument -> key); a key in capitals takes the text of the argument.
    loads: function of a data set -> keys of its positional arguments and keywords.
    flags: classes whose presence says that values come from the command line.
    """

    configs: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]]
    trainers: Mapping[str, tuple[str, Mapping[str, str]]]
    loads: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]]
    flags: tuple[str, ...] = ()


class Computed(Exception):
    """An expression is not a literal."""


def read_python(path: Path, calls: Calls) -> tuple[str, list[Setting], list[str]]:
    """Returns (the command that the program stands for, its settings, what is asked). Raises Unreadable."""
    text = path.read_text("utf-8", errors="replace")
    if len(text) > MOST:
        raise Unreadable(path.name, "", f"is longer than {MOST} characters")
    try:
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise Unreadable(
            f"{path.name}:{getattr(e, 'lineno', None) or 1}", "", f"is no program of Python 3: {e}"
        ) from None
    known = _Known(nodes, path.stem)
    command, settings, asked = "", [], []
    for node in (n for n in nodes if isinstance(n, ast.Call)):
        name, where = _name(node.func).rpartition(".")[2], f"{path.name}:{node.lineno}"
        if name in calls.configs:
            of, renamed, made = calls.configs[name]
            command = of or command
            found = [*((key, value, where) for key, value in made.items()), *_keywords(node, known, renamed, where)]
        elif name in calls.trainers:
            command = command or calls.trainers[name][0]
            found = _trainer(node, known, calls.trainers[name][1], where)
        elif name in calls.loads and not any(s.key in calls.loads[name][0] for s in settings):
            found = _load(node, known, *calls.loads[name], where)
        else:
            continue
        for key, value, place in found:
            if isinstance(value, Computed):
                asked.append(f"{key}={value} is computed ({place}): give {key}=VALUE after the file")
            else:
                settings.append(Setting(key, value, place))
    names = {_name(n).rpartition(".")[2] for n in nodes if isinstance(n, ast.Name | ast.Attribute)}
    if not command and not names & set(calls.flags):
        raise Unreadable(path.name, "", "starts no trainer: no config class or trainer is called")
    given = {s.key for s in settings}
    asked = [text for text in dict.fromkeys(asked) if text.partition("=")[0] not in given]
    asked += [
        f"{path.name}:{n.lineno}: rows are changed in Python, {_text(n)}: write them as they come out into a file, "
        "and name "
        "it in data.path"
        for n in nodes
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr in ("map", "filter")
        and n.args
        and isinstance(n.func.value, ast.Name)
        and "data" in n.func.value.id
    ]
    if names & set(calls.flags):
        asked.insert(
            0,
            f"{path.name} takes further values from its command line: give them as --key=value after the file, or "
            "migrate "
            "the script (.sh) that starts it",
        )
    return command, settings, asked


def _keywords(node: ast.Call, known: _Known, renamed: Mapping[str, str], where: str) -> Iterator[tuple[str, Any, str]]:
    for keyword in node.keywords:
        place = f"{where.partition(':')[0]}:{keyword.value.lineno}"
        if keyword.arg is None:
            yield "**", Computed(_text(keyword.value)), place
        else:
            yield renamed.get(keyword.arg, keyword.arg), known.value(keyword.value), place


def _trainer(node: ast.Call, known: _Known, keys: Mapping[str, str], where: str) -> Iterator[tuple[str, Any, str]]:
    for keyword in node.keywords:
        key = keys.get(str(keyword.arg), "")
        if key.isupper():
            yield key.lower(), _text(keyword.value), where
        elif key:
            value = known.functions(keyword.value) if key == "reward_funcs" else known.value(keyword.value)
            yield key, value, where


def _load(node: ast.Call, known: _Known, places, keywords, where: str) -> Iterator[tuple[str, Any, str]]:
    for key, argument in zip(places, node.args, strict=False):
        yield key, known.value(argument), where
    for keyword in node.keywords:
        if keyword.arg in keywords:
            value = known.value(keyword.value)
            yield keywords[keyword.arg], value[0] if isinstance(value, list) and value else value, where


class _Known:
    """Literals that names and attributes of a program stand for: those that are given once."""

    def __init__(self, nodes: list[ast.AST], module: str):
        self.module, self.names, self.fields, self.local = module, {}, {}, set()
        self.imported: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.names.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
                self.names.setdefault(node.target.id, []).extend((node, node))  # not one value
            elif isinstance(node, ast.ClassDef):
                self._dataclass(node)
            elif isinstance(node, ast.Call) and _name(node.func).endswith("add_argument"):
                self._argument(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.local.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

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
        except (Computed, RecursionError):
            return Computed(_text(node))

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
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand, depth + 1)
            if isinstance(number, int | float):
                return -number
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.FormattedValue) else p for p in node.values)
            return "".join(str(self._value(p, depth + 1)) for p in parts)
        if isinstance(node, ast.Call) and _name(node.func).endswith("from_pretrained") and node.args:
            return self._value(node.args[0], depth + 1)
        if isinstance(node, ast.Name | ast.Attribute):
            named = isinstance(node, ast.Name)
            found = self.names.get(node.id, []) if named else self.fields.get(node.attr, [])
            if len(found) == 1:
                return self._value(found[0], depth + 1)
            if not named and _name(node).startswith("torch."):  # a dtype
                return node.attr
        raise Computed

    def functions(self, node: ast.AST) -> Any:
        """Returns names of reward functions: of the library as they are, of the file and of other modules with their
        module."""
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
            else:
                return Computed(_text(node))
        return next((o for o in out if isinstance(o, Computed)), out)


def _name(node: ast.AST) -> str:
    """Returns `a.b` of names and attributes."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST) -> str:
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError, AttributeError):
        text = type(node).__name__
    return text if len(text) <= 60 else text[:57] + "..."
