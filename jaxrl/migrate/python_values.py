"""Values of a Python program's names, attributes and expressions, read by `ast`; nothing is executed.

A name stands for what its scope binds it to once: an assignment, or the argument of the one call of its function. What
is bound in another way, or twice, is computed. python_files.py and the systems' readers of programs ask here.
"""

from __future__ import annotations

import ast
import math
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.migrate.python_notes import name_of, text_of
from jaxrl.migrate.source import scalar

MOST = 1_000_000  # squared: of numbers that are worked out
CHANGES = ("update", "pop", "popitem", "setdefault", "append", "extend", "insert", "remove", "clear", "sort", "reverse")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Computed(Exception):
    """An expression whose value cannot be read without running it: raised by what reads it, and yielded in place of the
    value. Its text is the expression's, at most 60 characters. by: source text of the part at fault, "" = not known."""

    by = ""


class Scope:
    """The names that a module, class, function or comprehension binds.

    Attributes:
      node: the class, function or comprehension; None of the module.
      names: name -> expressions that it is bound to; what is no one value is there twice.
      parameters: of a function.
      outside: names that `global` and `nonlocal` bind in other scopes -> these."""

    def __init__(self, node: ast.AST | None = None, parent: Scope | None = None):
        self.node, self.parent = node, parent
        self.names: dict[str, list[ast.AST]] = {}
        self.parameters: set[str] = set()
        self.outside: dict[str, list[Scope]] = {}
        if isinstance(node, FUNCTIONS):
            a = node.args
            every = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
            self.parameters = {p.arg for p in every if p is not None}

    def bind(self, name: str, *values: ast.AST) -> None:
        """Adds expressions to a name's, where `global` or `nonlocal` says that it is."""
        for scope in self.outside.get(name, (self,)):
            scope.names.setdefault(name, []).extend(values)

    def above(self) -> Iterator[Scope]:
        """Yields the scope and those around it in which its names are looked up: no classes around functions."""
        yield self
        scope = self.parent
        while scope is not None:
            if not isinstance(scope.node, ast.ClassDef):
                yield scope
            scope = scope.parent


class Values:
    """Literals that names and attributes of a program stand for: those that are given once.

    Args:
      nodes: of the program's tree, which is the first, without the branches that are ruled out.
      module: name of the program, before its functions' names.
      environment: values for variables of the environment, and for names that are assigned. devices: those jax sees;
        0 = unknown. enums: classes whose members stand for their names.

    Attributes:
      used: names of `environment` that were asked for.
      bases: class of the program -> last parts of its bases' names.
      local, imported: functions of the program; names of `from x import` -> x.name."""

    def __init__(self, nodes: list[ast.AST], module: str, environment: Mapping[str, str] = {}, devices: int = 0,
                 enums: tuple[str, ...] = ()):
        self.module, self.environment, self.devices, self.enums = module, environment, devices, enums
        self.used: set[str] = set()
        self.local: set[str] = set()
        self.imported: dict[str, str] = {}
        self.bases: dict[str, list[str]] = {}
        self.classes: dict[str, dict[str, ast.AST]] = {}  # class -> fields -> defaults, or what declares them
        self.fields: dict[str, list[ast.AST]] = {}  # of all classes, and arguments of a parser
        self.given: set[str] = set()  # fields that some call gives a value
        self.targets: dict[str, list[ast.AST]] = {}  # attribute -> objects of which it is set; "" = any attribute
        self.calls: dict[str, list[ast.Call]] = {}  # function -> its calls by its plain name
        self.defined: dict[str, list[ast.AST]] = {}  # functions of a name
        self.mentions: dict[str, int] = {}  # how often a name is read
        self.top = Scope()
        self.scopes = {}  # of names, by the ids of their nodes
        every = [self.top]
        changed: list[ast.AST] = []
        live, stack = set(map(id, nodes)), [(nodes[0], self.top)] if nodes else []
        while stack:
            node, scope = stack.pop()
            self._read(node, scope, changed)
            inner = scope
            if isinstance(node, FUNCTIONS | COMPREHENSIONS | ast.ClassDef):
                inner = Scope(node, scope)
                every.append(inner)
            children = [(n, inner if self._is_inside(node, n) else scope) for n in ast.iter_child_nodes(node)]
            stack += [(n, of) for n, of in reversed(children) if id(n) in live]
        for scope in every:
            for name in environment.keys() & scope.names.keys():  # a constant that is given another value
                scope.names[name] = [ast.Constant(scalar(environment[name]))]
                self.used.add(name)
        for node in changed:
            self._change(node)

    @staticmethod
    def _is_inside(node: ast.AST, child: ast.AST) -> bool:
        """Whether a child of a class or function is of its own scope: no decorator, base, default or annotation."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return child in node.body
        return not isinstance(node, ast.Lambda) or child is node.body

    def _read(self, node: ast.AST, scope: Scope, changed: list[ast.AST]) -> None:
        """Takes what a node binds, declares, sets or calls. changed: gets the expressions whose entries it changes."""
        if isinstance(node, ast.Name):
            self.scopes[id(node)] = scope
            self.mentions[node.id] = self.mentions.get(node.id, 0) + isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, scope, changed)
        elif isinstance(node, ast.AnnAssign):
            if isinstance(scope.node, ast.ClassDef) and isinstance(node.target, ast.Name):
                self._declare(scope.node.name, node.target.id, node.value or node)
            elif node.value is not None:
                self._bind(node.target, node.value, scope, changed)
        elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.comprehension):
            self._bind(node.target, None, scope, changed)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, None, scope, changed)
        elif isinstance(node, ast.NamedExpr):
            of = next(s for s in scope.above() if not isinstance(s.node, COMPREHENSIONS))
            self._bind(node.target, node.value, of, changed)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            scope.bind(node.name, node, node)
        elif isinstance(node, ast.Delete):
            changed += [t.value for t in node.targets if isinstance(t, ast.Subscript)]
        elif isinstance(node, ast.Global | ast.Nonlocal):
            around = [s for s in scope.above() if s is not scope and s is not self.top]
            of = [self.top] if isinstance(node, ast.Global) else around
            scope.outside |= dict.fromkeys(node.names, of)
        elif isinstance(node, ast.ImportFrom):
            self.imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.ClassDef):
            self.classes.setdefault(node.name, {})
            self.bases[node.name] = [name_of(base).rpartition(".")[2] for base in node.bases]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.local.add(node.name)
            self.defined.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Call):
            self._read_call(node, changed)

    def _bind(self, target: ast.AST, value: ast.AST | None, scope: Scope, changed: list[ast.AST]) -> None:
        """Takes an assignment; names and attributes of value None have no one value."""
        if isinstance(target, ast.Name):
            scope.bind(target.id, *([target, target] if value is None else [value]))
        elif isinstance(target, ast.Tuple | ast.List):
            of = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            whole = len(of) == len(target.elts) and not any(isinstance(n, ast.Starred) for n in (*of, *target.elts))
            for i, one in enumerate(target.elts):
                self._bind(one, of[i] if whole else None, scope, changed)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, None, scope, changed)
        elif isinstance(target, ast.Attribute):
            of = next((s.node.name for s in self._around(scope) if isinstance(s.node, ast.ClassDef)), "")
            if name_of(target.value) != "self" or target.attr in self.classes.get(of, {}):
                self.targets.setdefault(target.attr, []).append(target.value)
        elif isinstance(target, ast.Subscript):
            self._entries_change(target.value, changed)

    @staticmethod
    def _around(scope: Scope | None) -> Iterator[Scope]:
        while scope is not None:
            yield scope
            scope = scope.parent

    def _declare(self, of: str, name: str, value: ast.AST) -> None:
        """Takes a field of a class. value: its default, field(default=...) too; the declaration of one without."""
        if isinstance(value, ast.Call):
            value = next((k.value for k in value.keywords if k.arg == "default"), value)
        self.classes[of][name] = value
        self.fields.setdefault(name, []).append(value)

    def _read_call(self, node: ast.Call, changed: list[ast.AST]) -> None:
        """Takes arguments of a parser, fields that a call gives values, and entries that it changes."""
        name = name_of(node.func)
        last, keywords = name.rpartition(".")[2], {k.arg: k.value for k in node.keywords}
        texts = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
        if isinstance(node.func, ast.Name):
            self.calls.setdefault(name, []).append(node)
        if last == "add_argument":
            self._argument(node, keywords)
        elif last == "setattr" and len(node.args) == 3 and name_of(node.args[0]) != "self":
            self.targets.setdefault(str(texts[1] or ""), []).append(node.args[0])
        elif last in ("set_defaults", "replace", "Namespace"):
            self.given |= {k or "" for k in keywords}
        elif last.startswith("parse_") and (lists := [*node.args, *keywords.values()]):
            words = [n.value for of in lists for n in ast.walk(of) if isinstance(n, ast.Constant)]
            self.given |= {w.lstrip("-").partition("=")[0].replace("-", "_") for w in map(str, words)}
        elif isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            self._entries_change(node.func.value, changed)

    def _entries_change(self, of: ast.AST, changed: list[ast.AST]) -> None:
        """Takes an expression whose entries the program changes: vars(x) and x.__dict__ are attributes of x."""
        if isinstance(of, ast.Attribute) and of.attr == "__dict__":
            self.targets.setdefault("", []).append(of.value)
        elif isinstance(of, ast.Call) and name_of(of.func) == "vars" and of.args:
            self.targets.setdefault("", []).append(of.args[0])
        else:
            changed.append(of)

    def _argument(self, node: ast.Call, keywords: Mapping[str | None, ast.AST]) -> None:
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        dest = keywords.get("dest")
        name = dest.value if isinstance(dest, ast.Constant) else next((n for n in names if n.startswith("--")), "")
        action = keywords.get("action")
        off = isinstance(action, ast.Constant) and action.value == "store_true"
        default = keywords.get("default", ast.Constant(False) if off else node)
        if name:
            self.fields.setdefault(str(name).lstrip("-").replace("-", "_"), []).append(default)

    def _change(self, node: ast.AST) -> None:
        """Takes a change of entries: the name that they are of, and what it names, have no one value any more."""
        for _ in range(9):
            if not isinstance(node, ast.Name):
                return
            home = self._home(node)
            found = self.bound(node)
            (home or self.top).names.setdefault(node.id, []).extend((node, node))
            if len(found) != 1:
                return
            node = found[0]

    def _home(self, node: ast.Name) -> Scope | None:
        """Returns the scope that binds a name."""
        scopes = self.scopes.get(id(node), self.top).above()
        return next((s for s in scopes if node.id in s.names or node.id in s.parameters), None)

    def bound(self, node: ast.Name) -> list[ast.AST]:
        """Returns the expressions that a name is bound to where it stands: one if they say its value, [] where the
        program does not bind it. Of a parameter it is the argument, where the program calls its function once."""
        home = self._home(node)
        if home is None:
            return []
        if node.id not in home.parameters:
            return home.names[node.id]
        found = None if node.id in home.names else self._passed(home, node.id)
        return [node, node] if found is None else [found]

    def _passed(self, scope: Scope, name: str) -> ast.AST | None:
        """Returns the expression that a parameter gets from the one call of its function, or its default; None where
        the text does not say it."""
        of = scope.node
        if not isinstance(of, ast.FunctionDef | ast.AsyncFunctionDef) or of.decorator_list or scope.parent is None:
            return None
        calls = self.calls.get(of.name, [])
        once = len(calls) == self.mentions.get(of.name, 0) == len(self.defined[of.name]) == 1
        if not once or isinstance(scope.parent.node, ast.ClassDef) or of.name in self.imported:
            return None
        call, a = calls[0], of.args
        unclear = [n for n in call.args if isinstance(n, ast.Starred)] + [k for k in call.keywords if k.arg is None]
        if unclear or name in (p.arg for p in (a.vararg, a.kwarg) if p is not None):
            return None
        places = [p.arg for p in (*a.posonlyargs, *a.args)]
        given = {**dict(zip(places, call.args, strict=False)), **{k.arg: k.value for k in call.keywords}}
        defaults = {**dict(zip(places[::-1], a.defaults[::-1], strict=False)),
                    **{p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}}
        return given.get(name, defaults.get(name))

    def _field(self, node: ast.Attribute) -> ast.AST | None:
        """Returns the expression of an attribute: of an object of the program's class, what its call gives or the
        class's default; else the one default of this name in the program. None where the program sets it, too."""
        if any(self._may_be(other, node.value) for n in (node.attr, "") for other in self.targets.get(n, ())):
            return None
        found = self.bound(node.value) if isinstance(node.value, ast.Name) else []
        made = found[0] if len(found) == 1 and isinstance(found[0], ast.Call) else None
        name = name_of(made.func).rpartition(".")[2] if made else ""
        if made and name in self.classes:
            if made.args or any(k.arg is None for k in made.keywords):
                return None
            given = {k.arg: k.value for k in made.keywords}
            return given.get(node.attr, next((f[node.attr] for f in self._fields_of(name) if node.attr in f), None))
        defaults = self.fields.get(node.attr, [])
        return defaults[0] if len(defaults) == 1 and not self._is_given(node.attr) else None

    def _fields_of(self, name: str, depth: int = 0) -> Iterator[dict[str, ast.AST]]:
        """Yields the fields of a class of the program, and of its bases."""
        if name in self.classes and depth < 20:
            yield self.classes[name]
            for base in self.bases.get(name, ()):
                yield from self._fields_of(base, depth + 1)

    def _is_given(self, attr: str) -> bool:
        """Whether a call gives a field of this name a value: by keyword, or it may, by place or in a table."""
        for name in self.classes:
            calls = self.calls.get(name, []) if any(attr in fields for fields in self._fields_of(name)) else []
            if any(n.args or any(k.arg in (attr, None) for k in n.keywords) for n in calls):
                return True
        return attr in self.given or "" in self.given

    def _may_be(self, other: ast.AST, node: ast.AST, depth: int = 0) -> bool:
        """Whether an object whose attribute is set may be the one that is read. Variables and attributes (by
        their last parts) of other names are other objects, but for parameters and a name that is given to another."""
        if isinstance(other, ast.Attribute):
            return other.attr == name_of(node).rpartition(".")[2]
        if name_of(other) == name_of(node) or not isinstance(other, ast.Name) or depth > 9:
            return True
        home, found = self._home(other), self.bound(other)
        if home is None or other.id in home.parameters and len(found) != 1:
            return True
        named = [n for n in found if isinstance(n, ast.Attribute) or isinstance(n, ast.Name) and n.id != other.id]
        return any(self._may_be(n, node, depth + 1) for n in named)

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
            return "".join(self._formatted(part, depth + 1) for part in node.values)
        if isinstance(node, ast.Attribute) and name_of(node.value).rpartition(".")[2] in self.enums:
            return node.attr
        if isinstance(node, ast.Name):
            found = self.bound(node)
            if len(found) == 1 and node.id not in self.local and node.id not in self.imported:
                return self._value(found[0], depth + 1)
        if isinstance(node, ast.Attribute):
            if (found := self._field(node)) is not None:
                return self._value(found, depth + 1)
            if name_of(node).startswith(("torch.", "jnp.", "jax.numpy.")):  # a dtype
                return node.attr
        raise Computed(text_of(node))

    def _formatted(self, part: ast.AST, depth: int) -> str:
        """Returns a part of an f-string as its conversion and format have it. Raises Computed for a list or table, and
        a format that does not fit or is longer than a number's."""
        if not isinstance(part, ast.FormattedValue):
            return str(self._value(part, depth))
        value = self._value(part.value, depth)
        form = str(self._value(part.format_spec, depth)) if part.format_spec else ""
        if isinstance(value, list | dict) or re.search(r"\d{3}", form):
            raise Computed(text_of(part.value))
        value = {ord("r"): repr, ord("s"): str, ord("a"): ascii}.get(part.conversion, lambda v: v)(value)
        try:
            return format(value, form)
        except (ValueError, TypeError):
            raise Computed(text_of(part.value)) from None

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
        if isinstance(node, ast.Name) and len(found := self.bound(node)) == 1:
            node = found[0]
        if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return [(str(k.value), v) for k, v in pairs if isinstance(k, ast.Constant)]
        return None

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """Returns the expressions of a list or tuple, itself or by its name; itself where it is none."""
        if isinstance(node, ast.Name) and len(found := self.bound(node)) == 1:
            node = found[0]
        return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]

    def loaded(self, node: ast.AST) -> ast.Call | None:
        """Returns the call of `from_pretrained` that a trainer's model is, of a name the last one before it; adapters
        are put around it."""
        line = getattr(node, "lineno", 0)
        for _ in range(9):
            if isinstance(node, ast.Name):
                found = self.bound(node)
                before = [n for n in found if getattr(n, "lineno", line) < line]
                node = max(before, key=lambda n: getattr(n, "lineno", 0), default=found[0] if len(found) == 1 else node)
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
            if isinstance(n, ast.Name) and len(found := self.bound(n)) == 1:
                inner = self.functions(found[0])
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
