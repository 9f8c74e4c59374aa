"""Texts that a model can write to have no score, and everything of jaxrl that reads what a model writes.

tests/rewards/test_absent.py has each reader read each text at 4 kB, evidence/absent.py at 25 and 100 kB with the processor's time.
"""

import asyncio
import json

from jaxrl import sandbox
from jaxrl.config.schema_rewards import JUDGE, REMOTE
from jaxrl.envs import builtin as worlds
from jaxrl.envs import libraries, openai, openenv, tools
from jaxrl.envs.api import Action, Turn
from jaxrl.envs.parsers import PARSERS, types_of
from jaxrl.rewards import builtin, judge, remote
from jaxrl.rewards.calling import outcome
from jaxrl.rewards.items import RewardItem, address, as_json
from jaxrl.sandbox import api, grading

MARKERS = (
    r"\boxed{", r"\boxed{}", r"\frac{", r"\frac{1}{", r"\sqrt{", r"\text{", r"\left(", r"\$", "$", "$$", "####",
    "#### 7\n", "7", "-", "9^", "x^", "!", "1/", "1,",
    "1.", "1a", "1e9", "(", ")", "{", "}", "[", "]", "[1", '{"a":', "<think>", "</think>", "<answer>", "</answer>", "answer is ", "answer ",
    "Answer: (", "option", "(B", "<tool_call>", "</tool_call>", "<function=f>", "<function=f><parameter=a>", "<parameter=a>1</parameter>",
    "<tool_call><function=f>", "<tool_call>{}</tool_call>", "<tool_call><function=f></function></tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "[TOOL_CALLS]f[ARGS]{}", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "<|python_tag|>",
    '{"name": "f"};', '{"name": "f", "id": "x"}', "```", "```\n", "```python\n", "`", "def f(x):\n", "if 1:\n ", "lambda:", "not ", "f(", "f()",
    "a.", "1+",
    "'", '"""', "\\", "true ", "left ", "nan ", "12+34-", " ", "\t", "\n", "\r\n", "\0", "\ud800", "\ue000", "\x1b[0m", "é", "<|im_end|>", "<",
    "[INST]", "{prompt}", "Score: ")
VALUES = ("9^9^9^9", "10**10**10", r"10^{10^{10}}", "9^{9^{9^{9}}}", "99999!", "9!!!!", "nan", "inf", "-inf", "1e999", "1e-999", "NaN", "Infinity",
          "-0", "0/0",
          "9" * 400, "-" + "9" * 400, "0." + "0" * 400 + "1", "1/" + "7" * 400)


def nested(begin: str, inside: str, end: str, size: int) -> str:
    n = max(1, size // (len(begin) + len(end)))
    return begin * n + inside + end * n


def texts(size: int) -> dict[str, str]:
    """Name -> text of some `size` characters, or of a value that is short by itself."""
    out = {f"{marker!r} again and again": marker * (size // len(marker)) for marker in MARKERS}
    out |= {f"a box of {marker!r}": "\\boxed{" + marker * (size // len(marker)) + "}" for marker in ("7", " ", "(", "1,", "9^", "-", "!")}
    out |= {f"{value[:20]}, {len(value)} characters": value for value in VALUES}
    out |= {f"a box of {value[:20]}, {len(value)} characters": "\\boxed{" + value + "}" for value in VALUES}
    for n, value in enumerate(("9" * 400, "9" * size, "1e999", "NaN", "-1e400", nested("[", "", "]", size), nested('{"a":', "1", "}", size))):
        out |= {f"a call with number {n}": f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>',
                f"an action with number {n}": f'{{"a": {value}}}', f"a score of number {n}": f"Score: {value}",
                f"a call in Python with number {n}": f"<|tool_call_start|>[add(a={value})]<|tool_call_end|>"}
    return out | {
        "boxes in boxes": nested(r"\boxed{", "18", "}", size), "fractions in fractions": nested(r"\frac{1}{", "2", "}", size),
        "a box of fractions in fractions": "\\boxed{" + nested(r"\frac{1}{", "2", "}", size) + "}", "parentheses": nested("(", "1", ")", size),
        "a list of lists": nested("[", "1", "]", size), "a call of calls": "[" + nested("f(a=", "1", ")", size) + "]",
        "a call called": "[" + "f" + "()" * (size // 2) + "]", "a call with signs": "[f(a=" + "-" * size + "1)]",
        "a call with a sum": "[f(a=" + "1+" * (size // 2) + "1)]", "every character of private use": "".join(map(chr, range(0xE000, 0xF8FF)))[:size],
        "digits and a letter": "1" * size + "a1", "answer, spaces": "answer" + " " * size + "?", "a call of spaces": "<tool_call>" + " " * size,
        "an XML call of spaces": "<tool_call><function=f>" + " " * size + "x</function></tool_call>",
        "XML calls without end": "<tool_call><function=f>" + "<parameter=a>" * (size // 13) + "</function></tool_call>",
        "a program of one line": "```python\nx = " + "1+" * (size // 2) + "1\n```", "a program of brackets": "```python\n" + "(" * size + "\n```",
        "a program that computes": "```python\ndef f(x):\n    return 9**9**9**9\nprint(f(1))\n```",
        "a program that calls itself": "```python\ndef f(x):\n    return f(x)\nprint(f(1))\n```",
        "a program of a long number": f"```python\ndef f(x):\n    return 10**{size}\nprint(10**400)\n```"}


# -- what reads them: name -> function of a text, which raises where the text is absent or right ------------------------------

def wrong(score) -> None:
    """As the worker takes a reward: a number, and that of a wrong answer."""
    found = outcome(score)
    assert found["outcome"] == "ok" and found["value"] == 0.0, found


REWARDS = {  # name -> columns
    "math": {"answer": "31337"}, "exact": {"answer": "31337"}, "boxed": {"answer": "31337"}, "choice": {"answer": "Q"},
    "format": {"format_pattern": "<think>(a|[^b])*</think><answer>q</answer>"},
    "code": {"tests": ["assert f(3) == 31337", "assert sum(range(f(3))) < 0"], "code_score": "fraction"}}
TESTS = {"of lines": {"inputs": ["3"], "outputs": ["31337"]}, "of calls": {"inputs": [[3]], "outputs": [31337], "fn_name": "f"},
         "of numbers": {"inputs": [[3]], "outputs": [0.5], "fn_name": "f"}}


def add(a: float, b: int = 1) -> str:
    """Adds.

    Args:
        a: a number
        b: another one
    """
    return str(a + b)


def calls_are_read(name: str):
    tool = tools.Tool(add)

    def read(text):
        outside, calls = PARSERS[name].read(text, types=types_of([tool.schema]))
        json.dumps([outside, [vars(call) for call in calls]])
        for call in calls:
            assert call.error or isinstance(call.arguments, dict)
            try:
                tool.arguments(call.arguments or {})
            except tools.BadArguments:
                pass
        turn = {"text": outside, "thinking": "", "finish": "stop", "tokens": [1, 1],
                "calls": [{"id": "", "name": c.name, "arguments": c.arguments, "error": c.error} for c in calls]}
        json.dumps(openai.said(turn, ["\n\n"]))
    return read


def turns_are_read(family: str):
    """The ids of the text, its markers as the tokenizer has them, and as they are spelled."""
    from helpers.turn_cases import TOOLS, renderer
    reader = renderer(family, TOOLS)

    def read(text):
        text = text.encode("utf-8", "replace").decode()
        for ids in (reader.tokenizer.encode(text, add_special_tokens=False), reader.tokens.plain(text)):
            json.dumps(reader.read(ids))
    return read


def stepped(make, row):
    def read(text):
        world = make()
        world.reset(row, 1)
        for _ in range(2):
            step = world.step(Action(Turn(text)))
            assert step.reward == 0.0 and not step.done
    return read


def action(fields):
    world = openenv.OpenEnv([], 0, fields, {}, 1.0)

    def read(text):
        found = world._action(text)
        json.dumps(found, allow_nan=False)
    return read


def options(schema, **changes) -> dict:
    return {name: option.default for name, option in schema.items()} | {"deadline_seconds": 60.0} | changes


def judged(text):
    """As what is judged, and as what a judge answers."""
    reads = judge.Judge(options(JUDGE, model="m", prompt=judge.PROMPT, digest="", lowest=0.0, highest=10.0), {"urls": [], "key_env": "", "cache": ""})
    json.dumps(reads.messages("q", text, None, None)).encode()
    score = reads.read(text)
    assert score is None or 0.0 <= score <= 1.0


def sent(text):
    """A completion on its way to a worker, to a service and into the record."""
    item = RewardItem("q", text, {"answer": "1"})
    as_json(item, 0).encode()
    address(item)
    remote.FENCED.findall(text)


def service_score(text):
    """A text as a service's score."""
    reads = remote.Remote(options(REMOTE, format="own"), {"urls": [], "key_env": ""})
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text

    async def scored(budget):
        return reads.score([value], "a service")

    found = outcome(asyncio.run(reads.within(scored)))
    assert found["outcome"] == "ok" or found["outcome"].startswith("error: type: "), found


def programs(tests):
    def read(text):
        assert grading.grade(builtin.code_block(text), tests).passed == [False]
    return read


def readers() -> dict:
    """Every one, by the registries that have them. The programs run under limits alone."""
    known = {name for name, fn in builtin.registered().items() if fn.__module__ == builtin.__name__}
    assert known == set(REWARDS), "a built-in reward without its columns here"
    out = {f"reward {name}": lambda text, name=name: wrong(builtin.registered()[name]("q", text, **REWARDS[name])) for name in REWARDS}
    out |= {f"calls as {name}": calls_are_read(name) for name in PARSERS}
    from helpers.turn_cases import FAMILIES
    out |= {f"turns of {family}": turns_are_read(family) for family in FAMILIES if FAMILIES[family][3]}
    out |= {"environment guess": stepped(worlds.guess, {"number": 31}), "environment lake": stepped(worlds.lake, {"map": "P#\n#G"})}
    out |= {f"action of {name}": action(fields) for name, fields in (
        ("an object", {"a": "integer", "b": "string"}), ("text", {"a": "string"}), ("an integer", {"a": "integer"}), ("a number", {"a": "number"}),
        ("yes or no", {"a": "boolean"}))}
    out |= {"action by name": lambda text: libraries.chosen(text, ("left", "right")), "a judge": judged, "the record": sent,
            "score of a service": service_score}
    return out | {f"program with tests {name}": programs(tests) for name, tests in TESTS.items()}


def limits_alone(seconds: float = 4.0) -> None:
    """Programs without a sandbox, in this process: what they are is known."""
    api.check = lambda *args: None
    sandbox.configure({"backend": "rlimits", "seconds": seconds, "cpu_seconds": 1.0})
