"""The shape of the house, read from the source alone: imports go one way and never in a circle, files and functions are
short. What breaks a rule today stands in a table of exceptions with its place; nothing may be added to those."""

import ast
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxrl

ROOT = Path(jaxrl.__file__).parent
LONGEST_FILE, LONGEST_FUNCTION, WIDEST = 600, 60, 120
GENERATED = "config/typed.py"
TABLES = {"config/schema.py", "config/schema_algorithm.py", "config/schema_jobs.py", "config/schema_rewards.py", "config/suggest.py",
          "config/schema_videos.py", "checkpoint/resume.py", "telemetry/names.py", "models/config.py", "models/families.py", "models/parameters.py",
          *(f"migrate/systems/{p.name}" for p in (ROOT / "migrate" / "systems").glob("*.py") if not p.stem.endswith("_meaning"))}

@cache
def modules() -> dict[str, ast.Module]:
    """Name -> tree of every module of jaxrl."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("jaxrl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text("utf-8"))
    return found


@cache
def imports(inside_functions: bool) -> dict[str, set[str]]:
    """Module -> the modules of jaxrl that it imports; a package's name stands for its __init__."""
    return {name: (_imported(tree, inside_functions) & modules().keys()) - {name} for name, tree in modules().items()}


def _imported(node, inside_functions: bool) -> set[str]:
    out = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            out |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"line {child.lineno}: jaxrl is imported by its full name"
            names = {f"{child.module}.{alias.name}" for alias in child.names}
            out |= {name if name in modules() else child.module for name in names}
        elif not isinstance(child, ast.expr) and (inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))):
            out |= _imported(child, inside_functions)
    return out


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other."""
    def reach(start):
        seen, todo = set(), [start]
        while todo:
            new = arrows[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reached = {name: reach(name) for name in arrows}
    found = []
    for name in arrows:
        if name in reached[name] and not any(name in circle for circle in found):
            found.append({other for other in reached[name] if name in reached[other]})
    return found


def room(module: str) -> str:
    return (module.split(".") + [""])[1]


def arrows():
    """(module, module that it imports), wherever the import stands."""
    return [(name, other) for name, others in imports(True).items() for other in others]


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.full
def test_no_circle_of_imports():
    assert len(modules()) > 100 and "jaxrl.training.objective" in imports(False)["jaxrl.training.update"]
    assert circles(imports(False)) == []
    assert circles(imports(True)) == []


def test_a_type_error_more_is_named_and_one_less_is_told():
    types = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / ".ci/types")))
    error = {"file": str(ROOT / "a.py"), "severity": "error", "rule": "reportCallIssue", "message": "Too few\n  arguments",
             "range": {"start": {"line": 4}}}
    found = types.grouped([error, {**error, "rule": "reportIndexIssue"}, {**error, "severity": "warning"}], ROOT.parent)
    assert types.counts(found) == {"jaxrl/a.py": {"reportCallIssue": 1, "reportIndexIssue": 1}}
    before = {"jaxrl/a.py": {"reportIndexIssue": 1}, "jaxrl/b.py": {"reportIndexIssue": 2}}
    assert types.compare(before, found) == (
        ["jaxrl/a.py: reportCallIssue: 0 -> 1", "    jaxrl/a.py:5: Too few arguments"], ["jaxrl/b.py: reportIndexIssue: 2 -> 0"])
    assert types.compare(types.counts(found), found) == ([], [])


def test_files_and_functions_are_short():
    lines = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: n for name, n in lines.items() if n > LONGEST_FILE and name != GENERATED} == {}
    long = {(name, node.name, node.lineno): node.end_lineno - node.lineno + 1 for name, tree in modules().items()
            for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert {key: n for key, n in long.items() if n > LONGEST_FUNCTION} == {}


def test_lines_are_within_120_columns():
    """But in files that are tables, whose rows stay rows."""
    wide = [f"{path.relative_to(ROOT)}:{number}" for path in ROOT.rglob("*.py") if str(path.relative_to(ROOT)) not in TABLES
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > WIDEST]
    assert wide == []


def test_nothing_imports_a_recipe():
    """The registry names them, and jaxrl.api runs what it names."""
    found = {(name, other) for name, other in arrows() if room(other) == "recipes" and room(name) != "recipes"}
    assert found == set()


def test_nothing_imports_planning():
    """But jaxrl.api, which runs mode=plan and injects the comparison."""
    found = {name for name, other in arrows() if room(other) == "planning" and room(name) != "planning"}
    assert found <= {"jaxrl.api"}


def test_only_the_command_imports_the_training_service():
    """And the service imports its HTTP library in one file; no other file of jaxrl names it."""
    assert {name for name, other in arrows() if room(other) == "service" != room(name)} == {"jaxrl.serve"}
    http = {name for name, tree in modules().items() for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "starlette" in (getattr(node, "module", "") or "")}
    assert http == {"jaxrl.service.routes"}


def test_algorithms_know_arrays_only():
    assert {(name, other) for name, other in arrows() if room(name) == "algorithms" != room(other)} == set()


def test_rollout_and_training_do_not_know_each_other():
    assert {(name, other) for name, other in arrows() if {room(name), room(other)} == {"rollout", "training"}} == set()
