"""What README and docs print is so: blocks run, commands parse, options and paths exist.

A comment before a block says what it needs: <!-- saved as FILE --> is a file that other blocks name; <!-- saved as FILE, runs with FLAGS -->
is trained with for two steps; <!-- saved as FILE, executed --> and blocks of Python without a comment are executed; <!-- needs FILE -->
comes after it; <!-- not run: WHY --> is compiled only. Models and rows that the text calls path/to/hf_model, train.jsonl, ... are made here.
"""

import contextlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_job

import jaxrl
from jaxrl.config.load import config_of, load_config, parse_flags, put
from jaxrl.config.schema import SCHEMA, free_tables, options
from jaxrl.data import check_paths, resolve
from jaxrl.launch import main as launch  # noqa: F401  (what its flags are is read from its source)
from jaxrl.main import main
from jaxrl.resolve.checks import common

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"bash", "python", "json"}


class Block(NamedTuple):
    place: str  # page:line
    language: str
    text: str
    saved_as: str
    runs_with: str
    note: str


def blocks_of(page: Path) -> list[Block]:
    text, out = page.read_text("utf-8"), []
    for found in re.finditer(r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", text, re.S | re.M):
        note = found["note"] or ""
        saved, runs = re.search(r"saved as ([\w.]+)", note), re.search(r"runs with (.*)", note)
        place = f"{page.relative_to(ROOT)}:{text[:found.start('body')].count(chr(10)) + 1}"
        out.append(Block(place, found["language"], found["body"], saved[1] if saved else "", runs[1] if runs else "", note))
    return out


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [b for b in BLOCKS if b.language == "python"]
TEXTS = [(page.relative_to(ROOT), re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)) for page in PAGES]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder as the text has it: a clone with the user's files in it."""
    for name in ("configs", "launch", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in PYTHON:
        if block.saved_as:
            (tmp_path / block.saved_as).write_text(block.text)
    for name, source in (("train", "train"), ("test", "test"), ("demonstrations", "sft"), ("mine", "train")):
        rows = [json.loads(line) for line in Path(resolve(f"jaxrl://arith/{source}.jsonl")).read_text().splitlines()[:24]]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row | renamed(row)) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def renamed(row: dict) -> dict:
    """The columns under the names that README's config file reads."""
    return {"question": row["prompt"], "solution": row.get("answer", "")}


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    out = []
    for line in words:
        while "&&" in line:
            out.append(line[:line.index("&&")])
            line = line[line.index("&&") + 1:]
        out += [line] if line else []
    return out


def flags_of(words: list[str]) -> list[str]:
    return [w for w in words if w.startswith("--config") and not w.endswith("=...")]


def test_every_block_is_of_a_language_that_is_looked_at():
    assert len(BLOCKS) > 20 and len(PYTHON) > 8
    for block in BLOCKS:
        assert block.language in LANGUAGES, block.place
        if block.language == "json":
            assert json.loads(block.text), block.place


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=lambda b: b.place)
def test_commands_are_such(block, place):
    assert subprocess.run(["bash", "-n"], input=block.text, text=True).returncode == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for words in commands(block):
        words = [w for w in words if not re.fullmatch(r"[A-Z_]+=\S*", w)]  # of the environment
        spec, overrides = parse_flags(flags_of(words))
        if spec is not None:
            config = load_config(spec, overrides)
            common.check(config)
            if not set(config.data.path) & {"openai/gsm8k"}:
                check_paths(config)
        program, script = words[0], next((w for w in words[1:] if not w.startswith("-")), "")
        if program in ("python", "bash", "sbatch") and "-m" not in words:
            assert (ROOT / script).is_file(), script
            check_flags(words, (ROOT / script).read_text())
        elif program == "python":
            module = words[words.index("-m") + 1]
            assert module.startswith("vllm.") or importlib.util.find_spec(module), module
            if module == "jaxrl.launch":
                check_flags(words, Path(importlib.util.find_spec(module).origin).read_text())
        elif program == "kubectl":
            assert (ROOT / words[words.index("-f") + 1]).is_file()
        elif program == "pip":
            extra = re.search(r"\[([\w,-]+)\]", words[-1])
            assert extra is None or set(extra[1].split(",")) <= set(project["project"]["optional-dependencies"]), words
        else:
            assert program in ("pytest", "jaxrl") or program.startswith("--config."), words


def check_flags(words: list[str], source: str) -> None:
    for word in words:
        if word.startswith("--") and not word.startswith("--config") and word != "--" and not source.startswith("#!"):
            assert word.partition("=")[0] in source, word


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.place)
def test_python_compiles_and_what_it_runs_with_are_options(block, place):
    compile(block.text, block.place, "exec")
    parse_flags(block.runs_with.split())
    if "executed" not in block.note:  # what is printed is what it is tried with
        assert re.findall(r"--config\.\S+", block.text) == block.runs_with.split()
    if "def get_config" in block.text:
        for arg in ("", ":sft"):
            config = load_config(block.saved_as + arg)
            common.check(config)
            check_paths(config)


def test_options_and_paths_that_the_text_names_exist():
    groups, known = "|".join(SCHEMA), options()
    tables = (*free_tables(), "mesh.roles")
    for page, text in TEXTS:
        if re.search(r"docs/(migrate|parameters|from_\w+)\.md$", str(page)):  # the first cells are keys of other systems
            text = re.sub(r"(?m)^\|[^|]*\|", "|", text)
        named = re.findall(rf"(?<![\w./:-])(?:--config\.)?((?:{groups})\.[a-z][\w.]*\w)(?![\w(/:])", text)
        named = [n for n in named if not n.endswith((".py", ".md", ".json", ".jsonl", ".sh", ".csv", ".yaml", ".sbatch"))]
        for name in named:
            group = any(option.startswith(name + ".") for option in known)
            assert name in known or group or name.startswith(tables), f"{page}: {name}"
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            assert "://" in link or (ROOT / page.parent / link).exists(), f"{page}: {link}"
        for path in re.findall(r"`((?:jaxrl|tests|evidence|benchmarks|configs|notebooks|launch)/[\w./]+\.\w+)`", text):
            assert (ROOT / path).exists() or (ROOT / "jaxrl" / path).exists(), f"{page}: {path}"


# -- what runs --------------------------------------------------------------------------------------------------------------

FEW = {"data.prompts_per_step": 4, "data.max_prompt_tokens": 96, "data.max_rows": 24, "rollout.group_size": 4, "rollout.max_new_tokens": 12,
       "rollout.prompt_lengths": (96,), "rollout.slots": 16, "reward.workers": 1, "eval.max_rows": 4, "train.steps": 2,
       "train.row_lengths": (), "train.tokens_per_microbatch": 512, "log.console": "off", "log.tensorboard": False,
       "checkpoint.every_steps": 0, "checkpoint.export_at_end": False, "eval.every_steps": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model."""
    c = tiny_job.get_config()
    for name, value in (FEW | {"train.steps": 1, "checkpoint.export_at_end": True}).items():
        put(c, name, value)
    c.run.dir, c.eval.sets = str(tmp_path_factory.mktemp("made") / "run"), ()
    return Path(jaxrl.train(c)["export"])


@pytest.fixture
def small(place, model, monkeypatch):
    """jaxrl.train with few rows, few tokens and two steps; `path/to/hf_model` is there."""
    (place / "path/to").mkdir(parents=True)
    (place / "path/to/hf_model").symlink_to(model)
    train, ran = jaxrl.train, []

    def shortened(config=None, *args, **given):
        config = config_of(config)
        for name, value in FEW.items():
            put(config, name, value)
        made = config.model.init == "random" and "model_type" in config.model.config
        if not config.model.path and "model" not in given and not made:  # a warm start: the tiny model stands for it
            config.model.path, config.run.warm_start = "path/to/hf_model", ""
        if config.env.function or config.env.tools or "env" in given or "tools" in given:  # its tokenizer has no chat template
            config.model.tokenizer, config.train.max_sequence_tokens = "jaxrl://chat/tokenizer", 192
        ran.append(train(config, *args, **given))
        assert ran[-1]["steps"] == 2 or ran[-1]["ended_by"]
        return ran[-1]

    monkeypatch.setattr(jaxrl, "train", shortened, raising=False)
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in PYTHON if b.runs_with], ids=lambda b: b.place)
def test_files_of_the_text_are_trained_with(block, small):
    c = tiny_job.get_config()
    for name, value in parse_flags(block.runs_with.split())[1].items():
        put(c, name, value)
    c.run.dir = "runs/block"
    if needed := re.search(r"needs ([\w.]+)", block.note):
        runpy.run_path(needed[1])
    jaxrl.train(c)
    assert small


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in PYTHON if not b.runs_with and "get_config(" not in b.text], ids=lambda b: b.place)
def test_python_of_the_text_runs(block, small, place):
    script = place / "block.py"
    script.write_text(block.text)  # run as python block.py would
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(script), run_name="__main__")
    assert ("jaxrl.train" in block.text) == bool(small)


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in BLOCKS if "--config.data.path=" in b.text and b.language == "bash"], ids=lambda b: b.place)
def test_commands_with_ones_own_data_run(block, small):
    (words,) = commands(block)
    extra = [f"--config.{n}=" + (",".join(map(str, v)) if isinstance(v, tuple) else str(v)) for n, v in FEW.items()]
    extra += [] if "path/to" in block.text else ["--config.model.path=path/to/hf_model", "--config.run.warm_start="]
    assert main([*flags_of(words), *extra]) == 0
