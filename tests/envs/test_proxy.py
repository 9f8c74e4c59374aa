"""The API of env.program: every wrong field is a 400 that names it, and no request loses its connection."""

import asyncio
import copy
import http.client
import json
import random
import threading
from types import SimpleNamespace

import pytest

from jaxrl.envs import openai
from jaxrl.envs.program import ProgramRunner
from jaxrl.envs.proxy import CallQueue, Proxy

CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODY = {
    "model": "any", "stop": ["END"], "max_tokens": 9, "stream": False, "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]},
                 {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
                 {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c0"}],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "strict": True, "parameters": {"type": "object"}}}],
}
VALUES = [True, 0, 1, -3, 0.5, "words", "", [], [3], [[]], {}, {"a": 1}]
ANY_NUMBER, TEXT, OBJECT, FLAG, WHOLE = (int, float), (str,), (dict,), (bool,), (int,)
# where in BODY -> types that are right, or only the listed values
FIELDS = {
    ("messages",): (), ("messages", 0): (), ("messages", 0, "role"): (), ("messages", 0, "content", 0): (),
    ("messages", 0, "content", 0, "text"): TEXT, ("messages", 0, "content"): TEXT, ("messages", 1, "tool_calls", 0): (),
    ("messages", 1, "tool_calls", 0, "function"): (), ("messages", 1, "tool_calls", 0, "function", "name"): TEXT,
    ("messages", 1, "tool_calls", 0, "function", "arguments"): OBJECT, ("messages", 1, "tool_calls", 0, "id"): TEXT,
    ("messages", 2, "name"): TEXT, ("messages", 2, "tool_call_id"): TEXT, ("messages", 0, "name"): TEXT,
    ("model",): TEXT, ("max_tokens",): WHOLE, ("max_completion_tokens",): WHOLE, ("stream",): FLAG, ("stream_options",): OBJECT,
    ("stream_options", "include_usage"): FLAG, ("stop",): TEXT, ("stop", 0): TEXT, ("tool_choice",): (), ("tools", 0): (),
    ("tools", 0, "type"): (), ("tools", 0, "function"): (), ("tools", 0, "function", "name"): TEXT, ("n",): (), ("logprobs",): (),
    ("tools", 0, "function", "description"): TEXT, ("tools", 0, "function", "parameters"): OBJECT, ("logit_bias",): (),
    ("tools", 0, "function", "strict"): FLAG, ("temperature",): ANY_NUMBER, ("top_p",): ANY_NUMBER, ("seed",): WHOLE,
    ("presence_penalty",): ANY_NUMBER, ("user",): TEXT, ("metadata",): OBJECT, ("store",): FLAG, ("parallel_tool_calls",): FLAG,
    ("reasoning_effort",): TEXT, ("response_format",): (), ("colour",): ()}
ALSO = {("messages", 0, "content"): [[]], ("stop",): [[]], ("n",): [1], ("logit_bias",): [{}], ("tool_choice",): ["", {}],
        ("messages", 1, "tool_calls", 0, "function", "arguments"): [""]}
NEVER = {("max_tokens",): [-3], ("max_completion_tokens",): [-3], ("stop", 0): [""]}


@pytest.fixture(scope="module")
def ask():
    """ask(body) -> (status, JSON) over one connection that is never lost; the episode answers each call alike."""
    ready, told = threading.Event(), {}

    async def main():
        proxy, told["loop"], told["over"] = Proxy(), asyncio.get_running_loop(), asyncio.Event()

        async def episode(line):
            turn = {"text": "ok", "calls": [], "thinking": "", "finish": "stop", "tokens": (1, 1)}
            while True:
                call = await line.calls.get()
                call.answer.set_result(openai.completion_body("id", 0, call.asked, turn))

        with proxy.open() as (key, line):
            told["url"], told["key"] = proxy.url(), key
            answering = asyncio.ensure_future(episode(line))
            ready.set()
            await told["over"].wait()
            answering.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60)
    connection = http.client.HTTPConnection(told["url"].split("/")[2], timeout=120)
    connection.connect()
    socket = connection.sock

    def send(body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/v1/chat/completions", data, {"Authorization": f"Bearer {told['key']}"})
        reply = connection.getresponse()
        data = reply.read()
        assert connection.sock is socket
        return reply.status, data if data.startswith(b"data: ") else json.loads(data)

    yield send
    connection.close()
    told["loop"].call_soon_threadsafe(told["over"].set)
    thread.join()


def replaced(place, value):
    body = copy.deepcopy(BODY)
    at = body
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    return body


def same(a, b):
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("place", FIELDS, ids=lambda place: ".".join(map(str, place)))
def test_a_wrong_type_is_refused_by_name(ask, place):
    assert ask(BODY)[0] == 200
    outcomes = set()
    for value in VALUES:
        right = type(value) in FIELDS[place] or any(same(value, one) for one in ALSO.get(place, ()))
        right = right and not any(same(value, one) for one in NEVER.get(place, ()))
        status, answer = ask(replaced(place, value))
        assert status == (200 if right else 400), (value, answer)
        outcomes.add(status)
        if status == 400:
            named = next(step for step in reversed(place) if isinstance(step, str))
            assert named in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error", answer
    assert 400 in outcomes


def test_null_is_what_is_not_there(ask):
    needed = {"messages", "role", "function", "text", 0}
    for place in FIELDS:
        status = 400 if place[-1] in needed or place[-2:] == ("function", "name") else 200
        assert ask(replaced(place, None))[0] == status, place


@pytest.mark.parametrize("body, words", [
    (b"", "not JSON"), (b"\xff", "not JSON"), (b'{"messages": [', "not JSON"), (b"[" * 100_000, "not JSON"), (b"3", "not a JSON object"),
    (b"[" * 200 + b"]" * 200, "nested more than 100"), (b'{"temperature": NaN}', "not JSON"), (b'{"temperature": 1e999}', "not JSON"),
    (b'{"seed": ' + b"9" * 9999 + b"}", "not JSON"), (json.dumps({"messages": []}).encode(), "messages"),
    (json.dumps(replaced(("messages", 1, "tool_calls", 0, "function", "arguments"), "[" * 100_000)).encode(), "arguments"),
    (json.dumps(replaced(("messages", 1, "tool_calls", 0, "function", "arguments"), '{"a": NaN}')).encode(), "arguments"),
    (json.dumps(BODY | {"tools": BODY["tools"] * 2}).encode(), "tools[1].function.name"),
    (json.dumps(BODY | {"tools": [BODY["tools"][0] | {"type": "custom"}]}).encode(), "tools[0]")])
def test_bodies_that_are_no_request(ask, body, words):
    status, answer = ask(body)
    assert status == 400 and words in answer["error"]["message"]


def test_whatever_stands_anywhere_is_answered(ask):
    """Some part of a good request becomes something else, a few times over."""
    random_ = random.Random(0)

    def places(node):
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield node, key
            yield from places(node[key])

    seen = set()
    for _ in range(500):
        body = copy.deepcopy(BODY)
        for _ in range(random_.choice((1, 1, 2, 3))):
            if not (found := list(places(body))):
                break
            node, key = random_.choice(found)
            node[key] = random_.choice([*VALUES, None, "\ud800", 10**30, {"type": "text"}, "tool", "assistant"])
        status, _ = ask(body)
        seen.add(status)
    assert seen == {200, 400}


def test_no_call_waits_for_an_episode_that_is_over():
    """One that waits when the queue closes, one that comes later, and one that comes at the moment at which the program ends."""
    async def refused(call):
        with pytest.raises(openai.RequestError, match="the episode is over"):
            await asyncio.wait_for(call, 60)

    async def main():
        line = CallQueue()
        waits = asyncio.ensure_future(line.ask(BODY, True, False))
        await asyncio.sleep(0)
        line.close(None)
        await refused(waits)
        await refused(line.ask(BODY | {"max_tokens": 8}, True, False))
        line, ended = CallQueue(), asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(ProgramRunner._serve(None, line, SimpleNamespace(ended=ended), None, None))
        await asyncio.sleep(0.01)
        waits = asyncio.ensure_future(line.ask(BODY, True, False))
        await asyncio.sleep(0)
        ended.set_result(0)
        await serving
        await refused(waits)

    asyncio.run(main())
