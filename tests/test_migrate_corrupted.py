"""jaxrl.migrate: files of every system that something went wrong with. There is an error with its place, never a trace."""

import json
import random
import re
from collections import Counter

import pytest
from helpers.tiers import first_cases

from jaxrl.migrate.read import read
from jaxrl.migrate.source import Unreadable
from jaxrl.migrate.systems import SYSTEMS, table_of
from jaxrl.migrate.table import Migration

SCRIPTS = {"skyrl": "python -m skyrl.main", "verl": "python3 -m verl.trainer.main_ppo"}
WRONG = ("fast", "", -1, 0, 1e-9, 10**30, True, "1e-6x", "${GPUS}", [], [1, "a"], [[-1]], {"a": 1}, "a.b:c", "../..", "[1", None)
CHARACTERS = "\"'`${}[]()=:#\\\n|&;<>*!%@0a\x00\u2028"


def settings(system, draw) -> dict:
    """Some keys of a system's table with values that it takes, beside those without which nothing runs there."""
    rows = [k for k in table_of(system).keys() if k.other is not None and "*" not in k.name]
    out = dict(table_of(system).required)
    for key in draw.sample(rows, min(12, len(rows))):
        out |= {**key.beside, key.name: key.other}
    return {k: v for k, v in out.items() if not any(other.startswith(k + ".") for other in out) and v is not None}


def yaml(found: dict) -> str:
    """Nested, a line to each key."""
    lines, open_ = [], ()
    for key, value in sorted(found.items()):
        *tables, name = key.split(".")
        same = next((i for i, (a, b) in enumerate(zip(tables, open_, strict=False)) if a != b), min(len(tables), len(open_)))
        lines += [f"{'  ' * i}{tables[i]}:" for i in range(same, len(tables))]
        lines.append(f"{'  ' * len(tables)}{name}: {json.dumps(value)}")
        open_ = tuple(tables)
    return "\n".join(lines) + "\n"


def toml(found: dict) -> str:
    def value(v):
        return "{" + ", ".join(f"{k} = {value(x)}" for k, x in v.items()) + "}" if isinstance(v, dict) else json.dumps(v)

    return "".join(f"{key} = {value(v)}\n" for key, v in found.items())


def script(found: dict, command: str) -> str:
    words = [f"  {key}={json.dumps(v) if isinstance(v, int | float) else repr(json.dumps(v))} \\\n" for key, v in found.items()]
    return f"set -x\nGPUS=${{GPUS:-8}}\n{command} \\\n" + "".join(words) + "  $@\n"


def files(system, draw):
    """(name, text) of a config as that system's users write it, with a wrong value or with broken text."""
    found, spoil = settings(system, draw), lambda text: corrupted(text, draw)
    if draw.random() < 0.5:
        found[draw.choice(sorted(found))] = draw.choice(WRONG[:-1] if system == "cosmos_rl" else WRONG)
        spoil = str
    if system == "cosmos_rl":
        return "job.toml", spoil(toml(found))
    if system in SCRIPTS and draw.random() < 0.5:
        return "job.sh", spoil(script(found, SCRIPTS[system]))
    return "job.yaml", spoil(yaml(found))


def corrupted(text: str, draw) -> str:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        new = draw.choice(["", "", draw.choice(CHARACTERS), text[at:at + draw.randint(0, 30)] * 2])
        text = text[:at] + new + text[at + draw.randint(0, 3):]
    return text


@pytest.mark.full
@first_cases(1, "system", SYSTEMS)
def test_corrupted_files_give_an_error_with_its_place_and_no_trace(system, tmp_path):
    draw, table, seen = random.Random(0), table_of(system), Counter()
    for _ in range(200):
        name, text = files(system, draw)
        (tmp_path / name).write_text(text, "utf-8")
        place, source = re.compile(rf"{name}:\d+"), None
        try:
            source = read(table, tmp_path / name, [])
            m = Migration(table, source, draw.choice(table.versions), 8).run()
            m.records()
            seen[m.outcome(False)] += 1
        except Unreadable as e:
            unset = e.key not in (source.settings if source else ()) and e.where == f"{table.title}'s default"
            assert place.fullmatch(e.where) or unset and e.key, str(e)
            assert e.why and (e.key or source is None), str(e)  # a syntax error has a line, and may have no key
            seen["unreadable with its key" if e.key else "unreadable"] += 1
    assert min(seen["unreadable"], seen["unreadable with its key"], seen["partial"]) >= 5, seen
