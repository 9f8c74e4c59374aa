"""gymnasium and textarena themselves, where an interpreter has them: JAXRL_ENVS_PYTHON names it, else it is this one.
(`python evidence/environments_compat.py` makes an environment of its own.)"""

import os
import sys
from pathlib import Path

import pytest
from helpers import env_cases
from helpers.env_cases import play, texts, turn

from jaxrl.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
import environments_compat  # noqa: E402

pytestmark = pytest.mark.compat
PYTHON = os.environ.get("JAXRL_ENVS_PYTHON", "")


@pytest.mark.parametrize("game", environments_compat.GAMES)
def test_games_are_the_librarys_own(game):
    row = environments_compat.show(game, PYTHON)
    assert row["equal_to_the_library"] and row["equal_alone"] and row["members_equal"]


def test_answers_are_read_by_number_and_by_name():
    answers = ["I go 2", "then left or right", "7", "nothing", "down, not 3.5", "Up!", "-1", "the 1."]
    with env_cases.pool("gym:FrozenLake-v1", python=PYTHON, workers=1, max_turns=8,
                        options={"is_slippery": False, "map_name": "8x8"}) as p:
        ends, said = play(p, {"e": {}}, lambda id, k, data: turn(answers[k]))
    found = [t.rsplit(" ", 1)[1] for t in texts(said["e"])]
    assert found == ["0", "1", "2", "answer.", "answer.", "10", "2", "answer."] and ends["e"].data["notes"] == {"invalid": 3.0}
    assert texts(said["e"])[0].startswith("Answer with one action, its number or its name, each turn: 0 (left), 1 (down), 2 (r")


def test_options_and_prompts():
    with env_cases.pool("gym:Blackjack-v1", python=PYTHON, workers=1, options={"prompt": "Play.", "natural": True}) as p:
        _, said = play(p, {"e": {}})
    assert texts(said["e"])[0].startswith("Play.\n\n(")
    with env_cases.pool("textarena:GuessTheNumber-v0", python=PYTHON, workers=1, options={"max_number": 7}) as p:
        _, said = play(p, {"e": {}}, lambda id, k, data: turn("[3]"))
    assert "between 1 and 7 within" in texts(said["e"])[0]


@pytest.mark.parametrize("game, options, text", [
    ("gym:FrozenLake-v99", {}, "gym:FrozenLake-v99 cannot be made with env.options={}"),
    ("gym:FrozenLake-v1", {"slippery": True}, "unexpected keyword argument 'slippery'"),
    ("textarena:Nowhere-v0", {}, "Nowhere-v0 not found in registry"),
    ("textarena:TicTacToe-v0", {}, "is not a one-player game")])
def test_what_cannot_be_made_is_refused(game, options, text):
    with pytest.raises(ConfigError, match=text), env_cases.pool(game, python=PYTHON, workers=1, options=options) as p:
        p.ready()


def test_rendered_pictures():
    """render_mode=rgb_array: each observation is the picture that the library renders, behind the description of the actions."""
    import base64
    with env_cases.pool("gym:FrozenLake-v1", python=PYTHON, workers=1, max_turns=3,
                        options={"is_slippery": False, "render_mode": "rgb_array"}) as p:
        _, said = play(p, {"e": {}}, lambda id, k, data: turn(["right", "nothing", "down"][k]))
    first, *others = (d["messages"][0]["content"] for d in said["e"])
    assert [part["type"] for part in first] == ["text", "image"] and first[0]["text"].startswith("Answer with one action")
    assert [part["type"] for part in others[0]] == ["image"] and others[1] == "There is no valid action in this answer."
    files = [base64.b64decode(part["image"].partition(",")[2]) for part in (first[1], others[0][0])]
    assert all(file.startswith(b"\x89PNG") for file in files) and files[0] != files[1]
