"""What README and docs print is so: blocks run, commands parse, options and paths exist.

A comment before a block says what it needs: <!-- saved as FILE --> is a file that other blocks name; <!-- saved as FILE, runs with FLAGS -->
is trained with for two steps; <!-- saved as FILE, executed --> and blocks of Python without a comment are executed; <!-- needs FILE -->
comes after it; <!-- not run: WHY --> is compiled only. Models and rows that the text calls path/to/hf_model, train.jsonl, ... are made here.
"""

import ast
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
import yaml
from helpers import tiny_job

import jaxrl
from jaxrl.__main__ import PROGRAMS
from jaxrl.config.load import config_of, load_config, parse_flags, put
from jaxrl.config.schema import SCHEMA, free_tables, options
from jaxrl.data import check_paths, resolve
from jaxrl.launch import main as launch  # noqa: F401  (what its flags are is read from its source)
from jaxrl.main import main
from jaxrl.resolve.checks import common

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *sorted(DOCS.rglob("*.md"))]
FOLDERS = {"guides", "reference", "explanations", "measurements"}
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
    for name in ("train", "test"):  # of docs/guides/vision.md, until my_photos.py writes them
        (tmp_path / f"{name}.csv").write_text("photo,question,answer\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def renamed(row: dict) -> dict:
    """The columns under the names that the config file of docs/guides/configs.md reads."""
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
            found = next(p for p in (ROOT / script, place / script) if p.is_file())  # of the clone, or of the page
            check_flags(words, found.read_text())
        elif program == "python":
            module = words[words.index("-m") + 1]
            assert module.startswith(("vllm.", "tinker_cookbook.")) or importlib.util.find_spec(module), module
            if module == "jaxrl.launch":
                check_flags(words, Path(importlib.util.find_spec(module).origin).read_text())
        elif program == "jaxrl":
            assert words[1] in PROGRAMS, words
            module = "jaxrl.service.app" if words[1:3] == ["serve", "tinker"] else PROGRAMS[words[1]].module
            check_flags(words, Path(importlib.util.find_spec(module).origin).read_text())
        elif program == "kubectl":
            assert (ROOT / words[words.index("-f") + 1]).is_file()
        elif program == "pip":
            extra = re.search(r"\[([\w,-]+)\]", words[-1])
            assert extra is None or set(extra[1].split(",")) <= set(project["project"]["optional-dependencies"]), words
        else:
            assert program in ("pytest", "export") or program.startswith("--config."), words


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
        if re.search(r"/(migrate|parameters|command|from_\w+)\.md$", str(page)):  # the first cells are keys of other systems, or slips
            text = re.sub(r"(?m)^\|[^|]*\|", "|", text)
        named = re.findall(rf"(?<![\w./:-])(?:--config\.)?((?:{groups})\.[a-z][\w.]*\w)(?![\w(/:])", text)
        named = [n for n in named if not n.endswith((".py", ".md", ".json", ".jsonl", ".sh", ".csv", ".yaml", ".sbatch"))]
        for name in named:
            group = any(option.startswith(name if name.endswith("_") else name + ".") for option in known)
            assert name in known or group or name.startswith(tables), f"{page}: {name}"
        if page.name == "code.md":
            for path in re.findall(r"`([\w/]+(?:\.py|/))`", text):
                assert (ROOT / "jaxrl" / path).exists(), f"{page}: {path}"
        for path in re.findall(r"`((?:jaxrl|tests|evidence|benchmarks|configs|notebooks|launch)/[\w./]+\.\w+)`", text):
            assert (ROOT / path).exists() or (ROOT / "jaxrl" / path).exists(), f"{page}: {path}"


def anchors(text: str) -> set[str]:
    """The ids that headings of a page get."""
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[tuple[Path, str]]:
    """(page or file, anchor) of the relative links of a page, outside its blocks."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", dict(TEXTS)[page.relative_to(ROOT)])
    return [((page.parent / path).resolve() if path else page, anchor) for path, anchor in found if "://" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_link_is_dead(page):
    for target, anchor in links_of(page):
        assert target.is_file(), target
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{target}#{anchor}"
        assert page.parent == ROOT or DOCS in target.parents, f"{target}: the site has the files of docs/ only"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 130 and max(map(len, lines)) <= 120


def test_the_workflow_has_every_section_of_ci_run_and_issues_ask_for_the_doctor():
    sections = subprocess.run(["bash", ROOT / ".ci/run", "--list"], capture_output=True, text=True, check=True).stdout.split()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["section"]["strategy"]["matrix"]["section"] == sections
    for form in ("bug", "performance"):
        fields = {field.get("id"): field for field in yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())["body"]}
        assert "jaxrl doctor" in fields["doctor"]["attributes"]["description"] and fields["doctor"]["validations"]["required"]
        assert "jaxrl-doctor.txt" in fields["doctor"]["attributes"]["description"]


def test_every_page_begins_with_what_its_reader_can_do_and_ends_with_what_was_measured():
    for page in DOCS.rglob("*/*.md"):
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))
        assert re.match(r"# .+\n\nAfter (reading this page|an afternoon)", text), page
        measured = [bool(re.match(r"Measured|Shown|How far", title)) for title in re.findall(r"(?m)^## (.+)$", text)]
        assert measured == sorted(measured), page


def test_every_page_is_in_one_of_four_folders_and_reached_from_the_index():
    assert {p.parent.name for p in PAGES if p.parent not in (ROOT, DOCS)} == FOLDERS
    assert [p.name for p in PAGES if p.parent == DOCS] == ["index.md"]
    reached, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            todo += [target for target, _ in links_of(page) if DOCS in target.parents]
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_pages_that_code_and_messages_name_exist():
    files = [p for folder in ("jaxrl", "configs", "notebooks", "tests", "benchmarks", "evidence") for p in (ROOT / folder).rglob("*")
             if p.suffix in (".py", ".ipynb", ".md", ".csv")]
    named = {(str(p.relative_to(ROOT)), page) for p in files
             for page in re.findall(r"(?<![\w/])docs/[\w/]+\.(?:md|svg)\b", p.read_text("utf-8"))}
    elsewhere = {"docs/features/sleep_mode.md"}  # of vLLM
    assert len(named) > 80
    assert [(name, page) for name, page in named if page not in elsewhere and not (ROOT / page).is_file()] == []


def texts_of_the_code() -> list[str]:
    """The string literals of jaxrl; an f-string with a null character for each of its values."""
    found = []
    for path in (ROOT / "jaxrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.full
def test_messages_that_the_troubleshooting_page_explains_exist():
    text, code = (DOCS / "guides/troubleshooting.md").read_text("utf-8"), texts_of_the_code()
    messages = [m for m in re.findall(r"(?m)^\| `([^`]+)` \|", text)]
    assert len(messages) > 30
    assert [m for m in messages if not any(m in one for one in code)] == []


def test_generated_pages_are_current():
    """python docs/generate.py"""
    module = runpy.run_path(str(DOCS / "generate.py"))
    assert set(module["GROUPS"]) == set(SCHEMA)
    for name, page in module["PAGES"].items():
        assert (DOCS / "reference" / name).read_text("utf-8") == page(), name


def test_the_api_page_has_every_public_name():
    shown = set(re.findall(r"(?m)^::: ([\w.]+)$", (DOCS / "reference/python.md").read_text("utf-8")))
    public = [getattr(jaxrl, name) for name in jaxrl.__all__ if name != "__version__"]
    assert shown == {f"{one.__module__}.{one.__qualname__}" for one in public}


def test_the_site_has_every_page():
    """mkdocs build --strict (.ci/run docs) says the same."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = re.findall(r"[\w/]+\.md", json.dumps(nav))
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


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
@pytest.mark.parametrize("block", [b for b in PYTHON if not b.runs_with and "get_config(" not in b.text and "not run" not in b.note],
                         ids=lambda b: b.place)
def test_python_of_the_text_runs(block, small, place):
    script = place / "block.py"
    script.write_text(block.text)  # run as python block.py would
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(script), run_name="__main__")
    assert ("jaxrl.train" in block.text) == bool(small)


@pytest.mark.slow
def test_photographs_of_the_vision_guide_are_trained_on(place):
    """SFT on a folder of photographs with CSV files, then GRPO from its export; every row has its image."""
    runpy.run_path("my_photos.py", run_name="__main__")
    for job in ("small_sft", "small_grpo"):
        quiet = {"run.dir": f"runs/my_vision_{job}", "data.epochs": 1, "train.steps": 2, "eval.max_rows": 8, "eval.before": False,
                 "log.console": "off", "log.tensorboard": False, "checkpoint.every_steps": 0, "eval.every_steps": 0}
        summary = jaxrl.train(load_config(f"my_vision.py:{job}", quiet))
        assert summary["steps"] == 2
        assert {"accuracy", "blank/accuracy", "swapped/accuracy"} <= summary["eval_after"]["sets"]["test"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in BLOCKS if "--config.data.path=" in b.text and b.language == "bash"], ids=lambda b: b.place)
def test_commands_with_ones_own_data_run(block, small):
    (words,) = commands(block)
    extra = [f"--config.{n}=" + (",".join(map(str, v)) if isinstance(v, tuple) else str(v)) for n, v in FEW.items()]
    extra += [] if "path/to" in block.text else ["--config.model.path=path/to/hf_model", "--config.run.warm_start="]
    assert main([*flags_of(words), *extra]) == 0
