"""The notebooks' first cell, wherever they are opened; what they train is run by .ci/run (JAXRL_QUICKSTART=grpo:tiny makes it short)."""

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxrl

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def opened(request, tmp_path, monkeypatch):
    """first_cell(folder, installed, pip's exit status) -> the commands it ran; `installed` maps packages to versions."""
    def first_cell(folder, installed, status=0):
        ran = []
        monkeypatch.chdir(folder)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed.get(name))
        monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
        monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=status, stderr="no"))
        exec(compile(cells(request.param)[0], request.param.name, "exec"), {})
        return [command[command.index("install") + 2:] for command in ran]

    wanted = [package for package in ("pillow", "matplotlib") if f'"{package}"' in cells(request.param)[0]]
    return first_cell, wanted, tmp_path


def test_it_installs_from_the_clone_around_it_else_from_an_index_and_keeps_the_jax_that_is_here(opened):
    first_cell, wanted, tmp_path = opened
    colab = {"jax": "0.11.1", "jaxlib": "0.11.1", "matplotlib": "3.9", "PIL": "11"}
    assert first_cell(tmp_path, colab) == [["jaxrl", "jax==0.11.1", "jaxlib==0.11.1"]]
    assert first_cell(ROOT / "notebooks", {}) == first_cell(ROOT, {}) == [[str(ROOT), *wanted]]
    here = {"jax": "0.10.2", "jaxlib": "0.10.2", "jaxrl": jaxrl.__version__}
    assert first_cell(ROOT / "notebooks", here) == ([[*wanted, "jax==0.10.2", "jaxlib==0.10.2"]] if wanted else [])
    assert first_cell(tmp_path, here | {"matplotlib": "3", "PIL": "11"}) == []


def test_it_says_what_to_do_where_another_jax_is_present_or_pip_fails(opened):
    first_cell, _, tmp_path = opened
    for version in ("0.4.33", "0.13.0"):
        with pytest.raises(SystemExit, match=rf"needs jax 0.10 to 0.12, here is jax {version}(.|\n)*%pip install 'jax>=0.10,<0.13'"):
            first_cell(tmp_path, {"jax": version, "jaxlib": version, "jaxrl": "0.1", "matplotlib": "3", "PIL": "11"})
    with pytest.raises(SystemExit, match="Set SOURCE to a clone"):
        first_cell(tmp_path, {"jax": "0.11.0", "jaxlib": "0.11.0"}, status=1)


def test_what_they_ask_for_is_what_the_package_says():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "jax>=0.10,<0.13" in project["dependencies"] and {"matplotlib>=3.8", "pillow>=10"} <= {*project["optional-dependencies"]["notebooks"]}
    assert "[notebooks]" in (ROOT / "README.md").read_text() and '"JAXRL_QUICKSTART", "grpo")' in "".join(cells(ROOT / "notebooks/quickstart.ipynb"))
    for path in NOTEBOOKS:
        for number, source in enumerate(cells(path)):
            compile(source, f"{path.name}[{number}]", "exec")


def test_what_they_import_from_jaxrl_is_there():
    found = [node for path in NOTEBOOKS for source in cells(path) for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxrl")]
    assert found
    for node in found:
        exec(compile(ast.Module([node], []), "import", "exec"), {})
