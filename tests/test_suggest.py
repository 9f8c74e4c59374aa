"""Names that are no options: the answer names ours, also to who types a key of another system."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiers import first_cases

import jaxrl
from jaxrl.__main__ import unknown
from jaxrl.config.load import default_config, parse_flags, put
from jaxrl.config.schema import options
from jaxrl.config.suggest import ELSEWHERE, unknown_option
from jaxrl.errors import ConfigError
from jaxrl.migrate.counterparts import options_of, sample
from jaxrl.migrate.source import Setting, Source, Unreadable
from jaxrl.migrate.systems import SYSTEMS, table_of
from jaxrl.migrate.table import Migration


def first(message: str) -> str:
    """The option that a message suggests first."""
    return re.search(r"did you mean ([\w.]+)", message)[1]


def targets(table, key) -> set[str]:
    """The options that a report names beside a key."""
    settings = {**table.required, **key.beside, key.name: sample(table, key)}
    try:
        rows = {name: Setting(name, value, "test:1") for name, value in settings.items()}
        m = Migration(table, Source(rows, []), table.versions[-1]).run()
    except Unreadable:
        return set()
    return {option for record in m.records() if record.key == key.name for option in record.targets}


@pytest.mark.full
@first_cases(2, "system", SYSTEMS)
def test_every_key_that_is_one_option_here_is_answered_with_it(system):
    table, asked = table_of(system), 0
    for key in table.keys():
        of_one = targets(table, key) if key.other is not None and "*" not in key.name else set()
        if len(of_one) != 1:
            continue
        for name in key.names():
            if name not in options() and "*" not in name:
                assert next(iter(of_one)) in unknown_option(name), name
                asked += 1
    assert asked > 50


@pytest.mark.parametrize("name, ours", [
    ("beta", "algorithm.kl.coef"), ("rollout.n", "rollout.group_size"), ("actor_rollout_ref.rollout.n", "rollout.group_size"),
    ("resume_from_checkpoint", "run.resume"), ("train.batchsize", "data.prompts_per_step"), ("lr", "optimizer.lr"),
    ("per_device_train_batch_size", "data.prompts_per_step"), ("rollout.num_generations", "rollout.group_size"),
    ("use_vllm", "rollout.engine"), ("actor.optim.lr", "optimizer.lr"), ("grad_clip", "optimizer.max_grad_norm"),
    ("lora_target_modules", "lora.targets"), ("load_in_4bit", "lora.base"), ("rollout.temprature", "rollout.temperature"),
    ("critics.lr", "critic.lr"), ("assistant_only_loss", "data.train_turns")])
def test_the_first_suggestion_is_the_option(name, ours):
    with pytest.raises(ConfigError) as e:
        put(default_config(), name, 1)
    assert first(str(e.value)) == ours


def test_several_options_of_a_key_are_named_and_what_needs_none_says_why():
    assert options_of("trl", "epsilon") == ("algorithm.clip_low", "algorithm.clip_high")
    assert "algorithm.clip_low (epsilon in TRL) or algorithm.clip_high?" in unknown_option("epsilon")
    assert "colocated engines sleep during the update" in unknown_option("vllm_enable_sleep_mode")


def test_the_hand_table_has_only_what_the_migration_does_not_answer(monkeypatch):
    assert set(ELSEWHERE.values()) <= set(options())
    monkeypatch.setattr("jaxrl.config.suggest.ELSEWHERE", {})
    for name, ours in ELSEWHERE.items():
        assert f"did you mean {ours}" not in unknown_option(name), name


@pytest.mark.parametrize("given, said", [
    ({"lr": 1e-5}, 'jaxrl.train(lr=...): options are given by name: jaxrl.train({"optimizer.lr": 1e-05})'),
    ({"num_generations": 4}, 'jaxrl.train({"rollout.group_size": 4})'),
    ({"reward": print}, "jaxrl.train(reward=...): did you mean rewards=..."),
    ({"steps": 4}, 'jaxrl.train({"train.steps": 4})')])
def test_options_that_are_given_to_train_as_arguments_are_answered_with_the_table_of_options(given, said):
    with pytest.raises(ConfigError) as e:
        jaxrl.train(**given)
    assert said in str(e.value)


def test_the_tables_of_other_systems_are_imported_only_when_a_name_is_unknown():
    text = ("import sys; from jaxrl.config.load import parse_flags\n"
            "parse_flags(['--config=x', '--config.optimizer.lr=1']); assert 'jaxrl.migrate' not in sys.modules\n"
            "try: parse_flags(['--config.rollout.n=8'])\n"
            "except ValueError: assert 'jaxrl.migrate.systems.verl' in sys.modules and 'jax' not in sys.modules; print('said')")
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "said\n"


def test_the_page_of_the_command_shows_what_is_answered():
    """Each row of docs/reference/command.md's table of slips."""
    page = next((Path(__file__).parents[1] / "docs").rglob("command.md")).read_text("utf-8")
    rows = re.findall(r"\| `([^`]+)` \| ([^|]+) \|", page.partition("## Names that jaxrl does not have")[2].partition("\n## ")[0])
    assert len(rows) > 6
    for typed, answer in rows:
        if typed.startswith("jaxrl "):
            said = unknown(typed.removeprefix("jaxrl "))
        else:
            with pytest.raises(ConfigError) as e:
                jaxrl.train(lr=1e-5) if typed.startswith("jaxrl.train") else parse_flags([typed])
            said = str(e.value)
        assert all(part.strip("? ") in said for part in answer.split("...")), typed
