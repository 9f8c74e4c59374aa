"""The tool of the programs beside it."""

import re


def calculate(expression: str) -> str:
    if not re.fullmatch(r"-?[0-9]{1,40}([+-][0-9]{1,40}){0,9}", expression):
        return "not a sum of whole numbers"
    return str(sum(map(int, re.findall(r"[+-]?[0-9]+", expression))))
