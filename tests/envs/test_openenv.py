"""env.servers: sessions of OpenEnv's services, of a server of the documented protocol (openenv_server.py) and, where
JAXRL_OPENENV_PYTHON names an interpreter that has it, of the public package itself; what they do wrong, and whose fault it is."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers import env_cases
from helpers.env_cases import play, texts, turn

from jaxrl.envs.openenv import OpenEnv
from jaxrl.envs.tools import BadEnvironment
from jaxrl.errors import ConfigError

REAL = os.environ.get("JAXRL_OPENENV_PYTHON", sys.executable)
OWN = pytest.param("openenv_server.py", id="own")
BOTH = [OWN, pytest.param("openenv_world.py", id="openenv", marks=pytest.mark.compat)]


@pytest.fixture(scope="module")
def serve():
    processes = []

    def start(file="openenv_server.py", kind="text", capacity=64):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        python = sys.executable if file == "openenv_server.py" else REAL
        processes.append(subprocess.Popen([python, Path(__file__).parents[1] / "helpers" / file, str(port), kind, str(capacity)]))
        for _ in range(3000):  # (importing openenv may take a minute)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/schema", timeout=60).close()
                return f"http://127.0.0.1:{port}"
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not start")

    yield start
    for process in processes:
        process.kill()
        process.wait()


def pool(*servers, **changes):
    return env_cases.pool("openenv", **{"servers": servers, "workers": 1, "step_seconds": 20.0, "retries": 0, "max_turns": 20} | changes)


def saying(*answers):
    return lambda id, k, said: turn(answers[k])


@pytest.mark.parametrize("file", BOTH)
def test_a_session(serve, file):
    """Reset with the seed and columns of the row, steps, rewards, the state's name; members of a group see the same."""
    url = serve(file)
    with pool(url, options={"reset": ("level",), "state": "target", "prompt": "Find it."}) as p:
        p.ready()
        ends, said = play(p, dict.fromkeys("ab", {"level": 2}), lambda id, k, said: turn(f" {k + 1}\n"), seed=lambda id: 7)
    assert texts(said["a"]) == texts(said["b"]) and len(said["a"]) > 2
    assert texts(said["a"])[:2] == ["Find it.\n\n1 to 16", "higher"]
    target = int(said["a"][0]["anchor"])
    assert len(said["a"]) == target and {d["anchor"] for d in said["a"]} == {str(target)}
    rewards = [d["reward"] for d in said["a"][1:]] + [ends["a"].data["reward"]]
    assert rewards == [-0.125] * (target - 1) + [1.0] and ends["a"].kind == "done"


@pytest.mark.parametrize("file", BOTH)
def test_actions_that_are_no_text(serve, file):
    """A number is the last one of the answer, an object the last that fits; one that does not fit is the policy's fault."""
    with pool(serve(file, "number")) as p:
        ends, said = play(p, {"a": {}}, lambda id, k, said: turn(["none", "3.5", "I say 0, no, 9."][k] if k < 3 else f"{k - 2}"))
    assert texts(said["a"])[:4] == ["1 to 8", "There is no valid action in this answer.", "There is no valid action in this answer.", "lower"]
    assert ends["a"].data["notes"] == {"invalid": 2.0}
    with pool(serve(file, "both")) as p:
        answers = ['{"number": "x", "why": "y"}', '{"number": 9}', '{"number": 9, "else": 1}', 'so {"why": "w", "number": 0} {"a": 1}']
        _, said = play(p, {"a": {}}, lambda id, k, said: turn(answers[k % 4]))
    no = "There is no valid action in this answer."
    assert texts(said["a"])[:5] == ["Answer with a JSON object each turn, of the fields number (integer), why (string).\n\n1 to 8",
                                    no, no, no, "higher"]


@pytest.mark.full
def test_what_services_do_wrong(serve):
    """All of it is the environment's fault, has its cause, and ends in time."""
    url = serve()
    with pool(url, step_seconds=30.0) as p:
        rows = dict.fromkeys(("garbage", "other", "nothing", "odd", "words", "die", "break", "hang"), {})
        ends, _ = play(p, rows, lambda id, k, said: turn(id))
    causes = {id: (e.data["fault"], e.data["cause"].replace(url, "URL").replace(" (in step)", "")) for id, e in ends.items()}
    assert causes.pop("hang")[0] == "late"
    causes = {id: cause for id, (fault, cause) in causes.items() if fault == "env"}
    odd = "URL gave an observation without observation, reward and done: "
    assert causes == {
        "garbage": "URL wrote invalid JSON: 'no json'", "other": "URL replied to step with '{\"type\": \"state\", \"data\": {}}'",
        "nothing": "URL replied to step with '{\"type\": \"observation\"}'", "die": "URL: EXECUTION_ERROR: no more",
        "odd": odd + "{'observation': 'x', 'reward': 1, 'done': False}", "words": odd + "{'observation': {}, 'reward': 'high', 'done': False}",
        "break": "URL: the connection broke"}


@pytest.mark.parametrize("file", BOTH)
def test_replicas_full_and_lost(serve, file):
    """What has no room is waited for; a further try finds another replica, and the same numbers."""
    one, two = serve(file, capacity=1), serve(file, capacity=1)
    with pool(one, two, retries=0) as p:
        ends, _ = play(p, dict.fromkeys("abcd", {}), lambda id, k, said: turn(str(k + 1)))
        assert {e.kind for e in ends.values()} == {"done"}
        lost = play(p, {"a": {}}, saying("exit"))[0]["a"]
        assert lost.data["fault"] == "env" and "the connection broke" in lost.data["cause"] or "closed" in lost.data["cause"]
        ends, said = play(p, dict.fromkeys("bc", {}), lambda id, k, said: turn(str(k + 1)))
        assert {e.kind for e in ends.values()} == {"done"} and texts(said["b"]) == texts(said["c"])


def test_no_room_is_said_with_what_to_do(serve):
    with pool(serve(capacity=1), step_seconds=6.0) as p:
        ends, _ = play(p, dict.fromkeys("ab", {}), lambda id, k, said: turn("9"))
    full = [e.data["cause"] for e in ends.values() if e.kind == "failed"]
    assert not full or "max_sessions=1): set env.in_flight" in full[0]


@pytest.mark.full
def test_services_that_cannot_be_had(serve):
    url, other = serve(), serve(kind="number")
    for servers, options, why in (
            (["http://127.0.0.1:9"], {}, "http://127.0.0.1:9 does not describe its actions at /schema"),
            ([url, other], {}, r"other actions than .*\(number \(integer\); say \(string\)\); env.servers are replicas"),
            ([url], {"action": "no"}, r"env.options.action='no': an action of .* has the fields say \(string\)"),
            ([url], {"fields": 1}, "env.options.fields: unknown option; openenv has action, observation"),
            (["127.0.0.1:8000"], {}, "is not an address; write http://host:8000")):
        with pytest.raises(ConfigError, match=why), pool(*servers, options=options) as p:
            p.ready()




@pytest.mark.parametrize("image", ["iVBORw0KGgo=", "data:image/png;base64,iVBORw0KGgo=", [[[0, 9, 255]] * 3] * 2, ["iVBORw0KGgo=", "iVBORw0KGgo="]])
def test_fields_with_images_are_parts(image):
    """Option `image` names the field: base64 text, a data URI, an array as lists, or a list of texts; the other fields are text."""
    session = OpenEnv(["http://a"], 0, {"say": "string"}, {"image": "screen"}, 1.0)
    seen = session._shown({"screen": image, "hint": "left"}, "Go.\n\n")
    count = 2 if image == ["iVBORw0KGgo="] * 2 else 1
    assert seen[0] == {"type": "text", "text": "Go.\n\nleft"} and [part["type"] for part in seen[1:]] == ["image"] * count
    assert all(part["image"].startswith("data:") if isinstance(part["image"], str) else png_pixels(part["image"]) == image for part in seen[1:])
    assert session._shown({"screen": image}) == seen[1:]


def png_pixels(file):
    import io

    import numpy as np
    from PIL import Image
    return np.asarray(Image.open(io.BytesIO(file))).tolist()


@pytest.mark.parametrize("seen, message", [
    ({"hint": "left"}, "env.options.image='screen': an observation has the fields hint"), ({"screen": 3}, "screen is no image: expected base64"),
    ({"screen": [[[0, 1]]]}, "is no image"), ({"screen": [[[0, 1, 300]]]}, "is no image"), ({"screen": [[[0, 1, 2]], []]}, "is no image")])
def test_fields_without_an_image_are_the_servers_fault(seen, message):
    with pytest.raises(BadEnvironment, match=message):
        OpenEnv(["http://a"], 0, {"say": "string"}, {"image": "screen"}, 1.0)._shown(seen)
