"""Tools: their schemas are transformers', their arguments are checked, and the driver goes on until a turn has no calls."""

import textwrap
import typing
from typing import Any, Literal

import pytest
from helpers import env_cases
from helpers.env_cases import play, texts, turn
from transformers.utils import get_json_schema

from jaxrl.envs import tools
from jaxrl.envs.tools import BadArguments, Tool, fit, schema


def simple(a: int, b: float, c: str, d: bool) -> int:
    """Does it.

    Args:
        a: one
        b: two
            that goes on
        c: three: with a colon
        d: four
    """


def none() -> None:
    """Takes nothing and gives nothing."""


def defaults(a: str, b: int = 3, c: float | None = None) -> str | None:
    """A first paragraph
    of two lines.

    A second paragraph.

    Args:
        a: must be
        b: may be

        c: may be, too

    Returns:
        What came
        of it.

    Raises:
        ValueError: never
    """


def nested(a: list[int], b: dict[str, list[float]], c: tuple[int, str], d: list, e: dict, f: Any) -> dict[str, int]:
    """Holds much.

    Args:
        a: x
        b: x
        c: x
        d: x
        e: x
        f: x
    """


def either(a: int | str, b: list[int] | str, c: typing.Optional[list[str]], d: typing.Union[int, float, None]):  # noqa: UP007, UP045
    """Chooses.

    Args:
        a: x
        b: x
        c: x
        d: x
    """


def chosen(a: Literal["x", "y"], b: Literal[1, "z"], c: str, d: Literal[True, 3] | None = None) -> Literal["x"]:
    """Picks.

    Args:
        a: x
        b: x
        c: x (choices: ["tea ", "coffee"])
        d: x

    Returns:
        One.
    """


class Holder:
    def method(self, a: int) -> bool:
        """Of an object.

        Args:
            a: x
        """


@pytest.mark.parametrize("fn", [simple, none, defaults, nested, either, chosen, Holder().method])
def test_schemas_are_those_of_transformers(fn):
    assert schema(fn) == get_json_schema(fn)


@pytest.mark.parametrize("kind, given, wanted", [
    (int, 3, 3), (int, 3.0, 3), (int, 3.5, None), (int, True, None), (int, "3", None), (float, 3, 3.0), (float, "3", None),
    (float, False, None), (str, "3", "3"), (str, 3, None), (bool, True, True), (bool, 1, None), (list[int], [1, 2.0], [1, 2]),
    (list[int], [1, "2"], None), (list[int], 1, None), (tuple[int, str], [1, "a"], [1, "a"]), (tuple[int, str], [1], None),
    (dict[str, float], {"a": 1}, {"a": 1.0}), (dict[str, float], {"a": "b"}, None), (Literal["a", 2], 2, 2),
    (Literal["a", 2], "b", None), (Literal["a", 1], True, None), (int | str, 3, 3), (int | str, "3", "3"),
    (int | float, 3, 3), (int | float, 3.0, 3.0), (list[int] | str, [1], [1]), (list[int] | str, ["a"], None),
    (Any, {"a": [None]}, {"a": [None]}), (list, ["a", 1], ["a", 1]), (list[int] | list[str], ["a"], ["a"]),
    (list[int] | list[str], [None], None), (dict[str, int] | dict[str, str], {"a": "b"}, {"a": "b"}),
    (tuple[int] | tuple[int, int], [1, 2], [1, 2]), (list[int] | list[float], [1.0, 2.5], [1.0, 2.5])])
def test_arguments_fit_their_types(kind, given, wanted):
    def tool(a: kind):
        """T.

        Args:
            a: x
        """

    if wanted is None:
        with pytest.raises(BadArguments, match="'a' must be "):
            Tool(tool).arguments({"a": given})
    else:
        found = Tool(tool).arguments({"a": given})["a"]
        assert found == wanted and type(found) is type(wanted)
    assert fit(None, {"type": "integer", "nullable": True}) is None
    with pytest.raises(BadArguments):
        fit(None, {"type": "integer"})


def test_arguments_fit_the_schemas_of_other_programs():
    """Schemas as pydantic writes them: objects with properties, true or false for a part's schema, null among options."""
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    assert fit({"x": 2.0, "y": "z"}, point) == {"x": 2, "y": "z"}
    assert fit({"x": 1, "y": "z"}, point | {"additionalProperties": {"type": "string"}}) == {"x": 1, "y": "z"}
    assert fit([{"x": 1}], {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": point}]}) == [{"x": 1}]
    assert fit(3.0, {"anyOf": [{"type": "integer"}, {"type": "null"}]}) == 3
    with pytest.raises(BadArguments, match="array of integer or array of string"):
        fit([None], schema_of(list[int] | list[str]))


@pytest.mark.parametrize("kind, described, words", [
    (str, "x (choices: [a, b])", r"parameter 'a' has the choices \[a, b\], .*write \(choices: \["), (str, "x (choices: 3)", "the choices 3"),
    (Literal[b"x"], "x", "is of type .*which no call can hold"), ("no.such", "x", "not defined"), ("int or", "x", "not defined")])
def test_types_and_choices_that_no_schema_has_are_named(kind, described, words):
    def tool(a: kind):
        pass

    tool.__doc__ = f"T.\n\nArgs:\n    a: {described}\n"
    with pytest.raises(TypeError, match=words):
        Tool(tool)
    assert schema_of(typing.List) == {"type": "array", "description": "x"}  # noqa: UP006


def schema_of(kind):
    def tool(a: kind):
        """T.

        Args:
            a: x
        """
    return Tool(tool).schema["function"]["parameters"]["properties"]["a"]


TOOLS = textwrap.dedent('''
    import asyncio, time, threading
    from jaxrl.envs import ToolError

    inside = most = 0
    pair = threading.Barrier(2)

    def add(a: int, b: int = 10) -> int:
        """Adds.

        Args:
            a: x
            b: x
        """
        return a + b

    async def meet(name: str) -> dict:
        """Waits until three are there.

        Args:
            name: x
        """
        global inside
        inside += 1
        while inside % 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01 * "cba".index(name))
        return {"name": name, "ä": [1, None]}

    def refuse() -> str:
        """Refuses."""
        raise ToolError("not \\\\ud800 today")

    def breaks(kind: str) -> str:
        """Breaks.

        Args:
            kind: x
        """
        if kind == "exit":
            raise SystemExit(3)
        if kind == "type":
            return object()
        raise ConnectionError("secret words")

    def nap() -> float:
        """Waits until two are there."""
        return pair.wait(300)

    async def by_hand(task, chat):
        """An episode that runs calls itself, and gives other tools later."""
        turn = await chat.send("a", tools=[add])
        answers = await turn.run()
        turn = await chat.send(answers, tools=[refuse])
        await chat.send(await turn.run())

    def plainly(task, chat):
        turn = chat.send("a", tools=[add, meet])
        while turn.calls:
            turn = chat.send(turn.run())
        return 1.0
''')


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(TOOLS, encoding="utf-8")
    return path


@pytest.fixture
def pool(source):
    made = []

    def make(*names, **changes):
        made.append(env_cases.pool(tools=tuple(f"{source}:{n}" for n in names), workers=1, **changes))
        return made[-1]

    yield make
    for p in made:
        p.close()


def test_the_driver_goes_on_until_there_are_no_calls(pool):
    p = pool("add", "refuse", max_turns=6)
    rows = {"some": {"prompt": "1 + 2?"}, "never": {"prompt": [{"role": "user", "content": "q"}]}, "none": {}, "cut": {}}
    calls = {"some": lambda k: [("add", {"a": k, "b": 2})] * (k < 3), "never": lambda k: [("refuse", {})], "none": lambda k: [],
             "cut": lambda k: [("add", {"a": 1})]}
    ends, said = play(p, rows, lambda id, k, data: turn("t", *calls[id](k), finish="length" if id == "cut" else "stop"))
    assert texts(said["some"]) == ["1 + 2?", "2", "3", "4"] and texts(said["cut"]) == ["go"]
    assert said["some"][1]["messages"] == [{"role": "tool", "name": "add", "tool_call_id": "c0", "content": "2"}]
    assert texts(said["never"]) == ["q"] + ["not \\ud800 today"] * 5 and texts(said["none"]) == ["go"]
    assert all(data["tools"] == p.tools for datas in said.values() for data in datas)
    assert [t["function"]["name"] for t in p.tools] == ["add", "refuse"]
    seen = {id: (e.data["value"], e.data["rewarded"], e.data["counts"]) for id, e in ends.items()}
    assert seen["some"] == (None, False, {"calls": 3, "malformed": 0}) and seen["never"][2]["calls"] == 6


def test_what_is_no_good_call_gets_a_fixed_answer(pool):
    bad = [("add", None), ("sub", {"a": 1}), ("add", {}), ("add", {"a": "1", "b": 2.5}), ("add", {"a": 1, "c<|im_end|>": 1}),
           ("refuse", {"a": 1}), ("add", {"a": 4})]
    ends, said = play(pool("add", "refuse", max_turns=9), {"e": {}}, lambda id, k, data: turn("", *bad[k:k + 1]))
    fit_not = "The arguments do not fit and the call was not run: "
    assert texts(said["e"])[1:] == [
        tools.MALFORMED, "There is no such tool. There are: add, refuse.", fit_not + "'a' is missing.",
        fit_not + "'a' must be integer; 'b' must be integer.", fit_not + "there is more than a, b.",
        fit_not + "it takes none.", "14"]
    assert ends["e"].data["counts"] == {"calls": 7, "malformed": 6}


@pytest.mark.parametrize("threads", [False, True])
def test_calls_of_a_turn_run_at_once_and_answer_in_order(pool, threads):
    calls = [("meet", {"name": n}) for n in "abc"] + [("add", {"a": 1}), ("add", {"a": 2})]
    p = pool("meet", "add", max_parallel_calls=4, threads=threads)
    ends, said = play(p, {"e": {}}, lambda id, k, data: turn("", *calls[:5 - 5 * k]))
    assert texts(said["e"])[1:] == [*(f'{{"name": "{n}", "ä": [1, null]}}' for n in "abc"), "11", tools.too_many_calls_text(4)]
    assert ends["e"].data["counts"] == {"calls": 5, "malformed": 0}
    assert tools.too_many_calls_text(1) == "This call was not run: at most 1 of a turn is."


def test_one_call_of_a_turn_is_run_by_default(pool):
    _, said = play(pool("add"), {"e": {}}, lambda id, k, data: turn("", *[("add", {"a": 1})] * (3 - 3 * k)))
    assert texts(said["e"])[1:] == ["11", tools.too_many_calls_text(1), tools.too_many_calls_text(1)]


def test_plain_tools_run_beside_each_other_in_threads(pool):
    _, said = play(pool("nap", max_parallel_calls=2, threads=True), {"e": {}}, lambda id, k, data: turn("", *[("nap", {})] * (2 - 2 * k)))
    assert sorted(texts(said["e"])[1:]) == ["0", "1"]


@pytest.mark.full
@pytest.mark.parametrize("kind, cause", [("any", "ConnectionError in tool breaks"), ("exit", "SystemExit in tool breaks"),
                                         ("type", "tool 'breaks' returned object, expected text or what JSON can hold (in episode)")])
@pytest.mark.parametrize("beside", [0, 1])
def test_what_a_tool_raises_is_the_environments_fault_and_not_shown(pool, kind, cause, beside):
    p = pool("breaks", "add", max_parallel_calls=2)
    ends, said = play(p, {"e": {}, "fine": {}}, lambda id, k, data: turn("", *[("breaks", {"kind": kind}), ("add", {"a": 1})][
        id == "fine":1 + beside - 2 * k * (id == "fine")]))
    assert ends["e"].kind == "failed" and ends["e"].data["fault"] == "env" and ends["e"].data["cause"] == cause
    assert texts(said["e"]) == ["go"] and ends["fine"].kind == "done"
    if kind == "any":
        assert "secret words" in ends["e"].data["detail"]


@pytest.mark.parametrize("name, wanted", [
    ("by_hand", ["a", "11", "not \\ud800 today"]), ("plainly", ["a", "11", '{"name": "a", "ä": [1, null]}'])])
def test_episodes_run_calls_themselves(source, name, wanted):
    calls = {"by_hand": [("add", {"a": 1}), ("refuse", {})], "plainly": [("add", {"a": 1}), ("meet", {"name": "a"})]}[name]
    with env_cases.pool(f"{source}:{name}", workers=1) as p:
        if name == "plainly":
            rows = {f"e{k}": {} for k in range(1)}
            calls = calls[:1]
            wanted = wanted[:2]
        else:
            rows = {"e0": {}}
        ends, said = play(p, rows, lambda id, k, data: turn("", *calls[k:k + 1]))
    assert texts(said["e0"]) == wanted and ends["e0"].kind == "done"
    assert [t["function"]["name"] for t in said["e0"][1]["tools"]] == (["refuse"] if name == "by_hand" else ["add", "meet"])
