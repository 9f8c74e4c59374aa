"""A model must not be able to be absent: whatever it writes has the score of a wrong answer. Texts and readers: hostile_texts.py."""

import numpy as np
import pytest
from helpers import hostile_texts
from helpers.hostile_texts import texts

from jaxrl import sandbox
from jaxrl.config.load import default_config
from jaxrl.rewards import RewardItem, RewardPool
from jaxrl.rewards.builtin import time_limited
from jaxrl.sandbox import api

READERS = hostile_texts.readers()
LONG = {name for name in READERS if name in ("reward math", "reward code") or name.startswith(("program", "turns of"))} - {"turns of hermes"}


@pytest.fixture
def limits_alone(monkeypatch):
    monkeypatch.setattr(api, "check", lambda *args: None)
    hostile_texts.limits_alone(seconds=300.0)
    yield
    sandbox.configure({})


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in READERS])
def test_no_text_is_absent(limits_alone, name):
    wrong = {}
    for label, text in texts(4000).items():
        try:
            READERS[name](text)
        except BaseException as e:
            wrong[label] = repr(e)[:200]
    assert not wrong


@pytest.mark.full
def test_no_text_is_absent_in_a_worker():
    """All rewards but `code` in real workers; the time of a completion is the processor's, and below reward.timeout_seconds."""
    config = default_config()
    config.reward.functions, config.reward.workers, config.reward.format_pattern = ("math", "exact", "boxed", "choice", "format"), 1, "(a+)+b"
    config.reward.timeout_seconds = 300.0
    table = list(texts(400).values())[::9] + ["a" * 64, "\\boxed{" + "9" * 400 + "}"]
    with RewardPool(config) as pool:
        letters = pool.score([RewardItem("q", text, {"answer": "B"}) for text in table])
        numbers = pool.score([RewardItem("q", text, {"answer": 31337}, functions=("math", "exact", "boxed", "format")) for text in table])
    assert {o for result in (letters, numbers) for outcomes in result.outcomes for o in outcomes.values()} == {"ok"}
    assert not np.any(numbers.total) and np.isfinite(letters.total).all()


@pytest.mark.slow
def test_no_text_is_absent_in_an_environment():
    """Each environment of the house plays each text, as an answer and as a call's argument, to its end."""
    from helpers import env_cases

    from jaxrl.envs.parsers import PARSERS

    rows = {"calc": {"answer": "31337"}, "library": {"seed": 1, "answer": "oslo"}, "guess": {"number": 31}, "lake": {"map": "P#\n#G"}}
    options = default_config().sandbox
    options.backend = "rlimits"
    said = dict(enumerate(texts(2000).values()))
    for name, row in rows.items():
        with env_cases.pool(name, max_turns=2, sandbox=options, step_seconds=300.0) as pool:
            def model(id, k, data):
                if k == 3:  # an episode has no more turns
                    return env_cases.turn("", finish="length")
                text, calls = PARSERS["hermes"].read(said[int(id)])
                told = [(call.name, call.arguments) for call in calls] + [("calculate", {"expression": said[int(id)]})] * (k == 0)
                return env_cases.turn(text, *told)
            ends, _ = env_cases.play(pool, {str(k): row for k in said}, model)
        assert {e.kind for e in ends.values()} == {"done"}, name
        assert not any(e.data["value"] for e in ends.values())


def test_a_library_that_catches_everything_does_not_hold_a_completion(monkeypatch):
    monkeypatch.setattr("jaxrl.rewards.builtin.LIMIT", 0.05)
    with time_limited() as limit:
        for _ in range(3):
            try:
                while True:
                    pass
            except BaseException as e:  # as a finalizer or a `finally: return` does
                caught = e
        raise caught
    assert limit.score == 0.0
