"""env.program through the trainer's side: tokens and log-probs of what a program asked for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.episode_cases import params, playing, requests, rescored, tokenizer

from jaxrl.rl.trajectories import collect
from jaxrl.rollout import generate

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[1] / "helpers" / "programs.py"
PROGRAM = f"{sys.executable} {FILE}"


def test_tokens_recorded_are_tokens_sampled():
    """Through the trainer's side: what the engine sampled is what is trained, behind the prompts that were; turns that are used up
    are refused, and the program that fails of it is scored."""
    with playing("", program=PROGRAM, max_turns=3, retries=0) as engine:
        asked = requests(1, 4, max_new_tokens=5)
        for request, row in zip(asked, [{"kind": "conversation"}, {"kind": "ends", "how": "many"}] * 2, strict=True):
            object.__setattr__(request, "task", SimpleNamespace(**vars(request.task) | {"columns": row}))
        results = generate(engine, asked, 600.0)
    traj = collect(asked, results)
    np.testing.assert_array_equal(traj.tokens[traj.loss_mask], np.concatenate([r.tokens for r in results]))
    np.testing.assert_allclose(rescored(traj, {0: params()})[traj.loss_mask], traj.logprobs[traj.loss_mask], atol=1e-5)
    for talk, many in zip(results[::2], results[1::2], strict=True):
        assert [t.opens for t in talk.turns] == [True, False, True] and talk.outcome.value == 0.5
        assert tokenizer().decode(talk.turns[1].added).endswith("?\n=")
        assert [t.opens for t in many.turns] == [True] * 3 and (many.finish, many.outcome.value) == ("length", 0.0)


def test_calls_that_are_not_trained_leave_no_trace():
    with playing("", program=PROGRAM, train_calls=f"{FILE}:no_summaries", max_turns=8, workers=1, says=["1", "2", "3"]) as engine:
        asked = requests(1, 1)
        asked[0].task.columns = {"kind": "sides"}
        (result,) = generate(engine, asked, 600.0)
        assert len(engine.engine.asked) == 5
    assert len(result.turns) == 3 and result.outcome.value == 0.5
    np.testing.assert_array_equal(result.turns[0].added, result.turns[1].added)  # the same request, twice
