"""Names that Python source uses without binding them, by Python's scopes. `grading` asks it which functions of a
program the tests call.

Not `symtable`: Python 3.12 shows the variables of comprehensions there as those of the scope around them.
"""

from __future__ import annotations

import ast
from typing import Any


def module_names(source: str) -> tuple[set[str], set[str]]:
    """Returns (names that a module uses and no scope around their use binds, names that it binds itself). A name that
    is bound in a function only is free elsewhere. Raises SyntaxError."""
    module = _Scope()
    module.visit(ast.parse(source))
    return module.free(), module.bound


class _Scope(ast.NodeVisitor):
    """The names of one scope: a module, a function, a class or a comprehension."""

    def __init__(self, outer: _Scope | None = None, kind: str = "module", bound=()):
        self.outer, self.kind, self.bound = outer, kind, set(bound)
        self.used, self.passed = set(), set()  # passed: from the functions of a class, which do not see its names
        self.outside = set()  # declared global or nonlocal

    def free(self) -> set[str]:
        return self.used - (self.bound - self.outside) | self.passed

    def _inner(self, kind: str, nodes, bound=()) -> None:
        inner = _Scope(self, kind, bound)
        inner._visit(nodes)
        (self.passed if self.kind == "class" else self.used).update(inner.free())

    def _visit(self, nodes) -> None:
        for node in filter(None, nodes):
            self.visit(node)

    def visit_Name(self, node: Any):
        (self.bound if isinstance(node.ctx, ast.Store) else self.used).add(node.id)

    def visit_NamedExpr(self, node: Any):
        self._visit([node.value, node.target])
        scope = self
        while scope.kind == "comprehension" and scope.outer is not None:
            scope = scope.outer
            scope.bound.add(node.target.id)

    def visit_Global(self, node: Any):
        self.outside.update(node.names)
        scope = self
        while scope.outer is not None:
            scope = scope.outer
        scope.bound.update(node.names)

    def visit_Nonlocal(self, node: Any):
        self.outside.update(node.names)

    def visit_alias(self, node: Any):
        self.bound.add((node.asname or node.name).partition(".")[0])

    def visit_ExceptHandler(self, node: Any):
        self.bound.update(filter(None, [node.name]))
        self.generic_visit(node)

    def visit_MatchAs(self, node: Any):
        self.bound.update(filter(None, [getattr(node, "name", None), getattr(node, "rest", None)]))
        self.generic_visit(node)

    visit_MatchStar = visit_MatchMapping = visit_MatchAs

    def visit_FunctionDef(self, node: Any):
        self.bound.add(node.name)
        self._visit(node.decorator_list)
        self._function(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: Any):
        self._function(node, [node.body])

    def _function(self, node, body) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        every, generics = [a for a in every if a is not None], _generics(node)
        self._visit([*arguments.defaults, *arguments.kw_defaults])
        self._inner("function", [*(a.annotation for a in every), getattr(node, "returns", None)], generics)
        self._inner("function", body, generics | {a.arg for a in every})

    def visit_ClassDef(self, node: Any):
        self.bound.add(node.name)
        self._visit([*node.decorator_list, *node.bases, *node.keywords])
        self._inner("class", node.body, _generics(node))

    def visit_ListComp(self, node: Any):
        first, *others = node.generators
        self.visit(first.iter)
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._inner("comprehension", [first.target, *first.ifs, *others, *values])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp


def _generics(node) -> set[str]:
    """Returns the names of type parameters, which functions and classes have since Python 3.12."""
    return {parameter.name for parameter in getattr(node, "type_params", ())}
