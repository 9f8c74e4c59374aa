"""Arithmetic that scripts leave to awk and printf, `$(awk "BEGIN {print 3 * 0.1}")`; nothing is executed."""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Mapping

_PRINTF = re.compile(r"printf\s+[\"']%\.(\d)f[\"']\s+[\"']?([-+.\deE]+)[\"']?")
_AWK = re.compile(r"awk\s+([\"'])\s*BEGIN\s*\{(.*)\}\s*\1", re.S)
_TEST = re.compile(r"if\s*\((.+?)(<=?|>=?)(.+?)\)\s*(\w+)\s*=(?!=)(.+)")
_FORMAT = re.compile(r"printf\s+\"%\.(\d)f(\\n)?\"\s*,(.+)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def computed(text: str) -> str | None:
    """Returns the text that `printf "%.Nf" X` or `awk "BEGIN {...}"` prints, with all variables filled in before, and
    without newlines at its end; None for any other command.

    Of awk are read assignments, `if (a < b) x = ...`, `print` (whole numbers in full, others with 6 significant digits)
    and `printf "%.Nf"` of sums, differences, products and quotients. None for anything else in it, for whole numbers
    from 2**53 on, which awks print differently, for more than 2000 characters, and where nothing is printed."""
    if found := _PRINTF.fullmatch(text.strip()):
        with contextlib.suppress(ValueError):  # "-", "1.2.3"
            return f"{float(found[2]):.{found[1]}f}"
    found = _AWK.fullmatch(text.strip())
    if not found or len(text) > 2000:
        return None
    values: dict[str, float] = {}
    printed = ""
    try:
        for statement in filter(None, (s.strip() for s in re.split(r"[;\n]", found[2].replace('\\"', '"')))):
            if test := _TEST.fullmatch(statement):
                if _COMPARE[test[2]](_number(test[1], values), _number(test[3], values)):
                    values[test[4]] = _number(test[5], values)
            elif form := _FORMAT.fullmatch(statement):
                printed += f"{_number(form[3], values):.{form[1]}f}" + "\n" * bool(form[2])
            elif statement.startswith("print "):
                printed += _printed(_number(statement.removeprefix("print "), values)) + "\n"
            elif assigned := re.fullmatch(r"(\w+)\s*=(?!=)(.+)", statement):
                values[assigned[1]] = _number(assigned[2], values)
            else:
                return None
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return None
    return printed.rstrip("\n") or None


def _printed(number: float) -> str:
    """Returns a number as awk's `print` has it. Raises ValueError for a whole number that awks print differently."""
    if number != int(number):
        return f"{number:.6g}"
    if abs(number) >= 2**53:
        raise ValueError(number)
    return str(int(number))


def _number(text: str, values: Mapping[str, float]) -> float:
    def walk(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return float(node.value)
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(text)

    return walk(ast.parse(text.strip(), mode="eval").body)
