"""The ledger of other systems' parameters (coverage*.csv), the importer's tables, and the page that is written from both."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence"))

import parameters  # noqa: E402

AGREE = {  # kind of the ledger -> kinds of the importer's rows
    "works": {"exact", "equivalent", "automatic", "inert", "ask", "table"},
    "automatic": {"automatic", "equivalent", "inert"},
    "not carried": {"unsupported", "automatic", "equivalent", "inert"},  # what makes no other job of it is no lack
}
BY_HAND = {"actor.optim.optimizer", "actor.lr_sched.lr_warmup_init",  # RLinf: the importer says which option to set
           "actor.model"}  # AReaL's supervised and reward-model trainers are refused, and have recipes


def test_every_parameter_has_one_kind():
    entries = parameters.ledger()
    assert len(entries) == 854 and {e["kind"] for e in entries} == {"works", "automatic", "not carried"}
    assert all(e["what"] and (e["test"] or e["kind"] != "works") for e in entries)


@pytest.mark.parametrize("system", parameters.SYSTEMS)
def test_the_importer_and_the_ledger_agree(system):
    mine = [e for e in parameters.ledger() if e["system"] == system]
    kinds = parameters.migrated(system, [e["key"] for e in mine])
    assert [e["key"] for e in mine if e["key"] not in kinds] == []
    tables = {e["key"] for e in mine if any(other["key"].startswith(e["key"] + ".") for other in mine)}
    wrong = {e["key"]: (e["kind"], kinds[e["key"]]) for e in mine if kinds[e["key"]] not in AGREE[e["kind"]] and e["key"] not in tables}
    assert {k: v for k, v in wrong.items() if k not in BY_HAND and not (system == "AReaL" and k == "model")} == {}


def test_the_page_is_current():
    """python evidence/parameters.py"""
    assert (parameters.ROOT / "docs" / "reference" / "parameters.md").read_text("utf-8") == parameters.page()
