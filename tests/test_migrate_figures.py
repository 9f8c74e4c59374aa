"""Figures of docs/guides/migrate.md are those of evidence/results/migrate_*.json: a result that moves moves its page."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guides" / "migrate.md").read_text("utf-8")
PAGE = " ".join(TEXT.split())
OUTCOMES = ("full", "partial", "refused", "unreadable")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def results(name):
    return json.loads((ROOT / "evidence" / "results" / f"{name}.json").read_text("utf-8"))["results"]


def word(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def cells(first: str) -> list[int]:
    """Returns the numbers that begin the cells of the page's one row with `first` and a number; 0 = an empty cell."""
    rows = re.findall(rf"^\| {re.escape(first)} \|( \d.*)\|$", TEXT, re.M)
    assert len(rows) == 1, first
    return [int(re.match(r" *([\d,]*)", cell)[1].replace(",", "") or 0) for cell in rows[0].split("|")]


def counts(row: dict, files: str) -> list[int]:
    return [row[files], *(row.get(outcome, 0) for outcome in OUTCOMES)]


def check_rows(rows: dict, files: str, total: str) -> None:
    """Compares a table of outcomes with the results: a row for each name, and their sum as the row `total`."""
    for name, row in rows.items():
        assert cells(name) == counts(row, files), name
        assert not row.get("wrong") and not row.get("trace"), name
    assert cells(total) == [sum(column) for column in zip(*(counts(row, files) for row in rows.values()), strict=True)]


def test_the_corpus():
    found = results("migrate_corpus")
    since, read, _ = found.pop("since"), found.pop("by rows"), found.pop("documents")
    check_rows(found, "configs", "all systems")
    assert f"reads {sum(row['configs'] for row in found.values())} example configs of {word(len(found))} systems" in PAGE
    assert f"{sum(row['rows'] for row in read.values())} rows of {len(read)} further configs" in PAGE
    assert not any(row["wrong"] for row in read.values())
    configs = since["then"]["configs"]
    assert cells(f"of these, the {configs} of {since['commit']}: then") == counts(since["then"], "configs")
    assert cells(f"the same {configs} today") == counts(since["now"], "configs")


def test_the_survey():
    found = results("migrate_survey")
    families = found.pop("families")
    check_rows(found, "files", "all clones")
    assert f"reads {sum(row['files'] for row in found.values()):,} scripts" in PAGE and f"of {word(len(found))} clones" in PAGE
    assert f"{families['before']}, of which {families['now']} are left" in PAGE and f"--since={families['since']}" in PAGE


def test_plans():
    found = results("migrate_plans")
    assert cells("written configs") == [found["written"]] and cells("with a result") == [found["planned"]]
    assert cells("fit the GPUs that the source names") == [found["fits"]] and "wrong" not in found
    assert cells("do not fit, and the report names the nearest config that does") == [found["does not fit"]]
    assert cells("preferences, reward models or distillation, which have no printed plan") == [found["none"]]
    dirty = sum(row["commit"].endswith("+") for row in found["configs"].values())
    assert f"{dirty} of them of a tree with uncommitted changes" in PAGE


@pytest.mark.parametrize("name", ["migrate_train", "migrate_train_kinds"])
def test_training(name):
    found = results(name)
    assert all(row["ok"] for row in found.values() if row["outcome"] != "refused")
    if name == "migrate_train":
        assert f"a config of each of the {word(len(found))} systems" in PAGE
        return
    ran = [row for row in found.values() if row["outcome"] != "refused"]
    assert f"{sum(row['ok'] and row['steps'] == 2 for row in ran)} of {len(ran)} end with two steps" in PAGE
    rl = [row["loss"] for row in ran if row["recipe"] == "rl"]
    assert f"of the {len(rl)} jobs of RL {sum(max(map(abs, loss)) < 1e-6 for loss in rl)} have losses below 1e-6" in PAGE
    kinds: dict[str, list] = {}
    for job in found:
        system, _, kind = job.partition("/")
        kinds.setdefault(system, []).append(kind.replace("_", " "))
    for system, names in kinds.items():
        row = PAGE.rpartition(f"| {system} | ")[2].partition(" |")[0].lower()
        assert Counter(part.partition(" (")[0].strip() for part in row.split(",")) == Counter(n.lower() for n in names), system
