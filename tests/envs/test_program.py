"""env.program: a program for an OpenAI API as an episode: what becomes of its calls, its end, and who is at fault."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import env_cases
from helpers.env_cases import play, texts, turn

from jaxrl.errors import ConfigError

FILE = Path(__file__).parents[1] / "helpers" / "programs.py"
PROGRAM = f"{sys.executable} {FILE}"


@pytest.fixture
def pool():
    made = []

    def make(program=PROGRAM, **changes):
        made.append(env_cases.pool(program=program, **{"workers": 1, "step_seconds": 30.0} | changes))
        made[-1].ready()
        return made[-1]

    yield make
    for p in made:
        p.close()


def ran(pool, kind, tmp_path, model=lambda id, k, said: turn("ok"), program=PROGRAM, **row):
    """(the end's data, what was sent, what the program printed)."""
    told = tmp_path / f"{kind}.json"
    p = pool(program, score=f"{FILE}:printed", train_calls=f"{FILE}:no_summaries")
    ends, said = play(p, {"a": {"kind": kind, "told": str(told), **row}}, model)
    found = json.loads(told.read_text()) if told.exists() else {"stderr": ends["a"].data}
    assert ends["a"].kind == "done" and ends["a"].data["value"] == 1.0, found["stderr"]
    return ends["a"].data, said["a"], json.loads(found["stdout"]) if found["stdout"] else None, found


def test_a_conversation_goes_on_or_begins_anew(pool, tmp_path):
    """Only what is new is sent; a changed history opens a sequence; the run's sampling is the run's."""
    model = lambda id, k, said: turn([" four END five", "six", "seven"][k])  # noqa: E731
    end, sends, out, found = ran(pool, "conversation", tmp_path, model, f"{PROGRAM} --q {{prompt}} {{kind}}:{{seed}}")
    assert [texts([s]) for s in sends] == [["Be brief.", "go"], ["And?"], ["Be brief.", "go", "Anew."]]
    assert [s["rewrite"] for s in sends] == [False, False, True] and all(s["train"] for s in sends)
    assert (sends[0]["stop"], sends[0]["max_tokens"], sends[0]["tools"]) == (["END"], 9, None)
    assert sends[0]["messages"][0]["role"] == "system"
    assert out["said"] == 3 and out["argv"] == ["--q", "go", "conversation:1"] and out["folder"] == ["task.json"]
    assert found["messages"][-1] == {"role": "assistant", "content": "seven"}


def test_calls_of_tools_go_both_ways(pool, tmp_path):
    turns = [turn("", ("add", {"a": 2, "b": 3})), turn("<call>{", ("", None)), turn("5")]
    end, sends, out, _ = ran(pool, "tools", tmp_path, lambda id, k, said: turns[k])
    assert sends[1]["messages"] == [{"role": "tool", "name": "add", "tool_call_id": "c0", "content": "5"}]
    assert sends[0]["tools"][0]["function"]["name"] == "add" and not sends[1]["rewrite"]
    whole = sends[2]["messages"]  # other tools are another prompt
    assert sends[2]["rewrite"] and sends[2]["tools"] is None and [m["role"] for m in whole] == [
        "user", "assistant", "tool", "assistant", "user"]
    assert whole[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert whole[3]["content"] == "<call>{" and out["said"] == "5"
    assert end["counts"] == {"calls": 2, "malformed": 1}


def test_streams_and_refusals(pool, tmp_path):
    _, _, out, _ = ran(pool, "streamed", tmp_path, lambda id, k, said: turn("hello", finish="length"))
    assert out["said"] == ["hello", "length", 9]
    _, sends, out, _ = ran(pool, "refused", tmp_path)
    assert [status for status, _ in out["said"]] == [400] * 10 + [401, 404, 405] and len(sends) == 1
    for (_, reason), word in zip(out["said"], ("n=2", "logit_bias", "response_format", "logprobs", "tool_choice", "colour", "stop",
                                               "image_url", "role", "messages", "key", "/embeddings", "POST"), strict=True):
        assert word in reason


def test_programs_show_images(pool, tmp_path):
    """Parts in OpenAI's form, from env.image_tokens on; a conversation with images goes on, and nothing is fetched."""
    shown, told = "data:image/png;base64,iVBORw0KGgo=", tmp_path / "told.json"
    row = {"a": {"kind": "pictures", "told": str(told), "shown": shown}}
    ends, said = play(pool(score=f"{FILE}:printed", image_tokens=9), row, lambda id, k, said: turn("seen"))
    assert ends["a"].data["value"] == 1.0, told.read_text()
    first, second = said["a"]
    assert first["messages"] == [{"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "image", "image": shown},
                                                              {"type": "text", "text": "?"}]}]
    assert second["messages"] == [{"role": "user", "content": [{"type": "image", "image": shown}]}] and not second["rewrite"]
    refusals = json.loads(json.loads(told.read_text())["stdout"])["said"]
    assert [status for status, _ in refusals] == [400] * 6
    for (_, reason), word in zip(refusals, ("nothing is fetched", '"a.png"', "null", "at 3", "input_audio", "only text"), strict=True):
        assert word in reason
    play(pool(score=f"{FILE}:printed"), row, lambda id, k, said: turn("seen"))  # a job of text
    [[status, reason]] = json.loads(json.loads(told.read_text())["stdout"])["said"]
    assert status == 400 and "only text is supported" in reason


def test_side_calls_and_repeated_ones(pool, tmp_path):
    end, sends, out, _ = ran(pool, "sides", tmp_path, lambda id, k, said: turn(f"answer {k}"))
    assert [s["train"] for s in sends] == [False, False, True, True, True] and len(sends) == 5
    assert out["said"] == ["answer 0", "answer 4"]
    assert [s["rewrite"] for s in sends] == [True, True, False, True, True]


def test_what_a_program_came_to(pool, tmp_path):
    """reward.json holds what an episode function returns; without it and without env.score there is none."""
    model = lambda id, k, said: turn("ok")  # noqa: E731
    ends, _ = play(pool(), {"a": {"kind": "conversation"}, "none": {"kind": "ends", "how": "none"}, **{
        how: {"kind": "ends", "how": how} for how in ("broken", "nan", "text")}}, model)
    assert ends["a"].data["value"] == 0.5 and ends["a"].data["rewards"] == {"turns": 3.0}
    causes = {id: e.data["cause"] for id, e in ends.items() if e.kind == "failed"}
    assert "without reward.json" in causes["none"] and "is not JSON" in causes["broken"]
    assert "is nan" in causes["nan"] and "of type str" in causes["text"]


@pytest.mark.slow
def test_how_programs_end(pool, tmp_path):
    """A program that fails is the environment's failure unless env.crash says otherwise; nothing is left of it."""
    mark = tmp_path / "mark"
    rows = {how: {"kind": "ends", "how": how, "mark": str(mark), "told": str(tmp_path / f"{how}.json")}
            for how in ("status", "raise", "signal", "child", "sleep", "flood", "memory")}
    score = f"{FILE}:printed"
    ends, _ = play(pool(score=score, step_seconds=20.0, memory_gb=0.25), rows)
    outcome = {id: "done" if e.kind == "done" else (e.data["fault"], e.data["cause"]) for id, e in ends.items()}
    why = " (in the program)"
    assert outcome == {
        "status": ("env", "the program ended with status 3" + why), "raise": ("env", "the program ended with status 1" + why),
        "signal": ("env", "the program was killed by SIGKILL" + why), "child": "done", "flood": "done",
        "memory": ("env", "the program used more memory than env.memory_gb=0.25 allows" + why),
        "sleep": ("late", "a turn took longer than env.step_seconds=20")}
    assert "words words" in ends["status"].data["detail"] and "ValueError: no" in ends["raise"].data["detail"]
    assert json.loads((tmp_path / "flood.json").read_text())["size"] == 1 << 20
    pid, folder = mark.read_text().split()
    assert not os.path.exists(f"/proc/{pid}") and not os.path.exists(folder)
    scored, _ = play(pool(crash="scored"), {"a": {"kind": "ends", "how": "status"}})
    assert scored["a"].kind == "done" and scored["a"].data["value"] == 0.0


def test_cancelled_programs_are_gone(pool):
    p = pool()
    p.start("a", {"row": {"kind": "once"}, "prompt": "go", "seed": 1})
    (event,) = p.events(30.0)
    assert event.kind == "send"
    with pytest.raises(AssertionError, match="outlives"):
        env_cases.alone(p, 0.0)
    p.cancel(["a"])
    env_cases.alone(p)
    assert play(p, {"b": {"kind": "conversation"}})[0]["b"].kind == "done"


def test_what_cannot_be_started():
    with pytest.raises(ConfigError, match="program 'no-such-program' not found"):
        with env_cases.pool(program="no-such-program -x", workers=1) as p:
            p.ready()
    with pytest.raises(ConfigError, match=r"env.score: score\(task, ran\)"):
        with env_cases.pool(program=PROGRAM, score=f"{FILE}:main", workers=1) as p:
            p.ready()
    with pytest.raises(ConfigError, match="No closing quotation"):
        env_cases.pool(program="python 'a")
