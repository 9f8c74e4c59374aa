"""vision_failures.csv: what has gone wrong in training with images elsewhere, and the tests that answer it."""

import ast
import csv
from pathlib import Path

HERE = Path(__file__).parent


def test_every_failure_has_a_test_that_exists():
    with open(HERE / "vision_failures.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len({row["failure"] for row in rows}) == 22
    for row in rows:
        path, name = row["test"].split("::")
        functions = {node.name for node in ast.parse((HERE.parent / path).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, row
