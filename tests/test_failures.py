"""vision_failures.csv and hybrid_failures.csv: what has gone wrong in training elsewhere, and the tests that answer it."""

import ast
import csv
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name, failures", [("vision_failures", 22), ("hybrid_failures", 19)])
def test_every_failure_has_a_test_that_exists(name, failures):
    with open(HERE / f"{name}.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len({row["failure"] for row in rows}) == failures
    for row in rows:
        path, test = row["test"].split("::")
        functions = {node.name for node in ast.parse((HERE.parent / path).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}
        assert test in functions, row
