"""The sharding lint: per config and mesh a budget of collectives (collectives.csv), and no involuntary
rematerialisation."""

import sys
from pathlib import Path

import pytest
from helpers import collective_cases
from helpers.collective_cases import CASES

from jaxrl.kernels.experts import tuned
from jaxrl.planning import compiling

RULES = ("the MLP is not split over tp", "weights are not gathered before use", "rows are not split")


@pytest.mark.parametrize("case", [pytest.param(case,
                                               marks=pytest.mark.slow if case == "ppo mixed" else pytest.mark.nightly)
                                  for case in CASES if case != "8B on 256"])  # that one: evidence/sharding.py
@pytest.mark.slow
def test_collectives_stay_within_their_budget(case):
    """Compiled for 8 to 256 simulated devices. After a change that is meant: python tests/helpers/collective_cases.py"""
    rows, rematerialised = collective_cases.found(case)
    assert collective_cases.over(rows, collective_cases.budget(case)) == [] and rematerialised == 0


@pytest.mark.full
def test_what_experts_send_over_ep():
    """Per layer of an update, in every chunk: tokens (once more in the backward pass, with their gradients), ids and gates are
    gathered, outputs and the gradients of tokens and gates are reduced; of a prefill tokens, ids, gates and outputs."""
    budget, layers, ep, size, slots = collective_cases.budget("experts"), 3, 4, 96, 2
    chunks = -(-2048 * ep // tuned.chunk(slots, 8))  # 2048 tokens on each device
    tokens = chunks * -(-2048 // chunks) * ep
    assert budget["update", "all-gather", ep] == (layers * chunks * 7, layers * tokens * 4 * (3 * size + 2 * 2 * slots))
    assert budget["update", "reduce-scatter", ep] == (layers * chunks * 3, layers * tokens * 4 * (2 * size + slots))
    count, moved = budget["prefill", "all-gather", ep]
    assert count == layers * 3 and moved % (layers * 4 * (size + 2 * slots)) == 0
    assert budget["prefill", "reduce-scatter", ep] == (layers, moved * size // (size + 2 * slots))
    assert ("prefill", "all-gather", 8) not in budget  # a router chooses where its tokens are


@pytest.mark.full
def test_what_cut_rows_send_over_cp():
    """Per layer of an update keys and values are gathered in the forward pass and when it is computed again, and their gradients
    reduced; positions and segments once for all layers, the last hidden states once. Of a sampler nothing is."""
    budget, layers, cp, size, kv = collective_cases.budget("long rows"), 3, 4, 96, 96
    tokens = 2048  # of a microbatch's rows on the devices of one cp
    assert budget["update", "all-gather", cp] == (layers * 4 + 1 + 2, tokens * 4 * (layers * 4 * kv + size + 2))
    assert budget["update", "reduce-scatter", cp] == (layers * 2 + 1, tokens * 4 * (layers * 2 * kv + size))
    assert {group for program, _, group in budget if program in ("prefill", "insert", "decode")} == {8}


@pytest.mark.full
def test_what_recurrences_exchange_over_cp():
    """Per layer and token queries, keys, values, what is written and the decay, and the output back: in the forward pass, when it is computed
    again, and their gradients. Of a sampler nothing is."""
    budget, cp, layers, model = collective_cases.budget("long rows, recurrent"), 4, 3, collective_cases.HYBRID
    keys, values = (model[f"linear_num_{kind}_heads"] * model[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    tokens, numbers = 2048, 2 * keys + 2 * values + 2 * model["linear_num_value_heads"]
    assert budget["update", "all-to-all", cp] == (layers * 3 * 6, layers * 3 * tokens * 4 * numbers)
    assert {program for program, kind, _ in budget if kind == "all-to-all"} == {"update"}


def with_broken(rule: str) -> list[str]:
    """What of the case `ppo mixed` is over its budget where a sharding rule is broken (broken_rule.py)."""
    popen = compiling.subprocess.Popen

    def broken(command, **options):
        assert command[1:3] == ["-m", "jaxrl.planning.compiling"]
        return popen([sys.executable, str(Path(__file__).parents[1] / "helpers" / "broken_rule.py"), rule, *command[3:]], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling.subprocess, "Popen", broken)
        rows, rematerialised = collective_cases.found("ppo mixed")
    warned = [f"{rematerialised} involuntary rematerialisations"] if rematerialised else []
    return collective_cases.over(rows, collective_cases.budget("ppo mixed")) + warned


@pytest.mark.nightly
def test_a_broken_rule_is_over_budget():
    """The others of RULES: evidence/sharding.py."""
    too_much = with_broken(RULES[0])
    assert "update: 36 all-gather of 2 devices, 12361728 bytes; allowed are 36, 11919360 bytes" in too_much


def test_over_names_program_kind_and_size():
    rows = {("update", "all-gather", 8): (3, 100), ("update", "all-reduce", 8): (1, 10)}
    assert collective_cases.over(rows, rows) == []
    assert collective_cases.over(rows, {("update", "all-gather", 8): (3, 99)}) == [
        "update: 3 all-gather of 8 devices, 100 bytes; allowed are 3, 99 bytes",
        "update: 1 all-reduce of 8 devices, 10 bytes; allowed are 0, 0 bytes"]
