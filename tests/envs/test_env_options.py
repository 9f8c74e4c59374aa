"""Every option below `env` that the engine of episodes reads, in both of its states."""

import copy
import sys

import numpy as np
import pytest
from helpers.episode_cases import WORLDS, Scripted, playing, requests, tokenizer
from helpers.turn_cases import FAMILIES, make_tokenizer
from helpers.worlds import NEWS, TEMPLATE

from jaxrl.config.load import default_config
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.common import check
from jaxrl.rollout import generate


def played(function="patient", says=("7",), groups=1, samples=1, **env):
    with playing(function, says=list(says), **env) as engine:
        assert isinstance(engine.engine, Scripted)
        return generate(engine, requests(groups, samples, max_new_tokens=env.get("tokens", 24)), 600.0)


def text(ids):
    return tokenizer().decode(ids)


def test_max_turns_and_max_observation_tokens():
    (result,) = played(max_turns=3, max_observation_tokens=40)
    assert len(result.turns) == 3 and result.finish == "length" and result.outcome.value == 1.0
    assert text(result.turns[1].added) == f"\n{NEWS}\n="
    (short,) = played(max_turns=3, max_observation_tokens=6)
    assert len(short.turns[1].added) == 6 + 3 < len(result.turns[1].added)
    assert text(short.turns[1].added).startswith("\nAnn ")


@pytest.mark.parametrize("history, opens", [("append", [True, False]), ("template", [True, True])])
def test_history(history, opens):
    """The model wrote 10 as two tokens; the template's rendering of it is one token, and so another sequence."""
    says = [["1", "0"], "7"]
    assert len(tokenizer()("10", add_special_tokens=False)["input_ids"]) == 1
    (result,) = played(says=says, max_turns=2, history=history)
    assert [turn.opens for turn in result.turns] == opens
    heads = [turn.added for turn in result.turns]
    assert text(heads[1]).startswith("Max has 3 apples\n=10<eos>\n" if opens[1] else "\nAnn has ")


@pytest.mark.parametrize("observations, added", [("message", f"<eos>\n{NEWS}\n="),
                                                 ("inline", NEWS)])
def test_observations(observations, added):
    """Behind a turn that did not end: the missing end and a message, or the text alone."""
    (result,) = played(says=["7" * 30, "8"], max_turns=2, observations=observations, max_observation_tokens=40)
    assert result.turns[0].finish == "length" and text(result.turns[1].added) == added


@pytest.mark.parametrize("in_flight", [0, 2])
@pytest.mark.slow
def test_in_flight(in_flight):
    with playing("several", in_flight=in_flight) as engine:
        engine.submit(requests(groups=6, samples=1))
        done = engine.poll(0.0)  # none is over within one turn
        assert (engine.health().running, engine.health().waiting) == ((2, 4) if in_flight else (6, 0))
        while len(done) < 6:
            done += engine.poll(0.1)
            assert not in_flight or engine.health().running <= in_flight


@pytest.mark.parametrize("retries", [0, pytest.param(2, marks=pytest.mark.full)])
def test_retries(retries):
    with playing("broken", says=["7"], retries=retries) as engine:
        (result,) = generate(engine, requests(1, 1), 600.0)
        assert len(engine.engine.asked) == 1  # a further try is answered from the record
    assert result.finish == "abort" and "OSError" in result.outcome.cause and "disk" in result.outcome.detail


@pytest.mark.parametrize("late", ["absent", "truncated"])
def test_late(late):
    (result,) = played("asleep", late=late, retries=0, step_seconds=600.0, episode_seconds=600.0)
    if late == "absent":
        assert result.finish == "abort" and "step_seconds" in result.outcome.cause and not result.turns
    else:
        assert result.finish == "length" and result.outcome.value == 0.75 and result.outcome.counts["late"] == 1
        assert text(result.tokens) == "7<eos>7<eos>"


@pytest.mark.parametrize("function", ["insists", "dawdles"])
def test_an_episode_without_a_result_keeps_its_notes_and_pays_for_malformed_calls(function):
    """One that goes on after its turns are used up, and one that is late when it sends again."""
    speaks = make_tokenizer(*FAMILIES["hermes"][:3])
    with playing(function, says=[['<tool_call>{"name": "nothing"}</tool_call>']], speaks=speaks, parser="hermes",
                 malformed_penalty=0.25, max_turns=2, max_observation_tokens=200, late="truncated", retries=0, step_seconds=600.0,
                 episode_seconds=600.0) as engine:
        (result,) = generate(engine, requests(1, 1, speaks=speaks, max_new_tokens=90), 600.0)
    assert result.finish == "length" and dict(result.outcome.notes) == {"seen": 2.0}
    assert result.outcome.counts["malformed"] == 2 and result.outcome.counts["cut_off"] == 1
    assert [turn.reward for turn in result.turns] == [1.0, 1.0] and result.outcome.value == 1.5


def test_an_untrained_call_that_cannot_be_rendered_fails_its_episode():
    speaks = copy.deepcopy(tokenizer())
    speaks.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    program = f"{sys.executable} {WORLDS.with_name('programs.py')}"
    with playing("", says=["7"], speaks=speaks, program=program, retries=0, workers=1) as engine:
        asked = requests(1, 1)
        asked[0].task.columns = {"kind": "rejected"}
        (result,) = generate(engine, asked, 600.0)
    assert result.finish == "abort" and "an untrained call: its messages cannot be rendered" in result.outcome.cause


@pytest.mark.full
@pytest.mark.parametrize("resume", ["replay", "restart"])
def test_resume(resume):
    with playing("slow", resume=resume) as engine:
        engine.submit(requests(groups=4))
        while not any(e.turns and e.first is None for e in engine._begun.values()):
            engine.poll(0.0)
        assert bool(engine.unfinished_results()) == (resume == "replay")


@pytest.mark.parametrize("penalty", [0.0, 0.25])
def test_tools_and_malformed_penalty(penalty):
    """A call is run, one that does not fit its tool is answered and, with env.malformed_penalty, costs."""
    speaks = make_tokenizer(*FAMILIES["hermes"][:3])
    says = [['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'],
            ['<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'], "5"]
    with playing("", says=says, speaks=speaks, tools=(f"{WORLDS}:add",), parser="hermes", malformed_penalty=penalty, max_turns=8,
                 max_observation_tokens=60) as engine:
        (result,) = generate(engine, requests(1, 1, speaks=speaks, max_new_tokens=90), 600.0)
    assert result.outcome.counts["calls"] == 2 and result.outcome.counts["malformed"] == 1
    assert len(result.turns) == 3 and result.finish == "stop"
    assert "5" in speaks.decode(result.turns[1].added) and "b" in speaks.decode(result.turns[2].added)
    assert result.outcome.value == (-0.25 if penalty else None)


def configured(**env):
    c = default_config()
    c.model.path = "somewhere"
    c.data.path = ("data.jsonl",)
    c.env.function = "calc"
    for name, value in env.items():
        group, _, leaf = name.partition("__")
        (c[group] if leaf else c.env)[leaf or name] = value
    return c


@pytest.mark.parametrize("options, said", [
    ({"function": "", "max_turns": 3}, "env.max_turns=3 has no effect without env.function, env.program, env.tools and env.mcp"),
    ({"tools": ("x:y",)}, "env.function and env.tools"),
    ({"run__recipe": "sft"}, "env.function='calc' has no effect with run.recipe=sft; set run.recipe=rl or distill"),
    ({"data__response_prefix": "A:"}, "data.response_prefix='A:': no use"),
    ({"data__chat": "false"}, "data.chat=false: the turns"),
    ({"data__add_generation_prompt": False}, "data.add_generation_prompt=False"),
    ({"history": "template", "observations": "inline"}, "env.observations=inline with env.history=template"),
    ({"step_seconds": 700.0}, "env.step_seconds=700: above env.episode_seconds=600"),
    ({"python": "no/such/python"}, "env.python='no/such/python': no such program"),
    ({"variables": ("A=1",)}, "'A=1' is no name"),
    ({"publish": "turn"}, "env.publish='turn' has no effect"),
    ({"function": "openenv"}, "env.function=openenv without env.servers: name the services"),
    ({"function": "guess", "servers": ("http://h:1",)}, "set env.function=openenv, or leave it out"),
    ({"max_turns": 0}, "env.max_turns=0: must be above 0"),
    ({"late": "zero"}, "env.late='zero': choose one of absent, truncated"),
    ({"max_failed_fraction": 2.0}, "env.max_failed_fraction=2.0: must lie in 0..1"),
    ({"train__max_sequence_tokens": 600, "max_input_tokens": 600}, "env.max_input_tokens=600: a sequence has at most"),
])
def test_what_cannot_work_is_refused_before_anything_is_read(options, said):
    with pytest.raises(ConfigError) as e:
        check(configured(**options))
    assert said in str(e.value)


def test_scores_without_reward_functions_are_the_environments():
    check(configured(reward__functions=()))
    with pytest.raises(ConfigError, match="or an environment that gives one"):
        check(configured(function="", reward__functions=()))
    assert np.isfinite(played("several", max_turns=4)[0].outcome.value)
