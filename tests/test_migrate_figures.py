"""Figures of docs/guides/migrate.md are those of evidence/results/migrate_*.json: a result that moves moves its page."""

import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "guides" / "migrate.md").read_text("utf-8").split())
OUTCOMES = ("full", "partial", "refused", "unreadable")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def results(name):
    return json.loads((ROOT / "evidence" / "results" / f"{name}.json").read_text("utf-8"))["results"]


def word(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def test_the_corpus():
    found = results("migrate_corpus")
    since = found.pop("since")
    read = found.pop("by rows")
    rows = [row for name, row in found.items() if name != "documents"]
    assert f"Of {len(read)} further configs" in PAGE and f"wrote {sum(row['rows'] for row in read.values())} rows" in PAGE
    assert not any(row["wrong"] for row in read.values())
    full, partial, refused, unreadable = (sum(row.get(outcome, 0) for row in rows) for outcome in OUTCOMES)
    assert f"({sum(row['configs'] for row in rows)} example configs of {word(len(rows))} systems" in PAGE
    assert f"{full} end as full, {partial} as partial, {refused} are refused by name, and {word(unreadable)} is unreadable" in PAGE
    assert not any(row["wrong"] for row in rows)
    then, now = ([since[when][outcome] for outcome in ("full", "partial", "refused")] for when in ("then", "now"))
    assert since["then"]["configs"] == since["now"]["configs"] and since["now"]["unreadable"] == 0
    assert "Of the {} of {}, {} ended as full, {} as partial and {} were refused then; today {}, {} and {}".format(
        since["then"]["configs"], since["commit"], *then, *now) in PAGE


def test_the_survey():
    found = results("migrate_survey")
    families = found.pop("families")
    full, partial, refused, unreadable = (sum(row.get(outcome, 0) for row in found.values()) for outcome in OUTCOMES)
    assert f"of all {sum(row['files'] for row in found.values()):,} scripts" in PAGE and f"example folders of {word(len(found))} clones" in PAGE
    assert f"{full} end as full, {partial} as partial, {refused} are refused and {unreadable} are unreadable" in PAGE
    assert f"{families['before']}, of which {families['now']} are left" in PAGE and f"--since={families['since']}" in PAGE
    assert f"RLinf has {found['RLinf/RLinf']['refused']} of those that are refused" in PAGE
    assert not any(row.get("wrong") or row.get("trace") for row in found.values())


def test_plans():
    found = results("migrate_plans")
    assert f"{found['planned']} have a result: {found['fits']} fit the GPUs that the source names, {found['does not fit']} do not" in PAGE
    assert f"{found['none']} are preferences, reward models or distillation" in PAGE and "wrong" not in found


@pytest.mark.parametrize("name", ["migrate_train", "migrate_train_kinds"])
def test_training(name):
    found = results(name)
    assert all(row["ok"] for row in found.values() if row["outcome"] != "refused")
    if name == "migrate_train":
        assert f"a config of each of the {word(len(found))} systems" in PAGE
        return
    ran = [row for row in found.values() if row["outcome"] != "refused"]
    assert f"{sum(row['ok'] and row['steps'] == 2 for row in ran)} of {len(ran)} end with two steps" in PAGE
    kinds: dict[str, list] = {}
    for job in found:
        system, _, kind = job.partition("/")
        kinds.setdefault(system, []).append(kind.replace("_", " "))
    for system, names in kinds.items():
        row = PAGE.rpartition(f"| {system} | ")[2].partition(" |")[0].lower()
        assert Counter(part.partition(" (")[0].strip() for part in row.split(",")) == Counter(n.lower() for n in names), system
